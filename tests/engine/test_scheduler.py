"""What the next step computes. Blocks of 64 tokens; no torch, no clock."""

from __future__ import annotations

import pytest
from diptych.engine.scheduler import Scheduler, SchedulerLimits, StepPlan
from diptych.engine.sequence import Sequence
from diptych.protos.frames import Sampling
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples

from .pure import STOP, carry_out, chunks, names, scheduler, seq, transferred

# ---- prefill -------------------------------------------------------------------------------------


def test_chunks_end_on_block_borders_or_at_the_end_of_the_ids() -> None:
    s = scheduler(max_step_tokens=200)
    s.add(seq("a", 500))
    assert chunks(s) == [[("a", 192)], [("a", 192)], [("a", 116)]]


def test_the_budget_that_a_short_prompt_leaves_goes_to_the_next() -> None:
    s = scheduler(max_step_tokens=256)
    s.add(seq("a", 100))
    s.add(seq("b", 300, seed=1))
    assert chunks(s) == [[("a", 100), ("b", 144)], [("b", 156)]]


def test_prompts_are_prefilled_first_come_first_served() -> None:
    s = scheduler(max_step_tokens=128)
    for index, name in enumerate("abc"):
        s.add(seq(name, 128, seed=index))
    assert chunks(s) == [[("a", 128)], [("b", 128)], [("c", 128)]]


def test_a_short_prompt_does_not_overtake_one_that_is_cut() -> None:
    s = scheduler(max_step_tokens=64)
    s.add(seq("a", 100))
    s.add(seq("b", 10, seed=1))
    assert chunks(s) == [[("a", 64)], [("a", 36), ("b", 10)]]


def test_decode_goes_on_beside_prefill() -> None:
    s = scheduler(max_step_tokens=64)
    s.add(seq("a", 10))
    carry_out(s, s.plan())
    s.add(seq("b", 128, seed=1))
    plan = s.plan()
    assert names(plan.decode) == ["a"] and [n for _, n in plan.prefill] == [64]


def test_nothing_to_do_is_an_empty_plan() -> None:
    assert not scheduler().plan()


def test_prompts_are_prefilled_in_the_order_of_their_deadlines() -> None:
    s = scheduler(max_step_tokens=128, max_running=2)
    deadlines = {"late": 9.0, "soon": 1.0, "later": 9.0, "now": 0.5}
    for index, (name, deadline) in enumerate(deadlines.items()):
        one = seq(name, 128, most=1, seed=index)
        one.deadline_s = deadline
        s.add(one)
    assert chunks(s) == [[("now", 128)], [("soon", 128)], [("late", 128)], [("later", 128)]]


def test_a_more_urgent_prompt_goes_first_at_the_next_chunk() -> None:
    s = scheduler(max_step_tokens=64)
    for name, deadline in (("late", 2.0), ("soon", 1.0)):
        one = seq(name, 128, most=1, seed=int(deadline))
        one.deadline_s = deadline
        s.add(one)
        carry_out(s, s.plan())
    assert chunks(s) == [[("soon", 64)], [("late", 64)]]


def test_an_urgent_prompt_that_does_not_fit_is_not_overtaken() -> None:
    s = scheduler(blocks=4)
    s.add(seq("a", 120))
    s.plan()
    for name, length, deadline in (("small", 5, 2.0), ("big", 180, 1.0)):
        one = seq(name, length, seed=length)
        one.deadline_s = deadline
        s.add(one)
    assert names(one for one, _ in s.plan().prefill) == ["a"]
    assert names(s.waiting) == ["big", "small"]


def test_a_key_that_lives_is_not_taken_again() -> None:
    s = scheduler()
    s.add(seq("a", 5))
    with pytest.raises(AssertionError):
        s.add(seq("a", 5))
    with pytest.raises(AssertionError):
        s.reserve(seq("a", 5))


def test_limits_that_cannot_work_are_refused() -> None:
    for wrong in ({"max_step_tokens": 63}, {"max_running": 0}, {"watermark": 1.0}):
        with pytest.raises(AssertionError):
            SchedulerLimits(**wrong)


# ---- reservation ---------------------------------------------------------------------------------


def test_a_sequence_reserves_its_ids_and_a_growth_allowance() -> None:
    s = scheduler(growth_tokens=256)
    assert s.required_blocks(seq("a", 100, most=1000)) == 6  # ceil((100 + 256) / 64)
    assert s.required_blocks(seq("a", 100, most=28)) == 2  # ceil(128 / 64)
    assert s.required_blocks(seq("a", 100, most=29)) == 3


def test_a_sequence_that_stops_after_the_first_token_reserves_its_ids_only() -> None:
    assert scheduler().required_blocks(seq("a", 128, most=1000, first_only=True)) == 2


def test_a_sequence_waits_until_its_reservation_fits() -> None:
    s = scheduler(blocks=4)
    s.add(seq("a", 120))  # 3 blocks
    s.add(seq("b", 60, most=20, seed=1))  # 2 blocks
    assert names(one for one, _ in s.plan().prefill) == ["a"]
    assert names(s.waiting) == ["b"]
    s.remove(("a", 0))
    assert names(one for one, _ in s.plan().prefill) == ["b"]


def test_the_head_of_the_line_is_not_overtaken_by_one_that_would_fit() -> None:
    s = scheduler(blocks=4)
    s.add(seq("a", 120))
    s.add(seq("big", 180, seed=1))
    s.add(seq("small", 5, seed=2))
    s.plan()
    assert names(s.waiting) == ["big", "small"]


def test_no_more_than_max_running_have_blocks() -> None:
    s = scheduler(max_running=2)
    for index in range(5):
        s.add(seq(str(index), 10, most=3, seed=index))
    finished = []
    while plan := s.plan():
        assert len(s.running) + len(s.prefilling) <= 2
        finished += carry_out(s, plan)
    assert names(finished) == ["0", "1", "2", "3", "4"]


# ---- prefix hits ---------------------------------------------------------------------------------


def test_a_hit_covers_full_blocks_and_leaves_one_token_to_compute() -> None:
    for length, hit in ((128, 64), (129, 128), (64, 0), (130, 128)):
        s = scheduler()
        s.add(seq("first", length, most=1))
        carry_out(s, s.plan())
        again = seq("again", length, most=1)
        s.add(again)
        assert [count for _, count in s.plan().prefill] == [length - hit]
        assert again.hit_tokens == hit


def test_a_hit_takes_no_free_block() -> None:
    s = scheduler(blocks=5)
    s.add(seq("a", 130, most=60))  # 3 blocks
    carry_out(s, s.plan())
    s.add(seq("b", 130, most=60))  # 2 shared + 1
    s.plan()
    assert s.pool.used_blocks == 4


def test_two_equal_prompts_in_one_step_are_both_computed() -> None:
    s = scheduler()
    s.add(seq("a", 130, most=1))
    s.add(seq("b", 130, most=1))
    assert chunks(s) == [[("a", 130), ("b", 130)]]
    assert s.pool.used_blocks == 0 and s.pool.cached_blocks == 2


# ---- preemption ----------------------------------------------------------------------------------


def test_the_youngest_is_preempted_when_a_block_is_missing() -> None:
    s = scheduler(blocks=3, growth_tokens=0, watermark=0)
    for index, name in enumerate("abc"):
        s.add(seq(name, 64, most=200, seed=index))
    carry_out(s, s.plan())
    plan = s.plan()
    assert names(plan.decode) == ["a"], "a takes c's block, b takes none: it is now the youngest"
    assert names(s.waiting) == ["b", "c"]
    assert s.preemptions == 2


def test_a_preempted_sequence_whose_first_token_came_is_not_late() -> None:
    s = scheduler()
    one = seq("a", 100, most=300)
    one.deadline_s = 101.0
    s.add(one)
    carry_out(s, s.plan(100.0))
    s._preempt(one)
    s.plan(102.0)
    assert one.generated_tokens == 1 and not one.background and one.deadline_s == 101.0


def test_what_a_committed_sequence_brought_with_it_is_not_counted_again() -> None:
    s = scheduler()
    one = seq("a", 150)
    one.sampling = Sampling(10, prompt_logprobs=0)
    transferred(s, one, waited=2.0)
    carry_out(s, s.plan())
    s._preempt(one)
    assert one.prompt_logprobs_sent == one.prompt_tokens, "its prompt would be scored once more"
    assert one.cacheable_tokens == len(one.token_ids) - 1
    assert one.waited_s == 0.0


def test_a_preempted_sequence_is_computed_again_from_prompt_and_generated_ids() -> None:
    s = scheduler(blocks=3, growth_tokens=0)
    a, b = seq("a", 100, most=90), seq("b", 60, most=90, seed=1)
    s.add(a)
    s.add(b)
    prefilled: dict[str, list[int]] = {"a": [], "b": []}
    while plan := s.plan():
        for one, count in plan.prefill:
            prefilled[one.attempt_key[0]].append(count)
        carry_out(s, plan)
    assert prefilled == {"a": [100], "b": [60, 65]}  # at 65 ids b needed a second block
    assert (a.generated_tokens, b.generated_tokens) == (90, 90)


def test_everyone_finishes_on_a_full_pool_the_oldest_first() -> None:
    s = scheduler(blocks=8, growth_tokens=0)
    for index in range(8):
        s.add(seq(str(index), 60, most=300, seed=index))  # 6 blocks at the end
    finished = []
    for _ in range(5000):
        plan = s.plan()
        if not plan:
            break
        finished += carry_out(s, plan)
    assert names(finished) == list("01234567")
    assert s.pool.used_blocks == 0 and s.preemptions > 0


def test_preempted_sequences_come_back_before_new_ones_in_order_of_age() -> None:
    s = scheduler(blocks=3, growth_tokens=0)
    for index, name in enumerate("abc"):
        one = seq(name, 64, most=120, seed=index)
        one.deadline_s = 5 - index  # means nothing to a resumed one
        s.add(one)
    carry_out(s, s.plan())
    s.add(seq("new", 1, seed=3))
    carry_out(s, s.plan())
    assert names(s.running) == ["a"] and names(s.waiting) == ["b", "c", "new"]
    assert s.reserve(seq("reserved", 1, seed=4)) is None, "one block is free, but b waits"
    s.remove(("a", 0))
    assert names(one for one, _ in s.plan().prefill) == ["b"]
    assert names(s.waiting) == ["c", "new"] and s.pool.available_blocks == 1
    assert s.reserve(seq("reserved", 1, seed=4)) is None
    s.remove(("b", 0))
    assert names(one for one, _ in s.plan().prefill) == ["c", "new"]


def test_a_resumed_sequence_keeps_its_age() -> None:
    s = scheduler(blocks=7, growth_tokens=0, max_step_tokens=64)
    a, b = seq("a", 64, most=200), seq("b", 64, most=200, seed=1)
    s.add(a)
    s.add(b)
    for _ in range(2):
        carry_out(s, s.plan())
    s._preempt(b)
    s.add(seq("c", 64, most=200, seed=2))
    while len(s.running) < 3:
        carry_out(s, s.plan())
    assert names(s.running) == ["a", "b", "c"]
    assert s._youngest().attempt_key == ("c", 0)


def test_an_older_sequence_takes_the_blocks_of_a_younger_prefill() -> None:
    s = scheduler(blocks=4, growth_tokens=0, max_step_tokens=64)
    s.add(seq("a", 63, most=200))
    carry_out(s, s.plan())
    s.add(seq("b", 180, seed=1))
    carry_out(s, s.plan())
    plan = s.plan()  # a needs its second block, b has three and is not done
    assert names(plan.decode) == ["a"] and not plan.prefill
    assert names(s.waiting) == ["b"] and s.waiting[0].was_preempted


def test_an_older_sequence_takes_the_blocks_of_a_younger_one_that_waits_for_its_place() -> None:
    s = scheduler(blocks=2, growth_tokens=0, max_running=1)
    transferred(s, seq("a", 63, most=50))
    transferred(s, seq("b", 60, most=50, seed=1))
    carry_out(s, s.plan())
    assert names(s.ready) == ["b"]
    assert names(s.plan().decode) == ["a"]
    assert names(s.waiting) == ["b"] and s.waiting[0].was_preempted


def test_blocks_that_a_transfer_reads_or_writes_are_never_taken() -> None:
    s = scheduler(blocks=4, growth_tokens=0, max_step_tokens=64)
    transferred(s, seq("a", 63, most=200))
    assert s.reserve(seq("coming", 60, seed=1))
    s.add(seq("going", 100, most=9, first_only=True, seed=2))  # pushed chunk by chunk
    carry_out(s, s.plan())
    assert names(s.prefilling) == ["going"]
    plan = s.plan()
    assert names(one for one, _ in plan.prefill) == ["going"] and not plan.decode
    assert names(s.waiting) == ["a"], "it had to go itself"
    assert len(s.held_blocks["coming", 0]) == 1


def test_a_resumed_sequence_leaves_the_watermark_to_older_ones_only() -> None:
    for older, left in (("a", 1), ("b", 0)):
        s = scheduler(blocks=4, growth_tokens=0, watermark=0.01)
        a, b = seq("a", 60, most=200), seq("b", 60, most=200, seed=1)
        for one in (a, b) if older == "a" else (b, a):
            s.add(one)
        carry_out(s, s.plan())
        s._preempt(b)
        b.token_ids += [0] * 140  # 200: 4 blocks with those of its prompt
        b.prompt_tokens = 200
        assert s._blocks_to_leave(b) == left


# ---- leaving -------------------------------------------------------------------------------------


def test_a_sequence_can_be_removed_in_every_state() -> None:
    s = scheduler(blocks=12, max_step_tokens=64, max_running=3)
    s.add(seq("running", 30))
    carry_out(s, s.plan())
    s.add(seq("filling", 200, seed=1))
    s.add(seq("held", 60, first_only=True, seed=2))
    s.add(seq("waiting", 60, seed=3))
    reserved = seq("reserved", 60, seed=4)
    assert s.reserve(reserved)
    carry_out(s, s.plan())
    assert (len(s.waiting), len(s.prefilling), len(s.running), len(s.held_blocks)) == (1, 2, 1, 1)
    assert s.pool.used_blocks == 1 + 4 + 1 + 2
    for left, name in ((7, "running"), (7, "waiting"), (5, "reserved")):
        s.remove((name, 0))
        s.remove((name, 0))
        s.pool.validate()
        assert s.pool.used_blocks == left
    while "held" not in [key[0] for key in s.held_blocks]:
        carry_out(s, s.plan())
    s.remove(("filling", 0))
    s.remove(("held", 0))
    assert s.pool.used_blocks == 0 and not s.plan()


def test_removing_an_unknown_key_changes_nothing() -> None:
    s = scheduler()
    s.add(seq("a", 10))
    s.remove(("b", 0))
    assert names(s.waiting) == ["a"]


def test_a_finished_sequence_gives_its_blocks_back() -> None:
    s = scheduler()
    s.add(seq("a", 10))
    carry_out(s, s.plan())
    assert names(carry_out(s, s.plan(), token=STOP)) == ["a"]
    assert s.pool.used_blocks == 0


def test_blocks_of_a_sequence_that_stops_after_the_first_are_held_until_removed() -> None:
    s = scheduler()
    one = seq("a", 100, most=50, first_only=True)
    s.add(one)
    carry_out(s, s.plan())
    assert s.held_blocks == {("a", 0): one.blocks} and not s.plan()
    s.remove(("a", 0))
    assert s.pool.used_blocks == 0


# ---- transfers -----------------------------------------------------------------------------------


def test_a_reservation_that_does_not_fit_takes_nothing() -> None:
    s = scheduler(blocks=3)
    assert s.reserve(seq("a", 300)) is None
    assert s.pool.used_blocks == 0 and not s.held_blocks


def test_a_committed_sequence_decodes_in_its_reserved_blocks() -> None:
    s = scheduler()
    one = seq("a", 100, most=50)
    blocks = s.reserve(one)
    assert blocks and len(blocks) == 3 and not s.plan()
    one.token_ids.append(7)
    s.commit(one)
    plan = s.plan()
    assert plan.decode == [one] and not plan.prefill
    carry_out(s, plan)
    assert one.blocks == blocks and one.computed_tokens == 101


def test_committed_sequences_beyond_max_running_wait_with_their_blocks() -> None:
    s = scheduler(max_running=2)
    made = [seq(name, 100, most=3, seed=index) for index, name in enumerate("abcd")]
    for one in made:
        assert s.reserve(one)
    for one in reversed(made):  # they arrive in another order
        one.token_ids.append(7)
        s.commit(one)
    used, finished = s.pool.used_blocks, []
    assert names(s.plan().decode) == ["a", "b"] and names(s.ready) == ["c", "d"]
    assert s.pool.used_blocks == used, "those that wait keep theirs"
    while plan := s.plan():
        assert len(s.running) <= 2
        finished += names(carry_out(s, plan))
    assert finished == ["a", "b", "c", "d"] and s.pool.used_blocks == 0


def test_committed_sequences_count_as_running_for_those_that_wait() -> None:
    s = scheduler(max_running=1)
    transferred(s, seq("a", 100, most=3))
    s.add(seq("b", 10, seed=1))
    plan = s.plan()
    assert names(plan.decode) == ["a"] and not plan.prefill


def test_a_committed_sequence_takes_the_place_of_one_that_had_to_go_at_once() -> None:
    s = scheduler(blocks=3, max_running=1, growth_tokens=0)
    old = seq("old", 60, most=9, seed=1)
    assert s.reserve(old)
    transferred(s, seq("young", 128, most=50))
    old.token_ids.append(7)
    carry_out(s, StepPlan())
    s.running.enter(_taken(s, "young"))
    s.commit(old)
    assert names(s.plan().decode) == ["old"], "and not an empty plan"
    assert names(s.waiting) == ["young"]


def _taken(s: Scheduler, name: str) -> Sequence:
    one = s.live[(name, 0), 0]
    assert one.queue is not None
    one.queue.leave(one)
    return one


def test_a_committed_sequence_publishes_its_prompt_for_later_hits() -> None:
    s = scheduler()
    one = seq("a", 130)
    s.reserve(one)
    one.token_ids.append(7)
    s.commit(one)
    assert s.pool.hashes() == one.block_hashes and len(one.block_hashes) == 2
    carry_out(s, s.plan())
    s.pool.validate()


arrival = st.tuples(
    st.integers(1, 250), st.integers(1, 200), st.integers(0, 2), st.integers(0, 30), st.booleans()
)


@settings(max_examples=examples(150), deadline=None)
@given(
    arrivals=st.lists(arrival, max_size=10),
    blocks=st.integers(8, 30),  # one sequence needs 8 at most: (250 + 200 + 63) // 64
    growth=st.sampled_from([0, 64, 256]),
    step=st.sampled_from([64, 100, 512]),
    running=st.integers(1, 6),
)
def test_everything_ends_and_every_block_comes_back(arrivals, blocks, growth, step, running):
    s = scheduler(blocks, growth_tokens=growth, max_step_tokens=step, max_running=running)
    made = [
        seq(str(i), length, most, seed=seed)
        for i, (length, most, seed, _, _) in enumerate(arrivals)
    ]
    dropped, finished = set(), []
    for now in range(6000):
        for one, (_, _, _, at, drop) in zip(made, arrivals, strict=True):
            if at == now:
                s.add(one)
            elif drop and now == at + 15 and one not in finished:
                s.remove(one.attempt_key)
                dropped.add(one.attempt_key)
        plan = s.plan()
        if not plan and now > 60:
            break
        assert sum(count for _, count in plan.prefill) <= step
        for one, count in plan.prefill:
            end = one.computed_tokens + count
            assert end % 16 == 0 or end == len(one.token_ids)
        finished += carry_out(s, plan)
    assert {one.attempt_key for one in finished} | dropped == {one.attempt_key for one in made}
    assert s.pool.used_blocks == 0 and not (s.waiting or s.prefilling or s.running or s.held_blocks)
