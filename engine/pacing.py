"""How long a step takes, learned from the steps before it (pure).

    seconds = base + row_s * rows + key_s * keys                        of decode
            + prompt_s * prompts + token_s * tokens + pair_s * pairs    of prefill

`keys` is the KV that decoding sequences read, in tokens: their lengths. `pairs` counts, for every
prefill token, the keys that it sees. Steps without prefill give the first line, steps with prefill
the second: what they took longer than their decodes would have. Both are least squares with
exponential forgetting and no negative factor (`Fit`).
A step that took much more or less than predicted counts as `OUTLIER` times that, so a single pause
moves the model little, and a real change still gets through within a few steps.
These are means. `upper` is the factor on the prediction that `QUANTILE` of the last `RECENT` steps
with both kinds of work stayed below; only long ones count, for the short are far from any budget.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

FORGET = 0.97  #: weight of a step after the next one of its kind: half is forgotten after 23
OUTLIER = 3.0
SETTLED = 4.0  #: weight of steps from which on a step can be an outlier
RECENT, QUANTILE = 64, 0.95
STAY = 1e-3  #: weight of the factors before, beside the steps': of what steps do not tell apart


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes; the module says what is counted."""

    rows: int = 0
    keys: int = 0
    tokens: int = 0
    pairs: int = 0
    prompts: int = 0


def pairs(tokens: int, start: int) -> int:
    """Keys that prefill tokens from position `start` on see, summed over the tokens."""
    return tokens * start + tokens * (tokens + 1) // 2


class Fit:
    """y = factors . x with factors >= 0, by least squares over the points added, newest first.

    Minimises sum FORGET^age (y - f . x)^2 + STAY sum_i (sum FORGET^age x_i^2) (f_i - before_i)^2:
    where points do not tell two factors apart, both stay about what they were.
    """

    def __init__(self, size: int) -> None:
        self.factors = [0.0] * size
        self.weight = 0.0  #: of all points; the newest has 1
        self._products = [[0.0] * size for _ in range(size)]
        self._sums = [0.0] * size

    def of(self, x: Sequence[float]) -> float:
        return sum(factor * value for factor, value in zip(self.factors, x, strict=True))

    def add(self, x: Sequence[float], y: float) -> None:
        self.weight = self.weight * FORGET + 1
        for i, value in enumerate(x):
            self._sums[i] = self._sums[i] * FORGET + value * y
            for j, other in enumerate(x):
                self._products[i][j] = self._products[i][j] * FORGET + value * other
        active = [i for i in range(len(x)) if self._products[i][i] > 1e-100]
        while True:
            found = self._solve(active)
            if min(found, default=0.0) >= 0:
                break
            active.pop(found.index(min(found)))
        fresh = dict(zip(active, found, strict=True))
        self.factors = [fresh.get(i, 0.0) for i in range(len(x))]

    def _solve(self, active: list[int]) -> list[float]:
        """The best factors of `active`, the others being 0. Gauss, on columns of length 1."""
        columns = [(i, math.sqrt(self._products[i][i])) for i in active]
        rows = [
            [self._products[i][j] / (s * t) + STAY * (i == j) for j, t in columns]
            + [self._sums[i] / s + STAY * self.factors[i] * s]
            for i, s in columns
        ]
        for i, row in enumerate(rows):  # no pivoting: the matrix is positive definite
            row[:] = [value / row[i] for value in row]
            for other in rows:
                if other is not row:
                    other[:] = [a - other[i] * b for a, b in zip(other, row, strict=True)]
        return [row[-1] / s for row, (_, s) in zip(rows, columns, strict=True)]


class StepCost:
    """`observe` every step; ask what decode and prefill of the next take, what has `room`."""

    def __init__(self) -> None:
        self._decode, self._prefill = Fit(3), Fit(3)
        self._mixed: deque[tuple[float, float]] = deque(maxlen=RECENT)  #: predicted, observed
        self.upper = 1.0

    def observe(self, seconds: float, work: Work) -> None:
        decode = self.decode_s(work.rows, work.keys)
        prefill = (work.prompts, work.tokens, work.pairs)
        expected = decode + self._prefill.of(prefill)
        known = self._prefill if work.tokens else self._decode
        if known.weight >= SETTLED and expected > 0:
            seconds = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
            if work.tokens and work.rows:
                self._mixed.append((expected, seconds))
                self.upper = self._upper()
        if work.tokens:
            self._prefill.add(prefill, max(seconds - decode, 0.0))
        elif work.rows:
            self._decode.add((1, work.rows, work.keys), seconds)

    def _upper(self) -> float:
        long = max(self._mixed)[0] / 2
        ratios = sorted(took / expected for expected, took in self._mixed if expected >= long)
        return max(1.0, ratios[int(QUANTILE * len(ratios))])

    @property
    def knows_prefill(self) -> bool:
        return self._prefill.weight > 0

    def decode_s(self, rows: int, keys: int) -> float:
        """Seconds of a step that only decodes."""
        return self._decode.of((1, rows, keys))

    def prefill_s(self, tokens: int, start: int) -> float:
        """Seconds more, if it also prefills `tokens` from position `start` on."""
        return self._prefill.of((1, tokens, pairs(tokens, start)))

    def room(self, seconds: float, start: int, most: int) -> int:
        """Prefill tokens from position `start` on, `most` at most, that take no longer.

        0 as long as the cost of prefill is not known. Solves prompt_s + a n + b n^2 = seconds.
        """
        if seconds == math.inf:
            return most
        if not self.knows_prefill or seconds <= 0:
            return 0
        if self.prefill_s(most, start) <= seconds:
            return most
        prompt, token, pair = self._prefill.factors
        if prompt >= seconds:
            return 0
        seconds -= prompt
        linear, square = token + pair * (start + 0.5), pair / 2
        root = math.sqrt(linear * linear + 4 * square * seconds)
        return min(int(2 * seconds / (linear + root)), most)

    def __repr__(self) -> str:
        base, row, key = self._decode.factors
        prompt, token, pair = self._prefill.factors
        decode = f"{base * 1e3:.2f} ms + {row * 1e6:.1f} us/row + {key * 1e9:.1f} ns/key"
        prefill = (
            f"{prompt * 1e3:.2f} ms/prompt + {token * 1e6:.1f} us/token + {pair * 1e9:.2f} ns/pair"
        )
        return f"<StepCost {decode} + {prefill}, {QUANTILE:.0%} within x {self.upper:.2f}>"
