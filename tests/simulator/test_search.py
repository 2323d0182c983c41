"""Bisection, choice of splits, and the document of a study."""

import json

import pytest
from diptych.simulator import report
from diptych.simulator.case import Case, Cores, Here, Verdict
from diptych.simulator.errors import SimulationError
from diptych.simulator.fleet import Fleet, Split, splits
from diptych.simulator.search import Search, candidates
from diptych.simulator.study import Study, policies_named, run
from diptych.simulator.trace import load

from .support import MODEL, h200


class Known(Search):
    """Holds any rate up to its split's own."""

    limits = {"6P2D": 0.4, "5P3D": 0.5, "7P1D": 0.2}  # noqa: RUF012

    def __init__(self):
        fleet, slo = h200()
        super().__init__(Case(load("synthetic:50"), fleet, slo))
        self.asked = []

    def ask(self, split, rate, share, seeds):
        self.asked.append((str(split), rate))
        return Here().submit(Verdict, rate <= self.limits[str(split)], 1.0, 0, 0.0)


def test_the_largest_rate_is_found_within_the_tolerance():
    for start in (0.01, 0.39, 5.0):
        found = Known().largest(Split.of("6P2D"), 0.9, start, 1, 0.02)
        assert 0.4 / 1.02 <= found <= 0.4


def test_a_rate_that_nothing_holds_is_zero():
    search = Known()
    search.limits = {"6P2D": 0.0}
    assert search.largest(Split.of("6P2D"), 0.9, 0.1, 1, 0.02) == 0.0


def test_the_best_split_wins_and_a_worse_one_costs_one_look():
    search = Known()
    found = search.best([Split.of(s) for s in ("6P2D", "5P3D", "7P1D")], 0.9, 0.1)
    assert str(found.split) == "5P3D" and found.rate == pytest.approx(0.5, rel=0.02)
    assert [name for name, _ in search.asked].count("7P1D") == 1


@pytest.mark.parametrize("order", [("6P2D", "5P3D", "7P1D"), ("7P1D", "6P2D", "5P3D")])
def test_spare_cores_ask_for_more_and_find_the_same(order):
    one, many = Known(), Known()
    many.cores.spare = True
    found = [each.best([Split.of(s) for s in order], 0.9, 0.1) for each in (one, many)]
    assert found[0] == found[1]
    assert set(one.asked) < set(many.asked)


def test_processes_find_what_one_process_finds():
    fleet, slo = h200(16)
    cases = [Case(load("synthetic:100"), fleet, slo, name, seeds=1) for name in ("lmetric",)]
    here = Search(cases[0]).largest(Split.of("3P1D"), 0.9, 0.3, 1, 0.1)
    with Cores(cases, 2) as cores:
        there = Search(cases[0], cores=cores)
        assert there.largest(Split.of("3P1D"), 0.9, 0.3, 1, 0.1) == here
        assert there.requests >= 100 and there.seconds > 0


def test_splits_are_read_and_counted():
    assert str(Split.of("5P2D1M")) == "5P2D1M" and Split.of("5P2D1M").total == 8
    assert len(splits(8, mixed=True)) == 8 and all(s.serves for s in splits(8, mixed=True))
    for text in ("6P2", "P", "", "6X2D"):
        with pytest.raises(SimulationError):
            Split.of(text)
    for text in ("H200", "H200:3", "H200:0", "V100:8"):
        with pytest.raises(SimulationError):
            Fleet.of(text, MODEL, 4)


def test_the_likeliest_split_comes_first():
    fleet, slo = h200()
    order = candidates(Case(load("synthetic:200"), fleet, slo))
    assert len(order) == 8 and order[-1].mixed == 8
    ideal = order[0].prefill
    assert [abs(s.prefill - ideal) for s in order[:-1]] == sorted(
        abs(s.prefill - ideal) for s in order[:-1]
    )


@pytest.fixture(scope="module")
def study():
    fleet, slo = h200(16)
    names = policies_named(["diptych", "round_robin"])
    said = []
    study = Study(
        load("synthetic:150"),
        MODEL,
        fleet,
        "H200:16",
        slo,
        names,
        split=Split.of("3P1D"),
        seeds=1,
        find_max=True,
    )
    return run(study, said.append), said


def test_a_study_is_a_document_with_a_row_for_each_policy(study):
    found, said = study
    rows = json.loads(json.dumps(found))["policies"]
    assert [row["name"] for row in rows] == ["diptych", "round_robin"]
    for row in rows:
        assert row["variant"] == "policy-only" and row["split"] == "3P1D"
        assert 0 < row["g99_per_gpu"] <= row["g90_per_gpu"]
        assert 0 < row["bound_share"] < 1 and 0 <= row["prefix_hit"] < 1
        assert row["requests_per_s_simulated"] > 0
        assert row["at_rate"]["attainment"] >= 0.9 and len(row["at_rate"]["deciles"]) == 10
    assert any("3P1D" in line for line in said)  # progress


def test_the_report_names_every_policy_in_text_and_html(study):
    found, _ = study
    lines = report.text(found).splitlines()
    assert lines[2].split()[:2] == ["POLICY", "VARIANT"]
    assert [line.split()[0] for line in lines[3:5]] == ["diptych", "round_robin"]
    page = report.document(found)
    assert page == report.document(found)  # equal study, equal file
    assert page.startswith("<!doctype html>") and page.count("<svg") == 1
    assert "round_robin" in page and "<script" not in page and 'src="http' not in page


def test_no_policy_of_that_name():
    with pytest.raises(SimulationError, match="expected all or one of"):
        policies_named(["best"])
    assert len(policies_named(["all"])) >= 10
