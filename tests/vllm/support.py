"""Opens vLLM engines in the process of the tests; several may live side by side here."""

from __future__ import annotations

import json
from pathlib import Path

from diptych.engine.options import EngineOptions, SchedulerLimits
from diptych.engine.vllm.engine import VllmEngine

DTYPE_BYTES = 2  #: Of bfloat16.


def open_engine(folder: Path, limits: SchedulerLimits, blocks: int) -> VllmEngine:
    """An engine whose pool has so many usable blocks, and vLLM's null block beside them."""
    kv_bytes = (blocks + 1) * block_bytes(folder, limits.block_tokens)
    return VllmEngine(EngineOptions(folder, kv_bytes=kv_bytes, limits=limits))


def block_bytes(folder: Path, block_tokens: int) -> int:
    """Bytes of a block in all layers, for a model whose layers are all alike."""
    config = json.loads((folder / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token_items = 2 * config["num_key_value_heads"] * head_dim
    return int(config["num_hidden_layers"] * block_tokens * token_items * DTYPE_BYTES)
