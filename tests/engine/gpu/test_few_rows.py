"""Products of few rows: the same as any other product, however they are cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from diptych.engine.gpu import few_rows, fp8
from diptych.engine.gpu.few_rows import FewRowsProduct, FewRowsTile, choose_tile


def tile(splits: int) -> FewRowsTile:
    return FewRowsTile(outputs=64, inputs=64, splits=splits, warps=4, stages=3)


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 5, few_rows.FEW_ROWS])
def test_bias_and_residual_are_added(splits: int, rows: int) -> None:
    weight, x = torch.randn(128, 512), torch.randn(rows, 512)
    bias, residual = torch.randn(128), torch.randn(rows, 128)
    product = FewRowsProduct(weight, tile(splits), bias=bias)
    expected = x @ weight.T + bias + residual
    for _ in range(2):  # the second product finds the arrivals as the first one did
        hidden = residual.clone()
        found = product(x, torch.float32, residual=hidden)
        assert found.data_ptr() == hidden.data_ptr()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("splits", [1, 2])
def test_gates_are_applied(splits: int) -> None:
    weight, x = torch.randn(256, 256), torch.randn(3, 256)
    gates, values = (x @ weight.T).chunk(2, dim=-1)
    found = FewRowsProduct(weight, tile(splits), gated=True)(x, torch.float32)
    torch.testing.assert_close(found, F.silu(gates) * values, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("gated", [False, True])
def test_scales_are_those_of_rows_and_weights(gated: bool) -> None:
    """The interpreter makes float32 of FP8 first, so sums differ in their order alone."""
    codes, row_scales = fp8.quantize_rows(torch.randn(5, 256))
    weight, scales = fp8.quantize_rows(torch.randn(128, 256))
    product = FewRowsProduct(weight, tile(2), scales=scales, gated=gated)
    found = product(codes, torch.float32, row_scales=row_scales)
    expected = (codes.float() @ weight.float().T) * row_scales * scales.T
    if gated:
        gates, values = expected.chunk(2, dim=-1)
        expected = F.silu(gates) * values
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_a_matrix_with_few_outputs_is_split() -> None:
    """So that there are programs enough for a GPU's processors. Sizes are those of Llama-3-8B."""
    for dtype in (torch.bfloat16, fp8.E4M3):
        splits = {
            (outputs, inputs): chosen.splits
            for outputs, inputs in ((6144, 4096), (4096, 4096), (4096, 14_336))
            if (chosen := choose_tile(torch.empty(outputs, inputs, dtype=dtype), gated=False))
        }
        assert splits == {(6144, 4096): 1, (4096, 4096): 2, (4096, 14_336): 2}


def test_odd_sizes_have_no_tile() -> None:
    assert choose_tile(torch.empty(48, 4096, dtype=torch.bfloat16), gated=False) is None
    assert choose_tile(torch.empty(128, 80, dtype=torch.bfloat16), gated=False) is None
