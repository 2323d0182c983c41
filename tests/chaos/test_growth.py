"""The lines of a soak: what grows, what does not, and what was too short to say."""

from __future__ import annotations

import pytest

from .growth import OBSERVED_MIN_S, SETTLED_S, ProcessSample, growths, soak_section

MINUTE_S = 60.0


def samples(
    pid: int, name: str, minutes: int, mib_a_minute: float, begins_at_s: float = 0.0
) -> list[ProcessSample]:
    """Of a process that takes 500 MiB in its first minutes, and grows from then on."""
    found = []
    for minute in range(minutes + 1):
        is_settled = minute * MINUTE_S >= SETTLED_S
        mib = 100 + 500 * is_settled + mib_a_minute * minute
        at_s = begins_at_s + minute * MINUTE_S
        found.append(ProcessSample(pid, name, at_s, int(mib * 2**20), 40 + minute % 2))
    return found


def test_a_leak_is_a_slope_and_a_start_is_none() -> None:
    grown, flat = growths([*samples(1, "Gateway", 30, 2.0), *samples(2, "Router", 30, 0.0)])
    assert grown.name == "Gateway" and flat.name == "Router"
    assert grown.mib_per_hour == pytest.approx(120.0, rel=1e-3)
    assert (grown.first_mib, grown.last_mib) == (606.0, 660.0)
    assert flat.mib_per_hour == pytest.approx(0.0, abs=1e-6)
    assert abs(flat.descriptors_per_hour) < 2.0 and flat.last_descriptors == 40


def test_the_longest_of_a_name_is_told_and_short_ones_are_left_out() -> None:
    too_short = int((SETTLED_S + OBSERVED_MIN_S) / MINUTE_S) - 1
    found = growths(
        [
            *samples(1, "Gateway", 10, 1.0),
            *samples(2, "Gateway", 20, 3.0, begins_at_s=600.0),
            *samples(3, "Router", too_short, 9.0),
        ]
    )
    assert [(one.name, one.observed_s) for one in found] == [("Gateway", 17 * MINUTE_S)]
    assert found[0].mib_per_hour == pytest.approx(180.0, rel=1e-3)


def test_the_section_says_what_was_lost_and_what_grew() -> None:
    (growth,) = growths(samples(1, "Gateway", 30, 2.0))
    result = {
        "day": "2026-01-02",
        "minutes": 30.0,
        "capacity": 20.0,
        "offered": 12.0,
        "requests": 21_600,
        "left_out": 3,
        "wrong": 0,
        "failed": 1,
        "cut_off": 7,
        "faults": 30,
        "not_whole": ["KILL router"],
        "leaks": "",
        "growths": [vars(growth)],
    }
    section = soak_section(result)
    assert "Of 21,600 requests 0\ngot a wrong answer, 1 got none, and 7 were sent again" in section
    assert (
        "After 1 faults the cluster was not whole" in section and "in the end: nothing" in section
    )
    assert "| Gateway | 27 | 606 / 660 | +120.0 | 41 / 40 | " in section
