"""What every command shares: where the cluster is, how to fail."""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

import httpx
import typer

Endpoint = Annotated[
    str, typer.Option("--endpoint", envvar="DIPTYCH_ENDPOINT", help="The gateway's URL.")
]
DEFAULT_ENDPOINT = "http://127.0.0.1:8000"


def fail(message: str, code: int = 1) -> NoReturn:
    """One sentence on stderr, and the exit code."""
    typer.echo(f"diptych: {message}", err=True)
    raise typer.Exit(code)


def unreachable(endpoint: str, error: Exception) -> NoReturn:
    reason = str(error) or type(error).__name__
    fail(f"no gateway at {endpoint} ({reason}); start one with: diptych serve")


def get_json(endpoint: str, path: str) -> Any:
    try:
        response = httpx.get(f"{endpoint}{path}", timeout=10.0)
    except httpx.HTTPError as error:
        unreachable(endpoint, error)
    if response.is_error:
        fail(error_message(response.content) or f"{endpoint}{path}: {response.status_code}")
    try:
        return response.json()
    except ValueError:
        fail(f"{endpoint}{path} does not answer in JSON: is this a Diptych gateway?")


def error_message(body: bytes) -> str:
    """The sentence of an error body, if it is one of ours."""
    import json

    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return ""
