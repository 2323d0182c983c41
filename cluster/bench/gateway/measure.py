"""One measurement: clients read streams, and /proc says what that cost."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .cluster import HOST, BenchError, MeasuredCluster
from .usage import REST, TITLES

#: The load generator, in C so that it takes little of the CPU that the cluster needs.
CLIENT_SOURCE = Path(__file__).with_name("client.c")
FLAT_TOKENS = 3900  #: Of an answer; the demo model's context is 4,096.
#: Of all flat answers: streams that began early must not end before others begin.
FLAT_TOKENS_IN_ALL = 1_500_000
PACE = 30  #: Tokens a second of each paced stream.


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """What the clients do. `streams`, `slow` and `leavers` are numbers of clients at a time."""

    #: Clients that read as fast as they can: those that are measured.
    streams: int
    #: Of each answer.
    tokens: int
    #: Tokens a second of each stream; 0: flat out.
    pace: int = 0
    #: Clients that read 64 bytes a second.
    slow: int = 0
    #: Clients that go away in the middle of an answer.
    leavers: int = 0
    #: Seconds over which the leavers come.
    span_s: float = 0.0
    #: Seconds over which the streams begin.
    ramp_s: float = 0.3


@dataclass(frozen=True, slots=True)
class GatewayMeasurement:
    """What one load cost."""

    #: Tokens a second, of all streams that are measured.
    tokens_s: float
    #: CPU microseconds per token, by part of the cluster (a key of `TITLES`, or `REST`).
    cpu_us: dict[str, float]
    #: What the load generator prints of itself and its streams: `tokens`, `events`, `cpu_us` (its
    #: own), `gap_p50_ms` and `gap_p99_ms` between tokens, and counts of streams by their end.
    client: dict[str, Any]
    #: The largest resident memory of the gateway that was seen, in MiB.
    gateway_mib: float


class Mark(NamedTuple):
    """The counts of clients and processes at a moment that the load generator names."""

    at_s: float
    tokens: int
    cpu_s: dict[str, float]


def build(folder: Path) -> Path:
    """Compile the load generator into `folder`, once per version of its source.

    Returns the program. Raises BenchError where there is no C compiler, or it fails.
    """
    digest = hashlib.blake2b(CLIENT_SOURCE.read_bytes(), digest_size=8).hexdigest()
    program = folder / f"client-{digest}"
    if program.exists():
        return program
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise BenchError("the load generator needs a C compiler (gcc)")
    command = [compiler, "-O2", "-o", str(program), str(CLIENT_SOURCE)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise BenchError(f"the load generator does not compile: {completed.stderr[:300]}")
    return program


def measure(cluster: MeasuredCluster, load: ClientLoad, client: Path) -> GatewayMeasurement:
    """Put the load on the cluster and measure it while all streams run.

    That is from the moment at which every stream has its second token until the first stream ends.
    The load generator prints `begun` and `ending` at these moments, with its clock in nanoseconds
    and the tokens so far. Raises BenchError if there was no such time, or if a stream failed that
    was not among slow or leaving clients. `client` is the program that `build` returns.
    """
    marks: dict[str, Mark] = {}
    gateway_mib = cluster.processes.rss_mib("gateway")
    with tempfile.NamedTemporaryFile("wb") as body:
        body.write(request(load))
        body.flush()
        command = _command(client, cluster.port, body.name, load)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            line = ""
            for line in process.stdout:
                if line.startswith("{"):  # the last line: what the client says of itself
                    break
                name, nanoseconds, tokens = line.split()
                marks[name] = Mark(int(nanoseconds) / 1e9, int(tokens), cluster.processes.cpu_s())
                gateway_mib = max(gateway_mib, cluster.processes.rss_mib("gateway"))
    if marks.keys() < {"begun", "ending"}:
        output = line.strip()
        raise BenchError(f"no steady state with {load}: the client says {output!r}")
    client_counts = json.loads(line)
    if client_counts["failed"] and not load.slow and not load.leavers:
        raise BenchError(f"{client_counts['failed']} of {load.streams} streams failed")

    begin = marks["begun"]
    end = marks["ending"]
    tokens_read = max(end.tokens - begin.tokens, 1)
    cpu_us = {
        part: (end.cpu_s[part] - begin.cpu_s[part]) / tokens_read * 1e6 for part in (*TITLES, REST)
    }
    return GatewayMeasurement(
        tokens_s=tokens_read / (end.at_s - begin.at_s),
        cpu_us=cpu_us,
        client=client_counts,
        gateway_mib=gateway_mib,
    )


def request(load: ClientLoad) -> bytes:
    """Return the whole HTTP request of every stream. Its seed is the token source's pace."""
    content = {
        "messages": [{"role": "user", "content": "Go."}],
        "stream": True,
        "max_tokens": load.tokens,
        "seed": load.pace,
    }
    body = json.dumps(content).encode()
    head = (
        # A keyless gateway answers to loopback names only.
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _command(client: Path, port: int, request_file: str, load: ClientLoad) -> list[str]:
    return [
        str(client),
        HOST,
        str(port),
        request_file,
        str(load.streams),
        str(load.slow),
        str(load.leavers),
        str(int(load.span_s * 1e3)),
        str(int(load.ramp_s * 1e3)),
    ]


def flat_load(streams: int) -> ClientLoad:
    """Return a load of `streams` streams that are as fast as everything goes."""
    return ClientLoad(streams, min(FLAT_TOKENS, FLAT_TOKENS_IN_ALL // streams))


def paced_load(streams: int, seconds: float) -> ClientLoad:
    """Return a load of `streams` streams that have `PACE` tokens a second for `seconds`."""
    return ClientLoad(streams, int(seconds * PACE), PACE)


def row(load: ClientLoad, proxy: str, measurement: GatewayMeasurement) -> dict[str, Any]:
    """Return a measurement as `diptych bench gateway -o json` has it.

    `added_itl_ms_p99` is how much longer the 99th percentile of the gaps between tokens was than
    the pace asks for. Flat loads have no pace, so their two `itl` values are None.
    """
    client = measurement.client
    client_tokens = max(client["tokens"], 1)
    added_itl_ms_p99 = None
    itl_ms_p50 = None
    if load.pace:
        added_itl_ms_p99 = round(client["gap_p99_ms"] - 1e3 / load.pace, 2)
        itl_ms_p50 = client["gap_p50_ms"]
    return {
        "streams": load.streams,
        "mode": "paced" if load.pace else "flat",
        "proxy": proxy,
        "tokens_s": round(measurement.tokens_s),
        "cpu_us_per_token": {part: round(us, 1) for part, us in measurement.cpu_us.items()},
        "added_itl_ms_p99": added_itl_ms_p99,
        "itl_ms_p50": itl_ms_p50,
        "client_us_per_token": round(client["cpu_us"] / client_tokens, 2),
        "events_per_token": round(client["events"] / client_tokens, 2),
        "failed": client["failed"],
        "gateway_mib": round(measurement.gateway_mib),
        "load_average": round(os.getloadavg()[0], 1),
    }
