"""How the hosting keeps requests between vLLM's steps, without vLLM."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from diptych.engine.commands import BlocksReserved
from diptych.engine.options import EngineOptions, SchedulerLimits
from diptych.engine.sequence import Sequence, SequenceOutput
from diptych.engine.vllm.engine import RESERVE_STEPS, VllmEngine
from diptych.engine.vllm.hosted_request import HostedRequest, RequestState
from diptych.protos.frames import Sampling

STEP_BUDGET = 128
POOL_BLOCKS = 4


@pytest.fixture
def engine() -> VllmEngine:
    engine = VllmEngine.__new__(VllmEngine)
    engine.options = EngineOptions(Path("/nowhere"), limits=SchedulerLimits(block_tokens=64))
    engine.max_model_len = POOL_BLOCKS * 64
    engine._block_pool = SimpleNamespace(num_gpu_blocks=POOL_BLOCKS + 1)
    engine._scheduler = SimpleNamespace(max_num_scheduled_tokens=STEP_BUDGET)
    engine._core = SimpleNamespace(abort_requests=lambda request_ids: None)  # type: ignore[assignment]
    engine._names = SimpleNamespace(forget_request=lambda request_id: None)  # type: ignore[assignment]
    engine._prefixes = SimpleNamespace(  # type: ignore[assignment]
        release=lambda attempt_key: None, unpin=lambda blocks: None
    )
    engine._requests = {}
    engine._deferred = []
    engine._drawing = set()
    engine._arrived = set()
    engine._pinned = {}
    engine._answers = []
    engine.reset_counters()
    return engine


def host(engine: VllmEngine, state: RequestState, preemptions: int = 0) -> HostedRequest:
    sequence = Sequence(("request", 0), list(range(100)), 100, Sampling(max_tokens=50))
    request = HostedRequest(sequence, state, 100)
    request.vllm_request = SimpleNamespace(num_preemptions=preemptions)
    engine._requests[request.request_id] = request
    return request


def test_a_reservation_is_not_refused_while_a_prompt_takes_the_steps(engine: VllmEngine) -> None:
    """vLLM looks at what waits only with the tokens that what runs has left."""
    request = host(engine, RequestState.RESERVING)
    engine._step_tokens = STEP_BUDGET
    for _ in range(10 * RESERVE_STEPS):
        engine._refuse_overdue_reservations()
    assert engine._answers == []
    assert request.state is RequestState.RESERVING

    engine._step_tokens = STEP_BUDGET - 1
    for _ in range(RESERVE_STEPS):
        assert engine._answers == []
        engine._refuse_overdue_reservations()
    assert engine._answers == [BlocksReserved(("request", 0), None)], "the pool is too full"
    assert engine._requests == {}


@pytest.mark.parametrize("leaves", [True, False])
def test_preemptions_count_once_however_a_request_ends(engine: VllmEngine, leaves: bool) -> None:
    """A client that leaves, and an answer that goes on elsewhere, have been preempted as well."""
    request = host(engine, RequestState.WAITING, preemptions=2)
    if not leaves:
        engine._end(request)
    engine.release(("request", 0))
    assert engine._preemptions == 2
    engine.release(("request", 0))
    assert engine._preemptions == 2


def test_preemptions_of_a_held_prompt_count_once(engine: VllmEngine) -> None:
    request = host(engine, RequestState.WAITING, preemptions=2)
    request.sequence.stop_after_first = True
    engine._pinned = {("request", 0): []}
    engine._end(request)
    assert request.state is RequestState.HELD
    engine.release(("request", 0))
    assert engine._preemptions == 2


@pytest.mark.parametrize(
    ("max_model_len", "setting"),
    [(POOL_BLOCKS * 64, "raise pools.*.engine.kv_mib"), (100, "model.max_model_len")],
)
def test_what_is_too_long_is_refused_with_the_limit_that_binds(
    engine: VllmEngine, max_model_len: int, setting: str
) -> None:
    engine.max_model_len = max_model_len
    engine.add(Sequence(("long", 0), list(range(max_model_len)), 100, Sampling(max_tokens=50)))
    (refusal,) = engine._answers
    assert isinstance(refusal, SequenceOutput)
    assert refusal.error is not None
    assert refusal.error.startswith(f"no_capacity: {max_model_len} tokens, and ")
    assert setting in refusal.error
    assert ("kv_mib" in refusal.error) == ("kv_mib" in setting)
