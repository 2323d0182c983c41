"""Which layout serves a load: splits and fleets, mixed layouts and several GPU types included.

Layouts of a fleet are ordered by what they would serve as a fluid, and the first ones simulated.
Disaggregation pays if the best one with separate prefill and decode serves clearly more than all
replicas mixed; at a rate that is given, if mixed misses its share and it misses less. Else the plan
says that it does not pay, and takes the mixed one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import ceil, inf, sqrt
from multiprocessing import get_context

import yaml

from .bound import Classes, classes, simulated
from .case import Case
from .errors import SimulationError
from .fleet import Fleet, Split
from .hardware import Hardware
from .metrics import Slo
from .search import Search, said_split
from .trace import Trace

TRIED = 6  #: layouts of a fleet that are simulated, besides the mixed one
PAYS = 1.05  #: what disaggregation must serve at least, times the mixed layout's requests/s


@dataclass(frozen=True, slots=True)
class Demand:
    """`rate` in requests/s; None: as much as can be. `share` of them must be in time."""

    trace: Trace
    slo: str
    share: float = 0.99
    rate: float | None = None
    seeds: int = 1
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Option:
    """A fleet with a name (`H200:32`, `cpu-1t:2`) and replicas that share a model."""

    name: str
    fleet: Fleet


@dataclass(frozen=True, slots=True)
class Layout:
    """What one split of one fleet does: `rate` it serves, and the share met at it."""

    name: str
    gpus: int
    tp: tuple[int, ...]
    splits: tuple[Split, ...]
    rate: float
    attainment: float

    @property
    def mixed(self) -> bool:
        return all(split.mixed == split.total for split in self.splits)


def plan(options: list[Option], demand: Demand, jobs: int, tell: Callable[[str], None]) -> dict:
    """The best layout of each fleet, the best of all, and whether disaggregation pays."""
    load = classes(demand.trace)
    tasks = [
        (option, layout, demand)
        for option in options
        for layout in _candidates(option.fleet, load, _slo(option, demand))
    ]
    if not tasks:
        raise SimulationError("no fleet to plan for")
    tell(f"{len(tasks)} layouts of {len(options)} fleets")
    layouts = []
    with ProcessPoolExecutor(max(1, jobs), get_context("fork")) as pool:
        for layout in pool.map(_simulate, *zip(*tasks, strict=True)):
            tell(f"{layout.name} {_said(layout)}: {_served(layout, demand)}")
            layouts.append(layout)
    best = choose(layouts, demand)
    rivals = [one for one in layouts if one.gpus == best.gpus]
    mixed = [one for one in rivals if one.mixed]
    apart = [one for one in rivals if not one.mixed]
    return {
        "trace": demand.trace.name,
        "slo": demand.slo,
        "share": demand.share,
        "rate": demand.rate,
        "layouts": [_plain(layout, demand) for layout in layouts],
        "best": _plain(best, demand),
        "verdict": verdict(mixed, apart, demand),
        "cluster": cluster(best, demand, options),
    }


def _slo(option: Option, demand: Demand) -> Slo:
    return Slo.of(demand.slo, option.fleet.reference)


def _candidates(fleet: Fleet, load: Classes, slo: Slo) -> list[tuple[Split, ...]]:
    """All mixed; then what serves most as a fluid, a split for each pool."""
    mixed = tuple(Split(mixed=count) for _, count in fleet.pools)
    choices = [[Split(p, count - p) for p in range(count + 1)] for _, count in fleet.pools]
    apart = [
        layout
        for layout in itertools.product(*choices)
        if any(s.prefill for s in layout) and any(s.decode for s in layout)
    ]
    apart.sort(key=lambda layout: -_fluid(fleet, layout, load, slo))
    partly = []
    if apart and len(fleet.pools) == 1:
        prefill, decode = apart[0][0].prefill, apart[0][0].decode
        partly = [(Split(prefill - 1, decode, 1),), (Split(prefill, decode - 1, 1),)]
    return [mixed, *apart[:TRIED], *(one for one in partly if one[0].serves)]


def _fluid(fleet: Fleet, layout: tuple[Split, ...], load: Classes, slo: Slo) -> float:
    """Requests/s that both phases could take: the smaller one counts."""
    prefill = decode = 0.0
    for (hardware, _), split in zip(fleet.pools, layout, strict=True):
        rate = simulated(hardware)
        seconds = rate.base + rate.token * load.uncached + rate.pair * load.pairs
        prefill += split.prefill / float(seconds @ load.share)
        step = min(slo.itl_s, rate.step + rate.weights + rate.read * rate.memory)
        decode += split.decode * rate.memory / float(load.context @ load.share) / step
    return min(prefill, decode)


def _simulate(option: Option, layout: tuple[Split, ...], demand: Demand) -> Layout:
    fleet = option.fleet
    mixed = all(split.mixed == split.total for split in layout)
    case = Case(
        demand.trace,
        fleet,
        _slo(option, demand),
        seeds=demand.seeds,
        closed=demand.closed,
        disaggregate="never" if mixed else "auto",
    )
    search = Search(case)
    if demand.rate is None:
        start = demand.trace.rate / fleet.gpus
        rate = search.largest(layout, demand.share, start, demand.seeds, 0.03) * fleet.gpus
        attainment = demand.share
    else:
        rate = demand.rate
        attainment = search.measure(layout, rate / fleet.gpus).attainment
    tp = tuple(hardware.tp for hardware, _ in fleet.pools)
    return Layout(option.name, fleet.gpus, tp, layout, rate, attainment)


def choose(layouts: list[Layout], demand: Demand) -> Layout:
    """With a rate: the fewest GPUs that serve it, else whoever serves most of it. Without one: the
    most per GPU. Mixed wins a tie, as it is simpler; two that serve the rate are one, too."""
    if demand.rate is None:
        return max(layouts, key=lambda one: one.rate / one.gpus * (PAYS if one.mixed else 1))
    enough = [one for one in layouts if one.attainment >= demand.share]
    if enough:
        return min(enough, key=lambda one: (one.gpus, not one.mixed, -one.attainment))
    return max(layouts, key=lambda one: (one.attainment, one.mixed))


def verdict(mixed: list[Layout], apart: list[Layout], demand: Demand) -> str:
    if not apart or not mixed:
        return "There is nothing to separate: one replica computes prompts and answers."
    one, other = _best(mixed, demand), _best(apart, demand)
    value = (lambda x: x.attainment) if demand.rate is not None else (lambda x: x.rate)
    said = f"{_said(other)} serves {_served(other, demand)}, all mixed {_served(one, demand)}"
    if value(one):
        said += f" ({value(other) / value(one):.2f}x)"
    if demand.rate is not None and abs(value(other) - value(one)) < _error(one, other, demand):
        said += f"; {_count(demand)} requests do not tell them apart, plan with a longer trace"
    least = (PAYS if demand.rate is None else 1.0) * value(one)
    if value(other) > least and not (demand.rate and one.attainment >= demand.share):
        return f"Disaggregation pays: {said}."
    return f"Disaggregation does not pay here: {said}."


def _count(demand: Demand) -> int:
    """Different requests behind a share: a seed moves copies, sessions, timestamps."""
    trace = demand.trace
    copies = max(1, ceil((demand.rate or trace.rate) / trace.rate - 1e-9))
    moved = copies > 1 or trace.sessions or trace.quantum_s > 0
    return copies * len(trace.items) * (demand.seeds if moved else 1)


def _error(one: Layout, other: Layout, demand: Demand) -> float:
    """Two standard errors of the difference of two shares, each of as many requests."""
    shares = one.attainment, other.attainment
    return 2 * sqrt(sum(share * (1 - share) for share in shares) / _count(demand))


def _best(layouts: list[Layout], demand: Demand) -> Layout:
    return max(layouts, key=lambda one: one.attainment if demand.rate else one.rate)


def _said(layout: Layout) -> str:
    return said_split(layout.splits)


def _served(layout: Layout, demand: Demand) -> str:
    if demand.rate is not None:
        return f"{layout.attainment:.1%} of {demand.rate:g} requests/s in time"
    return f"{layout.rate:.2f} requests/s with {demand.share:.0%} in time"


def _plain(layout: Layout, demand: Demand) -> dict:
    return {
        "fleet": layout.name,
        "gpus": layout.gpus,
        "split": _said(layout),
        "mixed": layout.mixed,
        "rate": round(layout.rate, 4),
        "rate_per_gpu": round(layout.rate / layout.gpus, 4),
        "attainment": round(layout.attainment, 4),
    }


def cluster(layout: Layout, demand: Demand, options: list[Option]) -> dict:
    """The part of cluster.yaml that the layout decides. A mixed replica is a decode worker that
    computes its prompts itself."""
    option = next(one for one in options if one.name == layout.name)
    slo = _slo(option, demand)
    prefill = sum(split.prefill for split in layout.splits)
    rest = sum(split.decode + split.mixed for split in layout.splits)
    hardware = option.fleet.reference
    return {
        "pools": {
            "prefill": {"replicas": prefill, **_pool(hardware)},
            "decode": {"replicas": rest, **_pool(hardware)},
        },
        "router": {"disaggregate": "never" if layout.mixed else "auto"},
        "slo": {"ttft_ms": slo.ttft_s * 1e3, "itl_ms": slo.itl_s * 1e3},
    }


def _pool(hardware: Hardware) -> dict:
    if not hardware.threads:
        return {"tensor_parallel": hardware.tp}
    engine: dict = {"threads": hardware.threads}
    if hardware.budget_s and hardware.budget_s < inf:
        engine["itl_budget_ms"] = hardware.budget_s * 1e3
    return {"engine": engine}


def text(result: dict) -> str:
    """The layouts, best first, and the verdict."""
    rows = sorted(result["layouts"], key=lambda row: (-row["attainment"], -row["rate_per_gpu"]))
    wide = max(len(row["fleet"]) for row in rows)
    lines = [f"trace {result['trace']}; {result['slo']}; {result['share']:.0%} in time"]
    lines.append(f"{'FLEET'.ljust(wide)}  {'SPLIT':>9}  REQUESTS/S  PER GPU  IN TIME")
    lines += [
        f"{row['fleet'].ljust(wide)}  {row['split']:>9}  {row['rate']:>10.2f}  "
        f"{row['rate_per_gpu']:>7.3f}  {row['attainment']:>7.1%}"
        for row in rows
    ]
    best = result["best"]
    return "\n".join([*lines, f"best: {best['split']} of {best['fleet']}", result["verdict"]])


def yaml_of(result: dict) -> str:
    """cluster.yaml, with the reason above it."""
    best = result["best"]
    head = [
        f"# diptych plan: {best['split']} of {best['fleet']} ({best['rate']:g} requests/s,",
        f"# {best['attainment']:.1%} in time) for {result['trace']}, {result['slo']}.",
        f"# {result['verdict']}",
    ]
    return "\n".join(head) + "\n" + yaml.safe_dump(result["cluster"], sort_keys=False)
