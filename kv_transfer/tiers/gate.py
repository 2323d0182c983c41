"""Whether the disk may be tried now (pure): off after failures in a row, tried again after a wait.

on --FAILURES_MAX failures in a row, or one that is final--> off --wait--> one try --ok--> on
The wait doubles with every failed try, from RETRY_S to RETRY_MAX_S.
"""

from __future__ import annotations

FAILURES_MAX = 3
RETRY_S, RETRY_MAX_S = 5.0, 300.0


class Gate:
    """Events `failed` and `succeeded`; `now` in seconds of any clock that does not go back."""

    def __init__(self) -> None:
        self.reason = ""  #: why it is off; empty while it is on
        self.until = 0.0  #: when the next try is allowed
        self._failures = 0
        self._wait_s = RETRY_S

    def allows(self, now: float) -> bool:
        return now >= self.until

    def failed(self, reason: str, now: float, final: bool = False) -> bool:
        """True when this failure switched it off."""
        self._failures += 1
        if not self.reason and not final and self._failures < FAILURES_MAX:
            return False
        first, self.reason = not self.reason, reason
        self.until, self._wait_s = now + self._wait_s, min(2 * self._wait_s, RETRY_MAX_S)
        return first

    def succeeded(self) -> bool:
        """True when this switched it on again."""
        was_off = bool(self.reason)
        self.reason, self.until, self._failures, self._wait_s = "", 0.0, 0, RETRY_S
        return was_off
