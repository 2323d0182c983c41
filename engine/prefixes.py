"""Prefixes that are not computed here but fetched, and prefixes that are served to a peer.

Pure: it does nothing itself, but takes events and returns what is to be done.

A prefix is the beginning of a prompt, in whole blocks, whose KV somebody has cached: this pool, the
tiers below it (host memory, disk), or the pool of another worker, a peer. A ticket is one transfer
of KV between two workers: the receiver offers blocks, the sender pushes into them.

Life of a fetch, before a prompt is computed:
    staging   `StagePrefix` asks the engine for blocks: those of the prefix that the pool has, which are
              pinned, and new ones for what a tier has or, by the router's word, the peer. All or none:
              `PrefixStaged` has no blocks if the pool is too full, or nothing can come.
    coming    `LoadBlocks` from the tiers if they hold a part. `OfferBlocks` to the peer for what is
              missing then: a ticket like any other. What the tiers brought is cached before that,
              and the prefix is staged again, so that a failed ticket takes nothing of it away.
    over      What came is cached by `CachePrefix`, where `AddSequence` finds it, and all staged blocks
              are released. If the transfer failed, the prompt is computed at once; its blocks wait until
              no write can land.

Serving a peer: after `PrefixRequested`, what the pool holds is pinned (`StagePrefix` with `pin_only`),
the blocks are pushed, and `PushEnded` releases them. Where there are tiers, what they hold behind that is
loaded into the pool and cached first. The peer waits meanwhile: it has offered its blocks already. Where
nothing is held, the ticket is opened (`ExpectOffer` with 0 tokens) to be cancelled: so the peer hears it.

A *probe* moves blocks of no meaning in the same way, to see whether and how fast they move: both
ends stage blocks and release them afterwards, and nothing is cached.

Keys: a fetch, or a probe, has its attempt's key with `FETCH_MARK` at the end of the request id.
The engine stages its blocks under that key, and its ticket is named after it. The peer that serves
it adds `SERVE_MARK` for the blocks that it stages: its own engine may know the other key already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, assert_never

from ..kv_transfer.commands import (
    BlocksArrived,
    BlocksFreed,
    CancelTransfer,
    ExpectOffer,
    FinishPush,
    OfferBlocks,
    PrefixRequested,
    PushBlocks,
    PushEnded,
    TicketCommand,
    TransferFailed,
    TransferOutcome,
)
from ..kv_transfer.identity import attempt_key_of, ticket_id_of
from ..protos.frames import AttemptKey
from .commands import (
    AddSequence,
    BlocksLoaded,
    CachePrefix,
    LoadBlocks,
    PrefixStaged,
    ReleaseSequence,
    StagePrefix,
)
from .sequence import Sequence

FETCH_MARK = "\x1e"  #: Ends the request id of the key of a fetch; no client's id has it.
#: Ends the request id of the key of blocks that are served; no client's id has it.
SERVE_MARK = "\x1f"
#: Begins the 9 bytes that stand for the hashes in a probe's ticket; a content hash has 16.
PROBE_PREFIX = b"probe"


@dataclass(slots=True)
class PrefixFetch:
    """A prompt's prefix on its way here; after a failure, until its blocks are free."""

    sequence: Sequence | None  #: That waits for the prefix; None: it waits no more.
    hashes: list[bytes]  #: Content hashes of all of the prefix's blocks, from its beginning.
    peer: str | None  #: The worker that is said to hold the prefix; None: only tiers are.
    #: The tokens, the partition and the adapter of each `StagePrefix` of this fetch.
    token_ids: tuple[int, ...]
    cache_partition: bytes
    adapter: str
    tiers_asked: bool = False  #: `LoadBlocks` was returned; it is not asked for again.


@dataclass(slots=True)
class ServedPrefix:
    """A prefix that is served to a peer, or blocks for its probe."""

    peer: str  #: The worker that asked.
    hashes: list[bytes]  #: Content hashes of the prefix's blocks; empty for a probe.
    asks_tiers: bool  #: The tiers are still to be asked for what the pool lacks.
    loading: bool = False  #: The tiers write into its blocks.
    #: The push has ended while the tiers were loading: its blocks are released behind the load.
    over: bool = False


@dataclass(frozen=True, slots=True)
class ProbeEnded:
    """A probe is over: blocks for `tokens` tokens came, or none, and the reason."""

    attempt_key: AttemptKey
    tokens: int
    busy_s: float = 0.0  #: Seconds in which at least one write of this ticket was under way.
    #: Why none came; empty if they did. It is that of the failed ticket or of `cancel`, or says who had
    #: no blocks to spare: `pool_full` is this worker, `peer_pool_full` the other.
    reason: str = ""


@dataclass(slots=True)
class RunningProbe:
    """A probe, from its beginning until its blocks are free."""

    attempt_key: AttemptKey
    peer: str  #: The worker that the blocks come from.
    tokens: int  #: So many tokens' KV has the size of what is moved.
    reason: str = ""  #: Not empty once it has failed: then `ProbeEnded` was returned.


#: What `PrefixExchange.handle` takes, and what its methods return for the worker to carry out.
PrefixEvent: TypeAlias = PrefixStaged | BlocksLoaded | TransferOutcome
PrefixAction: TypeAlias = (
    AddSequence
    | StagePrefix
    | CachePrefix
    | ReleaseSequence
    | LoadBlocks
    | TicketCommand
    | ProbeEnded
)


class PrefixExchange:
    """All fetches, probes and served prefixes of one worker.

    `begin_sequence` takes a sequence; its `AddSequence` is returned sooner or later, unless the
    sequence is cancelled. `begin_probe` takes a key; its `ProbeEnded` is returned sooner or later,
    and at once by `cancel`.
    """

    def __init__(self, block_tokens: int, has_tiers: bool = False) -> None:
        self.block_tokens = block_tokens  #: Tokens of a block in this worker's pool.
        self.has_tiers = has_tiers  #: There are tiers below the pool.
        self.fetches: dict[AttemptKey, PrefixFetch] = {}  #: By the key of the fetch.
        self.probes: dict[AttemptKey, RunningProbe] = {}  #: By the key of the fetch.
        #: By the key of the peer's fetch or probe.
        self.served: dict[AttemptKey, ServedPrefix] = {}

    def begin_sequence(self, sequence: Sequence, peer: str | None) -> list[PrefixAction]:
        """Fetches the sequence's prefix before the sequence is added.

        `peer` may hold more of the prefix than this pool; None: no other worker is known to.
        """
        hashes = sequence.block_hashes[: sequence.cacheable_tokens // self.block_tokens]
        if not hashes or not (peer or self.has_tiers):
            return [AddSequence(sequence)]
        key = _marked(sequence.attempt_key, FETCH_MARK)
        token_ids = tuple(sequence.token_ids[: len(hashes) * self.block_tokens])
        fetch = PrefixFetch(
            sequence,
            hashes,
            peer,
            token_ids,
            sequence.cache_partition,
            sequence.sampling.adapter,
        )
        self.fetches[key] = fetch
        return [_stage_fetch(key, fetch)]

    def begin_probe(self, attempt_key: AttemptKey, peer: str, tokens: int) -> list[PrefixAction]:
        """Moves blocks for `tokens` tokens here from `peer`.

        `tokens` must be a multiple of this worker's block size, and of the peer's.
        """
        key = _marked(attempt_key, FETCH_MARK)
        self.probes[key] = RunningProbe(attempt_key, peer, tokens)
        return [StagePrefix(key, [], peer_blocks=tokens // self.block_tokens)]

    def cancel(self, attempt_key: AttemptKey, reason: str = "aborted") -> list[PrefixAction]:
        """Gives up a sequence's fetch, or a probe. Its blocks stay until no write can land.

        A probe ends with `reason`. Of a fetch nothing is reported; if its sequence was not added yet,
        it never is: whoever cancels it knows.
        """
        key = _marked(attempt_key, FETCH_MARK)
        probe = self.probes.get(key)
        if probe is not None and not probe.reason:
            probe.reason = reason
            return [
                CancelTransfer(ticket_id_of(key), reason),
                ProbeEnded(attempt_key, 0, reason=reason),
            ]
        fetch = self.fetches.get(key)
        if fetch is None:
            return []
        fetch.sequence = None
        return [CancelTransfer(ticket_id_of(key), "aborted")]

    def has_staged(self, key: AttemptKey) -> bool:
        """Returns whether blocks staged under this key belong to a fetch, a probe or a peer."""
        return key in self.fetches or key in self.probes or _unmarked(key) in self.served

    def handle(self, event: PrefixEvent) -> list[PrefixAction]:
        """Takes answers of the engine and the tiers, and outcomes of prefix tickets."""
        match event:
            case PrefixRequested():
                return self._stage_for_peer(event)
            case PrefixStaged():
                return self._handle_staged(event)
            case BlocksLoaded(key, block_count):
                if key[0].endswith(SERVE_MARK):
                    return self._push_loaded(_unmarked(key), block_count)
                return self._handle_loaded(key, block_count)
            case BlocksArrived(ticket_id, _, tokens, busy_s):
                key = attempt_key_of(ticket_id)
                if key in self.probes:
                    return self._end_probe(key, tokens=tokens, busy_s=busy_s)
                return self._end_fetch(key, tokens // self.block_tokens)
            case TransferFailed(ticket_id, reason):
                return self._handle_failure(attempt_key_of(ticket_id), reason)
            case BlocksFreed(ticket_id):
                key = attempt_key_of(ticket_id)
                if key in self.probes:
                    return self._end_probe(key)
                del self.fetches[key]
                return [ReleaseSequence(key)]
            case PushEnded(ticket_id):
                return self._end_serving(attempt_key_of(ticket_id))
            case _:
                assert_never(event)

    def _handle_staged(self, staged: PrefixStaged) -> list[PrefixAction]:
        """Goes on with a fetch, a probe or a served prefix, whose blocks are staged now."""
        key = staged.attempt_key
        if key[0].endswith(SERVE_MARK):
            return self._serve(_unmarked(key), staged)
        if key in self.probes:
            return self._offer_probe(key, staged.blocks)
        return self._fetch(key, staged)

    # ---- fetches ---------------------------------------------------------------------------------

    def _fetch(self, key: AttemptKey, staged: PrefixStaged) -> list[PrefixAction]:
        """Loads what the tiers hold of the staged blocks, else asks the peer for what is missing."""
        fetch = self.fetches[key]
        if fetch.sequence is None or not staged.blocks:
            return self._end_fetch(key, 0)
        # Without a peer, blocks were staged for the tiers' part alone. A peer may hold nothing of
        # the prefix any more, so what the own tiers hold is not asked of it.
        if fetch.peer is None or (staged.tier_blocks and not fetch.tiers_asked):
            fetch.tiers_asked = True
            return [_load_from_tiers(staged, fetch.hashes)]
        offer = OfferBlocks(
            ticket_id_of(key),
            fetch.peer,
            staged.blocks,
            tokens=len(staged.blocks) * self.block_tokens,
            held_tokens=staged.held_blocks * self.block_tokens,
            hashes=tuple(fetch.hashes),
        )
        return [offer]

    def _handle_loaded(self, key: AttemptKey, block_count: int) -> list[PrefixAction]:
        """Ends a fetch that has all or knows no peer; else goes on to the peer with the rest."""
        fetch = self.fetches[key]
        is_whole = block_count >= len(fetch.hashes)
        if fetch.sequence is None or fetch.peer is None or is_whole:
            return self._end_fetch(key, block_count)
        return [CachePrefix(key, block_count), _stage_fetch(key, fetch)]

    def _end_fetch(self, key: AttemptKey, block_count: int) -> list[PrefixAction]:
        """Caches the first `block_count` staged blocks, which hold the prefix; adds the sequence."""
        fetch = self.fetches.pop(key)
        actions: list[PrefixAction] = [CachePrefix(key, block_count)]
        if fetch.sequence is not None:
            actions.append(AddSequence(fetch.sequence))
        return actions

    def _handle_failure(self, key: AttemptKey, reason: str) -> list[PrefixAction]:
        """Goes on without what a failed transfer was to bring. Its blocks are not free yet.

        A fetch's sequence is added, and a probe's end is reported.
        """
        probe = self.probes.get(key)
        if probe is not None:
            was_reported = bool(probe.reason)
            probe.reason = reason
            if was_reported:
                return []
            # a peer that has no blocks to spare for a probe says what it says of a prefix
            reported = "peer_pool_full" if reason == "not_held" else reason
            return [ProbeEnded(probe.attempt_key, 0, reason=reported)]
        # the fetch itself stays until `BlocksFreed`
        fetch = self.fetches[key]
        sequence = fetch.sequence
        fetch.sequence = None
        return [AddSequence(sequence)] if sequence is not None else []

    # ---- probes ----------------------------------------------------------------------------------

    def _offer_probe(self, key: AttemptKey, blocks: list[int]) -> list[PrefixAction]:
        """Offers a probe's staged blocks to its peer; ends a probe without any, or a cancelled one."""
        probe = self.probes[key]
        if probe.reason or not blocks:
            return self._end_probe(key, reason="pool_full")
        offer = OfferBlocks(
            ticket_id_of(key),
            probe.peer,
            blocks,
            tokens=probe.tokens,
            hashes=(_probe_hash(probe.tokens),),
        )
        return [offer]

    def _end_probe(
        self, key: AttemptKey, *, tokens: int = 0, busy_s: float = 0.0, reason: str = ""
    ) -> list[PrefixAction]:
        """Releases a probe's blocks, and reports its end unless its failure was reported."""
        probe = self.probes.pop(key)
        actions: list[PrefixAction] = [ReleaseSequence(key)]
        if not probe.reason:
            actions.append(ProbeEnded(probe.attempt_key, tokens, busy_s, reason))
        return actions

    # ---- serving a peer --------------------------------------------------------------------------

    def _stage_for_peer(self, request: PrefixRequested) -> list[PrefixAction]:
        """Stages what a peer asks for: the prefix as far as it is here, or blocks for a probe."""
        key = attempt_key_of(request.ticket_id)
        probe_tokens = _probe_tokens(request.hashes)
        served_key = _marked(key, SERVE_MARK)
        if probe_tokens is not None:
            self.served[key] = ServedPrefix(request.peer, [], asks_tiers=False)
            return [StagePrefix(served_key, [], peer_blocks=probe_tokens // self.block_tokens)]
        served = ServedPrefix(request.peer, list(request.hashes), asks_tiers=self.has_tiers)
        self.served[key] = served
        if served.asks_tiers:
            return [StagePrefix(served_key, served.hashes)]
        return [_stage_served(served_key, served)]

    def _serve(self, key: AttemptKey, staged: PrefixStaged) -> list[PrefixAction]:
        """Pushes the staged blocks; before that, once, loads what the tiers hold behind them.

        What is pinned has its KV already, so that all can be pushed at once. Without room in the pool for
        what the tiers hold, the peer gets what the pool has.
        """
        served = self.served.get(key)
        if served is None:
            return []  # it has ended, and its blocks are released
        if served.asks_tiers:
            served.asks_tiers = False
            if staged.blocks and staged.tier_blocks:
                served.loading = True
                return [_load_from_tiers(staged, served.hashes)]
            return [_stage_served(staged.attempt_key, served)]
        blocks = staged.blocks
        ticket_id = ticket_id_of(key)
        tokens = len(blocks) * self.block_tokens
        expect = ExpectOffer(ticket_id, served.peer, tokens)
        if not blocks:
            return [expect, CancelTransfer(ticket_id, "not_held")]
        return [expect, PushBlocks(ticket_id, 0, blocks), FinishPush(ticket_id, b"")]

    def _push_loaded(self, key: AttemptKey, block_count: int) -> list[PrefixAction]:
        """Caches what the tiers have brought for a peer, and stages what is to be pushed."""
        served_key = _marked(key, SERVE_MARK)
        served = self.served[key]
        served.loading = False
        if served.over:
            del self.served[key]
            return [CachePrefix(served_key, block_count)]  # which releases all of its blocks
        return [CachePrefix(served_key, block_count), _stage_served(served_key, served)]

    def _end_serving(self, key: AttemptKey) -> list[PrefixAction]:
        """Releases what was staged for a peer, once nothing writes into it."""
        served = self.served.get(key)
        if served is not None and served.loading:
            served.over = True
            return []
        self.served.pop(key, None)
        return [ReleaseSequence(_marked(key, SERVE_MARK))]


def is_prefix_ticket(ticket_id: str) -> bool:
    """Returns whether a ticket moves a prefix or a probe, and not the KV of an attempt."""
    request_id = ticket_id.rpartition("#")[0]
    return request_id.endswith((FETCH_MARK, SERVE_MARK))


def _stage_fetch(key: AttemptKey, fetch: PrefixFetch) -> StagePrefix:
    """Returns the command that asks the engine for a fetch's blocks."""
    return StagePrefix(
        key,
        fetch.hashes,
        peer_blocks=len(fetch.hashes) if fetch.peer else 0,
        token_ids=fetch.token_ids,
        cache_partition=fetch.cache_partition,
        adapter=fetch.adapter,
    )


def _stage_served(key: AttemptKey, served: ServedPrefix) -> StagePrefix:
    """Returns the command that pins what the pool holds of a prefix for a peer."""
    return StagePrefix(key, served.hashes, pin_only=True)


def _load_from_tiers(staged: PrefixStaged, hashes: list[bytes]) -> LoadBlocks:
    """Returns the command that loads what the tiers hold of a prefix with these hashes."""
    held_blocks = staged.held_blocks
    tier_end = held_blocks + staged.tier_blocks
    blocks = staged.blocks[held_blocks:tier_end]
    return LoadBlocks(staged.attempt_key, held_blocks, hashes[held_blocks:tier_end], blocks)


def _probe_hash(tokens: int) -> bytes:
    """Returns what stands for hashes in a ticket that wants blocks for `tokens` tokens.

    Such a ticket takes blocks of any content.
    """
    return PROBE_PREFIX + tokens.to_bytes(4)


def _probe_tokens(hashes: tuple[bytes, ...]) -> int | None:
    """Returns how many tokens a probe wants; None if the hashes are those of a prefix."""
    first = hashes[0]
    if len(first) != len(_probe_hash(0)) or not first.startswith(PROBE_PREFIX):
        return None
    return int.from_bytes(first[len(PROBE_PREFIX) :])


def _marked(key: AttemptKey, mark: str) -> AttemptKey:
    """Returns the key with `mark` at the end of its request id."""
    request_id, attempt = key
    return request_id + mark, attempt


def _unmarked(key: AttemptKey) -> AttemptKey:
    """Returns the key without the mark at the end of its request id, which must have one."""
    request_id, attempt = key
    return request_id[:-1], attempt
