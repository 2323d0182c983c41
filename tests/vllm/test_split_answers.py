"""KV that one vLLM computes and another one goes on with: reservations, forced ids, preemption.

Two engines in one thread; a copy between their pools stands for the transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from diptych.engine.engine_like import EngineLike
from diptych.engine.options import SchedulerLimits
from diptych.engine.sequence import BlocksFilled, Sequence, SequenceOutput
from diptych.kv_transfer.slices import ALL_PIECES, Lane, LaneEnd
from diptych.protos.frames import Grammar, Sampling

from tests.support.checkpoints import VOCAB

from ..kit.engine_conformance import (
    EngineKit,
    answer,
    assert_nothing_is_held,
    copy_blocks,
    prefill_elsewhere,
    reserve,
    run,
)
from .support import open_engine

WAITING_STEPS = 50
SAMPLINGS = {
    "seed": Sampling(12, temperature=0.9, top_p=0.9, seed=7),
    "penalties": Sampling(12, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
    "min_tokens": Sampling(12, min_tokens=9, stop_ids=tuple(range(5, VOCAB, 2))),
    "regex": Sampling(12, temperature=0.8, seed=3, grammar=Grammar("regex", "[a-z]{40}")),
    "n": Sampling(12, temperature=1.0, seed=5, n=3),
}


@pytest.fixture
def kit(checkpoint: Callable[[str], Path]) -> EngineKit:
    folder = checkpoint("llama")

    def open_with_blocks(limits: SchedulerLimits, blocks: int) -> EngineLike:
        return open_engine(folder, limits, blocks)

    return EngineKit(open_with_blocks, VOCAB)


def unsplit(kit: EngineKit, name: str, sampling: Sampling, seed: int = 0) -> list[list[int]]:
    """The answers of one engine that does all by itself."""
    engine = kit.open()
    engine.add(kit.sequence(name, sampling, seed=seed))
    outputs = run(engine)
    return [answer(outputs, name, index) for index in range(sampling.n)]


def later_ids(outputs: list[SequenceOutput], name: str, index: int = 0) -> list[int]:
    """What a decode engine adds to the first id of an answer, in order."""
    added = [
        output
        for output in outputs
        if output.attempt_key[0] == name and output.answer_index == index and output.token
    ]
    assert [output.offset for output in added] == list(range(1, 1 + len(added)))
    return [output.token.id for output in added if output.token]


def test_nothing_is_computed_until_the_kv_has_come(kit: EngineKit) -> None:
    [expected] = unsplit(kit, "a", Sampling(8))
    engine = kit.open()
    free_before = engine.observe().free_blocks
    sequence = kit.sequence("a", Sampling(8))
    target_blocks = reserve(engine, sequence)
    assert target_blocks is not None
    for _ in range(WAITING_STEPS):
        assert engine.step() == []
    assert engine.statistics()["steps"] == 0
    assert engine.observe().free_blocks == free_before - len(target_blocks)
    prefill_engine, source_blocks, first_ids = prefill_elsewhere(kit, sequence)
    copy_blocks(prefill_engine, source_blocks, engine, target_blocks)
    sequence.token_ids.append(first_ids[0])
    engine.commit(sequence)
    assert first_ids + later_ids(run(engine), "a") == expected
    assert engine.statistics()["prefill_tokens"] == 0
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_a_split_answer_is_the_unsplit_one(kit: EngineKit, sampling: Sampling) -> None:
    expected = unsplit(kit, "a", sampling)
    assert all(len(token_ids) > 1 for token_ids in expected), "nothing is left to decode elsewhere"
    sequence = kit.sequence("a", sampling)
    prefill_engine, source_blocks, first_ids = prefill_elsewhere(kit, sequence)
    engine = kit.open()
    target_blocks = reserve(engine, sequence)
    assert target_blocks is not None
    copy_blocks(prefill_engine, source_blocks, engine, target_blocks)
    sequence.token_ids.append(first_ids[0])
    engine.commit(sequence, tuple(enumerate(first_ids[1:], 1)))
    outputs = run(engine)
    split = [
        [first_id, *later_ids(outputs, "a", index)] for index, first_id in enumerate(first_ids)
    ]
    assert split == expected
    assert_nothing_is_held(engine)


def test_equal_prompts_in_one_step_send_what_was_computed(kit: EngineKit) -> None:
    """The second one's leading block is a cached one whose KV the same forward pass computes."""
    length = 100
    kit.limits = replace(kit.limits, max_step_tokens=2 * length)
    names = ("a", "b")
    prefill_engine, decode_engine = kit.open(), kit.open()
    lane = Lane(LaneEnd(prefill_engine.kv_pool.layout), LaneEnd(decode_engine.kv_pool.layout))
    received = {name: kit.sequence(name, Sampling(8), length=length) for name in names}
    targets = {name: reserve(decode_engine, sequence) for name, sequence in received.items()}
    sources: dict[str, dict[int, int]] = {name: {} for name in names}

    def push(filled_ranges: list[BlocksFilled]) -> None:
        """Copies at once, as a fast transport does."""
        for filled in filled_ranges:
            name = filled.attempt_key[0]
            sources[name].update(enumerate(filled.blocks, filled.first_block))
            target_blocks = targets[name]
            assert target_blocks is not None
            chosen = target_blocks[filled.first_block :][: len(filled.blocks)]
            spans = lane.spans(filled.blocks, chosen, filled.piece)
            size = spans.unit_bytes
            for source, target in zip(
                spans.source_units.tolist(), spans.target_units.tolist(), strict=True
            ):
                content = prefill_engine.kv_pool.view[source * size : (source + 1) * size]
                decode_engine.kv_pool.view[target * size : (target + 1) * size] = content

    prefill_engine.announce_filled = push
    for name in names:
        prefill_engine.add(kit.sequence(name, Sampling(8), length=length, stop_after_first=True))
    outputs = run(prefill_engine)
    assert prefill_engine.statistics()["steps"] == 1, "they were not computed in one step"
    assert max(output.hit_tokens for output in outputs) == kit.block_tokens, "no block was shared"

    for name in names:
        target_blocks = targets[name]
        assert target_blocks is not None
        source_blocks = [sources[name][index] for index in sorted(sources[name])]
        assert len(source_blocks) == 2
        spans = lane.spans(source_blocks, target_blocks[:2], ALL_PIECES)
        size = spans.unit_bytes
        for source, target in zip(
            spans.source_units.tolist(), spans.target_units.tolist(), strict=True
        ):
            computed = bytes(prefill_engine.kv_pool.view[source * size : (source + 1) * size])
            arrived = bytes(decode_engine.kv_pool.view[target * size : (target + 1) * size])
            assert arrived == computed, f"{name}: sent before it was computed"
            assert any(computed)


def test_a_preempted_answer_goes_on_with_the_same_ids(kit: EngineKit) -> None:
    """Its KV is computed again here: nobody sends it a second time."""
    kit.limits = SchedulerLimits(max_step_tokens=128, growth_tokens=1)
    sampling = Sampling(150)
    names = ("a", "b")
    expected = {name: unsplit(kit, name, sampling, seed)[0] for seed, name in enumerate(names)}
    # Each grows from 4 blocks to 6: both together do not fit.
    engine = kit.open(9)
    sequences: dict[str, Sequence] = {}
    first_ids: dict[str, list[int]] = {}
    for seed, name in enumerate(names):
        sequence = kit.sequence(name, sampling, seed=seed)
        prefill_engine, source_blocks, first_ids[name] = prefill_elsewhere(kit, sequence)
        target_blocks = reserve(engine, sequence)
        assert target_blocks is not None
        copy_blocks(prefill_engine, source_blocks, engine, target_blocks)
        sequences[name] = sequence
    for name, sequence in sequences.items():
        sequence.token_ids.append(first_ids[name][0])
        engine.commit(sequence)
    preempted: list[int] = []

    def observe() -> None:
        preempted.append(engine.observe().preempted_sequences)

    outputs = run(engine, observe)  # fails if a reservation is answered again
    assert engine.statistics()["preemptions"] > 0, "both have fitted"
    assert max(preempted) == 1, "the router does not hear that one waits"
    assert preempted[-1] == 0
    for name in names:
        assert first_ids[name] + later_ids(outputs, name) == expected[name]
    assert_nothing_is_held(engine)


def test_what_does_not_fit_beside_pins_waits_or_is_refused(kit: EngineKit) -> None:
    """Pins last as long as a transfer, whose time is bounded."""
    engine = kit.open(8)
    engine.add(kit.sequence("pinned", stop_after_first=True))
    run(engine)
    assert reserve(engine, kit.sequence("reserved", length=380, seed=1)) is None
    big = kit.sequence("big", Sampling(2), length=380, seed=2)
    engine.add(big)
    for _ in range(WAITING_STEPS):
        assert engine.step() == []
    assert not engine.idle(), "it would sleep, and never look again"
    engine.release(("pinned", 0))
    assert len(answer(run(engine), "big")) == 2
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("stop_after_first", [True, False])
def test_what_can_never_fit_is_refused_at_once(kit: EngineKit, stop_after_first: bool) -> None:
    """vLLM itself would wait for blocks for ever."""
    engine = kit.open(4)
    length = 4 * kit.block_tokens
    engine.add(kit.sequence("big", length=length, stop_after_first=stop_after_first))
    engine.add(kit.sequence("small", Sampling(2), length=100, seed=1))
    outputs = run(engine)
    (refused,) = [output for output in outputs if output.error]
    assert refused.attempt_key == ("big", 0)
    assert refused.error and refused.error.startswith("no_capacity: 256 tokens")
    assert "raise pools.*.engine.kv_mib" in refused.error
    assert len(answer(outputs, "small")) == 2
    assert reserve(engine, kit.sequence("big", length=length)) is None
    assert_nothing_is_held(engine)


def test_several_answers_end_where_the_pool_has_no_room_for_a_further_id(kit: EngineKit) -> None:
    """Each has the first id of its own, and vLLM has no more to compute."""
    engine = kit.open(4)
    sampling = Sampling(12, temperature=1.0, seed=5, n=3)
    engine.add(kit.sequence("full", sampling, length=4 * kit.block_tokens - 1))
    outputs = run(engine)
    assert [output.finish_reason for output in outputs] == ["length"] * 3
    assert [len(answer(outputs, "full", index)) for index in range(3)] == [1, 1, 1]
    assert_nothing_is_held(engine)


def test_blocks_of_an_answer_that_grows_are_counted_as_its_own(kit: EngineKit) -> None:
    """Control adds up what attempts hold, to find blocks that nobody gives back."""
    engine = kit.open()
    sequence = kit.sequence("a", Sampling(150))
    prefill_engine, source_blocks, first_ids = prefill_elsewhere(kit, sequence)
    target_blocks = reserve(engine, sequence)
    assert target_blocks is not None
    assert dict(engine.block_holders()) == {("a", 0): len(target_blocks)}
    copy_blocks(prefill_engine, source_blocks, engine, target_blocks)
    sequence.token_ids.append(first_ids[0])
    engine.commit(sequence)
    held: list[int] = []

    def observe() -> None:
        held.extend(dict(engine.block_holders()).values())

    run(engine, observe)
    assert max(held) == kit.blocks_for(sequence) > len(target_blocks)


def test_vllms_own_statistics_are_those_of_its_scheduler(kit: EngineKit) -> None:
    engine = kit.open()
    engine.add(kit.sequence("a"))
    running: list[float] = []
    usage: list[float] = []

    def observe() -> None:
        told = engine.statistics()["vllm"]
        running.append(told["running_requests"])
        usage.append(told["kv_cache_usage_ratio"])

    run(engine, observe)
    assert max(running) == 1 and 0 < max(usage) < 1
    engine.add(kit.sequence("again"))
    run(engine)
    told = engine.statistics()["vllm"]
    assert told["prefix_cache_queries_total"] == 2 * 200
    assert told["prefix_cache_hits_total"] == 3 * kit.block_tokens
