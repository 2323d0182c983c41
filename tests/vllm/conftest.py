"""Checkpoints for vLLM, and the environment that it wants before anything imports torch's Triton."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import checkpoints

#: Without vLLM none of these can be imported: `make test-vllm` runs them where it is installed.
collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a random checkpoint of an architecture, once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = checkpoints.make(tmp_path_factory.mktemp(name), name)
        return made[name]

    return make
