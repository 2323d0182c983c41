"""What a step that vLLM has scheduled counts as, without vLLM."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from diptych.engine.options import EngineOptions
from diptych.engine.sequence import Sequence
from diptych.engine.vllm.engine import VllmEngine
from diptych.engine.vllm.hosted_request import HostedRequest, RequestState
from diptych.protos.frames import Sampling

PROMPT_TOKENS = 100


def prefill_tokens_of_step(*, received: bool, preemptions: int, computed: int, count: int) -> int:
    """Return what a step counts in which vLLM computes `count` ids of a prompt that had begun."""
    sequence = Sequence(
        ("request", 0), list(range(PROMPT_TOKENS)), PROMPT_TOKENS, Sampling(max_tokens=50)
    )
    request = HostedRequest(sequence, RequestState.WAITING, PROMPT_TOKENS)
    request.received = received
    request.vllm_request = SimpleNamespace(num_preemptions=preemptions)
    engine = VllmEngine.__new__(VllmEngine)
    engine.options = EngineOptions(Path("/nowhere"))
    engine._requests = {request.request_id: request}
    engine._drawing = set()
    engine._filling = []
    engine.step_scheduled(
        SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[request.request_id], num_computed_tokens=[computed]
            ),
            num_scheduled_tokens={request.request_id: count},
            total_num_scheduled_tokens=count,
        )
    )
    return engine._step_prefill_tokens


@pytest.mark.parametrize(
    ("received", "preemptions", "computed", "count", "prefilled"),
    [
        (False, 0, 64, 36, 36),
        (True, 0, 99, 1, 0),  # vLLM computes the last id again, to sample behind it
        (True, 1, 0, 100, 100),  # its KV was given up, and has to be computed here
        (True, 1, 64, 46, 36),
        (True, 1, 110, 1, 0),  # it decodes again
    ],
)
def test_what_arrived_counts_as_prefilled_only_where_it_is_computed_again(
    received: bool, preemptions: int, computed: int, count: int, prefilled: int
) -> None:
    counted = prefill_tokens_of_step(
        received=received, preemptions=preemptions, computed=computed, count=count
    )
    assert counted == prefilled
