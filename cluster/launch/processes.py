"""Which processes descend from this one, and how they end: for Linux, by /proc and prctl."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

_SET_PARENT_DEATH_SIGNAL = 1  #: PR_SET_PDEATHSIG of linux/prctl.h
_SET_CHILD_SUBREAPER = 36  #: PR_SET_CHILD_SUBREAPER
_POLL_INTERVAL_S = 0.02


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends (a subreaper)."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int) -> None:
    """Let the kernel send this process SIGINT when its parent, the process `parent`, ends."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGINT)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGINT)


def _prctl(option: int, value: int) -> None:
    # prctl fails only for options that the kernel does not know; both are older than Python 3.11.
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def descendants(ancestor: int) -> set[int]:
    """Return the processes below `ancestor` that have not ended."""
    children: dict[int, list[int]] = {}
    for stat_file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has just ended
            # The name, in parentheses, may hold anything; behind it are the state and the parent.
            state, parent = stat_file.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(stat_file.parent.name))
    found: set[int] = set()
    unvisited = [ancestor]
    while unvisited:
        below = children.get(unvisited.pop(), [])
        found.update(below)
        unvisited += below
    return found


def end_descendants(limit_s: float, spare: set[int]) -> set[int]:
    """Kill the processes below this one but `spare`; return those that have not ended in time.

    Processes that a dying one has just started are killed too, if `adopt_orphans` was called
    before: else they would no longer be below this one.
    """
    deadline = time.monotonic() + limit_s
    while True:
        remaining = descendants(os.getpid()) - spare
        for process in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        reap_orphans(spare)
        if not remaining or time.monotonic() > deadline:
            return remaining
        time.sleep(_POLL_INTERVAL_S)


def reap_orphans(spare: set[int]) -> None:
    """Take note of the ends of children but `spare`: they would stay zombies otherwise.

    `spare` are children whose end somebody else waits for, as a `subprocess.Popen` does.
    """
    for stat_file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent = stat_file.read_text().rpartition(")")[2].split()[:2]
            process = int(stat_file.parent.name)
            if state == "Z" and int(parent) == os.getpid() and process not in spare:
                os.waitpid(process, os.WNOHANG)


def has_ended(process: int) -> bool:
    """Return whether a process is gone, or a zombie."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True
    return state == "Z"
