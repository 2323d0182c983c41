"""The faults: which process or folder, and what is done to it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support.live import Live

from .matrix import UNDISTURBED

STOPPED_S = 5.0  #: for which a frozen process is stopped, or a folder is full

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
    *(Fault(f"KILL {name}", (find,)) for name, find in _RAY.items()),
    *(
        Fault(f"{folder} full {STOPPED_S:g} s", (), replaces=False, fills=folder)
        for folder in ("/tmp", "/dev/shm")
    ),
)


def inject(fault: Fault, live: Live, status: dict[str, Any], draw: random.Random) -> list[int]:
    """Does it; returns the processes that were hit. A frozen one goes on after `STOPPED_S`."""
    victims = [
        victim for find in fault.groups for victim in _choose(find(live, status), fault, draw)
    ]
    for victim in victims:
        os.kill(victim, fault.signal)
    if fault.signal == signal.SIGSTOP:
        time.sleep(STOPPED_S)
        for victim in victims:
            _continue(victim)
    if fault.fills:
        _fill(Path(f"/proc/{live.process.pid}/root{fault.fills}"))
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


def _continue(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # somebody took it for dead, and killed it
        os.kill(process, signal.SIGCONT)
