"""Triton's kernels: by its interpreter on the CPU (tests/conftest.py), or on the GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import checkpoints

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}

if find_spec("triton") is None:  # it has no wheel for this platform
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Philox multiplies beyond 64 bits on purpose; numpy, under the interpreter, says so."""
    mark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
    for item in items:
        if "engine/gpu" in item.nodeid:
            item.add_marker(mark)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Draw fresh inputs in every run; a failure shows its seed, and GPU_TEST_SEED gives it again."""
    seed = int(os.environ.get("GPU_TEST_SEED", torch.seed() % 2**31))
    print(f"GPU_TEST_SEED={seed}")
    torch.manual_seed(seed)


@pytest.fixture
def exact_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's products element by element: numpy's, by the kernels of some processors
    (AMD's, Haswell's), give a row other bits at another place in the matrix."""

    def matmul(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return np.einsum("...ik,...kj->...ij", a, b, dtype=dtype)

    monkeypatch.setattr(np, "matmul", matmul)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Models with heads of 16 or more numbers, a power of two."""
    root = tmp_path_factory.mktemp("small")

    def make(name: str) -> Path:
        folder = root / name
        return folder if folder.exists() else checkpoints.make(folder, name, **SMALL)

    return make
