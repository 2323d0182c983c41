"""Products of few rows, as a decode step has: weights are read once, at the memory's rate.

cuBLAS' tiles are made for many rows. Here a program takes some outputs of all rows. A matrix with
few outputs has its inputs split among programs as well, so that the whole GPU reads: the last
program of a tile adds up what the others have left in memory, always in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .elementwise import silu_of_gate
from .overlap import let_next_kernel_start, overlap_options, wait_for_kernels_before

#: Rows of a product, at most.
FEW_ROWS = 32


@dataclass(frozen=True, slots=True)
class FewRowsTile:
    """How a product is cut."""

    outputs: int  #: Outputs of a program; of a gated matrix also as many of the second half.
    inputs: int  #: Inputs of a step.
    splits: int  #: Programs that share the inputs.
    warps: int
    stages: int  #: Steps whose weights are on their way at a time, about.

    def fits(self, outputs: int, inputs: int) -> bool:
        """Return whether a matrix, or each half of a gated one, can be cut so."""
        return outputs % self.outputs == 0 and inputs % (self.inputs * self.splits) == 0


@triton.jit
def _multiply_few(
    rows, weight, row_scales, weight_scales, bias, residual, out, partials, arrivals,
    count, outputs, inputs, input_row,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SPLITS: tl.constexpr,
    SCALED: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute out = rows weight^T + bias + residual, or silu(gate) * value of both halves.

    The grid is (outputs / OUTPUTS, SPLITS). The weights are the left side, as tensor cores take 64
    rows of that side at least. `outputs` are those of `out`. `partials` and `arrivals` are for
    splits: their sums, and for each tile how many splits are done, 0 before and after.
    """
    let_next_kernel_start(OVERLAP)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    depth = tl.arange(0, INPUTS)
    is_row = row < count
    split_inputs = inputs // (SPLITS * INPUTS) * INPUTS  # so the compiler sees how it is aligned
    first_input = split * split_inputs + depth
    weights = weight + output.to(tl.int64)[:, None] * inputs + first_input[None, :]
    values = weights + outputs.to(tl.int64) * inputs  # the second half of a gated matrix
    inputs_of_rows = rows + row[None, :] * input_row + first_input[:, None]
    to = row[None, :] * outputs + output[:, None]
    # What is needed at the end is on its way while the weights are read.
    if SCALED:
        weight_scale = tl.load(weight_scales + output)
        if GATED:
            value_scale = tl.load(weight_scales + outputs + output)
    if HAS_BIAS:
        added_bias = tl.load(bias + output).to(tl.float32)
    wait_for_kernels_before(OVERLAP)
    if SCALED:
        row_scale = tl.load(row_scales + row, mask=is_row, other=0.0)
    if HAS_RESIDUAL:
        added = tl.load(residual + to, mask=is_row[None, :], other=0.0)
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    value_total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for first in range(0, split_inputs, INPUTS):
        left = tl.load(weights + first)
        right = tl.load(inputs_of_rows + first, mask=is_row[None, :], other=0.0)
        # Tensor cores add FP8 products with few bits: after each step float32 takes their sum.
        total = tl.dot(left, right, total, input_precision="ieee", max_num_imprecise_acc=INPUTS)
        if GATED:
            left = tl.load(values + first)
            value_total = tl.dot(
                left, right, value_total, input_precision="ieee", max_num_imprecise_acc=INPUTS
            )
    is_last = True
    if SPLITS > 1:
        SIZE: tl.constexpr = OUTPUTS * ROWS
        HALVES: tl.constexpr = 2 if GATED else 1
        number = tl.arange(0, OUTPUTS)[:, None] * ROWS + row[None, :]
        first_part = partials + tile * (SPLITS * HALVES * SIZE) + number
        part = first_part + split * (HALVES * SIZE)
        tl.store(part, total, cache_modifier=".cg")
        if GATED:
            tl.store(part + SIZE, value_total, cache_modifier=".cg")
        tl.debug_barrier()  # all threads have stored before one of them says so
        is_last = tl.atomic_add(arrivals + tile, 1) == SPLITS - 1
        if is_last:
            tl.store(arrivals + tile, 0)
            total = tl.zeros([OUTPUTS, ROWS], tl.float32)
            value_total = tl.zeros([OUTPUTS, ROWS], tl.float32)
            for number_of_split in tl.static_range(SPLITS):
                part = first_part + number_of_split * (HALVES * SIZE)
                total += tl.load(part, cache_modifier=".cg")
                if GATED:
                    value_total += tl.load(part + SIZE, cache_modifier=".cg")
    if is_last:
        if SCALED:
            total *= weight_scale[:, None] * row_scale[None, :]
            if GATED:
                value_total *= value_scale[:, None] * row_scale[None, :]
        if HAS_BIAS:
            total += added_bias[:, None]
        if HAS_RESIDUAL:
            total += added.to(tl.float32)
        result = total.to(out.dtype.element_ty)
        if GATED:
            result = silu_of_gate(result, value_total.to(out.dtype.element_ty))
        tl.store(out + to, result, mask=is_row[None, :])


class FewRowsProduct:
    """Multiplies up to `FEW_ROWS` rows by one matrix.

    `weight` [outputs, inputs] is contiguous, in bf16, or e4m3 with float32 `scales` [outputs, 1].
    A `gated` matrix is gates over values: the result is silu(gate) * value. `bias` is [outputs].
    """

    def __init__(
        self,
        weight: torch.Tensor,
        tile: FewRowsTile,
        *,
        scales: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        gated: bool = False,
    ) -> None:
        assert weight.is_contiguous() and not (gated and bias is not None)
        self._weight = weight
        self._scales = scales
        self._bias = bias
        self._gated = gated
        self._tile = tile
        self._outputs = weight.shape[0] // (2 if gated else 1)
        #: Splits that are done, of each tile: 0 between two products.
        self._arrivals = torch.zeros(
            self._outputs // tile.outputs, dtype=torch.int32, device=weight.device
        )

    def __call__(
        self,
        rows: torch.Tensor,
        dtype: torch.dtype,
        *,
        row_scales: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the product in `dtype`, [T, outputs], in the memory of `residual` if that is given.

        `rows` [T, inputs] have the dtype of the weights, and `row_scales` [T, 1] if those have.
        `residual` [T, outputs] is contiguous and is added.
        """
        tile = self._tile
        row_count, inputs = rows.shape
        assert row_count <= FEW_ROWS and rows.stride(1) == 1
        assert residual is None or not self._gated
        out = residual
        if out is None:
            out = torch.empty(row_count, self._outputs, dtype=dtype, device=rows.device)
        assert out.is_contiguous()
        padded_rows = max(16, triton.next_power_of_2(row_count))
        partials = out
        if tile.splits > 1:
            numbers = tile.splits * padded_rows * self._weight.shape[0]
            partials = torch.empty(numbers, dtype=torch.float32, device=rows.device)
        _multiply_few[(self._outputs // tile.outputs, tile.splits)](
            rows,
            self._weight,
            # any pointer stands for what is not there: it is not read
            row_scales=rows if row_scales is None else row_scales,
            weight_scales=rows if self._scales is None else self._scales,
            bias=rows if self._bias is None else self._bias,
            residual=out,
            out=out,
            partials=partials,
            arrivals=self._arrivals,
            count=row_count,
            outputs=self._outputs,
            inputs=inputs,
            input_row=rows.stride(0),
            ROWS=padded_rows,
            OUTPUTS=tile.outputs,
            INPUTS=tile.inputs,
            SPLITS=tile.splits,
            SCALED=self._scales is not None,
            GATED=self._gated,
            HAS_BIAS=self._bias is not None,
            HAS_RESIDUAL=residual is not None,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **overlap_options(rows),
        )
        return out


#: By bytes of a number and whether the matrix is gated, the best tile first: the first one that fits
#: the matrix is taken. On an H200 other sizes that were tried were up to 3 % slower in a whole step,
#: but for fewer stages: those leave too little on its way, and a step took 8 % more.
TILES = {
    (2, True): (FewRowsTile(outputs=64, inputs=64, splits=1, warps=4, stages=4),),
    (2, False): (
        FewRowsTile(outputs=128, inputs=128, splits=1, warps=8, stages=4),
        FewRowsTile(outputs=64, inputs=128, splits=1, warps=4, stages=6),
        FewRowsTile(outputs=64, inputs=128, splits=2, warps=4, stages=6),
    ),
    (1, True): (FewRowsTile(outputs=64, inputs=128, splits=1, warps=4, stages=4),),
    (1, False): (
        FewRowsTile(outputs=64, inputs=256, splits=1, warps=4, stages=6),
        FewRowsTile(outputs=64, inputs=256, splits=2, warps=4, stages=6),
    ),
}

#: Programs that a product should have at least, so that most of a GPU's 132 to 148 processors read.
PROGRAMS_MINIMUM = 80


def choose_tile(weight: torch.Tensor, gated: bool) -> FewRowsTile | None:
    """Return how products with `weight` [outputs, inputs] are cut; None where this cannot be done.

    The first tile that fits and gives programs enough is taken, or else the last one that fits.
    """
    outputs, inputs = weight.shape
    if gated:
        outputs //= 2
    fitting = [tile for tile in TILES[weight.element_size(), gated] if tile.fits(outputs, inputs)]
    for tile in fitting:
        if outputs // tile.outputs * tile.splits >= PROGRAMS_MINIMUM:
            return tile
    return fitting[-1] if fitting else None


def make_few_rows_product(
    weight: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    gated: bool = False,
) -> FewRowsProduct | None:
    """Return the product of few rows with `weight`, as `FewRowsProduct` says.

    None: there is none on a CPU, in float32, of sizes that no tile fits, of a transposed matrix, or
    for gates with a bias.
    """
    if weight.device.type == "cpu" or weight.element_size() > 2:
        return None
    if not weight.is_contiguous() or (gated and bias is not None):
        return None
    tile = choose_tile(weight, gated)
    if tile is None:
        return None
    return FewRowsProduct(weight, tile, scales=scales, bias=bias, gated=gated)
