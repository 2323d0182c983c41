"""Resident memory and idle CPU of every process of the clusters that run on this machine.

    python loadtests/footprint.py [SECONDS]

Reads /proc twice, SECONDS (default 20) apart. CPU is in percent of one core; PSS counts shared
pages once. Linux only.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

MARKS = ("ray::", "/ray/core/", "diptych serve", "ray/dashboard", "ray/_private")


def processes() -> dict[int, tuple[str, float, int, int]]:
    """pid -> (name, CPU seconds so far, RSS MiB, PSS MiB)."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            if not any(mark in command for mark in MARKS) or "footprint" in command:
                continue
            stat = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            pss = next(
                int(line.split()[1]) >> 10
                for line in (folder / "smaps_rollup").read_text().splitlines()
                if line.startswith("Pss:")
            )
        except (OSError, StopIteration):
            continue  # it ended meanwhile
        ticks = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
        rss = int(stat[21]) * os.sysconf("SC_PAGE_SIZE") >> 20
        found[int(folder.name)] = (_name(command), ticks, rss, pss)
    return found


def _name(command: str) -> str:
    if "diptych serve" in command:
        return "diptych serve"
    return command.split()[0].rsplit("/", 1)[-1]


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    before = processes()
    time.sleep(seconds)
    after = processes()
    total_cpu, total_pss = 0.0, 0
    print(f"{'PROCESS':42} {'CPU %':>6} {'RSS MiB':>8} {'PSS MiB':>8}")
    for pid, (name, ticks, rss, pss) in sorted(after.items(), key=lambda item: item[1][0]):
        if pid not in before:
            continue
        cpu = (ticks - before[pid][1]) / seconds * 100
        total_cpu, total_pss = total_cpu + cpu, total_pss + pss
        print(f"{name:42} {cpu:6.2f} {rss:8} {pss:8}")
    print(f"{'total':42} {total_cpu:6.2f} {'':8} {total_pss:8}")


if __name__ == "__main__":
    main()
