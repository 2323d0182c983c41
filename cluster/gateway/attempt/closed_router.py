"""What a gateway knows of a router that takes no new request for a moment (pure).

A router whose queue is full says for how long it would refuse everybody (`AttemptRefused.closed_s`).
Until then the gateway refuses new requests itself, before they are tokenized: under several times
the load that a cluster can serve, most requests are refused, and each refusal costs CPU that those
who are served need.
"""

from __future__ import annotations

from math import inf

from ....protos.frames import AttemptRefused
from ..errors import ApiError


class ClosedRouter:
    """The last refusal of one model's router that held for everybody. `now` is monotonic."""

    def __init__(self) -> None:
        self._refused: AttemptRefused | None = None
        self._opens_at = -inf

    def note(self, refused: AttemptRefused, now: float) -> None:
        """Takes note of a refusal; most hold for one request only."""
        if refused.closed_s > 0:
            self._refused = refused
            self._opens_at = now + refused.closed_s

    def is_closed(self, now: float) -> bool:
        """Returns whether the last such refusal still holds."""
        return now < self._opens_at

    def check(self, now: float) -> None:
        """Raises the router's own refusal as an ApiError, while it holds for everybody."""
        refused = self._refused
        if refused is not None and self.is_closed(now):
            raise ApiError(refused.reason, refused.message, retry_after_s=refused.retry_after_s)
