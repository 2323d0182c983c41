"""What the commands share: options, failing with one sentence, HTTP, Control's API, and tables."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn
from urllib.parse import quote

import httpx
import typer

from ...loadtests.loopback import is_this_machine
from .running import RunningCluster, running_clusters

HERE = ""  #: In place of a URL: that of the cluster that runs on this machine.
Endpoint = Annotated[
    str,
    typer.Option(
        "--endpoint",
        envvar="DIPTYCH_ENDPOINT",
        help="The gateway's URL. Default: the cluster that runs here.",
        show_default=False,
    ),
]
ApiKey = Annotated[
    str, typer.Option("--token", envvar="DIPTYCH_TOKEN", help="The API key, if one is needed.")
]
DEFAULT_ENDPOINT = "http://127.0.0.1:8000"  #: Where `serve` puts the gateway.
#: Where `serve` puts Control, the process that operators ask.
DEFAULT_ADMIN = "http://127.0.0.1:8001"
Token = Annotated[
    str, typer.Option("--token", envvar="DIPTYCH_ADMIN_TOKEN", help="The admin key, if it has one.")
]
AdminUrl = Annotated[
    str,
    typer.Option(
        "--admin",
        envvar="DIPTYCH_ADMIN",
        help="The admin URL (Control's). Default: the cluster that runs here.",
        show_default=False,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what it would do, and do nothing.")]
Wait = Annotated[bool, typer.Option("--wait", help="Return when it is done, or after 15 minutes.")]
WAIT_LIMIT_S = 900.0  #: The 15 minutes of `--wait`: a large model takes minutes to load.
TEXT_OUTPUTS = ("text", "json")  #: Words of `-o` where the result is text and no table.
POLL_INTERVAL_S = 0.2  #: Between two looks at the cluster while `--wait` waits.
REQUEST_TIMEOUT_S = 15.0  #: Of one request to Control, which asks other processes for its answer.
PATH_CHARACTERS = "/:?=&"  #: What our own paths are made of, so that these are not quoted.
#: What a request raises that gets no answer, also for addresses and keys that cannot be sent.
NO_ANSWER = (httpx.HTTPError, httpx.InvalidURL, UnicodeError)
EVENT_PREFIX = b"data: "  #: Of the lines of a server-sent event that say something.


# ---- failing -------------------------------------------------------------------------------------


def fail(message: str, code: int = 1) -> NoReturn:
    """Print one sentence on stderr and end with the exit code: 1 failed, 2 wrong usage."""
    typer.echo(f"diptych: {message}", err=True)
    raise typer.Exit(code)


def check_output(output: str, allowed: Sequence[str] = ("table", "json")) -> None:
    """End with exit code 2 unless the value of `-o` is one of the allowed words."""
    if output not in allowed:
        listed = " or ".join(allowed) if len(allowed) == 2 else ", ".join(allowed)
        fail(f"-o {output}: expected {listed}", 2)


def check_writable(file: Path | None) -> None:
    """End with exit code 2 if the file cannot be written: before an hour of work, not after it."""
    if file is None:
        return
    target = file if file.exists() else file.parent
    if file.is_dir() or not os.access(target, os.W_OK):
        fail(f"cannot write {file}: is its folder there, and yours?", 2)


def save(file: Path, text: str) -> None:
    """Write the file, or fail. Print results before: if the disk is full, they are not lost."""
    try:
        file.write_text(text)
    except OSError as error:
        fail(f"cannot write {file}: {error.strerror}")


def no_gateway(endpoint: str, error: Exception) -> str:
    """Return the sentence that no gateway answers."""
    reason = str(error) or type(error).__name__
    return f"no gateway at {endpoint} ({reason}); start one with: diptych serve"


def unreachable(endpoint: str, error: Exception) -> NoReturn:
    """Fail because no gateway answers."""
    fail(no_gateway(endpoint, error))


def interrupt_on(*signals: signal.Signals) -> None:
    """Raise KeyboardInterrupt on these signals; jobs of a script ignore SIGINT by default."""
    for number in signals:
        signal.signal(number, signal.default_int_handler)


def error_message(body: bytes) -> str:
    """Return the sentence of an error body, or an empty string if the body is not one of ours."""
    try:
        message: str = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return ""
    return message


# ---- HTTP ----------------------------------------------------------------------------------------


def http_client(url: str, headers: dict[str, str], timeout: httpx.Timeout) -> httpx.Client:
    """Return a client for the base URL; the environment's proxy is for other machines only.

    Fails with a sentence if that proxy cannot be used. Raises one of `NO_ANSWER` for a URL or a
    header that cannot be sent.
    """
    transport = httpx.HTTPTransport() if is_this_machine(url) else None
    try:
        client = httpx.Client(timeout=timeout, transport=transport)
    except (ImportError, ValueError, httpx.InvalidURL) as error:  # only a proxy can be wrong here
        reason = str(error).rstrip(".")
        fail(f"the proxy of the environment cannot be used: {reason}; NO_PROXY names exceptions", 2)
    client.base_url = httpx.URL(url)
    client.headers.update(headers)
    return client


def event_data(response: httpx.Response) -> Iterator[bytes]:
    """Yield the data of server-sent events, line by line, as they come.

    Lines end at a newline only. httpx's own `iter_lines` also ends them at U+2028 and the like,
    which JSON has as they are.
    """
    rest = b""
    for piece in response.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(EVENT_PREFIX):
                yield line.removeprefix(EVENT_PREFIX).rstrip(b"\r")


# ---- clusters of this machine --------------------------------------------------------------------


def gateway_url(endpoint: str) -> str:
    """Return the endpoint, or for `HERE` the gateway of the cluster that runs on this machine."""
    if endpoint != HERE:
        return endpoint
    cluster = _cluster_here("--endpoint", "DIPTYCH_ENDPOINT")
    return cluster.http if cluster else DEFAULT_ENDPOINT


def admin_url(admin: str) -> str:
    """Return the URL, or for `HERE` Control's of the cluster that runs on this machine."""
    if admin != HERE:
        return admin
    cluster = _cluster_here("--admin", "DIPTYCH_ADMIN")
    return cluster.admin if cluster else DEFAULT_ADMIN


def _cluster_here(option: str, variable: str) -> RunningCluster | None:
    """Return the one cluster of this user that runs on this machine; None if there is no note.

    Without a note a cluster may run all the same behind the default addresses: in a container, or
    for another user. Fails, and lists the clusters, if several run.
    """
    clusters = running_clusters()
    if len(clusters) > 1:
        listed = "\n".join(
            f"  {cluster.model}: {option} "
            f"{cluster.http if option == '--endpoint' else cluster.admin}   (pid {cluster.pid})"
            for cluster in clusters
        )
        fail(f"{len(clusters)} clusters run here; say which one, or set {variable}:\n{listed}", 2)
    return clusters[0] if clusters else None


# ---- Control -------------------------------------------------------------------------------------


class AdminClient:
    """Control's admin API over HTTP. Every failure ends the command with one sentence.

    `url` may be `HERE`. `token` is the admin key, empty if none is needed.
    """

    def __init__(self, url: str, token: str) -> None:
        self.url = admin_url(url).rstrip("/")  #: Paths of the API begin with a slash.
        self.headers = {"authorization": f"Bearer {token}"} if token else {}

    def get(self, path: str) -> Any:
        """Return what Control answers, as it was parsed from JSON."""
        return self._ask("GET", path)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Give an order; return what Control answers, as it was parsed from JSON."""
        return self._ask("POST", path, json=body)

    def connect(self, timeout_s: float) -> httpx.Client:
        """Return a client with the admin key, for paths of the API. It raises as `http_client`."""
        return http_client(self.url, self.headers, httpx.Timeout(timeout_s))

    def _ask(self, method: str, path: str, **options: Any) -> Any:
        quoted_path = quote(path, safe=PATH_CHARACTERS)
        try:
            with self.connect(REQUEST_TIMEOUT_S) as client:
                response = client.request(method, f"{self.url}{quoted_path}", **options)
        except NO_ANSWER as error:
            self.unreachable(error)
        if response.is_error:
            fail(error_message(response.content) or f"{self.url}{path}: {response.status_code}")
        try:
            return response.json()
        except ValueError:
            fail(f"{self.url}{path} does not answer in JSON: is this Diptych's admin URL?")

    def unreachable(self, error: Exception) -> NoReturn:
        """Fail because no Control answers."""
        reason = str(error) or type(error).__name__
        fail(f"no Control at {self.url} ({reason}); start a cluster with: diptych serve")

    def wait(self, describe_remaining: Callable[[dict[str, Any]], str | None]) -> float:
        """Wait until `describe_remaining(status)` returns None; return the seconds that took.

        `status` is the object of `GET /admin/v1/cluster`, and the text that is returned says what
        remains to be done. It is printed whenever it changes. Fails after `WAIT_LIMIT_S`.
        """
        began = time.monotonic()
        last_printed = None
        while remaining := self._remaining(describe_remaining):
            if remaining != last_printed:
                typer.echo(f"  {remaining}", err=True)
                last_printed = remaining
            if time.monotonic() - began > WAIT_LIMIT_S:
                fail(f"not done after {WAIT_LIMIT_S:.0f} s: {remaining}")
            time.sleep(POLL_INTERVAL_S)
        return time.monotonic() - began

    def _remaining(self, describe_remaining: Callable[[dict[str, Any]], str | None]) -> str | None:
        """Return what remains, which includes that Control itself is away for a while."""
        try:
            with self.connect(REQUEST_TIMEOUT_S) as client:
                response = client.get(f"{self.url}/admin/v1/cluster").raise_for_status()
        except NO_ANSWER as error:
            return f"no answer: {str(error) or type(error).__name__}"
        return describe_remaining(response.json())


# ---- tables --------------------------------------------------------------------------------------


def table_lines(rows: Sequence[Sequence[str]], right_aligned_from: int | None = None) -> list[str]:
    """Return the rows as lines whose columns are as wide as they must be.

    All rows have the same number of cells. Columns are aligned to the left, and from the index
    `right_aligned_from` on to the right; None: all to the left.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first_right_aligned = len(widths) if right_aligned_from is None else right_aligned_from
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index < first_right_aligned else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def or_dash(value: float | None, shape: str) -> str:
    """Return the value in a format of `str.format`, or a dash where nothing was measured."""
    return "-" if value is None else shape.format(value)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print the rows, the heading among them, with all columns aligned to the left."""
    for line in table_lines(rows):
        typer.echo(line)
