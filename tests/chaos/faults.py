"""The faults: which process or folder, and what is done to it."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support.live import Live

from .matrix import UNDISTURBED

#: for which a frozen process is stopped, a folder is full, memory is short or the clock is wrong
STOPPED_S = 5.0

#: A command before `diptych serve` that gives it file systems of its own for the folders which a
#: fault fills. Only root may mount them.
OWN_FOLDERS = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'for folder in /tmp /dev/shm; do mount -t tmpfs -o size=512m tmpfs $folder; done; exec "$@"',
    "sh",
)

#: The control groups of memory, where a cluster can have one of its own with a limit.
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
MEMORY_STEP_BYTES = 16 << 20  #: by which a limit is lowered until nothing more can be reclaimed
CLOCK_SOURCE = Path(__file__).parent / "clock.c"
CLOCK_LIBRARY = "clock.so"  #: in the run's folder: what `CLOCK_SOURCE` is compiled to
CLOCK_FILE = "clock"  #: in the run's folder: by how many seconds the cluster's clocks are wrong
CLOCK_STEP_S = 3600


@dataclass(frozen=True)
class Variant:
    """A way to start the cluster that some faults need."""

    name: str  #: Empty: the plain start, which most faults need.
    arguments: tuple[str, ...] = ()  #: of `diptych serve`

    def prefix(self, folder: Path) -> tuple[str, ...]:
        """Returns the words to put before `diptych serve`.

        What they need is made here: the library of the clock in the run's `folder`, or the control
        group of the memory. The folder must not be below /tmp, which the cluster does not see.
        """
        own_folders = OWN_FOLDERS if os.geteuid() == 0 else ()
        if self.name == "clock":
            library = folder.absolute() / CLOCK_LIBRARY
            compiled = ["gcc", "-O2", "-shared", "-fPIC", "-o", str(library), str(CLOCK_SOURCE)]
            subprocess.run([*compiled, "-ldl"], check=True)
            clock_file = folder.absolute() / CLOCK_FILE
            _set_clock(clock_file, 0)
            environment = (f"LD_PRELOAD={library}", f"WRONG_CLOCK_FILE={clock_file}")
            return (*own_folders, "env", *environment)
        if self.name == "memory":
            group = memory_group()
            group.mkdir(exist_ok=True)
            joined = f'echo $$ > {group}/cgroup.procs && exec "$@"'
            return ("sh", "-c", joined, "sh", *own_folders)
        return own_folders

    def clean_up(self) -> None:
        """Removes the control group of a cluster that has ended; of others nothing is left."""
        if self.name == "memory":
            with contextlib.suppress(OSError):  # a process of it has not ended yet
                memory_group().rmdir()

    def missing(self) -> str:
        """Returns what this machine lacks for it; empty: nothing."""
        if self.name == "clock" and not shutil.which("gcc"):
            return "there is no gcc"
        limit = MEMORY_GROUPS / "memory.limit_in_bytes"
        if self.name == "memory" and (os.geteuid() != 0 or not limit.exists()):
            return f"only root with {MEMORY_GROUPS} can limit the cluster's memory"
        return ""


def memory_group() -> Path:
    """Returns the control group of the cluster that this process starts."""
    return MEMORY_GROUPS / f"diptych-chaos-{os.getpid()}"


PLAIN = Variant("")
PROXIES = Variant("proxies", ("--set", "gateway.listen=serve"))
CLOCK = Variant("clock")
MEMORY = Variant("memory")

#: Finds the processes that a fault may hit, given the cluster and its status.
FindProcesses = Callable[[Live, dict[str, Any]], list[int]]


@dataclass(frozen=True)
class Fault:
    """What is done, and to how many processes at once: one of each group, or all of them."""

    name: str  #: as in the matrix
    groups: tuple[FindProcesses, ...]
    signal: signal.Signals = signal.SIGKILL
    #: Whether the processes must be replaced: not so if they only freeze for a while.
    replaces: bool = True
    hits_all: bool = False  #: of each group, not one
    fills: str = ""  #: the folder of `OWN_FOLDERS` that is full for a while
    clock_step_s: int = 0  #: by which the clocks of all processes are wrong for a while
    limits_memory: bool = False  #: The cluster may not have more memory for a while.
    #: `diptych serve` starts the whole cluster again, which it does not do without end.
    costs_the_cluster: bool = False
    variant: Variant = PLAIN


def _workers(home: str) -> FindProcesses:
    return lambda _, status: [
        worker["pid"] for worker in status["workers"] if worker["home"] == home
    ]


def _router(_: Live, status: dict[str, Any]) -> list[int]:
    return [status["router"]["pid"]]


def _gateways(_: Live, status: dict[str, Any]) -> list[int]:
    return [gateway["pid"] for gateway in status["gateways"]]


def _control(_: Live, status: dict[str, Any]) -> list[int]:
    return [status["control"]["pid"]]


def _of_ray(name: str) -> FindProcesses:
    """Finds a process of Ray's below `diptych serve` by a part of its command line."""

    def find(live: Live, _: dict[str, Any]) -> list[int]:
        below = psutil.Process(live.process.pid).children(recursive=True)
        return [one.pid for one in below if name in _command_line(one)]

    return find


def _command_line(process: psutil.Process) -> str:
    """Returns what a process was called with; nothing if it has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


_PARTS: dict[str, FindProcesses] = {
    "prefill": _workers("prefill"),
    "decode": _workers("decode"),
    "router": _router,
    "gateway": _gateways,
    "Control": _control,
    "Serve controller": _of_ray("ray::ServeController"),
}
_RAY = {
    "GCS": _of_ray("gcs/gcs_server"),
    "raylet": _of_ray("raylet/raylet"),
    "dashboard agent": _of_ray("ray::DashboardAgent"),
}
_ALL = {**_PARTS, **_RAY}
_serve_proxy = _of_ray("ray::ProxyActor")
FAULTS = (
    Fault(UNDISTURBED, ()),
    *(Fault(f"KILL {name}", (find,)) for name, find in _PARTS.items()),
    *(
        Fault(f"STOP {name} {STOPPED_S:g} s", (find,), signal.SIGSTOP, replaces=False)
        for name, find in _ALL.items()
    ),
    *(Fault(f"TERM {name}", (find,), signal.SIGTERM) for name, find in _PARTS.items()),
    Fault("KILL prefill and decode", (_PARTS["prefill"], _PARTS["decode"])),
    Fault("KILL decode and router", (_PARTS["decode"], _router)),
    Fault("KILL decode and gateway", (_PARTS["decode"], _gateways)),
    Fault("KILL gateway and router", (_gateways, _router)),
    Fault("KILL all decode workers", (_PARTS["decode"],), hits_all=True),
    *(Fault(f"KILL {name}", (find,), costs_the_cluster=True) for name, find in _RAY.items()),
    *(
        Fault(f"TERM {name}", (find,), signal.SIGTERM, costs_the_cluster=True)
        for name, find in _RAY.items()
    ),
    *(
        Fault(f"{folder} full {STOPPED_S:g} s", (), replaces=False, fills=folder)
        for folder in ("/tmp", "/dev/shm")
    ),
    Fault(
        f"no more memory {STOPPED_S:g} s", (), replaces=False, limits_memory=True, variant=MEMORY
    ),
    *(
        Fault(
            f"clock {step_s // 3600:+d} h {STOPPED_S:g} s",
            (),
            replaces=False,
            clock_step_s=step_s,
            variant=CLOCK,
        )
        for step_s in (CLOCK_STEP_S, -CLOCK_STEP_S)
    ),
    Fault("KILL Serve proxy", (_serve_proxy,), variant=PROXIES),
    Fault("TERM Serve proxy", (_serve_proxy,), signal.SIGTERM, variant=PROXIES),
    Fault(
        f"STOP Serve proxy {STOPPED_S:g} s",
        (_serve_proxy,),
        signal.SIGSTOP,
        replaces=False,
        variant=PROXIES,
    ),
)


def inject(
    fault: Fault, live: Live, status: dict[str, Any], draw: random.Random, folder: Path
) -> list[int]:
    """Does it; returns the processes that were hit. A frozen one goes on after `STOPPED_S`.

    `folder` is the run's, where `Variant.prefix` has put what faults change.
    """
    victims = [
        victim for find in fault.groups for victim in _choose(find(live, status), fault, draw)
    ]
    for victim in victims:
        os.kill(victim, fault.signal)
    if fault.signal == signal.SIGSTOP:
        try:
            time.sleep(STOPPED_S)
        finally:
            for victim in victims:
                _continue(victim)
    if fault.fills:
        _fill(Path(f"/proc/{live.process.pid}/root{fault.fills}"))
    if fault.clock_step_s:
        _set_clock(folder / CLOCK_FILE, fault.clock_step_s)
        try:
            time.sleep(STOPPED_S)
        finally:
            _set_clock(folder / CLOCK_FILE, 0)
    if fault.limits_memory:
        _limit_memory(memory_group() / "memory.limit_in_bytes")
    return victims


def _choose(found: Sequence[int], fault: Fault, draw: random.Random) -> list[int]:
    assert found, f"{fault.name}: there is no such process"
    return list(found) if fault.hits_all else [draw.choice(list(found))]


def _fill(folder: Path) -> None:
    """Leaves no free byte in the folder's file system for `STOPPED_S`."""
    file_system = os.statvfs(folder)
    assert file_system.f_blocks * file_system.f_frsize <= 1 << 30, f"{folder} is not the cluster's"
    filler = folder / "filler"
    try:
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, file_system.f_bavail * file_system.f_frsize)
            time.sleep(STOPPED_S)
    finally:
        filler.unlink()


def _set_clock(file: Path, step_s: int) -> None:
    """Lets the wall clocks of the cluster's processes be wrong by so much, from now on.

    The processes have mapped the file, so it is written in place.
    """
    with file.open("r+b" if file.exists() else "w+b") as clock:
        clock.write(struct.pack("q", step_s))


def _limit_memory(limit: Path) -> None:
    """Leaves the cluster what it has now, without caches, for `STOPPED_S`.

    Whoever then needs more has the kernel end the largest process of the cluster.
    """
    usage = int((limit.parent / "memory.usage_in_bytes").read_text())
    unlimited = int(limit.read_text())
    with contextlib.suppress(OSError):  # nothing more can be reclaimed
        while usage > 0:
            limit.write_text(str(usage))
            usage -= MEMORY_STEP_BYTES
    assert int(limit.read_text()) < unlimited, "the limit could not be set"
    try:
        time.sleep(STOPPED_S)
    finally:
        limit.write_text("-1")


def _continue(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # somebody took it for dead, and killed it
        os.kill(process, signal.SIGCONT)
