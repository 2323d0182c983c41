"""CPU time and memory of a cluster's processes, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

#: part of the cluster -> what the title of its processes holds
TITLES = {
    "gateway": ("diptych:Gateway",),
    "worker": ("diptych:PrefillWorker", "diptych:DecodeWorker"),
    "proxy": ("ProxyActor", "haproxy"),
    "router": ("diptych:Router",),
}


class Processes:
    """The processes that descend from this one, by part; `rest` is Ray's own."""

    def cpu_s(self) -> dict[str, float]:
        """CPU time of each part since its start."""
        used = dict.fromkeys((*TITLES, "rest"), 0.0)
        for pid in descendants():
            used[_part(pid)] += _cpu_s(pid)
        return used

    def rss_mib(self, part: str) -> float:
        pids = [pid for pid in descendants() if _part(pid) == part]
        pages = sum(int(_read(pid, "statm").split()[1] or 0) for pid in pids)
        return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def descendants() -> list[int]:
    """Processes that this one has started, and theirs."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _read(int(entry.name), "stat").rpartition(")")[2].split()
            if fields:
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, open_ = [], [os.getpid()]
    while open_:
        pids = children.get(open_.pop(), [])
        found += pids
        open_ += pids
    return found


def _part(pid: int) -> str:
    title = _read(pid, "cmdline")
    return next((part for part, marks in TITLES.items() if any(m in title for m in marks)), "rest")


def _cpu_s(pid: int) -> float:
    """Of all threads, ended ones too; to 10 ms."""
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:  # it has ended
        return ""
