"""One decoder for every supported architecture, driven by `ModelSpec`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .attention import Meta
from .linear import Linear, Shared
from .ops import Norm, Ops
from .pool import KVPool
from .rope import rope_frequencies
from .spec import ModelSpec

#: hidden [T, H] and the norm before it -> hidden + what the block adds [T, H]
Feed = Callable[[torch.Tensor, Norm], torch.Tensor]


@dataclass(slots=True)
class Mlp:
    """`hidden + down(silu(gate) * up)`; `gate_up` is fused along the output and applies SiLU."""

    gate_up: Linear
    down: Linear | Shared

    def __call__(self, hidden: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self.down(self.gate_up(hidden, norm=norm), residual=hidden)


@dataclass(slots=True)
class Layer:
    """Weights of one layer; `qkv` is fused along the output."""

    norm: Norm
    qkv: Linear
    qk_norms: tuple[Norm, Norm] | None
    output: Linear | Shared
    mlp_norm: Norm
    mlp: Feed


@dataclass(slots=True)
class Weights:
    embedding: torch.Tensor
    layers: list[Layer]
    norm: Norm
    head: Linear | Shared


class Decoder:
    """Forward pass over a step's rows; K and V go to the pool's slots, attention reads them."""

    def __init__(self, spec: ModelSpec, weights: Weights, pool: KVPool, ops: Ops) -> None:
        self.spec, self.weights, self.pool, self.ops = spec, weights, pool, ops
        self._frequencies = ops.keep(rope_frequencies(spec.rope, spec.head_dim))
        self._scale = spec.head_dim**-0.5

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """`rows` (int64; None: all) of `hidden()` -> logits float32 [rows, vocab]."""
        hidden = hidden if rows is None else hidden[rows.to(hidden.device)]
        return self.weights.head(hidden, norm=self.weights.norm).float()

    @torch.inference_mode()
    def hidden(
        self, ids: torch.Tensor, meta: Meta, after: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """ids int64 [T] -> what the last layer gives, [T, hidden]; writes their KV.

        `after` is called with each layer's index when its KV is written, on all ranks.
        """
        ids, meta = self.ops.place(ids, meta)
        hidden = self.weights.embedding[ids]
        angles = meta.positions[:, None].float() * self._frequencies
        scale = self.spec.rope.attention_factor
        turn = angles.cos() * scale, angles.sin() * scale
        for index, layer in enumerate(self.weights.layers):
            cache, window = self.pool.layer(index), self.spec.windows[index]
            qkv = layer.qkv(hidden, norm=layer.norm)
            q = self.ops.rope_store(qkv, cache, layer.qk_norms, turn, meta)
            seen = self.ops.attend(q, cache, meta, self._scale, window)
            hidden = layer.output(seen.flatten(1), residual=hidden)  # ranks meet here
            if after:
                after(index)
            hidden = layer.mlp(hidden, layer.mlp_norm)
        return hidden
