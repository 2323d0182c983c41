"""The memory tier's bytes: one region, reserved at once, cut into slots of one block."""

from __future__ import annotations

import contextlib
import mmap
from array import array

import numpy as np

from .faults import TierFault, checksum


class MemoryStore:
    """`slots` slots of `block_bytes` bytes each, and the checksum of each slot's bytes.

    The region is reserved here, and takes physical memory when a slot is first used. Raises OSError
    when it cannot be reserved.
    """

    def __init__(self, slots: int, block_bytes: int) -> None:
        self.slots = slots
        self.block_bytes = block_bytes
        self._region = mmap.mmap(-1, slots * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages refuses the advice
                self._region.madvise(mmap.MADV_HUGEPAGE)
        self._blocks = np.frombuffer(self._region, np.uint8).reshape(slots, block_bytes)
        self._checksums = array("Q", bytes(8 * slots))  #: by slot

    def view(self, slot: int) -> memoryview:
        """Returns the bytes of a slot, uint8 [block_bytes], writable."""
        return self._blocks[slot].data

    def checksum_of(self, slot: int) -> int:
        """Returns the checksum that the slot's bytes should have."""
        return self._checksums[slot]

    def set_checksum(self, slot: int, block_checksum: int) -> None:
        """Sets the checksum of a slot whose bytes were written through `view`."""
        self._checksums[slot] = block_checksum

    def put(self, slot: int, data: memoryview, seed: int) -> None:
        """Copies a block in. The checksum is that of `data`, so `get` finds a torn copy.

        `seed` is `faults.checksum_seed` of the model and the block's content hash: `get` with
        another seed reports a fault.
        """
        self.set_checksum(slot, checksum(data, seed))
        np.copyto(self._blocks[slot], np.frombuffer(data, np.uint8))

    def get(self, slot: int, target: memoryview, seed: int) -> TierFault | None:
        """Copies a block out, and verifies what arrived in `target`.

        Returns None if that is what was stored with this seed, else TierFault.CHECKSUM.
        """
        np.copyto(np.frombuffer(target, np.uint8), self._blocks[slot])
        if checksum(target, seed) != self._checksums[slot]:
            return TierFault.CHECKSUM
        return None
