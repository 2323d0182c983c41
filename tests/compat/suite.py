"""Fetches vLLM's source distribution and prepares its HTTP tests to run without vLLM.

Everything lies below `build/compat`, which git ignores: the tests are never part of this repository.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "compat"
SHIM = Path(__file__).parent / "shim"
REQUIREMENTS = Path(__file__).parent / "requirements.txt"
VERSION = "0.33.0"
ARCHIVE = f"vllm-{VERSION}.tar.gz"
#: Folders of the distribution's `tests/` that the chosen tests and their imports lie in.
TEST_FOLDERS = (
    "entrypoints/anthropic",
    "entrypoints/openai",
    "entrypoints/serve",
    "tool_use",
)
#: What pip needs to read the distribution's metadata, which it does before it keeps the file.
METADATA_PACKAGES = ("setuptools>=80", "setuptools-scm", "setuptools-rust", "packaging", "jinja2")
#: setup.py imports torch, of which the metadata of a build without a device needs nothing.
TORCH_STAND_IN = """
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock


class Finder(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torch" else None

    def create_module(self, spec):
        module = MagicMock(name=spec.name, __path__=[], __spec__=spec, __version__="2.0")
        module.__name__ = spec.name
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(Finder())
"""
CONFTEST = '''"""Ours: vLLM's own imports its engine."""

from compat_shim.plugin import LocalAssetServer, local_asset_server  # noqa: F401
'''
UTILS = '''"""Ours: the server runs already."""

from compat_shim.remote_server import *  # noqa: F403
'''
PYTEST_SETTINGS = """[pytest]
asyncio_mode = auto
markers =
    skip_global_cleanup: has no meaning here
    skip_v1: has no meaning here
    cpu_test: has no meaning here
    core_model: has no meaning here
    distributed: has no meaning here
    slow_test: has no meaning here
"""


def fetch(build: Path = BUILD) -> Path:
    """Return the source distribution's file; download it unless it is there."""
    archive = build / ARCHIVE
    if archive.exists():
        return archive
    tools = make_environment(build / "metadata-venv", METADATA_PACKAGES)
    stand_in = build / "torch-stand-in"
    stand_in.mkdir(exist_ok=True)
    (stand_in / "sitecustomize.py").write_text(TORCH_STAND_IN)
    environment = {
        **os.environ,
        "PYTHONPATH": str(stand_in),
        "VLLM_TARGET_DEVICE": "empty",
        "VLLM_VERSION_OVERRIDE": VERSION,
    }
    command = [str(tools), "-m", "pip", "download", "--quiet", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--no-binary", ":all:", "--dest", str(build)]
    subprocess.run([*command, f"vllm=={VERSION}"], check=True, env=environment, timeout=600)
    return archive


def prepare(build: Path = BUILD) -> Path:
    """Unpack the tests beside our replacements of what they import, and return the folder to run them in."""
    suite = build / f"vllm-{VERSION}"
    if not suite.exists():
        unpacked = build / "unpacking"
        shutil.rmtree(unpacked, ignore_errors=True)
        with tarfile.open(fetch(build)) as archive:
            archive.extractall(unpacked, members=_wanted_members(archive), filter="data")
        (unpacked / f"vllm-{VERSION}").rename(suite)
        shutil.rmtree(unpacked)
    tests = suite / "tests"
    (tests / "conftest.py").write_text(CONFTEST)
    (tests / "utils.py").write_text(UTILS)
    (suite / "pytest.ini").write_text(PYTEST_SETTINGS)
    return suite


def _wanted_members(archive: tarfile.TarFile) -> list[tarfile.TarInfo]:
    """Return the members for the chosen tests, and the documents that the random model's vocabulary is made from."""
    prefix = f"vllm-{VERSION}/"
    folders = tuple(f"{prefix}tests/{folder}/" for folder in TEST_FOLDERS)
    files = (f"{prefix}tests/__init__.py",)
    packages = (f"{prefix}tests/entrypoints/__init__.py", f"{prefix}tests/entrypoints/conftest.py")
    documents = f"{prefix}docs/"
    return [
        member
        for member in archive.getmembers()
        if member.name.startswith(folders)
        or member.name in files + packages
        or (member.name.startswith(documents) and member.name.endswith(".md"))
    ]


def documents(suite: Path) -> list[Path]:
    """Return the distribution's documents, in a fixed order."""
    return sorted((suite / "docs").rglob("*.md"))


def make_environment(folder: Path, packages: tuple[str, ...]) -> Path:
    """Make a virtual environment with `packages` unless it is there, and return its Python."""
    python = folder / "bin" / "python"
    finished = folder / "finished.txt"
    wanted = "\n".join(_contents(packages))
    if finished.exists() and finished.read_text() == wanted:
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=120)
    # pip would take what PYTHONPATH leads to for installed
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), "-m", "pip", "install", "--quiet", "--quiet", *packages]
    subprocess.run(command, check=True, env=environment, timeout=1800)
    finished.write_text(wanted)
    return python


def _contents(packages: tuple[str, ...]) -> list[str]:
    """Return `packages` with the text of requirement files in place of their paths.

    A change of such a file makes the environment anew, another place of the repository does not.
    """
    return [Path(name).read_text() if Path(name).is_file() else name for name in packages]


def suite_python(build: Path = BUILD) -> Path:
    """Return the Python that runs the tests."""
    return make_environment(build / "venv", ("--requirement", str(REQUIREMENTS)))
