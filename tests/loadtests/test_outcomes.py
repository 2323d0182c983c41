"""Goodput maths, stages, deciles, the knee; and what a document says of its own weakness."""

from __future__ import annotations

import math

import pytest
from diptych.loadtests import outcomes as o
from diptych.loadtests import server
from diptych.loadtests.arrivals import RateStage
from diptych.loadtests.endpoint import EndpointFacts
from diptych.loadtests.outcomes import LoadOutcome
from diptych.loadtests.plan import LoadPlan
from diptych.loadtests.result import ClientCost, assemble
from diptych.protos import frames as f
from diptych.router.goodput import judge, p99
from diptych.simulator.attempt import SimulatedAttempt
from diptych.simulator.metrics import Slo
from diptych.simulator.trace import WorkloadRequest
from hypothesis import given
from hypothesis import strategies as st

SLO = Slo.parse("ttft=500ms,itl=50ms")
FACTS = EndpointFacts("http://x", "m", 4096, ("a", "b"), 3, True, True, "diptych")


def outcome(ttft_ms: float, *gaps_ms: float, **fields: object) -> LoadOutcome:
    gaps = [gap / 1e3 for gap in gaps_ms]
    values: dict = {"id": "r", "arrival_s": 0.0, "sent_s": 0.0, "output_tokens": len(gaps) + 1}
    values |= fields
    whole = ttft_ms / 1e3 + sum(gaps)
    return LoadOutcome(**values, ttft_s=ttft_ms / 1e3, e2e_s=whole, gaps_s=gaps)


@pytest.mark.parametrize(
    ("one", "missed"),
    [
        (outcome(500, 50, 50), ""),
        (outcome(501, 1, 1), "ttft"),
        (outcome(1, 120), "itl"),  # one gap, the hand-over's: it counts
        (outcome(1, 140, *[1] * 18), ""),  # 19 gaps: their mean alone is judged
        (outcome(1, 140, *[1] * 19), "itl"),  # 20 gaps: 1 late of 20 is more than 1 %
        (outcome(1, 140, *[1] * 99), ""),  # 100 gaps: 1 late is 1 %
        (outcome(1, 140, 140, *[1] * 98), "itl"),
        (outcome(1), ""),  # one token, no gap
        (outcome(1, 1, error="429 queue_full"), "error"),
        (outcome(math.nan), "ttft"),
    ],
)
def test_a_request_is_met_by_first_token_mean_gap_and_p99(one: LoadOutcome, missed: str) -> None:
    assert one.missed(SLO) == missed


@given(st.integers(0, 4), st.integers(1, 320))
def test_the_cluster_and_the_simulator_judge_gaps_alike(late: int, others: int) -> None:
    one = outcome(100, *[140] * late, *[1] * others)
    gaps, mean = one.gaps_s, one.tpot_s
    live = f.RequestOutcome("t", "c", "stop", 0.1, one.output_tokens, len(gaps), mean, p99(gaps))
    assert (judge(live, SLO.ttft_s, SLO.itl_s) == "both") == (not one.missed(SLO))
    request = WorkloadRequest(0.0, 1, one.output_tokens, "", [], [], [])
    attempt = SimulatedAttempt(request, ("r", 0), 0.0)
    attempt.first_token_at = 0.1
    attempt.ended_at = 0.1 + sum(gaps)
    attempt.ttft_target_s = SLO.ttft_s
    attempt.late_gaps = sum(gap > SLO.itl_s for gap in gaps)
    assert SLO.is_met(attempt) == (not one.missed(SLO))


def test_goodput_counts_failures_as_offered() -> None:
    found = [outcome(100, 10), outcome(900, 10), outcome(100, error="timeout"), outcome(200, 10)]
    figures = o.summarize(found, SLO, span_s=4.0)
    assert (figures["goodput"], figures["good_per_s"], figures["offered_per_s"]) == (0.5, 0.5, 1.0)
    assert figures["missed"] == {"ttft": 1, "error": 1} and figures["errors"] == {"timeout": 1}
    assert figures["ttft_ms"]["mean"] == pytest.approx(400)  # of those served
    assert figures["second_token_ms"]["max"] == pytest.approx(10)


def test_nothing_offered_has_no_goodput() -> None:
    figures = o.summarize([], SLO, 1.0)
    assert figures["goodput"] is None and figures["ttft_ms"] == {}


def test_the_knee_lies_between_the_last_stage_that_holds_and_the_first_that_does_not() -> None:
    rows = [{"offered_per_s": rate, "goodput": good} for rate, good in ((1, 1), (2, 1), (4, 0.8))]
    assert o.find_knee(rows, 0.9) == pytest.approx(3.0)  # half way down from 1 to 0.8
    assert o.find_knee(rows, 0.5) == 4 and o.find_knee(rows[2:], 0.9) is None


def test_stages_have_rates_of_their_own_and_unreached_ones_are_left_out() -> None:
    stages = [RateStage("a", 0, 2, 1), RateStage("b", 2, 4, 2), RateStage("c", 4, 6, 4)]
    found = [outcome(1), outcome(1, stage_index=1), outcome(900, stage_index=1)]
    rows = o.summarize_stages(found, stages, SLO)
    assert [(row["label"], row["offered_per_s"], row["goodput"]) for row in rows] == [
        ("a", 0.5, 1.0),
        ("b", 1.0, 0.5),
    ]


def test_deciles_go_by_prompt_length() -> None:
    found = [outcome(1 if n < 10 else 900, prompt_tokens=n) for n in reversed(range(20))]
    rows = o.summarize_deciles(found, SLO)
    assert [row["goodput"] for row in rows] == [1.0] * 5 + [0.0] * 5
    assert rows[-1] == {"longest": 19, "requests": 2, "goodput": 0.0}
    assert (
        o.summarize_deciles(found[:3], SLO)[0]["requests"] == 1
        and o.summarize_deciles([], SLO) == []
    )


def test_the_timeline_accounts_for_every_request() -> None:
    found = [outcome(100, arrival_s=n / 10, sent_s=n / 10) for n in range(50)]
    rows = o.summarize_timeline(found, SLO, 5.0)
    width = rows[1]["at_s"]
    assert sum(row["offered_per_s"] for row in rows) * width == pytest.approx(50)
    assert sum(row["running"] for row in rows) * width == pytest.approx(50 * 0.1, rel=0.03)


def test_a_document_says_what_weakens_it() -> None:
    plan = LoadPlan(duration=10.0, gate="goodput>=0.9")
    facts = EndpointFacts("http://x", "m", 4096, ("a", "b"), 3, ignore_eos=False, usage=False)
    late = [outcome(100, 1, arrival_s=1.0, sent_s=2.0), outcome(100, 1, output_tokens=9)]
    busy = ClientCost(processes={"a": (9.5, 10.0), "b": (1.0, 10.0)})
    run = assemble(plan, facts, late, busy, {}, {"skipped": 3, "started": "now"})
    told = " ".join(run["warnings"])
    for reason in (
        "95% of a core",
        "late",
        "upper limits",
        "a piece counts",
        "2.8 tokens",
        "3 req",
    ):
        assert reason in told
    assert run["gates"] == [{"gate": "goodput>=0.9", "holds": True}]
    cut = assemble(plan, FACTS, late, busy, {}, {"ended_s": 5.0})
    assert cut["span_s"] == 5.0 and any("stopped after 5 s" in one for one in cut["warnings"])
    lost = assemble(plan, FACTS, late, busy, {}, {"silent": 1})
    assert any("1 processes of this client never ended" in one for one in lost["warnings"])
    quiet = assemble(plan, FACTS, [outcome(100, 1)], ClientCost(), {}, {})
    assert quiet["warnings"] == []


def test_a_ramp_that_is_stopped_has_the_rates_that_it_offered() -> None:
    plan = LoadPlan(load="ramp", rate="1-4", steps=3, duration=30.0)  # 1/s, 2/s and 4/s
    found = [outcome(100, arrival_s=n + 0.5, sent_s=n + 0.5) for n in range(10)]
    found += [
        outcome(100 if n else 9000, arrival_s=at_s, sent_s=at_s, stage_index=1)
        for n, at_s in enumerate(10.1 + number / 2 for number in range(10))
    ]
    run = assemble(plan, FACTS, found, ClientCost(), {}, {"ended_s": 15.0})
    assert [row["offered_per_s"] for row in run["stages"]] == [1.0, 2.0]
    assert run["span_s"] == 15.0 and run["knee"]["g90"] == 2.0
    whole = assemble(plan, FACTS, found, ClientCost(), {}, {})  # it ended by itself, at its knee
    assert whole["span_s"] == 20.0

    # The time is rounded, and a request may have been sent behind it.
    for ended_s in (10.0, 10.1, 14.6):
        run = assemble(plan, FACTS, found[:11], ClientCost(), {}, {"ended_s": ended_s})
        assert len(run["stages"]) == 2 and run["span_s"] == max(ended_s, 10.1)
    run = assemble(plan, FACTS, [], ClientCost(), {}, {"ended_s": 4.0})
    assert run["span_s"] == 4.0 and run["stages"] == []


PROMETHEUS = """diptych_request_e2e_seconds_count 7
# HELP diptych_request_ttft_seconds x
# TYPE diptych_request_ttft_seconds histogram
diptych_request_ttft_seconds_bucket{slo_class="a",le="+Inf"} 7
diptych_request_ttft_seconds_sum{slo_class="a"} 1.5
diptych_request_ttft_seconds_count{slo_class="a"} 5
diptych_request_ttft_seconds_sum{slo_class="b c"} 0.5
diptych_request_ttft_seconds_count{slo_class="b c"} 2
diptych_request_output_tokens_sum 210
"""


def test_the_servers_counters_are_summed_over_labels_and_compared_by_difference() -> None:
    before = {"requests": 3.0, "ttft_count": 3.0, "ttft_sum": 1.0, "output_tokens": 10.0}
    told = server.difference(before, server.from_metrics(PROMETHEUS))
    assert (told["requests"], told["output_tokens"]) == (4, 200)
    assert told["ttft_ms"] == pytest.approx(250)  # (2.0 - 1.0) s / 4
    ours = {"served": 4, "output_tokens": 210, "ttft_ms": {"mean": 260.0}}
    ours |= {"server_ttft_ms": {}, "tpot_ms": {}, "e2e_ms": {}}
    rows = {
        row["figure"]: row["deviation"]
        for row in server.compare_with_server(told, ours, path_s=0.010)
    }
    assert rows["requests answered"] == 0 and rows["output tokens"] == pytest.approx(0.05)
    assert rows["TTFT mean, ms"] == pytest.approx(0.04)
    assert rows["TTFT mean + round trip, ms"] == pytest.approx(0)
    assert server.from_metrics("vllm:generation_tokens_total 5\n") == {"output_tokens": 5}


def test_a_url_that_the_command_and_the_admin_api_name_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = {
        "http://gateway/metrics": "vllm:generation_tokens_total 5\n",
        "http://worker/metrics": "vllm:generation_tokens_total 7\n",
        "http://admin/metrics/targets": '[{"targets": ["gateway", "worker"]}]',
    }
    monkeypatch.setattr(server, "_fetch", lambda url, key: pages.get(url, ""))
    counters = server.read_counters("http://gateway/metrics", "http://admin")
    assert counters == {"output_tokens": 12}


def test_a_server_that_cannot_be_asked_is_left_out() -> None:
    assert server.read_counters("http://127.0.0.1:9/metrics", "http://127.0.0.1:9") == {}
