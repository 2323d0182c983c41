"""Collections between events instead of amid one: a router's state is large and makes no cycles.

`off()` once in a process that runs a router, `sweep()` after each answer.
"""

from __future__ import annotations

import gc

YOUNG, MIDDLE, OLD = 20_000, 20, 100  #: thresholds, as of `gc.set_threshold`


def off() -> None:
    gc.disable()


def sweep() -> None:
    """Collects what Python itself would have, by now."""
    young, middle, old = gc.get_count()
    if young > YOUNG:
        gc.collect(0 if middle <= MIDDLE else 1 if old <= OLD else 2)
