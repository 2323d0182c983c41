"""What the router knows of the workers: one row of arrays each, and the work it has given them.

Own placements count at once; reports, however late, only correct speeds and publish prefixes. So a
stale report never makes two requests believe in the same room.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from operator import attrgetter
from typing import Any

import numpy as np

from ..protos.frames import AttemptKey, Coefficients, WorkerCard, WorkerReport
from .predictor import SLOW, Correction, Drift, Learned, prior, step_s

BATCH_TOKENS = 512  #: prompts below this share a step: it is where prefill becomes efficient
PREFETCH = 2  #: longer prompts that a worker has at a time
HALTED_MAX = 4  #: prompts of a worker that one more may go before
TYPICAL = (2048, 4096)  #: uncached, all tokens of a prompt by which workers' speeds are compared
FADE_S = 10.0  #: after so long without a prompt half of a worker's own correction is forgotten
SLACK_S = 0.005  #: beyond the round trip, for a prediction that is a little late
MEMORY_S = 0.01  #: cost of a KV pool that is full, in the coin of a step; grows with the square
OLD_CREDITS = 8  #: entries of the heap for each worker, before the old ones are cleared away
FLOATS = (
    *("busy_until", "credit_at", "first_due", "slack_s", "queued_tokens", "prompts"),
    *("prompt_tokens", "active", "rows", "kv_tokens", "fit", "expected_tokens", "calm_tokens"),
    *("chunk", "link_until", "step_now", "step_next", "decode_s", "step_token"),
    *("prefill_base", "prefill_token", "prefill_pair"),
    *("transfer_base", "transfer_token", "exposed"),
)
_ROW = attrgetter(*FLOATS)


def _by_due(item: tuple[AttemptKey, Work]) -> float:
    return item[1].due


class Work:
    """A prompt that a worker was given and whose first token is not out."""

    def __init__(
        self,
        seconds: float,  #: predicted
        uncached: int,
        prompt: int,
        since: float,
        due: float = 0.0,  #: the worker computes in this order; equal ones as they came
        halted: bool = False,  #: it waited, for others or a fetch: no sign of the speed
    ) -> None:
        self.seconds = seconds
        self.uncached = uncached
        self.prompt = prompt
        self.since = since
        self.due = due
        self.halted = halted


class Stream:
    """What a request takes up on a decode worker."""

    def __init__(
        self,
        blocks: int,  #: reserved
        expected_blocks: int,  #: at its expected end
        kv_tokens: float,  #: read by a step, on average over its life
        rows: int = 1,  #: of a step: its answers
    ) -> None:
        self.blocks = blocks
        self.expected_blocks = expected_blocks
        self.kv_tokens = kv_tokens
        self.rows = rows


@dataclass(slots=True, eq=False)
class Worker:
    """One worker. `prefills` are in the order in which it computes them.

    What is asked of one worker at a time stands here, what is compared over all in `Fleet`.
    """

    slot: int
    card: WorkerCard
    cost: Coefficients
    prefill: Correction
    step: Correction
    seq: int = 0  #: last report
    alive: bool = True
    prefills: dict[AttemptKey, Work] = field(default_factory=dict)
    head_since: float = 0.0  #: when the first of them began
    busy_until: float = 0.0  #: all of them are computed, by prediction
    credit_at: float = -inf  #: from when on it may be given a prompt
    first_due: float = 0.0  #: deadline of the first of its prompts; 0 in order of arrival
    slack_s: float = inf  #: by how much all its prompts could be put off and be in time
    queued_tokens: int = 0  #: uncached, given and not computed
    prompts: int = 0  #: the number of those prompts
    prompt_tokens: int = 0  #: and their length, cached or not
    home_s: float = 0.0  #: seconds of prefill that wait in the line for its cache
    streams: dict[AttemptKey, Stream] = field(default_factory=dict)
    active: int = 0  #: prompts and streams it has
    rows: int = 0  #: streams, those to come too
    kv_tokens: float = 0.0
    reserved: int = 0  #: blocks
    expected: int = 0  #: blocks, when all its streams have reached their expected length
    link_until: float = 0.0  #: KV is on its way to it until then
    fit: int = -1  #: blocks of the largest reservation that it takes; -1: none
    expected_tokens: float = inf  #: room left when all streams have reached their expected length
    calm_tokens: float = inf  #: KV tokens that it can read beside, its step within the target
    fitted: float = 0.0  #: when its prefills were last seen, or forgotten
    step_now: float = 0.0
    step_next: float = 0.0  #: a step with one more row, without its KV
    decode_s: float = 0.0  #: the same, and what a fuller pool costs
    step_token: float = 0.0
    step_fixed: float = 0.0  #: `cost`, corrected: a step but for its rows and KV
    step_row: float = 0.0
    step_weights: float = 0.0
    step_lone: float = 0.0  #: a step of one row; no target is shorter than 1.5 times that
    prefills_ok: bool = False  #: what it does now
    decodes_ok: bool = False
    chunk: int = 0
    chunk_s: float = 0.0  #: what is left of the chunk that it computes, on average
    prefill_base: float = 0.0  #: `cost`, corrected
    prefill_token: float = 0.0
    prefill_pair: float = 0.0
    typical_s: float = 0.0  #: prefill of a prompt like many
    transfer_base: float = 0.0
    transfer_token: float = 0.0
    exposed: float = 0.0

    @property
    def room(self) -> int:
        """Blocks that can be reserved; alone, a request may have all of them."""
        kept = self.card.growth_reserve_blocks if self.streams else 0
        return self.card.blocks - self.reserved - kept

    def left_s(self, due: float, now: float) -> float:
        """Seconds until a prompt with this deadline would begin."""
        if not self.prefills:
            return 0.0
        head = next(iter(self.prefills.values()))
        if due >= head.due and len(self.prefills) == 1:
            return max(self.busy_until - now, 0.0)
        before = sum(work.seconds for work in self.prefills.values() if work.due <= due)
        if due >= head.due:
            return max(self.head_since + before - now, 0.0)
        return self.chunk_s  # the chunk that is under way comes to its end

    def prefill_s(self, uncached: float, prompt: float) -> float:
        each = self.prefill_token + self.prefill_pair * (prompt - uncached / 2)
        return self.prefill_base + uncached * each


class Fleet:
    """Workers by name and by slot (slots are reused). Times in seconds of the caller's clock.

    The vectors of `FLOATS`, one value per slot, are for who compares all workers; they are as of
    the last `sync()`. Who looks at few workers reads those.
    """

    busy_until: np.ndarray
    credit_at: np.ndarray
    first_due: np.ndarray
    slack_s: np.ndarray
    queued_tokens: np.ndarray
    prompts: np.ndarray
    prompt_tokens: np.ndarray
    active: np.ndarray
    rows: np.ndarray
    kv_tokens: np.ndarray
    fit: np.ndarray
    expected_tokens: np.ndarray
    calm_tokens: np.ndarray
    chunk: np.ndarray
    link_until: np.ndarray
    step_now: np.ndarray
    step_next: np.ndarray
    decode_s: np.ndarray
    step_token: np.ndarray
    prefill_base: np.ndarray
    prefill_token: np.ndarray
    prefill_pair: np.ndarray
    transfer_base: np.ndarray
    transfer_token: np.ndarray
    exposed: np.ndarray

    def __init__(self, prior_tokens_per_s: float, rtt_s: float, itl_s: float) -> None:
        self._prior, self._lead_s = prior(prior_tokens_per_s), rtt_s + SLACK_S
        self.itl_s = itl_s  #: target that `calm_tokens` is for
        self.workers: dict[str, Worker] = {}
        self.prefills: dict[str, Worker] = {}  #: by what they can do
        self.decodes: dict[str, Worker] = {}
        self.joins = 0  #: counts changes of membership
        self.by_slot: list[Worker | None] = []
        self.prefill_ok = np.zeros(0, bool)
        self.decode_ok = np.zeros(0, bool)
        self.queue_until = np.zeros(0)  #: until when a worker computes prompts, its home's too
        self.put_off_s = np.zeros(0)  #: `slack_s` of those that a newcomer may go before
        self.typical_s = np.zeros(0)  #: prefill of a `TYPICAL` prompt
        self.decode_cost = np.zeros(0)  #: `decode_s` of those that decode
        self.ready: set[int] = set()  #: slots whose credit has come, for `credited`
        self._credits: list[tuple[float, int]] = []  #: those whose credit is to come; some are old
        self._rows = np.zeros((len(FLOATS), 0))
        self._stale: set[int] = set()
        self._types: dict[tuple[str, str, int], Drift] = {}
        self._learned: dict[tuple[str, int], Learned] = {}
        self._turn = 0
        self.block_tokens = 64
        self._resize(16)

    def _resize(self, size: int) -> None:
        old = self._rows
        self._rows = np.zeros((len(FLOATS), size))
        self._rows[FLOATS.index("prefill_token")] = 1.0  # empty slots divide too
        self._rows[:, : old.shape[1]] = old
        for index, name in enumerate(FLOATS):
            setattr(self, name, self._rows[index])
        empties: dict[str, Any] = {"prefill_ok": False, "decode_ok": False, "typical_s": 0.0}
        empties |= {"queue_until": inf, "put_off_s": -inf, "decode_cost": inf}
        for name, empty in empties.items():
            grown = np.full(size, empty)
            grown[: len(getattr(self, name))] = getattr(self, name)
            setattr(self, name, grown)
        self.by_slot += [None] * (size - len(self.by_slot))

    def sync(self) -> None:
        """Brings the vectors of `FLOATS` up to date."""
        for slot in self._stale:
            worker = self.by_slot[slot]
            if worker is not None:
                self._rows[:, slot] = _ROW(worker)
        self._stale.clear()

    # ---- membership ------------------------------------------------------------------------------

    def join(self, card: WorkerCard) -> Worker:
        """A new worker, or the same with a new card; what is placed on it stays."""
        worker = self.workers.get(card.id)
        if worker is None:
            if None not in self.by_slot:
                self._resize(2 * len(self.by_slot))
            slot = self.by_slot.index(None)
            cost = card.cost or self._learned_of(card).cost
            prefill, step = self._correction("prefill", card), self._correction("step", card)
            worker = Worker(slot, card, cost, prefill, step)
            self.workers[card.id] = self.by_slot[slot] = worker
        elif card.cost:
            worker.cost = card.cost
        worker.card, worker.seq = card, 0
        self.joins += 1
        self.block_tokens = card.block_tokens
        slot = worker.slot
        worker.prefills_ok = card.role in ("prefill", "mixed")
        worker.decodes_ok = card.role in ("decode", "mixed")
        self.prefill_ok[slot], self.decode_ok[slot] = worker.prefills_ok, worker.decodes_ok
        for known, can in ((self.prefills, worker.prefills_ok), (self.decodes, worker.decodes_ok)):
            known.pop(card.id, None)
            if can:
                known[card.id] = worker
        worker.chunk = card.chunk_tokens
        self._prefill_speed(worker)
        self._decode_speed(worker)
        self._decode_changed(worker)
        self._prefill_changed(worker)
        return worker

    def _correction(self, kind: str, card: WorkerCard) -> Correction:
        return Correction(
            self._types.setdefault((kind, card.gpu, card.tensor_parallel), Drift(SLOW))
        )

    def _learned_of(self, card: WorkerCard) -> Learned:
        return self._learned.setdefault((card.gpu, card.tensor_parallel), Learned(self._prior))

    def lose(self, name: str) -> Worker | None:
        worker = self.workers.pop(name, None)
        if worker:
            slot = worker.slot
            worker.alive = worker.prefills_ok = worker.decodes_ok = False
            self.joins += 1
            self.prefills.pop(name, None)
            self.decodes.pop(name, None)
            self.by_slot[slot] = None
            self.prefill_ok[slot] = self.decode_ok[slot] = False
            self.fit[slot], self.queue_until[slot] = -1, inf
            self.put_off_s[slot], self.decode_cost[slot] = -inf, inf
            self.ready.discard(slot)
        return worker

    @property
    def largest_pool(self) -> int:
        """Blocks of the largest KV pool that decodes."""
        return max((worker.card.blocks for worker in self.decodes.values()), default=0)

    def mask(self, ok: np.ndarray, without: list[str]) -> np.ndarray:
        """`ok` without the workers of these names."""
        slots = [self.workers[name].slot for name in without if name in self.workers]
        if not slots:
            return ok
        ok = ok.copy()
        ok[slots] = False
        return ok

    # ---- speeds ----------------------------------------------------------------------------------

    def _prefill_speed(self, worker: Worker) -> None:
        c, factor = worker.cost, worker.prefill.factor
        worker.prefill_base = c.prefill_base * factor
        worker.prefill_token = c.prefill_token * factor
        worker.prefill_pair = c.prefill_pair * factor
        worker.chunk_s = 0.5 * worker.prefill_token * worker.chunk
        worker.transfer_base, worker.transfer_token = c.transfer_base, c.transfer_token
        worker.exposed = c.exposed_share
        worker.typical_s = worker.prefill_s(*TYPICAL)
        if worker.alive:
            self.typical_s[worker.slot] = worker.typical_s
            self._stale.add(worker.slot)

    def _decode_speed(self, worker: Worker) -> None:
        c, factor = worker.cost, worker.step.factor
        worker.step_fixed, worker.step_token = factor * c.step_base, factor * c.step_token
        worker.step_row, worker.step_weights = factor * c.step_row, factor * c.step_weights
        worker.step_lone = factor * step_s(c, 1, 0)

    def corrected(self, worker: Worker, ratio: float, now: float) -> None:
        """A prefill took `ratio` times what the closed form says."""
        worker.fitted = now
        worker.prefill.observe(ratio)
        self._prefill_speed(worker)

    def report(self, worker: Worker, report: WorkerReport) -> bool:
        """What a report says of speed; without a closed form its type is learned from scratch.

        True if its reservations are taken again.
        """
        changed = False
        if worker.card.cost is None:
            changed = self._learn(worker, report)
        if report.steps and report.step_seconds > 0:
            changed = True
            if report.running and not report.prefill_tokens:
                expected = step_s(worker.cost, report.running, report.kv_tokens)
                worker.step.observe(report.step_seconds / report.steps / expected)
        # while preempted sequences wait for blocks, the worker refuses reservations
        before = worker.decodes_ok
        after = worker.card.role in ("decode", "mixed") and not report.waiting
        if after != before:
            worker.decodes_ok = self.decode_ok[worker.slot] = after
            self._prefill_changed(worker)  # credit is looked at again
        if changed:
            self._decode_speed(worker)
        if changed or after != before:
            self._decode_changed(worker)
        return after and not before

    def _learn(self, worker: Worker, report: WorkerReport) -> bool:
        """Its type learns from the report, it from its type. True if its closed form changed."""
        learned = self._learned_of(worker.card)
        if report.prefill_seconds > 0 and report.prefill_tokens:
            learned.prefill(report.prefill_seconds / report.prefill_tokens)
        if report.steps and report.step_seconds > 0:
            learned.step(report.step_seconds / report.steps, report.running)
        return self._catch_up(worker, learned)

    def _catch_up(self, worker: Worker, learned: Learned) -> bool:
        if worker.cost is learned.cost:
            return False
        worker.cost = learned.cost
        self._prefill_speed(worker)
        return True

    def revisit(self, now: float) -> None:
        """One worker, in turn. What one bad prompt said of it would keep an idle one idle for ever:
        it catches up with its type, and what is its own fades."""
        self._turn = (self._turn + 1) % len(self.by_slot)
        worker = self.by_slot[self._turn]
        if worker is None or worker.prefills:
            return
        changed = worker.card.cost is None and self._catch_up(worker, self._learned_of(worker.card))
        if now - worker.fitted > FADE_S:
            worker.fitted = now
            worker.prefill.fade()
            self._prefill_speed(worker)
        if changed:
            self._decode_speed(worker)
            self._decode_changed(worker)

    # ---- prompts ---------------------------------------------------------------------------------

    def give(
        self,
        worker: Worker,
        key: AttemptKey,
        tokens: tuple[int, int],
        seconds: float,
        now: float,
        due: float = 0.0,
        fetches: bool = False,
    ) -> None:
        """A prompt, (uncached, all) tokens, is on its way to the worker, and will take it so long.

        It goes before those with a later `due`; one that has begun is halted, and goes on behind.
        """
        uncached, prompt = tokens
        work = Work(seconds, uncached, prompt, now, due, fetches)
        works = worker.prefills
        if not works:
            worker.head_since = worker.busy_until = now
            worker.first_due = due
        elif due < next(reversed(works.values())).due:
            head = next(iter(works.values()))
            if due < head.due:
                done = now - worker.head_since
                head.seconds = max(head.seconds - done, 0.05 * head.seconds)
                head.halted, worker.head_since = True, now
                work.halted = True  # it waits for the chunk that is under way
            works[key] = work
            worker.prefills = dict(sorted(works.items(), key=_by_due))
            self._prefill_changed(worker)
            return
        works[key] = work  # behind all others: the sums grow
        worker.queued_tokens += uncached
        worker.prompt_tokens += prompt
        worker.prompts += 1
        worker.active += 1
        worker.busy_until = end = worker.busy_until + seconds
        if due - end < worker.slack_s:
            worker.slack_s = due - end
        self._credit_changed(worker)

    def computed(self, worker: Worker, key: AttemptKey, now: float) -> tuple[Work, float] | None:
        """The prompt's first token is out: its work, and the seconds that it took."""
        if key not in worker.prefills:
            return None
        first = next(iter(worker.prefills)) == key
        work = worker.prefills.pop(key)
        alone = first and not work.halted
        took = now - max(worker.head_since, work.since) if alone else 0.0
        worker.head_since = now
        self._prefill_changed(worker)
        return work, took

    def withdrawn(self, worker: Worker, key: AttemptKey, now: float) -> None:
        """The prompt is not going to be computed there any more."""
        if key in worker.prefills:
            if next(iter(worker.prefills)) == key:
                worker.head_since = now
            del worker.prefills[key]
            self._prefill_changed(worker)

    def _prefill_changed(self, worker: Worker) -> None:
        works = worker.prefills
        tokens = whole = 0
        end, slack, count = worker.head_since, inf, len(works)
        for work in works.values():
            tokens += work.uncached
            whole += work.prompt
            end += work.seconds
            if work.due - end < slack:
                slack = work.due - end
        worker.queued_tokens, worker.prompt_tokens, worker.prompts = tokens, whole, count
        worker.active = count + len(worker.streams)
        worker.slack_s = slack
        worker.first_due = next(iter(works.values())).due if count else 0.0
        worker.busy_until = end if count else 0.0
        self._credit_changed(worker)

    def _credit_changed(self, worker: Worker) -> None:
        if not worker.alive:
            return  # its slot may be another's by now
        slot, end = worker.slot, worker.busy_until
        tokens, count = worker.queued_tokens, worker.prompts
        if tokens < BATCH_TOKENS and tokens < worker.chunk:
            credit = -inf
        else:
            credit = end - self._lead_s if count < PREFETCH else inf
        worker.credit_at = credit
        if credit == inf:
            self.ready.discard(slot)
        elif credit == -inf:
            self.ready.add(slot)
        else:
            self.ready.discard(slot)
            heappush(self._credits, (credit, slot))
            if len(self._credits) > OLD_CREDITS * len(self.by_slot):
                to_come = ((w.credit_at, w.slot) for w in self.workers.values())
                self._credits = [one for one in to_come if -inf < one[0] < inf]
                heapify(self._credits)
        takes = worker.prefills_ok
        self.queue_until[slot] = end + worker.home_s if takes else inf
        self.put_off_s[slot] = worker.slack_s if takes and 0 < count < HALTED_MAX else -inf
        self._stale.add(slot)

    def waits_at(self, worker: Worker, seconds: float) -> None:
        """So much prefill waits in the line for this worker's cache."""
        worker.home_s = seconds
        if worker.prefills_ok:
            self.queue_until[worker.slot] = worker.busy_until + seconds

    def credited(self, now: float) -> list[Worker]:
        """Those that may be given a prompt now, but for those that are not `ready` any more."""
        credits, by_slot, ready = self._credits, self.by_slot, self.ready
        while credits and credits[0][0] <= now:
            credit, slot = heappop(credits)
            worker = by_slot[slot]
            if worker is not None and worker.credit_at == credit:
                ready.add(slot)
        if not ready:
            return []
        return [worker for slot in sorted(ready) if (worker := by_slot[slot]) is not None]

    def next_credit(self, now: float, decodes: bool) -> float:
        """When the next worker that prefills (or decodes) will be credited; inf: none."""
        self.credited(now)
        credits = self._credits
        while credits:
            credit, slot = credits[0]
            worker = self.by_slot[slot]
            if worker is not None and worker.credit_at == credit:
                takes = worker.decodes_ok if decodes else worker.prefills_ok
                if takes:
                    return credit
            heappop(credits)
        return inf

    # ---- streams ---------------------------------------------------------------------------------

    def reserve(self, worker: Worker, key: AttemptKey, stream: Stream) -> None:
        assert key not in worker.streams, key
        worker.streams[key] = stream
        worker.reserved += stream.blocks
        worker.expected += stream.expected_blocks
        worker.kv_tokens += stream.kv_tokens
        worker.rows += stream.rows
        if worker.alive:
            self._decode_changed(worker)

    def release(self, worker: Worker, key: AttemptKey) -> None:
        stream = worker.streams.pop(key, None)
        if stream:
            worker.reserved -= stream.blocks
            worker.expected -= stream.expected_blocks
            worker.kv_tokens -= stream.kv_tokens
            worker.rows -= stream.rows
            if worker.alive:
                self._decode_changed(worker)

    def _decode_changed(self, worker: Worker) -> None:
        slot, card = worker.slot, worker.card
        rows = worker.rows
        worker.active = worker.prompts + rows
        if not rows:
            worker.kv_tokens = 0.0  # rounding errors do not pile up
        kv = worker.kv_tokens
        room = card.blocks - worker.reserved - (card.growth_reserve_blocks if rows else 0)
        full = 1.0 - room / card.blocks if card.blocks else 1.0
        worker.fit = room if worker.decodes_ok and rows < card.max_running else -1
        fixed = worker.step_fixed + worker.step_token * kv
        row, least = worker.step_row, worker.step_weights
        now, after = row * rows, row * rows + row
        worker.step_now = fixed + (now if now > least else least)
        worker.step_next = after = fixed + (after if after > least else least)
        worker.decode_s = after + MEMORY_S * full * full
        worker.expected_tokens = worker.calm_tokens = inf
        if rows:
            left = room + worker.reserved - worker.expected
            worker.expected_tokens = float(left * card.block_tokens)
            worker.calm_tokens = self.calm(worker, self.itl_s)
        self.decode_cost[slot] = worker.decode_s if worker.decodes_ok else inf
        self._stale.add(slot)

    def calm(self, worker: Worker, itl_s: float) -> float:
        """KV tokens of one more row with which a step stays within the target. A worker whose
        step is too long even for one row is judged by that: it cannot do better."""
        after, lone = worker.step_next, 1.5 * worker.step_lone
        limit = lone if lone > itl_s else itl_s
        if worker.step_token:
            return (limit - after) / worker.step_token
        return inf if after <= limit else -inf
