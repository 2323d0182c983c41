"""A worker process: what it asks of Ray and Serve, and a stop before it has started."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from types import SimpleNamespace
from typing import Any

import pytest
from diptych.cluster.config import ClusterConfig
from diptych.cluster.worker import core as core_module
from diptych.cluster.worker import process as process_module
from diptych.cluster.worker.lifecycle import RoleOrdered, WorkerLifecycle, WorkerStarted
from diptych.cluster.worker.process import WorkerProcess, replica_has_ended
from diptych.protos import frames
from diptych.protos.frames import WorkerCard
from ray.serve._private.common import DeploymentID, ReplicaID


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


def replica_id(application: str, replica: str, deployment: str = "DecodeWorker") -> ReplicaID:
    return ReplicaID(replica, DeploymentID(deployment, application))


#: The asking worker, and another one, of an application that is not the front one.
OWN_ID = replica_id("diptych-tiny", "own")
OTHER = WorkerCard("prefill/other", "prefill", "prefill", "", "other", 0)


def let_ray_list(monkeypatch: pytest.MonkeyPatch, *living: ReplicaID) -> None:
    """Ray lists these replicas and no other actor."""
    names = [{"name": one.to_full_id_str(), "namespace": "serve"} for one in living]
    monkeypatch.setattr(process_module.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(process_module.ray.util, "list_named_actors", lambda **_: names)


def test_a_replica_of_the_same_application_that_ray_lists_has_not_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_ray_list(monkeypatch, OWN_ID, replica_id("diptych-tiny", "other", "PrefillWorker"))
    assert not replica_has_ended(OTHER, OWN_ID)


def test_a_replica_that_only_another_application_has_is_no_sign_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_ray_list(monkeypatch, OWN_ID, replica_id("diptych", "other", "PrefillWorker"))
    assert replica_has_ended(OTHER, OWN_ID)


def test_a_list_without_the_asking_replica_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    let_ray_list(monkeypatch, replica_id("diptych", "own"))
    assert not replica_has_ended(OTHER, OWN_ID), "else a frozen writer's blocks would be used"


# Python too calls `__del__`, when the object goes, and awaits nothing.
@pytest.mark.filterwarnings("ignore:coroutine 'WorkerProcess.__del__' was never awaited")
async def test_a_stop_while_the_model_loads_stops_what_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loading = asyncio.Event()
    stopped: list[str] = []
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="x"), app_name="diptych")
    tracer = SimpleNamespace(close=lambda: stopped.append("tracer"))
    ray_serve = SimpleNamespace(get_replica_context=lambda: context)
    monkeypatch.setattr(process_module, "serve", ray_serve)
    monkeypatch.setattr(process_module, "node_host", lambda: "127.0.0.1")
    monkeypatch.setattr(process_module, "router_finder", lambda _: _no_router)
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


def test_a_card_says_on_how_many_gpus_the_worker_runs_and_how_long_a_context_fits() -> None:
    config = ClusterConfig.model_validate({"pools": {"decode": {"tensor_parallel": 2}}})
    limits = SimpleNamespace(max_step_tokens=512, max_running=64, itl_budget_s=None)
    engine = SimpleNamespace(
        block_count=100,
        kv_pool=SimpleNamespace(layout=SimpleNamespace(block_tokens=64)),
        growth_reserve_blocks=1,
        limits=limits,
        max_model_len=6336,
    )
    process: Any = SimpleNamespace(
        name="decode/own",
        pool="decode",
        replica="own",
        lifecycle=WorkerLifecycle("decode"),
        core=SimpleNamespace(engine=engine, load_token_s=2e-6),
        _pool_config=config.pools.decode,
    )
    card = WorkerProcess._describe(process, "host:1", "", [])
    assert (card.tensor_parallel, card.max_model_len) == (2, 6336)
    assert card.load_token_s == 2e-6


class EmptyCore:
    """Stands for a `WorkerCore` without work."""

    attempts = 0
    open_tickets = 0

    def __init__(self, process: Any) -> None:
        self._process = process
        self.ending: asyncio.Future[asyncio.Task[None]] = asyncio.Future()
        self.handovers = 0

    def hand_over(self) -> int:
        self.handovers += 1
        return 0

    def observe(self) -> None:
        pass

    def become(self, _role: str) -> None:
        """End the worker right behind the change of role, before asyncio says that it is done."""
        self.ending.set_result(asyncio.create_task(self._process._end()))


# Python calls `__del__`, when the object goes, and awaits nothing.
@pytest.mark.filterwarnings("ignore:coroutine 'WorkerProcess.__del__' was never awaited")
async def test_a_worker_that_ends_right_behind_a_flip_still_hands_its_work_over() -> None:
    process: Any = WorkerProcess.__new__(WorkerProcess)
    process.loop = asyncio.get_running_loop()
    process.lifecycle = WorkerLifecycle("decode")
    process.core = EmptyCore(process)
    process.link = SimpleNamespace(connected=True)
    process._reporter = SimpleNamespace(must_join=False, introduce_again=lambda: None)
    process._card = WorkerCard("decode/own", "decode", "decode", "", "own", 0)
    process._change_task = None
    process._tasks = []
    process._stops = contextlib.AsyncExitStack()
    process._handle(WorkerStarted())
    process._handle(RoleOrdered("prefill", hand_over=True))
    async with asyncio.timeout(10):
        await (await process.core.ending)
    assert not process.lifecycle.changing
    assert process.core.handovers == 2, "for the flip, and for the end"
    del process
    gc.collect()


@pytest.mark.parametrize(("gateway_goes", "failed"), [(False, [""]), (True, ["gateway_gone"])])
def test_only_a_gateway_that_goes_makes_a_span_fail(gateway_goes: bool, failed: list[str]) -> None:
    """A cancelled attempt is one whose answer a stop string ended, or whose client left."""
    ended: dict[frames.AttemptKey, str] = {}

    def end(key: frames.AttemptKey, error_type: str = "") -> None:
        ended.setdefault(key, error_type)

    works = SimpleNamespace(end_attempt=end, end_gateway=lambda _: end(("r", 0), "gateway_gone"))
    process: Any = SimpleNamespace(_works=works)
    process._end_span = lambda key: WorkerProcess._end_span(process, key)
    # The core says that the attempt has ended, whatever ended it.
    process.core = SimpleNamespace(
        cancel=lambda frame: process._end_span(frame.attempt_key),
        gateway_gone=lambda _: process._end_span(("r", 0)),
    )
    if gateway_goes:
        WorkerProcess._forget_gateway(process, "g")
    else:
        peer: Any = SimpleNamespace(name="g")
        WorkerProcess._take_gateway_frame(process, peer, frames.CancelAttempt(("r", 0)))
    assert [*ended.values()] == failed
