"""What a checkpoint may look like, and what is said about one that cannot be served."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diptych.engine.cpu_backend import CpuBackend
from diptych.engine.engine import Engine, EngineOptions
from diptych.engine.errors import EngineError, OutOfMemory, UnsupportedModel, WeightsError
from diptych.engine.memory import (
    GpuMemory,
    available_memory,
    check_gpu_memory,
    check_memory,
    gpu_pool_bytes,
    weight_bytes,
)
from diptych.engine.quantization import Fp8Format
from diptych.engine.spec import ExpertsSpec, RopeSpec, fingerprint, read_spec
from diptych.engine.tensors import dequantize
from safetensors.torch import load_file, save_file

from tests.support import checkpoints, quantized
from tests.support.lazy import LazyModule

from .rig import MAX_LEN, engine

finegrained_fp8 = LazyModule("transformers.integrations.finegrained_fp8")


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


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional", "x"])
def test_an_unknown_rope_type_is_named(llama: Path, kind: str) -> None:
    change(llama, rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 4.0})
    message = refusal(llama, UnsupportedModel)
    assert f"'{kind}'" in message and "llama3, yarn" in message


def test_what_rope_does_not_know_is_named_unless_it_is_null(llama: Path) -> None:
    change(llama, rope_parameters={"rope_theta": 1e4, "long_factor": None})
    assert read_spec(llama).rope == RopeSpec(1e4)
    change(llama, rope_parameters={"rope_theta": 1e4, "mrope_section": [1, 2]})
    assert "mrope_section" in refusal(llama, UnsupportedModel)


@pytest.mark.parametrize("name", ["Qwen2MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_other_mixtures_of_experts_are_refused(llama: Path, name: str) -> None:
    change(llama, architectures=[name])
    assert name in refusal(llama, UnsupportedModel)


def test_an_unknown_kind_of_layer_is_named(tmp_path: Path) -> None:
    kinds = ["full_attention", "chunked_attention", "full_attention"]
    window = {"use_sliding_window": True, "sliding_window": 70, "layer_types": kinds}
    folder = checkpoints.make(tmp_path / "m", "qwen3", **window)
    assert "chunked_attention" in refusal(folder, UnsupportedModel)


COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
INT4 = {"weights": {"num_bits": 4, "type": "int", "strategy": "group"}}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "'bitsandbytes'"),
        ({"quant_method": "mxfp4"}, "'mxfp4'"),
        ({"bits": 4}, "None"),
        (COMPRESSED | {"config_groups": {"group_0": INT4}}, "4-bit int weights"),
        (COMPRESSED | {"config_groups": {}}, "0 kinds of groups"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (COMPRESSED | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    ],
)
def test_other_quantizations_are_named_with_what_is_supported(
    llama: Path, config: dict, named: str
) -> None:
    change(llama, quantization_config=config)
    message = refusal(llama, UnsupportedModel)
    assert named in message and "quantization_config" in message


def test_a_tensor_without_a_place_in_the_model_is_named(llama: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    known = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    save_file(weights | known, llama / "model.safetensors", {"format": "pt"})
    assert engine(llama).exact
    extra = {"model.layers.0.self_attn.q_proj.bias": torch.ones(128), "z": torch.ones(1)}
    save_file(weights | extra, llama / "model.safetensors", {"format": "pt"})
    message = refusal(llama, UnsupportedModel)
    assert "model.layers.0.self_attn.q_proj.bias and 1 more" in message


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


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers in config.json is 0"),
        ({"vocab_size": "512"}, "vocab_size in config.json is '512'"),
        ({"num_attention_heads": 3}, "num_attention_heads 3 in config.json is no multiple of"),
        ({"num_attention_heads": 6}, "hidden_size 128 in config.json is no multiple of"),
        ({"head_dim": 33}, "head_dim 33 is odd"),
    ],
)
def test_sizes_that_do_not_fit_each_other_are_named(
    llama: Path, values: dict[str, Any], named: str
) -> None:
    change(llama, **values)
    assert named in refusal(llama, EngineError)


def test_more_experts_per_token_than_there_are_is_named(tmp_path: Path) -> None:
    folder = checkpoints.make(tmp_path / "m", "mixtral", num_experts_per_tok=5)
    assert "num_experts_per_tok 5 in config.json exceeds 4" in refusal(folder, WeightsError)


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
    checkpoints.split(llama, 2)
    assert engine(llama).exact


def test_a_shard_of_a_split_checkpoint_that_is_missing_is_named(llama: Path) -> None:
    shard = checkpoints.split(llama, 3)["lm_head.weight"]
    (llama / shard).unlink()
    assert f"{shard} is missing" in refusal(llama, WeightsError)


def test_a_truncated_shard_is_named(llama: Path) -> None:
    shard = llama / checkpoints.split(llama, 3)["lm_head.weight"]
    shard.write_bytes(shard.read_bytes()[:-7])
    assert f"{shard.name} is damaged or truncated" in refusal(llama, WeightsError)


def test_a_shard_without_a_tensor_that_the_index_places_there_is_named(llama: Path) -> None:
    where = checkpoints.split(llama, 2)
    one, two = sorted(set(where.values()))
    (llama / two).write_bytes((llama / one).read_bytes())
    message = refusal(llama, WeightsError)
    assert f"{two} in" in message and "has no tensor" in message


def test_a_shard_of_another_model_is_named_by_a_shape(llama: Path, tmp_path: Path) -> None:
    other = checkpoints.make(tmp_path / "other", "llama", intermediate_size=320)
    shard = checkpoints.split(llama, 2)["model.layers.0.mlp.up_proj.weight"]
    checkpoints.split(other, 2)
    (llama / shard).write_bytes((other / shard).read_bytes())
    assert "[320, 128], config.json implies [256, 128]" in refusal(llama, WeightsError)


@pytest.mark.parametrize("index", [{}, {"weight_map": ["a"]}])
def test_an_index_without_a_map_is_named(llama: Path, index: dict) -> None:
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model.safetensors.index.json has no weight_map" in refusal(llama, WeightsError)


# ---- fp8 -----------------------------------------------------------------------------------------

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def fp8(llama: Path, tmp_path: Path) -> Path:
    quantized.quantize(llama, tmp_path / "fp8", "block")
    return tmp_path / "fp8"


def test_an_fp8_tensor_without_a_scale_is_named(fp8: Path) -> None:
    reweigh(fp8, **{Q + "_scale_inv": None})
    assert f"{Q} is float8" in refusal(fp8, WeightsError)


def test_an_fp8_tensor_of_a_config_that_does_not_say_so_is_named(fp8: Path) -> None:
    change(fp8, quantization_config=None)
    assert "config.json has no quantization_config" in refusal(fp8, WeightsError)


def test_scales_that_do_not_fit_are_named_with_both_shapes(fp8: Path) -> None:
    reweigh(fp8, **{Q + "_scale_inv": torch.ones(3, 2)})
    message = refusal(fp8, WeightsError)
    assert f"{Q} [128, 128] are [3, 2]" in message and "64 x 48" in message


@pytest.mark.parametrize("values", [{Q + "_scale_inv": torch.ones(2, 3, dtype=torch.uint8)}])
def test_scales_that_are_codes_are_refused(fp8: Path, values: dict) -> None:
    reweigh(fp8, **values)
    assert "torch.uint8, not floats" in refusal(fp8, UnsupportedModel)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2, torch.float64])
def test_a_tensor_of_an_unknown_type_is_named(fp8: Path, dtype: torch.dtype) -> None:
    reweigh(fp8, **{Q: torch.ones(128, 128).to(dtype)})
    assert f"{Q} is {str(dtype)[6:]}" in refusal(fp8, UnsupportedModel)


def test_a_scale_of_a_weight_that_is_not_quantized_is_refused(fp8: Path) -> None:
    reweigh(fp8, **{Q: torch.ones(128, 128)})
    assert "float32 with a scale" in refusal(fp8, UnsupportedModel)


def test_scales_of_a_quantized_kv_cache_are_not_read(fp8: Path) -> None:
    weights = load_file(fp8 / "model.safetensors")
    weights |= {f"model.layers.0.self_attn.{name}_scale": torch.tensor(0.1) for name in "kv"}
    save_file(weights, fp8 / "model.safetensors", {"format": "pt"})
    assert engine(fp8).exact


def test_block_scales_give_what_transformers_makes_of_them() -> None:
    weight = torch.randn(192, 128).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2)
    ours = dequantize("w", weight, scales, Fp8Format((64, 64)))
    assert torch.equal(
        ours, finegrained_fp8.Fp8Dequantize(None)._dequantize_one(weight, scales, torch.float32)
    )


# ---- memory --------------------------------------------------------------------------------------


def test_a_pool_that_cannot_hold_one_sequence_says_what_to_raise(llama: Path) -> None:
    with pytest.raises(OutOfMemory) as caught:
        Engine(EngineOptions(llama, kv_bytes=200_000, max_model_len=MAX_LEN))
    message = str(caught.value)
    assert "192 tokens" in message and "1024" in message  # (200000 / 49152 - 1) * 64
    assert "engine.kv_mib" in message and "model.max_model_len" in message
    most = int(message.split("kv_mib to ")[1].split()[0])
    Engine(EngineOptions(llama, kv_bytes=most << 20, max_model_len=MAX_LEN))
    with pytest.raises(OutOfMemory):
        Engine(EngineOptions(llama, kv_bytes=most - 1 << 20, max_model_len=MAX_LEN))


def test_without_a_wish_the_context_is_what_the_pool_holds(llama: Path) -> None:
    block = Engine(EngineOptions(llama)).kv_pool.block_bytes
    assert Engine(EngineOptions(llama, kv_bytes=4 * block + 5)).max_model_len == 3 * 64
    assert Engine(EngineOptions(llama, kv_bytes=900 * block)).max_model_len == 2048
    with pytest.raises(OutOfMemory, match="holds 0 tokens"):
        Engine(EngineOptions(llama, kv_bytes=block))


def test_a_context_beyond_the_models_positions_is_refused(checkpoint) -> None:
    with pytest.raises(UnsupportedModel, match="2049 tokens is more than the 2048 positions"):
        Engine(EngineOptions(checkpoint("llama"), max_model_len=2049))
    assert Engine(EngineOptions(checkpoint("llama"), max_model_len=2048)).max_model_len == 2048


def test_an_absurd_pool_is_out_of_memory(llama: Path) -> None:
    with pytest.raises(OutOfMemory, match="do not fit"):
        Engine(EngineOptions(llama, kv_bytes=1 << 62, max_model_len=MAX_LEN))


def test_weights_that_do_not_fit_are_refused_before_any_is_read(llama: Path) -> None:
    spec = read_spec(llama)
    weights = weight_bytes(spec, "bfloat16")
    # 3 layers of 49152 + 98304, two times 65536, and 3 x 65536 while packing, 2 bytes each
    assert weights == (3 * 147456 + 2 * 65536 + 3 * 65536) * 2
    check_memory(spec, "bfloat16", 5 << 20, weights + (5 << 20))
    check_memory(spec, "bfloat16", 5 << 20, None)
    with pytest.raises(OutOfMemory, match=r"1 MiB of bfloat16 weights.* need 6 MiB, 6 MiB") as few:
        check_memory(spec, "bfloat16", 5 << 20, weights + (5 << 20) - 1)
    assert "lower engine.kv_mib" in str(few.value)
    with pytest.raises(OutOfMemory, match=r"weights alone .* or model.dtype bfloat16"):
        check_memory(spec, "float32", 5 << 20, weights)


def test_each_rank_of_a_cpu_keeps_the_whole_embedding(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_spec(llama)
    embedding = spec.vocab * spec.hidden * 2
    one_rank = weight_bytes(spec, "bfloat16")
    assert weight_bytes(spec, "bfloat16", ranks=4) == one_rank + 3 * embedding
    # Four pools and the weights of one rank fit, so that only the embeddings are too much.
    available = one_rank + 4 * (5 << 20) + 3 * embedding
    options = EngineOptions(llama, kv_bytes=5 << 20, tensor_parallel=4)
    monkeypatch.setattr("diptych.engine.cpu_backend.available_memory", lambda: available)
    CpuBackend().check(options, spec)
    monkeypatch.setattr("diptych.engine.cpu_backend.available_memory", lambda: available - 1)
    with pytest.raises(OutOfMemory, match="do not fit"):
        CpuBackend().check(options, spec)


GPU = GpuMemory(gpu=1, total=1000 << 20, free=700 << 20)


def test_a_pool_without_kv_mib_gets_what_the_share_leaves(llama: Path) -> None:
    options = EngineOptions(llama, kv_bytes=None, gpu_memory_share=0.9)
    assert gpu_pool_bytes(options, GPU, held_bytes=300 << 20, step_bytes=200 << 20) == 400 << 20
    assert gpu_pool_bytes(options, GPU, held_bytes=100 << 20, step_bytes=400 << 20) == 300 << 20


@pytest.mark.parametrize(("held_mib", "step_mib"), [(500, 600), (100, 700), (700, 200)])
def test_a_gpu_that_has_no_room_for_a_pool_says_so(
    llama: Path, held_mib: int, step_mib: int
) -> None:
    options = EngineOptions(llama, kv_bytes=None, gpu_memory_share=0.9)
    with pytest.raises(OutOfMemory) as refused:
        gpu_pool_bytes(options, GPU, held_bytes=held_mib << 20, step_bytes=step_mib << 20)
    message = str(refused.value)
    assert message.startswith(
        f"GPU 1: no room is left for a KV pool beside {held_mib} MiB of weights and {step_mib} MiB "
        "of the largest steps, within engine.gpu_memory_share 0.9: 700 MiB are free of 1000 MiB"
    )
    assert "raise engine.gpu_memory_share" in message


def test_a_pool_that_was_asked_for_and_does_not_fit_says_its_size(llama: Path) -> None:
    options = EngineOptions(llama, kv_bytes=600 << 20)
    with pytest.raises(OutOfMemory, match=r"a KV pool of 600 MiB does not fit .* engine\.kv_mib"):
        gpu_pool_bytes(options, GPU, held_bytes=100 << 20, step_bytes=200 << 20)


@pytest.mark.parametrize("weights", ["model", "fp8"])
def test_weights_that_are_fp8_already_are_not_advised_to_be(llama: Path, weights: str) -> None:
    options = EngineOptions(llama, weights=weights)  # type: ignore[arg-type]
    with pytest.raises(OutOfMemory, match="the weights alone are too large") as refused:
        check_gpu_memory(read_spec(llama), options, GpuMemory(0, 1000, 100))
    assert ("set engine.weights fp8" in str(refused.value)) == (weights == "model")


def test_an_engine_without_memory_opens_no_weights(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych.engine.cpu_backend.available_memory", lambda: 1 << 20)
    (llama / "model.safetensors").unlink()
    assert "1 MiB are available" in refusal(llama, OutOfMemory)


def test_the_least_of_machine_and_cgroups_is_available(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (groups / "pod/box").mkdir(parents=True)
    assert available_memory(proc, groups) is None
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 5000 kB\nHugePages: 0\n")
    assert available_memory(proc, groups) == 5000 << 10
    (proc / "self/cgroup").write_text("0::/pod/box\n")
    for group, most in (("pod", "1000000"), ("pod/box", "max")):
        (groups / group / "memory.max").write_text(most + "\n")
        (groups / group / "memory.current").write_text("900000\n")
    (groups / "pod/memory.stat").write_text("anon 5\ninactive_file 200000\nactive_file 1\n")
    assert available_memory(proc, groups) == 1000000 - 900000 + 200001
    (groups / "pod/box/memory.max").write_text("10\n")
    assert available_memory(proc, groups) == 0


# ---- reading the spec ----------------------------------------------------------------------------


def test_both_spellings_of_rope_are_read(llama: Path) -> None:
    rope = RopeSpec(10000.0, "llama3", 8.0, 1.0, 4.0, 128)
    assert read_spec(llama).rope == rope
    scaling = dict(checkpoints.LLAMA3_ROPE)
    theta = scaling.pop("rope_theta")
    change(llama, rope_parameters=None, rope_theta=theta, rope_scaling=scaling)
    assert read_spec(llama).rope == rope


def test_yarn_stretches_the_context_and_infers_its_factors(llama: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    change(llama, rope_parameters=None, rope_theta=1e6, rope_scaling=scaling)
    spec = read_spec(llama)
    assert spec.max_positions == 4096
    assert spec.rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    change(llama, rope_scaling=scaling | {"factor": None})  # 2048 / 1024
    assert (read_spec(llama).rope.factor, read_spec(llama).max_positions) == (2.0, 2048)


def test_where_no_theta_is_given_mixtral_has_its_own(checkpoint) -> None:
    assert read_spec(checkpoint("mixtral")).rope == RopeSpec(1e6)
    assert read_spec(checkpoint("mistral")).rope == RopeSpec(1e4)


def test_experts_are_read_in_both_spellings(checkpoint, tmp_path: Path) -> None:
    spec = read_spec(checkpoint("qwen3_moe"))
    assert spec.experts == ExpertsSpec(8, 3, 96, True, (True, False, True))
    folder = checkpoints.make(tmp_path / "m", "qwen3_moe")
    change(folder, num_experts=None, num_local_experts=8)
    assert read_spec(folder) == spec
    change(folder, norm_topk_prob=None, mlp_only_layers=None, decoder_sparse_step=2)
    assert read_spec(folder).experts == ExpertsSpec(8, 3, 96, False, (False, True, False))
    assert read_spec(checkpoint("mixtral")).experts == ExpertsSpec(4, 2, 256, True, (True,) * 3)


def test_parameters_count_every_expert(checkpoint) -> None:
    for name in ("llama", "qwen2", "mixtral", "qwen3_moe"):
        weights = load_file(checkpoint(name) / "model.safetensors")
        matrices = sum(tensor.numel() for tensor in weights.values() if tensor.dim() == 2)
        assert read_spec(checkpoint(name)).parameters == matrices


def test_the_oldest_spelling_says_type(llama: Path) -> None:
    scaling = {"type": "linear", "factor": 2.0}
    change(llama, rope_parameters=None, rope_theta=5e5, rope_scaling=scaling)
    assert read_spec(llama).rope == RopeSpec(5e5, "linear", 2.0)


def test_rope_without_scaling_is_the_default(llama: Path) -> None:
    change(llama, rope_parameters=None, rope_theta=1e6)
    assert read_spec(llama).rope == RopeSpec(1e6)
    change(llama, rope_theta=None)
    assert read_spec(llama).rope == RopeSpec(10000.0)


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
    assert {name for name, spec in specs.items() if spec.qk_norm} == {"qwen3", "qwen3_moe"}
    assert {name for name, spec in specs.items() if spec.tied} == {"qwen2"}
    assert specs["mistral"].windows == (100, 100, 100)
    assert specs["llama"].windows == (None, None, None)
    assert (specs["qwen3"].head_dim, specs["llama"].head_dim) == (64, 32)


def test_the_fingerprint_tells_models_apart_and_nothing_else(tmp_path: Path, llama: Path) -> None:
    copy = checkpoints.make(tmp_path / "copy", "llama")
    assert fingerprint(llama) == fingerprint(copy) and len(fingerprint(llama)) == 16
    change(copy, rms_norm_eps=1e-6)
    assert fingerprint(llama) != fingerprint(copy)


def test_the_fingerprint_tells_finetunes_of_one_model_apart(tmp_path: Path, llama: Path) -> None:
    tuned = checkpoints.make(tmp_path / "tuned", "llama", seed=1)
    assert fingerprint(llama) != fingerprint(tuned)
    file = llama / "model.safetensors"
    before, size = fingerprint(llama), file.stat().st_size
    assert size > 3 * 65536
    for at in (size - 1, 65535):
        text = bytearray(file.read_bytes())
        text[at] ^= 1
        file.write_bytes(text)
        assert fingerprint(llama) != before
        before = fingerprint(llama)
