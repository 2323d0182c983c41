"""No pause amid an event: a router's state is large, makes no cycles, and grows by little objects.

`off()` once in a process that runs a router, `sweep()` after each answer. Collections come between
events instead of amid one, and memory is there before it is needed: the first touch of a page
costs an event on a virtual machine as much as all that it decides.
"""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

YOUNG, MIDDLE, OLD = 20_000, 20, 100  #: thresholds, as of `gc.set_threshold`
RESERVE = 64 << 20  #: bytes, for little objects, and a fourth of it for others
LITTLE, ARENA = 512, 1 << 20  #: Python's own allocator: its largest size, what it takes at a time
LARGE = 64 << 10
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  #: of glibc's mallopt

_kept: list[bytes] = []  #: an object in each arena, which keeps it


def off() -> None:
    gc.disable()
    with suppress(AttributeError, OSError):  # not glibc: its memory may go back and forth
        libc = ctypes.CDLL(None)
        libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)  # what was freed stays
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
    _reserve()


def sweep() -> None:
    """Collects what Python itself would have, by now."""
    young, middle, old = gc.get_count()
    if young > YOUNG:
        oldest = middle > MIDDLE and old > OLD
        gc.collect(2 if oldest else 1 if middle > MIDDLE else 0)
        if oldest:
            _reserve()


def _reserve() -> None:
    """Touches memory and gives it back to the allocators, not to the kernel."""
    little = [bytes(LITTLE - 33) for _ in range(RESERVE // LITTLE)]
    _kept[:] = little[:: ARENA // LITTLE]
    large = [bytearray(LARGE) for _ in range(RESERVE // 4 // LARGE)]
    del little, large
