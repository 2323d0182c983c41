"""A mixture's experts in two launches, whichever experts the rows chose.

Nothing is counted on the host, so a decode step with experts can be a CUDA graph.

A pair is a row and one of its experts. Pairs are sorted by expert and cut into tiles of equally
many pairs; a tile has one expert. How many tiles there are at most follows from the number of rows
alone; those in excess end at once. A pair is summed over its inputs in one order: with tiles of a
fixed size its bits depend on no other pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..ops import Ops
from .fp8 import quantize_rows

#: Pairs of a tile where pairs are spread thin over the experts: a product of tensor cores takes no
#: fewer rows.
FEW_ROWS = 16
MANY_ROWS = 64  #: Pairs of a tile everywhere else.

COLUMNS = 128  #: Outputs of a tile, as in `matmul.py`.
DEPTH = 64  #: Inputs that a tile takes at a time, as in `matmul.py`.


@triton.jit
def _grouped(
    rows, weight, scales, out, order, experts, firsts, ends, columns, depth, input_row,
    row_pairs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Compute out[pair] = rows[pair // row_pairs] weight[expert]^T of a tile.

    `row_pairs` is how many pairs share a row; `experts`, `firsts` and `ends` are those of
    `ExpertTiles`. The grid is (tiles, column tiles).
    """
    tile = tl.program_id(0)
    expert = tl.load(experts + tile)
    if expert < 0:
        return
    at = tl.load(firsts + tile) + tl.arange(0, ROWS)
    inside = at < tl.load(ends + tile)
    pair = tl.load(order + at, mask=inside, other=0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    steps = tl.arange(0, DEPTH)
    left = rows + (pair // row_pairs)[:, None] * input_row + steps[None, :]
    weight_row = expert * columns + column.to(tl.int64)
    right = weight + weight_row[None, :] * depth + steps[:, None]
    summed = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, DEPTH):
        deep = start + steps < depth
        a = tl.load(left + start, mask=inside[:, None] & deep[None, :], other=0.0)
        b = tl.load(right + start, mask=(column < columns)[None, :] & deep[:, None], other=0.0)
        summed = tl.dot(a, b.to(a.dtype), summed, input_precision="ieee")
    if SCALED:
        summed *= tl.load(scales + weight_row, mask=column < columns, other=0.0)[None, :]
    to = pair[:, None] * columns + column[None, :]
    stored = inside[:, None] & (column < columns)[None, :]
    tl.store(out + to, summed.to(out.dtype.element_ty), mask=stored)


@dataclass(slots=True)
class ExpertTiles:
    """Which pairs a tile computes, for one choice of experts. Tensors are int64 on the device."""

    #: [pairs] pairs sorted by expert; pair p is that of row p // k, if each row has k experts.
    order: torch.Tensor
    experts: torch.Tensor  #: [tiles] the expert of each tile; -1 for a tile in excess.
    firsts: torch.Tensor  #: [tiles] where a tile's pairs begin in `order`.
    ends: torch.Tensor  #: [tiles] where the pairs of a tile's expert end in `order`.
    rows: int  #: Pairs of a tile.


def cut_tiles(chosen: torch.Tensor, count: int, rows: int) -> ExpertTiles:
    """Cut the pairs of `chosen` experts into tiles of `rows` pairs; the host waits for nothing.

    `chosen` is int64 [pairs], each below the number of experts `count`.
    """
    pair_count = len(chosen)
    # each expert that was chosen has at most one tile that is not full
    tile_limit = min(pair_count, count) + pair_count // rows
    sizes = torch.zeros(count, dtype=torch.int64, device=chosen.device)
    sizes.scatter_add_(0, chosen, torch.ones_like(chosen))
    ends = sizes.cumsum(0)
    starts = ends - sizes
    tile_counts = (sizes + rows - 1) // rows
    tile_ends = tile_counts.cumsum(0)
    tile_starts = tile_ends - tile_counts

    tile = torch.arange(tile_limit, device=chosen.device)
    expert = torch.searchsorted(tile_ends, tile, right=True)
    clamped = expert.clamp(max=count - 1)  # a tile in excess reads the last expert's numbers
    return ExpertTiles(
        order=chosen.argsort(stable=True),
        experts=torch.where(expert < count, expert, -1),
        firsts=starts[clamped] + (tile - tile_starts[clamped]) * rows,
        ends=ends[clamped],
        rows=rows,
    )


class ExpertWeights:
    """One matrix of each of `count` experts: [count, outputs, inputs].

    With `fp8` the numbers are e4m3, with a float32 scale for each row, [count, outputs].
    """

    def __init__(self, count: int, fp8: bool) -> None:
        self._count = count
        self._fp8 = fp8
        self._values = torch.empty(0)
        self._scales = torch.empty(0)

    def put(self, expert: int, weight: torch.Tensor) -> None:
        """Copy the `weight` [outputs, inputs] of an expert, which is on the device.

        The first one decides the shape of all, and the memory for all is allocated with it.
        """
        scales = torch.empty(0)
        if self._fp8:
            weight, scales = quantize_rows(weight)
        if not len(self._values):
            self._values = weight.new_empty((self._count, *weight.shape))
            self._scales = scales.new_empty(self._count, len(weight))
        self._values[expert] = weight
        if self._fp8:
            self._scales[expert] = scales[:, 0]

    def product(self, rows: torch.Tensor, tiles: ExpertTiles, pairs_per_row: int) -> torch.Tensor:
        """Return the product of each pair's row and its expert's matrix, [pairs, outputs].

        `rows` are [pairs / pairs_per_row, inputs].
        """
        pair_count = len(tiles.order)
        columns, depth = self._values.shape[1:]
        assert rows.stride(1) == 1 and len(rows) * pairs_per_row == pair_count
        out = torch.empty(pair_count, columns, dtype=rows.dtype, device=rows.device)
        _grouped[(len(tiles.experts), triton.cdiv(columns, COLUMNS))](
            rows,
            self._values,
            scales=self._scales if self._fp8 else rows,  # any pointer: not read without SCALED
            out=out,
            order=tiles.order,
            experts=tiles.experts,
            firsts=tiles.firsts,
            ends=tiles.ends,
            columns=columns,
            depth=depth,
            input_row=rows.stride(0),
            row_pairs=pairs_per_row,
            ROWS=tiles.rows,
            COLUMNS=COLUMNS,
            DEPTH=DEPTH,
            SCALED=self._fp8,
            num_warps=4 if tiles.rows == FEW_ROWS else 8,
            num_stages=3,
        )
        return out


class GroupedExperts:
    """A mixture's experts on a device, as `moe.ExpertFunction`."""

    def __init__(
        self,
        ops: Ops,
        count: int,
        matrices: Iterable[tuple[torch.Tensor, torch.Tensor]],
        combine: Callable[[torch.Tensor], torch.Tensor] | None,
        fp8: bool,
        exact: bool,
    ) -> None:
        """Stack the experts' matrices, copied to the device by `ops.keep`.

        `matrices` gives the `count` experts' [2 * size, hidden] (gates, then what they gate) and
        [hidden, size]. Where several ranks have a part of each expert, `combine` sums the parts of
        all ranks; None for a single rank. With `fp8` the matrices are quantized. With `exact` all
        tiles have one size, so a result's bits do not depend on the other rows.
        """
        self._ops = ops
        self._count = count
        self._combine = combine
        self._exact = exact
        self._gate_up = ExpertWeights(count, fp8)
        self._down = ExpertWeights(count, fp8)
        for expert, (gate_up, down) in enumerate(matrices):
            self._gate_up.put(expert, ops.keep(gate_up))
            self._down.put(expert, ops.keep(down))

    def __call__(self, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the results [T, chosen, hidden] of `rows` [T, hidden] and int64 [T, chosen].

        They are not weighted, nor summed over the experts of a row: that is the caller's.
        """
        # on average an expert's pairs would fill less than half of a large tile
        spread_thin = chosen.numel() < self._count * MANY_ROWS // 2
        tile_rows = FEW_ROWS if spread_thin and not self._exact else MANY_ROWS
        tiles = cut_tiles(chosen.flatten(), self._count, tile_rows)
        gated = self._ops.silu_mul(self._gate_up.product(rows, tiles, chosen.shape[1]))
        out = self._down.product(gated, tiles, 1)
        if self._combine:
            out = self._combine(out)
        return out.view(*chosen.shape, -1)
