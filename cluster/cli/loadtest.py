"""`diptych loadtest`: Locust as a subprocess, its report, and the comparison of two runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from .common import DEFAULT_ENDPOINT, Endpoint, check_writable, fail, save

app = typer.Typer(help="Offer load to an OpenAI-compatible endpoint, and report goodput.")
INSTALL = "the load test needs Locust: pip install 'diptych[loadtest]'"
OPTIONS = {  # of Plan: names that differ here
    "load": "profile",
    "prompt": "prompt_tokens",
    "output": "output_tokens",
    "shared": "shared_tokens",
}


Profile = Annotated[str, typer.Option(help="constant, poisson, burst, ramp, trace or chat.")]
Rate = Annotated[
    str | None,
    typer.Option(help="Requests per second; LOW-HIGH for ramp. Default: 2, 1-16, as recorded."),
]
Users = Annotated[int, typer.Option(min=1, help="Of the chat profile.")]
Duration = Annotated[str, typer.Option(help="In which requests are offered: 90s, 3m.")]
Slo = Annotated[str, typer.Option(help="What a request must keep.")]
Gates = Annotated[
    list[str] | None,
    typer.Option(help="What must hold, else exit code 4: goodput>=0.95, ttft_p99<=1500."),
]
Laptop = Annotated[
    bool, typer.Option("--laptop", help="Start a cluster here for the run, and stop it.")
]
Grpc = Annotated[
    str, typer.Option(help="HOST:PORT: over gRPC; --endpoint is asked first. auto: of --laptop.")
]
Model = Annotated[str, typer.Option(help="Default: the first of /v1/models.")]
Tokens = Annotated[str, typer.Option(help="N or LOW-HIGH.")]
Shared = Annotated[
    int, typer.Option(min=0, help="That all prompts begin with; chat: of a system prompt.")
]
Think = Annotated[float, typer.Option(min=0, help="Mean seconds before a message (chat).")]
Steps = Annotated[int, typer.Option(min=1, help="Rates of a ramp.")]
Trace = Annotated[str, typer.Option(help="File, or synthetic[:N], for --profile trace.")]
Scale = Annotated[float, typer.Option(help="Factor on the trace's lengths.")]
Dispatch = Annotated[str, typer.Option(help="timestamp or thinktime (traces).")]
Seed = Annotated[int, typer.Option(help="Of arrivals, lengths and texts.")]
Drain = Annotated[float, typer.Option(min=0, help="Seconds for what runs at the end.")]
Processes = Annotated[int, typer.Option(min=1, help="Client processes on this machine.")]
Workers = Annotated[
    int, typer.Option(min=0, help="Wait for so many `loadtest worker` of other machines.")
]
Ui = Annotated[int | None, typer.Option(help="Locust's web page on this port.")]
Metrics = Annotated[str, typer.Option(help="URLs of the server's Prometheus metrics.")]
AdminUrl = Annotated[
    str, typer.Option(envvar="DIPTYCH_ADMIN", help="Admin URL, for the server's own counts.")
]
Html = Annotated[Path | None, typer.Option(help="Write a report with plots.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the run as JSON.")]
Output = Annotated[str, typer.Option("-o", "--output", help="table or json")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Locust's own output too.")]


@app.callback(invoke_without_command=True)
def loadtest(
    context: typer.Context,
    profile: Profile = "poisson",
    rate: Rate = None,
    users: Users = 10,
    duration: Duration = "60s",
    slo: Slo = "ttft=2s,itl=200ms",
    gate: Gates = None,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    laptop: Laptop = False,
    grpc: Grpc = "",
    model: Model = "",
    prompt_tokens: Tokens = "64-512",
    output_tokens: Tokens = "16-64",
    shared_tokens: Shared = 0,
    think: Think = 2.0,
    steps: Steps = 6,
    trace: Trace = "",
    scale: Scale = 1.0,
    dispatch: Dispatch = "timestamp",
    seed: Seed = 0,
    drain: Drain = 30.0,
    processes: Processes = 1,
    workers: Workers = 0,
    ui: Ui = None,
    metrics: Metrics = "",
    admin: AdminUrl = "",
    html: Html = None,
    out: Json = None,
    output: Output = "table",
    verbose: Verbose = False,
) -> None:
    """Offer load, measure every token, report goodput. Exit code 4 when a gate is missed.

    A key for the endpoint is taken from DIPTYCH_API_KEY or OPENAI_API_KEY.
    """
    if context.invoked_subcommand:
        return
    given = dict(locals())
    if output not in ("table", "json"):
        fail(f"-o {output}: expected table or json", 2)
    check_writable(out)
    check_writable(html)
    if find_spec("locust") is None:
        fail(INSTALL)
    with tempfile.TemporaryDirectory(prefix="diptych-loadtest-") as folder:
        given["out"] = str(Path(folder) / "run.json")  # an older run may be where `out` is
        plan = _plan(given)
        with _target(given) as (url, extra):
            code = _locust(_command(plan, url, extra, given), verbose)
        if not Path(given["out"]).exists():
            raise typer.Exit(code or 1)
        told = Path(given["out"]).read_text()
    _show(json.loads(told), html, output)
    if out:
        save(out, told)
    raise typer.Exit(code)


def _plan(given: dict[str, Any]) -> Any:
    from ...loadtests.errors import LoadError
    from ...loadtests.plan import LoadPlan

    values = {f.name: given[OPTIONS.get(f.name, f.name)] for f in fields(LoadPlan)}
    default = {"ramp": "1-16", "trace": ""}.get(given["profile"], "2")
    values["rate"] = default if given["rate"] is None else given["rate"]
    values["gate"] = ",".join(given["gate"] or [])
    try:
        values["duration"] = _seconds(given["duration"])
        plan = LoadPlan(**values)
        plan.check()
        return plan
    except LoadError as error:
        fail(str(error), 2)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)?", text)
    if not found:
        fail(f"--duration {text}: expected a time, as 90s or 3m", 2)
    return float(found[1]) * {"m": 60.0, "h": 3600.0}.get(found[2] or "s", 1.0)


@contextmanager
def _target(given: dict[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """URL to load, and options of the plan that follow from it."""
    if not given["laptop"]:
        yield given["endpoint"], {}
        return
    from ...loadtests.errors import LoadError
    from ...loadtests.laptop import cluster

    typer.echo("starting a cluster", err=True)
    try:
        with cluster(str(Path(sys.argv[0]).absolute()), []) as found:
            typer.echo(f"serving at {found.url}", err=True)
            extra = {"admin": found.admin}
            yield found.url, extra | ({"grpc": found.grpc} if given["grpc"] else {})
            typer.echo("stopping the cluster", err=True)
    except LoadError as error:
        fail(str(error))


def _command(plan: Any, url: str, extra: dict[str, str], given: dict[str, Any]) -> list[str]:
    from ...loadtests import plan as module

    file = Path(module.__file__).parent / "locustfile.py"
    command = [sys.executable, "-m", "locust", "-f", str(file), "--host", url]
    processes = given["processes"]
    users = plan.users if plan.load == "chat" else max(processes, given["workers"])
    command += ["-u", str(users), "-r", str(max(users, 1))]
    if given["ui"] is None:
        command += ["--headless", "--only-summary"]
    else:
        command += ["--web-port", str(given["ui"]), "--autostart"]
    if given["workers"]:
        command += ["--master", "--expect-workers", str(given["workers"])]
    elif processes > 1:
        command += ["--processes", str(processes)]
    for field in fields(plan):
        value = extra.get(field.name, getattr(plan, field.name))
        if field.name != "users" and value != field.default:
            command.append(f"--{field.name}={value}")
    return command


def _locust(command: list[str], verbose: bool) -> int:
    """Runs it; its own output only when asked for, or when it failed. Our lines are on stderr."""
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT is ignored by jobs of a script
        signal.signal(number, signal.default_int_handler)
    quiet = [] if verbose else ["--skip-log-setup"]  # then warnings only
    process = subprocess.Popen([*command, *quiet], stdout=sys.stderr)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        return process.wait()


def _show(run: dict[str, Any], html: Path | None, output: str) -> None:
    from ...loadtests.report import document, text

    typer.echo(json.dumps(run, indent=2) if output == "json" else text(run))
    if html:
        save(html, document(run))
        if output == "table":
            typer.echo(f"wrote {html}")


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="JSON of a run.", exists=True, dir_okay=False)],
    second: Annotated[Path, typer.Argument(help="JSON of another.", exists=True, dir_okay=False)],
    html: Html = None,
) -> None:
    """Two runs side by side: figures, ratios, and what else differed."""
    from ...loadtests.report import compared_text, comparison

    runs = []
    for path in (first, second):
        try:
            run = json.loads(path.read_text())
            run["distributions"], run["summary"]
        except (ValueError, KeyError, TypeError):
            fail(f"{path} is no JSON of a load test", 2)
        runs.append(run)
    names = (first.stem, second.stem if second.stem != first.stem else f"{second.stem} (2)")
    typer.echo(compared_text(runs[0], runs[1], names))
    if html:
        html.write_text(comparison(runs[0], runs[1], names))
        typer.echo(f"wrote {html}")


@app.command()
def worker(
    master: Annotated[str, typer.Argument(help="Machine that runs `loadtest --workers N`.")],
    port: Annotated[int, typer.Option(help="Of Locust's master there.")] = 5557,
    processes: Processes = 1,
) -> None:
    """Lend this machine to a load test that runs elsewhere; ends with it."""
    if find_spec("locust") is None:
        fail(INSTALL)
    from ...loadtests import plan as module

    file = Path(module.__file__).parent / "locustfile.py"
    command = [sys.executable, "-m", "locust", "-f", str(file), "--worker", "--master-host", master]
    command += ["--master-port", str(port), "--processes", str(processes)]
    os.execv(command[0], command)
