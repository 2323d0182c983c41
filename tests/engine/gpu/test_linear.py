"""Linear layers on a device: the residual is added where it lies."""

from __future__ import annotations

import pytest
import torch
from diptych.engine.gpu.backends import AttentionNeeds
from diptych.engine.gpu.ops import GpuLinear, GpuOps
from torch.utils._python_dispatch import TorchDispatchMode

NEEDS = AttentionNeeds("float32", "float32", 64, 16, exact=False)


class Calls(TorchDispatchMode):
    """The names of torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_residual_is_added_in_place(with_bias: bool) -> None:
    """A copy of it would be one pass over the hidden rows more, twice in each layer."""
    ops = GpuOps(torch.device("cpu"), NEEDS, 256, "triton", fp8=False)
    weight, rows, residual = torch.randn(32, 48), torch.randn(5, 48), torch.randn(5, 32)
    bias = torch.randn(32) if with_bias else None
    layer = GpuLinear(weight, bias, gated=False, ops=ops)
    expected = rows.double() @ weight.double().T + residual.double()
    if bias is not None:
        expected += bias
    with torch.inference_mode(), Calls() as calls:
        found = layer(rows, residual=residual)
    assert found.data_ptr() == residual.data_ptr()
    assert calls.names == ["numpy_T", "addmm_"] + ["add_"] * with_bias
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
