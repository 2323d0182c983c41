"""Bisection, choice of splits, and the document of a study."""

import json
from dataclasses import replace

import pytest
from diptych.simulator import report
from diptych.simulator.case import (
    Case,
    CaseProcesses,
    InlineExecutor,
    LoadVerdict,
    simulate_case,
)
from diptych.simulator.errors import SimulationError
from diptych.simulator.fleet import Faults, Fleet, Split, possible_splits
from diptych.simulator.metrics import Slo
from diptych.simulator.search import Search, candidate_splits
from diptych.simulator.sources import load_trace
from diptych.simulator.study import Study, parse_policies, run_study

from .support import MODEL, h200, simple


class SearchOfKnownLimits(Search):
    """Holds any rate up to its split's own."""

    limits = {"6P2D": 0.4, "5P3D": 0.5, "7P1D": 0.2}  # noqa: RUF012
    better_by_seed = 0.0  #: of its limit, by which each seed holds more than the one before

    def __init__(self):
        fleet, slo = h200()
        super().__init__(Case(load_trace("synthetic:50"), fleet, slo))
        self.asked = []

    def submit_check(self, split, rate, share, seeds, first_seed=0):
        self.asked.append((str(split), rate))
        limit = self.limits[str(split)] * (1 + self.better_by_seed * first_seed)
        return InlineExecutor().submit(LoadVerdict, rate <= limit, 1.0, 0, 0.0)


def test_the_largest_rate_is_found_within_the_tolerance():
    for start in (0.01, 0.39, 5.0):
        found = SearchOfKnownLimits().largest_rate(Split.parse("6P2D"), 0.9, start, 1, 0.02)
        assert 0.4 / 1.02 <= found <= 0.4


def test_the_interval_reaches_from_the_worst_seed_to_the_best_one():
    search = SearchOfKnownLimits()
    search.better_by_seed = 0.1
    found = search.best_split([Split.parse("6P2D")], 0.9, 0.1)
    low, high = found.interval
    assert 0.4 / 1.015 <= low <= 0.4, "the first seed's"
    assert 0.48 <= high <= 0.48 * 1.015, "the third one's"
    assert low <= found.rate <= high


def test_a_rate_that_nothing_holds_is_zero():
    search = SearchOfKnownLimits()
    search.limits = {"6P2D": 0.0}
    assert search.largest_rate(Split.parse("6P2D"), 0.9, 0.1, 1, 0.02) == 0.0


def test_the_best_split_wins_and_a_worse_one_costs_one_look():
    search = SearchOfKnownLimits()
    found = search.best_split([Split.parse(s) for s in ("6P2D", "5P3D", "7P1D")], 0.9, 0.1)
    assert str(found.split) == "5P3D" and found.rate == pytest.approx(0.5, rel=0.02)
    assert [name for name, _ in search.asked].count("7P1D") == 1


@pytest.mark.parametrize("order", [("6P2D", "5P3D", "7P1D"), ("7P1D", "6P2D", "5P3D")])
def test_spare_cores_ask_for_more_and_find_the_same(order):
    few, many = SearchOfKnownLimits(), SearchOfKnownLimits()
    many.processes.has_spare_cores = True
    found = [each.best_split([Split.parse(s) for s in order], 0.9, 0.1) for each in (few, many)]
    assert found[0] == found[1]
    assert set(few.asked) < set(many.asked)


@pytest.mark.slow
def test_processes_find_what_one_process_finds():
    fleet, slo = h200(16)
    cases = [Case(load_trace("synthetic:40"), fleet, slo, name, seeds=1) for name in ("lmetric",)]
    here = Search(cases[0]).largest_rate(Split.parse("3P1D"), 0.9, 0.3, 1, 0.1)
    with CaseProcesses(cases, 2) as cores:
        there = Search(cases[0], processes=cores)
        assert there.largest_rate(Split.parse("3P1D"), 0.9, 0.3, 1, 0.1) == here
        assert there.requests >= 40 and there.seconds > 0


def test_splits_are_read_and_counted():
    assert str(Split.parse("5P2D1M")) == "5P2D1M" and Split.parse("5P2D1M").replicas == 8
    assert len(possible_splits(8, mixed=True)) == 8 and all(
        s.serves_both_phases for s in possible_splits(8, mixed=True)
    )
    for text in ("6P2", "P", "", "6X2D"):
        with pytest.raises(SimulationError):
            Split.parse(text)
    for text in ("H200", "H200:3", "H200:0", "V100:8"):
        with pytest.raises(SimulationError):
            Fleet.parse(text, MODEL, 4)


@pytest.mark.parametrize("text", ["late=1s", "stale=1", "slow=3x", "kill=2@6.0.0s", "wrong=%"])
def test_faults_that_make_no_sense_are_said(text):
    with pytest.raises(SimulationError, match="expected stale=1s"):
        Faults.parse(text)


def test_the_likeliest_split_comes_first():
    fleet, slo = h200()
    order = candidate_splits(Case(load_trace("synthetic:200"), fleet, slo))
    assert len(order) == 8 and order[-1].mixed == 8
    ideal = order[0].prefill
    assert [abs(s.prefill - ideal) for s in order[:-1]] == sorted(
        abs(s.prefill - ideal) for s in order[:-1]
    )


@pytest.fixture(scope="module")
def study():
    fleet, slo = h200(16)
    names = parse_policies(["diptych", "round_robin"])
    said = []
    study = Study(
        load_trace("synthetic:40"),
        MODEL,
        fleet,
        "H200:16",
        slo,
        names,
        split=Split.parse("3P1D"),
        seeds=1,
        find_max=True,
    )
    return run_study(study, said.append), said


@pytest.mark.slow
def test_a_study_is_a_document_with_a_row_for_each_policy(study):
    found, said = study
    rows = json.loads(json.dumps(found))["policies"]
    assert [row["name"] for row in rows] == ["diptych", "round_robin"]
    for row in rows:
        assert row["variant"] == "policy-only" and row["split"] == "3P1D"
        assert 0 < row["g99_per_gpu"] <= row["g90_per_gpu"]
        low, high = row["g90_interval"]
        assert low <= row["g90_per_gpu"] <= high
        assert 0 < row["bound_share"] < 1 and 0 <= row["prefix_hit"] < 1
        assert row["requests_per_s_simulated"] > 0
        assert row["at_rate"]["attainment"] >= 0.9 and len(row["at_rate"]["deciles"]) == 10
    assert any("3P1D" in line for line in said)  # progress


@pytest.mark.slow
def test_the_report_names_every_policy_in_text_and_html(study):
    found, _ = study
    lines = report.study_text(found).splitlines()
    assert (
        "those of vLLM" in lines[1]
        and "not of Diptych's own engine, which has been timed with one" in lines[1]
    )
    assert "the fit of vllm on H200 has values on their limits" in lines[2]
    assert lines[4].split()[:2] == ["POLICY", "VARIANT"] and "OFFERED P99" in lines[4]
    assert [line.split()[0] for line in lines[5:7]] == ["diptych", "round_robin"]
    page = report.study_page(found)
    assert page == report.study_page(found)  # equal study, equal file
    assert page.startswith("<!doctype html>") and page.count("<svg") == 1
    assert "times are those of vLLM" in page
    assert "round_robin" in page and "<script" not in page and 'src="http' not in page


def test_a_study_in_which_no_rate_is_held_ends_without_a_comparison():
    fleet, _ = simple(2, Slo.flat(0.1, 0.05))  # a prompt of 1,000 tokens takes 1 s
    study = Study(
        load_trace("poisson:1000-1001:5-6:20"),
        "",
        fleet,
        "simple",
        Slo.flat(0.1, 0.05),
        parse_policies(["diptych"]),
        split=Split(1, 1),
        seeds=1,
        find_max=True,
        agreement=True,
    )
    said = []
    found = run_study(study, said.append)
    assert found["policies"][0]["rate_per_gpu"] == 0 and "agreement" not in found
    assert "holds no rate" in said[-1]


@pytest.mark.parametrize("policy", ["diptych", "mooncake"])
def test_late_requests_are_refused_early_only_where_that_is_asked_for(policy):
    fleet, _ = simple(2, Slo.flat(1.5, 0.05))  # a prompt of 1,000 tokens takes 1 s
    trace = load_trace("poisson:1000-1001:20-21:40")
    case = Case(trace, fleet, Slo.flat(1.5, 0.05), policy, disaggregate="always")
    reasons = []
    for asked in (False, True):
        run = simulate_case(replace(case, early_reject=asked), Split(1, 1), rate=1.0, seed=0)
        reasons.append({one.refusal_reason for one in run.outcomes})
    assert ["slo_unattainable" in found for found in reasons] == [False, True]


def test_no_policy_of_that_name():
    with pytest.raises(SimulationError, match="expected all or one of"):
        parse_policies(["best"])
    assert len(parse_policies(["all"])) >= 10
