"""Paged attention in Triton: one kernel for prefill, decode and split-KV, and one that combines.

Keys are summed in splits that begin at fixed positions, and splits are merged in order. Which
program computes a split is free, where it begins is not: so a row's bits depend on neither the
batch nor the grid. With `exact` prefill takes the tile of decode, and its bits too.

The online softmax is that of Milakov and Gimelshein (arXiv:1805.02867), its splits and their merge
as in Flash-Decoding (pytorch.org/blog/flash-decoding).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .varlen import Varlen

LOG2E = 1.4426950408889634
SPLIT = 256  #: keys of a split, at least
SPLITS = 64  #: of a sequence, at most: longer contexts have longer splits
PROGRAMS = 1024  #: of a decode grid: some for each of the 132 to 148 processors


@triton.jit
def _merge(acc, top, total, acc2, top2, total2):
    """Two parts of an online softmax: sums of exp2(score - top) v, the largest score, weights."""
    high = tl.maximum(top, top2)
    safe = tl.where(high == float("-inf"), 0.0, high)
    left, right = tl.exp2(top - safe), tl.exp2(top2 - safe)
    return acc * left[:, None] + acc2 * right[:, None], high, total * left + total2 * right


@triton.jit
def _sequence_of(tile, q_start, sequences, TOKENS: tl.constexpr):
    """The sequence whose rows `tile` holds: sequence i begins at tile q_start[i] / TOKENS + i."""
    low, high = tile * 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(q_start + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _range(
    query, k, v, blocks, positions, inside, low, high, end, scale, window,
    block_stride, token_stride,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Softmax parts of `query` [ROWS, DIM] over keys low..high; `end` keys are written."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    dims = tl.arange(0, DIM)
    for start in range(low, high, KEYS):
        keys = start + tl.arange(0, KEYS)
        written = keys < end
        if PAGE >= KEYS:
            block = tl.load(blocks + start // PAGE).to(tl.int64)
            place = block * block_stride + (keys % PAGE) * token_stride
        else:
            block = tl.load(blocks + keys // PAGE, mask=written, other=0).to(tl.int64)
            place = block * block_stride + (keys % PAGE) * token_stride
        # unused slots may hold NaN, and 0 x NaN is NaN: they are not read
        key = tl.load(k + place[None, :] + dims[:, None], mask=written[None, :], other=0.0)
        scores = tl.dot(query, key.to(query.dtype), input_precision="ieee") * scale
        seen = inside[:, None] & (keys[None, :] <= positions[:, None])
        if window > 0:
            seen = seen & (keys[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        high_now = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(high_now == float("-inf"), 0.0, high_now)
        weights = tl.exp2(scores - safe[:, None])
        fade = tl.exp2(top - safe)
        value = tl.load(v + place[:, None] + dims[None, :], mask=written[:, None], other=0.0)
        summed = tl.dot(weights.to(query.dtype), value.to(query.dtype), input_precision="ieee")
        acc = acc * fade[:, None] + summed
        total = total * fade + tl.sum(weights, 1)
        top = high_now
    return acc, top, total


@triton.jit
def _queries(
    q, first, offset, count, end, kv_head, q_row,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """A tile: TOKENS rows from `offset` of a sequence x the GROUP heads of a KV head."""
    lane = tl.arange(0, ROWS)
    token = offset + lane // GROUP
    inside = (lane < TOKENS * GROUP) & (token < count)
    head = kv_head * GROUP + lane % GROUP
    row = (first + token).to(tl.int64)
    at = row * q_row + head * DIM
    query = tl.load(q + at[:, None] + tl.arange(0, DIM)[None, :], mask=inside[:, None], other=0.0)
    return query, end - count + token, inside, row, head


@triton.jit
def _prefill(
    q, k, v, out, q_start, kv_len, table, sequences, scale, window,
    q_row, out_row, block_stride, head_stride, token_stride, table_row,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PAGE: tl.constexpr, DIM: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, KV heads): all keys of a tile here, in splits that are merged, or at SPLIT 0 in
    one."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    seq = _sequence_of(tile, q_start, sequences, TOKENS)
    first, end = tl.load(q_start + seq), tl.load(kv_len + seq)
    offset = (tile - first // TOKENS - seq) * TOKENS
    count = tl.load(q_start + seq + 1) - first
    if (offset >= count) | (end == 0):
        return
    query, positions, inside, row, head = _queries(
        q, first, offset, count, end, kv_head, q_row, GROUP, TOKENS, ROWS, DIM
    )
    blocks = table + seq.to(tl.int64) * table_row
    k += kv_head.to(tl.int64) * head_stride
    v += kv_head.to(tl.int64) * head_stride
    low, last = 0, tl.minimum(end, end - count + offset + TOKENS)
    if window > 0:
        low = tl.maximum(0, end - count + offset - window + 1) // KEYS * KEYS
    if SPLIT == 0:
        acc, top, total = _range(
            query, k, v, blocks, positions, inside, low, last, end, scale, window,
            block_stride, token_stride, ROWS, KEYS, PAGE, DIM,
        )  # fmt: skip
    else:
        acc = tl.zeros([ROWS, DIM], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for begin in range(low // SPLIT * SPLIT, last, SPLIT):
            a, t, s = _range(
                query, k, v, blocks, positions, inside,
                tl.maximum(begin, low), tl.minimum(begin + SPLIT, last), end, scale, window,
                block_stride, token_stride, ROWS, KEYS, PAGE, DIM,
            )  # fmt: skip
            acc, top, total = _merge(acc, top, total, a, t, s)
    to = (row * out_row + head * DIM)[:, None] + tl.arange(0, DIM)[None, :]
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + to, result.to(out.dtype.element_ty), inside[:, None])


@triton.jit
def _decode(
    q, k, v, part, tops, kv_len, table, scale, window,
    q_row, block_stride, head_stride, token_stride, table_row, heads, part_splits,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PAGE: tl.constexpr, DIM: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Grid (rows, KV heads, programs): each split's parts of a row that is a sequence's last.

    They go to `part` [T, Hq, part_splits, DIM] and `tops` [T, Hq, part_splits, 2].
    """
    seq, kv_head = tl.program_id(0), tl.program_id(1)
    end = tl.load(kv_len + seq)
    if end == 0:
        return
    query, positions, inside, row, head = _queries(
        q, seq, 0, 1, end, kv_head, q_row, GROUP, 1, ROWS, DIM
    )
    blocks = table + seq.to(tl.int64) * table_row
    k += kv_head.to(tl.int64) * head_stride
    v += kv_head.to(tl.int64) * head_stride
    low = 0
    if window > 0:
        low = tl.maximum(0, end - window) // KEYS * KEYS
    for split in range(low // SPLIT + tl.program_id(2), tl.cdiv(end, SPLIT), tl.num_programs(2)):
        begin = split * SPLIT
        a, t, s = _range(
            query, k, v, blocks, positions, inside,
            tl.maximum(begin, low), tl.minimum(begin + SPLIT, end), end, scale, window,
            block_stride, token_stride, ROWS, KEYS, PAGE, DIM,
        )  # fmt: skip
        to = (row * heads + head) * part_splits + split
        tl.store(part + to[:, None] * DIM + tl.arange(0, DIM)[None, :], a, inside[:, None])
        tl.store(tops + to * 2, t, inside)
        tl.store(tops + to * 2 + 1, s, inside)


@triton.jit
def _combine(
    part, tops, out, kv_len, window, out_row, heads, part_splits,
    KEYS: tl.constexpr, SPLIT: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Grid (rows, heads): merges a decoding row's splits in order."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.load(kv_len + row)
    if end == 0:
        return
    dims = tl.arange(0, DIM)
    one = tl.arange(0, 1)
    acc = tl.zeros([1, DIM], tl.float32)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    low = 0
    if window > 0:
        low = tl.maximum(0, end - window) // KEYS * KEYS
    for split in range(low // SPLIT, tl.cdiv(end, SPLIT)):
        at = (row * heads + head) * part_splits + split
        a = tl.load(part + at * DIM + one[:, None] + dims[None, :])
        t, s = tl.load(tops + at * 2 + one), tl.load(tops + at * 2 + 1 + one)
        acc, top, total = _merge(acc, top, total, a, t, s)
    result = acc / total[:, None]
    to = out + row * out_row + head * DIM + one[:, None] + dims[None, :]
    tl.store(to, result.to(out.dtype.element_ty))


class PagedAttention:
    """softmax(q k^T scale) v over pages, by Triton. Workspaces are kept: a graph needs their place.

    `max_len`: the longest sequence in tokens. `exact`: prefill gives the bits of decode.
    """

    name, graphs = "triton", True

    def __init__(self, max_len: int, exact: bool = False) -> None:
        self.split = max(SPLIT, triton.next_power_of_2(triton.cdiv(max_len, SPLITS)))
        self.exact, self._splits = exact, triton.cdiv(max_len, self.split)
        self._part = self._tops = torch.empty(0)

    def __call__(
        self,
        q: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        where: Varlen,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """q [T, Hq, D] (heads contiguous) against `[block, Hkv, token, D]` views -> [T, Hq, D].

        D and the tokens of a block are powers of two, at least 16. The cache may be FP8. Rows whose
        sequence has a `kv_len` of 0 are not written.
        """
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if where.max_q > 1:
            self._rows_of_prefill(q, cache, where, scale * LOG2E, window or 0, out)
        else:
            self._rows_of_decode(q, cache, where, scale * LOG2E, window or 0, out)
        return out

    def _rows_of_prefill(self, q, cache, where: Varlen, scale: float, window: int, out) -> None:
        keys, values = cache
        rows, heads, dim = q.shape
        kv_heads, page = keys.shape[1:3]
        group = heads // kv_heads
        narrow = max(16, triton.next_power_of_2(group))
        lanes = narrow if self.exact else max(narrow, min(128, 16384 // dim))
        tokens = lanes // group
        _prefill[(rows // tokens + where.sequences, kv_heads)](
            *(q, keys, values, out, where.q_start, where.kv_len, where.table, where.sequences),
            *(scale, window, q.stride(0), out.stride(0), *keys.stride()[:3]),
            where.table.stride(0),
            GROUP=group,
            TOKENS=tokens,
            ROWS=lanes,
            KEYS=min(page, 64),
            PAGE=page,
            DIM=dim,
            SPLIT=self.split if self.exact else 0,
            num_warps=8 if lanes >= 128 else 4,
        )

    def _rows_of_decode(self, q, cache, where: Varlen, scale: float, window: int, out) -> None:
        keys, values = cache
        rows, heads, dim = q.shape
        kv_heads, page = keys.shape[1:3]
        part, tops = self._workspace(q, rows)
        shape = {"KEYS": min(page, 64), "DIM": dim, "SPLIT": self.split}
        _decode[(rows, kv_heads, self._programs(rows * kv_heads, where.max_kv))](
            *(q, keys, values, part, tops, where.kv_len, where.table, scale, window),
            *(q.stride(0), *keys.stride()[:3], where.table.stride(0), heads, self._splits),
            GROUP=heads // kv_heads,
            ROWS=max(16, triton.next_power_of_2(heads // kv_heads)),
            PAGE=page,
            **shape,
            num_warps=4,
        )
        _combine[(rows, heads)](
            *(part, tops, out, where.kv_len, window, out.stride(0), heads, self._splits),
            **shape,
            num_warps=1,
        )

    def _programs(self, others: int, max_kv: int) -> int:
        """Programs that share a row's splits."""
        return max(1, min(triton.cdiv(max_kv, self.split), PROGRAMS // others))

    def _workspace(self, q: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 parts for `rows` rows; those of the largest batch so far are kept."""
        items = rows * q.shape[1] * self._splits
        if len(self._tops) < items * 2 or self._tops.device != q.device:
            self._part = q.new_empty(items * q.shape[2], dtype=torch.float32)
            self._tops = q.new_empty(items * 2, dtype=torch.float32)
        return self._part, self._tops
