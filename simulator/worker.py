"""One replica in virtual time: the engine's own scheduler and block pool, and a clock.

Every step is planned by `engine.scheduler.Scheduler`: who decodes, which chunks are prefilled, who
waits for blocks, who is preempted. Blocks, their contents and their eviction are
`engine.blocks.BlockPool`. What this file adds is how long a step takes (`Coefficients`), when
tokens reach clients, and what the worker reports. Steps that repeat are planned once (`repeat.py`).

Life of a worker between two events of the simulation:

    set_time(now)       says what time it is, before anything else is called
    catch_up(now)       as set_time; and books the steps that are over by now
    add_prompt, ...     something new; it interrupts the steps that repeat
    next_event_at       when a step ends that ends a prompt or an answer, or that was interrupted
    settle(now)         books what is over, says what has ended, and plans the next steps
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from math import inf

from ..engine.blocks import BlockPool
from ..engine.options import SchedulerLimits
from ..engine.pacing import StepWork, attended_pairs
from ..engine.scheduler import Scheduler, StepPlan
from ..engine.sequence import Sequence
from ..protos.frames import AttemptKey, Sampling, WorkerReport
from .attempt import SimulatedAttempt
from .hardware import Hardware
from .repeat import SAME_MOMENT_S, RepeatedSteps, repetitions
from .tiers import SimulatedTiers, put_below
from .trace import HASH_TOKENS, Trace, WorkloadRequest, block_id_of, looked_up_hashes

HOP_S = 5e-4  #: seconds of one message between gateway, router and worker, as assumed
#: tokens asked for by a client that names no limit: nobody knows an answer's length in advance
DEFAULT_MAX_TOKENS = 4096
#: Token ids mean nothing here but where an answer ends: the scheduler sees a stop token there.
MIDDLE_TOKEN = 0
LAST_TOKEN = 1
STOP_IDS = (LAST_TOKEN,)


class TraceScheduler(Scheduler):
    """The engine's scheduler on blocks that are as large as a trace's, whose contents it names.

    A mark is a content hash that routers look up: `trace.looked_up_hashes` says which ones a block
    has.
    """

    def __init__(self, pool: BlockPool, limits: SchedulerLimits) -> None:
        super().__init__(pool, limits)
        self._hashes_per_block = limits.block_tokens // HASH_TOKENS

    def _block_marks(self, sequence: Sequence, index: int) -> SequenceOf[bytes]:
        name = sequence.block_hashes[index]
        marks = looked_up_hashes(block_id_of(name), index, self._hashes_per_block)
        if len(marks) == 1 and marks[0] == name:
            return (name,)  # the same object: millions of blocks hold one
        return marks


class SimulatedWorker:
    """A replica of `hardware`. Times are seconds of the simulated clock.

    Blocks are as large as those of the `trace`. `role` is prefill, decode or mixed.
    `step_budget_s`: how long a step with decode and prefill may take, `inf` for no limit.
    `itl_target_s`: gaps between two tokens that are longer are late.
    """

    def __init__(
        self,
        name: str,
        role: str,
        hardware: Hardware,
        trace: Trace,
        step_budget_s: float,
        itl_target_s: float,
    ) -> None:
        self.name = name
        self.role = role
        self.cost = hardware.cost
        self.gpus = hardware.gpus
        self.block_tokens = trace.block_tokens
        self.itl_target_s = itl_target_s
        self.skips_repeated_steps = True  #: False: every step is planned (`exact.py`)
        self.slowness = 1.0  #: every step takes this times what `cost` says
        self.is_alive = True  #: False: it has failed, has not joined yet, or was removed
        # Steps vary, so they are planned for less than they may take.
        budget_s = None if step_budget_s == inf else step_budget_s * hardware.planned_share
        limits = SchedulerLimits(
            block_tokens=trace.block_tokens,
            # The engine requires a block at least; a trace's may be larger than a chunk.
            max_step_tokens=max(hardware.chunk_tokens, trace.block_tokens),
            max_running=hardware.max_running,
            itl_budget_s=budget_s,
        )
        pool_blocks = hardware.kv_tokens // trace.block_tokens + 1  # block 0 holds no KV
        self.tiers: SimulatedTiers | None = None  #: below the pool
        self.pool = BlockPool(pool_blocks)
        if hardware.tiers is not None:
            self.tiers = SimulatedTiers(hardware.tiers, trace.block_tokens)
            put_below(self.pool, self.tiers)
        self.scheduler = TraceScheduler(self.pool, limits)
        self.attempts: dict[AttemptKey, SimulatedAttempt] = {}  #: that have a sequence here
        self.without_blocks: list[SimulatedAttempt] = []  #: whose reservation has to wait
        self.reserved: list[SimulatedAttempt] = []  #: since the simulation last looked
        self.joining: list[SimulatedAttempt] = []  #: run from one of the next steps on
        self.joined: list[SimulatedAttempt] = []  #: whose first step here is not booked yet
        #: whose first token came, or comes, from here with a step, until the step behind it is over
        self.first_gap_open: list[SimulatedAttempt] = []
        self.steps: RepeatedSteps | None = None  #: that are under way
        self.has_news = False  #: something arrived while no step is under way
        self.now = 0.0
        self.late_steps = 0  #: booked steps that took longer than the ITL target
        self.preemptions_seen = 0  #: of those that the scheduler counts
        # what the simulation keeps here: the event scheduled for the worker, and its link
        self.event_version = 0
        self.event_at = inf
        self.link_out_free_at = 0.0  #: when the last transfer from here ends
        self.link_in_free_at = 0.0  #: when the last transfer to here ends
        # since the last report
        self.report_number = 0  #: of the last report
        #: Steps were booked. A worker without any that runs nothing either makes no report: what else
        #: happened to it is told by the attempts' own messages.
        self.has_changed = False
        self.prefill_tokens = 0
        self.prefill_seconds = 0.0
        self.decode_steps = 0
        self.decode_seconds = 0.0
        self.loaded_tokens = 0  #: from the tiers
        self.loading_seconds = 0.0  #: of those loads, their wait for others included

    # ---- what arrives ------------------------------------------------------------------------

    def add_prompt(self, attempt: SimulatedAttempt) -> None:
        """Queues the attempt's prompt. It decodes here too, unless it decodes elsewhere."""
        attempt.began_at = self.now
        if attempt.fetched_tokens:
            self._adopt_prefix(attempt)
        sequence = self._make_sequence(attempt)
        sequence.stop_after_first = attempt.is_remote
        self.attempts[attempt.key] = attempt
        self.scheduler.add(sequence)
        self._interrupt()

    def load_prefix(self, attempt: SimulatedAttempt) -> float:
        """Brings what the tiers hold of a prompt into the pool; returns when it is there.

        `add_prompt` finds it then. That is now where the tiers hold nothing that the pool lacks.
        """
        held_blocks, ready_at = self._load(attempt.key, self._cacheable_blocks(attempt), self.now)
        if held_blocks:
            attempt.fetched_tokens = max(attempt.fetched_tokens, held_blocks * self.block_tokens)
        return ready_at

    def serve_prefix(self, attempt: SimulatedAttempt, now: float) -> float:
        """Brings what the tiers hold of a prompt into the pool, for a peer; returns when it is there.

        It is cached at once, which is a little early.
        """
        served_key = (f"{attempt.key[0]}/served", attempt.key[1])
        held_blocks, ready_at = self._load(served_key, self._cacheable_blocks(attempt), now)
        if held_blocks:
            self.scheduler.cache_staged(served_key, held_blocks)
        return ready_at

    def _load(self, key: AttemptKey, names: list[bytes], now: float) -> tuple[int, float]:
        """Begins to load what the tiers hold behind the pool's part of a prefix, into staged blocks.

        Returns how many leading blocks of the prefix are staged under this key then, and when their KV
        is there; 0 and now where there is nothing to load, or no room for it.
        """
        if self.tiers is None:
            return 0, now
        pool_blocks = self.pool.prefix_length(names)
        loaded_blocks = self.tiers.count_held(names[pool_blocks:])
        if not loaded_blocks:
            return 0, now
        held_blocks = pool_blocks + loaded_blocks
        self.scheduler.stage(key, names, held_blocks)
        if key not in self.scheduler.staged:
            return 0, now
        ready_at = self.tiers.load(names[pool_blocks:held_blocks], now)
        self.loaded_tokens += loaded_blocks * self.block_tokens
        self.loading_seconds += ready_at - now
        self.has_changed = True
        return held_blocks, ready_at

    def _cacheable_blocks(self, attempt: SimulatedAttempt) -> list[bytes]:
        """Returns the names of the prompt's full blocks, without the last token's: it is computed."""
        tokens = min(attempt.request.prompt_tokens, attempt.context_tokens - 1)
        return attempt.request.block_names[: tokens // self.block_tokens]

    def _adopt_prefix(self, attempt: SimulatedAttempt) -> None:
        """The prefix that was brought is cached here from now on, if there is room for it."""
        count = attempt.fetched_tokens // self.block_tokens
        if attempt.key in self.scheduler.staged:  # what the tiers have loaded into it
            self.scheduler.cache_staged(attempt.key, count)
        names = attempt.request.block_names[:count]
        self.scheduler.stage(attempt.key, names, count)
        self.scheduler.cache_staged(attempt.key, count)

    def reserve(self, attempt: SimulatedAttempt) -> None:
        """Reserves blocks for KV that is to come, now or as soon as there are enough.

        The attempt is in `reserved` then, where the simulation finds it.
        """
        sequence = self._make_sequence(attempt)
        if self.scheduler.reserve(sequence) is None:
            self.without_blocks.append(attempt)
            return
        self.attempts[attempt.key] = attempt
        attempt.reserved_at = self.now
        cached_tokens = sequence.published_blocks * self.block_tokens
        attempt.moved_tokens = attempt.context_tokens - cached_tokens
        self.reserved.append(attempt)

    def commit(self, attempt: SimulatedAttempt, has_first_token: bool) -> None:
        """Lets an attempt decode, as its KV has arrived.

        `has_first_token`: the attempt's first token was made elsewhere, and comes with the KV.
        """
        sequence = self.scheduler.live[attempt.key, 0]  # its only answer
        if has_first_token:
            sequence.token_ids.append(MIDDLE_TOKEN)
        self._interrupt()
        runs_from = self.steps.ends_at if self.steps is not None else self.now
        waited_s = runs_from - attempt.last_token_at if attempt.last_token_at else 0.0
        self.scheduler.commit(sequence, waited_s)
        self.joining.append(attempt)

    def answer_tokens(self, attempt: SimulatedAttempt) -> int:
        """Returns how many tokens of the answer the attempt's sequence has here; 0 without one."""
        sequence = self.scheduler.live.get((attempt.key, 0))
        return sequence.generated_tokens if sequence is not None else 0

    def release(self, attempt: SimulatedAttempt) -> None:
        """Ends the attempt here, whatever it does, and frees its blocks."""
        self.scheduler.remove(attempt.key)
        self.attempts.pop(attempt.key, None)
        for attempts in (
            self.without_blocks,
            self.reserved,
            self.joining,
            self.joined,
            self.first_gap_open,
        ):
            if attempt in attempts:
                attempts.remove(attempt)
        self._interrupt()

    def _interrupt(self) -> None:
        """Makes the scheduler plan again after the step under way."""
        if self.steps is None:
            self.has_news = True
        else:
            self.steps.interrupt(self.now)

    # ---- sequences ---------------------------------------------------------------------------

    def _make_sequence(self, attempt: SimulatedAttempt) -> Sequence:
        """Returns the sequence as an engine would have it.

        The scheduler must not know how long the answer is, only what the client allows.
        """
        request = attempt.request
        tokens = attempt.context_tokens
        room_tokens = self.capacity_tokens - request.prompt_tokens
        max_tokens = min(request.output_limit or DEFAULT_MAX_TOKENS, room_tokens)
        max_tokens = max(max_tokens, request.output_tokens)
        return Sequence(
            attempt_key=attempt.key,
            token_ids=bytearray(tokens),  # each is MIDDLE_TOKEN
            prompt_tokens=request.prompt_tokens,
            sampling=Sampling(max_tokens=max_tokens, stop_ids=STOP_IDS),
            block_hashes=request.block_names,
            deadline_s=attempt.deadline_s,
            background=attempt.background,
        )

    def cached_tokens(self, request: WorkloadRequest) -> int:
        """Returns how many leading tokens of the prompt the prefix cache holds."""
        full_blocks = request.prompt_tokens // self.block_tokens
        return self.pool.prefix_length(request.block_names[:full_blocks]) * self.block_tokens

    def held_tokens(self, request: WorkloadRequest) -> int:
        """Returns how many leading tokens of the prompt the prefix cache or a tier holds."""
        cached_tokens = self.cached_tokens(request)
        if self.tiers is None:
            return cached_tokens
        full_blocks = request.prompt_tokens // self.block_tokens
        rest = request.block_names[cached_tokens // self.block_tokens : full_blocks]
        return cached_tokens + self.tiers.count_held(rest) * self.block_tokens

    # ---- time --------------------------------------------------------------------------------

    @property
    def next_event_at(self) -> float:
        """When `settle` has something to do, if nothing arrives before; `inf`: never."""
        if self.steps is not None:
            return self.steps.ends_at
        return self.now if self.has_news else inf

    def set_time(self, now: float) -> None:
        """Says what time it is. The steps that are under way are booked later, by `settle`.

        That is enough unless the caller reads what those steps have made: see `catch_up`.
        """
        self.now = now

    def catch_up(self, now: float) -> None:
        """Books the decode steps that are over by `now`, but the last one of their plan.

        Then `answer_tokens` and a report's decode are those of this moment. The rest is left to
        `settle`: steps with prefill are booked together, when the last one of their plan is over.
        """
        self.now = now
        steps = self.steps
        if steps is None or steps.plan.prefill:
            return
        completed = min(steps.completed_by(now), steps.count - 1)
        if completed > steps.booked:
            self._account(steps, completed)
            self._note_first_steps(steps, completed)
            tokens = bytes(completed - steps.booked)  # each is MIDDLE_TOKEN
            for sequence in steps.plan.decode:
                if self._attempt_of(sequence) is not None:
                    self.scheduler.record_computed(sequence, len(tokens))
                    sequence.token_ids.extend(tokens)
            steps.booked = completed

    def settle(self, now: float) -> tuple[list[SimulatedAttempt], list[SimulatedAttempt]]:
        """At `next_event_at`: books the steps that are over, and plans the next ones.

        Returns the attempts whose last token is out, and those whose prompt is computed: an answer
        of one token is among the latter only.
        """
        self.now = now
        self.has_news = False
        ended: list[SimulatedAttempt] = []
        filled: list[SimulatedAttempt] = []
        steps = self.steps
        if steps is not None and now >= steps.ends_at - SAME_MOMENT_S:
            self.steps = None
            self._book(steps, ended, filled)
        if self.without_blocks:
            waiting = self.without_blocks
            self.without_blocks = []
            for attempt in waiting:
                self.reserve(attempt)
        if self.steps is None:
            self._plan()
        return ended, filled

    def _plan(self) -> None:
        """Plans the next step, and how often it repeats; the steps begin now."""
        plan = self.scheduler.plan(self.now)
        if self.scheduler.preemptions > self.preemptions_seen:
            self._note_preempted()
        if not plan:
            return
        shortest_answer = self._shortest_answer(plan) if plan.decode else 1
        count = 1
        if self.skips_repeated_steps:
            count = repetitions(self.scheduler, plan, shortest_answer)
        first_s = self._prefill_seconds(plan) + self._decode_seconds(plan)
        growth_s = 0.0
        if count > 1:
            growth_s = self._growth_seconds(plan)
        self.steps = RepeatedSteps(plan, self.now, first_s=first_s, growth_s=growth_s, count=count)
        if self.joining and plan.decode:
            self._join(self.now + first_s, first_s)

    def _shortest_answer(self, plan: StepPlan) -> int:
        """Returns the tokens until the first of the answers that the plan decodes is complete."""
        attempts = self.attempts
        return min(
            attempts[sequence.attempt_key].request.output_tokens - sequence.generated_tokens
            for sequence in plan.decode
        )

    def _kv_tokens(self, plan: StepPlan) -> int:
        """Returns how many tokens the decodes of the plan's next step read."""
        kv_tokens = 0
        for sequence in plan.decode:
            kv_tokens += len(sequence.token_ids)
        return kv_tokens

    def _decode_seconds(self, plan: StepPlan) -> float:
        """Returns how long the decodes of the plan's next step take."""
        if not plan.decode:
            return 0.0
        return self.cost.step_s(len(plan.decode), self._kv_tokens(plan)) * self.slowness

    def _prefill_seconds(self, plan: StepPlan) -> float:
        """Returns how long the chunks take; each has its share of `prefill_base`, by its tokens.

        An attempt's `prefill_factor` makes the router's prediction wrong, where a run is to have
        mispredictions; else it is 1.
        """
        cost = self.cost
        seconds = 0.0
        for sequence, tokens in plan.prefill:
            uncached_tokens = len(sequence.token_ids) - sequence.hit_tokens
            chunk_s = cost.prefill_s(tokens, sequence.computed_tokens + tokens)
            chunk_s -= cost.prefill_base * (1 - tokens / uncached_tokens)
            seconds += chunk_s * self.attempts[sequence.attempt_key].prefill_factor
        return seconds * self.slowness

    def _growth_seconds(self, plan: StepPlan) -> float:
        """Returns how much longer the next step takes than this one, if its plan is the same.

        Each decode reads one more token; a chunk attends to one more chunk. A plan that repeats has
        decodes only, or a single chunk.
        """
        if plan.decode:
            return self.cost.step_token * len(plan.decode) * self.slowness
        sequence, tokens = plan.prefill[0]
        factor = self.attempts[sequence.attempt_key].prefill_factor
        return self.cost.prefill_pair * tokens * tokens * factor * self.slowness

    # ---- booking -----------------------------------------------------------------------------

    def _book(
        self, steps: RepeatedSteps, ended: list[SimulatedAttempt], filled: list[SimulatedAttempt]
    ) -> None:
        """Books all steps that were not booked yet. The last one may end prompts and answers."""
        plan = steps.plan
        self._account(steps, steps.count)
        self._note_first_steps(steps, steps.count)
        for sequence, tokens in plan.prefill:
            self._book_chunks(sequence, tokens * steps.count, ended, filled)
        count = steps.count - steps.booked
        # None is left if the steps were interrupted at the end of one that was booked already.
        for sequence in plan.decode if count else ():
            attempt = self._attempt_of(sequence)
            if attempt is None:
                continue
            self.scheduler.record_computed(sequence, count)
            sequence.token_ids.extend(bytes(count - 1))  # each is MIDDLE_TOKEN
            if sequence.generated_tokens + 1 < attempt.request.output_tokens:
                sequence.token_ids.append(MIDDLE_TOKEN)
            else:
                self._end(sequence, attempt)
                ended.append(attempt)

    def _attempt_of(self, sequence: Sequence) -> SimulatedAttempt | None:
        """Returns the attempt of a planned sequence; None if it was taken away during the step."""
        return self.attempts.get(sequence.attempt_key)

    def _account(self, steps: RepeatedSteps, last: int) -> None:
        """Counts the time of the steps up to number `last`, and those of them that were late.

        The scheduler's cost model learns from the mean of them.
        """
        count = last - steps.accounted
        if count <= 0:
            return
        self.has_changed = True
        plan = steps.plan
        seconds = steps.seconds_of(steps.accounted, last)
        self.late_steps += steps.longer_than(self.itl_target_s, steps.accounted, last)
        if plan.prefill:
            tokens = sum([tokens for _, tokens in plan.prefill])
            self.prefill_tokens += tokens * count
            self.prefill_seconds += seconds - self._decode_seconds(plan) * count
        else:
            self.decode_steps += count
            self.decode_seconds += seconds
        clock = self.scheduler.clock  # by which the scheduler knows whose ITL target is lost
        clock.advance(seconds, steps.longer_than(clock.late_step_s, steps.accounted, last))
        if self.scheduler.limits.itl_budget_s is not None:
            self._learn(steps, count, seconds / count)
        steps.accounted = last

    def _learn(self, steps: RepeatedSteps, count: int, mean_s: float) -> None:
        """Teaches the scheduler what the mean of the next `count` steps took.

        Decode alone whose time it predicts right already teaches nothing, and is most of a run.
        """
        plan = steps.plan
        rows = len(plan.decode)
        kv_tokens = 0
        if rows:
            ahead = steps.accounted - steps.booked
            kv_tokens = self._kv_tokens(plan) + rows * ahead + rows * (count - 1) // 2
        cost = self.scheduler.cost
        if not plan.prefill and abs(cost.decode_s(rows, kv_tokens) - mean_s) < 1e-6 * mean_s:
            return
        prefill_tokens = 0
        pairs = 0
        for sequence, tokens in plan.prefill:
            prefill_tokens += tokens
            start = sequence.computed_tokens + tokens * (count - 1) // 2
            pairs += attended_pairs(tokens, start)
        work = StepWork(
            decode_rows=rows,
            decode_kv_tokens=kv_tokens,
            prefill_tokens=prefill_tokens,
            attended_pairs=pairs,
            prefill_prompts=len(plan.prefill),
        )
        cost.observe(mean_s, work)

    def _book_chunks(
        self,
        sequence: Sequence,
        tokens: int,
        ended: list[SimulatedAttempt],
        filled: list[SimulatedAttempt],
    ) -> None:
        """Books prefilled tokens; with a prompt's last ones comes a token.

        An attempt's prompt is filled once. Its token is the first one, or the next one if the
        attempt goes on where another failed; in some systems the decode worker sends it. What is
        computed again after a preemption, on the worker that decodes, gives the answer's next
        token, which may be the last.
        """
        attempt = self._attempt_of(sequence)
        if attempt is None or not self.scheduler.record_computed(sequence, tokens):
            return
        is_complete = sequence.generated_tokens + 1 >= attempt.request.output_tokens
        is_filled_now = not attempt.filled_at
        if is_filled_now:
            attempt.hit_tokens = sequence.hit_tokens
            attempt.filled_at = self.now
            filled.append(attempt)
        if attempt.prefill_sends_token or not is_filled_now:
            token_at = self.now + HOP_S
            self._note_gap(attempt, self._gap_before(attempt, token_at))
            attempt.last_token_at = token_at
        self.scheduler.append_token(sequence, LAST_TOKEN if is_complete else MIDDLE_TOKEN)
        if sequence.stop_after_first:
            return
        if not is_complete:
            self.joining.append(attempt)
            return
        del self.attempts[attempt.key]
        if not is_filled_now:
            ended.append(attempt)

    def _join(self, step_ends_at: float, step_s: float) -> None:
        """The attempts that have just begun to run get a token at the end of this step."""
        still_waiting: list[SimulatedAttempt] = []
        for attempt in self.joining:
            if self.scheduler.live[attempt.key, 0].queue is not self.scheduler.running:
                still_waiting.append(attempt)
                continue
            attempt.gap_before_run_s = self._gap_before(attempt, step_ends_at + HOP_S)
            if not attempt.last_token_at:
                self.first_gap_open.append(attempt)
            self.joined.append(attempt)
            attempt.late_steps_before = self.late_steps + (step_s > self.itl_target_s)
            attempt.is_running = True
        self.joining = still_waiting

    def _gap_before(self, attempt: SimulatedAttempt, token_at: float) -> float:
        """Returns the gap that this token ends; 0 for the first one, whose time it notes.

        A gateway may hold the first token back (`router.first_token`), so that the gap to the
        second one is shorter.
        """
        if not attempt.last_token_at:
            attempt.first_token_at = token_at
            return 0.0
        gap_s = token_at - attempt.last_token_at
        hold = attempt.first_token_hold
        if hold is not None:  # the client has the first token since it was let out
            attempt.first_token_hold = None
            attempt.first_token_at = hold.second_token(token_at)
            gap_s = token_at - attempt.first_token_at
        return gap_s

    def _note_gap(self, attempt: SimulatedAttempt, gap_s: float) -> None:
        """Counts a gap that is no step's; those between two steps in a row are `late_steps`."""
        if not attempt.first_gap_s:
            attempt.first_gap_s = gap_s
        attempt.late_gaps += gap_s > self.itl_target_s

    def _note_first_steps(self, steps: RepeatedSteps, completed: int) -> None:
        """Notes the gaps that end with the first steps of attempts, as these steps are over now.

        Steps that were not booked yet are over up to number `completed`, which is one at least.
        """
        for attempt in self.joined:
            self._note_gap(attempt, attempt.gap_before_run_s)
        self.joined.clear()
        for number in range(steps.booked, completed):
            if not self.first_gap_open:
                return
            token_at = steps.end_of(number + 1) + HOP_S
            still_open: list[SimulatedAttempt] = []
            for attempt in self.first_gap_open:
                if token_at > attempt.first_token_at:
                    attempt.first_gap_s = token_at - attempt.first_token_at
                else:
                    still_open.append(attempt)  # the first token came with this step
            self.first_gap_open = still_open

    def stop_running(self, attempt: SimulatedAttempt) -> None:
        """Counts the late gaps of an attempt's run, which is over; of no effect without one.

        They are the late steps since it began to run. An attempt that is stopped within its first
        step here gets no token of it.
        """
        if not attempt.is_running:
            return
        attempt.is_running = False
        stopped_at = self.now + HOP_S
        if attempt in self.joined:
            if attempt.last_token_at:
                attempt.first_token_at = min(attempt.first_token_at, stopped_at)  # was it held?
            else:
                attempt.first_token_at = 0.0
            return
        attempt.late_gaps += self.late_steps - attempt.late_steps_before
        attempt.last_token_at = stopped_at
        if self.steps is not None:
            attempt.last_token_at = self.steps.end_of(self.steps.booked) + HOP_S

    def _end(self, sequence: Sequence, attempt: SimulatedAttempt) -> None:
        """Ends a complete answer."""
        self.scheduler.append_token(sequence, LAST_TOKEN)
        self.stop_running(attempt)
        if attempt in self.first_gap_open:
            self.first_gap_open.remove(attempt)
        del self.attempts[attempt.key]

    def _note_preempted(self) -> None:
        """The scheduler took blocks away: who ran gets the next token when it is computed again."""
        self.preemptions_seen = self.scheduler.preemptions
        for sequence in self.scheduler.waiting:
            attempt = self.attempts[sequence.attempt_key]
            for waiting in (self.joining, self.first_gap_open):
                if attempt in waiting:
                    waiting.remove(attempt)
            self.stop_running(attempt)

    # ---- reports -----------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """How many sequences decode."""
        return len(self.scheduler.running)

    def running_tokens(self, now: float) -> int:
        """Returns how many tokens the sequences that decode have."""
        unbooked = 0
        if self.steps is not None and not self.steps.plan.prefill:
            unbooked = self.steps.completed_by(now) - self.steps.booked
        tokens = sum([len(sequence.token_ids) for sequence in self.scheduler.running])
        return tokens + unbooked * self.running

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the KV pool can hold."""
        return self.pool.total_blocks * self.block_tokens

    def report(self, now: float) -> WorkerReport:
        """Returns what has happened since the last report. Blocks are counted in `HASH_TOKENS`."""
        self.now = now
        if self.steps is not None and not self.steps.plan.prefill:
            self._account(self.steps, self.steps.completed_by(now))
        self.report_number += 1
        changes = self.pool.drain_events()
        preempted = sum(sequence.was_preempted for sequence in self.scheduler.waiting)
        report = WorkerReport(
            seq=self.report_number,
            free_blocks=self.pool.available_blocks * (self.block_tokens // HASH_TOKENS),
            stored=changes.stored,
            evicted=changes.evicted,
            demoted=changes.demoted,
            loaded_tokens=self.loaded_tokens,
            loading_seconds=self.loading_seconds,
            prefill_tokens=self.prefill_tokens,
            prefill_seconds=self.prefill_seconds,
            running=self.running,
            kv_tokens=self.running_tokens(now),
            steps=self.decode_steps,
            step_seconds=self.decode_seconds,
            waiting=preempted + len(self.without_blocks),
        )
        self.prefill_tokens = 0
        self.prefill_seconds = 0.0
        self.decode_steps = 0
        self.decode_seconds = 0.0
        self.loaded_tokens = 0
        self.loading_seconds = 0.0
        self.has_changed = False
        return report

    def restart_reports(self) -> None:
        """Begins a new series of reports: the router is told of all cached blocks."""
        self.report_number = 0
        self.pool.drain_events()
