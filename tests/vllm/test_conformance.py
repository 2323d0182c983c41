"""vLLM behind `EngineLike` passes the suite that our own engine passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diptych.engine.engine_like import EngineLike
from diptych.engine.options import SchedulerLimits

from tests.support.checkpoints import VOCAB

from ..kit.engine_conformance import CHECKS, EngineKit
from .support import open_engine


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_vllm(check: Callable[[EngineKit], None], checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("llama")

    def open_with_blocks(limits: SchedulerLimits, blocks: int) -> EngineLike:
        return open_engine(folder, limits, blocks)

    check(EngineKit(open_with_blocks, VOCAB))
