"""One decoder for Llama, Mistral, Qwen2 and Qwen3, driven by `ModelSpec`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .attention import Attend, Meta
from .linear import Linear
from .pool import KVPool
from .spec import ModelSpec, Rope

Weight = torch.Tensor  #: norms and the embedding; matrices are `Linear`s


@dataclass(slots=True)
class Layer:
    """Weights of one layer; `qkv` and `gate_up` are fused along the output."""

    norm: Weight
    qkv: Linear
    q_norm: Weight | None
    k_norm: Weight | None
    output: Linear
    mlp_norm: Weight
    gate_up: Linear
    down: Linear


@dataclass(slots=True)
class Weights:
    embedding: Weight
    layers: list[Layer]
    norm: Weight
    head: Linear


def rope_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] rotation per position, in radians (float32)."""
    base = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "default":
        return base
    if rope.kind == "linear":
        return base / rope.factor
    wavelength = 2 * math.pi / base
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * base / rope.factor + smooth * base
    scaled = torch.where(wavelength > low, base / rope.factor, base)
    return torch.where((wavelength <= low) & (wavelength >= high), between, scaled)


class Decoder:
    """Forward pass over a step's rows; K and V go to the pool's slots, attention reads them."""

    def __init__(self, spec: ModelSpec, weights: Weights, pool: KVPool, attend: Attend) -> None:
        self.spec, self.weights, self.pool = spec, weights, pool
        self._frequencies = rope_frequencies(spec.rope, spec.head_dim)
        self._attend = attend
        self._scale = spec.head_dim**-0.5

    @torch.inference_mode()
    def forward(self, ids: torch.Tensor, meta: Meta, wanted: torch.Tensor) -> torch.Tensor:
        """ids int64 [T] -> logits float32 [len(wanted), vocab] of the rows `wanted`."""
        spec = self.spec
        hidden = self.weights.embedding[ids]
        angles = meta.positions[:, None].float() * self._frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        for index, layer in enumerate(self.weights.layers):
            normed = self._norm(hidden, layer.norm)
            hidden = hidden + self._attention(index, layer, normed, cos, sin, meta)
            normed = self._norm(hidden, layer.mlp_norm)
            gate, up = layer.gate_up(normed).split(spec.intermediate, dim=-1)
            hidden = hidden + layer.down(F.silu(gate) * up)
        last = self._norm(hidden[wanted], self.weights.norm)
        return self.weights.head(last).float()

    def _norm(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.spec.norm_eps)
        return weight * wide.to(x.dtype)

    def _attention(
        self,
        index: int,
        layer: Layer,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        meta: Meta,
    ) -> torch.Tensor:
        spec, rows = self.spec, x.shape[0]
        qkv = layer.qkv(x).view(rows, -1, spec.head_dim)
        q, k, v = qkv.split([spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        keys, values = self.pool.layer(index)
        keys[meta.slot_block, :, meta.slot_offset] = _rotate(k, cos, sin)
        values[meta.slot_block, :, meta.slot_offset] = v
        cache = (keys, values)
        out = self._attend(_rotate(q, cos, sin), cache, meta, self._scale, spec.windows[index])
        return layer.output(out.reshape(rows, -1))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the halves of [T, H, D] by float32 angles [T, 1, D/2]; rounds once."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
