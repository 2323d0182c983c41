"""Paged attention in plain torch: the backend that runs anywhere, with one reduction order per row.

Every row is computed as part of a query tile that ends at its block's border, over the keys of all
blocks up to that border, masked behind the row. The shapes of that computation depend on the row's
position alone, so its bits do not depend on chunking, on the batch, on prefix hits, or on whether
it is prefill or decode (given products whose rows are independent: `linear.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Span:
    """Rows `row`..`row + count` of the step are positions `start`.. of one sequence."""

    row: int
    count: int
    start: int
    blocks: torch.Tensor  #: int64, the sequence's blocks up to its last row


@dataclass(slots=True)
class Meta:
    """Where the step's rows are. Slots are (block, offset) of every row."""

    positions: torch.Tensor
    slot_block: torch.Tensor
    slot_offset: torch.Tensor
    spans: list[Span]  #: prefill chunks
    decode: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """per number of blocks: rows [B], block table [B, n], positions [B]"""


def _masked(scores: torch.Tensor, rows: torch.Tensor, window: int | None) -> torch.Tensor:
    """Softmax over keys 0..row (inside the window); `rows` broadcasts against `scores`."""
    keys = torch.arange(scores.shape[-1])
    hidden = keys > rows
    if window is not None:
        hidden = hidden | (keys <= rows - window)
    return torch.softmax(scores.float().masked_fill(hidden, float("-inf")), dim=-1)


def attend(
    q: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    meta: Meta,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """q [T, Hq, D] against the cache's `[block, Hkv, token, D]` views -> [T, Hq, D]."""
    out = torch.empty_like(q)
    for span in meta.spans:
        _prefill(q, cache, span, scale, window, out)
    for rows, table, positions in meta.decode:
        _decode(q, cache, rows, table, positions, scale, window, out)
    return out


def _prefill(q, cache, span: Span, scale: float, window: int | None, out: torch.Tensor) -> None:
    keys, values = cache
    tile, kv_heads, dim = keys.shape[2], keys.shape[1], keys.shape[3]
    group = q.shape[1] // kv_heads
    k = keys[span.blocks].transpose(0, 1).reshape(kv_heads, -1, dim)
    v = values[span.blocks].transpose(0, 1).reshape(kv_heads, -1, dim)
    end = span.start + span.count
    for first in range(span.start // tile * tile, end, tile):
        low, high = max(first, span.start), min(first + tile, end)
        rows = slice(span.row + low - span.start, span.row + high - span.start)
        padded = q.new_zeros(tile, q.shape[1], dim)
        padded[low - first : high - first] = q[rows]
        tiled = padded.view(tile, kv_heads, group, dim).permute(1, 2, 0, 3)
        tiled = tiled.reshape(kv_heads, group * tile, dim)
        scores = torch.bmm(tiled, k[:, : first + tile].transpose(1, 2)) * scale
        positions = torch.arange(first, first + tile).repeat(group)[:, None]
        weights = _masked(scores, positions, window).to(q.dtype)
        result = torch.bmm(weights, v[:, : first + tile])
        result = result.view(kv_heads, group, tile, dim).permute(2, 0, 1, 3)
        out[rows] = result.reshape(tile, -1, dim)[low - first : high - first]


def _decode(q, cache, rows, table, positions, scale, window, out: torch.Tensor) -> None:
    keys, values = cache
    count, blocks = table.shape
    kv_heads, tile, dim = keys.shape[1:]
    group = q.shape[1] // kv_heads
    k = keys[table].transpose(1, 2).reshape(count * kv_heads, blocks * tile, dim)
    v = values[table].transpose(1, 2).reshape(count * kv_heads, blocks * tile, dim)
    grouped = q[rows].reshape(count * kv_heads, group, dim)
    scores = torch.bmm(grouped, k.transpose(1, 2)) * scale
    at = positions.repeat_interleave(kv_heads)[:, None, None]
    weights = _masked(scores, at, window).to(q.dtype)
    out[rows] = torch.bmm(weights, v).reshape(count, kv_heads * group, dim)
