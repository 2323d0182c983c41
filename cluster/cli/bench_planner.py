"""`diptych bench planner`: roles that move with the load, in virtual time."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import fail
from .simulate import Jobs, Model, Output, Slo, _tell

if TYPE_CHECKING:
    from ...simulator.trace import Trace
    from ..bench.planner_study import Ran


def planner(
    trace: Annotated[str, typer.Argument(help="As for simulate; of ServeGen .npz: its first day.")],
    model: Model = "llama3.1-70b-fp8",
    tp: Annotated[int, typer.Option(min=1, help="GPUs of a replica.")] = 4,
    fleet: Annotated[str, typer.Option(help="GPUs of one type.")] = "H200:16",
    split: Annotated[str, typer.Option(help="Replicas by role where planners begin.")] = "2P2D",
    rate: Annotated[
        float | None, typer.Option(help="Requests/s on average. Default: as recorded.")
    ] = None,
    slo: Slo = "ttft=max(1s,3x),itl=50ms",
    jobs: Jobs = None,
    output: Output = "table",
) -> None:
    """Our planner, Dynamo's formulas, Serve's and KEDA's loops, beside every fixed split."""
    if output not in ("table", "json"):
        fail(f"-o {output}: expected table or json", 2)
    from ...simulator import SimulationError
    from ...simulator.case import Case
    from ...simulator.fleet import Fleet, Split
    from ...simulator.metrics import Slo
    from ..bench.planner_study import compare

    try:
        loads, gpus, begin = _load(trace, rate), Fleet.of(fleet, model, tp), Split.of(split)
        if begin.total != gpus.replicas or len(gpus.pools) > 1:
            fail(f"--split {split}: {fleet} is {gpus.replicas} replicas of one type", 2)
        case = Case(loads, gpus, Slo.of(slo, gpus.reference))
        cores = jobs or len(os.sched_getaffinity(0))
        found = compare(case, begin, rate or loads.rate, cores, _tell)
    except SimulationError as error:
        fail(str(error), 2)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    typer.echo(json.dumps([asdict(one) for one in found]) if output == "json" else _table(found))


def _load(source: str, rate: float | None) -> Trace:
    from ...simulator import servegen
    from ...simulator.trace import load

    path = Path(source)
    if path.suffix != ".npz" or not path.is_file():
        return load(source)
    return servegen.day(path, f"{path.stem} day", 0, rate or servegen.read(path, "", 0).rate)


def _table(found: list[Ran]) -> str:
    best = found[0].attainment
    head = f"{'planner':<10}{'from':>7}{'met':>9}{'of best fixed':>15}{'flips/min':>11}"
    lines = [head + f"{'orders':>8}{'TTFT p90':>10}{'GPU hours':>11}"]
    for one in found:
        share = one.attainment / best if best else 0.0
        lines.append(
            f"{one.planner:<10}{one.split:>7}{one.attainment:>9.1%}{share:>15.1%}"
            f"{one.flips_per_min:>11.2f}{len(one.orders):>8}{one.ttft_p90_s:>9.2f}s"
            f"{one.gpu_s / 3600:>11.1f}"
        )
    return "\n".join(lines)
