"""Threads that compute on CPUs leave the cores to those that carry messages."""

from __future__ import annotations

import os

#: What is added to the niceness of a thread that computes on CPUs. Gateways, the router and a
#: worker's own messages need little of a core, but at once. While all shared alike, a gateway that had
#: two cores together with two busy workers was late to accept: 100,000 times the kernel turned a
#: connection away, and of those who had a first token within four seconds 0.6 had it within two. With
#: 5 it turned none away, and 0.95 had it (`diptych bench live --table overload`, demo model, 1P1D,
#: five times the capacity).
COMPUTE_NICENESS = 5


def leave_cores_to_messages() -> None:
    """Lower the priority of the calling thread, and of those that it starts from now on.

    To be called by a thread before it computes on CPUs. Where a GPU computes, the thread that drives
    it keeps its priority: if it comes late, the GPU is idle.
    """
    os.nice(COMPUTE_NICENESS)  # Linux counts niceness for each thread.
