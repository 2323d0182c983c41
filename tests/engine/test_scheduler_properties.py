"""The scheduler under any order of events, on a pool where blocks hold what was computed.

The pool's memory is simulated: a slot holds a digest of the ids up to it, and a token is a function
of the digest in the last slot. So a block that is shared, reused or found again wrongly gives wrong
tokens, or a slot that is not what its reader expects.
"""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest
from diptych.engine.blocks import BlockPool
from diptych.engine.pacing import StepWork
from diptych.engine.scheduler import Scheduler, SchedulerLimits, StepPlan
from diptych.engine.sequence import Sequence
from diptych.kv_transfer.identity import block_hashes
from diptych.protos.frames import Sampling
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.support.examples import examples

SIZE = 4  #: tokens of a block
LONGEST = 28  #: ids of a sequence at its end, 7 blocks
SALT = b"salt"


def digest(ids: list[int]) -> bytes:
    return hashlib.blake2b(repr(ids).encode(), digest_size=8).digest()


def token_of(content: bytes) -> int:
    return content[0] % 3


class Machine(RuleBasedStateMachine):
    """The model: who must still end, and what every slot of the pool holds."""

    @initialize(
        blocks=st.integers(7, 12),
        step=st.sampled_from([4, 6, 16, 64]),
        running=st.integers(1, 6),
        growth=st.sampled_from([0, 0, 4, 32]),
        watermark=st.sampled_from([0.0, 0.0, 0.02, 0.3]),
        share=st.sampled_from([0.5, 0.75, 1.0]),
        budget=st.sampled_from([None, 0.002, 0.004]),
    )
    def begin(self, blocks, step, running, growth, watermark, share, budget) -> None:
        self.limits = SchedulerLimits(
            block_tokens=SIZE,
            max_step_tokens=step,
            max_running=running,
            growth_tokens=growth,
            watermark=watermark,
            held_share=share,
            itl_budget_s=budget,
            draft_tokens=3,
        )
        self.s = Scheduler(BlockPool(blocks + 1), self.limits, SALT)
        self.slots: dict[tuple[int, int], bytes] = {}
        self.made = 0
        self.due: set[str] = set()  #: must still end, here
        self.most: dict[str, int] = {}
        self.reserved: dict[str, Sequence] = {}
        self.prefilled: set[str] = set()
        self.staging: dict[tuple[str, int], list[int]] = {}  #: key -> the ids of its prefix
        self.known: dict[tuple[str, int], int] = {}
        self.demoting: set[int] = set()

    # ---- commands ----------------------------------------------------------------------------

    def sequence(self, length, most, family, deadline=0.0, first_only=False) -> Sequence:
        ids = [family] * min(length, 9) + [index % 2 for index in range(length - 9)]
        self.made += 1
        name = f"s{self.made}"
        most = min(most, LONGEST - length)
        self.most[name] = most
        hashes = block_hashes(ids, SALT, SIZE)
        return Sequence(
            (name, 0), ids, length, Sampling(most), hashes, first_only, deadline_s=deadline
        )

    @rule(
        length=st.integers(1, 14),
        most=st.integers(1, 24),
        family=st.integers(0, 1),
        deadline=st.sampled_from([0.0, 1.0, 2.0]),
        first_only=st.sampled_from([False, False, True]),
    )
    def add(self, length, most, family, deadline, first_only) -> None:
        one = self.sequence(length, most, family, deadline, first_only)
        self.due.add(one.attempt_key[0])
        self.s.add(one)

    @rule(
        lengths=st.lists(st.integers(1, 12), min_size=2, max_size=4),
        coming=st.integers(0, 2),
        first_only=st.sampled_from([False, False, True]),
    )
    def crowd(self, lengths, coming, first_only) -> None:
        """Short prompts and long answers: more than the pool holds at their end."""
        for index, length in enumerate(lengths):
            self.add(length, LONGEST, index % 2, 0.0, first_only)
        for index in range(coming):
            self.reserve(4 * index + 3, LONGEST, index)

    @rule(length=st.integers(1, 14), most=st.integers(8, 24), family=st.integers(0, 1))
    def reserve(self, length, most, family) -> None:
        one = self.sequence(length, most, family)
        before, waits = self.s.pool.available_blocks, any(w.was_preempted for w in self.s.waiting)
        growth = sum(self.may_grow(other) for other in self.s.live.values() if other.blocks)
        blocks = self.s.reserve(one)
        if blocks is None:
            assert (
                self.s.pool.available_blocks == before and one.attempt_key not in self.s.held_blocks
            )
            return
        assert not waits, "a preempted sequence goes first"
        assert self.s.pool.available_blocks >= min(self.s.growth_reserve_blocks, growth)
        assert len(blocks) >= self.s.blocks_for(length)
        self.reserved[one.attempt_key[0]] = one

    def may_grow(self, one: Sequence) -> int:
        whole = one.prompt_tokens + (0 if one.stop_after_first else self.most[one.attempt_key[0]])
        return max(0, -(-whole // SIZE) - len(one.blocks))

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def commit(self, data) -> None:
        one = self.reserved.pop(data.draw(st.sampled_from(sorted(self.reserved))))
        for position in range(len(one.token_ids)):  # the transfer, of what is not there
            if position < one.published_blocks * SIZE:
                slot = one.blocks[position // SIZE], position % SIZE
                assert self.slots[slot] == digest(one.token_ids[: position + 1]), "not its own KV"
            else:
                self.write(one, position)
        one.token_ids.append(token_of(digest(one.token_ids)))
        self.due.add(one.attempt_key[0])
        self.s.commit(one)

    @precondition(lambda self: len(self.s.live) > 3)
    @rule(data=st.data())
    def drop(self, data) -> None:
        key, _ = data.draw(st.sampled_from(sorted(self.s.live)))
        self.s.remove(key)
        self.forget(key[0])

    @precondition(lambda self: self.prefilled)
    @rule(data=st.data())
    def hand_over(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(self.prefilled)))
        self.s.remove((name, 0))
        self.forget(name)

    def forget(self, name: str) -> None:
        self.due.discard(name)
        self.prefilled.discard(name)
        self.reserved.pop(name, None)

    @rule(length=st.integers(4, 20), family=st.integers(0, 1), more=st.integers(0, 3))
    def stage(self, length, family, more) -> None:
        """A prefix of which `more` blocks than are known come from elsewhere; 0: it is pinned."""
        ids = [family] * min(length, 9) + [index % 2 for index in range(length - 9)]
        hashes = block_hashes(ids, SALT, SIZE)
        self.made += 1
        key, known = (f"p{self.made}", 0), self.s.pool.prefix_length(hashes)
        count = min(known + more, len(hashes)) if more else 0
        assert self.s.stage(key, hashes, count) == known
        blocks, _ = self.s.staged.get(key, ([], []))
        assert len(blocks) in ((0, known) if count <= known else (0, count))
        if blocks:
            self.staging[key], self.known[key] = ids, known

    @precondition(lambda self: self.staging)
    @rule(data=st.data(), arrives=st.integers(0, 5))
    def adopt(self, data, arrives) -> None:
        key = data.draw(st.sampled_from(sorted(self.staging)))
        ids, (blocks, _) = self.staging.pop(key), self.s.staged[key]
        for position in range(min(arrives, len(blocks)) * SIZE):
            block = blocks[position // SIZE]
            content = digest(ids[: position + 1])
            if self.s.pool.content(block) is not None:
                assert self.slots[block, position % SIZE] == content, "not its own KV"
            else:
                assert self.s.pool.references(block) == 1, "a shared block is written"
                self.slots[block, position % SIZE] = content
        self.s.cache_staged(key, min(arrives, len(blocks)))

    @rule(most=st.integers(1, 4))
    def demote(self, most) -> None:
        fresh = self.s.pool.pin_for_demotion(most)
        assert len(self.demoting) + len(fresh) <= max(most, len(self.demoting))
        self.demoting |= {block for block, _ in fresh}

    @precondition(lambda self: self.demoting)
    @rule(data=st.data(), kept=st.booleans())
    def demoted(self, data, kept) -> None:
        block = data.draw(st.sampled_from(sorted(self.demoting)))
        self.demoting.remove(block)
        self.s.pool.finish_demotion(block, kept)

    @precondition(lambda self: self.s.running)
    @rule(data=st.data(), count=st.integers(1, 6))
    def draft(self, data, count) -> None:
        index = data.draw(st.integers(0, len(self.s.running) - 1))
        self.s.running[index].drafts[:] = [0] * count

    # ---- steps -------------------------------------------------------------------------------

    @rule(times=st.integers(1, 20))
    def step(self, times) -> None:
        for _ in range(times):
            before = {one.arrival_number for one in self.s.waiting if one.was_preempted}
            plan = self.s.plan()
            self.check(plan)
            self.check_victims(before)
            if not plan:
                assert not self.s.plan(), "an empty plan stays empty"
                return
            self.carry_out(plan)

    def check(self, plan: StepPlan) -> None:
        planned = [one for one, _ in plan.prefill] + plan.decode
        assert len({one.attempt_key for one in planned}) == len(planned)
        assert len(self.s.running) + len(self.s.prefilling) <= self.limits.max_running
        assert sum(count for _, count in plan.prefill) <= self.limits.max_step_tokens
        for one, count in plan.prefill:
            end = one.computed_tokens + count
            assert count > 0 and (end % SIZE == 0 or end == len(one.token_ids))
        for one in plan.decode:
            assert one.computed_tokens == len(one.token_ids) - 1
            rows = 1 + len(one.drafts)
            assert len(one.blocks) >= self.s.blocks_for(one.computed_tokens + rows)
        coming = [one.blocks[one.published_blocks :] for one in self.reserved.values()]
        coming += [blocks[self.known[key] :] for key, (blocks, _) in self.s.staged.items()]
        reserved = {block for blocks in coming for block in blocks}
        used = {block for one in planned for block in one.blocks}
        assert not reserved & used, "a reserved block is in a batch"
        assert not {one.attempt_key[0] for one in planned} & set(self.reserved)

    def check_victims(self, before: set[int]) -> None:
        """Whoever could be taken and was not is older than those who were."""
        new = [
            w.arrival_number
            for w in self.s.waiting
            if w.was_preempted and w.arrival_number not in before
        ]
        movable = (*self.s.running, *self.s.ready, *self.s.prefilling)
        stay = [one.arrival_number for one in movable if not one.stop_after_first]
        assert not new or max(stay, default=0) < min(new), (new, stay)
        assert not any(w.stop_after_first and w.was_preempted for w in self.s.waiting)

    def write(self, one: Sequence, position: int) -> None:
        block = one.blocks[position // SIZE]
        assert self.s.pool.references(block) == 1, "a shared block is written"
        assert self.s.pool.content(block) is None, "a block of known content is written"
        self.slots[block, position % SIZE] = digest(one.token_ids[: position + 1])

    def carry_out(self, plan: StepPlan) -> None:
        rows = [*plan.prefill, *((one, 1) for one in plan.decode)]
        for one, count in rows:
            for position in range(one.computed_tokens):
                slot = one.blocks[position // SIZE], position % SIZE
                assert self.slots[slot] == digest(one.token_ids[: position + 1]), "not its own KV"
            for position in range(one.computed_tokens, one.computed_tokens + count):
                self.write(one, position)
        for one, count in rows:
            one.drafts.clear()
            if not self.s.record_computed(one, count):
                continue
            last = len(one.token_ids) - 1
            content = self.slots[one.blocks[last // SIZE], last % SIZE]
            self.sampled(one, self.s.append_token(one, token_of(content)))
        prefilled = sum(count for _, count in plan.prefill)
        seconds = 1e-3 + 3e-4 * len(plan.decode) + 1e-4 * prefilled
        self.s.cost.observe(seconds, StepWork(1, 1, prefilled, prefilled))

    def sampled(self, one: Sequence, finish: str | None) -> None:
        name = one.attempt_key[0]
        if one.stop_after_first:
            self.due.remove(name)
            self.prefilled.add(name)
            assert self.s.held_blocks[one.attempt_key] == one.blocks and one.generated_tokens == 1
        elif finish:
            self.due.remove(name)  # fails if it ends twice, or was dropped
            assert one.generated_tokens == self.most[name] and one.name not in self.s.live
            ids = one.token_ids[: one.prompt_tokens]
            while len(ids) < len(one.token_ids):
                ids.append(token_of(digest(ids)))
            assert ids == one.token_ids

    # ---- always ------------------------------------------------------------------------------

    @invariant()
    def every_block_is_in_one_place_and_has_its_owners(self) -> None:
        if not hasattr(self, "s"):
            return
        self.s.pool.validate()
        owners = Counter(block for one in self.s.live.values() for block in one.blocks)
        owners.update(block for blocks, _ in self.s.staged.values() for block in blocks)
        owners.update(self.demoting)
        references = {
            block: self.s.pool.references(block) for block in range(self.s.pool.total_blocks + 1)
        }
        assert owners == Counter(references)

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "s"):
            return
        lines = (self.s.waiting, self.s.prefilling, self.s.ready, self.s.running)
        standing = [one.attempt_key for line in lines for one in line]
        assert Counter([*standing, *self.s.held_blocks]) == Counter(key for key, _ in self.s.live)
        assert {key[0] for key in standing} == self.due
        assert {key[0] for key in self.s.held_blocks} == self.prefilled | set(self.reserved)
        ages = [one.arrival_number for one in self.s.live.values()]
        assert ages == sorted(ages), "in order of their coming, always"
        for line in lines:
            assert [line._key(one) for one in line] == sorted(line._key(one) for one in line)

    @invariant()
    def prefills_for_a_transfer_leave_their_share_of_the_pool(self) -> None:
        if not hasattr(self, "s"):
            return
        many = [one for one in self.s.live.values() if one.stop_after_first and one.blocks]
        blocks = {block for one in many for block in one.blocks}
        total = self.s.pool.total_blocks
        assert len(many) <= 1 or len(blocks) <= int(total * self.limits.held_share)

    def teardown(self) -> None:
        """Everything that is due ends, in a bounded number of steps, and the pool is whole."""
        if not hasattr(self, "s"):
            return
        for name in sorted(self.reserved):
            self.s.remove((name, 0))
            self.forget(name)
        for key in sorted(self.staging):
            self.s.remove(key)
        for block in sorted(self.demoting):
            self.s.pool.finish_demotion(block, True)
        for _ in range(100 * self.made + 10):
            for name in sorted(self.prefilled):
                self.s.remove((name, 0))
                self.forget(name)
            self.step(1)
            if not self.s.live:
                break
        assert not self.due and not self.s.live and self.s.pool.used_blocks == 0, self.s


TestScheduler = Machine.TestCase
TestScheduler.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


@pytest.mark.long
class TestSchedulerForLong(Machine.TestCase):
    settings = settings(max_examples=5000, stateful_step_count=80, deadline=None)
