"""Which peers a hosted vLLM exchanges KV with, and what becomes of a worker whose engine raises."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from diptych.engine.commands import AddSequence
from diptych.engine.engine import Engine
from diptych.engine.loop import EngineThread
from diptych.engine.options import EngineOptions, SchedulerLimits
from diptych.engine.vllm import internals
from diptych.engine.vllm.engine import VllmEngine
from diptych.engine.vllm.pool import describe_format, format_hash
from diptych.kv_transfer.layout import KVLayout
from diptych.protos.frames import CancelAttempt

from ..kit.engine_conformance import EngineKit
from .pair import PREFILL, Pair
from .support import open_engine
from .test_transfer_faults import failed, new_name, new_prompt

LIMITS = SchedulerLimits(max_step_tokens=128, growth_tokens=64)
ATTEMPTS = 5
DEATH_S = 10.0  #: A worker must notice within 1 s; a loaded machine may be slower to look.


@pytest.fixture(scope="module")
def pair(checkpoint: Callable[[str], Path]) -> Iterator[Pair]:
    pair = Pair(checkpoint("llama"), "tcp")
    yield pair
    pair.close()


@dataclass(frozen=True)
class Other:
    """What another worker's engine would tell of itself, and what is said of the difference."""

    facts: dict[str, str]
    layout: KVLayout
    words: str

    @property
    def compatibility(self) -> bytes:
        return format_hash(self.layout, self.facts)


def facts_of(engine: VllmEngine, layout: KVLayout, **arguments: Any) -> dict[str, str]:
    """What the engine would tell of itself now, after some part of it was replaced."""
    attention = internals.describe_attention(engine._core.vllm_config, engine._layer_numbers)
    return describe_format(layout, engine._salt, attention, arguments, adapters={})


def of_another_isa(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> Other:
    monkeypatch.setattr(internals, "_cpu_instruction_set", lambda config, layer: "another")
    context = engine._core.vllm_config.compilation_config.static_forward_context
    for name in engine._layer_numbers:
        if hasattr(context[name], "isa"):
            monkeypatch.setattr(context[name], "isa", "another")
    layout = engine.kv_pool.layout
    return Other(facts_of(engine, layout), layout, "instruction set: another (here: ")


def of_another_version(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> Other:
    monkeypatch.setattr(internals, "check_version", lambda: "0.32.99")
    layout = engine.kv_pool.layout
    return Other(facts_of(engine, layout), layout, "version of vLLM: 0.32.99 (here: 0.32.")


def of_another_order(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> Other:
    monkeypatch.setattr(engine._core.vllm_config.cache_config, "kv_cache_layout", "BLHNC")
    layout = engine.kv_pool.layout
    return Other(facts_of(engine, layout), layout, "layout of the KV cache: BLHNC (here: ")


def of_another_block_size(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> Other:
    layout = replace(engine.kv_pool.layout, block_tokens=128)
    return Other(facts_of(engine, layout), layout, "tokens of a block: 128 (here: 64)")


def of_other_numbers(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> Other:
    layout = engine.kv_pool.layout
    facts = facts_of(engine, layout, hf_overrides={"rope_theta": 1.0}, load_format="auto")
    return Other(facts, layout, 'engine.vllm: {"hf_overrides": {"rope_theta": 1.0}} (here: {})')


def of_another_kind(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> Other:
    """Our own engine with the same checkpoint."""
    own = Engine(EngineOptions(engine.options.model_folder, kv_bytes=8 << 20, limits=LIMITS))
    try:
        return Other(own.format_facts, own.kv_pool.layout, "engine: diptych (here: vllm)")
    finally:
        own.close()


def of_another_adapter(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> Other:
    layout = engine.kv_pool.layout
    attention = internals.describe_attention(engine._core.vllm_config, engine._layer_numbers)
    facts = describe_format(layout, engine._salt, attention, {}, adapters={"sql": b"1"})
    return Other(facts, layout, 'adapters: {"sql": "31"} (here: ')


@pytest.mark.parametrize(
    "change",
    [
        of_another_adapter,
        of_another_isa,
        of_another_version,
        of_another_order,
        of_another_block_size,
        of_other_numbers,
        of_another_kind,
    ],
)
def test_a_peer_of_another_format_is_refused_by_name_before_a_byte(
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[VllmEngine, pytest.MonkeyPatch], Other],
) -> None:
    engine: Any = pair.prefill.engine
    same = format_hash(engine.kv_pool.layout, facts_of(engine, engine.kv_pool.layout))
    assert same == pair.decode.engine.compatibility
    with monkeypatch.context() as patches:
        other = change(engine, patches)
    assert other.compatibility != same

    async def scenario() -> None:
        sent_before = pair.wires[PREFILL].write_count
        pair.decode.lose_peer(PREFILL)
        pair.decode.add_peer(
            PREFILL,
            [
                msgspec.structs.replace(
                    card,
                    compatibility=other.compatibility,
                    facts=other.facts,
                    layout=other.layout,
                )
                for card in pair.cards[PREFILL]
            ],
        )
        outcome = pair.begin(new_name(), 0, new_prompt())
        await failed(pair, outcome, "kv_peer_lost", "kv_no_offer", "kv_aborted")
        assert pair.wires[PREFILL].write_count == sent_before
        await pair.until(lambda: bool(pair.decode.transfers.statistics()["refused_peers"]))
        refused = pair.decode.statistics()["transfer"]["refused_peers"]
        assert list(refused) == [f"{PREFILL}:0"] and other.words in refused[f"{PREFILL}:0"]
        assert len(refused[f"{PREFILL}:0"].split("; ")) == 1, "more is said to differ than does"
        assert other.words in caplog.text
        probed = await pair.decode.probe(PREFILL, 1 << 20)
        assert other.words in probed["reason"], "diptych doctor does not say why"
        key = next(key for key, one in pair.outcomes.items() if one is outcome)
        pair.prefill.cancel(CancelAttempt(key))
        await pair.whole()
        pair.decode.lose_peer(PREFILL)
        pair.decode.add_peer(PREFILL, pair.cards[PREFILL])
        await served_again(pair)
        assert not pair.decode.statistics()["transfer"]["refused_peers"]

    pair.run(scenario())


async def served_again(pair: Pair) -> None:
    """With the right card all is well. Prefill may only now see that it was hung up on: then the
    first attempt fails, and the gateway makes another.
    """
    name, ids = new_name(), new_prompt()
    for attempt in range(ATTEMPTS):
        outcome = pair.begin(name, attempt, ids)
        await pair.until(lambda outcome=outcome: bool(outcome.finished or outcome.failures))
        if outcome.finished:
            break
        assert outcome.reasons[0] == "kv_peer_lost", outcome
        for core in (pair.prefill, pair.decode):
            core.cancel(CancelAttempt((name, attempt)))
        await pair.whole()
    assert outcome.token_ids[0] == await pair.alone(ids)


@pytest.mark.parametrize("hook", ["expected_tokens", "step_scheduled", "layer_saved", "sample"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_hook_that_raises_ends_the_engines_thread(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    """The worker's health check sees that; no output of the step is delivered."""
    engine = open_engine(checkpoint("llama"), LIMITS, 24)
    kit = EngineKit(lambda limits, blocks: engine, 512)
    delivered: list[Any] = []

    def fail(*arguments: Any) -> None:
        raise RuntimeError(f"{hook} fails on purpose")

    monkeypatch.setattr(engine, hook, fail)
    thread = EngineThread(engine, delivered.extend)
    thread.start()
    assert thread.alive
    thread.submit(AddSequence(kit.sequence("a")))
    deadline = time.monotonic() + DEATH_S
    while thread.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not thread.alive
    assert not delivered
