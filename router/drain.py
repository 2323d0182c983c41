"""How fast requests that wait are served: measured, because nobody can predict it in overload.

A closed form knows how long a prefill takes on an idle worker. How many seconds of prefill a busy
fleet begins in a second depends on what decodes beside it, on room in KV pools, and on gateways.
"""

from __future__ import annotations

from math import exp

MEMORY_S = 20.0  #: what was measured so long ago counts 1/e
PRIOR_S = 2.0  #: the first guess counts as so many seconds of measurement


class DrainRate:
    """Seconds of prefill that are begun in a second, while requests wait for it.

    `waits(now, ...)` is told at every event whether requests wait from now on; `served` of each
    request that leaves for a worker. Time in which nobody waits says nothing, and does not count.
    """

    def __init__(self) -> None:
        self._served_s = 0.0
        self._measured_s = 0.0
        self._guessed_s = PRIOR_S  #: seconds of measurement that the first guess counts as
        self._at = 0.0
        self._is_waiting = False

    def waits(self, now: float, is_waiting: bool) -> None:
        """Note whether requests wait from `now` on."""
        passed_s = max(now - self._at, 0.0)
        if self._is_waiting and passed_s:
            kept = exp(-passed_s / MEMORY_S)
            self._served_s *= kept
            self._guessed_s *= kept
            self._measured_s = self._measured_s * kept + passed_s
        self._at = now
        self._is_waiting = is_waiting

    def served(self, prefill_s: float) -> None:
        """Count a request that was given to a worker, while it or others waited."""
        if self._is_waiting:
            self._served_s += prefill_s

    def rate(self, first_guess: float) -> float:
        """Return seconds of prefill in a second; `first_guess` fades as measurements come."""
        served_s = self._served_s + first_guess * self._guessed_s
        return served_s / max(self._measured_s + self._guessed_s, 1e-9)
