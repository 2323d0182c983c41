"""Writes random Llama checkpoints to measure on, without a download.

The names of the shapes, `205M` and `7M`, say how many weights a model has. 205M is large enough
that reading its weights is what decode costs; 7M is quick.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

#: What `config.json` says for every shape.
BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

#: name -> what `config.json` says on top of BASE.
SHAPES: dict[str, dict[str, int]] = {
    "205M": {
        "vocab_size": 8192,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "7M": {
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
}


def write_checkpoint(name: str, folder: Path, seed: int = 0) -> Path:
    """Write a random bf16 checkpoint of shape `name` to `folder`, tokenizer included.

    Returns the folder.
    """
    config = BASE | SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config, seed), folder / "model.safetensors", {"format": "pt"})
    write_byte_tokenizer(folder)
    return folder


def _weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Return the tensors by name: normal with deviation 0.02, as such models begin; norms are 1."""
    generator = torch.Generator().manual_seed(seed)
    hidden = config["hidden_size"]
    intermediate = config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]

    def random(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.02).bfloat16()

    def ones() -> torch.Tensor:
        return torch.ones(hidden, dtype=torch.bfloat16)

    weights = {
        "model.embed_tokens.weight": random(config["vocab_size"], hidden),
        "model.norm.weight": ones(),
        "lm_head.weight": random(config["vocab_size"], hidden),
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        weights |= {
            f"{layer}self_attn.q_proj.weight": random(queries, hidden),
            f"{layer}self_attn.k_proj.weight": random(keys, hidden),
            f"{layer}self_attn.v_proj.weight": random(keys, hidden),
            f"{layer}self_attn.o_proj.weight": random(hidden, queries),
            f"{layer}mlp.gate_proj.weight": random(intermediate, hidden),
            f"{layer}mlp.up_proj.weight": random(intermediate, hidden),
            f"{layer}mlp.down_proj.weight": random(hidden, intermediate),
            f"{layer}input_layernorm.weight": ones(),
            f"{layer}post_attention_layernorm.weight": ones(),
        }
    return weights


def write_byte_tokenizer(folder: Path, other_specials: Sequence[str] = (), **settings: str) -> None:
    """Write a tokenizer of 256 bytes and of special tokens: `<s>`, `</s>` and `other_specials`.

    The measurement has no text, but some engines do not load a model without a tokenizer.
    `settings` are further ones of `tokenizer_config.json`.
    """
    specials = ["<s>", "</s>", *other_specials]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings |= {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
