"""Keeps garbage collections and first touches of memory out of a router's handling of events.

A router's state is large, makes no cycles, and grows by little objects. Python's cyclic collector
walks through that state, finds nothing, and takes longer than a decision. A process that runs a
router calls `disable()` once and `sweep()` after each answer. Collections then come between events
instead of amid one, and memory is there before it is needed: on a virtual machine, the first touch
of a page costs as much time as a whole decision.
"""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

# Thresholds of the generations, as of `gc.set_threshold`. All are above those of CPython 3.11 (700,
# 10, 10), the first one by far, as most collections find nothing.
YOUNG = 20_000  #: new container objects after which the youngest generation is collected
MIDDLE = 20  #: collections of the youngest generation before one of the middle
OLD = 100  #: collections of the middle generation before one of everything
RESERVE_BYTES = 64 << 20  #: touched ahead for little objects; a fourth of it for larger ones
LITTLE_BYTES = 512  #: the largest object of Python's own allocator
ARENA_BYTES = 1 << 20  #: what that allocator takes at a time
BYTES_HEADER = 33  #: bytes of a `bytes` object beside its content: 32 before it, a zero after it
LARGE_BYTES = 64 << 10  #: size of the objects by which malloc's own memory is touched
M_TRIM_THRESHOLD = -1  #: a parameter of glibc's mallopt, as the next
M_MMAP_THRESHOLD = -3
TRIM_BYTES = 1 << 30  #: free memory at the heap's end, above which glibc gives it to the kernel
MMAP_BYTES = 32 << 20  #: size of an allocation above which it is mapped, and unmapped when freed

_kept_objects: list[bytes] = []  #: an object in nearly each arena of the reserve, which keeps it


def disable() -> None:
    """Switch off Python's own collections, and touch the reserve of memory."""
    gc.disable()
    with suppress(AttributeError, OSError):  # not glibc: its memory may go back and forth
        libc = ctypes.CDLL(None)
        libc.mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)  # what was freed stays
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)  # and large objects take what was freed
    _reserve_memory()


def sweep() -> None:
    """Collect what Python, by the thresholds above, would have collected by now."""
    # Python counts on while its own collections are off.
    young, middle, old = gc.get_count()
    if young <= YOUNG:
        return
    if middle <= MIDDLE:
        gc.collect(0)
    elif old <= OLD:
        gc.collect(1)
    else:
        gc.collect(2)
        # The reserve may be used up; full collections are rare enough to touch it after each.
        _reserve_memory()


def _reserve_memory() -> None:
    """Touch memory and give it back to the allocators, not to the kernel."""
    content_bytes = LITTLE_BYTES - BYTES_HEADER
    # Little objects are made one behind the other, and Python gives an arena to the kernel only
    # when nothing in it is alive, so one of so many keeps its arena. Headers leave an arena room
    # for a few percent fewer objects than the stride, so a few percent of the arenas have none.
    little = [bytes(content_bytes) for _ in range(RESERVE_BYTES // LITTLE_BYTES)]
    _kept_objects[:] = little[:: ARENA_BYTES // LITTLE_BYTES]
    large = [bytearray(LARGE_BYTES) for _ in range(RESERVE_BYTES // 4 // LARGE_BYTES)]
    del little, large
