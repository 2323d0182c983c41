"""Paged attention in plain torch: the backend that runs anywhere, with one reduction order per row.

Every row is computed as part of a query tile that ends at its block's border, over the keys of all
blocks up to that border, masked behind the row. The shapes of that computation depend on the row's
position alone, so its bits do not depend on chunking, on the batch, on prefix hits, or on whether
it is prefill or decode (given products whose rows are independent: `linear.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(slots=True)
class Piece:
    """Rows `row`..`row + count` of the step are positions `start`.. of one sequence."""

    row: int
    count: int
    start: int
    blocks: list[int]  #: the sequence's blocks up to its last row
    decode: bool  #: one row, batched with others


@dataclass
class Meta:
    """Where the step's rows are. Slots are (block, offset) of every row; int64 throughout."""

    positions: torch.Tensor
    slot_block: torch.Tensor
    slot_offset: torch.Tensor
    pieces: list[Piece]
    _slots: torch.Tensor | None = None

    @cached_property
    def groups(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Decoding rows by their number of blocks: rows [B], block table [B, n], positions [B]."""
        groups: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            if piece.decode:
                groups.setdefault(len(piece.blocks), []).append(piece)
        return [
            (
                torch.tensor([piece.row for piece in members]),
                torch.tensor([piece.blocks for piece in members]),
                torch.tensor([piece.start for piece in members]),
            )
            for members in groups.values()
        ]

    @cached_property
    def flat(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, 4] of (row, count, start, offset into the table), and all block tables in a row."""
        spans: list[tuple[int, int, int, int]] = []
        table: list[int] = []
        for piece in self.pieces:
            spans.append((piece.row, piece.count, piece.start, len(table)))
            table += piece.blocks
        return torch.tensor(spans), torch.tensor(table)

    def slots(self, view: torch.Tensor) -> torch.Tensor:
        """[T] elements from a layer's K (or V) view `[block, head, token, dim]` to each row."""
        if self._slots is None:
            block, _, token, _ = view.stride()
            self._slots = self.slot_block * block + self.slot_offset * token
        return self._slots


Cache = tuple[torch.Tensor, torch.Tensor]  #: K and V of a layer, `[block, Hkv, token, D]` views
Attend = Callable[[torch.Tensor, Cache, Meta, float, int | None], torch.Tensor]


def _masked(scores: torch.Tensor, rows: torch.Tensor, window: int | None) -> torch.Tensor:
    """Softmax over keys 0..row (inside the window); `rows` broadcasts against `scores`."""
    keys = torch.arange(scores.shape[-1])
    hidden = keys > rows
    if window is not None:
        hidden = hidden | (keys <= rows - window)
    return torch.softmax(scores.float().masked_fill(hidden, float("-inf")), dim=-1)


def attend(
    q: torch.Tensor,
    cache: Cache,
    meta: Meta,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """q [T, Hq, D] against the cache's `[block, Hkv, token, D]` views -> [T, Hq, D]."""
    out = torch.empty_like(q)
    for piece in meta.pieces:
        if not piece.decode:
            _prefill(q, cache, piece, scale, window, out)
    for rows, table, positions in meta.groups:
        _decode(q, cache, rows, table, positions, scale, window, out)
    return out


def _prefill(q, cache, piece: Piece, scale: float, window: int | None, out: torch.Tensor) -> None:
    keys, values = cache
    tile, kv_heads, dim = keys.shape[2], keys.shape[1], keys.shape[3]
    group = q.shape[1] // kv_heads
    blocks = torch.tensor(piece.blocks)
    k = keys[blocks].transpose(0, 1).reshape(kv_heads, -1, dim)
    v = values[blocks].transpose(0, 1).reshape(kv_heads, -1, dim)
    end = piece.start + piece.count
    v[:, end:] = 0  # a weight of 0 does not hide what is no number
    for first in range(piece.start // tile * tile, end, tile):
        low, high = max(first, piece.start), min(first + tile, end)
        rows = slice(piece.row + low - piece.start, piece.row + high - piece.start)
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
    v = v.masked_fill((torch.arange(v.shape[1]) > at[:, 0])[..., None], 0)
    out[rows] = torch.bmm(weights, v).reshape(count, kv_heads * group, dim)
