"""One run: the real router, fed by workers in virtual time. Same input, same log, byte for byte.

Life of a request here:

1. It arrives: the router gets `PlacementRequested` with its lengths, block hashes and targets.
2. `AttemptPlaced` reaches the workers two hops later, through the gateway.
3. The prefill worker computes the prompt, the decode worker reserves blocks. The first token goes
   to the client, and `FirstTokenSent` to the router. (With the handoff `decode`, the client gets
   the first token from the decode worker, after the KV has moved.)
4. The KV moves while the prompt is computed; what is left of it, behind.
5. The sequence decodes on its decode worker. With its last token comes `AttemptEnded`.

A refusal is a miss. Workers report their blocks and steps every `REPORT_INTERVAL_S`.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf
from typing import Any

import msgspec

from ..protos.frames import (
    AttemptKey,
    AttemptOutcome,
    AttemptPlaced,
    AttemptRefused,
    DeliverFrame,
    PlaceAttempt,
    WorkerCard,
)
from ..router import Router, RouterConfig
from ..router import events as router_events
from ..router.first_token import FirstTokenPacer
from .attempt import SimulatedAttempt
from .errors import SimulationError
from .fleet import Faults, Fleet, Split
from .hardware import Hardware
from .metrics import SimulatedOutcome, Slo
from .trace import HASH_TOKENS, Trace, WorkloadRequest
from .worker import DEFAULT_MAX_TOKENS, HOP_S, SimulatedWorker

REPORT_INTERVAL_S = 0.5  #: seconds; a report is half of that old on average
#: why the gateway refuses what some worker cannot hold
CONTEXT_TOO_LONG = "context_length_exceeded"
TICK_S = 1e-3  #: between two ticks of the router, at least
SETTLE_S = 5.0  #: before the first arrival: the router has seen every worker join
SAME_TIME_S = 1e-9  #: Moments that are this close count as the same.
ROUTER_TERM = 1  #: There is one router in a run, the first.


class Moment(IntEnum):
    """What an entry of the simulation's clock is about. The values have no meaning.

    MESSAGE, FLOWS and TICKET occur in a run of `exact.py` only, whose class derives from `Simulation` and
    handles them. A ticket is one transfer of KV in `kv_transfer`, whose two ends exchange messages.
    """

    ARRIVAL = 0  #: of a request: the next turn of a session
    WORK = 1  #: a worker's step ends
    FIRST_TOKEN = 2  #: the router hears that a prompt is computed
    KV_ARRIVED = 3
    REPORT = 4  #: all workers report
    ROUTER_WAKE = 5
    LATE_REPORT = 6  #: a report that was held back
    KILL = 7
    NEXT_ATTEMPT = 8  #: a request whose workers gave up is placed again
    PLANNER = 9
    WORKER_JOINS = 10
    PLACED = 11  #: a placement reaches the workers
    MESSAGE = 12  #: from one end of a ticket to the other
    FLOWS = 13  #: a write over shared links ends
    TICKET = 14  #: the sending end of a ticket has something to do
    LOADED = 15  #: what the tiers hold of a prompt is in the pool


@dataclass(frozen=True, slots=True)
class Setting:
    """What runs: the fleet and how it is split, the router's configuration and the targets."""

    fleet: Fleet
    split: Split | tuple[Split, ...]  #: roles of the replicas; a tuple: for each pool of the fleet
    config: RouterConfig = field(default_factory=RouterConfig)
    slo: Slo = field(default_factory=Slo)
    #: which worker sends the first token to the client: prefill (as ours does), or decode
    handoff: str = "prefill"
    faults: Faults = field(default_factory=Faults)  #: what goes wrong; nothing by default
    #: share of the ITL target that a step with prefill and decode may take
    budget_share: float = 0.9
    plan_every_s: float = 5.0  #: between two calls of a planner
    flip_s: float = 1.0  #: a worker takes nothing for so long when its role changes
    start_s: float = 60.0  #: from the order of a replica to its first request


class Simulation:
    """One run of a setting: `run(requests)` returns a `SimulatedOutcome` for each request.

    A worker has a role, which a planner may change, and belongs to the pool of its first role. (The
    pools of `Fleet` are another thing: groups of equal hardware.)

    Times are seconds of the simulated clock, which is 0 when requests begin to come. Equal
    settings, traces, requests and seeds give equal runs. `log` gets a line for each placement and
    end.
    `on_event(simulation, event)` hears each event before the router does.
    `planner(simulation, now)` is called every `plan_every_s`; it reads `router` and `workers`, and
    may `flip`, `add` and `remove` workers.
    """

    def __init__(
        self,
        setting: Setting,
        trace: Trace,
        seed: int = 0,
        log: Callable[[str], Any] | None = None,
        planner: Callable[[Simulation, float], Any] | None = None,
        on_event: Callable[[Simulation, Any], Any] | None = None,
    ) -> None:
        self.setting = setting
        self.log = log
        self.on_event = on_event
        self.planner = planner
        self.slo = setting.slo
        self.faults = setting.faults
        self.trace = trace
        self.rng = random.Random(f"run/{seed}")
        self.now = -SETTLE_S
        self.clock: list[tuple[float, int, Moment, Any]] = []  #: a heap of what is to come
        self.entries = 0  #: that the clock ever had: equal times go in order of entry
        self.router = Router(setting.config, term=ROUTER_TERM)
        self.router_wake_at = inf  #: when the router is woken next
        self.workers: dict[str, SimulatedWorker] = {}  #: by name, those included that are gone
        self.cards: dict[str, WorkerCard] = {}  #: what the router is told of them, by name
        #: tokens that every worker's KV pool holds: longer requests are refused, as by a gateway
        self.context_limit_tokens: float = inf
        self.starting: dict[str, str] = {}  #: replicas that were ordered and are not up -> pool
        self.lifetimes: dict[str, list[float]] = {}  #: worker -> [ordered at, gone at]
        self.attempts: dict[AttemptKey, SimulatedAttempt] = {}  #: that have not ended
        #: By the number of a request that has ended: its last attempt.
        self.last_attempts: dict[int, SimulatedAttempt] = {}
        self.open_requests = 0  #: that have arrived, or will for sure, and have not ended
        #: Later turns of sessions that someone else offers, here or elsewhere; None: they are offered
        #: here as they become due.
        self.later_turns: list[WorkloadRequest] | None = None
        self.misses = 0  #: requests that have missed a target so far
        self.decode_sends_first_token = setting.handoff == "decode"
        #: the gateway's, which holds first tokens back; None: they go out as they come
        self.pacer: FirstTokenPacer | None = None
        if setting.config.pace_first_token and not self.decode_sends_first_token:
            self.pacer = FirstTokenPacer()
        self.handlers = self._make_handlers()
        self._start_fleet()

    def _make_handlers(self) -> dict[Moment, Callable[[Any], None]]:
        return {
            Moment.ARRIVAL: self._arrive,
            Moment.WORK: self._work,
            Moment.FIRST_TOKEN: self._first_token,
            Moment.KV_ARRIVED: self._kv_arrived,
            Moment.REPORT: self._report,
            Moment.ROUTER_WAKE: self._wake_router,
            Moment.LATE_REPORT: self._late_report,
            Moment.KILL: self._kill,
            Moment.NEXT_ATTEMPT: self._attempt_again,
            Moment.PLANNER: self._call_planner,
            Moment.WORKER_JOINS: self._worker_joins,
            Moment.PLACED: self._begin,
            Moment.LOADED: self._add_prompt,
        }

    def _start_fleet(self) -> None:
        for role, hardware in self.setting.fleet.workers(self.setting.split):
            name = self._make_worker(role, hardware)
            self.lifetimes[name] = [0.0, inf]
            self._tell_router(
                router_events.WorkerJoined(self.cards[name], term=ROUTER_TERM, cached_hashes=[])
            )
        names = list(self.workers)
        self._check_faults(len(names))
        for index, slowness in self.faults.slow_workers:
            self.workers[names[index]].slowness = slowness
        for index, killed_at in self.faults.killed_workers:
            self._schedule(killed_at, Moment.KILL, names[index])
        self._tell_router(router_events.GatewayJoined("gateway"))
        self.now = 0.0
        self._tell_router(router_events.RouterTick())

    def _check_faults(self, replicas: int) -> None:
        """Raises SimulationError if a fault names a worker that the fleet does not have."""
        for index, _ in (*self.faults.slow_workers, *self.faults.killed_workers):
            if index >= replicas:
                raise SimulationError(f"faults: no worker {index}, the fleet has {replicas}")

    def _make_worker(self, role: str, hardware: Hardware) -> str:
        index = len(self.workers)
        name = f"{role}/{index}"
        step_budget_s = hardware.itl_budget_s or self.slo.itl_s * self.setting.budget_share
        worker = self._new_worker(name, role, hardware, step_budget_s)
        self.workers[name] = worker
        self.context_limit_tokens = min(self.context_limit_tokens, worker.capacity_tokens)
        self.cards[name] = WorkerCard(
            id=name,
            pool=role,
            role=role,
            address=name,
            replica=name,
            pid=index,
            blocks=hardware.kv_tokens // HASH_TOKENS,
            block_tokens=HASH_TOKENS,
            gpu=hardware.gpu,
            tensor_parallel=hardware.tp,
            cost=hardware.cost if hardware.cost_on_card else None,
            chunk_tokens=hardware.chunk_tokens,
            max_running=hardware.max_running,
            step_ms=step_budget_s * 1e3 if step_budget_s < inf else 0.0,
            load_token_s=hardware.tiers.memory_token_s if hardware.tiers else 0.0,
        )
        return name

    def _new_worker(
        self, name: str, role: str, hardware: Hardware, step_budget_s: float
    ) -> SimulatedWorker:
        return SimulatedWorker(
            name,
            role,
            hardware,
            self.trace,
            step_budget_s=step_budget_s,
            itl_target_s=self.slo.itl_s,
        )

    # ---- the clock -------------------------------------------------------------------------------

    def _schedule(self, when: float, moment: Moment, subject: Any) -> None:
        self.entries += 1
        heapq.heappush(self.clock, (when, self.entries, moment, subject))

    def run(
        self, requests: list[WorkloadRequest], give_up: float = inf
    ) -> list[SimulatedOutcome] | None:
        """Returns the outcome of each request, in the order of their numbers, when all have ended.

        Returns None as soon as more than `give_up` of them have missed their targets. `requests`
        are in order of arrival; further turns of their sessions arrive by themselves. A simulation
        runs once.
        """
        self.begin()
        handlers = self.handlers
        clock = self.clock
        arrived = 0
        while arrived < len(requests) or self.open_requests:
            if self.misses > give_up:
                return None
            if arrived < len(requests) and (
                not clock or requests[arrived].arrival_s <= clock[0][0]
            ):
                request = requests[arrived]
                arrived += 1
                self.now = request.arrival_s
                self.open_requests += 1
                self._arrive(request)
                continue
            self.now, _, moment, subject = heapq.heappop(clock)
            handlers[moment](subject)
        return self.outcomes()

    def begin(self) -> None:
        """Start the clock of a run whose requests are offered one by one (`offer`, `advance`)."""
        self._schedule(REPORT_INTERVAL_S, Moment.REPORT, None)
        if self.planner is not None:
            self._schedule(self.setting.plan_every_s, Moment.PLANNER, None)

    def offer(self, request: WorkloadRequest) -> None:
        """Let a request arrive at its time, which has not passed yet."""
        self.open_requests += 1
        self._schedule(request.arrival_s, Moment.ARRIVAL, request)

    def advance(self, until: float) -> None:
        """Do everything that happens before the moment `until`."""
        clock = self.clock
        handlers = self.handlers
        while clock and clock[0][0] < until:
            self.now, _, moment, subject = heapq.heappop(clock)
            handlers[moment](subject)
        self.now = until

    def outcomes(self) -> list[SimulatedOutcome]:
        """Return the outcomes of all requests that have ended, in the order of their numbers."""
        return [self._outcome(self.last_attempts[index]) for index in sorted(self.last_attempts)]

    # ---- router ----------------------------------------------------------------------------------

    def _tell_router(self, event: router_events.RouterEvent) -> None:
        if self.on_event is not None:
            self.on_event(self, event)
        for action in self.router.handle(event, self.now):
            if type(action) is DeliverFrame:
                frame = action.frame
                if type(frame) is AttemptPlaced:
                    self._placed(frame)
                elif type(frame) is AttemptRefused:
                    self._refused(frame)
            elif type(action) is router_events.DisconnectWorker:
                self._rejoin(action.worker)
        # An earlier wake replaces the one that is set; `_wake_router` ignores that one. After a
        # tick the next is `TICK_S` away at least, as a router in doubt would stop the clock.
        wake_at = self.router.next_wake
        if wake_at is not None and wake_at < self.router_wake_at - SAME_TIME_S:
            is_tick = type(event) is router_events.RouterTick
            earliest = self.now + TICK_S if is_tick else self.now
            self.router_wake_at = max(wake_at, earliest)
            self._schedule(self.router_wake_at, Moment.ROUTER_WAKE, self.router_wake_at)

    def _wake_router(self, when: float) -> None:
        if when == self.router_wake_at:
            self.router_wake_at = inf
            self._tell_router(router_events.RouterTick())

    def _arrive(self, request: WorkloadRequest) -> None:
        """Does the gateway's part: refuses what no worker has room for, else asks for workers."""
        attempt = SimulatedAttempt(request, (str(request.index), 0), self.now)
        if request.prompt_tokens + request.output_tokens > self.context_limit_tokens:
            attempt.refusal = CONTEXT_TOO_LONG
            self._end(attempt)
        else:
            self._place(attempt, [])

    def _attempt_again(self, subject: tuple[SimulatedAttempt, list[str]]) -> None:
        attempt, lost_workers = subject
        self._place(attempt, lost_workers)

    def _place(self, attempt: SimulatedAttempt, lost_workers: list[str]) -> None:
        """Asks the router for workers."""
        request = attempt.request
        self.attempts[attempt.key] = attempt
        attempt.ttft_target_s = self.slo.ttft_target_s(request.prompt_tokens)
        if self.faults.misprediction_share:
            attempt.prefill_factor = 1 + self.faults.misprediction_share * self.rng.uniform(-1, 1)
        place = PlaceAttempt(
            attempt.key,
            attempt.context_tokens,
            request.output_limit or DEFAULT_MAX_TOKENS,
            request.prompt_hashes,
            lost_workers=lost_workers,
            tenant=request.tenant,
            ttft_s=attempt.ttft_target_s,
            itl_s=self.slo.itl_s,
            waited_s=self.now - attempt.arrived_at,
        )
        if self.log:
            self.log(f"{self.now:.6f} asked {attempt.key[0]} {attempt.context_tokens}")
        self._tell_router(router_events.PlacementRequested("gateway", place))

    def _placed(self, placed: AttemptPlaced) -> None:
        attempt = self.attempts.get(placed.attempt_key)
        if attempt is None or attempt.decode_worker:
            return  # it is over, or placed already: the router repeats an answer
        attempt.predicted_ttft_s = placed.predicted_ttft_ms / 1e3
        if placed.deadline_s:
            attempt.deadline_s = self.now + placed.deadline_s
        attempt.background = placed.background
        if self.log:
            workers = f"{placed.prefill_worker} {placed.decode_worker}"
            self.log(f"{self.now:.6f} placed {attempt.key[0]} {workers}")
        attempt.decode_worker = placed.decode_worker
        attempt.prefill_worker = placed.prefill_worker or placed.decode_worker
        attempt.is_remote = attempt.prefill_worker != attempt.decode_worker
        attempt.prefill_sends_token = not (self.decode_sends_first_token and attempt.is_remote)
        begins_at = self.now + 2 * HOP_S  # router to gateway, gateway to worker
        if placed.prefix_holder is not None:
            holder = self.workers[placed.prefix_holder]
            begins_at = self._fetch_prefix(holder, attempt, begins_at)
        self._schedule(begins_at, Moment.PLACED, attempt)

    def _begin(self, attempt: SimulatedAttempt) -> None:
        """The placement has reached the workers, and so has a prefix that was fetched."""
        if self.attempts.get(attempt.key) is not attempt:
            return  # a worker died meanwhile
        prefill_worker, decode_worker = self._workers_of(attempt)
        if attempt.is_remote:
            decode_worker.set_time(self.now)
            decode_worker.reserve(attempt)
            self._look_at_reservations(decode_worker)
        prefill_worker.set_time(self.now)
        loaded_at = prefill_worker.load_prefix(attempt)
        if loaded_at > self.now:
            self._schedule(loaded_at, Moment.LOADED, attempt)
        else:
            self._add_prompt(attempt)

    def _add_prompt(self, attempt: SimulatedAttempt) -> None:
        """What the tiers hold of the prompt is in the pool, and so is a prefix that was fetched."""
        if self.attempts.get(attempt.key) is not attempt:
            return  # a worker died meanwhile
        prefill_worker, _ = self._workers_of(attempt)
        prefill_worker.set_time(self.now)
        prefill_worker.add_prompt(attempt)
        self._schedule_worker(prefill_worker)

    def _workers_of(self, attempt: SimulatedAttempt) -> tuple[SimulatedWorker, SimulatedWorker]:
        """Returns (prefill worker, decode worker) of an attempt that was placed."""
        return self.workers[attempt.prefill_worker], self.workers[attempt.decode_worker]

    def _refused(self, refused: AttemptRefused) -> None:
        attempt = self.attempts.pop(refused.attempt_key, None)
        if attempt is not None:
            attempt.refusal = refused.reason
            self._end(attempt)

    # ---- workers ---------------------------------------------------------------------------------

    def _schedule_worker(self, worker: SimulatedWorker) -> None:
        """Sets the clock for the next event of the worker."""
        event_at = worker.next_event_at
        if event_at != worker.event_at:
            worker.event_version += 1  # entries of the clock with an older one are ignored
            worker.event_at = event_at
            if event_at < inf:
                self._schedule(event_at, Moment.WORK, (worker, worker.event_version))

    def _work(self, subject: tuple[SimulatedWorker, int]) -> None:
        worker, version = subject
        if version != worker.event_version or not worker.is_alive:
            return
        worker.event_at = inf
        ended, filled = worker.settle(self.now)
        for attempt in filled:
            self._filled(worker, attempt)
        self._look_at_reservations(worker)
        self._schedule_worker(worker)
        for attempt in ended:
            self._ended(attempt)

    def _filled(self, worker: SimulatedWorker, attempt: SimulatedAttempt) -> None:
        """The prompt is computed: there is a first token, and the KV goes on its way.

        The router hears of it in any case, also when the decode worker is to send the first token
        to the client: `FirstTokenSent` tells the router that the prefill is over.
        """
        token_at = self.now + HOP_S
        self._schedule(token_at, Moment.FIRST_TOKEN, attempt.key)
        sent_tokens = attempt.answer_tokens
        if attempt.prefill_sends_token:
            sent_tokens += 1
            is_late = token_at - attempt.arrived_at > attempt.ttft_target_s
            if is_late and not attempt.is_resumed:
                self.misses += 1
                attempt.counted_as_miss = True
        if sent_tokens >= attempt.request.output_tokens:
            self._answer_filled(worker, attempt)
        else:
            if not attempt.is_resumed:
                self._hold_first_token(attempt)
            if attempt.is_remote:
                self._start_transfer(worker, attempt)

    def _hold_first_token(self, attempt: SimulatedAttempt) -> None:
        """Does the gateway's part: the first token may wait for the second (`first_token.py`).

        The worker that decodes says when the second one comes, and lets the first one out by then.
        """
        if self.pacer is not None:
            attempt.first_token_hold = self.pacer.hold(
                attempt.first_token_at,
                deadline=attempt.arrived_at + attempt.ttft_target_s,
                itl_s=self.slo.itl_s,
                prompt_tokens=attempt.request.prompt_tokens,
                handed_over=attempt.is_remote,
            )

    def _answer_filled(self, worker: SimulatedWorker, attempt: SimulatedAttempt) -> None:
        """An answer of one token: nothing has to move."""
        if attempt.is_remote:
            for other in self._workers_of(attempt):
                other.set_time(self.now)
                other.release(attempt)
                self._schedule_worker(other)
        self._ended(attempt)

    def _look_at_reservations(self, worker: SimulatedWorker) -> None:
        """Begins the transfers whose prompt was computed before there were blocks for it."""
        reserved = worker.reserved
        worker.reserved = []
        for attempt in reserved:
            if attempt.filled_at:
                self._start_transfer(self.workers[attempt.prefill_worker], attempt)
        self._schedule_worker(worker)

    def _start_transfer(self, source: SimulatedWorker, attempt: SimulatedAttempt) -> None:
        """Finds when the KV has arrived, if the decode worker has blocks for it.

        Each link carries one transfer at a time. It begins with the prefill at the earliest, and
        `exposed_share` of it is left when the prefill ends.
        """
        if not attempt.reserved_at:
            return
        sink = self.workers[attempt.decode_worker]
        costs = (source.cost, sink.cost)  # the slower of the two ends counts
        seconds = attempt.moved_tokens * max(cost.transfer_token for cost in costs)
        could_begin_at = max(attempt.began_at, attempt.reserved_at)
        begins_at = max(could_begin_at, source.link_out_free_at, sink.link_in_free_at)
        ends_at = begins_at + seconds
        source.link_out_free_at = ends_at
        sink.link_in_free_at = ends_at
        exposed_s = max(cost.exposed_share for cost in costs) * seconds
        arrives_at = max(self.now + exposed_s, ends_at) + max(cost.transfer_base for cost in costs)
        self._schedule(arrives_at, Moment.KV_ARRIVED, attempt)

    def _fetch_prefix(
        self, source: SimulatedWorker, attempt: SimulatedAttempt, begins_at: float
    ) -> float:
        """Moves a prefix that another worker holds over the links; returns when it is there."""
        request = attempt.request
        sink, _ = self._workers_of(attempt)
        held_tokens = min(source.held_tokens(request), attempt.context_tokens - 1)
        moved_tokens = held_tokens - sink.held_tokens(request)
        if moved_tokens <= 0 or not source.is_alive:
            return begins_at
        begins_at = source.serve_prefix(attempt, begins_at)
        # Without room in its pool for all of it, the source has less to send.
        held_tokens = min(source.cached_tokens(request), held_tokens)
        moved_tokens = held_tokens - sink.held_tokens(request)
        if moved_tokens <= 0:
            return begins_at
        attempt.fetched_tokens = held_tokens
        costs = (source.cost, sink.cost)
        starts_at = max(begins_at, source.link_out_free_at, sink.link_in_free_at)
        ends_at = starts_at + moved_tokens * max(cost.transfer_token for cost in costs)
        source.link_out_free_at = ends_at
        sink.link_in_free_at = ends_at
        return ends_at + max(cost.transfer_base for cost in costs)

    def _first_token(self, key: AttemptKey) -> None:
        self._tell_router(router_events.FirstTokenSent(key))

    def _kv_arrived(self, attempt: SimulatedAttempt) -> None:
        source, sink = self._workers_of(attempt)
        source.set_time(self.now)
        source.release(attempt)
        self._schedule_worker(source)
        if sink.is_alive and attempt.key in self.attempts:
            self._commit(sink, attempt)

    def _commit(self, worker: SimulatedWorker, attempt: SimulatedAttempt) -> None:
        attempt.has_kv = True
        worker.set_time(self.now)
        worker.commit(attempt, has_first_token=not self.decode_sends_first_token)
        self._schedule_worker(worker)

    def _ended(self, attempt: SimulatedAttempt) -> None:
        """The last token is out."""
        attempt.ended_at = self.now + HOP_S
        del self.attempts[attempt.key]
        if self.log:
            times = f"{attempt.first_token_at:.6f} {attempt.late_gaps}"
            self.log(f"{self.now:.6f} ended {attempt.key[0]} {times}")
        ttft_ms = (attempt.first_token_at - attempt.arrived_at) * 1e3
        output_tokens = attempt.request.output_tokens
        outcome = AttemptOutcome(attempt.key, output_tokens, ttft_ms, reason="stop")
        self._tell_router(router_events.AttemptEnded(attempt.key, outcome))
        self._end(attempt)

    def _end(self, attempt: SimulatedAttempt) -> None:
        """The request is over: it was answered or refused."""
        self.open_requests -= 1
        request = attempt.request
        self.last_attempts[request.index] = attempt
        if not attempt.counted_as_miss and not self.slo.is_met(attempt):
            self.misses += 1
        next_turn = request.next_turn
        if next_turn is not None:
            next_turn.arrival_s = max(self.now, attempt.ended_at) + next_turn.think_s
            if self.later_turns is None:
                self.offer(next_turn)
            else:
                self.later_turns.append(next_turn)

    # ---- reports and faults ----------------------------------------------------------------------

    def _report(self, _: None) -> None:
        self._schedule(self.now + REPORT_INTERVAL_S, Moment.REPORT, None)
        for worker in self.workers.values():
            if not worker.is_alive or not (worker.has_changed or worker.running):
                continue
            event = router_events.WorkerReported(worker.name, worker.report(self.now))
            if self.faults.report_delay_s:
                heard_at = self.now + self.faults.report_delay_s
                self._schedule(heard_at, Moment.LATE_REPORT, event)
            else:
                self._tell_router(event)

    def _late_report(self, event: router_events.WorkerReported) -> None:
        if self.workers[event.worker].is_alive:
            self._tell_router(event)

    def _rejoin(self, name: str) -> None:
        """A whole snapshot: the router asked for it, or the worker has another role."""
        worker = self.workers[name]
        worker.restart_reports()
        self._tell_router(
            router_events.WorkerJoined(
                self.cards[name],
                term=ROUTER_TERM,
                cached_hashes=worker.pool.hashes(),
                demoted_hashes=worker.pool.demoted_hashes(),
            )
        )

    def _kill(self, name: str) -> None:
        """Ends a worker; its requests are placed again, and what was generated is prompt now.

        A worker that is gone already dies no second time.
        """
        worker = self.workers[name]
        if not worker.is_alive:
            return
        worker.catch_up(self.now)
        worker.is_alive = False
        self.lifetimes[name][1] = self.now
        self._tell_router(router_events.WorkerLost(name))
        kv_lost = [
            attempt
            for attempt in self.attempts.values()
            if attempt.prefill_worker == name and attempt.filled_at and not attempt.has_kv
        ]
        for attempt in self._attempts_at(worker):
            self._move_elsewhere(attempt, worker, lost_workers=[name])
        for attempt in kv_lost:
            if attempt.key in self.attempts:
                self._move_elsewhere(attempt, worker, lost_workers=[name])

    def _attempts_at(self, worker: SimulatedWorker) -> list[SimulatedAttempt]:
        """Returns the attempts that the worker computes or runs.

        Those whose prompt it has computed for another worker are not among them: their KV is under
        way, and only `_kill` keeps it from arriving.
        """
        return [
            attempt
            for attempt in self.attempts.values()
            if attempt.decode_worker == worker.name
            or (attempt.prefill_worker == worker.name and not attempt.filled_at)
        ]

    def _move_elsewhere(
        self, attempt: SimulatedAttempt, worker: SimulatedWorker, lost_workers: list[str]
    ) -> None:
        """Ends the attempt at both workers; a new one goes on behind the answer so far."""
        # The client has what earlier attempts and this worker have generated, and the first token
        # of this attempt's prefill, wherever that was computed.
        answer_tokens = max(attempt.answer_tokens, worker.answer_tokens(attempt))
        if attempt.prefill_sends_token and attempt.filled_at:
            answer_tokens = max(answer_tokens, attempt.answer_tokens + 1)
        for holder in self._workers_of(attempt):
            holder.catch_up(self.now)
        self.workers[attempt.decode_worker].stop_running(attempt)
        for holder in self._workers_of(attempt):
            holder.release(attempt)
            self._schedule_worker(holder)
        del self.attempts[attempt.key]
        self._tell_router(router_events.AttemptEnded(attempt.key))
        request_id, number = attempt.key
        again = SimulatedAttempt(attempt.request, (request_id, number + 1), attempt.arrived_at)
        again.first_token_at = attempt.first_token_at
        if attempt.first_token_hold is not None:  # nobody knows when the second one comes
            let_out_at = min(attempt.first_token_hold.release_at, self.now + HOP_S)
            again.first_token_at = max(let_out_at, attempt.first_token_at)
        again.last_token_at = max(attempt.last_token_at, again.first_token_at)
        again.first_gap_s = attempt.first_gap_s
        again.late_gaps = attempt.late_gaps
        again.counted_as_miss = attempt.counted_as_miss
        again.is_resumed = attempt.first_token_at > 0
        # At least one token is left to generate, else the new attempt would have no end.
        again.answer_tokens = min(answer_tokens, attempt.request.output_tokens - 1)
        self._schedule(self.now + HOP_S, Moment.NEXT_ATTEMPT, (again, lost_workers))

    # ---- a planner's orders ----------------------------------------------------------------------

    def _call_planner(self, _: None) -> None:
        assert self.planner is not None
        self._schedule(self.now + self.setting.plan_every_s, Moment.PLANNER, None)
        self.planner(self, self.now)

    def flip(self, name: str, role: str) -> None:
        """Gives a worker another role (prefill, decode or mixed), which it has `flip_s` later.

        It hands over what it has at once.
        Prompts and answers so far are placed again, its cache stays. Until then its card says `""`.
        """
        self._hand_over(self.workers[name])
        self._schedule(self.now + self.setting.flip_s, Moment.WORKER_JOINS, (name, role))

    def add(self, role: str, pool: int = 0) -> str:
        """Orders a replica with the hardware of the fleet's pool number `pool`; returns its name.

        The replica joins `start_s` later.
        """
        name = self._make_worker(role, self.setting.fleet.pools[pool][0])
        self.workers[name].is_alive = False
        self.starting[name] = role
        self.lifetimes[name] = [self.now, inf]
        self._schedule(self.now + self.setting.start_s, Moment.WORKER_JOINS, (name, role))
        return name

    def remove(self, pool: str) -> str | None:
        """Takes away the replica of the pool (a role) that was ordered last; returns its name.

        A replica that has not joined yet never does; another one hands over its work first.
        Returns None if the pool has no replica.
        """
        names = [
            name
            for name, card in self.cards.items()
            if card.pool == pool and self.lifetimes[name][1] == inf
        ]
        if not names:
            return None
        name = names[-1]
        self.lifetimes[name][1] = self.now
        if self.starting.pop(name, None) is None:
            self._hand_over(self.workers[name])
            self.workers[name].is_alive = False
            self._tell_router(router_events.WorkerLost(name))
        return name

    def _worker_joins(self, subject: tuple[str, str]) -> None:
        name, role = subject
        if self.lifetimes[name][1] < inf:
            return  # removed meanwhile
        self.starting.pop(name, None)
        worker = self.workers[name]
        worker.role = role
        worker.is_alive = True
        worker.catch_up(self.now)
        self.cards[name] = msgspec.structs.replace(self.cards[name], role=role)
        self._rejoin(name)

    def _hand_over(self, worker: SimulatedWorker) -> None:
        """Makes a worker take nothing new and moves what it has; the router still knows it."""
        self.cards[worker.name] = msgspec.structs.replace(self.cards[worker.name], role="")
        worker.role = ""
        self._rejoin(worker.name)
        worker.catch_up(self.now)
        for attempt in self._attempts_at(worker):
            self._move_elsewhere(attempt, worker, lost_workers=[])

    @property
    def gpu_seconds(self) -> float:
        """GPU seconds of all replicas from their order to their end, or to now."""
        gpu_seconds = 0.0
        for name, (ordered_at, gone_at) in self.lifetimes.items():
            gpu_seconds += self.workers[name].gpus * (min(gone_at, self.now) - ordered_at)
        return gpu_seconds

    # ---- results ---------------------------------------------------------------------------------

    def _outcome(self, attempt: SimulatedAttempt) -> SimulatedOutcome:
        request = attempt.request
        is_served = not attempt.refusal
        gaps = request.output_tokens - 1
        ttft_s = inf
        tpot_s = 0.0
        if is_served:
            ttft_s = attempt.first_token_at - attempt.arrived_at
        if is_served and gaps:
            tpot_s = (attempt.ended_at - attempt.first_token_at) / gaps
        return SimulatedOutcome(
            arrival_s=request.arrival_s,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            tenant=request.tenant,
            refusal_reason=attempt.refusal,
            ttft_s=ttft_s,
            ttft_target_s=attempt.ttft_target_s,
            tpot_s=tpot_s,
            first_gap_s=attempt.first_gap_s,
            late_gaps=attempt.late_gaps,
            cached_tokens=attempt.hit_tokens,
            moved_tokens=attempt.moved_tokens,
            targets_met=self.slo.is_met(attempt),
            predicted_ttft_s=attempt.predicted_ttft_s,
        )
