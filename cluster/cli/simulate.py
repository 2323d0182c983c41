"""`diptych simulate`: policies on a trace, in virtual time. `diptych plan`: the layout for one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from .common import check_output, check_writable, fail, save
from .progress import step_progress

if TYPE_CHECKING:
    from ...router import RouterConfig
    from ...simulator.calibration import Calibration
    from ...simulator.documents import LiveComparison, StudyDocument
    from ...simulator.fleet import Faults, Fleet, Split
    from ...simulator.metrics import Slo
    from ...simulator.planned_layout import FleetOption
    from ...simulator.trace import Trace

TRACE_HELP = "File (.jsonl, Azure .csv, either .gz; ServeGen .npz), synthetic[:N], poisson:256-1024:64-128[:N]."
ModelOption = Annotated[str, typer.Option(help="Model and type of its weights.")]
SloOption = Annotated[
    str,
    typer.Option(help="Targets: ttft=2s, max(1s, 3x) of the isolated prefill, 500ms + 300ms/1k."),
]
LiveOption = Annotated[
    Path | None,
    typer.Option(
        "--calibrate-from-live",
        help="Router's log, or JSON of measured coefficients; `recorded` replays its run.",
    ),
]
OutputOption = Annotated[str, typer.Option("-o", "--output", help="table or json")]
JobsOption = Annotated[int | None, typer.Option(min=1, help="Processes. Default: every core.")]
DispatchOption = Annotated[
    str, typer.Option(help="timestamp, or thinktime: turns wait for the end of the one before.")
]
PolicyOption = Annotated[list[str] | None, typer.Option(help="May be given several times; or all.")]
VariantOption = Annotated[
    str, typer.Option(help="policy-only, full (baselines as their authors ship them), or both.")
]
SeedsOption = Annotated[int, typer.Option(min=1, help="Jitter seeds.")]
#: G90 and G99 are the highest rates per GPU at which 90% and 99% of the requests meet their
#: targets.
FindMaxFlag = Annotated[bool, typer.Option("--find-max", help="Search G90 and G99.")]
HeadOption = Annotated[float, typer.Option(min=0.01, max=1, help="Share of the trace to use.")]
FaultsOption = Annotated[
    str, typer.Option(help="stale=1s,slow=3x@0,wrong=10%,kill=2@60s; all optional.")
]
AgreementFlag = Annotated[
    bool, typer.Option("--agreement", help="Run step by step too; say how far apart.")
]
EarlyRejectFlag = Annotated[
    bool, typer.Option("--early-reject", help="Refuse late requests at once: diptych, mooncake.")
]
HtmlOption = Annotated[Path | None, typer.Option(help="Write a report with plots.")]


def simulate(
    trace: Annotated[str, typer.Argument(help=TRACE_HELP + " Or: recorded.")],
    model: ModelOption = "llama3.1-70b-fp8",
    tp: Annotated[int, typer.Option(min=1, help="GPUs of a replica.")] = 4,
    fleet: Annotated[
        str, typer.Option(help="GPUs by type: H200:32, or H100:8,H200:8.")
    ] = "H200:32",
    split: Annotated[
        str, typer.Option(help="Replicas by role, like 6P2D or 8M; or best.")
    ] = "best",
    policy: PolicyOption = None,
    variant: VariantOption = "policy-only",
    slo: SloOption = "ttft=max(1s, 3x),itl=50ms",
    seeds: SeedsOption = 3,
    find_max: FindMaxFlag = False,
    rate: Annotated[
        float | None, typer.Option(help="Requests/s without --find-max. Default: as recorded.")
    ] = None,
    dispatch: DispatchOption = "timestamp",
    head: HeadOption = 1.0,
    faults: FaultsOption = "",
    agreement: AgreementFlag = False,
    early_reject: EarlyRejectFlag = False,
    calibrate_from_live: LiveOption = None,
    jobs: JobsOption = None,
    output: OutputOption = "table",
    html: HtmlOption = None,
) -> None:
    """Replay TRACE against the real router on simulated workers."""
    _check_options(rate, html, output)
    variants = _parse_variants(variant)
    # The simulator is imported here: no other command pays for it.
    from ...simulator.report import study_page, study_text
    from ...simulator.study import Study, parse_policies, run_study

    with _simulator_errors_reported():
        calibration = _read_calibration(calibrate_from_live)
        setup = _study_setup(
            calibration,
            trace=trace,
            model=model,
            fleet_name=fleet,
            tp=tp,
            split_name=split,
            slo_text=slo,
        )
        checked_faults = _parse_faults(faults, setup.fleet)
        study = Study(
            trace=_load_trace(trace, calibration, head),
            model=setup.model,
            fleet=setup.fleet,
            fleet_name=setup.fleet_name,
            slo=setup.slo,
            policies=parse_policies(policy or ["diptych"]),
            variants=variants,
            split=setup.split,
            seeds=seeds,
            find_max=find_max,
            rate=rate,
            closed_loop=_is_closed_loop(dispatch),
            faults=checked_faults,
            jobs=jobs or available_cores(),
            agreement=agreement,
            router_config=setup.router_config,
            early_reject=early_reject,
        )
        with step_progress("simulating") as report:
            result = run_study(study, report)
        # A search in which no rate was held has nothing to lay beside the recorded run.
        if trace == "recorded" and calibration and "at_rate" in result["policies"][0]:
            result["live"] = _compare_with_live(calibration, result)
    typer.echo(json.dumps(result, indent=2) if output == "json" else study_text(result))
    if html:
        save(html, study_page(result))


@contextmanager
def _simulator_errors_reported() -> Iterator[None]:
    """Turn what is wrong with the simulator's input, and an interrupt, into an exit."""
    from ...simulator import SimulationError

    try:
        yield
    except SimulationError as error:
        fail(str(error), 2)
    except KeyboardInterrupt:
        fail("interrupted", 130)


def _parse_variants(variant: str) -> tuple[str, ...]:
    """Return the variants of the policies to run, or fail."""
    if variant not in ("policy-only", "full", "both"):
        fail(f"--variant {variant}: expected policy-only, full or both", 2)
    return ("policy-only", "full") if variant == "both" else (variant,)


def _check_options(rate: float | None, file: Path | None, output: str) -> None:
    """Fail for options that are wrong, before an hour of work; `file` is what will be written."""
    check_output(output)
    if rate is not None and not 0 < rate < inf:
        fail(f"--rate {rate:g}: expected requests/s, more than 0", 2)
    check_writable(file)


def _compare_with_live(calibration: Calibration, study: StudyDocument) -> LiveComparison:
    """Return the recorded run's attainment, and how far from it the simulated one is.

    The attainment is the share of requests that met their targets.
    """
    assert calibration.run is not None, "a recorded trace has a run"
    live_attainment = calibration.run.attainment
    simulated_attainment = study["policies"][0]["at_rate"]["attainment"]
    points_apart = abs(live_attainment - simulated_attainment) * 100
    return {"attainment": live_attainment, "points_apart": round(points_apart, 2)}


class StudySetup(NamedTuple):
    """What a calibration decides of a study, or the command line without one."""

    model: str  #: "": the workers have measured coefficients
    fleet: Fleet  #: The hardware: how many replicas, and how fast they are.
    fleet_name: str  #: As reports show it: that of the option, or the measured hardware.
    split: Split | None  #: None: the best one
    slo: Slo
    router_config: RouterConfig | None  #: of a recorded run


def _study_setup(
    calibration: Calibration | None,
    *,
    trace: str,
    model: str,
    fleet_name: str,
    tp: int,
    split_name: str,
    slo_text: str,
) -> StudySetup:
    """Return what to simulate. With a calibration, the workers are those that were measured.

    A recorded trace also takes split, targets and router from its run. Raises SimulationError.
    """
    from ...simulator.fleet import Fleet, Split
    from ...simulator.metrics import Slo

    router_config = None
    if calibration:
        run = calibration.run  # None: the coefficients come without a recorded run
        # Workers of several thread counts may have been measured; a study has one kind.
        fleet = calibration.fleet(run.threads if run else calibration.workers[0].threads)
        fleet_name = fleet.reference.gpu
        model = ""
        if run and trace == "recorded":
            split_name = run.split
            slo_text = run.slo
            router_config = run.router
    else:
        fleet = Fleet.parse(fleet_name, model, tp)
    # Targets may be multiples of a prefill's time, so they are parsed for these workers.
    return StudySetup(
        model=model,
        fleet=fleet,
        fleet_name=fleet_name,
        split=None if split_name == "best" else Split.parse(split_name),
        slo=Slo.parse(slo_text, fleet.costs),
        router_config=router_config,
    )


def _parse_faults(text: str, fleet: Fleet) -> Faults:
    """Return what goes wrong; exit if a worker in it is not in the fleet."""
    from ...simulator.fleet import Faults

    faults = Faults.parse(text)
    for worker, _ in (*faults.slow_workers, *faults.killed_workers):
        if worker >= fleet.replicas:
            fail(f"--faults: there is no worker {worker}, the fleet has {fleet.replicas}", 2)
    return faults


def plan(
    trace: Annotated[str, typer.Argument(help=TRACE_HELP)] = "synthetic",
    model: ModelOption = "llama3.1-70b-fp8",
    tp: Annotated[str, typer.Option(help="GPUs of a replica; several: 2,4.")] = "4",
    fleet: Annotated[
        list[str] | None, typer.Option(help="A fleet to consider; may be given several times.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests/s to serve. Default: as many as can be.")
    ] = None,
    share: Annotated[float, typer.Option(min=0.5, max=1, help="Of requests in time.")] = 0.99,
    slo: SloOption = "ttft=max(1s, 3x),itl=50ms",
    seeds: SeedsOption = 1,
    dispatch: DispatchOption = "timestamp",
    head: HeadOption = 1.0,
    calibrate_from_live: Annotated[
        list[Path] | None,
        typer.Option(help="As for simulate; several: workers of several sizes."),
    ] = None,
    jobs: JobsOption = None,
    write: Annotated[Path, typer.Option(help="Where the plan goes.")] = Path("cluster.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite it.")] = False,
    output: OutputOption = "table",
) -> None:
    """Find the layout that serves TRACE best; say whether disaggregation pays; write it down."""
    _check_options(rate, write, output)
    if write.exists() and not force:
        fail(f"{write} exists: give another --write, or --force", 2)
    from ...simulator import plan as planner
    from ...simulator.planned_layout import PlanDemand

    with _simulator_errors_reported():
        calibration = _read_calibrations(calibrate_from_live or [])
        fleet_options = _fleet_options(fleet or ["H200:32"], model, tp, calibration)
        demand = PlanDemand(
            _load_trace(trace, calibration, head),
            slo,
            share,
            rate,
            seeds=seeds,
            closed_loop=_is_closed_loop(dispatch),
        )
        with step_progress("planning") as report:
            result = planner.plan_layouts(fleet_options, demand, jobs or available_cores(), report)
    typer.echo(json.dumps(result, indent=2) if output == "json" else planner.format_plan(result))
    save(write, planner.cluster_yaml(result))
    if output == "table":
        typer.echo(f"wrote {write}")


def _fleet_options(
    fleets: list[str], model: str, tp_sizes: str, calibration: Calibration | None
) -> list[FleetOption]:
    """Return the fleets to compare: the measured workers, or each fleet with each replica size.

    `tp_sizes` are GPUs of a replica, such as "2,4".
    """
    from ...simulator.fleet import Fleet
    from ...simulator.planned_layout import FleetOption

    if calibration:
        thread_counts = sorted({worker.threads for worker in calibration.workers})
        measured_fleets = [calibration.fleet(threads) for threads in thread_counts]
        return [
            FleetOption(f"{fleet.reference.gpu}:{fleet.replicas}", fleet)
            for fleet in measured_fleets
        ]
    try:
        sizes = [int(part) for part in tp_sizes.split(",")]
    except ValueError:
        fail(f"--tp {tp_sizes}: expected numbers, like 4 or 2,4", 2)
    if min(sizes) < 1:
        fail(f"--tp {tp_sizes}: a replica has at least one GPU", 2)
    return [
        FleetOption(name if len(sizes) == 1 else f"{name} tp{size}", Fleet.parse(name, model, size))
        for name in fleets
        for size in sizes
    ]


def _load_trace(source: str, calibration: Calibration | None, head: float) -> Trace:
    """Return the trace, or the share `head` of it. Raises SimulationError."""
    from ...simulator.errors import SimulationError
    from ...simulator.sources import load_trace

    if source == "recorded":
        if calibration is None:
            raise SimulationError("trace recorded: needs --calibrate-from-live")
        return calibration.trace()
    trace = load_trace(source)
    return trace.head(head) if head < 1 else trace


def _read_calibration(path: Path | None) -> Calibration | None:
    """Return the measured workers of a file, or None without one. Raises SimulationError."""
    if path is None:
        return None
    from ...simulator.recorded import read_calibration

    return read_calibration(path)


def _read_calibrations(paths: list[Path]) -> Calibration | None:
    """Return the measured workers of all files together, or None without files."""
    if not paths:
        return None
    from ...simulator.calibration import merge_calibrations
    from ...simulator.recorded import read_calibration

    return merge_calibrations([read_calibration(path) for path in paths])


def _is_closed_loop(dispatch: str) -> bool:
    """Return whether turns wait for the end of the one before."""
    if dispatch not in ("timestamp", "thinktime"):
        fail(f"--dispatch {dispatch}: expected timestamp or thinktime", 2)
    return dispatch == "thinktime"


def available_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))
