"""A worker without Ray and without its connections: engine, transfers, tiers, and the role.

The event loop owns the role machine. It feeds it gateway frames, engine outputs and ticket outcomes
and carries out what it decides: commands to the threads, frames to gateways.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..decode_worker import DecodeRole
from ..decode_worker.role import Over
from ..engine.commands import (
    Add,
    Adopt,
    Commit,
    Demote,
    Drop,
    Load,
    Observe,
    Observed,
    Reserve,
    Stage,
)
from ..engine.engine import Engine, EngineConfig
from ..engine.loop import EngineThread
from ..engine.scheduler import Limits
from ..engine.spec import fingerprint
from ..kv_transfer import PeerCard
from ..kv_transfer import commands as transfer
from ..kv_transfer.identity import block_hashes, ticket_id
from ..prefill_worker import PrefillRole
from ..protos import frames as f
from .config import ClusterConfig, PoolConfig
from .tiering import Tiering
from .transfers import Transfers

Progress = Callable[[str, float], None]


class Node:
    """`send(gateway, frame)`, `over(key)` and `observed` are called on the loop that made it."""

    def __init__(
        self,
        name: str,
        role: str,
        config: ClusterConfig,
        model: Path,
        send: Callable[[str, object], None],
        over: Callable[[f.Key], None],
        observed: Callable[[Observed], None],
    ) -> None:
        self.name, self.role_name, self.config, self._model = name, role, config, model
        self._send, self._over, self._observed = send, over, observed
        self._loop = asyncio.get_running_loop()
        self._peers: set[str] = set()

    async def start(self, host: str, progress: Progress | None = None) -> list[PeerCard]:
        """Loads the model, opens the transports; returns what peers need to know."""
        config = engine_config(self.config, self.pool, self._model)
        self.engine = await asyncio.to_thread(Engine, config, progress)
        self._salt = fingerprint(self._model)
        self.threads = EngineThread(self.engine, self._from_thread)
        tiers, submit = self.config.kv_tiers, self.threads.submit
        self.tiering: Tiering | None = None
        if tiers.memory_mib:
            tell = lambda outcome: self._from_thread([outcome])  # noqa: E731
            self.tiering = Tiering(self.role_name, self.engine, tiers, tell, submit)
        settings = self.config.kv_transfer
        corrupt = settings.faults.corrupt_writes if self.role_name == "prefill" else 0
        self.transfers = Transfers(self.name, self.engine, settings, host, corrupt, self._events)
        cards = await self.transfers.start()
        kind = PrefillRole if self.role_name == "prefill" else DecodeRole
        self.role: PrefillRole | DecodeRole = kind(self.name, self.engine.kv.layout.block_tokens)
        self.threads.start()
        return cards

    @property
    def pool(self) -> PoolConfig:
        pools = self.config.pools
        return pools.prefill if self.role_name == "prefill" else pools.decode

    # ---- from the cluster ------------------------------------------------------------------------

    def add_peer(self, worker: str, cards: list[PeerCard]) -> None:
        self._peers.add(worker)
        self.transfers.handle(transfer.AddPeer(worker, cards))

    def lose_peer(self, worker: str) -> None:
        self._peers.discard(worker)
        self.transfers.handle(transfer.LosePeer(worker))

    def knows(self, worker: str) -> bool:
        return worker in self._peers

    def submit(self, gateway: str, frame: f.Prefill | f.Decode) -> None:
        """A gateway's new attempt. A duplicate changes nothing."""
        size = self.engine.kv.layout.block_tokens
        hashes = block_hashes(frame.ids, self._salt, size)
        if frame.fetch and not self.knows(frame.fetch):
            frame = msgspec.structs.replace(frame, fetch=None)
        self._do(self.role.submit(gateway, frame, hashes, tiers=self.tiering is not None))

    def abort(self, frame: f.Abort) -> None:
        self._do(self.role.handle(frame))

    def gateway_gone(self, gateway: str) -> None:
        self._do(self.role.gateway_gone(gateway))

    def observe(self) -> None:
        """Answered by `observed`."""
        self.threads.submit(Observe())

    # ---- the loop --------------------------------------------------------------------------------

    def _from_thread(self, events: list) -> None:
        self._loop.call_soon_threadsafe(self._events, events)

    def _events(self, events: list) -> None:
        actions: list = []
        for event in events:
            if isinstance(event, Observed):
                self._observed(event)
            elif isinstance(event, Demote):
                assert self.tiering
                self.tiering.demote(event)
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
                    self._send(gateway, frame)
                case Add() | Reserve() | Commit() | Drop() | Stage() | Adopt():
                    self.threads.submit(action)
                case Load() if self.tiering:
                    self.tiering.load(action)
                case Over(key):
                    self._over(key)
                case ticket_command:
                    self.transfers.handle(ticket_command)
        for gateway, streams in steps.items():
            self._send(gateway, f.Step(streams))

    # ---- for operators ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raises RuntimeError when a thread or a rank is dead: then the whole worker is."""
        if not self.threads.alive:
            raise RuntimeError("the engine thread ended: see this worker's log")
        if not self.transfers.alive:
            raise RuntimeError("a transfer thread, or another rank, ended: see this worker's log")

    def statistics(self) -> dict:
        transfers, engine = self.transfers.statistics(), self.engine.statistics()
        engine["kv_blocks"]["quarantined"] = transfers.pop("quarantined")
        engine["kv_blocks"]["orphaned"] = self._orphaned()
        return {
            "jobs": len(self.role.jobs),
            "engine": engine,
            "transfer": transfers,
            "tiers": self.tiering.tiers.statistics() if self.tiering else None,
        }

    def _orphaned(self) -> int:
        """Blocks that the engine holds for a request of which nobody here knows."""
        known, prefixes = self.role.jobs, self.role.prefixes
        scheduler, count = self.engine.scheduler, 0
        for (key, _), seq in list(scheduler.live.items()):
            count += 0 if ticket_id(key) in known else len(seq.blocks)
        for key, (blocks, _) in list(scheduler.staged.items()):
            count += 0 if prefixes.knows(key) else len(blocks)
        return count

    def stop(self) -> None:
        self.threads.stop()
        self.transfers.stop()
        if self.tiering:
            self.tiering.close()
        self.engine.close()


def engine_config(config: ClusterConfig, pool: PoolConfig, model: Path) -> EngineConfig:
    settings = pool.engine
    limits = Limits(
        max_step_tokens=settings.max_step_tokens,
        max_running=settings.max_running,
        growth_tokens=settings.growth_tokens,
        itl_budget_s=settings.itl_budget_ms / 1e3 if settings.itl_budget_ms else None,
        draft_tokens=settings.draft_tokens,
    )
    return EngineConfig(
        model,
        config.model.dtype,
        settings.kv_mib << 20,
        config.model.max_model_len,
        settings.threads,
        limits,
        tensor_parallel=pool.tensor_parallel,
        rank_program="diptych.cluster.rank",
    )
