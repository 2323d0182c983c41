"""What the router knows of one worker, and the work that it has given to that worker.

Life of a prompt on a worker:
    placed          -> a `PrefillWork` in `pending_prefills`, in the order of deadlines
    first token out -> removed; the observed seconds correct the worker's speed
Life of a decode reservation:
    placed          -> a `DecodeReservation`: its blocks, rows and KV tokens count at once
    attempt ended   -> released

Own placements count at once; reports, however late, only correct speeds and publish prefixes. So a
stale report never makes two requests believe in the same room.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from ..protos.frames import AttemptKey, Coefficients, WorkerCard
from .predictor import Correction

#: Cost of a full KV pool, as seconds of a step; it grows with the square of the share in use, so
#: that a pool that is nearly full is avoided and a pool that is half full hardly.
FULL_POOL_S = 0.01
#: Tokens that came back from the tiers: after so many, a moving average of their time is half new.
LOADED_TOKENS = 8192
SLOW_STEP_FACTOR = 1.5  #: a worker's ITL target is at least so many times its shortest step


@dataclass(slots=True, eq=False)
class PrefillWork:
    """A prompt that a worker was given and whose first token is not out."""

    seconds: float  #: predicted time of the prefill alone
    uncached_tokens: int
    prompt_tokens: int
    assigned_at: float  #: when the router placed it
    deadline: float = 0.0  #: the worker computes in this order; equal ones as they came
    #: It waited for a chunk, a fetch or a load, so its time says nothing of the worker's speed.
    delayed: bool = False
    background: bool = False  #: it cannot be in time any more: others go before it
    #: Of its uncached tokens, by prediction, computed in the last step of a prompt before it.
    computed_tokens: int = 0


@dataclass(slots=True, eq=False)
class DecodeReservation:
    """What one request takes up on a decode worker."""

    blocks: int  #: reserved now
    expected_blocks: int  #: in use at the request's expected end
    kv_tokens: float  #: read by a step for this request, on average over its life
    rows: int = 1  #: rows of a step: one for each answer


@dataclass(slots=True, eq=False)
class WorkerState:
    """One worker as the router sees it. Times are seconds of the caller's clock.

    `WorkerFleet` is the only writer. The attributes behind "derived" are kept up to date by it,
    because many requests read them between two changes.
    """

    slot: int  #: the worker's number in the fleet and in the index; reused after it is lost
    card: WorkerCard
    nominal_cost: Coefficients  #: its speed, as its card or its type says
    cost: Coefficients  #: the same, corrected by what was observed
    prefill_correction: Correction  #: observed over predicted prefill times
    step_correction: Correction  #: observed over predicted times of a decode step
    last_report: int = 0  #: number of the last report
    alive: bool = True  #: False once it is lost; then nothing here means anything
    can_prefill: bool = False  #: its role allows prefill
    can_decode: bool = False  #: its role allows decode, and no preempted sequence waits there
    corrected_at: float = 0.0  #: when its prefill speed was last observed, or half forgotten
    #: Seconds in which a token's KV comes back from the tiers below its pool, as observed; at first as
    #: the card says. 0: it has none.
    load_token_s: float = 0.0
    loaded_lately: bool = False  #: a load was reported since the price of loads was looked at
    loads_faded_at: float = 0.0  #: when that was

    #: prompts in the order in which the worker computes them
    pending_prefills: dict[AttemptKey, PrefillWork] = field(default_factory=dict)
    head_began: float = 0.0  #: when the worker began the first of those prompts
    #: seconds of prefill of the queued requests that prefer this worker's cache
    preferring_s: float = 0.0

    reservations: dict[AttemptKey, DecodeReservation] = field(default_factory=dict)
    reserved_blocks: int = 0  #: of all reservations
    expected_blocks: int = 0  #: in use when all requests have reached their expected length
    rows: int = 0  #: rows of a step, those included whose prompts are still computed elsewhere
    kv_tokens: float = 0.0  #: read by a step
    link_busy_until: float = 0.0  #: KV is on its way to this worker until then

    # ---- derived from the prompts ----
    busy_until: float = 0.0  #: when all pending prompts are computed, by prediction
    credit_at: float = -inf  #: from when on the worker may be given another prompt
    first_deadline: float = 0.0  #: of the first pending prompt; 0: none, or in order of arrival
    #: by how much all pending prompts but background ones could be put off and still be in time;
    #: negative if one is late
    slack_s: float = inf
    pending_tokens: int = 0  #: uncached tokens of the pending prompts
    urgent_prompts: int = 0  #: pending prompts that are not background work
    urgent_tokens: int = 0  #: their uncached tokens
    urgent_until: float = 0.0  #: when they are computed, by prediction; as if no others were there

    # ---- derived from speeds and reservations ----
    #: Prefill of a prompt like many, by the card and by what the worker is surely slower than its type
    #: (`Correction.sure_slowness`). Workers are listed by `listed_prefill_s`.
    typical_prefill_s: float = 0.0
    half_chunk_s: float = 0.0  #: what is left of the chunk under way, on average
    step_s: float = 0.0  #: one step, as of now
    next_step_s: float = 0.0  #: a step with one more row, without the KV tokens of that row
    memory_s: float = 0.0  #: what the use of the KV pool costs
    decode_cost_s: float = 0.0  #: `next_step_s` and `memory_s`: what one more request costs here
    reservable_blocks: int = -1  #: of the largest reservation that the worker takes; -1: none
    expected_free_tokens: float = inf  #: room when all requests have reached their expected length
    default_spare_kv_tokens: float = inf  #: `spare_kv_tokens` for the configured ITL target

    @property
    def room(self) -> int:
        """Blocks that can be reserved; on an empty worker, one request may have all of them.

        Otherwise some are kept for answers that outgrow their reservations.
        """
        kept_for_growth = self.card.growth_reserve_blocks if self.reservations else 0
        return self.card.blocks - self.reserved_blocks - kept_for_growth

    @property
    def listed_prefill_s(self) -> float:
        """Prefill of a prompt like many, by which the workers of a large fleet are listed.

        Equal workers of a type have exactly the same, so that idle ones come before busy ones: the
        type's correction is the newest, not the one that each had when it was last heard of.
        """
        return self.typical_prefill_s * self.prefill_correction.shared.factor

    @property
    def active_requests(self) -> int:
        """Pending prompts and decoding rows, which some baselines balance.

        A prompt that is computed where it decodes has its row already.
        """
        elsewhere = sum(key not in self.reservations for key in self.pending_prefills)
        return elsewhere + self.rows

    def backlog_s(self, now: float) -> float:
        """Return the seconds until all pending prompts are computed."""
        return max(self.busy_until - now, 0.0)

    def wait_s(self, deadline: float, now: float) -> float:
        """Return the seconds until a further prompt with this deadline would begin.

        It goes behind pending prompts with an earlier or the same deadline. One that has begun is
        halted at the end of its chunk, half of which is left on average.
        """
        if not self.pending_prefills:
            return 0.0
        head = next(iter(self.pending_prefills.values()))
        if deadline < head.deadline:
            return self.half_chunk_s
        if len(self.pending_prefills) == 1:
            return self.backlog_s(now)
        works = self.pending_prefills.values()
        earlier_s = sum(work.seconds for work in works if work.deadline <= deadline)
        return max(self.head_began + earlier_s - now, 0.0)

    def observe_loads(self, tokens: int, seconds: float) -> None:
        """Take in a report: so many tokens' KV came back from the tiers in so many seconds."""
        weight = tokens / (tokens + LOADED_TOKENS)
        self.load_token_s += weight * (seconds / tokens - self.load_token_s)

    def fade_loads(self) -> None:
        """Forget half of what was observed of loads: while there are none, nothing can correct it."""
        self.load_token_s = (self.load_token_s + self.card.load_token_s) / 2

    def step_with(self, kv_tokens: float) -> float:
        """Return the seconds of a step with one more row, which reads these KV tokens."""
        return self.next_step_s + self.cost.step_token * kv_tokens

    def spare_kv_tokens(self, itl_s: float) -> float:
        """Return the KV tokens of one more row with which a step stays within `itl_s`.

        A worker whose step is too long even for one row is judged by that step: it cannot do
        better.
        """
        limit_s = max(SLOW_STEP_FACTOR * self.cost.step_s(1, 0), itl_s)
        if self.cost.step_token:
            return (limit_s - self.next_step_s) / self.cost.step_token
        return inf if self.next_step_s <= limit_s else -inf

    def update_decode_load(self, itl_s: float) -> None:
        """Work out the decode attributes again; `itl_s` is the configured target."""
        if not self.rows:
            self.kv_tokens = 0.0  # rounding errors do not pile up
        blocks = self.card.blocks
        room = self.room
        used_share = 1.0 - room / blocks if blocks else 1.0
        self.reservable_blocks = -1
        if self.can_decode and self.rows < self.card.max_running:
            self.reservable_blocks = room
        self.step_s = self.cost.step_s(self.rows, self.kv_tokens)
        self.next_step_s = self.cost.step_s(self.rows + 1, self.kv_tokens)
        self.memory_s = FULL_POOL_S * used_share * used_share
        self.decode_cost_s = self.next_step_s + self.memory_s
        self.expected_free_tokens = inf
        self.default_spare_kv_tokens = inf
        if self.rows:
            free_blocks = room + self.reserved_blocks - self.expected_blocks
            self.expected_free_tokens = float(free_blocks * self.card.block_tokens)
            self.default_spare_kv_tokens = self.spare_kv_tokens(itl_s)

    def update_pending_prefills(self) -> None:
        """Work out the prompt attributes again."""
        works = self.pending_prefills
        ends_at = self.head_began
        self.pending_tokens = 0
        self.urgent_prompts = 0
        self.urgent_tokens = 0
        self.urgent_until = self.head_began
        self.slack_s = inf
        for work in works.values():
            self.pending_tokens += work.uncached_tokens
            ends_at += work.seconds
            if work.background:
                continue
            self.urgent_prompts += 1
            self.urgent_tokens += work.uncached_tokens
            self.urgent_until += work.seconds
            self.slack_s = min(self.slack_s, work.deadline - ends_at)
        self.busy_until = ends_at if works else 0.0
        self.first_deadline = next(iter(works.values())).deadline if works else 0.0
