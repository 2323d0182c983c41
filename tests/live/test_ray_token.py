"""Ray's own processes refuse whoever has no token: here, and where Diptych joins a Ray."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from diptych.cluster.ray_cluster import AUTH_MODE, TOKEN_PATH

from tests.deploy.test_live import ray_node
from tests.support.live import BIN, Live, free_port, running
from tests.support.ray_token import call, run_code, token_environment

pytestmark = pytest.mark.cluster

WILDCARDS = ("0.0.0.0", "::")
RAY_VARIABLES = ("RAY_", "SERVE_")


def listening(live: Live) -> list[tuple[str, str, int]]:
    """Return process title, host and port of every TCP socket on which the cluster listens."""
    sockets = []
    for process in psutil.Process(live.process.pid).children(recursive=True):
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                title = " ".join(process.cmdline())[:60]
                host = connection.laddr.ip.removeprefix("::ffff:")
                sockets.append((title, host, connection.laddr.port))
    return sockets


def exported(live: Live) -> dict[str, str]:
    """Return the variables of the export line that `serve` prints."""
    lines = live.log.read_text().splitlines()
    line = next(line for line in lines if line.strip().startswith("export RAY_"))
    words = shlex.split(line)[1:]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def command(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run one of Ray's commands, with none of this process's own settings of Ray."""
    others = {k: v for k, v in os.environ.items() if not k.startswith(RAY_VARIABLES)}
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
    statuses = {}
    for title, host, port in listening(live):
        address = f"127.0.0.1:{port}" if host in WILDCARDS else f"{host}:{port}"
        statuses[title, port] = run_code(address, made)
        assert not made.exists(), f"{title} on {address} ran what a stranger sent"
    replicas = [title for title, _ in statuses if title.startswith("ray::ServeReplica")]
    assert len(set(replicas)) == 5
    refused = [key for key, code in statuses.items() if code == grpc.StatusCode.UNAUTHENTICATED]
    assert {title for title, _ in refused} >= set(replicas)
    assert grpc.StatusCode.OK not in statuses.values()


def test_ray_itself_refuses_a_stranger_and_listens_on_loopback(live: Live) -> None:
    assert call(exported(live)["RAY_ADDRESS"]) == grpc.StatusCode.UNAUTHENTICATED
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


def test_rays_commands_work_after_the_printed_line_only(live: Live) -> None:
    variables = exported(live)
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


def test_a_joined_ray_wants_the_token_that_it_was_started_with(tmp_path: Path) -> None:
    with head(token_environment(tmp_path)) as address:
        home = tmp_path / "home"
        home.mkdir()
        (tmp_path / "wrong").write_text("0" * 64)
        assert "no token, or a wrong one" in refusal(address, home)
        wrong = {TOKEN_PATH: str(tmp_path / "wrong")}
        assert f"wrong one, for Ray at {address}" in refusal(address, home, **wrong)
        missing = {TOKEN_PATH: str(tmp_path / "missing")}
        assert missing[TOKEN_PATH] in refusal(address, home, **missing)
        assert "asks for a token" in refusal(address, home, "--set", "ray.auth=disabled")
        assert not (home / ".ray").exists(), "no token is made in the shared place"


def test_a_ray_that_asks_nobody_is_not_joined(tmp_path: Path) -> None:
    with head({**os.environ, AUTH_MODE: "disabled"}) as address:
        assert "asks nobody for a token" in refusal(address, tmp_path)
    assert f"no Ray at {address}" in refusal(address, tmp_path)


@pytest.mark.long
def test_without_the_token_the_same_call_runs_code_in_every_replica(tmp_path: Path) -> None:
    """What the first test looks for is possible: it can fail."""
    with running(tmp_path / "serve.log", "--set", "ray.auth=disabled") as live:
        ran = set()
        for title, host, port in listening(live):
            made = tmp_path / f"made-{port}"
            run_code(f"127.0.0.1:{port}" if host in WILDCARDS else f"{host}:{port}", made)
            if made.exists():
                ran.add(title)
        assert len(ran) == 5
        assert "WARNING  Ray asks nobody for a token" in live.log.read_text()
