"""CPU time and memory of a cluster's processes, from /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

#: By part of the cluster: what the titles of its processes contain. Serve has two proxies: its own
#: in Python, and HAProxy, which it starts in the bench's runs with proxy `haproxy`.
TITLES = {
    # With the processes that render chat templates and compile grammars for it.
    "gateway": (":Gateway", "gateway.text.templates", "gateway.text.grammars"),
    "worker": (":PrefillWorker", ":DecodeWorker"),
    "proxy": ("ProxyActor", "haproxy"),
    "router": (":Router",),
}
REST = "rest"  #: All other processes: Ray's own, and the load generator.

# Fields of /proc/PID/stat, counted from 0 behind the process's name (proc_pid_stat(5)).
PARENT_FIELD = 1
USER_TIME_FIELD = 11
SYSTEM_TIME_FIELD = 12


class Processes:
    """The processes that descend from this one, by part of the cluster."""

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of each part, and of the rest, since their processes started.

        A process that has ended counts no more, so the difference of two calls holds only while no
        process ends.
        """
        cpu_s = dict.fromkeys((*TITLES, REST), 0.0)
        for pid in descendants():
            cpu_s[_part_of(pid)] += cpu_s_of(pid)
        return cpu_s

    def pids(self, part: str) -> list[int]:
        """Return the ids of a part's processes."""
        return [pid for pid in descendants() if _part_of(pid) == part]

    def rss_mib(self, part: str) -> float:
        """Return the resident memory of a part in MiB."""
        pages = 0
        for pid in self.pids(part):
            fields = _read(pid, "statm").split()
            pages += int(fields[1]) if fields else 0
        return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def descendants() -> list[int]:
    """Return the ids of the processes that this one has started, and of theirs."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat_fields(int(entry.name))
            if fields:
                children.setdefault(int(fields[PARENT_FIELD]), []).append(int(entry.name))
    # A process that starts or ends meanwhile may be missed.
    found: list[int] = []
    unvisited = [os.getpid()]
    while unvisited:
        child_pids = children.get(unvisited.pop(), [])
        found += child_pids
        unvisited += child_pids
    return found


def pin(pids: Iterable[int], cores: set[int]) -> None:
    """Let all threads of these processes run on these cores only; later threads inherit that."""
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*"):
            with contextlib.suppress(OSError):  # the thread has ended
                os.sched_setaffinity(int(task.name), cores)


def _part_of(pid: int) -> str:
    """Return a key of `TITLES`, or `REST`; Ray sets the title of each replica's process."""
    title = _read(pid, "cmdline")
    for part, marks in TITLES.items():
        if any(mark in title for mark in marks):
            return part
    return REST


def cpu_s_of(pid: int) -> float:
    """Return the CPU seconds of all threads, ended ones too, in steps of 10 ms."""
    fields = _stat_fields(pid)
    if not fields:
        return 0.0
    ticks = int(fields[USER_TIME_FIELD]) + int(fields[SYSTEM_TIME_FIELD])
    return ticks / os.sysconf("SC_CLK_TCK")


def thread_cpu_s_of(pid: int) -> float:
    """Return the CPU seconds of the threads that live now, in steps of a nanosecond.

    The scheduler's own count is fine enough for what takes less than a tick of `cpu_s_of`.
    """
    cpu_ns = 0
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):  # the thread has ended
            cpu_ns += int((task / "schedstat").read_text().split()[0])
    return cpu_ns / 1e9


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name, which may contain spaces itself."""
    return _read(pid, "stat").rpartition(")")[2].split()


def _read(pid: int, name: str) -> str:
    """Return a file of the process; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""
