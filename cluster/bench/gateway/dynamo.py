"""NVIDIA Dynamo's front end with mocked workers, as a server to measure beside the gateway.

Dynamo comes in an environment of its own (`pip install ai-dynamo`). Nothing else is needed: its
processes find each other by a folder, and talk over TCP on loopback.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ....loadtests.ports import free_ports
from .cluster import HOST, OPENER, BenchError
from .whole_requests import MeasuredServer

READY_LIMIT_S = 120.0  #: From the start until the front end names the model.
STOP_LIMIT_S = 10.0  #: After SIGTERM; then the processes are killed.
LOG_CHARACTERS_LIMIT = 500
MODEL_NAME = "bench"
BLOCK_TOKENS = 16  #: Of Dynamo's KV blocks.
MOCK_WORKERS = 2
#: How many times faster than in life mocked workers compute. 0, which means "at once", does not work
#: in Dynamo 1.6.1.
SPEEDUP = 1_000_000
DISCOVERY = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")


@dataclass(frozen=True, slots=True)
class DynamoProcesses:
    """The running processes of Dynamo: the front end is measured, mocked workers are not."""

    frontend: subprocess.Popen[bytes]
    workers: subprocess.Popen[bytes]
    port: int

    def server(self) -> MeasuredServer:
        """Return the front end as a server to measure."""
        pids = {"frontend": [self.frontend.pid]}
        return MeasuredServer("dynamo", self.port, MODEL_NAME, lambda: pids)


@contextlib.contextmanager
def run_dynamo(python: Path, model: Path) -> Iterator[DynamoProcesses]:
    """Run a front end with a router by KV, and two mocked workers; end them afterwards.

    `python` has Dynamo, and `model` is a checkpoint's folder. Raises BenchError if the front end
    does not come up.
    """
    with (
        tempfile.TemporaryDirectory(prefix="diptych-dynamo-") as name,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(name)
        (port,) = free_ports(1)
        worker_options = [
            *("--model-path", str(model), "--model-name", MODEL_NAME),
            *("--speedup-ratio", str(SPEEDUP), "--block-size", str(BLOCK_TOKENS)),
            *("--num-gpu-blocks-override", "65536", "--max-num-seqs", "1024"),
            *("--num-workers", str(MOCK_WORKERS)),
        ]
        frontend_options = [
            *("--http-host", HOST, "--http-port", str(port)),
            *("--router-mode", "kv", "--kv-cache-block-size", str(BLOCK_TOKENS)),
            *("--tokenizer", "fastokens"),  # the fastest that it has
        ]
        workers = _start(stack, python, "dynamo.mocker", worker_options, folder=folder)
        frontend = _start(stack, python, "dynamo.frontend", frontend_options, folder=folder)
        processes = DynamoProcesses(frontend, workers, port)
        _wait_until_ready(processes, folder)
        yield processes


def _start(
    stack: contextlib.ExitStack, python: Path, module: str, options: list[str], folder: Path
) -> subprocess.Popen[bytes]:
    """Start one process of Dynamo, which `stack` ends; its output is in `folder`."""
    environment = os.environ | {
        "DYN_FILE_KV": str(folder / "discovery"),
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_TCP_RPC_HOST": HOST,
        "DYN_LOG": "warn",
        "DYN_TELEMETRY_DISABLED": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    log = stack.enter_context((folder / f"{module}.log").open("wb"))
    command = [str(python), "-m", module, *DISCOVERY, *options]
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_until_ready(processes: DynamoProcesses, folder: Path) -> None:
    """Wait until the front end names the model. Raises BenchError after `READY_LIMIT_S`."""
    deadline = time.monotonic() + READY_LIMIT_S
    while time.monotonic() < deadline:
        for process in (processes.frontend, processes.workers):
            if process.poll() is not None:
                raise BenchError(f"Dynamo ended: {_log_end(folder)}")
        with contextlib.suppress(OSError, ValueError):
            url = f"http://{HOST}:{processes.port}/v1/models"
            with OPENER.open(url, timeout=5) as answer:
                if any(card["id"] == MODEL_NAME for card in json.load(answer)["data"]):
                    return
        time.sleep(0.2)
    raise BenchError(f"Dynamo was not ready after {READY_LIMIT_S:.0f} s: {_log_end(folder)}")


def _log_end(folder: Path) -> str:
    """Return the ends of both logs."""
    ends = [path.read_text(errors="replace").strip() for path in sorted(folder.glob("*.log"))]
    return " | ".join(end[-LOG_CHARACTERS_LIMIT:] for end in ends)
