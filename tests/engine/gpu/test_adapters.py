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


def fa2_prefill(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *,
                softmax_scale, causal, window_size, block_table):  # fmt: skip
    lengths = cu_seqlens_k.diff()
    assert causal and cu_seqlens_k.dtype == torch.int32 and cu_seqlens_k[0] == 0
    assert (max_seqlen_q, max_seqlen_k) == (cu_seqlens_q.diff().max(), lengths.max())
    return attend(q, k, v, cu_seqlens_q, lengths, block_table, window_size[0])


def fa4(q, k, v, *, cu_seqlens_q, max_seqlen_q, max_seqlen_k, seqused_k, page_table,
        softmax_scale, causal, window_size, num_splits):  # fmt: skip
    assert causal and max_seqlen_k == seqused_k.max() and num_splits in (0, 1)
    return attend(q, k, v, cu_seqlens_q, seqused_k, page_table, window_size[0]), None


class Wrapper:
    """FlashInfer's: a plan of pages, then any number of runs."""

    plans = 0

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert workspace.dtype == torch.uint8 and layout == "HND"

    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
             num_qo_heads, num_kv_heads, head_dim_qk, page_size, **options) -> None:  # fmt: skip
        assert (num_qo_heads, num_kv_heads) == (HEADS, KV_HEADS)
        assert (head_dim_qk, page_size) == (DIM, PAGE)
        assert options["causal"] and options["q_data_type"] == torch.float32
        Wrapper.plans += 1
        self.query_starts = qo_indptr
        self.left = options["window_left"]
        counts = paged_kv_indptr.diff()
        # as its `get_seq_lens` does
        self.lengths = (counts - 1).clamp(min=0) * PAGE + paged_kv_last_page_len
        self.table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for index, count in enumerate(counts.tolist()):
            first, last = paged_kv_indptr[index : index + 2]
            self.table[index, :count] = paged_kv_indices[first:last]

    def run(self, q, cache) -> torch.Tensor:
        keys, values = (part.transpose(1, 2) for part in cache)
        return attend(q, keys, values, self.query_starts, self.lengths, self.table, self.left)


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
    found = attention(q, cache, where, scale=DIM**-0.5, window=window)
    assert reference.error(found, reference.attention(q, cache, made, window)) < 1e-5


def test_flashinfer_plans_once_for_all_layers_of_a_step() -> None:
    made = reference.pieces([(3, 0)], PAGE, BLOCKS)
    cache, q = reference.pool(BLOCKS, KV_HEADS, PAGE, DIM), torch.randn(3, HEADS, DIM)
    attention = adapt_library("flashinfer", LIBRARIES["flashinfer"], CPU)
    before = Wrapper.plans

    def layers(where: Varlen, count: int, window: int | None = None) -> int:
        for _ in range(count):
            attention(q, cache, where, scale=DIM**-0.5, window=window)
        return Wrapper.plans - before

    (first,), (second,) = split_by_phase(made), split_by_phase(made)
    assert layers(first, 3) == 1
    assert layers(second, 3) == 2  # another step
    assert layers(second, 1, window=4) == 3  # a layer with a window


def test_flashinfer_plans_each_run_of_a_mixed_step_once() -> None:
    """Prompts and decoding rows take turns in every layer."""
    made = reference.pieces([(40, 0), (1, 64), (1, 130)], PAGE, BLOCKS)
    cache = reference.pool(BLOCKS, KV_HEADS, PAGE, DIM)
    q = torch.randn(42, HEADS, DIM)
    attention = adapt_library("flashinfer", LIBRARIES["flashinfer"], CPU)
    before = Wrapper.plans
    runs = split_by_phase(made)
    for _ in range(5):
        layer = [
            attention(
                q[run.first_row : run.first_row + run.row_count],
                cache,
                run,
                scale=DIM**-0.5,
                window=None,
            )
            for run in runs
        ]
    assert Wrapper.plans - before == 2
    assert reference.error(torch.cat(layer), reference.attention(q, cache, made)) < 1e-5


def test_flashinfer_computes_a_decode_step_whose_lengths_only_the_device_has() -> None:
    """The rows of `DecodeRunner`, two of them padding, which have neither keys nor pages."""
    made = reference.pieces([(1, 64), (1, 130)], PAGE, BLOCKS)
    cache = reference.pool(BLOCKS, KV_HEADS, PAGE, DIM)
    q = torch.randn(4, HEADS, DIM)
    (run,) = split_by_phase(made)
    padded = Varlen(
        first_row=0,
        row_count=4,
        query_starts=torch.arange(5, dtype=torch.int32),
        kv_lengths=torch.cat([run.kv_lengths, torch.zeros(2, dtype=torch.int32)]),
        block_table=torch.cat([run.block_table, torch.zeros_like(run.block_table)]),
        max_query_rows=1,
        max_kv_length=1024,
    )
    plans: list[tuple[list[int], list[int]]] = []

    class Watched(Wrapper):
        def plan(self, **options) -> None:
            starts, last = options["paged_kv_indptr"], options["paged_kv_last_page_len"]
            plans.append((starts.tolist(), last.tolist()))
            super().plan(**options)

    library = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Watched)
    found = adapt_library("flashinfer", library, CPU)(
        q, cache, padded, scale=DIM**-0.5, window=None
    )
    assert plans == [([0, 2, 5, 5, 5], [1, 3, 0, 0])]
    assert reference.error(found[:2], reference.attention(q[:2], cache, made)) < 1e-5


def test_flashinfer_overwrites_no_page_lists_that_are_on_their_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    class Watched(Wrapper):
        def plan(self, *args, **options) -> None:
            order.append("plan")
            super().plan(*args, **options)

    event = SimpleNamespace(
        record=lambda: order.append("mark"), synchronize=lambda: order.append("wait")
    )
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    library = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Watched)
    attention = adapt_library("flashinfer", library, CPU)
    attention._device = SimpleNamespace(type="cuda")
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, device=None, **more: empty(*a, **more))
    cache, q = reference.pool(BLOCKS, KV_HEADS, PAGE, DIM), torch.randn(3, HEADS, DIM)
    made = reference.pieces([(3, 0)], PAGE, BLOCKS)
    for _ in range(2):
        (run,) = split_by_phase(made)
        attention(q, cache, run, scale=DIM**-0.5, window=None)
    assert order == ["plan", "mark", "wait", "plan", "mark"]
