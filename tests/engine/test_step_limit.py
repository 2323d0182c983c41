"""How long a step with decodes may take: targets that can be met are kept, others starve nobody."""

from __future__ import annotations

import pytest
from diptych.engine.pacing import StepWork, attended_pairs
from diptych.engine.scheduler import BACKGROUND_DELAY_S, Scheduler
from diptych.engine.sequence import Sequence
from diptych.engine.step_counters import StepCounters
from diptych.engine.step_limit import Protection, protection_of

from .pure import carry_out, scheduler, seq, transferred
from .test_pacing import budget, learned, truth, work_of


def play(s: Scheduler, steps: int, now: float = 0.0) -> list[int]:
    """Carries out steps that take as long as the truth says; returns their prefill tokens."""
    prefilled = []
    for _ in range(steps):
        plan = s.plan(now)
        work = work_of(plan)
        prefilled.append(work.prefill_tokens)
        carry_out(s, plan)
        s.observe_step(truth(work), work)
    return prefilled


def prompt_beside_a_stream(
    itl_budget_s: float, deadline_s: float = 0.0
) -> tuple[Scheduler, Sequence]:
    s = scheduler(200, itl_budget_s=itl_budget_s)
    s.cost = learned()
    stream = seq("stream", 100, most=900)
    transferred(s, stream)
    play(s, 3)
    prompt = seq("prompt", 4000, seed=1)
    prompt.deadline_s = deadline_s
    s.add(prompt)
    return s, stream


def protection(s: Scheduler, sequence: Sequence) -> Protection:
    itl_budget_s = s.limits.itl_budget_s
    assert itl_budget_s is not None
    decode_s = s.cost.decode_s(1, sequence.computed_tokens)
    return protection_of(sequence, s.clock, itl_budget_s, decode_s)


def test_a_target_that_decode_alone_misses_starves_no_prompt() -> None:
    s, stream = prompt_beside_a_stream(budget(0) / 2)
    assert play(s, 4)[-1] == 512, "as much as a step may have, once the target is seen to be lost"
    assert protection(s, stream) is Protection.NONE


def test_a_target_that_can_be_met_is_kept_however_urgent_a_prompt_is() -> None:
    s, stream = prompt_beside_a_stream(budget(100), deadline_s=0.001)
    assert max(play(s, 20)) <= 112
    assert protection(s, stream) is Protection.GAPS and s.clock.late_steps == 0


def test_after_late_gaps_what_the_mean_has_saved_is_spent_for_a_first_token_at_risk() -> None:
    sizes = {}
    for deadline_s in (0.05, 1000.0):
        s, stream = prompt_beside_a_stream(budget(100), deadline_s)
        s.remove(("prompt", 0))
        play(s, 50)  # each of these steps saves the time of about 100 tokens
        s.clock.advance(0.0, late_steps=2)
        assert protection(s, stream) is Protection.MEAN
        prompt = seq("another", 4000, seed=2)
        prompt.deadline_s = deadline_s
        s.add(prompt)
        sizes[deadline_s] = play(s, 1)[0]
    assert sizes == {0.05: 512, 1000.0: 96}


def test_a_mean_that_can_come_down_again_is_still_a_target() -> None:
    s, stream = prompt_beside_a_stream(budget(100))
    s.clock.advance(0.02, late_steps=2)
    assert protection(s, stream) is Protection.MEAN
    s.clock.advance(10.0, late_steps=0)
    assert protection(s, stream) is Protection.NONE


def test_an_answer_whose_first_token_was_late_limits_no_step() -> None:
    s, stream = prompt_beside_a_stream(budget(100))
    stream.background = True
    assert play(s, 1) == [512]
    on_time = seq("on time", 100, most=900, seed=3)
    transferred(s, on_time)
    assert play(s, 1)[0] <= 112, "one that can be in time beside it limits them again"


def test_a_late_prompt_goes_behind_those_that_can_be_in_time_but_not_for_ever() -> None:
    s = scheduler(200, max_step_tokens=64)
    late, urgent, later = (seq(name, 640, most=1, seed=i) for i, name in enumerate("abc"))
    late.deadline_s = 5.0
    urgent.deadline_s = 9.0
    later.deadline_s = 6.0 + BACKGROUND_DELAY_S + 1.0
    s.add(late)
    assert [one for one, _ in s.plan(4.0).prefill] == [late]
    s.add(urgent)
    s.add(later)
    assert [one for one, _ in s.plan(6.0).prefill] == [urgent]
    assert late.background and not urgent.background
    s.remove(urgent.attempt_key)
    assert [one for one, _ in s.plan(6.0).prefill] == [late], "and before who comes much later"


def test_background_chunks_leave_room_for_the_first_gap_of_those_whose_kv_arrives() -> None:
    sizes = {}
    for arriving in ("nobody", "on time", "late"):
        s, _ = prompt_beside_a_stream(budget(200))
        prompt = s.waiting[0]
        prompt.background = True
        if arriving != "nobody":
            newcomer = seq(arriving, 100, most=900, seed=5)
            newcomer.background = arriving == "late"
            assert s.reserve(newcomer)
        sizes[arriving] = play(s, 1)[0]
    decode_s = s.cost.decode_s(1, 103)
    left_out = s.cost.prefill_room(decode_s, 0, 512)
    assert sizes["late"] == sizes["nobody"] and sizes["nobody"] - sizes["on time"] >= left_out - 16


def test_a_step_with_help_teaches_no_cost_and_counts_as_one_without() -> None:
    s = scheduler(200)
    s.cost = learned()
    work = StepWork(0, 0, 512, attended_pairs(512, 0), 1)
    alone_s = s.cost.step_s(work)
    for _ in range(30):
        assert s.observe_step(alone_s / 2, work, helped=True) == alone_s
    assert s.cost.step_s(work) == alone_s
    assert s.clock.elapsed_s == pytest.approx(30 * alone_s / 2), "gaps are as long as they were"
    for _ in range(30):
        s.observe_step(2 * alone_s, work, helped=True)
    assert s.cost.step_s(work) > 1.5 * alone_s, "help that made it slow"


def test_the_router_is_told_of_seconds_without_help_and_operators_of_those_that_passed() -> None:
    counters = StepCounters()
    counters.count_step(0.1, prefill_tokens=512, step_tokens=512, alone_s=0.19)
    counters.count_step(0.01, prefill_tokens=0, step_tokens=1, alone_s=0.015)
    counters.count_step(0.3, prefill_tokens=512, step_tokens=512)
    assert counters.prefill_s == pytest.approx(0.49)
    assert counters.decode_s == pytest.approx(0.015)
    values = counters.values()
    assert values["steps"] == 3
    assert values["helped_steps"] == 2
    assert values["step_s"]["prefill"]["sum"] == pytest.approx(0.4)
