"""`diptych simulate`: policies on a trace, in virtual time. `diptych plan`: the layout for one."""

from __future__ import annotations

import json
import os
import sys
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import check_writable, fail, save

if TYPE_CHECKING:
    from ...simulator.calibrate import Calibration
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
    _check(rate, html, output)
    if variant not in ("policy-only", "full", "both"):
        fail(f"--variant {variant}: expected policy-only, full or both", 2)
    from ...simulator import SimulationError
    from ...simulator.report import document, text

    try:
        study = _study(locals())
        from ...simulator.study import run

        result = run(study, _tell)
        recorded = _calibration(calibrate_from_live) if trace == "recorded" else None
        if recorded:
            live = recorded.run.attainment
            apart = live - result["policies"][0]["at_rate"]["attainment"]
            result["live"] = {"attainment": live, "points_apart": round(abs(apart) * 100, 2)}
    except SimulationError as error:
        fail(str(error), 2)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    typer.echo(json.dumps(result, indent=2) if output == "json" else text(result))
    if html:
        save(html, document(result))


def _check(rate: float | None, file: Path | None, output: str) -> None:
    if output not in ("table", "json"):
        fail(f"-o {output}: expected table or json", 2)
    if rate is not None and not 0 < rate < inf:
        fail(f"--rate {rate:g}: expected requests/s, more than 0", 2)
    check_writable(file)


def _study(given: dict[str, Any]):
    """The simulator is imported here: no other command pays for it."""
    from ...simulator.fleet import Faults, Fleet, Split
    from ...simulator.metrics import Slo
    from ...simulator.study import Study, policies_named

    live = _calibration(given["calibrate_from_live"])
    trace = _trace(given["trace"], live, given["head"])
    split, slo = given["split"], given["slo"]
    if live:
        run = live.run
        fleet = live.fleet(run.threads if run else live.workers[0].threads)
        name, model = fleet.pools[0][0].gpu, ""
        if run and given["trace"] == "recorded":
            split, slo = run.split, run.slo
    else:
        model, name = given["model"], given["fleet"]
        fleet = Fleet.of(name, model, given["tp"])
    faults = Faults.of(given["faults"])
    for worker, _ in (*faults.slow, *faults.kill):
        if worker >= fleet.replicas:
            fail(f"--faults: there is no worker {worker}, the fleet has {fleet.replicas}", 2)
    both = given["variant"] == "both"
    return Study(
        trace,
        model,
        fleet,
        name,
        Slo.of(slo, fleet.reference),
        policies_named(given["policy"] or ["diptych"]),
        ("policy-only", "full") if both else (given["variant"],),
        None if split == "best" else Split.of(split),
        given["seeds"],
        given["find_max"],
        given["rate"],
        _closed(given["dispatch"]),
        faults,
        given["jobs"] or len(os.sched_getaffinity(0)),
        given["agreement"],
        live.run.router if live and live.run and given["trace"] == "recorded" else None,
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
    _check(rate, write, output)
    if write.exists() and not force:
        fail(f"{write} exists: give another --write, or --force", 2)
    from ...simulator import SimulationError
    from ...simulator import plan as planner

    try:
        live = _merged(calibrate_from_live or [])
        options = _options(fleet or ["H200:32"], model, tp, live)
        demand = planner.Demand(
            _trace(trace, live, head), slo, share, rate, seeds, _closed(dispatch)
        )
        cores = jobs or len(os.sched_getaffinity(0))
        result = planner.plan(options, demand, cores, _tell)
    except SimulationError as error:
        fail(str(error), 2)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    typer.echo(json.dumps(result, indent=2) if output == "json" else planner.text(result))
    save(write, planner.yaml_of(result))
    if output == "table":
        typer.echo(f"wrote {write}")


def _options(fleets: list[str], model: str, tps: str, live: Calibration | None) -> list:
    from ...simulator.fleet import Fleet
    from ...simulator.plan import Option

    if live:
        threads = sorted({kind.threads for kind in live.workers})
        made = [live.fleet(count) for count in threads]
        return [Option(f"{one.pools[0][0].gpu}:{one.replicas}", one) for one in made]
    try:
        sizes = [int(part) for part in tps.split(",")]
    except ValueError:
        fail(f"--tp {tps}: expected numbers, like 4 or 2,4", 2)
    if min(sizes) < 1:
        fail(f"--tp {tps}: a replica has at least one GPU", 2)
    several = len(sizes) > 1
    return [
        Option(f"{name} tp{size}" if several else name, Fleet.of(name, model, size))
        for name in fleets
        for size in sizes
    ]


def _trace(source: str, live: Calibration | None, head: float) -> Trace:
    from ...simulator.errors import SimulationError
    from ...simulator.trace import load

    if source == "recorded":
        if live is None:
            raise SimulationError("trace recorded: needs --calibrate-from-live")
        return live.trace()
    trace = load(source)
    return trace.head(head) if head < 1 else trace


def _calibration(path: Path | None) -> Calibration | None:
    if path is None:
        return None
    from ...simulator.calibrate import read

    return read(path)


def _merged(paths: list[Path]) -> Calibration | None:
    from ...simulator.calibrate import merged, read

    return merged([read(path) for path in paths]) if paths else None


def _closed(dispatch: str) -> bool:
    if dispatch not in ("timestamp", "thinktime"):
        fail(f"--dispatch {dispatch}: expected timestamp or thinktime", 2)
    return dispatch == "thinktime"


def _tell(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)
