"""Percentiles of measured seconds, as reports show them (pure)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def percentiles(
    seconds: Sequence[float], ranks: Sequence[int], factor: float, digits: int
) -> dict[str, float]:
    """Returns `{"p50": ...}` for each rank, of the values times `factor`; empty without values.

    `factor` turns seconds into the unit that is shown, 1e3 for ms; `digits` are decimals.
    """
    if not seconds:
        return {}
    values = np.percentile(seconds, ranks) * factor
    return {
        f"p{rank}": round(float(value), digits) for rank, value in zip(ranks, values, strict=True)
    }
