"""A worker without Ray and without its connections: engine, transfers, tiers, and the role.

The event loop owns the role machine. It feeds it gateway frames, engine outputs and ticket outcomes
and carries out what it decides: commands to the threads, frames to gateways.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from ...decode_worker import DecodeRole
from ...decode_worker.role import Over
from ...engine.commands import (
    AddSequence,
    CachePrefix,
    CommitBlocks,
    DemoteBlocks,
    EngineObservation,
    LoadBlocks,
    ObserveEngine,
    ReleaseSequence,
    ReserveBlocks,
    StagePrefix,
)
from ...engine.engine import Engine, EngineConfig
from ...engine.loop import EngineThread
from ...engine.prefixes import Probed
from ...engine.scheduler import SchedulerLimits
from ...engine.spec import fingerprint
from ...kv_transfer import PeerCard, diagnosis
from ...kv_transfer import commands as transfer
from ...kv_transfer.identity import block_hashes, ticket_id_of
from ...prefill_worker import PrefillRole
from ...protos import frames as f
from ..config import STEP_SHARE, ClusterConfig, PoolConfig
from .cores import claim, spare, usable
from .tiering import Tiering
from .transfers import Transfers

Progress = Callable[[str, float], None]

OVER = 4096  #: ends of streams that are kept between two reports, at most
PROBE_S = 10.0  #: a probe that takes longer has failed
PROBE_SHARE = 4  #: of either pool's blocks, a probe takes one in so many at most


class Node:
    """`send(gateway, frame)` and `observed` are called on the loop that made it."""

    def __init__(
        self,
        name: str,
        role: str,
        config: ClusterConfig,
        model: Path,
        send: Callable[[str, object], None],
        observed: Callable[[EngineObservation], None],
    ) -> None:
        self.name, self.config, self._model = name, config, model
        self.home = self.role_name = role
        self.loads = 0  #: of weights, since the process began
        self._send, self._observed = send, observed
        self._loop = asyncio.get_running_loop()
        self._peers: dict[str, list[PeerCard]] = {}
        self._probe: asyncio.Future[Probed] | None = None
        self._probes = itertools.count()
        self.over: deque[f.AttemptKey] = deque(
            maxlen=OVER
        )  #: streams that ended, for the next report

    async def start(self, host: str, progress: Progress | None = None) -> list[PeerCard]:
        """Loads the model, opens the transports; returns what peers need to know."""
        self._claim = claim(self.pool.engine.threads)
        config = engine_config(self.config, self.pool, self._model)
        config = replace(config, cores=self._claim.cores)
        self.engine = await asyncio.to_thread(Engine, config, progress)
        self.loads += 1
        self._salt = fingerprint(self._model)
        self.threads = EngineThread(self.engine, self._from_thread)
        tiers, submit = self.config.kv_tiers, self.threads.submit
        self.tiering: Tiering | None = None
        if tiers.memory_mib:
            tell = lambda outcome: self._from_thread([outcome])  # noqa: E731
            self.tiering = Tiering(self.home, self.engine, tiers, tell, submit)
        settings = self.config.kv_transfer
        corrupt = settings.faults.corrupt_writes if self.role_name == "prefill" else 0
        cores = () if spare(self.config, len(usable())) else self._claim.cores
        self.transfers = Transfers(
            self.name, self.engine, settings, host, corrupt, self._events, cores
        )
        cards = await self.transfers.start()
        self.role = self._machine(self.home)
        self.threads.start()
        return cards

    @property
    def pool(self) -> PoolConfig:
        pools = self.config.pools
        return pools.prefill if self.home == "prefill" else pools.decode

    def _machine(self, role: str) -> PrefillRole | DecodeRole:
        kind = PrefillRole if role == "prefill" else DecodeRole
        return kind(self.name, self.engine.kv.layout.block_tokens)

    def become(self, role: str) -> None:
        """Another role, with the same engine, weights, blocks and transfers. No job may be left."""
        assert not self.role.jobs, "a role with jobs cannot be left"
        prefixes = self.role.prefixes  # peers may be fetching from here
        self.role, self.role_name = self._machine(role), role
        self.role.prefixes = prefixes

    # ---- from the cluster ------------------------------------------------------------------------

    def add_peer(self, worker: str, cards: list[PeerCard]) -> None:
        self._peers[worker] = cards
        self.transfers.handle(transfer.AddPeer(worker, cards))

    def lose_peer(self, worker: str, dead: bool = False) -> None:
        """`dead`: its process is known to be gone."""
        self._peers.pop(worker, None)
        self.transfers.handle(transfer.LosePeer(worker, dead))

    def knows(self, worker: str) -> bool:
        return worker in self._peers

    def _shares_names(self, worker: str) -> bool:
        """A peer whose blocks of the same name hold the same tokens."""
        size = self.engine.kv.layout.block_tokens
        return any(card.layout.block_tokens == size for card in self._peers.get(worker, ()))

    def submit(self, gateway: str, frame: f.StartPrefill | f.StartDecode) -> None:
        """A gateway's new attempt. A duplicate changes nothing."""
        size = self.engine.kv.layout.block_tokens
        hashes = block_hashes(frame.token_ids, self._salt, size)
        if frame.prefix_holder and not self._shares_names(frame.prefix_holder):
            frame = msgspec.structs.replace(frame, prefix_holder=None)
        deadline = time.monotonic() + frame.deadline_s if frame.deadline_s else 0.0
        tiers = self.tiering is not None
        submit: Callable[..., list] = self.role.submit  # the caller checked that frame fits role
        self._do(submit(gateway, frame, hashes, tiers, deadline))

    def abort(self, frame: f.CancelAttempt) -> None:
        self._do(self.role.handle(frame))

    def hand_over(self) -> int:
        """Tells every stream's gateway to go on elsewhere, and frees it; returns how many.

        What was computed stays cached, for whoever fetches it. Transfers that are nearly done end
        first: the worker is idle when `role.jobs` is empty. The caller refuses new attempts before.
        """
        actions = self.role.hand_over()
        self._do(actions)
        told = [action.frame for action in actions if isinstance(action, f.DeliverFrame)]
        return len(told)

    def gateway_gone(self, gateway: str) -> None:
        self._do(self.role.gateway_gone(gateway))

    def observe(self) -> None:
        """Answered by `observed`."""
        self.threads.submit(ObserveEngine())

    # ---- the loop --------------------------------------------------------------------------------

    def _from_thread(self, events: list) -> None:
        self._loop.call_soon_threadsafe(self._events, events)

    def _events(self, events: list) -> None:
        actions: list = []
        for event in events:
            if isinstance(event, EngineObservation):
                self._observed(event)
            elif isinstance(event, DemoteBlocks):
                assert self.tiering
                self.tiering.demote(event)
            else:
                actions += self.role.handle(event)
        self._do(actions)

    def _do(self, actions: list) -> None:
        """Carries out what the role decided; one Step frame per gateway."""
        steps: dict[str, list[f.AnswerTokens]] = {}
        for action in actions:
            match action:
                case f.DeliverFrame(gateway, f.AnswerTokens() as tokens):
                    steps.setdefault(gateway, []).append(tokens)
                case f.DeliverFrame(gateway, frame):
                    self._send(gateway, frame)
                case (
                    AddSequence()
                    | ReserveBlocks()
                    | CommitBlocks()
                    | ReleaseSequence()
                    | StagePrefix()
                    | CachePrefix()
                ):
                    self.threads.submit(action)
                case LoadBlocks() if self.tiering:
                    self.tiering.load(action)
                case Over(key):
                    self.over.append(key)
                case Probed():
                    if self._probe and not self._probe.done():
                        self._probe.set_result(action)
                case ticket_command:
                    self.transfers.handle(ticket_command)
        for gateway, streams in steps.items():
            self._send(gateway, f.EngineStepTokens(streams))

    # ---- for operators ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raises RuntimeError when a thread or a rank is dead: then the whole worker is."""
        if not self.threads.alive:
            raise RuntimeError("the engine thread ended: see this worker's log")
        if not self.transfers.alive:
            raise RuntimeError("a transfer thread, or another rank, ended: see this worker's log")

    def environment(self, pids: list[int]) -> diagnosis.Environment:
        """What this worker sees of its host. Takes a while: not for the event loop."""
        name = self.transfers.statistics()["transport"]
        return diagnosis.environment(self.name, name, self.engine.kv.size, pids)

    async def probe(self, peer: str, most_bytes: int) -> dict:
        """Moves blocks of no meaning here from `peer`, as any KV; says how that went.

        `over_tcp`: what share of them came over TCP connections of this process; None: unknown.
        Takes free blocks first, then those of the oldest cached prefixes.
        """
        tokens = self._probe_tokens(peer, most_bytes)
        if self._probe is not None or not tokens:
            return _probed(Probed(("", 0), 0, reason="busy" if tokens else "pool_too_small"))
        key = f"{self.name}\x1d{next(self._probes)}", 0  # no client's id has this character
        give_up = self.role.prefixes.forget
        late = self._loop.call_later(PROBE_S, lambda: self._do(give_up(key, "timeout")))
        self._probe = self._loop.create_future()
        try:
            before = await asyncio.to_thread(diagnosis.tcp_received)
            began = time.perf_counter()
            self._do(self.role.prefixes.probe(key, peer, tokens))
            probed = await self._probe
            wall = time.perf_counter() - began
            after = await asyncio.to_thread(diagnosis.tcp_received)
        finally:
            late.cancel()
            self._probe = None
            self._do(give_up(key))
        share = None
        if probed.tokens and before is not None and after is not None:
            mine = probed.tokens * self.engine.kv.layout.token_bytes
            share = min(1.0, max(0, after - before) / mine)
        return _probed(probed, probed.tokens * self._token_bytes, wall, share)

    @property
    def _token_bytes(self) -> int:
        """KV of one token in all ranks."""
        return self.engine.kv.layout.token_bytes * (1 + len(self.engine.followers))

    def _probe_tokens(self, peer: str, most_bytes: int) -> int:
        """How many tokens to move: whole blocks of both ends, and a bounded share of both pools."""
        pools = [(self.engine.kv.size, self.engine.kv.layout)]
        pools += [(card.size, card.layout) for card in self._peers.get(peer, [])[:1]]
        unit = max(layout.block_tokens for _, layout in pools)
        held = min(size // layout.token_bytes for size, layout in pools)
        tokens = min(max(most_bytes // self._token_bytes, unit), held // PROBE_SHARE)
        return tokens // unit * unit

    def statistics(self) -> dict:
        transfers, engine = self.transfers.statistics(), self.engine.statistics()
        engine["kv_blocks"]["quarantined"] = transfers.pop("quarantined")
        engine["kv_blocks"]["orphaned"] = self._orphaned()
        return {
            "jobs": len(self.role.jobs),
            "weight_loads": self.loads,
            "engine": engine,
            "transfer": transfers,
            "tiers": self.tiering.tiers.statistics() if self.tiering else None,
        }

    def streams(self) -> list[tuple[str, int, int]]:
        """(request, attempt, blocks) of all that decodes here, or is going to."""
        if not isinstance(self.role, DecodeRole):
            return []
        needs = self.engine.scheduler.needs
        return [(*job.seq.attempt_key, needs(job.seq)) for job in self.role.jobs.values()]

    def _orphaned(self) -> int:
        """Blocks that the engine holds for a request of which nobody here knows."""
        known, prefixes = self.role.jobs, self.role.prefixes
        scheduler, count = self.engine.scheduler, 0
        for (key, _), seq in list(scheduler.live.items()):
            count += 0 if ticket_id_of(key) in known else len(seq.blocks)
        for key, (blocks, _) in list(scheduler.staged.items()):
            count += 0 if prefixes.knows(key) else len(blocks)
        return count

    def stop(self) -> None:
        self.threads.stop()
        self.transfers.stop()
        if self.tiering:
            self.tiering.close()
        self.engine.close()
        self._claim.close()


def _probed(
    probed: Probed, size: int = 0, wall_s: float = 0.0, over_tcp: float | None = None
) -> dict:
    return {
        "bytes": size,
        "busy_s": round(probed.busy_s, 6),
        "wall_s": round(wall_s, 6),
        "over_tcp": over_tcp,
        "reason": probed.reason,
    }


def engine_config(config: ClusterConfig, pool: PoolConfig, model: Path) -> EngineConfig:
    settings = pool.engine
    limits = SchedulerLimits(
        block_tokens=config.model.block_tokens,
        max_step_tokens=settings.max_step_tokens,
        max_running=settings.max_running,
        growth_tokens=settings.growth_tokens,
        itl_budget_s=(settings.itl_budget_ms or STEP_SHARE * config.slo.itl_ms) / 1e3,
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
        shared_kv=config.kv_transfer.transport == "shm",
        rank_program="diptych.cluster.worker.rank",
        device=settings.device,
        attention=settings.attention,
        exact=settings.exact,
        kv_dtype=settings.kv_dtype,
        weights=settings.weights,
    )
