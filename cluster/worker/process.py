"""The worker process under Serve: a `WorkerCore`, its connections to gateways and to the router.

Both deployments (`PrefillWorker`, `DecodeWorker`) are this class. A worker's pool is the deployment
that it belongs to; its role is what it works as now, and may change. `lifecycle.WorkerLifecycle`
decides what the process takes and how it gets rid of its work; this file carries that out.
`reporting.WorkerReporter` decides what the router hears.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import time
from pathlib import Path
from typing import Any, assert_never

import msgspec
import ray
from ray import serve
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.constants import SERVE_NAMESPACE

from ...engine.commands import EngineObservation
from ...kv_transfer import PeerCard, diagnosis
from ...protos import frames
from ...protos.handshake import PeerIdentity
from ..applications import POOL_DEPLOYMENTS, router_finder
from ..config import ClusterConfig, EngineSettings, PoolConfig
from ..descriptors import reserve_descriptors
from ..router_service import node_host
from ..telemetry import Exporter, logs
from ..telemetry.process import resident_bytes
from ..telemetry.tracing import WorkerSpans, tracer_of
from ..telemetry.worker_metrics import TransportDetector, worker_rows
from ..termination import drain_on_sigterm
from ..wire.aliases import worker_alias
from ..wire.connection import FrameConnection, FrameListener
from ..wire.router_link import RouterLink
from .lifecycle import (
    ChangeTick,
    HandOverWork,
    LeaveOrdered,
    LifecycleEvent,
    OfferRole,
    RoleOrdered,
    TakeRole,
    WorkerLifecycle,
    WorkerPhase,
    WorkerStarted,
    WorkHandedOver,
)
from .reporting import WorkerReporter

log = logging.getLogger(__name__)

#: Seconds between two reports to the router, and between two questions to Ray about a lost worker.
REPORT_S = 1.0
FIRST_REPORT_S = 0.1  #: as `REPORT_S`, while the router does not know the worker
MOURN_S = 3600.0  #: for this long, Ray is asked whether a lost worker's process is gone
CHANGE_TICK_S = 0.01  #: between two looks at a change of role that is under way


class WorkerProcess:
    """One replica of a pool.

    Serve makes the object, by the deployment's arguments: `home` is the pool's name ("prefill" or
    "decode"), `config` the whole configuration in plain types, `model` the checkpoint's folder. The
    constructor returns when the worker can take work, which takes as long as the model loads.
    """

    async def __init__(  # type: ignore[misc]
        self, home: str, config: dict[str, Any], model: str
    ) -> None:
        reserve_descriptors()  # else some connections wait for the kernel
        self.pool = home
        self.config = ClusterConfig.model_validate(config)
        self.loop = asyncio.get_running_loop()
        context = serve.get_replica_context()
        self._replica_id = context.replica_id
        self.replica = self._replica_id.unique_id
        self.name = f"{home}/{self.replica}"  #: the worker's id in the cluster
        self._began_at = time.monotonic()
        self.lifecycle = WorkerLifecycle(home)
        self._model = Path(model)
        self._gateways: dict[str, FrameConnection] = {}  #: by the gateway's name
        #: Keeps the tasks alive: the loop itself refers to tasks weakly.
        self._probes: set[asyncio.Task[None]] = set()
        self._known_workers: dict[str, frames.WorkerCard] = {}  #: all others, by id
        self._mournings: set[asyncio.Task[None]] = set()  #: keeps these tasks alive
        self._reporter = WorkerReporter()
        self._card: frames.WorkerCard | None = None  #: what the router knows of us; None at first
        self._change_task: asyncio.Task[None] | None = None  #: while a change is under way
        #: What `__del__` has to stop: what `_start` has made so far, the last one first.
        self._stops = contextlib.AsyncExitStack()
        caller = PeerIdentity(self.name, "worker", self.config.secret)
        self.link = RouterLink(
            router_finder(context.app_name),
            caller,
            self.config.silence_s,
            on_connected=self._reporter.introduce_again,
            on_frame=self._take_router_frame,
        )
        self._tasks = [self.loop.create_task(self.link.run())]
        #: The task that ends the worker; None until Serve or SIGTERM asks for it.
        self._ending: asyncio.Task[None] | None = None
        drain_on_sigterm(self.__del__)
        await self._start()

    async def _start(self) -> None:
        """Load the model, open every connection, and offer the pool's role."""
        host = node_host()
        observability = self.config.observability
        logs.configure(observability.log, self.name)
        self.tracer = tracer_of(observability, "worker", self.name)
        self._works = WorkerSpans(self.tracer, self.name) if self.tracer else None
        # Loads torch, which the process that builds the application does not need.
        from .core import WorkerCore

        self.core = WorkerCore(
            name=self.name,
            pool=self.pool,
            config=self.config,
            model=self._model,
            send=self._send,
            on_observation=self._report,
            on_attempt_ended=self._end_span,
        )
        self._stops.callback(self.core.stop)
        # The spans are sent before the core stops: Serve may kill a process that stops slowly.
        if self.tracer:
            self._stops.push_async_callback(asyncio.to_thread, self.tracer.close)
        kv_cards = await self.core.start(host, self._report_loading)
        self.listener = FrameListener(
            self.config.secret, frames.FramesToWorker, self._serve_gateway
        )
        address = await self.listener.start(host)
        metrics_address = await self._export_metrics(host)
        self._card = self._describe(address, metrics_address, kv_cards)
        gc.collect()
        gc.freeze()  # else a full collection walks all of torch between two steps
        self._handle(WorkerStarted())
        self._tasks.append(self.loop.create_task(self._observe_engine()))

    def _describe(
        self, address: str, metrics_address: str, kv_cards: list[PeerCard]
    ) -> frames.WorkerCard:
        """Return what the router and all peers are told of this worker."""
        engine = self.core.engine
        return frames.WorkerCard(
            id=self.name,
            pool=self.pool,
            role=self.lifecycle.role,
            address=address,
            replica=self.replica,
            pid=os.getpid(),
            kv_card=msgspec.msgpack.encode(kv_cards),
            blocks=engine.block_count,
            block_tokens=engine.kv_pool.layout.block_tokens,
            growth_reserve_blocks=engine.growth_reserve_blocks,
            gpu=_hardware_name(self._pool_config.engine),
            tensor_parallel=self._pool_config.tensor_parallel,
            chunk_tokens=engine.limits.max_step_tokens,
            max_running=engine.limits.max_running,
            metrics=metrics_address,
            step_ms=(engine.limits.itl_budget_s or 0.0) * 1e3,  # 0: steps have no limit
            max_model_len=engine.max_model_len,
            load_token_s=self.core.load_token_s,
        )

    @property
    def _pool_config(self) -> PoolConfig:
        return self.config.pools.of(self.pool)

    async def _export_metrics(self, host: str) -> str:
        """Start the exporter; return the address where Prometheus finds this worker."""
        labels = {"model": self.config.model.name or "", "pool": self.pool, "replica": self.replica}
        transport_detector = TransportDetector(diagnosis.tcp_received)
        ranks = self._pool_config.tensor_parallel
        self.metrics = Exporter(
            self.config.observability,
            labels,
            lambda: worker_rows(self.statistics(), transport_detector, ranks),
        )
        self._stops.callback(self.metrics.close)
        await self.metrics.start(host)
        return self.metrics.address

    # ---- the router ------------------------------------------------------------------------------

    def _report_loading(self, note: str, fraction: float) -> None:
        """Tell the router how far the weights are. Any thread may call it."""
        frame = frames.LoadingProgress(self.name, f"loading weights, {note}", fraction)
        self.loop.call_soon_threadsafe(self.link.send, frame)

    async def _observe_engine(self) -> None:
        """Ask the engine now and then what it has done; the answer comes to `_report`."""
        while True:
            await asyncio.sleep(FIRST_REPORT_S if self._reporter.must_join else REPORT_S)
            if self.link.connected:
                self.core.observe()

    def _report(self, observation: EngineObservation) -> None:
        """Tell the router what the engine has done; a router that is new is told everything."""
        if self._reporter.must_join:
            assert self._card is not None
            self.core.ended_attempts.clear()
            reservations = self.core.decode_reservations()
            term = self.link.term
            self.link.send(self._reporter.joining(observation, self._card, term, reservations))
            return
        ended = list(self.core.ended_attempts)
        report = self._reporter.report(observation, ended, self.core.tier_loads())
        if report is not None:
            self.core.ended_attempts.clear()
            self.link.send(report)

    def _take_router_frame(self, frame: frames.FramesFromRouter) -> None:
        match frame:
            case frames.WorkerDirectory():
                self._take_directory(frame)
            case frames.AttemptPlaced() | frames.AttemptRefused():
                pass  # the router sends these, and those of the next case, to gateways only
            case frames.InspectProcess() | frames.CloseGateway() | frames.GatewayDirectory():
                pass
            case frames.CallReply():
                pass  # it answers whoever asked the router, and a worker asks nothing
            case frames.Heartbeat():
                pass  # never comes: `FrameConnection.frames` keeps heartbeats to itself
            case _:
                assert_never(frame)

    def _take_directory(self, directory: frames.WorkerDirectory) -> None:
        """Learn which peers there are.

        A router that is young (not `settled`) names only those that joined it, so a worker that it
        leaves out is not lost.
        """
        cards = {card.id: card for card in directory.workers if card.id != self.name}
        if not directory.settled:
            cards = {**self._known_workers, **cards}
        for name in cards.keys() - self._known_workers.keys():
            peers = msgspec.msgpack.decode(cards[name].kv_card, type=list[PeerCard])
            self.core.add_peer(name, peers)
        for name in self._known_workers.keys() - cards.keys():
            self.core.lose_peer(name)
            mourning = self.loop.create_task(self._mourn(self._known_workers[name]))
            self._mournings.add(mourning)
            mourning.add_done_callback(self._mournings.discard)
        self._known_workers = cards

    async def _mourn(self, card: frames.WorkerCard) -> None:
        """Ask Ray again and again whether a lost worker's process is gone, and tell the core.

        This ends when the process is gone, when the worker is back, or after `MOURN_S`. A worker
        that is merely silent may be frozen, and write to our blocks when it wakes up. So blocks
        that it could write stay out of use until its process is known to be gone, or until it is
        back, even if Ray is asked no more.
        """
        deadline_s = time.monotonic() + MOURN_S
        while card.id not in self._known_workers and time.monotonic() < deadline_s:
            if await asyncio.to_thread(replica_has_ended, card, self._replica_id):
                self.core.lose_peer(card.id, process_dead=True)
                return
            await asyncio.sleep(REPORT_S)

    # ---- gateways --------------------------------------------------------------------------------

    async def _serve_gateway(self, peer: FrameConnection, hello: frames.Hello) -> None:
        """Handle a gateway's frames until its connection ends; then its attempts are cancelled."""
        previous = self._gateways.get(peer.name)
        if previous:  # the gateway is back before the end of its old connection was seen
            previous.abort()
            self._forget_gateway(peer.name)
        self._gateways[peer.name] = peer
        try:
            async with contextlib.aclosing(peer.frames(self.config.silence_s)) as received:
                async for frame in received:
                    self._take_gateway_frame(peer, frame)
        finally:
            if self._gateways.get(peer.name) is peer:
                del self._gateways[peer.name]
                self._forget_gateway(peer.name)

    def _take_gateway_frame(self, peer: FrameConnection, frame: frames.FramesToWorker) -> None:
        match frame:
            case frames.StartPrefill() | frames.StartDecode():
                self._start_attempt(peer, frame)
            case frames.CancelAttempt():
                self._end_span(frame.attempt_key)
                self.core.cancel(frame)
            case frames.InspectProcess():
                peer.send(frames.CallReply(frame.call_id, self.statistics()))
            case frames.ChangeRole():  # of Control, which connects as a gateway does
                # The life cycle ignores an order that it refuses: `refusal` tells the caller.
                refusal = self.lifecycle.refusal()
                self._handle(RoleOrdered(frame.role, frame.hand_over))
                values = {"refused": refusal, "state": str(self.lifecycle.phase)}
                peer.send(frames.CallReply(frame.call_id, values))
            case frames.ProbeTransfer():
                probe = self.loop.create_task(self._probe_transfer(peer, frame))
                self._probes.add(probe)
                probe.add_done_callback(self._probes.discard)
            case frames.Heartbeat():
                pass
            case _:
                assert_never(frame)

    def _start_attempt(
        self, peer: FrameConnection, frame: frames.StartPrefill | frames.StartDecode
    ) -> None:
        reason = self._refusal(frame)
        if reason:
            peer.send(frames.AttemptFailed(frame.attempt_key, self.name, reason))
            return
        if self._works:
            self._works.begin(peer.name, frame)
        self.core.submit(peer.name, frame)

    def _refusal(self, frame: frames.StartPrefill | frames.StartDecode) -> str | None:
        """Return why this attempt cannot start here; None if it can."""
        if isinstance(frame, frames.StartPrefill):
            needed_role = "prefill"
            partner: str | None = frame.decode_worker
        else:
            needed_role = "decode"
            partner = frame.prefill_worker
        if frame.term < self.link.term:  # placed by a router that has been replaced
            return frames.STALE_TERM
        if self.lifecycle.phase is not WorkerPhase.READY:
            return "draining"
        if needed_role != self.lifecycle.role:
            return "wrong_role"
        if partner is not None and not self.core.knows(partner):
            return "unknown_peer"
        # `token_ids` are the prompt and the tokens that an earlier attempt has generated.
        prompt_tokens = len(frame.token_ids) - frame.resumed_tokens
        sequence_limit = prompt_tokens + frame.sampling.max_tokens
        if not frame.token_ids or sequence_limit > self.core.engine.max_model_len:
            return "context_length_exceeded"
        return None

    async def _probe_transfer(self, peer: FrameConnection, frame: frames.ProbeTransfer) -> None:
        """Answer `diptych doctor`: look at this host, or measure a transfer from `frame.peer`.

        The look tells whether this worker can reach the memory of `frame.pids`, its
        neighbours on the host.
        """
        if frame.peer is None:
            environment = await asyncio.to_thread(self.core.environment, frame.pids)
            values = msgspec.to_builtins(environment)
        else:
            values = await self.core.probe(frame.peer, frame.size_bytes)
        peer.send(frames.CallReply(frame.call_id, values))

    def _forget_gateway(self, gateway: str) -> None:
        if self._works:  # before the core ends the attempts, which would be no failures then
            self._works.end_gateway(gateway)
        self.core.gateway_gone(gateway)

    def _end_span(self, attempt_key: frames.AttemptKey) -> None:
        """End the span of an attempt that has not failed, if it has an open one."""
        if self._works:
            self._works.end_attempt(attempt_key)

    def _send(self, gateway: str, frame: frames.FramesFromWorker) -> None:
        """Send a frame, or drop it where the gateway has gone: nobody waits for it any more."""
        if self._works:
            self._works.handle_reply(frame)
        if gateway in self._gateways:
            self._gateways[gateway].send(frame)

    # ---- life ------------------------------------------------------------------------------------

    def _handle(self, event: LifecycleEvent) -> None:
        """Give the life cycle an event, and carry out the actions that it decides on.

        While a change is under way, a task ticks the life cycle.
        """
        for action in self.lifecycle.handle(event, time.monotonic()):
            match action:
                case OfferRole(role):
                    self._offer(role)
                case HandOverWork():
                    attempts = self.core.hand_over()
                    self._handle(WorkHandedOver(attempts))
                case TakeRole(role, took_s):
                    self.core.become(role)
                    log.info("flipped to %s in %.2f s", role, took_s)
                case _:
                    assert_never(action)
        # A task that is done may be here still: asyncio calls `_change_ended` a moment later.
        is_ticking = self._change_task is not None and not self._change_task.done()
        if self.lifecycle.changing and not is_ticking:
            self._change_task = self.loop.create_task(self._carry_change_through())
            self._change_task.add_done_callback(self._change_ended)

    async def _carry_change_through(self) -> None:
        """Tell the life cycle what is left to do, until its change has ended."""
        while self.lifecycle.changing:
            await asyncio.sleep(CHANGE_TICK_S)
            tick = ChangeTick(
                router_informed=not self._reporter.must_join,
                attempts_left=self.core.attempts,
                open_tickets=self.core.open_tickets,  # one for each KV transfer under way
            )
            self._handle(tick)

    def _change_ended(self, task: asyncio.Task[None]) -> None:
        """Log an error of the task, which nobody awaits."""
        if self._change_task is task:  # else the next change has begun already
            self._change_task = None
        if not task.cancelled() and task.exception():
            log.error("a change of role failed", exc_info=task.exception())

    def _offer(self, role: str) -> None:
        """Join again: `role` is what the router may give this worker from now on."""
        assert self._card is not None
        self._card = msgspec.structs.replace(self._card, role=role)
        self._reporter.introduce_again()
        if self.link.connected:
            self.core.observe()

    # ---- Serve -----------------------------------------------------------------------------------

    def check_health(self) -> None:
        """Answer Serve's probe: a worker without its threads is dead. Raises RuntimeError."""
        self.core.check()

    def statistics(self) -> dict[str, Any]:
        """Return a snapshot for people, `diptych status` and Prometheus."""
        return {
            "id": self.name,
            "alias": worker_alias(self.config.secret, self.name),  # what clients are told
            "pid": os.getpid(),
            "home": self.pool,  # the pool's name in the statistics
            "role": self.lifecycle.role,
            "address": self._card.address if self._card else "",
            "gpu": self._card.gpu if self._card else "",
            "state": str(self.lifecycle.phase),
            "note": self.lifecycle.note,
            "rss_mib": resident_bytes() >> 20,
            "uptime_s": round(time.monotonic() - self._began_at, 1),
            "clock_s": time.time(),  # Control compares the clocks of all hosts
            "cpu_s": round(time.process_time(), 2),
            "flips": self.lifecycle.flips,
            "handed_over": self.lifecycle.handed_over,
            **self.core.statistics(),
        }

    async def __del__(self) -> None:
        """Serve's shutdown hook: the work goes on elsewhere, then the threads stop.

        Serve may call it while the constructor still runs: then nothing is handed over, and what
        was made until then is stopped. SIGTERM does the same; whoever comes second waits for it.
        """
        if self._ending is None:
            self._ending = self.loop.create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        if self.lifecycle.phase is not WorkerPhase.STARTING:
            self._handle(LeaveOrdered(self.link.connected))
            if self._change_task:
                await asyncio.wait([self._change_task])
        for task in self._tasks:
            task.cancel()
        await self._stops.aclose()


def _hardware_name(settings: EngineSettings) -> str:
    """Return one name for one kind of machine: the router learns speeds by it."""
    if settings.device == "cpu":
        return f"cpu-{settings.threads}t"
    import torch

    return torch.cuda.get_device_name()


def replica_has_ended(card: frames.WorkerCard, own_id: ReplicaID) -> bool:
    """Return whether Ray says that a worker's process, or its node, has ended.

    False: the process lives, or Ray does not say. `own_id` is the id of the asking replica; the
    worker that `card` describes is a replica of the same Serve application. The call asks Ray's
    control service, which takes too long for the event loop.
    """
    application = own_id.deployment_id.app_name
    deployment_id = DeploymentID(POOL_DEPLOYMENTS[card.pool], application)
    replica = ReplicaID(card.replica, deployment_id).to_full_id_str()
    if not ray.is_initialized():
        return False
    try:  # not `get_actor`, which would answer from a cache
        alive = ray.util.list_named_actors(all_namespaces=True)
    except Exception as error:
        log.warning("Ray does not say whether %s is dead: %s", card.id, error)
        return False
    # A name that is wrong is never in the list, and blocks would be used that a frozen process may
    # still write to. So the list counts only if it has the asking replica, which lives.
    if {"name": own_id.to_full_id_str(), "namespace": SERVE_NAMESPACE} not in alive:
        log.error("Ray does not list this replica: whether %s is dead is not known", card.id)
        return False
    return {"name": replica, "namespace": SERVE_NAMESPACE} not in alive
