"""The router and the simulator as machine code, where `diptych.router.compile` has made it.

The same sources, compiled by mypyc and kept in the user's cache under the digest of all of them: a
source that was changed since has another digest, and runs as Python. So does everything where
nothing was compiled, or with `DIPTYCH_COMPILED=0`; answers are the same.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

log = logging.getLogger(__name__)

ROOT = Path(__file__).parents[1]
MODULES = {
    "router": (
        *("binding", "core", "decisions", "demand", "few", "fleet", "goodput", "index", "line"),
        *("pairing", "placement", "policies", "predictor", "tally"),
    ),
    "simulator": ("exact", "sim", "worker"),
}
GROUP = "diptych_native"
LIBRARY = f"{GROUP}__mypyc{EXTENSION_SUFFIXES[0]}"  #: the code; each module is a stub that calls it


def folder() -> Path:
    """Where these sources' machine code is, or would be."""
    names = (ROOT / package / f"{module}.py" for package in MODULES for module in MODULES[package])
    digest = hashlib.blake2b(LIBRARY.encode(), digest_size=12)
    for name in names:
        digest.update(name.read_bytes())
    return Path.home() / ".cache" / "diptych" / f"native-{digest.hexdigest()}"


def size(place: Path) -> int:
    """Bytes of all machine code there; `compile` notes them in the file `size` at the end."""
    return sum(path.stat().st_size for path in place.rglob("*.so"))


def whole(place: Path) -> bool:
    """Whether all that was compiled is there. Raises OSError."""
    note = place / "size"
    return note.exists() and note.read_text() == str(size(place))


def use(package: str, path: list[str]) -> None:
    """Puts the compiled modules of a package before its sources in the package's `__path__`."""
    if os.environ.get("DIPTYCH_COMPILED") == "0":
        return
    try:
        place = folder()
        if not place.exists():
            return
        if not whole(place):
            raise ImportError("something is missing or cut off")
        _load(place / LIBRARY)
    except ImportError as error:
        log.warning("%s is damaged (%s); make it anew: diptych.router.compile", place, error)
        return
    except (OSError, RuntimeError):  # no home, or not to be read
        return
    path.insert(0, str(place / package))


def _load(library: Path) -> None:
    """The stubs import it by its name, from nowhere on `sys.path`. Raises ImportError."""
    name = f"{GROUP}__mypyc"
    if name in sys.modules:
        return
    spec = spec_from_file_location(name, library)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
