"""Attention libraries behind the one interface of `paged.PagedAttention`.

Each class is an `AttentionBackend` by the calls of its `module`, the library that was imported. A
library sees a layer's cache as a strided view: nothing is copied. The names of the libraries'
parameters were read in the versions that the README of this folder names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Protocol

import torch

from ..attention import LayerCache
from .layer_events import DeviceEvent
from .varlen import Varlen

#: Bytes of the workspace in which FlashInfer lays out its plans and keeps parts of results: twice
#: the 128 MiB that its documentation recommends.
WORKSPACE = 256 << 20


class AttentionBackend(Protocol):
    """Paged attention over the rows of a run of prefill or of decode."""

    #: As in `backends.MODULES`.
    name: str

    #: True: a decode step can be captured in a CUDA graph, because its sequences change without a
    #: plan on the host.
    graphs: bool

    def __call__(
        self,
        queries: torch.Tensor,
        cache: LayerCache,
        run: Varlen,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Return the attention of `queries` [T, Hq, D] over a layer's cache, [T, Hq, D].

        `scale` multiplies the scores; `window` is the sliding window in tokens, or None.
        """
        ...


def _by_token(cache: LayerCache) -> LayerCache:
    """Return views `[block, token, Hkv, D]` of a cache's `[block, Hkv, token, D]`."""
    keys, values = cache
    return keys.transpose(1, 2), values.transpose(1, 2)


def _window_size(window: int | None) -> tuple[int, int]:
    """Return how many keys to the left and to the right of itself a row sees; -1 is all.

    Our `window` counts the row's own key too, theirs does not.
    """
    return (window - 1, 0) if window else (-1, -1)


class FlashAttention3:
    """`flash_attn_with_kvcache` of FA3's `flash_attn_interface`, or of the copy in sgl-kernel."""

    name = "fa3"
    graphs = True

    def __init__(self, module: ModuleType) -> None:
        self._attend = module.flash_attn_with_kvcache

    def __call__(
        self,
        queries: torch.Tensor,
        cache: LayerCache,
        run: Varlen,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        keys, values = _by_token(cache)
        return self._attend(
            queries,
            keys,
            values,
            cache_seqlens=run.kv_lengths,
            page_table=run.block_table,
            cu_seqlens_q=run.query_starts,
            max_seqlen_q=run.max_query_rows,
            softmax_scale=scale,
            causal=True,
            window_size=_window_size(window),
        )


class FlashAttention2:
    """flash-attn 2: the call with splits for decode, the varlen call for prefill."""

    name = "fa2"
    graphs = True

    def __init__(self, module: ModuleType) -> None:
        self._attend_decode = module.flash_attn_with_kvcache
        self._attend_prefill = module.flash_attn_varlen_func

    def __call__(
        self,
        queries: torch.Tensor,
        cache: LayerCache,
        run: Varlen,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        keys, values = _by_token(cache)
        common: dict[str, Any] = {
            "softmax_scale": scale,
            "causal": True,
            "window_size": _window_size(window),
            "block_table": run.block_table,
        }
        if run.max_query_rows == 1:
            out = self._attend_decode(
                queries[:, None], keys, values, cache_seqlens=run.kv_lengths, **common
            )
            return out[:, 0]
        return self._attend_prefill(
            queries,
            keys,
            values,
            cu_seqlens_q=run.query_starts,
            cu_seqlens_k=_starts(run.kv_lengths),
            max_seqlen_q=run.max_query_rows,
            max_seqlen_k=run.max_kv_length,
            **common,
        )


class FlashAttention4:
    """`flash_attn_varlen_func` of flash-attn-4 (`flash_attn.cute`)."""

    name = "fa4"
    graphs = True

    def __init__(self, module: ModuleType) -> None:
        self._attend = module.flash_attn_varlen_func

        #: Splits of a decoding row's keys. On sm90 it cannot split; elsewhere 0 lets it choose.
        self._decode_splits = 1 if torch.cuda.is_available() and _major() == 9 else 0

    def __call__(
        self,
        queries: torch.Tensor,
        cache: LayerCache,
        run: Varlen,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        keys, values = _by_token(cache)
        result = self._attend(
            queries,
            keys,
            values,
            cu_seqlens_q=run.query_starts,
            max_seqlen_q=run.max_query_rows,
            max_seqlen_k=run.max_kv_length,
            seqused_k=run.kv_lengths,
            page_table=run.block_table,
            softmax_scale=scale,
            causal=True,
            window_size=(window - 1, 0) if window else (None, None),
            num_splits=self._decode_splits if run.max_query_rows == 1 else 1,
        )
        return result[0] if isinstance(result, tuple) else result


def _major() -> int:
    """Return the major compute capability of the current GPU."""
    return torch.cuda.get_device_capability()[0]


@dataclass(frozen=True, slots=True)
class PageLists:
    """Where the rows and the pages of a run's sequences are, as FlashInfer wants it: all int32."""

    query_starts: torch.Tensor  #: [sequences + 1]: where each sequence's rows begin.
    page_starts: torch.Tensor  #: [sequences + 1]: where each sequence's pages begin in `pages`.
    pages: torch.Tensor  #: The blocks of all sequences, one sequence behind the other.
    last_page_tokens: torch.Tensor  #: [sequences]: tokens in the last page; 0 where there is none.

    @classmethod
    def of_run(cls, run: Varlen, block_tokens: int) -> PageLists:
        """Make the lists of a run on the host. Padding has no page, and no token in one."""
        page_counts = (run.kv_lengths + block_tokens - 1) // block_tokens
        is_page = torch.arange(run.block_table.shape[1]) < page_counts[:, None]
        full_pages = (page_counts - 1).clamp(min=0)
        return cls(
            query_starts=run.query_starts,
            page_starts=_starts(page_counts),
            pages=run.block_table[is_page],
            last_page_tokens=run.kv_lengths - full_pages * block_tokens,
        )


def _starts(counts: torch.Tensor) -> torch.Tensor:
    """Return where the parts of a list begin and where the last one ends, int32 [parts + 1]."""
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


@dataclass(slots=True)
class PlanSlot:
    """A wrapper of FlashInfer with a workspace of its own, and what it was planned for last."""

    wrapper: Any
    run: Varlen | None = None
    #: Behind the copy of the plan's page lists, which the wrapper keeps in pinned memory: the next
    #: plan overwrites them. None: nothing is on its way.
    copied: DeviceEvent | None = None


class FlashInfer:
    """FlashInfer's paged prefill wrapper, for decode too. It plans a step on the host.

    A step with prompts and decoding rows has two runs, which take turns in each layer. Each kind of
    run, and each window, has a wrapper: else every layer would plan twice.
    """

    name = "flashinfer"
    graphs = False

    def __init__(self, module: ModuleType, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._slots: dict[tuple[bool, int | None], PlanSlot] = {}  #: By decode or not, and window.

    def __call__(
        self,
        queries: torch.Tensor,
        cache: LayerCache,
        run: Varlen,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        key = (run.max_query_rows == 1, window)
        if key not in self._slots:
            workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=self._device)
            wrapper = self._module.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
            self._slots[key] = PlanSlot(wrapper)
        slot = self._slots[key]
        if slot.run is not run:
            self._plan(slot, queries, cache, run, scale=scale, window=window)
        return slot.wrapper.run(queries, cache)

    def _plan(
        self,
        slot: PlanSlot,
        queries: torch.Tensor,
        cache: LayerCache,
        run: Varlen,
        *,
        scale: float,
        window: int | None,
    ) -> None:
        """Plan all layers of a step with one run and one window."""
        if slot.copied:
            slot.copied.synchronize()
        keys, _ = cache
        _, kv_heads, block_tokens, _ = keys.shape
        pages = PageLists.of_run(_on_host(run), block_tokens)
        slot.wrapper.plan(
            qo_indptr=pages.query_starts,
            paged_kv_indptr=pages.page_starts,
            paged_kv_indices=pages.pages,
            paged_kv_last_page_len=pages.last_page_tokens,
            num_qo_heads=queries.shape[1],
            num_kv_heads=kv_heads,
            head_dim_qk=queries.shape[2],
            page_size=block_tokens,
            causal=True,
            sm_scale=scale,
            window_left=window - 1 if window else -1,
            q_data_type=queries.dtype,
            kv_data_type=keys.dtype,
        )
        slot.run = run
        if self._device.type == "cuda":
            slot.copied = torch.cuda.Event()
            slot.copied.record()


def _on_host(run: Varlen) -> Varlen:
    """Return a run whose tensors are the host's; where nobody has them, wait for the device."""
    if run.host is not None:
        return run.host
    return replace(
        run,
        query_starts=run.query_starts.cpu(),
        kv_lengths=run.kv_lengths.cpu(),
        block_table=run.block_table.cpu(),
    )


def adapt_library(name: str, module: ModuleType, device: torch.device) -> AttentionBackend:
    """Return the backend `name`, of `backends.MODULES`, by its imported module."""
    if name == "flashinfer":
        return FlashInfer(module, device)
    adapters: dict[str, Callable[[ModuleType], AttentionBackend]] = {
        "fa2": FlashAttention2,
        "fa3": FlashAttention3,
        "fa4": FlashAttention4,
    }
    return adapters[name](module)
