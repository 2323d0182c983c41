"""How many examples a property test tries."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> int:
    """Return `count`, or half of it where the same examples are tried each time, as in `make test`.

    These have passed before: they guard against what changed. New ones are tried by `make
    test-long`, in full number.
    """
    return count // 2 if settings.default and settings.default.derandomize else count
