"""One random checkpoint of each architecture for the whole session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import checkpoints
from tests.support.variants import daily_but


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint(name)` is the folder of that architecture's random model."""
    root = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = checkpoints.make(root / name, name)
        return made[name]

    return folder


@pytest.fixture(params=sorted(checkpoints.ARCHITECTURES))
def model(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Path:
    """Each architecture in turn."""
    return checkpoint(request.param)


@pytest.fixture(params=daily_but(["llama", "qwen3_moe"], sorted(checkpoints.ARCHITECTURES)))
def dense_or_experts(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Path:
    """A dense model, and one of experts with norms of queries and keys; daily all architectures."""
    return checkpoint(request.param)
