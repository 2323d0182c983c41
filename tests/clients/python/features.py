"""What each client script shares: where the server is, and a list of features that are tried one after the other.

A script decorates one function per feature. A feature that raises has failed; the others are tried all the same. The
outcomes are printed as JSON lines for the runner, and the exit code is 1 if a feature failed.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable

URL = os.environ["CLIENT_URL"]  #: without a path
V1_URL = f"{URL}/v1"
MODEL = os.environ["CLIENT_MODEL"]
TOKENIZER = os.environ["CLIENT_TOKENIZER"]  #: the folder of the model
API_KEY = "none"
QUESTION = "What is prefill?"

_features: dict[str, Callable] = {}


def feature(name: str) -> Callable[[Callable], Callable]:
    """Register the decorated function, which may be a coroutine, as the feature `name`."""

    def register(function: Callable) -> Callable:
        assert name not in _features, f"feature {name} is there twice"
        _features[name] = function
        return function

    return register


def refusal(kind: type[Exception], ask: Callable[[], object]) -> Exception:
    """Return the error of that kind that `ask` raises; AssertionError if it raises none."""
    try:
        ask()
    except kind as error:
        return error
    raise AssertionError("a wrong request was not refused")


def run_features() -> None:
    """Try each feature, print its outcome, and exit."""
    failed = []
    for name, function in _features.items():
        error = _error_of(function)
        print(json.dumps({"feature": name, "passed": not error, "error": error}), flush=True)
        if error:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    sys.exit(1 if failed else 0)


def _error_of(function: Callable) -> str:
    """Return in one line what the feature raised, or an empty string."""
    try:
        result = function()
        if inspect.isawaitable(result):
            asyncio.run(_finish(result))
    except Exception as error:
        traceback.print_exc()
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split()) or f"line {_script_line(error)}: {where.line}"
        return f"{type(error).__name__}: {text}"[:1000]
    return ""


async def _finish(result: object) -> None:
    assert inspect.isawaitable(result)
    await asyncio.wait_for(result, timeout=60)


def _script_line(error: Exception) -> int:
    """Return the last line of the traceback that lies in a client script."""
    folder = os.path.dirname(os.path.abspath(__file__))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if os.path.dirname(frame.filename) == folder and frame.filename != __file__
    ]
    return frames[-1].lineno or 0 if frames else 0
