"""Variants of a test whose neighbours take the same way through the code: `make test-daily`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def daily(values: Iterable[Any]) -> list[Any]:
    """Return parameters whose tests are left to `make test-daily`."""
    return [pytest.param(value, marks=pytest.mark.daily) for value in values]


def daily_but(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Return all values, of which those that are not quick are left to `make test-daily`."""
    quick = list(quick)
    return [
        value if value in quick else pytest.param(value, marks=pytest.mark.daily)
        for value in values
    ]
