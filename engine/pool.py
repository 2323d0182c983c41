"""The memory of the KV pool: one flat allocation, registered once with the transport."""

from __future__ import annotations

import os
import weakref

import torch

from ..kv_transfer import KVLayout
from ..kv_transfer.digests import Digester
from .huge import allocate, allocate_shared


class KVPool:
    """`blocks` zeroed KV blocks in one mapping (huge pages where the kernel has them).

    The mapping is private. With `shared` it is one of a file in memory, `fd`, by which other
    processes can map the same bytes: the `shm` transport needs that. Raises OutOfMemory where the
    mapping does not fit. Once blocks were used, slots behind a sequence's last row may hold anything: attention gives
    them no weight.

    `layout` says where in a block what is, `dtype` what a number is. It is what a transport
    registers and reads (`kv_transfer.transport.Pool`).
    """

    memory = "DRAM"  #: where the bytes are: DRAM | VRAM
    device = 0  #: number of the GPU; 0 for DRAM
    fd: int | None = None  #: file of the mapping if it is shared; closed with the pool
    #: makes checksums where the bytes are; None: the transfer makes them from `view`
    digester: Digester | None = None
    #: names the kind of checksums, empty for xxh3; peers compare it, as those of two kinds do not
    #: match
    digest_kind = b""

    def __init__(
        self, layout: KVLayout, blocks: int, dtype: torch.dtype, shared: bool = False
    ) -> None:
        size = blocks * layout.block_bytes
        start = 0
        if shared:
            self._map, self.fd = allocate_shared(size, "a KV pool")
            weakref.finalize(self, os.close, self.fd)
        else:
            self._map, start = allocate(size, "a KV pool")
        memory = torch.frombuffer(self._map, dtype=torch.uint8)[start : start + size]
        memory.zero_()  # touches every page now: too little memory shows here, not under load
        self.view = memoryview(self._map)[start : start + size]  #: all bytes, block by block
        self._place(memory, layout, blocks, dtype)

    def _place(
        self, memory: torch.Tensor, layout: KVLayout, blocks: int, dtype: torch.dtype
    ) -> None:
        """Lays the pool out in `memory`, uint8 [bytes]."""
        self.layout = layout
        self.blocks = blocks
        self.block_bytes = layout.block_bytes
        self.size = len(memory)  #: bytes
        self.base = memory.data_ptr()  #: address of the first byte
        self._flat = memory.view(dtype)  #: all numbers of the pool in a row
        self._layers = [
            (self._layer_part(index, 0), self._layer_part(index, 1))
            for index in range(layout.layers)
        ]

    def _layer_part(self, layer: int, part: int) -> torch.Tensor:
        """Returns K (part 0) or V (part 1) of a layer, `[block, head, token, dim]`."""
        layout = self.layout
        shape = (self.blocks, layout.heads, layout.block_tokens, layout.head_dim)
        # as_strided counts from the beginning of the mapping, not from that of `_flat`
        start = self._flat.storage_offset() + layout.offset(layer, part)
        return self._flat.as_strided(shape, layout.strides(), start)

    def copy_block(self, source: int, target: int) -> None:
        """Copies all layers of one block."""
        blocks = self._flat.view(self.blocks, self.layout.block_items)
        blocks[target] = blocks[source]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V of a layer, as strided views `[block, head, token, dim]`."""
        return self._layers[index]
