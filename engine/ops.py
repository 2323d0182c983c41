"""What lies between the matrices, in plain torch: runs anywhere, and in fp32 as in bf16.

`kernels.NativeOps` is the same in C++. Two backends differ in last bits, so `name` is part of the
hash that KV peers compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from .attention import Cache, Meta, attend


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm: `weight` [size] in the model's dtype."""

    weight: torch.Tensor
    eps: float


class Ops:
    """Elementwise operations and attention over a step's rows."""

    name = "torch"
    device_steps = False  #: steps of decode run on a device of their own, ids and sampling too

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that stays when the file under `tensor` is unmapped, where it is computed with."""
        return tensor.clone()

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool, precise: bool
    ) -> Any:
        """A linear layer of this backend's own; None: those of `linear.py`.

        `precise`: in the model's dtype even if others are quantized.
        """
        return None

    def experts(
        self,
        count: int,
        parts: Iterable[tuple[torch.Tensor, torch.Tensor]],
        together: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> Any:
        """A mixture's experts of this backend's own (`moe.Experts`); None: `moe.Each`.

        `parts`: of each expert its gates and what they gate, fused, and the matrix behind them.
        """
        return None

    def place(self, ids: torch.Tensor, meta: Meta) -> tuple[torch.Tensor, Meta]:
        """A step's ids and rows, where they are computed."""
        return ids, meta

    def attend(
        self, q: torch.Tensor, cache: Cache, meta: Meta, scale: float, window: int | None
    ) -> torch.Tensor:
        """q [T, Hq, D] against the cache's `[block, Hkv, token, D]` views -> [T, Hq, D]."""
        return attend(q, cache, meta, scale, window)

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """RMSNorm over the last dimension, in float32, rounded before the weight."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
        return norm.weight * wide.to(x.dtype)

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 2 * size] of gates and what they gate -> [T, size]."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rope_store(
        self,
        qkv: torch.Tensor,
        cache: Cache,
        norms: tuple[Norm, Norm] | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        meta: Meta,
    ) -> torch.Tensor:
        """qkv [T, (Hq + 2 Hkv) D] -> rotated q [T, Hq, D]; rotated k and v go to their slots.

        `norms` of q and k come first where a model has them. `angles`: cos, sin float32 [T, D/2].
        `qkv` may be overwritten.
        """
        keys, values = cache
        kv_heads, dim = keys.shape[1], keys.shape[3]
        heads = qkv.shape[1] // dim - 2 * kv_heads
        q, k, v = qkv.view(qkv.shape[0], -1, dim).split([heads, kv_heads, kv_heads], dim=1)
        if norms is not None:
            q, k = self.norm(q, norms[0]), self.norm(k, norms[1])
        keys[meta.slot_block, :, meta.slot_offset] = _rotate(k, *angles)
        values[meta.slot_block, :, meta.slot_offset] = v
        return _rotate(q, *angles)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the halves of [T, H, D] by float32 angles [T, D/2]; rounds once."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
