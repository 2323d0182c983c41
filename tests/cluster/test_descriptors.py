"""Room for file descriptors: the kernel's table is as large as asked, and no file stays open."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Prints the slots of the process' table before and after, and whether its files are the same.
SCRIPT = """
import os, resource, sys
from pathlib import Path
from diptych.cluster.descriptors import reserve_descriptors

def slots():
    status = Path("/proc/self/status").read_text()
    return int(status.split("FDSize:")[1].split()[0])

soft_limit = int(sys.argv[1])
hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard_limit))
files = os.listdir("/proc/self/fd")
before = slots()
reserve_descriptors(2_000)
print(before, slots(), files == os.listdir("/proc/self/fd"))
"""


def slots_around_a_reservation(soft_limit: int) -> tuple[int, int]:
    """Returns the table's slots before and after, in a process of its own."""
    parent = Path(__file__).parents[2].resolve().parent
    printed = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(soft_limit)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(parent), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    before, after, same_files = printed.split()
    assert same_files == "True"
    return int(before), int(after)


@pytest.mark.skipif(sys.platform != "linux", reason="the table is Linux's")
def test_the_table_has_room_for_as_many_files_as_asked() -> None:
    before, after = slots_around_a_reservation(soft_limit=4_096)
    assert before < 2_000 <= after


@pytest.mark.skipif(sys.platform != "linux", reason="the table is Linux's")
def test_a_process_that_may_open_fewer_files_has_room_for_those() -> None:
    _, after = slots_around_a_reservation(soft_limit=600)
    assert 600 <= after < 2_000
