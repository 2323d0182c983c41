"""All workers that the router knows, the work they were given, and when each may take more.

Life of a worker:
    joins     -> gets a slot, and speeds from its card or from what its type has shown
    reports   -> its decode speed is corrected; a full decode worker refuses reservations
    computes  -> its prefill speed is corrected by each first token
    lost      -> its slot is free for another worker

A prompt is *urgent* while it can meet its target, and *background* work once it cannot: then it gets
what no urgent prompt needs.
Credit says when a prefill worker may be given another prompt: at once while its urgent prompts
have less than a step's tokens, otherwise shortly before it runs out of them, and then only if it
has fewer than `PREFETCH`. With `HALTED_MAX` prompts of any kind it gets no other.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf

from ..protos.frames import AttemptKey, Coefficients, WorkerCard, WorkerReport
from ..protos.targets import TargetSum
from .predictor import SLOW, Correction, Drift, LearnedCost, prior
from .worker_state import DecodeReservation, PrefillWork, WorkerState

#: Uncached tokens up to which a worker is given further prompts, for one step computes them
#: together: from about so many on a step is efficient.
BATCH_TOKENS = 512
PREFETCH = 2  #: prompts that a worker has at a time, if they are more than a step's
HALTED_MAX = 4  #: pending prompts with which a worker is given no other, however urgent
#: Uncached, and all, tokens of the prompt by which workers' speeds are compared: one like many.
TYPICAL_UNCACHED_TOKENS = 2048
TYPICAL_PROMPT_TOKENS = 4096
FADE_S = 10.0  #: after so long without a prompt half of a worker's own correction is forgotten
#: A worker has credit so long, and a round trip, before it is predicted to run out of work, as
#: predictions may be a little late.
PREDICTION_SLACK_S = 0.005
STALE_CREDITS = 8  #: heap entries for each slot, before those that are out of date are removed
HALTED_SHARE_MIN = 0.05  #: of a halted prompt's prefill, at least so much is left
#: The time of a prompt says nothing of the worker's speed if less of its tokens, as a share of them,
#: were left to compute when it was the worker's first.
OWN_TOKENS_MIN = 0.1


class WorkerFleet:
    """All workers, by name and by slot. Times are seconds of the clock that the caller reads."""

    def __init__(self, prior_tokens_per_s: float, round_trip_s: float, itl_s: float) -> None:
        """`prior_tokens_per_s` is the prefill rate of a worker that says nothing of its speed.

        `round_trip_s` is the time to a gateway and back, `itl_s` the configured target for the
        seconds between two tokens (ITL: inter-token latency).
        """
        #: The configured target. For it, each worker keeps a figure up to date: how many KV tokens one
        #: more sequence may read with which a step still stays within the target
        #: (`WorkerState.default_spare_kv_tokens`).
        self.itl_s = itl_s
        self.workers: dict[str, WorkerState] = {}
        self.prefill_workers: list[WorkerState] = []  #: by slot, all whose role is to prefill
        self.decode_workers: list[WorkerState] = []  #: by slot, all whose role is to decode
        #: Every worker both prefills and decodes. It says nothing while there is no worker.
        self.only_mixed = False
        self.membership_version = 0  #: counts changes of membership
        self.by_slot: list[WorkerState | None] = []  #: None: the slot is free
        self.credited_slots: set[int] = set()  #: slots whose credit has come
        self.block_tokens = 64  #: tokens of a KV block, as the last card says; alike in a fleet
        self._prior = prior(prior_tokens_per_s)
        self._credit_lead_s = round_trip_s + PREDICTION_SLACK_S
        #: (moment, slot) of credits to come; an entry that its worker contradicts is out of date
        self._coming_credits: list[tuple[float, int]] = []
        #: by formula ("prefill" or "step"), GPU and tensor parallelism
        self._type_drifts: dict[tuple[str, str, int], Drift] = {}
        #: by GPU and tensor parallelism
        self._learned_costs: dict[tuple[str, int], LearnedCost] = {}
        self._revisited_slot = 0  #: the slot that `revisit` looked at last
        #: one worker of each GPU type and tensor parallelism that computes prompts
        self._examples: list[WorkerState] = []

    # ---- membership ------------------------------------------------------------------------------

    def join(self, card: WorkerCard) -> WorkerState:
        """Add a worker, or give a worker a new card; what is placed on it stays."""
        worker = self.workers.get(card.id)
        if worker is None:
            worker = self._add(card)
        elif card.cost:
            worker.nominal_cost = card.cost
        worker.card = card
        # What was observed of the loads stays.
        worker.load_token_s = worker.load_token_s or card.load_token_s
        worker.last_report = 0
        worker.can_prefill = _prefills(card)
        worker.can_decode = _decodes(card)
        self.block_tokens = card.block_tokens
        self._membership_changed()
        self._update_cost(worker)
        worker.update_decode_load(self.itl_s)
        self._update_pending(worker)
        return worker

    def _add(self, card: WorkerCard) -> WorkerState:
        cost = card.cost or self._learned_cost(card).cost
        worker = WorkerState(
            slot=self._free_slot(),
            card=card,
            nominal_cost=cost,
            cost=cost,
            prefill_correction=self._new_correction("prefill", card),
            step_correction=self._new_correction("step", card),
        )
        self.workers[card.id] = worker
        self.by_slot[worker.slot] = worker
        return worker

    def _free_slot(self) -> int:
        if None not in self.by_slot:
            self.by_slot.append(None)
        return self.by_slot.index(None)

    def _new_correction(self, formula: str, card: WorkerCard) -> Correction:
        """Return a correction of the worker's own, above the slow drift of all workers of its type.

        `SLOW` is the weight of one sample in that drift.
        """
        worker_type = (formula, card.gpu, card.tensor_parallel)
        return Correction(self._type_drifts.setdefault(worker_type, Drift(SLOW)))

    def _learned_cost(self, card: WorkerCard) -> LearnedCost:
        worker_type = (card.gpu, card.tensor_parallel)
        return self._learned_costs.setdefault(worker_type, LearnedCost(self._prior))

    def lose(self, name: str) -> WorkerState | None:
        """Remove a worker and free its slot; None if it is not known."""
        worker = self.workers.pop(name, None)
        if worker is None:
            return None
        worker.alive = False
        worker.can_prefill = False
        worker.can_decode = False
        self.by_slot[worker.slot] = None
        self.credited_slots.discard(worker.slot)
        self._membership_changed()
        return worker

    def _membership_changed(self) -> None:
        self.membership_version += 1
        alive = [worker for worker in self.by_slot if worker is not None]
        self.prefill_workers = [worker for worker in alive if _prefills(worker.card)]
        self.decode_workers = [worker for worker in alive if _decodes(worker.card)]
        self.only_mixed = all(_prefills(w.card) and _decodes(w.card) for w in alive)
        # Prompts are computed by these workers, or by all while there are none of them.
        computing = self.prefill_workers or alive
        examples = {(worker.card.gpu, worker.card.tensor_parallel): worker for worker in computing}
        self._examples = list(examples.values())

    def accepting_decode_workers(self) -> list[WorkerState]:
        """Return the decode workers that take reservations now, by slot."""
        return [worker for worker in self.decode_workers if worker.can_decode]

    @property
    def largest_pool(self) -> int:
        """Blocks of the largest KV pool that decodes."""
        return max((worker.card.blocks for worker in self.decode_workers), default=0)

    # ---- speeds ----------------------------------------------------------------------------------

    def isolated_prefill_s(self, prompt_tokens: float) -> float:
        """Return the seconds of a whole prompt, were it alone in the cluster and not cached.

        The fastest kind of prefill or mixed worker computes it (of any worker, while there are none
        of these), as its card says, or as was learned of its kind. No correction is in it: a worker
        that has become slow makes no target longer. While no worker is known, the prior says it.
        """
        seconds = [
            worker.nominal_cost.prefill_s(prompt_tokens, prompt_tokens) for worker in self._examples
        ]
        return min(seconds) if seconds else self._prior.prefill_s(prompt_tokens, prompt_tokens)

    def _update_cost(self, worker: WorkerState) -> None:
        """Apply the corrections to the nominal cost, and what is derived from prefill speed."""
        worker.cost = worker.nominal_cost.scaled(
            worker.prefill_correction.factor, worker.step_correction.factor
        )
        worker.half_chunk_s = 0.5 * worker.cost.prefill_token * worker.card.chunk_tokens
        nominal_s = worker.nominal_cost.prefill_s(TYPICAL_UNCACHED_TOKENS, TYPICAL_PROMPT_TOKENS)
        worker.typical_prefill_s = nominal_s * worker.prefill_correction.sure_slowness

    def isolated_prefill_text(self) -> str:
        """Return about how long a prompt takes alone, as in `20ms + 150ms/1k`, for people."""
        base_s = self.isolated_prefill_s(0)
        per_token_s = (
            self.isolated_prefill_s(TYPICAL_PROMPT_TOKENS) - base_s
        ) / TYPICAL_PROMPT_TOKENS
        # `scaled` by 1 rounds to four significant digits.
        return str(TargetSum(fixed_s=base_s, per_1k_s=1000 * per_token_s).scaled())

    def correct_prefill(
        self, worker: WorkerState, work: PrefillWork, took_s: float, now: float
    ) -> None:
        """Correct the worker's prefill speed: this work took `took_s` seconds."""
        nominal_s = worker.nominal_cost.prefill_s(work.uncached_tokens, work.prompt_tokens)
        worker.corrected_at = now
        worker.prefill_correction.observe(took_s / nominal_s if nominal_s else 1.0)
        self._update_cost(worker)

    def report(self, worker: WorkerState, report: WorkerReport) -> bool:
        """Correct the worker's speeds by a report; True if it takes reservations again.

        The speed of a worker whose card has no coefficients is learned from scratch.
        """
        cost_changed = False
        if worker.card.cost is None:
            cost_changed = self._learn(worker, report)
        if report.steps and report.step_seconds > 0:
            # Also without a sample of its own: reports of other workers of its type move the drift that
            # it shares with them.
            cost_changed = True
            # Only steps without prefill say how long decode takes.
            if report.running and not report.prefill_tokens:
                predicted_s = worker.nominal_cost.step_s(report.running, report.kv_tokens)
                step_s = report.step_seconds / report.steps
                worker.step_correction.observe(step_s / predicted_s)
        if report.loaded_tokens > 0:
            worker.observe_loads(report.loaded_tokens, report.loading_seconds)
            worker.loaded_lately = True
        could_decode = worker.can_decode
        # while preempted sequences wait for blocks, the worker refuses reservations
        worker.can_decode = _decodes(worker.card) and not report.waiting
        if worker.can_decode != could_decode:
            self._update_credit(worker)
        if cost_changed:
            self._update_cost(worker)
        if cost_changed or worker.can_decode != could_decode:
            worker.update_decode_load(self.itl_s)
        return worker.can_decode and not could_decode

    def _learn(self, worker: WorkerState, report: WorkerReport) -> bool:
        """The worker's type learns from the report, and the worker from its type.

        True if the worker's nominal cost is another one now.
        """
        learned = self._learned_cost(worker.card)
        if report.prefill_seconds > 0 and report.prefill_tokens:
            learned.observe_prefill(report.prefill_seconds / report.prefill_tokens)
        if report.steps and report.step_seconds > 0:
            learned.observe_step(report.step_seconds / report.steps, report.running)
        return self._adopt_learned(worker, learned)

    def _adopt_learned(self, worker: WorkerState, learned: LearnedCost) -> bool:
        if worker.nominal_cost is learned.cost:
            return False
        worker.nominal_cost = learned.cost
        self._update_cost(worker)
        return True

    def revisit(self, now: float) -> None:
        """Look at one worker in turn, and forget half of its own correction if it is idle.

        What one bad prompt said of a worker would otherwise keep an idle worker idle for ever, and what
        one slow load said of its tiers would keep prompts away from these.
        """
        self._revisited_slot = (self._revisited_slot + 1) % max(len(self.by_slot), 1)
        worker = self.by_slot[self._revisited_slot] if self.by_slot else None
        if worker is None:
            return
        if now - worker.loads_faded_at > FADE_S:
            worker.loads_faded_at = now
            if not worker.loaded_lately:
                worker.fade_loads()
            worker.loaded_lately = False
        if worker.pending_prefills:
            return
        if now - worker.corrected_at > FADE_S:
            worker.corrected_at = now
            worker.prefill_correction.fade()
            self._update_cost(worker)
        if worker.card.cost is None:
            learned = self._learned_cost(worker.card)
            if self._adopt_learned(worker, learned):
                worker.update_decode_load(self.itl_s)

    # ---- prompts ---------------------------------------------------------------------------------

    def give_prompt(
        self, worker: WorkerState, key: AttemptKey, work: PrefillWork, now: float
    ) -> None:
        """Note that a prompt is on its way to the worker.

        The prompt goes before those with a later deadline. One that has begun is halted at the
        next chunk's border, and goes on behind. Deadline 0 is that of all prompts of a policy that
        has no order of its own: they are in order of arrival.
        """
        works = worker.pending_prefills
        if not works:
            worker.head_began = now  # the first of the pending prompts, which is being computed
        elif work.deadline < next(reversed(works.values())).deadline:
            self._insert_prompt(worker, key, work, now)
            return
        works[key] = work
        self._update_pending(worker)

    def _insert_prompt(
        self, worker: WorkerState, key: AttemptKey, work: PrefillWork, now: float
    ) -> None:
        """Put a prompt before others of the worker, if need be before the one under way."""
        works = worker.pending_prefills
        head = next(iter(works.values()))
        if work.deadline < head.deadline:
            remaining_s = head.seconds - (now - worker.head_began)
            head.seconds = max(remaining_s, HALTED_SHARE_MIN * head.seconds)
            head.delayed = True
            worker.head_began = now
            work.delayed = True  # it waits for the chunk that is under way
        works[key] = work
        in_order = sorted(works.items(), key=lambda item: item[1].deadline)
        worker.pending_prefills = dict(in_order)
        self._update_pending(worker)

    def finish_prompt(
        self, worker: WorkerState, key: AttemptKey, now: float
    ) -> tuple[PrefillWork, float] | None:
        """Note that a prompt's first token is out.

        Returns the work and the seconds that it would have taken alone, 0.0 if the observed ones
        say nothing of the worker's speed; None if the prompt is not pending there.
        """
        if key not in worker.pending_prefills:
            return None
        works = worker.pending_prefills
        first = next(iter(works.values()))
        work = works.pop(key)
        own_tokens = work.uncached_tokens - work.computed_tokens
        took_s = 0.0
        if work is not first:
            first.delayed = True  # a step that computed another prompt would count as its time
        else:
            shared_tokens = self._fill_last_step(worker, own_tokens)
            if not work.delayed and own_tokens >= OWN_TOKENS_MIN * work.uncached_tokens:
                took_s = now - max(worker.head_began, work.assigned_at)
                took_s *= _alone_share(worker.nominal_cost, work, own_tokens, shared_tokens)
        worker.head_began = now
        self._update_pending(worker)
        return work, took_s

    def _fill_last_step(self, worker: WorkerState, tokens: int) -> int:
        """Return how many tokens of other prompts were computed in the first prompt's steps.

        `tokens` are those of the first prompt, which is not pending any more. The worker fills
        its last step with the beginnings of the prompts behind it, and these tokens do not count
        as theirs later.
        """
        room = -tokens % worker.card.chunk_tokens
        shared_tokens = 0
        for other in worker.pending_prefills.values():
            if other.assigned_at > worker.head_began:
                continue  # it came when these steps were under way
            computed_tokens = min(room, other.uncached_tokens - other.computed_tokens)
            other.computed_tokens += computed_tokens
            room -= computed_tokens
            shared_tokens += computed_tokens
        return shared_tokens

    def withdraw_prompt(self, worker: WorkerState, key: AttemptKey, now: float) -> None:
        """Note that the worker is not going to compute this prompt any more."""
        if key not in worker.pending_prefills:
            return
        if next(iter(worker.pending_prefills)) == key:
            worker.head_began = now
        del worker.pending_prefills[key]
        self._update_pending(worker)

    def _update_pending(self, worker: WorkerState) -> None:
        worker.update_pending_prefills()
        self._update_credit(worker)

    # ---- credit ----------------------------------------------------------------------------------

    def _update_credit(self, worker: WorkerState) -> None:
        if not worker.alive:
            return  # its slot may be another worker's by now
        worker.credit_at = self._credit_at(worker)
        if worker.credit_at == -inf:
            self.credited_slots.add(worker.slot)
            return
        self.credited_slots.discard(worker.slot)
        if worker.credit_at == inf:
            return
        heappush(self._coming_credits, (worker.credit_at, worker.slot))
        if len(self._coming_credits) > STALE_CREDITS * len(self.by_slot):
            self._remove_stale_credits()

    def _credit_at(self, worker: WorkerState) -> float:
        """Return when a prompt that can be in time may come: it goes before background work.

        -inf: at any time; inf: not before another prompt of the worker is done.
        """
        if len(worker.pending_prefills) >= HALTED_MAX:
            return inf
        if worker.urgent_tokens < min(BATCH_TOKENS, worker.card.chunk_tokens):
            return -inf
        if worker.urgent_prompts < PREFETCH:
            return worker.urgent_until - self._credit_lead_s
        return inf

    def takes_background(self, worker: WorkerState) -> bool:
        """Whether the worker has so little to do that it may begin a prompt nobody waits for."""
        return worker.pending_tokens < min(BATCH_TOKENS, worker.card.chunk_tokens)

    def _remove_stale_credits(self) -> None:
        self._coming_credits = [
            (worker.credit_at, worker.slot)
            for worker in self.workers.values()
            if -inf < worker.credit_at < inf
        ]
        heapify(self._coming_credits)

    def credit_arrived_workers(self, now: float) -> None:
        """Add the slots whose credit has come by `now` to `credited_slots`."""
        while self._coming_credits and self._coming_credits[0][0] <= now:
            credit_at, slot = heappop(self._coming_credits)
            worker = self.by_slot[slot]
            if worker is not None and worker.credit_at == credit_at:
                self.credited_slots.add(slot)

    def credited(self, now: float) -> list[WorkerState]:
        """Return the workers that may be given a prompt now, by slot.

        Slots that a policy has taken out of `credited_slots` are left out until their credit
        changes.
        """
        self.credit_arrived_workers(now)
        workers = [self.by_slot[slot] for slot in sorted(self.credited_slots)]
        return [worker for worker in workers if worker is not None]

    def credit_again(self, now: float) -> None:
        """Add every worker that has credit to `credited_slots`, and wait for all others again.

        `next_credit` forgets the coming credits of workers whose role it was not asked for.
        """
        for worker in self.workers.values():
            if worker.credit_at <= now:
                self.credited_slots.add(worker.slot)
        self._remove_stale_credits()

    def next_credit(self, now: float, decodes: bool) -> float:
        """Return when the next worker that prefills (or decodes) gets credit.

        inf: no worker gets it by the time alone; those that have it already do not count.
        """
        self.credit_arrived_workers(now)
        while self._coming_credits:
            credit_at, slot = self._coming_credits[0]
            worker = self.by_slot[slot]
            if worker is not None and worker.credit_at == credit_at:
                takes_prompts = worker.can_decode if decodes else worker.can_prefill
                if takes_prompts:
                    return credit_at
            heappop(self._coming_credits)
        return inf

    # ---- decode reservations ---------------------------------------------------------------------

    def reserve(self, worker: WorkerState, key: AttemptKey, reservation: DecodeReservation) -> None:
        """Reserve blocks, rows (of a step) and KV tokens for an attempt.

        Its `blocks` are those that it may use at once; `expected_blocks` is how many it will have at
        its expected end.
        """
        assert key not in worker.reservations, key
        worker.reservations[key] = reservation
        worker.reserved_blocks += reservation.blocks
        worker.expected_blocks += reservation.expected_blocks
        worker.kv_tokens += reservation.kv_tokens
        worker.rows += reservation.rows
        worker.update_decode_load(self.itl_s)

    def release(self, worker: WorkerState, key: AttemptKey) -> None:
        """Give an attempt's reservation back; nothing happens if it has none."""
        reservation = worker.reservations.pop(key, None)
        if reservation is None:
            return
        worker.reserved_blocks -= reservation.blocks
        worker.expected_blocks -= reservation.expected_blocks
        worker.kv_tokens -= reservation.kv_tokens
        worker.rows -= reservation.rows
        worker.update_decode_load(self.itl_s)


def _prefills(card: WorkerCard) -> bool:
    """Whether the worker's role is to compute prompts."""
    return card.role in ("prefill", "mixed")


def _alone_share(
    cost: Coefficients, work: PrefillWork, own_tokens: int, shared_tokens: int
) -> float:
    """Return the seconds of a prompt alone, as a share of those of the steps that computed it.

    The steps computed `own_tokens` of it, and `shared_tokens` of other prompts.
    """
    alone_s = cost.prefill_s(work.uncached_tokens, work.prompt_tokens)
    steps_s = cost.prefill_s(own_tokens, work.prompt_tokens) + cost.prefill_token * shared_tokens
    return alone_s / steps_s if steps_s else 1.0


def _decodes(card: WorkerCard) -> bool:
    """Whether the worker's role is to decode."""
    return card.role in ("decode", "mixed")
