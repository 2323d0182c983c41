"""Linear layers whose rows do not depend on the rows beside them.

On CPUs with AMX: `native/linear_amx.cpp`, one order of sums whatever the number of rows, with the
norm before and the activation or the residual behind it in the same call. Elsewhere oneDNN, which
picks its kernel by the number of rows, and on CPUs with AMX two kernels may sum in another
order: a bf16 linear of 1024 -> 5632 gives other last bits at 64 rows than at 32. So each shape is
calibrated once per process: which row counts give the bits of 16-row calls? Any number of rows is
then computed in pieces of those sizes, the last one padded. Where all kernels agree (AVX512-BF16),
that is one call, as without any of this.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from .errors import KernelUnavailable
from .kernels import NativeOps, native_ops
from .ops import Norm, Ops

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
REFERENCE = 16

Product = Callable[[torch.Tensor], torch.Tensor]


@cache
def packing_works() -> bool:
    """oneDNN's packed weights: private ops of torch, almost twice the bandwidth at one row."""
    try:
        weight = torch.ones(64, 64, dtype=torch.bfloat16)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
        ones = torch.ones(2, 64, dtype=torch.bfloat16)
        result = torch.ops.mkldnn._linear_pointwise(ones, packed, None, "none", [], "")
        return bool((result == 64).all())
    except (RuntimeError, AttributeError):
        return False


class Linear:
    """`x [T, in] -> x W^T + b [T, out]`, bf16 exact per row; other dtypes in one plain call.

    `gated`: W is gates over what they gate, and the result is `silu(gate) * up` [T, out / 2].
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        gated: bool = False,
        ops: Ops | None = None,
    ) -> None:
        self._ops, self._gated = ops or Ops(), gated
        self._product = _product(weight, bias)
        self._sizes: tuple[int, ...] = ()
        if weight.dtype == torch.bfloat16:
            shape = (weight.shape[0], weight.shape[1], bias is not None)
            if shape not in _calibrated:
                _calibrated[shape] = calibrate(self._product, weight.shape[1])
            self._sizes = _calibrated[shape]

    def __call__(
        self, x: torch.Tensor, norm: Norm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Of `norm(x)` where there is a norm; plus `residual` [T, out] where there is one."""
        out = self.product(x if norm is None else self._ops.norm(x, norm))
        if self._gated:
            out = self._ops.silu_mul(out)
        return out if residual is None else residual + out

    @property
    def whole(self) -> bool:
        """One call for any number of rows (up to the largest size)."""
        return self._sizes == SIZES

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + b, in pieces of the row counts that agree."""
        rows = x.shape[0]
        if not self._sizes or (self.whole and rows <= SIZES[-1]):
            return self._product(x)
        pieces, start = [], 0
        while start < rows:
            left = rows - start
            size = self._size(left)
            piece = x[start : start + size]
            if size > left:
                piece = F.pad(piece, (0, 0, 0, size - left))
            pieces.append(self._product(piece)[: min(size, left)])
            start += size
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _size(self, left: int) -> int:
        """All that is left in one padded piece, if at most half is padding; else the largest."""
        above = min((s for s in self._sizes if s >= left), default=None)
        below = max((s for s in self._sizes if s <= left), default=None)
        if below is None or (above is not None and above <= 2 * left):
            assert above is not None, self._sizes
            return above
        return below


class AmxLinear(Linear):
    """The same in C++ on AMX tiles. Weights are panels of 32 outputs, tiles of 16 x 16 pairs."""

    _ops: NativeOps

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool, ops: NativeOps
    ) -> None:
        outputs, self._inputs = weight.shape
        self._ops, self._gated, self._outputs = ops, gated, outputs // 2 if gated else outputs
        if gated:  # a tile of gates, then the tile of what they gate
            weight = weight.view(2, outputs // 32, 16, -1).transpose(0, 1).reshape(outputs, -1)
        weight = F.pad(weight, (0, 0, 0, -outputs % 32))
        self._width = weight.shape[0]
        pairs = weight.view(torch.int32).view(self._width // 32, 2, 16, self._inputs // 32, 16)
        self._weight = ops.arena.place(pairs.permute(0, 3, 1, 4, 2))
        self._bias = None if bias is None else F.pad(bias.float(), (0, -outputs % 32))

    @staticmethod
    def fits(weight: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> bool:
        whole = weight.shape[1] % 32 == 0 and weight.dtype == torch.bfloat16
        return whole and not (gated and (bias is not None or weight.shape[0] % 32))

    def __call__(
        self, x: torch.Tensor, norm: Norm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        if residual is not None and self._outputs % 32:
            return residual + self(x, norm)
        rows, ops = x.shape[0], self._ops
        assert x.stride(1) == 1 and (residual is None or residual.is_contiguous())
        out = torch.empty(rows, self._width // (2 if self._gated else 1), dtype=x.dtype)
        packed = torch.empty((rows + 31) // 32 * 32, self._inputs, dtype=x.dtype)
        ops.library.linear_amx(
            *(x.data_ptr(), x.stride(0), rows),
            *((None, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)),
            *(self._weight.data_ptr(), None if self._bias is None else self._bias.data_ptr()),
            *(None if residual is None else residual.data_ptr(), out.data_ptr()),
            *(self._inputs, self._width, self._gated, packed.data_ptr(), ops.threads),
        )
        return out if out.shape[1] == self._outputs else out[:, : self._outputs]


@dataclass(slots=True)
class Shared:
    """A linear layer of which each rank has a part. `together` makes one result of theirs.

    `Ranks.sum` where they share the inputs, `Ranks.join` where they share the outputs.
    """

    linear: Linear
    together: Callable[[torch.Tensor], torch.Tensor]

    def __call__(
        self, x: torch.Tensor, norm: Norm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = self.together(self.linear(x, norm=norm))
        return out if residual is None else residual + out


def make_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    *,
    ops: Ops,
    precise: bool = False,
) -> Linear:
    """The fastest linear layer for these weights here, exact where `ops` is.

    `precise`: in the model's dtype even if others are quantized.
    """
    made = ops.linear(weight, bias, gated, precise)
    if made is not None:
        return made
    if isinstance(ops, NativeOps) and ops.tiles and AmxLinear.fits(weight, bias, gated):
        return AmxLinear(weight, bias, gated, ops)
    return Linear(weight, bias, gated, ops)


#: (out, in, bias) -> row counts with the bits of 16-row calls
_calibrated: dict[tuple[int, int, bool], tuple[int, ...]] = {}


def _product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    if weight.dtype != torch.bfloat16 or not packing_works():
        return lambda x: F.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 32)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


@torch.inference_mode()
def calibrate(product: Product, inputs: int) -> tuple[int, ...]:
    """The row counts of `SIZES` at which `product` gives each row the bits of a 16-row call."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(SIZES[-1], inputs, generator=generator).to(torch.bfloat16)
    starts = range(0, SIZES[-1], REFERENCE)
    expected = torch.cat([product(rows[i : i + REFERENCE].clone()) for i in starts])

    def agrees(size: int) -> bool:
        pieces = range(0, min(SIZES[-1], 4 * size), size)
        return all(
            torch.equal(product(rows[i : i + size].clone()), expected[i : i + size]) for i in pieces
        )

    return tuple(size for size in SIZES if agrees(size))


def main() -> None:
    """Prints what exactness costs here: rates of our tiles, of oneDNN in pieces, of one call."""
    torch.set_num_threads(1)
    try:
        ops: Ops = native_ops(64, 1)
    except KernelUnavailable as error:
        print(f"no kernels of our own: {error}")
        ops = Ops()
    print(f"one core, GFLOP/s at 1, 32, 512 rows: {ops.name} | oneDNN exact (one call): row counts")
    for inputs, outputs in ((768, 256), (1024, 2048), (1024, 5632), (2816, 1024)):
        weight = torch.randn(outputs, inputs).bfloat16()
        plain = Linear(weight)
        tiles = make_linear(weight, ops=ops)
        rates: dict[str, list[str]] = {"tiles": [], "pieces": []}
        for rows in (1, 32, 512):
            x = torch.randn(rows, inputs).bfloat16()
            ours, exact, once = (_rate(call, x, outputs) for call in (tiles, plain, plain._product))
            rates["tiles"].append(f"{ours:.0f}")
            rates["pieces"].append(f"{exact:.0f} ({once:.0f})")
        sizes = ",".join(map(str, plain._sizes))
        left, right = (", ".join(parts) for parts in rates.values())
        print(f"{inputs} -> {outputs}: {left} | {right}: {sizes}")


def _rate(call: Product, x: torch.Tensor, outputs: int) -> float:
    """GFLOP/s, the best of ten calls."""
    call(x)
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        call(x)
        seconds.append(time.perf_counter() - began)
    return 2 * x.numel() * outputs / min(seconds) / 1e9


if __name__ == "__main__":
    main()
