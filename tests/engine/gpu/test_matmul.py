"""The product with one tile: right, and a row's bits do not depend on the number of rows."""

from __future__ import annotations

import pytest
import torch
from diptych.engine.gpu.matmul import COLUMNS, DEPTH, ROWS, matmul


@pytest.mark.parametrize("shape", [(3, 40, 70), (ROWS + 1, COLUMNS + 8, 2 * DEPTH)])
def test_it_is_a_linear_layer(shape: tuple[int, int, int]) -> None:
    rows, outputs, inputs = shape
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    residual = torch.randn(rows, outputs)
    expected = x.double() @ weight.double().T
    assert (matmul(x, weight) - expected).norm() / expected.norm() < 1e-6
    expected += bias.double() + residual.double()
    assert (matmul(x, weight, bias, residual) - expected).norm() / expected.norm() < 1e-6


@pytest.mark.usefixtures("exact_dots")
def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = torch.randn(2 * ROWS + 7, 200), torch.randn(COLUMNS, 200)
    whole = matmul(x, weight)
    for rows in (1, 2, 3, 7, 33, ROWS, ROWS + 1):
        assert torch.equal(matmul(x[:rows], weight), whole[:rows]), rows
    assert torch.equal(matmul(x[ROWS + 3 : ROWS + 4], weight)[0], whole[ROWS + 3])
    order = torch.randperm(len(x))
    assert torch.equal(matmul(x[order], weight), whole[order])
