"""The block pool against a model that is too simple to be wrong."""

from __future__ import annotations

from collections import Counter

import pytest
from diptych.engine.blocks import BlockPool
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.examples import examples

CONTENT = [bytes([i]) * 16 for i in range(8)]
USABLE = 4  #: blocks of the model's pool: few, so that evictions are frequent


def test_block_0_is_never_given_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4) or []) == [1, 2, 3, 4]
    assert pool.total_blocks == 4


def test_too_many_blocks_are_refused_and_nothing_changes() -> None:
    pool = BlockPool(5)
    pool.allocate(2)
    assert pool.allocate(3) is None
    assert (pool.available_blocks, pool.used_blocks) == (2, 2)
    pool.validate()


def test_a_released_sealed_block_is_found_again() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(3) or []
    pool.publish(blocks[0], CONTENT[0])
    pool.publish(blocks[1], CONTENT[1])
    pool.release(blocks)
    assert (pool.cached_blocks, pool.used_blocks, pool.available_blocks) == (2, 0, 4)
    assert pool.match([CONTENT[0], CONTENT[1], CONTENT[2]]) == blocks[:2]
    assert pool.cached_blocks == 0


def test_a_match_ends_at_the_first_unknown_block() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(2) or []
    pool.publish(blocks[0], CONTENT[0])
    pool.publish(blocks[1], CONTENT[2])
    assert pool.match([CONTENT[0], CONTENT[1], CONTENT[2]]) == blocks[:1]


def test_free_blocks_go_first_then_the_least_recently_used_tail() -> None:
    pool = BlockPool(6)
    first, second = pool.allocate(2) or [], pool.allocate(2) or []
    for block, content in zip(first + second, CONTENT, strict=False):
        pool.publish(block, content)
    pool.release(first)
    pool.release(second)
    assert pool.allocate(1) == [5]
    assert pool.allocate(3) == [first[1], first[0], second[1]]
    assert pool.hashes() == [CONTENT[2]]


def test_the_first_of_two_blocks_with_one_content_is_the_known_one() -> None:
    pool = BlockPool(4)
    a, b = pool.allocate(2) or []
    pool.publish(a, CONTENT[0])
    pool.publish(b, CONTENT[0])
    assert pool.match([CONTENT[0]]) == [a]
    pool.release([b])
    assert pool.cached_blocks == 0
    pool.validate()


def test_sealing_or_releasing_a_block_that_nobody_uses_is_a_broken_contract() -> None:
    pool = BlockPool(4)
    with pytest.raises(AssertionError):
        pool.publish(1, CONTENT[0])
    with pytest.raises(AssertionError):
        pool.release([1])


def test_a_prefix_stored_and_evicted_between_two_reports_is_not_reported_as_held() -> None:
    pool = BlockPool(2)
    for content in CONTENT[:2]:
        blocks = pool.allocate(1) or []
        pool.publish(blocks[0], content)
        pool.release(blocks)
    stored, evicted, _ = pool.drain_events()
    held = set()  # a listener applies evictions first, then what was stored
    held -= set(evicted)
    held |= set(stored)
    assert held == set(pool.hashes()) == {CONTENT[1]}


def test_a_prefix_evicted_and_stored_again_between_two_reports_is_held() -> None:
    pool = BlockPool(2)
    for content in (CONTENT[0], CONTENT[1], CONTENT[0]):
        blocks = pool.allocate(1) or []
        pool.publish(blocks[0], content)
        pool.release(blocks)
    stored, evicted, _ = pool.drain_events()
    assert CONTENT[0] in stored and CONTENT[0] not in evicted


def cached_prefix(pool: BlockPool, count: int) -> list[int]:
    """Caches a prefix of `count` blocks; returns them, its head first."""
    blocks = pool.allocate(count) or []
    for block, content in zip(blocks, CONTENT, strict=False):
        pool.publish(block, content)
    pool.release(blocks)
    return blocks


def demote(pool: BlockPool, limit: int, copied: bool = True) -> list[int]:
    """Has the tiers take, or refuse, the next `limit` blocks; returns these."""
    pinned = [block for block, _ in pool.pin_for_demotion(limit)]
    for block in pinned:
        pool.finish_demotion(block, copied)
    return pinned


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_blocks_that_tiers_have_are_evicted_in_the_order_of_before(limit: int) -> None:
    pool = BlockPool(5)
    prefix = cached_prefix(pool, 4)
    demoted = [block for _ in range(4) for block in demote(pool, limit)]
    assert demoted == prefix[::-1], "the tail is offered first"
    assert pool.allocate(4) == prefix[::-1], "a prefix's tail is evicted before its head"


def test_a_block_that_is_used_in_between_breaks_no_order_of_eviction() -> None:
    pool = BlockPool(5)
    prefix = cached_prefix(pool, 4)
    demote(pool, 2)
    for content in CONTENT[2:4]:  # the last two, which are the first to be evicted
        pool.release(pool.match([content]))
    demote(pool, 1)
    demote(pool, 1)
    pool.validate()
    assert pool.allocate(4) == [prefix[1], prefix[0], prefix[2], prefix[3]]


def test_a_demotion_goes_on_behind_blocks_that_wait_when_the_last_one_is_evicted() -> None:
    pool = BlockPool(5)
    prefix = cached_prefix(pool, 4)
    demote(pool, 2)
    assert pool.allocate(2) == [prefix[3], prefix[2]]
    demote(pool, 2)
    pool.validate()
    assert pool.allocate(2) == [prefix[1], prefix[0]]


def test_a_block_that_is_used_again_is_offered_to_the_tiers_again() -> None:
    """The tiers count that as a use, and keep their copy for longer."""
    pool = BlockPool(3)
    prefix = cached_prefix(pool, 2)
    assert demote(pool, 2) == prefix[::-1]
    assert demote(pool, 2) == []
    pool.release(pool.match(CONTENT[:1]))
    assert demote(pool, 2) == prefix[:1]


def test_an_evicted_block_that_a_tier_holds_is_demoted_until_the_tier_drops_it() -> None:
    pool = BlockPool(3)
    cached_prefix(pool, 2)
    demote(pool, 1)  # the tail
    pool.drain_events()
    blocks = pool.allocate(2) or []
    assert pool.drain_events() == ([], CONTENT[:1], CONTENT[1:2])
    assert (pool.hashes(), pool.demoted_hashes()) == ([], CONTENT[1:2])
    pool.publish(blocks[0], CONTENT[1])  # it has come back
    assert pool.drain_events() == (CONTENT[1:2], [], [])
    assert pool.demoted_hashes() == []
    pool.release(blocks)
    pool.allocate(2)
    assert pool.drain_events().demoted == CONTENT[1:2]
    pool.forget_in_tiers(CONTENT)
    assert pool.drain_events() == ([], CONTENT[1:2], [])


def test_a_block_that_is_used_while_it_is_copied_is_demoted_if_it_goes_and_offered_again() -> None:
    pool = BlockPool(2)
    prefix = cached_prefix(pool, 1)
    pool.pin_for_demotion(1)
    used = pool.match(CONTENT[:1])
    pool.finish_demotion(prefix[0], copied=True)
    pool.release(used)
    assert demote(pool, 1, copied=False) == prefix
    pool.drain_events()
    pool.allocate(1)
    assert pool.drain_events() == ([], [], CONTENT[:1])


def test_a_refused_block_is_offered_again_once_it_was_used_or_the_tiers_take_blocks() -> None:
    pool = BlockPool(4)
    prefix = cached_prefix(pool, 3)
    assert demote(pool, 2, copied=False) == [prefix[2], prefix[1]]
    assert demote(pool, 1, copied=False) == [prefix[0]]
    assert demote(pool, 3, copied=False) == [], "an idle worker would spin"
    pool.release(pool.match(CONTENT[:1]))
    assert demote(pool, 3, copied=True) == [prefix[0]]
    assert demote(pool, 3, copied=True) == [prefix[2], prefix[1]]
    assert demote(pool, 3) == []
    pool.validate()


#: of every third content nothing is told, of the others their name and one that two share
MARKS = {
    content: (content, b"shared %d" % (i // 4)) if i % 3 else ()
    for i, content in enumerate(CONTENT)
}


class Pool(RuleBasedStateMachine):
    """The model: each sequence's blocks, and what is sealed in which block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(USABLE + 1)
        self.owned: list[list[int]] = []
        self.sealed: dict[bytes, int] = {}
        self.mirror: set[bytes] = set()  #: marks that the pool holds, as reported
        self.tier_mirror: set[bytes] = set()  #: marks that only the tiers hold, as reported
        self.in_tiers: set[bytes] = set()

    def refs(self) -> Counter[int]:
        return Counter(block for blocks in self.owned for block in blocks)

    @rule(count=st.integers(0, USABLE + 1))
    def allocate(self, count: int) -> None:
        refs = self.refs()
        blocks = self.pool.allocate(count)
        if count > USABLE - len(refs):
            assert blocks is None
            return
        assert blocks is not None and len(set(blocks)) == count
        assert not set(blocks) & set(refs), "a used block is given out twice"
        self.sealed = {c: b for c, b in self.sealed.items() if b not in blocks}
        self.owned.append(blocks)

    @rule(first=st.integers(0, 7), count=st.integers(1, 3))
    def match(self, first: int, count: int) -> None:
        wanted = CONTENT[first : first + count]
        known = []
        for content in wanted:
            if content not in self.sealed:
                break
            known.append(self.sealed[content])
        assert self.pool.match(wanted) == known
        self.owned.append(known)

    @precondition(lambda self: any(self.owned))
    @rule(data=st.data(), content=st.sampled_from(CONTENT))
    def seal(self, data: st.DataObject, content: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(self.refs())))
        self.pool.publish(block, content, MARKS[content])
        if content not in self.sealed and block not in self.sealed.values():
            self.sealed[content] = block

    @rule(content=st.sampled_from(CONTENT))
    def live_through_a_short_request(self, content: bytes) -> None:
        self.allocate(1)
        if self.owned and len(self.owned[-1]) == 1:
            block = self.owned[-1][0]
            self.pool.publish(block, content, MARKS[content])
            if content not in self.sealed and block not in self.sealed.values():
                self.sealed[content] = block
            self.pool.release(self.owned.pop())

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.owned) - 1))
        self.pool.release(self.owned.pop(index))

    @rule()
    def report(self) -> None:
        changes = self.pool.drain_events()
        stored, evicted, demoted = (set(marks) for marks in changes)
        assert not (stored & evicted or stored & demoted or evicted & demoted)
        self.mirror = (self.mirror | stored) - evicted - demoted
        self.tier_mirror = (self.tier_mirror | demoted) - evicted - stored
        assert self.mirror == set(self.pool.hashes())
        assert self.tier_mirror == set(self.pool.demoted_hashes())
        in_tiers = {mark for content in self.in_tiers for mark in MARKS[content]}
        assert self.tier_mirror == in_tiers - self.mirror

    @rule(limit=st.integers(1, 3), copied=st.booleans())
    def demote(self, limit: int, copied: bool) -> None:
        for block, content in self.pool.pin_for_demotion(limit):
            self.pool.finish_demotion(block, copied)
            if copied:
                self.in_tiers.add(content)

    @rule(contents=st.lists(st.sampled_from(CONTENT), max_size=3))
    def leave_the_tiers(self, contents: list[bytes]) -> None:
        self.pool.forget_in_tiers(contents)
        self.in_tiers -= set(contents)

    @invariant()
    def agrees(self) -> None:
        self.pool.validate()
        used = set(self.refs())
        assert self.pool.used_blocks == len(used)
        assert self.pool.available_blocks == USABLE - len(used)
        assert set(self.pool.hashes()) == {m for content in self.sealed for m in MARKS[content]}
        assert self.pool.cached_blocks == len(set(self.sealed.values()) - used)


Pool.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=50, deadline=None)
TestPool = Pool.TestCase


def test_demoted_marks_come_head_first() -> None:
    pool = BlockPool(5)
    cached_prefix(pool, 4)
    for _ in range(4):
        demote(pool, 1)
    pool.drain_events()
    pool.allocate(4)
    assert pool.demoted_hashes() == CONTENT[:4]
    assert pool.drain_events().demoted == CONTENT[:4]


def test_marks_that_a_block_gets_behind_its_copy_are_demoted_too() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1) or []
    pool.publish(block, CONTENT[0], (CONTENT[0],))
    pool.release([block])
    demote(pool, 1)
    (block,) = pool.match(CONTENT[:1])
    pool.set_marks(block, CONTENT[:3])
    pool.release([block])
    pool.drain_events()
    pool.allocate(1)
    pool.validate()
    assert set(pool.drain_events().demoted) == set(CONTENT[:3])
