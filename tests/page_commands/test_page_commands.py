"""Every command of the pages has a place where it runs, or a reason why it runs nowhere."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.live import eventually

from . import run
from .find import ROOT, all_commands, commands_of, page_paths
from .run import LAST_RUN, TABLE, TYPED_GROUPS, Line, Runner, expectation, lines, type_command

GROUPS: dict[str, dict[str, Any]] = yaml.safe_load(TABLE.read_text())
A_DAY_AND_A_PAGE = re.compile(r"(\d{4}-\d\d-\d\d), (\S+\.md)(?:; .+)?")
FENCE = re.compile(r"^ *(```|~~~)(.*)$", re.MULTILINE)


def test_the_table_has_each_command_of_the_pages_once_and_no_other() -> None:
    listed = [command for group in GROUPS.values() for command in group]
    pages = all_commands()
    assert {command: pages[command] for command in pages if command not in listed} == {}
    assert [command for command in listed if command not in pages] == []
    assert sorted(listed) == sorted(set(listed))


def test_what_runs_on_demand_has_passed_as_it_stands_in_the_table() -> None:
    record = json.loads(LAST_RUN.read_text())
    typed = {line.command: expectation(line) for group in TYPED_GROUPS for line in lines(group)}
    passed = {command: last["expected"] for command, last in record.items() if last["passed"]}
    assert {command for command in typed if passed.get(command) != typed[command]} == set()
    assert [command for command in record if command not in typed] == []


def test_what_a_command_needs_is_in_the_table() -> None:
    typed = {line.command: line for group in TYPED_GROUPS for line in lines(group)}
    assert [need for line in typed.values() for need in line.needs if need not in typed] == []


def test_blocks_of_pages_are_fenced_in_the_one_way_that_is_understood() -> None:
    fences = [fence for path in page_paths() for fence in FENCE.findall((ROOT / path).read_text())]
    assert {marks for marks, _ in fences} == {"```"}
    assert {language for _, language in fences} <= {
        "",
        "sh",
        "python",
        "yaml",
        "json",
        "text",
        "diff",
    }


@pytest.mark.parametrize("command", GROUPS["suite"])
def test_a_suite_has_the_day_of_its_last_run_and_a_page_that_tells_of_it(command: str) -> None:
    entry = A_DAY_AND_A_PAGE.fullmatch(GROUPS["suite"][command])
    assert entry
    day, page = entry.groups()
    assert datetime.date.fromisoformat(day)
    written = datetime.date.fromisoformat(day).strftime("%-d %B %Y"), day
    assert any(form in " ".join((ROOT / page).read_text().split()) for form in written)


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        ("```sh\nmake serve  # starts it\n```\n", ["make serve"]),
        (
            "```\ndiptych plan TRACE \\\n  --fleet H200:8\n```",
            ["diptych plan TRACE --fleet H200:8"],
        ),
        ("   ```sh\n   .venv/bin/diptych top\n   ```\n", [".venv/bin/diptych top"]),
        ("```yaml\nmake: serve\n```\nThen `make docs`.\n", ["make docs"]),
        ("`diptych scale decode=2\n--wait` waits", ["diptych scale decode=2 --wait"]),
        ("`diptych status` and `diptych bench live`", []),
        ("`diptych status -w` is one, `export A=1` too", ["diptych status -w", "export A=1"]),
        ("`diptych status [-w]`, `diptych config show\\|diff`, `diptych serve ... --set`", []),
        ("Then\n\n    make chaos ARGS=1 \\\n        ARGS=2\n\n", ["make chaos ARGS=1 ARGS=2"]),
        ("```\nPrefill is the first phase.\n```\n", []),
        ("```json\n{}\n```\n\ntext\n\n```sh\nmake sim\n```", ["make sim"]),
    ],
)
def test_commands_are_found_where_a_reader_sees_them(text: str, commands: list[str]) -> None:
    assert commands_of(text) == commands


def test_a_command_that_runs_nowhere_has_a_reason() -> None:
    assert all(isinstance(reason, str) and reason.strip() for reason in GROUPS["not_run"].values())


# ---- typing them ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("BUILD", "TREE"):
        monkeypatch.setattr(run, name, tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "more", "passes"),
    [
        ("echo there", {"says": "there"}, True),
        ("echo there", {"says": "elsewhere"}, False),
        ("exit 3", {}, False),
        ("exit 3", {"status": 3}, True),
        ("no-such-program", {}, False),
        ("sleep 60", {"limit_s": 0.2}, False),
    ],
)
def test_a_command_passes_by_its_status_and_its_words(
    folder: Path, typed: str, more: dict[str, Any], passes: bool
) -> None:
    assert type_command(Line("alone", typed, typed, **more), typed) is passes


def test_what_a_command_leaves_behind_is_ended(folder: Path) -> None:
    typed = "sleep 60 & echo $! > pid"
    assert type_command(Line("alone", typed, typed), typed)
    stat = Path(f"/proc/{(folder / 'pid').read_text().strip()}/stat")
    eventually(lambda: not stat.exists() or ") Z " in stat.read_text())


def test_what_a_command_needs_is_typed_before_it_and_once_in_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = folder / "commands.yaml"
    needy = "{as: echo late >> order, needs: [make first]}"
    table.write_text(
        f"alone:\n  one: {needy}\n  two: {needy}\n  make first: {{as: echo first >> order}}\n"
        "serve: {}\ncluster: {}\n"
    )
    monkeypatch.setattr(run, "TABLE", table)
    monkeypatch.setattr(run, "LAST_RUN", folder / "last_run.json")
    first = Runner(only="", again=False)
    first.run("alone")
    assert first.count == 3
    assert (folder / "order").read_text().split() == ["first", "late", "late"]
    again = Runner(only="", again=False)
    again.run("alone")
    assert again.count == 0 and not again.failed, "all have passed today"


def test_a_key_that_means_nothing_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = folder / "commands.yaml"
    table.write_text("alone:\n  make docs: {minuts: 3}\n")
    monkeypatch.setattr(run, "TABLE", table)
    with pytest.raises(ValueError, match=r"make docs: unknown \['minuts'\], known are"):
        lines("alone")
