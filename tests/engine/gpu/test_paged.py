"""Paged attention: against a float64 reference, and the bits that must not depend on the batch."""

from __future__ import annotations

import pytest
import torch
from diptych.engine.attention import RowSpan
from diptych.engine.gpu import paged
from diptych.engine.gpu.paged import PagedAttention
from diptych.engine.gpu.varlen import split_by_phase
from hypothesis import given, settings
from hypothesis import strategies as st

from . import reference

MAX_LEN = 1024


def run(attention, q, cache, made, window=None) -> torch.Tensor:
    found = []
    for part in split_by_phase(made):
        rows = q[part.first_row : part.first_row + part.row_count]
        found.append(attention(rows, cache, part, scale=q.shape[2] ** -0.5, window=window))
    return torch.cat(found)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    spans=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 330)), min_size=1, max_size=3),
    decode=st.lists(st.integers(0, 600), max_size=2),
    heads=st.sampled_from([(1, 1), (2, 2), (6, 2), (7, 1), (4, 1)]),
    dim=st.sampled_from([16, 64, 128]),
    page=st.sampled_from([16, 64, 128]),
    window=st.sampled_from([None, 1, 100]),
    exact=st.booleans(),
)
def test_it_is_attention(spans, decode, heads, dim, page, window, exact) -> None:
    """Any mix of prefill and decode; NaN in every slot that no sequence has written."""
    blocks = 160 if page == 16 else 60
    made = reference.pieces([*spans, *((1, start) for start in decode)], page, blocks)
    cache = reference.pool(blocks, heads[1], page, dim)
    reference.poison(cache, made)
    q = torch.randn(sum(piece.row_count for piece in made), heads[0], dim)
    found = run(PagedAttention(MAX_LEN, exact), q, cache, made, window)
    expected = reference.attention(q, cache, made, window)
    assert reference.error(found, expected) < 1e-6


#: the interpreter of Triton 3.7 multiplies bfloat16 as if it were integers
HALF = [torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_stays_near(dtype: torch.dtype) -> None:
    made = reference.pieces([(20, 30), (1, 300)], 64, 12)
    cache = reference.pool(12, 2, 64, 64, dtype)
    q = torch.randn(21, 4, 64).to(dtype)
    found = run(PagedAttention(MAX_LEN), q, cache, made)
    expected = reference.attention(q, cache, made)
    assert reference.error(found, expected) < (2e-3 if dtype == torch.float16 else 2e-2)


@pytest.mark.slow
@pytest.mark.usefixtures("exact_dots")
def test_rows_of_prefill_have_the_bits_of_decode_if_exact() -> None:
    """Whole, in chunks, row by row, beside others, in another place of the pool: the same bits."""
    attention, length = PagedAttention(MAX_LEN, exact=True), 300
    cache = reference.pool(14, 2, 64, 64)
    q = torch.randn(length, 6, 64)
    whole = run(attention, q, cache, [RowSpan(0, length, 0, [3, 9, 1, 5, 7], False)])
    tail = run(attention, q[270:], cache, [RowSpan(0, 30, 270, [3, 9, 1, 5, 7], False)])
    assert torch.equal(tail, whole[270:])
    elsewhere = [2, 4, 6, 8, 10]
    for part in cache:
        part[elsewhere] = part[[3, 9, 1, 5, 7]]
    rows = [0, 63, 64, 255, 256, 299]
    decode = [
        RowSpan(index, 1, row, elsewhere[: row // 64 + 1], True) for index, row in enumerate(rows)
    ]
    assert torch.equal(run(attention, q[rows], cache, decode), whole[rows])
    alone = run(attention, q[[299]], cache, [RowSpan(0, 1, 299, elsewhere, True)])
    assert torch.equal(alone[0], whole[299])


def test_decode_does_not_depend_on_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program for all splits of a row, or one for each: the same bits, exact or not."""
    made = reference.pieces([(1, 900), (1, 511), (1, 0)], 64, 40)
    cache, q = reference.pool(40, 1, 64, 64), torch.randn(3, 4, 64)
    wide = run(PagedAttention(MAX_LEN), q, cache, made)
    monkeypatch.setattr(paged, "PROGRAMS", 1)
    assert torch.equal(run(PagedAttention(MAX_LEN), q, cache, made), wide)


def test_long_contexts_have_long_splits() -> None:
    assert PagedAttention(1024).split == paged.SPLIT_MINIMUM
    assert PagedAttention(131_072).split == 131_072 // paged.SPLITS_LIMIT


def test_rows_that_pad_a_graph_are_left_alone() -> None:
    """Their `kv_len` is 0, their table any block: nothing of it is read."""
    made = reference.pieces([(1, 70), (1, 5)], 64, 8)
    cache, q = reference.pool(8, 1, 64, 64), torch.randn(2, 2, 64)
    (where,) = split_by_phase(made)
    where.kv_lengths[1] = 0
    where.block_table[1] = 10**9
    out = PagedAttention(MAX_LEN)(q, cache, where, scale=0.125, window=None)
    expected = reference.attention(q[:1], cache, made[:1])
    assert reference.error(out[:1], expected) < 1e-6
