"""Checkpoints for vLLM, and the environment that it wants before anything imports torch's Triton."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import checkpoints

pytest.importorskip("vllm", reason="vLLM is not installed: `make test-vllm` runs these tests")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a random checkpoint of an architecture, once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = checkpoints.make(tmp_path_factory.mktemp(name), name)
        return made[name]

    return make
