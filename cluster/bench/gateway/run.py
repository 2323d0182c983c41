"""All measurements: prompts here, each cluster in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import prompts
from .cluster import BenchError

LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class Options:
    model: Path
    proxies: tuple[str, ...] = ("none", "haproxy", "python")
    streams: tuple[int, ...] = (128, 512)
    seconds: float = 10.0
    slow: bool = False


def run(options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """The result of `diptych bench gateway`. Raises BenchError when nothing could be measured."""
    result: dict[str, Any] = {"rows": [], "missing": {}, "cores": os.cpu_count()}
    for proxy in options.proxies:
        say(f"proxy {proxy}: starting a cluster")
        try:
            found = _cluster(options, proxy, say)
        except BenchError as error:
            result["missing"][proxy] = str(error)
            continue
        result["rows"] += found["rows"]
        if "slow" in found:
            result.setdefault("slow", {})[proxy] = found["slow"]
    say("prompts")
    result["prompts"] = prompts.measure(options.model)
    return result


def _cluster(options: Options, proxy: str, say: Callable[[str], None]) -> dict[str, Any]:
    asked = {
        "proxy": proxy,
        "model": str(options.model),
        "streams": options.streams,
        "seconds": options.seconds,
        "slow": options.slow,
    }
    command = [sys.executable, "-m", f"{__package__}.child", json.dumps(asked)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stderr and child.stdout
        lines: list[str] = []
        for line in child.stderr:
            if line.startswith("{"):
                say(line.strip())
            else:
                lines = [*lines[-20:], line]
        output = child.stdout.read().strip()
        try:
            child.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            child.kill()
    if not output:
        raise BenchError(f"the cluster's process ended: {''.join(lines)[-500:].strip()}")
    told: dict[str, Any] = json.loads(output.splitlines()[-1])
    if "error" in told:
        raise BenchError(told["error"])
    return told
