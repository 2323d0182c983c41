"""The table that sorts vLLM's tests: complete, and what is offered stays offered."""

from __future__ import annotations

import csv
from pathlib import Path

from tests.compat.sorting import CATEGORIES, OFFERED_CATEGORIES, read_sorting

#: The names and the outcomes of all tests of the first run. Nothing of this file changes.
FIRST_RUN = Path(__file__).parent / "compat" / "vllm-0.33.0-first-run.tsv"
TESTS_OF_THE_FIRST_RUN = 340
#: The names of all tests that passed at first or were ever offered. Lines are added and never removed.
OFFERED_ONCE = Path(__file__).parent / "compat" / "vllm-0.33.0-offered.txt"
LISTED_SO_FAR = 165


def test_each_line_has_a_known_category_and_a_sentence() -> None:
    for test in read_sorting().values():
        assert test.category in CATEGORIES, test
        assert test.note.endswith("."), test


def test_what_is_offered_stays_offered() -> None:
    sorting = read_sorting()
    offered_once = OFFERED_ONCE.read_text().splitlines()
    assert len(set(offered_once)) == len(offered_once) >= LISTED_SO_FAR
    offered = [name for name, test in sorting.items() if test.category in OFFERED_CATEGORIES]
    assert sorted(offered) == sorted(offered_once)


def test_each_test_of_the_first_run_is_sorted() -> None:
    with FIRST_RUN.open(newline="") as table:
        rows = list(csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE))
    sorting = read_sorting()
    assert len(rows) == TESTS_OF_THE_FIRST_RUN
    assert {row["test"] for row in rows} == set(sorting)
    for row in rows:
        if row["outcome"] != "failed":
            assert sorting[row["test"]].category == row["outcome"]
