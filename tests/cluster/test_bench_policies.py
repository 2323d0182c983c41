"""`diptych bench policies`: searches that go on where they ended, and a table that says who is ahead."""

from __future__ import annotations

import errno
import json
import random
import time
from math import inf
from pathlib import Path

import msgspec
import pytest
from diptych.cluster.bench.policies import searches as searches_module
from diptych.cluster.bench.policies.cells import GROUPS, TWELVE, Cell, chosen_cells
from diptych.cluster.bench.policies.searches import (
    EARLY_REJECT,
    PolicySearch,
    SearchResult,
    run_searches,
)
from diptych.cluster.bench.policies.table import Verdict, compare, document, markdown
from diptych.cluster.cli import app
from diptych.simulator.case import Case
from diptych.simulator.errors import SimulationError
from diptych.simulator.search import Search
from msgspec.structs import replace
from typer.testing import CliRunner

CELL = Cell("small", "small.jsonl", 1.0, "ttft=9s,itl=50ms", fleet="H200:8")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty long prompts within forty seconds, in Mooncake's format."""
    folder = tmp_path_factory.mktemp("traces")
    draw = random.Random(1)
    lines = [
        json.dumps(
            {
                "timestamp": number * 1000,
                "input_length": 512 * draw.randrange(40, 60),
                "output_length": draw.randrange(2, 9),
                "hash_ids": [],
            }
        )
        for number in range(40)
    ]
    (folder / CELL.trace).write_text("\n".join(lines) + "\n")
    return folder


def result(policy: str, g90: float, low: float, high: float, cell: str = "a") -> SearchResult:
    setup = {"name": cell, "slo": "ttft=2s,itl=50ms", "seeds": 2}
    return SearchResult(
        setup, policy, "full", "", g90, low, high, "1P1D", 0.01, 1.5, None, 0.7, 100, 1.0
    )


def found_by(search: PolicySearch, commit: str) -> SearchResult:
    return replace(
        result(search.policy, 1.0, 0.9, 1.1), setup=search.setup(), variant=search.variant
    )


def test_what_was_searched_is_not_searched_again(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    wanted = [
        PolicySearch(CELL, traces, policy, "policy-only", 1) for policy in ("diptych", "dynamo")
    ]
    first = run_searches(wanted[:1], tmp_path, jobs=1, commit="c", report=lines.append)
    assert first[0].g90 > 0 and first[0].split and first[0].commit == "c"
    assert first[0].low <= first[0].g90 <= first[0].high
    both = run_searches(wanted, tmp_path, jobs=2, commit="d", report=lines.append)
    assert both[0] == first[0] and both[1].policy == "dynamo" and both[1].commit == "d"
    monkeypatch.setattr(searches_module, "find_g90", None)
    assert run_searches(wanted, tmp_path, jobs=1, commit="e", report=lines.append) == both
    assert lines[-1] == "2 searches, 2 of them done before"


def test_results_of_another_setup_are_refused_by_name(traces: Path, tmp_path: Path) -> None:
    search = PolicySearch(CELL, traces, "diptych", "policy-only", 1)
    known = replace(result("diptych", 1.0, 0.9, 1.1), setup=search.setup())
    search.file(tmp_path).parent.mkdir()
    search.file(tmp_path).write_bytes(msgspec.json.encode(known))
    assert run_searches([search], tmp_path, jobs=1, commit="", report=print) == [known]
    other = PolicySearch(CELL, traces, "diptych", "policy-only", 2)
    with pytest.raises(SimulationError, match=r"another set-up \(seeds 1, not 2\)"):
        run_searches([other], tmp_path, jobs=1, commit="", report=print)
    search.file(tmp_path).write_text("{")
    with pytest.raises(SimulationError, match="remove it, and it is searched again"):
        run_searches([search], tmp_path, jobs=1, commit="", report=print)


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_search(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searches_module, "find_g90", None)
    (tmp_path / "file").write_text("")
    search = PolicySearch(CELL, traces, "diptych", "policy-only", 1)
    with pytest.raises(SimulationError, match=r"cannot write into .*file"):
        run_searches([search], tmp_path / "file", jobs=1, commit="", report=print)


def test_a_disk_that_fills_up_is_a_sentence_and_no_half_result(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(searches_module, "find_g90", found_by)
    monkeypatch.setattr(searches_module, "_write", full)
    search = PolicySearch(CELL, traces, "diptych", "policy-only", 1)
    with pytest.raises(SimulationError, match=r"cannot write .*: No space left"):
        run_searches([search], tmp_path, jobs=1, commit="", report=print)
    assert not search.file(tmp_path).exists()


def test_a_missing_trace_is_a_sentence(tmp_path: Path) -> None:
    search = PolicySearch(CELL, tmp_path, "diptych", "policy-only", 1)
    with pytest.raises(SimulationError, match=r"small\.jsonl: there is no such file; give its"):
        run_searches([search], tmp_path, jobs=1, commit="", report=print)


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [((2.0, 1.9, 2.1), "ahead"), ((1.5, 1.4, 1.6), "tie"), ((1.0, 0.9, 1.1), "behind")],
)
def test_intervals_say_who_is_ahead(ours: tuple[float, float, float], verdict: str) -> None:
    rivals = [result("dynamo", 1.2, 1.1, 1.3), result("mooncake", 1.6, 1.5, 1.7)]
    (row,) = compare([result("diptych", *ours), *rivals])
    assert row.best_rival.policy == "mooncake" and row.verdict == Verdict(verdict)
    low, high = row.ratio_interval
    assert low < row.ratio < high and row.ratio == pytest.approx(ours[0] / 1.6)


def test_the_page_names_the_best_rival_and_the_mean_of_the_ratios() -> None:
    found = []
    for cell, ours in (("a", 4.0), ("b", 1.0)):
        found.append(result("diptych", ours, ours * 0.9, ours * 1.1, cell))
        found.append(result("dynamo", 2.0, 1.9, 2.1, cell))
    comparisons = compare(found)
    page = markdown(comparisons, "full")
    assert "| a | 4.000 (3.600 to 4.400) 1P1D | dynamo 2.000 " in page
    assert "| 2.00 (1.71 to 2.32) | ahead |" in page and "| behind |" in page
    assert "Geometric mean of the ratios: 1.00." in page
    assert "| a | 1.0% | 1.5x | refused | 0.70 |" in page
    assert "Searched at ." not in page
    assert document(comparisons, "full")["geometric_mean"] == pytest.approx(1.0)


def test_ours_that_refuses_stands_in_a_table_of_its_own() -> None:
    refusing = replace(result("diptych", 3.0, 2.9, 3.1), variant=EARLY_REJECT, refused_share=0.08)
    rival = result("mooncake", 2.0, 1.9, 2.1)
    (row,) = compare([refusing, result("diptych", 1.0, 0.9, 1.1), rival])
    assert row.ours.g90 == 1.0 and row.verdict == Verdict.BEHIND
    page = markdown([row], "full")
    assert "| a | 3.000 (2.900 to 3.100) 1P1D | 8.0% | mooncake 2.000 " in page
    assert "| 1.0% | 1.50 |" in page and "Geometric mean of the ratios: 0.50." in page
    (cell,) = document([row], "full")["cells"]
    assert cell["ours_refusing"]["g90_per_gpu"] == 3.0
    (without,) = compare([result("diptych", 1.0, 0.9, 1.1), rival])
    assert "early_reject" not in markdown([without], "full")


@pytest.mark.slow
def test_a_search_of_ours_that_refuses_refuses_what_would_be_late(
    traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = []

    def note(case: Case) -> Search:
        cases.append(case)
        return Search(case)

    monkeypatch.setattr(searches_module, "Search", note)
    found = searches_module.find_g90(PolicySearch(CELL, traces, "diptych", EARLY_REJECT, 1))
    searches_module.find_g90(PolicySearch(CELL, traces, "diptych", "policy-only", 1))
    assert found.variant == EARLY_REJECT and [case.early_reject for case in cases] == [True, False]


def test_a_rival_that_holds_no_rate_leaves_no_ratio() -> None:
    (row,) = compare([result("diptych", 1.0, 0.9, 1.1), result("dynamo", 0.0, 0.0, 0.0)])
    assert row.ratio is None and row.verdict == Verdict.AHEAD
    page = markdown([row], "full")
    assert "no rival holds a rate" in page and "Geometric mean" not in page


def test_where_ours_holds_no_rate_the_mean_is_zero_and_not_left_out() -> None:
    (row,) = compare([result("diptych", 0.0, 0.0, 0.0), result("dynamo", 1.0, 0.9, 1.1)])
    assert row.verdict == Verdict.BEHIND
    assert "Geometric mean of the ratios: 0.00." in markdown([row], "full")


def test_a_rival_that_one_seed_does_not_hold_has_no_upper_ratio() -> None:
    (row,) = compare([result("diptych", 1.0, 0.9, 1.1), result("dynamo", 0.5, 0.0, 0.6)])
    assert row.ratio_interval == (1.5, inf)
    assert json.loads(json.dumps(document([row], "full")))["cells"][0]["ratio_interval"][1] is None


def test_a_rival_with_a_wider_interval_than_the_best_one_makes_a_tie() -> None:
    rivals = [result("dynamo", 1.6, 1.5, 1.7), result("aibrix", 1.59, 1.2, 1.95)]
    (row,) = compare([result("diptych", 2.0, 1.9, 2.1), *rivals])
    assert row.best_rival.policy == "dynamo" and row.verdict == Verdict.TIE


def test_who_is_named_twice_is_searched_once(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        searches_module, "find_g90", lambda search, commit: found_by(search, commit)
    )
    lines: list[str] = []
    search = PolicySearch(CELL, traces, "diptych", "policy-only", 1)
    found = run_searches([search, search], tmp_path, jobs=2, commit="", report=lines.append)
    assert len(found) == 1 and lines[0].startswith("1 searches, 0")


def test_a_search_that_fails_ends_the_others_and_loses_nothing(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def search_or_fail(search: PolicySearch, commit: str) -> SearchResult:
        if search.policy == "dynamo":
            raise SimulationError("this one fails")
        if search.policy == "mooncake":
            time.sleep(600)
        return found_by(search, commit)

    monkeypatch.setattr(searches_module, "find_g90", search_or_fail)
    wanted = [
        PolicySearch(CELL, traces, policy, "full", 1)
        for policy in ("diptych", "mooncake", "dynamo", "lmetric")
    ]
    with pytest.raises(SimulationError, match="this one fails"):
        run_searches(wanted, tmp_path, jobs=2, commit="", report=print)
    assert [search.policy for search in wanted if search.file(tmp_path).exists()] == ["diptych"]


def test_cells_are_named_alone_or_in_groups() -> None:
    assert len(TWELVE) == 12 and len({cell.name for cell in GROUPS["all"]}) == len(GROUPS["all"])
    assert [cell.name for cell in chosen_cells("agents-2s-50ms, synthetic-1s-20ms")] == [
        "agents-2s-50ms",
        "synthetic-1s-20ms",
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--cells", "moon"], "cell moon: expected one of twelve, more, all"),
        (["--variant", "half"], "--variant half: expected one of policy-only, full"),
        (["--policy", "best"], "policy best: expected all or one of"),
        ([], "there is no such file; give its folder, --traces"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    folders = ["--traces", str(tmp_path), "--folder", str(tmp_path / "results")]
    called = CliRunner().invoke(app, ["bench", "policies", *folders, *arguments])
    assert called.exit_code == 2 and sentence in " ".join(called.output.split()), called.output
