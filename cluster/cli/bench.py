"""`diptych bench engine`: how fast the engine is here, alone or in turn with vLLM."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from .common import fail

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)
COLUMNS = ["PHASE", "BATCH", "CONTEXT", "MS", "TOKENS/S", "BANDWIDTH", "FLOPS", "WAITED"]
PEER_COLUMNS = ["VLLM MS", "RATIO", "SPREAD"]
CALM = 0.02  #: `waited` of an undisturbed cell is below
INSTALL = "how to install it: engine/bench/README.md"


@app.callback()
def _bench() -> None:
    """A group, so that `engine` is a command of its own."""


@app.command()
def engine(
    model: Annotated[
        str, typer.Option(help="Checkpoint folder, or a random Llama: 205M, 7M.")
    ] = "205M",
    batch: Annotated[str, typer.Option(help="Decoding sequences.")] = "1,8,32,64",
    context: Annotated[str, typer.Option(help="Their tokens.")] = "128,1024",
    prompt: Annotated[str, typer.Option(help="Prefilled tokens.")] = "512,2048,8192",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of each engine. Default: every core.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Alternations.")] = 5,
    step_tokens: Annotated[
        int | None, typer.Option(min=64, help="Prefill tokens of one step. Default: the engine's.")
    ] = None,
    against: Annotated[str | None, typer.Option(help="The engine to compare with: vllm.")] = None,
    vllm_python: Annotated[
        Path | None,
        typer.Option(envvar="DIPTYCH_VLLM_PYTHON", help="The Python that has vLLM."),
    ] = None,
    output: Annotated[str, typer.Option("-o", "--output", help="table or json")] = "table",
) -> None:
    """Measure decode and prefill of the engine. An empty list leaves a phase out: --prompt ""."""
    if output not in ("table", "json"):
        fail(f"-o {output}: expected table or json", 2)
    cores = len(os.sched_getaffinity(0))
    if threads is not None and threads > cores:
        fail(f"--threads {threads}: this process has {cores} cores", 2)
    values: dict[str, Any] = {
        "threads": threads or cores,
        "rounds": rounds,
        "batches": numbers("--batch", batch),
        "contexts": numbers("--context", context),
        "prompts": numbers("--prompt", prompt),
        "step_tokens": step_tokens,
        "vllm_python": _peer(against, vllm_python),
    }
    if not (values["batches"] and values["contexts"]) and not values["prompts"]:
        fail("nothing to measure: give --batch and --context, or --prompt", 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by jobs of a script
    result = _run(model, values)
    typer.echo(json.dumps(result, indent=2) if output == "json" else _table(result))


@app.command()
def router(
    workers: Annotated[int, typer.Option(min=2, help="Half prefill, half decode.")] = 1000,
    entries: Annotated[int, typer.Option(min=0, help="Of the prefix index.")] = 2_600_000,
    queued: Annotated[int, typer.Option(min=1, help="Requests in the line.")] = 500,
    output: Annotated[str, typer.Option("-o", "--output", help="table or json")] = "table",
) -> None:
    """Measure one routing decision, and all that a fleet tells the router, on one core."""
    from time import thread_time  # of this thread: others may have the core meanwhile

    from ...router.bench import run

    if output not in ("table", "json"):
        fail(f"-o {output}: expected table or json", 2)
    result = run(thread_time, workers, entries, queued)
    if output == "json":
        typer.echo(json.dumps(result))
        return
    for name, value in result.items():
        typer.echo(f"{name:28}{value:>14,}")


def _run(model: str, values: dict[str, Any]) -> dict[str, Any]:
    """Torch is imported here, not before the options have been found right."""
    from ...engine.bench.child import EngineBenchError
    from ...engine.bench.compare import EngineBenchOptions, run
    from ...engine.errors import EngineError

    try:
        with checkpoint(model) as folder:
            result = run(
                EngineBenchOptions(model=folder, **values), lambda line: typer.echo(line, err=True)
            )
    except (EngineBenchError, EngineError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted", 130)
    return result | {"model": result["model"] | {"name": model}}


@contextmanager
def checkpoint(model: str) -> Iterator[Path]:
    """The folder of `model`; a random checkpoint is written to a temporary one."""
    from ...engine.bench.models import SHAPES, write_checkpoint

    if model not in SHAPES:
        if not Path(model).is_dir():
            fail(f"--model {model}: neither a checkpoint folder nor one of {', '.join(SHAPES)}", 2)
        yield Path(model).absolute()
        return
    with tempfile.TemporaryDirectory(prefix="diptych-bench-") as folder:
        typer.echo(f"writing a random checkpoint: {model}", err=True)
        yield write_checkpoint(model, Path(folder))


def numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        numbers = (0,)
    if any(number < 1 for number in numbers):
        fail(f"{option} {text}: expected numbers above 0, separated by commas", 2)
    return numbers


def _peer(against: str | None, python: Path | None) -> Path | None:
    """Where vLLM's Python is, if it is asked for."""
    if against is None:
        return None
    if against != "vllm":
        fail(f"--against {against}: expected vllm", 2)
    if python is None:
        fail(f"--against vllm needs --vllm-python, the Python that has vLLM; {INSTALL}", 2)
    found = shutil.which(python)
    if found is None:
        fail(f"--vllm-python {python}: no such program; {INSTALL}", 2)
    return Path(found).absolute()


def _table(result: dict[str, Any]) -> str:
    machine, peer = result["machine"], result["peer_setup"]
    lines = [
        f"model {result['model']['name']}, {result['model']['parameters'] / 1e6:.0f} M parameters,"
        f" bf16, greedy; {machine['threads']} threads: {machine['gb_per_s']} GB/s, "
        f"{machine['tflops']} TFLOP/s"
    ]
    if peer:
        missing = f", without {' and '.join(peer['missing'])}" if peer.get("missing") else ""
        lines.append(f"against {peer['name']}{missing}, {result['options']['rounds']} rounds")
    columns = COLUMNS[:4] + (PEER_COLUMNS if peer else []) + COLUMNS[4:]
    rows = [columns, *(_row(cell, bool(peer)) for cell in result["cells"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
    disturbed = sum(cell["waited"] >= CALM for cell in result["cells"])
    if disturbed:
        lines.append(
            f"{disturbed} of {len(result['cells'])} cells were disturbed: threads WAITED for a CPU "
            "that another process had"
        )
    if peer:
        lines.append(f"geometric mean of the ratios: {result['geomean_ratio']:.2f} (above 1: ours)")
    return "\n".join(lines)


def _row(cell: dict[str, Any], peer: bool) -> list[str]:
    against = [f"{cell[key]:.2f}" for key in ("peer_ms", "ratio", "iqr")] if peer else []
    return [
        cell["phase"],
        str(cell.get("batch", "-")),
        str(cell.get("context", cell.get("prompt"))),
        f"{cell['ms']:.2f}",
        *against,
        f"{cell['tokens_per_s']:,.0f}",
        *(f"{cell[key]:.0%}" for key in ("bandwidth_share", "flops_share", "waited")),
    ]
