"""Every command of the pages has a place where it runs, or a reason why it runs nowhere."""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

import pytest
import yaml

from .find import ROOT, all_commands, commands_of, page_paths
from .run import GROUPS as TYPED
from .run import LAST_RUN, TABLE, expectation, lines

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
    typed = {line.command: expectation(line) for group in TYPED for line in lines(group)}
    passed = {command: last["expected"] for command, last in record.items() if last["passed"]}
    assert {command for command in typed if passed.get(command) != typed[command]} == set()
    assert [command for command in record if command not in typed] == []


def test_what_a_command_needs_is_in_the_table() -> None:
    typed = {line.command: line for group in TYPED for line in lines(group)}
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
