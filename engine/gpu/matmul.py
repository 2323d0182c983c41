"""A matrix product whose rows do not depend on how many there are: one tile, one order of sums.

cuBLAS picks a kernel, and how it splits the sums, by the number of rows. Here every row is summed
over its inputs in steps of DEPTH in order, in a tile of one shape whatever the number of rows. It
is what the engine option `exact` costs, with which no answer depends on the batch: even for one row
a decode step computes a tile of ROWS rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Rows and outputs of the one tile. Unlike DEPTH they change no bit of the result, only the speed: the
#: larger they are, the more of a tile a small product leaves empty.
ROWS = 64
COLUMNS = 128
DEPTH = (
    64  #: Inputs that a tile takes at a time. Another DEPTH is another order of sums: other bits.
)


@triton.jit
def _matmul(
    x, weight, bias, residual, out, rows, columns, depth, x_row, weight_row, out_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Compute out = x weight^T + bias, rounded, then + residual.

    The grid is (row tiles, column tiles). `x_row`, `weight_row` and `out_row` are strides.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    steps = tl.arange(0, DEPTH)
    left = x + row.to(tl.int64)[:, None] * x_row + steps[None, :]
    right = weight + column.to(tl.int64)[None, :] * weight_row + steps[:, None]
    summed = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, DEPTH):
        deep = start + steps < depth
        a = tl.load(left + start, mask=(row < rows)[:, None] & deep[None, :], other=0.0)
        b = tl.load(right + start, mask=(column < columns)[None, :] & deep[:, None], other=0.0)
        summed = tl.dot(a, b, summed, input_precision="ieee")
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    if HAS_BIAS:
        summed += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    to = row.to(tl.int64)[:, None] * out_row + column[None, :]
    result = summed.to(out.dtype.element_ty)
    if HAS_RESIDUAL:
        added = tl.load(residual + to, mask=inside, other=0.0).to(tl.float32)
        result = (result.to(tl.float32) + added).to(out.dtype.element_ty)
    tl.store(out + to, result, mask=inside)


def matmul(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return rows weight^T + bias + residual, [T, outputs].

    `rows` are [T, inputs], `weight` is [outputs, inputs], `bias` [outputs], and `residual`
    [T, outputs], contiguous.
    """
    row_count, depth = rows.shape
    columns = weight.shape[0]
    assert rows.stride(1) == weight.stride(1) == 1
    out = torch.empty(row_count, columns, dtype=rows.dtype, device=rows.device)
    assert residual is None or residual.stride() == out.stride()
    _matmul[(triton.cdiv(row_count, ROWS), triton.cdiv(columns, COLUMNS))](
        rows,
        weight,
        bias=rows if bias is None else bias,  # any pointer: without HAS_BIAS it is not read
        residual=rows if residual is None else residual,
        out=out,
        rows=row_count,
        columns=columns,
        depth=depth,
        x_row=rows.stride(0),
        weight_row=weight.stride(0),
        out_row=out.stride(0),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        DEPTH=DEPTH,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        num_warps=8,
        num_stages=3,
    )
    return out
