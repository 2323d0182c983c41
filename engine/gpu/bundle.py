"""Packs what a bare machine with a GPU needs to run the proof: of this package, and of others.

The proof (`prove.py`) shows on a real GPU that kernels and KV transfers are right, and how fast. The
bundle is made here, where a package registry is reached, by a command of the proof:

    python -m diptych.engine.gpu.prove --bundle FOLDER

The bare machine has Python, torch and Triton, and reaches no registry. There the folder is put on
PYTHONPATH, and the proof is started without `--bundle`: wheels are unpacked into the folder already,
so that nothing is installed. A package that could not be had, or is too large, is named in
MISSING.txt, which is empty otherwise. Without an optional one the proof leaves out what needs it; a
required one that is missing must be on that machine already.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

#: Packages that the modules of `FOLDERS` import and that do not come with torch, their own
#: dependencies included. They are packed in this order, before `OPTIONAL`, while there is room.
REQUIRED = ("msgspec", "xxhash", "annotated-types", "llguidance", "safetensors")
#: What the proof of KV transfers needs: NIXL, NVIDIA's library that moves memory between processes.
#: `nixl` is a thin package that imports the build for the machine's CUDA, here that for CUDA 13.
OPTIONAL = ("nixl-cu13", "nixl")
#: Files of `nixl-cu13` that are not unpacked, by how their paths begin: expert parallelism, scripts and
#: a benchmark, more than half of the wheel. The proof has no use for them.
LEFT_OUT = ("nixl_ep_cu13/", "nixl_cu13.scripts/", "nixl_cu13.libs/ucx/libucx_perftest")

#: The Python of the machines that the bundle is for.
PYTHON_VERSION = "3.12"
#: pip takes a wheel whose name has one of these tags, or `any`. All tags from glibc 2.17 to 2.39, that of
#: the machines, are listed: of a tag `manylinux_2_N` pip does not infer those with a smaller N.
PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(17, 40)))

#: Bytes of the archive as which a user may have to send the folder. No further wheel is packed that would
#: go beyond; this package's own files are packed in any case. A wheel counts by the compressed size of
#: what is unpacked of it, and a file of this package by its whole size, though it will be compressed.
SIZE_LIMIT = 64 << 20

#: Seconds that pip may take for one wheel.
DOWNLOAD_S = 120.0

#: Folders of this package that the proof needs: kernels, KV transfers, and the messages of both.
FOLDERS = ("engine", "kv_transfer", "protos")

#: Puts the wheel of a package into a folder. Returns why it could not; None: it has.
Download: TypeAlias = Callable[[str, Path], str | None]


@dataclass(frozen=True, slots=True)
class Bundle:
    """What was packed."""

    packed: list[str]  #: File names of the wheels.
    missing: list[str]  #: Names of packages, each with the reason.
    size_bytes: int  #: Of this package's files and of the wheels, as `SIZE_LIMIT` counts them.


def download_wheel(name: str, folder: Path) -> str | None:
    """Fetch the wheel of a package for `PYTHON_VERSION` with pip. Returns why it could not, or None.

    It is the version that is installed here; where none is, the newest that has such a wheel. What the
    package depends on is not fetched.
    """
    try:
        requirement = f"{name}=={importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        requirement = name
    platforms = [part for platform in PLATFORMS for part in ("--platform", platform)]
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
        *("--python-version", PYTHON_VERSION, "--implementation", "cp", *platforms),
        *("-d", str(folder), requirement),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {DOWNLOAD_S:.0f} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"pip ended with {done.returncode}"


def _unpack(wheel_file: Path, folder: Path, bytes_left: int) -> tuple[str | None, int]:
    """Unpack what is needed of a wheel, if that has at most `bytes_left` compressed.

    Returns why it is not unpacked, or None; and the compressed bytes of what is.
    """
    if not zipfile.is_zipfile(wheel_file):
        return f"{wheel_file.name} is damaged", 0
    with zipfile.ZipFile(wheel_file) as wheel:
        parts = [part for part in wheel.infolist() if not part.filename.startswith(LEFT_OUT)]
        packed_bytes = sum(part.compress_size for part in parts)
        if packed_bytes > bytes_left:
            limit_mib = SIZE_LIMIT >> 20
            return f"{packed_bytes:,} bytes are more than what is left of {limit_mib} MiB", 0
        wheel.extractall(folder, parts)
    return None, packed_bytes


def make_bundle(folder: Path, download: Download = download_wheel) -> Bundle:
    """Copy `FOLDERS` into `folder`, and unpack the wheels of `REQUIRED` and `OPTIONAL` beside them.

    `folder` must be empty or new. Raises FileExistsError where it is not. A package that could not be
    packed raises nothing: `Bundle.missing` and MISSING.txt name it.
    """
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: name a new folder")
    package = folder / "diptych"
    package.mkdir(parents=True)
    root = Path(__file__).parents[2]
    # Libraries that were compiled for this machine's CPU (*.so) stay here: on the GPU the proof runs
    # kernels in Triton, which are compiled there.
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "tests")
    for name in FOLDERS:
        shutil.copytree(root / name, package / name, ignore=ignore)
    # The package's own `__init__.py` imports what the proof does not need.
    (package / "__init__.py").write_text('"""The part of Diptych that the proof needs."""\n')
    size = sum(path.stat().st_size for path in package.rglob("*") if path.is_file())
    packed: list[str] = []
    missing: list[str] = []
    for name in (*REQUIRED, *OPTIONAL):
        wheels = folder / ".wheels" / name
        wheels.mkdir(parents=True)
        reason = download(name, wheels)
        found = sorted(wheels.glob("*.whl"))
        if reason is None and not found:
            reason = "no wheel came"
        if reason is None:
            reason, wheel_bytes = _unpack(found[0], folder, SIZE_LIMIT - size)
            size += wheel_bytes
        if reason:
            missing.append(f"{name}: {reason}")
            continue
        packed.append(found[0].name)
    shutil.rmtree(folder / ".wheels")
    (folder / "MISSING.txt").write_text("".join(f"{line}\n" for line in missing))
    return Bundle(packed, missing, size)
