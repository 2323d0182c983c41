"""What the engine thread can be told, and what it answers (pure: importable without torch).

`LoadBlocks` and `BlocksLoaded` are for the tiers below the pool, which are no part of that thread.

A block is KV of a fixed number of tokens, named by its index in the engine's pool. A content hash
names what a block holds. It is made of all tokens of the prompt up to the block's end. An attempt's
key names its sequences, and the blocks that are reserved for them. All that is about one attempt
carries it; demotions and observations are about the whole pool and have none.

Life of a prompt that is computed here: `AddSequence`, then `SequenceOutput` for each token, and
`ReleaseSequence` when its blocks are not needed any more. Life of a prompt that was computed
elsewhere: `ReserveBlocks`, `BlocksReserved`, the transfer, `CommitBlocks`, and on like any other.
A prefix from elsewhere: `StagePrefix`, `PrefixStaged`, the transfer or `LoadBlocks` from the tiers
below the pool (host memory, disk), then `CachePrefix` with the number of blocks that came, or
`ReleaseSequence` once a transfer has failed and cannot write any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from ..protos.frames import AttemptKey
from .sequence import BlocksFilled, Sequence, SequenceOutput

# ---- sequences -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AddSequence:
    """Adds a sequence: its prompt is computed here, and then it is decoded.

    If the sequence says `stop_after_first`, only the first token is computed, and the blocks are
    held until `ReleaseSequence`, so that they can be sent to a decode worker.
    """

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class ReserveBlocks:
    """Reserves blocks for a sequence whose KV is going to arrive; answered by `BlocksReserved`."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class BlocksReserved:
    """The answer to `ReserveBlocks`."""

    attempt_key: AttemptKey
    #: None if the pool is too full, or if preempted sequences wait for blocks.
    blocks: list[int] | None
    held_blocks: int = 0  #: Leading blocks that hold the prompt's KV already.


@dataclass(frozen=True, slots=True)
class CommitBlocks:
    """The reserved blocks hold the KV of all tokens but the last: the sequence may be decoded."""

    sequence: Sequence
    #: (index, first token id) of the further answers to the same prompt that are to be decoded.
    other_answers: tuple[tuple[int, int], ...] = ()
    first_answer_ended: bool = False  #: True if answer 0 ended with its first token.
    #: Seconds that have passed since the client was sent the first token: they are part of its gap
    #: to the second one.
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReleaseSequence:
    """Ends the sequence if it is alive, and releases whatever blocks are under this key."""

    attempt_key: AttemptKey


# ---- prefixes ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StagePrefix:
    """Reserves blocks for a prefix whose KV may come from elsewhere; answered by `PrefixStaged`.

    It reserves as many as the tiers or `peer_blocks` reach, whichever is more, and none if the pool
    holds as much. A probe of the transfer path gives no hashes, as it needs blocks of any content:
    it gets `peer_blocks` blocks, and they are never cached.
    """

    attempt_key: AttemptKey  #: What the blocks are reserved under, and released by.
    hashes: list[bytes]  #: The prefix's content hashes, one a block.
    #: So many leading blocks may come from a peer; nobody knows how many it holds.
    peer_blocks: int = 0
    #: True: no blocks are reserved; those that hold the prefix already are pinned, so that they can
    #: be sent to a peer.
    pin_only: bool = False
    #: The prefix's tokens, the partition of the cache whose requests may share its blocks, and the
    #: adapter that computed it; empty where nothing is going to be cached. An engine that names
    #: contents by hashes of its own computes them from these three.
    token_ids: tuple[int, ...] = ()
    cache_partition: bytes = b""
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class PrefixStaged:
    """The answer to `StagePrefix`."""

    attempt_key: AttemptKey
    #: The staged blocks, in the order of the prefix: first the pinned ones, which hold its
    #: beginning already, then the reserved ones; with `pin_only` the pinned ones alone. Empty if
    #: none are staged: the pool is too full, nothing more can come from elsewhere, or, with
    #: `pin_only`, the pool holds nothing of the prefix.
    blocks: list[int]
    #: How many leading blocks of the prefix the pool holds already, staged or not.
    held_blocks: int = 0
    tier_blocks: int = 0  #: How many of the next ones the tiers are said to hold.


@dataclass(frozen=True, slots=True)
class CachePrefix:
    """The first `block_count` staged blocks hold the prefix: they are cached, for prompts to find.

    All staged blocks of the key are released; the pool may evict the cached ones from then on.
    """

    attempt_key: AttemptKey
    block_count: int


# ---- tiers below the pool ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """For the tiers: copy this content into these blocks; answered by `BlocksLoaded`."""

    attempt_key: AttemptKey
    held_blocks: int  #: Blocks of the prefix that lie before these and hold it already.
    hashes: list[bytes]  #: What each of `blocks` is to hold.
    blocks: list[int]  #: Where to, in the order of the prefix.


@dataclass(frozen=True, slots=True)
class BlocksLoaded:
    """The tiers have loaded: the first `block_count` staged blocks hold the prefix.

    Blocks that the pool held before count too.
    """

    attempt_key: AttemptKey
    block_count: int


@dataclass(frozen=True, slots=True)
class DemoteBlocks:
    """The pool runs low: the tiers may copy these blocks, which are pinned until `BlockDemoted`.

    The engine sends it by itself; each block is answered by a `BlockDemoted` of its own.
    """

    blocks: list[tuple[int, bytes]]  #: (block, content hash), in the order of their eviction.


@dataclass(frozen=True, slots=True)
class BlockDemoted:
    """The tiers have copied a pinned block, or are not going to: the block may be evicted."""

    block: int
    copied: bool  #: Whether a tier has the content now; it is not offered again then.


@dataclass(frozen=True, slots=True)
class BlocksLeftTiers:
    """No tier holds these contents any more. Those that the engine does not know change nothing."""

    hashes: list[bytes]


# ---- observation ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ObserveEngine:
    """Asks what has changed since the last time; answered by `EngineObservation`."""


@dataclass(frozen=True, slots=True)
class EngineObservation:
    """The state of the engine, as its worker reports it to the router."""

    hashes: list[bytes]  #: All hashes by which routers can find what is cached now.
    stored: list[bytes]  #: Those of `hashes` that came since the last observation.
    evicted: list[bytes]  #: Hashes that went since the last observation.
    free_blocks: int  #: Blocks that new sequences could get, cached ones included.
    prefill_tokens: int  #: Computed since the start; the next three count from the start, too.
    prefill_s: float  #: Seconds of steps with prefill, whether or not they decoded as well.
    decode_steps: int = 0  #: Steps without prefill.
    decode_s: float = 0.0  #: Seconds of these steps.
    running_sequences: int = 0  #: Sequences that are decoded.
    kv_tokens: int = 0  #: Tokens whose KV these sequences read in a step.
    preempted_sequences: int = 0  #: Sequences that wait for blocks to go on.
    #: Planned seconds of a step that has prefill beside decode; 0: such steps have no plan.
    step_s: float = 0.0
    #: All hashes by which routers can find what only the tiers below the pool hold.
    demoted_hashes: list[bytes] = field(default_factory=list)
    #: Those of them that came since the last observation.
    demoted: list[bytes] = field(default_factory=list)


#: What the engine thread carries out.
EngineCommand: TypeAlias = (
    AddSequence
    | ReserveBlocks
    | CommitBlocks
    | ReleaseSequence
    | StagePrefix
    | CachePrefix
    | BlockDemoted
    | BlocksLeftTiers
    | ObserveEngine
)
#: What the engine thread delivers.
EngineEvent: TypeAlias = (
    SequenceOutput | BlocksFilled | BlocksReserved | PrefixStaged | DemoteBlocks | EngineObservation
)
