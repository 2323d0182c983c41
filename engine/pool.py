"""The memory of the KV pool: one flat allocation, registered once with the transport."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence

import torch

from ..kv_transfer import KVLayout
from .huge import allocate, allocate_shared


class KVPool:
    """`blocks` zeroed KV blocks in one anonymous mapping (huge pages where the kernel has them).

    With `shared`, other processes can map it by its file `fd`: what the `shm` transport needs.
    `layer(i)` gives K and V of layer i as strided views `[block, head, token, dim]`.
    Unused slots may hold anything: attention reads nothing behind a sequence's last row.
    """

    memory, device = "DRAM", 0
    fd: int | None = None
    #: checksums of (unit, runs, seed) made where the bytes are; None: from `view`, by the transfer
    digest: Callable[[int, Sequence[tuple[int, int]], int], int] | None = None
    digest_kind = b""  #: what of this peers compare: two kinds of checksums do not match

    def __init__(
        self, layout: KVLayout, blocks: int, dtype: torch.dtype, shared: bool = False
    ) -> None:
        size, start = blocks * layout.block_bytes, 0
        if shared:
            self._map, self.fd = allocate_shared(size, "a KV pool")
            weakref.finalize(self, os.close, self.fd)
        else:
            self._map, start = allocate(size, "a KV pool")
        memory = torch.frombuffer(self._map, dtype=torch.uint8)[start : start + size]
        memory.zero_()  # touches every page now: too little memory shows here, not under load
        self.view = memoryview(self._map)[start : start + size]
        self._place(memory, layout, blocks, dtype)

    def _place(
        self, memory: torch.Tensor, layout: KVLayout, blocks: int, dtype: torch.dtype
    ) -> None:
        """The pool in `memory`, uint8 [bytes]."""
        self.layout, self.blocks, self.block_bytes = layout, blocks, layout.block_bytes
        self.size, self.base = len(memory), memory.data_ptr()
        self._flat = memory.view(dtype)
        self._layers = [(self._part(i, 0), self._part(i, 1)) for i in range(layout.layers)]

    def _part(self, layer: int, part: int) -> torch.Tensor:
        lay = self.layout
        shape = (self.blocks, lay.heads, lay.block_tokens, lay.head_dim)
        start = self._flat.storage_offset() + lay.offset(
            layer, part
        )  # of the mapping, not of _flat
        return self._flat.as_strided(shape, lay.strides(), start)

    def copy(self, source: int, target: int) -> None:
        """All layers of one block."""
        size = self.layout.block_items
        self._flat[target * size : (target + 1) * size] = self._flat[
            source * size : (source + 1) * size
        ]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._layers[index]
