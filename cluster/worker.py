"""The worker process: one engine thread, one transfer thread, one role machine, under Serve.

The event loop owns the role machine. It feeds it gateway frames, engine outputs and ticket outcomes
and carries out what it decides: commands to the two threads, frames to gateways. Both deployments
(`PrefillWorker`, `DecodeWorker`) are this class; `home` is the deployment, `role` is state.
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
from ray import serve

from ..decode_worker import DecodeRole
from ..decode_worker.role import Over
from ..engine.commands import Add, Commit, Drop, Observe, Observed, Reserve
from ..engine.engine import Engine, EngineConfig
from ..engine.loop import EngineThread
from ..engine.scheduler import Limits
from ..engine.spec import fingerprint
from ..kv_transfer import PeerCard
from ..kv_transfer import commands as transfer
from ..kv_transfer.identity import block_hashes
from ..prefill_worker import PrefillRole
from ..protos import frames as f
from .config import ClusterConfig
from .link import RouterLink
from .router_service import node_host
from .transfers import Transfers
from .wire import Connection, Listener

log = logging.getLogger(__name__)

REPORT_S = 1.0
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
        self.engine = await asyncio.to_thread(self._load)
        self._salt = fingerprint(self._model)
        self.threads = EngineThread(self.engine, self._from_engine)
        host, settings = node_host(), self.config.kv_transfer
        corrupt = settings.faults.corrupt_writes if self.home == "prefill" else 0
        self.transfers = Transfers(self.name, self.engine, settings, host, corrupt, self._events)
        kv_cards = await self.transfers.start()
        self.role: PrefillRole | DecodeRole = (
            PrefillRole(self.name)
            if self.role_name == "prefill"
            else DecodeRole(self.name, self.engine.kv.layout.block_tokens)
        )
        self.threads.start()
        self.listener = Listener(self.config.secret, f.ToWorker, self._serve)
        address = await self.listener.start(host)
        self._card = f.WorkerCard(
            id=self.name,
            home=self.home,
            role=self.role_name,
            address=address,
            replica=self.replica,
            pid=os.getpid(),
            kv_card=msgspec.msgpack.encode(kv_cards),
            blocks=self.engine.scheduler.pool.total,
            block_tokens=self.engine.kv.layout.block_tokens,
            kept=self.engine.scheduler.kept,
        )
        self._tasks.append(self.loop.create_task(self._observe()))

    def _load(self) -> Engine:
        pool = self.config.pools.prefill if self.home == "prefill" else self.config.pools.decode
        settings, model = pool.engine, self.config.model
        limits = Limits(
            max_step_tokens=settings.max_step_tokens,
            max_running=settings.max_running,
            growth_tokens=settings.growth_tokens,
            itl_budget_s=settings.itl_budget_ms / 1e3 if settings.itl_budget_ms else None,
            draft_tokens=settings.draft_tokens,
        )
        config = EngineConfig(
            self._model,
            model.dtype,
            settings.kv_mib << 20,
            model.max_model_len,
            settings.threads,
            limits,
            tensor_parallel=pool.tensor_parallel,
            rank_program="diptych.cluster.rank",
        )

        def progress(note: str, fraction: float) -> None:
            frame = f.Loading(self.name, f"loading weights, {note}", fraction)
            self.loop.call_soon_threadsafe(self.link.send, frame)

        return Engine(config, progress)

    # ---- router ----------------------------------------------------------------------------------

    def _joined(self) -> None:
        """A router is there (or start-up is over): the next observation introduces us."""
        self._reports = 0

    async def _observe(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S if self._reports else REPORT_S / 10)
            if self.link.connected and not self._closing:
                self.threads.submit(Observe())

    def _observed(self, seen: Observed) -> None:
        """Join with everything on a new connection, then only what changed."""
        before, self._seen = self._seen, seen
        if self._reports == 0 or before is None:
            assert self._card is not None
            self.link.send(f.Join(self._card, self.link.term, seen.hashes))
            self._reports = 1
            return
        tokens = seen.prefill_tokens - before.prefill_tokens
        if tokens or seen.stored or seen.evicted or seen.free_blocks != before.free_blocks:
            seconds = seen.prefill_seconds - before.prefill_seconds
            report = f.Report(
                self._reports, seen.free_blocks, seen.stored, seen.evicted, tokens, seconds
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
                self.transfers.handle(transfer.AddPeer(card.id, peers))
        for name in self._known.keys() - cards.keys():
            self.transfers.handle(transfer.LosePeer(name))
        self._known = cards

    # ---- gateways --------------------------------------------------------------------------------

    async def _serve(self, peer: Connection, hello: f.Hello) -> None:
        before = self._gateways.get(peer.name)
        if before:  # it is back before its old connection's end was seen
            before.abort()
            self._do(self.role.gateway_gone(peer.name))
        self._gateways[peer.name] = peer
        async with contextlib.aclosing(peer.frames(self.config.silence_s)) as frames:
            async for frame in frames:
                self._frame(peer, frame)
        if self._gateways.get(peer.name) is peer:
            del self._gateways[peer.name]
            self._do(self.role.gateway_gone(peer.name))

    def _frame(self, peer: Connection, frame: Any) -> None:
        match frame:
            case f.Prefill() | f.Decode():
                reason = self._refuses(frame)
                if reason:
                    peer.send(f.Failed(frame.key, self.name, reason))
                    return
                size = self.engine.kv.layout.block_tokens
                hashes = block_hashes(frame.ids, self._salt, size)
                self._do(self.role.submit(peer.name, frame, hashes))
            case f.Abort():
                self._do(self.role.handle(frame))
            case f.Inspect(call):
                peer.send(f.Statistics(call, self.statistics()))

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
        if partner is not None and partner not in self._known:
            return "unknown_peer"
        whole = len(frame.ids) + frame.sampling.max_tokens
        if not frame.ids or whole > self.engine.max_model_len:
            return "context_length_exceeded"
        return None

    # ---- threads ---------------------------------------------------------------------------------

    def _from_engine(self, outputs: list) -> None:
        self.loop.call_soon_threadsafe(self._events, outputs)

    def _events(self, events: list) -> None:
        actions: list = []
        for event in events:
            if isinstance(event, Observed):
                self._observed(event)
            else:
                actions += self.role.handle(event)
        self._do(actions)

    def _do(self, actions: list) -> None:
        """Carries out what the role decided; one Step frame per gateway."""
        steps: dict[str, list[f.Tokens]] = {}
        for action in actions:
            match action:
                case f.Deliver(gateway, f.Tokens() as tokens):
                    steps.setdefault(gateway, []).append(tokens)
                case f.Deliver(gateway, frame):
                    if gateway in self._gateways:
                        self._gateways[gateway].send(frame)
                case Add() | Reserve() | Commit() | Drop():
                    self.threads.submit(action)
                case Over(key):
                    self._end(key)
                case ticket_command:
                    self.transfers.handle(ticket_command)
        for gateway, streams in steps.items():
            if gateway in self._gateways:
                self._gateways[gateway].send(f.Step(streams))

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
        return isinstance(self.role, DecodeRole) and f"{key[0]}#{key[1]}" in self.role.jobs

    def _end(self, key: f.Key) -> None:
        future = self._ended.pop(key, None)
        if future and not future.done():
            future.set_result(None)

    def check_health(self) -> None:
        """Serve's probe: a worker without its threads is dead."""
        if not self.threads.alive:
            raise RuntimeError("the engine thread ended: see this worker's log")
        if not self.transfers.alive:
            raise RuntimeError("a transfer thread, or another rank, ended: see this worker's log")

    def statistics(self) -> dict:
        transfer = self.transfers.statistics()
        engine = self.engine.statistics()
        engine["kv_blocks"]["quarantined"] = transfer.pop("quarantined")
        usage = Path("/proc/self/statm")
        pages = int(usage.read_text().split()[1]) if usage.exists() else 0
        return {
            "id": self.name,
            "pid": os.getpid(),
            "home": self.home,
            "role": self.role_name,
            "state": "draining" if self._closing else "ready",
            "jobs": len(self.role.jobs),
            "rss_mib": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
            "cpu_s": round(time.process_time(), 2),
            "engine": engine,
            "transfer": transfer,
        }

    async def __del__(self) -> None:
        """Serve's shutdown hook: lets running jobs end, then stops the threads."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(AttributeError):  # start-up had not come that far
            for _ in range(int(DRAIN_S / 0.05)):
                if not self.role.jobs:
                    break
                await asyncio.sleep(0.05)
            self.threads.stop()
            self.transfers.stop()
            self.engine.close()


async def _find_router() -> str:
    return await serve.get_deployment_handle("Router", "diptych").address.remote()
