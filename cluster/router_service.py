"""The Router deployment: connections in, frames to the pure router, its actions out."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import BinaryIO

from ..protos import frames as f
from ..router import Router, RouterConfig, SloClass, garbage, replay
from ..router import events as e
from ..router.config import CLASSES
from ..router.decisions import Decision
from .config import ClusterConfig
from .telemetry import Exporter, RouterTally, logs
from .telemetry.tracing import Routes, tracer_of
from .wire.connection import Connection, Listener

log = logging.getLogger(__name__)

TICK_S = 0.25  #: at most; a waiting request is looked at when the router says so
TICK_MIN_S = 0.005
GATEWAY_S = 1.0  #: for a gateway's statistics
LOG_REST_S = 60.0  #: without recording, after a write that failed
RECENT = 200  #: requests of which percentiles are told


class RouterService:
    """One process, one term. Gateways and workers find it by `address()` through Serve."""

    async def __init__(self, config: dict) -> None:  # type: ignore[misc]
        garbage.off()
        self.config = ClusterConfig.model_validate(config)
        self.router = Router(router_config(self.config), term=time.time_ns() // 1_000_000)
        folder = self.config.router.log_folder
        self._log = EventLog(Path(folder), self.config.router.log_mib << 20) if folder else None
        self._peers: dict[str, Connection] = {}
        self._gateways: dict[str, None] = {}  #: names of those that are connected
        self._calls: dict[int, asyncio.Future[dict]] = {}
        self._next_call = 0
        self._asking: set[asyncio.Task] = set()
        self._loading: dict[str, tuple[str, float]] = {}
        self._listener = Listener(self.config.secret, f.FramesToRouter, self._serve)
        self._address = await self._listener.start(node_host())
        settings = self.config.observability
        logs.configure(settings.log, "router")
        tracer = tracer_of(settings, "router", f"router/{self.router.term}")
        self._routes = Routes(tracer) if tracer else None
        self._tally = RouterTally(self.router)
        labels = {"model": self.config.model.name or ""}
        self._metrics = Exporter(settings, labels, self._tally.rows)
        await self._metrics.start(node_host())
        self._ticker = asyncio.get_running_loop().create_task(self._tick())

    async def address(self) -> str:
        return self._address

    async def progress(self) -> dict[str, tuple[str, float]]:
        """What workers that are not ready yet say of their start-up."""
        return self._loading

    def check_health(self) -> None:
        if not self.router.active:
            raise RuntimeError("a newer router is active")
        if self._ticker.done():
            raise RuntimeError("the router's clock ended: its log says why")

    async def _tick(self) -> None:
        while True:
            if self._log:
                self._log.flush()
            wake = self.router.next_wake
            late = wake - time.monotonic() if wake is not None else TICK_S
            await asyncio.sleep(min(max(late, TICK_MIN_S), TICK_S))
            wake = self.router.next_wake
            if wake is not None and wake <= time.monotonic():
                self._handle(e.RouterTick())

    async def _serve(self, peer: Connection, hello: f.Hello) -> None:
        before = self._peers.get(peer.name)
        if before:  # it is back before its old connection's end was seen
            before.abort()
            self._gone(peer.name, hello.kind)
        self._peers[peer.name] = peer
        if hello.kind == "gateway":
            self._gateways[peer.name] = None
        if hello.kind != "worker":  # Control too wants to know who is there
            self._handle(e.GatewayJoined(peer.name))
        try:
            async with aclosing(peer.frames(self.config.silence_s)) as frames:
                async for frame in frames:
                    self._frame(peer, frame)
        finally:
            if self._peers.get(peer.name) is peer:
                self._gone(peer.name, hello.kind)

    def _gone(self, name: str, kind: str) -> None:
        del self._peers[name]
        self._loading.pop(name, None)
        self._gateways.pop(name, None)
        if self._routes:
            self._routes.gone(name)
        self._handle(e.WorkerLost(name) if kind == "worker" else e.GatewayLost(name))

    def _frame(self, peer: Connection, frame: object) -> None:
        match frame:
            case f.PlaceAttempt():
                if self._routes:
                    self._routes.asked(peer.name, frame)
                self._handle(e.PlacementRequested(peer.name, frame))
            case f.PromptPrefilled(key):
                self._handle(e.FirstTokenSent(key))
            case f.AttemptOutcome(key):
                if self._routes:
                    self._routes.answered(frame)
                self._handle(e.AttemptEnded(key, frame))
            case f.RequestOutcome():
                self._handle(e.RequestEnded(frame))
            case f.WorkerReport():
                self._handle(e.WorkerReported(peer.name, frame))
            case f.JoinRouter(card, term, cached, held):
                self._loading.pop(card.id, None)
                self._handle(e.WorkerJoined(card, term, cached, held))
            case f.NewerRouterSeen(term):
                self._handle(e.NewerRouterReported(term))
            case f.LoadingProgress(worker, note, fraction):
                self._loading[worker] = (note, fraction)
            case f.InspectProcess(call, request) if request:
                found = [decision.told() for decision in self.router.decisions.find(request)]
                peer.send(f.CallReply(call, {"decisions": found}))
            case f.InspectProcess(call, latest_decisions=latest) if latest:
                recent = [decision.told() for decision in self.router.decisions.latest(latest)]
                peer.send(f.CallReply(call, {"decisions": recent}))
            case f.InspectProcess(call):
                task = asyncio.get_running_loop().create_task(self._inspected(peer, call))
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)
            case f.CallReply(call, values) if call in self._calls:
                self._calls.pop(call).set_result(values)

    async def _inspected(self, peer: Connection, call: int) -> None:
        """Statistics of the router and of the gateways that answer in time."""
        asked = [self._ask(self._peers[name]) for name in self._gateways]
        if asked:
            await asyncio.wait(asked, timeout=GATEWAY_S)
        values = {
            "pid": os.getpid(),
            **self.router.statistics(time.monotonic()),
            "recent": recent(self.router.decisions.latest(RECENT)),
            "loading": self._loading,
            "metrics": self._metrics.address,
            "gateways": [one.result() for one in asked if one.done()],
        }
        peer.send(f.CallReply(call, values))

    async def close_gateways(self) -> None:
        """Before the cluster is stopped: clients are told, instead of being cut off."""
        asked = [self._ask(self._peers[name], f.CloseGateway) for name in self._gateways]
        if asked:
            await asyncio.wait(asked, timeout=GATEWAY_S)

    def _ask(
        self, gateway: Connection, frame: Callable[[int], object] = f.InspectProcess
    ) -> asyncio.Future[dict]:
        self._next_call += 1
        call = self._next_call
        future = self._calls[call] = asyncio.get_running_loop().create_future()
        gateway.send(frame(call))
        asyncio.get_running_loop().call_later(GATEWAY_S, self._calls.pop, call, None)
        return future

    def _handle(self, event: e.RouterEvent) -> None:
        if self._log:
            self._log.write(self.router, event, time.monotonic())
        for action in self._tally.handle(event, time.monotonic()):
            match action:
                case f.DeliverFrame(name, frame):
                    if self._routes:
                        self._routes.answered(frame)
                    if name in self._peers:
                        self._peers[name].send(frame)
                case e.DisconnectWorker(worker):
                    self._peers[worker].abort()
                case e.StepDown(term):
                    log.warning(
                        "router of term %d steps down: %d is active", self.router.term, term
                    )
                    self._listener.close()
                    for peer in list(self._peers.values()):
                        peer.abort()
        self.router.tidy()
        garbage.sweep()


def recent(decisions: list[Decision]) -> dict[str, float | None]:
    """95th percentiles over decisions whose outcome is known: of TTFT, and of each answer's
    99th percentile of the gaps between its tokens. None: of none it is known."""

    def p95(name: str) -> float | None:
        values = sorted(d.observed[name] for d in decisions if name in d.observed)
        return values[int(0.95 * (len(values) - 1))] if values else None

    return {"ttft_p95_ms": p95("ttft_ms"), "itl_p95_ms": p95("itl_p99_ms")}


class EventLog:
    """What the router is told, for `diptych replay`: two files, `most` bytes at most together.

    A disk that takes nothing stops the recording for a minute, not the router.
    """

    def __init__(self, folder: Path, most: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._most = folder / "router.jsonl", most // 2
        self._file: BinaryIO | None = None
        self._rests_until = -math.inf

    def write(self, router: Router, event: e.RouterEvent, now: float) -> None:
        line = replay.encode(event, now)
        if line is None or now < self._rests_until:
            return
        try:
            if self._file is None or self._file.tell() + len(line) > self._most:
                self._turn(router, now)
            assert self._file
            self._file.write(line)
        except OSError as error:
            self._rest(error)

    def _turn(self, router: Router, now: float) -> None:
        """The old file becomes the older one; the new one can be replayed alone."""
        if self._file:
            self._file.close()
        if self._path.exists():
            self._path.replace(self._path.with_suffix(".old.jsonl"))
        self._file = self._path.open("wb")
        self._file.write(replay.encode_head(router, now))
        for known in replay.snapshot(router):
            self._file.write(replay.encode(known, now) or b"")
        self._file.flush()

    def flush(self) -> None:
        try:
            if self._file:
                self._file.flush()
        except OSError as error:
            self._rest(error)

    def _rest(self, error: OSError) -> None:
        log.error("%s: %s; nothing is recorded for %.0f s", self._path, error, LOG_REST_S)
        self._rests_until = time.monotonic() + LOG_REST_S
        file, self._file = self._file, None
        with suppress(OSError):  # what its buffer holds cannot be written either
            if file:
                file.close()


def router_config(config: ClusterConfig) -> RouterConfig:
    """The router's own part of the tree."""
    router, slo = config.router, config.slo
    return RouterConfig(
        disaggregate=router.disaggregate,
        policy=router.policy,
        classes={name: SloClass(**vars(one)) for name, one in router.classes.items()} or CLASSES,
        queue_max=router.queue_max,
        queue_ttl_s=router.queue_ttl_s,
        growth_tokens=config.pools.decode.engine.growth_tokens,
        ttft_s=slo.ttft_ms / 1e3,
        itl_s=slo.itl_ms / 1e3,
    )


def node_host() -> str:
    """The address under which other nodes reach this one; loopback on a one-node cluster."""
    import ray

    return ray.util.get_node_ip_address()
