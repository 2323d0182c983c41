"""The few workers that are compared for one request, and what each of them would cost.

A small fleet is compared whole. Of a large one: the workers that are free soonest, those whose
prompts can be put off longest (a newcomer may go before them), those that cost least to decode on,
all found again every few requests; and whoever holds some of the prompt, or a few of them if many
do. Comparing all of a thousand workers for each request would take longer than everything else that
the router does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from operator import attrgetter

from .decisions import Option
from .fleet import HALTED_MAX, WorkerFleet
from .index import Hits, some_bits
from .request_queue import QueuedRequest
from .worker_state import WorkerState

COMPARE_ALL_MAX = 16  #: workers of a stage: up to this, all are compared
SOONEST_FREE = 4  #: prefill workers of a shortlist that are free soonest
LARGEST_SLACK = 2  #: further ones, whose prompts can be put off longest
CHEAPEST = 4  #: decode workers of a shortlist
USES = 4  #: requests before a shortlist is found again (in `refresh`)
FASTEST = 2  #: prefill workers that are asked how fast a prompt can be computed
WIDE_HOLDERS = 4  #: of the many that hold a prefix, so many are compared


@dataclass(slots=True, eq=False)
class PrefillCandidate:
    """A worker that could compute a prompt, and what that would cost in seconds."""

    worker: WorkerState
    cost: float  #: what the policy compares
    tie_breaker: int  #: orders candidates of equal cost; another order for each request
    wait_s: float  #: until the prefill would begin
    prefill_s: float  #: of the prompt alone
    has_credit: bool  #: the worker takes the prompt now

    def option(self) -> Option:
        """Return the candidate as a decision record names it."""
        return Option(self.worker.card.id, self.cost, (self.wait_s, self.prefill_s))


@dataclass(slots=True, eq=False)
class DecodeCandidate:
    """A worker that could decode a request, with the terms of the cost in seconds."""

    worker: WorkerState
    cost: float  #: what the policy compares
    tie_breaker: int
    moved_tokens: int  #: of the prompt, that the worker does not hold
    step_s: float  #: a step with this request: the predicted gap between tokens
    exposed_s: float  #: transfer that the prefill does not hide
    memory_s: float  #: what a fuller KV pool costs
    handover_s: float  #: what the gap between first and second token exceeds the target by

    def option(self) -> Option:
        """Return the candidate as a decision record names it."""
        terms = (self.step_s, self.exposed_s, self.memory_s, self.handover_s)
        return Option(self.worker.card.id, self.cost, terms)


@dataclass(slots=True, eq=False)
class LocalCandidate:
    """A decode worker that could compute the prompt itself."""

    worker: WorkerState
    cost: float  #: seconds to the first token
    tie_breaker: int

    def option(self) -> Option:
        """Return the candidate as a decision record names it. Its one term is the cost itself."""
        return Option(self.worker.card.id, self.cost, (self.cost,))


Candidate = PrefillCandidate | DecodeCandidate | LocalCandidate

#: The order of candidates: the least cost first, ties by a hash of the request.
candidate_order = attrgetter("cost", "tie_breaker")


def options_of(
    candidates: Iterable[Candidate], chosen: WorkerState | None, limit: int
) -> list[Option]:
    """Return the chosen worker's option first, then the best of the others: `limit` in all."""
    candidates = list(candidates)
    others = [candidate for candidate in candidates if candidate.worker is not chosen]
    named = [candidate for candidate in candidates if candidate.worker is chosen]
    named += nsmallest(limit - 1, others, key=candidate_order)
    return [candidate.option() for candidate in named]


class Shortlist:
    """Finds the workers that are compared for one request."""

    def __init__(self, fleet: WorkerFleet) -> None:
        self._fleet = fleet
        self._membership_version = -1
        self._prefill: list[WorkerState] = []
        self._decode: list[WorkerState] = []
        self._fastest: list[WorkerState] = []
        #: Uses until `refresh` finds a list again; at -USES, the next use does it by itself.
        self._prefill_uses_left = -USES
        self._decode_uses_left = -USES
        self._next_wide_slot = 0  #: from which slot on the next holders of many are taken

    def prefill_workers(self, request: QueuedRequest, now: float) -> list[WorkerState]:
        """Return the workers to compare for the prefill; the preferred one is among them.

        The list is the shortlist's own: the caller must not change it.
        """
        self._follow_membership()
        if self.compares_all_prefill:
            return self._prefill
        self._prefill_uses_left -= 1
        if self._prefill_uses_left < -USES:
            self._find_prefill(now)
        holders = [w for w in self._holders(request.hits, self._prefill) if w.can_prefill]
        preferred = request.preferred_worker
        listed = preferred in self._prefill or preferred in holders
        if preferred is not None and preferred.alive and not listed:
            holders.append(preferred)
        return self._prefill + holders if holders else self._prefill

    def decode_workers(self, hits: Hits) -> list[WorkerState]:
        """Return the workers to compare for decode; some of them may take no reservation now.

        `hits` says who holds how much of the prompt. The list must not be changed.
        """
        self._follow_membership()
        if self.compares_all_decode:
            return self._decode
        self._decode_uses_left -= 1
        if self._decode_uses_left < -USES:
            self._find_decode()
        holders = [w for w in self._holders(hits, self._decode) if w.can_decode]
        return self._decode + holders if holders else self._decode

    def fastest_workers(self, hits: Hits, local: bool) -> list[WorkerState]:
        """Return workers that would compute a prompt soonest, were all workers idle."""
        if local:
            return self.decode_workers(hits)
        self._follow_membership()
        if self.compares_all_prefill:
            return self._prefill
        holders = [w for w in self._holders(hits, self._fastest) if w.can_prefill]
        return self._fastest + holders

    @property
    def compares_all_prefill(self) -> bool:
        """Whether all prefill workers are compared for each request."""
        return len(self._fleet.prefill_workers) <= COMPARE_ALL_MAX

    @property
    def compares_all_decode(self) -> bool:
        """Whether all decode workers are compared for each request."""
        return len(self._fleet.decode_workers) <= COMPARE_ALL_MAX

    def refresh(self, now: float) -> None:
        """Find the shortlists again, if enough requests have used them.

        This is called where nobody waits for an answer; the other methods find them only after
        twice as many uses.
        """
        if self._prefill_uses_left <= 0 and not self.compares_all_prefill:
            self._find_prefill(now)
        if self._decode_uses_left <= 0 and not self.compares_all_decode:
            self._find_decode()

    # ---- finding ---------------------------------------------------------------------------------

    def _find_prefill(self, now: float) -> None:
        def free_at(worker: WorkerState) -> float:
            backlog_ends_at = worker.busy_until + worker.preferring_s
            return max(backlog_ends_at, now) + worker.listed_prefill_s

        self._prefill_uses_left = USES
        workers = self._fleet.prefill_workers
        soonest = _cheapest(workers, free_at, SOONEST_FREE)
        displaceable = [w for w in workers if 0 < len(w.pending_prefills) < HALTED_MAX]
        largest_slack = _cheapest(displaceable, _negative_slack_s, LARGEST_SLACK)
        self._prefill = soonest + [worker for worker in largest_slack if worker not in soonest]

    def _find_decode(self) -> None:
        self._decode_uses_left = USES
        workers = [worker for worker in self._fleet.decode_workers if worker.can_decode]
        self._decode = _cheapest(workers, _decode_cost_s, CHEAPEST)

    def _holders(self, hits: Hits, listed: Sequence[WorkerState]) -> list[WorkerState]:
        """Return workers that hold some of the prompt and are not listed.

        Of a prefix that many hold there are a few, unless a listed worker holds as much: at each
        call other ones, so that no holder is always passed over.
        """
        slots = list(hits.depth_by_slot)
        if hits.wide_depths:
            depth, mask = hits.wide_depths[0]
            if not any(hits.depth(worker.slot) >= depth for worker in listed):
                self._next_wide_slot = (self._next_wide_slot + 1) % mask.bit_length()
                slots += some_bits(mask, self._next_wide_slot, WIDE_HOLDERS)
        workers = [self._fleet.by_slot[slot] for slot in slots]
        return [worker for worker in workers if worker is not None and worker not in listed]

    def _follow_membership(self) -> None:
        """Begin with all workers again, if a worker has joined or was lost."""
        if self._fleet.membership_version == self._membership_version:
            return
        self._membership_version = self._fleet.membership_version
        self._prefill = self._fleet.prefill_workers
        self._decode = self._fleet.decode_workers
        self._prefill_uses_left = -USES
        self._decode_uses_left = -USES
        self._fastest = nsmallest(FASTEST, self._prefill, key=_listed_prefill_s)


_decode_cost_s = attrgetter("decode_cost_s")
_listed_prefill_s = attrgetter("listed_prefill_s")
_slot = attrgetter("slot")


def _negative_slack_s(worker: WorkerState) -> float:
    return -worker.slack_s


def _cheapest(
    workers: Sequence[WorkerState], cost: Callable[[WorkerState], float], count: int
) -> list[WorkerState]:
    """Return the workers of the least cost, by slot."""
    return sorted(nsmallest(count, workers, key=cost), key=_slot)
