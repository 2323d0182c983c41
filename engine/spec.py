"""What a checkpoint asks of the decoder, read from its Hugging Face `config.json`.

Anything that the decoder does not know is an error that names it, never a default.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from .errors import UnsupportedModel, WeightsError
from .quantization import Fp8, read_quantization

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
ROPE_KEYS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"),
    *("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"),
}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding, as transformers' `modeling_rope_utils` computes it.

    `kind` is one of ROPE_KINDS; the other fields are that kind's.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  #: of cosines and sines


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: each token goes through `chosen` of `count` MLPs.

    `renormalize`: the weights of the chosen ones sum to 1. `layers[i]`: whether layer i has it.
    """

    count: int
    chosen: int
    intermediate: int
    renormalize: bool
    layers: tuple[bool, ...]


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
    experts: Experts | None = None
    fp8: Fp8 | None = None

    @property
    def parameters(self) -> int:
        """Number of weights of the matrices (norms and biases are noise)."""
        layer = self.hidden * self.head_dim * (self.heads + self.kv_heads) * 2
        experts = self.experts or Experts(0, 0, 0, False, ())
        sparse = sum(experts.layers)
        mlps = (self.layers - sparse) * self.intermediate
        mlps += sparse * experts.count * experts.intermediate
        routers = sparse * experts.count * self.hidden
        ends = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + 3 * self.hidden * mlps + routers + ends


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
    only = {"hidden_act": ("silu", None), "mlp_bias": (False, None)}
    for key, known in only.items():
        if config.get(key) not in known:
            raise UnsupportedModel(f"{key} {config[key]!r} in config.json is not supported")
    heads, kv_heads, head_dim = _heads(config)
    bias = bool(config.get("attention_bias", False))
    qwen3 = architecture in ("qwen3", "qwen3_moe")
    rope = _rope(config, architecture)
    stretched = int(rope.original_max_position * rope.factor) if rope.kind == "yarn" else 0
    return ModelSpec(
        architecture=architecture,
        vocab=_size(config, "vocab_size"),
        hidden=_size(config, "hidden_size"),
        intermediate=_size(config, "intermediate_size"),
        layers=_size(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=config["rms_norm_eps"],
        rope=rope,
        max_positions=max(_size(config, "max_position_embeddings"), stretched),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bias or architecture == "qwen2",
        output_bias=bias and (qwen3 or architecture == "llama"),
        qk_norm=qwen3,
        windows=_windows(config, architecture),
        eos_ids=_eos_ids(folder, config),
        dtype=config.get("dtype") or config.get("torch_dtype") or "bfloat16",
        experts=_experts(config, architecture),
        fp8=read_quantization(config.get("quantization_config")),
    )


def _size(config: dict[str, Any], key: str) -> int:
    value = config[key]
    if not isinstance(value, int) or value < 1:
        raise WeightsError(f"{key} in config.json is {value!r}, not a positive whole number")
    return value


def _heads(config: dict[str, Any]) -> tuple[int, int, int]:
    """Query heads, KV heads, and the size of each."""
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads") if config.get("num_key_value_heads") else heads
    if heads % kv_heads:
        raise WeightsError(
            f"num_attention_heads {heads} in config.json is no multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    if config.get("head_dim"):
        head_dim = _size(config, "head_dim")
    elif hidden % heads:
        raise WeightsError(
            f"hidden_size {hidden} in config.json is no multiple of num_attention_heads {heads}, "
            "and there is no head_dim"
        )
    else:
        head_dim = hidden // heads
    if head_dim % 2:
        raise UnsupportedModel(f"head_dim {head_dim} is odd: rotary embedding needs an even one")
    return heads, kv_heads, head_dim


def _eos_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    ends = read_json(generation).get("eos_token_id") if generation.exists() else None
    ends = config.get("eos_token_id") if ends is None else ends
    return () if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)


def _experts(config: dict[str, Any], architecture: str) -> Experts | None:
    """Qwen3-MoE counts `num_experts` on the hub, `num_local_experts` since transformers 5."""
    layers = _size(config, "num_hidden_layers")
    if architecture == "mixtral":
        count, wide = _size(config, "num_local_experts"), _size(config, "intermediate_size")
        renormalize, sparse = True, (True,) * layers
    elif architecture == "qwen3_moe":
        key = "num_experts" if "num_experts" in config else "num_local_experts"
        count, wide = _size(config, key), _size(config, "moe_intermediate_size")
        renormalize = bool(config.get("norm_topk_prob", False))
        dense = config.get("mlp_only_layers") or []
        step = _size({"decoder_sparse_step": 1} | config, "decoder_sparse_step")
        sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    else:
        return None
    chosen = _size(config, "num_experts_per_tok")
    if chosen > count:
        raise WeightsError(f"num_experts_per_tok {chosen} in config.json exceeds {count} experts")
    return Experts(count, chosen, wide, renormalize, sparse)


def _rope(config: dict[str, Any], architecture: str) -> Rope:
    """Both spellings: `rope_parameters` (transformers 5), `rope_theta` + `rope_scaling` before."""
    usual = 1e6 if architecture == "mixtral" else 1e4  # transformers' `default_theta`
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    unknown = sorted(key for key in values.keys() - ROPE_KEYS if values[key] is not None)
    if unknown:
        raise UnsupportedModel(f"{', '.join(unknown)} of the rope in config.json is not supported")
    theta = float(values.get("rope_theta") or config.get("rope_theta") or usual)
    kind = values.get("rope_type") or values.get("type") or "default"
    partial = values.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor {partial} is not supported")
    if kind not in ROPE_KINDS:
        known = ", ".join(ROPE_KINDS)
        raise UnsupportedModel(f"rope type {kind!r} is not supported (supported: {known})")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, float(values["factor"]))
    original = config.get("original_max_position_embeddings")
    original = original or values.get("original_max_position_embeddings")
    original = int(original or config["max_position_embeddings"])
    if kind == "yarn":
        return _yarn(config, values, theta, original)
    low, high = float(values["low_freq_factor"]), float(values["high_freq_factor"])
    return Rope(theta, kind, float(values["factor"]), low, high, original)


def _yarn(config: dict[str, Any], values: dict[str, Any], theta: float, original: int) -> Rope:
    factor = float(values.get("factor") or config["max_position_embeddings"] / original)

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = values.get("attention_factor")
    above, below = values.get("mscale"), values.get("mscale_all_dim")
    if attention is None:
        attention = scale(above) / scale(below) if above and below else scale(1.0)
    return Rope(
        theta,
        "yarn",
        factor,
        original_max_position=original,
        beta_fast=float(values.get("beta_fast") or 32),
        beta_slow=float(values.get("beta_slow") or 1),
        truncate=bool(values.get("truncate", True)),
        attention_factor=float(attention),
    )


def _windows(config: dict[str, Any], architecture: str) -> tuple[int | None, ...]:
    """Mistral and Mixtral have a window wherever one is given, Qwen where it is switched on.

    Llama ignores it, and Qwen3-MoE has it on all layers, as their references do.
    """
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    always = architecture in ("mistral", "mixtral")
    if architecture == "llama" or not (always or config.get("use_sliding_window")):
        window = None
    if window is None:
        return (None,) * layers
    window, kinds = _size(config, "sliding_window"), config.get("layer_types")
    if always or architecture == "qwen3_moe":
        kinds = ["sliding_attention"] * layers
    elif kinds is None:
        first = min(config.get("max_window_layers", 28), layers)
        kinds = ["full_attention"] * first + ["sliding_attention"] * (layers - first)
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != layers:
        raise UnsupportedModel(f"layer_types {kinds} in config.json are not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def fingerprint(folder: Path) -> bytes:
    """16 bytes that tell two models apart: config.json, and each weight file's name, size, and
    first and last 64 KiB (its header, and some of its weights).

    Cheap: it guards against mixing models up, not against an adversary.
    """
    digest = xxhash.xxh3_128()
    digest.update((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = path.stat().st_size
            digest.update(f"{path.name}|{size}|".encode() + file.read(65536))
            file.seek(max(size - 65536, 0))
            digest.update(file.read(65536))
    return digest.digest()
