"""The Router deployment: it feeds the pure router with frames, and carries out its actions.

One process is one term of the router: of two routers the one with the higher term is active.
Gateways and workers find the process by `address()` through Serve, and keep a connection each.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, assert_never

import numpy as np

from ..protos import frames
from ..router import Router, RouterConfig, SloClass, TenantSlo, events, garbage
from ..router.config import CLASSES
from ..router.decisions import Decision
from .config import ClusterConfig, ConfigError
from .descriptors import reserve_descriptors
from .event_log import EventLog
from .telemetry import Exporter, RouterTally, logs
from .telemetry.tracing import RoutingSpans, tracer_of
from .termination import drain_on_sigterm
from .wire.connection import FrameConnection, FrameListener

log = logging.getLogger(__name__)

#: Longest sleep of the clock. If the router asks for an earlier wake during a sleep, the wake comes
#: when that sleep ends.
TICK_LIMIT_S = 0.25
TICK_MINIMUM_S = 0.005  #: Shortest sleep, so that a wake that is overdue leaves time for frames.
GATEWAY_LIMIT_S = 1.0  #: Gateways have so long to answer a call for statistics, or to close.
#: For spans that were not sent yet when the router ends: the next router waits for that.
SPANS_LIMIT_S = 1.0
#: Latest decisions, one for each attempt, that the recent percentiles are made of.
RECENT_REQUESTS = 200

Values = dict[str, Any]  #: Plain values: a configuration, or the reply to a call.


class RouterService:
    """Serves one active router to gateways, workers and Control.

    Serve awaits the constructor. `config` is a whole `ClusterConfig`, in plain values.
    `deployments` are not used: binding them makes Serve deploy the workers with their router.
    """

    async def __init__(  # type: ignore[misc]
        self, config: Values, deployments: Sequence[object] = ()
    ) -> None:
        garbage.disable()  # Python's collector would pause decisions; `_handle` sweeps between them
        reserve_descriptors()  # the kernel would pause them, too
        self.config = ClusterConfig.model_validate(config)
        # The wall clock's milliseconds: a router that starts later has a higher term.
        self.router = Router(router_config(self.config), term=time.time_ns() // 1_000_000)
        self._log = self._open_log()
        self._peers: dict[str, FrameConnection] = {}  #: by name; a worker's name is its card's id
        self._gateways: dict[str, None] = {}  #: names of those that are connected, oldest first
        #: How gateways reach each other, of those that have said it, by name.
        self._gateway_cards: dict[str, frames.GatewayCard] = {}
        self._open_calls: dict[int, asyncio.Future[Values]] = {}  #: to gateways, by call id
        self._last_call_id = 0
        self._inspections: set[asyncio.Task[None]] = set()
        #: Note and fraction of each worker that is not ready yet, by its name.
        self._loading: dict[str, tuple[str, float]] = {}
        self._listener = FrameListener(self.config.secret, frames.FramesToRouter, self._serve)
        self._address = await self._listener.start(node_host())
        observability = self.config.observability
        logs.configure(observability.log, "router")
        self._tracer = tracer_of(observability, "router", f"router/{self.router.term}")
        self._routes = RoutingSpans(self._tracer) if self._tracer else None
        self._tally = RouterTally(self.router)  #: Passes events to the router, and measures it.
        labels = {"model": self.config.model.name or ""}
        self._metrics = Exporter(observability, labels, self._tally.rows)
        await self._metrics.start(node_host())
        self._clock = asyncio.get_running_loop().create_task(self._keep_time())
        self._ending: asyncio.Task[None] | None = None  #: Once Serve or SIGTERM ends the router.
        drain_on_sigterm(self.__del__)

    async def __del__(self) -> None:
        """End the router. Serve awaits this before the replica ends, and SIGTERM calls it.

        Whoever comes second waits for the first.
        """
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        """Leave the field to the next router: its peers tell that one what they have."""
        self._listener.close()
        for peer in list(self._peers.values()):
            peer.abort()
        if self._log:
            self._log.flush()
        if self._tracer:
            with suppress(TimeoutError):
                async with asyncio.timeout(SPANS_LIMIT_S):
                    await asyncio.to_thread(self._tracer.close)

    def reconfigure(self, _: Values) -> None:
        """Take the deployment's `user_config`, which is for gateways and Control to read in Serve.

        Serve calls this in place of a restart.
        """

    def _open_log(self) -> EventLog | None:
        """Return the log of events for `diptych replay`; None where no folder is configured.

        Raises ConfigError if the folder's `~` stands for the home folder of nobody.
        """
        settings = self.config.router
        if not settings.log_folder:
            return None
        try:
            folder = Path(settings.log_folder).expanduser()
        except RuntimeError as error:  # there is no such user, or the user has no home folder
            raise ConfigError(f"router.log_folder={settings.log_folder}: {error}") from None
        return EventLog(folder, settings.log_mib << 20)

    async def address(self) -> str:
        """Return "host:port" of the listener for frames."""
        return self._address

    async def progress(self) -> dict[str, tuple[str, float]]:
        """Return what workers that are not ready yet say of their start: a note and a fraction."""
        return self._loading

    async def gateway_hosts(self) -> list[str]:
        """Return the hosts of the gateways that have said how others reach them."""
        hosts = [card.address.rpartition(":")[0] for card in self._gateway_cards.values()]
        return sorted({host.strip("[]") for host in hosts})

    def check_health(self) -> None:
        """Answer Serve's probe. Raises RuntimeError when this router must not place any more."""
        if not self.router.active:
            raise RuntimeError("a newer router is active")
        if self._clock.done():
            cause = None if self._clock.cancelled() else self._clock.exception()
            log.error("the router's clock ended", exc_info=cause)
            raise RuntimeError("the router's clock ended: its log says why")

    async def _keep_time(self) -> None:
        """Let the router look at its queue when it asked for that."""
        while True:
            if self._log:
                self._log.flush()
            wait_s = TICK_LIMIT_S
            if self.router.next_wake is not None:
                wait_s = min(wait_s, self.router.next_wake - time.monotonic())
            await asyncio.sleep(max(wait_s, TICK_MINIMUM_S))
            wake_at = self.router.next_wake
            if wake_at is not None and wake_at <= time.monotonic():
                self._handle(events.RouterTick())

    # ---- connections -----------------------------------------------------------------------------

    async def _serve(self, peer: FrameConnection, hello: frames.Hello) -> None:
        """Handle a peer's frames until its connection ends; then the router counts it as lost."""
        previous = self._peers.get(peer.name)
        if previous:  # the peer is back before the end of its old connection was seen
            previous.abort()
            self._peer_gone(peer.name, hello.kind)
        self._peers[peer.name] = peer
        if hello.kind == "gateway":
            self._gateways[peer.name] = None
        if hello.kind != "worker":
            # To the router Control is a gateway too: the router tells both which workers there are.
            self._handle(events.GatewayJoined(peer.name))
        try:
            async with aclosing(peer.frames(self.config.silence_s)) as received:
                async for frame in received:
                    self._take_frame(peer, frame)
        finally:
            if self._peers.get(peer.name) is peer:
                self._peer_gone(peer.name, hello.kind)

    def _peer_gone(self, name: str, kind: str) -> None:
        del self._peers[name]
        self._loading.pop(name, None)
        self._gateways.pop(name, None)
        if self._gateway_cards.pop(name, None):
            self._send_gateway_directory()
        if self._routes:
            self._routes.end_gateway(name)
        if kind == "worker":
            self._handle(events.WorkerLost(name))
        else:
            self._handle(events.GatewayLost(name))

    def _take_frame(self, peer: FrameConnection, frame: frames.FramesToRouter) -> None:
        match frame:
            case frames.PlaceAttempt():
                if self._routes:
                    self._routes.begin(peer.name, frame)
                self._handle(events.PlacementRequested(peer.name, frame))
            case frames.PromptPrefilled():
                self._handle(events.FirstTokenSent(frame.attempt_key))
            case frames.AttemptOutcome():
                if self._routes:
                    self._routes.handle_reply(frame)
                self._handle(events.AttemptEnded(frame.attempt_key, frame))
            case frames.RequestOutcome():
                self._handle(events.RequestEnded(frame))
            case frames.WorkerReport():
                self._handle(events.WorkerReported(peer.name, frame))
            case frames.JoinRouter():
                self._loading.pop(frame.card.id, None)
                self._handle(
                    events.WorkerJoined(
                        frame.card,
                        frame.term,
                        cached_hashes=frame.cached_hashes,
                        held_reservations=frame.held_reservations,
                        demoted_hashes=frame.demoted_hashes,
                    )
                )
            case frames.NewerRouterSeen():
                self._handle(events.NewerRouterReported(frame.term))
            case frames.LoadingProgress():
                self._loading[frame.worker] = (frame.note, frame.fraction)
            case frames.InspectProcess():
                self._inspect(peer, frame)
            case frames.CallReply():
                waiting = self._open_calls.pop(frame.call_id, None)
                if waiting:
                    waiting.set_result(frame.values)
            case frames.IntroduceGateway(address):
                self._gateway_cards[peer.name] = frames.GatewayCard(peer.name, address)
                self._send_gateway_directory()
            case frames.Heartbeat():
                pass  # never comes: `FrameConnection.frames` keeps heartbeats to itself
            case _:
                assert_never(frame)

    def _send_gateway_directory(self) -> None:
        """Tell the gateways of each other."""
        directory = frames.GatewayDirectory(list(self._gateway_cards.values()))
        for name in self._gateway_cards:
            self._peers[name].send(directory)

    # ---- statistics ------------------------------------------------------------------------------

    def _inspect(self, peer: FrameConnection, frame: frames.InspectProcess) -> None:
        """Answer with decisions if the frame asks for some, else with all statistics."""
        if frame.request_id:
            decisions = self.router.decisions.find(frame.request_id)
        elif frame.latest_decisions:
            decisions = self.router.decisions.latest(frame.latest_decisions)
        else:
            inspection = self._send_statistics(peer, frame.call_id)
            task = asyncio.get_running_loop().create_task(inspection)
            self._inspections.add(task)
            task.add_done_callback(self._inspections.discard)
            return
        values = {"decisions": [decision.to_plain() for decision in decisions]}
        peer.send(frames.CallReply(frame.call_id, values))

    async def _send_statistics(self, peer: FrameConnection, call_id: int) -> None:
        """Send statistics of the router and of the gateways that answer in time."""
        gateway_replies = await self._call_gateways(frames.InspectProcess)
        values = {
            "pid": os.getpid(),
            "clock_s": time.time(),  # Control compares the clocks of all hosts
            **self.router.statistics(time.monotonic()),
            "recent": recent_percentiles(self.router.decisions.latest(RECENT_REQUESTS)),
            "loading": self._loading,
            "metrics": self._metrics.address,
            "gateways": gateway_replies,
            "connected_gateways": len(self._gateways),  # also those that were late with a reply
        }
        peer.send(frames.CallReply(call_id, values))

    async def close_gateways(self) -> None:
        """Tell clients that the cluster is being stopped, instead of cutting them off."""
        await self._call_gateways(frames.CloseGateway)

    async def _call_gateways(self, make_frame: Callable[[int], object]) -> list[Values]:
        """Send every gateway a call; return the replies that come in time."""
        loop = asyncio.get_running_loop()
        replies: list[asyncio.Future[Values]] = []
        for name in self._gateways:
            self._last_call_id += 1
            call_id = self._last_call_id
            reply: asyncio.Future[Values] = loop.create_future()
            self._open_calls[call_id] = reply
            replies.append(reply)
            self._peers[name].send(make_frame(call_id))
            loop.call_later(GATEWAY_LIMIT_S, self._open_calls.pop, call_id, None)
        if replies:
            await asyncio.wait(replies, timeout=GATEWAY_LIMIT_S)
        return [reply.result() for reply in replies if reply.done()]

    # ---- the router ------------------------------------------------------------------------------

    def _handle(self, event: events.RouterEvent) -> None:
        """Feed the router, and carry out what it decides."""
        now = time.monotonic()
        if self._log:
            # A file of the log begins with a snapshot of the router, as it is before the event.
            self._log.write(self.router, event, now)
        for action in self._tally.handle(event, now):
            match action:
                case frames.DeliverFrame(name, frame):
                    if self._routes:
                        self._routes.handle_reply(frame)
                    if name in self._peers:
                        self._peers[name].send(frame)
                case events.DisconnectWorker(worker):
                    # Only a report of this worker leads to this action, so it is connected.
                    self._peers[worker].abort()
                case events.StepDown(term):
                    self._step_down(term)
                case _:
                    assert_never(action)
        # What can wait is done now that the answers are sent: the router's index and counts learn
        # of its decisions, and garbage is collected.
        self.router.tidy()
        garbage.sweep()

    def _step_down(self, term: int) -> None:
        """Leave the field to a router with a higher term; `check_health` then fails."""
        log.warning("router of term %d steps down: %d is active", self.router.term, term)
        self._listener.close()
        for peer in list(self._peers.values()):
            peer.abort()


def recent_percentiles(decisions: Sequence[Decision]) -> dict[str, float | None]:
    """Return 95th percentiles over decisions whose outcome is known, in milliseconds.

    They are of the TTFT, and of each answer's 99th percentile of the gaps between its tokens. A
    percentile is None if no decision's outcome has its value. `ttft_share_p95` is the TTFT as a
    share of the request's own target: up to 1 it was in time.
    """

    def percentile_95(name: str) -> float | None:
        values = [decision.observed[name] for decision in decisions if name in decision.observed]
        # "lower" returns a value that was observed, instead of one between two.
        return float(np.percentile(values, 95, method="lower")) if values else None

    ttft_shares = [
        decision.observed["ttft_ms"] / 1e3 / decision.ttft_target_s
        for decision in decisions
        if "ttft_ms" in decision.observed and decision.ttft_target_s > 0
    ]
    ttft_share_p95 = None
    if ttft_shares:
        ttft_share_p95 = round(float(np.percentile(ttft_shares, 95, method="lower")), 4)
    return {
        "ttft_share_p95": ttft_share_p95,
        "ttft_p95_ms": percentile_95("ttft_ms"),
        "itl_p95_ms": percentile_95("itl_p99_ms"),
    }


def router_config(config: ClusterConfig) -> RouterConfig:
    """Return the router's own part of the configuration tree."""
    router = config.router
    slo = config.slo
    classes = {
        name: SloClass(
            priority=settings.priority,
            weight=settings.weight,
            early_reject=settings.early_reject,
            ttft=settings.ttft or "",
            itl_s=(settings.itl_ms or 0.0) / 1e3,
        )
        for name, settings in router.classes.items()
    }
    tenants = {
        name: TenantSlo(ttft=targets.ttft or "", itl_s=(targets.itl_ms or 0.0) / 1e3)
        for name, targets in slo.tenants.items()
    }
    return RouterConfig(
        disaggregate=router.disaggregate,
        policy=router.policy,
        classes=classes or CLASSES,
        default_class=router.default_class or "",
        queue_max=router.queue_max,
        queue_ttl_s=router.queue_ttl_s,
        background_wait_s=router.background_wait_s,
        # Decode engines reserve room for so many new tokens; the router must reckon with the same.
        growth_tokens=config.pools.decode.engine.growth_tokens,
        ttft=str(slo.ttft_target),
        itl_s=slo.itl_ms / 1e3,
        tenants=tenants,
        pace_first_token=config.slo.pace_first_token,
    )


def node_host() -> str:
    """Return the address under which other nodes reach this one, as Ray knows it.

    On a cluster of one node that is loopback.
    """
    import ray  # here, as Ray takes long to import and the functions above do without it

    return ray.util.get_node_ip_address()
