"""Targets, and what counts as met."""

from math import inf

import pytest
from diptych.simulator.attempt import SimulatedAttempt
from diptych.simulator.errors import SimulationError
from diptych.simulator.metrics import (
    SimulatedOutcome,
    Slo,
    isolated_cost,
    offered_percentiles,
    summarize,
)
from diptych.simulator.trace import WorkloadRequest

from .support import SIMPLE

SLO = Slo.flat(1.0, 0.05)


def attempt(output=101, ttft=0.5, mean=0.02, late=0):
    one = SimulatedAttempt(WorkloadRequest(0.0, 100, output, "", [], [], []), ("r", 0), 0.0)
    one.first_token_at, one.ttft_target_s, one.late_gaps = ttft, 1.0, late
    one.ended_at = ttft + mean * (output - 1)
    return one


def test_the_text_form_gives_a_floor_and_a_multiple_of_the_isolated_prefill():
    slo = Slo.parse("ttft=max(1s,3x),itl=50ms", (SIMPLE.cost,))
    assert slo.ttft_target_s(100) == 1.0  # 3 * 0.1 s is below the floor
    assert slo.ttft_target_s(1000) == pytest.approx(3.0)
    assert str(slo) == "ttft=max(1s, 3x),itl=50ms"
    assert Slo.parse(str(slo), (SIMPLE.cost,)) == slo
    flat = Slo.parse("ttft=500ms, itl=0.03s")
    assert (flat.ttft_target_s(10**6), flat.itl_s) == (0.5, 0.03)
    by_length = Slo.parse("ttft=500ms + 300ms/1k,itl=50ms")
    assert by_length.ttft_target_s(4000) == pytest.approx(1.7)


def test_the_fastest_replica_times_an_isolated_prefill():
    slo = Slo.parse("ttft=3x,itl=50ms", (SIMPLE.cost, SIMPLE.cost.scaled(0.5, 1.0)))
    assert slo.ttft_target_s(1000) == pytest.approx(1.5)


def test_a_multiple_needs_the_cost_of_a_prefill():
    slo = Slo.parse("ttft=max(1s, 3x),itl=50ms")
    with pytest.raises(SimulationError, match="need its cost; give times"):
        slo.ttft_target_s(100)
    measured = Slo.parse("ttft=max(1s, 3x),itl=50ms", (isolated_cost("200ms + 100ms/1k"),))
    assert measured.ttft_target_s(4000) == pytest.approx(1.8)
    for text in ("3x", "max(1s, 2s)", "soon"):
        with pytest.raises(SimulationError, match="isolated"):
            isolated_cost(text)


@pytest.mark.parametrize(
    "text", ["ttft=1s", "itl=50ms", "ttft=1,itl=2ms", "ttft=fast,itl=1s", "ttft=fastx,itl=1s"]
)
def test_a_wrong_target_is_said(text):
    with pytest.raises(SimulationError):
        Slo.parse(text)


def test_a_request_is_met_by_ttft_mean_gap_and_the_p99_of_gaps():
    assert SLO.is_met(attempt())
    assert not SLO.is_met(attempt(ttft=1.01))
    assert not SLO.is_met(attempt(mean=0.051))
    assert SLO.is_met(attempt(late=1))  # 1 of 100 gaps may be late
    assert not SLO.is_met(attempt(late=2))


def test_a_few_gaps_are_judged_by_their_mean_only():
    assert SLO.is_met(attempt(output=20, late=1))  # 19 gaps
    assert not SLO.is_met(attempt(output=21, late=1))  # 20 gaps: none of them may be late
    assert SLO.is_met(attempt(output=1))


def test_a_refusal_is_a_miss():
    one = attempt()
    one.refusal = "overloaded"
    assert not SLO.is_met(one)


def outcome(prompt, met, tenant="a", refused=""):
    return SimulatedOutcome(
        0.0, prompt, 10, tenant, refused, 0.1, 1.0, 0.01, 0.01, 0, 0, 0, met, 0.0
    )


def test_the_summary_splits_attainment_by_length_and_tenant():
    short = [outcome(n, True) for n in range(90)]
    long = [outcome(1000 + n, n < 5, "b", "" if n < 5 else "overloaded") for n in range(10)]
    summary = summarize(short + long)
    assert summary.attainment == pytest.approx(0.95) and summary.refused == 5
    assert summary.deciles == [1.0] * 9 + [0.5]
    assert summary.tenants == {"a": 1.0, "b": 0.5}


def test_percentiles_over_all_offered_requests_put_refused_ones_last():
    # Of 100 requests 97 were served, in 1 to 97 s: the 95th is a served one, the 99th is not.
    assert offered_percentiles([float(n) for n in range(97, 0, -1)], 100) == {
        "p95": 95.0,
        "p99": None,
    }
    assert offered_percentiles([3.0], 1) == {"p95": 3.0, "p99": 3.0}
    assert offered_percentiles([], 7) == {"p95": None, "p99": None}
    assert offered_percentiles([], 0) == {}
    refused = [outcome(9, False, refused="overloaded")] * 2
    summary = summarize([outcome(9, True)] * 98 + refused)
    assert summary.ttft_offered == {"p95": 0.1, "p99": None} and summary.ttft["p99"] == 0.1
    assert summary.attainment == pytest.approx(0.98)


def test_fewer_than_ten_requests_have_as_many_parts_and_no_empty_one():
    missed = SimulatedOutcome(
        arrival_s=0.0,
        prompt_tokens=10,
        output_tokens=1,
        tenant="",
        refusal_reason="full",
        ttft_s=inf,
        ttft_target_s=1.0,
        tpot_s=0.0,
        first_gap_s=0.0,
        late_gaps=0,
        cached_tokens=0,
        moved_tokens=0,
        targets_met=False,
        predicted_ttft_s=0.0,
    )
    assert summarize([missed] * 3).deciles == [0.0] * 3
    assert summarize([]).deciles == [1.0]
