"""The test at the start passes with this vLLM, and fails where blocks lie otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diptych.engine.errors import EngineError
from diptych.engine.options import EngineOptions, SchedulerLimits
from diptych.engine.sequence import Sequence
from diptych.engine.vllm import engine as hosted
from diptych.engine.vllm import self_test
from diptych.engine.vllm.engine import open_vllm
from diptych.engine.vllm.self_test import find_difference
from diptych.protos.frames import Sampling, Token

from tests.support.checkpoints import VOCAB
from tests.support.fleet import Reference

from ..kit.engine_conformance import (
    GREEDY,
    SEEDED,
    EngineKit,
    answer_tokens,
    assert_nothing_is_held,
    copy_blocks,
    prefill_elsewhere,
    reserve,
    run,
)
from .support import open_engine

LIMITS = SchedulerLimits(max_step_tokens=128)


def test_an_engine_that_opens_has_passed_and_counts_from_nought(
    checkpoint: Callable[[str], Path],
) -> None:
    engine = open_vllm(EngineOptions(checkpoint("llama"), kv_bytes=4 << 20, limits=LIMITS))
    assert_nothing_is_held(engine)
    observation = engine.observe()
    assert observation.prefill_tokens == observation.decode_steps == 0
    assert observation.hashes == observation.stored == [], "nobody is told of the test's blocks"


def test_an_engine_that_does_not_pass_is_closed(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise EngineError("other ids")

    monkeypatch.setattr(hosted, "check_moved_blocks", fail)
    hooks_before = dict(hosted.HOOKS)
    with pytest.raises(EngineError, match="other ids"):
        open_vllm(EngineOptions(checkpoint("llama"), kv_bytes=4 << 20, limits=LIMITS))
    assert hooks_before == hosted.HOOKS


def test_blocks_that_do_not_arrive_where_they_belong_are_found(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(checkpoint("llama"), LIMITS, blocks=16)
    copy = self_test._copy

    def copy_swapped(engine, source_blocks, target_blocks):  # type: ignore[no-untyped-def]
        copy(engine, source_blocks[::-1], target_blocks)

    monkeypatch.setattr(self_test, "_copy", copy_swapped)
    with pytest.raises(EngineError, match="lays its blocks out otherwise"):
        self_test.check_moved_blocks(engine, VOCAB)


def test_an_id_that_is_about_as_likely_is_no_difference_and_others_are() -> None:
    def token(token_id: int, *top: tuple[int, float]) -> Token:
        return Token(token_id, dict(top)[token_id], top)

    right = [token(7, (7, -1.0), (8, -1.02), (3, -4.0)), token(5, (5, -0.5), (6, -3.0))]
    other_text = [token(8, (8, -1.0), (7, -1.01), (3, -4.0)), token(9, (9, -0.1), (4, -4.0))]
    assert find_difference(right, right) is None
    assert find_difference(right, other_text) is None
    assert find_difference(right, other_text[:1])
    assert find_difference(right, [right[0], token(5, (5, -0.7), (6, -3.0))])
    assert find_difference(right, [right[0], token(6, (6, -0.5), (5, -3.0))])
    assert find_difference(right, [token(7, (7, -1.0), (2, -1.02), (3, -4.0)), right[1]])


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_what_a_reference_thinks_of_an_answer_tells_it_from_any_other(
    checkpoint: Callable[[str], Path], sampling: Sampling
) -> None:
    """Another prompt's text, and the text that damaged blocks give, can never pass."""
    folder = checkpoint("llama")
    kit = EngineKit(lambda limits, blocks: open_engine(folder, limits, blocks), VOCAB)
    reference = Reference(folder)
    engine = kit.open()
    for name, seed in (("own", 0), ("other", 1)):
        engine.add(kit.sequence(name, sampling, seed=seed))
    outputs = run(engine)
    assert reference.find_difference(kit.prompt(seed=0), answer_tokens(outputs, "own")) is None
    assert reference.find_difference(kit.prompt(seed=1), answer_tokens(outputs, "other")) is None
    assert reference.find_difference(kit.prompt(seed=0), answer_tokens(outputs, "other"))

    own = answer_tokens(outputs, "own")
    for damaged in range(-(-len(kit.prompt()) // kit.block_tokens)):
        found = own[:1] + decoded_with_a_foreign_block(kit, kit.sequence("own", sampling), damaged)
        assert find_difference(own, found), f"block {damaged}"
        assert reference.find_difference(kit.prompt(seed=0), found), f"block {damaged}"


def decoded_with_a_foreign_block(kit: EngineKit, sequence: Sequence, damaged: int) -> list[Token]:
    """The tokens behind the first, where one block of the KV is another prompt's."""
    prefill_engine, source_blocks, first_ids = prefill_elsewhere(kit, sequence)
    foreign_engine, foreign_blocks, _ = prefill_elsewhere(
        kit, kit.sequence("foreign", sequence.sampling, seed=9)
    )
    engine = kit.open()
    target_blocks = reserve(engine, sequence)
    assert target_blocks is not None
    copy_blocks(prefill_engine, source_blocks, engine, target_blocks)
    copy_blocks(foreign_engine, foreign_blocks[damaged:][:1], engine, target_blocks[damaged:][:1])
    sequence.token_ids.append(first_ids[0])
    engine.commit(sequence)
    return [output.token for output in run(engine) if output.token]
