"""Attention libraries behind the one interface of `paged.PagedAttention`.

Each call gives [T, Hq, D]. A library sees a layer's cache as a strided view: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import torch

from .varlen import Varlen

Cache = tuple[torch.Tensor, torch.Tensor]
WORKSPACE = 256 << 20  #: bytes that FlashInfer's plans are laid out in


class Attention(Protocol):
    """`graphs`: a decode step can be captured, its sequences change without a plan on the host."""

    name: str
    graphs: bool

    def __call__(
        self,
        q: torch.Tensor,
        cache: Cache,
        where: Varlen,
        scale: float,
        window: int | None,
    ) -> torch.Tensor: ...


def _by_token(cache: Cache) -> Cache:
    """Views `[block, token, Hkv, D]` of `[block, Hkv, token, D]`."""
    return cache[0].transpose(1, 2), cache[1].transpose(1, 2)


class FlashAttention3:
    """`flash_attn_with_kvcache` of FA3's `flash_attn_interface`, or of the copy in sgl-kernel."""

    name, graphs = "fa3", True

    def __init__(self, module: ModuleType) -> None:
        self._call = module.flash_attn_with_kvcache

    def __call__(self, q, cache, where, scale, window) -> torch.Tensor:
        keys, values = _by_token(cache)
        return self._call(
            q,
            keys,
            values,
            cache_seqlens=where.kv_len,
            page_table=where.table,
            cu_seqlens_q=where.q_start,
            max_seqlen_q=where.max_q,
            softmax_scale=scale,
            causal=True,
            window_size=(window - 1, 0) if window else (-1, -1),
        )


class FlashAttention2:
    """flash-attn 2: the call with splits for decode, the varlen one for prefill."""

    name, graphs = "fa2", True

    def __init__(self, module: ModuleType) -> None:
        self._decode, self._prefill = module.flash_attn_with_kvcache, module.flash_attn_varlen_func

    def __call__(self, q, cache, where, scale, window) -> torch.Tensor:
        keys, values = _by_token(cache)
        common: dict[str, Any] = {
            "softmax_scale": scale,
            "causal": True,
            "window_size": (window - 1, 0) if window else (-1, -1),
            "block_table": where.table,
        }
        if where.max_q == 1:
            lengths = where.kv_len
            return self._decode(q[:, None], keys, values, cache_seqlens=lengths, **common)[:, 0]
        k_start = torch.nn.functional.pad(where.kv_len.cumsum(0, dtype=torch.int32), (1, 0))
        bounds = where.q_start, k_start, where.max_q, where.max_kv
        return self._prefill(q, keys, values, *bounds, **common)


class FlashAttention4:
    """`flash_attn_varlen_func` of flash-attn-4 (`flash_attn.cute`)."""

    name, graphs = "fa4", True

    def __init__(self, module: ModuleType) -> None:
        self._call = module.flash_attn_varlen_func
        #: on sm90 it cannot split; elsewhere 0 lets it choose
        self._splits = 1 if torch.cuda.is_available() and _major() == 9 else 0

    def __call__(self, q, cache, where, scale, window) -> torch.Tensor:
        keys, values = _by_token(cache)
        result = self._call(
            q,
            keys,
            values,
            cu_seqlens_q=where.q_start,
            max_seqlen_q=where.max_q,
            max_seqlen_k=where.max_kv,
            seqused_k=where.kv_len,
            page_table=where.table,
            softmax_scale=scale,
            causal=True,
            window_size=(window - 1, 0) if window else (None, None),
            num_splits=self._splits if where.max_q == 1 else 1,
        )
        return result[0] if isinstance(result, tuple) else result


def _major() -> int:
    return torch.cuda.get_device_capability()[0]


class FlashInfer:
    """FlashInfer's paged prefill wrapper, for decode too. It plans a step on the host."""

    name, graphs = "flashinfer", False

    def __init__(self, module: ModuleType, device: torch.device) -> None:
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self._wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        self._planned: tuple[Varlen, int | None] | None = None

    def __call__(self, q, cache, where, scale, window) -> torch.Tensor:
        step = self._planned
        if step is None or step[0] is not where or step[1] != window:
            self._wrapper.plan(
                *_pages(where.host or where, cache[0].shape[2]),
                q.shape[1],
                cache[0].shape[1],
                q.shape[2],
                cache[0].shape[2],
                causal=True,
                sm_scale=scale,
                window_left=window - 1 if window else -1,
                q_data_type=q.dtype,
                kv_data_type=cache[0].dtype,
            )
            self._planned = where, window
        return self._wrapper.run(q, cache)


def _pages(where: Varlen, page: int) -> tuple[torch.Tensor, ...]:
    """Of a step on the host: q_start, the pages of all sequences in a row, tokens of the last."""
    counts = (where.kv_len + page - 1) // page
    inside = torch.arange(where.table.shape[1]) < counts[:, None]
    starts = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    return where.q_start, starts, where.table[inside], where.kv_len - (counts - 1) * page


def adapter(name: str, module: ModuleType, device: torch.device) -> Attention:
    """The library `name` whose module was imported."""
    if name == "flashinfer":
        return FlashInfer(module, device)
    kinds: dict[str, Callable[[ModuleType], Attention]]
    kinds = {"fa2": FlashAttention2, "fa3": FlashAttention3, "fa4": FlashAttention4}
    return kinds[name](module)
