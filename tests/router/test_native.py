"""The router as machine code: used where it was compiled, and only as long as it is the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from diptych.router import native

WHERE = """
import diptych.router.core as core, diptych.simulator.worker as worker
print(core.__file__, worker.__file__)
"""


def modules(compiled: str) -> list[str]:
    env = os.environ | {"DIPTYCH_COMPILED": compiled}
    done = subprocess.run(
        [sys.executable, "-c", WHERE], env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_compiled_modules_are_used_unless_switched_off():
    if not (native.build_folder() / native.LIBRARY).exists():
        pytest.skip("nothing was compiled here: python -m diptych.router.compile")
    assert all(name.endswith(".so") for name in modules("1"))
    assert all(name.endswith(".py") for name in modules("0"))


@pytest.mark.parametrize("damaged", ["", "router"])
def test_a_damaged_file_costs_speed_and_nothing_else(tmp_path, damaged):
    """Cut off, as by a full disk: what is left runs as Python, and the user is told what to do."""
    place = native.build_folder()
    if not place.exists():
        pytest.skip("nothing was compiled here: python -m diptych.router.compile")
    copy = tmp_path / ".cache" / "diptych" / place.name
    shutil.copytree(place, copy)
    next((copy / damaged).glob("*.so")).write_bytes(b"")
    env = os.environ | {"HOME": str(tmp_path), "DIPTYCH_COMPILED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WHERE], env=env, capture_output=True, text=True, check=True
    )
    assert all(name.endswith(".py") for name in done.stdout.split())
    assert "diptych.router.compile" in done.stderr


def test_without_a_compiler_it_says_so_and_all_runs_as_python(tmp_path):
    env = {"HOME": str(tmp_path), "PATH": str(tmp_path)}
    command = [sys.executable, "-m", "diptych.router.compile"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert "Python (there is no gcc)" in done.stdout


@pytest.mark.parametrize("changed", ["router/request_queue.py", "simulator/worker.py"])
def test_a_changed_source_is_another_one(tmp_path, monkeypatch, changed):
    for package in ("engine", "router", "simulator"):
        shutil.copytree(native.ROOT / package, tmp_path / package)
    before = native.build_folder()
    monkeypatch.setattr(native, "ROOT", tmp_path)
    try:
        native.build_folder.cache_clear()
        assert native.build_folder() == before
        with (tmp_path / changed).open("a") as source:
            source.write("# another one\n")
        assert native.build_folder() == before, "in a process that has begun with the other one"
        native.build_folder.cache_clear()
        assert native.build_folder() != before
        path: list[str] = []
        native.prefer_compiled("router", path)
        assert path == []
    finally:
        native.build_folder.cache_clear()
