"""Memory in huge pages, for what is streamed from DRAM.

With pages of 4 KiB, address translation limits a core to about two thirds of the bandwidth.
"""

from __future__ import annotations

import contextlib
import mmap
import os

import torch

from .errors import OutOfMemory

#: Bytes of a huge page on x86.
HUGE_PAGE = 2 << 20

#: Bytes that an arena allocates at once, at least, so that many small tensors share a chunk's huge
#: pages. A tensor that does not fit into a chunk's rest begins a new one, and the rest is unused.
ARENA_CHUNK = 64 << 20

#: Tensors in an arena begin at multiples of this many bytes: a small page, so that each tensor also
#: begins at a cache line.
ALIGNMENT = 4096


def allocate(size: int, purpose: str) -> tuple[mmap.mmap, int]:
    """Return a private mapping, and the offset in it at which `size` usable bytes begin.

    The offset is the border of a huge page. Raises OutOfMemory, which names the `purpose`.
    """
    try:
        # one page more, since the kernel need not place the mapping at a huge page's border
        length = _round_up(size, HUGE_PAGE) + HUGE_PAGE
        memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise _does_not_fit(size, purpose, error) from None
    _advise_huge_pages(memory)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    return memory, -address % HUGE_PAGE


def allocate_shared(size: int, purpose: str) -> tuple[mmap.mmap, int]:
    """Return a mapping of `size` bytes of a file in memory, and the file's descriptor.

    Another process that is handed the descriptor can map the same memory. The caller closes it.
    The mapping is in huge pages only where `/sys/kernel/mm/transparent_hugepage/shmem_enabled` says
    `advise` or more. Raises OutOfMemory, which names the `purpose`, and AttributeError on systems
    without such files.
    """
    file = os.memfd_create("diptych-kv", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, size)
        memory = mmap.mmap(file, size)
    except (OSError, ValueError) as error:
        os.close(file)
        raise _does_not_fit(size, purpose, error) from None
    _advise_huge_pages(memory)
    return memory, file


class HugePageArena:
    """Places tensors one after the other in huge pages. The tensors keep their memory alive."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)  #: The end of the last chunk.

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of `tensor` in huge pages. Raises OutOfMemory."""
        size = tensor.numel() * tensor.element_size()
        padded_size = _round_up(size, ALIGNMENT)
        if len(self._free) < padded_size:
            chunk = max(ARENA_CHUNK, _round_up(padded_size, HUGE_PAGE))
            memory, start = allocate(chunk, "a part of the weights")
            self._free = torch.frombuffer(memory, dtype=torch.uint8)[start : start + chunk]
        place = self._free[:size]
        self._free = self._free[padded_size:]
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _round_up(size: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit


def _advise_huge_pages(memory: mmap.mmap) -> None:
    """Ask Linux for huge pages; other systems, and kernels without huge pages, take no advice."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)


def _does_not_fit(size: int, purpose: str, error: Exception) -> OutOfMemory:
    return OutOfMemory(f"{purpose} of {size >> 20} MiB does not fit: {error}")
