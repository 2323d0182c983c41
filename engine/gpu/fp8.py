"""Weights in FP8 (e4m3): half the bytes of bf16 in decode, twice the rate of products in prefill.

A row of weights, and a row of what it meets, has one float32 scale: its largest number becomes 448,
the largest of e4m3fn. A checkpoint's own FP8 weights are dequantized first: where it has a scale
for each row, the same codes come out again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..linear import Linear
from ..ops import Norm, Ops

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0


@triton.jit
def _quantize(x, out, scales, size, x_row, BLOCK: tl.constexpr):
    """Grid (rows,): a row's codes and its scale."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    value = tl.load(x + row * x_row + columns, mask=inside, other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(value), 0)
    scale = tl.where(peak > 0, peak / 448.0, 1.0)
    codes = tl.minimum(tl.maximum(value / scale, -448.0), 448.0)
    tl.store(out + row * size + columns, codes.to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, size] -> e4m3 [T, size], float32 scales [T, 1]; one kernel on a GPU."""
    if x.device.type != "cpu":
        codes = torch.empty(x.shape, dtype=E4M3, device=x.device)
        scales = torch.empty(len(x), 1, device=x.device)
        block = triton.next_power_of_2(x.shape[1])
        _quantize[(len(x),)](x, codes, scales, x.shape[1], x.stride(0), BLOCK=block)
        return codes, scales
    wide = x.float()
    peak = wide.abs().amax(1, keepdim=True)
    scales = torch.where(peak > 0, peak / LARGEST, 1.0)
    return (wide / scales).clamp(-LARGEST, LARGEST).to(E4M3), scales


def product(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """x [T, in] times e4m3 weight[out, in]^T of float32 scales [out, 1] -> `dtype` [T, out]."""
    codes, x_scales = quantize_rows(x)
    if x.device.type != "cpu":
        across = scales.T.contiguous()
        return torch._scaled_mm(codes, weight.T, x_scales, across, out_dtype=dtype)
    return ((codes.float() @ weight.float().T) * x_scales * scales.T).to(dtype)


class Fp8Linear(Linear):
    """`linear.Linear` whose weights are e4m3; what it is given is quantized row by row."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool, ops: Ops
    ) -> None:
        self._ops, self._gated = ops, gated
        self._weight, self._scales = quantize_rows(ops.keep(weight))
        self._bias = None if bias is None else ops.keep(bias)

    @staticmethod
    def fits(weight: torch.Tensor) -> bool:
        """What `torch._scaled_mm` takes: sizes that are multiples of 16."""
        return weight.shape[0] % 16 == weight.shape[1] % 16 == 0

    def __call__(
        self, x: torch.Tensor, norm: Norm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = x if norm is None else self._ops.norm(x, norm)
        out = product(x, self._weight, self._scales, x.dtype)
        out = out if self._bias is None else out + self._bias
        out = self._ops.silu_mul(out) if self._gated else out
        return out if residual is None else residual + out
