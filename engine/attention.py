"""Paged attention in plain torch: the backend that runs anywhere, with one order of sums per row.

The KV cache is paged: the keys and values of a sequence lie in blocks of the pool, and a block
table lists these blocks in the order of the sequence's positions. A step computes rows, one for
each token; `StepRows` says where the keys of each row are.

A row of prefill is computed as part of a query tile that ends at its block's border, a decoding row
beside those of other sequences. Either goes over the keys of all blocks up to that border, with the
keys after the row masked. The number and the order of these keys depend on the row's position
alone. So its bits do not depend on chunking, on the batch, on prefix hits, or on whether it is
prefill or decode (given products whose rows are independent: `linear.py`).

In shapes, T is the number of rows of a step, Hq and Hkv are the numbers of query and KV heads, and
D is the size of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

#: The keys and the values of one layer: two views `[block, Hkv, token, D]` of the pool.
LayerCache = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class RowSpan:
    """Consecutive rows of a step that are consecutive positions of one sequence."""

    first_row: int  #: Index of the first of them in the step.
    row_count: int
    first_position: int  #: The position in its sequence of the row `first_row`.
    blocks: list[int]  #: The sequence's blocks, up to the one that holds the last row.
    is_decode: bool  #: True for a single row that is batched with those of other sequences.

    @property
    def end_position(self) -> int:
        """The position after the last row: the number of keys that row sees without a window."""
        return self.first_position + self.row_count


@dataclass(slots=True)
class DecodeGroup:
    """Decoding rows of sequences that have equally many blocks; all tensors are int64."""

    rows: torch.Tensor  #: [B] indices of the rows in the step.
    block_table: torch.Tensor  #: [B, blocks]
    positions: torch.Tensor  #: [B] positions of the rows in their sequences.


@dataclass
class StepRows:
    """Where the rows of a step are in their sequences and in the pool. Tensors are int64 [T].

    The K and V of a row are stored in its slot, which is a block and an offset in tokens into it.
    """

    positions: torch.Tensor  #: Of each row in its sequence, from 0.
    slot_blocks: torch.Tensor  #: Index in the pool of the block that has the row's slot.
    slot_offsets: torch.Tensor  #: The slot's offset in that block, in tokens.
    spans: list[RowSpan]  #: All rows, in order: sequence by sequence.
    _slot_elements: torch.Tensor | None = None  #: What `slot_elements` has worked out.

    @cached_property
    def decode_groups(self) -> list[DecodeGroup]:
        """The decoding rows, grouped by how many blocks their sequences have."""
        spans_by_blocks: dict[int, list[RowSpan]] = {}
        for span in self.spans:
            if span.is_decode:
                spans_by_blocks.setdefault(len(span.blocks), []).append(span)
        return [
            DecodeGroup(
                rows=torch.tensor([span.first_row for span in spans]),
                block_table=torch.tensor([span.blocks for span in spans]),
                positions=torch.tensor([span.first_position for span in spans]),
            )
            for spans in spans_by_blocks.values()
        ]

    @cached_property
    def flat_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The spans as the C++ kernels read them, int64 [spans, 4], and all block tables in a row.

        A span's four numbers are its first row, its row count, its first position, and where its
        blocks begin in the second tensor, int64 [blocks of all spans].
        """
        numbers: list[tuple[int, int, int, int]] = []
        blocks: list[int] = []
        for span in self.spans:
            numbers.append((span.first_row, span.row_count, span.first_position, len(blocks)))
            blocks += span.blocks
        return torch.tensor(numbers), torch.tensor(blocks)

    def slot_elements(self, view: torch.Tensor) -> torch.Tensor:
        """Return how many elements each row's slot lies behind the start of `view`, int64 [T].

        `view` is a layer's K or V view `[block, head, token, dim]`. All layers have the same
        strides, so the first call's result serves them all.
        """
        if self._slot_elements is None:
            block_stride, _, token_stride, _ = view.stride()
            offsets = self.slot_offsets * token_stride
            self._slot_elements = self.slot_blocks * block_stride + offsets
        return self._slot_elements


def attend(
    queries: torch.Tensor,
    cache: LayerCache,
    step: StepRows,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Return softmax(q k^T scale) v of each row over its sequence's keys up to itself.

    `queries` are [T, Hq, D], as is the result; `window` is the sliding window in tokens, or None.
    """
    out = torch.empty_like(queries)
    for span in step.spans:
        if not span.is_decode:
            _attend_prefill(queries, cache, span, scale=scale, window=window, out=out)
    for group in step.decode_groups:
        _attend_decode(queries, cache, group, scale=scale, window=window, out=out)
    return out


def _softmax_of_visible(
    scores: torch.Tensor, positions: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Return the float32 softmax over the keys 0 to `positions` that are inside of the window.

    `positions` broadcasts against `scores` [.., queries, keys].
    """
    keys = torch.arange(scores.shape[-1])
    invisible = keys > positions
    if window is not None:
        invisible = invisible | (keys <= positions - window)
    return torch.softmax(scores.float().masked_fill(invisible, float("-inf")), dim=-1)


def _attend_prefill(
    queries: torch.Tensor,
    cache: LayerCache,
    span: RowSpan,
    *,
    scale: float,
    window: int | None,
    out: torch.Tensor,
) -> None:
    """Write the attention of a span's rows to `out`, one block-sized tile of rows at a time."""
    key_pages, value_pages = cache
    _, kv_heads, tile_rows, head_dim = key_pages.shape
    blocks = torch.tensor(span.blocks)
    keys = key_pages[blocks].transpose(0, 1).reshape(kv_heads, -1, head_dim)
    values = value_pages[blocks].transpose(0, 1).reshape(kv_heads, -1, head_dim)
    values[:, span.end_position :] = 0  # unused slots may hold NaN, and 0 x NaN is NaN

    for tile_start in range(
        span.first_position // tile_rows * tile_rows, span.end_position, tile_rows
    ):
        tile_end = tile_start + tile_rows
        begin = max(tile_start, span.first_position)
        end = min(tile_end, span.end_position)
        first_row = span.first_row + begin - span.first_position
        rows = slice(first_row, first_row + end - begin)
        rows_in_tile = slice(begin - tile_start, end - tile_start)

        tile = queries.new_zeros(tile_rows, queries.shape[1], head_dim)
        tile[rows_in_tile] = queries[rows]
        result = _attend_tile(
            tile,
            keys[:, :tile_end],
            values[:, :tile_end],
            tile_start,
            scale=scale,
            window=window,
        )
        out[rows] = result[rows_in_tile]


def _attend_tile(
    tile: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tile_start: int,
    *,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Return the attention of a tile of rows [rows, Hq, D] at the positions from `tile_start` on.

    `keys` and `values` are [Hkv, tokens, D]. The query heads that share a KV head are stacked, so
    that each KV head takes one product.
    """
    tile_rows, heads, head_dim = tile.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    stacked = tile.view(tile_rows, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    stacked = stacked.reshape(kv_heads, group * tile_rows, head_dim)
    scores = torch.bmm(stacked, keys.transpose(1, 2)) * scale
    positions = torch.arange(tile_start, tile_start + tile_rows).repeat(group)[:, None]
    weights = _softmax_of_visible(scores, positions, window).to(tile.dtype)
    result = torch.bmm(weights, values)
    result = result.view(kv_heads, group, tile_rows, head_dim).permute(2, 0, 1, 3)
    return result.reshape(tile_rows, heads, head_dim)


def _attend_decode(
    queries: torch.Tensor,
    cache: LayerCache,
    group: DecodeGroup,
    *,
    scale: float,
    window: int | None,
    out: torch.Tensor,
) -> None:
    """Write the attention of a group's rows to `out`: one batched product for all of them."""
    key_pages, value_pages = cache
    count, blocks = group.block_table.shape
    kv_heads, block_tokens, head_dim = key_pages.shape[1:]
    heads_per_kv_head = queries.shape[1] // kv_heads
    gathered_shape = count * kv_heads, blocks * block_tokens, head_dim
    keys = key_pages[group.block_table].transpose(1, 2).reshape(gathered_shape)
    values = value_pages[group.block_table].transpose(1, 2).reshape(gathered_shape)

    grouped = queries[group.rows].reshape(count * kv_heads, heads_per_kv_head, head_dim)
    scores = torch.bmm(grouped, keys.transpose(1, 2)) * scale
    positions = group.positions.repeat_interleave(kv_heads)[:, None, None]
    weights = _softmax_of_visible(scores, positions, window).to(queries.dtype)
    # unused slots may hold NaN, and 0 x NaN is NaN
    unwritten = torch.arange(values.shape[1]) > positions[:, 0]
    values = values.masked_fill(unwritten[..., None], 0)
    result = torch.bmm(weights, values)
    out[group.rows] = result.reshape(count, kv_heads * heads_per_kv_head, head_dim)
