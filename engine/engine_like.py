"""What a worker asks of an engine, whichever engine it is.

`engine.Engine` is one; a second engine comes in behind the same interface. `loop.EngineThread` owns
an `EngineLike` and calls it from one thread; workers send it `EngineCommand`s and get
`EngineEvent`s back. Nothing outside of `engine/` needs to know how an engine schedules.
`tests/kit/engine_conformance.py` is the suite that each engine passes.

Life of a sequence, as calls:
    computed here    add -> step ... (SequenceOutput) ... release
    KV from a peer   reserve -> (the transfer) -> commit -> step ... -> release
    cached prefix    stage -> (tiers or a peer copy blocks) -> cache_staged -> add

An *attempt* is one try to answer a request on these workers, and an *answer* is one of its `n`
outputs. A `Sequence` is what the engine computes for one answer; the sequences of an attempt share
its `AttemptKey` and the blocks of its prompt, and `release` ends them all.

*Tiers* are host memory and disk below the pool. *Demotion* is their copying of cached blocks before
these are evicted. The *content* of a block is named by a hash of all tokens up to the block's end.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ..kv_transfer.digests import Digester
from ..kv_transfer.layout import KVLayout
from ..kv_transfer.transport import Pool
from ..protos.frames import AttemptKey, Grammar
from .commands import (
    BlocksReserved,
    EngineEvent,
    EngineObservation,
    PrefixStaged,
    StagePrefix,
)
from .options import EngineOptions, SchedulerLimits
from .sequence import BlocksFilled, Sequence, SequenceOutput

if TYPE_CHECKING:
    from .core_sharing import CoreSharing

#: What a step brings about.
StepEvent: TypeAlias = SequenceOutput | BlocksReserved

#: Takes what happened, in order; called on the engine's thread, and must not block.
Deliver: TypeAlias = Callable[[Collection[EngineEvent]], None]

#: Follows the loading of the weights: what is loaded, and the share of it that is there.
ReportProgress: TypeAlias = Callable[[str, float], None]


class EnginePool(Pool, Protocol):
    """The memory with the KV blocks of one rank; transfers and tiers read and write it."""

    layout: KVLayout  #: Where in a block the K and V of each layer, head and token are.
    block_bytes: int  #: Of one block, in all layers.
    #: Makes checksums where the bytes are, as on a GPU; None: the transfer computes them from the
    #: bytes in host memory, which the pool shows it (`Pool.view`).
    digester: Digester | None


class EngineLike(Protocol):
    """An engine of one replica.

    It is not thread safe: one thread owns it. Only what says "Any thread" may be called by others,
    and only the properties may be read by others.
    """

    #: Called in mid-step, on the engine's thread, with blocks whose KV may be read by transfers.
    announce_filled: Callable[[list[BlocksFilled]], None]
    #: Returns how many leading blocks of these contents the tiers hold. Whoever has tiers sets it.
    count_tier_blocks: Callable[[list[bytes]], int]

    @property
    def kv_pool(self) -> EnginePool:
        """This rank's KV pool, which transfers and tiers read and write."""
        ...

    @property
    def compatibility(self) -> bytes:
        """What peers compare: equal for engines that may read each other's KV."""
        ...

    @property
    def format_facts(self) -> dict[str, str]:
        """What `compatibility` is a hash of beside the layout, by name; `engine` is one of them."""
        ...

    @property
    def piece_count(self) -> int:
        """In how many pieces of layers a block's KV becomes final, and is announced."""
        ...

    @property
    def exact(self) -> bool:
        """True if the start-up check found that bits do not depend on the batch."""
        ...

    @property
    def rank_sockets(self) -> list[socket.socket]:
        """A socket to each process of a rank above 0, in order of ranks.

        The engine does not use them: by them the worker speaks with the transfers that run beside
        the model there.
        """
        ...

    @property
    def limits(self) -> SchedulerLimits:
        """What a step, and the pool between steps, may hold; the router places by them."""
        ...

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

    @property
    def core_sharing(self) -> CoreSharing | None:
        """What shares idle cores with other engines of the machine; None where nothing does."""
        ...

    def has_grammar(self, grammar: Grammar) -> bool:
        """Returns whether the grammar is compiled: sampling by it takes no more time. Any thread.

        A wrong grammar counts as compiled; it fails the sequences that have it.
        """
        ...

    def compile_grammar(self, grammar: Grammar) -> None:
        """Compiles the grammar, in the calling thread's time. Any thread."""
        ...

    def add(self, sequence: Sequence) -> None:
        """Prefills the sequence, then decodes it, or holds its blocks if it stops there."""
        ...

    def reserve(self, sequence: Sequence) -> BlocksReserved | None:
        """Asks for blocks for KV that is going to arrive; None: one of the next steps answers.

        The answer has no blocks where the pool has no room. An engine that gives out blocks only while
        it plans a step answers in a step, after a bounded number of them.
        """
        ...

    def commit(
        self,
        sequence: Sequence,
        other_answers: tuple[tuple[int, int], ...] = (),
        *,
        first_answer_ended: bool = False,
        waited_s: float = 0.0,
    ) -> None:
        """Decodes a sequence whose KV has arrived in its reserved blocks.

        `other_answers` are (index, first token id) of further answers to its prompt, which share
        that KV. `first_answer_ended` says that the sequence's own answer ended with its first
        token. `waited_s` are the seconds since that token was sent: the scheduler counts them as
        part of the gap before the next one.
        """
        ...

    def release(self, attempt_key: AttemptKey) -> None:
        """Ends the sequences of an attempt wherever they are.

        Their blocks are free after the next step, or at once.
        """
        ...

    def stage(self, command: StagePrefix) -> PrefixStaged:
        """Reserves blocks for a prefix of which the pool, a tier or a peer may hold a part.

        `cache_staged` or `release` gives them back.
        """
        ...

    def cache_staged(self, attempt_key: AttemptKey, block_count: int) -> None:
        """Caches the first `block_count` staged blocks of this key, and releases all of them.

        The cached ones stay in the cache until they are evicted.
        """
        ...

    def pin_for_demotion(self) -> list[tuple[int, bytes]]:
        """Returns cached blocks that tiers shall copy before they are evicted: (block, content).

        They are pinned until `finish_demotion`. Empty unless the pool runs low.
        """
        ...

    def finish_demotion(self, block: int, copied: bool) -> None:
        """Unpins a block of `pin_for_demotion`; `copied` says whether a tier has it now."""
        ...

    def forget_in_tiers(self, hashes: list[bytes]) -> None:
        """Takes note that no tier holds these contents any more; unknown ones change nothing."""
        ...

    def required_blocks(self, sequence: Sequence) -> int:
        """Returns how many blocks the sequence takes, if it shares none. Any thread."""
        ...

    def block_holders(self) -> Iterator[tuple[AttemptKey, int]]:
        """Yields attempts with a number of blocks that they have. Any thread.

        An attempt with several answers may come several times; blocks that they share may count
        each time, and the number may be 0.
        """
        ...

    def observe(self) -> EngineObservation:
        """Returns the load, what is cached, and what of that changed since the last call."""
        ...

    def step(self) -> Collection[StepEvent]:
        """Computes one step over all live sequences; empty when nothing has come of it."""
        ...

    def idle(self) -> bool:
        """Returns whether, after a step without outputs, no step has work before a command comes.

        A step of chunks that end no prompt has no outputs, and the next one goes on all the same.
        """
        ...

    def statistics(self) -> dict[str, Any]:
        """Returns a snapshot. Any thread.

        The keys are those of `Engine.statistics`: counts of sequences by state, of steps, tokens and
        preemptions, and `kv_blocks`. Metrics read them (cluster/telemetry/). The worker adds the blocks
        `quarantined` (a lost peer may still write them) and `orphaned` (held for an attempt that nobody
        knows). `kv_blocks` says how many
        blocks are `free`, `active`, `cached`, `reserved`, `staged` and `demoting`, and the `total`,
        which is their sum.
        """
        ...

    def close(self) -> None:
        """Ends the processes of the other ranks. The engine's thread has ended before."""
        ...


#: Loads the model and allocates the KV pool. Raises EngineError, one of `errors.py`: the checkpoint,
#: the architecture, the options, the kernels or the memory will not do.
OpenEngine: TypeAlias = Callable[[EngineOptions, ReportProgress | None], EngineLike]
