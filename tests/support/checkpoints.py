"""Random checkpoints of every supported architecture, with a byte-level tokenizer. No download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diptych.engine.bench.models import write_byte_tokenizer
from safetensors.torch import load_file, save_file

VOCAB = 512
TEMPLATE = (
    "<s>{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
QWEN3_MOE = {
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
#: name -> (architecture, model type, config on top of BASE)
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("MistralForCausalLM", "mistral", {"sliding_window": 100}),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", {"head_dim": 64}),
    "mixtral": (
        "MixtralForCausalLM",
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "qwen3_moe", QWEN3_MOE),
}


def make(folder: Path, name: str, seed: int = 0, **changes: Any) -> Path:
    """Writes a random fp32 checkpoint of architecture `name` to `folder`."""
    architecture, kind, extra = ARCHITECTURES[name]
    config = {**BASE, **extra, **changes}
    config |= {"architectures": [architecture], "model_type": kind, "dtype": "float32"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    save_file(_weights(config, kind, seed), folder / "model.safetensors", {"format": "pt"})
    specials = ["<|system|>", "<|user|>", "<|assistant|>"]
    write_byte_tokenizer(folder, specials, chat_template=TEMPLATE)
    return folder


def split(folder: Path, shards: int) -> dict[str, str]:
    """Turns a checkpoint of one file into one of several; tensor -> its shard."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shard = "model-{:05d}-of-{:05d}.safetensors"
    where = {
        name: shard.format(index % shards + 1, shards) for index, name in enumerate(sorted(weights))
    }
    for file in set(where.values()):
        mine = {name: tensor for name, tensor in weights.items() if where[name] == file}
        save_file(mine, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return where


Shapes = dict[str, tuple[int, ...]]


def _weights(config: dict[str, Any], kind: str, seed: int) -> dict[str, torch.Tensor]:
    """Norms around 1, routers wide enough to prefer clearly, everything else small."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in _shapes(config, kind).items():
        values = torch.randn(*shape, generator=generator)
        values *= 0.5 if name.endswith(("mlp.gate.weight", "moe.gate.weight")) else 0.08
        weights[name] = 1 + values if name.endswith("norm.weight") else values
    return weights


def _shapes(config: dict[str, Any], kind: str) -> Shapes:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}."
        shapes |= _attention(at + "self_attn.", config, kind)
        shapes |= _feed(at, index, config, kind)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}{norm}.weight"] = (hidden,)
    return shapes


def _attention(at: str, config: dict[str, Any], kind: str) -> Shapes:
    hidden, shapes = config["hidden_size"], {}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or hidden // heads
    sizes = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
    bias = config.get("attention_bias", False)
    for projection, size in sizes.items():
        shapes[f"{at}{projection}.weight"] = (size, hidden)
        if kind == "qwen2" or bias:
            shapes[f"{at}{projection}.bias"] = (size,)
    shapes[at + "o_proj.weight"] = (hidden, heads * dim)
    if bias:
        shapes[at + "o_proj.bias"] = (hidden,)
    if kind in ("qwen3", "qwen3_moe"):
        shapes |= {at + "q_norm.weight": (dim,), at + "k_norm.weight": (dim,)}
    return shapes


def _feed(at: str, index: int, config: dict[str, Any], kind: str) -> Shapes:
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    block, names, count = "mlp", ("gate_proj", "up_proj", "down_proj"), 0
    if kind == "mixtral":
        block, names, count = "block_sparse_moe", ("w1", "w3", "w2"), config["num_local_experts"]
    if kind == "qwen3_moe" and index not in config["mlp_only_layers"]:
        every = config.get("decoder_sparse_step", 1)
        count = config["num_experts"] if (index + 1) % every == 0 else 0
        wide = config["moe_intermediate_size"] if count else wide
    shapes: Shapes = {f"{at}{block}.gate.weight": (count, hidden)} if count else {}
    for expert in [f".experts.{number}" for number in range(count)] or [""]:
        for name, shape in zip(names, [(wide, hidden)] * 2 + [(hidden, wide)], strict=True):
            shapes[f"{at}{block}{expert}.{name}.weight"] = shape
    return shapes
