"""What the engine thread can be told, and answers (pure: importable without torch)."""

from __future__ import annotations

from dataclasses import dataclass

from ..protos.frames import AttemptKey
from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class AddSequence:
    """Prefill the sequence here, then decode it (or hold its blocks: `stop_after_first`)."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class ReserveBlocks:
    """Reserve blocks for a sequence whose KV is going to arrive; answered by `Reserved`."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class CommitBlocks:
    """The reserved blocks hold the KV of all ids but the last: decode as soon as there is a place.

    `others`: (index, first id) of further answers to the same prompt. `ended`: the first answer
    ended with its first id. `waited`: seconds since that was sent.
    """

    sequence: Sequence
    other_answers: tuple[tuple[int, int], ...] = ()
    first_answer_ended: bool = False
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReleaseSequence:
    """The sequence is over: end it if it lives, give back whatever blocks it has."""

    attempt_key: AttemptKey


@dataclass(frozen=True, slots=True)
class BlocksReserved:
    """`blocks` is None when the pool is too full, or preempted sequences wait for theirs.

    The first `held` of them hold the prompt's KV already.
    """

    attempt_key: AttemptKey
    blocks: list[int] | None
    held_blocks: int = 0


@dataclass(frozen=True, slots=True)
class StagePrefix:
    """Blocks for a prefix whose KV may come from elsewhere; answered by `Staged`.

    `wanted`: of its blocks, how many a peer is said to hold. `pin`: no more than what is here. No
    hashes: blocks whose content nobody ever looks for.
    """

    attempt_key: AttemptKey
    hashes: list[bytes]
    peer_blocks: int = 0
    pin_only: bool = False


@dataclass(frozen=True, slots=True)
class PrefixStaged:
    """`held` of the blocks hold the prefix already; the tiers are said to hold the `below` next.

    No blocks: nothing is to be had from elsewhere, or the pool is too full.
    """

    attempt_key: AttemptKey
    blocks: list[int]
    held_blocks: int = 0
    tier_blocks: int = 0


@dataclass(frozen=True, slots=True)
class CachePrefix:
    """The first `count` staged blocks hold the prefix: cache them, give the others back."""

    attempt_key: AttemptKey
    block_count: int


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """For the tiers: copy this content into these blocks; answered by `Loaded`."""

    attempt_key: AttemptKey
    held_blocks: int
    hashes: list[bytes]
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class BlocksLoaded:
    """The first `count` staged blocks hold the prefix now, those that did before included."""

    attempt_key: AttemptKey
    block_count: int


@dataclass(frozen=True, slots=True)
class DemoteBlocks:
    """Told when the pool runs low: (block, content) that the tiers may copy; they are pinned."""

    blocks: list[tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class BlockDemoted:
    """A pinned block was copied (`kept`) or not: it may be evicted."""

    block: int
    copied: bool


@dataclass(frozen=True, slots=True)
class ObserveEngine:
    """Asks for what changed since the last time; answered by `Observed`."""


@dataclass(frozen=True, slots=True)
class EngineObservation:
    """`hashes`: every prefix that is held now; `stored`, `evicted`: since the last `Observed`."""

    hashes: list[bytes]
    stored: list[bytes]
    evicted: list[bytes]
    free_blocks: int
    prefill_tokens: int
    prefill_s: float
    decode_steps: int = 0  #: steps without prefill, since the start, like the next one
    decode_s: float = 0.0
    running_sequences: int = 0  #: sequences that decode
    kv_tokens: int = 0  #: that they read in a step
    preempted_sequences: int = 0  #: sequences that wait for blocks to go on
    step_s: float = 0.0  #: a step with prefill beside decode is planned to take so long; 0: any
