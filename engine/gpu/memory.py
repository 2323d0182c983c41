"""The KV pool in a GPU's memory: one allocation for the life of the engine, registered once."""

from __future__ import annotations

import torch

from ...kv_transfer import KVLayout
from ...kv_transfer.vram import DIGEST
from ..errors import OutOfMemory
from ..pool import KVPool


class DevicePool(KVPool):
    """`pool.KVPool` on a GPU. Its `view` is empty: transports that read host memory cannot use it.

    Those are `tcp` and `shm`; `nixl` reads the device's memory. The constructor raises OutOfMemory.
    """

    memory = "VRAM"
    digest_kind = DIGEST

    def __init__(
        self, layout: KVLayout, blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate `blocks` blocks of `layout` on `device`, filled with zeros of `dtype`."""
        self.device = device.index or 0
        size = blocks * layout.block_bytes
        try:
            memory = torch.zeros(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"a KV pool of {size >> 20} MiB does not fit: {error}") from None
        self.view = memoryview(b"")
        self._place(memory, layout, blocks, dtype)
        from .digest import DeviceDigester  # Triton's, which the choice of a backend does not need

        self.digester = DeviceDigester(memory)
