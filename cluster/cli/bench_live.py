"""`diptych bench live`: whole servers on this machine, ours and vLLM's, under the same requests."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .bench import interrupt_at_end
from .common import check_output, fail
from .progress import step_progress

if TYPE_CHECKING:
    from ..bench.live.cells import LiveOptions
    from ..bench.live.loads import LengthRange

LOADTEST_INSTALL = "the client needs gevent: pip install 'diptych[loadtest]'"
VLLM_INSTALL = "how to install it: engine/bench/README.md"
DEMO = "demo"  #: value of `--model` for the small checkpoint that comes with the engine
RANDOM = "205M"  #: value of `--model` for a checkpoint of random weights, written for the run
#: Lengths of prompts and answers in tokens, by option and by whether the table is an overload.
#: Those of an overload are short; its default model is the small demo.
DEFAULT_TOKENS = {
    ("--prompt-tokens", False): "512-2048",
    ("--prompt-tokens", True): "64-256",
    ("--output-tokens", False): "64-128",
    ("--output-tokens", True): "32-64",
}


def live(
    table: Annotated[str, typer.Option(help="slo, overload or chats.")] = "slo",
    model: Annotated[
        str, typer.Option(help="Checkpoint folder; 205M: a random Llama; demo: the bundled one.")
    ] = "",
    layouts: Annotated[
        str,
        typer.Option(help="Ours, by workers: 1P1D, 2M; plan: those that plan picks (table slo)."),
    ] = "plan,1P1D,1M,2M",
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Layout of vLLM to compare with: vllm-chunk256 or vllm-chunk2048 (one server, "
            "tokens of a step), vllm-2x (two servers), vllm-pd (a prefill and a decode server); "
            "vllm: all four. May be given several times."
        ),
    ] = None,
    vllm_python: Annotated[
        Path | None, typer.Option(envvar="DIPTYCH_VLLM_PYTHON", help="The Python that has vLLM.")
    ] = None,
    rates: Annotated[str, typer.Option(help="Requests/s, in table slo.")] = "0.5,1.0,1.5",
    slo: Annotated[
        list[str] | None,
        typer.Option(
            help="TTFT:ITL to count goodput by; our servers are set up for the first. May be given "
            "several times."
        ),
    ] = None,
    isolated: Annotated[
        str,
        typer.Option(
            help="TTFT of a prompt alone on the server, as 20ms + 150ms/1k tokens; the 3x of --slo "
            "'max(1s, 3x):50ms' is a multiple of it."
        ),
    ] = "",
    seeds: Annotated[str, typer.Option(help="Seeds of arrivals, lengths and texts.")] = "1,2,3",
    requests: Annotated[int, typer.Option(min=1, help="Requests of a cell, in table slo.")] = 40,
    prompt_tokens: Annotated[str, typer.Option(help="LOW-HIGH, but not in table chats.")] = "",
    output_tokens: Annotated[str, typer.Option(help="LOW-HIGH of an answer.")] = "",
    seconds: Annotated[
        float, typer.Option(min=1, help="How long requests are sent, in table overload.")
    ] = 120.0,
    sessions: Annotated[int, typer.Option(min=1, help="Chats at a time, in table chats.")] = 16,
    turns: Annotated[int, typer.Option(min=1, help="Of each chat.")] = 5,
    max_model_len: Annotated[
        int, typer.Option(min=64, help="Tokens of prompt and answer, on all servers.")
    ] = 4096,
    override: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Setting of our servers.")
    ] = None,
    out: Annotated[
        Path,
        typer.Option(help="Folder of the cells' results; cells that it has are not run again."),
    ] = Path("live-bench"),
    output: Annotated[str, typer.Option("-o", "--output", help="table or json")] = "table",
) -> None:
    """Compare layouts of ours, and vLLM's, by requests/s within targets, cell by cell."""
    check_output(output)
    if find_spec("gevent") is None:
        fail(LOADTEST_INSTALL)
    from ..bench.live.errors import LiveBenchError

    names = [name.strip() for name in layouts.split(",") if name.strip()]
    values = {
        "table": table,
        "isolated": isolated,
        "slos": slo or ["2s:50ms", "2s:100ms", "4s:200ms"],
        "rates": rates,
        "seeds": seeds,
        "requests": requests,
        "prompt": prompt_tokens,
        "output": output_tokens,
        "seconds": seconds,
        "sessions": sessions,
        "turns": turns,
        "max_model_len": max_model_len,
        "settings": tuple(override or []),
        "layouts": names,
        "against": against or [],
    }
    interrupt_at_end()
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _checkpoint(model or (DEMO if table == "overload" else RANDOM)) as folder:
            options = _options(values, folder)
            document = _run(options, names=names, vllm_python=vllm_python, out=out)
    except LiveBenchError as error:
        fail(str(error), 2)
    except OSError as error:
        fail(f"{out}: {error.strerror}")
    except KeyboardInterrupt:
        fail(f"interrupted; the same command goes on where it was ({out})", 130)
    page = (out / f"{table}.md").read_text()
    typer.echo(json.dumps(document, indent=2) if output == "json" else page)
    if document["missing"]:
        fail(f"cells that failed: {len(document['missing'])}; the same command tries them again")
    if document["plan_error"]:
        fail("plan picked no layout")


def _run(
    options: LiveOptions, *, names: list[str], vllm_python: Path | None, out: Path
) -> dict[str, Any]:
    """Run the table, and return its document. Raises LiveBenchError.

    `names` are those of `--layouts`; the name `plan` among them has `plan` pick layouts too, which
    is done in the table `slo` alone.
    """
    from ..bench.live.cells import LiveTable
    from ..bench.live.layouts import DiptychLayout
    from ..bench.live.run import LiveRun, machine_facts, run, servers_of

    needs_vllm = any(not isinstance(layout, DiptychLayout) for layout in options.layouts)
    python = _find_vllm_python(vllm_python) if needs_vllm else None
    live_run = LiveRun(
        options=options,
        folder=out,
        # Our servers are started by the program that runs now: `sys.argv[0]` is `diptych`.
        start_server=servers_of(options, str(Path(sys.argv[0]).absolute()), python),
        facts=machine_facts(options, python),
        plan_picks="plan" in names and options.table == LiveTable.SLO,
    )
    with step_progress("measuring") as report:
        return run(live_run, report)


def _options(values: dict[str, Any], model: Path) -> LiveOptions:
    """Return the options of the command line, checked. Raises LiveBenchError.

    `values` are the command line's, each under the name of the field of `LiveOptions` that it sets.
    Two have no such field: `against` adds to the layouts, and `isolated` is part of each SLO. The
    cores are those on which this process may run: `taskset` in front of the command chooses them.
    """
    from ..bench.live.cells import LiveOptions, LiveTable
    from ..bench.live.errors import LiveBenchError
    from ..bench.live.layouts import parse_diptych_layout, parse_vllm_layouts
    from ..bench.live.results import LiveSlo

    if values["table"] not in list(LiveTable):
        raise LiveBenchError(f"--table {values['table']}: expected {', '.join(LiveTable)}")
    table = LiveTable(values["table"])
    ours = [parse_diptych_layout(name) for name in values["layouts"] if name != "plan"]
    is_overload = table == LiveTable.OVERLOAD
    return LiveOptions(
        table=table,
        model=model,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        layouts=tuple(dict.fromkeys((*ours, *parse_vllm_layouts(values["against"])))),
        slos=tuple(LiveSlo.parse(text, values["isolated"]) for text in values["slos"]),
        seeds=_seeds(values["seeds"]),
        # A value that is given twice is measured once.
        rates=tuple(dict.fromkeys(_numbers("--rates", values["rates"]))),
        requests=values["requests"],
        prompt=_token_range("--prompt-tokens", values["prompt"], is_overload=is_overload),
        output=_token_range("--output-tokens", values["output"], is_overload=is_overload),
        seconds=values["seconds"],
        sessions=values["sessions"],
        turns=values["turns"],
        max_model_len=values["max_model_len"],
        settings=values["settings"],
    )


def _numbers(option: str, text: str) -> list[float]:
    """Return the numbers of a comma-separated list; `option` is for the error.

    Raises LiveBenchError if there is none, or one is not a finite number above 0.
    """
    from ..bench.live.errors import LiveBenchError

    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values or not all(0 < value < float("inf") for value in values):
        raise LiveBenchError(f"{option} {text}: expected numbers above 0, separated by commas")
    return values


def _seeds(text: str) -> tuple[int, ...]:
    """Return the seeds of a comma-separated list. Raises LiveBenchError."""
    from ..bench.live.errors import LiveBenchError

    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise LiveBenchError(f"--seeds {text}: expected whole numbers above 0, separated by commas")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _token_range(option: str, text: str, *, is_overload: bool) -> LengthRange:
    """Return the range of a text like `64-512`, or `128` for this number alone.

    Without a text the range is the option's default for the table. Raises LiveBenchError.
    """
    from ..bench.live.errors import LiveBenchError
    from ..bench.live.loads import LengthRange

    default = DEFAULT_TOKENS[option, is_overload]
    low, _, high = (text or default).partition("-")
    if not low.isdecimal() or not (high or low).isdecimal() or not 0 < int(low) <= int(high or low):
        raise LiveBenchError(f"{option} {text}: expected tokens, as 128 or 64-512")
    return LengthRange(int(low), int(high or low))


def _find_vllm_python(python: Path | None) -> Path:
    """Return the absolute path of the Python that has vLLM; end with code 2 if there is none."""
    if python is None:
        fail(f"--against vllm needs --vllm-python, the Python that has vLLM; {VLLM_INSTALL}", 2)
    program = shutil.which(python)
    if program is None:
        fail(f"--vllm-python {python}: no such program; {VLLM_INSTALL}", 2)
    return Path(program).absolute()


@contextmanager
def _checkpoint(model: str) -> Iterator[Path]:
    """Yield the model's folder; end with code 2 if `model` names none.

    A random checkpoint is written to a temporary folder, which is removed after the run.
    """
    if model == DEMO:
        from ...engine.demo import CHECKPOINT

        yield CHECKPOINT
        return
    if model != RANDOM:
        if not Path(model).is_dir():
            fail(f"--model {model}: neither a checkpoint folder nor {RANDOM} or {DEMO}", 2)
        yield Path(model).absolute()
        return
    from ..bench.live.model import write_model

    with tempfile.TemporaryDirectory(prefix="diptych-live-") as folder:
        typer.echo(f"writing a random checkpoint: {model}", err=True)
        yield write_model(Path(folder) / RANDOM)
