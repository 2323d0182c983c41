"""NIXL's import must not break the logging of the process that it is imported into."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import logging, logging.handlers, sys
target = logging.StreamHandler(sys.stdout)
buffer = logging.handlers.MemoryHandler(10, target=target)
logging.getLogger("ray.serve").addHandler(buffer)
from diptych.kv_transfer.speed import SpeedPool
from diptych.kv_transfer.transports.nixl import NixlTransport
transport = NixlTransport("agent", SpeedPool(1 << 20, shared=False))
import nixl.logging  # it has been imported: there is nothing left to close
print("kept" if buffer.target is target else f"now it is {buffer.target}")
transport.close()
"""


def test_log_handlers_that_buffer_keep_their_targets() -> None:
    pytest.importorskip("nixl")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.startswith("kept"), (done.stdout, done.stderr)
