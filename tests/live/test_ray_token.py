"""Ray's processes refuse whoever has no token: of a cluster here, and of a Ray that is joined."""

from __future__ import annotations

import os
import shlex
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from diptych.cluster.launch.ray_cluster import AUTH_MODE, HARMLESS_CALL, TOKEN_PATH

from tests.deploy.test_live import ray_node
from tests.support.live import BIN, Live, free_port, running, stop
from tests.support.ray_token import (
    RAYLET_CALL,
    WORKER_CALL,
    call,
    run_code,
    token_environment,
)
from tests.support.sockets import WILDCARDS, listening_sockets, processes_of

pytestmark = pytest.mark.cluster

RAY_PREFIXES = ("RAY_", "SERVE_")
REPLICAS = 5  #: Gateway, Router, Control, one prefill and one decode worker


def listening(live: Live) -> list[tuple[str, str, int]]:
    """Return process title, host and port of every TCP socket on which the cluster listens."""
    return [(one.title, one.host, one.port) for one in listening_sockets(live)]


def reachable(host: str, port: int) -> str:
    return f"127.0.0.1:{port}" if host in WILDCARDS else f"{host}:{port}"


def replicas(live: Live) -> set[str]:
    """Return the titles of the cluster's replicas."""
    titles = {title for title, _, _ in listening(live) if title.startswith("ray::ServeReplica")}
    assert len(titles) == REPLICAS
    return titles


def exported(live: Live) -> dict[str, str]:
    """Return the variables of the export line that `serve` prints."""
    lines = live.log.read_text().splitlines()
    line = next(line for line in lines if line.strip().startswith("export RAY_"))
    words = shlex.split(line)[1:]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def command(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command with `environment`, and with none of this process's own settings of Ray."""
    others = {k: v for k, v in os.environ.items() if not k.startswith(RAY_PREFIXES)}
    return subprocess.run(
        [str(BIN / words[0]), *words[1:]],
        env={**others, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_no_port_runs_a_strangers_code(live: Live, tmp_path: Path) -> None:
    made = tmp_path / "made"
    refused = set()
    for title, host, port in listening(live):
        status = run_code(reachable(host, port), made)
        assert not made.exists(), f"{title} on {host}:{port} ran what a stranger sent"
        assert status != grpc.StatusCode.OK
        if status == grpc.StatusCode.UNAUTHENTICATED:
            refused.add(title)
    assert refused == replicas(live)


def test_ray_itself_answers_no_stranger(live: Live) -> None:
    refused: dict[str, set[str]] = {}
    for title, host, port in listening(live):
        for method in (HARMLESS_CALL, RAYLET_CALL, WORKER_CALL):
            status = call(reachable(host, port), method)
            assert status != grpc.StatusCode.OK, f"{title} on {host}:{port} answers {method}"
            if status == grpc.StatusCode.UNAUTHENTICATED:
                refused.setdefault(method, set()).add(title)
    assert len(refused[HARMLESS_CALL]) == len(refused[RAYLET_CALL]) == 1
    assert refused[WORKER_CALL] > replicas(live), "replicas, and Serve's controller"


def test_rays_own_processes_listen_on_loopback(live: Live) -> None:
    ray_processes = [
        (title, host)
        for title, host, _ in listening(live)
        if not title.startswith("ray::ServeReplica")
    ]
    assert ray_processes and {host for _, host in ray_processes} == {"127.0.0.1"}


def test_the_token_and_the_sessions_are_this_users_alone(live: Live) -> None:
    token_file = Path(exported(live)[TOKEN_PATH])
    assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(token_file.parent.stat().st_mode) == 0o700
    assert len(token_file.read_text()) == 64
    session = next(token_file.parent.glob("ray/session_latest"))
    logs = [path for path in session.rglob("*") if path.is_file()]
    token = token_file.read_bytes()
    assert logs and not [path for path in [live.log, *logs] if token in path.read_bytes()]


def test_rays_commands_work_after_the_printed_line(live: Live) -> None:
    variables = {"RAY_AUTH_TOKEN": "of another cluster", **exported(live)}
    status = command(variables, "ray", "status")
    assert "Active:" in status.stdout or "No cluster status" in status.stdout, status.stderr
    served = command(variables, "serve", "status")
    for deployment in ("Gateway", "Router", "Control", "PrefillWorker", "DecodeWorker"):
        assert deployment in served.stdout, served.stderr
    stranger = {**variables, AUTH_MODE: "disabled"}
    assert command(stranger, "ray", "status").returncode != 0
    assert command(stranger, "serve", "status").returncode != 0


@contextmanager
def head(environment: dict[str, str]) -> Iterator[str]:
    """Start the head of a Ray cluster, and yield the address at which it is joined."""
    gcs = free_port()
    with tempfile.TemporaryDirectory(prefix="dip", dir="/tmp") as folder:
        flags = ["--head", "--port", str(gcs), "--include-dashboard", "false", "--num-cpus", "2"]
        flags += ["--temp-dir", f"{folder}/ray"]
        with ray_node(environment, Path(folder) / "head.log", *flags):
            yield f"127.0.0.1:{gcs}"


def refusal(address: str, home: Path, *flags: str, **environment: str) -> str:
    """Return the one sentence with which `serve --ray-address` fails."""
    variables = {"HOME": str(home), **environment}
    done = command(variables, "diptych", "serve", "--ray-address", address, *flags)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 1 and len(lines) == 1, done.stderr
    return lines[0]


@pytest.mark.long
def test_a_ray_of_others_is_joined_with_its_token_alone(tmp_path: Path) -> None:
    environment = token_environment(tmp_path)
    with head(environment) as address:
        home = tmp_path / "home"
        home.mkdir()
        (tmp_path / "wrong").write_text("0" * 64)
        assert "no token, or a wrong one" in refusal(address, home)
        wrong = {TOKEN_PATH: str(tmp_path / "wrong")}
        assert f"wrong one, for Ray at {address}" in refusal(address, home, **wrong)
        missing = {TOKEN_PATH: str(tmp_path / "missing")}
        assert missing[TOKEN_PATH] in refusal(address, home, **missing)
        assert "asks for a token" in refusal(address, home, "--set", "ray.auth=disabled")
        assert not (home / ".ray").exists(), "a token was made in the shared place"

        # Each application is built by a process of its own there, and nobody gave them a secret.
        flags = ["--ray-address", address, "--set", "kv_transfer.transport=tcp"]
        with running(tmp_path / "serve.log", *flags, environment=environment) as live:
            reply = live.chat("What is prefill?", max_tokens=8)
            assert reply.json()["usage"]["completion_tokens"] == 8, reply.text


@pytest.mark.slow
def test_a_ray_that_asks_nobody_or_is_gone_is_not_joined(tmp_path: Path) -> None:
    with head({**os.environ, AUTH_MODE: "disabled"}) as address:
        assert "asks nobody for a token" in refusal(address, tmp_path)
        assert "asks nobody" in refusal(address, tmp_path, http_proxy="http://127.0.0.1:9")
    assert f"no Ray at {address}" in refusal(address, tmp_path)
    assert "would start another Ray" in refusal("local", tmp_path)
    with grpc_server() as somebody:
        assert "UNIMPLEMENTED" in refusal(somebody, tmp_path)


@contextmanager
def grpc_server() -> Iterator[str]:
    """Start a gRPC server that knows no method, and yield its address."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("0.0.0.0:0")  # Ray asks at this machine's own address
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.mark.long
def test_without_the_token_the_same_call_runs_code_in_every_replica(tmp_path: Path) -> None:
    """This shows that the first test can fail."""
    with running(tmp_path / "serve.log", "--set", "ray.auth=disabled") as live:
        ran = set()
        for title, host, port in listening(live):
            made = tmp_path / f"made-{port}"
            run_code(reachable(host, port), made)
            if made.exists():
                ran.add(title)
        assert ran == replicas(live)
        assert "WARNING  Ray asks nobody for a token" in live.log.read_text()
        # A service manager stops it so, and Ray's own handler would abort it on the way.
        processes = processes_of(live)
        assert stop(live.process, signal.SIGTERM) == 0, live.log.read_text()
        assert not psutil.wait_procs(processes, timeout=10)[1]
