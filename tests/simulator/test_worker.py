"""One replica between events: arithmetic by hand."""

from math import inf

import pytest
from diptych.simulator.trace import Request, Run
from diptych.simulator.worker import Job, Worker

from .support import COST

STEP = 0.010


def request(prompt=1000, output=11, blocks=()):
    runs = [Run(block, 1, (b"%d" % block,)) for block in blocks]
    return Request(0.0, prompt, output, "", list(blocks), len(blocks), runs, [], [])


def worker(kv_tokens=100_000, budget_s=0.045):
    one = Worker("decode/0", "decode", COST, kv_tokens, 64, budget_s)
    one.itl_s = 0.05
    return one


def decoding(one, prompt=1000, output=11):
    """A job whose KV has just arrived; its first token came at the same time."""
    job = Job(request(prompt, output), ("r", 0), 0.0)
    job.first = one.at if one.at else 1e-12
    one.join(job)
    return job


def run(one, until=inf):
    """Plays the worker alone; returns (time, ended, filled) of each event."""
    seen = []
    while (due := one.due()) <= until and due < inf:
        one.advance(due)
        seen.append((due, *one.settle()))
    return seen


def test_a_lone_stream_takes_base_and_its_own_growing_context_a_step():
    one = worker()
    decoding(one, prompt=1000, output=11)
    ((end, ended, _),) = [event for event in run(one) if event[1]]
    # 10 steps of 10 ms, reading 1000, 1001, ... tokens at 1 us: 0.1 + 10 * 1000 us + 50 us (fluid)
    assert end == pytest.approx(0.1 + 0.010 + 50e-6, rel=1e-4)
    assert len(ended) == 1 and one.rows == 0 and one.tokens == 0


def test_a_second_stream_slows_the_first_down_and_joins_at_a_step_border():
    one = worker()
    first = decoding(one, prompt=1000, output=101)
    one.advance(0.0165)  # one and a half steps of 11 ms
    second = decoding(one, prompt=9000, output=2)
    # the rest of the step under way, then one of 10 ms that reads 1,000 + 9,000 tokens
    assert second.joined == 2.0
    assert second.first_gap == pytest.approx(0.5 * 0.011 + 0.020, rel=0.01)
    assert first.joined == 0.0


def test_prefill_beside_decode_gets_what_a_step_has_left_of_the_budget():
    one = worker(budget_s=0.091)
    decoding(one, prompt=1000, output=1001)
    job = Job(request(400, 2), ("p", 0), 0.0)  # 400 ms of prefill
    one.submit(job, 0.0)
    end = next(time for time, _, filled in run(one, 5.0) if job in filled)
    # a block of 64 fits into what 11 of 91 ms leave, two do not; 6 of them, and 16 tokens
    assert end == pytest.approx(6 * 0.075 + 0.027, rel=0.01)


def test_a_prompt_alone_has_all_of_the_time():
    one = worker()
    job = Job(request(500, 2), ("p", 0), 0.0)
    one.submit(job, 0.25)
    assert one.due() == 0.25
    end = next(time for time, _, filled in run(one) if job in filled)
    assert end == pytest.approx(0.25 + 0.5)


def test_a_starved_prefill_still_goes_on():
    one = worker(budget_s=0.001)  # decode alone is over it
    decoding(one, prompt=1000, output=100_000)
    job = Job(request(640, 2), ("p", 0), 0.0)
    one.submit(job, 0.0)
    assert any(job in filled for _, _, filled in run(one, 50.0))


def test_the_steps_that_compute_a_starved_prompts_blocks_are_late_and_the_others_are_not():
    one = worker(budget_s=0.001)
    stream = decoding(one, prompt=1000, output=201)  # 11 ms a step
    prompt = Job(request(640, 2), ("p", 0), 0.0)
    one.submit(prompt, 0.0)
    done = next(time for time, _, filled in run(one) if prompt in filled)
    # ten blocks, one in eight steps: each such step takes 11 + 64 ms, the others 11
    assert done == pytest.approx(80 * 0.011 + 0.640, rel=0.05)
    run(one)
    assert stream.late == 10


def test_a_starved_prompt_makes_no_more_steps_late_where_their_mean_exceeds_the_target():
    one = worker(budget_s=0.001)
    one.itl_s = 0.015  # 11 ms a step, 75 with a block: 19 in the mean
    stream = decoding(one, prompt=1000, output=201)
    one.submit(Job(request(640, 2), ("p", 0), 0.0), 0.0)
    run(one)
    assert stream.late == 10


def test_steps_over_the_target_are_late_for_everyone_who_runs():
    one = worker()
    decoding(one, prompt=1000, output=11)
    long = decoding(one, prompt=60_000, output=11)  # 10 + 61 ms a step
    run(one)
    assert long.late >= 10


def test_a_gap_between_first_and_second_token_is_a_gap():
    one = worker()
    one.advance(1.0)
    job = Job(request(1000, 30), ("r", 0), 0.0)
    job.first = 0.9  # its KV took 100 ms to arrive
    one.join(job)
    assert job.first_gap == pytest.approx(0.1 + 0.011) and job.late == 1


@pytest.mark.parametrize(
    ("steps", "waited", "gap", "yields"),
    [
        (2.0, 0.0, 0.147, False),  # at a border: its step reads 9,000 tokens, computes two blocks
        (2.8, 0.0, 0.028 + 0.083, True),  # the rest of a step; then room for one block
        (2.5, 0.0, 0.070 + 0.019, True),  # then for none
        (2.5, 0.060, 0.130 + 0.019, True),
        (2.5, 0.200, 0.270 + 0.147, False),  # over the budget whatever the others leave
    ],
)
def test_the_step_that_somebody_joins_leaves_them_what_they_waited(steps, waited, gap, yields):
    one = worker(budget_s=0.150)
    decoding(one, prompt=1000, output=1001)
    one.submit(Job(request(2000, 2), ("p", 0), 0.0), 0.0)
    run(one, 0.0)
    one.advance(steps * 0.139)  # of which 11 ms are decode, 128 two blocks
    rest = one.rest
    job = Job(request(8000, 100), ("r", 0), 0.0)
    job.first = one.at - waited
    one.join(job)
    assert job.first_gap == pytest.approx(gap, abs=1e-3)
    assert (one.rest > rest) == yields, "who yields takes a step more, which reads its rows"


def test_of_several_who_join_a_step_none_gets_a_token_before_it_began():
    one = worker(budget_s=0.150)
    decoding(one, prompt=1000, output=1001)
    one.submit(Job(request(2000, 2), ("p", 0), 0.0), 0.0)
    run(one, 0.0)
    one.advance(2.5 * 0.139)
    for prompt in (1000, 8000, 8000, 60_000):
        wait = 0.5 * one.base
        job = Job(request(prompt, 100), (str(prompt), 0), 0.0)
        job.first = one.at
        one.join(job)
        assert job.first_gap >= 0.9 * wait + 0.010


def test_a_worker_plans_for_its_share_of_the_budget_and_a_block_at_least():
    def end(planned):
        one = worker(budget_s=0.150)  # 11 ms of decode, blocks of 64
        one.planned = planned
        decoding(one, prompt=1000, output=1001)
        job = Job(request(640, 2), ("p", 0), 0.0)
        one.submit(job, 0.0)
        return next(time for time, _, filled in run(one, 5.0) if job in filled)

    assert end(1.0) == pytest.approx(5 * 0.139, rel=0.02)
    assert end(0.6) == pytest.approx(10 * 0.075, rel=0.02)
    assert end(0.3) == pytest.approx(10 * 0.075, rel=0.02), "45 ms have no room, 150 do"


def test_the_cache_finds_leading_blocks_only_and_evicts_the_tail_first():
    one = worker(kv_tokens=64 * 4)
    one.keep(request(256, 2, blocks=(1, 2, 3, 4)))
    assert one.cached(request(256, 2, blocks=(1, 2, 9, 4))) == 128
    one.keep(request(64, 2, blocks=(7,)))
    assert one.cached(request(256, 2, blocks=(1, 2, 3, 4))) == 192
    stored, evicted = one.changes()
    assert sorted(stored) == [b"1", b"2", b"3", b"7"] and evicted == [b"4"]
    assert one.changes() == ([], [])


def test_a_hit_shortens_the_prefill_but_one_token_is_always_computed():
    one = worker()
    one.keep(request(128, 2, blocks=(1, 2)))
    job = Job(request(128, 2, blocks=(1, 2)), ("p", 0), 0.0)
    one.submit(job, 0.0)
    run(one)
    assert job.hit == 127


def test_streams_wait_for_room_and_the_youngest_gives_way():
    one = worker(kv_tokens=3000)
    first = decoding(one, prompt=1500, output=900)
    second = decoding(one, prompt=1400, output=900)
    third = decoding(one, prompt=1400, output=2)
    assert one.rows == 2 and list(one.ready) == [third]
    run(one, 100.0)
    assert one.preempted >= 1 and second.resumed and not first.resumed
    assert one.rows == 0 and not one.ready and not one.fill


def test_a_prompt_to_compute_is_no_sequence_without_blocks_but_a_preempted_one_is():
    one = worker(kv_tokens=3000)
    decoding(one, prompt=1400, output=900)
    decoding(one, prompt=1400, output=900)
    for index in range(2):
        one.submit(Job(request(100, 2), ("p", index), 0.0), 0.0)
    assert len(one.fill) + (one.head is not None) == 2 and one.waiting == 0
    seen = []
    for _ in range(40):
        one.advance(one.due())
        seen.append((one.preempted, one.waiting))
        one.settle()
    assert (1, 1) in seen and all(waiting <= preempted for preempted, waiting in seen)


def test_a_slow_worker_takes_longer_for_both_phases():
    one = worker()
    one.slow = 3.0
    job = Job(request(100, 2), ("p", 0), 0.0)
    one.submit(job, 0.0)
    assert run(one)[-1][0] == pytest.approx(0.3)


def test_a_more_urgent_prompt_goes_on_at_the_next_border_of_chunks():
    one = worker()
    one.chunk_tokens = 400
    long, short = (Job(request(n, 2), (str(n), 0), 0.0) for n in (1000, 100))
    long.deadline, short.deadline = 9.0, 1.0
    one.submit(long, 0.0)
    one.submit(short, 0.1)
    times = {job: time for time, _, filled in run(one) for job in filled}
    # chunks of 0.4 s: the short one has 0.4 to 0.5 s, then the long one goes on
    assert times[short] == pytest.approx(0.5) and times[long] == pytest.approx(1.1)
    assert one.prefill_tokens == 1100


def test_prompts_without_deadlines_are_computed_as_they_come():
    one = worker()
    jobs = [Job(request(n, 2), (str(n), 0), 0.0) for n in (500, 100, 200)]
    for job in jobs:
        one.submit(job, 0.0)
    assert [job for _, _, filled in run(one) for job in filled] == jobs


def test_beside_decode_the_head_makes_way_after_a_step():
    one = worker(budget_s=0.091)
    decoding(one, prompt=1000, output=10_001)
    long, short = (Job(request(n, 2), (str(n), 0), 0.0) for n in (1000, 20))
    long.deadline, short.deadline = 90.0, 1.0
    one.submit(long, 0.0)
    one.submit(short, 0.2)
    times = {job: time for time, _, filled in run(one, 3.0) for job in filled}
    assert times[short] < 0.2 + 3 * 0.091 and times[long] > 1.1
