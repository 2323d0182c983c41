"""What a checkpoint may look like, and what is said about one that cannot be served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diptych.engine.engine import Engine, EngineConfig
from diptych.engine.errors import EngineError, OutOfMemory, UnsupportedModel, WeightsError
from diptych.engine.spec import Rope, fingerprint, read_spec
from safetensors.torch import load_file, save_file

from tests.support import checkpoints

from .rig import MAX_LEN, engine


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return checkpoints.make(tmp_path / "llama", "llama")


def change(folder: Path, file: str = "config.json", **values: Any) -> None:
    """Rewrites keys of a JSON file; None removes one."""
    config = json.loads((folder / file).read_text()) | values
    config = {key: value for key, value in config.items() if value is not None}
    (folder / file).write_text(json.dumps(config))


def reweigh(folder: Path, **values: torch.Tensor | None) -> None:
    """Rewrites tensors (`__` stands for a dot); None removes one."""
    weights = load_file(folder / "model.safetensors")
    for name, tensor in values.items():
        weights.pop(name.replace("__", "."))
        if tensor is not None:
            weights[name.replace("__", ".")] = tensor
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def refusal(folder: Path, kind: type[EngineError]) -> str:
    with pytest.raises(kind) as caught:
        engine(folder)
    return str(caught.value)


# ---- models that the decoder does not have -------------------------------------------------------


def test_an_unknown_architecture_is_named_with_the_known_ones(llama: Path) -> None:
    change(llama, architectures=["GPT2LMHeadModel"])
    message = refusal(llama, UnsupportedModel)
    assert "GPT2LMHeadModel" in message and "Qwen3ForCausalLM" in message


def test_a_config_without_architecture_is_refused(llama: Path) -> None:
    change(llama, architectures=None)
    assert "(none)" in refusal(llama, UnsupportedModel)


def test_an_unknown_rope_type_is_named(llama: Path) -> None:
    change(llama, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0})
    message = refusal(llama, UnsupportedModel)
    assert "'yarn'" in message and "llama3" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "awq"}),
        ("partial_rotary_factor", 0.5),
        ("mlp_bias", True),
    ],
)
def test_what_the_decoder_does_not_know_is_named_never_ignored(
    llama: Path, key: str, value: Any
) -> None:
    change(llama, **{key: value})
    assert key in refusal(llama, UnsupportedModel)


# ---- damaged checkpoints -------------------------------------------------------------------------


def test_a_missing_config_is_named(llama: Path) -> None:
    (llama / "config.json").unlink()
    message = refusal(llama, WeightsError)
    assert "config.json is missing" in message and str(llama) in message


@pytest.mark.parametrize("text", ["{", "", "\x00\x01", "[1, 2]", '"text"'])
def test_a_malformed_config_is_named(llama: Path, text: str) -> None:
    (llama / "config.json").write_text(text)
    assert "config.json is not" in refusal(llama, WeightsError)


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "rms_norm_eps"])
def test_a_missing_size_is_named(llama: Path, key: str) -> None:
    change(llama, **{key: None})
    assert key in refusal(llama, WeightsError)


def test_a_rope_type_without_its_numbers_is_named(llama: Path) -> None:
    change(llama, rope_parameters={"rope_type": "linear", "rope_theta": 1e4})
    assert "factor" in refusal(llama, WeightsError)


def test_missing_weights_are_named(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    assert "model.safetensors is missing" in refusal(llama, WeightsError)


def test_a_missing_shard_is_named(llama: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors is missing" in refusal(llama, WeightsError)


def test_truncated_weights_are_called_damaged(llama: Path) -> None:
    file = llama / "model.safetensors"
    for size in (file.stat().st_size - 1, 200, 3, 0):
        file.write_bytes(file.read_bytes()[:size])
        message = refusal(llama, WeightsError)
        assert "model.safetensors is damaged or truncated" in message


def test_a_missing_tensor_is_named(llama: Path) -> None:
    reweigh(llama, model__layers__1__mlp__down_proj__weight=None)
    assert "model.layers.1.mlp.down_proj.weight is missing" in refusal(llama, WeightsError)


def test_an_untied_model_without_its_head_is_not_served_with_its_embedding(llama: Path) -> None:
    reweigh(llama, lm_head__weight=None)
    assert "lm_head.weight is missing" in refusal(llama, WeightsError)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(llama: Path) -> None:
    reweigh(llama, model__layers__0__self_attn__k_proj__weight=torch.zeros(32, 128))
    message = refusal(llama, WeightsError)
    assert "model.layers.0.self_attn.k_proj.weight is [32, 128]" in message
    assert "[64, 128]" in message


def test_shards_are_read_as_one_checkpoint(llama: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    (llama / "model.safetensors").unlink()
    where = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(sorted(weights))}
    for part in set(where.values()):
        mine = {name: tensor for name, tensor in weights.items() if where[name] == part}
        save_file(mine, llama / part, {"format": "pt"})
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert engine(llama).exact


# ---- memory --------------------------------------------------------------------------------------


def test_a_pool_that_cannot_hold_one_sequence_says_what_to_raise(llama: Path) -> None:
    with pytest.raises(OutOfMemory) as caught:
        Engine(EngineConfig(llama, kv_bytes=200_000, max_model_len=MAX_LEN))
    message = str(caught.value)
    assert "192 tokens" in message and "1024" in message  # (200000 / 49152 - 1) * 64
    assert "engine.kv_mib" in message and "model.max_model_len" in message
    most = int(message.split("kv_mib to ")[1].split()[0])
    Engine(EngineConfig(llama, kv_bytes=most << 20, max_model_len=MAX_LEN))


def test_without_a_wish_the_context_is_what_the_pool_holds(llama: Path) -> None:
    block = Engine(EngineConfig(llama)).kv.block_bytes
    assert Engine(EngineConfig(llama, kv_bytes=4 * block + 5)).max_model_len == 3 * 64
    assert Engine(EngineConfig(llama, kv_bytes=900 * block)).max_model_len == 2048
    with pytest.raises(OutOfMemory, match="holds 0 tokens"):
        Engine(EngineConfig(llama, kv_bytes=block))


def test_an_absurd_pool_is_out_of_memory(llama: Path) -> None:
    with pytest.raises(OutOfMemory, match="does not fit"):
        Engine(EngineConfig(llama, kv_bytes=1 << 62, max_model_len=MAX_LEN))


# ---- reading the spec ----------------------------------------------------------------------------


def test_both_spellings_of_rope_are_read(llama: Path) -> None:
    rope = Rope(10000.0, "llama3", 8.0, 1.0, 4.0, 128)
    assert read_spec(llama).rope == rope
    scaling = dict(checkpoints.LLAMA3_ROPE)
    theta = scaling.pop("rope_theta")
    change(llama, rope_parameters=None, rope_theta=theta, rope_scaling=scaling)
    assert read_spec(llama).rope == rope


def test_the_oldest_spelling_says_type(llama: Path) -> None:
    scaling = {"type": "linear", "factor": 2.0}
    change(llama, rope_parameters=None, rope_theta=5e5, rope_scaling=scaling)
    assert read_spec(llama).rope == Rope(5e5, "linear", 2.0)


def test_rope_without_scaling_is_the_default(llama: Path) -> None:
    change(llama, rope_parameters=None, rope_theta=1e6)
    assert read_spec(llama).rope == Rope(1e6)
    change(llama, rope_theta=None)
    assert read_spec(llama).rope == Rope(10000.0)


@pytest.mark.parametrize(("written", "read"), [(2, (2,)), ([1, 7], (1, 7)), (0, (0,))])
def test_end_ids_come_from_the_generation_config(llama: Path, written: Any, read: tuple) -> None:
    change(llama, "generation_config.json", eos_token_id=written)
    assert read_spec(llama).eos_ids == read


def test_end_ids_come_from_the_config_if_there_is_no_generation_config(llama: Path) -> None:
    (llama / "generation_config.json").unlink()
    change(llama, eos_token_id=[4, 5])
    assert read_spec(llama).eos_ids == (4, 5)
    change(llama, eos_token_id=None)
    assert read_spec(llama).eos_ids == ()


def test_each_architecture_has_its_own_extras(checkpoint) -> None:
    specs = {name: read_spec(checkpoint(name)) for name in checkpoints.ARCHITECTURES}
    assert {name for name, spec in specs.items() if spec.qkv_bias} == {"qwen2"}
    assert {name for name, spec in specs.items() if spec.qk_norm} == {"qwen3"}
    assert {name for name, spec in specs.items() if spec.tied} == {"qwen2"}
    assert specs["mistral"].windows == (100, 100, 100)
    assert specs["llama"].windows == (None, None, None)
    assert (specs["qwen3"].head_dim, specs["llama"].head_dim) == (64, 32)


def test_the_fingerprint_tells_models_apart_and_nothing_else(tmp_path: Path, llama: Path) -> None:
    copy = checkpoints.make(tmp_path / "copy", "llama")
    assert fingerprint(llama) == fingerprint(copy) and len(fingerprint(llama)) == 16
    change(copy, rms_norm_eps=1e-6)
    assert fingerprint(llama) != fingerprint(copy)
