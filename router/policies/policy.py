"""What a policy is: which request goes when, and to which workers.

The router asks a policy at three moments: when a request arrives, whenever an event may have made
room (`place_queued`), and when it plans its next wake-up. Everything that is the same for all
policies is `placer.Placer`, which a policy receives.

There are two kinds. An early policy places every request at once, oldest first, as soon as a decode
worker has room: derive it from `EarlyPolicy` and say what each worker would cost. A late policy
leaves requests in the router's queue until it likes a worker for them: write a class with the
methods of `Policy`. Either is one class in one file, named in `policies.POLICIES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from math import inf
from typing import Protocol

from ..costs import (
    PrefillSpan,
    cheapest_position,
    decode_candidate,
    paced_prefill_s,
    plan_prefill,
)
from ..decisions import PlacementKind
from ..placer import OPTIONS, Placement, Placer, Rejection
from ..request_queue import QueuedRequest
from ..shortlist import DecodeCandidate, PrefillCandidate
from ..worker_state import WorkerState

#: The deadline, in its worker's order, of each prompt that an early policy places. A worker computes
#: prompts in the order of these deadlines; as they are equal, in the order of arrival.
SAME_DEADLINE = 0.0

#: Seconds from its placement: the deadline, in the worker's order, of a request that is overdue.
#: Most urgent requests have earlier ones, and it is not put off for ever.
OVERDUE_DEADLINE_S = 30.0


class Policy(Protocol):
    """Decides which request goes when and where. Made once for each router, as `Policy(placer)`.

    Moments are seconds of the caller's clock. A policy that decides on a placement calls
    `placer.commit`, and returns the placement to the router, which tells the gateway.
    """

    @property
    def judges_lateness(self) -> bool:
        """Whether requests that cannot be in time are told from the others, and made overdue."""

    @property
    def patience_s(self) -> float:
        """Seconds after which a queued request is given up, though workers are up.

        While no worker of a role is up, requests are given up by the router's `queue_ttl_s`.
        """

    def arrive(self, request: QueuedRequest, now: float) -> Placement | Rejection | None:
        """Place or refuse a new request, or put it into `placer.queue` and return None.

        In its place a request that is in the queue already may be refused. A placement that is
        returned has been committed; a refused request is not in the queue.
        """

    def place_queued(self, now: float) -> list[Placement | Rejection]:
        """Place every queued request that can be placed now; rejected ones leave the queue too.

        It is called at every event, also when the queue is empty.
        """

    def next_wake(self, now: float) -> float:
        """Return when `place_queued` should be called if no event comes before; inf: never."""

    def reconsider(self, request: QueuedRequest) -> None:
        """Note that a queued request may go to other workers than before."""

    def worker_lost(self, worker: WorkerState) -> None:
        """Note that a worker is gone."""

    def local_only_changed(self, now: float) -> None:
        """Note that decode workers compute all prompts from now on, or no longer do.

        Each queued request's `local` says so already.
        """

    def local_prompt_finished(self) -> None:
        """Note that a decode worker has computed a prompt and may take another."""


class EarlyPolicy:
    """Places requests at once, oldest first, as soon as a decode worker has room.

    A derived class says what each worker would cost a request, in any unit: the least wins, equal
    ones share by the request's hash. The costs of one call are compared with each other only.
    """

    #: True: refuses a request for a prefill worker if its first token is predicted to be late and
    #: its class prefers an early refusal (`SloClass.early_reject`).
    rejects_late = False
    judges_lateness = False

    def __init__(self, placer: Placer) -> None:
        self.placer = placer

    # ---- what a derived class says ---------------------------------------------------------------

    def prefill_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], now: float
    ) -> list[float]:
        """Return what each worker would cost as the request's prefill worker; inf: not at all.

        There is one cost for each of `workers`, in their order. By default this is the predicted
        time to the first token.
        """
        return [self.first_token_s(request, worker, now) for worker in workers]

    def decode_costs(
        self,
        request: QueuedRequest,
        workers: Sequence[WorkerState],
        span: PrefillSpan,
    ) -> list[float]:
        """Return what each worker would cost as the request's decode worker; inf: not at all.

        `span` is when the prompt is computed. By default this is the predicted step, exposed
        transfer and memory, as if all of the prompt moved.
        """
        costs = []
        for worker in workers:
            candidate = decode_candidate(request, worker, span, request.prompt_tokens)
            costs.append(candidate.cost - candidate.handover_s)
        return costs

    def mixed_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], now: float
    ) -> list[float]:
        """Return what each worker would cost as the request's only worker; inf: not at all.

        It is asked where the fleet has mixed workers alone, so that no KV moves. By default these
        are `prefill_costs`.
        """
        return self.prefill_costs(request, workers, now)

    def in_order(self, requests: list[QueuedRequest]) -> list[QueuedRequest]:
        """Return the queued requests as they are to be placed; given, and by default returned, in
        order of arrival.
        """
        return requests

    def is_saturated(self) -> bool:
        """Return whether all requests stay in the queue for now. By default none is held back."""
        return False

    def placed(self, placement: Placement) -> None:
        """Note a placement that was made."""

    # ---- what a derived class may ask ------------------------------------------------------------

    def first_token_s(self, request: QueuedRequest, worker: WorkerState, now: float) -> float:
        """Return the predicted seconds to the first token on a prefill worker.

        It comes behind all prompts that the worker has; where they go by deadline, behind those that
        are due earlier.
        """
        return self._wait_s(request, worker, now) + plan_prefill(request, worker).compared_s

    def local_first_token_s(self, request: QueuedRequest, worker: WorkerState, now: float) -> float:
        """Return the predicted seconds to the first token on a worker that decodes beside."""
        plan = plan_prefill(request, worker)
        prefill_s = paced_prefill_s(worker, plan.compared_s, request.itl_s)
        return self._wait_s(request, worker, now) + prefill_s

    def _wait_s(self, request: QueuedRequest, worker: WorkerState, now: float) -> float:
        if self.placer.config.deadline_order:
            return worker.wait_s(request.deadline, now)
        return worker.backlog_s(now)

    # ---- the interface of a policy ---------------------------------------------------------------

    @property
    def patience_s(self) -> float:
        """Return the configured `queue_ttl_s`, as an early policy predicts no wait."""
        return self.placer.config.queue_ttl_s

    def arrive(self, request: QueuedRequest, now: float) -> Placement | None:
        """Put the request into the queue: `place_queued` follows at once."""
        self.placer.queue.enter(request, now, self.placer.capacity)
        return None  # the router calls `place_queued` now

    def place_queued(self, now: float) -> list[Placement | Rejection]:
        """Place requests in the policy's order, which is that of arrival by default.

        A request that finds no room holds up those behind. A request that needs a role of which no
        worker is there is passed over.
        """
        decided: list[Placement | Rejection] = []
        if not self.placer.queue.by_key or self.is_saturated():
            return decided
        for request in self.in_order(list(self.placer.queue.by_key.values())):
            if self.is_saturated():
                break
            if self.placer.missing_roles(request):
                continue
            # finds what each worker has cached of the prompt, and reads every hash for it, where
            # the default would bisect
            self.placer.find_prefix(request, exact=True)
            outcome = self._decide(request, now)
            if outcome is None:
                break
            if isinstance(outcome, Placement):
                self.placer.commit(outcome, now)
                self.placed(outcome)
            else:
                self.placer.queue.leave(request.attempt_key)
            decided.append(outcome)
        return decided

    def next_wake(self, now: float) -> float:
        """Returns infinity: nothing changes between two events."""
        return inf

    def reconsider(self, request: QueuedRequest) -> None:
        """Does nothing, as all queued requests are looked at each time."""

    def worker_lost(self, worker: WorkerState) -> None:
        """Does nothing, as all workers are looked at each time."""

    def local_only_changed(self, now: float) -> None:
        """Does nothing, as all queued requests are looked at each time."""

    def local_prompt_finished(self) -> None:
        """Does nothing, as all workers are looked at each time."""

    # ---- one request -----------------------------------------------------------------------------

    def _decide(self, request: QueuedRequest, now: float) -> Placement | Rejection | None:
        """Return what becomes of the request now; None: there is no room."""
        placer = self.placer
        if request.local:
            workers = placer.allowed(request, placer.fleet.accepting_decode_workers())
            local = placer.place_local_on_best(request, workers, self._deadline(request), now)
            return self._put_behind_if_late(local, now)
        workers = placer.allowed(request, placer.fleet.prefill_workers)
        if placer.fleet.only_mixed:
            return self._place_on_one(request, workers, now)
        costs = self.prefill_costs(request, workers, now)
        position = cheapest_position(costs, request.tie_hash)
        if position is None:
            return None
        worker = workers[position]
        remote_s = self.first_token_s(request, worker, now)
        if placer.config.disaggregate == "auto":
            local = placer.better_local(request, remote_s, self._deadline(request), now)
            if local is not None:
                return self._put_behind_if_late(local, now)
        lateness_s = now + remote_s - request.deadline
        if self._refuses(request, lateness_s):
            return Rejection(request, lateness_s)
        placement = self._put_behind_if_late(self._pair(request, worker, now), now)
        if placement is not None and placer.records_options:
            placement.prefill_candidates = self._named_prefill(request, workers, costs, now)
        return placement

    def _refuses(self, request: QueuedRequest, lateness_s: float) -> bool:
        """Return whether a request that would be late by so much is refused at once."""
        return self.rejects_late and request.slo.early_reject and lateness_s > 0

    def _place_on_one(
        self, request: QueuedRequest, workers: Sequence[WorkerState], now: float
    ) -> Placement | Rejection | None:
        """Return the placement on the cheapest mixed worker, which computes all of the request."""
        blocks = self.placer.blocks_needed(request)
        workers = [worker for worker in workers if worker.reservable_blocks >= blocks]
        costs = self.mixed_costs(request, workers, now)
        position = cheapest_position(costs, request.tie_hash)
        if position is None:
            return None
        worker = workers[position]
        lateness_s = now + self.local_first_token_s(request, worker, now) - request.deadline
        if self._refuses(request, lateness_s):
            return Rejection(request, lateness_s)
        placement = self.placer.place_local(request, worker, self._deadline(request), now)
        if placement is not None and self.placer.records_options:
            placement.decode_candidates = self._named_prefill(request, workers, costs, now)
        return self._put_behind_if_late(placement, now)

    def _deadline(self, request: QueuedRequest) -> float:
        """Return the prompt's deadline in its worker's order, if it can be in time."""
        return request.deadline if self.placer.config.deadline_order else SAME_DEADLINE

    def _put_behind_if_late(self, placement: Placement | None, now: float) -> Placement | None:
        """Return the placement; where prompts go by deadline, a late one goes behind the others."""
        if placement is None or not self.placer.config.deadline_order:
            return placement
        if now + placement.wait_s + placement.prefill_s > placement.request.deadline:
            placement.deadline = now + OVERDUE_DEADLINE_S
        return placement

    def _pair(self, request: QueuedRequest, worker: WorkerState, now: float) -> Placement | None:
        """Return the placement on this prefill worker and the cheapest decode worker."""
        placer = self.placer
        planned = placer.plan_prefill(request, worker, self._deadline(request), now)
        blocks = placer.blocks_needed(request)
        allowed = placer.allowed(request, placer.fleet.accepting_decode_workers())
        workers = [other for other in allowed if other.reservable_blocks >= blocks]
        costs = self.decode_costs(request, workers, planned.span)
        position = cheapest_position(costs, request.tie_hash)
        if position is None:
            return None
        chosen = self._decode_candidate(request, workers[position], costs[position], planned.span)
        # Of equal costs the request's hash has chosen one, which need not be among the first.
        cheapest = nsmallest(OPTIONS, range(len(costs)), key=costs.__getitem__)
        compared = [chosen] + [
            self._decode_candidate(request, workers[other], costs[other], planned.span)
            for other in cheapest
            if other != position and costs[other] < inf
        ]
        return placer.pair(request, PlacementKind.EARLY, planned, chosen=chosen, compared=compared)

    def _decode_candidate(
        self, request: QueuedRequest, worker: WorkerState, cost: float, span: PrefillSpan
    ) -> DecodeCandidate:
        """Return the predicted terms of a worker, with the cost by which it was compared."""
        moved_tokens = request.prompt_tokens - request.pooled_tokens(worker)
        candidate = decode_candidate(request, worker, span, moved_tokens)
        candidate.cost = cost
        return candidate

    def _named_prefill(
        self,
        request: QueuedRequest,
        workers: Sequence[WorkerState],
        costs: Sequence[float],
        now: float,
    ) -> list[PrefillCandidate]:
        """Return every worker that could have been chosen, for the decision record."""
        return [
            PrefillCandidate(
                worker=worker,
                cost=cost,
                # for the record alone, which names few of them: of equal ones the lower slots
                tie_breaker=worker.slot,
                wait_s=worker.backlog_s(now),
                prefill_s=plan_prefill(request, worker).compared_s,
                has_credit=worker.credit_at <= now,
            )
            for worker, cost in zip(workers, costs, strict=True)
            if cost < inf
        ]
