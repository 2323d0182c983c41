"""A checkpoint's tensors -> `Weights`: one by one, fused, packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from .decoder import Feed, Layer, Mlp, Weights
from .linear import Linear, Shared, make_linear
from .moe import Each, Moe
from .ops import Norm, Ops
from .ranks import Ranks
from .spec import ModelSpec
from .tensors import Tensors

Progress = Callable[[str, float], None]
Row = Linear | Shared

HEAD = "lm_head.weight"
NAMES = ("gate_proj", "up_proj", "down_proj")
MIXTRAL_NAMES = ("w1", "w3", "w2")


@dataclass(slots=True)
class _Source:
    """Tensors as this rank needs them: all, or its part along a dimension."""

    files: Tensors
    ops: Ops
    ranks: Ranks | None

    def take(self, name: str, *shape: int, split: int | None = None) -> torch.Tensor:
        tensor = self.files.take(name, *shape)
        return self.ranks.part(tensor, split) if self.ranks and split is not None else tensor

    def summed(self, name: str, outputs: int, inputs: int, bias: str | None = None) -> Row:
        """A linear layer over inputs that the ranks share; the bias is rank 0's."""
        weight = self.take(name + ".weight", outputs, inputs, split=1)
        add = self.take(bias, outputs) if bias else None
        if self.ranks is None:
            return make_linear(weight, add, ops=self.ops)
        add = add if self.ranks.rank == 0 else None
        return Shared(make_linear(weight, add, ops=self.ops), self.ranks.sum)


def load(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    ops: Ops,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
) -> Weights:
    """Loads a checkpoint, or a rank's share of it; `spec` is the whole model's.

    Raises WeightsError (a tensor is missing or has another shape) and UnsupportedModel (there is
    one that this model has no place for, or of another type).
    """
    files = Tensors(folder, dtype, spec.fp8)
    embedding = ops.keep(files.take("model.embed_tokens.weight", spec.vocab, spec.hidden))
    source = _Source(files, ops, ranks)
    layers = []
    for index in range(spec.layers):
        layers.append(_layer(source, index, spec))
        files.release()
        if progress:
            progress(f"layer {index + 1}/{spec.layers}", (index + 1) / spec.layers)
    tied = spec.tied and HEAD not in files  # what is on disk counts, as in transformers
    head = embedding if tied else files.take(HEAD, spec.vocab, spec.hidden)
    norm = Norm(ops.keep(files.take("model.norm.weight", spec.hidden)), spec.norm_eps)
    files.check_all_taken()
    if ranks is None:
        return Weights(embedding, layers, norm, make_linear(head, ops=ops, precise=True))
    part = make_linear(ranks.part(head, 0), ops=ops, precise=True)
    return Weights(embedding, layers, norm, Shared(part, ranks.join))


def _layer(source: _Source, index: int, spec: ModelSpec) -> Layer:
    prefix = f"model.layers.{index}."
    attn = prefix + "self_attn."
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    parts = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
    qkv = [source.take(f"{attn}{name}.weight", size, spec.hidden, split=0) for name, size in parts]
    bias = [
        source.take(f"{attn}{name}.bias", size, split=0) for name, size in parts if spec.qkv_bias
    ]
    output_bias = attn + "o_proj.bias" if spec.output_bias else None

    def norm(name: str, size: int) -> Norm:
        return Norm(source.ops.keep(source.take(name, size)), spec.norm_eps)

    def qk_norm(name: str) -> Norm:
        return norm(attn + name, spec.head_dim)

    return Layer(
        norm=norm(prefix + "input_layernorm.weight", spec.hidden),
        qkv=make_linear(torch.cat(qkv), torch.cat(bias) if bias else None, ops=source.ops),
        qk_norms=(qk_norm("q_norm.weight"), qk_norm("k_norm.weight")) if spec.qk_norm else None,
        output=source.summed(attn + "o_proj", spec.hidden, q, output_bias),
        mlp_norm=norm(prefix + "post_attention_layernorm.weight", spec.hidden),
        mlp=_feed(source, prefix, index, spec),
    )


def _feed(source: _Source, prefix: str, index: int, spec: ModelSpec) -> Feed:
    ops = source.ops

    def fused(at: str, names: tuple[str, str, str], wide: int) -> torch.Tensor:
        both = [f"{at}.{name}.weight" for name in names[:2]]
        return torch.cat([source.take(name, wide, spec.hidden, split=0) for name in both])

    def mlp(at: str, names: tuple[str, str, str], wide: int) -> Mlp:
        gate_up = make_linear(fused(at, names, wide), gated=True, ops=ops)
        return Mlp(gate_up, source.summed(f"{at}.{names[2]}", spec.hidden, wide))

    experts = spec.experts
    if experts is None or not experts.layers[index]:
        return mlp(prefix + "mlp", NAMES, spec.intermediate)
    mixtral = spec.architecture == "mixtral"
    block, names = ("block_sparse_moe", MIXTRAL_NAMES) if mixtral else ("mlp", NAMES)
    router = source.take(f"{prefix}{block}.gate.weight", experts.count, spec.hidden)
    places, wide = (
        [f"{prefix}{block}.experts.{i}" for i in range(experts.count)],
        experts.intermediate,
    )

    def down(at: str) -> torch.Tensor:
        return source.take(f"{at}.{names[2]}.weight", spec.hidden, wide, split=1)

    parts = ((fused(at, names, wide), down(at)) for at in places)
    together = source.ranks.sum if source.ranks else None
    return Moe(
        make_linear(router, ops=ops, precise=True),
        ops.experts(experts.count, parts, together)
        or Each([mlp(at, names, wide) for at in places]),
        experts.chosen,
        experts.renormalize,
        ops,
    )
