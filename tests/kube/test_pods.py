"""Rules that the API server of the box enforces, with the chart's own objects; no operator needed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from . import box, settings

EMPTY_NAMESPACE = "fleets"
FLEETS = sorted((settings.REPOSITORY / "deploy/rendered").glob("*.yaml"))


@pytest.mark.parametrize("fleet", FLEETS, ids=lambda path: path.stem)
def test_the_server_takes_every_rendered_fleet_without_a_warning(
    namespace: str, fleet: Path, tmp_path: Path
) -> None:
    # In a namespace without a release, whose fields would be Helm's.
    box.kubectl("create", "namespace", EMPTY_NAMESPACE, check=False)
    text = fleet.read_text().replace(f"namespace: {namespace}\n", f"namespace: {EMPTY_NAMESPACE}\n")
    text = re.sub(r", endPort: \d+", "", text)  # newer than the box's server
    file = tmp_path / fleet.name
    file.write_text(text)
    line = ("apply", "--server-side", "--dry-run=server", "--validate=strict")
    result = box.kubectl(*line, "--filename", str(file))
    assert "warning" not in result.stderr.lower()
    documents = [document for document in yaml.safe_load_all(text) if document]
    assert len(result.stdout.splitlines()) == len(documents)


def test_the_heads_account_may_change_its_release_and_nothing_else(namespace: str) -> None:
    if not box.kubectl("--namespace", namespace, "get", "role/diptych-head", check=False).stdout:
        pytest.skip("needs the installed release: KUBERAY_OPERATOR=FILE make test-kube")
    account = f"system:serviceaccount:{namespace}:diptych-head"

    def may(*what: str) -> bool:
        line = ("--namespace", namespace, "auth", "can-i", *what, "--as", account)
        return box.kubectl(*line, check=False).stdout.strip() == "yes"

    assert may("patch", "rayservices/diptych")
    assert may("patch", "rayclusters")
    assert not may("patch", "rayservices/another")
    assert not may("get", "secrets")
    assert not may("create", "pods")
