"""The memory tier's bytes: one region, reserved at once, cut into slots of one block."""

from __future__ import annotations

import mmap
from array import array

import numpy as np

from .faults import Fault, checksum


class MemoryStore:
    """`slots` slots of `block_bytes` bytes. The region is reserved here and takes physical memory
    when a slot is first used. Raises OSError when it cannot be reserved."""

    def __init__(self, slots: int, block_bytes: int) -> None:
        self.slots, self.block_bytes = slots, block_bytes
        self._region = mmap.mmap(-1, slots * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._region.madvise(mmap.MADV_HUGEPAGE)
        self._blocks = np.frombuffer(self._region, np.uint8).reshape(slots, block_bytes)
        self._sums = array("Q", bytes(8 * slots))

    def view(self, slot: int) -> memoryview:
        """The bytes of a slot, uint8 [block_bytes], writable."""
        return self._blocks[slot].data

    def sum(self, slot: int) -> int:
        return self._sums[slot]

    def label(self, slot: int, total: int) -> None:
        """The slot's bytes have this checksum."""
        self._sums[slot] = total

    def put(self, slot: int, data: memoryview, seed: int) -> None:
        """Copies a block in. The checksum is that of `data`, so a torn copy is found by `get`."""
        self.label(slot, checksum(data, seed))
        np.copyto(self._blocks[slot], np.frombuffer(data, np.uint8))

    def get(self, slot: int, target: memoryview, seed: int) -> Fault | None:
        """Copies a block out and verifies what arrived in `target`."""
        np.copyto(np.frombuffer(target, np.uint8), self._blocks[slot])
        return None if checksum(target, seed) == self._sums[slot] else Fault.CHECKSUM
