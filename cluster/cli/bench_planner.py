"""`diptych bench planner`: roles that move with the load, in virtual time."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import check_output, fail
from .progress import step_progress
from .simulate import JobsOption, ModelOption, OutputOption, SloOption

if TYPE_CHECKING:
    from ...simulator.trace import Trace
    from ..bench.planner_study import PlannerRun


def planner(
    trace: Annotated[str, typer.Argument(help="As for simulate; of ServeGen .npz: its first day.")],
    model: ModelOption = "llama3.1-70b-fp8",
    tp: Annotated[int, typer.Option(min=1, help="GPUs of a replica.")] = 4,
    fleet: Annotated[str, typer.Option(help="GPUs of one type.")] = "H200:16",
    split: Annotated[str, typer.Option(help="Replicas by role where planners begin.")] = "2P2D",
    rate: Annotated[
        float | None,
        typer.Option(help="Requests/s on average. Default: as recorded; of .npz about 6.7."),
    ] = None,
    slo: SloOption = "ttft=max(1s, 3x),itl=50ms",
    jobs: JobsOption = None,
    output: OutputOption = "table",
) -> None:
    """Our planner, Dynamo's formulas, Serve's and KEDA's loops, beside every fixed split."""
    check_output(output)
    from ...simulator import SimulationError
    from ...simulator.case import Case
    from ...simulator.entry import available_cores
    from ...simulator.fleet import Fleet, Split
    from ...simulator.metrics import Slo
    from ..bench.planner_study import compare

    try:
        loaded_trace = _load_trace(trace, rate)
        gpus = Fleet.parse(fleet, model, tp)
        first_split = Split.parse(split)
        # A flip changes a worker's role on its GPU: with two types, splits could not be compared.
        if first_split.replicas != gpus.replicas or len(gpus.pools) > 1:
            fail(f"--split {split}: {fleet} is {gpus.replicas} replicas of one type", 2)
        with step_progress("comparing") as report:
            runs = compare(
                Case(loaded_trace, gpus, Slo.parse(slo, gpus.costs)),
                first_split,
                rate or loaded_trace.rate,
                jobs=jobs or available_cores(),
                report_progress=report,
            )
    except SimulationError as error:
        fail(str(error), 2)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    typer.echo(json.dumps([asdict(run) for run in runs]) if output == "json" else _table(runs))


def _load_trace(source: str, rate: float | None) -> Trace:
    """Return a trace; of a ServeGen file it is the first day. Raises SimulationError.

    `rate` scales the day to so many requests/s on average; None: to those of the window that
    `simulate` takes, about 6.7, as ServeGen's own rates are those of a whole service.
    """
    from ...simulator.sources import load_trace, servegen

    path = Path(source)
    if path.suffix != ".npz" or not path.is_file():
        return load_trace(source)
    return servegen.read_day(
        path, f"{path.stem} day", 0, rate or servegen.read_window(path, "", 0).rate
    )


def _table(runs: list[PlannerRun]) -> str:
    """Return the runs as a table; the first one is the best fixed split.

    `met` is the share of requests that met their targets, `of best fixed` that share over the best
    fixed split's. A flip is a worker's change of role, and orders are all that a planner gave.
    """
    best_attainment = runs[0].attainment
    lines = [
        f"{'planner':<10}{'from':>7}{'met':>9}{'of best fixed':>15}{'flips/min':>11}"
        f"{'orders':>8}{'TTFT p90':>10}{'GPU hours':>11}"
    ]
    for run in runs:
        share = run.attainment / best_attainment if best_attainment else 0.0
        lines.append(
            f"{run.planner:<10}{run.split:>7}{run.attainment:>9.1%}{share:>15.1%}"
            f"{run.flips_per_min:>11.2f}{len(run.orders):>8}{run.ttft_p90_s:>9.2f}s"
            f"{run.gpu_s / 3600:>11.1f}"
        )
    return "\n".join(lines)
