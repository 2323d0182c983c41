"""No pause amid an event: a router's state is large, makes no cycles, and grows by little objects.

A process that runs a router calls `disable()` once and `sweep()` after each answer. Collections
then come between events instead of amid one, and memory is there before it is needed: on a virtual
machine, the first touch of a page costs an event as much as all that it decides.
"""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

#: thresholds of the generations, as of `gc.set_threshold`
YOUNG = 20_000
MIDDLE = 20
OLD = 100
RESERVE_BYTES = 64 << 20  #: for little objects; a fourth of it for others
LITTLE_BYTES = 512  #: the largest object of Python's own allocator
ARENA_BYTES = 1 << 20  #: what that allocator takes at a time
BYTES_HEADER = 33  #: bytes of a `bytes` object before its content
LARGE_BYTES = 64 << 10
M_TRIM_THRESHOLD = -1  #: parameters of glibc's mallopt
M_MMAP_THRESHOLD = -3
TRIM_BYTES = 1 << 30
MMAP_BYTES = 32 << 20

_kept_objects: list[bytes] = []  #: an object in each arena, which keeps the arena


def disable() -> None:
    """Switch off Python's own collections, and take memory ahead."""
    gc.disable()
    with suppress(AttributeError, OSError):  # not glibc: its memory may go back and forth
        libc = ctypes.CDLL(None)
        libc.mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)  # what was freed stays
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
    _reserve_memory()


def sweep() -> None:
    """Collect what Python itself would have collected by now."""
    young, middle, old = gc.get_count()
    if young <= YOUNG:
        return
    if middle <= MIDDLE:
        gc.collect(0)
    elif old <= OLD:
        gc.collect(1)
    else:
        gc.collect(2)
        _reserve_memory()


def _reserve_memory() -> None:
    """Touch memory and give it back to the allocators, not to the kernel."""
    content_bytes = LITTLE_BYTES - BYTES_HEADER
    little = [bytes(content_bytes) for _ in range(RESERVE_BYTES // LITTLE_BYTES)]
    _kept_objects[:] = little[:: ARENA_BYTES // LITTLE_BYTES]
    large = [bytearray(LARGE_BYTES) for _ in range(RESERVE_BYTES // 4 // LARGE_BYTES)]
    del little, large
