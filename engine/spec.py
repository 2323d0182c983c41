"""What a checkpoint asks of the decoder, read from its Hugging Face `config.json`.

Anything that the decoder does not know is an error that names it, never a default.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from .errors import UnsupportedModel, WeightsError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding. Llama 3 scaling: Hugging Face transformers, `_compute_llama3_parameters`.

    `kind` is "default", "linear" or "llama3"; the other fields are that kind's.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes in elements. `windows[i]` is layer i's sliding window in tokens, None for full."""

    architecture: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    max_positions: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    eos_ids: tuple[int, ...]
    dtype: str

    @property
    def parameters(self) -> int:
        """Number of weights of the matrices (norms and biases are noise)."""
        attention = self.hidden * self.head_dim * (self.heads + self.kv_heads) * 2
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.vocab * self.hidden * (1 if self.tied else 2)


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise WeightsError(f"{path.name} is missing in {path.parent}: not a checkpoint") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise WeightsError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise WeightsError(f"{path} is not a JSON object")
    return values


def read_spec(folder: Path) -> ModelSpec:
    """Reads config.json (and generation_config.json for the end ids) of a checkpoint folder.

    Raises WeightsError (file missing or malformed) and UnsupportedModel (unknown architecture,
    rope type, activation or quantization).
    """
    config = read_json(folder / "config.json")
    names = config.get("architectures") or ["(none)"]
    architecture = ARCHITECTURES.get(names[0])
    if architecture is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModel(f"architecture {names[0]} is not supported (supported: {known})")
    try:
        return _spec(folder, config, architecture)
    except KeyError as error:
        raise WeightsError(f"config.json in {folder} has no {error}") from None


def _spec(folder: Path, config: dict[str, Any], architecture: str) -> ModelSpec:
    only = {"hidden_act": ("silu", None), "quantization_config": (None,), "mlp_bias": (False, None)}
    for key, known in only.items():
        if config.get(key) not in known:
            raise UnsupportedModel(f"{key} {config[key]!r} in config.json is not supported")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    bias = bool(config.get("attention_bias", False))
    generation = folder / "generation_config.json"
    ends = read_json(generation).get("eos_token_id") if generation.exists() else None
    ends = config.get("eos_token_id") if ends is None else ends
    return ModelSpec(
        architecture=architecture,
        vocab=config["vocab_size"],
        hidden=hidden,
        intermediate=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        norm_eps=config["rms_norm_eps"],
        rope=_rope(config),
        max_positions=config["max_position_embeddings"],
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bias or architecture == "qwen2",
        output_bias=bias and architecture in ("llama", "qwen3"),
        qk_norm=architecture == "qwen3",
        windows=_windows(config, architecture),
        eos_ids=() if ends is None else tuple(ends) if isinstance(ends, list) else (ends,),
        dtype=config.get("dtype") or config.get("torch_dtype") or "bfloat16",
    )


def _rope(config: dict[str, Any]) -> Rope:
    """Both spellings: `rope_parameters` (transformers 5), `rope_theta` + `rope_scaling` before."""
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(values.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = values.get("rope_type") or values.get("type") or "default"
    partial = values.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor {partial} is not supported")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, float(values["factor"]))
    if kind == "llama3":
        return Rope(
            theta,
            kind,
            float(values["factor"]),
            float(values["low_freq_factor"]),
            float(values["high_freq_factor"]),
            int(values["original_max_position_embeddings"]),
        )
    raise UnsupportedModel(
        f"rope type {kind!r} is not supported (supported: default, linear, llama3)"
    )


def _windows(config: dict[str, Any], architecture: str) -> tuple[int | None, ...]:
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    if window is None or (architecture != "mistral" and not config.get("use_sliding_window")):
        return (None,) * layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = 0 if architecture == "mistral" else config.get("max_window_layers", layers)
        kinds = ["full_attention"] * first + ["sliding_attention"] * (layers - first)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def fingerprint(folder: Path) -> bytes:
    """16 bytes that tell two models apart: config.json, and each weight file's name, size, header.

    Cheap (no weight is hashed): it guards against mixing models up, not against an adversary.
    """
    digest = xxhash.xxh3_128()
    digest.update((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(f"{path.name}|{path.stat().st_size}|".encode() + file.read(65536))
    return digest.digest()
