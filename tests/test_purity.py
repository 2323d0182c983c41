"""What must start fast or run anywhere loads no heavy library."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "nixl")
LIGHT = [
    "diptych.protos.frames",
    "diptych.kv_transfer.tickets",
    "diptych.kv_transfer.fan",
    "diptych.kv_transfer.identity",
    "diptych.kv_transfer.tiers",
    "diptych.engine.blocks",
    "diptych.engine.commands",
    "diptych.engine.prefixes",
    "diptych.engine.scheduler",
    "diptych.router",
    "diptych.router.core",
    "diptych.prefill_worker",
    "diptych.decode_worker",
    "diptych.simulator",
    "diptych.simulator.exact",
    "diptych.simulator.study",
    "diptych.cluster.cli",
]


@pytest.mark.parametrize("module", LIGHT)
def test_importing_it_loads_no_heavy_library(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(sys.modules.keys() & {set(HEAVY)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
