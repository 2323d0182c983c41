"""How the hosting keeps requests between vLLM's steps, without vLLM."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from diptych.engine.commands import BlocksReserved
from diptych.engine.options import EngineOptions, SchedulerLimits
from diptych.engine.sequence import Sequence, SequenceOutput
from diptych.engine.vllm import engine as engine_module
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


def answering(
    engine: VllmEngine, name: str, *, sampled: int = 10, computed: int | None = None
) -> HostedRequest:
    """An answer to a prompt of 100 ids that has gone on; `computed` of its ids have KV."""
    sequence = Sequence((name, 0), list(range(100 + sampled)), 100, Sampling(max_tokens=50))
    request = HostedRequest(sequence, RequestState.WAITING, 100, sampled_tokens=sampled)
    if computed is None:
        computed = 100 + sampled - 1
    request.vllm_request = SimpleNamespace(num_preemptions=0, num_computed_tokens=computed)
    engine._requests[request.request_id] = request
    return request


def budget_of_step(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many ids vLLM may compute in the engine's next step, which computes nothing."""
    budgets: list[int] = []

    def step_fn() -> tuple[None, bool]:
        budgets.append(engine._scheduler.max_num_scheduled_tokens)
        engine._step_tokens = 0
        return None, False

    engine._core = SimpleNamespace(step_fn=step_fn, post_step=lambda computed: None)  # type: ignore[assignment]
    engine._scheduler.has_requests = lambda: True
    engine._connector = None
    monkeypatch.setattr(engine_module, "give_worker_connector", lambda connector: None)
    engine.step()
    (budget,) = budgets
    return budget


def test_a_step_prefills_max_step_tokens_at_most(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer that goes on has a token of its own beside them, and prompts never get that."""
    engine.options = EngineOptions(
        Path("/nowhere"), limits=SchedulerLimits(block_tokens=64, max_step_tokens=64)
    )
    engine._step_tokens_limit = STEP_BUDGET
    waiting = host(engine, RequestState.WAITING)  # its prompt is to be computed
    waiting.vllm_request.num_computed_tokens = 0
    assert budget_of_step(engine, monkeypatch) == 64
    for name in ("a", "b"):
        answering(engine, name)
    assert budget_of_step(engine, monkeypatch) == 64 + 2, "answers wait for the prompt"
    answering(engine, "preempted", computed=0)
    answering(engine, "computed again in part", computed=64)
    assert budget_of_step(engine, monkeypatch) == 64 + 2, "what is computed again is prefill"


def test_a_step_has_no_more_ids_than_vllm_was_started_for(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.options = EngineOptions(
        Path("/nowhere"), limits=SchedulerLimits(block_tokens=64, max_step_tokens=STEP_BUDGET - 1)
    )
    engine._step_tokens_limit = STEP_BUDGET
    for name in "abc":
        answering(engine, name)
    assert budget_of_step(engine, monkeypatch) == STEP_BUDGET


def test_a_reservation_is_refused_by_the_budget_that_its_step_had(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that takes up a step has kept vLLM from looking, at whatever budget."""
    engine._step_tokens_limit = 10 * STEP_BUDGET
    request = host(engine, RequestState.RESERVING)
    budget = engine.limits.max_step_tokens
    assert budget_of_step(engine, monkeypatch) == budget
    assert request.waited_steps == 1, "the step had budget to spare"
    engine._step_tokens = budget
    engine._refuse_overdue_reservations()
    assert request.waited_steps == 1, "the step had none"


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
