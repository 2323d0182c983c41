"""A checkpoint's tensors -> `Weights`: one by one, fused, packed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from .decoder import Feed, Layer, Mlp, Weights
from .linear import make_linear
from .moe import Moe
from .ops import Norm, Ops
from .spec import ModelSpec
from .tensors import Tensors

Progress = Callable[[str, float], None]

HEAD = "lm_head.weight"
NAMES = ("gate_proj", "up_proj", "down_proj")
MIXTRAL_NAMES = ("w1", "w3", "w2")


def load(
    folder: Path, spec: ModelSpec, dtype: torch.dtype, ops: Ops, progress: Progress | None = None
) -> Weights:
    """Loads a checkpoint.

    Raises WeightsError (a tensor is missing or has another shape) and UnsupportedModel (there is
    one that this model has no place for, or of another type).
    """
    files = Tensors(folder, dtype, spec.fp8)
    embedding = files.take("model.embed_tokens.weight", spec.vocab, spec.hidden).clone()
    layers = []
    for index in range(spec.layers):
        layers.append(_layer(files, index, spec, ops))
        files.release()
        if progress:
            progress(f"layer {index + 1}/{spec.layers}", (index + 1) / spec.layers)
    tied = spec.tied and HEAD not in files  # what is on disk counts, as in transformers
    head = embedding if tied else files.take(HEAD, spec.vocab, spec.hidden)
    norm = Norm(files.take("model.norm.weight", spec.hidden).clone(), spec.norm_eps)
    files.check_all_taken()
    return Weights(embedding, layers, norm, make_linear(head, ops=ops))


def _layer(files: Tensors, index: int, spec: ModelSpec, ops: Ops) -> Layer:
    prefix = f"model.layers.{index}."
    attn = prefix + "self_attn."
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    parts = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
    qkv = [files.take(f"{attn}{name}.weight", size, spec.hidden) for name, size in parts]
    bias = [files.take(f"{attn}{name}.bias", size) for name, size in parts if spec.qkv_bias]
    output_bias = files.take(attn + "o_proj.bias", spec.hidden) if spec.output_bias else None

    def norm(name: str, size: int) -> Norm:
        return Norm(files.take(name, size).clone(), spec.norm_eps)

    def qk_norm(name: str) -> Norm:
        return norm(attn + name, spec.head_dim)

    return Layer(
        norm=norm(prefix + "input_layernorm.weight", spec.hidden),
        qkv=make_linear(torch.cat(qkv), torch.cat(bias) if bias else None, ops=ops),
        qk_norms=(qk_norm("q_norm.weight"), qk_norm("k_norm.weight")) if spec.qk_norm else None,
        output=make_linear(
            files.take(attn + "o_proj.weight", spec.hidden, q), output_bias, ops=ops
        ),
        mlp_norm=norm(prefix + "post_attention_layernorm.weight", spec.hidden),
        mlp=_feed(files, prefix, index, spec, ops),
    )


def _feed(files: Tensors, prefix: str, index: int, spec: ModelSpec, ops: Ops) -> Feed:
    def mlp(at: str, names: tuple[str, str, str], wide: int) -> Mlp:
        gate, up, down = (f"{at}.{name}.weight" for name in names)
        gate_up = torch.cat([files.take(name, wide, spec.hidden) for name in (gate, up)])
        last = files.take(down, spec.hidden, wide)
        return Mlp(make_linear(gate_up, gated=True, ops=ops), make_linear(last, ops=ops))

    experts = spec.experts
    if experts is None or not experts.layers[index]:
        return mlp(prefix + "mlp", NAMES, spec.intermediate)
    mixtral = spec.architecture == "mixtral"
    block, names = ("block_sparse_moe", MIXTRAL_NAMES) if mixtral else ("mlp", NAMES)
    router = files.take(f"{prefix}{block}.gate.weight", experts.count, spec.hidden)
    return Moe(
        make_linear(router, ops=ops),
        [
            mlp(f"{prefix}{block}.experts.{expert}", names, experts.intermediate)
            for expert in range(experts.count)
        ],
        experts.chosen,
        experts.renormalize,
        ops,
    )
