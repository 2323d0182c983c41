"""The ways in: `simulate` replays a trace, `plan` finds the layout for it.

Both take plain values, such as "H200:32" and "6P2D", and check them. The commands
`diptych simulate` and `diptych plan` call them, and so do notebooks, by `from diptych import plan`.
What they return prints as the commands print it, and holds the document of `-o json`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from ..router import RouterConfig
from .calibration import Calibration, merge_calibrations
from .case import Variant
from .cells import cell_fleet, cell_split
from .documents import OWN_POLICY, LiveComparison, PolicyEntry, StudyDocument
from .errors import SimulationError
from .expense import Prices
from .fleet import Faults, Fleet, Split
from .hardware import DEFAULT_ENGINE
from .metrics import Slo
from .plan import cluster_yaml, format_plan, plan_layouts
from .planned_layout import FleetOption, PlanDemand
from .recorded import read_calibration
from .report import study_page, study_text
from .search import ProgressReporter, no_progress
from .sources import load_trace
from .study import Study, parse_policies, run_study
from .tiers import TierSizes
from .trace import Trace

DEFAULT_MODEL = "llama3.1-70b-fp8"
DEFAULT_FLEET = "H200:32"
DEFAULT_TP = 4  #: GPUs of a replica
DEFAULT_SLO = "ttft=max(1s, 3x),itl=50ms"
BEST_SPLIT = "best"  #: in place of a split: try all of them
BOTH_VARIANTS = "both"  #: in place of a variant: `policy-only` and `full`
RECORDED = "recorded"  #: in place of a trace: the run of the router's log

#: A file or a generator, as `load_trace` takes them, or a trace that was loaded or made already.
TraceSource = str | Path | Trace


@dataclass(frozen=True, slots=True, repr=False)
class StudyResult:
    """What `simulate` found. It prints as the table of `diptych simulate`."""

    document: StudyDocument  #: that of `diptych simulate -o json`

    @property
    def policies(self) -> list[PolicyEntry]:
        """The figures of each policy in each variant."""
        return self.document["policies"]

    def html(self) -> str:
        """Return the report with plots, the page that `--html` writes."""
        return study_page(self.document)

    def __repr__(self) -> str:
        return study_text(self.document)


@dataclass(frozen=True, slots=True, repr=False)
class PlanResult:
    """What `plan` found. It prints as the table of `diptych plan`."""

    document: dict[str, Any]  #: that of `diptych plan -o json`

    @property
    def verdict(self) -> str:
        """A sentence that says whether disaggregation pays."""
        return self.document["verdict"]

    @property
    def best(self) -> dict[str, Any]:
        """The best layout: its fleet, split, rate and share in time."""
        return self.document["best"]

    @property
    def cluster_yaml(self) -> str:
        """The text of the cluster.yaml that `diptych plan` writes."""
        return cluster_yaml(self.document)

    def __repr__(self) -> str:
        return format_plan(self.document)


# ---- simulate ------------------------------------------------------------------------------------


def simulate(
    trace: TraceSource,
    *,
    model: str = DEFAULT_MODEL,
    engine: str = DEFAULT_ENGINE,
    tp: int = DEFAULT_TP,
    fleet: str = DEFAULT_FLEET,
    split: str = BEST_SPLIT,
    policy: str | Sequence[str] = OWN_POLICY,
    variant: str = Variant.POLICY_ONLY,
    slo: str = DEFAULT_SLO,
    seeds: int = 3,
    find_max: bool = False,
    rate: float | None = None,
    dispatch: str = "timestamp",
    head: float = 1.0,
    faults: str = "",
    agreement: bool = False,
    early_reject: bool = False,
    pace_first_token: bool | None = None,
    price: str | Sequence[str] = (),
    tiers: str = "",
    cells: int = 1,
    calibrate_from_live: str | Path | None = None,
    jobs: int | None = None,
    report_progress: ProgressReporter = no_progress,
) -> StudyResult:
    """Replay a trace against the real router on simulated workers.

    The parameters are the options of `diptych simulate`, and mean what its `--help` says. `policy`
    is a name, several, or `all`. `rate` is in requests/s; None: as recorded. `jobs` processes
    simulate; None: one for each core. Each line of progress goes to `report_progress`, for example
    `print`. Raises SimulationError, a sentence on what is wrong.
    """
    _check_at_least_one("seeds", seeds)
    _check_rate(rate)
    names = [policy] if isinstance(policy, str) else list(policy)
    prices = Prices.parse(price)
    calibration = read_calibration(Path(calibrate_from_live)) if calibrate_from_live else None
    setup = _study_setup(
        calibration,
        recorded=trace == RECORDED,
        model=model,
        engine=engine,
        fleet_name=fleet,
        tp=tp,
        split_name=split,
        slo_text=slo,
        tiers=TierSizes.parse(tiers),
    )
    _check_cells(cells, setup, agreement)
    prices.of_fleet_hour(setup.fleet)  # a GPU without a price is said before anything is simulated
    study = Study(
        trace=_read_trace(trace, calibration, head),
        model=setup.model,
        fleet=setup.fleet,
        fleet_name=setup.fleet_name,
        slo=setup.slo,
        policies=parse_policies(names),
        variants=_parse_variants(variant),
        split=setup.split,
        seeds=seeds,
        find_max=find_max,
        rate=rate,
        closed_loop=_is_closed_loop(dispatch),
        faults=_parse_faults(faults, setup.fleet),
        jobs=_process_count(jobs),
        agreement=agreement,
        router_config=setup.router_config,
        early_reject=early_reject,
        pace_first_token=pace_first_token,
        prices=prices,
        tiers=tiers,
        cells=cells,
    )
    document = run_study(study, report_progress)
    # Only the same load without faults can be laid beside the recorded run.
    is_same_load = rate is None and not find_max and head == 1 and not faults and cells == 1
    if trace == RECORDED and calibration and is_same_load:
        document["live"] = _compare_with_live(calibration, document)
    return StudyResult(document)


class StudySetup(NamedTuple):
    """What a calibration decides of a study, or the parameters without one."""

    model: str  #: "": the workers have measured coefficients
    fleet: Fleet  #: The hardware: how many replicas, and how fast they are.
    fleet_name: str  #: As reports show it: that of the parameter, or the measured hardware.
    split: Split | None  #: None: the best one
    slo: Slo
    router_config: RouterConfig | None  #: of a recorded run


def _study_setup(
    calibration: Calibration | None,
    *,
    recorded: bool,
    model: str,
    engine: str,
    fleet_name: str,
    tp: int,
    split_name: str,
    slo_text: str,
    tiers: TierSizes | None,
) -> StudySetup:
    """Return what to simulate. With a calibration, the workers are those that were measured.

    A recorded trace also takes split, targets and router from its run. Raises SimulationError.
    """
    router_config = None
    if calibration:
        run = calibration.run  # None: the coefficients come without a recorded run
        # Workers of several thread counts may have been measured; a study has one kind.
        threads = run.threads if run else calibration.workers[0].threads
        # A recorded run had workers of its own number, whatever this machine's cores hold.
        replicas = Split.parse(run.split).replicas if run and recorded else None
        fleet = calibration.fleet(threads, replicas)
        fleet_name = fleet.reference.gpu
        model = ""
        if run and recorded:
            split_name = run.split
            slo_text = run.slo
            router_config = run.router
    else:
        _check_at_least_one("tp", tp)
        fleet = Fleet.parse(fleet_name, model, tp, engine)
    fleet = fleet.with_tiers(tiers)
    # Targets may be multiples of a prefill's time, so they are parsed for these workers.
    return StudySetup(
        model=model,
        fleet=fleet,
        fleet_name=fleet_name,
        split=None if split_name == BEST_SPLIT else Split.parse(split_name),
        slo=Slo.parse(slo_text, fleet.costs),
        router_config=router_config,
    )


def _check_cells(cells: int, setup: StudySetup, agreement: bool) -> None:
    """Raise SimulationError if the fleet cannot be divided into so many cells, or the study not."""
    _check_at_least_one("cells", cells)
    if cells == 1:
        return
    if setup.split is None:
        raise SimulationError(f"cells {cells}: give the split of the whole fleet too, like 60P20D")
    if agreement:
        raise SimulationError(f"cells {cells}: a run step by step has one cell")
    setup.fleet.workers(setup.split)  # says that the split is of another fleet
    cell_fleet(setup.fleet, cells)
    cell_split(setup.split, cells)


def _parse_variants(variant: str) -> tuple[str, ...]:
    """Return the variants of the policies to run. Raises SimulationError."""
    if variant == BOTH_VARIANTS:
        return Variant.POLICY_ONLY, Variant.FULL
    if variant not in tuple(Variant):
        names = ", ".join(Variant)
        raise SimulationError(f"variant {variant}: expected {names} or {BOTH_VARIANTS}")
    return (variant,)


def _parse_faults(text: str, fleet: Fleet) -> Faults:
    """Return what goes wrong. Raises SimulationError, also for a worker that is not in the fleet."""
    faults = Faults.parse(text)
    for worker, _ in (*faults.slow_workers, *faults.killed_workers):
        if worker >= fleet.replicas:
            raise SimulationError(
                f"faults: there is no worker {worker}, the fleet has {fleet.replicas}"
            )
    return faults


def _compare_with_live(calibration: Calibration, study: StudyDocument) -> LiveComparison:
    """Return the recorded run's attainment, and how far from it the simulated one is.

    The attainment is the share of requests that met their targets.
    """
    assert calibration.run is not None, "a recorded trace has a run"
    live_attainment = calibration.run.attainment
    simulated_attainment = study["policies"][0]["at_rate"]["attainment"]
    points_apart = abs(live_attainment - simulated_attainment) * 100
    return {"attainment": live_attainment, "points_apart": round(points_apart, 2)}


# ---- plan ----------------------------------------------------------------------------------------


def plan(
    trace: TraceSource = "synthetic",
    *,
    model: str = DEFAULT_MODEL,
    engine: str = DEFAULT_ENGINE,
    tp: int | Sequence[int] = DEFAULT_TP,
    fleet: str | Sequence[str] = DEFAULT_FLEET,
    price: str | Sequence[str] = (),
    rate: float | None = None,
    share: float = 0.99,
    slo: str = DEFAULT_SLO,
    seeds: int = 1,
    dispatch: str = "timestamp",
    head: float = 1.0,
    tiers: str = "",
    calibrate_from_live: Sequence[str | Path] = (),
    jobs: int | None = None,
    report_progress: ProgressReporter = no_progress,
) -> PlanResult:
    """Find the layout that serves a trace best, and say whether disaggregation pays.

    The parameters are the options of `diptych plan`, and mean what its `--help` says. Several
    fleets are compared, and several `tp`; with a `price` for an hour of each GPU type, such as
    `H100=2.2,H200=3`, by what they cost instead of by the number of their GPUs. `rate` is in requests/s; None: as many as can be served.
    `jobs` processes simulate; None: one for each core. Each line of progress goes to
    `report_progress`, for example `print`. Nothing is written: `cluster_yaml` of the result is the
    file's text. Raises SimulationError, a sentence on what is wrong.
    """
    _check_at_least_one("seeds", seeds)
    _check_rate(rate)
    if not 0.5 <= share <= 1:
        raise SimulationError(f"share {share:g}: expected 0.5 to 1")
    calibration = None
    if calibrate_from_live:
        calibrations = [read_calibration(Path(path)) for path in calibrate_from_live]
        calibration = merge_calibrations(calibrations)
    fleets = [fleet] if isinstance(fleet, str) else list(fleet)
    tp_sizes = [tp] if isinstance(tp, int) else list(tp)
    demand = PlanDemand(
        _read_trace(trace, calibration, head),
        slo,
        share,
        rate,
        seeds=seeds,
        closed_loop=_is_closed_loop(dispatch),
    )
    options = _fleet_options(fleets, model, engine, tp_sizes, calibration, Prices.parse(price))
    document = plan_layouts(
        options, demand, _process_count(jobs), report_progress, TierSizes.parse(tiers)
    )
    return PlanResult(document)


def _fleet_options(
    fleets: list[str],
    model: str,
    engine: str,
    tp_sizes: list[int],
    calibration: Calibration | None,
    prices: Prices,
) -> list[FleetOption]:
    """Return the fleets to compare: the measured workers, or each fleet with each replica size.

    `tp_sizes` are GPUs of a replica. Raises SimulationError.
    """
    if calibration:
        thread_counts = sorted({worker.threads for worker in calibration.workers})
        measured_fleets = [calibration.fleet(threads) for threads in thread_counts]
        for fleet in measured_fleets:
            prices.of_fleet_hour(fleet)  # says that they have none
        return [
            FleetOption(f"{fleet.reference.gpu}:{fleet.replicas}", fleet)
            for fleet in measured_fleets
        ]
    for size in tp_sizes:
        _check_at_least_one("tp", size)
    options: list[FleetOption] = []
    for name in fleets:
        for size in tp_sizes:
            fleet = Fleet.parse(name, model, size, engine)
            full_name = name if len(tp_sizes) == 1 else f"{name} tp{size}"
            options.append(FleetOption(full_name, fleet, prices.of_fleet_hour(fleet)))
    return options


# ---- what both take ------------------------------------------------------------------------------


def _read_trace(source: TraceSource, calibration: Calibration | None, head: float) -> Trace:
    """Return the trace, or the share `head` of it. Raises SimulationError."""
    if not 0.01 <= head <= 1:
        raise SimulationError(f"head {head:g}: expected 0.01 to 1")
    if source == RECORDED:
        if calibration is None:
            raise SimulationError("trace recorded: needs --calibrate-from-live")
        trace = calibration.trace()
    else:
        trace = source if isinstance(source, Trace) else load_trace(str(source))
    return trace.head(head)


def _check_at_least_one(name: str, value: int) -> None:
    """Raise SimulationError for a number that is less than 1."""
    if value < 1:
        raise SimulationError(f"{name} {value}: expected 1 or more")


def _check_rate(rate: float | None) -> None:
    """Raise SimulationError for a rate that is no load."""
    if rate is not None and not 0 < rate < inf:
        raise SimulationError(f"rate {rate:g}: expected requests/s, more than 0")


def _is_closed_loop(dispatch: str) -> bool:
    """Return whether turns wait for the end of the one before. Raises SimulationError."""
    if dispatch not in ("timestamp", "thinktime"):
        raise SimulationError(f"dispatch {dispatch}: expected timestamp or thinktime")
    return dispatch == "thinktime"


def _process_count(jobs: int | None) -> int:
    """Return how many processes simulate. Raises SimulationError."""
    if jobs is None:
        return available_cores()
    _check_at_least_one("jobs", jobs)
    return jobs


def available_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))
