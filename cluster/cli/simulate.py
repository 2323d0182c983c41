"""`diptych simulate`: policies on a trace, in virtual time. `diptych plan`: the layout for one."""

from __future__ import annotations

import json
import os
import sys
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import check_output, check_writable, fail, save

if TYPE_CHECKING:
    from ...simulator.calibrate import Calibration
    from ...simulator.plan import Option
    from ...simulator.study import Study
    from ...simulator.trace import Trace

TRACE_HELP = "File (.jsonl, .jsonl.gz, ServeGen .npz), synthetic[:N], poisson:256-1024:64-128[:N]."
Model = Annotated[str, typer.Option(help="Model and type of its weights.")]
Slo = Annotated[str, typer.Option(help="Targets; 3x: of the prompt's isolated prefill.")]
Live = Annotated[
    Path | None,
    typer.Option(
        "--calibrate-from-live",
        help="Router's log, or JSON of measured coefficients; `recorded` replays its run.",
    ),
]
Output = Annotated[str, typer.Option("-o", "--output", help="table or json")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Processes. Default: every core.")]
Dispatch = Annotated[
    str, typer.Option(help="timestamp, or thinktime: turns wait for the end of the one before.")
]


def simulate(
    trace: Annotated[str, typer.Argument(help=TRACE_HELP + " Or: recorded.")],
    model: Model = "llama3.1-70b-fp8",
    tp: Annotated[int, typer.Option(min=1, help="GPUs of a replica.")] = 4,
    fleet: Annotated[
        str, typer.Option(help="GPUs by type: H200:32, or H100:8,H200:8.")
    ] = "H200:32",
    split: Annotated[
        str, typer.Option(help="Replicas by role, like 6P2D or 8M; or best.")
    ] = "best",
    policy: Annotated[
        list[str] | None, typer.Option(help="May be given several times; or all.")
    ] = None,
    variant: Annotated[
        str, typer.Option(help="policy-only, full (baselines as their authors ship them), or both.")
    ] = "policy-only",
    slo: Slo = "ttft=max(1s,3x),itl=50ms",
    seeds: Annotated[int, typer.Option(min=1, help="Jitter seeds.")] = 3,
    find_max: Annotated[bool, typer.Option("--find-max", help="Search G90 and G99.")] = False,
    rate: Annotated[
        float | None, typer.Option(help="Requests/s without --find-max. Default: as recorded.")
    ] = None,
    dispatch: Dispatch = "timestamp",
    head: Annotated[float, typer.Option(min=0.01, max=1, help="Share of the trace to use.")] = 1.0,
    faults: Annotated[
        str, typer.Option(help="stale=1s,slow=3x@0,wrong=10%,kill=2@60s; all optional.")
    ] = "",
    agreement: Annotated[
        bool, typer.Option("--agreement", help="Run step by step too; say how far apart.")
    ] = False,
    calibrate_from_live: Live = None,
    jobs: Jobs = None,
    output: Output = "table",
    html: Annotated[Path | None, typer.Option(help="Write a report with plots.")] = None,
) -> None:
    """Replay TRACE against the real router on simulated workers."""
    _check_options(rate, html, output)
    if variant not in ("policy-only", "full", "both"):
        fail(f"--variant {variant}: expected policy-only, full or both", 2)
    options = dict(locals())  # by name: most of them are fields of the study
    # The simulator is imported here: no other command pays for it.
    from ...simulator import SimulationError
    from ...simulator.report import document, text
    from ...simulator.study import run

    try:
        calibration = _read_calibration(calibrate_from_live)
        result = run(_make_study(options, calibration), report_progress)
        if trace == "recorded" and calibration:
            result["live"] = _compare_with_live(calibration, result)
    except SimulationError as error:
        fail(str(error), 2)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    typer.echo(json.dumps(result, indent=2) if output == "json" else text(result))
    if html:
        save(html, document(result))


def _check_options(rate: float | None, file: Path | None, output: str) -> None:
    check_output(output)
    if rate is not None and not 0 < rate < inf:
        fail(f"--rate {rate:g}: expected requests/s, more than 0", 2)
    check_writable(file)


def _compare_with_live(calibration: Calibration, result: dict[str, Any]) -> dict[str, float]:
    """Return the recorded run's attainment, and how far from it the simulated one is."""
    assert calibration.run is not None, "a recorded trace has a run"
    live_attainment = calibration.run.attainment
    simulated_attainment = result["policies"][0]["at_rate"]["attainment"]
    points_apart = abs(live_attainment - simulated_attainment) * 100
    return {"attainment": live_attainment, "points_apart": round(points_apart, 2)}


def _make_study(options: dict[str, Any], calibration: Calibration | None) -> Study:
    """Return what to simulate. With a calibration, the workers are those that were measured.

    A recorded trace also takes split, targets and router from its run.
    """
    from ...simulator.fleet import Faults, Fleet, Split
    from ...simulator.metrics import Slo
    from ...simulator.study import Study, policies_named

    split = options["split"]
    slo = options["slo"]
    router = None
    if calibration:
        run = calibration.run
        fleet = calibration.fleet(run.threads if run else calibration.workers[0].threads)
        fleet_name = fleet.pools[0][0].gpu
        model = ""
        if run and options["trace"] == "recorded":
            split = run.split
            slo = run.slo
            router = run.router
    else:
        model = options["model"]
        fleet_name = options["fleet"]
        fleet = Fleet.of(fleet_name, model, options["tp"])

    faults = Faults.of(options["faults"])
    for worker, _ in (*faults.slow, *faults.kill):
        if worker >= fleet.replicas:
            fail(f"--faults: there is no worker {worker}, the fleet has {fleet.replicas}", 2)

    variant = options["variant"]
    return Study(
        trace=_load_trace(options["trace"], calibration, options["head"]),
        model=model,
        fleet=fleet,
        fleet_name=fleet_name,
        slo=Slo.of(slo, fleet.reference),
        policies=policies_named(options["policy"] or ["diptych"]),
        variants=("policy-only", "full") if variant == "both" else (variant,),
        split=None if split == "best" else Split.of(split),
        seeds=options["seeds"],
        find_max=options["find_max"],
        rate=options["rate"],
        closed=_is_closed_loop(options["dispatch"]),
        faults=faults,
        jobs=options["jobs"] or available_cores(),
        agreement=options["agreement"],
        router=router,
    )


def plan(
    trace: Annotated[str, typer.Argument(help=TRACE_HELP)] = "synthetic",
    model: Model = "llama3.1-70b-fp8",
    tp: Annotated[str, typer.Option(help="GPUs of a replica; several: 2,4.")] = "4",
    fleet: Annotated[
        list[str] | None, typer.Option(help="A fleet to consider; may be given several times.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests/s to serve. Default: as many as can be.")
    ] = None,
    share: Annotated[float, typer.Option(min=0.5, max=1, help="Of requests in time.")] = 0.99,
    slo: Slo = "ttft=max(1s,3x),itl=50ms",
    seeds: Annotated[int, typer.Option(min=1, help="Jitter seeds.")] = 1,
    dispatch: Dispatch = "timestamp",
    head: Annotated[float, typer.Option(min=0.01, max=1, help="Share of the trace to use.")] = 1.0,
    calibrate_from_live: Annotated[
        list[Path] | None,
        typer.Option(help="As for simulate; several: workers of several sizes."),
    ] = None,
    jobs: Jobs = None,
    write: Annotated[Path, typer.Option(help="Where the plan goes.")] = Path("cluster.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite it.")] = False,
    output: Output = "table",
) -> None:
    """Find the layout that serves TRACE best; say whether disaggregation pays; write it down."""
    _check_options(rate, write, output)
    if write.exists() and not force:
        fail(f"{write} exists: give another --write, or --force", 2)
    from ...simulator import SimulationError
    from ...simulator import plan as planner

    try:
        calibration = _read_calibrations(calibrate_from_live or [])
        fleet_options = _fleet_options(fleet or ["H200:32"], model, tp, calibration)
        demand = planner.Demand(
            _load_trace(trace, calibration, head),
            slo,
            share,
            rate,
            seeds=seeds,
            closed=_is_closed_loop(dispatch),
        )
        result = planner.plan(fleet_options, demand, jobs or available_cores(), report_progress)
    except SimulationError as error:
        fail(str(error), 2)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    typer.echo(json.dumps(result, indent=2) if output == "json" else planner.text(result))
    save(write, planner.yaml_of(result))
    if output == "table":
        typer.echo(f"wrote {write}")


def _fleet_options(
    fleets: list[str], model: str, tp_sizes: str, calibration: Calibration | None
) -> list[Option]:
    """Return the fleets to compare: the measured workers, or each fleet with each replica size."""
    from ...simulator.fleet import Fleet
    from ...simulator.plan import Option

    if calibration:
        thread_counts = sorted({worker.threads for worker in calibration.workers})
        measured_fleets = [calibration.fleet(threads) for threads in thread_counts]
        return [
            Option(f"{fleet.pools[0][0].gpu}:{fleet.replicas}", fleet) for fleet in measured_fleets
        ]
    try:
        sizes = [int(part) for part in tp_sizes.split(",")]
    except ValueError:
        fail(f"--tp {tp_sizes}: expected numbers, like 4 or 2,4", 2)
    if min(sizes) < 1:
        fail(f"--tp {tp_sizes}: a replica has at least one GPU", 2)
    return [
        Option(name if len(sizes) == 1 else f"{name} tp{size}", Fleet.of(name, model, size))
        for name in fleets
        for size in sizes
    ]


def _load_trace(source: str, calibration: Calibration | None, head: float) -> Trace:
    """Return the trace, or the share `head` of it. Raises SimulationError."""
    from ...simulator.errors import SimulationError
    from ...simulator.trace import load

    if source == "recorded":
        if calibration is None:
            raise SimulationError("trace recorded: needs --calibrate-from-live")
        return calibration.trace()
    trace = load(source)
    return trace.head(head) if head < 1 else trace


def _read_calibration(path: Path | None) -> Calibration | None:
    if path is None:
        return None
    from ...simulator.calibrate import read

    return read(path)


def _read_calibrations(paths: list[Path]) -> Calibration | None:
    """Return the measured workers of all files together, or None without files."""
    if not paths:
        return None
    from ...simulator.calibrate import merged, read

    return merged([read(path) for path in paths])


def _is_closed_loop(dispatch: str) -> bool:
    """Return whether turns wait for the end of the one before."""
    if dispatch not in ("timestamp", "thinktime"):
        fail(f"--dispatch {dispatch}: expected timestamp or thinktime", 2)
    return dispatch == "thinktime"


def available_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def report_progress(line: str) -> None:
    """Print progress on stderr, at once."""
    print(line, file=sys.stderr, flush=True)
