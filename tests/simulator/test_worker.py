"""One replica between events: arithmetic by hand. The engine's own scheduler plans its steps."""

from dataclasses import replace
from math import inf

import pytest
from diptych.simulator.attempt import SimulatedAttempt
from diptych.simulator.trace import Trace, TraceRequest, WorkloadRequest, block_hash
from diptych.simulator.worker import HOP_S, SimulatedWorker

from .support import SIMPLE

TRACE = Trace("t", [TraceRequest(0.0, 64, 2)], 64)


def request(prompt=1000, output=11, blocks=()):
    """`blocks`: numbers of its blocks that others may have too; the rest are its own."""
    count = (prompt + output) // 64
    own_blocks = range(10_000 * prompt + 100 * output, 10_000 * prompt + 100 * output + count)
    names = [block_hash(block, 0) for block in (*blocks, *own_blocks)][:count]
    return WorkloadRequest(0.0, prompt, output, "", [], names, [], output_limit=output)


def make_worker(kv_tokens=100_000, budget_s=0.045, itl_s=0.05, chunk_tokens=8192, **hardware):
    shape = replace(SIMPLE, kv_tokens=kv_tokens, chunk_tokens=chunk_tokens, **hardware)
    return SimulatedWorker("decode/0", "decode", shape, TRACE, budget_s, itl_s)


numbers = iter(range(10**9))


def attempt_at(prompt, output, blocks=()):
    return SimulatedAttempt(request(prompt, output, blocks), (str(next(numbers)), 0), 0.0)


def decoding(worker, prompt=1000, output=11, waited_s=0.0):
    """An attempt whose KV has just arrived, so long after its first token."""
    attempt = attempt_at(prompt, output)
    attempt.is_remote = True
    worker.reserve(attempt)
    worker.reserved.clear()
    attempt.first_token_at = attempt.last_token_at = worker.now - waited_s or 1e-12
    attempt.filled_at = attempt.first_token_at  # elsewhere
    worker.commit(attempt, has_first_token=True)
    return attempt


def prefilling(worker, prompt, output=2, blocks=(), deadline_s=0.0):
    """An attempt whose prompt is to be computed here, and its answer too."""
    attempt = attempt_at(prompt, output, blocks)
    attempt.deadline_s = deadline_s
    worker.add_prompt(attempt)
    return attempt


def run(worker, until=inf):
    """Plays the worker alone; returns (time, ended, filled) of each event."""
    events = []
    while (at := worker.next_event_at) <= until and at < inf:
        events.append((at, *worker.settle(at)))
    return events


def filled_at(worker, attempt):
    """Plays the worker until the attempt's prompt is computed."""
    while worker.next_event_at < 100.0:
        _, filled = worker.settle(worker.next_event_at)
        if attempt in filled:
            return worker.now
    raise AssertionError("the prompt is never computed")


def test_a_lone_stream_takes_base_and_its_own_growing_context_a_step():
    worker = make_worker()
    decoding(worker, prompt=1000, output=11)
    ((end, ended, _),) = [event for event in run(worker) if event[1]]
    # 10 steps of 10 ms, which read 1,001 to 1,010 tokens at 1 us each
    assert end == pytest.approx(0.1 + 10_055e-6)
    assert len(ended) == 1 and worker.running == 0 and worker.pool.used_blocks == 0


def test_a_second_stream_slows_the_first_down_and_joins_at_a_step_border():
    worker = make_worker()
    first = decoding(worker, prompt=1000, output=101)
    run(worker, 0.0)
    worker.catch_up(0.0165)  # one and a half steps of 11 ms
    second = decoding(worker, prompt=9000, output=2)
    ended = {attempt: at for at, ended, _ in run(worker) for attempt in ended}
    # the rest of the step under way, then one of 10 ms that reads 1,000 + 9,000 tokens
    assert ended[second] == pytest.approx(0.022 + 0.020, rel=0.01)
    assert second.first_gap_s == pytest.approx(0.5 * 0.011 + 0.020 + HOP_S, rel=0.01)
    assert ended[first] == pytest.approx(99 * 0.011 + 0.020, rel=0.01)


def test_prefill_beside_decode_gets_what_a_step_has_left_of_the_budget():
    worker = make_worker(budget_s=0.091)
    decoding(worker, prompt=1000, output=1001)
    began_at = filled_at(worker, prefilling(worker, 1280))  # what both kinds of work cost is known
    attempt = prefilling(worker, 400)  # 400 ms of prefill
    # a block of 64 fits into what 12 of 91 ms leave, two do not; 6 of them, and 16 tokens
    took_s = filled_at(worker, attempt) - began_at
    assert took_s == pytest.approx(6 * 0.0765 + 0.0285, rel=0.05)


def test_a_prompt_alone_has_all_of_the_time():
    worker = make_worker()
    worker.catch_up(0.25)
    attempt = prefilling(worker, 500)
    assert worker.next_event_at == 0.25
    assert filled_at(worker, attempt) == pytest.approx(0.25 + 0.5)


def test_a_prompt_of_many_chunks_takes_as_long_as_one():
    """Chunks that repeat are carried out without planning each."""
    skipping, stepping = make_worker(chunk_tokens=256), make_worker(chunk_tokens=256)
    stepping.skips_repeated_steps = False
    ends = [filled_at(worker, prefilling(worker, 1500)) for worker in (skipping, stepping)]
    assert ends == pytest.approx([1.5, 1.5])


def test_where_decode_alone_is_over_the_budget_prompts_go_as_fast_as_without_one():
    worker = make_worker(budget_s=0.001)  # decode alone is over it
    stream = decoding(worker, prompt=1000, output=201)  # 11 ms a step
    run(worker, 0.0)
    prompt = prefilling(worker, 640)
    done = filled_at(worker, prompt)
    # a few steps show that the target cannot be met; then one step takes the whole prompt
    assert done == pytest.approx(0.640 + 8 * 0.011, abs=0.1)
    run(worker)
    assert stream.late_gaps <= 4


def test_steps_over_the_target_are_late_for_everyone_who_runs():
    worker = make_worker()
    decoding(worker, prompt=1000, output=11)
    long = decoding(worker, prompt=60_000, output=11)  # 10 + 61 ms a step
    run(worker)
    assert long.late_gaps == 10


def test_a_gap_between_first_and_second_token_is_a_gap():
    worker = make_worker()
    worker.catch_up(1.0)
    attempt = decoding(worker, 1000, 30, waited_s=0.1)  # its KV took 100 ms to arrive
    run(worker)
    assert attempt.first_gap_s == pytest.approx(0.1 + 0.011 + HOP_S, rel=0.01)
    assert attempt.late_gaps == 1


def test_the_step_that_somebody_joins_leaves_them_what_they_waited():
    """With a budget of 150 ms 128 tokens fit beside 11 ms of decode; fewer beside who has waited."""

    def first_gap_s(waited_s):
        worker = make_worker(budget_s=0.150, itl_s=0.150)
        decoding(worker, prompt=1000, output=1001)
        prefilling(worker, 6400)
        run(worker, 2.0)  # the cost of both kinds of work is known by now
        worker.catch_up(worker.next_event_at)  # a border of steps
        attempt = decoding(worker, 2000, 100, waited_s)
        run(worker, worker.now + 1.0)
        return attempt.first_gap_s - waited_s

    # a step reads 3,000 tokens: 13 ms of decode, and 128, 64 or 16 tokens of the prompt
    assert first_gap_s(0.001) == pytest.approx(0.013 + 0.128, abs=3e-3)
    assert first_gap_s(0.060) == pytest.approx(0.013 + 0.064, abs=3e-3)
    assert first_gap_s(0.120) == pytest.approx(0.013 + 0.016, abs=3e-3)
    assert first_gap_s(0.200) == pytest.approx(0.013 + 0.128, abs=3e-3), "over the budget anyhow"


def test_a_worker_plans_for_its_share_of_the_budget():
    def end(planned_share):
        # 11 ms of decode, blocks of 64
        worker = make_worker(budget_s=0.150, planned_share=planned_share)
        decoding(worker, prompt=1000, output=1001)
        began_at = filled_at(worker, prefilling(worker, 1280))
        return filled_at(worker, prefilling(worker, 640)) - began_at

    assert end(1.0) == pytest.approx(5 * 0.140, rel=0.05)
    assert end(0.6) == pytest.approx(10 * 0.076, rel=0.05)


def test_the_cache_finds_leading_blocks_only_and_evicts_the_tail_first():
    worker = make_worker(kv_tokens=64 * 6)
    first = prefilling(worker, 257, output=1, blocks=(1, 2, 3, 4))
    run(worker)
    assert first.filled_at > 0
    assert worker.cached_tokens(request(257, 1, blocks=(1, 2, 9, 4))) == 128
    prefilling(worker, 128, output=1, blocks=(7, 8))
    run(worker)
    assert worker.cached_tokens(request(257, 1, blocks=(1, 2, 3, 4))) == 192
    report = worker.report(worker.now)
    assert sorted(report.stored) == [block_hash(block, 0) for block in (1, 2, 3, 7, 8)]
    assert report.evicted == [block_hash(4, 0)]
    after = worker.report(worker.now)
    assert (after.stored, after.evicted) == ([], [])


def test_a_hit_shortens_the_prefill_but_the_last_block_is_always_computed():
    worker = make_worker()
    prefilling(worker, 128, output=1, blocks=(1, 2))
    run(worker)
    attempt = prefilling(worker, 128, output=1, blocks=(1, 2))
    began_at = worker.now
    assert filled_at(worker, attempt) == pytest.approx(began_at + 0.064)
    assert attempt.hit_tokens == 64


def test_streams_wait_for_room_and_the_youngest_gives_way():
    worker = make_worker(kv_tokens=3840)
    first = decoding(worker, prompt=1500, output=900)
    second = decoding(worker, prompt=1400, output=900)
    third = attempt_at(1400, 2)
    third.is_remote = True
    worker.reserve(third)
    assert worker.without_blocks == [third]
    ended = [attempt for _, ended, _ in run(worker, 200.0) for attempt in ended]
    assert ended == [first, second]
    assert worker.scheduler.preemptions >= 1
    assert second.late_gaps > first.late_gaps, "its KV was computed again"
    assert worker.reserved == [third]


def test_an_answer_that_was_preempted_before_its_last_token_ends():
    """Its last token comes with the prefill that computes it again."""
    worker = make_worker(kv_tokens=3840)
    attempts = [decoding(worker, 1500, 900), decoding(worker, 1400, 458)]
    ended = []
    generated_again = set()
    while worker.next_event_at < inf:
        ended += worker.settle(worker.next_event_at)[0]
        generated_again |= {one.generated_tokens for one in worker.scheduler.prefilling}
    assert generated_again == {457}
    assert ended == attempts and not worker.attempts and worker.pool.used_blocks == 0


def test_each_gap_of_a_preempted_answer_is_counted_once():
    worker = make_worker(kv_tokens=3840, itl_s=0.005)  # every step is late
    attempts = [decoding(worker, 1500, 900), decoding(worker, 1400, 900)]
    run(worker)
    assert worker.scheduler.preemptions >= 1
    assert [attempt.late_gaps for attempt in attempts] == [899, 899]


def test_an_answer_preempted_before_its_first_token_gets_that_with_its_prompt():
    """A system in which the decode worker sends the first token."""
    worker = make_worker(kv_tokens=3840)
    attempt = attempt_at(1400, 5)
    attempt.is_remote = True
    worker.reserve(attempt)
    attempt.filled_at = 1e-12  # elsewhere
    worker.commit(attempt, has_first_token=False)
    worker.scheduler._preempt(worker.scheduler.live[attempt.key, 0])
    (ended,) = [event for event in run(worker) if event[1] or event[2]]
    assert ended[1:] == ([attempt], [])
    assert attempt.first_token_at == pytest.approx(0.056 + HOP_S)  # its full blocks are cached


def test_a_preempted_sequence_waits_and_a_prompt_to_compute_does_not():
    worker = make_worker(kv_tokens=3840)
    decoding(worker, prompt=1500, output=900)
    decoding(worker, prompt=1400, output=900)
    run(worker, 0.0)
    prefilling(worker, 3000)  # no room for it
    reports = []
    for at in range(1, 40):
        run(worker, at * 0.5)
        reports.append((worker.scheduler.preemptions, worker.report(at * 0.5).waiting))
    assert (1, 1) in reports and all(waiting <= preempted for preempted, waiting in reports)


def test_a_report_in_the_middle_of_repeated_steps_counts_those_that_are_over():
    worker = make_worker()
    decoding(worker, prompt=1000, output=1001)
    run(worker, 0.0)
    report = worker.report(0.0335)  # three steps of 11 ms are over
    assert (report.running, report.steps, report.kv_tokens) == (1, 3, 1004)
    assert report.step_seconds == pytest.approx(3 * 0.011, rel=0.01)
    again = worker.report(0.0335)
    assert (again.steps, again.kv_tokens) == (0, 1004)


def test_an_attempt_that_is_released_in_the_middle_leaves_nothing_behind():
    worker = make_worker(budget_s=0.150)
    stays = decoding(worker, prompt=1000, output=101)
    goes = decoding(worker, prompt=1000, output=1001)
    prompt = prefilling(worker, 2000)
    run(worker, 0.3)
    worker.catch_up(0.301)
    worker.release(goes)
    worker.release(prompt)
    ended = [attempt for _, ended, _ in run(worker) for attempt in ended]
    assert ended == [stays]
    worker.pool.validate()
    assert worker.pool.used_blocks == 0 and not worker.attempts


def test_a_slow_worker_takes_longer_for_both_phases():
    worker = make_worker()
    worker.slowness = 3.0
    attempt = prefilling(worker, 100)
    assert filled_at(worker, attempt) == pytest.approx(0.3)


def test_a_more_urgent_prompt_goes_on_at_the_next_border_of_chunks():
    worker = make_worker(chunk_tokens=384)
    long = prefilling(worker, 1000, deadline_s=9.0)
    run(worker, 0.0)
    worker.catch_up(0.1)
    short = prefilling(worker, 100, deadline_s=1.0)
    times = {attempt: at for at, _, filled in run(worker) for attempt in filled}
    # chunks of 384 ms: the short one is in the second, beside what 384 - 100 tokens leave
    assert times[short] == pytest.approx(2 * 0.384, rel=0.1)
    assert times[long] == pytest.approx(1.1, rel=0.02)
    assert worker.prefill_tokens == 1100


def test_prompts_without_deadlines_are_computed_as_they_come():
    worker = make_worker()
    attempts = [prefilling(worker, tokens) for tokens in (5000, 4000, 6000)]
    assert [attempt for _, _, filled in run(worker) for attempt in filled] == attempts


def test_an_end_between_two_steps_takes_no_step_and_adds_none():
    """Both steps and tokens until then were booked, and the end interrupts at the very same moment."""
    worker = make_worker()
    stays, leaves = decoding(worker, 1000, 50), decoding(worker, 900, 50)
    worker.settle(0.0)
    assert worker.steps is not None
    border = worker.steps.end_of(3)
    worker.catch_up(border)
    assert worker.answer_tokens(stays) == 1 + 3
    worker.release(leaves)
    worker.settle(border)
    assert worker.answer_tokens(stays) == 1 + 3
