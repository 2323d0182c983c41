"""The requests that are not placed yet, urgent or overdue.

Life of a queued request:
    enters     -> urgent, in order of (priority, `start_by_s`): when its prefill must begin at the
                  latest, put off by its tenant's debt. By deadline alone, long prompts would begin
                  too late
    too late   -> overdue, in the order in which requests became so: served when no urgent one can
                  be, and the first one now and then before the urgent ones, once it is old
    leaves     -> placed, refused, ended, or given up at `expires_at`
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from ..protos.frames import AttemptKey, PlaceAttempt
from .config import SloClass
from .index import NOBODY, Hits, tokens_at
from .worker_state import WorkerState

#: Seconds of prefill that a tenant may ask beyond its share before its requests are put off.
QUANTUM_S = 2.0
TENANTS_MAX = 10_000  #: accounts kept; with more, that of the tenant that asked longest ago goes
TIE_SPREAD = 0x9E3779B1  #: spreads ties over equal workers (Knuth's multiplicative hash)


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """One attempt as the router sees it. Moments by the clock of `now`, lengths in tokens."""

    gateway: str  #: name of the gateway that asked
    attempt_key: AttemptKey  #: (request id, number of the attempt)
    place: PlaceAttempt  #: what the gateway asked
    slo: SloClass  #: the settings of the request's class
    heard_at: float  #: when this router heard of it
    arrived_at: float  #: when the client's request began
    deadline: float  #: of its first token
    expires_at: float  #: when the router gives it up
    old_at: float  #: after this moment it is old (`is_old`)
    itl_s: float  #: its target for the seconds between two tokens (inter-token latency)
    sampled_hashes: Sequence[bytes]  #: the prefix hashes that are looked up, root first
    tie_hash: int  #: seeded hash of the key, which spreads requests over equal workers
    local: bool  #: its prompt must be computed on its decode worker
    prompt_tokens: int
    excludes_workers: bool  #: its gateway has named workers as lost or to avoid
    kv_tokens_read: float  #: whose KV a decode step reads for all its answers, on average
    expected_tokens: float  #: whose KV is in its blocks when all its answers end as expected
    ttft_target_s: float = 0.0  #: from its arrival to its first token
    ttft_target: str = ""  #: the same as in `max(1s, 3x)`; "": a plain time
    #: Seconds that its whole prompt would take if nothing of it were cached and the cluster had no
    #: other work (its isolated prefill). 0: its TTFT target does not depend on them.
    isolated_s: float = 0.0

    # ---- what the last look at the index has found ----
    hits: Hits = NOBODY  #: who holds how much of its prompt
    looked_at_version: int = -1  #: `WorkerFleet.membership_version` at that time
    #: One of the workers with the longest cached prefix of its prompt, however short this is. None:
    #: none has any, or so many have it that hardly any worker needs to fetch it.
    holder: WorkerState | None = None
    held_tokens: int = 0  #: of the prompt, on `holder`
    holder_load_s: float = 0.0  #: in which `holder` loads those of them that only its tiers have
    fetchable: bool = False  #: those tokens can be moved from `holder`

    # ---- its place in the queue ----
    fastest_prefill_s: float = 0.0  #: on the worker that would compute it fastest, were it idle
    start_by_s: float = 0.0  #: moment at which its prefill must begin, put off by its tenant's debt
    #: It can no longer be in time, by itself or behind the urgent ones. It stays overdue then.
    overdue: bool = False
    #: It was to be in time when it came: it entered the urgent ones, or a worker took it at once.
    admitted_as_urgent: bool = False
    preferred_worker: WorkerState | None = None  #: whose cache is worth a wait
    preferred_prefill_s: float = 0.0  #: its prefill on the preferred worker
    choose_again_at: float = 0.0  #: when it may choose a worker again; 0: it never did

    def cached_tokens(self, worker: WorkerState) -> int:
        """Return its prompt's tokens in the worker's pool or in the tiers below that.

        At least one token is always computed.
        """
        depth = self.hits.depth(worker.slot)
        return min(tokens_at(depth), self.prompt_tokens - 1) if depth else 0

    def pooled_tokens(self, worker: WorkerState) -> int:
        """Return those of its cached tokens that the worker's pool has: they cost nothing."""
        return self.cached_tokens(worker) - self.demoted_tokens(worker)

    def demoted_tokens(self, worker: WorkerState) -> int:
        """Return those of its cached tokens that only the worker's tiers have: they must be loaded."""
        hits = self.hits
        if worker.slot not in hits.demoted_by_slot:
            return 0
        depth = hits.depth(worker.slot)
        if not depth:
            return 0
        pooled_depth = hits.pooled_depth(worker.slot, depth)
        last = self.prompt_tokens - 1
        return min(tokens_at(depth), last) - min(tokens_at(pooled_depth), last)

    def tie_breaker(self, slot: int) -> int:
        """Return a number that orders equal workers, differently for each request."""
        spread = (self.tie_hash + slot * TIE_SPREAD) & 0xFFFF
        return spread << 16 | slot

    @property
    def is_put_off(self) -> bool:
        """Whether it waits longer because its tenant has asked more than its share.

        It says so only of a request that has entered the queue.
        """
        return self.start_by_s > self.deadline - self.fastest_prefill_s

    def is_old(self, now: float) -> bool:
        """Return whether it has waited for long enough to slow others down.

        An old request may go where it breaks the ITL targets of sequences that decode, and an old
        overdue one is served now and then before urgent ones.
        """
        return now > self.old_at


@dataclass(slots=True)
class TenantAccount:
    """What a tenant has asked beyond its share, in seconds of prefill, as of `updated_at`."""

    debt_s: float
    updated_at: float


#: (priority, `start_by_s`, number of its entry): the order of urgent requests, without ties
Rank = tuple[int, float, int]
#: requests in the order of their ranks
RankedRequests = list[tuple[Rank, QueuedRequest]]


#: (seconds of its fastest prefill, number of its entry): the order of urgent requests by length
Length = tuple[float, int]


def _length_of(entry: tuple[Length, QueuedRequest]) -> Length:
    return entry[0]


def _rank_of(entry: tuple[Rank, QueuedRequest]) -> Rank:
    return entry[0]


class RequestQueue:
    """Every request that is not placed. Deterministic: ties are broken by order of entry.

    An urgent request that prefers a worker's cache stands in that worker's own queue too. The
    seconds of those requests are the worker's `preferring_s`.
    """

    def __init__(self) -> None:
        self.by_key: OrderedDict[AttemptKey, QueuedRequest] = OrderedDict()  #: in order of entry
        self.urgent: RankedRequests = []  #: the most urgent first
        self._by_length: list[tuple[Length, QueuedRequest]] = []  #: the same, the longest last
        #: In the order in which they became so: the one that is overdue for longest is the first.
        self.overdue: OrderedDict[AttemptKey, QueuedRequest] = OrderedDict()
        self.prefill_s = 0.0  #: fastest prefills of all urgent requests
        self.overdue_prefill_s = 0.0  #: fastest prefills of all overdue requests
        #: requests that were admitted as urgent and became overdue while they waited
        self.moved_behind = 0
        self.preferring_s = 0.0  #: prefills of those that prefer a worker, on that worker
        #: slot -> urgent requests that prefer this worker, in the same order as `urgent`
        self.preferring: dict[int, RankedRequests] = {}
        #: a heap of (moment, number of the entry, request); requests that have left are skipped
        self._expiries: list[tuple[float, int, QueuedRequest]] = []
        self._ranks: dict[AttemptKey, Rank] = {}
        self._entered = 0  #: numbers the entries in `urgent` and `_expiries`
        #: by tenant; the tenant that asked longest ago is the first
        self._accounts: OrderedDict[str, TenantAccount] = OrderedDict()
        #: the same tenants, in the order in which `_forget_paid_accounts` looks at them
        self._inspection_order: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.by_key)

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self.by_key

    def most_urgent(self, limit: int) -> list[QueuedRequest]:
        """Return the first urgent requests, `limit` at most."""
        return [request for _, request in self.urgent[:limit]]

    def behind_s(self, request: QueuedRequest, limit: int) -> float:
        """Return the seconds of the fastest prefills of the urgent requests behind this urgent one.

        Only the `limit` least urgent requests are looked at.
        """
        rank = self._ranks[request.attempt_key]
        seconds = 0.0
        for other_rank, other in reversed(self.urgent[-limit:]):
            if other_rank <= rank:
                break
            seconds += other.fastest_prefill_s
        return seconds

    def longest_urgent(self, limit: int) -> list[QueuedRequest]:
        """Return the urgent requests with the longest prefills, `limit` at most, the longest first."""
        return [request for _, request in self._by_length[: -limit - 1 : -1]]

    # ---- entering --------------------------------------------------------------------------------

    def enter(self, request: QueuedRequest, now: float, capacity: float) -> None:
        """Queue a request as urgent.

        `capacity` is the number of workers that prefill: the seconds of service in a second.
        """
        self._entered += 1
        delay_s = self.charge(request, now, capacity)
        request.start_by_s = request.deadline - request.fastest_prefill_s + delay_s
        rank = (request.slo.priority, request.start_by_s, self._entered)
        self.by_key[request.attempt_key] = request
        self._ranks[request.attempt_key] = rank
        insort(self.urgent, (rank, request), key=_rank_of)
        length = (request.fastest_prefill_s, self._entered)
        insort(self._by_length, (length, request), key=_length_of)
        self.prefill_s += request.fastest_prefill_s
        self.prefer(request, request.preferred_worker, request.preferred_prefill_s)
        heapq.heappush(self._expiries, (request.expires_at, self._entered, request))

    def charge(self, request: QueuedRequest, now: float, capacity: float) -> float:
        """Charge the request's tenant, and return by how many seconds this puts the request off.

        The charge is the request's fastest prefill. A tenant's share of the fleet is `capacity`
        over the tenants that have asked lately; its debt is paid off at that rate.

        The returned delay is the time in which the tenant's share of the fleet serves what the
        tenant asked beyond `QUANTUM_S`. It is zero for the only tenant.
        """
        tenant = request.place.tenant
        account = self._accounts.get(tenant)
        if account is None:
            account = TenantAccount(debt_s=0.0, updated_at=now)
            self._accounts[tenant] = account
            self._inspection_order[tenant] = None
            if len(self._accounts) > TENANTS_MAX:
                self._forget_account(next(iter(self._accounts)))
        self._accounts.move_to_end(tenant)
        share = max(capacity, 1.0) / len(self._accounts)
        paid_s = (now - account.updated_at) * share
        account.debt_s = max(account.debt_s - paid_s, 0.0) + request.fastest_prefill_s
        account.updated_at = now
        if len(self._accounts) == 1:
            return 0.0
        self._forget_paid_accounts(now, share)
        return max(account.debt_s - QUANTUM_S, 0.0) / share

    def _forget_paid_accounts(self, now: float, share: float) -> None:
        """Forget the tenant that asked longest ago, and one further in turn, if they owe nothing.

        A tenant in debt that asks no more stays the first one until its debt is paid, maybe for
        hours. The further one is for those behind it: they would count as tenants that ask.
        """
        self._forget_if_paid(next(iter(self._accounts)), now, share)
        further_tenant = next(iter(self._inspection_order))
        self._inspection_order.move_to_end(further_tenant)
        self._forget_if_paid(further_tenant, now, share)

    def _forget_if_paid(self, tenant: str, now: float, share: float) -> None:
        account = self._accounts[tenant]
        if account.debt_s <= (now - account.updated_at) * share:
            self._forget_account(tenant)

    def _forget_account(self, tenant: str) -> None:
        del self._accounts[tenant]
        del self._inspection_order[tenant]

    # ---- leaving ---------------------------------------------------------------------------------

    def leave(self, key: AttemptKey) -> QueuedRequest | None:
        """Take a request out of the queue; None if it is not there."""
        request = self.by_key.pop(key, None)
        if request is None:
            return None
        if self.overdue.pop(key, None) is None:
            self._remove_urgent(request)
        else:
            self._forget_overdue(request)
        del self._ranks[key]
        return request

    def refuse(self, request: QueuedRequest) -> None:
        """Take a request out that is refused at its arrival, and take its tenant's charge back."""
        self.leave(request.attempt_key)
        account = self._accounts.get(request.place.tenant)
        if account is not None:
            account.debt_s = max(account.debt_s - request.fastest_prefill_s, 0.0)

    def mark_overdue(self, request: QueuedRequest) -> None:
        """Put a request that cannot be served in time behind the urgent ones."""
        self._remove_urgent(request)
        request.overdue = True
        if request.admitted_as_urgent:
            self.moved_behind += 1
        self.overdue[request.attempt_key] = request
        self.overdue_prefill_s += request.fastest_prefill_s

    def _forget_overdue(self, request: QueuedRequest) -> None:
        self.overdue_prefill_s -= request.fastest_prefill_s
        if not self.overdue:
            self.overdue_prefill_s = 0.0  # rounding errors do not pile up

    def _remove_urgent(self, request: QueuedRequest) -> None:
        rank = self._ranks[request.attempt_key]
        position = bisect_left(self.urgent, rank, key=_rank_of)
        assert self.urgent[position][1] is request
        del self.urgent[position]
        _, _, entry = rank
        length = (request.fastest_prefill_s, entry)
        position = bisect_left(self._by_length, length, key=_length_of)
        assert self._by_length[position][1] is request
        del self._by_length[position]
        self._stop_preferring(request)
        self.prefill_s -= request.fastest_prefill_s
        if not self.urgent:
            self.prefill_s = 0.0  # rounding errors do not pile up

    def expired(self, now: float) -> Iterator[QueuedRequest]:
        """Yield the requests whose time is over. The caller takes each out, or postpones it."""
        while self._expiries and self._expiries[0][0] <= now:
            _, _, request = heapq.heappop(self._expiries)
            if self.by_key.get(request.attempt_key) is request:
                yield request

    def postpone(self, request: QueuedRequest, expires_at: float) -> None:
        """Let a request wait longer."""
        request.expires_at = expires_at
        self._entered += 1
        heapq.heappush(self._expiries, (expires_at, self._entered, request))

    @property
    def next_expiry(self) -> float:
        """When the next request is given up; inf: there is none."""
        while self._expiries:
            expires_at, _, request = self._expiries[0]
            if self.by_key.get(request.attempt_key) is request:
                return expires_at
            heapq.heappop(self._expiries)
        return inf

    # ---- preferred workers -----------------------------------------------------------------------

    def prefer(self, request: QueuedRequest, worker: WorkerState | None, prefill_s: float) -> None:
        """Note which worker an urgent request prefers now; None if it prefers none.

        `prefill_s`: the seconds that its prompt would take there.
        """
        self._stop_preferring(request)
        request.preferred_worker = worker
        request.preferred_prefill_s = prefill_s
        if worker is not None:
            own_queue = self.preferring.setdefault(worker.slot, [])
            insort(own_queue, (self._ranks[request.attempt_key], request), key=_rank_of)
            self.preferring_s += prefill_s
            worker.preferring_s += prefill_s

    def _stop_preferring(self, request: QueuedRequest) -> None:
        worker = request.preferred_worker
        if worker is None:
            return
        own_queue = self.preferring.get(worker.slot, [])
        position = bisect_left(own_queue, self._ranks[request.attempt_key], key=_rank_of)
        if position == len(own_queue) or own_queue[position][1] is not request:
            return
        request.preferred_worker = None
        del own_queue[position]
        self.preferring_s -= request.preferred_prefill_s
        worker.preferring_s -= request.preferred_prefill_s
        if not own_queue:
            worker.preferring_s = 0.0  # rounding errors do not pile up

    def forget_worker(self, slot: int) -> list[QueuedRequest]:
        """Return the urgent requests that preferred a lost worker; they prefer none now."""
        requests = [request for _, request in self.preferring.pop(slot, [])]
        for request in requests:
            request.preferred_worker = None
            self.preferring_s -= request.preferred_prefill_s
        return requests
