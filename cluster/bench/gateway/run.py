"""All measurements of `diptych bench gateway`.

Each cluster is measured in a process of its own (`child.py`), as Ray reads its switches at import.
The prompts are measured in this process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import prompts
from .cluster import BenchError

CHILD_LIMIT_S = 900.0  #: For a child to end after it has closed its output; then it is interrupted.
#: For a child to end its cluster after an interrupt; then it is killed, and all that it started.
STOP_LIMIT_S = 60.0
LOG_LINES_LIMIT = 21  #: Lines of a child that are kept in case it fails.
LOG_CHARACTERS_LIMIT = 500


@dataclass(frozen=True, slots=True)
class GatewayBenchOptions:
    """What to measure."""

    #: A checkpoint's folder, of which the tokenizer is used.
    model: Path
    #: none (the gateway's own socket), haproxy or python.
    proxies: tuple[str, ...] = ("none", "haproxy", "python")
    #: Numbers of streams at a time, in turn.
    streams: tuple[int, ...] = (128, 512)
    #: Length of a paced load, whose streams have a steady number of tokens a second.
    seconds: float = 10.0
    #: Whether slow clients are measured too.
    slow: bool = False
    #: Rounds of whole requests, which are measured instead of tokens; 0: tokens are measured.
    rounds: int = 0
    #: The Python that has Dynamo, whose front end is measured beside whole requests; None: no peer.
    dynamo: Path | None = None


def run(options: GatewayBenchOptions, report_progress: Callable[[str], None]) -> dict[str, Any]:
    """Return the result of `diptych bench gateway`, which is printed as JSON.

    `rows` are those of all proxies: tokens a second, and CPU and latency for each token. `prompts` are
    those of preparing prompts, `slow` has the runs with slow clients by proxy, `requests` the rows of
    whole requests: CPU and latency for each. `report_progress` gets a line now
    and then. A proxy with which nothing could be measured is in `missing`, with the reason; so are
    `prompts` that could not be measured.
    """
    result: dict[str, Any] = {"rows": [], "prompts": [], "missing": {}, "cores": os.cpu_count()}
    for proxy in options.proxies:
        report_progress(f"proxy {proxy}: starting a cluster")
        try:
            measured = _measure_in_child(options, proxy, report_progress)
        except BenchError as error:
            result["missing"][proxy] = str(error)
            continue
        result["rows"] += measured["rows"]
        if "slow" in measured:
            result.setdefault("slow", {})[proxy] = measured["slow"]
        if "requests" in measured:
            result.setdefault("requests", []).extend(measured["requests"])
    if not options.rounds:
        report_progress("prompts")
        try:
            result["prompts"] = prompts.measure(options.model)
        except BenchError as error:
            result["missing"]["prompts"] = str(error)
    return result


def _measure_in_child(
    options: GatewayBenchOptions, proxy: str, report_progress: Callable[[str], None]
) -> dict[str, Any]:
    """Run `child.py` and return its last line's object; rows are progress. Raises BenchError.

    However this ends, the child has ended, and what it has started with it.
    """
    child_options = {
        "proxy": proxy,
        "model": str(options.model),
        "streams": options.streams,
        "seconds": options.seconds,
        "slow": options.slow,
        "rounds": options.rounds,
        "dynamo": options.dynamo and str(options.dynamo),
    }
    command = [sys.executable, "-m", f"{__package__}.child", json.dumps(child_options)]
    log_lines = deque[str](maxlen=LOG_LINES_LIMIT)
    # The child's stdout is a file: many rounds of whole requests have more rows than fit into a
    # pipe, and this process reads the other pipe until the child ends.
    with (
        tempfile.TemporaryFile("w+") as result_file,
        subprocess.Popen(
            command,
            stdout=result_file,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # ^C reaches this process alone, which ends the child
        ) as child,
    ):
        assert child.stderr
        try:
            for line in child.stderr:  # until the child ends
                if line.startswith("{"):
                    report_progress(line.strip())
                else:
                    log_lines.append(line)
            with suppress(subprocess.TimeoutExpired):
                child.wait(CHILD_LIMIT_S)
        finally:
            _end(child)
        result_file.seek(0)
        output = result_file.read().strip()
    if not output:
        log_end = "".join(log_lines)[-LOG_CHARACTERS_LIMIT:].strip()
        raise BenchError(f"the cluster's process ended: {log_end}")
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    if "error" in result:
        raise BenchError(result["error"])
    return result


def _end(child: subprocess.Popen[str]) -> None:
    """End a child that leads its session, by an interrupt at which the child ends its cluster.

    It has `STOP_LIMIT_S` seconds for that. What is left of its group then, or once it has ended, is
    killed.
    """
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            child.wait(STOP_LIMIT_S)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
