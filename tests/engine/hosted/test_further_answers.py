"""What the further answers to a prompt take from the first one, without vLLM."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diptych.engine.options import EngineOptions, SchedulerLimits
from diptych.engine.sequence import Sequence, SequenceOutput
from diptych.engine.vllm.engine import VllmEngine
from diptych.engine.vllm.hosted_request import HostedRequest, RequestState
from diptych.protos.frames import Grammar, Sampling

VOCABULARY = 256
ONLY_IDS = (7, 8)  #: What the grammar of these tests admits, one of them.


class OneIdMatcher:
    """Stands for a `GrammarMatcher` of a choice between ids: complete behind one of them."""

    def __init__(self) -> None:
        self.consumed_tokens = 0
        self.complete = False
        self.allowed = np.zeros(VOCABULARY, bool)
        self.allowed[list(ONLY_IDS)] = True

    def consume(self, token_ids: list[int]) -> None:
        self.consumed_tokens += len(token_ids)
        self.complete = True
        self.allowed[:] = False


@pytest.fixture
def started() -> list[Sequence]:
    return []


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, started: list[Sequence]) -> VllmEngine:
    engine = VllmEngine.__new__(VllmEngine)
    engine.options = EngineOptions(Path("/nowhere"), limits=SchedulerLimits(block_tokens=64))
    engine.max_model_len = 1024
    engine._salt = b"salt"
    engine._requests = {}
    engine._drawing = set()
    engine._pinned = {}
    engine._grammars = SimpleNamespace(  # type: ignore[assignment]
        matcher=lambda grammar, stop_ids: OneIdMatcher()
    )
    engine._names = SimpleNamespace(  # type: ignore[assignment]
        learn=lambda *arguments: None, forget_request=lambda request_id: None
    )
    engine._core = SimpleNamespace(abort_requests=lambda request_ids: None)  # type: ignore[assignment]
    engine.reset_counters()
    monkeypatch.setattr(engine, "_start", lambda fork, state, tokens: started.append(fork))
    return engine


def compute_prompt(engine: VllmEngine, first: Sequence, logits: torch.Tensor) -> list[object]:
    """Draw the first ids of a prompt's answers, as vLLM has computed it; return what is booked."""
    request = HostedRequest(first, RequestState.WAITING, first.prompt_tokens)
    full_blocks = (first.prompt_tokens + 1) // engine.limits.block_tokens
    request.vllm_request = SimpleNamespace(
        num_preemptions=0, block_hashes=[b"theirs"] * full_blocks
    )
    engine._requests[request.request_id] = request
    engine._drawing.add(request.request_id)
    engine.sample(logits[None], {0: request.request_id})
    output = SimpleNamespace(
        request_id=request.request_id,
        new_token_ids=[int(logits.argmax())],
        finished=False,
        new_prompt_logprobs_tensors=None,
    )
    return list(engine._book(output))  # type: ignore[arg-type]


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
    engine: VllmEngine, started: list[Sequence], prompt_tokens: int, prompt_blocks: int
) -> None:
    sampling = Sampling(max_tokens=9, temperature=1.0, n=2)
    first = Sequence(("request", 0), list(range(prompt_tokens)), prompt_tokens, sampling)
    first.block_hashes = [b"%d" % index for index in range(prompt_blocks)]
    compute_prompt(engine, first, torch.zeros(VOCABULARY))

    (fork,) = started
    assert fork.token_ids[:-1] == first.token_ids[:-1] == list(range(prompt_tokens))
    assert fork.token_ids[-1] != first.token_ids[-1], "take another seed"
    assert fork.block_hashes == first.block_hashes[:prompt_blocks]
    full_blocks = len(first.token_ids) // 64
    assert len(first.block_hashes) == full_blocks, "the first answer keeps its own"


@pytest.mark.parametrize("stop_after_first", [False, True])
def test_every_answer_ends_with_the_id_that_completes_its_grammar(
    engine: VllmEngine, started: list[Sequence], stop_after_first: bool
) -> None:
    """Without stop ids no id is allowed behind it: an answer that went on would fail."""
    sampling = Sampling(max_tokens=9, temperature=1.0, n=3, grammar=Grammar("regex", "yes|no"))
    first = Sequence(
        ("request", 0), list(range(10)), 10, sampling, stop_after_first=stop_after_first
    )
    events = compute_prompt(engine, first, torch.zeros(VOCABULARY))
    outputs = [event for event in events if isinstance(event, SequenceOutput)]
    assert [output.answer_index for output in outputs] == [0, 1, 2]
    assert all(output.token and output.token.id in ONLY_IDS for output in outputs)
    assert [output.finish_reason for output in outputs] == ["stop", "stop", "stop"]
    assert started == [], "an answer that has ended goes on"
