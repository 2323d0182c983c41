"""Least squares with factors that are not negative, for fits of a whole recording at once.

The seconds that a worker takes for a token, a row or a call cannot be negative, so a fit that lets
them be only describes noise. Every offline fit of a cost that is linear in what is counted uses
this module. Three other fits differ in kind, and stay where they are:
- `engine/pacing.py` learns while the engine runs: it takes one step at a time, forgets old ones,
  and keeps factors that new steps do not tell apart. It runs within a step, without numpy.
- `router/predictor.py` corrects a known closed form by moving averages of single ratios.
- `fit.py` fits efficiencies, in which the closed form is not linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

SCALE_MINIMUM = 1e-12  #: in place of the largest value of a column of zeros, to divide by it


class FittedLine(NamedTuple):
    """The line `base + slope * x`; neither is negative."""

    base: float
    slope: float


def fit_factors(
    rows: Sequence[Sequence[float]],
    values: Sequence[float],
    weights: Sequence[float] | None = None,
) -> list[float]:
    """Return the factors >= 0 that minimise `sum of weight * (value - factors . row)^2`.

    There is a factor for each column of `rows`, and a value, or weight, for each row. Every row
    counts once if there are no weights. There must be at least one row.
    """
    matrix = np.array(rows, dtype=float)
    targets = np.array(values, dtype=float)
    # Columns are scaled to the same size: the solver loses accuracy where tokens stand beside ones.
    scale = np.maximum(matrix.max(axis=0), SCALE_MINIMUM)
    matrix /= scale
    if weights is not None:
        root_weights = np.sqrt(np.array(weights, dtype=float))
        matrix *= root_weights[:, None]
        targets *= root_weights
    solution, _ = nnls(matrix, targets)
    return [float(factor) for factor in solution / scale]


def fit_line(xs: Sequence[float], values: Sequence[float]) -> FittedLine:
    """Return the line through the points (x, value) with the least sum of squared errors."""
    base, slope = fit_factors([[1.0, x] for x in xs], values)
    return FittedLine(base, slope)
