"""How certain a share of requests is: intervals by the bootstrap, over stretches of a run.

Requests that arrive together wait together. So a draw does not take single requests but stretches
of requests in the order of their arrival, from all runs alike. Two layouts that served the same
requests are compared draw by draw: what was hard for both does not widen the interval of their
ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np

STRETCHES = 20  #: of each run; a run of fewer requests has one for each
DRAWS = 2000  #: draws of stretches by which an interval is found
PERCENTILES = (2.5, 97.5)  #: of the draws, at which an interval ends

#: For each run, whether each request met its targets, in the order of the requests' numbers: by
#: arrival, but in a closed loop session by session.
MetByRun = Sequence[Sequence[bool]]


class Interval(NamedTuple):
    """The middle 95 % of a figure's draws; both ends are in it."""

    low: float
    high: float


def share_interval(met: MetByRun) -> Interval:
    """Return the interval of the share of requests that met their targets."""
    stretches = _Stretches.of(met)
    return _interval(stretches.met[stretches.draws()].sum(axis=1) / stretches.drawn_requests())


def ratio_interval(numerator: MetByRun, denominator: MetByRun) -> Interval:
    """Return the interval of how many times as many requests of the first met their targets.

    Both have to be of the same requests. A ratio of nothing to nothing counts as 1.
    """
    above = _Stretches.of(numerator)
    below = _Stretches.of(denominator)
    draws = above.draws()
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = above.met[draws].sum(axis=1) / below.met[draws].sum(axis=1)
    return _interval(np.nan_to_num(ratios, nan=1.0, posinf=inf))


class _Stretches(NamedTuple):
    """The stretches of all runs, one after the other: an element of each array for each stretch."""

    met: np.ndarray  #: how many of its requests met their targets
    requests: np.ndarray  #: how many requests it has

    @staticmethod
    def of(met: MetByRun) -> _Stretches:
        """Cut each run into stretches of about equally many requests; an empty run has none."""
        parts = [
            part
            for run in met
            if len(run)
            for part in np.array_split(np.asarray(run, dtype=float), min(STRETCHES, len(run)))
        ]
        return _Stretches(
            np.array([part.sum() for part in parts]), np.array([len(part) for part in parts])
        )

    def draws(self) -> np.ndarray:
        """Return `DRAWS` rows of indices of stretches; equal rows for equally many stretches.

        Each row has as many stretches as there are, drawn with repetition. The fixed seed makes two
        layouts with the same requests draw the same stretches.
        """
        count = len(self.met)
        return np.random.default_rng(0).integers(0, count, (DRAWS, count))

    def drawn_requests(self) -> np.ndarray:
        """Return how many requests each draw has; stretches differ in length."""
        return self.requests[self.draws()].sum(axis=1)


def _interval(values: np.ndarray) -> Interval:
    # Without interpolation: between a number and infinity there is nothing.
    low, high = np.percentile(values, PERCENTILES, method="inverted_cdf")
    return Interval(float(low), float(high))
