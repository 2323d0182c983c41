"""What the further answers to a prompt take from the first one, without vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
from diptych.engine.options import EngineOptions, SchedulerLimits
from diptych.engine.sequence import Sequence
from diptych.engine.vllm.engine import VllmEngine
from diptych.protos.frames import Sampling, Token


@pytest.mark.parametrize(
    ("prompt_tokens", "prompt_blocks"),
    [
        (62, 0),
        (63, 0),  # the first answer's id fills the first block
        (64, 1),
        (127, 1),
    ],
)
def test_a_further_answer_takes_no_name_of_a_block_that_holds_the_first_ones_id(
    monkeypatch: pytest.MonkeyPatch, prompt_tokens: int, prompt_blocks: int
) -> None:
    started: list[Sequence] = []
    engine = VllmEngine.__new__(VllmEngine)
    engine.options = EngineOptions(Path("/nowhere"), limits=SchedulerLimits(block_tokens=64))
    engine.max_model_len = 1024
    monkeypatch.setattr(engine, "_start", lambda fork, state, tokens: started.append(fork))

    first = Sequence(
        ("request", 0), list(range(prompt_tokens)), prompt_tokens, Sampling(max_tokens=9, n=2)
    )
    first.token_ids.append(7)
    full_blocks = len(first.token_ids) // 64
    first.block_hashes = [b"%d" % index for index in range(full_blocks)]
    engine._book_further(first, 1, Token(8))

    (fork,) = started
    assert fork.token_ids == [*range(prompt_tokens), 8]
    assert fork.block_hashes == first.block_hashes[:prompt_blocks]
    assert len(first.block_hashes) == full_blocks, "the first answer keeps its own"
