"""Weights in FP8 (e4m3): half the bytes of bf16 in decode, twice the rate of products in prefill.

A row of weights, and a row of what the weights are multiplied with, has one float32 scale: its
largest number becomes 448, the largest of e4m3fn. A checkpoint's own FP8 weights are dequantized
first. A row's codes come out again if the checkpoint has a scale for the row and uses the code 448
(or -448) in it, and if no other rank has a part of the row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..linear import Linear
from ..ops import Ops, RmsNorm
from .elementwise import norm_row, rms_norm, row_warps
from .few_rows import FEW_ROWS, make_few_rows_product
from .overlap import let_next_kernel_start, overlap_options, wait_for_kernels_before

#: 8-bit floats with 4 bits of exponent and 3 of mantissa, without infinities.
E4M3 = torch.float8_e4m3fn

#: The largest number of e4m3fn.
LARGEST = 448.0


@triton.jit
def _quantize(
    rows, norm_weight, out, scales, size, input_row, eps,
    BLOCK: tl.constexpr, HAS_NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute the codes and the scale of a row, or of its RMSNorm.

    The grid is (rows,); a row has at most BLOCK numbers.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    let_next_kernel_start(OVERLAP)
    wait_for_kernels_before(OVERLAP)
    value = tl.load(rows + row * input_row + columns, mask=inside, other=0.0)
    if HAS_NORM:
        gain = tl.load(norm_weight + columns, mask=inside, other=0.0)
        value = norm_row(value, gain, size, eps)
    wide = value.to(tl.float32)
    peak = tl.max(tl.abs(wide), 0)
    # 448 is LARGEST: a kernel cannot read a module's variables
    scale = tl.where(peak > 0, peak / 448.0, 1.0)
    codes = wide / scale
    # NaN must stay NaN, so that the engine reports a damaged model: by default it would become a
    # bound. `peak` passes over NaN, but no scale makes a number of it.
    codes = tl.maximum(codes, -448.0, propagate_nan=tl.PropagateNan.ALL)
    codes = tl.minimum(codes, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + row * size + columns, codes.to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


def quantize_rows(
    rows: torch.Tensor, norm: RmsNorm | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the e4m3 codes [T, size] and the float32 scales [T, 1] of `rows` [T, size].

    With `norm`, those of the rows' RMSNorm. On a GPU that is one kernel.
    """
    if rows.device.type != "cpu":
        codes = torch.empty(rows.shape, dtype=E4M3, device=rows.device)
        scales = torch.empty(len(rows), 1, device=rows.device)
        size = rows.shape[1]
        block = triton.next_power_of_2(size)
        _quantize[(len(rows),)](
            rows,
            rows if norm is None else norm.weight,  # any pointer: without HAS_NORM it is not read
            codes,
            scales,
            size=size,
            input_row=rows.stride(0),
            eps=0.0 if norm is None else norm.eps,
            BLOCK=block,
            HAS_NORM=norm is not None,
            num_warps=row_warps(block),
            **overlap_options(rows),
        )
        return codes, scales
    wide = (rows if norm is None else rms_norm(rows, norm)).float()
    peak = wide.abs().amax(1, keepdim=True)
    scales = torch.where(peak > 0, peak / LARGEST, 1.0)
    return (wide / scales).clamp(-LARGEST, LARGEST).to(E4M3), scales


def product(
    rows: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return rows weight^T in `dtype`, [T, outputs].

    `rows` [T, inputs] are quantized here. `weight` is e4m3 [outputs, inputs], with float32 `scales`
    [outputs, 1].
    """
    codes, row_scales = quantize_rows(rows)
    if rows.device.type != "cpu":
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
        self._few_rows = make_few_rows_product(
            self._weight, scales=self._scales, bias=self._bias, gated=gated
        )

    def __call__(
        self,
        rows: torch.Tensor,
        norm: RmsNorm | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        few_rows = self._few_rows
        if few_rows is None or len(rows) > FEW_ROWS:
            return super().__call__(rows, norm, residual)
        codes, row_scales = quantize_rows(rows, norm)
        return few_rows(codes, rows.dtype, row_scales=row_scales, residual=residual)

    @staticmethod
    def fits(weight: torch.Tensor) -> bool:
        """Return whether `torch._scaled_mm` takes `weight`: its sizes are multiples of 16."""
        return weight.shape[0] % 16 == weight.shape[1] % 16 == 0

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `rows W^T + bias` in the dtype of `rows`, [T, outputs]."""
        out = product(rows, self._weight, self._scales, rows.dtype)
        return out if self._bias is None else out + self._bias
