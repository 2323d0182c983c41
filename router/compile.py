"""`python -m diptych.router.compile`: compiles what `native` lists. Needs mypy, setuptools and gcc.

This takes about a minute. The command says what is missing; everything runs without it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import msgspec

from .native import (
    GROUP,
    MODULES,
    ROOT,
    build_folder,
    is_complete,
    machine_code_bytes,
    source_paths,
)

SUBJECT = "router and simulator"  #: begins each message of the command
SETUP = """
from mypyc.build import mypycify
from setuptools import setup
options = ["--follow-imports=silent", "--ignore-missing-imports", "--explicit-package-bases"]
options += ["--no-site-packages"]  # reading what is below torch would take minutes
setup(name="native", ext_modules=mypycify([*options, *{sources}], group_name="{group}"))
"""


def build(target: Path) -> None:
    """Compile beside the target folder and rename: two processes may build at the same time.

    Raises subprocess.CalledProcessError, OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        draft = Path(name)
        output = draft / "out"
        sources = [f"diptych/{path}" for path in source_paths()]
        # The sources are named as of the package `diptych`, whatever the checkout's folder is.
        (draft / "diptych").symlink_to(ROOT)
        # Of other packages' types only those of the messages matter.
        (draft / "msgspec").symlink_to(Path(msgspec.__file__).parent)
        (draft / "setup.py").write_text(SETUP.format(sources=sources, group=GROUP))
        command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "out"]
        subprocess.run(command, cwd=draft, check=True, capture_output=True, text=True)
        for package in {package.split("/")[0] for package in MODULES}:
            (output / "diptych" / package).rename(output / package)
        (output / "diptych").rmdir()
        (output / "size").write_text(str(machine_code_bytes(output)))  # `native.is_complete`
        try:
            output.rename(target)
        except OSError:  # another process was first
            if not is_complete(target):
                raise


def missing_tools() -> list[str]:
    """Return what is needed for compiling and not installed."""
    missing = [name for name in ("mypyc", "setuptools") if find_spec(name) is None]
    if not shutil.which("gcc") and not shutil.which("cc"):
        missing.append("gcc")
    return missing


def main() -> None:
    """Compile, unless that is done already, and say what came of it."""
    target = build_folder()
    missing = missing_tools()
    if target.exists() and is_complete(target):
        print(f"{SUBJECT}: compiled already ({target})")
        return
    if missing:
        print(f"{SUBJECT}: Python (there is no {' and no '.join(missing)})")
        return
    try:
        shutil.rmtree(target, ignore_errors=True)  # a damaged one
        build(target)
        print(f"{SUBJECT}: compiled ({target})")
    except subprocess.CalledProcessError as error:
        output = (error.stdout + error.stderr).splitlines()
        errors = [line for line in output if "error" in line] or ["no reason given"]
        print(f"{SUBJECT}: Python (mypyc: {errors[0]})")
    except OSError as error:
        print(f"{SUBJECT}: Python ({error})")


if __name__ == "__main__":
    main()
