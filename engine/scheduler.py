"""Which tokens the next step computes (pure).

A sequence waits, is prefilled chunk by chunk, then decodes one token a step.
Chunks end on block borders or at the end of the ids, so any chunking gives the same numbers.
A sequence reserves its ids plus a growth allowance, and leaves a few blocks to those that grow.
When a decoding one needs another block and none is left, the youngest is preempted: it gives its
blocks back, and is computed again from prompt + generated ids before anything new begins.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from operator import attrgetter

from ..kv_transfer.identity import FRONT_BLOCKS, block_hashes, hashes_per_block, is_looked_up
from ..protos.frames import AttemptKey
from .blocks import BlockPool
from .pacing import StepCost
from .sequence import Sequence, SequenceQueue

AGE = attrgetter("arrival_number")
RANK = attrgetter("prefill_order")


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    block_tokens: int = 64
    max_step_tokens: int = 512  #: prefill tokens of one step
    max_running: int = 128  #: sequences that decode together
    growth_tokens: int = 256  #: reserved behind the ids, at most
    watermark: float = 0.02  #: share of the pool, rounded up, that newcomers leave for growth
    held_share: float = 0.75  #: of the pool, for prefills that wait for their transfer or will
    itl_budget_s: float | None = None  #: how long a step with decodes may take; None: no limit
    draft_tokens: int = 0  #: guesses of a decoding sequence that a step verifies, at most
    draft_below: int = 8  #: no guesses while more sequences run: their rows are no longer cheap
    prefill_every: int = 8  #: steps over the budget after which a block is prefilled all the same

    def __post_init__(self) -> None:
        assert self.max_step_tokens >= self.block_tokens > 0, self
        assert self.max_running > 0 and self.prefill_every > 0, self
        assert 0 <= self.watermark < 1 and 0 < self.held_share <= 1, self


@dataclass(slots=True)
class Plan:
    """One step: (sequence, number of ids) to prefill, sequences to decode by one token."""

    prefill: list[tuple[Sequence, int]] = field(default_factory=list)
    decode: list[Sequence] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode)


class Scheduler:
    """Owns every live sequence and the block pool. An empty plan stays empty until a command.

    `salt`: the parent of a first block's content hash, as for the hashes that sequences bring.
    """

    def __init__(self, pool: BlockPool, limits: SchedulerLimits, salt: bytes = b"") -> None:
        self.pool, self.limits, self.salt = pool, limits, salt
        self.cost = StepCost()  #: fed by whoever runs the steps
        self.live: dict[tuple[AttemptKey, int], Sequence] = {}  #: by name, until they end
        self.waiting = SequenceQueue(RANK)  #: no blocks yet, or no longer
        self.filling = SequenceQueue(RANK)  #: have blocks, KV of their ids not complete
        self.ready = SequenceQueue(AGE)  #: committed, wait for a place among those that run
        self.running = SequenceQueue(AGE)
        self.held: dict[
            AttemptKey, list[int]
        ] = {}  #: blocks of a transfer to come or under way, by key
        self.staged: dict[
            AttemptKey, tuple[list[int], list[bytes]]
        ] = {}  #: (blocks, what they will hold)
        self.kept = math.ceil(pool.total * limits.watermark)  #: for growth, at most
        self.preemptions = 0
        self._arrivals = itertools.count(1)
        self._starved = 0  #: steps in a row in which the ITL budget left nothing for prefill

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_tokens)

    def needs(self, seq: Sequence) -> int:
        """Blocks that the sequence reserves: its ids and a growth allowance.

        And for each further answer to its prompt as many but the prompt's full blocks, if the pool
        has them.
        """
        if seq.stop_after_first:
            return self.blocks_for(len(seq.token_ids))
        left = seq.sampling.max_tokens - seq.generated_tokens
        own = self.blocks_for(len(seq.token_ids) + min(left, self.limits.growth_tokens))
        more = seq.further_answers * (own - seq.prompt_tokens // self.limits.block_tokens)
        return max(own, min(own + more, self.pool.total))

    @property
    def step_s(self) -> float:
        """What a step with prefill beside decode is planned to take, at most; 0: no limit.

        Less than the ITL budget, so that nearly all of them keep it.
        """
        return (self.limits.itl_budget_s or 0.0) / self.cost.upper

    # ---- entering ----------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        self._enlist(seq)
        self.waiting.enter(seq)

    def reserve(self, seq: Sequence) -> list[int] | None:
        """Blocks for a sequence whose KV is going to arrive; None when they are not to be had.

        They are not while a preempted sequence waits for its blocks. The first `seq.sealed` ones
        hold KV already: the prefix is known here.
        """
        if self.waiting and self.waiting[0].was_preempted:
            return None
        found = self._match(seq, len(seq.token_ids) // self.limits.block_tokens)
        fresh = self.pool.allocate(self.needs(seq) - len(found), self._leaves(seq))
        if fresh is None:
            self.pool.release(found)
            return None
        self._enlist(seq)
        self.held[seq.attempt_key] = seq.blocks = found + fresh
        seq.published_blocks = len(found)
        return seq.blocks

    def commit(self, seq: Sequence, waited: float = 0.0) -> None:
        """The KV of all ids but the last is in the reserved blocks: decode as soon as may be.

        `waited`: seconds since the client got the last id.
        """
        del self.held[seq.attempt_key]
        seq.waited_s = waited
        seq.computed_tokens = len(seq.token_ids) - 1
        self._seal(seq)
        self.ready.enter(seq)

    def fork(self, seq: Sequence, indices: list[int]) -> list[Sequence]:
        """Further answers to a prompt whose KV is complete, in the blocks reserved for them.

        They share the prompt's full blocks; the KV in the one behind is for the caller to copy.
        Those that a small pool has no blocks for wait like preempted ones, without any.
        """
        whole = seq.prompt_tokens // self.limits.block_tokens
        extra = max((len(seq.blocks) - whole) // seq.sampling.n, 1)
        spare, siblings = seq.blocks[whole + extra :], []
        seq.blocks = seq.blocks[: whole + extra]
        for index in indices:
            one = seq.fork(index)
            own, spare = spare[:extra], spare[extra:]
            if own:
                one.blocks = self.pool.share(seq.blocks[:whole]) + own
                one.computed_tokens, one.published_blocks = one.prompt_tokens, whole
            else:
                one.was_preempted = True
            self._enlist(one)
            siblings.append(one)
        self.pool.release(spare)
        return siblings

    def _enlist(self, seq: Sequence) -> None:
        assert seq.name not in self.live, seq.name
        self.live[seq.name] = seq
        seq.arrival_number = next(self._arrivals)

    # ---- prefixes from elsewhere -------------------------------------------------------------

    def stage(self, key: AttemptKey, hashes: list[bytes], count: int) -> int:
        """Reserves blocks for the first `count` of `hashes`; returns how many are known.

        They are in `staged` if something is to come, or, with a `count` of 0, if any is known.
        """
        found = self.pool.match(hashes)
        fresh: list[int] | None = []
        if count:
            starved = self.waiting and self.waiting[0].was_preempted
            more = count - len(found)
            fresh = None if starved or more <= 0 else self.pool.allocate(more, self.kept)
        blocks = found + fresh if fresh is not None else []
        if blocks:
            self.staged[key] = blocks, hashes
        else:
            self.pool.release(found)
        return len(found)

    def adopt(self, key: AttemptKey, count: int) -> None:
        """The first `count` staged blocks hold what they were meant for."""
        blocks, hashes = self.staged.pop(key, ([], []))
        for index, (block, content) in enumerate(zip(blocks[:count], hashes, strict=False)):
            self.pool.seal(block, content, self._marks(index, [content]))
        self.pool.release(blocks)

    # ---- leaving -----------------------------------------------------------------------------

    def remove(self, key: AttemptKey) -> None:
        """Drops a request's sequences and blocks, held and staged ones too, if it is not gone."""
        if key in self.staged:
            self.adopt(key, 0)
        for name in [name for name in self.live if name[0] == key]:
            self.end(self.live[name])

    def end(self, seq: Sequence) -> None:
        """One answer is over; others to its prompt go on."""
        del self.live[seq.name]
        if seq.answer_index == 0:
            self.held.pop(seq.attempt_key, None)
        if seq.queue is not None:
            seq.queue.leave(seq)
        self.pool.release(seq.blocks)

    # ---- stepping ----------------------------------------------------------------------------

    def plan(self) -> Plan:
        """First those that run get their next block, then others begin with what is left.

        If those that ran had to go, committed ones take their places at once.
        """
        joined = []
        while self.ready and self._places():
            seq = self.ready[0]
            self.ready.leave(seq)
            self.running.enter(seq)
            joined.append(seq)
        plan, rows, index = Plan(), 0, 0
        while index < len(self.running):  # preemption shortens the line from its end
            seq = self.running[index]
            if self._grow(seq, len(seq.drafts)):
                plan.decode.append(seq)
                rows += 1 + len(seq.drafts)
            index += 1
        self._admit()
        budget, block = self.limits.max_step_tokens, self.limits.block_tokens
        seconds, mean = self._seconds(plan.decode, rows, joined)
        for seq in self.filling:
            room = self.cost.room(seconds, seq.computed_tokens, budget)
            due = self._starved + 1 >= self.limits.prefill_every or not self.cost.knows_prefill
            if not plan.prefill and (
                due or self.cost.room(mean, seq.computed_tokens, block) == block
            ):
                room = max(room, block)
            count = min(len(seq.token_ids) - seq.computed_tokens, room)
            if seq.computed_tokens + count < len(seq.token_ids):
                count -= (seq.computed_tokens + count) % self.limits.block_tokens
            if count <= 0:
                break
            plan.prefill.append((seq, count))
            budget -= count
            seconds -= self.cost.prefill_s(count, seq.computed_tokens)
        self._starved = self._starved + 1 if self.filling and not plan.prefill else 0
        return plan if plan or not self.ready else self.plan()

    def _places(self) -> int:
        return self.limits.max_running - len(self.filling) - len(self.running)

    def _admit(self) -> None:
        """Moves sequences from waiting to filling while the first of the line fits."""
        while self.waiting and self._places():
            seq = self.waiting[0]
            needs = self.needs(seq)
            whole = seq.cacheable_tokens // self.limits.block_tokens
            if needs - whole > self.pool.available:
                return  # not even if all of its prefix is known and in use
            found = self._match(seq, whole)
            fresh = self.pool.allocate(needs - len(found), self._leaves(seq))
            if fresh is None:
                self.pool.release(found)
                return
            seq.blocks = found + fresh
            seq.computed_tokens = len(found) * self.limits.block_tokens
            seq.published_blocks = len(found)
            if not seq.was_preempted:
                seq.hit_tokens = seq.computed_tokens
            self.waiting.leave(seq)
            self.filling.enter(seq)

    def _leaves(self, seq: Sequence) -> int:
        """Blocks that `seq` must leave in the pool when it gets its own.

        What the others may still grow by, at most the watermark; of the others only older ones, if
        it is resumed. And beside prefills for a transfer, one more of them leaves the share that
        they may not hold: a slow receiver stops new ones, never one that has begun.
        """
        held = [self.live[key, 0] for key in self.held]
        if seq.stop_after_first and any(s.stop_after_first for s in (*held, *self.filling)):
            return max(self.kept, self.pool.total - int(self.pool.total * self.limits.held_share))
        growth = 0
        for one in itertools.chain(self.running, self.ready, self.filling, held):
            if seq.was_preempted and one.arrival_number > seq.arrival_number:
                continue
            answer = 0 if one.stop_after_first else one.sampling.max_tokens
            growth += max(0, self.blocks_for(one.prompt_tokens + answer) - len(one.blocks))
            if growth >= self.kept:
                return self.kept
        return growth

    def _seconds(
        self, decode: list[Sequence], rows: int, joined: list[Sequence]
    ) -> tuple[float, float]:
        """What the ITL budget leaves for prefill beside these sequences and their `rows`.

        So that most steps keep it, and the mean one: after a disturbance the first may be nothing.
        Those that join have waited already; for whom the budget is over, nothing is saved.
        """
        budget = self.limits.itl_budget_s
        if budget is None or not rows:
            return math.inf, math.inf
        waited = max((seq.waited_s for seq in joined if 0 < seq.waited_s < budget), default=0.0)
        keys = sum(seq.computed_tokens + 1 + len(seq.drafts) for seq in decode)
        decode_s = self.cost.decode_s(rows, keys)
        return (budget - waited) / self.cost.upper - decode_s, budget - waited - decode_s

    def _grow(self, seq: Sequence, drafts: int = 0) -> bool:
        """Room for the sequence's next KV, by preempting the youngest if there is no other way.

        `drafts` are more rows, verified in the same step; nobody is preempted for them: they are
        cut instead.
        """
        while (missing := self.blocks_for(seq.computed_tokens + 1 + drafts) - len(seq.blocks)) > 0:
            fresh = self.pool.allocate(missing)
            if fresh:
                seq.blocks += fresh
            elif drafts:
                drafts = 0
                seq.drafts.clear()
            else:
                victim = self._youngest()
                self._preempt(victim)
                if victim is seq:
                    return False
        return True

    def _youngest(self) -> Sequence:
        """Of all but those whose blocks a transfer reads or writes, now or later."""
        movable = (seq for seq in self.filling if not seq.stop_after_first)
        return max((self.running[-1], *self.ready[-1:], *movable), key=AGE)

    def _preempt(self, seq: Sequence) -> None:
        assert seq.queue is not None, seq
        seq.queue.leave(seq)
        self.pool.release(seq.blocks)
        seq.blocks, seq.computed_tokens, seq.published_blocks = [], 0, 0
        seq.drafts.clear()
        seq.was_preempted = True
        self.waiting.enter(seq)
        self.preemptions += 1

    def fills(self, seq: Sequence, count: int) -> tuple[int, int, int]:
        """Blocks of a prefill of `count` ids, as borders: told before, known, final after it."""
        size, end = self.limits.block_tokens, seq.computed_tokens + count
        last = self.blocks_for(end) if end == len(seq.token_ids) else end // size
        return seq.filled_blocks, seq.computed_tokens // size, last

    @property
    def pressing(self) -> bool:
        """Something else than the next step of those that run is due, and may begin."""
        return bool(self.filling or ((self.waiting or self.ready) and self._places() > 0))

    def ahead(self, seq: Sequence, count: int) -> bool:
        """Room for the KV of `count` ids behind the computed ones, without preempting anybody."""
        missing = self.blocks_for(seq.computed_tokens + count) - len(seq.blocks)
        fresh = self.pool.allocate(missing) if missing > 0 else []
        seq.blocks += fresh or []
        return fresh is not None

    # ---- booking -----------------------------------------------------------------------------

    def computed(self, seq: Sequence, count: int) -> bool:
        """Books `count` more ids as computed; True when the last id's logits are there."""
        seq.computed_tokens += count
        if seq.computed_tokens >= (seq.published_blocks + 1) * self.limits.block_tokens:
            self._seal(seq)
        return seq.computed_tokens == len(seq.token_ids)

    def _seal(self, seq: Sequence) -> None:
        """Publishes the full blocks; the chain of hashes goes on into the generated ids."""
        size = self.limits.block_tokens
        whole = seq.computed_tokens // size
        for index in range(seq.published_blocks, whole):
            if index == len(seq.block_hashes):
                parent = seq.block_hashes[-1] if seq.block_hashes else self.salt
                seq.block_hashes += block_hashes(
                    seq.token_ids[index * size : (index + 1) * size], parent, size
                )
            self.pool.seal(seq.blocks[index], seq.block_hashes[index], self._units(seq, index))
        seq.published_blocks = whole

    def _units(self, seq: Sequence, index: int) -> list[bytes]:
        """The marks of a block of `seq`: a larger one answers for each hash that ends in it."""
        size, units = self.limits.block_tokens, seq.block_hashes[index : index + 1]
        if hashes_per_block(size) > 1:
            parent = seq.block_hashes[index - 1] if index else self.salt
            units = block_hashes(seq.token_ids[index * size : (index + 1) * size], parent)
        return self._marks(index, units)

    def _match(self, seq: Sequence, whole: int) -> list[int]:
        """Its known blocks. Larger ones that came without ids (`adopt`) are told in full now."""
        found, each = (
            self.pool.match(seq.block_hashes[:whole]),
            hashes_per_block(self.limits.block_tokens),
        )
        front = FRONT_BLOCKS // each if each > 1 else 0  # behind it a block's name is all
        for index in range(min(len(found), front)):
            self.pool.mark(seq.block_hashes[index], self._units(seq, index))
        return found

    def _marks(self, index: int, units: list[bytes]) -> list[bytes]:
        """Of a prompt's block: those of its last hashes that routers look up."""
        end = (index + 1) * hashes_per_block(self.limits.block_tokens)
        return [one for at, one in enumerate(units, end - len(units)) if is_looked_up(at)]

    def sampled(self, seq: Sequence, token: int) -> str | None:
        """Appends a sampled token and moves the sequence on; returns its finish reason."""
        seq.token_ids.append(token)
        finish = seq.finish_reason()
        if seq.name not in self.live:
            return finish  # a further answer on a prefill worker: decode begins elsewhere
        filling = seq.queue is self.filling
        if filling and seq.stop_after_first:
            self.filling.leave(seq)
            self.held[seq.attempt_key] = seq.blocks
        elif finish:
            self.end(seq)
        elif filling:
            self.filling.leave(seq)
            self.running.enter(seq)
        elif seq.queue is None:
            (self.ready if seq.blocks else self.waiting).enter(seq)
        return finish

    def fail(self, seq: Sequence, damaged: bool) -> None:
        """Ends a sequence that is filling or running. A transfer may still read held blocks.

        `damaged`: its KV may be no numbers, so nobody shall find its blocks.
        """
        if damaged:
            self.pool.unseal(seq.blocks)
        if seq.stop_after_first:
            self.filling.leave(seq)
            self.held[seq.attempt_key] = seq.blocks
        else:
            self.end(seq)

    def __repr__(self) -> str:
        return (
            f"<Scheduler {len(self.waiting)} waiting, {len(self.filling)} filling, "
            f"{len(self.ready)} ready, {len(self.running)} running, {len(self.held)} held | "
            f"{self.pool!r}>"
        )
