"""Weights in FP8 (e4m3): half the bytes of bf16 in decode, twice the rate of products in prefill.

A row of weights, and a row of what the weights are multiplied with, has one float32 scale: its
largest number becomes 448, the largest of e4m3fn. A checkpoint's own FP8 weights are dequantized
first. A row's codes come out again if the checkpoint has a scale for the row and uses the code 448
(or -448) in it, and if no other rank has a part of the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..linear import Linear
from ..ops import Ops

#: 8-bit floats with 4 bits of exponent and 3 of mantissa, without infinities.
E4M3 = torch.float8_e4m3fn

#: The largest number of e4m3fn.
LARGEST = 448.0

#: So many rows, as a batch of decode has, are multiplied by a kernel of our own: cuBLAS takes a tile
#: of 128 rows for scales by row, which reads the weights at half of the memory's rate.
FEW_ROWS = 32


@triton.jit
def _quantize(rows, out, scales, size, input_row, BLOCK: tl.constexpr):
    """Compute a row's codes and its scale. The grid is (rows,); a row has at most BLOCK numbers."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    value = tl.load(rows + row * input_row + columns, mask=inside, other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(value), 0)
    # 448 is LARGEST: a kernel cannot read a module's variables
    scale = tl.where(peak > 0, peak / 448.0, 1.0)
    codes = value / scale
    # NaN must stay NaN, so that the engine reports a damaged model: by default it would become a
    # bound. `peak` passes over NaN, but no scale makes a number of it.
    codes = tl.maximum(codes, -448.0, propagate_nan=tl.PropagateNan.ALL)
    codes = tl.minimum(codes, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + row * size + columns, codes.to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the e4m3 codes [T, size] and the float32 scales [T, 1] of `rows` [T, size].

    On a GPU that is one kernel.
    """
    if rows.device.type != "cpu":
        codes = torch.empty(rows.shape, dtype=E4M3, device=rows.device)
        scales = torch.empty(len(rows), 1, device=rows.device)
        size = rows.shape[1]
        block = triton.next_power_of_2(size)
        _quantize[(len(rows),)](
            rows, codes, scales, size=size, input_row=rows.stride(0), BLOCK=block
        )
        return codes, scales
    wide = rows.float()
    peak = wide.abs().amax(1, keepdim=True)
    scales = torch.where(peak > 0, peak / LARGEST, 1.0)
    return (wide / scales).clamp(-LARGEST, LARGEST).to(E4M3), scales


@dataclass(frozen=True, slots=True)
class FewRowsTile:
    """How `_multiply_few` is cut: outputs of a program, inputs of a step, warps and stages."""

    outputs: int
    inputs: int
    warps: int
    stages: int


#: For wide matrices, and for those that would give too few programs to fill a GPU.
WIDE_TILE = FewRowsTile(outputs=64, inputs=128, warps=4, stages=3)
NARROW_TILE = FewRowsTile(outputs=64, inputs=256, warps=4, stages=6)
WIDE_OUTPUTS = 16_384  #: A matrix with so many outputs is wide.


@triton.jit
def _multiply_few(
    rows, weight, row_scales, weight_scales, out, count, outputs, inputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Multiply quantized rows by OUTPUTS rows of the weights. The grid is (outputs / OUTPUTS,).

    The weights are the left side, as tensor cores take 64 rows of that side at least.
    """
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    depth = tl.arange(0, INPUTS)
    is_row = row < count
    weights = weight + output.to(tl.int64)[:, None] * inputs + depth[None, :]
    codes = rows + row[None, :] * inputs + depth[:, None]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for first in range(0, inputs, INPUTS):
        left = tl.load(weights + first)
        right = tl.load(codes + first, mask=is_row[None, :], other=0.0)
        # Tensor cores add FP8 products with few bits: after each step float32 takes their sum.
        total = tl.dot(left, right, total, max_num_imprecise_acc=INPUTS)
    scale = tl.load(weight_scales + output)[:, None]
    scale = scale * tl.load(row_scales + row, mask=is_row, other=0.0)[None, :]
    to = out + row[None, :] * outputs + output[:, None]
    tl.store(to, (total * scale).to(out.dtype.element_ty), mask=is_row[None, :])


def few_rows_tile(rows: torch.Tensor, weight: torch.Tensor) -> FewRowsTile | None:
    """Return the tile for a product of `rows` and `weight`; None if `_multiply_few` cannot do it."""
    outputs, inputs = weight.shape
    tile = WIDE_TILE if outputs >= WIDE_OUTPUTS else NARROW_TILE
    fits = outputs % tile.outputs == inputs % tile.inputs == 0
    return tile if fits and len(rows) <= FEW_ROWS else None


def multiply_few(
    codes: torch.Tensor,
    weight: torch.Tensor,
    row_scales: torch.Tensor,
    weight_scales: torch.Tensor,
    *,
    dtype: torch.dtype,
    tile: FewRowsTile,
) -> torch.Tensor:
    """Return the product of at most `FEW_ROWS` quantized rows and quantized weights, in `dtype`.

    `codes` [T, inputs] and `weight` [outputs, inputs] are e4m3, contiguous; their scales are float32
    [T, 1] and [outputs, 1]. The sizes must be multiples of the tile's.
    """
    outputs, inputs = weight.shape
    out = torch.empty(len(codes), outputs, dtype=dtype, device=codes.device)
    _multiply_few[(outputs // tile.outputs,)](
        codes,
        weight,
        row_scales,
        weight_scales,
        out,
        count=len(codes),
        outputs=outputs,
        inputs=inputs,
        ROWS=max(16, triton.next_power_of_2(len(codes))),
        OUTPUTS=tile.outputs,
        INPUTS=tile.inputs,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def product(
    rows: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return rows weight^T in `dtype`, [T, outputs].

    `rows` [T, inputs] are quantized here. `weight` is e4m3 [outputs, inputs], with float32 `scales`
    [outputs, 1].
    """
    codes, row_scales = quantize_rows(rows)
    if rows.device.type != "cpu":
        tile = few_rows_tile(rows, weight)
        if tile is not None:
            return multiply_few(codes, weight, row_scales, scales, dtype=dtype, tile=tile)
        column_scales = scales.T.contiguous()
        return torch._scaled_mm(codes, weight.T, row_scales, column_scales, out_dtype=dtype)
    return ((codes.float() @ weight.float().T) * row_scales * scales.T).to(dtype)


class Fp8Linear(Linear):
    """`linear.Linear` whose weights are e4m3; its input is quantized row by row.

    `weight` [outputs, inputs] comes in the model's dtype and is quantized here.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool, ops: Ops
    ) -> None:
        self._ops = ops
        self._gated = gated
        self._weight, self._scales = quantize_rows(ops.keep(weight))
        self._bias = None if bias is None else ops.keep(bias)

    @staticmethod
    def fits(weight: torch.Tensor) -> bool:
        """Return whether `torch._scaled_mm` takes `weight`: its sizes are multiples of 16."""
        return weight.shape[0] % 16 == weight.shape[1] % 16 == 0

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `rows W^T + bias` in the dtype of `rows`, [T, outputs]."""
        out = product(rows, self._weight, self._scales, rows.dtype)
        return out if self._bias is None else out + self._bias
