"""Reads the table that sorts vLLM's tests."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

SORTING = Path(__file__).parent / "vllm-0.33.0-sorting.tsv"
#: Categories whose tests count as offered: what passed in the first run, and what a user of vLLM's API would expect.
OFFERED_CATEGORIES = ("passed", "offered")
CATEGORIES = (*OFFERED_CATEGORIES, "not-offered", "weak-model", "artefact", "skipped")


@dataclass(frozen=True)
class SortedTest:
    """A line of the sorting table."""

    name: str
    category: str
    note: str  #: why, in a sentence


def read_sorting(path: Path = SORTING) -> dict[str, SortedTest]:
    """Return the sorting table's lines by test."""
    with path.open(newline="") as table:
        rows = csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE)
        return {row["test"]: SortedTest(row["test"], row["category"], row["note"]) for row in rows}
