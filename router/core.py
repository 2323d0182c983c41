"""The router (pure): `handle(event, now) -> [action]`, without clock, socket or Ray.

Life of an attempt:
    PlacementRequested -> a `QueuedRequest`; the policy places it at once or queues it (`policies`)
    ...                -> the policy places it on a prefill and a decode worker, or (local) on one
                          decode worker that computes the prompt too; or it is refused
    FirstTokenSent     -> the prompt counts no more as work of the worker that computed it, which may
                          take another one; what is predicted of a prefill worker is corrected
    AttemptEnded       -> the decode worker's blocks are free; the outcome joins the decision record
All state is soft: a new router (higher term) rebuilds it from the workers that join and from the
requests that gateways repeat.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import Any, assert_never

import xxhash

from ..protos.frames import (
    AttemptKey,
    AttemptOutcome,
    AttemptPlaced,
    AttemptRefused,
    DeliverFrame,
    PlaceAttempt,
    RequestOutcome,
    WorkerDirectory,
)
from .config import RouterConfig
from .decisions import Decisions
from .demand import DemandWindow, outlook
from .events import (
    AttemptEnded,
    DisconnectWorker,
    FirstTokenSent,
    GatewayJoined,
    GatewayLost,
    NewerRouterReported,
    PlacementRequested,
    RequestEnded,
    RouterAction,
    RouterEvent,
    RouterTick,
    StepDown,
    WorkerJoined,
    WorkerLost,
    WorkerReported,
)
from .fleet import WorkerFleet
from .goodput import Goodput
from .index import PrefixIndex, sample
from .placement_counts import PlacementCounts
from .placer import Placement, Placer, Rejection
from .policies import POLICIES
from .predictor import OutputLengths
from .recorder import DecisionRecorder, UntidiedPlacement, name_of
from .request_queue import QueuedRequest, RequestQueue
from .request_targets import RequestTargets
from .worker_state import DecodeReservation, WorkerState

#: A decode step is assumed to read this share of the tokens that a reservation's blocks have room
#: for, if the reservation is known from its worker alone, which does not say the lengths.
FOREIGN_KV_SHARE = 0.75
FINISHED = ("stop", "length")  #: reasons of attempts that say how long answers are
#: For how long a full queue counts as full: seconds at most, and as a share of the time that the
#: workers need for it. Gateways refuse new requests themselves meanwhile.
QUEUE_FULL_S = 0.05
QUEUE_FULL_SHARE = 0.1
MIN_REJECT_RETRY_S = 1.0  #: no client is told to come back sooner
#: After this share of `queue_ttl_s`, or of its TTFT target if that is longer, a request is old: from
#: then on it may be placed although running answers then miss their ITL targets. If it is overdue,
#: which is that it can no longer meet its own TTFT target, it then gets a turn beside the urgent ones
#: (`QueuedRequest.is_old`).
OLD_SHARE = 0.5


@dataclass(slots=True, eq=False)
class PlacedAttempt:
    """An attempt that workers have. It ends when its gateway says so, or is lost."""

    gateway: str  #: name of the gateway that asked
    request: QueuedRequest
    computing_worker: WorkerState  #: the one that computes the prompt
    decode_worker: WorkerState
    placed: AttemptPlaced  #: the answer to the gateway, for when it asks again
    first_token_sent: bool = False  #: the prompt is computed
    ended_on_worker: bool = False  #: the decode worker says so, its gateway not yet


@dataclass(slots=True, eq=False)
class UntidiedArrival:
    """A new request that the demand does not count yet."""

    prompt_tokens: int
    output_tokens: float  #: expected, of all its answers together
    arrived_at: float  #: at this router


class Router:
    """Places the requests of one model. One router is active at a time.

    `term` should be higher than any router's before it: the highest one is the active router. Until
    a router has settled, it corrects a term that is too low by what its peers have seen.
    Moments are seconds of one clock, which the caller reads (`now`) and which never goes back.
    After each `handle` the caller sends what it returned, then calls `tidy`, and comes back with a
    `RouterTick` at `next_wake` if no event comes before.
    """

    def __init__(self, config: RouterConfig, term: int) -> None:
        self.config = config
        self.term = term
        self.active = True  #: False once a newer router is known; then nothing happens any more
        self.settled = False  #: True once every live worker has had the time to join
        self.settles_at: float | None = None  #: when it settles; None: no event has come yet
        self.gateways: dict[str, None] = {}  #: by name, in order of joining
        self.fleet = WorkerFleet(config.prior_tokens_per_s, config.rtt_s, config.itl_s)
        self.queue = RequestQueue()
        self._index = PrefixIndex(config.index_per_worker, config.predicted_ttl_s)
        self.placer = Placer(config, self.fleet, self._index, self.queue)
        self.policy = POLICIES[config.policy](self.placer)
        self.placed_attempts: dict[AttemptKey, PlacedAttempt] = {}
        #: by key: the decode worker of an attempt that decodes though another router placed it, or
        #: its gateway is not connected any more; the attempt keeps its reservation there
        self.foreign_attempts: dict[AttemptKey, WorkerState] = {}
        self.lengths = OutputLengths()
        self.targets = RequestTargets(config)
        self.goodput = Goodput()
        self.counts = PlacementCounts()
        self.placed = 0  #: placements since the start
        self.refused = 0  #: refusals since the start
        self.hit_tokens = 0  #: cached or fetched prompt tokens of all placements that are tidied
        self.prompt_tokens = 0  #: prompt tokens of the same placements
        self._demand = DemandWindow()
        self._recorder = DecisionRecorder(config.policy, config.decisions)
        self._now = -inf
        self._untidied_placements: deque[UntidiedPlacement] = deque()
        self._untidied_arrivals: list[UntidiedArrival] = []

    def handle(self, event: RouterEvent, now: float) -> list[RouterAction]:
        """Take in an event, and return what has to be done about it."""
        if not self.active:
            return []
        self._now = now
        if self._untidied_placements or self._untidied_arrivals:
            self.tidy()
        if self.settled:
            return self._dispatch(event, now)
        return [*self._settle(now), *self._dispatch(event, now)]

    def _dispatch(self, event: RouterEvent, now: float) -> list[RouterAction]:
        match event:
            case PlacementRequested(gateway, place):
                return self._request_placement(gateway, place, now)
            case FirstTokenSent(attempt_key):
                return self._note_first_token(attempt_key, now)
            case AttemptEnded(attempt_key, outcome):
                return self._end_attempt(attempt_key, outcome, now)
            case WorkerReported():
                return self._take_report(event, now)
            case RequestEnded(outcome):
                self._observe_outcome(outcome, now)
                return []
            case RouterTick():
                self._index.expire(now)
                return self._place_queued(now)
            case WorkerJoined():
                return self._add_worker(event, now)
            case WorkerLost(name):
                return self._remove_worker(name, now)
            case GatewayJoined(gateway):
                self.gateways[gateway] = None
                return [DeliverFrame(gateway, self.directory())]
            case GatewayLost(gateway):
                return self._remove_gateway(gateway, now)
            case NewerRouterReported(term):
                return self._meet_term(term)
            case _:
                assert_never(event)

    @property
    def next_wake(self) -> float | None:
        """When a `RouterTick` would change something; None: not before the next event."""
        moments = []
        if not self.settled and self.settles_at is not None:
            moments.append(self.settles_at)
        if self.queue:
            moments.append(self.queue.next_expiry)
            moments.append(self.policy.next_wake(self._now))
        wake_at = min(moments, default=inf)
        return wake_at if wake_at < inf else None

    # ---- what can be done after the answer -------------------------------------------------------

    def tidy(self) -> None:
        """Do what can be done after the answer is on its way.

        The demand counts new requests. The index and the counts learn of placements, and the
        records of these are written. The shortlist of workers is refreshed. Call this after
        sending. If it was not called, the next `handle` calls it first, if anything is left to do.
        """
        for arrival in self._untidied_arrivals:
            self._demand.record_arrival(
                arrival.prompt_tokens, arrival.output_tokens, arrival.arrived_at
            )
        self._untidied_arrivals.clear()
        while self._untidied_placements:
            self._tidy_placement(self._untidied_placements.popleft())
        self.placer.shortlist.refresh(self._now)

    def _tidy_placement(self, untidied: UntidiedPlacement) -> None:
        placement = untidied.placement
        request = placement.request
        placed_at = untidied.placed_at
        if not request.place.is_rehearsal:
            self.counts.count_placement(
                disaggregated=placement.prefill_worker is not None,
                kind=placement.kind,
                waited_s=placed_at - request.heard_at,
            )
            self._demand.record_placement(request.prompt_tokens, placement.cached_tokens, placed_at)
            self.hit_tokens += placement.cached_tokens
            self.prompt_tokens += request.prompt_tokens
        worker = placement.computing_worker
        if worker.alive:
            # All of them, those that it holds too: what is used often is then forgotten last.
            self._index.predict(worker.slot, request.sampled_hashes, placed_at)
        if untidied.decision_id:
            decode_workers = len(self.fleet.decode_workers)
            self._recorder.record_placement(untidied, decode_workers)

    @property
    def decisions(self) -> Decisions:
        """The records of the last decisions."""
        self.tidy()
        return self._recorder.decisions

    @property
    def demand(self) -> DemandWindow:
        """What was asked of the fleet lately."""
        self.tidy()
        return self._demand

    @property
    def index(self) -> PrefixIndex:
        """Which worker holds which prefix."""
        self.tidy()
        return self._index

    # ---- membership ------------------------------------------------------------------------------

    @property
    def workers(self) -> dict[str, WorkerState]:
        """All workers by name."""
        return self.fleet.workers

    def directory(self) -> WorkerDirectory:
        """Return the frame that names all workers; gateways and workers connect by it."""
        cards = [worker.card for worker in self.workers.values()]
        return WorkerDirectory(self.term, cards, self.settled)

    def _announce(self) -> list[RouterAction]:
        directory = self.directory()
        return [DeliverFrame(peer, directory) for peer in (*self.gateways, *self.workers)]

    def _settle(self, now: float) -> list[RouterAction]:
        """Announce the directory once every live worker has had the time to join."""
        if self.settles_at is None:
            self.settles_at = now + self.config.settle_s
        if now < self.settles_at:
            return []
        self.settled = True
        self._membership_changed(now)
        return self._announce()

    def _membership_changed(self, now: float) -> None:
        """Follow whether decode workers have to compute all prompts (`Placer.local_only`).

        With `disaggregate: auto` they have to while no prefill worker is up. Before this router has
        settled, such a worker may be up and not have joined yet.
        """
        if self.placer.update_local_only(self.settled):
            self.policy.local_only_changed(now)

    def _add_worker(self, event: WorkerJoined, now: float) -> list[RouterAction]:
        actions = self._meet_term(event.term)
        if not self.active:
            return actions
        worker = self.fleet.join(event.card)
        self._index.drop(worker.slot)
        self._index.demote(worker.slot, event.demoted_hashes)
        self._index.store(worker.slot, event.cached_hashes)
        self._reserve_held(worker, event)
        self._membership_changed(now)
        return [*self._announce(), *self._place_queued(now)]

    def _reserve_held(self, worker: WorkerState, event: WorkerJoined) -> None:
        """Reserve what already decodes on a worker that joins.

        These are attempts of another router, or from before a connection broke.
        """
        for key in self._foreign_attempts_of(worker):
            self._release_foreign(key)
        held_keys = {(name, attempt) for name, attempt, _ in event.held_reservations}
        # Placed there and not held: it ended while the connection was broken, or, before its
        # first token, has yet to begin.
        for key in worker.reservations.keys() & self.placed_attempts.keys() - held_keys:
            attempt = self.placed_attempts[key]
            attempt.ended_on_worker |= attempt.first_token_sent
        for name, number, blocks in event.held_reservations:
            key = (name, number)
            if key not in worker.reservations:
                self._reserve_held_attempt(worker, key, blocks)

    def _reserve_held_attempt(self, worker: WorkerState, key: AttemptKey, blocks: int) -> None:
        attempt = self.placed_attempts.get(key)
        is_elsewhere = attempt is not None and attempt.decode_worker.card.id != worker.card.id
        fits = blocks <= worker.card.blocks - worker.reserved_blocks
        if is_elsewhere or key in self.queue or not fits:
            return
        self._release_foreign(key)
        reservation = DecodeReservation(
            blocks=blocks,
            expected_blocks=blocks,
            kv_tokens=FOREIGN_KV_SHARE * worker.card.block_tokens * blocks,
        )
        self.fleet.reserve(worker, key, reservation)
        if attempt is not None:
            attempt.decode_worker = worker
        else:
            self.foreign_attempts[key] = worker

    def _foreign_attempts_of(self, worker: WorkerState) -> list[AttemptKey]:
        return [key for key, holder in self.foreign_attempts.items() if holder is worker]

    def _release_foreign(self, key: AttemptKey) -> None:
        worker = self.foreign_attempts.pop(key, None)
        if worker is not None:
            self.fleet.release(worker, key)

    def _remove_worker(self, name: str, now: float) -> list[RouterAction]:
        worker = self.fleet.lose(name)
        if worker is None:
            return []
        self._index.drop(worker.slot)
        self.policy.worker_lost(worker)
        self._membership_changed(now)
        for key in self._foreign_attempts_of(worker):
            del self.foreign_attempts[key]
        return [*self._announce(), *self._place_queued(now)]

    def _remove_gateway(self, gateway: str, now: float) -> list[RouterAction]:
        self.gateways.pop(gateway, None)
        queued = [key for key, request in self.queue.by_key.items() if request.gateway == gateway]
        for key in queued:
            self.queue.leave(key)
        for key, attempt in list(self.placed_attempts.items()):
            if attempt.gateway != gateway:
                continue
            decodes = attempt.first_token_sent and attempt.decode_worker.alive
            if decodes and not attempt.ended_on_worker:
                # it goes on if only the connection broke: its worker reports the end
                del self.placed_attempts[key]
                self.foreign_attempts[key] = attempt.decode_worker
            else:
                self._forget_attempt(key, now)
        return self._place_queued(now)

    def _meet_term(self, term: int) -> list[RouterAction]:
        """Take in the highest term that a peer has seen.

        A settled router has been replaced if that is above its own: it steps down. One that has not
        settled has just begun. It is the newer one then, though the clock that gave it its term has
        gone back since: it goes above the term that was seen.
        """
        if term <= self.term:
            return []
        if not self.settled:
            self.term = term + 1
            return self._announce()
        self.active = False
        return [StepDown(term)]

    def _take_report(self, event: WorkerReported, now: float) -> list[RouterAction]:
        worker = self.workers.get(event.worker)
        report = event.report
        if worker is None:
            return []
        if report.seq != worker.last_report + 1:  # one was lost: a whole snapshot must come
            return [DisconnectWorker(event.worker)]
        worker.last_report = report.seq
        if report.evicted:
            self._index.evict(worker.slot, report.evicted)
        if report.demoted:
            self._index.demote(worker.slot, report.demoted)
        if report.stored:
            self._index.store(worker.slot, report.stored)
        has_more_room = self.fleet.report(worker, report)
        for key in report.ended:
            if key in self.foreign_attempts:
                self._release_foreign(key)
                has_more_room = True
            elif key in self.placed_attempts:
                self.placed_attempts[key].ended_on_worker = True
        all_blocks_free = report.free_blocks >= worker.card.blocks > 0 and not report.running
        if self.foreign_attempts and all_blocks_free:
            for key in self._foreign_attempts_of(worker):  # nobody reported their end
                self._release_foreign(key)
                has_more_room = True
        return self._place_queued(now) if has_more_room else []

    # ---- placing ---------------------------------------------------------------------------------

    def _request_placement(
        self, gateway: str, place: PlaceAttempt, now: float
    ) -> list[RouterAction]:
        key = place.attempt_key
        attempt = self.placed_attempts.get(key)
        if attempt is not None:  # the answer was lost on its way
            return [DeliverFrame(gateway, attempt.placed)]
        queued = self.queue.by_key.get(key)
        if queued is not None:  # its gateway knows better now which workers are lost
            queued.place = place
            queued.excludes_workers = bool(place.lost_workers or place.avoided_workers)
            queued.local = self.placer.is_local(place)
            self.policy.reconsider(queued)
            return self._place_queued(now)
        if len(self.queue) >= self.config.queue_max:
            message = f"{len(self.queue)} requests wait already"
            self._record_refusal(self._new_request(gateway, place, now), message, now)
            closed_s = self._queue_stays_full_s()
            return [self._refuse(gateway, key, "queue_full", message, closed_s=closed_s)]
        self._release_foreign(key)
        self._index.expire(now)
        request = self._new_request(gateway, place, now)
        _, attempt_number = key
        if attempt_number == 0 and not place.is_rehearsal:  # another attempt is no new demand
            arrival = UntidiedArrival(
                request.prompt_tokens, request.expected_tokens - request.prompt_tokens, now
            )
            self._untidied_arrivals.append(arrival)
        decided = self.policy.arrive(request, now)
        actions: list[RouterAction] = [] if decided is None else [self._answer(decided, now)]
        actions += self._place_queued(now)
        self._note_admission(request)
        return actions

    def _queue_stays_full_s(self) -> float:
        """Return for how long gateways may take the queue to be full, now that it is, in seconds.

        A place that becomes free meanwhile stays free. That is no loss while the queue keeps the
        workers busy, so it is a small share of the time for which it does.
        """
        prefill_s = self.queue.prefill_s + self.queue.overdue_prefill_s
        busy_s = prefill_s / max(self.placer.capacity, 1)
        return min(QUEUE_FULL_S, QUEUE_FULL_SHARE * busy_s)

    def _note_admission(self, request: QueuedRequest) -> None:
        """Count a newcomer that is to be in time, now that the policy has judged it.

        It waits among the urgent ones, or a worker has it. Not counted are attempts after a request's
        first, a gateway's own questions, what waits for a worker to come up, and all requests under a
        policy that does not judge who can be in time.
        """
        key = request.attempt_key
        if key[1] > 0 or request.place.is_rehearsal or request.overdue:
            return
        is_kept = key in self.placed_attempts or key in self.queue
        if not is_kept or not self.policy.judges_lateness or self.placer.missing_roles(request):
            return
        request.admitted_as_urgent = True
        self.counts.urgent_admitted += 1

    def _answer(self, decided: Placement | Rejection, now: float) -> DeliverFrame:
        if isinstance(decided, Placement):
            return self._answer_placement(decided, now)
        return self._refuse_rejected(decided, now)

    def _new_request(self, gateway: str, place: PlaceAttempt, now: float) -> QueuedRequest:
        config = self.config
        prompt_tokens = place.prompt_tokens
        ttft_s = place.ttft_s
        ttft_target = place.ttft
        isolated_s = 0.0
        if not ttft_s:
            target = self.targets.asked_ttft_target(place)
            if target.needs_isolated:
                isolated_s = self.fleet.isolated_prefill_s(prompt_tokens)
            ttft_s = target.seconds(prompt_tokens, isolated_s)
            ttft_target = "" if target.is_flat else str(target)
        arrived_at = now - place.waited_s
        request_id, attempt_number = place.attempt_key
        hashed_name = f"{request_id}|{attempt_number}".encode()
        answers = place.answer_count
        output_tokens = self.lengths.expect(place.tenant, place.slo_class, place.max_tokens)
        return QueuedRequest(
            gateway=gateway,
            attempt_key=place.attempt_key,
            place=place,
            slo=config.classes[self.targets.known_class(place.slo_class)],
            heard_at=now,
            arrived_at=arrived_at,
            deadline=arrived_at + ttft_s,
            expires_at=now + max(config.queue_ttl_s, ttft_s),
            old_at=now + OLD_SHARE * max(config.queue_ttl_s, ttft_s),
            itl_s=place.itl_s or self.targets.itl_s(place),
            sampled_hashes=sample(place.hashes),
            tie_hash=xxhash.xxh3_64_intdigest(hashed_name, config.seed),
            local=self.placer.is_local(place),
            prompt_tokens=prompt_tokens,
            excludes_workers=bool(place.lost_workers or place.avoided_workers),
            kv_tokens_read=answers * (prompt_tokens + output_tokens / 2),
            expected_tokens=prompt_tokens + answers * output_tokens,
            ttft_target_s=ttft_s,
            ttft_target=ttft_target,
            isolated_s=isolated_s,
        )

    def _place_queued(self, now: float) -> list[RouterAction]:
        """Give up the requests whose time is over, and place all that can be placed.

        The policy is asked also when nobody waits: it may measure for how long somebody did.
        """
        actions: list[RouterAction] = []
        if self.queue and self.queue.next_expiry <= now:
            actions = self._refuse_expired_requests(now)
        for decided in self.policy.place_queued(now):
            actions.append(self._answer(decided, now))
        return actions

    def _answer_placement(self, placement: Placement, now: float) -> DeliverFrame:
        request = placement.request
        ready_s = placement.wait_s + placement.prefill_s
        ttft_s = now - request.arrived_at + ready_s
        decision_id = 0
        if self.config.decisions and not request.place.is_rehearsal:
            decision_id = self._recorder.decisions.next_number()
        self._untidied_placements.append(
            UntidiedPlacement(
                placement=placement,
                decision_id=decision_id,
                ttft_s=ttft_s,
                placed_at=now,
                queue_length=len(self.queue),
            )
        )
        placed = AttemptPlaced(
            attempt_key=request.attempt_key,
            term=self.term,
            prefill_worker=name_of(placement.prefill_worker),
            decode_worker=placement.decode_worker.card.id,
            hit_tokens=placement.cached_tokens,
            predicted_ready_ms=ready_s * 1e3,
            predicted_ttft_ms=ttft_s * 1e3,
            predicted_itl_ms=placement.itl_s * 1e3,
            decision_id=decision_id,
            # 0 says "in order of arrival", so a deadline that has passed is as near as can be.
            deadline_s=max(placement.deadline - now, 0.001) if placement.deadline else 0.0,
            prefix_holder=name_of(placement.fetch_from),
            background=request.overdue,
            ttft_target_s=request.ttft_target_s,
            itl_target_s=request.itl_s,
            ttft_target=request.ttft_target,
        )
        self.placed_attempts[request.attempt_key] = PlacedAttempt(
            gateway=request.gateway,
            request=request,
            computing_worker=placement.computing_worker,
            decode_worker=placement.decode_worker,
            placed=placed,
        )
        self.placed += 1
        return DeliverFrame(request.gateway, placed)

    # ---- refusing --------------------------------------------------------------------------------

    def _refuse(
        self,
        gateway: str,
        key: AttemptKey,
        reason: str,
        message: str,
        retry_after_s: float = 1.0,
        closed_s: float = 0.0,
    ) -> DeliverFrame:
        self.refused += 1
        self.counts.refused[reason] += 1
        return DeliverFrame(gateway, AttemptRefused(key, reason, message, retry_after_s, closed_s))

    def _record_refusal(self, request: QueuedRequest, message: str, now: float) -> None:
        if self.config.decisions and not request.place.is_rehearsal:
            self._recorder.record_refusal(request, message, len(self.queue), now)

    def _refuse_expired_requests(self, now: float) -> list[RouterAction]:
        """Refuse who has waited too long: sooner where no worker is up than where all are busy."""
        actions: list[RouterAction] = []
        for request in self.queue.expired(now):
            gives_up_at = request.heard_at + self.policy.patience_s
            if gives_up_at > now and not self.placer.missing_roles(request):
                self.queue.postpone(request, min(now + self.config.queue_ttl_s, gives_up_at))
                continue
            self.queue.leave(request.attempt_key)
            actions.append(self._refuse_expired(request, now))
        return actions

    def _refuse_expired(self, request: QueuedRequest, now: float) -> DeliverFrame:
        waited = f"waited {request.expires_at - request.heard_at:g} s for a worker"
        missing = self.placer.missing_roles(request)
        if missing:
            reason = "no_capacity"
            message = f"{waited}: no {' or '.join(sorted(missing))} worker is up"
        else:
            reason = "deadline_exceeded"
            message = f"{waited}: all are busy"
        self._record_refusal(request, message, now)
        return self._refuse(request.gateway, request.attempt_key, reason, message)

    def _refuse_rejected(self, rejection: Rejection, now: float) -> DeliverFrame:
        request = rejection.request
        reason = "slo_unattainable"
        message = f"the first token would be {rejection.lateness_s:.1f} s late"
        if rejection.wait_s:
            reason = "queue_full"
            message = (
                f"{len(self.queue.overdue)} late requests wait, about {rejection.wait_s:.0f} s"
            )
        self._record_refusal(request, message, now)
        return self._refuse(
            request.gateway,
            request.attempt_key,
            reason,
            message,
            retry_after_s=max(MIN_REJECT_RETRY_S, rejection.retry_after_s),
        )

    # ---- what becomes of an attempt --------------------------------------------------------------

    def _note_first_token(self, key: AttemptKey, now: float) -> list[RouterAction]:
        attempt = self.placed_attempts.get(key)
        if attempt is None or attempt.first_token_sent:
            return []
        attempt.first_token_sent = True
        ttft_s = now - attempt.request.arrived_at
        if not attempt.request.place.is_rehearsal:
            self.counts.count_first_token(attempt.placed.predicted_ttft_ms / 1e3, ttft_s)
        request = attempt.request
        is_in_time = ttft_s <= request.ttft_target_s
        if request.admitted_as_urgent and not request.overdue and is_in_time:
            self.counts.urgent_in_time += 1
        finished = self.fleet.finish_prompt(attempt.computing_worker, key, now)
        # A worker that is held to be slow gets no prompts, so none would show that it is not. So at
        # each first token the next worker in turn, if it is idle, comes a part of the way back to
        # what its cost says.
        self.fleet.revisit(now)
        if finished is not None:
            work, took_s = finished
            if attempt.placed.prefill_worker is None:
                self.policy.local_prompt_finished()
            elif took_s > 0:
                self.placer.residuals.observe(took_s / work.seconds if work.seconds else 1.0)
                self.fleet.correct_prefill(attempt.computing_worker, work, took_s, now)
        self._recorder.record_first_token(key, ttft_s)
        return self._place_queued(now)

    def _end_attempt(
        self, key: AttemptKey, outcome: AttemptOutcome | None, now: float
    ) -> list[RouterAction]:
        attempt = self.placed_attempts.get(key)
        self._release_foreign(key)
        self._forget_attempt(key, now)
        if outcome is not None:
            if attempt is not None and outcome.tokens and outcome.reason in FINISHED:
                self._observe_length(attempt.request.place, outcome)
            self._recorder.record_outcome(key, outcome)
        return self._place_queued(now)

    def _observe_length(self, place: PlaceAttempt, outcome: AttemptOutcome) -> None:
        if place.is_rehearsal:  # its answer is as short as its gateway wants
            return
        tokens = outcome.tokens / place.answer_count
        self.lengths.observe(place.tenant, place.slo_class, tokens)

    def _forget_attempt(self, key: AttemptKey, now: float) -> None:
        self.queue.leave(key)
        attempt = self.placed_attempts.pop(key, None)
        if attempt is not None:
            self.fleet.withdraw_prompt(attempt.computing_worker, key, now)
            self.fleet.release(attempt.decode_worker, key)

    def _observe_outcome(self, outcome: RequestOutcome, now: float) -> None:
        """Count a request by its targets, which the gateway knows of those that were placed.

        One that a gateway has refused in this router's place counts among the refused ones, too.
        """
        if outcome.is_unasked:
            self.refused += 1
            self.counts.refused[outcome.reason] += 1
        ttft_s = outcome.ttft_target_s
        if not ttft_s:
            target = self.targets.ttft_target(outcome)
            isolated_s = self.fleet.isolated_prefill_s(outcome.prompt_tokens)
            ttft_s = target.seconds(outcome.prompt_tokens, isolated_s)
        self.goodput.observe(
            outcome, ttft_s, outcome.itl_target_s or self.targets.itl_s(outcome), now
        )

    # ---- for people ------------------------------------------------------------------------------

    def statistics(self, now: float | None = None) -> dict[str, Any]:
        """Return what people and metrics see of the router, in plain types.

        "late" are the overdue requests of those that wait ("waiting"). "urgent" says what became of the
        requests that were to be in time when they came (`_urgent_statistics`). "bound" are the attempts
        that workers have, and "outlook" is what the planner of worker counts reads. "isolated_prefill"
        says how long prompts take on an idle worker: targets may be multiples of that.
        The window of the goodput ends at `now`; None: at the last event.
        """
        if now is None:
            now = self._now
        self.tidy()
        self.goodput.forget(now)
        return {
            "term": self.term,
            "active": self.active,
            "policy": self.config.policy,
            "waiting": len(self.queue),
            "late": len(self.queue.overdue),
            "urgent": self._urgent_statistics(),
            "bound": len(self.placed_attempts),
            "placed": self.placed,
            "refused": self.refused,
            "hit_tokens": self.hit_tokens,
            "prompt_tokens": self.prompt_tokens,
            "index_entries": len(self._index),
            "isolated_prefill": self.fleet.isolated_prefill_text(),
            "decisions": self._recorder.decisions.count,
            "goodput": self.goodput.statistics(),
            "outlook": outlook(self.demand, self.fleet, now),
        }

    def _urgent_statistics(self) -> dict[str, int]:
        """Return how many first attempts were to be in time when they came, and what became of them.

        "moved" are those that were moved behind the others while they waited, "in_time" those of the
        rest that sent their first token within its target. What is left over is late, waits still,
        was refused, or its client left or its worker was lost before the first token.
        """
        return {
            "admitted": self.counts.urgent_admitted,
            "moved": self.queue.moved_behind,
            "in_time": self.counts.urgent_in_time,
        }

    def __repr__(self) -> str:
        roles = [worker.card.role for worker in self.workers.values()]
        return (
            f"<Router term {self.term}: {roles.count('prefill')} prefill, "
            f"{roles.count('decode')} decode | {len(self.placed_attempts)} bound, "
            f"{len(self.queue)} waiting>"
        )
