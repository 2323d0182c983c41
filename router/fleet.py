"""What the router knows of the workers: one row of arrays each, and the work it has given them.

Own placements count at once; reports, however late, only correct speeds and publish prefixes. So a
stale report never makes two requests believe in the same room.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import numpy as np
from msgspec import structs

from ..protos.frames import Coefficients, Key, Report, WorkerCard
from .predictor import SLOW, Correction, Drift, prefill_s, prior, step_s

BATCH_TOKENS = 512  #: prompts below this share a step: it is where prefill becomes efficient
PREFETCH = 2  #: longer prompts that a worker has at a time
SLACK_S = 0.005  #: beyond the round trip, for a prediction that is a little late
MEMORY_S = 0.01  #: cost of a KV pool that is full, in the coin of a step; grows with the square
FLOATS = (
    *(
        "busy_until",
        "credit_at",
        "first_due",
        "slack_s",
        "home_s",
        "queued_tokens",
        "prompts",
        "prompt_tokens",
        "active",
    ),
    *("rows", "kv_tokens", "fit", "expected_tokens", "calm_tokens", "chunk", "link_until"),
    *("step_now", "step_next", "decode_s", "step_token"),
    *("prefill_base", "prefill_token", "prefill_pair"),
    *("transfer_base", "transfer_token", "exposed"),
)


@dataclass(slots=True)
class Work:
    """A prompt that a worker was given and whose first token is not out."""

    seconds: float  #: predicted
    nominal_s: float  #: the same, uncorrected
    uncached: int
    prompt: int
    since: float
    due: float = 0.0  #: the worker computes in this order; equal ones as they came
    halted: bool = False  #: it does not show the worker's speed: others went before, or a fetch


@dataclass(slots=True)
class Stream:
    """What a request takes up on a decode worker."""

    blocks: int  #: reserved
    expected_blocks: int  #: at its expected end
    kv_tokens: float  #: read by a step, on average over its life


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
    prefills: dict[Key, Work] = field(default_factory=dict)
    head_since: float = 0.0  #: when the first of them began
    busy_until: float = 0.0  #: all of them are computed, by prediction
    home_s: float = 0.0  #: seconds of prefill that wait in the line for its cache
    streams: dict[Key, Stream] = field(default_factory=dict)
    reserved: int = 0  #: blocks
    expected: int = 0  #: blocks, when all its streams have reached their expected length
    link_until: float = 0.0  #: KV is on its way to it until then
    fit: int = -1  #: blocks of the largest reservation that it takes; -1: none
    expected_tokens: float = inf  #: room left when all streams have reached their expected length
    calm_tokens: float = inf  #: KV tokens that it can read beside, its step within the target
    step_next: float = 0.0  #: a step with one more row, without its KV
    decode_s: float = 0.0  #: the same, and what a fuller pool costs
    step_token: float = 0.0

    @property
    def room(self) -> int:
        """Blocks that can be reserved; alone, a request may have all of them."""
        kept = self.card.kept if self.streams else 0
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
        c = self.cost  # the chunk that is under way comes to its end
        return 0.5 * c.prefill_token * self.card.chunk_tokens * self.prefill.factor


class Fleet:
    """Slots are reused; arrays have one value per slot. Times in seconds of the caller's clock."""

    busy_until: np.ndarray
    credit_at: np.ndarray  #: from when on it may be given a prompt
    first_due: np.ndarray  #: deadline of the first of its prompts; 0 in order of arrival
    slack_s: np.ndarray  #: by how much all its prompts could be put off and be in time
    home_s: np.ndarray
    queued_tokens: np.ndarray  #: uncached, given and not computed
    prompts: np.ndarray  #: the number of those prompts
    prompt_tokens: np.ndarray  #: and their length, cached or not
    active: np.ndarray  #: prompts and streams it has
    rows: np.ndarray  #: streams, those to come too
    kv_tokens: np.ndarray
    fit: np.ndarray  #: blocks of the largest reservation that it takes; -1: none
    expected_tokens: np.ndarray  #: room left when all streams have reached their expected length
    calm_tokens: np.ndarray  #: KV tokens that it can read beside, its step within the target
    chunk: np.ndarray
    link_until: np.ndarray  #: KV is on its way to it until then
    step_now: np.ndarray
    step_next: np.ndarray  #: with one more row, without its KV
    decode_s: np.ndarray  #: the same, and what a fuller pool costs
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
        self.prefills: set[str] = set()  #: names by what they can do
        self.decodes: set[str] = set()
        self.decode_bits = 0  #: mask of their slots
        self.bits = 0  #: of all
        self.joins = 0  #: counts changes of membership
        self.by_slot: list[Worker | None] = []
        self.prefill_ok = np.zeros(0, bool)
        self.decode_ok = np.zeros(0, bool)
        self._rows = np.zeros((len(FLOATS), 0))
        self._types: dict[tuple[str, str, int], Drift] = {}
        self.block_tokens = 64
        self._resize(16)

    def _resize(self, size: int) -> None:
        old = self._rows
        self._rows = np.zeros((len(FLOATS), size))
        self._rows[FLOATS.index("prefill_token")] = 1.0  # empty slots divide too
        self._rows[:, : old.shape[1]] = old
        for index, name in enumerate(FLOATS):
            setattr(self, name, self._rows[index])
        for name in ("prefill_ok", "decode_ok"):
            grown = np.zeros(size, bool)
            grown[: len(getattr(self, name))] = getattr(self, name)
            setattr(self, name, grown)
        self.by_slot += [None] * (size - len(self.by_slot))

    # ---- membership ------------------------------------------------------------------------------

    def join(self, card: WorkerCard) -> Worker:
        """A new worker, or the same with a new card; what is placed on it stays."""
        worker = self.workers.get(card.id)
        if worker is None:
            if None not in self.by_slot:
                self._resize(2 * len(self.by_slot))
            slot = self.by_slot.index(None)
            cost = card.cost or self._prior
            prefill, step = self._correction("prefill", card), self._correction("step", card)
            worker = Worker(slot, card, cost, prefill, step)
            self.workers[card.id] = self.by_slot[slot] = worker
            self.link_until[slot] = self.busy_until[slot] = self.home_s[slot] = 0.0
        elif card.cost:
            worker.cost = card.cost
        worker.card, worker.seq = card, 0
        self.joins += 1
        self.bits |= 1 << worker.slot
        self.block_tokens = card.block_tokens
        slot = worker.slot
        self.prefill_ok[slot] = card.role in ("prefill", "mixed")
        self.decode_ok[slot] = card.role in ("decode", "mixed")
        for names, ok in ((self.prefills, self.prefill_ok), (self.decodes, self.decode_ok)):
            names.add(card.id) if ok[slot] else names.discard(card.id)
        self.decode_bits = self.decode_bits & ~(1 << slot) | int(self.decode_ok[slot]) << slot
        self.chunk[slot] = card.chunk_tokens
        self._prefill_speed(worker)
        self._decode_changed(worker)
        self._prefill_changed(worker)
        return worker

    def _correction(self, kind: str, card: WorkerCard) -> Correction:
        return Correction(self._types.setdefault((kind, card.gpu, card.tp), Drift(SLOW)))

    def lose(self, name: str) -> Worker | None:
        worker = self.workers.pop(name, None)
        if worker:
            worker.alive = False
            self.joins += 1
            self.prefills.discard(name)
            self.decodes.discard(name)
            self.by_slot[worker.slot] = None
            self.prefill_ok[worker.slot] = self.decode_ok[worker.slot] = False
            self.fit[worker.slot] = -1
            self.decode_bits &= ~(1 << worker.slot)
            self.bits &= ~(1 << worker.slot)
        return worker

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
        slot, c, factor = worker.slot, worker.cost, worker.prefill.factor
        self.prefill_base[slot] = c.prefill_base * factor
        self.prefill_token[slot] = c.prefill_token * factor
        self.prefill_pair[slot] = c.prefill_pair * factor
        self.transfer_base[slot], self.transfer_token[slot] = c.transfer_base, c.transfer_token
        self.exposed[slot] = c.exposed_share

    def prefill_s(self, worker: Worker, uncached: int, prompt: int) -> float:
        return prefill_s(worker.cost, uncached, prompt) * worker.prefill.factor

    def corrected(self, worker: Worker, ratio: float) -> None:
        """A prefill took `ratio` times what the closed form says."""
        worker.prefill.observe(ratio)
        self._prefill_speed(worker)

    def report(self, worker: Worker, report: Report) -> bool:
        """What a report says of speed; a worker with no closed form is learned from scratch.

        True if its reservations are taken again.
        """
        c = worker.cost
        if worker.card.cost is None and report.prefill_seconds > 0 and report.prefill_tokens:
            seen = report.prefill_seconds / report.prefill_tokens
            token = 0.8 * c.prefill_token + 0.2 * seen
            worker.cost = c = structs.replace(c, prefill_token=token)
            self._prefill_speed(worker)
        if report.steps and report.step_seconds > 0:
            seen = report.step_seconds / report.steps
            if worker.card.cost is None:
                base = 0.8 * c.step_base + 0.2 * max(seen - c.step_row * report.running, 0.0)
                worker.cost = structs.replace(c, step_base=base)
            elif report.running and not report.prefill_tokens:
                worker.step.observe(seen / step_s(c, report.running, report.kv_tokens))
        # while preempted sequences wait for blocks, the worker refuses reservations
        before = bool(self.decode_ok[worker.slot])
        after = worker.card.role in ("decode", "mixed") and not report.waiting
        self.decode_ok[worker.slot] = after
        self._decode_changed(worker)
        return after and not before

    # ---- prompts ---------------------------------------------------------------------------------

    def give(
        self,
        worker: Worker,
        key: Key,
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
        head = next(iter(worker.prefills.values()), None)
        if head is None:
            worker.head_since = now
        elif due < head.due:
            head.seconds = max(head.seconds - (now - worker.head_since), 0.05 * head.seconds)
            head.halted, worker.head_since = True, now
        nominal = prefill_s(worker.cost, uncached, prompt)
        worker.prefills[key] = Work(seconds, nominal, uncached, prompt, now, due, fetches)
        if head is not None and due:
            ordered = sorted(worker.prefills.items(), key=lambda item: item[1].due)
            worker.prefills = dict(ordered)
        self._prefill_changed(worker)

    def computed(self, worker: Worker, key: Key, now: float) -> tuple[Work, float] | None:
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

    def withdrawn(self, worker: Worker, key: Key, now: float) -> None:
        """The prompt is not going to be computed there any more."""
        if key in worker.prefills:
            if next(iter(worker.prefills)) == key:
                worker.head_since = now
            del worker.prefills[key]
            self._prefill_changed(worker)

    def _prefill_changed(self, worker: Worker) -> None:
        slot, work = worker.slot, worker.prefills.values()
        tokens = sum(w.uncached for w in work)
        end = worker.head_since + sum(w.seconds for w in work)
        self.queued_tokens[slot], self.prompts[slot] = tokens, len(work)
        self.prompt_tokens[slot] = sum(w.prompt for w in work)
        self.active[slot] = len(work) + len(worker.streams)
        self.busy_until[slot] = worker.busy_until = end if work else 0.0
        done, slack = worker.head_since, inf
        for one in work:
            done += one.seconds
            slack = min(slack, one.due - done)
        self.slack_s[slot] = slack
        self.first_due[slot] = next(iter(work)).due if work else 0.0
        if tokens < min(BATCH_TOKENS, worker.card.chunk_tokens):
            self.credit_at[slot] = -inf
        else:
            self.credit_at[slot] = end - self._lead_s if len(work) < PREFETCH else inf

    def credited(self, now: float, ok: np.ndarray) -> np.ndarray:
        """Slots, of those in `ok`, that may be given a prompt now."""
        return np.flatnonzero(ok & (self.credit_at <= now))

    # ---- streams ---------------------------------------------------------------------------------

    def reserve(self, worker: Worker, key: Key, stream: Stream) -> None:
        assert key not in worker.streams, key
        worker.streams[key] = stream
        worker.reserved += stream.blocks
        worker.expected += stream.expected_blocks
        self._count(worker, stream, 1)

    def release(self, worker: Worker, key: Key) -> None:
        stream = worker.streams.pop(key, None)
        if stream:
            worker.reserved -= stream.blocks
            worker.expected -= stream.expected_blocks
            self._count(worker, stream, -1)

    def _count(self, worker: Worker, stream: Stream, sign: int) -> None:
        if worker.alive:
            slot = worker.slot
            self.rows[slot] += sign
            self.kv_tokens[slot] += sign * stream.kv_tokens
            self._decode_changed(worker)

    def _decode_changed(self, worker: Worker) -> None:
        slot, c, factor = worker.slot, worker.cost, worker.step.factor
        rows, token = len(worker.streams), factor * worker.cost.step_token
        if not rows:
            self.kv_tokens[slot] = 0.0  # rounding errors do not pile up
        kv = float(self.kv_tokens[slot])
        after = factor * step_s(c, rows + 1, kv)
        card, room = worker.card, worker.room
        full = 1.0 - room / card.blocks if card.blocks else 1.0
        takes = self.decode_ok[slot] and rows < card.max_running
        worker.fit = room if takes else -1
        worker.step_next, worker.step_token = after, token
        worker.decode_s = after + MEMORY_S * full * full
        worker.expected_tokens = worker.calm_tokens = inf
        if rows:
            left = room + worker.reserved - worker.expected
            worker.expected_tokens = left * card.block_tokens
            worker.calm_tokens = self.calm(worker, self.itl_s)
        self.rows[slot], self.active[slot] = rows, len(worker.prefills) + rows
        self.step_now[slot] = factor * step_s(c, rows, kv)
        self.fit[slot], self.step_token[slot] = worker.fit, token
        self.step_next[slot], self.decode_s[slot] = after, worker.decode_s
        self.expected_tokens[slot] = worker.expected_tokens
        self.calm_tokens[slot] = worker.calm_tokens

    def calm(self, worker: Worker, itl_s: float) -> float:
        """KV tokens of one more row with which a step stays within the target. A worker whose
        step is too long even for one row is judged by that: it cannot do better."""
        c, after = worker.cost, worker.step_next
        limit = max(itl_s, 1.5 * worker.step.factor * step_s(c, 1, 0))
        if worker.step_token:
            return (limit - after) / worker.step_token
        return inf if after <= limit else -inf
