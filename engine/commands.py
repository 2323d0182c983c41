"""What the engine thread can be told, and answers (pure: importable without torch)."""

from __future__ import annotations

from dataclasses import dataclass

from ..protos.frames import Key
from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class Add:
    """Prefill the sequence here, then decode it (or hold its blocks: `stop_after_first`)."""

    seq: Sequence


@dataclass(frozen=True, slots=True)
class Reserve:
    """Reserve blocks for a sequence whose KV is going to arrive; answered by `Reserved`."""

    seq: Sequence


@dataclass(frozen=True, slots=True)
class Commit:
    """The reserved blocks hold the KV of all ids but the last: decode as soon as there is a place.

    `others`: (index, first id) of further answers to the same prompt. `ended`: the first answer
    ended with its first id. `waited`: seconds since that was sent.
    """

    seq: Sequence
    others: tuple[tuple[int, int], ...] = ()
    ended: bool = False
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class Drop:
    """The sequence is over: end it if it lives, give back whatever blocks it has."""

    key: Key


@dataclass(frozen=True, slots=True)
class Reserved:
    """`blocks` is None when the pool is too full, or preempted sequences wait for theirs.

    The first `held` of them hold the prompt's KV already.
    """

    key: Key
    blocks: list[int] | None
    held: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """Blocks for a prefix whose KV may come from elsewhere; answered by `Staged`.

    `wanted`: of its blocks, how many a peer is said to hold. `pin`: no more than what is here. No
    hashes: blocks whose content nobody ever looks for.
    """

    key: Key
    hashes: list[bytes]
    wanted: int = 0
    pin: bool = False


@dataclass(frozen=True, slots=True)
class Staged:
    """`held` of the blocks hold the prefix already; the tiers are said to hold the `below` next.

    No blocks: nothing is to be had from elsewhere, or the pool is too full.
    """

    key: Key
    blocks: list[int]
    held: int = 0
    below: int = 0


@dataclass(frozen=True, slots=True)
class Adopt:
    """The first `count` staged blocks hold the prefix: cache them, give the others back."""

    key: Key
    count: int


@dataclass(frozen=True, slots=True)
class Load:
    """For the tiers: copy this content into these blocks; answered by `Loaded`."""

    key: Key
    held: int
    hashes: list[bytes]
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The first `count` staged blocks hold the prefix now, those that did before included."""

    key: Key
    count: int


@dataclass(frozen=True, slots=True)
class Demote:
    """Told when the pool runs low: (block, content) that the tiers may copy; they are pinned."""

    blocks: list[tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class Demoted:
    """A pinned block was copied (`kept`) or not: it may be evicted."""

    block: int
    kept: bool


@dataclass(frozen=True, slots=True)
class Observe:
    """Asks for what changed since the last time; answered by `Observed`."""


@dataclass(frozen=True, slots=True)
class Observed:
    """`hashes`: every prefix that is held now; `stored`, `evicted`: since the last `Observed`."""

    hashes: list[bytes]
    stored: list[bytes]
    evicted: list[bytes]
    free_blocks: int
    prefill_tokens: int
    prefill_seconds: float
    decode_steps: int = 0  #: steps without prefill, since the start, like the next one
    decode_seconds: float = 0.0
    running: int = 0  #: sequences that decode
    kv_tokens: int = 0  #: that they read in a step
    preempted: int = 0  #: sequences that wait for blocks to go on
    step_s: float = 0.0  #: a step with prefill beside decode is planned to take so long; 0: any
