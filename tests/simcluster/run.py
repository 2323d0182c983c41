"""`make sim`: plays many seeds of a simulated cluster, on all cores; prints those that break a promise.

make sim ARGS='--seeds 10000'
make sim ARGS='--replay 4711'     the log of one seed

^C and SIGTERM end it early: what was played until then is printed and written. Seeds are handed out
in their order, so `--first` goes on behind them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from .world import Report, World

PROGRESS_S = 10.0


@dataclass
class Total:
    """What many seeds were like together."""

    seeds: int = 0
    requests: int = 0
    tokens: int = 0
    asked_again: int = 0  #: tries beyond the first one of each request
    left: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    broken: dict[int, str] = field(default_factory=dict)  #: by seed

    def add(self, seed: int, report: Report, broken: str) -> None:
        self.seeds += 1
        self.requests += report.requests
        self.tokens += report.tokens
        self.asked_again += report.tries - report.requests
        self.left += report.left
        self.failed += report.failed
        self.faults += report.faults
        if broken:
            self.broken[seed] = broken

    def __str__(self) -> str:
        faults = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        failed = ", ".join(f"{name} {count}" for name, count in sorted(self.failed.items()))
        return (
            f"{self.seeds:,} seeds: {self.requests:,} requests, {self.tokens:,} tokens; "
            f"{self.left:,} clients left, {self.asked_again:,} asked again\n"
            f"{sum(self.faults.values()):,} faults: {faults or 'none'}\n"
            f"{sum(self.failed.values()):,} requests with an error: {failed or 'none'}\n"
            f"{len(self.broken)} seeds broke a promise"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many are played")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--faults", type=int, help="faults of each; default: the seed decides")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--replay", type=int, metavar="SEED", help="plays one, and prints its log")
    parser.add_argument("--json", type=Path, help="writes the result there")
    given = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of a run
        command = [sys.executable, "-W", "ignore", "-m", "tests.simcluster.run", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"PYTHONHASHSEED": "0"})
    if given.replay is not None:
        sys.exit(replay(given.replay, given.faults))
    total = play_all(given.first, given.seeds, given.faults, given.processes)
    print(total)
    for seed, broken in sorted(total.broken.items()):
        print(f"  seed {seed}: {broken}\n    make sim ARGS='--replay {seed}'")
    if given.json:
        values = {"day": datetime.now(UTC).date().isoformat(), **vars(total)}
        given.json.write_text(json.dumps(values, indent=2) + "\n")
    sys.exit(1 if total.broken else 0)


def play_all(first: int, count: int, faults: int | None, processes: int) -> Total:
    """Plays the seeds, until a signal says stop; prints how far it is."""
    total = Total()
    began_at = told_at = time.monotonic()
    work = ((seed, faults) for seed in range(first, first + count))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited until a process has begun
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, _leave_interrupts_to_the_parent, maxtasksperchild=200) as pool:
        stopped = []  #: the signals that came
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda got, _: stopped.append(got))
        for seed, report, broken in pool.imap_unordered(play, work, chunksize=4):
            total.add(seed, report, broken)
            now = time.monotonic()
            if now - told_at > PROGRESS_S:
                told_at = now
                left_s = (now - began_at) / total.seeds * (count - total.seeds)
                print(
                    f"{total.seeds:,} of {count:,} seeds, {len(total.broken)} broken, "
                    f"{left_s / 60:.0f} min left",
                    file=sys.stderr,
                    flush=True,
                )
            if stopped:
                print("stopped early", file=sys.stderr, flush=True)
                break
    return total


def _leave_interrupts_to_the_parent() -> None:
    """Ignore ^C, which a terminal sends to all processes; the pool ends this one by SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def play(given: tuple[int, int | None]) -> tuple[int, Report, str]:
    """Plays a seed; returns what it was like, and which promise did not hold."""
    seed, faults = given
    world = World(seed, faults)
    try:
        return seed, world.play(), ""
    except Exception as error:
        return seed, world.report, f"{type(error).__name__}: {error}"[:500]


def replay(seed: int, faults: int | None) -> int:
    """Plays a seed, and prints what happened when."""
    world = World(seed, faults)
    broken = ""
    try:
        world.play()
    except Exception as error:
        broken = f"{type(error).__name__}: {error}"
    print("\n".join(world.log))
    print(broken or "all promises held")
    return 1 if broken else 0


if __name__ == "__main__":
    main()
