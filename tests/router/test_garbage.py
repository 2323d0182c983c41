"""Collections happen where `sweep` is called, and only once there is something to collect; memory
is there before it is needed."""

from __future__ import annotations

import gc
import subprocess
import sys
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
    garbage.disable()
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


FAULTS = """
import resource, sys
from diptych.router import garbage
if sys.argv[1] == "off":
    garbage.disable()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = faults()
little = [bytes(60) for _ in range(100_000)]
large = [bytearray(20_000) for _ in range(200)]
print(faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator is glibc's")
def test_what_an_event_keeps_touches_no_new_page():
    def faults(how: str) -> int:
        command = [sys.executable, "-c", FAULTS, how]
        return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)

    assert faults("off") < faults("on") / 4
