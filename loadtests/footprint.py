"""Resident memory and idle CPU of every process of the clusters that run on this machine.

    python loadtests/footprint.py [SECONDS]

Reads /proc twice, SECONDS (default 20) apart. CPU is in percent of one core; PSS counts shared
pages once. Linux only. Processes of other users are left out, unless root asks.
"""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

#: A process is one of a cluster if its command line contains one of these: Ray's own, `serve`, and
#: what workers and gateways start (the fork server, template processes, ranks).
MARKS = (
    "ray::",
    "/ray/core/",
    "ray/dashboard",
    "ray/_private",
    "ray/autoscaler",
    "diptych serve",
    "diptych.cluster.launch.",
    "diptych.cluster.gateway.",
    "diptych.cluster.worker.",
)


@dataclass(frozen=True, slots=True)
class ProcessFootprint:
    """What one process takes."""

    name: str  #: for people: Ray's own titles, or the program
    cpu_s: float  #: since the process began
    rss_mib: int  #: resident memory; pages that processes share count in each
    pss_mib: int  #: the same, where a shared page counts in parts


def read_footprints() -> dict[int, ProcessFootprint]:
    """Returns the footprint of every process of a cluster, by process id."""
    footprints: dict[int, ProcessFootprint] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            footprint = _read_footprint(folder)
        except (OSError, StopIteration):
            continue  # the process has ended, or is another user's
        if footprint is not None:
            footprints[int(folder.name)] = footprint
    return footprints


def _read_footprint(folder: Path) -> ProcessFootprint | None:
    """Returns the footprint; None for a process that is not of a cluster.

    Raises OSError or StopIteration if the process ends meanwhile, and PermissionError, an OSError,
    if it is another user's.
    """
    words = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
    command = words.decode(errors="replace").strip()
    if not any(mark in command for mark in MARKS) or "footprint" in command:
        return None
    # The fields of proc_pid_stat(5) from the third on: the second may contain spaces.
    fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
    user_ticks = int(fields[11])
    system_ticks = int(fields[12])
    resident_pages = int(fields[21])
    return ProcessFootprint(
        name=_name(command),
        cpu_s=(user_ticks + system_ticks) / os.sysconf("SC_CLK_TCK"),
        rss_mib=resident_pages * os.sysconf("SC_PAGE_SIZE") >> 20,
        pss_mib=_read_pss_kib(folder) >> 10,
    )


def _read_pss_kib(folder: Path) -> int:
    lines = (folder / "smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _name(command: str) -> str:
    if "diptych serve" in command:
        return "diptych serve"
    module = re.search(r" -m (diptych\.\S+)", command)
    return module[1] if module else command.split()[0].rsplit("/", 1)[-1]


def main() -> None:
    """Prints what each process took of CPU and memory. Argument: for how many seconds."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    before = read_footprints()
    time.sleep(seconds)
    after = read_footprints()
    total_cpu_percent = 0.0
    total_pss_mib = 0
    print(f"{'PROCESS':42} {'CPU %':>6} {'RSS MiB':>8} {'PSS MiB':>8}")
    for pid, process in sorted(after.items(), key=lambda item: item[1].name):
        if pid not in before:  # it began meanwhile: a start is not idle
            continue
        cpu_percent = (process.cpu_s - before[pid].cpu_s) / seconds * 100
        total_cpu_percent += cpu_percent
        total_pss_mib += process.pss_mib
        print(f"{process.name:42} {cpu_percent:6.2f} {process.rss_mib:8} {process.pss_mib:8}")
    print(f"{'total':42} {total_cpu_percent:6.2f} {'':8} {total_pss_mib:8}")


if __name__ == "__main__":
    main()
