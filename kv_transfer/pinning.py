"""Whether this process may pin its KV pool, as RDMA needs.

A driver locks registered memory into RAM. Where the process may not lock so much, UCX leaves RDMA
out and moves KV over TCP without a word, or fails at the first transfer. A worker says it at its
start instead.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

#: Environment variable: `1` lets a worker start though it cannot pin its pool.
ALLOW_UNPINNED_VARIABLE = "DIPTYCH_ALLOW_UNPINNED"
RDMA_DEVICE_FOLDER = Path("/dev/infiniband")
PROCESS_STATUS = Path("/proc/self/status")
CAP_IPC_LOCK = 14  #: The number of the capability that lifts the limit.


class PinningRefused(Exception):
    """The KV pool cannot be pinned. The message says why, and what to do."""


def memlock() -> int | None:
    """Return the bytes that an RDMA driver may pin for this process; None: no limit."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def pinning_refusal(
    pool_bytes: int, *, has_rdma: bool, memlock_bytes: int | None, may_lock_all: bool
) -> str | None:
    """Return why a pool of this size cannot be pinned, or None if it can or need not be.

    `memlock_bytes` is the limit, None for no limit. `may_lock_all` is True where the capability
    IPC_LOCK is in force, which a user other than root does not get from Kubernetes.
    """
    if not has_rdma or may_lock_all or memlock_bytes is None or memlock_bytes >= pool_bytes:
        return None
    return (
        f"RDMA pins the KV pool of {pool_bytes >> 20} MiB, and this process may lock "
        f"{memlock_bytes >> 10} KiB: raise the memlock limit (LimitMEMLOCK=infinity of the "
        f"container runtime, or ulimit -l unlimited), or set {ALLOW_UNPINNED_VARIABLE}=1 to go on "
        "without RDMA"
    )


def check_pinning(pool_bytes: int) -> None:
    """Raise PinningRefused if this process cannot pin a pool of host memory of this size."""
    if os.environ.get(ALLOW_UNPINNED_VARIABLE) == "1":
        return
    has_rdma = RDMA_DEVICE_FOLDER.is_dir() and any(RDMA_DEVICE_FOLDER.iterdir())
    refusal = pinning_refusal(
        pool_bytes,
        has_rdma=has_rdma,
        memlock_bytes=memlock(),
        may_lock_all=capability_in_force(PROCESS_STATUS.read_text()),
    )
    if refusal is not None:
        raise PinningRefused(refusal)


def capability_in_force(process_status: str) -> bool:
    """Return whether the text of /proc/PID/status says that IPC_LOCK is effective."""
    for line in process_status.splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> CAP_IPC_LOCK & 1)
    return False
