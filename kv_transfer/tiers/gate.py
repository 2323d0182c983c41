"""Whether the disk may be written or opened now (pure): off after failures in a row, for a wait.

    on --FAILURE_LIMIT failures in a row, or a conclusive one--> off --wait--> tries --success--> on

The wait doubles with every failed try, from RETRY_S to RETRY_LIMIT_S. After it tries are allowed
until one of them fails or succeeds.
"""

from __future__ import annotations

FAILURE_LIMIT = 3  #: in a row; one alone may be a hiccup
RETRY_S = 5.0  #: the first wait
RETRY_LIMIT_S = 300.0  #: the longest wait


class DiskGate:
    """Says whether the disk is on, by the failures and successes of writing and opening.

    Reading goes on while the disk is off, as long as its file is open. `now` is of any clock that does not go back.
    """

    def __init__(self) -> None:
        self.reason = ""  #: why the disk is off; empty while it is on
        self.retry_at = 0.0  #: until then a disk that is off is not tried; 0 while it is on
        self._failures = 0  #: in a row
        self._wait_s = RETRY_S

    def allows(self, now: float) -> bool:
        """Returns whether the disk may be written or opened now: it is on, or a try is allowed."""
        return now >= self.retry_at

    def record_failure(self, reason: str, now: float, conclusive: bool = False) -> bool:
        """Returns True when this failure switched the disk off.

        A `conclusive` one does so alone: its cause is no hiccup, as when the folder cannot be
        opened. A failed try of a disk that is off already returns False, and doubles the wait.
        """
        self._failures += 1
        was_on = not self.reason
        if was_on and not conclusive and self._failures < FAILURE_LIMIT:
            return False
        self.reason = reason
        self.retry_at = now + self._wait_s
        self._wait_s = min(2 * self._wait_s, RETRY_LIMIT_S)
        return was_on

    def record_success(self) -> bool:
        """Returns True when this success switched the disk on again."""
        was_off = bool(self.reason)
        self.reason = ""
        self.retry_at = 0.0
        self._failures = 0
        self._wait_s = RETRY_S
        return was_off
