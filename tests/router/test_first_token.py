"""When a first token goes out: with the second in reach, and never behind its own target."""

from __future__ import annotations

import random
from math import inf

import pytest
from diptych.router.first_token import (
    GAP_SHARE,
    JOINS_MINIMUM,
    TARGET_MARGIN_S,
    UNKNOWN_JOIN_ITLS,
    FirstTokenHold,
    FirstTokenPacer,
    JoinEstimate,
    ReleaseReason,
)
from hypothesis import given
from hypothesis import strategies as st

ITL_S = 0.020


def hold(pacer: FirstTokenPacer, deadline: float = 100.0, tokens: int = 1000) -> FirstTokenHold:
    """The hold of a first token that came at 50."""
    return pacer.hold(50.0, deadline=deadline, itl_s=ITL_S, prompt_tokens=tokens, handed_over=True)


def experienced(join_s: float, count: int = 64) -> FirstTokenPacer:
    """A pacer that has observed one join time again and again."""
    pacer = FirstTokenPacer()
    for _ in range(count):
        hold(pacer).second_token(50.0 + join_s)
    return pacer


def test_a_token_whose_second_one_is_expected_in_time_goes_out_at_once() -> None:
    held = hold(experienced(0.015))
    assert (held.release_at, held.reason) == (50.0, ReleaseReason.IN_TIME)


def test_a_token_waits_until_the_second_one_can_follow_in_time() -> None:
    held = hold(experienced(0.050))
    assert held.release_at == pytest.approx(50.0 + 0.050 - GAP_SHARE * ITL_S)
    assert held.second_token(50.050) == held.release_at, "it had gone out by then"
    assert held.reason is ReleaseReason.SECOND_EXPECTED


def test_a_second_token_that_comes_earlier_takes_the_first_one_with_it() -> None:
    held = hold(experienced(0.050))
    assert held.second_token(50.010) == held.release_at == 50.010
    assert held.reason is ReleaseReason.SECOND_CAME


def test_no_token_waits_beyond_its_own_target() -> None:
    pacer = experienced(0.050)
    held = hold(pacer, deadline=50.020)
    assert held.release_at == pytest.approx(50.020 - TARGET_MARGIN_S)
    assert held.reason is ReleaseReason.TTFT_TARGET
    overdue = hold(pacer, deadline=49.0)
    assert (overdue.release_at, overdue.reason) == (50.0, ReleaseReason.TTFT_TARGET)


def test_while_nobody_knows_the_join_time_a_token_waits_for_the_second_within_a_limit() -> None:
    pacer = FirstTokenPacer()
    for _ in range(JOINS_MINIMUM - 1):
        hold(pacer).second_token(50.001)
    assert hold(pacer).release_at == pytest.approx(50.0 + UNKNOWN_JOIN_ITLS * ITL_S)
    hold(pacer).second_token(50.001)
    assert hold(pacer).release_at == 50.0


def test_answers_that_are_handed_over_say_nothing_of_those_that_are_not() -> None:
    pacer = experienced(0.050)
    assert pacer.estimate(handed_over=True).upper_s(1000) == pytest.approx(0.050)
    assert pacer.estimate(handed_over=False).upper_s(1000) == inf


def test_the_estimate_grows_with_the_prompt_as_the_joins_do() -> None:
    estimate, turn = JoinEstimate(), random.Random(1)
    for _ in range(500):
        tokens = turn.randrange(1, 100_000)
        estimate.observe(tokens, 0.020 + 0.3e-6 * tokens)
    assert estimate.expected_s(1_000) == pytest.approx(0.0203, rel=0.01)
    assert estimate.expected_s(80_000) == pytest.approx(0.044, rel=0.01)


def test_all_but_one_join_in_fifty_keep_the_upper_estimate() -> None:
    """A join is the rest of a step and a whole one: anything from 20 to 40 ms."""
    estimate, turn = JoinEstimate(), random.Random(2)
    beyond = 0
    for number in range(4000):
        join_s = turn.uniform(0.020, 0.040)
        beyond += number >= 1000 and join_s > estimate.upper_s(5000)
        estimate.observe(5000, join_s)
    assert 0.01 < beyond / 3000 < 0.03
    assert estimate.upper_s(5000) < 0.041, "and it is no more careful than it must be"


def test_one_join_of_a_minute_moves_the_estimate_little_and_a_real_change_gets_through() -> None:
    estimate = JoinEstimate()
    for _ in range(256):
        estimate.observe(5000, 0.030)
    estimate.observe(5000, 60.0)
    assert estimate.expected_s(5000) < 0.031
    for _ in range(1000):
        estimate.observe(5000, 0.200)
    assert estimate.expected_s(5000) == pytest.approx(0.200, rel=0.05)


@given(
    st.lists(st.tuples(st.integers(0, 200_000), st.floats(0.0, 100.0)), max_size=60),
    st.integers(0, 200_000),
    st.floats(0.0, 10.0),
)
def test_whatever_was_observed_the_wait_ends_by_the_target(
    joins: list[tuple[int, float]], tokens: int, slack_s: float
) -> None:
    pacer = FirstTokenPacer()
    for joined_tokens, join_s in joins:
        pacer.estimate(handed_over=True).observe(joined_tokens, join_s)
    held = hold(pacer, 50.0 + slack_s, tokens)
    assert 50.0 <= held.release_at <= max(50.0, 50.0 + slack_s - TARGET_MARGIN_S)
