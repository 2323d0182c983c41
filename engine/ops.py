"""The operations of a model in plain torch: they run anywhere, and in float32 as in bfloat16.

`Ops` is what the decoder computes with between its matrices. `kernels.NativeOps` is the same in
C++, and `gpu.ops.GpuOps` the same on a GPU. Two backends differ in last bits, so `Ops.name` is part
of the hash that KV peers compare.

In shapes, T is the number of rows of a step, Hq and Hkv are the numbers of query and KV heads, and
D is the size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F

from .attention import LayerCache, StepRows, attend


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """The weight and the epsilon of a root mean square norm (Zhang, Sennrich: arXiv:1910.07467)."""

    weight: torch.Tensor  #: [size] in the model's dtype.
    eps: float  #: Added to the mean square, so that rows of zeros are no division by zero.


class LinearLayer(Protocol):
    """A linear layer as the decoder calls it: `linear.Linear`, or one that ranks share."""

    def __call__(
        self,
        rows: torch.Tensor,
        norm: RmsNorm | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the layer of `rows` [T, inputs], or of `norm(rows)` where there is a norm.

        `residual` [T, outputs] is added where there is one; its memory may become the result's.
        """
        ...


#: Takes rows [T, hidden] and the ids of each row's experts, int64 [T, chosen]; gives the result of
#: each row from each of its experts, [T, chosen, hidden].
ExpertFunction: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Ops:
    """Elementwise operations and attention over the rows of a step, in plain torch."""

    #: Distinct for each way of computing: peers with other operations have other last bits.
    name = "torch"

    #: True where steps of pure decode run on a device, with the choice of the next ids.
    device_steps = False

    #: How many rows an MLP computes together, at most; None: all. What lies between its matrices
    #: is several times as wide as a hidden row, and is read again from a CPU's caches or memory.
    mlp_rows: int | None = None

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a checkpoint's tensor, where it is computed with.

        The copy stays when the file under `tensor` is unmapped.
        """
        return tensor.clone()

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool, precise: bool
    ) -> LinearLayer | None:
        """Return this backend's own linear layer; None: the caller takes that of `linear.py`.

        `weight` is [outputs, inputs]. With `gated` the first half of the outputs are gates of the
        second half. A `precise` layer computes in the model's dtype even if others are quantized.
        """
        return None

    def experts(
        self,
        count: int,
        matrices: Iterable[tuple[torch.Tensor, torch.Tensor]],
        combine: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> ExpertFunction | None:
        """Return this backend's own experts of a mixture, or None for `moe.SequentialExperts`.

        `matrices` gives, for each of the `count` experts, its gates and what they gate, fused to
        [2 * size, hidden], and the matrix behind them, [hidden, size]. `combine` makes one result
        of what the ranks compute, and is None for a single rank.
        """
        return None

    def place(self, token_ids: torch.Tensor, step: StepRows) -> tuple[torch.Tensor, StepRows]:
        """Return a step's ids (int64 [T]) and rows where they are computed with."""
        return token_ids, step

    def place_indices(self, rows: torch.Tensor) -> torch.Tensor:
        """Return indices of rows where the rows are; the host waits for nothing."""
        return rows

    def attend(
        self,
        queries: torch.Tensor,
        cache: LayerCache,
        step: StepRows,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Return the attention of `queries` [T, Hq, D] over a layer's cache, [T, Hq, D].

        `scale` multiplies the scores; `window` is the sliding window in tokens, or None.
        """
        return attend(queries, cache, step, scale=scale, window=window)

    def norm(self, rows: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        """Return the RMSNorm of [T, size]: in float32, rounded before it meets the weight."""
        wide = rows.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
        return norm.weight * wide.to(rows.dtype)

    def silu_mul(self, gates_and_values: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * value, [T, size], of gates and values side by side, [T, 2 * size]."""
        gates, values = gates_and_values.chunk(2, dim=-1)
        return F.silu(gates) * values

    def rope_store(
        self,
        qkv: torch.Tensor,
        cache: LayerCache,
        norms: tuple[RmsNorm, RmsNorm] | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        step: StepRows,
    ) -> torch.Tensor:
        """Rotate queries and keys by their positions, and store keys and values in their slots.

        `qkv` [T, (Hq + 2 Hkv) D] may be overwritten. `norms`, of queries and of keys, come first
        where a model has them. `angles` are cosines and sines, float32 [T, D / 2]. The result are
        the rotated queries, [T, Hq, D].
        """
        key_pages, value_pages = cache  # each [blocks, Hkv, tokens of a block, D]
        kv_heads = key_pages.shape[1]
        head_dim = key_pages.shape[3]
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        # A row has all queries, then all keys, then all values.
        by_head = qkv.view(qkv.shape[0], -1, head_dim)
        queries, keys, values = by_head.split([heads, kv_heads, kv_heads], dim=1)
        if norms is not None:
            query_norm, key_norm = norms
            queries = self.norm(queries, query_norm)
            keys = self.norm(keys, key_norm)
        cosines, sines = angles
        key_pages[step.slot_blocks, :, step.slot_offsets] = _rotate(keys, cosines, sines)
        value_pages[step.slot_blocks, :, step.slot_offsets] = values
        return _rotate(queries, cosines, sines)


def _rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of [T, H, D] by float32 angles [T, D / 2]; the result is rounded once."""
    first, second = heads.float().chunk(2, dim=-1)
    cosines = cosines[:, None]
    sines = sines[:, None]
    rotated_first = first * cosines - second * sines
    rotated_second = second * cosines + first * sines
    return torch.cat((rotated_first, rotated_second), -1).to(heads.dtype)
