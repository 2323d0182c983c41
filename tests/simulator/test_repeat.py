"""Steps that are carried out at once end when, and as, they would one by one."""

import random

import pytest
from diptych.engine.scheduler import StepPlan
from diptych.simulator.repeat import RepeatedSteps

from tests.support.variants import daily

from .test_worker import decoding, make_worker, prefilling


def steps(count=10, first_s=0.010, growth_s=0.001, begins_at=5.0):
    return RepeatedSteps(StepPlan(), begins_at, first_s, growth_s, count)


def test_each_step_takes_longer_by_the_growth():
    ends = [steps().end_of(number) for number in range(4)]
    assert ends == pytest.approx([5.0, 5.010, 5.021, 5.033])
    assert steps().seconds_of(1, 3) == pytest.approx(0.011 + 0.012)


@pytest.mark.parametrize("growth_s", [0.0, 1e-9, 0.001])
def test_a_step_is_over_when_its_end_has_come(growth_s):
    repeated = steps(growth_s=growth_s)
    for number in range(11):
        end = repeated.end_of(number)
        assert repeated.completed_by(end) == number
        assert repeated.completed_by(end - 1e-6) == max(0, number - 1)
    assert repeated.completed_by(100.0) == 10


def test_an_interruption_ends_with_the_step_under_way():
    middle, border, start = steps(), steps(), steps()
    middle.interrupt(5.015)
    border.interrupt(border.end_of(3))
    start.interrupt(5.0)
    assert (middle.count, border.count, start.count) == (2, 3, 1)


@pytest.mark.parametrize(("limit_s", "late"), [(0.009, 10), (0.0135, 6), (0.0195, 0), (1.0, 0)])
def test_late_steps_are_those_that_take_longer_than_the_limit(limit_s, late):
    repeated = steps()
    assert repeated.longer_than(limit_s, 0, 10) == late
    parts = [repeated.longer_than(limit_s, first, first + 1) for first in range(10)]
    assert sum(parts) == late


@pytest.mark.parametrize("seed", [*range(3), *daily(range(3, 8))])
def test_a_worker_that_skips_repeated_steps_says_the_same_as_one_that_does_not(seed):
    """Streams and prompts come at random times; KV runs short, so some are preempted."""
    outcomes = []
    for skips in (True, False):
        draw = random.Random(seed)
        worker = make_worker(kv_tokens=40_000, budget_s=0.060, chunk_tokens=512)
        worker.skips_repeated_steps = skips
        ended_at = {}
        filled_at = {}
        attempts = []

        def play(until, worker=worker, ended_at=ended_at, filled_at=filled_at):
            while worker.next_event_at <= until:
                at = worker.next_event_at
                ended, filled = worker.settle(at)
                ended_at.update((attempt, at) for attempt in ended)
                filled_at.update((attempt, at) for attempt in filled)

        now = 0.0
        for _ in range(40):
            now += draw.expovariate(4.0)
            play(now)
            worker.catch_up(now)
            prompt, output = draw.randrange(100, 6000), draw.randrange(2, 300)
            kind = decoding if draw.random() < 0.5 and worker.pool.available_blocks > 200 else None
            if kind is None:
                attempts.append(prefilling(worker, prompt, output))
            else:
                attempts.append(decoding(worker, prompt, output))
        play(1e9)
        outcomes.append(
            [
                (
                    filled_at.get(one, 0.0),
                    ended_at[one],
                    one.first_gap_s,
                    one.late_gaps,
                    one.hit_tokens,
                )
                for one in attempts
            ]
        )
    skipping, stepping = outcomes
    for one, other in zip(skipping, stepping, strict=True):
        *times, _, hit_tokens = one
        *other_times, _, other_hit_tokens = other
        assert times == pytest.approx(other_times, rel=1e-2), "a chunk of 16 tokens more or less"
        assert hit_tokens == other_hit_tokens
    # steps that are planned to take just the budget are late or not by a hair
    late_gaps, other_late_gaps = (sum(attempt[3] for attempt in one) for one in outcomes)
    assert late_gaps == pytest.approx(other_late_gaps, rel=0.03, abs=10)
