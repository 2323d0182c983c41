"""The worker process under Serve: a `Node`, its connections to gateways and to the router.

Both deployments (`PrefillWorker`, `DecodeWorker`) are this class; `home` is the deployment, `role`
is state. Life of a worker:
    ready     the router gives it what its role does
    draining  an operator said so: nothing new; what runs ends here, or is handed over
    flipping  nothing new, everything handed over; then ready, in another role
    leaving   Serve ends this process: the same, then the end
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.constants import SERVE_NAMESPACE

from ...engine.commands import EngineObservation
from ...kv_transfer import PeerCard, diagnosis
from ...protos import frames as f
from ..config import ClusterConfig, EngineSettings
from ..router_service import node_host
from ..telemetry import Exporter, logs
from ..telemetry.tracing import Works, tracer_of
from ..telemetry.worker_metrics import Ways
from ..telemetry.worker_metrics import rows as worker_rows
from ..wire.connection import Connection, Listener
from ..wire.handshake import Caller
from ..wire.router_link import RouterLink

log = logging.getLogger(__name__)

REPORT_S = 1.0
MOURN_S = 3600.0  #: Ray is asked for as long whether a lost worker's process is gone
EMPTY_S = 10.0  #: until what was handed over has left
TOLD_S = 1.0  #: until the router has heard that nothing new is wanted
FETCH_S = 3.0  #: peers may fetch what a leaving worker computed


class Worker:
    """One replica of a pool."""

    async def __init__(  # type: ignore[misc]
        self, home: str, config: dict, model: str
    ) -> None:
        self.home = self.role_name = home
        self.config = ClusterConfig.model_validate(config)
        self.loop = asyncio.get_running_loop()
        self.replica = serve.get_replica_context().replica_id.unique_id
        self.name = f"{home}/{self.replica}"
        self._model = Path(model)
        self._gateways: dict[str, Connection] = {}
        self._probing: set[asyncio.Task] = set()
        self._known: dict[str, f.WorkerCard] = {}
        self._reports = 0  #: 0: the router does not know us yet; else the next report's number
        self._seen: EngineObservation | None = None
        self._card: f.WorkerCard | None = None
        self.state, self.note = "starting", ""
        self.flips = self.handed_over = 0
        self._told = asyncio.Event()  #: the router knows our card
        self._changing: asyncio.Task | None = None
        hello = Caller(self.name, "worker", self.config.secret)
        silence = self.config.silence_s
        self.link = RouterLink(_find_router, hello, silence, self._joined, self._routed)
        self._tasks = [self.loop.create_task(self.link.run())]
        await self._start()

    async def _start(self) -> None:
        host, settings = node_host(), self.config.observability
        logs.configure(settings.log, self.name)
        self.tracer = tracer_of(settings, "worker", self.name)
        self._works = Works(self.tracer, self.name) if self.tracer else None
        from .core import Node  # torch: who builds the application does without

        self.node = Node(
            self.name,
            self.role_name,
            self.config,
            self._model,
            self._send,
            self._observed,
        )
        kv_cards = await self.node.start(host, self._progress)
        self.listener = Listener(self.config.secret, f.FramesToWorker, self._serve)
        address = await self.listener.start(host)
        engine = self.node.engine
        self._card = f.WorkerCard(
            id=self.name,
            pool=self.home,
            role=self.role_name,
            address=address,
            replica=self.replica,
            pid=os.getpid(),
            kv_card=msgspec.msgpack.encode(kv_cards),
            blocks=engine.scheduler.pool.total,
            block_tokens=engine.kv.layout.block_tokens,
            growth_reserve_blocks=engine.scheduler.kept,
            gpu=_hardware(getattr(self.config.pools, self.home).engine),
            chunk_tokens=engine.scheduler.limits.max_step_tokens,
            max_running=engine.scheduler.limits.max_running,
            metrics=await self._export(host),
            step_ms=(engine.scheduler.limits.itl_budget_s or 0.0) * 1e3,
        )
        gc.collect()
        gc.freeze()  # else a full collection walks all of torch between two steps
        self.state = "ready"
        self._tasks.append(self.loop.create_task(self._observe()))

    async def _export(self, host: str) -> str:
        """Where Prometheus finds this worker."""
        pool = getattr(self.config.pools, self.home)
        labels = {"model": self.config.model.name or "", "pool": self.home, "replica": self.replica}
        ways = Ways(diagnosis.tcp_received)
        rows = lambda: worker_rows(self.statistics(), ways, pool.tensor_parallel)  # noqa: E731
        self.metrics = Exporter(self.config.observability, labels, rows)
        await self.metrics.start(host)
        return self.metrics.address

    def _progress(self, note: str, fraction: float) -> None:
        frame = f.LoadingProgress(self.name, f"loading weights, {note}", fraction)
        self.loop.call_soon_threadsafe(self.link.send, frame)

    # ---- router ----------------------------------------------------------------------------------

    def _joined(self) -> None:
        """A router is there (or start-up is over): the next observation introduces us."""
        self._reports = 0

    async def _observe(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S if self._reports else REPORT_S / 10)
            if self.link.connected:
                self.node.observe()

    def _observed(self, seen: EngineObservation) -> None:
        """Join with everything on a new connection, then only what changed."""
        before, self._seen = self._seen, seen
        if self._reports == 0 or before is None:
            assert self._card is not None
            held = self.node.streams()
            self.node.over.clear()
            self.link.send(f.JoinRouter(self._card, self.link.term, seen.hashes, held))
            self._reports = 1
            self._told.set()
            return
        tokens = seen.prefill_tokens - before.prefill_tokens
        steps = seen.decode_steps - before.decode_steps
        ended = list(self.node.over)
        changed = tokens or steps or seen.stored or seen.evicted or ended
        state = (seen.free_blocks, seen.running_sequences, seen.preempted_sequences)
        if changed or state != (
            before.free_blocks,
            before.running_sequences,
            before.preempted_sequences,
        ):
            report = f.WorkerReport(
                self._reports,
                seen.free_blocks,
                seen.stored,
                seen.evicted,
                tokens,
                seen.prefill_s - before.prefill_s,
                seen.running_sequences,
                seen.kv_tokens,
                steps,
                seen.decode_s - before.decode_s,
                seen.preempted_sequences,
                seen.step_s * 1e3,
                ended,
            )
            self.node.over.clear()
            self.link.send(report)
            self._reports += 1

    def _routed(self, frame: Any) -> None:
        if not isinstance(frame, f.WorkerDirectory):
            return
        cards = {card.id: card for card in frame.workers if card.id != self.name}
        if not frame.settled:
            cards = {**self._known, **cards}
        for card in cards.values():
            if card.id not in self._known:
                peers = msgspec.msgpack.decode(card.kv_card, type=list[PeerCard])
                self.node.add_peer(card.id, peers)
        for name in self._known.keys() - cards.keys():
            self.node.lose_peer(name)
            self._tasks.append(self.loop.create_task(self._mourn(self._known[name])))
        self._known = cards

    async def _mourn(self, card: f.WorkerCard) -> None:
        """Until Ray knows that a lost worker's process is gone: a silent one may be frozen."""
        began = time.monotonic()
        while card.id not in self._known and time.monotonic() - began < MOURN_S:
            if await asyncio.to_thread(_is_dead, card):
                self.node.lose_peer(card.id, dead=True)
                return
            await asyncio.sleep(REPORT_S)

    # ---- gateways --------------------------------------------------------------------------------

    async def _serve(self, peer: Connection, hello: f.Hello) -> None:
        before = self._gateways.get(peer.name)
        if before:  # it is back before its old connection's end was seen
            before.abort()
            self._forget(peer.name)
        self._gateways[peer.name] = peer
        try:
            async with contextlib.aclosing(peer.frames(self.config.silence_s)) as frames:
                async for frame in frames:
                    self._frame(peer, frame)
        finally:
            if self._gateways.get(peer.name) is peer:
                del self._gateways[peer.name]
                self._forget(peer.name)

    def _frame(self, peer: Connection, frame: Any) -> None:
        match frame:
            case f.StartPrefill() | f.StartDecode():
                reason = self._refuses(frame)
                if reason:
                    peer.send(f.AttemptFailed(frame.attempt_key, self.name, reason))
                    return
                if self._works:
                    self._works.begin(peer.name, frame)
                self.node.submit(peer.name, frame)
            case f.CancelAttempt():
                if self._works:
                    self._works.over(frame.attempt_key, "aborted")
                self.node.abort(frame)
            case f.InspectProcess(call):
                peer.send(f.CallReply(call, self.statistics()))
            case f.ChangeRole(call, role, hand_over):
                refused = self._steer(role, hand_over)
                peer.send(f.CallReply(call, {"refused": refused, "state": self.state}))
            case f.ProbeTransfer():
                task = self.loop.create_task(self._probe(peer, frame))
                self._probing.add(task)
                task.add_done_callback(self._probing.discard)

    async def _probe(self, peer: Connection, frame: f.ProbeTransfer) -> None:
        if frame.peer is None:
            seen = await asyncio.to_thread(self.node.environment, frame.pids)
            values = msgspec.to_builtins(seen)
        else:
            values = await self.node.probe(frame.peer, frame.size_bytes)
        peer.send(f.CallReply(frame.call_id, values))

    def _refuses(self, frame: f.StartPrefill | f.StartDecode) -> str | None:
        """Why this attempt cannot start here, if so."""
        wanted = "prefill" if isinstance(frame, f.StartPrefill) else "decode"
        partner = frame.decode_worker if isinstance(frame, f.StartPrefill) else frame.prefill_worker
        if frame.term < self.link.term:
            return "stale_term"
        if self.state != "ready":
            return "draining"
        if wanted != self.role_name:
            return "wrong_role"
        if partner is not None and not self.node.knows(partner):
            return "unknown_peer"
        whole = len(frame.token_ids) - frame.resumed_tokens + frame.sampling.max_tokens
        if not frame.token_ids or whole > self.node.engine.max_model_len:
            return "context_length_exceeded"
        return None

    def _forget(self, gateway: str) -> None:
        self.node.gateway_gone(gateway)
        if self._works:
            self._works.gone(gateway)

    def _send(self, gateway: str, frame: Any) -> None:
        if self._works:
            self._works.sent(frame)
        if gateway in self._gateways:
            self._gateways[gateway].send(frame)

    # ---- role ------------------------------------------------------------------------------------

    def _steer(self, role: str, hand_over: bool) -> str | None:
        """Begins what an operator ordered; why not, if so."""
        if self.state not in ("ready", "draining") or self._changing:
            return f"it is {self.state} already"
        if role in ("", self.role_name):
            self.state = "ready" if role else "draining"
            self._offer(role)
            self._spawn(self._empty() if hand_over and not role else None)
        else:
            self.state = "flipping"
            self._spawn(self._flip(role))
        self.note = ""
        return None

    def _spawn(self, change: Coroutine[Any, Any, Any] | None) -> None:
        if change is None:
            return
        self._changing = self.loop.create_task(change)
        self._changing.add_done_callback(self._changed)

    def _changed(self, task: asyncio.Task) -> None:
        self._changing = None
        if not task.cancelled() and task.exception():
            log.error("a change of role failed", exc_info=task.exception())

    def _offer(self, role: str) -> None:
        """Joins again: `role` is what the router may give us from now on, "" is nothing."""
        assert self._card is not None
        self._card = msgspec.structs.replace(self._card, role=role)
        self._reports = 0
        self._told.clear()
        if self.link.connected:
            self.node.observe()

    async def _flip(self, role: str) -> None:
        began = time.monotonic()
        self._offer("")
        if await self._empty():
            self.node.become(role)
            self.role_name = role
            self.flips += 1
            log.info("flipped to %s in %.2f s", role, time.monotonic() - began)
        else:
            self.note = f"it did not become {role}: {len(self.node.role.jobs)} jobs do not end"
        self.state = "ready"
        self._offer(self.role_name)

    async def _empty(self) -> bool:
        """Hands everything over, once the router has heard that nothing new is wanted."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TOLD_S):
                await self._told.wait()
        self.handed_over += self.node.hand_over()
        for _ in range(int(EMPTY_S / 0.01)):
            if not self.node.role.jobs:
                return True
            await asyncio.sleep(0.01)
        return False

    async def _leave(self) -> None:
        """Then nobody misses this process; what it computed can be fetched a while longer."""
        if self._changing:
            self._changing.cancel()
        self.state = "leaving"
        if not self.link.connected:  # the whole cluster stops, perhaps
            self.node.hand_over()
            return
        self._offer("")
        before = self.handed_over
        await self._empty()
        limit = time.monotonic() + (FETCH_S if self.handed_over > before else 0.0)
        calm = 0
        while time.monotonic() < limit and calm < 5:  # half a second without a transfer
            await asyncio.sleep(0.1)
            calm = 0 if self.node.statistics()["transfer"]["tickets"] else calm + 1

    # ---- Serve -----------------------------------------------------------------------------------

    def check_health(self) -> None:
        """Serve's probe: a worker without its threads is dead."""
        self.node.check()

    def statistics(self) -> dict:
        usage = Path("/proc/self/statm")
        pages = int(usage.read_text().split()[1]) if usage.exists() else 0
        return {
            "id": self.name,
            "pid": os.getpid(),
            "home": self.home,
            "role": self.role_name,
            "address": self._card.address if self._card else "",
            "gpu": self._card.gpu if self._card else "",
            "state": self.state,
            "note": self.note,
            "rss_mib": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
            "cpu_s": round(time.process_time(), 2),
            "flips": self.flips,
            "handed_over": self.handed_over,
            **self.node.statistics(),
        }

    async def __del__(self) -> None:
        """Serve's shutdown hook: the streams go on elsewhere, then the threads stop."""
        if self.state != "starting":
            await self._leave()
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(AttributeError):  # start-up had not come that far
            self.metrics.close()
            if self.tracer:
                await asyncio.to_thread(self.tracer.close)
            self.node.stop()


def _hardware(settings: EngineSettings) -> str:
    """Workers that are the same kind of machine have the same name: the router learns by it."""
    if settings.device == "cpu":
        return f"cpu-{settings.threads}t"
    import torch

    return torch.cuda.get_device_name()


def _is_dead(card: f.WorkerCard) -> bool:
    """Whether Ray says that a replica's process has ended, or its node; False if it cannot say."""
    name = "PrefillWorker" if card.pool == "prefill" else "DecodeWorker"
    replica = ReplicaID(card.replica, DeploymentID(name, "diptych")).to_full_id_str()
    if not ray.is_initialized():
        return False
    try:  # `get_actor` would answer from a cache
        alive = ray.util.list_named_actors(all_namespaces=True)
    except Exception as error:
        log.warning("Ray does not say whether %s is dead: %s", card.id, error)
        return False
    return {"name": replica, "namespace": SERVE_NAMESPACE} not in alive


async def _find_router() -> str:
    return await serve.get_deployment_handle("Router", "diptych").address.remote()
