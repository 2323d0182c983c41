"""A worker process that is stopped before it has started."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import pytest
from diptych.cluster.worker import core as core_module
from diptych.cluster.worker import process as process_module
from diptych.cluster.worker.process import WorkerProcess


class LoadingCore:
    """Stands for a `WorkerCore` whose model is still loading."""

    def __init__(self, loading: asyncio.Event, stopped: list[str]) -> None:
        self._loading = loading
        self._stopped = stopped

    async def start(self, _host: str, _progress: Any) -> None:
        self._loading.set()
        await asyncio.Event().wait()

    def stop(self) -> None:
        self._stopped.append("core")


async def _no_router() -> str:
    raise OSError("no router")


# Python too calls `__del__`, when the object goes, and awaits nothing.
@pytest.mark.filterwarnings("ignore:coroutine 'WorkerProcess.__del__' was never awaited")
async def test_a_stop_while_the_model_loads_stops_what_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loading = asyncio.Event()
    stopped: list[str] = []
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="x"))
    tracer = SimpleNamespace(close=lambda: stopped.append("tracer"))
    ray_serve = SimpleNamespace(get_replica_context=lambda: context)
    monkeypatch.setattr(process_module, "serve", ray_serve)
    monkeypatch.setattr(process_module, "node_host", lambda: "127.0.0.1")
    monkeypatch.setattr(process_module, "_find_router", _no_router)
    monkeypatch.setattr(process_module, "tracer_of", lambda *_: tracer)
    monkeypatch.setattr(process_module.logs, "configure", lambda *_: None)
    monkeypatch.setattr(core_module, "WorkerCore", lambda **_: LoadingCore(loading, stopped))

    process: Any = WorkerProcess.__new__(WorkerProcess)
    start = asyncio.create_task(process.__init__("decode", {}, "folder"))
    async with asyncio.timeout(10):
        await loading.wait()
        await process.__del__()
    assert stopped == ["tracer", "core"]
    start.cancel()
    await asyncio.wait([start])
    del process, start
    gc.collect()
