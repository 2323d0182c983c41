"""The index: which block is where, what goes first, what is never lost unsaid (pure)."""

from collections import Counter

from diptych.kv_transfer.tiers.faults import Tier
from diptych.kv_transfer.tiers.gate import FAILURE_LIMIT, RETRY_LIMIT_S, RETRY_S, DiskGate
from diptych.kv_transfer.tiers.index import CopyToDisk, CopyToMemory, TierIndex
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.examples import examples

from .tiers_support import name

A, B, C, D, E = (name(n) for n in range(5))


def stored(index, *contents):
    for content in contents:
        assert index.begin_store(content) is not None
        index.end_store(content, ok=True)


def demoted(index):
    move = index.begin_move(writes=True)
    assert isinstance(move, CopyToDisk)
    index.end_move(move, ok=True)
    return move.content


def test_of_a_prefix_that_was_loaded_the_tail_leaves_memory_first() -> None:
    index = TierIndex(3)
    stored(index, A, B, C)
    assert index.pin_prefix([A, B, D]) == 2
    for content in (A, B):
        index.unpin(content)
    stored(index, D, E)  # C leaves, which was not used, and then B
    assert index.count_held([A]) == (1, 0) and index.count_held([B]) == (0, 0)


def test_what_left_its_last_tier_is_told_once_unless_it_is_back() -> None:
    index = TierIndex(2)
    index.attach_disk(1, [])
    stored(index, A, B)
    assert demoted(index) == A
    stored(index, C)  # A leaves memory, and stays on disk
    assert index.take_left() == [] and set(index.contents()) == {A, B, C}
    stored(index, D)  # B leaves memory, and is nowhere else
    assert index.take_left() == [B] and index.take_left() == []
    index.remove_copy(A, Tier.DISK, "checksum")
    stored(index, A)
    assert A not in index.take_left()
    index.detach_disk()
    assert set(index.take_left()).isdisjoint(index.contents())


def test_what_only_a_lost_disk_held_has_left() -> None:
    index = TierIndex(1)
    index.attach_disk(2, [])
    stored(index, A)
    assert demoted(index) == A
    stored(index, B)
    assert index.take_left() == []
    index.detach_disk()
    assert index.take_left() == [A] and index.contents() == [B]


def test_the_block_that_nobody_used_for_longest_leaves_memory() -> None:
    index = TierIndex(2)
    stored(index, A, B)
    assert index.begin_store(A) is None and A in index  # known: a use
    stored(index, C)
    assert index.count_held([A]) == (1, 0) and index.count_held([B]) == (0, 0)
    assert index.removal_reasons == {"evicted_before_disk": 1}


def test_memory_is_copied_to_disk_in_the_order_in_which_it_would_leave() -> None:
    index = TierIndex(3)
    index.attach_disk(3, [])
    stored(index, A, B, C)
    assert index.begin_store(A) is None
    assert [demoted(index) for _ in range(3)] == [B, C, A]
    assert index.begin_move(writes=True) is None


def test_a_block_that_is_on_disk_leaves_memory_without_a_loss() -> None:
    index = TierIndex(1)
    index.attach_disk(2, [])
    stored(index, A)
    demoted(index)
    stored(index, B)
    assert index.count_held([A, B]) == (1, 1) and not index.removal_reasons


def test_a_block_that_is_used_from_disk_comes_back_to_memory() -> None:
    index = TierIndex(1)
    index.attach_disk(2, [(A, 1)])
    assert index.pin_prefix([A])
    move = index.begin_move(writes=True)
    assert move == CopyToMemory(A, memory_slot=0, disk_slot=1)
    index.end_move(move, ok=True)
    index.unpin(A)
    assert index.find_slots(A) == (0, 1)


def test_the_block_that_was_used_last_comes_back_to_memory_first() -> None:
    index = TierIndex(2)
    index.attach_disk(2, [(A, 0), (B, 1)])
    assert index.pin_prefix([A]) and index.pin_prefix([B]) and index.pin_prefix([A])
    moves = [index.begin_move(writes=True) for _ in range(2)]
    assert [move.content for move in moves] == [A, B]


def test_a_promotion_takes_no_slot_whose_block_would_be_lost() -> None:
    index = TierIndex(1)
    index.attach_disk(1, [(A, 0)])
    stored(index, B)
    assert index.pin_prefix([A])
    assert index.begin_move(writes=True) is None  # and B cannot go to disk: A is pinned there
    assert index.count_held([B, A]) == (1, 1)


def test_what_is_pinned_is_evicted_from_neither_tier() -> None:
    index = TierIndex(1)
    index.attach_disk(1, [])
    stored(index, A)
    demoted(index)
    assert index.pin_prefix([A])
    assert index.begin_store(B) is None and B not in index
    index.unpin(A)
    stored(index, B)  # A is on disk only
    assert index.pin_prefix([A])
    assert index.begin_move(writes=True) is None
    index.unpin(A)
    assert demoted(index) == B and index.removal_reasons == {"evicted": 1}


def test_a_block_whose_copy_is_under_way_is_not_evicted() -> None:
    index = TierIndex(1)
    index.attach_disk(1, [])
    assert index.begin_store(A) == 0 and index.begin_store(B) is None
    index.end_store(A, ok=True)
    move = index.begin_move(writes=True)
    assert isinstance(move, CopyToDisk) and index.begin_store(B) is None
    index.end_move(move, ok=False)
    assert index.dirty_blocks == 1  # a failed write is to be tried again
    assert index.begin_store(B) == 0


def test_a_lost_disk_makes_misses_of_what_only_it_had() -> None:
    index = TierIndex(2)
    index.attach_disk(2, [(A, 0), (B, 1)])
    stored(index, B)
    assert index.pin_prefix([A])
    index.detach_disk()
    assert index.count_held([B, A]) == (1, 0) and index.dirty_blocks == 1
    index.unpin(A)
    assert A not in index and index.removal_reasons == {"detached": 1}


def test_without_leave_to_write_nothing_goes_to_disk() -> None:
    index = TierIndex(1)
    index.attach_disk(1, [])
    stored(index, A)
    assert index.begin_move(writes=False) is None


def test_the_gate_closes_after_failures_in_a_row_and_waits_longer_each_time() -> None:
    gate, now = DiskGate(), 100.0
    assert [gate.record_failure("io", now) for _ in range(FAILURE_LIMIT)] == [False, False, True]
    waits = []
    for _ in range(12):
        assert not gate.allows(gate.retry_at - 0.1) and gate.allows(gate.retry_at)
        waits.append(gate.retry_at - now)
        now = gate.retry_at
        assert not gate.record_failure("io", now)  # off already: one try, not three
    assert waits[:3] == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S] and waits[-1] == RETRY_LIMIT_S
    assert gate.record_success() and gate.allows(now) and not gate.record_success()


def test_failures_that_are_not_in_a_row_do_not_close_the_gate() -> None:
    gate = DiskGate()
    for _ in range(FAILURE_LIMIT):
        assert not gate.record_failure("io", 0.0)
        gate.record_success()
    assert gate.allows(0.0)


class IndexMachine(RuleBasedStateMachine):
    """Stores, loads and moves in flight at once, against a model of what must still be there."""

    contents = st.integers(0, 11).map(name)
    pick = st.integers(0, 1 << 16)

    def __init__(self) -> None:
        super().__init__()
        self.index = TierIndex(3)
        self.filling: list[bytes] = []
        self.moves: list[CopyToDisk | CopyToMemory] = []
        self.pins: Counter[bytes] = Counter()

    def places(self) -> dict[bytes, tuple]:
        return {content: self.index.find_slots(content) for content in map(name, range(12))}

    @rule(content=contents)
    def admit(self, content: bytes) -> None:
        busy = {m.memory_slot for m in self.moves} | {self.places()[c][0] for c in self.pins}
        slot = self.index.begin_store(content)
        if slot is not None:
            assert slot not in busy, "a slot in flight was given away"
            self.filling.append(content)

    @precondition(lambda self: self.filling)
    @rule(pick=pick, ok=st.booleans())
    def admitted(self, pick: int, ok: bool) -> None:
        content = self.filling.pop(pick % len(self.filling))
        self.index.end_store(content, ok)
        assert not ok or self.index.find_slots(content)[0] is not None

    @rule(content=contents)
    def pin(self, content: bytes) -> None:
        assert bool(self.index.pin_prefix([content])) == (
            self.index.count_held([content]) != (0, 0)
        )
        if self.index.count_held([content]) != (0, 0):
            self.pins[content] += 1

    @precondition(lambda self: self.pins)
    @rule(pick=pick)
    def unpin(self, pick: int) -> None:
        content = sorted(self.pins)[pick % len(self.pins)]
        self.index.unpin(content)
        self.pins -= Counter([content])

    @rule(writes=st.booleans())
    def next_move(self, writes: bool) -> None:
        before = self.places()
        move = self.index.begin_move(writes)
        if move is not None:
            memory, disk = before[move.content]
            assert (
                move.memory_slot == memory
                if isinstance(move, CopyToDisk)
                else move.disk_slot == disk
            )
            self.moves.append(move)

    @precondition(lambda self: self.moves)
    @rule(pick=pick, ok=st.booleans())
    def moved(self, pick: int, ok: bool) -> None:
        move = self.moves.pop(pick % len(self.moves))
        self.index.end_move(move, ok)
        assert not ok or self.index.find_slots(move.content) == (move.memory_slot, move.disk_slot)

    @precondition(lambda self: not self.moves)
    @rule(content=contents, tier=st.sampled_from(Tier))
    def lose(self, content: bytes, tier: Tier) -> None:
        if self.index.find_slots(content)[tier is Tier.DISK] is not None:
            self.index.remove_copy(content, tier, "checksum")

    @precondition(lambda self: not self.moves and not self.index.disk_slots)
    @rule(found=st.dictionaries(st.integers(0, 4), contents))
    def attach(self, found: dict[int, bytes]) -> None:
        self.index.attach_disk(5, [(content, slot) for slot, content in found.items()])
        assert all(self.index.find_slots(content)[1] is not None for content in found.values())

    @precondition(lambda self: not self.moves and self.index.disk_slots)
    @rule()
    def detach(self) -> None:
        self.index.detach_disk()

    @invariant()
    def every_block_is_where_it_is_said_to_be(self) -> None:
        self.index.validate()
        held = sum(where != (None, None) for where in self.places().values())
        assert self.index.memory_blocks <= 3 and self.index.disk_blocks <= 5
        assert self.index.entered_blocks - sum(self.index.removal_reasons.values()) == held, (
            "lost silently"
        )


class EvictionMachine(IndexMachine):
    """Without damage: what is pinned stays, whatever else happens."""

    def __init__(self) -> None:
        super().__init__()
        self.index.attach_disk(5, [])

    lose = detach = attach = None  # type: ignore[assignment]

    @invariant()
    def what_is_pinned_is_there(self) -> None:
        assert all(self.index.count_held([content]) != (0, 0) for content in self.pins)


IndexMachine.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=60)
EvictionMachine.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=60)
TestIndex = IndexMachine.TestCase
TestEviction = EvictionMachine.TestCase
