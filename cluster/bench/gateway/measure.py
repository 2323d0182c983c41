"""One measurement: clients read streams, /proc says what that cost."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cluster import BenchError, Cluster

SOURCE = Path(__file__).with_name("client.c")
FLAT_TOKENS = 3900  #: of an answer; the demo model's context is 4,096
FLAT_SUM = (
    1_500_000  #: of all answers, at most: streams that began early must not end before others begin
)
PACE = 30  #: tokens a second
PARTS = ("gateway", "worker", "proxy", "router")


@dataclass(frozen=True, slots=True)
class Load:
    """What clients do. `pace` 0: flat out."""

    streams: int
    tokens: int
    pace: int = 0
    slow: int = 0
    leavers: int = 0
    span_s: float = 0.0  #: leavers come over this time
    ramp_s: float = 0.3


@dataclass(frozen=True, slots=True)
class Result:
    """`cpu_us`: per token, by part; `client`: what the client says."""

    tokens_s: float
    cpu_us: dict[str, float]
    client: dict[str, Any]
    gateway_mib: float  #: the most that was seen


def compiler() -> str:
    found = shutil.which("gcc") or shutil.which("cc")
    if found is None:
        raise BenchError("the load generator needs a C compiler (gcc)")
    return found


def build(folder: Path) -> Path:
    """Compiles the load generator, once per source. Raises BenchError."""
    path = folder / f"client-{hashlib.blake2b(SOURCE.read_bytes(), digest_size=8).hexdigest()}"
    if not path.exists():
        command = [compiler(), "-O2", "-o", str(path), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchError(f"the load generator does not compile: {done.stderr[:300]}")
    return path


def measure(cluster: Cluster, load: Load, client: Path) -> Result:
    """Steady state: from every stream's first token to the first stream's end."""
    marks: dict[str, tuple[float, int, dict[str, float]]] = {}
    most = cluster.processes.rss_mib("gateway")
    with tempfile.NamedTemporaryFile("wb") as body:
        body.write(request(load))
        body.flush()
        with subprocess.Popen(
            _command(client, cluster.port, body.name, load), stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout
            line = ""
            for line in process.stdout:
                if line.startswith("{"):
                    break
                name, ns, tokens = line.split()
                marks[name] = int(ns) / 1e9, int(tokens), cluster.processes.cpu_s()
                most = max(most, cluster.processes.rss_mib("gateway"))
    if marks.keys() < {"begun", "ending"}:
        said = line.strip()
        raise BenchError(f"no steady state with {load}: the client says {said!r}")
    (began, first, before), (ended, last, after) = marks["begun"], marks["ending"]
    count = max(last - first, 1)
    cpu = {part: (after[part] - before[part]) / count * 1e6 for part in (*PARTS, "rest")}
    return Result(count / (ended - began), cpu, json.loads(line), most)


def request(load: Load) -> bytes:
    """The whole HTTP request. Its seed is the source's pace."""
    content = {
        "messages": [{"role": "user", "content": "Go."}],
        "stream": True,
        "max_tokens": load.tokens,
        "seed": load.pace,
    }
    body = json.dumps(content).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _command(client: Path, port: int, body: str, load: Load) -> list[str]:
    numbers = load.streams, load.slow, load.leavers, load.span_s * 1e3, load.ramp_s * 1e3
    return [str(client), "127.0.0.1", str(port), body, *(str(int(n)) for n in numbers)]


def flat(streams: int) -> Load:
    return Load(streams, min(FLAT_TOKENS, FLAT_SUM // streams))


def paced(streams: int, seconds: float) -> Load:
    return Load(streams, int(seconds * PACE), PACE)


def row(load: Load, proxy: str, result: Result) -> dict[str, Any]:
    """As `diptych bench gateway -o json` has it."""
    client, step_ms = result.client, 1e3 / load.pace if load.pace else 0.0
    return {
        "streams": load.streams,
        "mode": "paced" if load.pace else "flat",
        "proxy": proxy,
        "tokens_s": round(result.tokens_s),
        "cpu_us_per_token": {name: round(us, 1) for name, us in result.cpu_us.items()},
        "added_itl_ms_p99": round(client["gap_p99_ms"] - step_ms, 2) if load.pace else None,
        "itl_ms_p50": client["gap_p50_ms"] if load.pace else None,
        "client_us_per_token": round(client["cpu_us"] / max(client["tokens"], 1), 2),
        "events_per_token": round(client["events"] / max(client["tokens"], 1), 2),
        "failed": client["failed"],
        "gateway_mib": round(result.gateway_mib),
        "load_average": round(os.getloadavg()[0], 1),
    }
