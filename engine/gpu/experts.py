"""A mixture's experts in two launches, whichever experts the rows chose: nothing is counted on the
host, so a decode step with experts can be a CUDA graph.

Pairs (row, expert) are sorted by expert and cut into tiles of ROWS; a tile has one expert. How
many tiles there are at most follows from the number of rows alone; those in excess end at once. A
pair is summed over its inputs in one order: with a fixed ROWS its bits depend on no other pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..ops import Ops
from .fp8 import E4M3, quantize_rows

FEW_ROWS, MANY_ROWS = 16, 64  #: of a tile; the first where pairs are spread thin
COLUMNS, DEPTH = 128, 64


@triton.jit
def _grouped(
    x, weight, scales, out, order, experts, firsts, ends, columns, depth, x_row, each,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, column tiles): out[pair] = x[pair // each] weight[expert]^T."""
    tile = tl.program_id(0)
    expert = tl.load(experts + tile)
    if expert < 0:
        return
    at = tl.load(firsts + tile) + tl.arange(0, ROWS)
    inside = at < tl.load(ends + tile)
    pair = tl.load(order + at, mask=inside, other=0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    steps = tl.arange(0, DEPTH)
    left = x + (pair // each)[:, None] * x_row + steps[None, :]
    at_weight = expert * columns + column.to(tl.int64)
    right = weight + at_weight[None, :] * depth + steps[:, None]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, DEPTH):
        deep = start + steps < depth
        a = tl.load(left + start, mask=inside[:, None] & deep[None, :], other=0.0)
        b = tl.load(right + start, mask=(column < columns)[None, :] & deep[:, None], other=0.0)
        acc = tl.dot(a, b.to(a.dtype), acc, input_precision="ieee")
    if SCALED:
        acc *= tl.load(scales + at_weight, mask=column < columns, other=0.0)[None, :]
    to = pair[:, None] * columns + column[None, :]
    tl.store(
        out + to, acc.to(out.dtype.element_ty), mask=inside[:, None] & (column < columns)[None, :]
    )


@dataclass(slots=True)
class Tiles:
    """Which pairs a tile computes, for one choice of experts; int64 on the device.

    `order` [pairs]: pairs by expert; `experts` [tiles]: -1 for none; a tile has those of `order`
    from `firsts` on, before `ends`.
    """

    order: torch.Tensor
    experts: torch.Tensor
    firsts: torch.Tensor
    ends: torch.Tensor
    rows: int


def cut(chosen: torch.Tensor, count: int, rows: int) -> Tiles:
    """Tiles for the experts `chosen` (int64 [pairs], below `count`); the host waits for nothing."""
    pairs = len(chosen)
    most = min(pairs, count) + pairs // rows
    sizes = torch.zeros(count, dtype=torch.int64, device=chosen.device)
    sizes.scatter_add_(0, chosen, torch.ones_like(chosen))
    ends = sizes.cumsum(0)
    tiles = (sizes + rows - 1) // rows
    tile_ends = tiles.cumsum(0)
    at = torch.arange(most, device=chosen.device)
    expert = torch.searchsorted(tile_ends, at, right=True)
    known = expert.clamp(max=count - 1)
    firsts = (ends - sizes)[known] + (at - (tile_ends - tiles)[known]) * rows
    alone = torch.where(expert < count, expert, -1)
    return Tiles(chosen.argsort(stable=True), alone, firsts, ends[known], rows)


class Weights:
    """One matrix of each expert: [count, out, in], in e4m3 with a scale for each row if `fp8`."""

    def __init__(self, count: int, fp8: bool) -> None:
        self._count, self._fp8 = count, fp8
        self._values = self._scales = torch.empty(0)

    def put(self, expert: int, weight: torch.Tensor) -> None:
        """`weight` [out, in], on the device."""
        scales = torch.empty(0)
        if self._fp8:
            weight, scales = quantize_rows(weight)
        if not len(self._values):
            self._values = weight.new_empty(self._count, *weight.shape)
            self._scales = scales.new_empty(self._count, len(weight))
        self._values[expert] = weight
        if self._fp8:
            self._scales[expert] = scales[:, 0]

    def product(self, x: torch.Tensor, tiles: Tiles, each: int) -> torch.Tensor:
        """x [pairs / each, in] -> [pairs, out], of each pair by its expert."""
        pairs, (columns, depth) = len(tiles.order), self._values.shape[1:]
        assert x.stride(1) == 1 and len(x) * each == pairs
        out = torch.empty(pairs, columns, dtype=x.dtype, device=x.device)
        _grouped[(len(tiles.experts), triton.cdiv(columns, COLUMNS))](
            *(x, self._values, self._scales if self._fp8 else x, out),
            *(tiles.order, tiles.experts, tiles.firsts, tiles.ends),
            *(columns, depth, x.stride(0), each),
            ROWS=tiles.rows,
            COLUMNS=COLUMNS,
            DEPTH=DEPTH,
            SCALED=self._values.dtype == E4M3,
            num_warps=4 if tiles.rows == FEW_ROWS else 8,
            num_stages=3,
        )
        return out


class GroupedExperts:
    """`moe.Experts` on a device. `together` makes one result of the ranks' parts."""

    def __init__(
        self,
        ops: Ops,
        count: int,
        parts: Iterable[tuple[torch.Tensor, torch.Tensor]],
        together: Callable[[torch.Tensor], torch.Tensor] | None,
        fp8: bool,
        exact: bool,
    ) -> None:
        """`parts`: gates and what they gate, fused, and the matrix behind them, of each expert."""
        self._ops, self._count, self._together, self._exact = ops, count, together, exact
        self._gate_up, self._down = Weights(count, fp8), Weights(count, fp8)
        for expert, (gate_up, down) in enumerate(parts):
            self._gate_up.put(expert, ops.keep(gate_up))
            self._down.put(expert, ops.keep(down))

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], ids int64 [T, chosen] -> [T, chosen, hidden]."""
        spread = chosen.numel() < self._count * MANY_ROWS // 2
        rows = FEW_ROWS if spread and not self._exact else MANY_ROWS
        tiles = cut(chosen.flatten(), self._count, rows)
        inner = self._ops.silu_mul(self._gate_up.product(x, tiles, chosen.shape[1]))
        out = self._down.product(inner, tiles, 1)
        if self._together:
            out = self._together(out)
        return out.view(*chosen.shape, -1)
