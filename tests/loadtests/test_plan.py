"""Options as text: what is understood, what is refused and how."""

from __future__ import annotations

from argparse import Namespace
from itertools import pairwise
from pathlib import Path

import pytest
from diptych.loadtests.arrivals import (
    BURST_EVERY_S,
    BURST_S,
    Arrival,
    planned_arrivals,
    rate_stages,
)
from diptych.loadtests.errors import LoadError
from diptych.loadtests.plan import LoadGate, LoadPlan
from diptych.loadtests.prompts import REPEATS, Words, probe


def checked(**options: object) -> LoadPlan:
    plan = LoadPlan(**options)  # type: ignore[arg-type]
    plan.check()
    return plan


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"load": "waves"}, "expected one of constant"),
        ({"rate": "0"}, "expected a number"),
        ({"rate": "1-4"}, "for ramp also"),
        ({"load": "ramp", "rate": "4-1"}, "expected a number"),
        ({"prompt": "9-3"}, "expected tokens"),
        ({"slo": "ttft=500,itl=30ms"}, "no part of a target like"),
        ({"slo": "ttft=max(1s,3x),itl=30ms"}, "give that with --isolated"),
        ({"gate": "goodness>=1"}, "expected one of goodput"),
        ({"gate": "goodput"}, "expected NAME>=VALUE"),
        ({"load": "trace"}, "needs --trace"),
        ({"duration": 0.0}, "above 0"),
    ],
)
def test_what_is_wrong_is_told_before_the_load(options: dict, told: str) -> None:
    with pytest.raises(LoadError, match=told):
        checked(**options)


def test_locust_options_become_a_plan() -> None:
    plan = LoadPlan.of(Namespace(plan_load="ramp", plan_rate="1-8", num_users=7, plan_seed="3"))
    assert (plan.load, plan.rates, plan.users, plan.seed) == ("ramp", (1.0, 8.0), 7, 3)


def test_a_gate_compares_a_figure_with_its_limit() -> None:
    summary = {
        "requests": 9,
        "goodput": 0.95,
        "errors": {"timeout": 2, "500": 1},
        "ttft_ms": {"p99": 800.0},
    }
    holds = {
        text: LoadGate.of(text).holds(summary)
        for text in ("goodput>=0.95", "goodput>0.95", "errors<=2", "ttft_p99<800.5")
    }
    assert list(holds.values()) == [True, False, False, True]
    assert not LoadGate.of("itl_p99<=1000").holds({"itl_ms": {}, "requests": 1}), (
        "no gap holds nothing"
    )
    assert not LoadGate.of("errors<=0").holds({"errors": {}, "requests": 0}), "nor does no request"


def test_constant_arrivals_lie_on_a_grid() -> None:
    found = planned_arrivals(checked(load="constant", rate="4", duration=2.0))
    assert [one.arrival_s for one in found] == [n / 4 for n in range(8)]


@pytest.mark.parametrize(
    ("rate", "duration", "count"), [("0.7", 90.0, 63), ("0.5", 3.0, 2), ("3", 0.1, 1)]
)
def test_constant_arrivals_fill_the_whole_duration(rate: str, duration: float, count: int) -> None:
    found = planned_arrivals(checked(load="constant", rate=rate, duration=duration))
    assert len(found) == count and found[-1].arrival_s < duration


def test_equal_plans_offer_equal_load_and_seeds_differ() -> None:
    assert (
        planned_arrivals(checked(seed=1))
        == planned_arrivals(checked(seed=1))
        != planned_arrivals(checked(seed=2))
    )


def test_poisson_and_burst_offer_their_rate_on_average() -> None:
    for load in ("poisson", "burst"):
        found = planned_arrivals(checked(load=load, rate="10", duration=600.0))
        assert len(found) == pytest.approx(6000, rel=0.06)  # 1.3 % is one standard deviation
        assert all(0 <= a.arrival_s <= b.arrival_s < 600 for a, b in pairwise(found))
        late = [one.arrival_s % BURST_EVERY_S >= BURST_EVERY_S - BURST_S for one in found]
        # 3 of 15 s at 4 times the rest's rate: 4 * 3 / (4 * 3 + 12) of the arrivals
        assert sum(late) / len(late) == pytest.approx(0.5 if load == "burst" else 0.2, abs=0.03)


@pytest.mark.parametrize("duration", [10.0, 20.0, 29.0, 30.0])
def test_a_burst_load_has_its_rate_in_durations_of_any_length(duration: float) -> None:
    plans = [checked(load="burst", rate="50", duration=duration, seed=seed) for seed in range(12)]
    found = sum(len(planned_arrivals(plan)) for plan in plans)
    # Four standard deviations are 5 % of the shortest duration's 6,000 arrivals.
    assert found == pytest.approx(12 * 50 * duration, rel=0.05)


def test_a_ramp_grows_geometrically_and_marks_its_stages() -> None:
    plan = checked(load="ramp", rate="1-16", steps=5, duration=50.0)
    assert [round(stage.rate, 6) for stage in rate_stages(plan)] == [1, 2, 4, 8, 16]
    for one in planned_arrivals(plan):
        stage = rate_stages(plan)[one.stage_index]
        assert stage.begin_s <= one.arrival_s < stage.end_s


def test_a_trace_keeps_lengths_and_prefixes_at_another_scale(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [
        '{"timestamp": 0, "input_length": 1200, "output_length": 80, "hash_ids": [7, 8, 9]}',
        '{"timestamp": 2000, "input_length": 600, "output_length": 40, "hash_ids": [7, 11]}',
    ]
    file.write_text("\n".join(rows))
    plan = checked(load="trace", trace=str(file), rate="", scale=0.125, duration=10.0)
    first, second = planned_arrivals(plan)
    assert [(one.prompt_tokens, one.output_tokens) for one in (first, second)] == [
        (150, 10),
        (75, 5),
    ]
    assert [size for _, size in first.blocks] == [64] * 3, "512 tokens at an eighth"
    assert first.blocks[0] == second.blocks[0] and first.blocks[1] != second.blocks[1]
    words = Words(("a", "b", "c"), template=3)
    texts = [words.text(one).split() for one in (first, second)]
    assert [len(text) for text in texts] == [148, 73], "the template's tokens are in the length"
    assert texts[0][:65] == texts[1][:65] and texts[0][65:73] != texts[1][65:73]


def test_a_trace_ends_with_its_requests_or_with_the_duration(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    row = '{"timestamp": %d, "input_length": 9, "output_length": 8, "hash_ids": [1]}'
    file.write_text("\n".join(row % (500 * number) for number in range(40)))
    for rate, duration, end_s in (("2", 60.0, 20.0), ("2", 15.0, 15.0), ("1", 90.0, 40.0)):
        plan = checked(load="trace", trace=str(file), rate=rate, duration=duration)
        (stage,) = rate_stages(plan)
        assert stage.end_s == pytest.approx(end_s)


def test_words_of_one_token_are_found_by_what_the_endpoint_counts() -> None:
    costly = {"of", "in"}  # two tokens each; a template of five; a first word costs one more

    def count(text: str) -> int:
        return 6 + sum(2 if word in costly else 1 for word in text.split())

    words = probe(count)
    assert words.template == 7 and not costly & set(words.alphabet)
    assert count(words.text(Arrival(0.0, prompt_tokens=40, output_tokens=1))) == 40
    assert count(words.text(Arrival(0.0, prompt_tokens=1, output_tokens=1))) == 7, "none is shorter"
    with pytest.raises(LoadError, match="one token"):
        probe(lambda text: 5 + 3 * len(text.split()))
    assert REPEATS > 1
