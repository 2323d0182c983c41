"""`diptych bench engine` and `bench router`: how fast they are on this machine.

The engine is measured alone, or in turn with vLLM. Modules of the benches are imported by the
command that needs them: torch would slow down every other command.
"""

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

from .common import check_output, fail, interrupt_on, table_lines
from .progress import step_progress

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)
#: The engine's table has three groups of columns; those of PEER_COLUMNS are shown only in a
#: comparison with vLLM.
#: RATIO is vLLM's time over ours, SPREAD the interquartile range of the rounds' ratios, BANDWIDTH
#: and FLOPS are shares of what the machine can do, WAITED the share of the time in which a thread
#: waited for a CPU, because another process had it.
TIME_COLUMNS = ("PHASE", "BATCH", "CONTEXT", "MS")
PEER_COLUMNS = ("VLLM MS", "RATIO", "SPREAD")
RATE_COLUMNS = ("TOKENS/S", "BANDWIDTH", "FLOPS", "WAITED")
#: A cell counts as disturbed if its threads waited for a CPU for this share of the time, or more.
CALM_SHARE = 0.02
INSTALL = "how to install it: engine/bench/README.md"


def interrupt_at_end() -> None:
    """Raise KeyboardInterrupt at ^C, SIGTERM and SIGHUP, so that nothing is left behind.

    A SIGHUP that is ignored, as under `nohup`, stays so.
    """
    interrupt_on(signal.SIGINT, signal.SIGTERM)  # a script's background job would ignore SIGINT
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        interrupt_on(signal.SIGHUP)


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
    step_tokens: Annotated[  # at least one KV block, which has 64 tokens
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
    check_output(output)
    cores = len(os.sched_getaffinity(0))
    if threads is not None and threads > cores:
        fail(f"--threads {threads}: this process has {cores} cores", 2)
    options: dict[str, Any] = {
        "threads": threads or cores,
        "rounds": rounds,
        "batches": numbers("--batch", batch),
        "contexts": numbers("--context", context),
        "prompts": numbers("--prompt", prompt),
        "step_tokens": step_tokens,
        "vllm_python": _find_vllm_python(against, vllm_python),
    }
    measures_decode = options["batches"] and options["contexts"]
    if not measures_decode and not options["prompts"]:
        fail("nothing to measure: give --batch and --context, or --prompt", 2)
    interrupt_at_end()
    result = _measure_engine(model, options)
    typer.echo(json.dumps(result, indent=2) if output == "json" else _table(result))


@app.command()
def router(
    workers: Annotated[int, typer.Option(min=2, help="Half prefill, half decode.")] = 1000,
    # System prompts are drawn again and again: 2.6 million pairs leave 2.1 million different ones.
    entries: Annotated[
        int, typer.Option(min=0, help="Pairs of worker and prefix drawn for the index.")
    ] = 2_600_000,
    queued: Annotated[int, typer.Option(min=1, help="Requests in the queue.")] = 500,
    output: Annotated[str, typer.Option("-o", "--output", help="table or json")] = "table",
) -> None:
    """Measure one routing decision, and all that a fleet tells the router, on one core."""
    from time import thread_time  # of this thread: others may have the core meanwhile

    from ...router.bench import run

    check_output(output)
    result = run(thread_time, workers, entries, queued)
    if output == "json":
        typer.echo(json.dumps(result))
        return
    for name, value in result.items():
        typer.echo(f"{name:28}{value:>14,}")


def _measure_engine(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the result, or end the command.

    Torch is imported only now that all options but `--model` are known to be right.
    """
    from ...engine.bench.child import EngineBenchError
    from ...engine.bench.compare import EngineBenchOptions, run
    from ...engine.errors import EngineError

    try:
        with checkpoint(model) as folder:
            bench_options = EngineBenchOptions(model=folder, **options)
            with step_progress("measuring") as report:
                result = run(bench_options, report)
    except (EngineBenchError, EngineError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted", 130)
    result["model"] |= {"name": model}
    return result


@contextmanager
def checkpoint(model: str) -> Iterator[Path]:
    """Yield the folder of `model`, or end the command if there is no such model.

    A random model is written to a temporary folder, which is removed at the end.
    """
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
    """Return the numbers of an option's comma-separated list, or end the command."""
    try:
        values = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        values = (0,)  # refused below, like any number that is too small
    if any(value < 1 for value in values):
        fail(f"{option} {text}: expected numbers above 0, separated by commas", 2)
    return values


def _find_vllm_python(against: str | None, python: Path | None) -> Path | None:
    """Return the Python that has vLLM, or None if no other engine is compared."""
    if against is None:
        return None
    if against != "vllm":
        fail(f"--against {against}: expected vllm", 2)
    if python is None:
        fail(f"--against vllm needs --vllm-python, the Python that has vLLM; {INSTALL}", 2)
    program = shutil.which(python)
    if program is None:
        fail(f"--vllm-python {python}: no such program; {INSTALL}", 2)
    return Path(program).absolute()


def _table(result: dict[str, Any]) -> str:
    """Return the engine's result as text; its keys are those of `engine/bench/results.py`."""
    model = result["model"]
    machine = result["machine"]
    peer = result["peer_setup"]
    cells = result["cells"]
    lines = [
        f"model {model['name']}, {model['parameters'] / 1e6:.0f} M parameters,"
        f" bf16, greedy; {machine['threads']} threads: {machine['gb_per_s']} GB/s, "
        f"{machine['tflops']} TFLOP/s"
    ]
    columns: tuple[str, ...] = TIME_COLUMNS + RATE_COLUMNS
    if peer:
        # Libraries that vLLM recommends and that are not installed (`engine/bench/peer.py`).
        missing = f", without {' and '.join(peer['missing'])}" if peer.get("missing") else ""
        lines.append(f"against {peer['name']}{missing}, {result['options']['rounds']} rounds")
        columns = TIME_COLUMNS + PEER_COLUMNS + RATE_COLUMNS
    rows = [_row(cell, with_peer=bool(peer)) for cell in cells]
    lines += table_lines([columns, *rows], right_aligned_from=1)
    disturbed = sum(cell["waited"] >= CALM_SHARE for cell in cells)
    if disturbed:
        lines.append(
            f"{disturbed} of {len(cells)} cells were disturbed: threads WAITED for a CPU "
            "that another process had"
        )
    if peer:
        lines.append(f"geometric mean of the ratios: {result['geomean_ratio']:.2f} (above 1: ours)")
    return "\n".join(lines)


def _row(cell: dict[str, Any], *, with_peer: bool) -> tuple[str, ...]:
    """Return a cell's row; prefill has no batch, and its prompt stands for the context."""
    peer_texts = []
    if with_peer:
        peer_texts = [f"{cell[key]:.2f}" for key in ("peer_ms", "ratio", "iqr")]
    return (
        cell["phase"],
        str(cell.get("batch", "-")),
        str(cell.get("context", cell.get("prompt"))),
        f"{cell['ms']:.2f}",
        *peer_texts,
        f"{cell['tokens_per_s']:,.0f}",
        *(f"{cell[key]:.0%}" for key in ("bandwidth_share", "flops_share", "waited")),
    )
