"""How long a step takes, learned from the steps before it (pure).

    seconds = base + row_s * decode rows + token_s * prefill tokens

Steps without prefill give `base` and `row_s`: a line through them, with exponential forgetting.
Steps with prefill give `token_s`: what they took longer than their decodes would have, per token.
A step that took much more or less than predicted counts as `OUTLIER` times that, so a single pause
moves the model little, and a real change still gets through within a few steps.
"""

from __future__ import annotations

FORGET = 0.97  #: weight of a step after the next one of its kind: half is forgotten after 23
OUTLIER = 3.0
SETTLED = 4.0  #: weight of steps from which on a step can be an outlier


class StepCost:
    """`observe` every step; `predict` one, or ask what prefill fits into a time (`room`)."""

    def __init__(self) -> None:
        self._steps = self._seconds = 0.0  #: of steps without prefill, like the next three
        self._rows = self._rows_squared = self._rows_seconds = 0.0
        self._chunks = self._tokens = self._extra = 0.0  #: of steps with prefill

    def observe(self, seconds: float, prefill_tokens: int, decode_rows: int) -> None:
        known = self._chunks if prefill_tokens else self._steps
        expected = self.predict(prefill_tokens, decode_rows)
        if known >= SETTLED and expected > 0:
            seconds = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
        if prefill_tokens:
            extra = max(seconds - self.predict(0, decode_rows), 0.0)
            self._chunks = self._chunks * FORGET + 1
            self._tokens = self._tokens * FORGET + prefill_tokens
            self._extra = self._extra * FORGET + extra
        elif decode_rows:
            self._steps = self._steps * FORGET + 1
            self._seconds = self._seconds * FORGET + seconds
            self._rows = self._rows * FORGET + decode_rows
            self._rows_squared = self._rows_squared * FORGET + decode_rows**2
            self._rows_seconds = self._rows_seconds * FORGET + decode_rows * seconds

    @property
    def token_s(self) -> float | None:
        """Seconds per prefill token; None before the first was seen."""
        return self._extra / self._tokens if self._tokens else None

    def predict(self, prefill_tokens: int, decode_rows: int) -> float:
        return self._decode(decode_rows) + prefill_tokens * (self.token_s or 0.0)

    def room(self, budget_s: float, decode_rows: int, most: int) -> int:
        """Prefill tokens, `most` at most, with which a step of these rows stays inside the budget.

        0 as long as the cost of a token is not known.
        """
        left = budget_s - self._decode(decode_rows)
        if self.token_s is None or left <= 0:
            return 0
        return most if self.token_s * most <= left else int(left / self.token_s)

    def _decode(self, rows: int) -> float:
        """Base and slope are never negative: the line stays flat or rises from 0 at the least."""
        if not self._steps:
            return 0.0
        mean_rows, mean_s = self._rows / self._steps, self._seconds / self._steps
        spread = self._rows_squared / self._steps - mean_rows**2
        slope = 0.0
        if spread > 1e-6 * mean_rows**2:
            slope = (self._rows_seconds / self._steps - mean_rows * mean_s) / spread
        slope = min(max(slope, 0.0), mean_s / mean_rows)
        return max(mean_s + slope * (rows - mean_rows), 0.0)  # rounding

    def __repr__(self) -> str:
        token = f"{self.token_s * 1e6:.1f} us/token" if self.token_s is not None else "no prefill"
        return f"<StepCost {self._decode(1) * 1e3:.2f} ms at 1 row, {token}>"
