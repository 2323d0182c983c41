"""The README's commands do what it says: `make serve`, those of the second terminal, the bench."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from diptych.cluster.cli.common import DEFAULT_ENDPOINT

from tests.support.live import free_port, stop, wait_ready

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.cluster


def blocks() -> list[str]:
    return re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_first_block_is_the_main_job_and_the_tests() -> None:
    assert blocks()[0].split("\n")[:2] == ["make serve", "make test"]
    assert "make test" in (ROOT / ".ci/run").read_text()


def test_make_serve_and_the_commands_of_the_second_terminal(tmp_path: Path) -> None:
    http, admin, log = free_port(), free_port(), tmp_path / "serve.log"
    flags = f"--port {http} --grpc-port {free_port()}"  # the README's ports may be taken here
    flags += f" --set control.port={admin} --set control.grpc_port={free_port()}"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*blocks()[0].split("\n")[0].split(), f"ARGS={flags}"],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    endpoint = f"http://127.0.0.1:{http}"
    try:
        wait_ready(process, log)
        where = {"DIPTYCH_ENDPOINT": endpoint, "DIPTYCH_ADMIN": f"http://127.0.0.1:{admin}"}
        environment = {**os.environ, **where}
        chat, status, curl = (
            subprocess.run(
                command.replace(DEFAULT_ENDPOINT, endpoint),
                shell=True,
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            ).stdout
            for command in re.split(r"(?<!\\)\n", blocks()[1].strip())
        )
        told = (ROOT / "README.md").read_text().split("```\nPrefill is")[1].split("\n\n")[0]
        answer = "Prefill is" + told.replace("\n", " ")
        assert chat.startswith(answer) and "TTFT" in chat and "ITL" in chat
        assert status.startswith("HEALTHY")
        assert json.loads(curl)["choices"][0]["message"]["content"] == answer
        os.killpg(process.pid, signal.SIGINT)  # as a terminal's ^C does
    finally:
        stop(process)
    text = log.read_text()
    assert "curl http://127.0.0.1" in text and text.rstrip().splitlines()[-1]
    assert "stopped" in text and "Traceback" not in text
    assert subprocess.run(["pgrep", "-g", str(process.pid)], check=False).returncode == 1


@pytest.mark.slow
def test_the_bench_measures_both_phases() -> None:
    done = subprocess.run(
        blocks()[2], shell=True, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.startswith("model 7M")
    assert "\ndecode " in done.stdout and "\nprefill " in done.stdout
