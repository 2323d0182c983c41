"""Two whole workers with vLLM: prefixes from a peer, logprobs of prompts, a worker that dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from diptych.engine.options import EngineOptions, SchedulerLimits
from diptych.engine.sequence import SequenceOutput
from diptych.engine.vllm.engine import VllmEngine
from diptych.kv_transfer.identity import block_hashes, partition_salt
from diptych.kv_transfer.slices import ALL_PIECES, Lane, LaneEnd
from diptych.protos.frames import Sampling

from tests.support.checkpoints import VOCAB

from ..kit.engine_conformance import EngineKit, answer, run
from .pair import PREFILL, Pair
from .support import open_engine
from .test_transfer_faults import new_name, new_prompt

LIMITS = SchedulerLimits(max_step_tokens=128, growth_tokens=64)


@pytest.fixture(params=["nixl", "tcp"])
def pair(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Iterator[Pair]:
    if request.param == "nixl":
        pytest.importorskip("nixl", reason="NIXL has no wheel for this platform")
    pair = Pair(checkpoint("llama"), request.param)
    yield pair
    pair.close()


def cached_content(engine: Any, token_ids: list[int]) -> list[bytes]:
    """The bytes of each cached full block of a prompt, in its order."""
    end = LaneEnd(engine.kv_pool.layout)
    contents: list[bytes] = []
    for content in block_hashes(token_ids, partition_salt(engine._salt, b""), LIMITS.block_tokens):
        their_hash = engine._names.their_hash(content)
        if their_hash is None:
            break
        number = engine._block_pool.get_cached_block(their_hash, [0])[0].block_id
        spans = Lane(end, end).spans([number], [number], ALL_PIECES)
        size = spans.unit_bytes
        units = spans.source_units.tolist()
        contents.append(
            b"".join(bytes(engine.kv_pool.view[unit * size : (unit + 1) * size]) for unit in units)
        )
    return contents


def test_a_prefix_from_a_peer_has_its_bytes_and_gives_the_same_answer(pair: Pair) -> None:
    async def scenario() -> None:
        ids = new_prompt(300)
        expected = await pair.ask(ids)
        await pair.whole()
        decode: Any = pair.decode.engine
        assert decode._scheduler.reset_prefix_cache()
        decode.observe()
        assert not cached_content(decode, ids), "decode has the prefix anyhow"
        held = cached_content(pair.prefill.engine, ids)
        assert len(held) == 300 // LIMITS.block_tokens and any(any(block) for block in held)
        sent_before = pair.wires[PREFILL].write_count
        computed_before = decode.observe().prefill_tokens
        assert await pair.alone(ids, b"", prefix_holder=PREFILL) == expected
        assert pair.wires[PREFILL].write_count > sent_before
        computed = decode.observe().prefill_tokens - computed_before
        assert computed == 300 - len(held) * LIMITS.block_tokens, "the prefix was computed again"
        assert cached_content(decode, ids)[: len(held)] == held
        await pair.whole()

    pair.run(scenario())


def test_a_prompts_logprobs_come_once_and_from_prefill(pair: Pair) -> None:
    async def scenario() -> None:
        ids = new_prompt(300)
        expected = await pair.alone(ids)
        outcome = pair.begin(
            new_name(), 0, ids, sampling=Sampling(8, logprobs=2, prompt_logprobs=2)
        )
        await pair.until(lambda: bool(outcome.finished or outcome.failures))
        assert not outcome.failures, outcome
        assert outcome.token_ids[0] == expected
        assert [score.id for score in outcome.prompt_scores] == ids[1:]
        for score in outcome.prompt_scores:
            assert score.rank and score.rank >= 1 and score.logprob is not None
            assert len(score.top) == 2 and score.top[0][1] >= score.top[1][1]
            assert (score.rank == 1) == (score.top[0][0] == score.id)
        assert pair.decode.engine.observe().prefill_tokens == 300, "only the first, alone"
        await pair.whole()

    pair.run(scenario())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_whose_engine_died_says_so_to_its_health_check(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By that check the process ends, and the router sees that it hangs up."""
    pair = Pair(checkpoint("llama"), "tcp")

    def fail(*arguments: Any) -> None:
        raise RuntimeError("it fails on purpose")

    try:
        pair.decode.check()
        monkeypatch.setattr(pair.decode.engine, "sample", fail)
        with pytest.raises(RuntimeError):
            pair.run(pair.ask(new_prompt()))
        with pytest.raises(RuntimeError, match="engine"):
            pair.decode.check()
        pair.prefill.check()
    finally:
        pair.close()


# ---- one engine ----------------------------------------------------------------------------------


def first_tokens(outputs: list[SequenceOutput]) -> list[str]:
    return [output.attempt_key[0] for output in outputs if output.token and output.offset == 0]


def test_prompts_are_computed_in_the_order_of_their_deadlines(
    checkpoint: Callable[[str], Path],
) -> None:
    """Whichever came first; what is in the background comes last."""
    folder = checkpoint("llama")  # a step has room for no more than one prompt
    kit = EngineKit(lambda limits, blocks: open_engine(folder, limits, blocks), VOCAB, LIMITS)
    for stop_after_first in (False, True):
        engine = kit.open(40)
        deadlines = {"late": 90.0, "none of its own": 1.0, "early": 30.0, "middle": 60.0}
        for seed, (name, deadline_s) in enumerate(deadlines.items()):
            sequence = kit.sequence(name, seed=seed, stop_after_first=stop_after_first)
            sequence.deadline_s = deadline_s
            sequence.background = name == "none of its own"
            engine.add(sequence)
        order = first_tokens(run(engine))
        assert order == ["early", "middle", "late", "none of its own"]


def test_a_step_of_vllm_prefills_max_step_tokens_at_most(
    checkpoint: Callable[[str], Path],
) -> None:
    """Beside nothing, and beside an answer that goes on: that has a token of its own."""
    folder = checkpoint("llama")
    kit = EngineKit(lambda limits, blocks: open_engine(folder, limits, blocks), VOCAB, LIMITS)
    engine = kit.open(40)
    engine.add(kit.sequence("first", Sampling(20), length=300))
    computed: list[int] = []
    for _ in range(3):
        engine.step()
        computed.append(engine.statistics()["prefill_tokens"])
    assert computed == [128, 256, 300]
    engine.add(kit.sequence("second", Sampling(2), length=300, seed=1))
    outputs = engine.step()
    assert engine.statistics()["prefill_tokens"] == 300 + 128
    assert [output.attempt_key[0] for output in outputs] == ["first"], "it waits for the prompt"


def test_an_argument_of_the_operator_reaches_vllm(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("llama")

    def opened(**arguments: Any) -> VllmEngine:
        options = EngineOptions(
            folder, kv_bytes=4 << 20, limits=LIMITS, vllm_arguments=dict(arguments)
        )
        return VllmEngine(options)

    kit = EngineKit(lambda limits, blocks: opened(), VOCAB, LIMITS)
    usual = opened()
    changed = opened(hf_overrides={"rms_norm_eps": 0.5}, long_prefill_token_threshold=32)
    settings = changed._core.vllm_config.scheduler_config
    assert settings.long_prefill_token_threshold == 32
    answers: list[list[int]] = []
    for engine in (usual, changed):
        engine.add(kit.sequence("a"))
        answers.append(answer(run(engine), "a"))
    assert answers[0] != answers[1], "the model's numbers are as without it"
    assert changed.compatibility != usual.compatibility
