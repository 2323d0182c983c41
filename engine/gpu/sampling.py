"""The next id of each row on the device, without a sort: argmax, or argmax of logits plus noise.

The noise is that of `engine.sampler.gumbel_noise`: Philox 4x64-10 (Salmon et al., SC 2011) keyed by
(seed, position), as numpy counts it, in float64. So a seed gives the same draws on a CPU and here,
and no generator's state is kept, or travels.

Two kernels do the work: `_scan` finds the best id of each chunk of a row, `_pick` the best chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Ids of a program (Triton's unit of parallel work): a row of 128,256 has 126 of them.
CHUNK = 1024


@triton.jit
def _philox(counter, key, key2):
    """Return four uint64 of each counter: ten rounds on (counter, 0, 0, 0), keyed by two words.

    The constants are the multipliers and the key increments of Philox 4x64.
    """
    a, b = counter, tl.zeros_like(counter)
    c, d = tl.zeros_like(counter), tl.zeros_like(counter)
    for _ in tl.static_range(10):
        high = tl.umulhi(a, 0xD2E7470EE14C6C93 + tl.zeros_like(a))
        high2 = tl.umulhi(c, 0xCA5A826395121157 + tl.zeros_like(a))
        low = a * (0xD2E7470EE14C6C93 + tl.zeros_like(a))
        low2 = c * (0xCA5A826395121157 + tl.zeros_like(a))
        a, b, c, d = high2 ^ b ^ key, low2, high ^ d ^ key2, low
        key += 0x9E3779B97F4A7C15 + tl.zeros_like(key)
        key2 += 0xBB67AE8584CAA73B + tl.zeros_like(key)
    return a, b, c, d


@triton.jit
def _best_of(value, ids):
    """Return the largest value and its id, the lowest id of equal values."""
    best = tl.max(value, 0)
    return best, tl.min(tl.where(value == best, ids, 2147483647), 0)


@triton.jit
def _scan(
    logits, seeds, positions, temperatures, values, ids, peaks, vocab, row_stride, chunks,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Find the best id of a chunk, its value, and the chunk's largest logit (NaN if one is).

    The grid is (rows, chunks). A value is the logit at temperature 0, else logit / temperature plus
    noise.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    counter = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
    key = tl.zeros_like(counter).to(tl.uint64) + tl.load(seeds + row).to(tl.uint64)
    key2 = tl.zeros_like(counter).to(tl.uint64) + tl.load(positions + row).to(tl.uint64)
    # numpy counts from 1, and each count gives four numbers
    words = _philox((counter + 1).to(tl.uint64), key, key2)
    # 2147483647, the largest int32, stands for no id: every id is lower
    top = tl.full([], float("-inf"), tl.float64)
    top_id = tl.full([], 2147483647, tl.int32)
    peak = tl.full([], float("-inf"), tl.float32)
    damaged = tl.full([], 0, tl.int32)
    for word in tl.static_range(4):
        index = counter * 4 + word
        logit = tl.load(logits + row * row_stride + index, mask=index < vocab, other=float("-inf"))
        logit = logit.to(tl.float32)
        damaged = tl.maximum(damaged, tl.max((logit != logit).to(tl.int32), 0))
        peak = tl.maximum(peak, tl.max(logit, 0))
        value = logit.to(tl.float64)
        if temperature > 0:
            # the upper 53 bits times 2^-53, as numpy makes a float64 of them
            uniform = (words[word] >> 11).to(tl.float64) * 1.1102230246251565e-16
            noise = -tl.log(-tl.log(tl.maximum(uniform, 1e-300)))
            value = value / temperature + noise
        best, best_id = _best_of(tl.where(index < vocab, value, float("-inf")), index)
        lower_id = tl.where(best == top, tl.minimum(best_id, top_id), top_id)
        top_id = tl.where(best > top, best_id, lower_id)
        top = tl.maximum(best, top)
    to = row * chunks + chunk
    tl.store(values + to, top)
    tl.store(ids + to, top_id)
    tl.store(peaks + to, tl.where(damaged > 0, float("nan"), peak))


@triton.jit
def _pick(values, ids, peaks, out, out_peak, chunks, BLOCK: tl.constexpr):
    """Find the best id of all chunks, and the largest logit. The grid is (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < chunks
    value = tl.load(values + row * chunks + at, mask=inside, other=float("-inf"))
    index = tl.load(ids + row * chunks + at, mask=inside, other=2147483647)
    peak = tl.load(peaks + row * chunks + at, mask=inside, other=float("-inf"))
    _, best = _best_of(value, index)
    damaged = tl.max((peak != peak).to(tl.int32), 0)
    tl.store(out + row, best.to(tl.int64))
    tl.store(out_peak + row, tl.where(damaged > 0, float("nan"), tl.max(peak, 0)))


def pick_tokens(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the next ids, int64 [T], and the largest logit of each row, float32 [T].

    `logits` are [T, vocab], `seeds` and `positions` int64 [T], `temperatures` float64 [T]: at 0 the
    id is that of the largest logit, else a draw. The largest logit is NaN if any of the row is;
    where it is no finite number the id means nothing.
    """
    row_count, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    values = logits.new_empty(row_count, chunks, dtype=torch.float64)
    ids = logits.new_empty(row_count, chunks, dtype=torch.int32)
    peaks = logits.new_empty(row_count, chunks, dtype=torch.float32)
    out = logits.new_empty(row_count, dtype=torch.int64)
    out_peak = logits.new_empty(row_count).float()
    _scan[(row_count, chunks)](
        logits,
        seeds,
        positions,
        temperatures,
        values,
        ids,
        peaks,
        vocab,
        logits.stride(0),
        chunks,
        CHUNK=CHUNK,
    )
    block = triton.next_power_of_2(chunks)
    _pick[(row_count,)](values, ids, peaks, out, out_peak, chunks, BLOCK=block)
    return out, out_peak
