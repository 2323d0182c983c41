"""Which processes descend from this one, and how they end: for Linux, by /proc and prctl."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator, Set
from pathlib import Path
from typing import NamedTuple

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


def die_with_starter() -> None:
    """Let the kernel kill this process when the thread that started it ends, even if it is frozen.

    Nothing happens if that thread has ended before.
    """
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    # prctl fails only for options that the kernel does not know; both are older than Python 3.11.
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


class _ProcessState(NamedTuple):
    """What /proc says of a process."""

    letter: str  #: Z is a zombie: the process has ended, and its parent does not know yet.
    parent: int


def _read_state(process: int) -> _ProcessState | None:
    """Return the state of a process; None if it is gone."""
    try:
        # The name, in parentheses, may hold anything, also bytes that are no text.
        content = Path(f"/proc/{process}/stat").read_bytes()
        letter, parent = content.rpartition(b")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return _ProcessState(letter.decode(), int(parent))


def _all_processes() -> Iterator[tuple[int, _ProcessState]]:
    """Yield the processes of this machine, or of this container."""
    for folder in Path("/proc").glob("[0-9]*"):
        process = int(folder.name)
        state = _read_state(process)
        if state is not None:
            yield process, state


def descendants(ancestor: int, spare: Set[int] = frozenset()) -> set[int]:
    """Return the processes below `ancestor` that have not ended, but `spare` and those below them."""
    children: dict[int, list[int]] = {}
    for process, state in _all_processes():
        if state.letter != "Z" and process not in spare:
            children.setdefault(state.parent, []).append(process)
    found: set[int] = set()
    unvisited = [ancestor]
    while unvisited:
        below = children.get(unvisited.pop(), [])
        found.update(below)
        unvisited += below
    return found


def end_descendants(limit_s: float, spare: Set[int]) -> set[int]:
    """Kill the processes below this one but `spare` and those below them.

    Returns those that have not ended in time, among them any that this process may not kill.
    Processes that a dying one has just started are killed too, if `adopt_orphans` was called
    before: else they would no longer be below this one.
    """
    deadline = time.monotonic() + limit_s
    while True:
        remaining = descendants(os.getpid(), spare)
        for process in remaining:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        reap_orphans(spare)
        if not remaining or time.monotonic() > deadline:
            return remaining
        time.sleep(_POLL_INTERVAL_S)


def reap_orphans(spare: Set[int]) -> None:
    """Take note of the ends of children but `spare`: they would stay zombies otherwise.

    `spare` are children whose end somebody else waits for, as a `subprocess.Popen` does.
    """
    if not _has_zombies():  # to look through all processes takes 10 ms, every second
        return
    for process, state in _all_processes():
        if state.letter == "Z" and state.parent == os.getpid() and process not in spare:
            with contextlib.suppress(OSError):  # somebody else has just done so
                os.waitpid(process, os.WNOHANG)


def _has_zombies() -> bool:
    """Return whether a child has ended and nobody has taken note of it; nobody does so by this."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # there is no child
        return False


def has_ended(process: int) -> bool:
    """Return whether a process is gone, or a zombie."""
    state = _read_state(process)
    return state is None or state.letter == "Z"
