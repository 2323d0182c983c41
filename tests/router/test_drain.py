"""How fast requests that wait are served."""

from __future__ import annotations

import pytest
from diptych.router.drain import DrainRate


def served(rate: DrainRate, seconds: int, each_s: float) -> None:
    """A request of `each_s` of prefill is served every second, while others wait."""
    for second in range(seconds):
        rate.waits(float(second), is_waiting=True)
        rate.served(each_s)


def test_before_anything_is_measured_the_first_guess_counts() -> None:
    assert DrainRate().rate(first_guess=4.0) == pytest.approx(4.0)


def test_what_is_measured_replaces_the_guess() -> None:
    rate = DrainRate()
    served(rate, 100, each_s=0.3)
    assert rate.rate(first_guess=4.0) == pytest.approx(0.3, rel=0.1)


def test_time_in_which_nobody_waits_does_not_count() -> None:
    rate = DrainRate()
    served(rate, 100, each_s=0.3)
    rate.waits(100.0, is_waiting=False)
    before = rate.rate(4.0)
    rate.waits(5000.0, is_waiting=True)
    assert rate.rate(4.0) == pytest.approx(before)


def test_what_waits_and_is_not_served_brings_the_rate_down() -> None:
    rate = DrainRate()
    served(rate, 100, each_s=0.3)
    rate.waits(200.0, is_waiting=True)
    assert rate.rate(4.0) < 0.01


def test_it_follows_a_change() -> None:
    rate = DrainRate()
    served(rate, 100, each_s=0.3)
    for second in range(100, 200):
        rate.waits(float(second), is_waiting=True)
        rate.served(0.9)
    assert rate.rate(4.0) == pytest.approx(0.9, rel=0.1)
