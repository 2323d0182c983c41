"""What people install: the smallest size is enough to serve, and what is built works outside the tree."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.pip_settings import uv_variables
from tests.support.live import running
from tests.support.pty import OnTerminal

ROOT = Path(__file__).parent.parent

#: modules of every process of a cluster, and the commands that talk to one
SERVE_MODULES = (
    "diptych.cluster.app",
    "diptych.cluster.gateway.gateway",
    "diptych.cluster.router_service",
    "diptych.cluster.worker.process",
    "diptych.cluster.worker.rank",
    "diptych.cluster.control.control",
    "diptych.cluster.cli.serve",
    "diptych.cluster.cli.chat",
    "diptych.cluster.cli.status",
)

VENDORED_BY_RAY = {"psutil", "colorama"}  #: Ray brings copies of its own


def distributions_of_the_smallest_size() -> set[str]:
    """Return the names of all distributions that the dependencies without extras bring along."""
    found: set[str] = set()
    visited: set[tuple[str, frozenset[str]]] = set()
    to_visit = [("diptych", frozenset[str]())]
    while to_visit:
        name, extras = to_visit.pop()
        if (name, extras) in visited:
            continue
        visited.add((name, extras))
        try:
            lines = requires(name) or []
        except PackageNotFoundError:
            continue  # another platform's
        found.add(name)
        for requirement in map(Requirement, lines):
            marker = requirement.marker
            if marker and not any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
                continue
            to_visit.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return found


def test_serving_needs_nothing_but_what_the_smallest_size_installs() -> None:
    """The modules import though everything that only the larger sizes install cannot be found."""
    installed = distributions_of_the_smallest_size()
    hidden = {
        module
        for module, owners in packages_distributions().items()
        if not {canonicalize_name(owner) for owner in owners} & installed
    } - VENDORED_BY_RAY
    assert {"locust", "transformers", "helm_sdkpy"} & hidden, "the larger sizes must be hidden"
    hide = f"""
import importlib.abc, sys
class Hidden(importlib.abc.MetaPathFinder):
    names = {hidden!r}
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in self.names:
            raise ModuleNotFoundError(fullname, name=fullname)
sys.meta_path.insert(0, Hidden())
"""
    imports = "\n".join(f"import {module}" for module in SERVE_MODULES)
    done = subprocess.run(
        [sys.executable, "-c", hide + imports],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr


def build_wheel_from_an_sdist(folder: Path) -> Path:
    """Build an sdist of the committed and the changed files, and a wheel of the sdist alone."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    source = folder / "source"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).exists():
                archive.add(ROOT / name, name)
    packed.seek(0)
    with tarfile.open(fileobj=packed) as archive:
        archive.extractall(source, filter="data")
    build = "import setuptools.build_meta as backend; backend.build_sdist('../dist')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    sdist = next((folder / "dist").glob("*.tar.gz"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, sdist]
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.mark.cluster
@pytest.mark.slow
def test_a_wheel_made_of_the_sdist_serves_in_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = build_wheel_from_an_sdist(tmp_path)
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", installed]
    subprocess.run([str(part) for part in [*command, wheel]], check=True, capture_output=True)
    empty.mkdir()
    monkeypatch.chdir(empty)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    origin = subprocess.run(
        [sys.executable, "-c", "import diptych.cluster as cluster; print(cluster.__file__)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert origin.startswith(str(installed)), "the tree must not be what is tested"
    with running(tmp_path / "serve.log", environment=environment) as live:
        answer = live.chat("What is prefill?", max_tokens=8).json()
        assert answer["usage"]["completion_tokens"] == 8
    assert list(empty.iterdir()) == []


def run_progress(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "deploy/progress.py"), "a thing"]
    return subprocess.run(
        [*command, sys.executable, "-c", script], capture_output=True, text=True, check=False
    )


def test_progress_shows_each_phase_of_pip_once_where_there_is_no_terminal() -> None:
    done = run_progress(
        "print('Collecting ray==2.60.0'); print('  Downloading ray-2.60.0-cp311.whl (70.1 MB)');"
        "print('Collecting numpy>=2'); print('Installing collected packages: numpy, ray')"
    )
    assert done.returncode == 0
    phases = re.findall(r"installing a thing: (.*)", done.stdout)
    assert phases == [
        "starting",
        "finding versions",
        "downloading",
        "putting packages in place",
    ]
    assert "installed a thing in" in done.stdout


def test_progress_shows_what_uv_does() -> None:
    done = run_progress(
        "print('Resolved 16 packages in 299ms'); print('Downloading sympy (6.0MiB)');"
        "print(' Downloaded sympy'); print('Prepared 16 packages in 5.51s')"
    )
    phases = re.findall(r"installing a thing: (.*)", done.stdout)
    assert phases == ["starting", "downloading", "putting packages in place"]


def test_uv_is_told_what_pip_is_configured_with() -> None:
    """A variable wins over files, and what concerns other commands is not passed on."""
    listed = """:env:.find-links='/opt/wheels'
:env:.disable-pip-version-check='1'
download.index-url='https://other.example/simple'
global.extra-index-url='file:///one\\nfile:///two'
global.find-links='/elsewhere'
install.index-url='https://mirror.example/simple'
"""
    assert uv_variables(listed) == {
        "UV_FIND_LINKS": "/opt/wheels",
        "UV_EXTRA_INDEX_URL": "file:///one file:///two",
        "UV_INDEX_URL": "https://mirror.example/simple",
    }


@pytest.mark.parametrize(("columns", "width"), [(40, 39), (200, 110)])
def test_on_a_terminal_progress_is_one_line_however_narrow(
    tmp_path: Path, columns: int, width: int
) -> None:
    """A line as wide as the terminal, or wider, could not be written over."""
    script = f"print('Collecting {'x' * 150}')"
    command = [sys.executable, str(ROOT / "deploy/progress.py"), "a thing"]
    environment = {**os.environ, "COLUMNS": str(columns)}
    terminal = OnTerminal([*command, sys.executable, "-c", script], environment, tmp_path)
    try:
        shown = terminal.wait_for("installed a thing in")
    finally:
        assert terminal.end() == 0
    lines = shown.split("\r")[1:-1]
    assert lines and {len(line) for line in lines} == {width}


def test_a_failed_install_shows_what_pip_said_and_keeps_its_exit_status() -> None:
    done = run_progress("print('ERROR: No matching distribution'); raise SystemExit(7)")
    assert done.returncode == 7
    assert "ERROR: No matching distribution" in done.stderr
    assert "could not install a thing" in done.stdout


@pytest.mark.parametrize("uv", ["cannot be installed", "fails"])
def test_where_uv_does_not_get_through_pip_installs(tmp_path: Path, uv: str) -> None:
    """The environment's Python is a script that notes what it is asked for."""
    venv, asked = tmp_path / "venv", tmp_path / "asked"
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin/python"
    python.write_text(
        f"""#!/bin/sh
echo "$*" >> {asked}
case "$*" in
    *"install -q uv=="*) {"exit 1" if uv == "cannot be installed" else f"cp /bin/true {venv}/bin/uv"} ;;
    deploy/progress.py*bin/uv*) exit 1 ;;
esac
"""
    )
    python.chmod(0o755)
    command = ["bash", str(ROOT / "deploy/install.sh"), str(venv)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    by_pip = (
        f"deploy/progress.py Diptych (serve) {python} -m pip --disable-pip-version-check install"
    )
    assert f"{by_pip} -c constraints.txt -e ." in asked.read_text().splitlines()
    said = "uv cannot be installed" if uv == "cannot be installed" else "trying it with pip"
    assert said in done.stdout
    assert (venv / ".installed-serve").exists()


def test_install_sh_names_its_sizes_when_it_is_asked_for_another() -> None:
    command = ["bash", str(ROOT / "deploy/install.sh"), "/nonexistent", "huge"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no size 'huge'; there are serve, loadtest and dev" in done.stderr
