"""How memory and descriptors of processes grow, by straight lines through samples (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: A process has what it needs for its work after so long: the line begins there.
SETTLED_S = 180.0
OBSERVED_MIN_S = 300.0  #: Of a shorter time behind that, no line is drawn.
HOUR_S = 3600.0

SECTION = """
## Soak

{minutes:g} minutes on {day}, with requests of the same kinds at random times: {offered:g} a second, where eight users
who never pause get {capacity:g} a second answered. A fault a minute, {faults} in all. Of {requests:,} requests {wrong}
got a wrong answer, {failed} got none, and {cut_off} were sent again; {left_out} arrivals were left out, as 64 requests
were under way. After {not_whole_count} faults the cluster was not whole in time. Held by nobody in the end: {leaks}.

    make soak

The lines are least squares through samples of each process, every 5 s from its fourth minute on. Of processes of one
kind the one that was observed longest stands here; those that were replaced too often have no line.

| process | minutes | resident MiB, first / last | MiB an hour | descriptors, first / last | an hour |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class ProcessSample:
    """What a process holds at one moment."""

    pid: int
    name: str
    at_s: float  #: of a monotonic clock
    resident_bytes: int
    descriptors: int


@dataclass(frozen=True)
class Growth:
    """The lines through one process's samples, without those of its first `SETTLED_S`."""

    name: str
    observed_s: float
    first_mib: float
    last_mib: float
    mib_per_hour: float
    first_descriptors: int
    last_descriptors: int
    descriptors_per_hour: float


def growths(samples: Iterable[ProcessSample]) -> list[Growth]:
    """Returns the growth of the process of each name that was observed longest, by name.

    Processes of whom there are samples of less than `OBSERVED_MIN_S` are left out.
    """
    by_process: dict[int, list[ProcessSample]] = defaultdict(list)
    for sample in samples:
        by_process[sample.pid].append(sample)
    longest: dict[str, Growth] = {}
    for of_process in by_process.values():
        # Ray names a process when it gets its work: what it is in the end, it is called.
        name = of_process[-1].name
        growth = _growth(name, of_process)
        known = longest.get(name)
        if growth and (known is None or growth.observed_s > known.observed_s):
            longest[name] = growth
    return [longest[name] for name in sorted(longest)]


def _growth(name: str, samples: Sequence[ProcessSample]) -> Growth | None:
    settled = [sample for sample in samples if sample.at_s >= samples[0].at_s + SETTLED_S]
    if not settled or settled[-1].at_s - settled[0].at_s < OBSERVED_MIN_S:
        return None
    hours = np.array([sample.at_s for sample in settled]) / HOUR_S
    resident_mib = np.array([sample.resident_bytes for sample in settled]) / 2**20
    descriptors = np.array([sample.descriptors for sample in settled])
    return Growth(
        name=name,
        observed_s=settled[-1].at_s - settled[0].at_s,
        first_mib=float(resident_mib[0]),
        last_mib=float(resident_mib[-1]),
        mib_per_hour=float(np.polyfit(hours, resident_mib, 1)[0]),
        first_descriptors=int(descriptors[0]),
        last_descriptors=int(descriptors[-1]),
        descriptors_per_hour=float(np.polyfit(hours, descriptors, 1)[0]),
    )


def soak_section(result: Mapping[str, Any]) -> str:
    """Returns a soak's result as a section of the page."""
    rows = [_row(Growth(**growth)) for growth in result["growths"]]
    fields = {name: value for name, value in result.items() if name not in ("growths", "leaks")}
    section = SECTION.format(
        **fields,
        not_whole_count=len(result["not_whole"]) or "no",
        leaks=result["leaks"] or "nothing",
    )
    return section + "".join(rows)


def _row(growth: Growth) -> str:
    cells = [
        growth.name,
        f"{growth.observed_s / 60:.0f}",
        f"{growth.first_mib:.0f} / {growth.last_mib:.0f}",
        f"{growth.mib_per_hour:+.1f}",
        f"{growth.first_descriptors} / {growth.last_descriptors}",
        f"{growth.descriptors_per_hour:+.1f}",
    ]
    return "| " + " | ".join(cells) + " |\n"
