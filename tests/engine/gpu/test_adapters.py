"""What each library is called with: fakes with its signature that compute by the reference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from diptych.engine.gpu.adapters import adapt_library
from diptych.engine.gpu.varlen import Varlen, split_by_phase

from . import reference

HEADS, KV_HEADS, DIM, PAGE, BLOCKS = 4, 2, 32, 64, 30
CPU = torch.device("cpu")


def attend(q, keys, values, starts, lengths, table, left) -> torch.Tensor:
    """Attention from what a library sees: caches `[block, token, Hkv, D]`, `left` keys before."""
    out = torch.empty_like(q)
    for index, end in enumerate(lengths.tolist()):
        first, last = starts[index : index + 2].tolist()
        k, v = (part[table[index].long()].flatten(0, 1)[:end] for part in (keys, values))
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
        for row in range(first, last):
            position = end - last + row
            low = 0 if left in (-1, None) else max(0, position - left)
            scores = torch.einsum("hd,khd->hk", q[row], k[low : position + 1]) * DIM**-0.5
            out[row] = torch.einsum("hk,khd->hd", scores.softmax(1), v[low : position + 1])
    return out


def fa3(q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q,
        softmax_scale, causal, window_size):  # fmt: skip
    assert causal and softmax_scale == DIM**-0.5
    assert window_size == (-1, -1) or window_size[1] == 0
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    left = window_size[0]
    return attend(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, left)


def fa2_decode(q, k_cache, v_cache, *, cache_seqlens, softmax_scale, causal, window_size,
               block_table):  # fmt: skip
    assert causal and q.shape[1] == 1
    starts = torch.arange(len(q) + 1)
    out = attend(q[:, 0], k_cache, v_cache, starts, cache_seqlens, block_table, window_size[0])
    return out[:, None]


def fa2_prefill(q, k, v, cu_q, cu_k, max_q, max_k, *, softmax_scale, causal, window_size,
                block_table):  # fmt: skip
    assert causal and cu_k.dtype == torch.int32 and cu_k[0] == 0
    assert (max_q, max_k) == (cu_q.diff().max(), cu_k.diff().max())
    return attend(q, k, v, cu_q, cu_k.diff(), block_table, window_size[0])


def fa4(q, k, v, *, cu_seqlens_q, max_seqlen_q, max_seqlen_k, seqused_k, page_table,
        softmax_scale, causal, window_size, num_splits):  # fmt: skip
    assert causal and max_seqlen_k == seqused_k.max() and num_splits in (0, 1)
    return attend(q, k, v, cu_seqlens_q, seqused_k, page_table, window_size[0]), None


class Wrapper:
    """FlashInfer's: a plan of pages, then any number of runs."""

    plans = 0

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert workspace.dtype == torch.uint8 and layout == "HND"

    def plan(self, q_start, starts, pages, last, heads, kv_heads, dim, page, **options) -> None:
        assert (heads, kv_heads, dim, page) == (HEADS, KV_HEADS, DIM, PAGE)
        assert options["causal"] and options["q_data_type"] == torch.float32
        Wrapper.plans += 1
        self.q_start, self.left = q_start, options["window_left"]
        counts = starts.diff()
        self.lengths = (counts - 1) * PAGE + last
        self.table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for index, count in enumerate(counts.tolist()):
            self.table[index, :count] = pages[starts[index] : starts[index + 1]]

    def run(self, q, cache) -> torch.Tensor:
        keys, values = (part.transpose(1, 2) for part in cache)
        return attend(q, keys, values, self.q_start, self.lengths, self.table, self.left)


LIBRARIES = {
    "fa3": SimpleNamespace(flash_attn_with_kvcache=fa3),
    "fa2": SimpleNamespace(flash_attn_with_kvcache=fa2_decode, flash_attn_varlen_func=fa2_prefill),
    "fa4": SimpleNamespace(flash_attn_varlen_func=fa4),
    "flashinfer": SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper),
}


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("spans", [[(40, 0), (7, 100)], [(1, 64), (1, 130), (1, 0)]])
def test_a_library_sees_the_step_as_it_is(name, window, spans) -> None:
    made = reference.pieces(spans, PAGE, BLOCKS)
    cache = reference.pool(BLOCKS, KV_HEADS, PAGE, DIM)
    q = torch.randn(sum(piece.row_count for piece in made), HEADS, DIM)
    (where,) = split_by_phase(made)
    attention = adapt_library(name, LIBRARIES[name], CPU)
    found = attention(q, cache, where, DIM**-0.5, window)
    assert reference.error(found, reference.attention(q, cache, made, window)) < 1e-5


def test_flashinfer_plans_once_for_all_layers_of_a_step() -> None:
    made = reference.pieces([(3, 0)], PAGE, BLOCKS)
    cache, q = reference.pool(BLOCKS, KV_HEADS, PAGE, DIM), torch.randn(3, HEADS, DIM)
    attention = adapt_library("flashinfer", LIBRARIES["flashinfer"], CPU)
    before = Wrapper.plans

    def layers(where: Varlen, count: int, window: int | None = None) -> int:
        for _ in range(count):
            attention(q, cache, where, DIM**-0.5, window)
        return Wrapper.plans - before

    (first,), (second,) = split_by_phase(made), split_by_phase(made)
    assert layers(first, 3) == 1
    assert layers(second, 3) == 2  # another step
    assert layers(second, 1, window=4) == 3  # a layer with a window
