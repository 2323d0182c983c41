"""Triton's compiler and ptxas need no GPU: every kernel becomes machine code, without spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_MOST = 227 << 10  #: bytes of shared memory that a block of sm_90 and sm_100 may have


def compiled(capability: int, cache: Path) -> dict[str, dict]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, str(Path(__file__).with_name("compiling.py")), str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def check(found: dict[str, dict]) -> None:
    assert not [name for name, kernel in found.items() if kernel["stack_bytes"]]
    assert max(kernel["shared_bytes"] for kernel in found.values()) <= SHARED_MOST


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    found = compiled(90, tmp_path)
    check(found)
    assert found["prefill"]["wgmma"] and found["matmul"]["wgmma"]
    assert found["quantize"]["bounds_keep_nan"], "a damaged model's NaN would become 448"


@pytest.mark.daily
def test_every_kernel_compiles_for_blackwell(tmp_path: Path) -> None:
    check(compiled(100, tmp_path))


@pytest.mark.long
def test_every_kernel_compiles_for_ampere(tmp_path: Path) -> None:
    """Wide prefill spills there: it is no target of ours, just a place that must work."""
    assert compiled(80, tmp_path)
