"""`diptych loadtest` runs Locust as a subprocess and reports its run; it also compares two runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import (
    HERE,
    Endpoint,
    admin_url,
    check_output,
    check_writable,
    fail,
    gateway_url,
    interrupt_on,
    save,
)

if TYPE_CHECKING:
    from ...loadtests.plan import LoadPlan

app = typer.Typer(help="Offer load to an OpenAI-compatible endpoint, and report goodput.")
#: The error where Locust is not installed.
INSTALL = "the load test needs Locust: pip install 'diptych[loadtest]'"
#: Fields of the load test's plan whose options have other names here.
OPTION_OF_FIELD = {
    "load": "profile",
    "prompt": "prompt_tokens",
    "output": "output_tokens",
    "shared": "shared_tokens",
}
#: Requests/s by profile, where `--rate` is not given; the others have `DEFAULT_RATE`. A ramp goes
#: from the first to the second; empty: as the trace was recorded.
DEFAULT_RATES = {"ramp": "1-16", "trace": ""}
DEFAULT_RATE = "2"
#: Seconds by the letter behind a duration; a duration without a letter is in seconds.
SECONDS_OF_UNIT = {"s": 1.0, "m": 60.0, "h": 3600.0}

Profile = Annotated[str, typer.Option(help="constant, poisson, burst, ramp, trace or chat.")]
Rate = Annotated[
    str | None,
    typer.Option(
        help="Requests per second; LOW-HIGH for ramp. Default: 2 (ramp 1-16, trace as recorded)."
    ),
]
Users = Annotated[int, typer.Option(min=1, help="Users of the chat profile.")]
Duration = Annotated[str, typer.Option(help="Time in which requests are offered: 90s, 3m.")]
Slo = Annotated[str, typer.Option(help="Targets that a request must meet to count as goodput.")]
Isolated = Annotated[
    str,
    typer.Option(
        help="How long a prompt takes alone, as 20ms + 150ms/1k: for --slo ttft=max(1s, 3x)."
    ),
]
Gates = Annotated[
    list[str] | None,
    typer.Option(
        help="Figure that must hold, else exit code 4: goodput>=0.95, ttft_p99<=1500 (ms)."
    ),
]
Laptop = Annotated[
    bool, typer.Option("--laptop", help="Start a cluster here for the run, and stop it.")
]
Grpc = Annotated[
    str,
    typer.Option(
        help="Send the load over gRPC to HOST:PORT. With --laptop it goes to that cluster, "
        "whatever is given (auto, for one). The endpoint is asked over HTTP which model it has."
    ),
]
Model = Annotated[str, typer.Option(help="Model to ask for. Default: the first of /v1/models.")]
Tokens = Annotated[str, typer.Option(help="Tokens: N or LOW-HIGH.")]
Shared = Annotated[
    int,
    typer.Option(min=0, help="Tokens that all prompts begin with; chat: of each system prompt."),
]
Think = Annotated[
    float, typer.Option(min=0, help="Mean seconds between an answer and the next message (chat).")
]
Steps = Annotated[int, typer.Option(min=1, help="Number of rates in a ramp.")]
Trace = Annotated[
    str,
    typer.Option(
        help="File, or synthetic[:N] for N generated requests (default 4000). For --profile trace."
    ),
]
Scale = Annotated[float, typer.Option(help="Factor on the trace's lengths.")]
Dispatch = Annotated[
    str, typer.Option(help="timestamp, or thinktime: a trace's turns wait for the one before.")
]
Seed = Annotated[int, typer.Option(help="Seed of arrivals, lengths and texts.")]
Drain = Annotated[float, typer.Option(min=0, help="Seconds for answers that still run at the end.")]
Processes = Annotated[int, typer.Option(min=1, help="Client processes on this machine.")]
Workers = Annotated[
    int,
    typer.Option(
        min=0, help="Wait for so many processes of `loadtest worker`; they alone offer the load."
    ),
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
    isolated: Isolated = "",
    gate: Gates = None,
    endpoint: Endpoint = HERE,
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

    A key for the endpoint is taken from DIPTYCH_API_KEY, DIPTYCH_TOKEN or OPENAI_API_KEY.
    """
    if context.invoked_subcommand:
        return  # `compare` or `worker` runs instead
    options = dict(locals())  # by parameter name: the plan takes its fields from them
    check_output(output)
    check_writable(out)
    check_writable(html)
    if find_spec("locust") is None:
        fail(INSTALL)
    with tempfile.TemporaryDirectory(prefix="diptych-loadtest-") as folder:
        run_file = Path(folder) / "run.json"  # an older run may be where `out` is
        options["out"] = str(run_file)
        plan = _make_plan(options)
        with _target(options) as target:
            code = _run_locust(_locust_command(plan, target, options), verbose=verbose)
        # Locust failed before there was a run; it has said why.
        if not run_file.exists():
            raise typer.Exit(code or 1)
        run_text = run_file.read_text()
    _show(json.loads(run_text), html, output)
    if out:
        save(out, run_text)
    raise typer.Exit(code)


def _make_plan(options: dict[str, Any]) -> LoadPlan:
    """Return the load test's plan from the options of the command line, or fail."""
    from ...loadtests.errors import LoadError
    from ...loadtests.plan import LoadPlan

    values = {
        field.name: options[OPTION_OF_FIELD.get(field.name, field.name)]
        for field in fields(LoadPlan)
    }
    if options["rate"] is None:
        values["rate"] = DEFAULT_RATES.get(options["profile"], DEFAULT_RATE)
    values["gate"] = ",".join(options["gate"] or [])
    values["duration"] = _parse_duration(options["duration"])
    try:
        plan = LoadPlan(**values)
        plan.check()
    except LoadError as error:
        fail(str(error), 2)
    return plan


def _parse_duration(text: str) -> float:
    """Return the seconds of `90s`, `3m` or `1h`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)?", text)
    if not match:
        fail(f"--duration {text}: expected a time, as 90s or 3m", 2)
    return float(match[1]) * SECONDS_OF_UNIT[match[2] or "s"]


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Where the load goes."""

    url: str  #: URL of the HTTP endpoint.
    #: Fields of the plan that only the target knows; they replace those of the command line.
    plan_fields: dict[str, str] = field(default_factory=dict)


@contextmanager
def _target(options: dict[str, Any]) -> Iterator[LoadTarget]:
    """Yield the endpoint, or with `--laptop` a cluster that runs meanwhile.

    Any value of `--grpc` means the gRPC address of that cluster. Without `--laptop`, `auto` means
    no address: the command fails.
    """
    if not options["laptop"]:
        if options["grpc"] == "auto":
            fail("--grpc auto needs --laptop: give HOST:PORT of the endpoint's gRPC API", 2)
        yield _given_target(options)
        return
    from ...loadtests.errors import LoadError
    from ...loadtests.laptop import cluster

    typer.echo("starting a cluster", err=True)
    try:
        # The cluster is started by the very `diptych` that runs now, with default settings.
        with cluster(str(Path(sys.argv[0]).absolute()), []) as laptop_cluster:
            typer.echo(f"serving at {laptop_cluster.url}", err=True)
            plan_fields = {"admin": laptop_cluster.admin}
            if options["grpc"]:
                plan_fields["grpc"] = laptop_cluster.grpc
            yield LoadTarget(laptop_cluster.url, plan_fields)
            typer.echo("stopping the cluster", err=True)
    except LoadError as error:
        fail(str(error))


def _given_target(options: dict[str, Any]) -> LoadTarget:
    """Return the endpoint of the options; of the cluster that runs here, its Control, too."""
    url = gateway_url(options["endpoint"])
    if options["endpoint"] == HERE and not options["admin"]:
        return LoadTarget(url, {"admin": admin_url(HERE)})
    return LoadTarget(url)


def _locust_command(plan: LoadPlan, target: LoadTarget, options: dict[str, Any]) -> list[str]:
    """Return Locust's command line; the plan travels as options of our locustfile."""
    processes = options["processes"]
    # In the chat profile each of Locust's users is a conversation. In all others one user in each
    # process sends that process's share of the requests; further users have nothing to do. Only
    # the processes of `loadtest worker` offer load if there are any: `--processes` is then not
    # passed on. `-r` starts all users in the first second.
    users = plan.users if plan.load == "chat" else max(processes, options["workers"])
    command = [*_locustfile_command(), "--host", target.url]
    command += ["-u", str(users), "-r", str(max(users, 1))]
    if options["ui"] is None:
        command += ["--headless", "--only-summary"]
    else:
        command += ["--web-port", str(options["ui"]), "--autostart"]
    if options["workers"]:
        command += ["--master", "--expect-workers", str(options["workers"])]
    elif processes > 1:
        command += ["--processes", str(processes)]
    for plan_field in fields(plan):
        value = target.plan_fields.get(plan_field.name, getattr(plan, plan_field.name))
        # `-u` has said the users.
        if plan_field.name != "users" and value != plan_field.default:
            command.append(f"--{plan_field.name}={value}")
    return command


def _locustfile_command() -> list[str]:
    """Return the beginning of Locust's command line, with the file that says what its users do."""
    from ...loadtests import plan as plan_module

    locustfile = Path(plan_module.__file__).parent / "locustfile.py"
    return [sys.executable, "-m", "locust", "-f", str(locustfile)]


def _run_locust(command: list[str], *, verbose: bool) -> int:
    """Run Locust and return its exit code; ^C lets Locust end the run and report it.

    A second ^C kills Locust. SIGTERM counts as ^C, and so does the SIGHUP of a closed terminal,
    unless that is ignored, as under `nohup`. All output goes to stderr. Without `verbose` Locust
    logs warnings only.
    """
    interrupt_on(signal.SIGINT, signal.SIGTERM)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        interrupt_on(signal.SIGHUP)
    if not verbose:
        command = [*command, "--skip-log-setup"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,  # Locust would take keys from a terminal that is not its own
        stdout=sys.stderr,
        # ^C reaches this process alone, which interrupts Locust once: a second interrupt would end
        # Locust before it has written the run.
        start_new_session=True,
    )
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        return process.wait()
    finally:
        # Locust itself after a second ^C; after an early one, which ends it at once, the processes
        # that it has forked.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _show(run: dict[str, Any], html: Path | None, output: str) -> None:
    """Print the run, and write its report into `html` if there is one."""
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

    first_run = _read_run(first)
    second_run = _read_run(second)
    # Runs of two folders may have the same file name; the table needs two names.
    second_name = second.stem if second.stem != first.stem else f"{second.stem} (2)"
    names = (first.stem, second_name)
    typer.echo(compared_text(first_run, second_run, names))
    if html:
        save(html, comparison(first_run, second_run, names))
        typer.echo(f"wrote {html}")


def _read_run(file: Path) -> dict[str, Any]:
    """Return the run in a JSON file, or fail if there is none."""
    try:
        run: dict[str, Any] = json.loads(file.read_text())
    except ValueError:
        run = {}
    if not isinstance(run, dict) or not {"distributions", "summary"} <= run.keys():
        fail(f"{file} is no JSON of a load test", 2)
    return run


@app.command()
def worker(
    master: Annotated[str, typer.Argument(help="Machine that runs `loadtest --workers N`.")],
    port: Annotated[int, typer.Option(help="Of Locust's master there.")] = 5557,
    processes: Processes = 1,
) -> None:
    """Lend this machine to a load test that runs elsewhere; ends with it."""
    if find_spec("locust") is None:
        fail(INSTALL)
    command = [*_locustfile_command(), "--worker", "--master-host", master]
    command += ["--master-port", str(port), "--processes", str(processes)]
    os.execv(command[0], command)
