"""`python -m diptych.router.compile`: compiles what `native` lists. Needs mypy, setuptools and gcc.

About a minute. What is in the way is said; everything runs without.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from .native import GROUP, MODULES, ROOT, folder, size, whole

SETUP = """
from mypyc.build import mypycify
from setuptools import setup
options = ["--follow-imports=silent", "--ignore-missing-imports", "--explicit-package-bases"]
setup(name="native", ext_modules=mypycify([*options, *{sources}], group_name="{group}"))
"""


def build(place: Path) -> None:
    """Compiles beside the target and renames: two processes may build at the same time.

    Raises subprocess.CalledProcessError, OSError.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as draft:
        sources = [f"diptych/{pack}/{name}.py" for pack in MODULES for name in MODULES[pack]]
        (Path(draft) / "diptych").symlink_to(ROOT)
        (Path(draft) / "setup.py").write_text(SETUP.format(sources=sources, group=GROUP))
        command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "out"]
        subprocess.run(command, cwd=draft, check=True, capture_output=True, text=True)
        out = Path(draft) / "out"
        for package in MODULES:
            (out / "diptych" / package).rename(out / package)
        (out / "diptych").rmdir()
        (out / "size").write_text(str(size(out)))
        try:
            out.rename(place)
        except OSError:  # another process was first
            if not whole(place):
                raise


def main() -> None:
    place = folder()
    missing = [name for name in ("mypyc", "setuptools") if find_spec(name) is None]
    if not shutil.which("gcc") and not shutil.which("cc"):
        missing.append("gcc")
    if place.exists() and whole(place):
        print(f"router and simulator: compiled already ({place})")
    elif missing:
        print(f"router and simulator: Python (there is no {' and no '.join(missing)})")
    else:
        try:
            shutil.rmtree(place, ignore_errors=True)  # a damaged one
            build(place)
            print(f"router and simulator: compiled ({place})")
        except subprocess.CalledProcessError as error:
            lines = [line for line in (error.stdout + error.stderr).splitlines() if "error" in line]
            print(f"router and simulator: Python (mypyc: {(lines or ['no reason given'])[0]})")
        except OSError as error:
            print(f"router and simulator: Python ({error})")


if __name__ == "__main__":
    main()
