"""Linear layers whose rows do not depend on the rows beside them.

On CPUs with AMX, AVX512-BF16 or AVX2, the layer is our own kernel (`native/linear_amx.cpp`,
`linear_avx512.cpp`, `linear_avx2.cpp`). It has one order of sums whatever the number of rows, and
does the norm before the product and the activation or the residual behind it in the same call.

Where that kernel is missing, or does not fit the weights, the product is torch's, which for bf16
is oneDNN's. That library picks its kernel by the number of rows. On a CPU with AMX, two of oneDNN's
kernels may sum in another order: a bf16 linear of 1024 -> 5632 gives other last bits at 64 rows
than at 32. So each bf16 shape is calibrated once per process: which row counts give the bits of
16-row calls? Any number of rows is then computed in pieces of those sizes, the last one padded.
Where all kernels agree, as most do without AMX, that is one call up to the largest size.

    python -m diptych.engine.linear     # prints what exactness costs on this machine

In shapes, T is the number of rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F

from .errors import KernelUnavailable
from .kernels import NativeOps, native_ops
from .ops import LinearLayer, Ops, RmsNorm

#: The row counts that calibration tries. Those that agree are the sizes of pieces. As these are
#: powers of two, at most half of a padded piece is padding where all of them agree.
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

#: The row count whose bits count as the right ones; any would do, if all engines take the same.
REFERENCE_ROWS = 16

#: Takes rows [T, inputs], gives rows [T, outputs].
Product = Callable[[torch.Tensor], torch.Tensor]


@cache
def packing_works() -> bool:
    """Return whether torch has oneDNN's packed weights, and they give the right result.

    These are private operations of torch. At one row they have almost twice the bandwidth of plain
    weights.
    """
    try:
        weight = torch.ones(64, 64, dtype=torch.bfloat16)
        # 32 is the number of rows that oneDNN chooses the layout for; any number may come
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
        ones = torch.ones(2, 64, dtype=torch.bfloat16)
        result = torch.ops.mkldnn._linear_pointwise(ones, packed, None, "none", [], "")
        return bool((result == 64).all())
    except (RuntimeError, AttributeError):
        return False


class Linear:
    """The `ops.LinearLayer` of `rows W^T + bias`: exact per row in bf16, one call in other dtypes.

    W is `weight`, [outputs, inputs]; `bias` is [outputs]. With `gated`, W is gates over what they
    gate, and the layer gives `silu(gate) * value`, [T, outputs / 2]. `ops` compute norm and gates;
    None: in plain torch. A subclass that computes otherwise replaces `product` or `__call__`.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        gated: bool = False,
        ops: Ops | None = None,
    ) -> None:
        self._ops = ops or Ops()
        self._gated = gated
        self._product = _product(weight, bias)

        #: The row counts that give the bits of 16-row calls; empty where any count is taken.
        self._sizes: tuple[int, ...] = ()
        if weight.dtype == torch.bfloat16:
            shape = (weight.shape[0], weight.shape[1], bias is not None)
            if shape not in _calibrated_sizes:
                _calibrated_sizes[shape] = calibrate(self._product, weight.shape[1])
            self._sizes = _calibrated_sizes[shape]

    def __call__(
        self,
        rows: torch.Tensor,
        norm: RmsNorm | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = self.product(rows if norm is None else self._ops.norm(rows, norm))
        if self._gated:
            out = self._ops.silu_mul(out)
        return out if residual is None else residual + out

    @property
    def _one_call_is_exact(self) -> bool:
        """True if calibration found that all sizes agree, so that one call does up to the largest.

        False in other dtypes than bf16, which are not calibrated and always take one call.
        """
        return self._sizes == SIZES

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `rows W^T + bias`, without norm and gates; bf16 in pieces of sizes that agree."""
        row_count = rows.shape[0]
        if not self._sizes or (self._one_call_is_exact and row_count <= SIZES[-1]):
            return self._product(rows)
        pieces: list[torch.Tensor] = []
        start = 0
        while start < row_count:
            remaining = row_count - start
            size = self._piece_size(remaining)
            piece = rows[start : start + size]
            if size > remaining:
                piece = F.pad(piece, (0, 0, 0, size - remaining))
            pieces.append(self._product(piece)[: min(size, remaining)])
            start += size
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _piece_size(self, remaining: int) -> int:
        """Return the row count of the next piece when `remaining` rows are left.

        All of them go into one padded piece if at most half of it is padding, or if all sizes that
        agree are larger. Else the piece is the largest one without padding.
        """
        larger = min((size for size in self._sizes if size >= remaining), default=None)
        smaller = max((size for size in self._sizes if size <= remaining), default=None)
        if smaller is None or (larger is not None and larger <= 2 * remaining):
            assert larger is not None, self._sizes
            return larger
        return smaller


@dataclass(frozen=True, slots=True)
class KernelShape:
    """How a kernel of ours wants its weights, and how much it works on at a time."""

    panel: int  #: Outputs that are computed together; missing ones are filled up with zeros.
    input_multiple: int  #: The number of inputs must be a multiple of this.
    rows: int  #: The workspace has room for a multiple of so many rows.
    packed_dtype: torch.dtype  #: Of the rows in the workspace, as the kernel reads them.
    #: Orders weights as the kernel reads them; their outputs fill the last panel.
    arrange: Callable[[torch.Tensor], torch.Tensor]
    #: Puts gates beside what they gate, in weights of gates over what they gate.
    interleave: Callable[[torch.Tensor], torch.Tensor]


def _arrange_tiles(weight: torch.Tensor) -> torch.Tensor:
    """For `linear_amx.cpp`: panels of 32 outputs, for each 32 inputs two tiles of 16 outputs.

    A tile is in the order in which AMX reads pairs of bf16 numbers: 16 rows of 16 pairs.
    """
    outputs, inputs = weight.shape
    pairs = weight.view(torch.int32).view(outputs // 32, 2, 16, inputs // 32, 16)
    return pairs.permute(0, 3, 1, 4, 2)


def _arrange_pairs(weight: torch.Tensor) -> torch.Tensor:
    """For `linear_avx512.cpp`: panels of 64 outputs, for each pair of inputs a word of each output."""
    outputs, inputs = weight.shape
    return weight.view(torch.int32).view(outputs // 64, 64, inputs // 2).permute(0, 2, 1)


def _arrange_words(weight: torch.Tensor) -> torch.Tensor:
    """For `linear_avx2.cpp`: panels of 16 outputs, for each input 8 words of two outputs.

    Word j has output j in its low half, and output j + 8 in its high half.
    """
    outputs, inputs = weight.shape
    return weight.view(outputs // 16, 2, 8, inputs).permute(0, 3, 2, 1)


def _interleave(weight: torch.Tensor, run: int) -> torch.Tensor:
    """Put each `run` of gates in front of the `run` that they gate."""
    outputs = weight.shape[0]
    runs = weight.view(2, outputs // (2 * run), run, -1)
    return runs.transpose(0, 1).reshape(outputs, -1)


#: By instruction set (`KernelBuild.instructions`).
KERNEL_SHAPES = {
    "amx": KernelShape(
        panel=32,
        input_multiple=32,
        rows=32,
        packed_dtype=torch.bfloat16,
        arrange=_arrange_tiles,
        interleave=partial(_interleave, run=16),
    ),
    "avx512": KernelShape(
        panel=64,
        input_multiple=16,
        rows=1,
        packed_dtype=torch.bfloat16,
        arrange=_arrange_pairs,
        interleave=partial(_interleave, run=16),
    ),
    "avx2": KernelShape(
        panel=16,
        input_multiple=8,
        rows=6,
        packed_dtype=torch.float32,
        arrange=_arrange_words,
        interleave=partial(_interleave, run=8),
    ),
}


class NativeLinear(Linear):
    """The same layer in C++: norm, product, gates and residual in one call.

    Only `__call__` works here. The product alone (`Linear.product`) is never called, and has no
    weights. A residual is added behind the call where the outputs do not fill their last panel.
    """

    _ops: NativeOps

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool, ops: NativeOps
    ) -> None:
        outputs, inputs = weight.shape
        self._shape = KERNEL_SHAPES[ops.build.instructions]
        self._kernel = getattr(ops.library, f"linear_{ops.build.instructions}")
        self._ops = ops
        self._gated = gated
        self._inputs = inputs
        self._outputs = outputs // 2 if gated else outputs
        if gated:
            weight = self._shape.interleave(weight)
        missing = -outputs % self._shape.panel
        weight = F.pad(weight, (0, 0, 0, missing))
        self._padded_outputs = weight.shape[0]  #: The outputs with those that fill the last panel.
        self._weight = ops.arena.place(self._shape.arrange(weight))
        self._bias = None if bias is None else F.pad(bias.float(), (0, missing))

    @staticmethod
    def fits(weight: torch.Tensor, bias: torch.Tensor | None, gated: bool, ops: NativeOps) -> bool:
        """Return whether the kernel of `ops` can compute a layer of these weights."""
        if weight.dtype != torch.bfloat16:
            return False
        shape = KERNEL_SHAPES[ops.build.instructions]
        outputs, inputs = weight.shape
        if inputs % shape.input_multiple:
            return False
        return not (gated and (bias is not None or outputs % shape.panel))

    def __call__(
        self,
        rows: torch.Tensor,
        norm: RmsNorm | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        shape = self._shape
        # the kernel would add a residual to padded outputs, which the residual does not have
        if residual is not None and self._outputs % shape.panel:
            return residual + self(rows, norm)
        row_count = rows.shape[0]
        assert rows.stride(1) == 1 and (residual is None or residual.is_contiguous())
        assert residual is None or not self._gated  # the kernels have no such layer
        width = self._padded_outputs // (2 if self._gated else 1)
        out = torch.empty(row_count, width, dtype=rows.dtype)
        packed_rows = (row_count + shape.rows - 1) // shape.rows * shape.rows
        workspace = torch.empty(packed_rows, self._inputs, dtype=shape.packed_dtype)
        # in the order of the kernels' parameters (`kernels._LINEAR`): ctypes takes no keywords
        self._kernel(
            rows.data_ptr(),
            rows.stride(0),
            row_count,
            None if norm is None else norm.weight.data_ptr(),
            0.0 if norm is None else norm.eps,
            self._weight.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
            self._inputs,
            self._padded_outputs,
            self._gated,
            workspace.data_ptr(),
            self._ops.threads,
        )
        return out if width == self._outputs else out[:, : self._outputs]


@dataclass(slots=True)
class ShardedLinear:
    """A linear layer of which each rank has a part; `combine` makes one result of the parts'.

    `combine` is `Collectives.sum` where the inputs are divided among the ranks, and
    `Collectives.join` where the outputs are.
    """

    linear: LinearLayer  #: This rank's part.
    combine: Callable[[torch.Tensor], torch.Tensor]

    def __call__(
        self,
        rows: torch.Tensor,
        norm: RmsNorm | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the layer of all ranks, as `Linear.__call__` does. Raises RankLost."""
        out = self.combine(self.linear(rows, norm=norm))
        return out if residual is None else residual + out


def make_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    *,
    ops: Ops,
    precise: bool = False,
) -> LinearLayer:
    """Return the fastest linear layer for these weights on this machine.

    In bf16 it is exact per row, unless `ops` brings a layer of its own that is not. A `precise`
    layer computes in the model's dtype even if others are quantized.
    """
    own_layer = ops.linear(weight, bias, gated=gated, precise=precise)
    if own_layer is not None:
        return own_layer
    if isinstance(ops, NativeOps) and NativeLinear.fits(weight, bias, gated, ops):
        return NativeLinear(weight, bias, gated, ops)
    return Linear(weight, bias, gated, ops)


#: (outputs, inputs, has a bias) -> the row counts with the bits of 16-row calls.
_calibrated_sizes: dict[tuple[int, int, bool], tuple[int, ...]] = {}


def _product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """Return the fastest product with these weights; bf16 weights are packed once, here."""
    if weight.dtype != torch.bfloat16 or not packing_works():
        return lambda rows: F.linear(rows, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 32)
    return lambda rows: torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")


@torch.inference_mode()
def calibrate(product: Product, inputs: int) -> tuple[int, ...]:
    """Return the row counts of `SIZES` at which `product` gives each row a 16-row call's bits."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(SIZES[-1], inputs, generator=generator).to(torch.bfloat16)
    starts = range(0, SIZES[-1], REFERENCE_ROWS)
    expected = torch.cat([product(rows[i : i + REFERENCE_ROWS].clone()) for i in starts])

    def agrees(size: int) -> bool:
        """Look at the first four calls of `size` rows, as far as there are rows."""
        starts = range(0, min(SIZES[-1], 4 * size), size)
        return all(
            torch.equal(product(rows[i : i + size].clone()), expected[i : i + size]) for i in starts
        )

    return tuple(size for size in SIZES if agrees(size))


#: Bytes of the weights that `main` measures with: more than any cache, as all layers of a model are.
MEASURED_BYTES = 1 << 28
MEASURED_ROWS = (1, 8, 32, 512)


def main() -> None:
    """Print what exactness costs on one core of this machine.

    These are the rates of our own kernel, of oneDNN in pieces that agree and of oneDNN in one call,
    and the sizes that agree. All weights come from memory. So a rate at one row is GB/s as well.
    """
    torch.set_num_threads(1)
    try:
        ops: Ops = native_ops(head_dim=64, threads=1)  # any head size: there is no attention here
    except KernelUnavailable as error:
        print(f"no kernels of our own: {error}")
        ops = Ops()
    rows_text = ", ".join(map(str, MEASURED_ROWS))
    print(
        f"one core, GFLOP/s at {rows_text} rows: {ops.name} | oneDNN exact (one call): row counts"
    )
    for inputs, outputs in ((768, 256), (1024, 2048), (1024, 5632), (2816, 1024)):
        count = -(-MEASURED_BYTES // (2 * inputs * outputs))
        weights = [torch.randn(outputs, inputs).bfloat16() for _ in range(count)]
        own = [make_linear(weight, ops=ops) for weight in weights]
        own_rates = [f"{_gflops_per_s(own, rows, inputs, outputs):.0f}" for rows in MEASURED_ROWS]
        onednn = [Linear(weight) for weight in weights]
        onednn_rates: list[str] = []
        for rows in MEASURED_ROWS:
            exact = _gflops_per_s(onednn, rows, inputs, outputs)
            one_call = _gflops_per_s([one._product for one in onednn], rows, inputs, outputs)
            onednn_rates.append(f"{exact:.0f} ({one_call:.0f})")
        sizes = ",".join(map(str, onednn[0]._sizes))
        rates = f"{', '.join(own_rates)} | {', '.join(onednn_rates)}"
        print(f"{inputs} -> {outputs}: {rates}: {sizes}")


def _gflops_per_s(
    products: SequenceOf[Product], row_count: int, inputs: int, outputs: int
) -> float:
    """Return the rate of the best of five rounds through all products, which are equally large."""
    rows = torch.randn(row_count, inputs).bfloat16()
    durations_s: list[float] = []
    for _ in range(5):
        started_at = time.perf_counter()
        for product in products:
            product(rows)
        durations_s.append(time.perf_counter() - started_at)
    return 2 * row_count * inputs * outputs * len(products) / min(durations_s) / 1e9


if __name__ == "__main__":
    main()
