"""A box for all tests, with the chart installed in it. `make test-kube` runs them, nothing else does."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator

import pytest
import yaml

from . import box, settings
from .release import Release

VALUES = settings.REPOSITORY / "tests/kube/values.yaml"
STORE = settings.REPOSITORY / "tests/kube/store.yaml"
CHART = settings.REPOSITORY / "deploy/helm/diptych"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the tests that need the box out, unless `DIPTYCH_KUBE` asks for them."""
    if os.environ.get("DIPTYCH_KUBE") == "1":
        return
    skip = pytest.mark.skip(reason="needs the Kubernetes in a box: make test-kube")
    for item in items:  # those of all folders
        if "running_box" in getattr(item, "fixturenames", ()):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def running_box() -> Iterator[None]:
    """A box that is up: the one that is, or else one for these tests."""
    if box.is_up():
        yield
        return
    box.up()
    yield
    box.down()


@pytest.fixture(scope="session")
def namespace(running_box: None) -> str:
    """A namespace with the release's Secret."""
    name = settings.RELEASE_NAMESPACE
    box.kubectl("create", "namespace", name, check=False)
    make_secret(name, "diptych-secret")
    return name


def make_secret(namespace: str, name: str) -> None:
    """Make the Secret with three new words, unless it is there."""
    words = [
        f"--from-literal={key}={secrets.token_hex(16)}" for key in ("secret", "auth_token", "admin")
    ]
    line = ("--namespace", namespace, "create", "secret", "generic", name)
    box.kubectl(*line, *words, check=False)


def make_store(namespace: str) -> None:
    """Run a Redis, and make the Secret with its password in the release's namespace."""
    box.kubectl("apply", "--filename", str(STORE))
    pod = yaml.safe_load_all(STORE.read_text())
    command = next(one for one in pod if one["kind"] == "Pod")["spec"]["containers"][0]["command"]
    word = f"--from-literal=password={command[-1]}"
    line = ("--namespace", namespace, "create", "secret", "generic", "store", word)
    box.kubectl(*line, check=False)
    box.kubectl("--namespace", "store", "wait", "--for=condition=Ready", "pod/redis")


@pytest.fixture(scope="session")
def release(namespace: str) -> Release:
    """The chart, installed and serving."""
    if settings.operator_program() is None:
        pytest.skip("needs KubeRay's operator: KUBERAY_OPERATOR=FILE make test-kube")
    if not shutil.which("redis-server"):
        pytest.skip("needs Redis for what Ray's head knows: apt-get install redis-server")
    make_store(namespace)
    release = Release(namespace, "diptych", CHART, VALUES)
    release.upgrade()
    release.wait_until_serving()
    return release
