"""What every command shares: where the cluster is, how to fail."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn
from urllib.parse import quote

import httpx
import typer

Endpoint = Annotated[
    str, typer.Option("--endpoint", envvar="DIPTYCH_ENDPOINT", help="The gateway's URL.")
]
ApiKey = Annotated[
    str, typer.Option("--token", envvar="DIPTYCH_TOKEN", help="The API key, if one is needed.")
]
DEFAULT_ENDPOINT = "http://127.0.0.1:8000"
DEFAULT_ADMIN = "http://127.0.0.1:8001"
Token = Annotated[
    str, typer.Option("--token", envvar="DIPTYCH_ADMIN_TOKEN", help="The admin key, if it has one.")
]
AdminUrl = Annotated[
    str, typer.Option("--admin", envvar="DIPTYCH_ADMIN", help="The admin URL (Control's).")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what it would do, and do nothing.")]
Wait = Annotated[bool, typer.Option("--wait", help="Return when it is done, or after 15 minutes.")]
WAIT_S, POLL_S = 900.0, 0.2
PATH = "/:?=&"  #: what our own paths are made of
#: what a request raises that gets no answer, addresses and keys that cannot be sent among them
NO_ANSWER = (httpx.HTTPError, httpx.InvalidURL, UnicodeError)


def fail(message: str, code: int = 1) -> NoReturn:
    """One sentence on stderr, and the exit code."""
    typer.echo(f"diptych: {message}", err=True)
    raise typer.Exit(code)


def check_writable(file: Path | None) -> None:
    """Said before an hour of work, not behind it."""
    if file and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
        fail(f"cannot write {file}: is its folder there, and yours?", 2)


def save(file: Path, text: str) -> None:
    """What is printed should be out already: a disk may be full."""
    try:
        file.write_text(text)
    except OSError as error:
        fail(f"cannot write {file}: {error.strerror}")


def unreachable(endpoint: str, error: Exception) -> NoReturn:
    reason = str(error) or type(error).__name__
    fail(f"no gateway at {endpoint} ({reason}); start one with: diptych serve")


class Admin:
    """The admin API. Every failure ends the command with one sentence."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url.rstrip("/")
        self.headers = {"authorization": f"Bearer {token}"} if token else {}

    def get(self, path: str) -> Any:
        return self._ask("GET", path)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._ask("POST", path, json=body)

    def _ask(self, method: str, path: str, **given: Any) -> Any:
        try:
            response = httpx.request(
                method,
                f"{self.url}{quote(path, safe=PATH)}",
                headers=self.headers,
                timeout=15.0,
                **given,
            )
        except NO_ANSWER as error:
            self.unreachable(error)
        if response.is_error:
            fail(error_message(response.content) or f"{self.url}{path}: {response.status_code}")
        try:
            return response.json()
        except ValueError:
            fail(f"{self.url}{path} does not answer in JSON: is this Diptych's admin URL?")

    def unreachable(self, error: Exception) -> NoReturn:
        reason = str(error) or type(error).__name__
        fail(f"no Control at {self.url} ({reason}); start a cluster with: diptych serve")

    def wait(self, done: Callable[[dict[str, Any]], str | None]) -> float:
        """Until `done(status)` says nothing is left to wait for; the seconds that took."""
        began, said = time.monotonic(), None
        while left := self._left(done):
            if left != said:
                typer.echo(f"  {left}", err=True)
                said = left
            if time.monotonic() - began > WAIT_S:
                fail(f"not done after {WAIT_S:.0f} s: {left}")
            time.sleep(POLL_S)
        return time.monotonic() - began

    def _left(self, done: Callable[[dict[str, Any]], str | None]) -> str | None:
        """What is left, also while Control itself is replaced."""
        try:
            path = f"{self.url}/admin/v1/cluster"
            response = httpx.get(path, headers=self.headers, timeout=15.0).raise_for_status()
        except NO_ANSWER as error:
            return f"no answer: {error or type(error).__name__}"
        return done(response.json())


def table(rows: list[tuple[str, ...]]) -> None:
    """Columns as wide as they must be."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())


def error_message(body: bytes) -> str:
    """The sentence of an error body, if it is one of ours."""
    import json

    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return ""
