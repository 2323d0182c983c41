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

HOST = "127.0.0.1"
START_S = 180.0  #: for a cluster to be ready
STOP_S = 60.0  #: for a cluster to end by itself; then its processes are killed


@dataclass(frozen=True, slots=True)
class LaptopCluster:
    """Where a cluster of this machine is reached."""

    url: str  #: of the OpenAI API
    grpc: str  #: host:port of the gRPC API
    admin: str  #: URL of the admin API


@contextmanager
def cluster(
    diptych: str, arguments: list[str], start_limit_s: float = START_S
) -> Iterator[LaptopCluster]:
    """Starts a cluster by the command `diptych`, and stops it afterwards.

    `arguments` are those of `diptych serve`; ports are chosen here. `start_limit_s` is in seconds.
    Raises LoadError with the log's last line if it does not start.
    """
    http_port, grpc_port, admin_port, admin_grpc_port = _free_ports(4)
    command = [diptych, "serve", *arguments]
    command += ["--port", str(http_port), "--grpc-port", str(grpc_port)]
    command += ["--set", f"control.port={admin_port}"]
    command += ["--set", f"control.grpc_port={admin_grpc_port}"]
    with tempfile.TemporaryDirectory(prefix="diptych-loadtest-") as folder:
        log = Path(folder) / "serve.log"
        with log.open("w") as out:
            # In a session of its own: an interrupt from the terminal does not reach it, and it can
            # be killed with all its processes.
            process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            _wait_until_ready(process, log, start_limit_s)
            yield LaptopCluster(
                url=f"http://{HOST}:{http_port}",
                grpc=f"{HOST}:{grpc_port}",
                admin=f"http://{HOST}:{admin_port}",
            )
        finally:
            _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path, start_limit_s: float) -> None:
    deadline = time.monotonic() + start_limit_s
    # `diptych serve` prints such a line when requests can be served.
    while "] ready" not in log.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            lines = log.read_text().strip().splitlines()
            reason = lines[-1] if lines else "no output"
            raise LoadError(f"diptych serve did not start: {reason}")
        time.sleep(0.2)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    # All are open at a time, so that the ports differ; they may be taken again before their use.
    probes = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
