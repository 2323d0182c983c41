"""Threads that compute on CPUs leave the cores to those that carry messages."""

from __future__ import annotations

import os

#: What is added to the niceness of a thread that computes on CPUs. Gateways, the router and a
#: worker's own messages need little of a core, but at once. Measured on two cores, at five times the
#: capacity (`diptych bench live --table overload --layouts 1P1D --model demo --seeds 1 --seconds 60`,
#: with `nstat` beside it): while all shared alike, the gateway between two busy workers got 0.45 of a
#: core, and `TcpExtListenOverflows` grew by 73,333, as the kernel turned connections away. With 5 it
#: did not grow.
COMPUTE_NICENESS = 5


def leave_cores_to_messages() -> None:
    """Lower the priority of the calling thread, and of those that it starts from now on.

    A thread calls this once, before it computes on CPUs. Where a GPU computes, the thread that drives
    it keeps its priority: if it comes late, the GPU is idle. So do ranks above 0 on CPUs, whose threads
    for KV transfers would inherit the lower one.

    Linux compares niceness within a session (where autogroup is on) and within a cgroup: it helps
    gateways that run in the same Ray node, and none in another pod. A thread that is put off while it
    holds Python's lock puts off the threads of its own process too.
    """
    os.nice(COMPUTE_NICENESS)  # Linux counts niceness for each thread.
