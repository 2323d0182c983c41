"""Who waits: the urgent by deadline, and the late, who cannot be served in time any more, by age.

Life of a waiting request:
    enters   -> urgent, by (priority, due): when it must begin at the latest, put off by its
                tenant's debt. By deadline alone, long prompts would begin too late
    too late -> late: served when no urgent one can be, and every `AGED_TURN`-th time once it is old
    leaves   -> bound, refused, ended, or given up at `expires`
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
from .fleet import Fleet, Worker
from .index import NOBODY, Hits

QUANTUM_S = 2.0  #: service that a tenant may have beyond its share before it waits for others
TENANTS_MAX = 10_000


class Waiting:
    """One request as the router sees it. Moments by the clock of `now`, lengths in tokens."""

    def __init__(
        self,
        gateway: str,
        key: AttemptKey,
        place: PlaceAttempt,
        slo: SloClass,
        since: float,  #: when this router heard of it
        arrived: float,  #: when it began
        deadline: float,  #: of its first token
        expires: float,
        itl_s: float,
        sampled: Sequence[bytes],  #: hashes that are looked up
        tie: int,  #: seeded hash of the key
        output: float,  #: expected
        local: bool,  #: it must be computed on its decode worker
        prompt: int = 0,  #: tokens
        picky: bool = False,  #: it has seen workers fail
        reads: float = 0.0,  #: KV tokens that a step reads for it, on average: all its answers
        whole: float = 0.0,  #: tokens in blocks at their expected end
    ) -> None:
        self.gateway = gateway
        self.key = key
        self.place = place
        self.slo = slo
        self.since = since
        self.arrived = arrived
        self.deadline = deadline
        self.expires = expires
        self.itl_s = itl_s
        self.sampled = sampled
        self.tie = tie
        self.output = output
        self.local = local
        self.prompt = prompt
        self.picky = picky
        self.reads = reads
        self.whole = whole
        self.hits: Hits = NOBODY  #: who holds how much of its prompt, as of the last look
        self.looked: int = -1  #: `Fleet.joins` at that time
        self.holder: Worker | None = None  #: that has most of its prompt
        self.held: int = 0  #: tokens of it there
        self.fetches: bool = False  #: and they can be moved from there
        self.least_s: float = 0.0  #: prefill on the worker that would do it fastest, were it idle
        self.due: float = 0.0
        self.late: bool = False
        self.home: Worker | None = None  #: whose cache it waits for, if that pays
        self.home_s: float = 0.0  #: its prefill there
        self.look_at: float = 0.0  #: when it chooses again


@dataclass(slots=True)
class Account:
    """A tenant's service beyond its share, in seconds, as of `at`."""

    debt: float = 0.0
    at: float = 0.0


class Line:
    """Every waiting request, in both orders. Deterministic: ties by order of entry.

    Who waits for a worker's cache stands in that worker's `homes` too, while it is urgent; their
    seconds are the worker's `home_s`.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.by_key: OrderedDict[AttemptKey, Waiting] = OrderedDict()
        self.urgent: list[tuple[int, float, int, Waiting]] = []
        self.late: OrderedDict[AttemptKey, Waiting] = OrderedDict()
        self.work_s = 0.0  #: least seconds of all urgent ones
        self.home_s = 0.0  #: of those that wait for a cache, there
        self._expiries: list[tuple[float, int, Waiting]] = []
        self._ranks: dict[AttemptKey, tuple[int, float, int]] = {}
        self.homes: dict[int, list[tuple[int, float, int, Waiting]]] = {}
        self._entered = 0
        self._accounts: OrderedDict[str, Account] = OrderedDict()

    def __len__(self) -> int:
        return len(self.by_key)

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self.by_key

    def enter(self, waiting: Waiting, now: float, capacity: float) -> None:
        """`capacity`: workers that prefill, which is the seconds of service in a second."""
        self._entered += 1
        delay = self.charge(waiting, now, capacity)
        waiting.due = waiting.deadline - waiting.least_s + delay
        rank = (waiting.slo.priority, waiting.due, self._entered)
        self.by_key[waiting.key] = waiting
        self._ranks[waiting.key] = rank
        insort(self.urgent, (*rank, waiting))
        self.work_s += waiting.least_s
        self.settle(waiting, waiting.home, waiting.home_s)
        heapq.heappush(self._expiries, (waiting.expires, self._entered, waiting))

    def charge(self, waiting: Waiting, now: float, capacity: float) -> float:
        """By how much the tenant's debt puts this request off: the time that its share of the
        fleet takes to serve what it asked beyond `QUANTUM_S`. Zero for the only tenant."""
        account = self._accounts.get(waiting.place.tenant)
        if account is None:
            account = self._accounts[waiting.place.tenant] = Account(at=now)
            if len(self._accounts) > TENANTS_MAX:
                self._accounts.popitem(last=False)
        self._accounts.move_to_end(waiting.place.tenant)
        share = max(capacity, 1.0) / len(self._accounts)
        account.debt = max(account.debt - (now - account.at) * share, 0.0) + waiting.least_s
        account.at = now
        if len(self._accounts) == 1:
            return 0.0
        self._forget(now, share)
        return max(account.debt - QUANTUM_S, 0.0) / share

    def _forget(self, now: float, share: float) -> None:
        """Forgets the tenant that asked least recently, once it owes nothing."""
        tenant, account = next(iter(self._accounts.items()))
        if account.debt <= (now - account.at) * share:
            del self._accounts[tenant]

    def leave(self, key: AttemptKey) -> Waiting | None:
        waiting = self.by_key.pop(key, None)
        if waiting is None:
            return None
        if self.late.pop(key, None) is None:
            self._drop_urgent(waiting)
        del self._ranks[key]
        return waiting

    def _drop_urgent(self, waiting: Waiting) -> None:
        place = bisect_left(self.urgent, self._ranks[waiting.key])
        assert self.urgent[place][3] is waiting
        del self.urgent[place]
        self._leave_home(waiting)
        self.work_s = self.work_s - waiting.least_s if self.urgent else 0.0

    def settle(self, waiting: Waiting, worker: Worker | None, seconds: float) -> None:
        """An urgent request waits for this worker's cache from now on."""
        self._leave_home(waiting)
        waiting.home, waiting.home_s = worker, seconds
        if worker is not None:
            rank = (*self._ranks[waiting.key], waiting)
            insort(self.homes.setdefault(worker.slot, []), rank)
            self.home_s += seconds
            self._fleet.waits_at(worker, worker.home_s + seconds)

    def _leave_home(self, waiting: Waiting) -> None:
        worker, rank = waiting.home, self._ranks[waiting.key]
        queue = self.homes.get(worker.slot, []) if worker else []
        place = bisect_left(queue, rank)
        if worker is None or place == len(queue) or queue[place][3] is not waiting:
            return
        waiting.home = None
        del queue[place]
        self.home_s -= waiting.home_s
        self._fleet.waits_at(worker, worker.home_s - waiting.home_s if queue else 0.0)

    def unsettle(self, slot: int) -> list[Waiting]:
        """The worker is gone: who waited for it waits for none."""
        waiters = [waiting for *_, waiting in self.homes.pop(slot, [])]
        for waiting in waiters:
            waiting.home = None
            self.home_s -= waiting.home_s
        return waiters

    def demote(self, waiting: Waiting) -> None:
        """It cannot be served in time: others first."""
        self._drop_urgent(waiting)
        waiting.late = True
        self.late[waiting.key] = waiting

    def expired(self, now: float) -> Iterator[Waiting]:
        """Those whose time is over, taken out of the line."""
        while self._expiries and self._expiries[0][0] <= now:
            _, _, waiting = heapq.heappop(self._expiries)
            if self.by_key.get(waiting.key) is waiting:
                self.leave(waiting.key)
                yield waiting

    @property
    def next_expiry(self) -> float:
        """When the next one is given up."""
        while self._expiries:
            at, _, waiting = self._expiries[0]
            if self.by_key.get(waiting.key) is waiting:
                return at
            heapq.heappop(self._expiries)
        return inf
