"""Random checkpoints of every supported architecture, with a byte-level tokenizer. No download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

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
#: name -> (architecture, model type, config on top of BASE)
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("MistralForCausalLM", "mistral", {"sliding_window": 100}),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", {"head_dim": 64}),
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
    _tokenizer(folder)
    return folder


def _weights(config: dict[str, Any], kind: str, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or hidden // heads

    def random(*shape: int, scale: float = 0.08) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    def around_one(size: int) -> torch.Tensor:
        return 1 + random(size)

    weights = {
        "model.embed_tokens.weight": random(config["vocab_size"], hidden),
        "model.norm.weight": around_one(hidden),
    }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = random(config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}."
        sizes = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        for projection, size in sizes.items():
            weights[f"{at}self_attn.{projection}.weight"] = random(size, hidden)
            if kind == "qwen2":
                weights[f"{at}self_attn.{projection}.bias"] = random(size)
        weights[f"{at}self_attn.o_proj.weight"] = random(hidden, heads * dim)
        if kind == "qwen3":
            weights[f"{at}self_attn.q_norm.weight"] = around_one(dim)
            weights[f"{at}self_attn.k_norm.weight"] = around_one(dim)
        weights[f"{at}mlp.gate_proj.weight"] = random(wide, hidden)
        weights[f"{at}mlp.up_proj.weight"] = random(wide, hidden)
        weights[f"{at}mlp.down_proj.weight"] = random(hidden, wide)
        weights[f"{at}input_layernorm.weight"] = around_one(hidden)
        weights[f"{at}post_attention_layernorm.weight"] = around_one(hidden)
    return weights


def _tokenizer(folder: Path) -> None:
    """256 bytes and a few special tokens; the other ids decode to nothing."""
    specials = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
