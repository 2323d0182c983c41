"""A cluster of this machine for one run: `diptych serve` on free ports, stopped afterwards."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import LoadError

START_S, STOP_S = 180.0, 60.0


@dataclass(frozen=True, slots=True)
class Cluster:
    url: str
    grpc: str
    admin: str


@contextmanager
def cluster(diptych: str, arguments: list[str]) -> Iterator[Cluster]:
    """`diptych`: the command. Raises LoadError with the log's end if it does not start."""
    http, rpc, admin, admin_rpc = _free_ports(4)
    command = [diptych, "serve", *arguments, "--port", str(http), "--grpc-port", str(rpc)]
    command += ["--set", f"control.port={admin}", "--set", f"control.grpc_port={admin_rpc}"]
    with tempfile.TemporaryDirectory(prefix="diptych-loadtest-") as folder:
        log = Path(folder) / "serve.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            _wait(process, log)
            host = "127.0.0.1"
            yield Cluster(f"http://{host}:{http}", f"{host}:{rpc}", f"http://{host}:{admin}")
        finally:
            _stop(process)


def _wait(process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while "] ready" not in log.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            last = log.read_text().strip().splitlines()[-1:] or ["no output"]
            raise LoadError(f"diptych serve did not start: {last[0]}")
        time.sleep(0.2)


def _stop(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
