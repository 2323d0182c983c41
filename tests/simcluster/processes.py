"""The processes of a simulated cluster: the real code of router, workers and gateways.

Only what reaches outside is replaced: Ray and Serve, the clock, sockets, threads, the model, and
the transport of KV, which is the fabric of `tests/kit`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from diptych.cluster import router_service
from diptych.cluster.gateway.attempt.generator import Generator
from diptych.cluster.gateway.attempt.plane import Plane
from diptych.cluster.router_service import RouterService
from diptych.cluster.worker import core as worker_core
from diptych.cluster.worker import process as worker_process
from diptych.cluster.worker.process import WorkerProcess
from diptych.engine.engine_like import EngineLike
from diptych.kv_transfer.commands import TransferCommand, TransferOutcome
from diptych.kv_transfer.service import TransferService
from diptych.kv_transfer.slices import LaneEnd
from diptych.kv_transfer.ticket_events import TicketTimeouts
from diptych.kv_transfer.transport import PeerCard

from tests.kit.fabric import Fabric

from .clock import PROCESS
from .engine import SALT, HashEngine, VirtualEngineThread

HOST = "host"
SECRET = "of the simulated cluster"
TRANSFER_TIMEOUT_S = 6.0
CONFIG: dict[str, Any] = {
    "model": {"path": "hash", "name": "hash"},
    "secret": SECRET,
    "router": {"queue_ttl_s": 10.0, "background_wait_s": 10.0},
    "kv_transfer": {"timeout_s": TRANSFER_TIMEOUT_S},
}
MAX_ATTEMPTS = 4
PLACE_TIMEOUT_S = 15.0
PLACE_LIMIT_S = 35.0


class VirtualTransferService(TransferService):
    """The transfer thread as timers of a virtual loop."""

    def start(self) -> PeerCard:
        self._virtual = asyncio.get_running_loop()
        self._alive = True
        self._timer: asyncio.TimerHandle | None = None
        self._open()
        self._arm(0.0)
        assert self.card is not None
        return self.card

    def submit(self, command: TransferCommand) -> None:
        super().submit(command)
        self._arm(0.0)

    def stop(self) -> None:
        if self.alive:
            self.halt()
            self._transport.close()

    def halt(self) -> None:
        """As a process that has died: nothing is closed."""
        self._alive = False

    @property
    def alive(self) -> bool:
        return getattr(self, "_alive", False)

    def _arm(self, delay_s: float) -> None:
        if not self.alive:
            return
        if self._timer:
            self._timer.cancel()
        self._timer = self._virtual.call_later(delay_s, self._round)

    def _round(self) -> None:
        self._timer = None
        if self.alive:
            self._run_round(0.0)
            self._arm(max(self._patience_s(), 0.0003))


class Surroundings:
    """What the processes of one simulation find around them. `entered` puts it in place."""

    def __init__(
        self,
        fabric: Fabric,
        find_router: Callable[[], Awaitable[str]],
        has_ended: Callable[[str], bool],
        blocks_of: Callable[[str], int],
    ) -> None:
        """`has_ended` says whether a worker's process has, `blocks_of` how many blocks it gets."""
        self._fabric = fabric
        self._find_router = find_router
        self._has_ended = has_ended
        self._blocks_of = blocks_of

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Replaces Ray, threads and transports for as long as the context lasts."""
        replaced: list[tuple[Any, str, Any]] = [
            (router_service, "node_host", lambda: HOST),
            (router_service, "drain_on_sigterm", _ignore),
            (router_service, "Exporter", _NoExporter),
            (router_service, "garbage", SimpleNamespace(disable=_ignore, sweep=_ignore)),
            (worker_process, "node_host", lambda: HOST),
            (worker_process, "drain_on_sigterm", _ignore),
            (worker_process, "Exporter", _NoExporter),
            (worker_process, "TransportDetector", _ignore),
            (worker_process, "gc", SimpleNamespace(collect=_ignore, freeze=_ignore)),
            (worker_process, "serve", SimpleNamespace(get_replica_context=_replica_context)),
            (worker_process, "router_finder", lambda _application: self._find_router),
            (worker_process, "replica_has_ended", self._replica_has_ended),
            (worker_core, "EngineThread", VirtualEngineThread),
            (worker_core, "engine_opener", lambda _config: self._open_engine),
            (worker_core, "make_rank_services", self._make_rank_services),
            (worker_core, "fingerprint", lambda _folder: SALT),
        ]
        with contextlib.ExitStack() as patches:
            for owner, name, value in replaced:
                patches.enter_context(mock.patch.object(owner, name, value))
            configure = mock.patch("diptych.cluster.telemetry.logs.configure", _ignore)
            patches.enter_context(configure)
            yield

    def _replica_has_ended(self, card: Any, _own_id: Any) -> bool:
        return self._has_ended(card.id)

    def _open_engine(self, options: Any, _progress: Any) -> HashEngine:
        return HashEngine(options, self._blocks_of(PROCESS.get()))

    def _make_rank_services(
        self,
        worker: str,
        engine: EngineLike,
        _settings: Any,
        _host: str,
        *,
        on_outcome: Callable[[TransferOutcome], None],
        **_: Any,
    ) -> list[TransferService]:
        agent = f"{worker}:0"
        pool = engine.kv_pool
        service = VirtualTransferService(
            agent=agent,
            pool=pool,
            end=LaneEnd(pool.layout, 0, 1),
            compatibility=engine.compatibility,
            open_transport=lambda admit: self._fabric.open(agent, pool, admit),
            deliver=on_outcome,
            timeouts=TicketTimeouts(chunk_s=TRANSFER_TIMEOUT_S),
            facts=engine.format_facts,
        )
        return [service]


def _ignore(*_: Any, **__: Any) -> None:
    """Stands for what a simulation does not need."""


class _NoExporter:
    address = ""

    def __init__(self, *_: Any) -> None:
        pass

    async def start(self, _host: str) -> None:
        pass

    def close(self) -> None:
        pass


def _replica_context() -> Any:
    """What Serve tells a replica of itself."""
    replica = PROCESS.get().partition("/")[2]
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=replica), app_name="diptych")


class SimulatedWorker(WorkerProcess):
    """A worker whose end is awaited by name.

    Serve awaits `__del__` of a replica that got SIGTERM. Python's garbage collector would call it
    again for every worker of a run that is over.
    """

    async def leave(self) -> None:
        await super().__del__()

    def __del__(self) -> None:  # type: ignore[override]
        """Does nothing: a worker that was not asked to leave has died."""


async def open_worker(pool: str) -> SimulatedWorker:
    """Starts a worker in the process whose code calls this."""
    worker: Any = SimulatedWorker.__new__(SimulatedWorker)
    await worker.__init__(pool, CONFIG, "hash")
    opened: SimulatedWorker = worker
    return opened


class SimulatedRouter(RouterService):
    """A router whose `__del__`, which Serve awaits, is not the garbage collector's to call."""

    def __del__(self) -> None:  # type: ignore[override]
        """Does nothing: a router of a run that is over has died."""


async def open_router() -> RouterService:
    """Starts a router in the process whose code calls this."""
    router: Any = SimulatedRouter.__new__(SimulatedRouter)
    await router.__init__(CONFIG)
    opened: RouterService = router
    return opened


async def open_gateway(name: str, find_router: Callable[[], Awaitable[str]]) -> Generator:
    """Starts the part of a gateway behind its HTTP: requests come as `Request` objects."""
    plane = Plane(name, SECRET, 3.0, find_router)
    return Generator(plane, MAX_ATTEMPTS, PLACE_TIMEOUT_S, PLACE_LIMIT_S)
