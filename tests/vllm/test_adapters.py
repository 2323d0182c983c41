"""LoRA adapters behind two workers with vLLM: the answers of vLLM alone, and no shared KV."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from diptych.cluster.gateway.attempt.partitions import CachePartitions
from diptych.engine.adapters import NO_PROMPT_LOGPROBS, RANKS, WEIGHTS_FILE
from diptych.engine.errors import EngineError, UnsupportedModel
from diptych.engine.options import EngineOptions
from diptych.engine.vllm.engine import VllmEngine
from diptych.engine.vllm.models import attention_environment
from diptych.engine.vllm.start import ENVIRONMENT, RESERVE_SLOTS
from diptych.protos.frames import Sampling
from safetensors.torch import load_file, save_file

from tests.support import vllm_checkpoints
from tests.support.adapters import make_adapter

from .model_matrix import KV_BYTES, LIMITS
from .pair import DECODE, PREFILL, Outcome, Pair
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
    """By each of the two, and not for good: another worker may have newer settings."""

    async def scenario() -> None:
        for role in (PREFILL, DECODE):
            outcome = pair.begin(
                new_name(), 0, new_prompt(70), at=(role,), sampling=sampling_of("unheard-of")
            )
            await pair.until(lambda told=outcome: bool(told.failures))  # type: ignore[misc]
            assert outcome.reasons == ["unknown_adapter"] and not outcome.failures[0].final
            assert "'unheard-of'" in outcome.failures[0].reason
        await pair.whole()

    pair.run(scenario())


def test_logprobs_of_prompts_are_refused_and_end_nobody(
    pair: Pair, prompts: list[list[int]]
) -> None:
    """vLLM's step would raise with several requests in its batch, and that ends a worker."""
    wanted = Sampling(ANSWER_TOKENS, logprobs=2, prompt_logprobs=2)

    async def scenario() -> None:
        others = [ask(pair, prompts[0], name) for name in NAMES]
        refused = pair.begin(new_name(), 0, prompts[1], sampling=wanted)
        await pair.until(lambda: len(refused.failures) == 2)
        assert set(refused.reasons) == {NO_PROMPT_LOGPROBS.partition(":")[0]}
        assert all(failure.final for failure in refused.failures)
        for outcome in others:
            await pair.until(partial(has_ended, outcome))
            assert not outcome.failures, outcome
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


def renamed(old: str, new: str) -> Callable[[Path, Path], Path]:
    """An adapter some of whose matrices have names that the model has not."""

    def make(folder: Path, base: Path) -> Path:
        assert len(old) == len(new)  # so that the file stays one of safetensors
        make_adapter(folder, base)
        file = folder / WEIGHTS_FILE
        file.write_bytes(file.read_bytes().replace(old.encode(), new.encode()))
        return folder

    return make


def without(name: str) -> Callable[[Path, Path], Path]:
    """An adapter that lacks one of the two matrices of a module."""

    def make(folder: Path, base: Path) -> Path:
        make_adapter(folder, base)
        file = folder / WEIGHTS_FILE
        tensors = load_file(file)
        del tensors[f"base_model.model.model.layers.0.{name}.weight"]
        save_file(tensors, file, {"format": "pt"})
        return folder

    return make


def of_a_model_with(**changes: int) -> Callable[[Path, Path], Path]:
    """An adapter of a model of the same family, of another size."""

    def make(folder: Path, base: Path) -> Path:
        other = folder.parent / "other"
        other.mkdir()
        config = json.loads((base / "config.json").read_text()) | changes
        (other / "config.json").write_text(json.dumps(config))
        return make_adapter(folder, other)

    return make


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (renamed("self_attn.q_proj", "self_attn.c_attn"), "cannot load the adapter foreign"),
        (renamed("model.model.layers", "model.modal.layers"), "which this model has not"),
        (without("self_attn.k_proj.lora_A"), "foreign"),
        (without("mlp.down_proj.lora_B"), "foreign"),
        (of_a_model_with(num_hidden_layers=9), "which this model has not"),
        (of_a_model_with(hidden_size=32), "and the model's takes"),
        (of_a_model_with(hidden_size=4096), "cannot load the adapter foreign"),
    ],
    ids=[
        "names of another family",
        "another wrapper",
        "no A",
        "no B",
        "more layers",
        "smaller",
        "larger",
    ],
)
def test_an_adapter_of_another_model_is_refused_at_the_start(
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    make: Callable[[Path, Path], Path],
    words: str,
) -> None:
    """Also where vLLM would leave out what does not fit, and answer by the model itself."""
    folder = make(tmp_path / "foreign", checkpoint("llama"))
    with pytest.raises(EngineError, match=words):
        VllmEngine(
            EngineOptions(
                checkpoint("llama"), kv_bytes=KV_BYTES, limits=LIMITS, adapters={"foreign": folder}
            )
        )


def test_ranks_that_differ_by_module_have_room(
    checkpoint: Callable[[str], Path], adapters: dict[str, Path], tmp_path: Path
) -> None:
    """`r` is the smallest one there, and PEFT lists the others."""
    folder = make_adapter(tmp_path / "wide", checkpoint("llama"), rank=24)
    file = folder / "adapter_config.json"
    settings = json.loads(file.read_text()) | {"r": 8, "rank_pattern": {".*_proj": 24}}
    file.write_text(json.dumps(settings))
    engine = VllmEngine(
        EngineOptions(
            checkpoint("llama"), kv_bytes=KV_BYTES, limits=LIMITS, adapters={"wide": folder}
        )
    )
    assert engine._core.vllm_config.lora_config.max_lora_rank == 32
    engine.close()


def test_the_ranks_are_those_that_vllm_has_room_for() -> None:
    from vllm.config.lora import MaxLoRARanks

    assert set(RANKS) == set(MaxLoRARanks.__args__)


def test_no_adapter_is_served_with_experts(tmp_path: Path) -> None:
    folder = vllm_checkpoints.make(tmp_path / "qwen2_moe", "qwen2_moe")
    adapter = make_adapter(tmp_path / "sql", folder)
    with pytest.raises(UnsupportedModel, match="experts where adapters are served"):
        VllmEngine(
            EngineOptions(folder, kv_bytes=KV_BYTES, limits=LIMITS, adapters={"sql": adapter})
        )
