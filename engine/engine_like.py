"""What a worker asks of an engine, whichever engine it is.

`engine.Engine` is one; a second engine comes in behind the same interface. `loop.EngineThread` owns
an `EngineLike` and calls it from one thread; workers send it `EngineCommand`s and get
`EngineEvent`s back. Nothing outside of `engine/` needs to know how an engine schedules.

Life of a sequence, as calls:
    computed here    add -> step ... (SequenceOutput) ... release
    KV from a peer   reserve -> (the transfer) -> commit -> step ... -> release
    cached prefix    stage -> (tiers or a peer copy blocks) -> cache_staged -> add
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ..protos.frames import AttemptKey
from .commands import (
    AddSequence,
    BlockDemoted,
    BlocksReserved,
    CachePrefix,
    CommitBlocks,
    DemoteBlocks,
    EngineObservation,
    ObserveEngine,
    PrefixStaged,
    ReleaseSequence,
    ReserveBlocks,
    StagePrefix,
)
from .options import SchedulerLimits
from .pool import KVPool
from .sequence import BlocksFilled, Sequence, SequenceOutput

#: what the engine thread can be told
EngineCommand = (
    AddSequence
    | ReserveBlocks
    | CommitBlocks
    | ReleaseSequence
    | StagePrefix
    | CachePrefix
    | BlockDemoted
    | ObserveEngine
)
#: what it delivers
EngineEvent = (
    SequenceOutput | BlocksFilled | BlocksReserved | PrefixStaged | EngineObservation | DemoteBlocks
)


#: takes a list of `EngineEvent`s (`Any`, as lists of one kind are passed, and lists are invariant)
Deliver = Callable[[list[Any]], None]


class EngineLike(Protocol):
    """An engine of one replica. Not thread safe: one thread owns it, but for `statistics`."""

    #: called in mid-step, on the engine's thread, with blocks whose KV may be read by transfers
    announce_filled: Callable[[list[BlocksFilled]], None]
    #: how many leading blocks of these contents the tiers hold; set by whoever has tiers
    count_tier_blocks: Callable[[list[bytes]], int]

    @property
    def kv_pool(self) -> KVPool:
        """This rank's KV pool, which transfers and tiers read and write."""
        ...

    @property
    def compatibility(self) -> bytes:
        """What peers compare: equal for engines that may read each other's KV."""
        ...

    @property
    def piece_count(self) -> int:
        """In how many pieces of layers a block's KV becomes final."""
        ...

    @property
    def exact(self) -> bool:
        """True if the start-up check found that bits do not depend on the batch."""
        ...

    @property
    def rank_sockets(self) -> list[socket.socket]:
        """A socket to each process of a rank above 0."""
        ...

    @property
    def limits(self) -> SchedulerLimits: ...

    @property
    def max_model_len(self) -> int:
        """The longest sequence, in tokens."""
        ...

    @property
    def block_count(self) -> int:
        """How many blocks of the pool sequences can use."""
        ...

    @property
    def growth_reserve_blocks(self) -> int:
        """How many blocks newcomers leave to those that grow."""
        ...

    @property
    def cores(self) -> tuple[int, ...]:
        """Cores that the engine's thread is to be bound to; none: any."""
        ...

    def add(self, sequence: Sequence) -> None:
        """Prefills the sequence, then decodes it, or holds its blocks if it stops there."""
        ...

    def reserve(self, sequence: Sequence) -> list[int] | None:
        """Returns blocks for KV that is going to arrive, or None if there are not enough."""
        ...

    def commit(
        self,
        sequence: Sequence,
        other_answers: tuple[tuple[int, int], ...] = (),
        *,
        first_answer_ended: bool = False,
        waited_s: float = 0.0,
    ) -> None:
        """Decodes a sequence whose KV has arrived in its reserved blocks."""
        ...

    def release(self, attempt_key: AttemptKey) -> None:
        """Ends a sequence wherever it is; its blocks are free before the next step."""
        ...

    def stage(self, command: StagePrefix) -> PrefixStaged:
        """Returns blocks for a prefix of which the pool, a tier or a peer may hold a part."""
        ...

    def cache_staged(self, attempt_key: AttemptKey, block_count: int) -> None:
        """Caches the first `block_count` staged blocks of this key and releases the others."""
        ...

    def pin_for_demotion(self) -> list[tuple[int, bytes]]:
        """Returns cached blocks that tiers shall copy before they are evicted, with contents."""
        ...

    def finish_demotion(self, block: int, copied: bool) -> None:
        """Unpins a block of `pin_for_demotion`, which a tier has `copied` or not."""
        ...

    def required_blocks(self, sequence: Sequence) -> int:
        """Returns how many blocks `reserve` would take for the sequence."""
        ...

    def block_holders(self) -> Iterator[tuple[AttemptKey, int]]:
        """Yields each attempt that has blocks, with their number. Any thread."""
        ...

    def observe(self) -> EngineObservation:
        """Returns what changed since the last call."""
        ...

    def step(self) -> list[SequenceOutput]:
        """Computes one step over all live sequences; [] when there is nothing to do."""
        ...

    def idle(self) -> bool:
        """True if, after a step without outputs, no other step has work before a command."""
        ...

    def statistics(self) -> dict[str, Any]:
        """Returns a snapshot. Any thread."""
        ...

    def close(self) -> None:
        """Ends the processes of the other ranks."""
        ...
