"""Whether this process may pin its KV pool, as RDMA needs.

A driver locks the memory that is registered with it into RAM. Where the process may not lock as
much as its pool, UCX moves KV over TCP without a word, or fails at the first transfer. A worker
refuses to start there instead, and says why.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from .ucx import RDMA_TRANSPORTS, ucx_permits, ucx_permits_rdma_devices

#: Environment variable: `1` lets a worker start though it cannot pin its pool.
ALLOW_UNPINNED_VARIABLE = "DIPTYCH_ALLOW_UNPINNED"
#: The files by which a process uses RDMA: one for each device, and `rdma_cm` beside them.
RDMA_DEVICE_FOLDER = Path("/dev/infiniband")
RDMA_DEVICE_FILES = "uverbs*"  #: The devices' own files in that folder.
#: Folders with an entry for each RDMA device, and for each network interface.
RDMA_NAME_FOLDER = Path("/sys/class/infiniband")
INTERFACE_FOLDER = Path("/sys/class/net")
PROCESS_STATUS = Path("/proc/self/status")
CAP_IPC_LOCK = 14  #: The number of the capability that lifts the limit.


class PinningRefused(Exception):
    """The KV pool cannot be pinned. The message says why, and what to do."""


def memlock() -> int | None:
    """Return the bytes that an RDMA driver may pin for this process; None: no limit.

    There is none where the capability IPC_LOCK is in force, which a user other than root does not
    get from Kubernetes.
    """
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if soft == resource.RLIM_INFINITY or capability_in_force(_process_status()):
        return None
    return soft


def _process_status() -> str:
    """Return what the kernel says of this process; empty where it has no /proc."""
    try:
        return PROCESS_STATUS.read_text()
    except OSError:
        return ""


def capability_in_force(process_status: str) -> bool:
    """Return whether the text of /proc/PID/status says that IPC_LOCK is effective."""
    for line in process_status.splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> CAP_IPC_LOCK & 1)
    return False


def may_use_rdma() -> bool:
    """Return whether this process has RDMA devices that UCX's settings leave UCX to use."""
    if not any(RDMA_DEVICE_FOLDER.glob(RDMA_DEVICE_FILES)):
        return False
    return ucx_permits(os.environ.get("UCX_TLS", ""), RDMA_TRANSPORTS) and ucx_permits_rdma_devices(
        os.environ.get("UCX_NET_DEVICES", ""),
        rdma_devices={device.name for device in RDMA_NAME_FOLDER.glob("*")},
        interfaces={interface.name for interface in INTERFACE_FOLDER.glob("*")},
    )


def pinning_refusal(pool_bytes: int, *, has_rdma: bool, memlock_bytes: int | None) -> str | None:
    """Return why a pool of this size cannot be pinned, or None if it can or need not be.

    `memlock_bytes` is the limit, None for no limit.
    """
    if not has_rdma or memlock_bytes is None or memlock_bytes >= pool_bytes:
        return None
    return (
        f"RDMA pins the KV pool of {pool_bytes >> 20} MiB, and this process may lock "
        f"{memlock_bytes >> 10} KiB: raise the memlock limit (LimitMEMLOCK=infinity of the "
        f"container runtime, or ulimit -l unlimited), or set {ALLOW_UNPINNED_VARIABLE}=1 to go on "
        "without RDMA"
    )


def check_pinning(pool_bytes: int) -> None:
    """Raise PinningRefused if UCX may use RDMA and cannot pin so many bytes of host memory."""
    if os.environ.get(ALLOW_UNPINNED_VARIABLE) == "1":
        return
    refusal = pinning_refusal(pool_bytes, has_rdma=may_use_rdma(), memlock_bytes=memlock())
    if refusal is not None:
        raise PinningRefused(refusal)
