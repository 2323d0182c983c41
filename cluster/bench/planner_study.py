"""The planner in virtual time, beside fixed splits and other planners: `diptych bench planner`.

A split says how many replicas prefill and how many decode. A fixed split keeps its numbers; a
planner begins with one split and changes it. All of them have the same GPUs and our router. The
other planners change replica counts, and a new replica takes seconds to come up (`start_s` of the
simulated fleet). Ours changes roles. What is compared is attainment: the share of requests that met
their targets of TTFT (time to the first token) and ITL (time between tokens).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ...simulator.case import Case, CaseProcesses
from ...simulator.fleet import Split, possible_splits
from ...simulator.metrics import summarize
from ...simulator.sim import Simulation
from ...simulator.trace import count_turns
from ..planner.core import (
    FleetObservation,
    FlipWorker,
    Planner,
    PlannerConfig,
    RecentTraffic,
    Replica,
    ReplicaBounds,
)
from .planner_peers import DynamoPlanner, KedaPlanner, ReplicaBudget, ServeLoopPlanner

#: The other planners decide by the requests that ended within the last so many seconds.
RECENT_WINDOW_S = 60.0
FIXED = "fixed"  #: The planner's name in a run where nobody plans.

AnyPlanner = Planner | DynamoPlanner | ServeLoopPlanner | KedaPlanner


@dataclass(slots=True)
class PlannerDriver:
    """Connects a planner to a simulation: observes the fleet, and carries out the orders.

    The simulation calls the driver every few seconds of its virtual time.
    """

    planner: AnyPlanner
    #: (virtual seconds, order with its reason), as they were given.
    orders: list[tuple[float, str]] = field(default_factory=list)
    flip_count: int = 0  #: Of the orders, those that changed a worker's role.

    def __call__(self, simulation: Simulation, now: float) -> None:
        observation = observe_simulation(simulation, now)
        for action in self.planner.handle(observation, now):
            self.orders.append((now, f"{action}: {action.reason}"))
            if isinstance(action, FlipWorker):
                self.flip_count += 1
                simulation.flip(action.worker, action.role)
                continue
            # A new size: the difference to what is there or starts is added or removed.
            present_count = sum(replica.pool == action.pool for replica in observation.replicas)
            present_count += observation.starting_replicas.get(action.pool, 0)
            for _ in range(action.replicas - present_count):
                simulation.add(action.pool)
            for _ in range(present_count - action.replicas):
                simulation.remove(action.pool)


def observe_simulation(simulation: Simulation, now: float) -> FleetObservation:
    """Return what a live Control would see: the router's demand and the workers' statistics."""
    replicas: list[Replica] = []
    backlog_s = 0.0
    decode_room_tokens = 0
    decode_used_tokens = 0.0
    for name, worker in simulation.workers.items():
        if not worker.is_alive or not worker.role:
            continue
        card = simulation.cards[name]
        assert card.cost is not None
        replicas.append(
            Replica(
                name=name,
                role=worker.role,
                pool=card.pool,
                cost=card.cost,
                kv_tokens=worker.capacity_tokens,
                gpus=card.tensor_parallel,
            )
        )
        if worker.role == "decode":
            decode_room_tokens += worker.capacity_tokens
            decode_used_tokens += worker.running_tokens(now)
        # The router's prediction of when the worker will have computed the prompts that it has.
        router_worker = simulation.router.workers.get(name)
        if router_worker is not None and worker.role == "prefill":
            backlog_s += max(0.0, router_worker.busy_until - now)
    return FleetObservation(
        replicas=tuple(replicas),
        starting_replicas=dict(Counter(simulation.starting.values())),
        demand=simulation.router.demand.offered_load(now),
        backlog_s=backlog_s,
        kv_used_share=decode_used_tokens / decode_room_tokens if decode_room_tokens else 0.0,
        recent=_recent_traffic(simulation, now),
    )


def _recent_traffic(simulation: Simulation, now: float) -> RecentTraffic:
    """Return the means and P90s of what ended in the last minute, and what runs."""
    prefilling = sum(not attempt.first_token_at for attempt in simulation.attempts.values())
    decoding = len(simulation.attempts) - prefilling
    # They ended one after the other, but all are searched: this is a study.
    ended = [
        attempt
        for attempt in simulation.last_attempts.values()
        if not attempt.refusal and now - RECENT_WINDOW_S <= attempt.ended_at <= now
    ]
    if not ended:
        return RecentTraffic(RECENT_WINDOW_S, prefilling=prefilling, decoding=decoding)
    ttfts_s = np.array([attempt.first_token_at - attempt.arrived_at for attempt in ended])
    answers_s = np.array([attempt.ended_at - attempt.first_token_at for attempt in ended])
    # An answer of one token has no gap between tokens; 1 keeps the division below defined.
    gap_counts = np.array([max(1, attempt.request.output_tokens - 1) for attempt in ended])
    gaps_s = answers_s / gap_counts
    return RecentTraffic(
        window_s=RECENT_WINDOW_S,
        completed=len(ended),
        mean_prompt_tokens=sum(attempt.request.prompt_tokens for attempt in ended) / len(ended),
        mean_output_tokens=sum(attempt.request.output_tokens for attempt in ended) / len(ended),
        mean_ttft_s=float(ttfts_s.mean()),
        mean_itl_s=float(gaps_s.mean()),
        ttft_p90_s=float(np.percentile(ttfts_s, 90, method="lower")),
        itl_p90_s=float(np.percentile(gaps_s, 90, method="lower")),
        prefilling=prefilling,
        decoding=decoding,
    )


def planner_makers(case: Case, replica_limit: int) -> dict[str, Callable[[], AnyPlanner]]:
    """Return what makes each planner, by name, with `replica_limit` replicas in all.

    Each pool has at least one replica, so neither has more than `replica_limit - 1`. Ours may only
    change roles (`scaling_enabled` is False), so the others get the number of replicas that it has
    as their budget. `ServeLoopPlanner` and `KedaPlanner` can exceed it until their next call, if
    they let both pools grow at once.
    """
    # KEDA's loop takes one TTFT target: the part that does not depend on the prompt's length, or
    # 1 s if there is no such part.
    ttft_s = case.slo.ttft_s or 1.0
    itl_s = case.slo.itl_s
    pool_bounds = ReplicaBounds(minimum=1, limit=replica_limit - 1)
    bounds = {"prefill": pool_bounds, "decode": pool_bounds}
    budget = ReplicaBudget(bounds, total=replica_limit)
    config = PlannerConfig(itl_s=itl_s, pools=bounds, scaling_enabled=False)
    return {
        "diptych": lambda: Planner(config),
        "dynamo": lambda: DynamoPlanner(itl_s, budget),
        "serve": lambda: ServeLoopPlanner(budget),
        "keda": lambda: KedaPlanner(ttft_s, itl_s, budget),
    }


@dataclass(frozen=True, slots=True)
class PlannerRun:
    """One run, as `diptych bench planner -o json` has it."""

    #: The planner's name, or `fixed`.
    planner: str
    #: Replicas by role at the beginning: `6P2D` is six that prefill and two that decode.
    split: str
    #: Share of the requests that met their targets, 0 to 1.
    attainment: float
    ttft_p90_s: float
    #: Seconds of all GPUs together, starting replicas included.
    gpu_s: int
    #: 0 for planners that change no roles.
    flips_per_min: float = 0.0
    #: The planner's orders: (virtual seconds, order with its reason).
    orders: tuple[tuple[float, str], ...] = ()


def run(case: Case, split: Split, rate: float, name: str = FIXED, *, seed: int = 0) -> PlannerRun:
    """Simulate the case from `split` on, at `rate` requests/s, under the planner of that name.

    `case` has the trace of requests, the fleet's speeds and the targets. `name` is `FIXED` or a key
    of `planner_makers`.
    """
    driver = None
    if name != FIXED:
        driver = PlannerDriver(planner_makers(case, split.replicas)[name]())
    requests = case.trace.workload(rate, seed, case.closed_loop)
    minutes = count_turns(requests) / rate / 60
    simulation = Simulation(case.setting(split), case.trace, seed, planner=driver)
    outcomes = simulation.run(requests)
    assert outcomes is not None
    summary = summarize(outcomes)
    return PlannerRun(
        planner=name,
        split=str(split),
        attainment=round(summary.attainment, 4),
        ttft_p90_s=round(summary.ttft.get("p90", 0.0), 3),
        gpu_s=round(simulation.gpu_seconds),
        flips_per_min=round(driver.flip_count / minutes, 3) if driver else 0.0,
        orders=tuple(driver.orders) if driver else (),
    )


def compare(
    case: Case,
    first_split: Split,
    rate: float,
    jobs: int,
    report_progress: Callable[[str], None],
) -> list[PlannerRun]:
    """Run every fixed split, and every planner from `first_split`, on `jobs` cores.

    `report_progress` gets a line when a run has ended. The fixed splits come first in the result,
    then the planners, the best of each kind first.
    """
    tasks = [(split, FIXED) for split in possible_splits(first_split.replicas)]
    tasks += [(first_split, name) for name in planner_makers(case, first_split.replicas)]
    runs: list[PlannerRun] = []
    with CaseProcesses([case], jobs) as cores:
        futures = [cores.submit(run, 0, split, rate, name=name) for split, name in tasks]
        for future in futures:
            planner_run: PlannerRun = future.result()
            runs.append(planner_run)
            report_progress(
                f"{planner_run.planner} {planner_run.split}: {planner_run.attainment:.1%} met"
            )
    return sorted(runs, key=lambda run: (run.planner != FIXED, -run.attainment))
