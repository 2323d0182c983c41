"""What a run says of the checkout that it was made from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from diptych.loadtests import machine


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", folder, *who, *arguments], check=True, capture_output=True)


def test_results_in_the_checkout_are_no_change_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next run would be taken for one of another commit."""
    source = tmp_path / "source.py"
    source.write_text("a = 1\n")
    git(tmp_path, "init")
    git(tmp_path, "add", "source.py")
    git(tmp_path, "commit", "-m", "Begin")
    monkeypatch.setattr(machine, "__file__", str(source))
    commit = machine.describe()["commit"]
    assert commit and not commit.endswith("+")
    (tmp_path / "results.json").write_text("{}")
    assert machine.describe()["commit"] == commit
    source.write_text("a = 2\n")
    assert machine.describe()["commit"] == f"{commit}+"


def test_an_installation_inside_another_checkout_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit would be that of somebody's project with a virtual environment in it."""
    (tmp_path / "project.py").write_text("a = 1\n")
    git(tmp_path, "init")
    git(tmp_path, "add", "project.py")
    git(tmp_path, "commit", "-m", "Begin")
    installed = tmp_path / ".venv" / "diptych" / "machine.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("b = 1\n")
    monkeypatch.setattr(machine, "__file__", str(installed))
    assert machine.describe()["commit"] == ""
