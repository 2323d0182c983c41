"""Our policy: requests wait in the router until a worker has credit for them.

A worker has credit while it may be given another prompt: it has little to do, or is about to run
out of work. To decode alone, a worker needs none: there it is room that counts.

A request is urgent while it can meet its deadline. The most urgent one is of the highest priority,
and of those the one whose prefill must begin first, put off by what its tenant has had beyond its
share. Whoever cannot be served in time any more is overdue, or is refused if its class
prefers that. If not all can be in time, the longest prompt is late. There are four ways to a worker:
  push: a request chooses the worker that has its first token earliest. If that one is busy, the
        request takes the best of the free ones, unless the busy one is clearly earlier; then it
        waits, and prefers that worker if another would have to compute much more
  pull: a worker with credit takes the most urgent request that it can serve in time, or one that
        prefers its cache, if the urgent one can stand that
  offer: the most urgent requests choose again every `CHOOSE_S`, while there are idle workers; with
        `disaggregate: auto` always, as decode workers may take them
  share: a decode worker with time to spare computes a prompt beside its decodes, if that prompt
        would be late on the prefill workers, or is overdue
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from math import inf

from ...protos.frames import AttemptKey
from ..config import GIVE_UP_FACTOR
from ..costs import PrefillPlan, paced_prefill_s, plan_prefill
from ..decisions import PassedOver, PlacementKind
from ..drain import DrainRate
from ..fleet import HALTED_MAX
from ..placer import Placement, Placer, Rejection
from ..request_queue import QueuedRequest
from ..shortlist import PrefillCandidate, candidate_order
from ..worker_state import WorkerState
from .policy import OVERDUE_DEADLINE_S

URGENT_COMPARED = 8  #: requests that a worker chooses among: few, as each is a prediction
PREFERRING_COMPARED = 4  #: and of those, at most, that prefer this worker
#: A busy worker is waited for if the time to its first token is below this share of the free one's,
#: less these seconds.
SOONER_SHARE = 0.9
SOONER_S = 0.01
#: what a cache must save to go before a more urgent request: seconds, or a share of the prompt
SAVED_S = 0.02
SAVED_SHARE = 0.5
#: A newcomer goes before a worker's other prompts if they can be put off by so many times its
#: predicted prefill (which may be wrong) and be in time.
PUT_OFF_FACTOR = 2.0
#: A worker pulls a request only if so many times its predicted wait and prefill are left to it. A
#: newcomer that has less left behind the urgent requests before it is late, or one of those is.
TIME_MARGIN = 1.4
#: Of the prefill that is begun, the share that is kept for the oldest overdue request, once it is old.
OVERDUE_SHARE = 1 / 8
LONGEST_COMPARED = 8  #: of the longest urgent requests, to find one that is late for a new one
BEHIND_COUNTED = 64  #: of the least urgent requests: a new one does not wait for those behind it
CHOOSE_S = 0.1  #: between two choices of one request: choosing costs the router time
OFFER_S = 0.0125  #: between two offers, in each of which one request chooses again

#: Of the fleet's rate, the share at which overdue requests are taken to be served at least, when
#: the wait of a newcomer is predicted. While all workers have much to do they get less, and wait
#: longer than was predicted.
LOWEST_RATE = OVERDUE_SHARE


class Outcome(Enum):
    """What came of an attempt to place a request."""

    PLACED = 1
    NOTHING = 2  #: no worker takes it, or there is nothing to take, now
    #: decode workers have no room for this request; one that is smaller, or old, may find some
    NO_ROOM = 3


@dataclass(slots=True)
class PullChoice:
    """What a worker with credit takes, and which more urgent ones it looked at and leaves alone."""

    request: QueuedRequest | None
    passed_over: list[PassedOver]


class DeadlinePolicy:
    """Serves as many requests as possible in time. See `policy.Policy` for the interface.

    `now` is in seconds of the caller's clock, as all moments are. A list `decided` is given down
    to collect what is decided on the way. `disaggregate` is the configured mode: with "auto" a
    decode worker may compute a prompt itself where that is better.
    """

    judges_lateness = True

    def __init__(self, placer: Placer) -> None:
        self.placer = placer
        self.config = placer.config
        self.fleet = placer.fleet
        self.queue = placer.queue
        self.idle_slots: set[int] = set()  #: workers that have credit and found nothing to do
        self.decode_full = False  #: decode workers have no room for the next request
        self._choosing: list[QueuedRequest] = []  #: requests that choose at the next opportunity
        #: queued requests whose prompts a decode worker has to compute, while prefill workers
        #: compute the others
        self._local_requests: dict[AttemptKey, QueuedRequest] = {}
        #: seconds of prefill of urgent requests that go before the oldest overdue one's next turn
        self._urgent_turn_s = 0.0
        self._urgent_rate = DrainRate()
        self._overdue_rate = DrainRate()
        self._next_offer_at = -inf

    # ---- the interface of a policy ---------------------------------------------------------------

    @property
    def patience_s(self) -> float:
        """How long a request may be queued before the router gives it up.

        It is twice the longest predicted wait with which a request is let in (`GIVE_UP_FACTOR`): by
        then the prediction was wrong.
        """
        return GIVE_UP_FACTOR * self.config.background_wait_s

    def arrive(self, request: QueuedRequest, now: float) -> Placement | Rejection | None:
        """Let a new request choose a worker; queue it if the chosen worker does not take it.

        The request is charged to its tenant unless it is refused: entering the queue does it too,
        and puts the requests of a tenant off that has asked for more than its share of all the
        workers.
        """
        placer = self.placer
        placer.find_prefix(request)
        if placer.missing_roles(request):
            self._queue_unchosen(request, now)
            return None
        if request.local or self.decode_full or request.excludes_workers:
            self._queue_unchosen(request, now)
            return self._admit(request, now)
        workers = placer.shortlist.prefill_workers(request, now)
        candidates = self._prefill_candidates(request, workers, now)
        request.fastest_prefill_s = min(candidate.prefill_s for candidate in candidates)
        request.choose_again_at = now + CHOOSE_S
        if now + request.fastest_prefill_s <= request.deadline:
            decided: list[Placement | Rejection] = []
            outcome = self._choose(request, candidates, now, decided)
            if outcome is Outcome.PLACED:
                self.queue.charge(request, now, placer.capacity)
                placement = decided[0]
                assert isinstance(placement, Placement)
                return placement
            if outcome is Outcome.NO_ROOM:
                self._choosing.append(request)
        self.queue.enter(request, now, placer.capacity)
        return self._admit(request, now)

    def _admit(self, request: QueuedRequest, now: float) -> Rejection | None:
        """Keep the urgent requests to those that can be in time, now that one has entered.

        If they are too many, one of them waits with the overdue ones: the new one, or a much longer
        one. It is refused if its class prefers that, or if too many wait there.
        """
        queue = self.queue
        capacity = max(self.placer.capacity, 1)
        lowest_rate = LOWEST_RATE * capacity  # a rate from a time without workers says nothing
        urgent_rate = max(self._urgent_rate.rate(capacity), lowest_rate)
        urgent_s = (queue.prefill_s - queue.behind_s(request, BEHIND_COUNTED)) / urgent_rate
        credit_at = self.fleet.next_credit(now, decodes=self.placer.local_only)
        # inf: workers have credit already, or get it by an event whose moment nobody predicts.
        begins_at = max(credit_at, now) if credit_at < inf else now
        # `urgent_s` counts the requests before this one, and this one. With less than `TIME_MARGIN` to
        # spare no worker would pull it. If the queue were as long as deadlines allow, all would come
        # in their last moment, and small errors make that too late.
        lateness_s = now + TIME_MARGIN * (begins_at - now + urgent_s) - request.deadline
        # Up to one for each worker, nobody waits behind another: then the rate says nothing, and the
        # deadline alone decides later.
        if lateness_s <= 0 or len(queue.urgent) <= capacity:
            return None
        late = request
        if now + request.fastest_prefill_s <= request.deadline:  # else it is late whoever leaves
            late = self._longer_than(request) or request
        if late.slo.early_reject:
            queue.refuse(late)
            return Rejection(late, lateness_s, retry_after_s=lateness_s)
        overdue_rate = max(self._overdue_rate.rate(capacity), lowest_rate)
        wait_s = queue.overdue_prefill_s / overdue_rate
        wait_limit_s = self.config.background_wait_s
        if wait_s > wait_limit_s:
            queue.refuse(late)
            return Rejection(late, lateness_s, wait_s, retry_after_s=wait_s - wait_limit_s)
        queue.mark_overdue(late)
        return None

    def _longer_than(self, request: QueuedRequest) -> QueuedRequest | None:
        """Return the urgent request to be late in place of a new one: the longest; None: there is none.

        One long prompt that is late lets many short ones be in time. To make the longest job late
        leaves the fewest late ones (J. M. Moore, "An n job, one machine sequencing algorithm for
        minimizing the number of late jobs", Management Science 15(1), 1968).

        It may be behind the new one. Then that is late all the same, and the long one would be later;
        to look only at those before it held a fifth less on the conversation trace. It is of no higher
        priority, and the same tenant's; or of another that has had more than its share, if the new
        one's has not.
        """
        for other in self.queue.longest_urgent(LONGEST_COMPARED):
            if other.fastest_prefill_s <= request.fastest_prefill_s:
                return None
            if other.slo.priority < request.slo.priority or other.local != request.local:
                continue
            is_beyond_share = other.is_put_off and not request.is_put_off
            if other.place.tenant == request.place.tenant or is_beyond_share:
                return other
        return None

    def _queue_unchosen(self, request: QueuedRequest, now: float) -> None:
        """Queue a new request that chooses its worker in `place_queued`."""
        placer = self.placer
        workers = placer.shortlist.fastest_workers(request.hits, request.local)
        prefills_s = [plan_prefill(request, worker).compared_s for worker in workers]
        request.fastest_prefill_s = min(prefills_s, default=0.0)
        self.reconsider(request)
        self.queue.enter(request, now, placer.capacity)

    def place_queued(self, now: float) -> list[Placement | Rejection]:
        """Let requests choose workers, then workers requests, as far as there is credit."""
        decided: list[Placement | Rejection] = []
        self._note_waiting(now)
        if not self.queue:
            return decided
        self._retire_late(now, decided)
        self._push_choosing(now, decided)
        self._push_local_requests(now, decided)
        self._pull_for_credited(now, decided)
        may_offer = bool(self.idle_slots) or self.config.disaggregate == "auto"
        if now >= self._next_offer_at and may_offer:
            self._next_offer_at = now + OFFER_S
            self._offer(now, decided)
        self._note_waiting(now)
        return decided

    def _note_waiting(self, now: float) -> None:
        """Tell the measured rates whether requests wait from now on: other time does not count.

        Urgent ones wait behind others only if there are more of them than workers (`_admit`). Fewer
        may wait for workers that they prefer. While there are no workers, nobody can be served.
        """
        capacity = self.placer.capacity
        self._urgent_rate.waits(now, is_waiting=0 < capacity < len(self.queue.urgent))
        self._overdue_rate.waits(now, is_waiting=capacity > 0 and bool(self.queue.overdue))

    def next_wake(self, now: float) -> float:
        """Return when the next worker has credit by prediction, or a request chooses again."""
        credit_at = self.fleet.next_credit(now, decodes=self.placer.local_only)
        if self.decode_full or self._local_requests:
            return min(credit_at, now + CHOOSE_S)
        if not self.idle_slots and self.config.disaggregate != "auto":
            return credit_at
        moments = [credit_at]
        if self.queue.overdue:
            moments.append(now + CHOOSE_S)
        for request in self.queue.most_urgent(URGENT_COMPARED):
            moments.append(max(request.choose_again_at, self._next_offer_at))
        return min(moments)

    def reconsider(self, request: QueuedRequest) -> None:
        """Let a request choose at the next opportunity."""
        if request.local and not self.placer.local_only:
            self._local_requests[request.attempt_key] = request
        else:
            self._choosing.append(request)

    def worker_lost(self, worker: WorkerState) -> None:
        """Let the requests that preferred a lost worker choose another."""
        self.idle_slots.discard(worker.slot)
        self._choosing += self.queue.forget_worker(worker.slot)

    def local_only_changed(self, now: float) -> None:
        """Let all requests choose again: other workers compute prompts from now on.

        The placer has set each request's `local` by then.
        """
        self.idle_slots.clear()
        self._local_requests.clear()
        self.fleet.credit_again(now)
        for request in self.queue.by_key.values():
            self.reconsider(request)

    def local_prompt_finished(self) -> None:
        """Let the most urgent requests choose at once: a decode worker can take a prompt again."""
        self._next_offer_at = -inf
        for request in self.queue.most_urgent(URGENT_COMPARED):
            request.choose_again_at = -inf

    # ---- the steps of `place_queued` -------------------------------------------------------------

    def _retire_late(self, now: float, decided: list[Placement | Rejection]) -> None:
        """Move requests at the front of the urgent ones to the overdue ones, if nobody could serve
        them in time any more; those whose class prefers that are refused instead.

        The first one that can be in time ends this. Late ones behind it, of a lower priority or of a
        tenant that has had more than its share, stay urgent until it has left.
        """
        while self.queue.urgent:
            _, request = self.queue.urgent[0]
            lateness_s = now + request.fastest_prefill_s - request.deadline
            if lateness_s <= 0:
                return
            if request.slo.early_reject:
                self.queue.leave(request.attempt_key)
                decided.append(Rejection(request, lateness_s, retry_after_s=lateness_s))
            else:
                self.queue.mark_overdue(request)

    def _push_choosing(self, now: float, decided: list[Placement | Rejection]) -> None:
        """Let the requests that are to choose do so, until one finds the decode workers full.

        The others then choose no more. In the next event the most urgent requests choose instead;
        what else waits is pulled, or has its turn in an offer.
        """
        choosing = self._choosing
        self._choosing = []
        if self.decode_full:  # perhaps there is room now
            choosing = [*self.queue.most_urgent(URGENT_COMPARED), *choosing]
        self.decode_full = False
        for request in choosing:
            if self.decode_full:
                return
            if request.attempt_key in self.queue and not request.overdue:
                self.decode_full = self._push(request, now, decided) is Outcome.NO_ROOM

    def _push_local_requests(self, now: float, decided: list[Placement | Rejection]) -> None:
        """Let requests that no prefill worker may compute choose decode workers, the first ones.

        Those that have left the queue meanwhile are removed like those that are placed.
        """
        for request in list(islice(self._local_requests.values(), URGENT_COMPARED)):
            outcome = Outcome.PLACED
            if self.queue.by_key.get(request.attempt_key) is request:
                outcome = self._push_local(request, now, decided)
            if outcome is Outcome.NO_ROOM:
                self.decode_full = True
            if outcome is Outcome.PLACED:
                del self._local_requests[request.attempt_key]

    def _pull_for_credited(self, now: float, decided: list[Placement | Rejection]) -> None:
        """Let each worker with credit choose a request; who finds none is idle from then on.

        An idle worker is not asked again at every event: newcomers choose it themselves.
        """
        for worker in self.fleet.credited(now):
            slot = worker.slot
            if slot in self.idle_slots or not self.placer.takes_prompts(worker):
                self.fleet.credited_slots.discard(slot)
                continue
            outcome = self._pull(worker, now, decided)
            if outcome is Outcome.NO_ROOM:
                self.decode_full = True
                return
            if outcome is Outcome.NOTHING:
                self.idle_slots.add(slot)
                self.fleet.credited_slots.discard(slot)

    def _offer(self, now: float, decided: list[Placement | Rejection]) -> None:
        """Let one urgent request choose again, and one idle worker pull for the overdue ones.

        One each, so that an event stays cheap; the next offer has the next ones.
        """
        for request in self.queue.most_urgent(URGENT_COMPARED):
            if request.choose_again_at <= now:
                if self._push(request, now, decided) is Outcome.NO_ROOM:
                    self.decode_full = True
                break
        if self.queue.overdue and self.idle_slots and not self.decode_full:
            worker = self._idle_worker_for_overdue()
            if worker is not None:
                self.decode_full = self._pull(worker, now, decided) is Outcome.NO_ROOM
        if self.queue.overdue and self.config.disaggregate == "auto":
            self._share_with_decode_worker(now, decided)

    def _share_with_decode_worker(self, now: float, decided: list[Placement | Rejection]) -> None:
        """Give one overdue request to a decode worker that has time to spare for its prompt.

        Requests are overdue because the prefill workers do not keep up. The engine computes such a
        prompt in what the running answers' targets leave of each step, so nobody pays for it.
        """
        for request in islice(self.queue.overdue.values(), URGENT_COMPARED):
            if request.local or self.placer.missing_roles(request):
                continue
            workers = self.placer.workers_to_share(request)
            spare = [worker for worker in workers if self.fleet.takes_background(worker)]
            deadline = self._deadline(request, now)
            placement = self.placer.place_local_on_best(request, spare, deadline, now)
            if placement is not None:
                self._commit(placement, now, decided)
                return

    def _idle_worker_for_overdue(self) -> WorkerState | None:
        """Return an idle worker that may take one of the first overdue requests."""
        for request in islice(self.queue.overdue.values(), URGENT_COMPARED):
            if request.local != self.placer.local_only or self.placer.missing_roles(request):
                continue
            for worker in self.placer.allowed(request, self._prompt_workers()):
                if worker.slot in self.idle_slots:
                    return worker
        return None

    def _prompt_workers(self) -> list[WorkerState]:
        """Return the workers that pull: those on which prompts are computed."""
        fleet = self.fleet
        workers = fleet.decode_workers if self.placer.local_only else fleet.prefill_workers
        return [worker for worker in workers if self.placer.takes_prompts(worker)]

    def _deadline(self, request: QueuedRequest, now: float) -> float:
        """Return when the prompt should be computed, for the worker's order."""
        return now + OVERDUE_DEADLINE_S if request.overdue else request.deadline

    # ---- push: a request chooses its worker ------------------------------------------------------

    def _push(
        self, request: QueuedRequest, now: float, decided: list[Placement | Rejection]
    ) -> Outcome:
        placer = self.placer
        if placer.missing_roles(request):
            return Outcome.NOTHING
        placer.find_prefix_again(request)  # it may have waited since it was queued unchosen
        request.choose_again_at = now + CHOOSE_S
        if request.local:
            return self._push_local(request, now, decided)
        workers: Sequence[WorkerState] = placer.shortlist.prefill_workers(request, now)
        if request.excludes_workers:
            workers = placer.allowed(request, self.fleet.prefill_workers)
        candidates = self._prefill_candidates(request, workers, now)
        return self._choose(request, candidates, now, decided)

    def _push_local(
        self, request: QueuedRequest, now: float, decided: list[Placement | Rejection]
    ) -> Outcome:
        allowed = self.placer.allowed(request, self.fleet.accepting_decode_workers())
        workers = [worker for worker in allowed if worker.credit_at <= now]
        if not workers:
            return Outcome.NOTHING
        deadline = self._deadline(request, now)
        placement = self.placer.place_local_on_best(request, workers, deadline, now)
        return self._commit(placement, now, decided)

    def _choose(
        self,
        request: QueuedRequest,
        candidates: list[PrefillCandidate],
        now: float,
        decided: list[Placement | Rejection],
    ) -> Outcome:
        """Place the request on the worker that has its first token earliest, of those that take it now.

        With `auto` a decode worker is preferred where it is better. The request waits if nobody takes
        it, or if a busy worker is clearly earlier than every free one. If it would be late behind what
        the best worker has to do, it leaves that one to those that may be in time.
        """
        if not candidates:
            return Outcome.NOTHING
        best = min(candidates, key=candidate_order)
        if self.config.disaggregate == "auto":
            others_s = 0.0 if best.has_credit else self._others_share_s(request)
            deadline = self._deadline(request, now)
            remote_s = best.cost + others_s
            local = self.placer.better_local(request, remote_s, deadline, now)
            if local is None and now + remote_s > request.deadline:
                # `better_local` plans for half the ITL target in a step; the whole one may do.
                local = self.placer.local_in_time(request, now)
            if local is not None:
                return self._commit(local, now, decided)
        if not best.has_credit:
            takers = [candidate for candidate in candidates if candidate.has_credit]
            taker = min(takers, key=candidate_order, default=None)
            if taker is None or self._is_worth_waiting(request, best.cost, taker.cost, now):
                slowest_s = max(candidate.prefill_s for candidate in candidates)
                self._wait_for(request, best, saved_s=slowest_s - best.prefill_s)
                return Outcome.NOTHING
            best = taker
        is_late = now + best.cost > request.deadline
        if is_late and best.worker.backlog_s(now) > 0 and self._others_are_urgent(request):
            return Outcome.NOTHING
        placement = self._pair(request, best.worker, PlacementKind.PUSH, now)
        if placement is not None and self.placer.records_options:
            placement.prefill_candidates = candidates
        return self._commit(placement, now, decided)

    def _prefill_candidates(
        self, request: QueuedRequest, workers: Sequence[WorkerState], now: float
    ) -> list[PrefillCandidate]:
        """Return what the first token would cost on each of these workers.

        The request may go before all prompts of a worker, if none of them becomes late by that. No
        worker gets more than `HALTED_MAX` prompts by this, as each may halt the one before it. Where a
        part of the prefix would be fetched from another worker, which may fail, the cost is higher
        than what is predicted (`PrefillPlan.compared_s`).
        """
        put_off_factor = PUT_OFF_FACTOR * self.placer.residuals.upper
        candidates = []
        for worker in workers:
            prefill_s = plan_prefill(request, worker).compared_s
            wait_s = max(worker.busy_until - now, 0.0) + worker.preferring_s
            if worker is request.preferred_worker:
                wait_s -= request.preferred_prefill_s  # `preferring_s` counts this request too
            has_credit = worker.credit_at <= now
            goes_first = (
                worker.first_deadline > request.deadline
                and worker.slack_s >= put_off_factor * prefill_s
                and len(worker.pending_prefills) < HALTED_MAX
                and not request.overdue
            )
            if goes_first:  # it waits for the end of the chunk under way
                has_credit = True
                wait_s = min(wait_s, worker.half_chunk_s)
            candidate = PrefillCandidate(
                worker=worker,
                cost=wait_s + prefill_s,
                tie_breaker=request.tie_breaker(worker.slot),
                wait_s=wait_s,
                prefill_s=prefill_s,
                has_credit=has_credit,
            )
            candidates.append(candidate)
        return candidates

    def _others_are_urgent(self, request: QueuedRequest) -> bool:
        """Return whether urgent requests of no lower priority wait beside this one."""
        for _, other in self.queue.urgent[:2]:
            if other is not request:
                return other.slo.priority <= request.slo.priority
        return False

    def _others_share_s(self, request: QueuedRequest) -> float:
        """Return the seconds that other urgent requests take each prefill worker, if none is idle.

        Requests that prefer a worker do not count: they wait for that one.
        """
        if self.idle_slots or not self.queue.urgent:
            return 0.0
        counted = request.attempt_key in self.queue and request.preferred_worker is None
        own_s = request.fastest_prefill_s if counted else 0.0
        others_s = max(self.queue.prefill_s - self.queue.preferring_s - own_s, 0.0)
        return others_s / max(len(self.fleet.prefill_workers), 1)

    def _is_worth_waiting(
        self, request: QueuedRequest, there_s: float, here_s: float, now: float
    ) -> bool:
        """Whether the request had better wait for a busy worker than take one that is free.

        `there_s` and `here_s` are the times to the first token on the two.
        """
        # A place here is certain and one there is a prediction: it must be clearly earlier.
        late_there = now + there_s > request.deadline
        late_here = now + here_s > request.deadline
        if late_there and not late_here:
            return False
        return there_s < SOONER_SHARE * here_s - SOONER_S

    def _wait_for(self, request: QueuedRequest, best: PrefillCandidate, saved_s: float) -> None:
        """Note that the request waits, and for which worker if its cache saves a lot.

        `saved_s` is by how much the slowest compared worker takes longer for the prompt. For a
        request that prefers the same worker already, the first prediction of its prefill stays.
        """
        preferred = best.worker if saved_s > SAVED_S else None
        if request.attempt_key not in self.queue:
            request.preferred_worker = preferred
            request.preferred_prefill_s = best.prefill_s
        elif preferred is not request.preferred_worker:
            self.queue.prefer(request, preferred, best.prefill_s)

    # ---- pull: a worker chooses its request ------------------------------------------------------

    def _pull(
        self, worker: WorkerState, now: float, decided: list[Placement | Rejection]
    ) -> Outcome:
        # In this order: an old overdue request whose turn it is, the best urgent one, and, if there
        # is none, any overdue one. Overdue requests go only to a worker whose prompts leave room in
        # its next step: there they hold up nobody.
        choice = PullChoice(None, [])
        may_begin_background = self.fleet.takes_background(worker)
        if may_begin_background:
            choice.request = self._oldest_overdue(worker, now)
        if choice.request is None:
            choice = self._best_for(worker, now)
        if choice.request is None and may_begin_background:
            choice.request = self._first_overdue(worker)
        request = choice.request
        if request is None:
            return Outcome.NOTHING
        self.placer.find_prefix_again(request)
        if request.local:
            deadline = self._deadline(request, now)
            placement = self.placer.place_local(request, worker, deadline, now)
        else:
            placement = self._pair(request, worker, PlacementKind.PULL, now)
        if placement is not None:
            placement.passed_over = choice.passed_over
        return self._commit(placement, now, decided)

    def _may_take(self, worker: WorkerState, request: QueuedRequest) -> bool:
        if request.local != self.placer.local_only or self.placer.missing_roles(request):
            return False
        if not request.excludes_workers:
            return True
        return worker in self.placer.allowed(request, self._prompt_workers())

    def _oldest_overdue(self, worker: WorkerState, now: float) -> QueuedRequest | None:
        """Return the oldest overdue request, if it is its turn.

        Without turns, urgent requests that keep coming would hold it up for ever.
        """
        if self._urgent_turn_s > 0 or not self.queue.overdue:
            return None
        oldest = next(iter(self.queue.overdue.values()))
        return oldest if oldest.is_old(now) and self._may_take(worker, oldest) else None

    def _first_overdue(self, worker: WorkerState) -> QueuedRequest | None:
        """Return the first of the oldest overdue requests that the worker may take."""
        for request in islice(self.queue.overdue.values(), URGENT_COMPARED):
            if self._may_take(worker, request):
                return request
        return None

    def _best_for(self, worker: WorkerState, now: float) -> PullChoice:
        """Return the most urgent request that the worker can serve in time.

        A less urgent request goes first if the worker's cache saves a lot of its prefill, and the
        most urgent one can stand that. This is asked with less to spare than a pull needs: the
        urgent one may be pulled by other workers meanwhile, and has its turns in the offers.
        """
        choice = PullChoice(None, [])
        if not self.fleet.decode_workers:
            return choice
        urgent_prefill_s = 0.0
        urgent: QueuedRequest | None = None
        cached: QueuedRequest | None = None
        best_saved_s = 0.0
        for request in self._compared_for(worker):
            if urgent is not None and not self._prefers_cache_of(request, worker):
                continue  # its cache is no reason to go before a more urgent one
            if not self._may_take(worker, request):
                continue
            plan = plan_prefill(request, worker)
            prefill_s = plan.seconds
            if request.local:
                # The worker keeps its steps short for the answers that it decodes: by its own limit,
                # or else by this request's target, for want of theirs.
                prefill_s = paced_prefill_s(worker, prefill_s, request.itl_s)
            reason = self._reason_to_pass(request, worker, prefill_s, now)
            if reason is not None:
                if urgent is None:  # else it is less urgent than what may be taken
                    choice.passed_over.append(_passed_over(request, reason, now))
                continue
            if urgent is None:
                urgent = request
                urgent_prefill_s = prefill_s
                continue
            saved_s = _saved_s(request, worker, plan)
            behind_s = worker.wait_s(request.deadline, now) + prefill_s
            urgent_ends_s = behind_s + urgent_prefill_s * self.placer.residuals.upper
            if saved_s > best_saved_s and now + urgent_ends_s <= urgent.deadline:
                cached = request
                best_saved_s = saved_s
        if urgent is not None and cached is not None:
            reason = f"the cache saves {best_saved_s * 1e3:.0f} ms for another, and it can wait"
            choice.passed_over.append(_passed_over(urgent, reason, now))
        choice.request = cached or urgent
        return choice

    def _compared_for(self, worker: WorkerState) -> list[QueuedRequest]:
        """Return the most urgent requests, some that prefer this worker among them.

        As many of the least urgent ones are left out as there are of the latter, however few
        requests there are: what no worker pulls has its turn in an offer.
        """
        urgent = self.queue.urgent[:URGENT_COMPARED]
        preferring = self.queue.preferring.get(worker.slot, [])[:PREFERRING_COMPARED]
        if preferring:
            # Both lists are in the order of ranks, so of those that prefer this worker only those
            # behind the last one kept are missing.
            urgent = urgent[: -len(preferring)]
            last_rank = urgent[-1][0] if urgent else None
            urgent += [entry for entry in preferring if last_rank is None or entry[0] > last_rank]
        return [request for _, request in urgent]

    def _prefers_cache_of(self, request: QueuedRequest, worker: WorkerState) -> bool:
        return request.preferred_worker is worker or request.holder is worker

    def _reason_to_pass(
        self, request: QueuedRequest, worker: WorkerState, prefill_s: float, now: float
    ) -> str | None:
        """Return why the worker leaves this request alone; None: it does not."""
        here_s = worker.wait_s(request.deadline, now) + prefill_s
        if now + TIME_MARGIN * here_s * self.placer.residuals.upper > request.deadline:
            return "too slow here"
        preferred = request.preferred_worker
        if preferred is None or preferred is worker:
            return None
        there_s = preferred.backlog_s(now) + preferred.preferring_s
        if self._is_worth_waiting(request, there_s, here_s, now):
            return "its prefix is on a worker soon free"
        return None

    # ---- both ways -------------------------------------------------------------------------------

    def _pair(
        self, request: QueuedRequest, worker: WorkerState, kind: PlacementKind, now: float
    ) -> Placement | None:
        """Return the placement with the cheapest decode worker; None: there is no room.

        A request that is not old yet goes only where it breaks nobody's ITL target.
        """
        deadline = self._deadline(request, now)
        planned = self.placer.plan_prefill(request, worker, deadline, now)
        # `span` is when the prompt is computed: its KV arrives behind that.
        gentle = not request.is_old(now)
        candidates = self.placer.decode_candidates(request, planned.span, gentle)
        if not candidates:
            return None
        chosen = min(candidates, key=candidate_order)
        return self.placer.pair(request, kind, planned, chosen=chosen, compared=candidates)

    def _commit(
        self, placement: Placement | None, now: float, decided: list[Placement | Rejection]
    ) -> Outcome:
        if placement is None:
            return Outcome.NO_ROOM
        # It is no longer idle; when it has credit again, it pulls again.
        self.idle_slots.discard(placement.computing_worker.slot)
        request = placement.request
        prefill_s = request.fastest_prefill_s
        if request.overdue:
            self._overdue_rate.served(prefill_s)
            left_s = max(self._urgent_turn_s, 0.0)
            self._urgent_turn_s = left_s + prefill_s * (1 / OVERDUE_SHARE - 1)
        else:
            if request.heard_at < now:  # Who finds a worker on arrival shortens no line.
                self._urgent_rate.served(prefill_s)
            self._urgent_turn_s -= prefill_s
        self.placer.commit(placement, now)
        decided.append(placement)
        return Outcome.PLACED


def _saved_s(request: QueuedRequest, worker: WorkerState, plan: PrefillPlan) -> float:
    """Return the seconds that the worker's cache saves; 0.0: too little to go before others."""
    prompt_tokens = request.prompt_tokens
    saved_s = worker.cost.prefill_s(prompt_tokens, prompt_tokens) - plan.seconds
    saves_share = plan.cached_tokens > SAVED_SHARE * prompt_tokens
    return saved_s if saved_s > SAVED_S or saves_share else 0.0


def _passed_over(request: QueuedRequest, reason: str, now: float) -> PassedOver:
    return PassedOver(request.attempt_key[0], request.deadline - now, reason)
