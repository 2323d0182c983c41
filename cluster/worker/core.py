"""A worker without Ray and without its connections: engine, transfers, tiers, and the role machine.

The event loop owns the role machine (`PrefillRole` or `DecodeRole`). It feeds the machine with
gateways' frames, the engine's outputs and the outcomes of transfers, and carries out what the
machine decides: commands to the threads that own the engine and the transfers, frames to gateways.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias, assert_never

import msgspec

from ...decode_worker import DecodeRole
from ...decode_worker.role import DecodeAction, DecodeAttemptEnded
from ...engine.adapters import NO_PROMPT_LOGPROBS
from ...engine.commands import (
    AddSequence,
    BlocksLoaded,
    BlocksReserved,
    CachePrefix,
    CommitBlocks,
    DemoteBlocks,
    EngineEvent,
    EngineObservation,
    LoadBlocks,
    ObserveEngine,
    PrefixStaged,
    ReleaseSequence,
    ReserveBlocks,
    StagePrefix,
)
from ...engine.engine import Engine
from ...engine.engine_like import EngineLike, OpenEngine, ReportProgress
from ...engine.loop import EngineThread
from ...engine.options import (
    ComputeSettings,
    EngineOptions,
    SchedulerLimits,
    SchedulerSettings,
)
from ...engine.prefixes import ProbeEnded
from ...engine.roles import failure_frame
from ...engine.sequence import BlocksFilled, SequenceOutput
from ...engine.spec import fingerprint
from ...kv_transfer import PeerCard, diagnosis
from ...kv_transfer.commands import (
    AddPeer,
    BlocksArrived,
    BlocksFreed,
    CancelTransfer,
    ExpectOffer,
    FinishPush,
    LosePeer,
    OfferBlocks,
    PrefixRequested,
    PushBlocks,
    PushEnded,
    TransferFailed,
    TransferOutcome,
)
from ...kv_transfer.identity import block_hashes, partition_salt, ticket_id_of
from ...kv_transfer.worker_transfers import RankService, WorkerTransfers
from ...prefill_worker import PrefillRole
from ...prefill_worker.role import PrefillAction
from ...protos import frames
from ..config import STEP_SHARE, ClusterConfig, EngineSettings, PoolConfig
from ..launch.checkpoint import find_adapters
from .cores import claim, spare, usable
from .grammars import GrammarQueue, StartFrame
from .reporting import TierLoads
from .tiering import Tiering
from .transfers import make_rank_services

#: What a role decides.
RoleAction: TypeAlias = PrefillAction | DecodeAction
#: What the threads of the engine, of the tiers and of the transfers report.
WorkerEvent: TypeAlias = EngineEvent | BlocksLoaded | TransferOutcome

ENDED_ATTEMPTS_LIMIT = 4096  #: ends of attempts kept between two reports; then the oldest go
PROBE_LIMIT_S = 10.0  #: a probe that takes longer has failed
PROBE_SHARE = 4  #: a probe takes at most one in so many of either pool's blocks
PROBE_MARK = "\x1d"  #: in the name of a probe's attempt; no client's id has this character


class WorkerCore:
    """One worker's engine, role, transfers and tiers, from `start` until `stop`.

    A role is the pure machine that decides for one kind of worker; this object carries out what
    the role decides.

    `name` is the worker's id, `pool` "prefill" or "decode", `model` the checkpoint's folder.
    `send(gateway, frame)` and `on_observation` are called on the loop that made the object.
    `open_engine` makes the engine when the core starts; None stands for the engine that the
    configuration names. This class treats every engine alike; only `engine_opener` and
    `engine_config` look at the engine's kind.
    """

    def __init__(
        self,
        name: str,
        pool: str,
        config: ClusterConfig,
        model: Path,
        *,
        send: Callable[[str, frames.FramesFromWorker], None],
        on_observation: Callable[[EngineObservation], None],
        on_attempt_ended: Callable[[frames.AttemptKey], None] = lambda _: None,
        open_engine: OpenEngine | None = None,
    ) -> None:
        self.name = name
        self.config = config
        self.pool = pool  #: the pool that the worker belongs to, whatever its role
        self.role_name = pool  #: the role that the worker has now; `become` changes it
        self.weight_loads = 0  #: since the process began; 1, as no change of role loads again
        #: decode attempts that ended since the last report; `WorkerProcess._report` empties it when
        #: it sends one
        self.ended_attempts: deque[frames.AttemptKey] = deque(maxlen=ENDED_ATTEMPTS_LIMIT)
        #: seconds in which a token's KV comes back from the tiers, measured by `start`; 0: no tiers
        self.load_token_s = 0.0
        self._model = model
        self._send = send
        self._on_observation = on_observation
        self._on_attempt_ended = on_attempt_ended
        self._open_engine = open_engine or engine_opener(config)
        self._loop = asyncio.get_running_loop()
        self._peers: dict[str, list[PeerCard]] = {}  #: by worker: a card for each of its ranks
        self._probe: asyncio.Future[ProbeEnded] | None = None  #: the one that runs, if any
        self._probe_numbers = itertools.count()
        self._stops = ExitStack()  #: stops what `start` has made so far, the last one first

    async def start(self, host: str, progress: ReportProgress | None = None) -> list[PeerCard]:
        """Load the model and open the transports; return what peers need to know, by rank.

        `host` is the address to listen on. `progress` is called from another thread while the
        weights load. Raises what the engine or a transport raises.
        """
        claimed = claim(self.pool_config.engine.threads)
        self._claimed_cores = claimed
        self._stops.callback(claimed.close)
        options = engine_config(self.config, self.pool_config, self._model)
        options = replace(options, cores=claimed.cores, core_states=claimed.states)
        self.engine: EngineLike = await asyncio.to_thread(self._open_engine, options, progress)
        self._stops.callback(self.engine.close)
        self.weight_loads += 1
        self._salt = fingerprint(self._model)
        self._grammars = GrammarQueue(self.engine, self._begin, self._refuse)
        self.engine_thread = EngineThread(self.engine, self._from_thread)
        self.tiering = self._open_tiers()
        if self.tiering:
            self._stops.callback(self.tiering.close)
            block_s = await asyncio.to_thread(self.tiering.measure_load_s)
            self.load_token_s = block_s / self.engine.kv_pool.layout.block_tokens
        self.transfers = WorkerTransfers(self._loop.call_soon_threadsafe, self._handle_events)
        self._stops.callback(self.transfers.stop)
        cards = await asyncio.to_thread(self.transfers.start, self._make_rank_services(host))
        self.role = self._make_role(self.pool)
        self._stops.callback(self.engine_thread.stop)
        self.engine_thread.start()
        return cards

    def _open_tiers(self) -> Tiering | None:
        settings = self.config.kv_tiers
        if not settings.memory_mib:
            return None

        def tell_role(loaded: BlocksLoaded) -> None:
            self._from_thread([loaded])

        return Tiering(
            self.pool,
            self.engine,
            settings,
            tell_role=tell_role,
            submit_to_engine=self.engine_thread.submit,
        )

    def tier_loads(self) -> TierLoads | None:
        """Return what has come back from the tiers since the start; None: there are none."""
        if self.tiering is None:
            return None
        block_tokens = self.engine.kv_pool.layout.block_tokens
        loads = self.tiering.tiers.loads_done
        return TierLoads(loads.blocks * block_tokens, loads.seconds)

    def _make_rank_services(self, host: str) -> list[RankService]:
        settings = self.config.kv_transfer
        # The sender damages what it writes; for tests of a live cluster.
        corrupt_writes = settings.faults.corrupt_writes if self.role_name == "prefill" else 0
        engines_leave_a_core = spare(self.config, len(usable()))
        return make_rank_services(
            self.name,
            self.engine,
            settings,
            host,
            secret=self.config.secret,
            corrupt_writes=corrupt_writes,
            on_outcome=self.transfers.take_outcome,
            # No cores: the transfers may run anywhere. Where the engines use every core, the
            # transfers keep to this engine's, so that their copies slow no other worker down.
            cores=() if engines_leave_a_core else self._claimed_cores.cores,
        )

    @property
    def pool_config(self) -> PoolConfig:
        """The settings of the worker's pool, which a change of role leaves as they are."""
        return self.config.pools.of(self.pool)

    def _make_role(self, role: str) -> PrefillRole | DecodeRole:
        machine = PrefillRole if role == "prefill" else DecodeRole
        block_tokens = self.engine.kv_pool.layout.block_tokens
        return machine(self.name, block_tokens, has_tiers=self.tiering is not None)

    def become(self, role: str) -> None:
        """Take another role with the same engine, weights, blocks and transfers.

        No attempt may be left. Prefixes that peers fetch from here go on.
        """
        assert not self.role.attempts, "a role with attempts cannot be left"
        prefixes = self.role.prefixes
        self.role = self._make_role(role)
        self.role_name = role
        self.role.prefixes = prefixes

    # ---- from the cluster ------------------------------------------------------------------------

    def add_peer(self, worker: str, cards: list[PeerCard]) -> None:
        """Learn how another worker's ranks are reached; before, no KV moves between the two."""
        self._peers[worker] = cards
        self.transfers.handle(AddPeer(worker, cards))

    def lose_peer(self, worker: str, process_dead: bool = False) -> None:
        """Forget a peer. `process_dead`: its process is known to be gone, and writes no more."""
        self._peers.pop(worker, None)
        self.transfers.handle(LosePeer(worker, process_dead))

    def knows(self, worker: str) -> bool:
        """Return whether this worker has been told how to reach that one (`add_peer`).

        The transfers may still refuse to move KV between the two, if their layouts differ for
        instance.
        """
        return worker in self._peers

    def _names_blocks_alike(self, worker: str) -> bool:
        """Return whether blocks of the same hash hold the same number of tokens here and there."""
        block_tokens = self.engine.kv_pool.layout.block_tokens
        cards = self._peers.get(worker, ())
        return any(card.layout.block_tokens == block_tokens for card in cards)

    def submit(self, gateway: str, frame: frames.StartPrefill | frames.StartDecode) -> None:
        """Begin a gateway's new attempt, which fits the role. A duplicate changes nothing.

        An attempt with a grammar begins when the grammar is compiled. One for an adapter that this
        worker lacks fails; another worker may have newer settings, and the adapter.
        """
        adapter = frame.sampling.adapter
        if adapter and adapter not in self.config.model.adapters:
            reason = f"unknown_adapter: {adapter!r} is not loaded here"
            self._refuse(gateway, frame.attempt_key, reason, final=False)
        elif self.config.model.adapters and frame.sampling.prompt_logprobs is not None:
            self._refuse(gateway, frame.attempt_key, NO_PROMPT_LOGPROBS, final=True)
        elif frame.sampling.grammar is None:
            self._begin(gateway, frame)
        else:
            self._grammars.begin_when_compiled(gateway, frame)

    def _begin(self, gateway: str, frame: StartFrame) -> None:
        """Give an attempt to the role, with the hashes that name its blocks on every worker."""
        block_tokens = self.engine.kv_pool.layout.block_tokens
        salt = partition_salt(self._salt, frame.cache_partition)
        hashes = block_hashes(frame.token_ids, salt, block_tokens)
        if frame.prefix_holder and not self._names_blocks_alike(frame.prefix_holder):
            # Hashes of blocks of another size mean nothing to the holder: nothing is fetched.
            frame = msgspec.structs.replace(frame, prefix_holder=None)
        # A frame has the seconds that are left, as clocks of hosts differ; 0: no deadline.
        deadline_s = time.monotonic() + frame.deadline_s if frame.deadline_s else 0.0
        actions: Collection[RoleAction]
        match frame:
            case frames.StartPrefill():
                assert isinstance(self.role, PrefillRole), "the caller checks the role"
                actions = self.role.submit(gateway, frame, hashes, deadline_s=deadline_s)
            case frames.StartDecode():
                assert isinstance(self.role, DecodeRole), "the caller checks the role"
                actions = self.role.submit(gateway, frame, hashes, deadline_s=deadline_s)
            case _:
                assert_never(frame)
        self._carry_out(actions)

    def _refuse(
        self, gateway: str, attempt_key: frames.AttemptKey, reason: str, final: bool
    ) -> None:
        """Tell the gateway that an attempt does not begin here, and why.

        Unless that is final, the gateway tries another worker. For a grammar that was not compiled
        in time it is final only if this grammar itself was being compiled for too long.
        """
        self._send(gateway, frames.AttemptFailed(attempt_key, self.name, reason, final))

    def cancel(self, frame: frames.CancelAttempt) -> None:
        """Give up an attempt, begun or waiting for its grammar. Unknown attempts are no error."""
        self._grammars.forget(frame.attempt_key)
        self._carry_out(self.role.handle(frame))

    def hand_over(self) -> int:
        """Have the attempts go on at other workers, before this one leaves or changes its role.

        Returns how many attempts were given up: the gateway of each is told, and its blocks are
        freed. What was computed stays cached, for whoever fetches it. Attempts that are over but
        for a transfer stay until its end: the worker is idle when `attempts` is 0. The role does
        not change here. The caller refuses new attempts before.
        """
        actions = self.role.hand_over()
        for attempt in self._grammars.forget_all():
            key = attempt.frame.attempt_key
            actions.append(failure_frame(attempt.gateway, key, self.name, frames.HANDOVER))
        self._carry_out(actions)
        # Each attempt that was given up has one frame to its gateway, which says so.
        return sum(isinstance(action, frames.DeliverFrame) for action in actions)

    def gateway_gone(self, gateway: str) -> None:
        """Cancel all attempts of a gateway whose connection has ended."""
        self._grammars.forget_gateway(gateway)
        self._carry_out(self.role.lose_gateway(gateway))

    def observe(self) -> None:
        """Ask the engine what it has done; the answer goes to `on_observation`."""
        self.engine_thread.submit(ObserveEngine())

    @property
    def attempts(self) -> int:
        """How many attempts are not over here, those included that wait for their grammar."""
        return len(self.role.attempts) + len(self._grammars)

    @property
    def open_tickets(self) -> int:
        """Transfers under way."""
        return sum(self.transfers.statistics()["tickets"].values())

    # ---- the loop --------------------------------------------------------------------------------

    def _from_thread(self, events: Collection[WorkerEvent]) -> None:
        """Have the loop handle the events of another thread."""
        self._loop.call_soon_threadsafe(self._handle_events, events)

    def _handle_events(self, events: Collection[WorkerEvent]) -> None:
        """Hand events on: most of them to the role, whose actions are carried out together."""
        actions: list[RoleAction] = []
        for event in events:
            match event:
                case EngineObservation():
                    self._on_observation(event)
                case DemoteBlocks():
                    assert self.tiering, "an engine without tiers demotes nothing"
                    self.tiering.demote(event)
                case SequenceOutput() | BlocksFilled() | BlocksReserved() | PrefixStaged():
                    actions += self.role.handle(event)
                case BlocksLoaded() | BlocksArrived() | TransferFailed() | BlocksFreed():
                    actions += self.role.handle(event)
                case PushEnded() | PrefixRequested():
                    actions += self.role.handle(event)
                case _:
                    assert_never(event)
        self._carry_out(actions)

    def _carry_out(self, actions: Collection[RoleAction]) -> None:
        """Do what the role decided; the tokens of one step reach each gateway in one frame.

        Whoever waits for the end of a decode attempt hears of it when its last frame is sent.
        """
        step_tokens: dict[str, list[frames.AnswerTokens]] = {}
        ended_attempts: list[frames.AttemptKey] = []
        for action in actions:
            match action:
                case frames.DeliverFrame(gateway, frames.AnswerTokens() as tokens):
                    step_tokens.setdefault(gateway, []).append(tokens)
                case frames.DeliverFrame(gateway, frame):
                    self._send(gateway, frame)
                case AddSequence() | ReserveBlocks() | CommitBlocks() | ReleaseSequence():
                    self.engine_thread.submit(action)
                case StagePrefix() | CachePrefix():
                    self.engine_thread.submit(action)
                case LoadBlocks():
                    assert self.tiering, "a role without tiers loads nothing from them"
                    self.tiering.load(action)
                case DecodeAttemptEnded(attempt_key):
                    ended_attempts.append(attempt_key)
                case ProbeEnded():
                    # Nobody waits any more if the caller of `probe` was cancelled.
                    if self._probe and not self._probe.done():
                        self._probe.set_result(action)
                case OfferBlocks() | ExpectOffer() | PushBlocks() | FinishPush() | CancelTransfer():
                    self.transfers.handle(action)
                case _:
                    assert_never(action)
        for gateway, answers in step_tokens.items():
            self._send(gateway, frames.EngineStepTokens(answers))
        for attempt_key in ended_attempts:
            self.ended_attempts.append(attempt_key)
            self._on_attempt_ended(attempt_key)

    # ---- for operators ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise RuntimeError if the worker cannot go on.

        That is so if its engine's thread, a transfer thread, or another rank has ended. Without the
        tiers' thread the worker goes on.
        """
        if not self.engine_thread.alive:
            raise RuntimeError("the engine thread ended: see this worker's log")
        if not self.transfers.alive:
            raise RuntimeError("a transfer thread, or another rank, ended: see this worker's log")

    def environment(self, pids: list[int]) -> diagnosis.HostEnvironment:
        """Return what this worker sees of its host. Takes half a second: not for the event loop.

        `pids` are processes whose memory the worker tries to reach (`process_vm_readv`).
        """
        transport = self.transfers.statistics()["transport"]
        pool = self.engine.kv_pool
        return diagnosis.observe_host(
            self.name, transport, pool.size, pids, pool_memory=pool.memory
        )

    async def probe(self, peer: str, size_limit_bytes: int) -> dict[str, Any]:
        """Fetch blocks of no meaning from `peer`, the way KV is fetched, and report how that went.

        The blocks are written to free blocks of this worker first, then to those of the oldest
        cached prefixes. They have about `size_limit_bytes` bytes, one block at least, and at most
        `1 / PROBE_SHARE` of either pool. The answer is `ProbeResult.values`. Its `reason` is "busy"
        while another probe runs here, "pool_too_small" where not one block fits that share, and
        "timeout" after `PROBE_LIMIT_S`.
        """
        if self._probe is not None:
            return ProbeResult(reason="busy").values()
        tokens = self._probe_tokens(peer, size_limit_bytes)
        if not tokens:
            return ProbeResult(reason="pool_too_small").values()
        attempt_key = (f"{self.name}{PROBE_MARK}{next(self._probe_numbers)}", 0)

        def give_up() -> None:
            self._carry_out(self.role.prefixes.cancel(attempt_key, "timeout"))

        timer = self._loop.call_later(PROBE_LIMIT_S, give_up)
        self._probe = self._loop.create_future()
        try:
            tcp_bytes_before = await asyncio.to_thread(diagnosis.tcp_received)
            began = time.perf_counter()
            self._carry_out(self.role.prefixes.begin_probe(attempt_key, peer, tokens))
            probed = await self._probe
            wall_s = time.perf_counter() - began
            tcp_bytes_after = await asyncio.to_thread(diagnosis.tcp_received)
        finally:
            timer.cancel()
            self._probe = None
            # Frees the blocks if the caller was cancelled; after the probe's end it does nothing.
            self._carry_out(self.role.prefixes.cancel(attempt_key))
        result = ProbeResult(
            bytes=probed.tokens * self._token_bytes,
            busy_s=probed.busy_s,
            wall_s=wall_s,
            reason=self._explain_probe(probed.reason, peer),
        )
        if probed.tokens and tcp_bytes_before is not None and tcp_bytes_after is not None:
            # Only rank 0 runs in this process: other ranks' bytes do not pass its connections.
            received_here = probed.tokens * self.engine.kv_pool.layout.token_bytes
            tcp_bytes = max(0, tcp_bytes_after - tcp_bytes_before)
            result.over_tcp = min(1.0, tcp_bytes / received_here)
        return result.values()

    @property
    def _token_bytes(self) -> int:
        """KV of one token in all ranks, in bytes."""
        return self.engine.kv_pool.layout.token_bytes * (1 + len(self.engine.rank_sockets))

    def _probe_tokens(self, peer: str, size_limit_bytes: int) -> int:
        """Return how many tokens to move: whole blocks of both ends, a share of either pool."""
        pools = [(self.engine.kv_pool.size, self.engine.kv_pool.layout)]
        pools += [(card.size, card.layout) for card in self._peers.get(peer, [])[:1]]
        # Blocks have 64, 128 or 256 tokens: a multiple of the larger fits both ends.
        unit = max(layout.block_tokens for _, layout in pools)
        tokens_of_smaller_pool = min(size // layout.token_bytes for size, layout in pools)
        tokens = max(size_limit_bytes // self._token_bytes, unit)
        tokens = min(tokens, tokens_of_smaller_pool // PROBE_SHARE)
        return tokens // unit * unit

    def statistics(self) -> dict[str, Any]:
        """Return a snapshot of the attempts, the engine, the transfers and the tiers."""
        transfers = self.transfers.statistics()
        engine = self.engine.statistics()
        engine["kv_blocks"]["quarantined"] = transfers.pop("quarantined")
        engine["kv_blocks"]["orphaned"] = self._orphaned_blocks()
        return {
            "jobs": self.attempts,
            "weight_loads": self.weight_loads,
            "engine": engine,
            "transfer": transfers,
            "tiers": self.tiering.tiers.statistics() if self.tiering else None,
        }

    def decode_reservations(self) -> list[tuple[str, int, int]]:
        """Return (request id, attempt number, blocks) of each attempt that the decode role has.

        Those that wait for their KV are among them; those that wait for their grammar are not yet.
        A prefill role has none. A router that the worker joins learns from them how full the
        worker is.
        """
        if not isinstance(self.role, DecodeRole):
            return []
        return [
            (*attempt.sequence.attempt_key, self.engine.required_blocks(attempt.sequence))
            for attempt in self.role.attempts.values()
        ]

    def _orphaned_blocks(self) -> int:
        """Count blocks that the engine holds for an attempt of which nobody here knows.

        They are a leak, unless the release is on its way to the engine's thread.
        """
        return sum(
            block_count
            for attempt_key, block_count in self.engine.block_holders()
            if ticket_id_of(attempt_key) not in self.role.attempts
            and not self.role.prefixes.has_staged(attempt_key)
        )

    def _explain_probe(self, reason: str, peer: str) -> str:
        """Return why a probe failed: why the peer is refused, or cannot be reached, if it is so."""
        if reason != "peer_lost":
            return reason
        statistics = self.transfers.statistics()
        for agent, mismatch in statistics["refused_peers"].items():
            if agent.startswith(f"{peer}:"):
                return f"{peer} is refused, as it has another {mismatch}"
        for agent, error in statistics["unreachable_peers"].items():
            if agent.startswith(f"{peer}:"):
                return f"{peer} could not be reached at the last try: {error}"
        return reason

    def stop(self) -> None:
        """End the threads and give back the cores. Takes seconds at most.

        After a `start` that failed or has not ended, this stops what was made until then.
        """
        self._stops.close()


@dataclass(slots=True)
class ProbeResult:
    """What `diptych doctor` hears of one probe."""

    reason: str  #: why nothing moved, or ""
    bytes: int = 0  #: that came, in all ranks
    busy_s: float = 0.0  #: seconds with a write under way
    wall_s: float = 0.0  #: seconds from the request to the last checksum
    #: of rank 0's bytes, the share that came over TCP connections of this process, as the kernel
    #: counts them; None if it is not known
    over_tcp: float | None = None

    def values(self) -> dict[str, Any]:
        """Return the result as `diptych doctor` reads it (`diagnosis.PairMeasurement`)."""
        return {
            "bytes": self.bytes,
            "busy_s": round(self.busy_s, 6),
            "wall_s": round(self.wall_s, 6),
            "over_tcp": self.over_tcp,
            "reason": self.reason,
        }


def engine_opener(config: ClusterConfig) -> OpenEngine:
    """Return what opens the engine that the configuration names."""
    if config.engine.kind == "vllm":
        from ...engine.vllm.engine import open_vllm

        return open_vllm
    return Engine


def engine_config(config: ClusterConfig, pool: PoolConfig, model: Path) -> EngineOptions:
    """Return the options of `pool`'s engines by the configuration; cores are not chosen here."""
    settings = pool.engine
    limits = SchedulerLimits(
        block_tokens=config.model.block_tokens,
        itl_budget_s=_itl_budget_s(config, settings),
        **_settings_of(SchedulerSettings, settings),
    )
    return EngineOptions(
        model_folder=model,
        dtype=config.model.dtype,
        kv_bytes=settings.kv_bytes,
        max_model_len=config.model.max_model_len,
        limits=limits,
        tensor_parallel=pool.tensor_parallel,
        # The `shm` transport writes into peers' pools, so these must be shared memory.
        shared_kv=config.kv_transfer.transport == "shm",
        # Ranks above 0 have transfers of their own, so they run more than the engine's follower.
        rank_program="diptych.cluster.worker.rank",
        vllm_arguments=config.engine.vllm,
        adapters=find_adapters(config),
        **_settings_of(ComputeSettings, settings),
    )


def _itl_budget_s(config: ClusterConfig, settings: EngineSettings) -> float | None:
    """Return how long a step that decodes may take; None: vLLM plans its steps without a limit."""
    if config.engine.kind == "vllm":
        return None
    return (settings.itl_budget_ms or STEP_SHARE * config.slo.itl_ms) / 1e3


def _settings_of(
    struct: type[SchedulerSettings] | type[ComputeSettings], settings: EngineSettings
) -> dict[str, Any]:
    """Return the settings that are fields of `struct`, by name: nobody lists them twice."""
    return {field.name: getattr(settings, field.name) for field in fields(struct)}
