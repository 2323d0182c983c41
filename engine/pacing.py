"""The online cost model: how long a step takes, learned from the steps before it (pure).

    decode_s  = base_s + row_s * decode_rows + kv_token_s * decode_kv_tokens
    prefill_s = prompt_s * prefill_prompts + token_s * prefill_tokens + pair_s * attended_pairs
    step_s    = decode_s + prefill_s

`StepWork` says what is counted. Each line has a `LeastSquaresFit` of its own:
- a step without prefill is a point of the first line;
- a step with prefill is a point of the second: what it took longer than its decodes would have.

`engine.scheduler` plans by the predictions how much prefill fits beside decode.

Both fits forget old steps (`FORGETTING_FACTOR`) and have no negative factor. A step that took much
more than predicted counts as `OUTLIER_RATIO` times the prediction, one that took much less as the
prediction divided by it. So a single pause moves the model little, and a real change still gets
through within a few steps.

The predictions are means. `StepCost.tail_ratio` is how much longer than predicted a slow step
takes: `TAIL_QUANTILE` of the last `TAIL_STEPS` steps with both kinds of work stayed below it. Only
long steps count for it, because short ones are far from any budget.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

FORGETTING_FACTOR = 0.97  #: weight of a step after the next of its kind: half is gone after 23
#: a step counts as at most three times, and at least a third of, what was predicted: near enough
#: that one pause does little harm, far enough that a real change is learned within a few steps
OUTLIER_RATIO = 3.0
#: weight of the steps before, from which on a step can be an outlier: with fewer than about four
#: steps the prediction is too poor to doubt a step by it
OUTLIER_MINIMUM_WEIGHT = 4.0
TAIL_STEPS = 64  #: enough for a 95 % quantile (three are above it), few enough to follow a change
TAIL_QUANTILE = 0.95  #: the share of long steps that a plan with `tail_ratio` keeps in time
#: pull to the factors before, beside the points' weight: it decides what points do not tell apart
INERTIA = 1e-3
NO_POINTS = 1e-100  #: a column whose squares sum to less had no value but 0


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes, as the cost model counts it."""

    decode_rows: int = 0  #: one of each decoding sequence, and its drafts
    decode_kv_tokens: int = 0  #: KV that decoding sequences read: their lengths
    prefill_tokens: int = 0  #: prompt tokens that are computed
    attended_pairs: int = 0  #: (prefill token, key that it sees) pairs, see `attended_pairs`
    prefill_prompts: int = 0  #: sequences that have prefill tokens


def attended_pairs(tokens: int, start: int) -> int:
    """Returns the number of keys that `tokens` prefill tokens from position `start` on see, in all.

    The token at position p sees the keys 0..p, so this is the sum of p + 1 over the positions:
    tokens * start + tokens * (tokens + 1) / 2.
    """
    return tokens * start + tokens * (tokens + 1) // 2


class LeastSquaresFit:
    """y = factors . x with factors >= 0, by least squares; newer points have more weight.

    With age = number of points added since, and before = the factors when a point is added, the
    factors minimise

        sum_points FORGETTING_FACTOR^age (y - factors . x)^2
        + INERTIA sum_i (sum_points FORGETTING_FACTOR^age x_i^2) (factors_i - before_i)^2

    so where points do not tell two factors apart, both stay about what they were. A factor that would
    be negative is left out, the most negative one first, and none comes back: on noisy points the sum
    may end slightly above its least.
    """

    def __init__(self, size: int) -> None:
        self.factors = [0.0] * size  #: one for each entry of x; all 0 before the first point
        self.total_weight = 0.0  #: of all points; the newest has 1
        self._products = [[0.0] * size for _ in range(size)]  #: weighted sums of x_i x_j
        self._sums = [0.0] * size  #: weighted sums of x_i y

    def predict(self, x: Sequence[float]) -> float:
        """Returns y for `x`, which has `size` entries; 0 before the first point."""
        return sum(factor * value for factor, value in zip(self.factors, x, strict=True))

    def add_point(self, x: Sequence[float], y: float) -> None:
        """Adds a point and finds the factors anew."""
        self._accumulate(x, y)
        active = [i for i in range(len(x)) if self._products[i][i] > NO_POINTS]
        while True:  # without the most negative factor, until none is negative
            solution = self._solve(active)
            lowest = min(solution, default=0.0)
            if lowest >= 0:
                break
            active.pop(solution.index(lowest))
        self.factors = [0.0] * len(x)
        for i, factor in zip(active, solution, strict=True):
            self.factors[i] = factor

    def _accumulate(self, x: Sequence[float], y: float) -> None:
        """Adds the point to the weighted sums, in which every older point counts less now."""
        self.total_weight = self.total_weight * FORGETTING_FACTOR + 1
        for i, value in enumerate(x):
            self._sums[i] = self._sums[i] * FORGETTING_FACTOR + value * y
            products = self._products[i]
            for j, other in enumerate(x):
                products[j] = products[j] * FORGETTING_FACTOR + value * other

    def _solve(self, active: list[int]) -> list[float]:
        """Returns the best factors of the `active` columns, the others being 0.

        Gauss-Jordan elimination on columns scaled to length 1.
        """
        scales = {i: math.sqrt(self._products[i][i]) for i in active}
        rows: list[list[float]] = []
        for i in active:
            row = [self._products[i][j] / (scales[i] * scales[j]) for j in active]
            row[len(rows)] += INERTIA
            row.append(self._sums[i] / scales[i] + INERTIA * self.factors[i] * scales[i])
            rows.append(row)
        for pivot, row in enumerate(rows):  # no pivoting: the matrix is positive definite
            row[:] = [value / row[pivot] for value in row]
            for other in rows:
                if other is not row:
                    factor = other[pivot]
                    other[:] = [a - factor * b for a, b in zip(other, row, strict=True)]
        return [row[-1] / scales[i] for row, i in zip(rows, active, strict=True)]


class StepCost:
    """Takes every step by `observe`; predicts what decode and prefill of the next one take."""

    def __init__(self) -> None:
        self._decode = LeastSquaresFit(3)
        self._prefill = LeastSquaresFit(3)
        #: (predicted, observed) seconds of the last steps with decode and prefill
        self._mixed_steps: deque[tuple[float, float]] = deque(maxlen=TAIL_STEPS)
        self.tail_ratio = 1.0  #: slow steps take this times what is predicted; 1 or more

    def observe(self, seconds: float, work: StepWork) -> None:
        """Learns from a step that took `seconds`. A step without any work teaches nothing."""
        decode_s = self.decode_s(work.decode_rows, work.decode_kv_tokens)
        prefill = (work.prefill_prompts, work.prefill_tokens, work.attended_pairs)
        predicted_s = self.step_s(work)
        fit = self._prefill if work.prefill_tokens else self._decode
        if fit.total_weight >= OUTLIER_MINIMUM_WEIGHT and predicted_s > 0:
            seconds = max(seconds, predicted_s / OUTLIER_RATIO)
            seconds = min(seconds, predicted_s * OUTLIER_RATIO)
            if work.prefill_tokens and work.decode_rows:
                self._mixed_steps.append((predicted_s, seconds))
                self.tail_ratio = self._measure_tail()
        if work.prefill_tokens:
            self._prefill.add_point(prefill, max(seconds - decode_s, 0.0))
        elif work.decode_rows:
            self._decode.add_point((1, work.decode_rows, work.decode_kv_tokens), seconds)

    def _measure_tail(self) -> float:
        """Returns the ratio of observed to predicted that `TAIL_QUANTILE` of long steps stay below.

        Long are those predicted to take at least half of what the longest is.
        """
        longest_s, _ = max(self._mixed_steps)
        ratios = sorted(
            observed_s / predicted_s
            for predicted_s, observed_s in self._mixed_steps
            if predicted_s >= longest_s / 2
        )
        return max(1.0, ratios[int(TAIL_QUANTILE * len(ratios))])

    @property
    def prefill_measured(self) -> bool:
        """True once a step with prefill was observed."""
        return self._prefill.total_weight > 0

    def step_s(self, work: StepWork) -> float:
        """Returns the seconds of a step with this work; of a kind not seen yet, 0."""
        prefill = (work.prefill_prompts, work.prefill_tokens, work.attended_pairs)
        decode_s = self.decode_s(work.decode_rows, work.decode_kv_tokens)
        return decode_s + self._prefill.predict(prefill)

    def decode_s(self, rows: int, kv_tokens: int) -> float:
        """Returns the seconds of a step that only decodes: `rows` rows, and the KV of `kv_tokens`."""
        return self._decode.predict((1, rows, kv_tokens))

    def prefill_s(self, tokens: int, start: int) -> float:
        """Returns the seconds that a step takes longer if it prefills `tokens` tokens as well.

        They stand at position `start` of a prompt and behind.
        """
        return self._prefill.predict((1, tokens, attended_pairs(tokens, start)))

    def prefill_room(self, seconds: float, start: int, token_limit: int) -> int:
        """Returns how many prefill tokens from position `start` on take no longer than `seconds`.

        They are `token_limit` at most. While the cost of prefill is not known they are 0, but for
        infinite `seconds`, in which any number is prefilled. With n tokens,
        `prefill_s` is prompt_s + n (token_s + pair_s (start + 1/2)) + n^2 pair_s / 2; the root of
        linear n + square n^2 = c is n = 2c / (linear + sqrt(linear^2 + 4 square c)), also where
        square is 0.
        """
        if seconds == math.inf:
            return token_limit
        if not self.prefill_measured or seconds <= 0:
            return 0
        if self.prefill_s(token_limit, start) <= seconds:
            return token_limit
        prompt_s, token_s, pair_s = self._prefill.factors
        if prompt_s >= seconds:
            return 0
        seconds -= prompt_s
        linear = token_s + pair_s * (start + 0.5)
        square = pair_s / 2
        root = math.sqrt(linear * linear + 4 * square * seconds)
        return min(int(2 * seconds / (linear + root)), token_limit)

    def __repr__(self) -> str:
        base_s, row_s, kv_token_s = self._decode.factors
        prompt_s, token_s, pair_s = self._prefill.factors
        return (
            f"<StepCost {base_s * 1e3:.2f} ms + {row_s * 1e6:.1f} us/row"
            f" + {kv_token_s * 1e9:.1f} ns/key + {prompt_s * 1e3:.2f} ms/prompt"
            f" + {token_s * 1e6:.1f} us/token + {pair_s * 1e9:.2f} ns/pair,"
            f" {TAIL_QUANTILE:.0%} within x {self.tail_ratio:.2f}>"
        )
