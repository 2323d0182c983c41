"""The pages of docs/ name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ARCHITECTURE = ROOT / "docs/architecture.md"
FOLDERS = "cluster engine kv_transfer router simulator loadtests deploy protos prefill_worker decode_worker tests"


def named_paths(text: str) -> list[str]:
    """Return what looks like a path of this repository in backquotes."""
    quoted = re.findall(r"`([\w./-]+/[\w./-]*)`", text)
    return [path for path in quoted if path.split("/")[0] in FOLDERS.split()]


def test_every_path_that_the_architecture_names_is_there() -> None:
    paths = named_paths(ARCHITECTURE.read_text())
    assert len(paths) > 50
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_table_of_changes_has_a_row_for_what_people_change() -> None:
    table = ARCHITECTURE.read_text().partition("## To change X, open Y")[2]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) >= 25


def test_no_line_of_a_page_is_wider_than_120_characters() -> None:
    wide = [
        line
        for line in ARCHITECTURE.read_text().splitlines()
        if len(line) > 120 and not line.startswith("|")
    ]
    assert wide == []
