"""The worker process under Serve: a `Node`, its connections to gateways and to the router.

Both deployments (`PrefillWorker`, `DecodeWorker`) are this class; `home` is the deployment, `role`
is state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.constants import SERVE_NAMESPACE

from ..engine.commands import Observed
from ..kv_transfer import PeerCard
from ..kv_transfer.identity import ticket_id
from ..protos import frames as f
from .config import ClusterConfig
from .link import RouterLink
from .node import Node
from .router_service import node_host
from .wire import Connection, Listener

log = logging.getLogger(__name__)

REPORT_S = 1.0
MOURN_S = 3600.0  #: Ray is asked for as long whether a lost worker's process is gone
DRAIN_S = 10.0


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
        self._ended: dict[f.Key, asyncio.Future[None]] = {}
        self._known: dict[str, f.WorkerCard] = {}
        self._reports = 0  #: 0: the router does not know us yet; else the next report's number
        self._seen: Observed | None = None
        self._card: f.WorkerCard | None = None
        self._closing = False
        hello = f.Hello(self.name, "worker", self.config.secret)
        silence = self.config.silence_s
        self.link = RouterLink(_find_router, hello, silence, self._joined, self._routed)
        self._tasks = [self.loop.create_task(self.link.run())]
        await self._start()

    async def _start(self) -> None:
        host = node_host()
        self.node = Node(
            self.name,
            self.role_name,
            self.config,
            self._model,
            self._send,
            self._end,
            self._observed,
        )
        kv_cards = await self.node.start(host, self._progress)
        self.listener = Listener(self.config.secret, f.ToWorker, self._serve)
        address = await self.listener.start(host)
        engine = self.node.engine
        self._card = f.WorkerCard(
            id=self.name,
            home=self.home,
            role=self.role_name,
            address=address,
            replica=self.replica,
            pid=os.getpid(),
            kv_card=msgspec.msgpack.encode(kv_cards),
            blocks=engine.scheduler.pool.total,
            block_tokens=engine.kv.layout.block_tokens,
            kept=engine.scheduler.kept,
            chunk_tokens=engine.scheduler.limits.max_step_tokens,
            max_running=engine.scheduler.limits.max_running,
        )
        self._tasks.append(self.loop.create_task(self._observe()))

    def _progress(self, note: str, fraction: float) -> None:
        frame = f.Loading(self.name, f"loading weights, {note}", fraction)
        self.loop.call_soon_threadsafe(self.link.send, frame)

    # ---- router ----------------------------------------------------------------------------------

    def _joined(self) -> None:
        """A router is there (or start-up is over): the next observation introduces us."""
        self._reports = 0

    async def _observe(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S if self._reports else REPORT_S / 10)
            if self.link.connected and not self._closing:
                self.node.observe()

    def _observed(self, seen: Observed) -> None:
        """Join with everything on a new connection, then only what changed."""
        before, self._seen = self._seen, seen
        if self._reports == 0 or before is None:
            assert self._card is not None
            held = self.node.streams()
            self.link.send(f.Join(self._card, self.link.term, seen.hashes, held))
            self._reports = 1
            return
        tokens = seen.prefill_tokens - before.prefill_tokens
        steps = seen.decode_steps - before.decode_steps
        changed = tokens or steps or seen.stored or seen.evicted
        state = (seen.free_blocks, seen.running, seen.preempted)
        if changed or state != (before.free_blocks, before.running, before.preempted):
            report = f.Report(
                self._reports,
                seen.free_blocks,
                seen.stored,
                seen.evicted,
                tokens,
                seen.prefill_seconds - before.prefill_seconds,
                seen.running,
                seen.kv_tokens,
                steps,
                seen.decode_seconds - before.decode_seconds,
                seen.preempted,
            )
            self.link.send(report)
            self._reports += 1

    def _routed(self, frame: Any) -> None:
        if not isinstance(frame, f.Directory):
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
            self.node.gateway_gone(peer.name)
        self._gateways[peer.name] = peer
        async with contextlib.aclosing(peer.frames(self.config.silence_s)) as frames:
            async for frame in frames:
                self._frame(peer, frame)
        if self._gateways.get(peer.name) is peer:
            del self._gateways[peer.name]
            self.node.gateway_gone(peer.name)

    def _frame(self, peer: Connection, frame: Any) -> None:
        match frame:
            case f.Prefill() | f.Decode():
                reason = self._refuses(frame)
                if reason:
                    peer.send(f.Failed(frame.key, self.name, reason))
                    return
                self.node.submit(peer.name, frame)
            case f.Abort():
                self.node.abort(frame)
            case f.Inspect(call):
                peer.send(f.Statistics(call, self.statistics()))
            case f.Probe():
                task = self.loop.create_task(self._probe(peer, frame))
                self._probing.add(task)
                task.add_done_callback(self._probing.discard)

    async def _probe(self, peer: Connection, frame: f.Probe) -> None:
        if frame.peer is None:
            seen = await asyncio.to_thread(self.node.environment, frame.pids)
            values = msgspec.to_builtins(seen)
        else:
            values = await self.node.probe(frame.peer, frame.bytes)
        peer.send(f.Statistics(frame.call, values))

    def _refuses(self, frame: f.Prefill | f.Decode) -> str | None:
        """Why this attempt cannot start here, if so."""
        wanted = "prefill" if isinstance(frame, f.Prefill) else "decode"
        partner = frame.decode if isinstance(frame, f.Prefill) else frame.prefill
        if frame.term < self.link.term:
            return "stale_term"
        if self._closing:
            return "draining"
        if wanted != self.role_name:
            return "wrong_role"
        if partner is not None and not self.node.knows(partner):
            return "unknown_peer"
        whole = len(frame.ids) + frame.sampling.max_tokens
        if not frame.ids or whole > self.node.engine.max_model_len:
            return "context_length_exceeded"
        return None

    def _send(self, gateway: str, frame: Any) -> None:
        if gateway in self._gateways:
            self._gateways[gateway].send(frame)

    # ---- Serve -----------------------------------------------------------------------------------

    async def lifetime(self, key: list, _target: str) -> None:
        """Returns when the stream is over: Serve counts it, and drains by it.

        At once if it is not here: Serve sends the call elsewhere when `_target` is gone.
        """
        request, attempt = key
        if not self._live((request, attempt)):
            return
        future = self._ended.setdefault((request, attempt), self.loop.create_future())
        await asyncio.shield(future)

    def _live(self, key: f.Key) -> bool:
        return self.role_name == "decode" and ticket_id(key) in self.node.role.jobs

    def _end(self, key: f.Key) -> None:
        future = self._ended.pop(key, None)
        if future and not future.done():
            future.set_result(None)

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
            "state": "draining" if self._closing else "ready",
            "rss_mib": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
            "cpu_s": round(time.process_time(), 2),
            **self.node.statistics(),
        }

    async def __del__(self) -> None:
        """Serve's shutdown hook: lets running jobs end, then stops the threads."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(AttributeError):  # start-up had not come that far
            for _ in range(int(DRAIN_S / 0.05)):
                if not self.node.role.jobs:
                    break
                await asyncio.sleep(0.05)
            self.node.stop()


def _is_dead(card: f.WorkerCard) -> bool:
    """Whether Ray says that a replica's process has ended, or its node; False if it cannot say."""
    name = "PrefillWorker" if card.home == "prefill" else "DecodeWorker"
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
