"""One replica in virtual time, event by event: what happens between two events is in closed form.

Decode is a clock that counts steps: each running sequence gets one token a step, so one that joins
at step v leaves at v + its tokens. With B rows that read K tokens a step takes s = a + b K, and K
grows by B a step: m steps take m s + b B m^2 / 2. Prefill is work in seconds; beside decode it gets
what a step has left of the ITL budget (whole blocks, at most `chunk_tokens`), alone all the time.
Where a step has less left than a block takes, one of `STARVED_STEPS` computes a block: all take the
mean, and that one is late if it exceeds the target. A step that somebody joins leaves to prefill
what their wait for it leaves of the budget.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from math import ceil, inf, sqrt

from ..protos.frames import Coefficients
from .trace import Request, Run

STARVED_STEPS = 8  #: so many steps after the last one the engine prefills a block all the same
BLOCK = 64  #: tokens of that block
BUCKET_S = 1e-3  #: of the histogram of gaps


class Job:
    """One attempt at one request, and what was measured of it."""

    __slots__ = (
        *("request", "key", "arrived", "ready", "started", "first", "hit", "prefill", "decode"),
        *("joined", "late0", "late", "ended", "context", "left", "first_gap", "remote", "target"),
        *(
            "work",
            "resumed",
            "moved",
            "done",
            "outcome",
            "predicted",
            "fetched",
            "deadline",
            "halted",
            "evicted",
        ),
    )

    def __init__(self, request: Request, key: tuple[str, int], arrived: float) -> None:
        self.request, self.key, self.arrived = request, key, arrived
        self.context = request.prompt  #: tokens with KV once it is prefilled
        self.left = request.output - 1  #: tokens to decode after the first
        self.first = self.ended = self.started = self.ready = self.target = 0.0
        self.first_gap = self.late0 = self.joined = self.work = 0.0
        self.deadline = 0.0  #: earlier ones are computed first; 0: as they come
        self.halted: tuple[float, float, float, float] | None = None
        self.hit = self.moved = self.late = self.fetched = 0
        self.remote = self.resumed = self.done = False
        self.evicted = False  #: preempted, and not computed again
        self.prefill: Worker | None = None
        self.decode: Worker | None = None
        self.outcome = ""
        self.predicted = 0.0


class Worker:
    """`advance(now)`, then `join`/`submit`/`finish`; `due()` says when something happens here."""

    def __init__(
        self, name: str, role: str, cost: Coefficients, kv_tokens: int, unit: int, budget_s: float
    ) -> None:
        self.name, self.role, self.cost = name, role, cost
        self.capacity, self.unit, self.budget_s = kv_tokens, unit, budget_s
        self.itl_s = inf  #: a step longer than this is late
        self.planned = 1.0  #: share of the budget that chunks are planned for
        self.chunk_tokens, self.max_running = 8192, 512
        self.slow = 1.0
        self.alive = True
        self.version = 0  #: of the event scheduled for it
        self.scheduled = inf
        self.at = 0.0  #: time of the state below
        self.clock = 0.0  #: steps done
        self.rows, self.tokens = 0, 0.0
        self.leaving: list[tuple[float, int, Job]] = []
        self.ready: deque[Job] = deque()  #: KV is here, no place among those that run
        self.fill: list[Job] = []  #: prompts to prefill, as they came; halted ones behind
        self.urgencies = False  #: some prompt came with a deadline: the most urgent goes first
        self.head: Job | None = None
        self.rest = 0.0  #: seconds of prefill that the head still needs
        self.head_s = 0.0  #: and needed when it began
        self.cap_s = 0.0  #: seconds of prefill in a chunk of the head, at most
        self.block_s = 0.0  #: and in a block of it
        self.joined_at = -1.0  #: the step that somebody joined last
        self.yielded = 0.0  #: seconds of its chunk that it left to them
        self.egress = self.ingress = 0.0  #: when its link is free, each way
        self.cache: OrderedDict[int, Run] = OrderedDict()
        self.cached_blocks = 0
        self.stored: list[Run] = []  #: since the last report
        self.evicted: list[Run] = []
        self.late = 0.0
        self.burst = 0.0  #: the step that computes a starved prompt's block; the others do without
        self.gaps = [0.0] * 1001
        self.preempted = 0
        self._numbers = 0
        self.dirty = False
        self.seq = 0
        self.prefill_tokens, self.prefill_s = 0, 0.0  #: since the last report
        self.steps, self.steps_s = 0.0, 0.0
        self._step()

    # ---- time ------------------------------------------------------------------------------------

    def _step(self) -> None:
        """The step's length from here on, and how it grows; call when rows or head change."""
        cost, rows = self.cost, self.rows
        if not rows:
            self.base = self.growth = self.chunk = self.burst = 0.0
            return
        weights = cost.step_row * rows
        if weights < cost.step_weights:
            weights = cost.step_weights
        decode = self.slow * (cost.step_base + weights + cost.step_token * self.tokens)
        self.growth = self.slow * cost.step_token * rows
        self.chunk = self.burst = 0.0
        head = self.head
        if head is not None:
            self.chunk = self._beside(self.budget_s, decode)
            if self.chunk <= 0:
                self.chunk = self.block_s / STARVED_STEPS
                self.burst = decode + self.block_s
        self.base = decode + self.chunk

    def _beside(self, budget_s: float, decode: float) -> float:
        """Seconds of a chunk: within the planned share, a block if at least the budget has room."""
        chunk = self._fits_in(budget_s * self.planned - decode)
        return chunk if chunk > 0 else min(self._fits_in(budget_s - decode), self.block_s)

    def _fits_in(self, seconds: float) -> float:
        """Seconds of the head's largest chunk that takes no longer: chunks are whole blocks."""
        if seconds >= self.cap_s:
            return self.cap_s
        return int(seconds / self.block_s) * self.block_s if seconds > 0 else 0.0

    def advance(self, now: float) -> None:
        """Brings the state to `now`; nothing ends on the way (see `due`)."""
        span = now - self.at
        self.at = now
        if span <= 0:
            return
        if not self.rows:
            if self.head is not None:
                self.rest -= span
            return
        base, growth = self.base, self.growth
        if self.chunk:
            steps = span / base
            self.rest -= steps * self.chunk
            last = base
        else:
            steps = span / base
            if growth * steps > 1e-6 * base:
                steps = (sqrt(base * base + 2 * growth * span) - base) / growth
            last = base + growth * steps
        self.clock += steps
        self.tokens += self.rows * steps
        if not self.chunk:
            self.steps += steps
            self.steps_s += span
        elif self.burst:
            others = steps * (1 - 1 / STARVED_STEPS)
            self.steps += others
            self.steps_s += others * (base - self.chunk)
        bucket = int((base + last) / (2 * BUCKET_S))
        self.gaps[bucket if bucket < 1000 else 1000] += self.rows * steps
        if self.burst and base - self.chunk <= self.itl_s:
            self.late += steps / STARVED_STEPS if self.burst > self.itl_s else 0.0
        elif last > self.itl_s:
            over = 1.0 if base > self.itl_s else (last - self.itl_s) / (last - base)
            self.late += steps * over
        self._step()

    def due(self) -> float:
        """When the next thing ends or begins here, if nobody interferes."""
        head = self.head
        if not self.rows:
            if head is None:
                return self._next_begin()
            if not self.urgencies:
                return self.at + (self.rest if self.rest > 0 else 0.0)
            coming = self._more_urgent()
            if coming <= self.at:
                return self.at + self._to_border()
            end = self.at + (self.rest if self.rest > 0 else 0.0)
            return coming if coming < end else end
        steps = self.leaving[0][0] - self.clock
        if steps < 0:
            steps = 0.0
        if self.tokens + self.rows * steps > self.capacity and self.rows > 1:
            full = (self.capacity - self.tokens) / self.rows + 1e-3  # somebody has to go then
            steps = full if full > 0 else 0.0
        if head is None:
            end = self.at + steps * self.base + self.growth * steps * steps / 2
            begin = self._next_begin()
            return begin if begin < end else end
        coming = self._more_urgent() if self.urgencies else inf
        if coming <= self.at:
            return self.at + min(steps, 1.0) * self.base
        rest = self.rest if self.rest > 0 else 0.0
        whole = int(rest / self.chunk)
        if whole < steps:  # the last chunk takes a step of its own, as long as it needs
            last = rest - whole * self.chunk
            if last > 1e-9:
                last += self.base - self.chunk
            end = self.at + whole * self.base + last
        else:
            end = self.at + steps * self.base
        return coming if coming < end else end

    def _next_begin(self) -> float:
        """When a prompt can begin that waits for its frame, or for a prefix from elsewhere."""
        begin = inf
        for job in self.fill:
            if job.ready <= self.at:
                return self.at
            if job.ready < begin:
                begin = job.ready
        return begin

    def settle(self) -> tuple[list[Job], list[Job]]:
        """At a due time: (jobs whose last token is out, jobs whose prompt is computed)."""
        ended: list[Job] = []
        leaving, clock = self.leaving, self.clock + 1e-7
        while leaving and leaving[0][0] <= clock:
            job = heapq.heappop(leaving)[2]
            self._leave(job)
            ended.append(job)
        filled: list[Job] = []
        if self.head is not None and self.rest <= 1e-9:
            done, self.head = self.head, None
            filled.append(done)
            self.prefill_tokens += done.context - done.hit
            self.prefill_s += self.head_s
            self.dirty = True
        if self.head is not None and self.urgencies and self._more_urgent() <= self.at:
            self._halt()
        if self.head is None and self.fill:
            self._begin_next()
        while self.ready and self._fits(self.ready[0]):
            self._enter(self.ready.popleft())
        if self.rows and self.tokens > self.capacity:
            self._preempt()
        self._step()
        return ended, filled

    # ---- order of prompts ----------------------------------------------------------------------

    def _begin_next(self) -> None:
        """The first that is ready; by deadline, if any has one."""
        ready = [job for job in self.fill if job.ready <= self.at + 1e-12]
        if not ready:
            return
        job = min(ready, key=lambda one: one.deadline) if self.urgencies else ready[0]
        self.fill.remove(job)
        self._begin(job)

    def _more_urgent(self) -> float:
        """When a prompt is ready that goes before the head; inf: none."""
        assert self.head is not None
        limit = self.head.deadline
        return min((job.ready for job in self.fill if job.deadline < limit), default=inf)

    def _to_border(self) -> float:
        """Seconds to the end of the chunk under way: only there may another prompt go on."""
        done = self.head_s - self.rest
        chunks = ceil(done / self.cap_s - 1e-6)
        left = min(self.rest, chunks * self.cap_s - done)
        return left if left > 0 else 0.0

    def _halt(self) -> None:
        """At a border of chunks (or of steps, beside decode) the head makes way."""
        head = self.head
        if head is None or (not self.rows and self._to_border() > 1e-9):
            return
        head.halted = (self.rest, self.head_s, self.cap_s, self.block_s)
        self.fill.append(head)
        self.head = None

    # ---- prefill ---------------------------------------------------------------------------------

    def submit(self, job: Job, ready: float) -> None:
        job.ready = ready
        self.urgencies = self.urgencies or job.deadline > 0
        self.fill.append(job)

    def _begin(self, job: Job) -> None:
        if job.halted is not None:
            self.rest, self.head_s, self.cap_s, self.block_s = job.halted
            job.halted, self.head = None, job
            return
        job.started = self.at
        request = job.request
        job.hit = self.cached(request)
        if job.fetched > job.hit:
            job.hit = job.fetched
        if job.hit >= job.context:
            job.hit = job.context - 1
        uncached = job.context - job.hit
        cost = self.cost
        pairs = (job.context * job.context - job.hit * job.hit) / 2
        seconds = cost.prefill_token * uncached + cost.prefill_pair * pairs
        noise = job.work if job.work else 1.0
        self.rest = self.head_s = self.slow * noise * (cost.prefill_base + seconds)
        self.cap_s = self.rest * min(1.0, self.chunk_tokens / uncached)
        self.block_s = self.rest * min(1.0, BLOCK / uncached)
        self.head = job

    def cached(self, request: Request) -> int:
        """Leading tokens of the prompt that the prefix cache holds."""
        cache, count = self.cache, 0
        for run in request.runs:
            if run[0] not in cache:
                break
            count += run[1]
        return count * self.unit

    def keep(self, request: Request, answer: bool = False) -> None:
        """Caches the blocks of the prompt, or of the answer; the head as the latest used."""
        cache = self.cache
        touch, store = cache.move_to_end, self.stored.append
        for run in reversed(request.answers if answer else request.runs):
            block = run[0]
            if block in cache:
                touch(block)
            else:
                cache[block] = run
                self.cached_blocks += run[1]
                store(run)
        self.dirty = True
        over = self.cached_blocks - int(self.capacity - self.tokens) // self.unit
        while over > 0 and cache:
            run = cache.popitem(last=False)[1]
            self.evicted.append(run)
            self.cached_blocks -= run[1]
            over -= run[1]

    @property
    def free_tokens(self) -> int:
        return max(0, int(self.capacity - self.tokens))

    @property
    def waiting(self) -> int:
        """Sequences that were preempted and have no blocks."""
        return sum(job.evicted for job in self.fill) if self.preempted else 0

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        """Names (stored, evicted) since the last call, as the blocks ended: none is in both."""
        cache = self.cache
        stored: list[bytes] = []
        evicted: list[bytes] = []
        for run in self.stored:
            if run[0] in cache:
                stored += run[2]
        for run in self.evicted:
            if run[0] not in cache:
                evicted += run[2]
        self.stored, self.evicted = [], []
        return stored, evicted

    # ---- decode ----------------------------------------------------------------------------------

    def _fits(self, job: Job) -> bool:
        if self.rows >= self.max_running:
            return False
        return not self.rows or self.tokens + job.context + 1 <= self.capacity

    def join(self, job: Job) -> None:
        """KV is here: decodes from the next step on, if there is room."""
        if not self.ready and self._fits(job):
            self._enter(job)
            self._step()
        else:
            self.ready.append(job)

    def _enter(self, job: Job) -> None:
        start = self.clock  # its prompt was computed here, and ended with a step
        if self.rows and job.prefill is not self:
            start = float(ceil(start - 1e-9))
        wait = (start - self.clock) * self.base
        self.rows += 1
        self.tokens += job.context
        job.joined, job.evicted = start, False
        job.late0 = self.late
        self._step()
        gap = self._own_step(job, start, wait) - job.first
        if not job.first:  # the first token is decode's to send
            job.first = gap
        elif job.resumed:
            job.late += 1
        else:
            job.first_gap = gap
            job.late += gap > self.itl_s
            bucket = int(gap / BUCKET_S)
            self.gaps[bucket if bucket < 1000 else 1000] += 1
        self._numbers += 1
        heapq.heappush(self.leaving, (start + job.left, self._numbers, job))

    def _own_step(self, job: Job, start: float, wait: float) -> float:
        """When the step that `job` joins ends: its chunk is smaller by what the job has waited."""
        begin = self.at + wait
        waited = begin - job.first
        if self.chunk <= 0 or self.burst or waited >= self.budget_s:
            return begin + self.base
        decode = self.base - self.chunk
        less = self.chunk - min(self.chunk, self._beside(self.budget_s - waited, decode))
        before = self.yielded if start == self.joined_at else 0.0
        self.joined_at, self.yielded = start, max(less, before)
        self.rest += (self.yielded - before) * decode / self.base  # one more step reads its rows
        return begin + self.base - min(self.yielded, self.chunk)

    def _leave(self, job: Job) -> None:
        self.rows -= 1
        made = self.clock - job.joined
        self.tokens -= job.context + made
        if not self.rows:
            self.tokens = 0.0
        steps_late = self.late - job.late0
        job.late += int(steps_late + 0.5)

    def _preempt(self) -> None:
        """The youngest gives its KV back and is computed again, here."""
        if self.rows == 1:
            return
        victim = max(self.leaving, key=lambda entry: entry[1])
        self.leaving.remove(victim)
        heapq.heapify(self.leaving)
        job = victim[2]
        made = int(self.clock - job.joined)
        self._leave(job)
        job.context += made
        job.left = max(1, job.left - made)
        job.resumed = job.evicted = True
        job.ready = self.at
        self.fill.insert(0, job)
        self.preempted += 1

    def forget(self, job: Job) -> None:
        """Takes a job out, wherever it stands: the other end of its transfer is gone."""
        if job is self.head:
            self.head = None
        elif job in self.fill:
            self.fill.remove(job)
        elif job in self.ready:
            self.ready.remove(job)
        else:
            kept = [entry for entry in self.leaving if entry[2] is not job]
            if len(kept) < len(self.leaving):
                self.leaving = kept
                heapq.heapify(self.leaving)
                self._leave(job)
        self._step()
