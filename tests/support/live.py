"""A real cluster for tests: `diptych serve` as a subprocess on free ports of 127.0.0.1."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from diptych.loadtests.ports import PORTS

BIN = Path(sys.executable).parent
#: The python with vLLM, if the clusters of these tests are to compute with it (`make test-vllm`).
VLLM_PYTHON = os.environ.get("DIPTYCH_TEST_VLLM_PYTHON")
START_S, STOP_S = 400.0 if VLLM_PYTHON else 150.0, 60.0


TEST_PROCESSES_MAX = 8  #: Processes of pytest that run beside each other.


def free_port() -> int:
    """Returns a port that stays free until its server starts, which may be a minute later.

    Each process of pytest has ports of its own. Gateways share a port with whoever else binds it in
    their way, so two tests with the same one would get each other's connections.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    own_ports = PORTS[worker % TEST_PROCESSES_MAX :: TEST_PROCESSES_MAX]
    while True:
        port = random.SystemRandom().choice(own_ports)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def eventually(check: Callable[[], Any], seconds: float = 30.0, every: float = 0.05) -> Any:
    """The first true value of `check`; AssertionError with the last one when time is up."""
    deadline = time.monotonic() + seconds
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < deadline, f"still {value!r} after {seconds} s"
        time.sleep(every)


@dataclass
class Live:
    """Where a running cluster is, and the usual questions to it."""

    http: int
    grpc: int
    admin: int
    process: subprocess.Popen
    log: Path
    admin_grpc: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http}"

    @property
    def control(self) -> str:
        return f"http://127.0.0.1:{self.admin}"

    def status(self) -> dict[str, Any]:
        return httpx.get(f"{self.control}/admin/v1/cluster", timeout=10).json()

    def until_healthy(self, seconds: float = 60.0) -> None:
        """Wait until the status is healthy; AssertionError with its reasons when time is up.

        For a moment after a change the status may be degraded: Serve's controller, which has just
        been busy, answers late.
        """
        deadline = time.monotonic() + seconds
        while (status := self.status())["state"] != "healthy":
            assert time.monotonic() < deadline, f"still degraded: {status['reasons']}"
            time.sleep(0.1)

    def worker(self, home: str) -> dict[str, Any]:
        """Statistics of the (only) worker of a pool."""
        return next(w for w in self.status()["workers"] if w["home"] == home)

    def chat(
        self, text: str, headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], **fields}
        url = f"{self.url}/v1/chat/completions"
        return httpx.post(url, json=body, headers=headers, timeout=120)

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(BIN / "diptych"), *arguments]
        where = {"DIPTYCH_ENDPOINT": self.url, "DIPTYCH_ADMIN": self.control}
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, **where},
        )

    def idle(self) -> bool:
        """No job and no block in use anywhere (cached blocks can be taken at any time)."""
        workers = self.status()["workers"]
        blocks = [w["engine"]["kv_blocks"] for w in workers]
        whole = all(b["free"] + b["cached"] == b["total"] for b in blocks)
        return whole and not any(w["jobs"] for w in workers)


@contextmanager
def running(
    log: Path,
    *arguments: str,
    environment: dict[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Iterator[Live]:
    """Starts a cluster, waits until it is ready, stops it as ^C does.

    `environment`: of `diptych serve`; None: this process's. `prefix`: a command that becomes the
    command behind it, as `unshare` does.
    """
    http, grpc, admin, admin_grpc = (free_port() for _ in range(4))
    command = [*prefix, str(BIN / "diptych"), "serve", *arguments]
    command += ["--port", str(http), "--grpc-port", str(grpc)]
    if VLLM_PYTHON:
        command += ["--engine", "vllm", "--set", f"engine.python={VLLM_PYTHON}"]
    command += ["--set", f"control.port={admin}", "--set", f"control.grpc_port={admin_grpc}"]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
    live = Live(http, grpc, admin, process, log, admin_grpc)
    try:
        wait_ready(process, log)
        yield live
    finally:
        stop(process)


def wait_ready(process: subprocess.Popen, log: Path) -> float:
    """Waits for the welcome; returns the seconds that `serve` says it took."""

    def ready() -> str | None:
        assert process.poll() is None, f"serve ended: {log.read_text()}"
        found = re.search(r"\[ *([\d.]+) s\] ready", log.read_text())
        return found and found.group(1)

    return float(eventually(ready, START_S))


def stop(process: subprocess.Popen, signal_number: int = signal.SIGINT) -> int:
    """^C, and the exit code. A cluster that does not stop is killed, and the test fails."""
    if process.poll() is None:
        os.kill(process.pid, signal_number)
    try:
        return process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
