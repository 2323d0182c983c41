"""Servers of one cell: started, waited for, and ended by their process groups."""

from __future__ import annotations

import ctypes.util
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ....loadtests.errors import LoadError
from ....loadtests.laptop import cluster
from ....loadtests.ports import free_ports
from .errors import LiveBenchError
from .layouts import (
    DiptychLayout,
    DiptychServing,
    ServerCommand,
    VllmLayout,
    VllmServing,
    diptych_arguments,
    server_count,
    vllm_commands,
)

HOST = "127.0.0.1"
PROXY_SCRIPT = Path(__file__).with_name("proxy.py")
START_LIMIT_S = 900.0  #: for a server until it answers, and for the script that asks for versions
#: For a process that was asked to end; what is left of its group is killed then.
STOP_LIMIT_S = 30.0
POLL_INTERVAL_S = 0.25  #: between two questions whether a server answers
REQUEST_TIMEOUT_S = 10.0  #: of the requests for health and statistics
LOG_CHARACTERS_LIMIT = 800  #: of a log's end in the message of an error


@dataclass(slots=True)
class RunningServer:
    """Where a cell's server is, and what it says of itself."""

    url: str
    #: Returns what the server has counted up to the call; empty for vLLM.
    statistics: Callable[[], dict[str, Any]] = field(default=dict)


@contextmanager
def diptych_server(
    command: str, layout: DiptychLayout, serving: DiptychServing, log: Path
) -> Iterator[RunningServer]:
    """Serve by `diptych serve` inside of the context; the router's log goes to the folder `log`.

    `command` is the program `diptych`. Raises LiveBenchError if the server does not start.
    """
    try:
        arguments = diptych_arguments(layout, serving, log)
        with cluster(command, arguments, START_LIMIT_S) as running:
            yield RunningServer(running.url, lambda: _cluster_statistics(running.admin))
    except LoadError as error:
        raise LiveBenchError(f"{layout.name}: {error}") from None


def _cluster_statistics(admin_url: str) -> dict[str, Any]:
    """Return what the cluster counted; empty without an answer.

    These are the requests, the goodput, how many requests were to be in time when they came and
    were (`urgent`), and as `recent` percentiles of the last requests' latencies
    (`recent_percentiles` of cluster/router_service.py).
    """
    try:
        # No proxy of the environment knows a server of this machine.
        answer = httpx.get(
            f"{admin_url}/admin/v1/cluster", timeout=REQUEST_TIMEOUT_S, trust_env=False
        )
        status = answer.raise_for_status().json()
    except (httpx.HTTPError, ValueError):
        return {}
    router = status.get("router") or {}
    return {
        "requests": status.get("requests"),
        "goodput": router.get("goodput"),
        "urgent": router.get("urgent"),
        "recent": router.get("recent"),
    }


@contextmanager
def vllm_servers(layout: VllmLayout, serving: VllmServing, logs: Path) -> Iterator[RunningServer]:
    """Serve by vLLM inside of the context; processes write to files in `logs`.

    All servers start at the same time, their proxy when they are up. Raises LiveBenchError if one
    does not start.
    """
    ports = free_ports(server_count(layout) + 1)
    commands = vllm_commands(layout, serving, ports, PROXY_SCRIPT)
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        processes = [stack.enter_context(_process(command, logs)) for command in commands.servers]
        for command, process in zip(commands.servers, processes, strict=True):
            wait_until_healthy(command, process, logs)
        if commands.proxy:
            process = stack.enter_context(_process(commands.proxy, logs))
            wait_until_healthy(commands.proxy, process, logs)
        yield RunningServer(f"http://{HOST}:{commands.port}")


@contextmanager
def _process(command: ServerCommand, logs: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in a session of its own, and end it with all that it started.

    Raises LiveBenchError if the program is not there or not executable.
    """
    with _log_file(command, logs).open("w") as log:
        try:
            process = subprocess.Popen(
                command.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | command.environment,
                start_new_session=True,  # ^C reaches this process alone, which ends the servers
            )
        except OSError as error:
            raise LiveBenchError(f"{command.name}: {error}") from None
    try:
        yield process
    finally:
        stop_group(process)


def stop_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads its session, and all that it has started.

    The group gets SIGTERM and has `STOP_LIMIT_S` seconds; what is left of it gets SIGKILL.
    """
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until_healthy(
    command: ServerCommand, process: subprocess.Popen[bytes], logs: Path
) -> None:
    """Return when `/health` answers.

    Raises LiveBenchError if the process ends, or takes longer than `START_LIMIT_S`.
    """
    deadline = time.monotonic() + START_LIMIT_S
    while not _is_healthy(command.port):
        if process.poll() is not None:
            raise LiveBenchError(
                f"{command.name} ended with code {process.returncode}: {_log_end(command, logs)}"
            )
        if time.monotonic() > deadline:
            raise LiveBenchError(
                f"{command.name} did not start in {START_LIMIT_S:.0f} s: {_log_end(command, logs)}"
            )
        time.sleep(POLL_INTERVAL_S)


def _is_healthy(port: int) -> bool:
    try:
        answer = httpx.get(
            f"http://{HOST}:{port}/health", timeout=REQUEST_TIMEOUT_S, trust_env=False
        )
    except httpx.HTTPError:
        return False
    return answer.is_success


def _log_file(command: ServerCommand, logs: Path) -> Path:
    return logs / f"{command.name.replace(' ', '-')}.log"


def _log_end(command: ServerCommand, logs: Path) -> str:
    return _log_file(command, logs).read_text(errors="replace").strip()[-LOG_CHARACTERS_LIMIT:]


# ---- vLLM's environment --------------------------------------------------------------------------


def preloaded_libraries(python: Path) -> tuple[str, ...]:
    """Return tcmalloc and Intel's OpenMP as far as they are there; vLLM recommends both on x86."""
    prefix = python.parent.parent
    bundled = sorted(prefix.glob("lib/python*/site-packages/vllm/libs/libtcmalloc*.so*"))
    tcmalloc = str(bundled[0]) if bundled else ctypes.util.find_library("tcmalloc_minimal")
    openmp = prefix / "lib" / "libiomp5.so"
    libraries = [tcmalloc, str(openmp) if openmp.exists() else None]
    return tuple(library for library in libraries if library)


def vllm_versions(python: Path) -> dict[str, str]:
    """Return the versions of vLLM and of its torch. Raises LiveBenchError if there is no vLLM."""
    script = (
        "from importlib.metadata import version as v, packages_distributions as p\n"
        "print(v(p()['vllm'][0]), v('torch'))"
    )
    done = subprocess.run(
        [python, "-c", script], capture_output=True, text=True, timeout=START_LIMIT_S, check=False
    )
    if done.returncode:
        raise LiveBenchError(
            f"--vllm-python {python} has no vLLM; how to install it: engine/bench/README.md"
        )
    vllm, torch = done.stdout.split()
    return {"vllm": vllm, "torch of vllm": torch}
