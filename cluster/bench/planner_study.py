"""The planner in virtual time, beside fixed splits and other planners: `diptych bench planner`.

All have the same GPUs and our router. Others change replicas, which takes `start_s`; ours flips
roles. Goodput is the number of requests met.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ...simulator.case import Case, Cores, count_of
from ...simulator.fleet import Split, splits
from ...simulator.metrics import summarize
from ...simulator.sim import Simulation
from ..planner.core import Bounds, Flip, Observation, Planner, PlannerConfig, Recent, Replica
from .planner_peers import Dynamo, Keda, ServeLoop

RECENT_S = 60.0
FIXED = "fixed"


@dataclass(slots=True)
class Driver:
    """A simulation's planner: shows it what there is, does what it orders."""

    planner: Planner | Dynamo | ServeLoop | Keda
    orders: list[tuple[float, str]] = field(default_factory=list)
    flips: int = 0
    _ended: deque = field(default_factory=deque)
    _seen: int = 0

    def __call__(self, simulation: Simulation, now: float) -> None:
        seen = observe(simulation, now, self._recent(simulation, now))
        for action in self.planner.handle(seen, now):
            self.orders.append((now, str(action)))
            if isinstance(action, Flip):
                self.flips += 1
                simulation.flip(action.worker, action.to)
                continue
            homes = [one for one in seen.replicas if one.home == action.pool]
            change = action.replicas - len(homes) - seen.starting.get(action.pool, 0)
            for _ in range(change):
                simulation.add(action.pool)
            for _ in range(-change):
                simulation.remove(action.pool)

    def _recent(self, simulation: Simulation, now: float) -> Recent:
        """Of what ended in the last minute; the simulation's `done` is by arrival."""
        waiting = sum(1 for job in simulation.jobs.values() if not job.first)
        ended = [
            job
            for job in simulation.done
            if job is not None and not job.outcome and now - RECENT_S <= job.ended <= now
        ]
        base = {"prefilling": waiting, "decoding": len(simulation.jobs) - waiting}
        if not ended:
            return Recent(RECENT_S, **base)
        ttft = sorted(job.first - job.arrived for job in ended)
        gaps = sorted((j.ended - j.first) / max(1, j.request.output - 1) for j in ended)
        last = int(0.9 * (len(ended) - 1))
        return Recent(
            RECENT_S,
            len(ended),
            sum(job.request.prompt for job in ended) / len(ended),
            sum(job.request.output for job in ended) / len(ended),
            sum(ttft) / len(ttft),
            sum(gaps) / len(gaps),
            ttft[last],
            gaps[last],
            **base,
        )


def observe(simulation: Simulation, now: float, recent: Recent) -> Observation:
    """What a live Control would see: the router's demand and the workers' reports."""
    replicas, room, used = [], 0, 0.0
    backlog = 0.0
    for name, worker in simulation.workers.items():
        card = simulation.cards[name]
        if not worker.alive or not worker.role:
            continue
        assert card.cost is not None
        kind = card.cost, worker.capacity, card.tensor_parallel
        replicas.append(Replica(name, worker.role, card.pool, *kind))
        if worker.role == "decode":
            room, used = room + worker.capacity, used + worker.tokens
        known = simulation.router.workers.get(name)
        if known is not None and worker.role == "prefill":
            backlog += max(0.0, known.busy_until - now)
    starting: dict[str, int] = {}
    for pool in simulation.starting.values():
        starting[pool] = starting.get(pool, 0) + 1
    need = simulation.router.demand.offered_load(now)
    share = used / room if room else 0.0
    return Observation(tuple(replicas), starting, need, backlog, share, recent)


def peers(case: Case, most: int) -> dict[str, Callable[[], Planner | Dynamo | ServeLoop | Keda]]:
    """Each planner by name, with `most` replicas in all."""
    bounds = {"prefill": Bounds(1, most - 1), "decode": Bounds(1, most - 1)}
    itl, ttft = case.slo.itl_s, case.slo.ttft_s
    config = PlannerConfig(itl_s=itl, pools=bounds, scale=False)
    return {
        "diptych": lambda: Planner(config),
        "dynamo": lambda: Dynamo(itl, bounds, most),
        "serve": lambda: ServeLoop(bounds, most),
        "keda": lambda: Keda(ttft, itl, bounds, most),
    }


@dataclass(frozen=True, slots=True)
class Ran:
    """One run. `orders` are a planner's, `(seconds, what)`; `fixed`: nobody planned."""

    planner: str
    split: str
    attainment: float
    ttft_p90_s: float
    gpu_s: int
    flips_per_min: float = 0.0
    orders: tuple[tuple[float, str], ...] = ()


def run(case: Case, split: Split, rate: float, name: str = FIXED, seed: int = 0) -> Ran:
    """From `split` on, at `rate` requests/s in all, under the planner of that name."""
    driver = None if name == FIXED else Driver(peers(case, split.total)[name]())
    requests = case.trace.workload(rate, seed, case.closed)
    minutes = count_of(requests) / rate / 60
    simulation = Simulation(case.setting(split), case.trace, seed, planner=driver)
    outcomes = simulation.run(requests)
    assert outcomes is not None
    summary = summarize(outcomes)
    return Ran(
        name,
        str(split),
        round(summary.attainment, 4),
        round(summary.ttft.get("p90", 0.0), 3),
        round(simulation.gpu_seconds),
        round(driver.flips / minutes, 3) if driver else 0.0,
        tuple(driver.orders) if driver else (),
    )


def compare(
    case: Case, begin: Split, rate: float, jobs: int, tell: Callable[[str], None]
) -> list[Ran]:
    """Every fixed split, then every planner from `begin`, best of each kind first."""
    tasks = [(split, FIXED) for split in splits(begin.total)]
    tasks += [(begin, name) for name in peers(case, begin.total)]
    with Cores([case], jobs) as cores:
        asked = [cores.submit(run, 0, split, rate, name) for split, name in tasks]
        found = []
        for one in asked:
            found.append(one.result())
            tell(f"{found[-1].planner} {found[-1].split}: {found[-1].attainment:.1%} met")
    return sorted(found, key=lambda ran: (ran.planner != FIXED, -ran.attainment))
