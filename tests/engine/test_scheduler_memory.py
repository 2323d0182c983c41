"""Who gets blocks, who keeps them, and what is found again. Blocks of 64 tokens; no torch."""

from __future__ import annotations

import itertools

import pytest
from diptych.engine.scheduler import Scheduler
from diptych.engine.sequence import Sequence
from diptych.kv_transfer.identity import block_hashes
from diptych.protos.frames import Sampling
from diptych.router.index import PrefixIndex, positions

from .pure import carry_out, names, scheduler, seq, transferred

# ---- room to grow --------------------------------------------------------------------------------


def test_newcomers_leave_the_watermark_to_those_that_grow() -> None:
    s = scheduler(blocks=50, growth_tokens=0, watermark=0.03)  # 1.5 of 50: 2 blocks
    s.add(seq("a", 64, most=1000))
    s.add(seq("b", 47 * 64, seed=1))  # of 49
    s.add(seq("c", 1, seed=2))
    s.plan()
    assert names(s.prefilling) == ["a", "b"] and s.pool.available_blocks == 2
    assert s.reserve(seq("d", 1, seed=3)) is None


def test_nothing_is_left_for_growth_where_nobody_can_grow() -> None:
    for first in (seq("a", 64, most=64), seq("a", 128, most=900, first_only=True)):
        s = scheduler(blocks=4, watermark=0.5)
        s.add(first)
        s.plan()
        assert s.pool.available_blocks == 2
        assert s.reserve(seq("b", 64, most=64, seed=1)), "a's allowance covers all its growth"


def test_no_more_is_left_than_what_the_others_can_grow_by() -> None:
    s = scheduler(blocks=10, growth_tokens=0, watermark=0.5)
    s.add(seq("a", 64, most=64))  # one block of growth, not five
    s.plan()
    assert s.reserve(seq("b", 9 * 64, seed=1)) is None
    assert s.reserve(seq("b", 8 * 64, seed=1))


def test_reserved_sequences_may_grow_too() -> None:
    s = scheduler(blocks=10, growth_tokens=0, watermark=0.1)
    assert s.reserve(seq("a", 64, most=500))
    assert s.reserve(seq("b", 9 * 64, seed=1)) is None
    assert s.reserve(seq("b", 8 * 64, seed=1))


def test_alone_a_sequence_may_have_the_whole_pool() -> None:
    s = scheduler(blocks=10, growth_tokens=0, watermark=0.5, held_share=0.5)
    assert s.reserve(seq("a", 640, most=1))
    s.remove(("a", 0))
    for first_only in (False, True):
        s.add(seq("a", 640, most=1, first_only=first_only))
        assert s.plan().prefill
        s.remove(("a", 0))


def test_a_growing_sequence_takes_its_block_before_newcomers_begin() -> None:
    s = scheduler(blocks=2, growth_tokens=0)
    transferred(s, seq("a", 64, most=60))
    s.add(seq("b", 5, seed=1))
    plan = s.plan()
    assert names(plan.decode) == ["a"] and not plan.prefill and s.preemptions == 0


# ---- blocks of generated tokens ------------------------------------------------------------------


def decoded(s: Scheduler, one: Sequence) -> Sequence:
    """Adds it and steps to its end; its tokens count up."""
    s.add(one)
    token = itertools.count(100)
    while s.live:
        carry_out(s, s.plan(), next(token))
    return one


def test_the_next_turn_finds_the_answer_before_it() -> None:
    s = scheduler()
    first = decoded(s, seq("first", 100, most=200))
    assert len(first.token_ids) == 300 and len(first.block_hashes) == 4  # 256 of the 299 with KV
    ids = first.token_ids + [5] * 50
    again = Sequence(("again", 0), ids, 350, Sampling(5), block_hashes(ids, b"salt"))
    s.add(again)
    assert [count for _, count in s.plan().prefill] == [350 - 256]
    assert again.hit_tokens == 256


def test_the_chain_begins_with_the_salt_where_the_prompt_has_no_full_block() -> None:
    s = scheduler()
    one = decoded(s, seq("a", 10, most=120))
    assert one.block_hashes == block_hashes(one.token_ids[:128], b"salt") == s.pool.hashes()


def test_a_prompt_that_brings_no_hashes_is_published_all_the_same() -> None:
    s = scheduler()
    one = seq("a", 300, most=5)
    one.block_hashes = []
    decoded(s, one)
    assert s.pool.hashes() == block_hashes(one.token_ids[:256], b"salt")


@pytest.mark.parametrize("size", [64, 128, 256])
def test_routers_are_told_what_they_look_up_whatever_the_size_of_a_block(size: int) -> None:
    """Of a block of 256 tokens all four hashes that end in it, not just its name."""
    s = scheduler(block_tokens=size, max_step_tokens=8192, growth_tokens=256)
    one = seq("a", 40 * 64 + 5, most=3)
    one.block_hashes = block_hashes(one.token_ids, b"salt", size)
    decoded(s, one)
    units = block_hashes(one.token_ids, b"salt")
    assert s.pool.hashes() == [units[at] for at in positions(40)]
    s.add(
        Sequence(
            ("b", 0),
            one.token_ids[:2500],
            2500,
            Sampling(1),
            block_hashes(one.token_ids, b"salt", size),
        )
    )
    assert sum(count for _, count in s.plan().prefill) == 2500 - 2500 // size * size


@pytest.mark.parametrize("size", [128, 256])
def test_what_came_by_name_is_told_in_full_once_its_ids_are_known(size: int) -> None:
    """A prefix from a peer or a tier: the index finds a prefix only from its first hash on."""
    s = scheduler(block_tokens=size, max_step_tokens=8192, growth_tokens=256)
    one = seq("a", 32 * 64 + 5, most=3)
    one.block_hashes = block_hashes(one.token_ids, b"salt", size)
    s.stage(("a", 0), one.block_hashes, len(one.block_hashes))
    s.cache_staged(("a", 0), len(one.block_hashes))
    units, index = block_hashes(one.token_ids, b"salt"), PrefixIndex()
    sampled = [units[at] for at in positions(32)]
    index.store(0, s.pool.drain_events()[0])
    assert index.depth(0, sampled) == 0
    decoded(s, one)
    stored, evicted, _ = s.pool.drain_events()
    assert not evicted and one.hit_tokens == 32 * 64
    index.store(0, stored)
    assert index.depth(0, sampled) == len(sampled)


def test_a_block_is_published_when_its_last_kv_is_there_and_not_before() -> None:
    s = scheduler()
    one = seq("a", 60, most=100)
    s.add(one)
    while one.computed_tokens < 63:
        carry_out(s, s.plan())
    assert len(one.token_ids) == 64 and s.pool.hashes() == []
    carry_out(s, s.plan())
    assert s.pool.hashes() == block_hashes(one.token_ids[:64], b"salt")


def test_a_transferred_sequence_publishes_what_it_decodes() -> None:
    s = scheduler()
    one = transferred(s, seq("a", 100, most=100))
    while s.live:
        carry_out(s, s.plan())
    assert s.pool.hashes() == block_hashes(one.token_ids[:192], b"salt")


def test_a_resumed_sequence_finds_its_generated_tokens_and_keeps_its_hit() -> None:
    s = scheduler()
    decoded(s, seq("before", 70, most=1))
    one = seq("a", 70, most=200)
    s.add(one)
    while one.generated_tokens < 130:
        carry_out(s, s.plan())
    assert one.hit_tokens == 64
    s._preempt(one)
    assert [count for _, count in s.plan().prefill] == [200 - 192]
    assert one.hit_tokens == 64, "of the prompt, when it came"


# ---- back-pressure -------------------------------------------------------------------------------


def test_a_slow_receiver_stops_new_prefills_and_not_those_under_way() -> None:
    s = scheduler(blocks=16, max_step_tokens=64, held_share=0.75)  # 12 of 16
    for index in range(8):
        s.add(seq(str(index), 190, most=9, first_only=True, seed=index))  # 3 blocks
    while plan := s.plan():
        carry_out(s, plan)
        assert s.pool.used_blocks <= 12
    assert [key[0] for key in s.held_blocks] == list("0123") and names(s.waiting) == list("4567")
    assert not s.plan() and s.pool.available_blocks == 4
    s.remove(("2", 0))
    while plan := s.plan():
        carry_out(s, plan)
    assert [key[0] for key in s.held_blocks] == list("0134") and names(s.waiting) == list("567")
    for key in [*s.held_blocks]:
        s.remove(key)
    while plan := s.plan():
        carry_out(s, plan)
    assert [key[0] for key in s.held_blocks] == list("567")


def test_a_prefill_larger_than_the_share_has_its_turn_alone() -> None:
    s = scheduler(blocks=16, held_share=0.5)
    s.add(seq("small", 60, first_only=True))
    s.add(seq("large", 640, first_only=True, seed=1))
    s.add(seq("next", 60, first_only=True, seed=2))
    carry_out(s, s.plan())
    assert names(s.waiting) == ["large", "next"]
    s.remove(("small", 0))
    carry_out(s, s.plan())
    assert names(s.prefilling) == ["large"] and names(s.waiting) == ["next"]


def test_decoding_goes_on_beside_prefills_that_fill_their_share() -> None:
    s = scheduler(blocks=16, held_share=0.75, growth_tokens=0, watermark=0.1)
    transferred(s, seq("a", 60, most=120, seed=9))
    for index in range(4):
        s.add(seq(str(index), 190, first_only=True, seed=index))
    finished = []
    while plan := s.plan():
        finished += names(carry_out(s, plan))
    assert finished == ["a"] and s.preemptions == 0 and len(s.held_blocks) == 4


# ---- drafts --------------------------------------------------------------------------------------


def test_drafts_get_room_for_their_kv() -> None:
    s = scheduler(growth_tokens=0)
    one = transferred(s, seq("a", 60, most=50))
    one.drafts = [1, 2, 3]  # rows 60 to 63
    assert s.plan().decode == [one] and len(one.blocks) == 1
    one.drafts = [1, 2, 3, 4]
    assert s.plan().decode == [one] and len(one.blocks) == 2 and one.drafts == [1, 2, 3, 4]


def test_drafts_are_cut_where_blocks_are_short_and_nobody_is_preempted() -> None:
    s = scheduler(blocks=2, growth_tokens=0)
    a, b = (transferred(s, seq(name, 60, most=50, seed=i)) for i, name in enumerate("ab"))
    a.drafts, b.drafts = [1] * 4, [1] * 3
    assert s.plan().decode == [a, b] and s.preemptions == 0
    assert (a.drafts, b.drafts) == ([], [1] * 3), "b's fit into the block that it has"


def test_a_needed_block_is_taken_even_if_the_drafts_behind_it_have_no_room() -> None:
    s = scheduler(blocks=3, growth_tokens=0)
    a = transferred(s, seq("a", 64, most=50))
    b = transferred(s, seq("b", 60, most=50, seed=1))
    a.drafts = [1] * 64  # 2 blocks, one is left
    assert s.plan().decode == [a, b]
    assert len(a.blocks) == 2 and a.drafts == []
