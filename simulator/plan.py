"""Finds the layout that serves a load best, over splits, mixed layouts and several fleets.

A layout gives the replicas of each pool of a fleet their roles. Planning takes these steps:

1. `_candidate_layouts` orders the layouts of each fleet by what they would serve as a fluid, and
   keeps the first ones, the mixed one, and two that are partly mixed.
2. `_simulate` finds out what each of them serves, in several processes.
3. `choose_layout` takes the best.
4. `describe_verdict` says whether separate prefill and decode workers pay against mixed ones.

At a given rate they pay if the mixed layout misses its target and the separated one misses less.
Without a rate they pay if they serve at least `PAYS_FACTOR` times as much. Where they do not pay, the
plan takes the mixed layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import ceil, inf, sqrt
from multiprocessing import get_context
from typing import Any, NamedTuple

import yaml

from .bound import RequestClasses, classify_requests, mean_request_seconds
from .case import Case
from .errors import SimulationError
from .fleet import Fleet, Split
from .hardware import Hardware
from .metrics import Slo
from .search import Search, split_text
from .trace import Trace

SIMULATED_LAYOUTS = 6  #: separated layouts of a fleet that are simulated
#: A separated layout must serve this times the mixed one's requests/s: mixed is simpler.
PAYS_FACTOR = 1.05
SEARCH_TOLERANCE = 0.03  #: relative, of the rates found

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


@dataclass(frozen=True, slots=True)
class FleetOption:
    """A fleet that may be taken, by a name such as `H200:32` or `cpu-1t:2`."""

    name: str
    fleet: Fleet

    def slo(self, demand: PlanDemand) -> Slo:
        """Return the demand's targets, as multiples of what a prefill takes on this fleet."""
        return Slo.parse(demand.slo, self.fleet.reference)


@dataclass(frozen=True, slots=True)
class FleetLayout:
    """The roles of a fleet's replicas, and what the fleet serves with them."""

    fleet_name: str
    gpus: int
    splits: Splits
    rate: float  #: requests/s
    attainment: float  #: share of the requests within their targets at this rate

    @property
    def mixed(self) -> bool:
        """Whether no replica is a prefill or decode worker only."""
        return _is_mixed(self.splits)


def _is_mixed(splits: Splits) -> bool:
    return all(split.mixed == split.replicas for split in splits)


def plan_layouts(
    options: list[FleetOption],
    demand: PlanDemand,
    jobs: int,
    report_progress: Callable[[str], None],
) -> dict[str, Any]:
    """Return what each layout serves, the best one, and whether disaggregation pays.

    The result is the document of `diptych plan -o json`. `jobs` processes simulate, and each result
    is a line for `report_progress`. Raises SimulationError if there is no fleet.
    """
    load = classify_requests(demand.trace)
    tasks = [
        _LayoutTask(option, splits, demand)
        for option in options
        for splits in _candidate_layouts(option.fleet, load, option.slo(demand))
    ]
    if not tasks:
        raise SimulationError("no fleet to plan for")
    report_progress(f"{len(tasks)} layouts of {len(options)} fleets")

    layouts: list[FleetLayout] = []
    with ProcessPoolExecutor(max(1, jobs), get_context("fork")) as pool:
        for layout in pool.map(_simulate, tasks):
            served = _describe_served(layout, demand)
            report_progress(f"{layout.fleet_name} {split_text(layout.splits)}: {served}")
            layouts.append(layout)

    best = choose_layout(layouts, demand)
    same_size = [layout for layout in layouts if layout.gpus == best.gpus]
    mixed = [layout for layout in same_size if layout.mixed]
    separated = [layout for layout in same_size if not layout.mixed]
    return {
        "trace": demand.trace.name,
        "slo": demand.slo,
        "share": demand.share,
        "rate": demand.rate,
        "layouts": [_layout_entry(layout) for layout in layouts],
        "best": _layout_entry(best),
        "verdict": describe_verdict(mixed, separated, demand),
        "cluster": cluster_settings(best, demand, options),
    }


# ---- candidates ----------------------------------------------------------------------------------


def _candidate_layouts(fleet: Fleet, load: RequestClasses, slo: Slo) -> list[Splits]:
    """Return the mixed layout, the separated ones that serve most as a fluid, and partly mixed ones.

    With a single pool, the partly mixed layouts are the best separated one with one prefill or one
    decode worker made mixed.
    """
    mixed = tuple(Split(mixed=replicas) for _, replicas in fleet.pools)
    choices = [
        [Split(prefill, replicas - prefill) for prefill in range(replicas + 1)]
        for _, replicas in fleet.pools
    ]
    separated = [
        splits
        for splits in itertools.product(*choices)
        if any(split.prefill for split in splits) and any(split.decode for split in splits)
    ]
    separated.sort(key=lambda splits: -_fluid_rate(fleet, splits, load, slo))

    partly_mixed: list[Splits] = []
    if separated and len(fleet.pools) == 1:
        (best,) = separated[0]
        candidates = [
            Split(best.prefill - 1, best.decode, mixed=1),
            Split(best.prefill, best.decode - 1, mixed=1),
        ]
        partly_mixed = [(split,) for split in candidates if split.serves_both_phases]
    return [mixed, *separated[:SIMULATED_LAYOUTS], *partly_mixed]


def _fluid_rate(fleet: Fleet, splits: Splits, load: RequestClasses, slo: Slo) -> float:
    """Return the requests/s that both phases could take, if nothing ever queued."""
    prefill_rate = 0.0
    decode_rate = 0.0
    for (hardware, _), split in zip(fleet.pools, splits, strict=True):
        seconds = mean_request_seconds(hardware, load, slo.itl_s)
        prefill_rate += split.prefill / seconds.prefill_s
        decode_rate += split.decode / seconds.decode_s
    return min(prefill_rate, decode_rate)


# ---- simulation ----------------------------------------------------------------------------------


class _LayoutTask(NamedTuple):
    """One layout to simulate, as it is sent to a process."""

    option: FleetOption
    splits: Splits
    demand: PlanDemand


def _simulate(task: _LayoutTask) -> FleetLayout:
    """Return what the layout serves: at the demand's rate, or the largest rate that it serves."""
    fleet = task.option.fleet
    demand = task.demand
    case = Case(
        demand.trace,
        fleet,
        task.option.slo(demand),
        seeds=demand.seeds,
        closed_loop=demand.closed_loop,
        disaggregate="never" if _is_mixed(task.splits) else "auto",
    )
    search = Search(case)
    if demand.rate is None:
        rate_per_gpu = search.largest_rate(
            task.splits,
            demand.share,
            start=demand.trace.rate / fleet.gpus,
            seeds=demand.seeds,
            tolerance=SEARCH_TOLERANCE,
        )
        rate = rate_per_gpu * fleet.gpus
        attainment = demand.share
    else:
        rate = demand.rate
        attainment = search.measure(task.splits, rate / fleet.gpus).attainment
    return FleetLayout(
        fleet_name=task.option.name,
        gpus=fleet.gpus,
        splits=task.splits,
        rate=rate,
        attainment=attainment,
    )


# ---- the choice ----------------------------------------------------------------------------------


def choose_layout(layouts: list[FleetLayout], demand: PlanDemand) -> FleetLayout:
    """Return the best layout.

    There are three cases:
    - Without a rate: the layout that serves most requests/s per GPU, where a separated one has to
      serve `PAYS_FACTOR` times as much as a mixed one.
    - With a rate that some layouts serve: the one with the fewest GPUs, of these a mixed one.
    - With a rate that none serves: the one that serves most of it, of equal ones a mixed one.
    """
    if demand.rate is None:
        return max(
            layouts,
            key=lambda layout: layout.rate / layout.gpus * (PAYS_FACTOR if layout.mixed else 1),
        )
    sufficient = [layout for layout in layouts if layout.attainment >= demand.share]
    if sufficient:
        return min(
            sufficient, key=lambda layout: (layout.gpus, not layout.mixed, -layout.attainment)
        )
    return max(layouts, key=lambda layout: (layout.attainment, layout.mixed))


def describe_verdict(
    mixed_layouts: list[FleetLayout], separated_layouts: list[FleetLayout], demand: PlanDemand
) -> str:
    """Return a sentence that says whether disaggregation pays, and by how much.

    The layouts have equally many GPUs. The best one with all replicas mixed is compared with the
    best of the others.
    """
    if not separated_layouts or not mixed_layouts:
        return "There is nothing to separate: one replica computes prompts and answers."
    mixed = max(mixed_layouts, key=lambda layout: _compared_value(layout, demand))
    separated = max(separated_layouts, key=lambda layout: _compared_value(layout, demand))
    mixed_value = _compared_value(mixed, demand)
    separated_value = _compared_value(separated, demand)

    comparison = (
        f"{split_text(separated.splits)} serves {_describe_served(separated, demand)}, "
        f"all mixed {_describe_served(mixed, demand)}"
    )
    if mixed_value:
        comparison += f" ({separated_value / mixed_value:.2f}x)"
    if demand.rate is None:
        pays = separated_value > PAYS_FACTOR * mixed_value
    else:
        pays = separated_value > mixed_value and mixed.attainment < demand.share
        requests = _distinct_requests(demand)
        if abs(separated_value - mixed_value) < _two_standard_errors(mixed, separated, requests):
            comparison += f"; {requests} requests do not tell them apart, plan with a longer trace"
    return f"Disaggregation {'pays' if pays else 'does not pay here'}: {comparison}."


def _compared_value(layout: FleetLayout, demand: PlanDemand) -> float:
    """Return what layouts are compared by: requests/s, or at a given rate the share in time."""
    return layout.rate if demand.rate is None else layout.attainment


def _distinct_requests(demand: PlanDemand) -> int:
    """Return how many different requests are behind an attainment.

    A seed makes different requests only where it has something to move: copies of the trace,
    sessions, or timestamps within their quantum.
    """
    trace = demand.trace
    copies = max(1, ceil((demand.rate or trace.rate) / trace.rate - 1e-9))
    seeds_differ = copies > 1 or trace.has_sessions or trace.quantum_s > 0
    return copies * len(trace.requests) * (demand.seeds if seeds_differ else 1)


def _two_standard_errors(one: FleetLayout, other: FleetLayout, requests: int) -> float:
    """Return two standard errors of the difference of two attainments of `requests` requests."""
    variances = [layout.attainment * (1 - layout.attainment) for layout in (one, other)]
    return 2 * sqrt(sum(variances) / requests)


# ---- what is written down ------------------------------------------------------------------------


def _describe_served(layout: FleetLayout, demand: PlanDemand) -> str:
    if demand.rate is not None:
        return f"{layout.attainment:.1%} of {demand.rate:g} requests/s in time"
    return f"{layout.rate:.2f} requests/s with {demand.share:.0%} in time"


def _layout_entry(layout: FleetLayout) -> dict[str, Any]:
    """Return the layout as it stands in the document."""
    return {
        "fleet": layout.fleet_name,
        "gpus": layout.gpus,
        "split": split_text(layout.splits),
        "mixed": layout.mixed,
        "rate": round(layout.rate, 4),
        "rate_per_gpu": round(layout.rate / layout.gpus, 4),
        "attainment": round(layout.attainment, 4),
    }


def cluster_settings(
    layout: FleetLayout, demand: PlanDemand, options: list[FleetOption]
) -> dict[str, Any]:
    """Return the settings of cluster.yaml that the layout decides.

    A mixed replica is a decode worker that computes its prompts itself.
    """
    option = next(option for option in options if option.name == layout.fleet_name)
    slo = option.slo(demand)
    hardware = option.fleet.reference
    prefill_replicas = sum(split.prefill for split in layout.splits)
    decode_replicas = sum(split.decode + split.mixed for split in layout.splits)
    # Each pool has settings of its own: YAML would write a shared object as an alias.
    return {
        "pools": {
            "prefill": {"replicas": prefill_replicas, **_replica_settings(hardware)},
            "decode": {"replicas": decode_replicas, **_replica_settings(hardware)},
        },
        "router": {"disaggregate": "never" if layout.mixed else "auto"},
        "slo": {"ttft_ms": slo.ttft_s * 1e3, "itl_ms": slo.itl_s * 1e3},
    }


def _replica_settings(hardware: Hardware) -> dict[str, Any]:
    """Return the settings of a pool that make its replicas like this one."""
    if not hardware.threads:
        return {"tensor_parallel": hardware.tp}
    engine: dict[str, float] = {"threads": hardware.threads}
    if hardware.itl_budget_s and hardware.itl_budget_s < inf:
        engine["itl_budget_ms"] = hardware.itl_budget_s * 1e3
    return {"engine": engine}


def format_plan(document: dict[str, Any]) -> str:
    """Return the document of `plan_layouts` as a table, best layouts first, with the verdict."""
    entries = sorted(
        document["layouts"], key=lambda entry: (-entry["attainment"], -entry["rate_per_gpu"])
    )
    width = max(len(entry["fleet"]) for entry in entries)
    best = document["best"]
    lines = [
        f"trace {document['trace']}; {document['slo']}; {document['share']:.0%} in time",
        f"{'FLEET'.ljust(width)}  {'SPLIT':>9}  REQUESTS/S  PER GPU  IN TIME",
    ]
    for entry in entries:
        lines.append(
            f"{entry['fleet'].ljust(width)}  {entry['split']:>9}  {entry['rate']:>10.2f}  "
            f"{entry['rate_per_gpu']:>7.3f}  {entry['attainment']:>7.1%}"
        )
    lines.append(f"best: {best['split']} of {best['fleet']}")
    lines.append(document["verdict"])
    return "\n".join(lines)


def cluster_yaml(document: dict[str, Any]) -> str:
    """Return the text of cluster.yaml; comments at its top say why."""
    best = document["best"]
    comments = [
        f"# diptych plan: {best['split']} of {best['fleet']} ({best['rate']:g} requests/s,",
        f"# {best['attainment']:.1%} in time) for {document['trace']}, {document['slo']}.",
        f"# {document['verdict']}",
    ]
    settings = yaml.safe_dump(document["cluster"], sort_keys=False)
    return "\n".join(comments) + "\n" + settings
