"""A layout that `plan.py` considers, and what it serves in simulation, with an interval."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from .case import Case, simulate_case
from .fleet import Fleet, Split
from .intervals import Interval, MetByRun, share_interval
from .metrics import Slo, offered_percentiles
from .search import Search
from .trace import Trace

SEARCH_TOLERANCE = 0.03  #: relative error of a rate that is searched for

#: One split for each pool of a fleet.
Splits = tuple[Split, ...]


@dataclass(frozen=True, slots=True)
class PlanDemand:
    """The load, and how well it has to be served."""

    trace: Trace
    slo: str  #: the targets, as in `ttft=2s,itl=50ms`
    share: float = 0.99  #: of the requests that must be within their targets
    rate: float | None = None  #: requests/s to serve; None: as many as can be
    seeds: int = 1
    closed_loop: bool = False  #: True: a session's next turn waits for the end of the one before

    def runs(self, rate: float) -> int:
        """Return how many different runs the seeds make at a rate.

        A seed makes different requests only where it has something to move: copies of the trace,
        sessions, or timestamps within their quantum.
        """
        trace = self.trace
        # Above its own rate a trace is overlaid with copies of itself, each shifted by the seed.
        has_copies = rate > trace.rate * (1 + 1e-9)
        seeds_differ = has_copies or trace.has_sessions or trace.quantum_s > 0
        return self.seeds if seeds_differ else 1


@dataclass(frozen=True, slots=True)
class FleetOption:
    """A fleet that may be taken, by a name such as `H200:32` or `cpu-1t:2`."""

    name: str
    fleet: Fleet
    hour_price: float | None = None  #: of the whole fleet, in the currency of the prices

    def slo(self, demand: PlanDemand) -> Slo:
        """Return the demand's targets for this fleet.

        A TTFT target such as `3x` is a multiple of a prompt's prefill on the fleet's fastest kind
        of replica.
        """
        return Slo.parse(demand.slo, self.fleet.costs)

    def paced_by_targets(self) -> FleetOption:
        """Return the option with engines whose steps follow the ITL target.

        Measured engines were paced for the targets that they had. For other targets they would be
        configured anew. Without a budget (None) the simulation derives one from the target;
        engines that were measured without any limit (inf) keep none.
        """
        pools = tuple(
            (
                replace(hardware, itl_budget_s=None)
                if _has_budget(hardware.itl_budget_s)
                else hardware,
                count,
            )
            for hardware, count in self.fleet.pools
        )
        return replace(self, fleet=replace(self.fleet, pools=pools))


def _has_budget(itl_budget_s: float | None) -> bool:
    return itl_budget_s is not None and itl_budget_s < inf


@dataclass(frozen=True, slots=True)
class FleetLayout:
    """The roles of a fleet's replicas, and what the fleet serves with them."""

    fleet_name: str
    gpus: int  #: of the whole fleet; of CPU workers, their cores
    splits: Splits
    rate: float  #: requests/s of the whole fleet
    #: Share of the requests within their targets at this rate. Where the rate was searched for, it
    #: is the share that the demand wants, not a measured one.
    attainment: float
    #: For each run at this rate, whether each request was within its targets; the runs of a fleet's
    #: layouts have the same requests. It is empty where the rate was searched for.
    met: MetByRun = field(default=(), repr=False)
    #: Requests of all runs at this rate. It is 0 where the rate was searched for, and where the
    #: runs had no request.
    requests: int = 0
    refused: int = 0  #: how many of these requests were refused
    #: `p95` and `p99` of the time to the first token over all these requests, as
    #: `metrics.offered_percentiles` gives them.
    ttft_offered: dict[str, float | None] = field(default_factory=dict)
    hour_price: float | None = None  #: of the fleet, as its `FleetOption` has it

    @property
    def expense(self) -> float:
        """What fleets are compared by: the price of an hour, or without prices the GPUs."""
        return self.gpus if self.hour_price is None else self.hour_price

    @property
    def mixed(self) -> bool:
        """Whether no replica is a prefill or decode worker only."""
        return is_mixed(self.splits)

    @property
    def interval(self) -> Interval:
        """The 95 % interval of the attainment; a point if `met` has no requests."""
        if not any(self.met):
            return Interval(self.attainment, self.attainment)
        return share_interval(self.met)


def is_mixed(splits: Splits) -> bool:
    """Return whether all replicas are mixed."""
    return all(split.mixed == split.replicas for split in splits)


class LayoutTask(NamedTuple):
    """One layout to simulate, as it is sent to a process."""

    option: FleetOption
    splits: Splits
    demand: PlanDemand

    def case(self) -> Case:
        """Return the case of the layout: the trace on its fleet, by Diptych's own policy."""
        return Case(
            self.demand.trace,
            self.option.fleet,
            self.option.slo(self.demand),
            seeds=self.demand.seeds,
            closed_loop=self.demand.closed_loop,
            disaggregate="never" if is_mixed(self.splits) else "auto",
        )


def simulate_layout(task: LayoutTask) -> FleetLayout:
    """Return what the layout serves: at the demand's rate, or the largest rate that it serves.

    The largest rate is that at which the demand's share of the requests is in time. It is 0 if the
    layout cannot serve even a small part of the trace's own rate.
    """
    demand = task.demand
    if demand.rate is not None:
        return simulate_at(task, demand.rate)
    gpus = task.option.fleet.gpus
    rate_per_gpu = Search(task.case()).largest_rate(
        task.splits,
        demand.share,
        start=demand.trace.rate / gpus,
        seeds=demand.seeds,
        tolerance=SEARCH_TOLERANCE,
    )
    return FleetLayout(
        fleet_name=task.option.name,
        gpus=gpus,
        hour_price=task.option.hour_price,
        splits=task.splits,
        rate=rate_per_gpu * gpus,
        attainment=demand.share,
    )


def simulate_at(task: LayoutTask, rate: float) -> FleetLayout:
    """Return what the layout serves at `rate` requests/s of the whole fleet, more than 0.

    Without any request the attainment is 1.
    """
    case = task.case()
    fleet = task.option.fleet
    met: list[list[bool]] = []
    served_ttfts_s: list[float] = []
    for seed in range(task.demand.runs(rate)):
        run = simulate_case(case, task.splits, rate=rate / fleet.gpus, seed=seed)
        outcomes = run.outcomes or []
        met.append([outcome.targets_met for outcome in outcomes])
        served_ttfts_s += [outcome.ttft_s for outcome in outcomes if not outcome.refusal_reason]
    requests = sum(map(len, met))
    return FleetLayout(
        fleet_name=task.option.name,
        gpus=fleet.gpus,
        hour_price=task.option.hour_price,
        splits=task.splits,
        rate=rate,
        attainment=sum(map(sum, met)) / requests if requests else 1.0,
        met=met,
        requests=requests,
        refused=requests - len(served_ttfts_s),
        ttft_offered=offered_percentiles(served_ttfts_s, requests),
    )
