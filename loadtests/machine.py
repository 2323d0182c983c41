"""Where and with what a run was made."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

#: The libraries whose versions may change the figures of a run.
PACKAGES = ("diptych", "locust", "gevent", "grpcio", "numpy")


def describe() -> dict[str, Any]:
    """Returns the machine of the client, the commit of this checkout, and versions of libraries.

    `cores` are those that this process may run on. A library that is missing has an empty version.
    """
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    versions = {package: _version(package) for package in PACKAGES}
    return {
        "machine": {
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(memory_bytes / 2**30, 1),
            "system": f"{platform.system()} {platform.release()}",
        },
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **versions},
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """Returns the commit of the checkout that this file is in, with `+` if it has changes.

    Files that git does not know do not count: results may be among them. Empty when this file is in
    no checkout, or is one that git does not know: an installation inside of another project's
    checkout.
    """
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        commit = _git("rev-parse", "--short=12", "HEAD")
        return f"{commit}+" if _git("status", "--short", "--untracked-files=no") else commit
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
