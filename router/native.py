"""Router, simulator and the engine's scheduling as machine code, if `diptych.router.compile` made it.

mypyc compiles the same sources, which are kept in the user's cache under the digest of all of them.
A source that was changed since has another digest, and runs as Python. So does everything where
nothing was compiled, or with `DIPTYCH_COMPILED=0`; answers are the same.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

log = logging.getLogger(__name__)

ROOT = Path(__file__).parents[1]
#: package -> modules that are compiled; policies that others may derive from stay Python
MODULES = {
    "router": (
        "cells",
        "core",
        "costs",
        "decisions",
        "demand",
        "drain",
        "first_token",
        "fleet",
        "goodput",
        "index",
        "placement_counts",
        "placer",
        "predictor",
        "recorder",
        "request_queue",
        "shortlist",
        "worker_state",
    ),
    "router/policies": ("deadline",),
    "engine": ("blocks", "pacing", "scheduler", "sequence", "step_limit"),
    "simulator": ("attempt", "exact", "repeat", "sim", "worker"),
}
GROUP = "diptych_native"
LIBRARY = f"{GROUP}__mypyc{EXTENSION_SUFFIXES[0]}"  #: the code; each module is a stub that calls it


def source_paths() -> list[str]:
    """Return the paths of all compiled sources, relative to the package's root."""
    return [f"{package}/{module}.py" for package in MODULES for module in MODULES[package]]


@cache
def build_folder() -> Path:
    """Return where these sources' machine code is, or would be. Raises OSError, RuntimeError.

    A process looks once: its packages are imported one by one, and if a source changed in between,
    it would run some modules as machine code and some as Python, with two copies of each class.
    """
    digest = hashlib.blake2b(LIBRARY.encode(), digest_size=12)
    for path in source_paths():
        digest.update((ROOT / path).read_bytes())
    return Path.home() / ".cache" / "diptych" / f"native-{digest.hexdigest()}"


def machine_code_bytes(folder: Path) -> int:
    """Return the bytes of all machine code there; `compile` notes them in the file `size`."""
    return sum(path.stat().st_size for path in folder.rglob("*.so"))


def is_complete(folder: Path) -> bool:
    """Whether all that was compiled is there. Raises OSError."""
    noted = folder / "size"
    return noted.exists() and noted.read_text() == str(machine_code_bytes(folder))


def prefer_compiled(package: str, path: list[str]) -> None:
    """Put a package's compiled modules before its sources in the package's `__path__`."""
    if os.environ.get("DIPTYCH_COMPILED") == "0":
        return
    try:
        folder = build_folder()
        if not folder.exists():
            return
        if not is_complete(folder):
            raise ImportError("something is missing or cut off")
        _load(folder / LIBRARY)
    except ImportError as error:
        log.warning("%s is damaged (%s); make it anew: diptych.router.compile", folder, error)
        return
    except (OSError, RuntimeError):  # there is no home, or it cannot be read
        return
    path.insert(0, str(folder / package))


def _load(library: Path) -> None:
    """Load the library under the name by which the stubs import it. Raises ImportError."""
    name = f"{GROUP}__mypyc"
    if name in sys.modules:
        return
    spec = spec_from_file_location(name, library)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
