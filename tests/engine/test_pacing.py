"""What a step costs, as learned from steps; prefill beside decodes inside an ITL budget."""

from __future__ import annotations

import math
import random

import pytest
from diptych.engine.pacing import OUTLIER_RATIO, StepCost, StepWork, attended_pairs
from diptych.engine.scheduler import Scheduler, StepPlan
from hypothesis import given
from hypothesis import strategies as st

from .pure import carry_out, scheduler, seq, transferred

BASE, ROW, KEY = 4e-3, 2e-4, 2e-7
TOKEN, PAIR = 1e-4, 1e-8


def truth(work: StepWork, slower: float = 1.0) -> float:
    decode = (
        BASE + ROW * work.decode_rows + KEY * work.decode_kv_tokens if work.decode_rows else 0.0
    )
    return slower * (decode + TOKEN * work.prefill_tokens + PAIR * work.attended_pairs)


def step(rows: int = 0, context: int = 0, tokens: int = 0, start: int = 0) -> StepWork:
    """`rows` sequences of `context` tokens decode, `tokens` are prefilled from `start` on."""
    return StepWork(rows, rows * context, tokens, attended_pairs(tokens, start))


def some_step(dice: random.Random) -> StepWork:
    tokens = dice.choice([0, 0, 64, 192, 512])
    return step(
        dice.randrange(1, 65), dice.randrange(16, 4096), tokens, dice.randrange(0, 8192, 64)
    )


def predicted(cost: StepCost, work: StepWork) -> float:
    start = (work.attended_pairs - attended_pairs(work.prefill_tokens, 0)) // max(
        work.prefill_tokens, 1
    )
    return cost.decode_s(work.decode_rows, work.decode_kv_tokens) + cost.prefill_s(
        work.prefill_tokens, start
    )


def learned(steps: int = 400, noise: float = 0.0, slower: float = 1.0) -> StepCost:
    cost, dice = StepCost(), random.Random(1)
    for _ in range(steps):
        work = some_step(dice)
        cost.observe(truth(work, slower) * dice.uniform(1 - noise, 1 + noise), work)
    return cost


ASKED = [step(1, 16), step(64, 16), step(64, 4000), step(10, 500, 64), step(64, 1000, 512, 8000)]


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_it_finds_the_cost_of_rows_and_tokens_and_of_what_they_see(noise: float) -> None:
    cost = learned(noise=noise)
    for work in ASKED:
        assert predicted(cost, work) == pytest.approx(truth(work), rel=0.05 + noise / 2), work


def test_long_contexts_cost_more_even_if_the_rows_are_always_as_many() -> None:
    cost, dice = StepCost(), random.Random(2)
    for _ in range(200):
        work = step(8, dice.choice([128, 4096]))
        cost.observe(truth(work), work)
    for context in (128, 4096):
        assert cost.decode_s(8, 8 * context) == pytest.approx(truth(step(8, context)), rel=0.01)


def test_a_late_chunk_of_a_prompt_costs_more_than_an_early_one() -> None:
    cost = StepCost()
    for start in range(0, 8192, 512):
        cost.observe(truth(step(tokens=512, start=start)), step(tokens=512, start=start))
    for start in (0, 4096, 16384):
        real = truth(step(tokens=512, start=start))
        assert cost.prefill_s(512, start) == pytest.approx(real, rel=0.03)
    assert cost.prefill_room(0.05, 16384, 512) < cost.prefill_room(0.05, 0, 512)


def test_one_kind_of_step_gives_their_mean() -> None:
    cost = StepCost()
    for _ in range(50):
        cost.observe(0.010, step(8, 100))
    assert cost.decode_s(8, 800) == pytest.approx(0.010, rel=1e-4)
    assert 0.010 <= cost.decode_s(64, 800) <= 0.080
    assert 0.010 <= cost.decode_s(64, 6400) <= 0.080


def test_prefill_alone_tells_what_prefill_costs() -> None:
    cost = StepCost()
    for _ in range(5):
        cost.observe(0.05, step(tokens=500))
    assert cost.prefill_s(500, 0) == pytest.approx(0.05, rel=1e-2)
    assert cost.decode_s(0, 0) == 0


def test_a_pause_moves_it_little_and_a_real_change_gets_through() -> None:
    cost = learned()
    work = step(32, 1000, 64)
    before = predicted(cost, work)
    for one in (step(32, 1000), work):
        cost.observe(30.0, one)
    assert predicted(cost, work) < 1.5 * before
    for _ in range(150):
        for one in (step(32, 1000), work):
            cost.observe(truth(one, slower=10), one)
    assert predicted(cost, work) == pytest.approx(10 * before, rel=0.2)


def test_an_outlier_counts_at_most_its_bound() -> None:
    cost = StepCost()
    for _ in range(200):
        cost.observe(0.01, step(4, 10))
    cost.observe(1e9, step(4, 10))
    weight = 1 / sum(0.97**n for n in range(201))
    assert cost.decode_s(4, 40) == pytest.approx(
        0.01 * (1 + weight * (OUTLIER_RATIO - 1)), rel=1e-3
    )


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_most_steps_with_prefill_stay_below_its_upper_bound(noise: float) -> None:
    cost, dice, above = learned(), random.Random(3), 0
    for index in range(2000):
        work = step(16, 500, dice.choice([128, 256]), 1024)
        took = truth(work) * dice.uniform(1 - noise, 1 + noise)
        above += index >= 500 and took > predicted(cost, work) * cost.tail_ratio * (1 + 1e-6)
        cost.observe(took, work)
    assert above / 1500 <= 0.1
    assert 1.0 <= cost.tail_ratio <= 1.001 + 1.2 * noise


def test_short_steps_and_those_that_only_decode_tell_nothing_of_that_bound() -> None:
    cost, dice = learned(), random.Random(4)
    before = cost.tail_ratio
    for _ in range(40):
        cost.observe(truth(step(16, 500, 1024)), step(16, 500, 1024))
        cost.observe(2 * truth(step(16, 500)), step(16, 500))
        cost.observe(truth(step(1, 16, 64)) * dice.choice([1, 2]), step(1, 16, 64))
    assert before <= 1.01 and cost.tail_ratio <= 1.2


def test_prompts_of_which_each_has_a_price_are_told_from_their_tokens() -> None:
    cost, dice = learned(), random.Random(5)
    for _ in range(200):
        prompts, tokens = dice.randrange(1, 5), 64 * dice.randrange(4, 9)
        work = StepWork(4, 400, tokens, 0, prompts)
        cost.observe(truth(StepWork(4, 400, tokens)) + 5e-3 * prompts, work)
    assert cost.prefill_s(128, 0) == pytest.approx(128 * TOKEN + 5e-3, rel=0.05)
    assert cost.prefill_room(4e-3, 0, 512) == 0, "not even the price of a prompt is left"


def test_more_rows_never_cost_less_and_no_rows_never_less_than_nothing() -> None:
    falling, steep = StepCost(), StepCost()
    for seconds, rows in ((0.02, 1), (0.01, 10)):
        falling.observe(seconds, step(rows, 10))
    assert falling.decode_s(64, 640) >= falling.decode_s(1, 10) > 0
    for seconds, rows in ((0.001, 4), (0.1, 8)):
        steep.observe(seconds, step(rows, 10))
    assert steep.decode_s(1, 10) > 0


def test_prefill_that_seems_to_take_no_time_is_free_and_not_a_gain() -> None:
    cost = StepCost()
    cost.observe(0.1, step(8, 10))
    cost.observe(0.01, step(8, 10, 64))
    assert cost.prefill_s(512, 0) == 0 and cost.prefill_room(0.1, 0, 512) == 512


@given(
    st.lists(
        st.tuples(
            st.floats(1e-9, 1e6),
            st.builds(
                step,
                st.integers(0, 256),
                st.integers(1, 1 << 17),
                st.sampled_from([0, 64, 900]),
                st.integers(0, 1 << 17),
            ),
        )
    )
)
def test_whatever_it_sees_its_answers_are_finite_and_not_negative(steps) -> None:
    cost = StepCost()
    for seconds, work in steps:
        cost.observe(seconds, work)
        for ask in (*ASKED, StepWork()):
            assert math.isfinite(predicted(cost, ask)) and predicted(cost, ask) >= 0
            assert 0 <= cost.prefill_room(0.05, 100, 512) <= 512


def test_room_is_what_fits_and_not_one_token_more() -> None:
    cost = learned()
    for seconds in (0.005, 0.03, 0.5):
        for start in (0, 1000, 30_000):
            room = cost.prefill_room(seconds, start, 100_000)
            assert cost.prefill_s(room, start) <= seconds * (1 + 1e-9)
            assert seconds < cost.prefill_s(room + 1, start)
    assert cost.prefill_room(0.0, 0, 512) == cost.prefill_room(-1.0, 0, 512) == 0
    assert cost.prefill_room(9.0, 0, 512) == 512


def test_there_is_no_room_as_long_as_the_cost_is_not_known_unless_there_is_no_limit() -> None:
    assert StepCost().prefill_room(1.0, 0, 512) == 0
    assert StepCost().prefill_room(math.inf, 0, 512) == 512


# ---- the mixed loop ------------------------------------------------------------------------------


def mixed(
    seconds: float | None, prompt: int = 2000, blocks: int = 100, **limits: float
) -> Scheduler:
    """One sequence that decodes, one prompt that came beside it, a known cost."""
    s = scheduler(blocks, itl_budget_s=seconds, prefill_every=4, **limits)
    s.cost = learned()
    transferred(s, seq("a", 100, most=900))
    s.add(seq("b", prompt, seed=1))
    return s


def work_of(plan: StepPlan) -> StepWork:
    return StepWork(
        len(plan.decode),
        sum(one.computed_tokens + 1 for one in plan.decode),
        sum(count for _, count in plan.prefill),
        sum(attended_pairs(count, one.computed_tokens) for one, count in plan.prefill),
        len(plan.prefill),
    )


def prefills(s: Scheduler, steps: int) -> list[int]:
    """Prefill tokens of each step; the true cost is observed."""
    made = []
    for _ in range(steps):
        plan = s.plan()
        work = work_of(plan)
        made.append(work.prefill_tokens)
        carry_out(s, plan)
        s.cost.observe(truth(work), work)
    return made


def budget(tokens: int, start: int = 0) -> float:
    """A time in which one row of 100 tokens and so many prefill tokens fit, and hardly more."""
    return truth(step(1, 101, tokens, start))


def test_chunks_beside_decodes_fit_into_the_budget() -> None:
    s = mixed(budget(200, start=640))
    sizes = prefills(s, 5)
    assert sizes == [208, 208, 192, 192, 192], "multiples of 16, fewer as the context grows"


def test_chunks_leave_room_for_what_steps_take_longer_now_and_then() -> None:
    s, dice, over = mixed(budget(200), prompt=500), random.Random(6), 0
    for index in range(200):
        if not s.prefilling:
            s.add(seq(f"p{index}", 500, most=1, seed=index + 2))
        plan = s.plan()
        work = work_of(plan)
        carry_out(s, plan)
        took = truth(work) * dice.uniform(0.8, 1.2)
        over += index >= 50 and took > budget(200)
        s.cost.observe(took, work)
    assert over <= 8, "of 150; planned by the mean, 35 are"


def test_after_a_few_slow_steps_prefill_goes_on_by_blocks_at_least() -> None:
    s, made = scheduler(200, itl_budget_s=0.180), 0
    for name in ("a", "b"):
        transferred(s, seq(name, 64, most=3000, seed=ord(name)))
    for index in range(250):
        if not s.prefilling and not s.waiting:
            s.add(seq(f"p{index}", 500, most=1, seed=index + 5))
        plan = s.plan()
        work = work_of(plan)
        carry_out(s, plan)
        slow = 100 <= index < 104
        made += work.prefill_tokens if index >= 104 else 0
        s.cost.observe((0.070 + TOKEN * work.prefill_tokens) * (3 if slow else 1), work)
    assert made > 146 * 64, "of 500 each without them; 8 where only the upper bound counts"


@pytest.mark.parametrize(("waited", "size"), [(0.0, 192), (0.006, 128), (0.02, 0), (1.0, 192)])
def test_a_step_that_somebody_joins_leaves_them_what_they_waited(waited: float, size: int) -> None:
    s = mixed(budget(200))
    transferred(s, seq("c", 100, most=900, seed=2), waited=waited)
    assert prefills(s, 2) == [size, 192], "only the first; and not where their budget is over"


@pytest.mark.parametrize("waited", [-1.0, math.nan])
def test_nobody_waits_less_than_nothing(waited: float) -> None:
    s = scheduler(itl_budget_s=budget(200))
    s.cost = learned()
    transferred(s, seq("a", 100, most=900), waited=waited)
    s.add(seq("b", 2000, seed=1))
    assert prefills(s, 1) == [192]


def test_chunks_become_smaller_as_their_context_grows() -> None:
    s = mixed(budget(200), prompt=64 * 256, blocks=400)
    sizes = prefills(s, 150)
    assert sizes[:2] == [192, 192] and sizes == sorted(sizes, reverse=True)[: len(sizes)]
    assert 64 in sizes, "16,000 keys a token make it cost 2.6 times as much"


def test_long_contexts_of_decodes_leave_less_for_prefill() -> None:
    first = []
    for length in (100, 20_000):
        s = scheduler(600, itl_budget_s=budget(200))
        s.cost = learned()
        transferred(s, seq("a", length, most=900))
        s.add(seq("b", 2000, seed=1))
        first.append(prefills(s, 1)[0])
    assert first == [192, 160], "20,000 keys cost 4 ms, as 40 tokens"


def test_without_a_budget_or_without_decodes_a_step_takes_all_it_may() -> None:
    assert prefills(mixed(None), 1) == [512]
    s = mixed(1e-6)
    s.remove(("a", 0))
    assert prefills(s, 1) == [512]


def test_the_end_of_a_prompt_need_not_be_a_whole_block() -> None:
    assert prefills(mixed(budget(40), prompt=30), 1) == [30]


def test_a_budget_that_decodes_use_up_still_lets_a_block_through_now_and_then() -> None:
    assert prefills(mixed(budget(0) / 2), 12) == [0, 0, 0, 64] * 3


def test_many_decodes_leave_less_for_prefill() -> None:
    s = mixed(budget(200), growth_tokens=0)
    for index in range(40):
        transferred(s, seq(f"d{index}", 10, most=900, seed=index + 2))
    assert prefills(s, 1) == [112], "41 rows cost 8 ms, as 80 tokens"


def test_it_finds_its_budget_from_nothing() -> None:
    s = mixed(budget(200, 2000), prompt=8000, blocks=200)
    s.cost = StepCost()
    early = sum(prefills(s, 15))
    for _ in range(15):
        start = s.prefilling[0].computed_tokens
        (size,) = prefills(s, 1)
        row = s.running[0].computed_tokens
        fits, not_fits = (
            truth(StepWork(1, row, n, attended_pairs(n, start))) for n in (size, size + 64)
        )
        assert fits <= budget(200, 2000) * 1.02 and not_fits > budget(200, 2000) * 0.98
    assert early < s.prefilling[0].computed_tokens < 8000


def test_a_block_is_prefilled_at_once_where_nobody_knows_yet_what_prefill_costs() -> None:
    s = mixed(budget(200))
    s.cost = StepCost()
    assert prefills(s, 1) == [64]


def test_drafted_rows_count() -> None:
    s = mixed(budget(150))
    assert [count for _, count in s.plan().prefill] == [144]
    s.running[0].drafts = [0] * 30  # 6 ms, as 60 tokens
    assert [count for _, count in s.plan().prefill] == [80]
