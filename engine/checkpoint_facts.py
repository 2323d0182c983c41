"""What anyone needs to know of a checkpoint whichever engine computes it.

Gateways, `diptych serve` before it starts anything, and workers of another engine ask for them.
`spec.read_spec` reads what our own decoder needs beside, and refuses models that it does not know.
Only JSON files are read, and no torch is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import WeightsError
from .sizing import ITEM_BYTES
from .spec import end_ids, read_json, text_config

#: What published checkpoints leave out of config.json, by model type: transformers has them as
#: defaults of the configuration's class.
LEFT_OUT: dict[str, dict[str, int]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    }
}


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """A checkpoint's architecture, vocabulary and sizes."""

    architecture: str  #: As its config.json names it; `(none)` if it does not.
    vocabulary: int  #: How many ids there are.
    end_ids: tuple[int, ...]  #: Ids that end an answer.
    max_positions: int  #: The longest sequence that the model was made for, in tokens.
    #: Numbers that the KV cache has for a token, in all layers. With multi-head latent attention
    #: it is the least: where a CPU lacks AMX, K and V of each head are kept (`vllm/models.py`).
    token_items: int

    def pool_tokens(self, kv_bytes: int, dtype: str) -> int:
        """Returns how many tokens a KV pool of so many bytes holds, about."""
        return kv_bytes // (self.token_items * ITEM_BYTES[dtype])


def read_facts(folder: Path) -> CheckpointFacts:
    """Reads config.json, and the end ids from generation_config.json if that is there and names some.

    Raises WeightsError where a size is missing or no number. A missing architecture is `(none)`, and
    missing end ids are an empty tuple.
    """
    checkpoint_config = read_json(folder / "config.json")
    config = text_config(checkpoint_config)
    config = LEFT_OUT.get(config.get("model_type", ""), {}) | config
    names = checkpoint_config.get("architectures") or ["(none)"]
    try:
        return CheckpointFacts(
            architecture=str(names[0]),
            vocabulary=int(config["vocab_size"]),
            end_ids=end_ids(folder),
            max_positions=int(config["max_position_embeddings"]),
            token_items=int(config["num_hidden_layers"]) * _layer_items(config),
        )
    except KeyError as error:
        raise WeightsError(f"config.json in {folder} has no {error}") from None
    except (TypeError, ValueError) as error:
        raise WeightsError(f"config.json in {folder} has a size that is none: {error}") from None


def _layer_items(config: dict[str, Any]) -> int:
    """Returns the numbers of the KV cache that one layer has for a token."""
    if config.get("kv_lora_rank"):
        # Multi-head latent attention keeps one latent vector and one rotated key for all heads.
        return int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])
    heads = int(config["num_attention_heads"])
    head_dim = config.get("head_dim") or int(config["hidden_size"]) // heads
    return 2 * int(config.get("num_key_value_heads") or heads) * int(head_dim)
