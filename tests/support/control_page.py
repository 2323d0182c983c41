"""The live page of an invented cluster: Control's real routes, no Ray, and workers that are numbers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

from diptych.cluster.config import ClusterConfig
from diptych.cluster.control import http
from diptych.cluster.control.history import INTERVAL_S, SAMPLES_LIMIT

from .live import eventually, free_port


class InventedCluster:
    """In place of `ClusterOperations`, with one model, whose `Operations` it stands for too.

    `prefill` and `decode` are how many workers have each role.
    """

    def __init__(self, config: ClusterConfig, prefill: int, decode: int) -> None:
        self.config = config
        self.actions = deque[dict[str, Any]]()
        self.plane = SimpleNamespace(latest=self.latest)
        self.models = {"invented-70b": SimpleNamespace(operations=self)}
        self.started = time.monotonic()
        self._counts = {"prefill": prefill, "decode": decode}
        self._tokens = 0

    async def latest(self, count: int) -> list[dict[str, Any]]:
        return [decision(number) for number in range(min(count, 12), 0, -1)]

    async def status(self) -> dict[str, Any]:
        self._tokens += 1000
        names = {
            role: [f"{role}/{index:04x}beef" for index in range(count)]
            for role, count in self._counts.items()
        }
        workers = [self._worker("prefill", name, []) for name in names["prefill"]]
        workers += [self._worker("decode", name, names["prefill"]) for name in names["decode"]]
        pools = {role: self.pool(role, self.started) for role in names}
        classes = {"interactive": {"requests": 90, "share": 0.97, "ttft": 0.98, "itl": 0.99}}
        counts = {"running": 7, "finished": 1234, "good": 1201, "refused": 3, "cancelled": 2}
        return {
            "state": "healthy",
            "missing": [],
            "model": "invented-70b",
            "slo": {"ttft_ms": 500.0, "itl_ms": 30.0},
            "requests": counts | {"retries": 1},
            "pools": pools,
            "router": {
                "goodput": {"share": 0.97, "requests": 90, "classes": classes},
                "term": 1,
                "hit_tokens": self._tokens // 2,
                "prompt_tokens": self._tokens,
            },
            "workers": workers,
        }

    def pool(self, role: str, moment: float) -> dict[str, Any]:
        wave = abs((moment * 7) % 20 - 10) / 10
        count = self._counts[role]
        return {
            "ready": count,
            "target": count,
            "gpu": "H200",
            "queue": int(9 * wave) if role == "prefill" else 0,
            "running": 31,
            "kv_used": 0.4 + 0.4 * wave,
            "prefix_hit": 0.62 if role == "prefill" else None,
            "ttft_p95_ms": 250 + 300 * wave if role == "prefill" else None,
            "itl_p95_ms": 12 + 9 * wave if role == "decode" else None,
            "notes": ["decode/0001beef draining (12 left)"] if role == "decode" else [],
        }

    def _worker(self, role: str, name: str, sources: list[str]) -> dict[str, Any]:
        index = int(name.partition("/")[2][:4], 16)
        blocks = {"total": 100, "active": 10 + index % 60, "reserved": 5, "cached": 20}
        engine = {"running": index % 9, "ready": 0, "prefilling": 0, "waiting": 0}
        moved = int((time.monotonic() - self.started) * (3 << 20))
        return {
            "id": name,
            "role": role,
            "home": role,
            "state": "draining" if (role, index) == ("decode", 1) else "ready",
            "pid": 1000 + index,
            "engine": engine | {"kv_blocks": blocks},
            "transfer": {
                "received_from": {
                    source: moved if (place + index) % 4 == 0 else 4096
                    for place, source in enumerate(sources[:8])
                }
            },
        }


def decision(number: int) -> dict[str, Any]:
    terms = {"left": 0.06, "prefill": 0.188}
    observed = {"ttft_ms": 301.0 + 20 * number, "itl_p99_ms": 24.0, "tokens": 184}
    return {
        "number": number,
        "key": [f"chatcmpl-{number:08x}~1", 0],
        "policy": "diptych",
        "kind": "push",
        "prompt_tokens": 9214,
        "slo_class": "interactive",
        "ttft_target_s": 0.5,
        "itl_target_s": 0.03,
        "waited_s": 0.004 * number,
        "waiting": 2,
        "prefill": "prefill/0001beef",
        "decode": "decode/0003beef",
        "fetch": None,
        "hit_tokens": 7168,
        "passed_over": [],
        "prefill_options": [["prefill/0001beef", 0.25, terms], ["prefill/0000beef", 0.6, terms]],
        "decode_options": [["decode/0003beef", 0.02, {"step": 0.02, "exposed": 0.011}]],
        "others": 3,
        "note": "",
        "left_s": 0.061,
        "prefill_s": 0.188,
        "ttft_s": 0.253,
        "itl_s": 0.0229,
        "exposed_s": 0.011,
        "observed": observed | {"reason": "stop", "transfer_ms": 140.0, "exposed_ms": 12.0},
        "session": "",
    }


@contextmanager
def invented_control(
    prefill: int = 2, decode: int = 4, samples: int = SAMPLES_LIMIT
) -> Iterator[str]:
    """Yield the URL of a Control with so many workers and samples of the last hour."""
    config = ClusterConfig.model_validate({"control": {"port": free_port()}})
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> http.AdminHttpServer:
        cluster = InventedCluster(config, prefill, decode)
        model_orders = cast("Any", None)
        application = http.build(cast("Any", cluster), model_orders, metrics_address="")
        history = application.state.history
        now = time.time()
        for age in range(samples, 0, -1):
            status = await cluster.status()
            status["pools"] = {role: cluster.pool(role, age / 11) for role in status["pools"]}
            history.add(status, now - age * INTERVAL_S)
        server = http.AdminHttpServer(application, config.control)
        await server.start()
        return server

    try:
        server = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
        eventually(lambda: server._uvicorn.started)
        yield f"http://127.0.0.1:{config.control.port}"
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
