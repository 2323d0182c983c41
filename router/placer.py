"""What every policy needs to place a request: look at workers, pair two of them, note the result.

A policy decides which request goes when and to which prefill worker (`policies/`). The rest is
here, the same for all policies: who may take a request, what of its prompt is cached or fetched,
the decode worker and the room there, the local prefill, and noting a placement on both workers.

Life of a placement:
    plan_prefill    -> when a prompt would be computed on a worker (`PlannedPrefill`)
    pair            -> with the decode worker: a `Placement`. Nothing has changed yet
    commit          -> prompt, reservation and transfer count on the workers from here on

A worker has *credit* once it has so little to do that it may be given another prompt
(`fleet.WorkerFleet`). A worker *accepts* reservations unless sequences of its own wait for blocks. A
request is *overdue* once it cannot be in time any more; then it is background work, which gets what no
other prompt needs. A reservation is for the blocks that an answer may use at once; what it is
*expected* to have in the end may be more.

A *hit* is a part of a prompt whose KV a worker has cached. The *residual* of a prefill is its observed
time divided by the predicted one; `Residuals.upper` is one that few prefills exceed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from ..protos.frames import PlaceAttempt
from .config import RouterConfig
from .costs import (
    PrefillSpan,
    cheapest_position,
    decode_candidate,
    disturbs_nobody,
    local_first_token_s,
    paced_prefill_s,
    plan_prefill,
    spare_share,
)
from .decisions import Option, PassedOver, PlacementKind
from .fleet import WorkerFleet
from .index import LISTED_HOLDERS_MAX, PrefixIndex, bits, tokens_at
from .predictor import Residuals
from .request_queue import QueuedRequest, RequestQueue
from .shortlist import (
    Candidate,
    DecodeCandidate,
    LocalCandidate,
    Shortlist,
    candidate_order,
    options_of,
)
from .worker_state import DecodeReservation, PrefillWork, WorkerState

#: A prompt with as many uncached tokens, or fewer, is short enough for a decode worker: about one
#: step's chunk.
LOCAL_TOKENS = 512
#: One with up to `LOCAL_CACHED_TOKENS` uncached ones suits it too, if this share of the prompt or
#: more is cached there, or fetched: the worker has most of it then.
LOCAL_CACHED_SHARE = 0.6
LOCAL_CACHED_TOKENS = 4096
#: A decode worker helps out with prompts while decode leaves it this share of its time.
SPARE_SHARE_MIN = 0.25
OPTIONS = 3  #: workers of each stage that a decision record names
#: Added to the cost of a worker without room for chunks: it comes after all others.
NO_CHUNK_ROOM_S = 1e6


@dataclass(slots=True, eq=False)
class PlannedPrefill:
    """When and how a worker would compute a prompt. Times are in seconds."""

    worker: WorkerState
    wait_s: float  #: until the prefill begins
    prefill_s: float  #: of the prompt alone
    cached_tokens: int  #: cached in the pool or the tiers below, or fetched
    loaded_tokens: int  #: of those, that come from the tiers
    fetch_from: WorkerState | None  #: whose cached prefix is fetched; None: nothing is fetched
    deadline: float  #: for the worker's order; 0: in order of arrival
    span: PrefillSpan


@dataclass(slots=True, eq=False)
class Placement:
    """What was decided for one request. Times are in seconds."""

    request: QueuedRequest
    kind: PlacementKind
    prefill_worker: WorkerState | None  #: None: the decode worker computes the prompt
    decode_worker: WorkerState
    uncached_tokens: int
    cached_tokens: int  #: cached in the pool or the tiers below, or fetched
    wait_s: float  #: until the prefill begins
    prefill_s: float  #: from then to the first token
    itl_s: float  #: the predicted gap between tokens
    exposed_s: float  #: transfer that the prefill does not hide
    deadline: float  #: when the prompt should be computed, for the worker's order; 0: as they come
    blocks: int  #: to reserve on the decode worker
    moved_tokens: int = 0  #: of the prompt, that go to the decode worker
    loaded_tokens: int = 0  #: of the cached ones, that come from the tiers of the computing worker
    fetch_from: WorkerState | None = None  #: whose cached prefix is fetched; None: nothing is
    passed_over: Sequence[PassedOver] = ()  #: more urgent requests that a worker left alone
    prefill_candidates: Sequence[Candidate] = ()  #: what was compared, for the decision record
    decode_candidates: Sequence[Candidate] = ()

    @property
    def computing_worker(self) -> WorkerState:
        """The worker that computes the prompt."""
        return self.prefill_worker or self.decode_worker

    def prefill_options(self) -> list[Option]:
        """Return those that a decision record names: the chosen one and the best, `OPTIONS` in all."""
        return options_of(self.prefill_candidates, self.prefill_worker, OPTIONS)

    def decode_options(self) -> list[Option]:
        """Return those that a decision record names: the chosen one and the best, `OPTIONS` in all."""
        return options_of(self.decode_candidates, self.decode_worker, OPTIONS)


@dataclass(slots=True, eq=False)
class Rejection:
    """A request to refuse.

    Either its first token would be too late, and its class prefers to know; or so many late
    requests wait that it would wait too long.
    """

    request: QueuedRequest
    lateness_s: float  #: by how much its first token would miss the deadline, by prediction
    wait_s: float = 0.0  #: behind all late requests, by prediction; 0: that is not the reason
    retry_after_s: float = 0.0  #: when it may be taken, by prediction


class Placer:
    """Looks at the fleet for one request at a time, and notes what a policy decides."""

    def __init__(
        self, config: RouterConfig, fleet: WorkerFleet, index: PrefixIndex, queue: RequestQueue
    ) -> None:
        self.config = config
        self.fleet = fleet
        self.index = index
        self.queue = queue
        self.residuals = Residuals()
        self.shortlist = Shortlist(fleet)
        self.records_options = config.decisions > 0  #: placements carry what was compared
        self.local_only = config.disaggregate == "never"  #: decode workers compute all prompts

    # ---- who may take a request ------------------------------------------------------------------

    def update_local_only(self, settled: bool) -> bool:
        """Follow the membership: `auto` without any prefill worker is `never`, for so long.

        `settled`: all workers have had the time to join this router, so none is merely late. True
        if `local_only` has changed; the queued requests have been told by then.
        """
        mode = self.config.disaggregate
        without_prefill = mode == "auto" and settled and not self.fleet.prefill_workers
        local_only = mode == "never" or without_prefill
        if local_only == self.local_only:
            return False
        self.local_only = local_only
        for request in self.queue.by_key.values():
            request.local = self.is_local(request.place)
        return True

    def is_local(self, place: PlaceAttempt) -> bool:
        """Whether this prompt has to be computed on its decode worker."""
        return place.local_prefill or self.local_only

    def takes_prompts(self, worker: WorkerState) -> bool:
        """Whether prompts regularly go to this worker now.

        A decode worker may compute some even if not (`better_local`, `local_in_time`).
        """
        return worker.can_decode if self.local_only else worker.can_prefill

    @property
    def capacity(self) -> int:
        """The number of workers that prompts regularly go to: so many seconds of prefill are served in
        a second. Decode workers count where there is no prefill worker, not where they help out.
        """
        if self.local_only:
            return len(self.fleet.decode_workers)
        return len(self.fleet.prefill_workers) or len(self.fleet.decode_workers)

    def missing_roles(self, request: QueuedRequest) -> set[str]:
        """Return the roles that the request needs and no worker has.

        Workers that the request's gateway has named as lost do not count.
        """
        candidates = {"decode": self.fleet.decode_workers}
        if not request.local:
            candidates["prefill"] = self.fleet.prefill_workers
        lost = request.place.lost_workers
        if not lost:
            return {role for role, workers in candidates.items() if not workers}
        return {
            role
            for role, workers in candidates.items()
            if all(worker.card.id in lost for worker in workers)
        }

    def allowed(
        self, request: QueuedRequest, workers: Sequence[WorkerState]
    ) -> Sequence[WorkerState]:
        """Return `workers` without lost ones, and without those to avoid if there are others."""
        if not request.excludes_workers:
            return workers
        lost = request.place.lost_workers
        avoided = request.place.avoided_workers
        alive = [worker for worker in workers if worker.card.id not in lost]
        return [worker for worker in alive if worker.card.id not in avoided] or alive

    def blocks_needed(self, request: QueuedRequest) -> int:
        """Return the blocks to reserve: for the prompt and the growth allowance.

        Each further answer takes as many, less the prompt's full blocks, but they are reserved for
        only as far as the largest pool has room, so that some worker can take the request (as
        `engine.scheduler` reserves).
        """
        place = request.place
        block_tokens = self.fleet.block_tokens
        # An answer may be long and seldom is: only so much of it is reserved before it grows.
        growth_tokens = min(place.max_tokens, self.config.growth_tokens)
        first_answer = ceil((request.prompt_tokens + growth_tokens) / block_tokens)
        if place.answer_count == 1:
            return first_answer
        further_answer = first_answer - request.prompt_tokens // block_tokens
        all_answers = first_answer + (place.answer_count - 1) * further_answer
        return max(first_answer, min(all_answers, self.fleet.largest_pool))

    # ---- what is cached --------------------------------------------------------------------------

    def find_prefix(self, request: QueuedRequest, exact: bool = False) -> None:
        """Find out who holds how much of the prompt, and whether that can be moved from there.

        `exact` reads every hash; otherwise the index bisects.
        """
        lookup = self.index.match if exact else self.index.find
        request.hits = lookup(request.sampled_hashes)
        request.looked_at_version = self.fleet.membership_version
        request.holder = self._holder(request)
        request.held_tokens = 0
        request.fetchable = False
        if request.holder is not None:
            held_tokens = tokens_at(request.hits.deepest)
            # The last token is computed in any case: its logits give the answer's first token.
            request.held_tokens = min(held_tokens, request.prompt_tokens - 1)
            request.holder_load_s = self._load_s(request, request.holder)
            # A cost of 0 is not known yet: without it nobody can tell whether a fetch pays.
            has_transfer_cost = request.holder.cost.transfer_token > 0
            request.fetchable = self.config.fetch and has_transfer_cost

    def _holder(self, request: QueuedRequest) -> WorkerState | None:
        """Return the worker with the longest match that has to load least of it, or nothing.

        Of equal ones the request's hash chooses. None if none has any, or so many have that hardly
        anybody needs to fetch it.
        """
        hits = request.hits
        if not 0 < hits.holders.bit_count() <= LISTED_HOLDERS_MAX:
            return None
        slots = list(bits(hits.holders))
        if hits.demoted_by_slot:
            slots = self._soonest_to_send(request, slots)
        return self.fleet.by_slot[slots[request.tie_hash % len(slots)]]

    def _soonest_to_send(self, request: QueuedRequest, slots: list[int]) -> list[int]:
        """Return those of the workers that load what they hold of the prompt soonest."""
        seconds = []
        for slot in slots:
            worker = self.fleet.by_slot[slot]
            seconds.append(self._load_s(request, worker) if worker is not None else inf)
        soonest = min(seconds)
        return [slot for slot, needed in zip(slots, seconds, strict=True) if needed == soonest]

    def _load_s(self, request: QueuedRequest, worker: WorkerState) -> float:
        """Return the seconds in which the worker loads what only its tiers have of the prompt."""
        return worker.load_token_s * request.demoted_tokens(worker)

    def find_prefix_again(self, request: QueuedRequest) -> None:
        """Look up the prompt again, if the longest match is another one by now."""
        same_members = self.fleet.membership_version == request.looked_at_version
        if same_members and self.index.stands(request.hits, request.sampled_hashes):
            return
        self.find_prefix(request)

    # ---- prefill worker and decode worker --------------------------------------------------------

    def plan_prefill(
        self, request: QueuedRequest, worker: WorkerState, deadline: float, now: float
    ) -> PlannedPrefill:
        """Return when the worker would compute the prompt, behind what it has.

        `deadline` is the prompt's in the worker's order: later ones wait; 0 is in order of arrival.
        """
        plan = plan_prefill(request, worker)
        wait_s = worker.wait_s(deadline, now)
        begins_at = now + wait_s
        return PlannedPrefill(
            worker=worker,
            wait_s=wait_s,
            prefill_s=plan.seconds,
            cached_tokens=plan.cached_tokens,
            loaded_tokens=plan.loaded_tokens,
            fetch_from=plan.fetch_from,
            deadline=deadline,
            span=PrefillSpan(begins_at, begins_at + plan.seconds),
        )

    def decode_candidates(
        self, request: QueuedRequest, span: PrefillSpan, gentle: bool
    ) -> list[DecodeCandidate]:
        """Return the decode workers that have room, with what the request would cost there.

        These are the shortlist's; all workers are compared if none of those is left. A worker that
        cannot be the cheapest may be left out. `gentle` leaves out the workers where the request
        would break somebody's ITL target. Empty: nobody has room, or with `gentle` nobody where no
        target would break.
        """
        listed = self.shortlist.decode_workers(request.hits)
        if request.excludes_workers:
            listed = [worker for worker in listed if not _is_excluded(request, worker)]
        candidates = self._compare_decode(request, listed, span, gentle)
        if candidates:
            return candidates
        if self.shortlist.compares_all_decode and not request.excludes_workers:
            return []
        workers = self.allowed(request, self.fleet.accepting_decode_workers())
        return self._compare_decode(request, workers, span, gentle)

    def _compare_decode(
        self,
        request: QueuedRequest,
        workers: Sequence[WorkerState],
        span: PrefillSpan,
        gentle: bool,
    ) -> list[DecodeCandidate]:
        blocks = self.blocks_needed(request)
        lowest_cost = inf
        candidates = []
        for worker in workers:
            if worker.reservable_blocks < blocks:
                continue
            if worker.decode_cost_s > lowest_cost:
                continue  # its step alone costs more than all of another worker
            # `fleet.itl_s`: the configured target, for which each worker's figure is ready; the request's
            # own is asked if it differs
            if gentle and not disturbs_nobody(request, worker, self.fleet.itl_s):
                continue
            # A decode worker's tiers do not help: only what its pool holds need not be sent.
            moved_tokens = request.prompt_tokens - request.pooled_tokens(worker)
            candidate = decode_candidate(request, worker, span, moved_tokens)
            lowest_cost = min(lowest_cost, candidate.cost)
            candidates.append(candidate)
        return candidates

    def pair(
        self,
        request: QueuedRequest,
        kind: PlacementKind,
        planned: PlannedPrefill,
        chosen: DecodeCandidate,
        compared: Sequence[DecodeCandidate],
    ) -> Placement:
        """Return the placement on a prefill worker and the chosen decode worker."""
        same_worker = chosen.worker is planned.worker
        return Placement(
            request=request,
            kind=kind,
            prefill_worker=None if same_worker else planned.worker,
            decode_worker=chosen.worker,
            uncached_tokens=request.prompt_tokens - planned.cached_tokens,
            cached_tokens=planned.cached_tokens,
            wait_s=planned.wait_s,
            prefill_s=planned.prefill_s,
            itl_s=chosen.step_s,
            exposed_s=chosen.exposed_s,
            deadline=planned.deadline,
            blocks=self.blocks_needed(request),
            moved_tokens=chosen.moved_tokens,
            loaded_tokens=planned.loaded_tokens,
            fetch_from=planned.fetch_from,
            decode_candidates=compared if self.records_options else (),
        )

    # ---- local prefill ---------------------------------------------------------------------------

    def better_local(
        self, request: QueuedRequest, remote_s: float, deadline: float, now: float
    ) -> Placement | None:
        """Return a local placement, if the prompt had better not go to a prefill worker.

        That is so if the first token comes as early, unless it is late here and there; or if the
        prompt is short, or mostly cached or fetched, and in time. `remote_s` is the time to the first
        token on a prefill worker.
        """
        workers: Sequence[WorkerState] = self.shortlist.decode_workers(request.hits)
        if request.excludes_workers:
            workers = self.allowed(request, self.fleet.decode_workers)
        blocks = self.blocks_needed(request)
        candidates = []
        for worker in workers:
            if worker.credit_at > now or worker.reservable_blocks < blocks:
                continue
            # Whoever comes here by choice must fit in the end too: it could go elsewhere.
            if worker.expected_free_tokens < request.expected_tokens:
                continue
            candidate = _local_candidate(request, worker, now)
            if candidate.cost < inf:
                candidates.append(candidate)
        if not candidates:
            return None
        best = min(candidates, key=candidate_order)
        is_late = best.cost > (request.deadline - now) / self.residuals.upper
        if best.cost > remote_s and (is_late or not _suits_decode_worker(request, best.worker)):
            return None
        if is_late and now + remote_s > request.deadline:
            return None  # late on either side: a decode worker shares what is overdue
        placement = self.place_local(request, best.worker, deadline, now)
        if placement is not None and self.records_options:
            placement.decode_candidates = candidates
        return placement

    def workers_to_share(self, request: QueuedRequest) -> list[WorkerState]:
        """Return the listed decode workers that have time and room for the prompt and its answer.

        They help out where the prefill workers do not keep up. Decode must leave such a worker
        `SPARE_SHARE_MIN` of its time, when two steps must fit into the ITL target: a sequence whose KV
        arrives waits for the step under way, and then for its own. And the answer must break nobody's
        ITL target there.
        """
        blocks = self.blocks_needed(request)
        listed = self.shortlist.decode_workers(request.hits)
        return [
            worker
            for worker in self.allowed(request, listed)
            if worker.reservable_blocks >= blocks
            and not worker.can_prefill
            and spare_share(worker, request.itl_s, steps=2) >= SPARE_SHARE_MIN
            and disturbs_nobody(request, worker, self.fleet.itl_s)
        ]

    def local_in_time(self, request: QueuedRequest, now: float) -> Placement | None:
        """Return a local placement that is in time, for a request that prefill workers have late.

        The decode worker computes the prompt in what its decodes leave of each step.
        """
        candidates = []
        for worker in self.workers_to_share(request):
            if worker.credit_at > now:
                continue
            plan = plan_prefill(request, worker)
            ready_s = worker.wait_s(request.deadline, now)
            ready_s += paced_prefill_s(worker, plan.seconds, request.itl_s)
            if now + ready_s * self.residuals.upper <= request.deadline:
                tie_breaker = request.tie_breaker(worker.slot)
                candidates.append(LocalCandidate(worker, ready_s, tie_breaker))
        if not candidates:
            return None
        best = min(candidates, key=candidate_order)
        placement = self.place_local(request, best.worker, request.deadline, now)
        if placement is not None and self.records_options:
            placement.decode_candidates = candidates
        return placement

    def place_local_on_best(
        self,
        request: QueuedRequest,
        workers: Sequence[WorkerState],
        deadline: float,
        now: float,
    ) -> Placement | None:
        """Place a request on the decode worker that would have its first token earliest.

        That worker computes the prompt too. Returns None if none of `workers` has room. A worker
        that decodes so much that it can hardly prefill beside is still better than none.
        """
        blocks = self.blocks_needed(request)
        candidates = [
            _local_candidate(request, worker, now)
            for worker in workers
            if worker.reservable_blocks >= blocks
        ]
        for candidate in candidates:
            if candidate.cost == inf:
                plan = plan_prefill(request, candidate.worker)
                backlog_s = candidate.worker.backlog_s(now)
                # `compared_s`, not `seconds`: a fetch counts for more than it is predicted to take.
                candidate.cost = NO_CHUNK_ROOM_S + backlog_s + plan.compared_s
        position = cheapest_position([candidate.cost for candidate in candidates], request.tie_hash)
        if position is None:
            return None
        placement = self.place_local(request, candidates[position].worker, deadline, now)
        if placement is not None and self.records_options:
            placement.decode_candidates = candidates
        return placement

    def place_local(
        self, request: QueuedRequest, worker: WorkerState, deadline: float, now: float
    ) -> Placement | None:
        """Return a placement on this worker alone; None if there is no room on the worker."""
        blocks = self.blocks_needed(request)
        if worker.reservable_blocks < blocks:
            return None
        plan = plan_prefill(request, worker)
        wait_s = worker.wait_s(deadline, now)
        ready_s = local_first_token_s(request, worker, plan, now)
        if ready_s == inf:
            ready_s = wait_s + paced_prefill_s(worker, plan.seconds, request.itl_s)
        return Placement(
            request=request,
            kind=PlacementKind.LOCAL,
            prefill_worker=None,
            decode_worker=worker,
            uncached_tokens=request.prompt_tokens - plan.cached_tokens,
            cached_tokens=plan.cached_tokens,
            wait_s=wait_s,
            prefill_s=ready_s - wait_s,
            itl_s=worker.step_with(request.kv_tokens_read),
            exposed_s=0.0,
            deadline=deadline,
            blocks=blocks,
            loaded_tokens=plan.loaded_tokens,
            fetch_from=plan.fetch_from,
        )

    # ---- noting a placement ----------------------------------------------------------------------

    def commit(self, placement: Placement, now: float) -> None:
        """Note a placement on its workers, and take the request out of the queue."""
        request = placement.request
        work = PrefillWork(
            seconds=placement.prefill_s,
            uncached_tokens=placement.uncached_tokens,
            prompt_tokens=request.prompt_tokens,
            assigned_at=now,
            deadline=placement.deadline,
            delayed=placement.fetch_from is not None or placement.loaded_tokens > 0,
            background=request.overdue,
        )
        self.fleet.give_prompt(placement.computing_worker, request.attempt_key, work, now)
        reservation = DecodeReservation(
            blocks=placement.blocks,
            expected_blocks=ceil(int(request.expected_tokens) / self.fleet.block_tokens),
            kv_tokens=request.kv_tokens_read,
            rows=request.place.answer_count,
        )
        decode_worker = placement.decode_worker
        self.fleet.reserve(decode_worker, request.attempt_key, reservation)
        if placement.prefill_worker is not None:
            begins_at = max(decode_worker.link_busy_until, now + placement.wait_s)
            transfer_s = decode_worker.cost.transfer_s(placement.moved_tokens)
            decode_worker.link_busy_until = begins_at + transfer_s
        self.queue.leave(request.attempt_key)


def _is_excluded(request: QueuedRequest, worker: WorkerState) -> bool:
    name = worker.card.id
    return name in request.place.lost_workers or name in request.place.avoided_workers


def _local_candidate(request: QueuedRequest, worker: WorkerState, now: float) -> LocalCandidate:
    plan = plan_prefill(request, worker)
    ready_s = local_first_token_s(request, worker, plan, now)
    return LocalCandidate(worker, ready_s, request.tie_breaker(worker.slot))


def _suits_decode_worker(request: QueuedRequest, worker: WorkerState) -> bool:
    """Whether a prompt is short on this worker, or mostly cached or fetched there."""
    cached_tokens = plan_prefill(request, worker).cached_tokens
    uncached_tokens = request.prompt_tokens - cached_tokens
    if uncached_tokens <= LOCAL_TOKENS:
        return True
    mostly_cached = cached_tokens >= LOCAL_CACHED_SHARE * request.prompt_tokens
    return mostly_cached and uncached_tokens <= LOCAL_CACHED_TOKENS
