"""The quickest clients of tests/clients against a gateway: their own scripts, feature by feature."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.standin import StandIn, checkpoint, standing_in

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests/clients/python"
#: What the clients lack in our environment, in front of it: `make build/quick-clients`.
QUICK_CLIENTS = ROOT / "build/quick-clients"
OWN_PACKAGES = {"openai_sdk", "anthropic_sdk"}  #: They need nothing from there.
#: A feature that the stand-in's workers cannot have: they say the same whatever the answer begins with.
NEEDS_A_MODEL = {"prefill continued"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("clients") / "demo")


@pytest.fixture(scope="module")
def gateway(folder: Path) -> Iterator[StandIn]:
    with standing_in(folder) as running:
        yield running


@pytest.mark.parametrize(
    ("script", "features"),
    [
        ("openai_sdk", 15),
        ("anthropic_sdk", 12),
        pytest.param("llm_client", 7, marks=pytest.mark.slow),
        pytest.param("instructor_client", 4, marks=pytest.mark.slow),
        pytest.param("langchain_client", 11, marks=pytest.mark.slow),
    ],
)
def test_all_features_of_a_client_pass(
    gateway: StandIn, folder: Path, script: str, features: int
) -> None:
    if not QUICK_CLIENTS.exists() and script not in OWN_PACKAGES:
        pytest.skip("its packages are not installed: `make build/quick-clients` does it")
    done = subprocess.run(
        [sys.executable, SCRIPTS / f"{script}.py"],
        env={
            **os.environ,
            "PYTHONPATH": str(QUICK_CLIENTS),
            "CLIENT_URL": gateway.url,
            "CLIENT_MODEL": "demo",
            "CLIENT_TOKENIZER": str(folder),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"feature"')]
    outcomes = [json.loads(line) for line in lines]
    assert len(outcomes) == features, done.stderr[-2000:]
    failed = [one for one in outcomes if not one["passed"] and one["feature"] not in NEEDS_A_MODEL]
    assert not failed, failed
