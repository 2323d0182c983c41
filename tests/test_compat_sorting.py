"""The table that sorts vLLM's tests: complete, and what is offered stays offered."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest

from tests.compat.sorting import CATEGORIES, read_sorting

FIRST_RUN = Path(__file__).parents[2] / "shared" / "compat" / "vllm-0.33.0-first-run.tsv"
OFFERED_AT_FIRST = 95


def test_each_line_has_a_known_category_and_a_sentence() -> None:
    for test in read_sorting().values():
        assert test.category in CATEGORIES, test
        assert test.note.endswith("."), test


def test_what_is_offered_stays_offered() -> None:
    counts = Counter(test.category for test in read_sorting().values())
    assert counts["offered"] >= OFFERED_AT_FIRST
    assert counts["passed"] == 55


def test_each_test_of_the_first_run_is_sorted() -> None:
    if not FIRST_RUN.exists():
        pytest.skip(f"{FIRST_RUN} is not here")
    with FIRST_RUN.open(newline="") as table:
        rows = list(csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE))
    sorting = read_sorting()
    assert {row["test"] for row in rows} == set(sorting)
    for row in rows:
        if row["outcome"] != "failed":
            assert sorting[row["test"]].category == row["outcome"]
