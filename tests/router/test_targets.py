"""Targets as people write them, what they come to, and whose a request's are."""

from __future__ import annotations

import operator

import pytest
from diptych.protos.frames import PlaceAttempt, RequestOutcome
from diptych.protos.targets import (
    TargetError,
    TargetSum,
    TtftTarget,
    format_time,
    parse_time,
)
from diptych.router import RouterConfig, SloClass, TenantSlo
from diptych.router import events as e
from diptych.router.config import ordered_classes
from diptych.simulator.metrics import Slo
from hypothesis import example, given
from hypothesis import strategies as st

from .test_deadline_policy import COST, Rig

#: Times and multiples with few digits, as people write them.
times_s = st.integers(0, 100_000).map(lambda ms: ms / 1e3)
multiples = st.integers(0, 5000).map(lambda hundredths: hundredths / 100)
sums = st.builds(TargetSum, times_s, times_s, multiples).filter(
    lambda part: part.fixed_s + part.per_1k_s + part.multiple > 0
)
targets = st.lists(sums, min_size=1, max_size=4).map(lambda parts: TtftTarget(tuple(parts)))
prompts = st.integers(1, 200_000)
isolated_times_s = st.floats(0, 600)


@pytest.mark.parametrize(
    ("text", "seconds"),  # of a prompt of 4,000 tokens, which takes 0.5 s alone
    [
        ("2s", 2.0),
        ("1500ms", 1.5),
        ("3x", 1.5),
        ("max(1s,3x)", 1.5),
        ("max(2s, 3x)", 2.0),
        ("500ms + 300ms/1k", 1.7),
        ("max(1s, 500ms + 300ms/1k, 2x)", 1.7),
        ("500ms+1s+.5x", 1.75),
        (" MAX( 1S , 3X ) ", 1.5),
    ],
)
def test_a_target_comes_to_the_largest_of_its_sums(text: str, seconds: float) -> None:
    assert TtftTarget.parse(text).seconds(4000, 0.5) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "nothing is no part"),
        ("2", "2: 2 is no part of a target like 2s, 1500ms, max"),
        ("max()", "nothing is no part"),
        ("max(1s, 3y)", r"max\(1s, 3y\): 3y is no part"),
        ("max(1s, max(2s, 3x))", "no part"),
        ("3x/1k", "3x/1k is no part"),
        ("-1s", "no part"),
        ("1s + ", "nothing is no part"),
        ("0s", "more than 0"),
        ("1e3s", "no part"),
        ("90000s", "at most a day"),
        ("2000x", "at most 1000x"),
        ("max(" + ",".join(["1s"] * 9) + ")", "8 parts at most"),
        ("1s" + " " * 200, "200 characters"),
        # The text itself is short enough, and what it is printed as is not.
        ("max(" + ",".join(["1001ms+101ms/1k+1.25x"] * 8) + ")", "200 characters"),
    ],
)
def test_what_is_no_target_is_one_sentence(text: str, said: str) -> None:
    with pytest.raises(TargetError, match=said) as raised:
        TtftTarget.parse(text)
    assert "\n" not in str(raised.value)


@given(targets)
def test_a_target_is_what_its_text_says(target: TtftTarget) -> None:
    assert TtftTarget.parse(str(target)) == target
    assert str(TtftTarget.parse(str(target))) == str(target)


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Texts of up to eight sums, with numbers of many digits, before the point and behind it."""
    number = st.from_regex(r"([0-9]{0,5}\.)?[0-9]{1,24}", fullmatch=True, alphabet="0123456789.")
    term = st.builds(operator.add, number, st.sampled_from(["ms", "s", "x", "ms/1k", "s/1k"]))
    sum_texts = [
        "+".join(draw(st.lists(term, min_size=1, max_size=4)))
        for _ in range(draw(st.integers(1, 8)))
    ]
    return sum_texts[0] if len(sum_texts) == 1 else f"max({','.join(sum_texts)})"


@given(texts(), prompts, isolated_times_s)
@example("0.00001x", 1, 1.0)
@example("." + "0" * 180 + "1s", 1, 1.0)
@example("999.99999999999ms", 1, 1.0)
@example("max(" + ",".join(["1001ms+101ms/1k+1.25x"] * 7) + ")", 1000, 1.0)
def test_what_is_taken_is_printed_as_a_text_that_says_the_same(
    text: str, prompt_tokens: int, isolated_s: float
) -> None:
    try:
        target = TtftTarget.parse(text)
    except TargetError:
        return
    printed = TtftTarget.parse(str(target))
    assert printed.seconds(prompt_tokens, isolated_s) == pytest.approx(
        target.seconds(prompt_tokens, isolated_s), rel=1e-8, abs=0.0
    )
    again = TtftTarget.parse(str(printed))
    assert again == printed


@given(targets, prompts, isolated_times_s)
def test_no_sum_is_larger_than_the_target_and_one_is_the_target(
    target: TtftTarget, prompt_tokens: int, isolated_s: float
) -> None:
    seconds = target.seconds(prompt_tokens, isolated_s)
    assert all(part.seconds(prompt_tokens, isolated_s) <= seconds for part in target.sums)
    assert target.deciding_sum(prompt_tokens, isolated_s).seconds(prompt_tokens, isolated_s) == (
        seconds
    )
    assert seconds >= target.least_s


@given(targets, prompts, isolated_times_s, prompts, isolated_times_s)
def test_longer_prompts_never_have_shorter_targets(
    target: TtftTarget, tokens: int, isolated_s: float, more_tokens: int, more_s: float
) -> None:
    longer_s = target.seconds(tokens + more_tokens, isolated_s + more_s)
    assert longer_s >= target.seconds(tokens, isolated_s)
    if target.is_flat:
        assert longer_s == target.least_s and not target.needs_isolated


@given(targets, prompts, isolated_times_s, st.sampled_from([0.5, 2.0, 8.0]))
def test_a_scaled_target_comes_to_as_many_times_as_much(
    target: TtftTarget, tokens: int, isolated_s: float, factor: float
) -> None:
    seconds = target.seconds(tokens, isolated_s)
    assert target.scaled(factor).seconds(tokens, isolated_s) == pytest.approx(
        factor * seconds, rel=1e-3
    )


@given(st.integers(1, 86_400_000))
def test_a_time_is_what_its_text_says(milliseconds: int) -> None:
    assert parse_time(format_time(milliseconds / 1e3)) == pytest.approx(milliseconds / 1e3)


# ---- in the router -------------------------------------------------------------------------------

#: COST computes 1,000 prompt tokens a second, so 3x of 2,000 tokens is 6 s.


def test_a_multiple_is_of_the_whole_prompt_alone_in_the_cluster() -> None:
    rig = Rig("prefill/a", "decode/x", ttft="max(1s, 3x)")
    rig.stored("prefill/a", [bytes([1, block]) * 8 for block in range(31)])
    rig.ask("busy", prompt=5000)
    rig.ask("r", prompt=2000, hashes=[bytes([1, block]) * 8 for block in range(31)])
    assert rig.frames["busy"].ttft_target_s == pytest.approx(15.0)
    (decision,) = rig.router.decisions.find("r")
    # Neither what is cached nor what waits makes the target another one.
    assert decision.hit_tokens > 1000
    assert decision.ttft_target_s == pytest.approx(6.0) and decision.isolated_s == 2.0
    assert decision.ttft_target == "max(1s, 3x)"
    rig.ask("short", prompt=100)
    (decision,) = rig.router.decisions.find("short")
    assert decision.ttft_target_s == pytest.approx(1.0)


def test_the_fastest_kind_of_worker_says_how_long_a_prompt_takes_alone() -> None:
    slow = Rig("prefill/a", "decode/x", ttft="3x")
    fast_cost = COST.scaled(0.5, 1.0)
    slow.join("prefill/b", cost=fast_cost, gpu="fast")
    slow.ask("r", prompt=2000)
    assert slow.frames["r"].ttft_target_s == pytest.approx(3.0)
    slow.send(e.WorkerLost("prefill/b"))
    slow.ask("s", prompt=2000)
    assert slow.router.targets and slow.router.fleet.isolated_prefill_s(2000) == 2.0
    # The simulator and the router say the same of the same workers.
    slo = Slo.parse("ttft=3x,itl=50ms", (COST, fast_cost))
    assert slo.ttft_target_s(2000) == pytest.approx(slow.frames["r"].ttft_target_s)


def test_without_any_worker_the_prior_says_it_and_a_slow_worker_changes_nothing() -> None:
    rig = Rig(ttft="3x", prior_tokens_per_s=500.0)
    assert rig.router.fleet.isolated_prefill_s(1000) == pytest.approx(2.0)
    rig.join("prefill/a")
    rig.join("decode/x")
    rig.ask("r", prompt=1000)
    rig.first("r", after=5.0)  # five times slower than its card says
    rig.over("r")
    rig.ask("s", prompt=1000)
    assert rig.frames["s"].ttft_target_s == pytest.approx(3.0)


CONFIGURED = {
    "ttft": "4s",
    "itl_s": 0.1,
    "classes": {"chat": SloClass(), "batch": SloClass(priority=1, ttft="60s", itl_s=1.0)},
    "tenants": {"acme": TenantSlo(ttft="500ms + 1s/1k"), "slow": TenantSlo(itl_s=0.5)},
}


@pytest.mark.parametrize(
    ("asked", "ttft_s", "itl_s"),
    [
        ({"slo_class": "chat"}, 4.0, 0.1),
        ({"slo_class": "unknown"}, 4.0, 0.1),
        ({"slo_class": "chat", "tenant": "acme"}, 1.5, 0.1),
        ({"slo_class": "chat", "tenant": "slow"}, 4.0, 0.5),
        ({"slo_class": "batch", "tenant": "acme"}, 60.0, 1.0),
        ({"slo_class": "batch", "tenant": "acme", "ttft": "max(1s, 3x)"}, 3.0, 1.0),
        ({"slo_class": "batch", "ttft_s": 7.0, "itl_s": 0.2}, 7.0, 0.2),
        # What an earlier attempt's target came to counts, whatever the words say.
        ({"slo_class": "batch", "ttft_s": 7.0, "ttft": "max(1s, 3x)"}, 7.0, 1.0),
        ({"slo_class": "chat", "ttft": "a later version's"}, 4.0, 0.1),
    ],
)
def test_a_request_goes_before_its_class_its_class_before_its_tenant(
    asked: dict, ttft_s: float, itl_s: float
) -> None:
    rig = Rig("prefill/a", "decode/x", **CONFIGURED)
    rig.ask("r", prompt=1000, **asked)
    placed = rig.frames["r"]
    assert (placed.ttft_target_s, placed.itl_target_s) == (
        pytest.approx(ttft_s),
        pytest.approx(itl_s),
    )


BY_PRIORITY = {
    "early": SloClass(early_reject=True, ttft="1s"),
    "bulk": SloClass(priority=2, ttft="60s"),
    "silver": SloClass(priority=1, ttft="5s"),
    "gold": SloClass(priority=1, ttft="4s"),
}


@pytest.mark.parametrize(
    ("classes", "ttft_s"),
    [(BY_PRIORITY, 4.0), (BY_PRIORITY | {"interactive": SloClass(priority=3, ttft="1s")}, 1.0)],
)
def test_the_order_in_which_classes_are_listed_does_not_count(
    classes: dict[str, SloClass], ttft_s: float
) -> None:
    """What carries a configuration to Kubernetes sorts its keys."""
    for names in (list(classes), sorted(classes), sorted(classes, reverse=True)):
        rig = Rig("prefill/a", "decode/x", classes={name: classes[name] for name in names})
        rig.ask("r", prompt=1000, slo_class="unknown")
        assert rig.frames["r"].ttft_target_s == ttft_s
        targets = rig.router.targets
        default_class = targets.known_class("unknown")
        assert [targets.known_class(name) for name in ("bulk", "unknown")] == [
            "bulk",
            default_class,
        ]
        assert ordered_classes(classes)[0] == default_class
        assert ordered_classes(classes, "bulk")[0] == "bulk"
        rig = Rig("prefill/a", "decode/x", classes=classes, default_class="silver")
        assert rig.router.targets.known_class("unknown") == "silver"


def test_goodput_is_judged_by_the_same_targets() -> None:
    rig = Rig("prefill/a", "decode/x", **CONFIGURED)

    def met(**outcome: object) -> str:
        before = dict(rig.router.goodput.total)
        values = {"tenant": "", "slo_class": "chat", "reason": "stop", "waited_s": 3.0} | outcome
        rig.send(e.RequestEnded(RequestOutcome(**values)))
        (group,) = (
            group
            for group, count in rig.router.goodput.total.items()
            if count > before.get(group, 0)
        )
        return group.met

    assert met() == "both"
    assert met(waited_s=5.0) == "itl"
    assert met(waited_s=5.0, ttft_target_s=6.0) == "both"  # as the gateway was told
    assert met(tenant="acme", prompt_tokens=1000) == "itl"  # 1.5 s
    assert met(tenant="acme", prompt_tokens=3000) == "both"  # 3.5 s
    assert met(slo_class="batch", waited_s=50.0) == "both"


def test_a_tighter_target_is_served_first() -> None:
    rig = Rig("prefill/a", "decode/x")
    rig.ask("running", ttft="1100ms")
    rig.ask("patient", ttft="9x")  # 9 s
    rig.ask("urgent", ttft="max(1s, 2500ms/1k)", prompt=2000)  # 5 s, of which it takes 2
    assert list(rig.first("running", after=1.0)) == ["urgent"]


def test_a_target_in_the_configuration_that_is_none_is_refused() -> None:
    with pytest.raises(TargetError):
        Rig("prefill/a", ttft="soon")
    assert RouterConfig(ttft_s=3.0).ttft_target == TtftTarget.flat(3.0)
    assert PlaceAttempt(("r", 0), 1, 1, []).ttft == ""
