"""A cluster of this machine for one run: `diptych serve` on free ports, stopped afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import LoadError
from .ports import HOST, free_ports

START_S = 180.0  #: for a cluster to be ready
STOP_S = 60.0  #: for a cluster to end by itself; then its processes are killed
ERROR_PREFIX = "diptych: "  #: of the lines in which the command says what went wrong


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
    Raises LoadError with the reason that the command gives if it does not start.
    """
    http_port, grpc_port, admin_port, admin_grpc_port = free_ports(4)
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
            raise LoadError(f"diptych serve did not start: {start_failure(log.read_text())}")
        time.sleep(0.2)


def start_failure(log: str) -> str:
    """Return why a start failed, or how far it came: the last line of `log` that says so.

    The command's own errors begin with its name. Lines of Ray's may follow, as it ends with the start.
    """
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(ERROR_PREFIX)]
    reasons = errors or lines or ["no output"]
    return reasons[-1].removeprefix(ERROR_PREFIX)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
