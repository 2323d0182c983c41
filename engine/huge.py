"""Memory in huge pages, for what is streamed from DRAM: with 4 KiB pages, address translation
limits a core to about two thirds of the bandwidth."""

from __future__ import annotations

import mmap
import os

import torch

from .errors import OutOfMemory

PAGE = 2 << 20
CHUNK = 64 << 20
LINE = 4096  #: alignment of what is placed


def allocate(size: int, what: str) -> tuple[mmap.mmap, int]:
    """A private mapping that holds `size` bytes from the returned offset on, a huge page's start.

    Raises OutOfMemory, naming `what`.
    """
    try:
        whole = -(-size // PAGE) * PAGE + PAGE
        memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise OutOfMemory(f"{what} of {size >> 20} MiB does not fit: {error}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % PAGE


def allocate_shared(size: int, what: str) -> tuple[mmap.mmap, int]:
    """A mapping of `size` bytes of a file in memory, and the file, for other processes to map.

    In huge pages only where `/sys/kernel/mm/transparent_hugepage/shmem_enabled` says `advise` or
    more. Raises OutOfMemory, naming `what`; AttributeError where there are no such files.
    """
    file = os.memfd_create("diptych-kv", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, size)
        memory = mmap.mmap(file, size)
    except (OSError, ValueError) as error:
        os.close(file)
        raise OutOfMemory(f"{what} of {size >> 20} MiB does not fit: {error}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, file


class Arena:
    """Tensors one after the other in huge pages; they keep their memory alive."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` in huge pages, contiguous."""
        size = tensor.numel() * tensor.element_size()
        whole = -(-size // LINE) * LINE
        if len(self._rest) < whole:
            room = max(CHUNK, -(-whole // PAGE) * PAGE)
            memory, start = allocate(room, "a part of the weights")
            self._rest = torch.frombuffer(memory, dtype=torch.uint8)[start : start + room]
        place, self._rest = self._rest[:size], self._rest[whole:]
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
