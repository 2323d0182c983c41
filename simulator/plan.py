"""Finds the layout that serves a load best, over splits, mixed layouts and several fleets.

A layout gives the replicas of each pool of a fleet their roles. Planning takes these steps:

1. `_candidate_layouts` orders the layouts of each fleet by what they would serve as a fluid, and
   keeps the first ones, the mixed one, and two that are partly mixed.
2. `simulate_layout` finds out what each of them serves, in several processes.
3. `choose_layout` takes the best.
4. `describe_verdict` says whether separate prefill and decode workers pay against mixed ones.
5. `reach.py` says whether the targets are within reach, what is reachable if not, and what other
   targets would give.
6. `tier_sizes.py` says how large tiers below the KV pools should be, where they are asked for.

At a given rate separate workers pay if the mixed layout misses its target and the separated one
misses less. Without a rate they pay if they serve at least `PAYS_FACTOR` times as much. In both
cases the interval of the ratio, of requests in time at one rate, has to exclude 1: else the verdict
is that disaggregation may pay.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Executor
from math import inf
from typing import Any, NamedTuple

import yaml

from ..protos.targets import format_time
from .bound import RequestClasses, classify_requests, mean_request_seconds
from .errors import SimulationError
from .expense import joules_per_token, price_per_million_tokens
from .fleet import Fleet, Split
from .hardware import Hardware, describe_doubts, describe_engine
from .intervals import Interval, ratio_interval
from .metrics import Slo
from .planned_layout import (
    FleetLayout,
    FleetOption,
    LayoutTask,
    PlanDemand,
    Splits,
    simulate_at,
    simulate_layout,
)
from .processes import simulation_processes
from .reach import ReachStudy, find_reach, target_curve
from .search import ProgressReporter, no_progress, split_text
from .tier_sizes import check_sizes, size_tiers, tier_lines
from .tiers import TierSizes

STEP_TOKENS_MINIMUM = 64  #: of `max_step_tokens` in cluster.yaml
SIMULATED_LAYOUTS = 6  #: limit of the separated layouts that are simulated, for each fleet
#: A separated layout must serve this times the mixed one's requests/s: mixed is simpler.
PAYS_FACTOR = 1.05
#: Columns of the table that are there if any layout has a figure, by their keys in the document.
EXPENSE_TITLES = {"joules_per_token": "J/TOKEN", "price_per_million_tokens": "PRICE/M"}


def plan_layouts(
    options: list[FleetOption],
    demand: PlanDemand,
    jobs: int,
    report_progress: ProgressReporter,
    tiers: TierSizes | None = None,
) -> dict[str, Any]:
    """Return what each layout serves, the best one, and whether disaggregation pays.

    The result is the document of `diptych plan -o json`. `jobs` processes simulate, and each result
    is a line for `report_progress`. `tiers` are the largest below a worker's KV pool: the best layout,
    which is found without any, is simulated with several sizes. Raises SimulationError if there is no
    fleet.
    """
    if tiers is not None:
        for option in options:
            check_sizes(option.fleet, tiers)  # before anything is simulated
    with simulation_processes(jobs) as pool:
        layouts = _simulate_layouts(options, demand, pool, report_progress)
        best = choose_layout(layouts, demand)
        contest = _find_contest(layouts, best, demand)
        study = ReachStudy(
            option_of={option.name: option for option in options},
            demand=demand,
            # The best rate is 0 where no layout has enough requests in time at any rate.
            rate=best.rate or demand.trace.rate,
            pool=pool,
        )
        comparison = None
        if contest is not None:
            comparison = _compare(contest, study)
        contenders = [best] if contest is None else [contest.separated, contest.mixed]
        report_progress("targets that are within reach, and others")
        reach = find_reach(study, contenders)
        curve = target_curve(study, contenders)
        tier_study = None
        if tiers is not None:
            report_progress("sizes of tiers below the KV pools")
            tier_study = size_tiers(best, _option_of(best, options), demand, tiers, pool)
    return {
        "trace": demand.trace.name,
        "slo": str(Slo.parse(demand.slo)),
        "share": demand.share,
        "rate": demand.rate,
        "engines": sorted({describe_engine(option.fleet.reference) for option in options}),
        "fit_warnings": describe_doubts(
            hardware for option in options for hardware, _ in option.fleet.pools
        ),
        "layouts": [_layout_entry(layout, demand, options) for layout in layouts],
        "best": _layout_entry(best, demand, options),
        "verdict": describe_verdict(contest, comparison, demand),
        "comparison": comparison and comparison.entry(),
        "reach": reach,
        "curve": curve,
        "tiers": tier_study,
        "cluster": cluster_settings(best, demand, options),
    }


def pick_layout(options: list[FleetOption], demand: PlanDemand, jobs: int) -> FleetLayout:
    """Return the best layout, as `plan_layouts` chooses it, without verdict and reach.

    `jobs` processes simulate. Raises SimulationError if there is no fleet.
    """
    with simulation_processes(jobs) as pool:
        return choose_layout(_simulate_layouts(options, demand, pool, no_progress), demand)


def _simulate_layouts(
    options: list[FleetOption],
    demand: PlanDemand,
    pool: Executor,
    report_progress: ProgressReporter,
) -> list[FleetLayout]:
    """Return what the candidates of all fleets serve. Raises SimulationError if there is no fleet."""
    load = classify_requests(demand.trace)
    tasks = [
        LayoutTask(option, splits, demand)
        for option in options
        for splits in _candidate_layouts(option.fleet, load, option.slo(demand))
    ]
    if not tasks:
        raise SimulationError("no fleet to plan for")
    report_progress(f"{len(tasks)} layouts of {len(options)} fleets")
    layouts: list[FleetLayout] = []
    for layout in pool.map(simulate_layout, tasks):
        served = _describe_served(layout, demand)
        report_progress(f"{layout.fleet_name} {split_text(layout.splits)}: {served}")
        layouts.append(layout)
    return layouts


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
    separated.sort(key=lambda splits: -_fluid_rate(fleet, splits, load, slo))  # best first

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
        # Answers of one token have no decode step.
        decode_rate += split.decode / seconds.decode_s if seconds.decode_s else inf
    return min(prefill_rate, decode_rate)


# ---- the choice ----------------------------------------------------------------------------------


def choose_layout(layouts: list[FleetLayout], demand: PlanDemand) -> FleetLayout:
    """Return the best layout.

    There are three cases:
    - Without a rate: the layout that serves most requests/s for its expense, where a separated one
      has to serve `PAYS_FACTOR` times as much as a mixed one. The expense is the price of the fleet
      where prices are stated, else the number of its GPUs.
    - With a rate that some layouts serve: the one with the least expense, of these a mixed one.
    - With a rate that none serves: the one that serves most of it, of equal ones a mixed one.
    """
    if demand.rate is None:
        return max(
            layouts,
            key=lambda layout: layout.rate / layout.expense * (PAYS_FACTOR if layout.mixed else 1),
        )
    sufficient = [layout for layout in layouts if layout.attainment >= demand.share]
    if sufficient:
        return min(
            sufficient, key=lambda layout: (layout.expense, not layout.mixed, -layout.attainment)
        )
    return max(layouts, key=lambda layout: (layout.attainment, layout.mixed))


class Contest(NamedTuple):
    """The best separated layout and the best mixed one, of equal expense.

    A partly mixed layout counts as separated.
    """

    separated: FleetLayout
    mixed: FleetLayout


class LayoutComparison(NamedTuple):
    """How many times as many requests a separated layout serves in time, at the same rate."""

    rate: float  #: requests/s that both layouts were offered
    ratio: float  #: requests in time, separated over mixed; inf: the mixed layout serves none
    interval: Interval  #: of the ratio

    @property
    def pays(self) -> bool:
        """Whether the separated layout certainly serves more."""
        return self.interval.low > 1

    def entry(self) -> dict[str, Any]:
        """Return the comparison as it stands in the document; None stands for infinity."""
        return {
            "rate": round(self.rate, 4),
            "ratio": _finite(self.ratio),
            "interval": [_finite(bound) for bound in self.interval],
        }

    def __str__(self) -> str:
        low, high = self.interval
        return f"{_times(self.ratio)}, {_times(low)} to {_times(high)}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < inf else "∞"


def _finite(value: float) -> float | None:
    """Return the value as JSON can hold it: None for infinity."""
    return round(value, 4) if value < inf else None


def _find_contest(
    layouts: Sequence[FleetLayout], best: FleetLayout, demand: PlanDemand
) -> Contest | None:
    """Return the best layouts of both kinds that cost as much as `best`.

    None: there are layouts of one kind alone, as with a fleet of one replica.
    """
    same_size = [layout for layout in layouts if layout.expense == best.expense]
    separated = [layout for layout in same_size if not layout.mixed]
    mixed = [layout for layout in same_size if layout.mixed]
    if not separated or not mixed:
        return None
    return Contest(
        separated=max(separated, key=lambda layout: _compared_value(layout, demand)),
        mixed=max(mixed, key=lambda layout: _compared_value(layout, demand)),
    )


def _compare(contest: Contest, study: ReachStudy) -> LayoutComparison:
    """Return how both layouts serve the same requests.

    With a rate in the demand, both were simulated at it already. Without, they are simulated at the
    largest rate that the separated layout serves.
    """
    if study.demand.rate is not None:
        return compare_layouts(contest)
    rate = contest.separated.rate or study.rate
    tasks = [
        LayoutTask(study.option_of[layout.fleet_name], layout.splits, study.demand)
        for layout in contest
    ]
    separated, mixed = study.pool.map(simulate_at, tasks, [rate] * len(tasks))
    return compare_layouts(Contest(separated, mixed))


def compare_layouts(contest: Contest) -> LayoutComparison:
    """Return the ratio of the requests in time; both layouts served the same ones."""
    separated, mixed = contest
    ratio = 1.0
    if separated.attainment or mixed.attainment:
        ratio = separated.attainment / mixed.attainment if mixed.attainment else inf
    return LayoutComparison(separated.rate, ratio, ratio_interval(separated.met, mixed.met))


def describe_verdict(
    contest: Contest | None, comparison: LayoutComparison | None, demand: PlanDemand
) -> str:
    """Return a sentence that says whether disaggregation pays, and by how much.

    It pays where the separated layout serves more, as the module's docstring says, and the ratio's
    interval lies above 1.
    """
    if contest is None or comparison is None:
        return "There is nothing to separate: one replica computes prompts and answers."
    separated, mixed = contest
    text = (
        f"{split_text(separated.splits)} serves {_describe_served(separated, demand)}, "
        f"all mixed {_describe_served(mixed, demand)}"
    )
    separated_value = _compared_value(separated, demand)
    mixed_value = _compared_value(mixed, demand)
    if demand.rate is None:
        serves_more = separated_value > PAYS_FACTOR * mixed_value
        times = f"{separated_value / mixed_value:.2f}x; " if mixed_value else ""
        text += f" ({times}at {comparison.rate:.3g} requests/s {comparison} as many in time)"
    else:
        serves_more = separated_value > mixed_value and mixed.attainment < demand.share
        text += f" ({comparison})"
    if not serves_more:
        return f"Disaggregation does not pay here: {text}."
    if not comparison.pays:
        return (
            f"Disaggregation may pay: {text}; these requests do not tell, plan with a longer trace "
            "or more --seeds."
        )
    return f"Disaggregation pays: {text}."


def _compared_value(layout: FleetLayout, demand: PlanDemand) -> float:
    """Return what layouts are compared by: requests/s, or at a given rate the share in time."""
    return layout.rate if demand.rate is None else layout.attainment


# ---- what is written down ------------------------------------------------------------------------


def _describe_served(layout: FleetLayout, demand: PlanDemand) -> str:
    """Return the share in time at the demand's rate, or without one the rate that is served."""
    if demand.rate is not None:
        return f"{layout.attainment:.1%} of {demand.rate:g} requests/s in time"
    return f"{layout.rate:.2f} requests/s with {demand.share:.0%} in time"


def _layout_entry(
    layout: FleetLayout, demand: PlanDemand, options: list[FleetOption]
) -> dict[str, Any]:
    """Return the layout as it stands in the document.

    `price_per_million_tokens` and `joules_per_token` are of tokens in time (`expense.py`), and None
    where they are not known.
    """
    option = _option_of(layout, options)
    tokens_per_s = layout.rate * layout.attainment * demand.trace.mean_output_tokens
    price = price_per_million_tokens(option.hour_price, tokens_per_s)
    joules = joules_per_token(option.fleet, tokens_per_s)
    return {
        "fleet": layout.fleet_name,
        "gpus": layout.gpus,
        "split": split_text(layout.splits),
        "mixed": layout.mixed,
        "rate": round(layout.rate, 4),
        "rate_per_gpu": round(layout.rate / layout.gpus, 4),
        "attainment": round(layout.attainment, 4),
        "interval": [round(bound, 4) for bound in layout.interval],
        "requests": layout.requests,
        "refused": layout.refused,
        "ttft_offered": layout.ttft_offered,
        "price_per_million_tokens": None if price is None else round(price, 4),
        "joules_per_token": None if joules is None else round(joules, 3),
    }


def _option_of(layout: FleetLayout, options: list[FleetOption]) -> FleetOption:
    return next(option for option in options if option.name == layout.fleet_name)


def cluster_settings(
    layout: FleetLayout, demand: PlanDemand, options: list[FleetOption]
) -> dict[str, Any]:
    """Return the settings of cluster.yaml that the layout decides.

    A mixed replica is a decode worker that computes its prompts itself.
    """
    option = _option_of(layout, options)
    slo = option.slo(demand)
    hardware = option.fleet.reference
    prefill_replicas = sum(split.prefill for split in layout.splits)
    decode_replicas = sum(split.decode + split.mixed for split in layout.splits)
    # Each pool has settings of its own: YAML would write a shared object as an alias.
    settings: dict[str, Any] = {
        "pools": {
            "prefill": {"replicas": prefill_replicas, **_replica_settings(hardware)},
            "decode": {"replicas": decode_replicas, **_replica_settings(hardware)},
        },
        "router": {"disaggregate": "never" if layout.mixed else "auto"},
        "slo": {"ttft": str(slo.ttft), "itl_ms": slo.itl_s * 1e3},
    }
    if not hardware.threads:  # GPUs hand their KV over by no other transport
        settings["kv_transfer"] = {"transport": "nixl"}
    return settings


def _replica_settings(hardware: Hardware) -> dict[str, Any]:
    """Return the settings of a pool that make its replicas like this one.

    These are its GPUs; or of a CPU worker its threads, and the limits of its steps. The size of the
    KV pool is not among them: cluster.yaml has it in MiB, and a calibration in tokens.
    """
    if not hardware.threads:
        return {"tensor_parallel": hardware.tp, "engine": {"device": "cuda"}}
    engine: dict[str, float] = {
        "threads": hardware.threads,
        "max_step_tokens": max(hardware.chunk_tokens, STEP_TOKENS_MINIMUM),
        "max_running": hardware.max_running,
    }
    if hardware.itl_budget_s and hardware.itl_budget_s < inf:
        engine["itl_budget_ms"] = hardware.itl_budget_s * 1e3
    return {"engine": engine}


def format_plan(document: dict[str, Any]) -> str:
    """Return the document of `plan_layouts` as text: layouts, verdict, targets within reach.

    The column `95 %` is the interval of the share in time, which is a point where the layout's rate
    was searched for. Layouts with most in time come first. `J/TOKEN` is the GPUs' energy, at their
    full power, for a token of an answer in time; `PRICE/M` is the price of a million of them.
    """
    entries = sorted(
        document["layouts"], key=lambda entry: (-entry["attainment"], -entry["rate_per_gpu"])
    )
    width = max(len(entry["fleet"]) for entry in entries)
    expense_titles = {
        key: title
        for key, title in EXPENSE_TITLES.items()
        if any(entry[key] is not None for entry in entries)
    }
    best = document["best"]
    lines = [
        f"trace {document['trace']}; {document['slo']}; {document['share']:.0%} in time",
        *document["engines"],
        *document["fit_warnings"],
        f"{'FLEET'.ljust(width)}  {'SPLIT':>9}  REQUESTS/S  PER GPU  IN TIME           95 %"
        + "".join(f"  {title:>7}" for title in expense_titles.values()),
    ]
    for entry in entries:
        lines.append(
            f"{entry['fleet'].ljust(width)}  {entry['split']:>9}  {entry['rate']:>10.2f}  "
            f"{entry['rate_per_gpu']:>7.3f}  {entry['attainment']:>7.1%}"
            f"  {_percent_range(entry['interval']):>13}"
            + "".join(f"  {_figure(entry[key]):>7}" for key in expense_titles)
        )
    lines.append(f"best: {best['split']} of {best['fleet']}")
    lines.append(_offered_line(document["reach"]))
    lines.append(document["verdict"])
    lines.append(document["reach"]["sentence"])
    lines += _curve_lines(document)
    if document["tiers"]:
        lines += tier_lines(document["tiers"])
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _offered_line(reach: dict[str, Any]) -> str:
    """Return the TTFT over all offered requests, the refused ones behind all others."""
    figures = [
        f"{rank} {'refused' if seconds is None else format_time(round(seconds, 3))}"
        for rank, seconds in reach["ttft_offered"].items()
    ]
    return (
        f"{reach['best']} at {reach['rate']:.3g} requests/s: TTFT of all offered requests "
        f"{', '.join(figures)}; {reach['refused']} of {reach['requests']} refused"
    )


def _percent_range(interval: list[float]) -> str:
    low, high = interval
    return f"{low:.1%}-{high:.1%}"


def _curve_lines(document: dict[str, Any]) -> list[str]:
    """Return the goodput over ITL targets as a table, a column for each layout."""
    points: dict[float, list[dict[str, Any]]] = {}
    for point in document["curve"]:
        points.setdefault(point["itl_ms"], []).append(point)
    columns = [f"{point['split']} of {point['fleet']}" for point in next(iter(points.values()))]
    lines = [
        f"goodput at {document['reach']['rate']:g} requests/s by ITL target, TTFT as asked:",
        "  ".join(["ITL TARGET", *(f"{column:>26}" for column in columns)]),
    ]
    for itl_ms, row in points.items():
        cells = [f"{point['goodput']:.3f}/s ({_percent_range(point['interval'])})" for point in row]
        lines.append("  ".join([f"{itl_ms:>7g} ms", *(f"{cell:>26}" for cell in cells)]))
    return lines


def cluster_yaml(document: dict[str, Any]) -> str:
    """Return the text of cluster.yaml for the best layout; comments say why, and how it is served.

    The plan knows the model's shape, and not where its checkpoint is.
    """
    best = document["best"]
    comments = [
        f"# diptych plan: {best['split']} of {best['fleet']} ({best['rate']:g} requests/s,",
        f"# {best['attainment']:.1%} in time) for {document['trace']}, {document['slo']}.",
        f"# {document['verdict']}",
        f"# {document['reach']['sentence']}",
        "# Serve it: diptych serve MODEL -c FILE, with this file and a checkpoint folder (or a",
        "# Hugging Face id), or add model.path here.",
    ]
    settings = yaml.safe_dump(document["cluster"], sort_keys=False)
    return "\n".join(comments) + "\n" + settings
