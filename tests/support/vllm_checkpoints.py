"""Random checkpoints of architectures that only vLLM computes, small and with the true keys.

Their `config.json` has what the published checkpoints of the family have, with fewer and smaller
layers. Transformers makes the weights and names them, so the files look like published ones; it
comes with vLLM. Nothing is downloaded.

    python -m tests.support.vllm_checkpoints gemma3 /tmp/gemma3
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diptych.engine.bench.models import write_byte_tokenizer
from safetensors.torch import load_file, save_file

from .checkpoints import TEMPLATE, VOCAB

SPREAD = 0.08  #: Standard deviation of the weights: answers depend on all of the prompt.
EMBEDDING_SPREAD = 1.0  #: Of the embeddings: the next id depends on the last one, too.
TIED_SPREAD = 0.02  #: Of embeddings that are the last matrix, too; wider, an id repeats itself.
ROUTER_SPREAD = 0.5  #: Of those that choose experts, so that a choice is clear.
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
GEMMA3: dict[str, Any] = {
    "head_dim": 64,
    "num_hidden_layers": 6,
    "sliding_window": 64,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "query_pre_attn_scalar": 64,
    "rope_local_base_freq": 10000.0,
    "tie_word_embeddings": True,
}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
DEEPSEEK_V3: dict[str, Any] = {
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 96,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}
GPT_OSS: dict[str, Any] = {
    "head_dim": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
QWEN2_MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
}
LFM2: dict[str, Any] = {
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "tie_word_embeddings": True,
}
#: Model type by name, and its configuration on top of BASE.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 100}),
    "qwen2_moe": ("qwen2_moe", QWEN2_MOE),
    "qwen3": ("qwen3", {"head_dim": 64}),
    "phi3": ("phi3", {}),
    "gemma3_text": ("gemma3_text", GEMMA3),
    "deepseek_v2": ("deepseek_v2", DEEPSEEK),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK | DEEPSEEK_V3),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "lfm2": ("lfm2", LFM2),
}


def make_family(folder: Path, name: str, **changes: Any) -> Path:
    """Writes a random bfloat16 checkpoint of a family of `FAMILIES` to `folder`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, extra = FAMILIES[name]
    config = AutoConfig.for_model(model_type, **(BASE | extra | changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    _spread_weights(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    _finish(folder)
    return folder


def _spread_weights(model: torch.nn.Module) -> None:
    """Gives all matrices random numbers wide enough that answers depend on every part."""
    tied = model.config.get_text_config().tie_word_embeddings
    for name, weights in model.named_parameters():
        if weights.dim() >= 2:
            spread = SPREAD
            if name.endswith("embed_tokens.weight"):
                spread = TIED_SPREAD if tied else EMBEDDING_SPREAD
            elif name.endswith(("gate.weight", "router.weight")):
                spread = ROUTER_SPREAD
            torch.nn.init.normal_(weights, std=spread)


def _finish(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    specials = ["<|system|>", "<|user|>", "<|assistant|>"]
    write_byte_tokenizer(folder, specials, chat_template=TEMPLATE)


# ---- quantized copies --------------------------------------------------------------------------

GROUP = 64  #: Inputs that share a scale, in the formats with 4 bits.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  #: Which of eight outputs each 4 bits of a word hold.
INT8_SCHEME: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}
AWQ_SCHEME: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": GROUP,
    "zero_point": True,
    "version": "gemm",
}
GPTQ_SCHEME: dict[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP,
    "desc_act": False,
    "sym": True,
}
Tensors = dict[str, torch.Tensor]


def quantize(folder: Path, scheme: dict[str, Any]) -> None:
    """Rewrites a checkpoint's linear layers by one of the schemes above, in place."""
    pack = {"compressed-tensors": _pack_int8, "awq": _pack_awq, "gptq": _pack_gptq}
    file = folder / "model.safetensors"
    tensors: Tensors = {}
    for name, weight in load_file(file).items():
        if name.endswith("_proj.weight"):
            prefix = name.removesuffix("weight")
            parts = pack[scheme["quant_method"]](weight.float())
            tensors |= {prefix + part: values.contiguous() for part, values in parts.items()}
        else:
            tensors[name] = weight
    save_file(tensors, file, {"format": "pt"})
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text()) | {"quantization_config": scheme}
    config_file.write_text(json.dumps(config))


def _pack_int8(weight: torch.Tensor) -> Tensors:
    """A signed byte for each weight, and a scale for each output."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def _four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns values of 0 to 15 around 8 as [inputs, outputs], and [groups, outputs] scales."""
    grouped = weight.t().reshape(-1, GROUP, weight.shape[0])
    scale = grouped.abs().amax(dim=1, keepdim=True) / 7
    values = ((grouped / scale).round() + 8).to(torch.int32)
    return values.reshape(-1, weight.shape[0]), scale[:, 0].half()


def _pack_words(values: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Packs each eight neighbours of the last dimension into one int32 word."""
    eights = values.reshape(*values.shape[:-1], -1, 8).to(torch.int64)
    word = torch.zeros_like(eights[..., 0])
    for place, index in enumerate(order):
        word |= eights[..., index] << (4 * place)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def _pack_awq(weight: torch.Tensor) -> Tensors:
    values, scales = _four_bits(weight)
    zeros = torch.full(tuple(scales.shape), 8)
    return {
        "qweight": _pack_words(values, AWQ_ORDER),
        "qzeros": _pack_words(zeros, AWQ_ORDER),
        "scales": scales,
    }


def _pack_gptq(weight: torch.Tensor) -> Tensors:
    in_order = tuple(range(8))
    values, scales = _four_bits(weight)
    zeros = torch.full(tuple(scales.shape), 7)  # the format counts them from 1
    return {
        "qweight": _pack_words(values.t(), in_order).t(),
        "qzeros": _pack_words(zeros, in_order),
        "scales": scales,
        "g_idx": (torch.arange(len(values)) // GROUP).to(torch.int32),
    }


# ---- beside families ---------------------------------------------------------------------------


def make_gemma3_with_images(folder: Path) -> Path:
    """Writes a Gemma 3 as it is published: a vision tower before the language model."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    }
    config = AutoConfig.for_model(
        "gemma3",
        text_config=BASE | GEMMA3,
        vision_config=vision,
        mm_tokens_per_image=4,
        boi_token_index=5,
        eoi_token_index=6,
        image_token_index=7,
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    _spread_weights(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    _finish(folder)
    return folder


def make_mxfp4_gpt_oss(folder: Path) -> Path:
    """Writes a gpt-oss as it is published: its experts' matrices as MXFP4 blocks and scales."""
    make_family(folder, "gpt_oss")
    file = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    tensors: Tensors = {}
    for name, weights in load_file(file).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = weights
            continue
        experts, inputs, outputs = weights.shape
        blocks = (experts, outputs, inputs // 32, 16)
        # Any byte holds two numbers; a scale is a power of two, here 2^-5.
        tensors[name + "_blocks"] = torch.randint(
            0, 256, blocks, generator=generator, dtype=torch.uint8
        )
        tensors[name + "_scales"] = torch.full(blocks[:3], 127 - 5, dtype=torch.uint8)
    save_file(tensors, file, {"format": "pt"})
    config_file = folder / "config.json"
    scheme = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    config = json.loads(config_file.read_text()) | {"quantization_config": scheme}
    config_file.write_text(json.dumps(config))
    return folder


def make(folder: Path, name: str) -> Path:
    """Writes the checkpoint `name` of `MAKERS` to `folder`."""
    return MAKERS[name](folder)


def _make_quantized(folder: Path, scheme: dict[str, Any]) -> Path:
    make_family(folder, "qwen3")
    quantize(folder, scheme)
    return folder


#: All that can be made: each writes a folder, and returns it.
MAKERS: dict[str, Callable[[Path], Path]] = {
    **{name: partial(make_family, name=name) for name in FAMILIES},
    "qwen3_int8": partial(_make_quantized, scheme=INT8_SCHEME),
    "qwen3_awq": partial(_make_quantized, scheme=AWQ_SCHEME),
    "qwen3_gptq": partial(_make_quantized, scheme=GPTQ_SCHEME),
    "gemma3": make_gemma3_with_images,
    "gpt_oss_mxfp4": make_mxfp4_gpt_oss,
}

if __name__ == "__main__":
    make(Path(sys.argv[2]), sys.argv[1])
