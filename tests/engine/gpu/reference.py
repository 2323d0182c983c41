"""Attention as it is defined, row by row in float64, and random cases of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from diptych.engine.attention import RowSpan

Cache = tuple[torch.Tensor, torch.Tensor]


def pieces(spans: Sequence[tuple[int, int]], page: int, blocks: int) -> list[RowSpan]:
    """A step of (count, start) each; a sequence's blocks are drawn, none belongs to two."""
    free = torch.randperm(blocks - 1).tolist()
    made, row = [], 0
    for count, start in spans:
        need = -(-(start + count) // page)
        mine, free = [1 + block for block in free[:need]], free[need:]
        assert len(mine) == need, "more blocks are needed"
        made.append(RowSpan(row, count, start, mine, count == 1))
        row += count
    return made


def pool(blocks: int, heads: int, page: int, dim: int, dtype: torch.dtype = torch.float32) -> Cache:
    """K and V of one layer as the pool's views: block outermost, K and V of a head side by side."""
    flat = torch.randn(blocks, heads, 2, page, dim).to(dtype)
    return flat[:, :, 0], flat[:, :, 1]


def poison(cache: Cache, made: list[RowSpan]) -> None:
    """Every slot that no sequence has written becomes NaN."""
    page = cache[0].shape[2]
    written = torch.zeros(cache[0].shape[0], page, dtype=torch.bool)
    for piece in made:
        for position in range(piece.first_position + piece.row_count):
            written[piece.blocks[position // page], position % page] = True
    for part in cache:
        part.masked_fill_(~written[:, None, :, None], float("nan"))


def attention(
    q: torch.Tensor, cache: Cache, made: list[RowSpan], window: int | None = None
) -> torch.Tensor:
    """softmax(q k / sqrt(D)) v in float64, [T, Hq, D]."""
    heads, dim = q.shape[1:]
    group = heads // cache[0].shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for piece in made:
        k, v = (p[piece.blocks].transpose(0, 1).flatten(1, 2).double() for p in cache)
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        for index in range(piece.row_count):
            end = piece.first_position + index + 1
            low = max(0, end - window) if window else 0
            row = q[piece.first_row + index].double()
            scores = torch.einsum("hd,hkd->hk", row, k[:, low:end]) / math.sqrt(dim)
            out[piece.first_row + index] = torch.einsum(
                "hk,hkd->hd", scores.softmax(1), v[:, low:end]
            )
    return out


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected|; NaN never passes a comparison."""
    return float((found.double() - expected).norm() / expected.norm())
