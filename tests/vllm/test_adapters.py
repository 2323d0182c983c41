"""LoRA adapters behind two workers with vLLM: the answers of vLLM alone, and no shared KV."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from diptych.cluster.gateway.attempt.partitions import CachePartitions
from diptych.engine.errors import EngineError, UnsupportedModel
from diptych.engine.options import EngineOptions
from diptych.engine.vllm.engine import VllmEngine
from diptych.engine.vllm.models import attention_environment
from diptych.engine.vllm.start import ENVIRONMENT, LORA_RANKS, RESERVE_SLOTS
from diptych.protos.frames import Sampling

from tests.support.adapters import make_adapter

from .model_matrix import KV_BYTES, LIMITS
from .pair import PREFILL, Outcome, Pair
from .test_transfer_faults import new_name, new_prompt
from .vllm_alone import AloneTask, answers_of

ANSWER_TOKENS = 8
#: As requests name them; "" is the model itself.
NAMES = ("", "sql", "poems")
PARTITIONS = CachePartitions("secret")

pytestmark = pytest.mark.timeout(900)  #: vLLM alone answers before the first test.


def sampling_of(adapter: str) -> Sampling:
    return Sampling(ANSWER_TOKENS, adapter=adapter)


def partition_of(adapter: str) -> bytes:
    """The partition that a gateway without keys gives a request for the adapter."""
    return PARTITIONS.name_of(None, None, None, adapter)


@pytest.fixture(scope="module")
def adapters(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: make_adapter(folder / name, checkpoint("llama"), seed, rank)
        for name, seed, rank in (("sql", 1, 8), ("poems", 2, 12))
    }


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [new_prompt(length) for length in (300, 130, 64, 5)]


@pytest.fixture(scope="module")
def answers_alone(
    checkpoint: Callable[[str], Path], adapters: dict[str, Path], prompts: list[list[int]]
) -> dict[str, list[list[int]]]:
    """What vLLM alone answers to all prompts, with each adapter and with none."""
    tasks = [
        AloneTask(
            str(checkpoint("llama")),
            prompts[0],
            answer_tokens=ANSWER_TOKENS,
            block_tokens=LIMITS.block_tokens,
            step_tokens=LIMITS.max_step_tokens,
            sequences=RESERVE_SLOTS * LIMITS.max_running,
            kv_bytes=KV_BYTES,
            further_prompts=prompts[1:],
            adapter=str(adapters.get(name, "")),
        )
        for name in NAMES
    ]
    answers = answers_of(tasks, ENVIRONMENT | attention_environment())
    return dict(zip(NAMES, answers, strict=True))


@pytest.fixture(params=["nixl", "tcp"])
def pair(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], adapters: dict[str, Path]
) -> Iterator[Pair]:
    if request.param == "nixl":
        pytest.importorskip("nixl", reason="NIXL has no wheel for this platform")
    pair = Pair(checkpoint("llama"), request.param, adapters=adapters)
    yield pair
    pair.close()


def ask(pair: Pair, ids: list[int], adapter: str) -> Outcome:
    return pair.begin(
        new_name(), 0, ids, sampling=sampling_of(adapter), partition=partition_of(adapter)
    )


def has_ended(outcome: Outcome) -> bool:
    return bool(outcome.finished or outcome.failures)


def test_split_answers_of_all_adapters_at_once_are_those_of_vllm_alone(
    pair: Pair, prompts: list[list[int]], answers_alone: dict[str, list[list[int]]]
) -> None:
    """Each prompt with each adapter and with none, all under way together, twice: the second time
    their prefixes are cached."""
    different = {json.dumps(answers) for answers in answers_alone.values()}
    assert len(different) == len(NAMES), "the adapters change nothing"

    async def scenario() -> None:
        for _ in range(2):
            outcomes = [(ask(pair, ids, name), name, ids) for ids in prompts for name in NAMES]
            for outcome, _, _ in outcomes:
                await pair.until(partial(has_ended, outcome))
            for outcome, name, ids in outcomes:
                assert not outcome.failures, (name, outcome)
                expected = answers_alone[name][prompts.index(ids)]
                assert outcome.token_ids[0] == expected, (name, len(ids))
            await pair.whole()

    pair.run(scenario())


def test_a_prefix_of_an_adapter_comes_from_a_peer(
    pair: Pair, prompts: list[list[int]], answers_alone: dict[str, list[list[int]]]
) -> None:
    """It is fetched once; then this pool has it, under the adapter's name alone."""

    async def alone(name: str, holder: str | None) -> list[int]:
        return await pair.alone(prompts[0], partition_of(name), holder, sampling_of(name))

    async def scenario() -> None:
        outcome = ask(pair, prompts[0], "sql")
        await pair.until(lambda: bool(outcome.finished or outcome.failures))
        await pair.whole()
        decode: Any = pair.decode.engine
        assert decode._scheduler.reset_prefix_cache()
        decode.observe()
        for computed, holder in ((300 - 256, PREFILL), (300 - 256, None)):
            before = decode.observe().prefill_tokens
            assert await alone("sql", holder) == answers_alone["sql"][0]
            assert decode.observe().prefill_tokens - before == computed
        before = decode.observe().prefill_tokens
        assert await alone("poems", None) == answers_alone["poems"][0]
        assert decode.observe().prefill_tokens - before == 300, "another adapter's KV was used"
        await pair.whole()

    pair.run(scenario())


def test_an_adapter_that_a_worker_lacks_is_refused_there(pair: Pair) -> None:
    async def scenario() -> None:
        outcome = ask(pair, new_prompt(70), "unheard-of")
        await pair.until(lambda: len(outcome.failures) > 0)
        assert not outcome.token_ids
        assert "unknown_adapter" in outcome.reasons or "pool_full" in outcome.reasons, outcome
        local = pair.begin(new_name(), 0, new_prompt(70), at=(PREFILL,), sampling=sampling_of("x"))
        await pair.until(lambda: bool(local.failures))
        assert local.reasons == ["unknown_adapter"] and not local.failures[0].final
        await pair.whole()

    pair.run(scenario())


def test_peers_with_other_adapters_refuse_each_other(
    checkpoint: Callable[[str], Path], adapters: dict[str, Path]
) -> None:
    def compatibility(named: dict[str, Path]) -> bytes:
        engine = VllmEngine(
            EngineOptions(checkpoint("llama"), kv_bytes=KV_BYTES, limits=LIMITS, adapters=named)
        )
        engine.close()
        return engine.compatibility

    swapped = {"sql": adapters["poems"], "poems": adapters["sql"]}
    reversed_order = dict(reversed(adapters.items()))
    found = [compatibility(named) for named in ({}, adapters, swapped, reversed_order)]
    assert found[1] == found[3], "the order of the settings counts"
    assert len(set(found)) == 3


def test_an_adapter_of_another_model_is_refused_at_the_start(
    checkpoint: Callable[[str], Path], adapters: dict[str, Path], tmp_path: Path
) -> None:
    settings_file = adapters["sql"] / "adapter_config.json"
    folder = tmp_path / "foreign"
    folder.mkdir()
    settings = json.loads(settings_file.read_text()) | {"target_modules": ["c_attn"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    weights = (adapters["sql"] / "adapter_model.safetensors").read_bytes()
    renamed = weights.replace(b"self_attn.q_proj", b"self_attn.c_attn")
    (folder / "adapter_model.safetensors").write_bytes(renamed)
    with pytest.raises(EngineError, match="cannot load the adapter foreign"):
        VllmEngine(
            EngineOptions(
                checkpoint("llama"), kv_bytes=KV_BYTES, limits=LIMITS, adapters={"foreign": folder}
            )
        )


def test_a_rank_that_vllm_has_no_room_for_is_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    from vllm.config.lora import MaxLoRARanks

    assert set(LORA_RANKS) == set(MaxLoRARanks.__args__)
    folder = make_adapter(tmp_path / "wide", checkpoint("llama"), 1, rank=LORA_RANKS[-1] + 1)
    with pytest.raises(UnsupportedModel, match="513"):
        VllmEngine(EngineOptions(checkpoint("llama"), kv_bytes=KV_BYTES, adapters={"wide": folder}))
