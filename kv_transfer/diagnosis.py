"""What a worker sees of its host: everything that decides how its KV travels, and nothing else.

It is read from /proc and /sys, where they are; what cannot be known is None, or empty. Linux only:
on other systems most of it is empty. No library is loaded for it and no program is run.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import socket
import struct
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import msgspec

from . import speed
from .pinning import memlock
from .transports.process import own_process_identity

COPY_BYTES = 64 << 20  #: moved to learn memcpy's speed; fewer stay in caches and look faster
PACKAGES = ("diptych", "torch", "nixl")  #: whose versions peers should have alike
#: tcpi_bytes_acked and tcpi_bytes_received of tcp_info in linux/tcp.h, since Linux 4.1.
_TCP_INFO_BYTES = struct.Struct("=QQ")
_TCP_INFO_BYTES_OFFSET = 120
_TCP_INFO_SIZE = 256  #: room for later kernels' larger tcp_info
_UNKNOWN_VERSION = "-"


class NetworkPort(msgspec.Struct, frozen=True):
    """One port of an RDMA device (its link may be Ethernet), or one network interface."""

    name: str  #: `device:port` of RDMA, else the interface's
    gbit_s: float | None  #: as the driver says; virtual interfaces say nothing
    active: bool = True


class HostEnvironment(msgspec.Struct, frozen=True):
    """What a worker sees of its own host."""

    worker: str  #: its id, as the caller names it
    host: str
    boot: str  #: id of this boot of the kernel: equal for all containers of one host
    #: Identity of the process (`transports.process.own_process_identity`), by which peers on the
    #: host see whether it is gone; empty where the system gives none.
    process: str
    pid: int
    transport: str  #: what its transfer service opened; empty outside a cluster
    pool_bytes: int  #: registered memory of one rank
    versions: dict[str, str]  #: of Python and of `PACKAGES`; "-": not installed
    kernel: str  #: its release, as `uname -r` says it
    memlock_bytes: int | None  #: what may be pinned; None: no limit
    ptrace_scope: int | None  #: Yama's; None: this kernel has no Yama
    #: pid -> may this process write to its memory (cross-memory attach, which UCX uses on one host)
    cma: dict[str, bool]
    rdma: list[NetworkPort]
    rdma_files: list[str]  #: in /dev/infiniband: without them the ports cannot be used
    nics: list[NetworkPort]
    ucx_tls: str  #: UCX_TLS; empty: UCX chooses
    huge_pages: str  #: always | madvise | never; empty: unknown
    memcpy_gib_s: float  #: one thread, in huge pages where they are to be had
    checksum_gib_s: float  #: of the checksum that every block gets, one core
    clock_s: float = 0.0  #: wall clock when it was asked
    took_s: float = 0.0  #: from then to the answer
    pool_memory: str = "DRAM"  #: where the pool is: DRAM, or VRAM in a GPU


def observe_host(
    worker: str,
    transport: str = "",
    pool_bytes: int = 0,
    pids: Iterable[int] = (),
    *,
    pool_memory: str = "DRAM",
) -> HostEnvironment:
    """Looks at this host. Takes half a second, and 128 MiB meanwhile: a memcpy is measured.

    `transport`, `pool_bytes` and `pool_memory` are those of the worker; `pids` are processes of
    this host to try cross-memory attach (CMA) on. Nothing is raised for what the host does not
    tell.
    """
    clock_s = time.time()
    began = time.perf_counter()
    environment = HostEnvironment(
        worker=worker,
        host=socket.gethostname(),
        boot=_read("/proc/sys/kernel/random/boot_id"),
        process=own_process_identity(),
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
        huge_pages=_bracketed(_read("/sys/kernel/mm/transparent_hugepage/enabled")),
        memcpy_gib_s=round(speed.memcpy(COPY_BYTES), 2),
        checksum_gib_s=round(speed.checksum(COPY_BYTES), 2),
        pool_memory=pool_memory,
    )
    took_s = time.perf_counter() - began
    return msgspec.structs.replace(environment, clock_s=clock_s, took_s=took_s)


def versions() -> dict[str, str]:
    """Versions of what must agree between workers; `-` for what is not installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = _UNKNOWN_VERSION
    return found


def may_reach(pid: int) -> bool:
    """Whether the kernel lets this process reach the memory of process `pid`, as CMA needs.

    This is tried by process_vm_readv(2) of one byte at address 0: the permission is checked before
    the address.
    """

    class IoVector(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        return False
    read = libc.process_vm_readv
    read.restype = ctypes.c_ssize_t
    vectors = ctypes.POINTER(IoVector)
    count = ctypes.c_ulong
    read.argtypes = (ctypes.c_int, vectors, count, vectors, count, ctypes.c_ulong)
    byte = ctypes.create_string_buffer(1)
    local = IoVector(ctypes.addressof(byte), 1)
    remote = IoVector(None, 1)
    read_bytes = read(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    return bool(read_bytes == 1 or ctypes.get_errno() == errno.EFAULT)


def tcp_received() -> int | None:
    """Returns the bytes that came in over this process's open TCP connections; None: unknown.

    The kernel counts them for each connection (TCP_INFO). So one can see from outside whether a
    transport that does not say how it moves bytes uses TCP.
    """
    if not hasattr(socket, "TCP_INFO"):
        return None
    total = 0
    for name in _names("/proc/self/fd"):
        with contextlib.suppress(OSError, struct.error):  # closed meanwhile, or no TCP
            total += _received_by_socket(int(name))
    return total


def _received_by_socket(fd: int) -> int:
    """Returns the bytes that a TCP connection received; 0 for a file that is no socket.

    Raises OSError.
    """
    if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
        return 0
    with socket.socket(fileno=os.dup(fd)) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
    _, received_bytes = _TCP_INFO_BYTES.unpack_from(info, _TCP_INFO_BYTES_OFFSET)
    return received_bytes


def rdma_ports(folder: Path) -> list[NetworkPort]:
    """Ports of all RDMA devices. `rate` reads like "400 Gb/sec (4X NDR)", `state` "4: ACTIVE"."""
    ports: list[NetworkPort] = []
    for port in sorted(folder.glob("*/ports/*")):
        device = port.parent.parent.name
        rate = _read(port / "rate").partition(" ")[0]
        active = "ACTIVE" in _read(port / "state")
        ports.append(NetworkPort(f"{device}:{port.name}", _scaled(rate, 1.0), active))
    return ports


def network_interfaces(folder: Path) -> list[NetworkPort]:
    """Returns all interfaces but loopback. `speed` is in Mbit/s, -1 where nobody knows."""
    interfaces: list[NetworkPort] = []
    for interface in sorted(folder.glob("*")):
        if interface.name == "lo" or not interface.is_dir():  # `bonding_masters` is a file
            continue
        gbit_s = _scaled(_read(interface / "speed"), 1e-3)
        # The drivers of some virtual interfaces leave it "unknown" whether they are up.
        active = _read(interface / "operstate") in ("up", "unknown")
        interfaces.append(NetworkPort(interface.name, gbit_s, active))
    return interfaces


def _scaled(text: str, scale: float) -> float | None:
    """Returns the number in `text` times `scale`; None when it is no number, or not positive."""
    try:
        value = float(text) * scale
    except ValueError:
        return None
    return value if value > 0 else None


def _bracketed(text: str) -> str:
    """Returns the choice in brackets: "madvise" of "always [madvise] never"."""
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
