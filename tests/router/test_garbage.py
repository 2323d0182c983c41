"""Collections happen where `sweep` is called, and only once there is something to collect."""

from __future__ import annotations

import gc
import weakref

import pytest
from diptych.router import garbage


class Node:
    """In a cycle with itself."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def _off():
    gc.collect()
    garbage.off()
    yield
    gc.enable()


@pytest.mark.usefixtures("_off")
def test_a_cycle_is_collected_by_a_sweep_that_is_due():
    lost = weakref.ref(Node())
    garbage.sweep()
    assert lost() is not None
    kept = [[] for _ in range(garbage.YOUNG + 1)]
    assert lost() is not None and kept
    garbage.sweep()
    assert lost() is None
