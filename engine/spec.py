"""What a checkpoint asks of the decoder, read from its Hugging Face `config.json`.

Anything that the decoder does not know is an error that names it, never a default.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, assert_never

import xxhash

from .errors import UnsupportedModel, WeightsError
from .quantization import Fp8Format, read_quantization

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
#: keys of the rope's part of config.json that are read; any other key is an error, since it may
#: mean another computation
ROPE_KEYS = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
}
DEFAULT_THETA = 1e4  #: transformers' `default_theta`: the base of the rope's wave lengths
MIXTRAL_THETA = 1e6  #: the same of transformers' `MixtralConfig`
FULL_ATTENTION = "full_attention"  #: a value of `layer_types`
SLIDING_ATTENTION = "sliding_attention"  #: the other one
#: keys of config.json that the decoder knows with these values only
FIXED_VALUES: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", None),
    "mlp_bias": (False, None),
}
#: keys under which a multimodal checkpoint keeps the configuration of its language model
TEXT_KEYS = ("text_config", "llm_config", "language_config")
FINGERPRINT_BYTES = 65536  #: of either end of a weight file; all of it would take minutes to read


class WindowRule(StrEnum):
    """Which layers have the `sliding_window` of config.json."""

    NEVER = "never"
    ALL_LAYERS = "all layers"
    #: With `use_sliding_window`: those that `layer_types` or `max_window_layers` names.
    SWITCHED_ON = "switched on"
    #: With `use_sliding_window`: all.
    SWITCHED_ON_ALL_LAYERS = "switched on, all layers"


class ExpertsFormat(StrEnum):
    """Whose names config.json has for a mixture of experts."""

    MIXTRAL = "mixtral"
    QWEN3 = "qwen3"


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a class of transformers settles by itself, so that config.json does not say it."""

    name: str  #: `ModelSpec.architecture`
    qkv_bias: bool = False  #: queries, keys and values have biases without `attention_bias` too
    output_bias: bool = False  #: with `attention_bias`, the output of attention has one too
    qk_norm: bool = False  #: queries and keys are normed
    windows: WindowRule = WindowRule.NEVER  #: which layers attend to a sliding window only
    default_theta: float = DEFAULT_THETA  #: of the rope, where config.json has none
    experts: ExpertsFormat | None = None  #: None: the model has no mixture of experts


#: The architectures that the decoder knows, by the name in config.json. A model that is a stack of
#: Llama's layers needs one more line here, and nothing else (docs/extending.md).
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", output_bias=True),
    "MistralForCausalLM": Architecture("mistral", windows=WindowRule.ALL_LAYERS),
    "MixtralForCausalLM": Architecture(
        "mixtral",
        windows=WindowRule.ALL_LAYERS,
        default_theta=MIXTRAL_THETA,
        experts=ExpertsFormat.MIXTRAL,
    ),
    "Qwen2ForCausalLM": Architecture("qwen2", qkv_bias=True, windows=WindowRule.SWITCHED_ON),
    "Qwen3ForCausalLM": Architecture(
        "qwen3", output_bias=True, qk_norm=True, windows=WindowRule.SWITCHED_ON
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe",
        output_bias=True,
        qk_norm=True,
        windows=WindowRule.SWITCHED_ON_ALL_LAYERS,
        experts=ExpertsFormat.QWEN3,
    ),
}


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding, as transformers' `modeling_rope_utils` computes it."""

    theta: float  #: base of the wave lengths: the longest is about 2 pi times it, in tokens
    #: one of ROPE_KINDS: how waves are stretched for contexts beyond the original one; the other
    #: fields are for that, and `rope.py` has the formulas
    kind: str = "default"
    factor: float = 1.0  #: by which waves are stretched
    low_freq_factor: float = 1.0  #: llama3: longer waves than context / this are stretched fully
    high_freq_factor: float = 1.0  #: llama3: shorter waves than context / this not at all
    original_max_position: int = 0  #: the original context in tokens
    beta_fast: float = 32.0  #: yarn: what turns so often within the context is not stretched
    beta_slow: float = 1.0  #: yarn: what turns so seldom within it is stretched fully
    truncate: bool = True  #: yarn: these two borders are rounded to whole dimensions
    attention_factor: float = 1.0  #: of cosines and sines


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts: each token goes through some of `count` MLPs."""

    count: int
    experts_per_token: int
    intermediate: int  #: inner size of one expert's MLP
    renormalize: bool  #: the weights of a token's experts sum to 1
    layers: tuple[bool, ...]  #: whether layer i has the mixture, or an MLP like other models


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """How many heads attention has, and how large each is."""

    heads: int  #: of queries
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the decoder needs to know of a model. Sizes in elements."""

    architecture: str  #: the name of one of ARCHITECTURES
    vocab: int  #: how many token ids there are
    hidden: int  #: size of the rows that go through the layers
    intermediate: int  #: inner size of an MLP
    layers: int  #: their number, as the next two
    heads: int  #: of queries
    kv_heads: int  #: of keys and of values
    head_dim: int
    norm_eps: float  #: added to the mean square in every RMSNorm
    rope: RopeSpec
    max_positions: int  #: tokens of the longest sequence that the model was made for
    tied: bool  #: the head is the embedding, unless the checkpoint has one
    qkv_bias: bool  #: queries, keys and values have biases
    output_bias: bool  #: the output of attention has one
    qk_norm: bool  #: each head of queries and keys is normed before it is rotated
    windows: tuple[int | None, ...]  #: each layer's sliding window in tokens; None: full attention
    eos_ids: tuple[int, ...]  #: ids that end an answer, by the checkpoint's configuration
    dtype: str  #: of the checkpoint's tensors, by its config.json; the engine's may be another
    experts: ExpertsSpec | None = None  #: None: every layer has a plain MLP
    fp8: Fp8Format | None = None  #: how quantized weights are scaled; None: they are not quantized

    @property
    def parameters(self) -> int:
        """The number of weights in all matrices; norms and biases are too few to count."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        embedding = self.vocab * self.hidden
        weights = self.layers * attention + embedding
        if not self.tied:
            weights += embedding
        dense_layers = self.layers
        if self.experts is not None:
            sparse_layers = sum(self.experts.layers)
            dense_layers -= sparse_layers
            expert = 3 * self.hidden * self.experts.intermediate
            weights += sparse_layers * self.experts.count * (expert + self.hidden)  # + router
        return weights + 3 * self.hidden * self.intermediate * dense_layers


def read_json(path: Path) -> dict[str, Any]:
    """Returns a JSON object from a checkpoint's file. Raises WeightsError where there is none."""
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
    """Reads a checkpoint folder's config.json, and the end ids of generation_config.json.

    Raises WeightsError (file missing or malformed) and UnsupportedModel (unknown architecture,
    rope type, activation or quantization).
    """
    config = read_json(folder / "config.json")
    names = config.get("architectures") or ["(none)"]
    architecture = ARCHITECTURES.get(names[0])
    if architecture is None:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModel(f"architecture {names[0]} is not supported (supported: {supported})")
    try:
        return _spec(folder, config, architecture)
    except KeyError as error:
        raise WeightsError(f"config.json in {folder} has no {error}") from None


def _spec(folder: Path, config: dict[str, Any], architecture: Architecture) -> ModelSpec:
    for key, supported in FIXED_VALUES.items():
        if config.get(key) not in supported:
            raise UnsupportedModel(f"{key} {config[key]!r} in config.json is not supported")
    attention = _heads(config)
    bias = bool(config.get("attention_bias", False))
    rope = _rope(config, architecture.default_theta)
    max_positions = _size(config, "max_position_embeddings")
    if rope.kind == "yarn":  # some configs give only the positions before the scaling
        max_positions = max(max_positions, int(rope.original_max_position * rope.factor))
    return ModelSpec(
        architecture=architecture.name,
        vocab=_size(config, "vocab_size"),
        hidden=_size(config, "hidden_size"),
        intermediate=_size(config, "intermediate_size"),
        layers=_size(config, "num_hidden_layers"),
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        norm_eps=config["rms_norm_eps"],
        rope=rope,
        max_positions=max_positions,
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bias or architecture.qkv_bias,
        output_bias=bias and architecture.output_bias,
        qk_norm=architecture.qk_norm,
        windows=_windows(config, architecture.windows),
        eos_ids=_eos_ids(folder, config),
        dtype=config.get("dtype") or config.get("torch_dtype") or "bfloat16",
        experts=_experts(config, architecture.experts),
        fp8=read_quantization(config.get("quantization_config")),
    )


def _size(config: dict[str, Any], key: str) -> int:
    """Returns a positive whole number of the config. Raises WeightsError, or KeyError without it."""
    value = config[key]
    if not isinstance(value, int) or value < 1:
        raise WeightsError(f"{key} in config.json is {value!r}, not a positive whole number")
    return value


def _heads(config: dict[str, Any]) -> AttentionHeads:
    hidden = _size(config, "hidden_size")
    heads = _size(config, "num_attention_heads")
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
    return AttentionHeads(heads, kv_heads, head_dim)


def end_ids(folder: Path) -> tuple[int, ...]:
    """Returns the ids that end an answer by the checkpoint's configuration, whatever its model."""
    config = read_json(folder / "config.json")
    return _eos_ids(folder, {**text_config(config), **config})


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a multimodal checkpoint's configuration that is its language model's.

    It is the whole configuration of any other checkpoint.
    """
    for key in TEXT_KEYS:
        if isinstance(config.get(key), dict):
            nested: dict[str, Any] = config[key]
            return nested
    return config


def _eos_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Returns the end ids of generation_config.json, or else of config.json: a number or a list."""
    end_ids = None
    generation_config = folder / "generation_config.json"
    if generation_config.exists():
        end_ids = read_json(generation_config).get("eos_token_id")
    if end_ids is None:
        end_ids = config.get("eos_token_id")
    if end_ids is None:
        return ()
    return tuple(end_ids) if isinstance(end_ids, list) else (end_ids,)


def _experts(config: dict[str, Any], experts_format: ExpertsFormat | None) -> ExpertsSpec | None:
    match experts_format:
        case None:
            return None
        case ExpertsFormat.MIXTRAL:
            experts = _mixtral_experts(config)
        case ExpertsFormat.QWEN3:
            experts = _qwen3_experts(config)
        case _:
            assert_never(experts_format)
    if experts.experts_per_token > experts.count:
        raise WeightsError(
            f"num_experts_per_tok {experts.experts_per_token} in config.json exceeds "
            f"{experts.count} experts"
        )
    return experts


def _mixtral_experts(config: dict[str, Any]) -> ExpertsSpec:
    return ExpertsSpec(
        count=_size(config, "num_local_experts"),
        experts_per_token=_size(config, "num_experts_per_tok"),
        intermediate=_size(config, "intermediate_size"),
        renormalize=True,
        layers=(True,) * _size(config, "num_hidden_layers"),
    )


def _qwen3_experts(config: dict[str, Any]) -> ExpertsSpec:
    """Returns Qwen3-MoE's experts, of which some layers may have none."""
    # the count is `num_experts` on the hub, and `num_local_experts` since transformers 5
    count_key = "num_experts" if "num_experts" in config else "num_local_experts"
    dense_layers = config.get("mlp_only_layers") or []
    step = _size({"decoder_sparse_step": 1} | config, "decoder_sparse_step")
    return ExpertsSpec(
        count=_size(config, count_key),
        experts_per_token=_size(config, "num_experts_per_tok"),
        intermediate=_size(config, "moe_intermediate_size"),
        renormalize=bool(config.get("norm_topk_prob", False)),
        layers=tuple(
            layer not in dense_layers and (layer + 1) % step == 0
            for layer in range(_size(config, "num_hidden_layers"))
        ),
    )


def _rope(config: dict[str, Any], default_theta: float) -> RopeSpec:
    """Reads both spellings: `rope_parameters` (transformers 5), and `rope_scaling` before it."""
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = values.get("rope_type") or values.get("type") or "default"
    _refuse_unsupported_rope(config, values, kind)
    theta = float(values.get("rope_theta") or config.get("rope_theta") or default_theta)
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, kind, float(values["factor"]))
    original = config.get("original_max_position_embeddings")
    original = original or values.get("original_max_position_embeddings")
    original = int(original or config["max_position_embeddings"])
    if kind == "yarn":
        return _yarn(config, values, theta, original)
    return RopeSpec(
        theta=theta,
        kind=kind,
        factor=float(values["factor"]),
        low_freq_factor=float(values["low_freq_factor"]),
        high_freq_factor=float(values["high_freq_factor"]),
        original_max_position=original,
    )


def _refuse_unsupported_rope(config: dict[str, Any], values: dict[str, Any], kind: str) -> None:
    """Raises UnsupportedModel where the decoder does not know a rope's kind, or a key of `values`."""
    unknown = sorted(key for key in values.keys() - ROPE_KEYS if values[key] is not None)
    if unknown:
        raise UnsupportedModel(f"{', '.join(unknown)} of the rope in config.json is not supported")
    rotary_share = values.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if rotary_share != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor {rotary_share} is not supported")
    if kind not in ROPE_KINDS:
        supported = ", ".join(ROPE_KINDS)
        raise UnsupportedModel(f"rope type {kind!r} is not supported (supported: {supported})")


def _yarn(config: dict[str, Any], values: dict[str, Any], theta: float, original: int) -> RopeSpec:
    factor = float(values.get("factor") or config["max_position_embeddings"] / original)
    return RopeSpec(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=float(values.get("beta_fast") or 32),
        beta_slow=float(values.get("beta_slow") or 1),
        truncate=bool(values.get("truncate", True)),
        attention_factor=_yarn_attention_factor(values, factor),
    )


def _yarn_attention_factor(values: dict[str, Any], factor: float) -> float:
    """Returns the factor of cosines and sines that transformers' `_compute_yarn_parameters` finds."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = values.get("attention_factor")
    if attention_factor is not None:
        return float(attention_factor)
    mscale = values.get("mscale")
    mscale_all_dim = values.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return float(scale(mscale) / scale(mscale_all_dim))
    return float(scale(1.0))


def _windows(config: dict[str, Any], rule: WindowRule) -> tuple[int | None, ...]:
    """Returns each layer's window, as the reference of the architecture has it."""
    layers = config["num_hidden_layers"]
    needs_switch = rule in (WindowRule.SWITCHED_ON, WindowRule.SWITCHED_ON_ALL_LAYERS)
    switched_off = needs_switch and not config.get("use_sliding_window")
    if rule is WindowRule.NEVER or switched_off or config.get("sliding_window") is None:
        return (None,) * layers
    window = _size(config, "sliding_window")
    kinds = config.get("layer_types")
    if rule in (WindowRule.ALL_LAYERS, WindowRule.SWITCHED_ON_ALL_LAYERS):
        kinds = [SLIDING_ATTENTION] * layers
    elif kinds is None:
        full_layers = min(config.get("max_window_layers", 28), layers)  # 28: transformers' default
        kinds = [FULL_ATTENTION] * full_layers + [SLIDING_ATTENTION] * (layers - full_layers)
    unknown = set(kinds) - {FULL_ATTENTION, SLIDING_ATTENTION}
    if unknown or len(kinds) != layers:
        raise UnsupportedModel(f"layer_types {kinds} in config.json are not supported")
    return tuple(window if kind == SLIDING_ATTENTION else None for kind in kinds)


def fingerprint(folder: Path, config_file: str = "config.json") -> bytes:
    """Returns 16 bytes that tell two models apart.

    They are a hash of the file with their settings, and of each weight file's name, size, first and
    last 64 KiB (its header, and some of its weights). Cheap: it guards against mixing models up,
    not against an adversary.
    """
    digest = xxhash.xxh3_128()
    digest.update((folder / config_file).read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = path.stat().st_size
            digest.update(f"{path.name}|{size}|".encode() + file.read(FINGERPRINT_BYTES))
            file.seek(max(size - FINGERPRINT_BYTES, 0))
            digest.update(file.read(FINGERPRINT_BYTES))
    return digest.digest()
