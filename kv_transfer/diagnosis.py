"""What a worker sees of its host: everything on which the way of its KV depends, and nothing else.

Read from /proc and /sys, where they are; what cannot be known is None, or empty. Linux only: on
other systems most of it is empty. No library is loaded for it and no program run.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import socket
import struct
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import msgspec

from . import speed
from .transports.process import here

COPY_BYTES = 64 << 20  #: moved to learn memcpy's speed; fewer stay in caches and look faster
PACKAGES = ("diptych", "torch", "nixl")
_ACKED_RECEIVED = struct.Struct("=QQ")  #: of tcp_info in linux/tcp.h, since Linux 4.1
_ACKED_AT = 120


class Port(msgspec.Struct, frozen=True):
    """One port of an RDMA device (its link may be Ethernet), or one network interface."""

    name: str
    gbit_s: float | None  #: as the driver says; virtual interfaces say nothing
    active: bool = True


class Environment(msgspec.Struct, frozen=True):
    """One worker's host, as it sees it itself."""

    worker: str
    host: str
    boot: str  #: id of this boot of the kernel: equal for all containers of one host
    process: str  #: identity for peers (`transports.process.here`); empty: nobody watches it
    pid: int
    transport: str  #: what its transfer service opened; empty outside a cluster
    pool_bytes: int  #: registered memory of one rank
    versions: dict[str, str]
    kernel: str
    memlock_bytes: int | None  #: what may be pinned; None: no limit
    ptrace_scope: int | None  #: Yama's; None: this kernel has no Yama
    cma: dict[str, bool]  #: pid -> may this process write to its memory
    rdma: list[Port]
    rdma_files: list[str]  #: in /dev/infiniband: without them the ports cannot be used
    nics: list[Port]
    ucx_tls: str  #: UCX_TLS; empty: UCX chooses
    huge_pages: str  #: always | madvise | never; empty: unknown
    memcpy_gib_s: float  #: one thread, in huge pages where they are to be had
    checksum_gib_s: float  #: of the checksum that every block gets, one core
    clock_s: float = 0.0  #: wall clock when it was asked
    took_s: float = 0.0  #: from then to the answer


def environment(
    worker: str, transport: str = "", pool_bytes: int = 0, pids: Iterable[int] = ()
) -> Environment:
    """Looks at this host. Takes half a second, and 128 MiB meanwhile: a memcpy is measured."""
    clock, began = time.time(), time.perf_counter()
    seen = Environment(
        worker=worker,
        host=socket.gethostname(),
        boot=_read("/proc/sys/kernel/random/boot_id"),
        process=here(),
        pid=os.getpid(),
        transport=transport,
        pool_bytes=pool_bytes,
        versions=versions(),
        kernel=platform.release(),
        memlock_bytes=memlock(),
        ptrace_scope=_number("/proc/sys/kernel/yama/ptrace_scope"),
        cma={str(pid): may_reach(pid) for pid in pids},
        rdma=rdma_ports(Path("/sys/class/infiniband")),
        rdma_files=_names("/dev/infiniband"),
        nics=network_interfaces(Path("/sys/class/net")),
        ucx_tls=os.environ.get("UCX_TLS", ""),
        huge_pages=_chosen(_read("/sys/kernel/mm/transparent_hugepage/enabled")),
        memcpy_gib_s=round(speed.memcpy(COPY_BYTES), 2),
        checksum_gib_s=round(speed.checksum(COPY_BYTES), 2),
    )
    took = time.perf_counter() - began
    return msgspec.structs.replace(seen, clock_s=clock, took_s=took)


def versions() -> dict[str, str]:
    """Of what must agree between workers; `-` for what is not installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "-"
    return found


def memlock() -> int | None:
    """Bytes that an RDMA driver may pin for this process; None: no limit."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def may_reach(pid: int) -> bool:
    """Whether the kernel lets this process at the memory of `pid`: what CMA needs.

    process_vm_readv(2) of one byte at address 0. The permission is checked before the address.
    """

    class Vector(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        return False
    byte = ctypes.create_string_buffer(1)
    mine, other = Vector(ctypes.addressof(byte), 1), Vector(None, 1)
    call = libc.process_vm_readv
    call.restype = ctypes.c_ssize_t
    unsigned = ctypes.c_ulong
    done = call(pid, ctypes.byref(mine), unsigned(1), ctypes.byref(other), unsigned(1), unsigned(0))
    return bool(done == 1 or ctypes.get_errno() == errno.EFAULT)


def tcp_received() -> int | None:
    """Bytes that came in over the TCP connections that this process has open; None: unknown.

    The kernel counts them for each connection (TCP_INFO): what a transport that says nothing of
    its ways did can be seen from outside.
    """
    if not hasattr(socket, "TCP_INFO"):
        return None
    total = 0
    for name in _names("/proc/self/fd"):
        with contextlib.suppress(OSError, struct.error):  # closed meanwhile, or no TCP
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += _ACKED_RECEIVED.unpack_from(info, _ACKED_AT)[1]
    return total


def rdma_ports(folder: Path) -> list[Port]:
    """Ports of all RDMA devices. `rate` reads like "400 Gb/sec (4X NDR)", `state` "4: ACTIVE"."""
    return [
        Port(
            f"{port.parent.parent.name}:{port.name}",
            _gbit(_read(port / "rate").partition(" ")[0], 1.0),
            "ACTIVE" in _read(port / "state"),
        )
        for port in sorted(folder.glob("*/ports/*"))
    ]


def network_interfaces(folder: Path) -> list[Port]:
    """All but loopback. `speed` is in Mbit/s, -1 where nobody knows."""
    return [
        Port(one.name, _gbit(_read(one / "speed"), 1e-3), _read(one / "operstate") == "up")
        for one in sorted(folder.glob("*"))
        if one.name != "lo"
    ]


def _gbit(text: str, scale: float) -> float | None:
    try:
        value = float(text) * scale
    except ValueError:
        return None
    return value if value > 0 else None


def _chosen(text: str) -> str:
    """The one in brackets: "always [madvise] never"."""
    return text.partition("[")[2].partition("]")[0]


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _number(path: str) -> int | None:
    text = _read(path)
    return int(text) if text.isdigit() else None


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
