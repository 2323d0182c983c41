"""Which tokens the next step computes (pure).

A sequence waits, is prefilled chunk by chunk in order of arrival, then decodes one token a step.
Chunks end on block borders or at the end of the ids, so any chunking gives the same numbers.
A sequence reserves its ids plus a growth allowance; when a decoding one needs another block and
none is left, the youngest is preempted: it gives its blocks back and is computed again from
prompt + generated ids.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..protos.frames import Key
from .blocks import BlockPool
from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class Limits:
    block_tokens: int = 64
    max_step_tokens: int = 512  #: prefill tokens of one step
    max_running: int = 128  #: sequences that decode together
    growth_tokens: int = 256  #: reserved behind the ids, at most


@dataclass(slots=True)
class Plan:
    """One step: (sequence, number of ids) to prefill, sequences to decode by one token."""

    prefill: list[tuple[Sequence, int]] = field(default_factory=list)
    decode: list[Sequence] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode)


class Scheduler:
    """Owns every live sequence and the block pool."""

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self.pool, self.limits = pool, limits
        self.waiting: deque[Sequence] = deque()
        self.filling: deque[Sequence] = deque()  #: have blocks, KV of their ids not complete
        self.running: list[Sequence] = []  #: oldest first
        self.held: dict[Key, list[int]] = {}  #: blocks kept for a transfer, by key
        self.preemptions = 0

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_tokens)

    def needs(self, seq: Sequence) -> int:
        """Blocks that the sequence reserves: its ids and a growth allowance."""
        left = 0 if seq.stop_after_first else seq.sampling.max_tokens - seq.generated
        return self.blocks_for(len(seq.ids) + min(left, self.limits.growth_tokens))

    # ---- entering ----------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def reserve(self, seq: Sequence) -> list[int] | None:
        """Blocks for a sequence whose KV is going to arrive; None when they are not to be had."""
        blocks = self.pool.allocate(self.needs(seq))
        if blocks is not None:
            self.held[seq.key] = blocks
        return blocks

    def commit(self, seq: Sequence) -> None:
        """The KV of all ids but the last is in the reserved blocks: decode from now on."""
        seq.blocks = self.held.pop(seq.key)
        seq.computed = len(seq.ids) - 1
        self.running.append(seq)

    # ---- leaving -----------------------------------------------------------------------------

    def remove(self, key: Key) -> None:
        """Drops a sequence and its blocks, held ones too; nothing happens if it is gone."""
        self.pool.release(self.held.pop(key, []))
        for queue in (self.waiting, self.filling, self.running):
            for seq in [s for s in queue if s.key == key]:
                queue.remove(seq)
                self.pool.release(seq.blocks)

    # ---- stepping ----------------------------------------------------------------------------

    def plan(self) -> Plan:
        self._admit()
        plan = Plan()
        for seq in list(self.running):
            if seq in self.running and self._grow(seq):
                plan.decode.append(seq)
        plan.decode = [seq for seq in plan.decode if seq in self.running]
        budget = self.limits.max_step_tokens
        for seq in self.filling:
            count = min(len(seq.ids) - seq.computed, budget)
            if seq.computed + count < len(seq.ids):
                count -= (seq.computed + count) % self.limits.block_tokens
            if count <= 0:
                break
            plan.prefill.append((seq, count))
            budget -= count
        return plan

    def _admit(self) -> None:
        """Moves sequences from waiting to filling while there is room, first come first served."""
        while self.waiting:
            seq = self.waiting[0]
            if len(self.filling) + len(self.running) >= self.limits.max_running:
                return
            whole = (len(seq.ids) - 1) // self.limits.block_tokens  # one token must be computed
            found = self.pool.match(seq.hashes[:whole])
            fresh = self.pool.allocate(self.needs(seq) - len(found))
            if fresh is None:
                self.pool.release(found)
                return
            seq.blocks = found + fresh
            seq.computed = seq.hit = len(found) * self.limits.block_tokens
            seq.sealed = len(found)
            self.filling.append(self.waiting.popleft())

    def _grow(self, seq: Sequence) -> bool:
        """A block for the sequence's next KV; preempts the youngest when there is none."""
        while len(seq.blocks) < self.blocks_for(seq.computed + 1):
            fresh = self.pool.allocate(1)
            if fresh:
                seq.blocks += fresh
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.pool.release(seq.blocks)
        seq.blocks, seq.computed, seq.sealed = [], 0, 0
        self.waiting.appendleft(seq)
        self.preemptions += 1

    def computed(self, seq: Sequence, count: int) -> bool:
        """Books `count` more ids as computed; True when the last id's logits are there."""
        seq.computed += count
        for index in range(
            seq.sealed, min(seq.computed // self.limits.block_tokens, len(seq.hashes))
        ):
            self.pool.seal(seq.blocks[index], seq.hashes[index])
            seq.sealed = index + 1
        return seq.computed == len(seq.ids)

    def sampled(self, seq: Sequence, token: int) -> str | None:
        """Appends a sampled token and moves the sequence on; returns its finish reason."""
        seq.ids.append(token)
        filling = seq in self.filling
        if filling:
            self.filling.remove(seq)
        finish = seq.finish_reason()
        if filling and seq.stop_after_first:
            self.held[seq.key] = seq.blocks
        elif finish:
            if not filling:
                self.running.remove(seq)
            self.pool.release(seq.blocks)
        elif filling:
            self.running.append(seq)
        return finish

    def __repr__(self) -> str:
        return (
            f"<Scheduler {len(self.waiting)} waiting, {len(self.filling)} filling, "
            f"{len(self.running)} running, {len(self.held)} held | {self.pool!r}>"
        )
