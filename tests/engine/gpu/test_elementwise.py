"""The fused kernels against `engine.ops`, whose results they replace."""

from __future__ import annotations

import pytest
import torch
from diptych.engine.attention import StepRows
from diptych.engine.gpu import elementwise
from diptych.engine.ops import Ops, RmsNorm

ROWS = 5
#: not bfloat16: Triton 3.7's interpreter truncates to it, a GPU rounds
TYPES = [torch.float32, torch.float16]


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to a last bit of float16 where float32 sums differ in theirs."""
    tolerance = 1e-5 if expected.dtype == torch.float32 else 2e-3
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-5)


def same_rotated(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that rotated numbers are equal up to a last bit of float16 of the pair that was rotated.

    Each number is `a cos - b sin` or `a sin + b cos` of a pair that is rounded before, so where the two
    terms nearly cancel the difference is small beside the pair and not beside the number. A rotation
    keeps the length of a pair, so `expected` itself tells it.
    """
    tolerance = 1e-5 if expected.dtype == torch.float32 else 2e-3
    assert found.dtype == expected.dtype
    first, second = expected.float().chunk(2, dim=-1)
    length = torch.hypot(first, second)
    lengths = torch.cat((length, length), dim=-1)
    difference = (found.float() - expected.float()).abs()
    assert bool((difference <= 1e-5 + tolerance * lengths).all()), difference.max()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [64, 200])
def test_norm_is_that_of_the_model(size: int, dtype: torch.dtype) -> None:
    wide = draw(ROWS, 2 * size, dtype=dtype)
    x, norm = wide[:, :size], RmsNorm(draw(size, dtype=dtype), 1e-5)
    same(elementwise.rms_norm(x, norm), Ops().norm(x, norm))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [32, elementwise.COLUMNS + 5])
def test_silu_mul_is_that_of_the_model(size: int, dtype: torch.dtype) -> None:
    x = draw(2, 2 * size, dtype=dtype)
    same(elementwise.silu_mul(x), Ops().silu_mul(x))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("many_rows", [elementwise.MANY_ROWS, ROWS])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_store_is_that_of_the_model(
    normed: bool, dtype: torch.dtype, many_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elementwise, "MANY_ROWS", many_rows)  # the rows here are many or few
    heads, kv_heads, dim = 6, 2, 64
    qkv = draw(ROWS, (heads + 2 * kv_heads) * dim, dtype=dtype)
    norms = (RmsNorm(draw(dim, dtype=dtype), 1e-5), RmsNorm(draw(dim, dtype=dtype), 1e-5))
    turns = torch.rand(ROWS, dim // 2) * 100
    angles = turns.cos(), turns.sin()
    blocks, offsets = torch.tensor([3, 3, 1, 2, 0]), torch.tensor([7, 8, 0, 15, 3])
    meta = StepRows(torch.arange(ROWS), blocks, offsets, [])
    caches = []
    for _ in range(2):
        flat = torch.full((4, kv_heads, 2, 16, dim), 7.0, dtype=dtype)
        caches.append((flat[:, :, 0], flat[:, :, 1]))
    chosen = norms if normed else None
    expected = Ops().rope_store(qkv.clone(), caches[0], chosen, angles, meta)
    found = elementwise.rope_store(qkv, caches[1], chosen, angles, (blocks, offsets))
    same_rotated(found, expected)
    (found_keys, found_values), (expected_keys, expected_values) = caches[1], caches[0]
    same_rotated(found_keys, expected_keys)
    assert torch.equal(found_values, expected_values)  # stored unchanged
    for mine, theirs in zip(caches[1], caches[0], strict=True):
        assert (mine == 7).sum() == (theirs == 7).sum()  # no other slot was touched
