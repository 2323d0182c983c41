"""Triton's kernels: by its interpreter on the CPU (tests/conftest.py), or on the GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Philox multiplies beyond 64 bits on purpose; numpy, under the interpreter, says so."""
    mark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
    for item in items:
        if "engine/gpu" in item.nodeid:
            item.add_marker(mark)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(torch.seed() % 2**31)  # fresh inputs in every run
