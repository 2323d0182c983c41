"""One run: the real router, fed by workers in virtual time. Same input, same log, byte for byte.

Life of a request here: `Asked` at its arrival; `Placed` reaches the workers a hop later through the
gateway; prompt computed -> first token -> `FirstToken` to the router; KV moves while the prompt is
computed, what is left of it behind; decode joins at the next step; last token -> `Ended`. A refusal
is a miss. Workers report block events and steps every `REPORT_S`.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

import msgspec

from ..protos.frames import (
    AttemptOutcome,
    AttemptPlaced,
    AttemptRefused,
    DeliverFrame,
    PlaceAttempt,
    WorkerCard,
    WorkerReport,
)
from ..router import Router, RouterConfig
from ..router import events as e
from .fleet import Faults, Fleet, Split
from .hardware import Hardware
from .metrics import Outcome, Slo
from .trace import HASH_TOKENS, Request, Trace, total
from .worker import Job, Worker

HOP_S = 5e-4  #: one message between gateway, router and worker
REPORT_S = 0.5
MAX_TOKENS = 4096  #: asked for by who says nothing: nobody knows an answer's length in advance
TICK_S = 1e-3  #: between two ticks of the router, at least
SETTLE_S = 5.0  #: before the first arrival: the router has seen every worker join
ARRIVE, WORK, FIRST, READY, REPORT, WAKE, HEAR, KILL, AGAIN, PLAN, ENTER = range(11)


@dataclass(frozen=True, slots=True)
class Setting:
    """What runs: fleet, split, router and targets. `handoff`: who sends the first token."""

    fleet: Fleet
    split: Split | tuple[Split, ...]
    config: RouterConfig = field(default_factory=RouterConfig)
    slo: Slo = field(default_factory=Slo)
    handoff: str = "prefill"  #: prefill | decode
    faults: Faults = field(default_factory=Faults)
    budget_share: float = 0.9  #: of the ITL target: how long a step with prefill in it may take
    plan_every_s: float = 5.0  #: between two calls of a planner
    flip_s: float = 1.0  #: a worker takes nothing for so long when its role changes
    start_s: float = 60.0  #: from the order of a replica to its first request


class Simulation:
    """`run(requests)` -> one `Outcome` for each, in their order.

    `told(simulation, event)` hears each event before the router does.
    `planner(simulation, now)` is called every `plan_every_s`; it reads `router` and `workers`, and
    may `flip`, `add` and `remove`.
    """

    def __init__(
        self,
        setting: Setting,
        trace: Trace,
        seed: int = 0,
        log: Callable[[str], Any] | None = None,
        planner: Callable[[Simulation, float], Any] | None = None,
        told: Callable[[Simulation, Any], Any] | None = None,
    ) -> None:
        self.setting, self.log, self.told = setting, log, told
        self.slo, self.faults = setting.slo, setting.faults
        self.rng = random.Random(f"run/{seed}")
        self.now = -SETTLE_S
        self.heap: list[tuple[float, int, int, Any]] = []
        self.order = 0
        self.wake = inf
        self.router = Router(setting.config, term=1)
        self.workers: dict[str, Worker] = {}
        self.cards: dict[str, WorkerCard] = {}
        self.jobs: dict[tuple[str, int], Job] = {}
        self.open = 0  #: requests that have arrived, or will for sure, and not ended
        self.misses, self.give_up = 0, inf
        self.done: list[Job | None] = []
        self.unit, self.planner = trace.block_tokens, planner
        self.starting: dict[str, str] = {}  #: replicas that were ordered and are not up -> pool
        self.up: dict[str, list[float]] = {}  #: worker -> [ordered at, gone at], both may be past
        self.late_roles = setting.handoff == "decode"
        self.acts: tuple[Callable[[Any], None], ...] = (
            *(self._arrive, self._work, self._first, self._ready, self._report),
            *(self._wake, self._hear, self._kill, self._again, self._plan, self._enter),
        )
        self._fleet()

    def _fleet(self) -> None:
        for role, hardware in self.setting.fleet.workers(self.setting.split):
            name = self._make(role, hardware)
            self.up[name] = [0.0, inf]
            self._tell(e.WorkerJoined(self.cards[name], 1, []))
        names = list(self.workers)
        for index, times in self.faults.slow:
            self.workers[names[index]].slow = times
        for index, at in self.faults.kill:
            self._at(at, KILL, names[index])
        self._tell(e.GatewayJoined("gateway"))
        self.now = 0.0
        self._tell(e.RouterTick())

    def _make(self, role: str, hardware: Hardware) -> str:
        index = len(self.workers)
        name = f"{role}/{index}"
        budget = hardware.budget_s or self.slo.itl_s * self.setting.budget_share
        worker = self._worker(name, role, hardware, self.unit, budget)
        worker.itl_s = self.slo.itl_s
        self.workers[name] = worker
        self.cards[name] = WorkerCard(
            name,
            role,
            role,
            name,
            name,
            index,
            blocks=hardware.kv_tokens // HASH_TOKENS,
            block_tokens=HASH_TOKENS,
            gpu=hardware.gpu,
            tensor_parallel=hardware.tp,
            cost=hardware.cost if hardware.known else None,
            chunk_tokens=hardware.chunk_tokens,
            max_running=hardware.max_running,
            step_ms=budget * 1e3 if budget < inf else 0.0,
        )
        return name

    def _worker(
        self, name: str, role: str, hardware: Hardware, unit: int, budget_s: float
    ) -> Worker:
        worker = Worker(name, role, hardware.cost, hardware.kv_tokens, unit, budget_s)
        worker.chunk_tokens = hardware.chunk_tokens
        worker.max_running = hardware.max_running
        worker.planned = hardware.planned
        return worker

    # ---- the clock -------------------------------------------------------------------------------

    def _at(self, when: float, kind: int, what: Any) -> None:
        self.order += 1
        heapq.heappush(self.heap, (when, self.order, kind, what))

    def run(self, requests: list[Request], give_up: float = inf) -> list[Outcome] | None:
        """`give_up`: misses after which nothing but a failure can come of it (None then)."""
        self.give_up = give_up
        self.done = [None] * total(requests)
        heap, count, index = self.heap, len(requests), 0
        self._at(REPORT_S, REPORT, None)
        if self.planner is not None:
            self._at(self.setting.plan_every_s, PLAN, None)
        acts = self.acts
        self.open = 0
        while index < count or self.open:
            if self.misses > give_up:
                return None
            if index < count and (not heap or requests[index].at <= heap[0][0]):
                request = requests[index]
                index += 1
                self.now = request.at
                self.open += 1
                self._arrive(request)
                continue
            self.now, _, kind, what = heapq.heappop(heap)
            acts[kind](what)
        return [self._outcome(request, job) for request, job in self._pairs(requests)]

    def _pairs(self, requests: list[Request]) -> list[tuple[Request, Job]]:
        return [(job.request, job) for job in self.done if job is not None]

    # ---- router ----------------------------------------------------------------------------------

    def _tell(self, event: Any) -> None:
        if self.told is not None:
            self.told(self, event)
        for action in self.router.handle(event, self.now):
            if type(action) is DeliverFrame:
                frame = action.frame
                if type(frame) is AttemptPlaced:
                    self._placed(frame)
                elif type(frame) is AttemptRefused:
                    self._refused(frame)
            elif type(action) is e.DisconnectWorker:
                self._rejoin(action.worker)
        wake = self.router.next_wake
        if wake is not None and wake < self.wake - 1e-9:
            least = self.now + TICK_S if type(event) is e.RouterTick else self.now
            self.wake = wake if wake > least else least
            self._at(self.wake, WAKE, self.wake)

    def _wake(self, when: float) -> None:
        if when == self.wake:
            self.wake = inf
            self._tell(e.RouterTick())

    def _arrive(self, request: Request) -> None:
        self._ask(Job(request, (str(request.index), 0), self.now), [])

    def _again(self, what: tuple[Job, list[str]]) -> None:
        self._ask(*what)

    def _ask(self, job: Job, lost: list[str]) -> None:
        request = job.request
        self.jobs[job.key] = job
        job.target = self.slo.ttft(request.prompt)
        if self.faults.misprediction:
            job.work = 1 + self.faults.misprediction * self.rng.uniform(-1, 1)
        place = PlaceAttempt(
            job.key,
            job.context,
            request.most or MAX_TOKENS,
            request.hashes,
            lost_workers=lost,
            tenant=request.tenant,
            ttft_s=job.target,
            itl_s=self.slo.itl_s,
            waited_s=self.now - job.arrived,
        )
        if self.log:
            self.log(f"{self.now:.6f} asked {job.key[0]} {job.context}")
        self._tell(e.PlacementRequested("gateway", place))

    def _placed(self, placed: AttemptPlaced) -> None:
        job = self.jobs.get(placed.attempt_key)
        if job is None or job.decode is not None:
            return
        job.decode = self.workers[placed.decode_worker]
        job.predicted = placed.predicted_ttft_ms / 1e3
        if placed.deadline_s:
            job.deadline = self.now + placed.deadline_s
        start = self.now + 2 * HOP_S
        if self.log:
            self.log(
                f"{self.now:.6f} placed {job.key[0]} {placed.prefill_worker} {placed.decode_worker}"
            )
        if placed.prefill_worker is None or placed.prefill_worker == placed.decode_worker:
            job.prefill = job.decode
        else:
            job.prefill, job.remote = self.workers[placed.prefill_worker], True
        job.prefill.advance(self.now)
        if placed.prefix_holder is not None:
            start = self._fetch(self.workers[placed.prefix_holder], job.prefill, job, start)
        self._submit(job, start)

    def _submit(self, job: Job, start: float) -> None:
        assert job.prefill is not None
        job.prefill.submit(job, start)
        self._schedule(job.prefill)

    def _refused(self, refused: AttemptRefused) -> None:
        job = self.jobs.pop(refused.attempt_key, None)
        if job is not None:
            job.outcome = refused.reason
            self._end(job)

    # ---- workers ---------------------------------------------------------------------------------

    def _schedule(self, worker: Worker) -> None:
        due = worker.due()
        if due != worker.scheduled:
            worker.version += 1
            worker.scheduled = due
            if due < inf:
                self._at(due, WORK, (worker, worker.version))

    def _work(self, what: tuple[Worker, int]) -> None:
        worker, version = what
        if version != worker.version or not worker.alive:
            return
        worker.scheduled = inf
        worker.advance(self.now)
        ended, filled = worker.settle()
        for job in filled:
            self._filled(worker, job)
        self._schedule(worker)
        for job in ended:
            self._ended(job)

    def _filled(self, worker: Worker, job: Job) -> None:
        """The prompt is computed: first token, and the KV goes on its way."""
        request = job.request
        worker.keep(request)
        handed = self.late_roles and job.remote
        if not job.first and not handed:
            job.first = self.now + HOP_S
            if job.first - job.arrived > job.target:
                self.misses += 1
                job.done = True  # counted as a miss
        self._at(self.now + HOP_S, FIRST, job.key)
        if handed and not job.resumed:
            job.left = request.output
        if job.left <= 0:
            self._ended(job)
            return
        if not job.remote:
            worker.join(job)
            return
        assert job.decode is not None
        job.remote = False  # what comes later happens where it decodes
        self._at(self._transfer(worker, job.decode, job), READY, job)

    def _transfer(self, source: Worker, sink: Worker, job: Job) -> float:
        """When the KV has arrived. Each link carries one transfer at a time; it begins with the
        prefill at the earliest, and `exposed_share` of it is left when the prefill ends."""
        held = min(sink.cached(job.request), job.context)
        job.moved = job.context - held
        costs = (source.cost, sink.cost)
        seconds = job.moved * max(cost.transfer_token for cost in costs)
        begin = max(job.started, source.egress, sink.ingress)
        source.egress = sink.ingress = begin + seconds
        exposed = max(cost.exposed_share for cost in costs) * seconds
        return max(self.now + exposed, begin + seconds) + max(c.transfer_base for c in costs)

    def _fetch(self, source: Worker, sink: Worker, job: Job, start: float) -> float:
        """A prefix that another worker holds comes over the links before the prompt begins."""
        request = job.request
        there = min(source.cached(request), job.context - 1)
        moved = there - sink.cached(request)
        if moved <= 0 or not source.alive:
            return start
        job.fetched = there
        costs = (source.cost, sink.cost)
        begin = max(start, source.egress, sink.ingress)
        end = begin + moved * max(cost.transfer_token for cost in costs)
        source.egress = sink.ingress = end
        return end + max(cost.transfer_base for cost in costs)

    def _first(self, key: tuple[str, int]) -> None:
        self._tell(e.FirstTokenSent(key))

    def _ready(self, job: Job) -> None:
        worker = job.decode
        if worker is None or not worker.alive or job.key not in self.jobs:
            return
        worker.advance(self.now)
        worker.keep(job.request)
        worker.join(job)
        self._schedule(worker)

    def _ended(self, job: Job) -> None:
        """The last token is out."""
        worker, request = job.decode, job.request
        assert worker is not None
        if request.answers:
            worker.keep(request, answer=True)
        job.ended = self.now + HOP_S
        del self.jobs[job.key]
        if self.log:
            self.log(f"{self.now:.6f} ended {job.key[0]} {job.first:.6f} {job.late}")
        ttft = (job.first - job.arrived) * 1e3
        self._tell(
            e.AttemptEnded(job.key, AttemptOutcome(job.key, request.output, ttft, reason="stop"))
        )
        self._end(job)

    def _end(self, job: Job) -> None:
        self.open -= 1
        request = job.request
        self.done[request.index] = job
        if not job.done and not self.slo.met(job):
            self.misses += 1
        if request.then is not None:
            later = request.then
            later.at = max(self.now, job.ended) + later.think_s
            self.open += 1
            self._at(later.at, ARRIVE, later)

    # ---- reports and faults ----------------------------------------------------------------------

    def _report(self, _: None) -> None:
        self._at(self.now + REPORT_S, REPORT, None)
        for worker in self.workers.values():
            if worker.alive and (worker.dirty or worker.rows):
                worker.advance(self.now)
                report = self._state(worker)
                if self.faults.report_delay_s:
                    later = self.now + self.faults.report_delay_s
                    self._at(later, HEAR, e.WorkerReported(worker.name, report))
                else:
                    self._tell(e.WorkerReported(worker.name, report))

    def _hear(self, event: e.WorkerReported) -> None:
        if self.workers[event.worker].alive:
            self._tell(event)

    def _state(self, worker: Worker) -> WorkerReport:
        worker.seq += 1
        steps = round(worker.steps)
        stored, evicted = worker.changes()
        report = WorkerReport(
            worker.seq,
            worker.free_tokens // HASH_TOKENS,
            stored,
            evicted,
            worker.prefill_tokens,
            worker.prefill_s,
            running=worker.rows,
            kv_tokens=int(worker.tokens),
            steps=steps,
            step_seconds=worker.steps_s * steps / worker.steps if steps else 0.0,
            waiting=worker.waiting,
        )
        worker.prefill_tokens, worker.prefill_s = 0, 0.0
        worker.steps = worker.steps_s = 0.0
        worker.dirty = False
        return report

    def _rejoin(self, name: str) -> None:
        """A whole snapshot: the router asked for it, or the worker has another role."""
        worker = self.workers[name]
        worker.seq = 0
        worker.changes()
        cached = [name for run in worker.cache.values() for name in run.names]
        self._tell(e.WorkerJoined(self.cards[name], 1, cached))

    def _kill(self, name: str) -> None:
        """The worker dies; its requests are placed again, what was generated is prompt now."""
        worker = self.workers[name]
        worker.advance(self.now)
        worker.alive = False
        self.up[name][1] = self.now
        self._tell(e.WorkerLost(name))
        for job in self._concerned(worker):
            self._again_elsewhere(job, worker, [name])

    def _concerned(self, worker: Worker) -> list[Job]:
        """What it computes or runs; not what it has handed to another."""
        mine = [job for job in self.jobs.values() if worker in (job.prefill, job.decode)]
        return [job for job in mine if job.decode is worker or not job.first]

    def _again_elsewhere(self, job: Job, lost: Worker, gone: list[str]) -> None:
        other = job.prefill if job.decode is lost else job.decode
        if other is not None and other is not lost:
            other.advance(self.now)
            other.forget(job)
            self._schedule(other)
        del self.jobs[job.key]
        self._tell(e.AttemptEnded(job.key))
        again = Job(job.request, (job.key[0], job.key[1] + 1), job.arrived)
        again.first, again.late, again.done = job.first, job.late, job.done
        if job.first:
            made = int(lost.clock - job.joined) if job.joined else 0
            again.context, again.left = job.context + made, max(1, job.left - made)
            again.resumed = True
        self._at(self.now + HOP_S, AGAIN, (again, gone))

    # ---- a planner's orders ----------------------------------------------------------------------

    def _plan(self, _: None) -> None:
        assert self.planner is not None
        self._at(self.now + self.setting.plan_every_s, PLAN, None)
        self.planner(self, self.now)

    def flip(self, name: str, role: str) -> None:
        """The worker hands over what it has (prompt and answer so far are placed again, its cache
        stays) and has the role `flip_s` later. Until then its card says `""`."""
        self._hand_over(self.workers[name])
        self._at(self.now + self.setting.flip_s, ENTER, (name, role))

    def add(self, role: str, pool: int = 0) -> str:
        """Orders a replica like those of the fleet's pool; it joins `start_s` later."""
        name = self._make(role, self.setting.fleet.pools[pool][0])
        self.workers[name].alive = False
        self.starting[name] = role
        self.up[name] = [self.now, inf]
        self._at(self.now + self.setting.start_s, ENTER, (name, role))
        return name

    def remove(self, home: str) -> str | None:
        """The youngest replica of the pool, one that starts first, hands over and is gone."""
        mine = [name for name, card in self.cards.items() if card.pool == home]
        there = [name for name in mine if self.up[name][1] == inf]
        if not there:
            return None
        name = there[-1]
        self.up[name][1] = self.now
        if self.starting.pop(name, None) is None:
            self._hand_over(self.workers[name])
            self.workers[name].alive = False
            self._tell(e.WorkerLost(name))
        return name

    def _enter(self, what: tuple[str, str]) -> None:
        name, role = what
        if self.up[name][1] < inf:
            return  # removed meanwhile
        self.starting.pop(name, None)
        worker = self.workers[name]
        worker.role, worker.alive = role, True
        worker.advance(self.now)
        self.cards[name] = msgspec.structs.replace(self.cards[name], role=role)
        self._rejoin(name)

    def _hand_over(self, worker: Worker) -> None:
        """Takes nothing new, and what it has goes elsewhere; it stays in the directory."""
        self.cards[worker.name] = msgspec.structs.replace(self.cards[worker.name], role="")
        worker.role = ""
        self._rejoin(worker.name)
        worker.advance(self.now)
        for job in self._concerned(worker):
            self._again_elsewhere(job, worker, [])
            worker.forget(job)
        self._schedule(worker)

    @property
    def gpu_seconds(self) -> float:
        """What the replicas cost from their order to their end, or to now."""
        gpus = self.setting.fleet.reference.gpus
        return gpus * sum((min(end, self.now) - begin for begin, end in self.up.values()), 0.0)

    # ---- results ---------------------------------------------------------------------------------

    def _outcome(self, request: Request, job: Job) -> Outcome:
        served = not job.outcome
        gaps = request.output - 1
        return Outcome(
            request.at,
            request.prompt,
            request.output,
            request.tenant,
            job.outcome,
            job.first - job.arrived if served else inf,
            job.target,
            (job.ended - job.first) / gaps if served and gaps else 0.0,
            job.first_gap,
            job.late,
            job.hit,
            job.moved,
            self.slo.met(job),
            job.predicted,
        )
