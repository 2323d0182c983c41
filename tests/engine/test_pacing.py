"""What a step costs, as learned from steps; prefill beside decodes inside an ITL budget."""

from __future__ import annotations

import math
import random

import pytest
from diptych.engine.pacing import OUTLIER, StepCost
from diptych.engine.scheduler import Scheduler
from hypothesis import given
from hypothesis import strategies as st

from .pure import carry_out, scheduler, seq, transferred

BASE, ROW, TOKEN = 4e-3, 2e-4, 1e-4


def truth(tokens: int, rows: int, slower: float = 1.0) -> float:
    return slower * (BASE + TOKEN * tokens + ROW * rows)


def learned(steps: int = 400, noise: float = 0.0, slower: float = 1.0) -> StepCost:
    cost, dice = StepCost(), random.Random(1)
    for _ in range(steps):
        rows, tokens = dice.randrange(1, 65), dice.choice([0, 0, 64, 192, 512])
        cost.observe(truth(tokens, rows, slower) * dice.uniform(1 - noise, 1 + noise), tokens, rows)
    return cost


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_it_finds_the_cost_of_rows_and_tokens(noise: float) -> None:
    cost = learned(noise=noise)
    for tokens, rows in ((0, 1), (0, 64), (64, 10), (512, 64)):
        assert cost.predict(tokens, rows) == pytest.approx(
            truth(tokens, rows), rel=0.05 + noise / 2
        )


def test_one_number_of_rows_gives_their_mean() -> None:
    cost = StepCost()
    for _ in range(50):
        cost.observe(0.010, 0, 8)
    assert cost.predict(0, 8) == pytest.approx(0.010)
    assert 0.010 <= cost.predict(0, 64) <= 0.080


def test_prefill_alone_tells_what_a_token_costs() -> None:
    cost = StepCost()
    cost.observe(0.05, 500, 0)
    assert cost.token_s == pytest.approx(1e-4)


def test_a_pause_moves_it_little_and_a_real_change_gets_through() -> None:
    cost = learned()
    before = cost.predict(64, 32)
    for tokens in (0, 64):
        cost.observe(30.0, tokens, 32)
    assert cost.predict(64, 32) < 1.5 * before
    for _ in range(150):
        for tokens in (0, 64):
            cost.observe(truth(tokens, 32, slower=10), tokens, 32)
    assert cost.predict(64, 32) == pytest.approx(10 * before, rel=0.2)


def test_an_outlier_counts_at_most_its_bound() -> None:
    cost = StepCost()
    for _ in range(200):
        cost.observe(0.01, 0, 4)
    cost.observe(1e9, 0, 4)
    weight = 1 / sum(0.97**n for n in range(201))
    assert cost.predict(0, 4) == pytest.approx(0.01 * (1 + weight * (OUTLIER - 1)), rel=1e-6)


def test_more_rows_never_cost_less_and_no_rows_never_less_than_nothing() -> None:
    falling, steep = StepCost(), StepCost()
    for seconds, rows in ((0.02, 1), (0.01, 10)):
        falling.observe(seconds, 0, rows)
    assert falling.predict(0, 64) >= falling.predict(0, 1) > 0
    for seconds, rows in ((0.001, 4), (0.1, 8)):
        steep.observe(seconds, 0, rows)
    assert steep.predict(0, 1) > 0


def test_prefill_that_seems_to_take_no_time_is_free_and_not_a_gain() -> None:
    cost = StepCost()
    cost.observe(0.1, 0, 8)
    cost.observe(0.01, 64, 8)
    assert cost.token_s == 0 and cost.room(0.2, 8, 512) == 512


@given(
    st.lists(st.tuples(st.floats(1e-9, 1e6), st.sampled_from([0, 64, 900]), st.integers(0, 256)))
)
def test_whatever_it_sees_its_answers_are_finite_and_not_negative(steps) -> None:
    cost = StepCost()
    for seconds, tokens, rows in steps:
        cost.observe(seconds, tokens, rows)
        for ask in (0, 1, 300):
            assert math.isfinite(cost.predict(100, ask)) and cost.predict(100, ask) >= 0
            assert 0 <= cost.room(0.05, ask, 512) <= 512


def test_room_is_what_fits_and_not_one_token_more() -> None:
    cost = learned()
    for budget in (0.015, 0.03, 0.05):
        room = cost.room(budget, 16, 10_000)
        assert cost.predict(room, 16) <= budget < cost.predict(room + 1, 16)
    assert cost.room(truth(0, 16) / 2, 16, 512) == 0
    assert cost.room(9.0, 16, 512) == 512


def test_there_is_no_room_as_long_as_a_token_s_cost_is_not_known() -> None:
    assert StepCost().room(1.0, 1, 512) == 0


# ---- the mixed loop ------------------------------------------------------------------------------


def mixed(budget: float | None, prompt: int = 2000, **limits: float) -> Scheduler:
    """One sequence that decodes, one prompt that came beside it, a known cost."""
    s = scheduler(itl_budget_s=budget, prefill_every=4, **limits)
    s.cost = learned()
    transferred(s, seq("a", 100, most=900))
    s.add(seq("b", prompt, seed=1))
    return s


def prefills(s: Scheduler, steps: int) -> list[int]:
    """Prefill tokens of each step; the true cost is observed."""
    made = []
    for _ in range(steps):
        plan = s.plan()
        made.append(sum(count for _, count in plan.prefill))
        carry_out(s, plan)
        s.cost.observe(truth(made[-1], len(plan.decode)), made[-1], len(plan.decode))
    return made


def test_chunks_beside_decodes_fit_into_the_budget() -> None:
    s = mixed(budget=truth(200, 1))
    sizes = prefills(s, 10)
    assert sizes == [192] * 10, "three blocks of 64, not four"
    assert all(truth(size, 1) <= truth(200, 1) for size in sizes)


def test_without_a_budget_or_without_decodes_a_step_takes_all_it_may() -> None:
    assert prefills(mixed(budget=None), 1) == [512]
    s = mixed(budget=1e-6)
    s.remove(("a", 0))
    assert prefills(s, 1) == [512]


def test_the_end_of_a_prompt_need_not_be_a_whole_block() -> None:
    assert prefills(mixed(budget=truth(40, 1), prompt=30), 1) == [30]


def test_a_budget_that_decodes_use_up_still_lets_a_block_through_now_and_then() -> None:
    assert prefills(mixed(budget=truth(0, 1) / 2), 12) == [0, 0, 0, 64] * 3


def test_many_decodes_leave_less_for_prefill() -> None:
    s = mixed(budget=truth(200, 1), growth_tokens=0)
    for index in range(40):
        transferred(s, seq(f"d{index}", 10, most=900, seed=index + 2))
    assert prefills(s, 1) == [64], "41 rows cost 8 ms, as 80 tokens"


def test_it_finds_its_budget_from_nothing() -> None:
    s = mixed(budget=truth(200, 1), prompt=6000)
    s.cost = StepCost()
    assert prefills(s, 30)[-10:] == [192] * 10


def test_drafted_rows_count() -> None:
    s = mixed(budget=truth(150, 1))
    assert [count for _, count in s.plan().prefill] == [128]
    s.running[0].drafts = [0] * 30  # 6 ms, as 60 tokens
    assert [count for _, count in s.plan().prefill] == [64]
