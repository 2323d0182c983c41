"""A pytest plugin for vLLM's tests: it installs the stand-ins, selects tests, and writes down outcomes.

Environment: COMPAT_TESTS names a file with one test id a line, COMPAT_OUTCOMES the file of outcomes (JSON lines),
COMPAT_URL the proxy, which is told which test runs.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from pathlib import Path

import pytest

from compat_shim import stand_ins

stand_ins.install()


class LocalAssetServer:
    """Takes the place of a class of vLLM's `tests/conftest.py` that serves images."""

    def __enter__(self) -> LocalAssetServer:
        return self

    def __exit__(self, *error: object) -> None: ...


@pytest.fixture(scope="session")
def local_asset_server() -> LocalAssetServer:
    return LocalAssetServer()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that the list names."""
    listed = os.environ.get("COMPAT_TESTS")
    if not listed:
        return
    names = set(Path(listed).read_text().splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in names])
    items[:] = [item for item in items if item.nodeid in names]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    url = os.environ["COMPAT_URL"] + "/compat/running-test"
    request = urllib.request.Request(url, data=item.nodeid.encode(), method="POST")
    urllib.request.urlopen(request, timeout=10).close()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    outcome = yield
    report = outcome.get_result()
    if report.passed and report.when != "call":
        return
    record = {
        "test": report.nodeid,
        "outcome": report.outcome,
        "phase": report.when,
        "reason": _reason(report, call),
        "seconds": round(call.duration, 2),
        "ended_at": time.time(),
    }
    with Path(os.environ["COMPAT_OUTCOMES"]).open("a") as outcomes:
        outcomes.write(json.dumps(record) + "\n")


def _reason(report: pytest.TestReport, call: pytest.CallInfo[None]) -> str:
    """Return in one line why the test did not pass, or an empty string."""
    if report.passed:
        return ""
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    assert call.excinfo is not None
    lines = str(call.excinfo.value).strip().splitlines() or [""]
    return f"{call.excinfo.typename}: {' '.join(lines)[:600]} (line {_test_line(call)})"


def _test_line(call: pytest.CallInfo[None]) -> int:
    """Return the last line of the traceback that lies in one of vLLM's own test files."""
    assert call.excinfo is not None
    lines = [
        entry.lineno + 1
        for entry in call.excinfo.traceback
        if "/tests/" in str(entry.path) and "compat_shim" not in str(entry.path)
    ]
    return lines[-1] if lines else 0
