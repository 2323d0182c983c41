"""Paged attention in Triton: kernels for prefill, for decode with split KV, and to combine splits.

Keys are summed in splits that begin at fixed positions, and splits are merged in order. Any program
may compute a split, but the split begins at the same position always. So the bits that a tile
gives for a row depend on neither the batch nor the grid. Prefill differs from decode in its bits,
and decode of many rows from that of few, whose tiles are other ones. But with `exact` all take one
tile and the same splits, and so give the same bits.

The online softmax is that of Milakov and Gimelshein (arXiv:1805.02867). It goes through the keys
once and keeps for each row the largest score so far (`top`), the sum of exp2(score - top)
(`total`), and the sum of these weights times the values (`summed`, a vector of the head's size).
Splits and their merge are those of Flash-Decoding (pytorch.org/blog/flash-decoding).

Scores are in units of log 2, because `exp2` is one instruction. Upper-case parameters are known
when a kernel is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..attention import LayerCache
from .overlap import let_next_kernel_start, overlap_options, wait_for_kernels_before
from .varlen import Varlen

#: log2(e): turns scores into units of log 2.
LOG2E = 1.4426950408889634

#: Keys of a split, at least: shorter ones would cost more to merge than they gain in parallel. How
#: many a split really has is `PagedAttention.split`, which the kernels get as SPLIT.
SPLIT_MINIMUM = 256

#: Splits of a sequence, at most: longer contexts have longer splits. It bounds the workspace.
SPLITS_LIMIT = 64

#: Programs of a decode grid, about: some for each of the 132 to 148 processors of a GPU.
PROGRAMS = 1024

#: Keys that prefill takes at a time. With 4 warps and 3 stages a layer of 8,192 tokens takes 1.89 ms
#: on an H200 (32 heads of 128, 8 of KV); 2 stages take 2.04, 64 keys, 8 warps and 3 stages 2.00.
PREFILL_KEYS = 32
PREFILL_STAGES = 3


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """How a program of decode goes through its keys."""

    keys: int  #: Taken at a time.
    warps: int
    stages: int
    registers: int | None  #: Of a thread, at most; None: as many as the compiler takes.


#: For few programs, and for `exact`, where the bits must not depend on how many there are.
FEW_PROGRAMS_TILE = DecodeTile(keys=64, warps=4, stages=3, registers=None)

#: For many programs: eight of them have room on a processor of an H100 or H200, so all programs of
#: 32 rows run at once. A step of 256 rows over 1,024 keys takes 15.4 ms so, and 16.0 with the other.
MANY_PROGRAMS_TILE = DecodeTile(keys=32, warps=2, stages=2, registers=128)

#: Rows times KV heads from which on there are many programs.
MANY_ROWS_AND_HEADS = 128


@triton.jit
def _merge(summed, top, total, summed2, top2, total2):
    """Merge two parts of an online softmax: weighted values, largest scores, sums of weights."""
    merged_top = tl.maximum(top, top2)
    # where neither part saw a key: -inf less -inf would be NaN
    safe_top = tl.where(merged_top == float("-inf"), 0.0, merged_top)
    left = tl.exp2(top - safe_top)
    right = tl.exp2(top2 - safe_top)
    merged = summed * left[:, None] + summed2 * right[:, None]
    return merged, merged_top, total * left + total2 * right


@triton.jit
def _sequence_of(tile, query_starts, sequences, TOKENS: tl.constexpr):
    """Find the sequence whose rows `tile` holds.

    Sequence i begins at tile query_starts[i] // TOKENS + i: the `+ i` leaves each sequence before
    it room for a last tile that is not full.
    """
    low = tile * 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _attend_range(
    query, keys, values, blocks, positions, inside, low, high, end, scale, window,
    block_stride, token_stride,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Compute the softmax parts of `query` [ROWS, DIM] over the keys from `low` to `high`.

    `blocks` is the sequence's block table, of which `end` keys are written. `positions` are those
    of the rows, and `inside` says which rows there are.
    """
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, DIM], tl.float32)
    dims = tl.arange(0, DIM)
    # Found one step ahead, so that the loads of keys do not wait for it and can be on their way early.
    next_block = tl.load(blocks + low // PAGE)
    for start in range(low, high, KEYS):
        key_positions = start + tl.arange(0, KEYS)
        written = key_positions < end
        if PAGE >= KEYS:
            block = next_block.to(tl.int64)
            next_block = tl.load(blocks + (start + KEYS) // PAGE, mask=start + KEYS < high, other=0)
            place = block * block_stride + (key_positions % PAGE) * token_stride
        else:
            block = tl.load(blocks + key_positions // PAGE, mask=written, other=0).to(tl.int64)
            place = block * block_stride + (key_positions % PAGE) * token_stride
        # unused slots may hold NaN, and 0 x NaN is NaN: they are not read
        key = tl.load(keys + place[None, :] + dims[:, None], mask=written[None, :], other=0.0)
        scores = tl.dot(query, key.to(query.dtype), input_precision="ieee") * scale
        visible = inside[:, None] & (key_positions[None, :] <= positions[:, None])
        if window > 0:
            visible = visible & (key_positions[None, :] > positions[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - safe_top[:, None])
        fade = tl.exp2(top - safe_top)
        value = tl.load(values + place[:, None] + dims[None, :], mask=written[:, None], other=0.0)
        weighted = tl.dot(weights.to(query.dtype), value.to(query.dtype), input_precision="ieee")
        summed = summed * fade[:, None] + weighted
        total = total * fade + tl.sum(weights, 1)
        top = new_top
    return summed, top, total


@triton.jit
def _load_queries(
    queries, first, offset, count, end, kv_head, query_row,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Load a tile: TOKENS rows from `offset` of a sequence times the GROUP heads of a KV head.

    The sequence's `count` rows begin at row `first` of the run, and are the last ones of `end`.
    """
    lane = tl.arange(0, ROWS)
    token = offset + lane // GROUP
    inside = (lane < TOKENS * GROUP) & (token < count)
    head = kv_head * GROUP + lane % GROUP
    row = (first + token).to(tl.int64)
    at = row * query_row + head * DIM
    dims = tl.arange(0, DIM)
    query = tl.load(queries + at[:, None] + dims[None, :], mask=inside[:, None], other=0.0)
    return query, end - count + token, inside, row, head


@triton.jit
def _prefill(
    queries, keys, values, out, query_starts, kv_lengths, block_table, sequences, scale, window,
    query_row, out_row, block_stride, head_stride, token_stride, table_row,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PAGE: tl.constexpr, DIM: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Attend from a tile's rows to all of their keys. The grid is (tiles, KV heads).

    The keys are taken in splits that are merged, or in one where SPLIT is 0.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = _sequence_of(tile, query_starts, sequences, TOKENS)
    first = tl.load(query_starts + sequence)
    end = tl.load(kv_lengths + sequence)
    offset = (tile - first // TOKENS - sequence) * TOKENS
    count = tl.load(query_starts + sequence + 1) - first
    if (offset >= count) | (end == 0):
        return
    query, positions, inside, row, head = _load_queries(
        queries, first=first, offset=offset, count=count, end=end, kv_head=kv_head,
        query_row=query_row, GROUP=GROUP, TOKENS=TOKENS, ROWS=ROWS, DIM=DIM,
    )  # fmt: skip
    blocks = block_table + sequence.to(tl.int64) * table_row
    keys += kv_head.to(tl.int64) * head_stride
    values += kv_head.to(tl.int64) * head_stride
    low = 0
    last = tl.minimum(end, end - count + offset + TOKENS)
    if window > 0:
        low = tl.maximum(0, end - count + offset - window + 1) // KEYS * KEYS
    if SPLIT == 0:
        summed, top, total = _attend_range(
            query, keys, values, blocks, positions=positions, inside=inside,
            low=low, high=last, end=end, scale=scale, window=window,
            block_stride=block_stride, token_stride=token_stride,
            ROWS=ROWS, KEYS=KEYS, PAGE=PAGE, DIM=DIM,
        )  # fmt: skip
    else:
        summed = tl.zeros([ROWS, DIM], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for begin in range(low // SPLIT * SPLIT, last, SPLIT):
            split_summed, split_top, split_total = _attend_range(
                query, keys, values, blocks, positions=positions, inside=inside,
                low=tl.maximum(begin, low), high=tl.minimum(begin + SPLIT, last), end=end,
                scale=scale, window=window, block_stride=block_stride, token_stride=token_stride,
                ROWS=ROWS, KEYS=KEYS, PAGE=PAGE, DIM=DIM,
            )  # fmt: skip
            summed, top, total = _merge(
                summed, top, total, summed2=split_summed, top2=split_top, total2=split_total
            )
    to = (row * out_row + head * DIM)[:, None] + tl.arange(0, DIM)[None, :]
    result = summed / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + to, result.to(out.dtype.element_ty), inside[:, None])


@triton.jit
def _decode(
    queries, keys, values, partials, tops, kv_lengths, block_table, scale, window,
    query_row, block_stride, head_stride, token_stride, table_row, heads, split_count,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PAGE: tl.constexpr, DIM: tl.constexpr, SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute the parts of each split of a row. The grid is (rows, KV heads, programs).

    Each row is the last one of its sequence. Its weighted values go to `partials`
    [T, Hq, split_count, DIM], its largest scores and sums of weights to `tops`
    [T, Hq, split_count, 2].
    """
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    let_next_kernel_start(OVERLAP)
    end = tl.load(kv_lengths + sequence)  # written before any kernel that this one overlaps with
    wait_for_kernels_before(OVERLAP)
    if end == 0:
        return
    query, positions, inside, row, head = _load_queries(
        queries, first=sequence, offset=0, count=1, end=end, kv_head=kv_head,
        query_row=query_row, GROUP=GROUP, TOKENS=1, ROWS=ROWS, DIM=DIM,
    )  # fmt: skip
    blocks = block_table + sequence.to(tl.int64) * table_row
    keys += kv_head.to(tl.int64) * head_stride
    values += kv_head.to(tl.int64) * head_stride
    low = 0
    if window > 0:
        low = tl.maximum(0, end - window) // KEYS * KEYS
    for split in range(low // SPLIT + tl.program_id(2), tl.cdiv(end, SPLIT), tl.num_programs(2)):
        begin = split * SPLIT
        summed, top, total = _attend_range(
            query, keys, values, blocks, positions=positions, inside=inside,
            low=tl.maximum(begin, low), high=tl.minimum(begin + SPLIT, end), end=end,
            scale=scale, window=window, block_stride=block_stride, token_stride=token_stride,
            ROWS=ROWS, KEYS=KEYS, PAGE=PAGE, DIM=DIM,
        )  # fmt: skip
        to = (row * heads + head) * split_count + split
        dims = tl.arange(0, DIM)
        tl.store(partials + to[:, None] * DIM + dims[None, :], summed, inside[:, None])
        tl.store(tops + to * 2, top, inside)
        tl.store(tops + to * 2 + 1, total, inside)


@triton.jit
def _combine(
    partials, tops, out, kv_lengths, window, out_row, heads, split_count,
    KEYS: tl.constexpr, SPLIT: tl.constexpr, DIM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge a decoding row's splits, in order. The grid is (rows, heads)."""
    let_next_kernel_start(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    end = tl.load(kv_lengths + row)  # written before any kernel that this one overlaps with
    wait_for_kernels_before(OVERLAP)
    if end == 0:
        return
    dims = tl.arange(0, DIM)
    single = tl.arange(0, 1)
    summed = tl.zeros([1, DIM], tl.float32)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    low = 0
    if window > 0:
        low = tl.maximum(0, end - window) // KEYS * KEYS
    for split in range(low // SPLIT, tl.cdiv(end, SPLIT)):
        at = (row * heads + head) * split_count + split
        split_summed = tl.load(partials + at * DIM + single[:, None] + dims[None, :])
        split_top = tl.load(tops + at * 2 + single)
        split_total = tl.load(tops + at * 2 + 1 + single)
        summed, top, total = _merge(
            summed, top, total, summed2=split_summed, top2=split_top, total2=split_total
        )
    result = summed / total[:, None]
    to = out + row * out_row + head * DIM + single[:, None] + dims[None, :]
    tl.store(to, result.to(out.dtype.element_ty))


class PagedAttention:
    """softmax(q k^T scale) v over pages, by Triton.

    `max_model_len` is the length of the longest sequence in tokens. With `exact`, prefill gives the
    bits of decode; without, runs of one row a sequence take the kernel of decode, all others that
    of prefill. Workspaces stay until a larger batch comes. A CUDA graph needs them to stay where
    they are, so the graph of the largest batch must be captured first.
    """

    name = "triton"
    graphs = True

    def __init__(self, max_model_len: int, exact: bool = False) -> None:
        #: Keys of a split. It depends on `max_model_len` alone, never on a step: bits depend on it.
        self.split = max(
            SPLIT_MINIMUM, triton.next_power_of_2(triton.cdiv(max_model_len, SPLITS_LIMIT))
        )
        self.exact = exact
        self._split_count = triton.cdiv(max_model_len, self.split)
        self._partials = torch.empty(0)
        self._tops = torch.empty(0)
        self._captured = False  #: True once a CUDA graph writes to the workspaces.

    def __call__(
        self,
        queries: torch.Tensor,
        cache: LayerCache,
        run: Varlen,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Return the attention of `queries` [T, Hq, D] (heads contiguous), [T, Hq, D].

        The cache's views are `[block, Hkv, token, D]`. D and the tokens of a block are powers of
        two, at least 16. The cache may be FP8. Rows whose sequence has a `kv_length` of 0 are not
        written.
        """
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        attend = self._attend_prefill if run.max_query_rows > 1 else self._attend_decode
        attend(queries, cache, run, scale=scale * LOG2E, window=window or 0, out=out)
        return out

    def _attend_prefill(
        self,
        queries: torch.Tensor,
        cache: LayerCache,
        run: Varlen,
        *,
        scale: float,
        window: int,
        out: torch.Tensor,
    ) -> None:
        keys, values = cache
        row_count, heads, head_dim = queries.shape
        _, kv_heads, block_tokens, _ = keys.shape
        group = heads // kv_heads
        # A lane is a row of one query head. 16 are the least that a product of tensor cores takes;
        # a tile of more numbers than 16,384 does not fit into registers.
        decode_lanes = max(16, triton.next_power_of_2(group))
        lanes = decode_lanes if self.exact else max(decode_lanes, min(128, 16384 // head_dim))
        tokens = lanes // group
        _prefill[(row_count // tokens + run.sequences, kv_heads)](
            queries,
            keys,
            values,
            out,
            query_starts=run.query_starts,
            kv_lengths=run.kv_lengths,
            block_table=run.block_table,
            sequences=run.sequences,
            scale=scale,
            window=window,
            query_row=queries.stride(0),
            out_row=out.stride(0),
            block_stride=keys.stride(0),
            head_stride=keys.stride(1),
            token_stride=keys.stride(2),
            table_row=run.block_table.stride(0),
            GROUP=group,
            TOKENS=tokens,
            ROWS=lanes,
            # An exact prefill takes the keys as decode does.
            KEYS=min(block_tokens, FEW_PROGRAMS_TILE.keys if self.exact else PREFILL_KEYS),
            PAGE=block_tokens,
            DIM=head_dim,
            SPLIT=self.split if self.exact else 0,
            num_warps=4,
            num_stages=2 if self.exact else PREFILL_STAGES,
        )

    def _attend_decode(
        self,
        queries: torch.Tensor,
        cache: LayerCache,
        run: Varlen,
        *,
        scale: float,
        window: int,
        out: torch.Tensor,
    ) -> None:
        keys, values = cache
        row_count, heads, head_dim = queries.shape
        _, kv_heads, block_tokens, _ = keys.shape
        partials, tops = self._workspace(queries, row_count)
        tile = self._decode_tile(row_count, keys)
        shape = {"KEYS": min(block_tokens, tile.keys), "DIM": head_dim, "SPLIT": self.split}
        programs = self._programs_per_row(row_count * kv_heads, run.max_kv_length)
        _decode[(row_count, kv_heads, programs)](
            queries,
            keys,
            values,
            partials,
            tops=tops,
            kv_lengths=run.kv_lengths,
            block_table=run.block_table,
            scale=scale,
            window=window,
            query_row=queries.stride(0),
            block_stride=keys.stride(0),
            head_stride=keys.stride(1),
            token_stride=keys.stride(2),
            table_row=run.block_table.stride(0),
            heads=heads,
            split_count=self._split_count,
            GROUP=heads // kv_heads,
            ROWS=max(16, triton.next_power_of_2(heads // kv_heads)),
            PAGE=block_tokens,
            **shape,
            num_warps=tile.warps,
            num_stages=tile.stages,
            maxnreg=tile.registers,
            **overlap_options(queries),
        )
        _combine[(row_count, heads)](
            partials,
            tops,
            out,
            kv_lengths=run.kv_lengths,
            window=window,
            out_row=out.stride(0),
            heads=heads,
            split_count=self._split_count,
            **shape,
            num_warps=1,
            **overlap_options(queries),
        )

    def _decode_tile(self, row_count: int, keys: torch.Tensor) -> DecodeTile:
        """Return how decode of `row_count` rows goes through `keys`."""
        _, kv_heads, _, head_dim = keys.shape
        is_many = row_count * kv_heads >= MANY_ROWS_AND_HEADS
        # A cache in FP8, or a wider head, needs more registers than the tile for many programs has.
        fits = keys.element_size() == 2 and head_dim <= 128
        return MANY_PROGRAMS_TILE if is_many and fits and not self.exact else FEW_PROGRAMS_TILE

    def _programs_per_row(self, rows_and_heads: int, max_kv_length: int) -> int:
        """Return how many programs share the splits of a row and a KV head."""
        splits = triton.cdiv(max_kv_length, self.split)
        return max(1, min(splits, PROGRAMS // rows_and_heads))

    def _workspace(
        self, queries: torch.Tensor, row_count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 `partials` and `tops` for `row_count` rows.

        Those of the largest batch so far are kept, as the class says.
        """
        splits = row_count * queries.shape[1] * self._split_count
        if len(self._tops) < splits * 2 or self._tops.device != queries.device:
            assert not self._captured, (
                f"{row_count} rows need a larger workspace than a CUDA graph was captured with: "
                "the graph would go on writing to memory that others have"
            )
            self._partials = queries.new_empty(splits * queries.shape[2], dtype=torch.float32)
            self._tops = queries.new_empty(splits * 2, dtype=torch.float32)
        self._captured = self._captured or _is_capturing(queries)
        return self._partials, self._tops


def _is_capturing(queries: torch.Tensor) -> bool:
    """Return whether what is launched now becomes part of a CUDA graph."""
    return queries.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
