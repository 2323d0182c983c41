"""Room for file descriptors, made before a process has clients.

Linux gives a process a table for 64 descriptors, and a larger one when a file finds no room in it: at
64, 256, 512 and so on. If the process has threads, the call that opens that file (`accept`, `connect`,
`open`) waits until every core has let go of the old table, by `synchronize_rcu` in the kernel's
`expand_fdtable` (fs/file.c): 3 to 17 ms on a virtual machine. So one of a gateway's first clients
waited longer for its first token than for all that the cluster did about it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource

#: A table for so many descriptors takes 64 KiB, and is enough for the most streams of a gateway.
DESCRIPTORS = 8_192


def reserve_descriptors(count: int = DESCRIPTORS) -> None:
    """Make the process' table of files large enough for `count` descriptors, or as many as it may open.

    The table never shrinks. Call this once, where nobody waits yet.
    """
    soft_limit, _hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit != resource.RLIM_INFINITY:
        count = min(count, soft_limit)
    with contextlib.suppress(OSError):  # without room, files are opened as before: some wait
        reading, writing = os.pipe()
        try:
            os.close(fcntl.fcntl(reading, fcntl.F_DUPFD_CLOEXEC, count - 1))
        finally:
            os.close(reading)
            os.close(writing)
