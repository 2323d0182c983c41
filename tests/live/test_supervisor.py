"""`diptych serve` when processes end that are not its replicas: Ray's own, and `serve` itself."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.live import BIN, Live, eventually, free_port, running

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

AGAIN_S = 60.0  #: generous: on a quiet machine of two cores it takes 13 s
GONE_S = 10.0


def processes_of(live: Live) -> list[psutil.Process]:
    root = psutil.Process(live.process.pid)
    return [root, *root.children(recursive=True)]


def command_of(process: psutil.Process) -> str:
    """The words a process was started with; a process that has ended has none."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # also what psutil raises for a zombie
        return ""


def process_named(live: Live, name: str) -> psutil.Process:
    found = [one for one in processes_of(live) if name in command_of(one)]
    assert len(found) == 1, found
    return found[0]


def left_behind(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def ray_folder(log: Path) -> Path:
    return Path(re.findall(r"RAY_AUTH_TOKEN_PATH=(\S+)/ray_token", log.read_text())[-1])


def folders_of(process: psutil.Process) -> list[Path]:
    """The folders of Ray that a process was started with."""
    return [Path(name) for name in re.findall(r"/tmp/dip\w+", command_of(process))]


def test_a_cluster_comes_back_without_ray_and_ends_with_serve(tmp_path: Path) -> None:
    with running(tmp_path / "serve.log") as live:
        first_folder = ray_folder(live.log)
        first_processes = processes_of(live)[1:]
        # Nobody reads what Ray's log monitor sends, and it keeps all logs open.
        assert not [one for one in first_processes if "log_monitor" in command_of(one)]
        process_named(live, "gcs/gcs_server").kill()
        eventually(lambda: live.log.read_text().count("] ready") == 2, AGAIN_S)
        assert "Ray's gcs_server has ended" in live.log.read_text()
        assert not left_behind(first_processes) and not first_folder.exists()
        assert httpx.get(f"{live.url}/ready", timeout=10).status_code == 200
        assert live.chat("What is prefill?", max_tokens=4).status_code == 200

        # After SIGTERM this process closes its port, and neither answers nor ends.
        process_named(live, "gcs/gcs_server").terminate()
        eventually(lambda: live.log.read_text().count("] ready") == 3, AGAIN_S)
        assert "Ray's gcs_server listens no more" in live.log.read_text()

        # Without its fork server, Ray starts processes by itself.
        process_named(live, "launch.fork_server").kill()
        os.kill(live.worker("decode")["pid"], signal.SIGKILL)
        assert live.chat("What is prefill?", max_tokens=4).status_code == 200
        assert psutil.Process(live.worker("decode")["pid"]).parent().name() == "raylet"

        last_processes = processes_of(live)
        live.process.kill()
        eventually(lambda: not left_behind(last_processes), GONE_S)
        eventually(lambda: not ray_folder(live.log).exists(), GONE_S)


@pytest.mark.parametrize(
    ("line", "number"),
    [
        pytest.param("starting Ray", signal.SIGTERM, marks=pytest.mark.daily),
        ("starting Serve", signal.SIGINT),
        pytest.param("starting workers", signal.SIGTERM, marks=pytest.mark.daily),
    ],
)
def test_a_start_can_be_stopped_anywhere(tmp_path: Path, line: str, number: signal.Signals) -> None:
    ports = [f"{name}={free_port()}" for name in ("control.port", "control.grpc_port")]
    command = [str(BIN / "diptych"), "serve", "--port", str(free_port())]
    command += ["--grpc-port", str(free_port()), "--set", ports[0], "--set", ports[1]]
    log = tmp_path / "serve.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        eventually(lambda: line in log.read_text(), 60.0)
        below = psutil.Process(process.pid).children(recursive=True)
        folders = {folder for one in below for folder in folders_of(one)}
        process.send_signal(number)
        assert process.wait(GONE_S) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert not left_behind(below)
    assert "Traceback" not in log.read_text() and log.read_text().endswith("stopped\n")
    assert not any(folder.exists() for folder in folders)
