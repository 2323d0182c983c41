"""How fast requests that wait are served: measured, because nobody can predict it in overload.

A formula says how long a prefill takes on an idle worker. How many seconds of such prefill a busy
fleet begins in a second depends on what decodes beside it, on room in KV pools, and on gateways.
The router divides the seconds of prefill that wait by this rate, to tell how long a request waits.
"""

from __future__ import annotations

from math import exp

#: What was measured so many seconds ago counts 1/e. Only seconds in which requests waited pass.
MEMORY_S = 20.0
PRIOR_S = 2.0  #: the caller's first guess counts as so many seconds of measurement


class DrainRate:
    """Seconds of prefill that are begun in a second, while requests wait for it.

    Seconds of prefill are what the requests' prefills would take on idle workers, so four workers
    may reach a rate of four. The caller calls `waits` at every event: before it serves those who
    wait, and again behind that. It calls `served` for each request that has waited and leaves for a
    worker. While no request waits, the rate says how many come and not how many could be served: that
    time does not count.
    """

    def __init__(self) -> None:
        self._served_s = 0.0  #: of prefill, begun in the measured time; older ones count less
        self._measured_s = 0.0  #: of time in which requests waited; older ones count less
        self._guessed_s = PRIOR_S  #: seconds of measurement that the first guess still counts as
        self._at = 0.0  #: `now` of the last call of `waits`
        self._is_waiting = False

    def waits(self, now: float, is_waiting: bool) -> None:
        """Note whether requests wait from `now` on, in seconds of the caller's clock."""
        passed_s = max(now - self._at, 0.0)
        if self._is_waiting and passed_s:
            kept = exp(-passed_s / MEMORY_S)
            self._served_s *= kept
            self._guessed_s *= kept
            self._measured_s = self._measured_s * kept + passed_s
        self._at = now
        self._is_waiting = is_waiting

    def served(self, prefill_s: float) -> None:
        """Count a request that has waited and was given to a worker.

        It does not count if the last call of `waits` said that nobody waits.

        `prefill_s` is how long its prefill takes on an idle worker.
        """
        if self._is_waiting:
            self._served_s += prefill_s

    def rate(self, first_guess: float) -> float:
        """Return seconds of prefill in a second; `first_guess`, such a rate, fades.

        The guess fades while requests wait, so a long wait in which none is served gives nearly 0.
        """
        served_s = self._served_s + first_guess * self._guessed_s
        return served_s / (self._measured_s + self._guessed_s)
