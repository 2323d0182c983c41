"""Which tokens the next step computes (pure).

Life of a sequence, by the queue it stands in:
    waiting     it has no blocks: not yet, or no longer, after a preemption
    prefilling  it has blocks; chunks of its ids are computed step by step
    (none)      its blocks are in `held_blocks`: a transfer will fill them, or still reads them
    ready       its KV has arrived; it waits for a place among those that run
    running     it decodes one token a step

A chunk may end at any multiple of `CHUNK_TOKENS`, or of a block that is smaller: any chunking gives
the same numbers. How long a step with decodes may take, `step_limit` says. A prompt whose first
token is late goes behind the others, and so do its chunks.

A sequence reserves its ids plus a growth allowance, and leaves a few blocks to those that grow.
When a decoding one needs another block and none is left, the youngest is preempted: its blocks are
released, and it is computed again from prompt + generated ids before anything new begins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from operator import attrgetter

from ..kv_transfer.identity import (
    FRONT_BLOCKS,
    block_hashes,
    hashes_per_block,
    is_looked_up,
    partition_salt,
)
from ..protos.frames import AttemptKey
from .blocks import BlockPool
from .options import SchedulerLimits
from .pacing import StepCost, StepWork
from .sequence import Sequence, SequenceQueue
from .step_limit import StepClock, StepPace, step_pace

#: Chunks end on multiples of it, or at the end of the ids. It is less than a block, so that a chunk
#: fits into what decode leaves of a step; and 16 rows are what AMX kernels compute in one tile.
CHUNK_TOKENS = 16
#: So many prompts, first in order, are looked at for late or endangered first tokens. That bounds
#: the time that planning takes, however long the queue is.
RISK_PROMPTS = 8
#: A prompt whose first token is late gets a new deadline, so many seconds from now: the prompts
#: that can be in time go first, but as the new deadline comes near it goes before newer ones.
BACKGROUND_DELAY_S = 10.0
#: Orders of queues: the oldest first; and what is to be prefilled first.
BY_AGE = attrgetter("arrival_number")
BY_PREFILL_ORDER = attrgetter("prefill_order")


@dataclass(slots=True)
class StepPlan:
    """What one step computes. A plan of nothing is false."""

    #: (sequence, how many of its next ids), in the order of `Sequence.prefill_order`
    prefill: list[tuple[Sequence, int]] = field(default_factory=list)
    #: sequences that get one token, and one more for each of their drafts that is right
    decode: list[Sequence] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode)


@dataclass(slots=True)
class PrefillBudget:
    """What a step's decodes leave for prefill.

    Seconds are infinite where the step has no limit, and below 0 where decode alone exceeds it.
    """

    tokens: int  #: prompt tokens, at most
    tail_s: float  #: so that 95 % of the steps (`pacing.TAIL_QUANTILE`) keep the step's limit
    mean_s: float  #: so that a step of predicted length keeps it; a slow one would not


class Scheduler:
    """Owns every live sequence and the block pool. An empty plan stays empty until a command.

    Content hashes are chained: each block's is made of its ids and the hash before. `salt` (the
    model's) and the sequence's cache partition stand for the hash before the first block. The
    hashes that sequences bring must have been made with the same salt.
    """

    def __init__(self, pool: BlockPool, limits: SchedulerLimits, salt: bytes = b"") -> None:
        self.pool = pool
        self.limits = limits  #: what a step, and the pool between steps, may hold
        self.salt = salt
        #: whoever runs the steps calls `observe_step` after each one, which feeds these two
        self.cost = StepCost()
        self.clock = StepClock(limits.itl_budget_s)
        self.live: dict[tuple[AttemptKey, int], Sequence] = {}  #: by name, until they end
        self.waiting = SequenceQueue(BY_PREFILL_ORDER)
        self.prefilling = SequenceQueue(BY_PREFILL_ORDER)
        self.ready = SequenceQueue(BY_AGE)
        self.running = SequenceQueue(BY_AGE)
        #: blocks of a sequence whose transfer is to come or under way
        self.held_blocks: dict[AttemptKey, list[int]] = {}
        #: blocks of a prefix that comes from elsewhere, and the contents that they will hold
        self.staged: dict[AttemptKey, tuple[list[int], list[bytes]]] = {}
        #: blocks that newcomers leave for growth, at most
        self.growth_reserve_blocks = math.ceil(pool.total_blocks * limits.watermark)
        self.preemptions = 0  #: since the start, of all sequences
        self._arrivals = itertools.count(1)
        self._steps_without_prefill = 0  #: in a row, though something is prefilling

    def blocks_for(self, tokens: int) -> int:
        """Returns how many blocks hold the KV of so many tokens."""
        return -(-tokens // self.limits.block_tokens)

    def required_blocks(self, sequence: Sequence) -> int:
        """Returns how many blocks the sequence reserves: for its ids and a growth allowance.

        Each further answer to its prompt takes as many, less the prompt's full blocks, if the pool
        has them.
        """
        length = len(sequence.token_ids)
        if sequence.stop_after_first:
            return self.blocks_for(length)
        tokens_left = sequence.sampling.max_tokens - sequence.generated_tokens
        first_answer = self.blocks_for(length + min(tokens_left, self.limits.growth_tokens))
        shared = sequence.prompt_tokens // self.limits.block_tokens
        all_answers = first_answer + sequence.further_answers * (first_answer - shared)
        return max(first_answer, min(all_answers, self.pool.total_blocks))

    @property
    def planned_step_s(self) -> float:
        """Seconds that a step with prefill beside decode is planned to take at most; 0: no limit.

        That is less than the budget for the gap between two tokens (`itl_budget_s`), by what slow
        steps take longer than predicted, so that nearly all steps keep the budget.
        """
        return (self.limits.itl_budget_s or 0.0) / self.cost.tail_ratio

    # ---- entering ----------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence for its blocks; its prompt is prefilled here."""
        self._register(sequence)
        self.waiting.enter(sequence)

    def reserve(self, sequence: Sequence) -> list[int] | None:
        """Returns blocks for a sequence whose KV is going to arrive; None if there are not enough.

        There are none while a preempted sequence waits for its blocks. The first
        `sequence.published_blocks` ones hold KV already: that prefix is cached here. The blocks
        are held until `commit`, or until `remove` releases them.
        """
        if self._preempted_waits:
            return None
        full_blocks = len(sequence.token_ids) // self.limits.block_tokens
        cached = self._match(sequence, full_blocks)
        allocated = self.pool.allocate(
            self.required_blocks(sequence) - len(cached), self._blocks_to_leave(sequence)
        )
        if allocated is None:
            self.pool.release(cached)
            return None
        self._register(sequence)
        sequence.blocks = cached + allocated
        sequence.published_blocks = len(cached)
        self.held_blocks[sequence.attempt_key] = sequence.blocks
        return sequence.blocks

    def commit(self, sequence: Sequence, waited_s: float = 0.0) -> None:
        """Decodes a sequence whose reserved blocks have the KV of all ids but the last.

        It decodes as soon as there is a place. `waited_s`: seconds since the client got the last id.
        """
        del self.held_blocks[sequence.attempt_key]
        sequence.waited_s = waited_s
        # Whoever computed the KV has sent them: they must not come again after a preemption.
        sequence.prompt_logprobs_sent = sequence.prompt_tokens
        sequence.computed_tokens = len(sequence.token_ids) - 1
        self._publish(sequence)
        self.ready.enter(sequence)

    def fork(self, sequence: Sequence, indices: list[int]) -> list[Sequence]:
        """Makes further answers to a prompt whose KV is complete, in blocks reserved for them.

        They share the prompt's full blocks. The prompt's last block, if it is partly filled, is not
        shared: each fork has its own, and the caller copies the KV into it. Forks that a small pool
        has no blocks for wait like preempted sequences, without any.
        """
        full_blocks = sequence.prompt_tokens // self.limits.block_tokens
        # Each answer gets the same number of blocks behind the shared ones, and at least the one
        # that its first token needs.
        per_answer = max((len(sequence.blocks) - full_blocks) // sequence.sampling.n, 1)
        spare = sequence.blocks[full_blocks + per_answer :]
        sequence.blocks = sequence.blocks[: full_blocks + per_answer]
        forks: list[Sequence] = []
        for index in indices:
            fork = sequence.fork(index)
            own_blocks = spare[:per_answer]
            spare = spare[per_answer:]
            if own_blocks:
                fork.blocks = self.pool.share(sequence.blocks[:full_blocks]) + own_blocks
                fork.computed_tokens = fork.prompt_tokens
                fork.published_blocks = full_blocks
            else:
                fork.was_preempted = True
            self._register(fork)
            forks.append(fork)
        self.pool.release(spare)
        return forks

    def _register(self, sequence: Sequence) -> None:
        assert sequence.name not in self.live, sequence.name
        self.live[sequence.name] = sequence
        sequence.arrival_number = next(self._arrivals)

    @property
    def _preempted_waits(self) -> bool:
        """True while a preempted sequence waits for its blocks: nothing new gets any."""
        return bool(self.waiting) and self.waiting[0].was_preempted

    # ---- prefixes from elsewhere -------------------------------------------------------------

    def stage(self, attempt_key: AttemptKey, hashes: list[bytes], count: int) -> int:
        """Reserves blocks for the first `count` of `hashes`; returns how many are cached here.

        A `count` of 0 only pins the cached blocks. Else blocks are reserved for what is missing
        behind them, all or none. `staged` has the blocks under this key, with the cached ones
        first; or it has no entry, if nothing was missing, or the pool has too few blocks.
        """
        cached = self.pool.match(hashes)
        allocated: list[int] | None = []
        if count:
            missing = count - len(cached)
            allocated = None
            if missing > 0 and not self._preempted_waits:
                allocated = self.pool.allocate(missing, self.growth_reserve_blocks)
        if allocated is not None and (cached or allocated):
            self.staged[attempt_key] = cached + allocated, hashes
        else:
            self.pool.release(cached)
        return len(cached)

    def cache_staged(self, attempt_key: AttemptKey, count: int) -> None:
        """Caches the first `count` staged blocks, which hold what they were reserved for.

        Releases all of them; those that can be found stay in the cache.
        """
        blocks, hashes = self.staged.pop(attempt_key, ([], []))
        # Often there are more hashes than blocks that came; and a probe's blocks have none.
        for index, (block, content) in enumerate(zip(blocks[:count], hashes, strict=False)):
            self.pool.publish(block, content, self._marks(index, [content]))
        self.pool.release(blocks)

    # ---- leaving -----------------------------------------------------------------------------

    def remove(self, attempt_key: AttemptKey) -> None:
        """Ends an attempt's sequences and releases its blocks, held and staged ones too."""
        if attempt_key in self.staged:
            self.cache_staged(attempt_key, 0)  # caches none, releases all
        for name in [name for name in self.live if name[0] == attempt_key]:
            self.end(self.live[name])

    def end(self, sequence: Sequence) -> None:
        """Ends one answer; others to its prompt go on."""
        del self.live[sequence.name]
        if sequence.answer_index == 0:  # held blocks are the first answer's
            self.held_blocks.pop(sequence.attempt_key, None)
        if sequence.queue is not None:
            sequence.queue.leave(sequence)
        self.pool.release(sequence.blocks)

    def fail(self, sequence: Sequence, damaged: bool) -> None:
        """Ends a sequence that is prefilling or running. A transfer may still read held blocks.

        `damaged`: its KV may be no numbers, so nobody shall find its blocks.
        """
        if damaged:
            self.pool.unpublish(sequence.blocks)
        if sequence.stop_after_first:
            # Its blocks are held until the transfer is over and the role calls `remove`.
            self.prefilling.leave(sequence)
            self.held_blocks[sequence.attempt_key] = sequence.blocks
        else:
            self.end(sequence)

    # ---- planning ----------------------------------------------------------------------------

    def plan(self, now: float = 0.0) -> StepPlan:
        """Plans the next step: first decode, then prefill with what decode leaves.

        Those that run get their next block, then others begin. If all that ran were preempted,
        committed ones take their places at once. `now`: seconds, by the clock of the sequences'
        `deadline_s` (the engine's is `time.monotonic`).
        """
        self._put_off_late(self.waiting, now)
        self._put_off_late(self.prefilling, now)
        joined = self._join_running()
        plan = StepPlan()
        draft_rows = self._plan_decode(plan)
        self._admit()
        self._plan_prefill(plan, draft_rows, joined, now)
        if not plan and self.ready:
            return self.plan(now)
        return plan

    def observe_step(self, seconds: float, work: StepWork, *, helped: bool = False) -> float:
        """Learns from a step that took `seconds`; returns what it takes without help.

        A step that cores of idle neighbours `helped` to be fast teaches no cost: the next one may get
        no help. For it, the result is what is predicted by steps without help.
        """
        self.clock.advance(seconds, late_steps=int(seconds > self.clock.late_step_s))
        alone_s = self.cost.step_s(work)
        if helped and seconds < alone_s:
            return alone_s
        self.cost.observe(seconds, work)
        return seconds

    def _put_off_late(self, queue: SequenceQueue, now: float) -> None:
        """Moves prompts whose first token is late by now behind those that can be in time."""
        while True:
            # a `deadline_s` of 0 is no deadline
            late = next(
                (
                    s
                    for s in queue.sequences[:RISK_PROMPTS]
                    # the first token of a preempted sequence has come, so it is not late
                    if 0.0 < s.deadline_s < now and not s.was_preempted
                ),
                None,
            )
            if late is None:
                return
            queue.leave(late)  # before its deadline changes, by which the queue finds its place
            late.background = True
            late.deadline_s = now + BACKGROUND_DELAY_S
            queue.enter(late)

    def _join_running(self) -> list[Sequence]:
        """Moves committed sequences to those that run, while there are places; returns them."""
        joined: list[Sequence] = []
        while self.ready and self._free_places() > 0:
            sequence = self.ready[0]
            self.ready.leave(sequence)
            self._run(sequence)
            joined.append(sequence)
        return joined

    def _run(self, sequence: Sequence) -> None:
        sequence.run_mark = self.clock.mark(sequence)
        self.running.enter(sequence)

    def _plan_decode(self, plan: StepPlan) -> int:
        """Plans each running sequence that gets its next block; returns the number of drafts."""
        draft_rows = 0
        index = 0
        while index < len(self.running):  # preemption shortens the queue from its end
            sequence = self.running[index]
            if self._grow(sequence, len(sequence.drafts)):
                plan.decode.append(sequence)
                draft_rows += len(sequence.drafts)
            index += 1
        return draft_rows

    def _plan_prefill(
        self, plan: StepPlan, draft_rows: int, joined: list[Sequence], now: float
    ) -> None:
        """Plans chunks of the sequences that are prefilling, in order, while there is budget."""
        if not self.prefilling:
            self._steps_without_prefill = 0
            return
        budget = self._prefill_budget(plan.decode, draft_rows, joined, now)
        handover_s = self._handover_s(plan.decode, draft_rows)
        for sequence in self.prefilling:
            if sequence.background and handover_s:
                budget.tail_s -= handover_s  # once: those behind it are background work too
                budget.mean_s -= handover_s
                handover_s = 0.0
            count = self._chunk(sequence, budget, is_first=not plan.prefill)
            if count <= 0:
                break
            plan.prefill.append((sequence, count))
            budget.tokens -= count
            budget.tail_s -= self.cost.prefill_s(count, sequence.computed_tokens)
        self._steps_without_prefill = 0 if plan.prefill else self._steps_without_prefill + 1

    def _chunk(self, sequence: Sequence, budget: PrefillBudget, *, is_first: bool) -> int:
        """Returns how many ids of the sequence the step prefills.

        The first of a step gets up to a block all the same, as far as the mean step has room for
        it; or a whole one, if `prefill_every` steps had none, or as long as nobody knows what
        prefill costs. For background work the smallest chunk stands in for a block. A result of 0
        or less ends the step's prefill.
        """
        computed = sequence.computed_tokens
        block = self.limits.block_tokens
        if sequence.background and self.cost.prefill_measured:
            block = min(CHUNK_TOKENS, block)
        room = self.cost.prefill_room(budget.tail_s, computed, budget.tokens)
        if is_first:
            overdue = self._steps_without_prefill + 1 >= self.limits.prefill_every
            if overdue or not self.cost.prefill_measured:
                room = max(room, block)
            elif room < block:
                room = max(room, self.cost.prefill_room(budget.mean_s, computed, block))
        count = min(len(sequence.token_ids) - computed, room)
        if computed + count < len(sequence.token_ids):
            count -= (computed + count) % min(CHUNK_TOKENS, block)
        return count

    def _prefill_budget(
        self, decode: list[Sequence], draft_rows: int, joined: list[Sequence], now: float
    ) -> PrefillBudget:
        """Returns what the limits leave for prefill beside these sequences and their drafts.

        After a disturbance, slow steps may make `tail_s` nothing. A sequence of `joined` begins
        to run with this step: its client has waited for `waited_s` already, so the step must be
        shorter by that. One that has waited longer than the budget is late however short it is.
        """
        tokens = self.limits.max_step_tokens
        itl_budget_s = self.limits.itl_budget_s
        if itl_budget_s is None or not decode:
            return PrefillBudget(tokens, math.inf, math.inf)
        rows = len(decode) + draft_rows
        kv_tokens = rows + sum(sequence.computed_tokens for sequence in decode)
        decode_s = self.cost.decode_s(rows, kv_tokens)
        pace = step_pace(decode, self.clock, itl_budget_s, decode_s)
        limit_s = pace.limit_s
        if pace.urgent_limit_s > limit_s and self._first_token_at_risk(pace, decode_s, now):
            limit_s = pace.urgent_limit_s
        if not pace.keeps_gaps:
            # Only mean gaps count: slow steps are made up for by fast ones, so no margin for them.
            return PrefillBudget(tokens, limit_s - decode_s, limit_s - decode_s)
        longest_wait_s = 0.0
        for sequence in joined:
            if longest_wait_s < sequence.waited_s < itl_budget_s:
                longest_wait_s = sequence.waited_s
        left_s = limit_s - longest_wait_s
        return PrefillBudget(tokens, left_s / self.cost.tail_ratio - decode_s, left_s - decode_s)

    def _handover_s(self, decode: list[Sequence], draft_rows: int) -> float:
        """Returns the seconds by which background work must leave a step shorter than its limit.

        A sequence whose KV arrives during a step waits for its end, and then for a step of decodes.
        Both are its client's first gap, so the step must be shorter by those decodes.
        """
        held = (self.live[attempt_key, 0] for attempt_key in self.held_blocks)
        arriving = any(not (other.stop_after_first or other.background) for other in held)
        if not arriving or not decode:
            return 0.0
        rows = len(decode) + draft_rows
        kv_tokens = rows + sum(sequence.computed_tokens for sequence in decode)
        return self.cost.decode_s(rows, kv_tokens)

    def _first_token_at_risk(self, pace: StepPace, decode_s: float, now: float) -> bool:
        """Returns whether a first token will be late if steps keep to `pace.limit_s`."""
        # A prompt's first token needs its own prefill and that of the prompts before it. Prefill
        # gets `share` of the time until the deadline.
        share = pace.prefill_share(decode_s)
        work_s = 0.0
        for sequence in itertools.islice(self._prompts_in_order(), RISK_PROMPTS):
            if sequence.background or not sequence.deadline_s:
                continue
            missing = len(sequence.token_ids) - sequence.computed_tokens
            work_s += self.cost.prefill_s(missing, sequence.computed_tokens)
            if work_s > share * (sequence.deadline_s - now):
                return True
        return False

    def _prompts_in_order(self) -> Iterable[Sequence]:
        """Returns the sequences with prompts to compute: first those that have blocks."""
        return itertools.chain(self.prefilling, self.waiting)

    def _free_places(self) -> int:
        """Returns how many more sequences may prefill or run."""
        return self.limits.max_running - len(self.prefilling) - len(self.running)

    def _admit(self) -> None:
        """Moves sequences from waiting to prefilling while the first of the queue fits."""
        while self.waiting and self._free_places() > 0:
            sequence = self.waiting[0]
            required = self.required_blocks(sequence)
            cacheable = sequence.cacheable_tokens // self.limits.block_tokens
            if required - cacheable > self.pool.available_blocks:
                return  # not even if all of its prefix is cached and in use
            cached = self._match(sequence, cacheable)
            allocated = self.pool.allocate(required - len(cached), self._blocks_to_leave(sequence))
            if allocated is None:
                self.pool.release(cached)
                return
            sequence.blocks = cached + allocated
            sequence.computed_tokens = len(cached) * self.limits.block_tokens
            sequence.published_blocks = len(cached)
            if not sequence.was_preempted:  # else it finds its own blocks, which is no cache hit
                sequence.hit_tokens = sequence.computed_tokens
            self.waiting.leave(sequence)
            self.prefilling.enter(sequence)

    def _blocks_to_leave(self, sequence: Sequence) -> int:
        """Returns how many blocks `sequence` must leave in the pool when it gets its own.

        Prefills for a transfer may hold `held_share` of the pool together. So a slow receiver stops
        new prefills, never one that has begun; and a prompt that is larger is computed alone.
        """
        # Held blocks are those of answer 0: further answers begin when the prompt's KV is there.
        held = [self.live[attempt_key, 0] for attempt_key in self.held_blocks]
        if sequence.stop_after_first and _any_prefill_only(held, self.prefilling):
            held_limit = int(self.pool.total_blocks * self.limits.held_share)
            return max(self.growth_reserve_blocks, self.pool.total_blocks - held_limit)
        others = itertools.chain(self.running, self.ready, self.prefilling, held)
        return self._growth_of(others, sequence)

    def _growth_of(self, others: Iterable[Sequence], newcomer: Sequence) -> int:
        """Returns how many blocks the others may still grow by, at most the reserve.

        A preempted sequence that comes back leaves room to older sequences only.
        """
        growth = 0
        for other in others:
            if newcomer.was_preempted and other.arrival_number > newcomer.arrival_number:
                continue
            answer_tokens = 0 if other.stop_after_first else other.sampling.max_tokens
            final_blocks = self.blocks_for(other.prompt_tokens + answer_tokens)
            growth += max(0, final_blocks - len(other.blocks))
            if growth >= self.growth_reserve_blocks:
                return self.growth_reserve_blocks
        return growth

    def _grow(self, sequence: Sequence, drafts: int) -> bool:
        """Makes room for the sequence's next KV, by preempting the youngest if need be.

        `drafts` is the number of guessed ids, which are verified in the same step and need room
        too. Nobody is preempted for guesses: they are dropped instead. Returns False if the
        sequence itself was the youngest, and so is preempted now.
        """
        while True:
            end = sequence.computed_tokens + 1 + drafts
            missing = self.blocks_for(end) - len(sequence.blocks)
            if missing <= 0:
                return True
            allocated = self.pool.allocate(missing)
            if allocated:
                sequence.blocks += allocated
            elif drafts:
                drafts = 0
                sequence.drafts.clear()
            else:
                youngest = self._youngest()
                self._preempt(youngest)
                if youngest is sequence:
                    return False

    def _youngest(self) -> Sequence:
        """Returns the youngest sequence whose blocks no transfer reads or writes, now or later.

        Called for a sequence that runs, so there is one.
        """
        movable = (sequence for sequence in self.prefilling if not sequence.stop_after_first)
        return max((self.running[-1], *self.ready.sequences[-1:], *movable), key=BY_AGE)

    def _preempt(self, sequence: Sequence) -> None:
        """Takes the sequence's blocks; it waits, to be computed again from all of its ids."""
        assert sequence.queue is not None, sequence
        sequence.queue.leave(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed_tokens = 0
        sequence.published_blocks = 0
        sequence.drafts.clear()
        sequence.was_preempted = True
        sequence.preemptions += 1
        sequence.waited_s = 0.0  # that gap was counted when the sequence first ran
        self.waiting.enter(sequence)
        self.preemptions += 1

    def filled_range(self, sequence: Sequence, count: int) -> tuple[int, int, int]:
        """Returns three numbers of blocks, for a prefill of `count` ids.

        Blocks before the first were announced. Those before the second had their KV before this
        step. Those before the third are final after it.
        """
        block = self.limits.block_tokens
        end = sequence.computed_tokens + count
        final = self.blocks_for(end) if end == len(sequence.token_ids) else end // block
        return sequence.filled_blocks, sequence.computed_tokens // block, final

    # ---- decode ahead of the plan ------------------------------------------------------------

    @property
    def must_plan(self) -> bool:
        """True if the next step may do more than give each running sequence its next token.

        Then it must be planned here, once the results of the step before are known. Otherwise it
        can be launched while that step is under way.
        """
        if self.prefilling:
            return True
        if self.limits.draft_tokens and len(self.running) <= self.limits.draft_below:
            return True  # tokens may be guessed, from the ids that the step before gives
        return bool(self.waiting or self.ready) and self._free_places() > 0

    def reserve_ahead(self, sequence: Sequence, count: int) -> bool:
        """Makes room for `count` ids behind the computed ones, where that preempts nobody.

        Returns False where a sequence would have to be preempted: no room is made then.
        """
        missing = self.blocks_for(sequence.computed_tokens + count) - len(sequence.blocks)
        if missing <= 0:
            return True
        allocated = self.pool.allocate(missing)
        if allocated is None:
            return False
        sequence.blocks += allocated
        return True

    # ---- booking -----------------------------------------------------------------------------

    def record_computed(self, sequence: Sequence, count: int) -> bool:
        """Books `count` more ids as computed; True when the last id's logits are there."""
        sequence.computed_tokens += count
        next_border = (sequence.published_blocks + 1) * self.limits.block_tokens
        if sequence.computed_tokens >= next_border:
            self._publish(sequence)
        return sequence.computed_tokens == len(sequence.token_ids)

    def append_token(self, sequence: Sequence, token: int) -> str | None:
        """Appends a sampled token and moves the sequence on; returns its finish reason."""
        sequence.token_ids.append(token)
        finish_reason = sequence.finish_reason()
        if sequence.queue is self.running:  # most are, so this costs no look-up
            if finish_reason:
                self.end(sequence)
            return finish_reason
        if sequence.name not in self.live:
            return finish_reason  # a further answer on a prefill worker: decode begins elsewhere
        prefilling = sequence.queue is self.prefilling
        if prefilling and sequence.stop_after_first:
            self.prefilling.leave(sequence)
            self.held_blocks[sequence.attempt_key] = sequence.blocks
        elif finish_reason:
            self.end(sequence)
        elif prefilling:
            self.prefilling.leave(sequence)
            self._run(sequence)
        elif sequence.queue is None:
            # A further answer, just forked: a queue's order needs it complete, so it enters now.
            queue = self.ready if sequence.blocks else self.waiting
            queue.enter(sequence)
        return finish_reason

    # ---- content hashes ----------------------------------------------------------------------

    def _publish(self, sequence: Sequence) -> None:
        """Publishes the full blocks; the chain of hashes goes on into the generated ids."""
        block = self.limits.block_tokens
        full_blocks = sequence.computed_tokens // block
        for index in range(sequence.published_blocks, full_blocks):
            if index == len(sequence.block_hashes):
                ids = sequence.token_ids[index * block : (index + 1) * block]
                sequence.block_hashes += block_hashes(ids, self._parent(sequence, index), block)
            marks = self._block_marks(sequence, index)
            self.pool.publish(sequence.blocks[index], sequence.block_hashes[index], marks)
        sequence.published_blocks = full_blocks

    def _parent(self, sequence: Sequence, index: int) -> bytes:
        """Returns the content hash in front of block `index`."""
        if index:
            return sequence.block_hashes[index - 1]
        return partition_salt(self.salt, sequence.cache_partition)

    def _match(self, sequence: Sequence, block_limit: int) -> list[int]:
        """References the cached blocks of the sequence, among its first `block_limit`.

        Marks are the hashes that routers are told of. A block of more than 64 tokens has several
        hashes, which only its ids tell; a block that came by `cache_staged` came without ids. So
        such blocks get all their marks now, from the ids of the sequence that uses them.
        """
        cached = self.pool.match(sequence.block_hashes[:block_limit])
        hash_count = hashes_per_block(self.limits.block_tokens)
        if hash_count > 1:
            # behind the front, a block's own hash is the only one that is looked up
            for index in range(min(len(cached), FRONT_BLOCKS // hash_count)):
                marks = self._block_marks(sequence, index)
                self.pool.set_marks(cached[index], marks)
        return cached

    def _block_marks(self, sequence: Sequence, index: int) -> SequenceOf[bytes]:
        """Returns the marks of a block of `sequence`: one for each hash that ends in the block."""
        block = self.limits.block_tokens
        if hashes_per_block(block) == 1:
            return self._marks(index, sequence.block_hashes[index : index + 1])
        ids = sequence.token_ids[index * block : (index + 1) * block]
        return self._marks(index, block_hashes(ids, self._parent(sequence, index)))

    def _marks(self, index: int, hashes: list[bytes]) -> list[bytes]:
        """Returns those of `hashes`, the last ones of block `index`, that routers look up."""
        end = (index + 1) * hashes_per_block(self.limits.block_tokens)
        first = end - len(hashes)
        return [content for position, content in enumerate(hashes, first) if is_looked_up(position)]

    def __repr__(self) -> str:
        return (
            f"<Scheduler {len(self.waiting)} waiting, {len(self.prefilling)} filling, "
            f"{len(self.ready)} ready, {len(self.running)} running, {len(self.held_blocks)} held | "
            f"{self.pool!r}>"
        )


def _any_prefill_only(*groups: Iterable[Sequence]) -> bool:
    """Returns whether any of the sequences stops after its first token."""
    return any(sequence.stop_after_first for group in groups for sequence in group)
