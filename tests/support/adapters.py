"""Random LoRA adapters, as PEFT saves them, for Llamas and models with their names of matrices."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

SPREAD = 0.1  #: Standard deviation of both matrices: other answers, of the same size.


def make_adapter(folder: Path, base: Path, seed: int = 0, rank: int = 8) -> Path:
    """Writes an adapter of attention and MLP for the model in `base` to `folder`."""
    config = json.loads((base / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    kv_size = config["num_key_value_heads"] * head_dim
    #: Rows out and numbers in, by the name that a layer has for its matrix.
    shapes = {
        "self_attn.q_proj": (config["num_attention_heads"] * head_dim, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (rows, width) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            narrow = torch.randn(rank, width, generator=generator) * SPREAD
            wide = torch.randn(rows, rank, generator=generator) * SPREAD
            tensors[f"{prefix}.lora_A.weight"] = narrow.to(torch.bfloat16)
            tensors[f"{prefix}.lora_B.weight"] = wide.to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(name.partition(".")[2] for name in shapes),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
