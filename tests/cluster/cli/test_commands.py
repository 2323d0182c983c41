"""Smaller commands: completion of the shell, `undrain`, and `replay` of a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from diptych.cluster.cli import app, explain
from diptych.cluster.event_log import EventLog
from diptych.router import Router, RouterConfig
from diptych.router.events import GatewayJoined
from diptych.router.replay import LogHead
from typer.testing import CliRunner

from tests.cluster.test_orders_cli import run

DIPTYCH = Path(sys.executable).parent / "diptych"


@pytest.mark.parametrize(
    ("shell", "line", "offered"),
    [
        ("bash", "diptych dr", "drain"),
        ("zsh", "diptych config re", "reference"),
        ("fish", "diptych chat --sys", "--system"),
    ],
)
def test_the_shell_completes_commands_and_options(shell: str, line: str, offered: str) -> None:
    asked = {
        "_DIPTYCH_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = subprocess.run(
        [DIPTYCH], env={**os.environ, **asked}, capture_output=True, text=True, timeout=60
    )
    assert offered in done.stdout, done.stderr


def test_undrain_is_what_takes_a_drain_back(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "/admin/v1/replicas/decode/a"
    answers = {f"{path}:{verb}": {"replicas": ["decode/a"]} for verb in ("drain", "undrain")}
    _, said, _ = run(monkeypatch, answers, "drain", "decode/a")
    assert said.splitlines()[-1] == "undo: diptych undrain decode/a"
    code, said, control = run(monkeypatch, answers, "undrain", "decode/a", "--dry-run")
    assert (code, said) == (0, "undrain decode/a (dry run)\n")
    assert control.posted == [(f"{path}:undrain", {"dry_run": True})]


def test_replay_takes_the_older_file_of_a_folder_first(tmp_path: Path) -> None:
    router = Router(RouterConfig(), term=1)
    log = EventLog(tmp_path, 600)  # so small that a few events more than its beginning fill a file
    for number in range(40):
        log.write(router, GatewayJoined(f"gateway/{number}"), 10.0 + number)
        log.flush()
    assert {file.name for file in tmp_path.iterdir()} == {"router.jsonl", "router.old.jsonl"}
    moments = [at for at, event in explain._logged_events(tmp_path) if isinstance(event, LogHead)]
    assert moments == sorted(moments) and len(moments) == 2
    done = CliRunner().invoke(app, ["replay", str(tmp_path), "-o", "json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["requests"] == 0


def test_replay_says_which_file_of_a_folder_is_wrong(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["replay", str(tmp_path)])
    assert done.exit_code == 1 and "there is no router.jsonl in this folder" in done.stderr
    (tmp_path / "router.jsonl").write_text("{}\n")
    done = CliRunner().invoke(app, ["replay", str(tmp_path)])
    assert done.exit_code == 1 and "router.jsonl, line 1" in done.stderr


def test_explain_says_a_target_in_words() -> None:
    described = {"prompt_tokens": 2000, "ttft_target_s": 6.0, "ttft_target": "max(1s, 3x)"}
    assert explain._ttft_target({**described, "isolated_s": 2.0}) == (
        "max(1s, 3x) = 6000.0 ms, by 3x (the whole prompt alone takes 2000.0 ms)"
    )
    assert explain._ttft_target(described) == "max(1s, 3x) = 6000.0 ms"  # of a further attempt
    by_length = {"prompt_tokens": 2000, "ttft_target_s": 1.1, "ttft_target": "500ms + 300ms/1k"}
    assert explain._ttft_target({**by_length, "isolated_s": 0.0}) == "500ms + 300ms/1k = 1100.0 ms"
    assert explain._ttft_target({"ttft_target_s": 0.5, "ttft_target": ""}) == "500.0 ms"
    assert explain._ttft_target({"ttft_target_s": 0.5}) == "500.0 ms"  # of an older router
