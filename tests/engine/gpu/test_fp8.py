"""FP8 weights and FP8 KV: near the model they stand for, and known to KV peers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diptych.engine.attention import RowSpan, StepRows
from diptych.engine.engine import Engine
from diptych.engine.errors import KernelUnavailable
from diptych.engine.gpu import fp8
from diptych.engine.ops import Ops, RmsNorm

from . import reference
from .test_engine import engine

STEP = 2.0**-3  #: largest relative distance of two neighbours in e4m3


def test_rows_come_back_within_half_a_step() -> None:
    x = torch.randn(7, 96) * 10.0 ** torch.randint(-4, 4, (7, 1))
    x[3] = 0
    codes, scales = fp8.quantize_rows(x)
    back = codes.float() * scales
    tiny = x.abs().amax(1, keepdim=True) * 2.0**-15  # below the smallest normal number: absolute
    assert ((back - x).abs() <= (x.abs() * STEP / 2).maximum(tiny)).all()
    assert codes[[0, 1, 2, 4, 5, 6]].float().abs().amax(1).eq(fp8.LARGEST).all()


def test_codes_of_a_checkpoint_come_out_again() -> None:
    """Dequantized in bf16 by a scale for each row, as `tensors.dequantize` does, and back."""
    codes = (torch.randn(16, 64) * 100).clamp(-440, 440).to(fp8.E4M3)
    codes[:, 5] = 448.0
    stored = (codes.float() * torch.rand(16, 1)).bfloat16()
    assert torch.equal(fp8.quantize_rows(stored)[0].view(torch.uint8), codes.view(torch.uint8))


def quantize(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, norm: RmsNorm | None = None
) -> None:
    """Run the kernel that a GPU runs."""
    weight, eps = (x, 0.0) if norm is None else (norm.weight, norm.eps)
    fp8._quantize[(len(x),)](
        x, weight, codes, scales, x.shape[1], x.stride(0), eps,
        BLOCK=256, HAS_NORM=norm is not None, OVERLAP=False,
    )  # fmt: skip


def test_the_kernel_gives_the_same_codes() -> None:
    """Nearly: Triton 3.7's interpreter rounds ties up and loses a carry, a GPU does not."""
    x = torch.randn(3, 200)
    codes, scales = torch.empty(3, 200, dtype=fp8.E4M3), torch.empty(3, 1)
    quantize(x, codes, scales)
    expected, expected_scales = fp8.quantize_rows(x)
    torch.testing.assert_close(scales, expected_scales)
    mine, theirs = (one.view(torch.uint8).int() for one in (codes, expected))
    apart = (mine - theirs).abs() > 0
    assert apart.double().mean() < (0.1 if x.device.type == "cpu" else 1e-3)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_nan_stays_nan() -> None:
    """So logits are NaN as well, and the answer ends with `model_damaged`.

    Triton's interpreter keeps NaN in every maximum, and makes it a number in FP8. So there it is
    the CPU's path that is tested; of the kernel, `test_compiles.py` looks at the machine's code.
    """
    x = torch.randn(4, 200)
    x[1, 3] = torch.nan
    x[2] = torch.nan
    x[3, 5] = torch.inf
    codes, scales = fp8.quantize_rows(x)
    back = codes.float() * scales
    expected = torch.tensor([False, True, True, True], device=x.device)
    assert torch.equal(back.isnan().any(1), expected)
    kernel_codes, kernel_scales = torch.empty(4, 200), torch.empty(4, 1)
    quantize(x, kernel_codes, kernel_scales)
    assert torch.equal(kernel_codes.isnan().any(1), expected)


def test_a_layer_is_near_the_one_it_stands_for() -> None:
    x, weight, bias = torch.randn(5, 128), torch.randn(64, 128) * 0.1, torch.randn(64)
    layer = fp8.Fp8Linear(weight, bias, False, Ops())
    residual = torch.randn(5, 64)
    expected = x.double() @ weight.double().T + bias + residual
    assert 1e-4 < reference.error(layer(x, residual=residual), expected) < 0.04


def logits(owner: Engine) -> torch.Tensor:
    """Of 40 rows of one text, after a prefill."""
    ids = torch.arange(40) * 37 % owner.spec.vocab
    at = torch.arange(40)
    meta = StepRows(at, torch.ones(40, dtype=torch.int64), at, [RowSpan(0, 40, 0, [1], False)])
    return owner._model.logits(owner._model.hidden(ids, meta), torch.arange(40)).double()


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        pytest.param({"weights": "fp8"}, 0.1, marks=pytest.mark.slow),
        ({"kv_dtype": "float8_e4m3fn"}, 0.1),
    ],
)
def test_logits_stay_near(small: Callable[[str], Path], fields, most: float) -> None:
    folder = small("llama")
    found, expected = logits(engine(folder, "triton", **fields)), logits(engine(folder, "torch"))
    assert 1e-4 < reference.error(found, expected) < most
    agree = (found.argmax(1) == expected.argmax(1)).double().mean()
    assert agree > 0.8


def test_peers_with_another_kv_dtype_do_not_match(small: Callable[[str], Path]) -> None:
    folder = small("llama")
    plain = engine(folder, "triton")
    half = engine(folder, "triton", kv_dtype="float8_e4m3fn")
    assert half.compatibility != plain.compatibility
    assert half.kv_pool.block_bytes * 4 == plain.kv_pool.block_bytes


def test_they_are_settings_of_a_gpu(small: Callable[[str], Path]) -> None:
    with pytest.raises(KernelUnavailable, match="settings of a GPU"):
        engine(small("llama"), "torch", weights="fp8")
    with pytest.raises(KernelUnavailable, match="exact: products of FP8"):
        engine(small("llama"), "triton", weights="fp8", exact=True)


def test_codes_of_a_norm_are_those_of_the_normed_rows() -> None:
    """The kernel norms and quantizes at once; the interpreter's rounding to FP8 is off, as above."""
    x = torch.randn(3, 200)
    norm = RmsNorm(torch.rand(200) + 0.5, 1e-5)
    codes, scales = torch.empty(3, 200, dtype=fp8.E4M3), torch.empty(3, 1)
    quantize(x, codes, scales, norm)
    expected, expected_scales = fp8.quantize_rows(Ops().norm(x, norm))
    torch.testing.assert_close(scales, expected_scales)
    mine, theirs = (one.view(torch.uint8).int() for one in (codes, expected))
    assert (mine != theirs).double().mean() < 0.1
    on_cpu, _ = fp8.quantize_rows(x, norm)
    assert (on_cpu.view(torch.uint8).int() != theirs).double().mean() < 0.02
