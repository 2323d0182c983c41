"""The test at the start passes with this vLLM, and fails where blocks lie otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diptych.engine.errors import EngineError
from diptych.engine.options import EngineOptions, SchedulerLimits
from diptych.engine.vllm import self_test
from diptych.engine.vllm.engine import open_vllm

from tests.support.checkpoints import VOCAB

from ..kit.engine_conformance import assert_nothing_is_held
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
