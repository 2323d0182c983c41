"""Progress of long commands: a bar with the time left on a terminal, lines elsewhere, stdout clean."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from diptych.cluster.cli import progress

from tests.support.pty import OnTerminal

STEPS = """
import time
from diptych.cluster.cli.progress import step_progress
with step_progress("planning") as report:
    report("4 layouts of 2 fleets")
    for number in range(3):
        report(f"layout {number}")
        time.sleep(0.3)
    time.sleep(30)
"""


def test_on_a_terminal_a_bar_says_what_is_left(tmp_path: Path) -> None:
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    terminal = OnTerminal([sys.executable, "-c", STEPS], environment, tmp_path)
    try:
        assert "4 layouts of 2 fleets" in terminal.wait_for("layout 2")
        assert "planning" in terminal.wait_for("s left")
        terminal.type("\x03")
    finally:
        assert terminal.end() != 0


def test_elsewhere_each_line_is_a_line_and_stdout_has_none() -> None:
    code = STEPS.replace("time.sleep(30)", "pass")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    lines = ["4 layouts of 2 fleets", "layout 0", "layout 1", "layout 2"]
    assert (done.stdout, done.stderr.splitlines()) == ("", lines)


@pytest.mark.parametrize(
    ("total", "completed", "elapsed_s", "left"),
    [
        (None, 0, 5.0, ""),
        (10, 0, 5.0, ""),
        (10, 2, 5.0, "about 20 s left"),
        (100, 1, 5.0, "about 8 min 15 s left"),
        (10, 10, 5.0, "ending"),
    ],
)
def test_the_time_left_is_told_once_it_can_be_known(
    total: float | None, completed: float, elapsed_s: float, left: str
) -> None:
    assert progress.time_left(total, completed, elapsed_s) == left


@pytest.mark.slow
def test_plan_with_json_prints_json_alone_on_stdout(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).parent / "diptych"), "plan", "synthetic:40", "-o", "json"]
    command += ["--write", str(tmp_path / "cluster.yaml")]
    command += ["--fleet", "H200:2", "--tp", "1", "--seeds", "1", "--jobs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "layouts of 1 fleets" in done.stderr and json.loads(done.stdout)
