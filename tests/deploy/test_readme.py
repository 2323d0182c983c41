"""Every command of deploy/README.md, as far as it can be tried without a cluster."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from deploy import render

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deploy/README.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
INLINE = re.findall(r"`((?:helm|kubectl) [a-z]+ [^`]+)`", TEXT)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", "").strip().split("\n")]
COMMANDS += [" ".join(command.split()) for command in INLINE]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


def flag(words: list[str], *names: str) -> list[str]:
    return [after for word, after in pairwise(words) if word in names]


def without_assignment(command: str) -> str:
    """`command`, or what the value of its variable comes from where it is `export NAME=$(...)`."""
    assignment = re.fullmatch(r"export [A-Z_]+=\$\((.*)\)", command)
    return assignment[1] if assignment else command


@pytest.mark.parametrize("command", COMMANDS)
def test_paths_exist_and_tools_are_those_that_we_know(command: str) -> None:
    words = shlex.split(without_assignment(command))
    assert words[0] in {
        "docker",
        "kind",
        "helm",
        "kubectl",
        ".venv/bin/python",
        ".venv/bin/diptych",
    }
    paths = [word for word in words if word.startswith("deploy/")]
    assert all((ROOT / path).exists() for path in paths)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith(".venv/bin/python")])
def test_commands_in_python_run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, to save the imports; `render.py` rewrites, so it is asked what it would."""
    script, *arguments = shlex.split(command)[1:]
    monkeypatch.chdir(ROOT)
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    assert module.main(arguments or ["--check"]) == 0


def test_commands_of_diptych_exist() -> None:
    used = {c.split()[1] for c in COMMANDS if c.startswith(".venv/bin/diptych")}
    assert used == {"chat", "doctor", "render", "scale", "status"}
    for name in used:
        assert run(str(Path(sys.executable).parent / "diptych"), name, "--help").returncode == 0


@pytest.mark.parametrize("command", [c for c in COMMANDS if "deploy/helm" in c])
def test_helm_commands_render(command: str) -> None:
    words = shlex.split(command)
    assert words[1] in ("install", "upgrade") and words[2] == render.RELEASE
    assert [ROOT / words[3]] == [render.CHART]
    assert {w for w in words if w.startswith("-")} <= {"--namespace", "--values", "--set"}
    chosen: dict[str, Any] = {}
    for file in flag(words, "--values"):
        chosen.update(yaml.safe_load((ROOT / file).read_text()))
    for text in flag(words, "--set"):
        chosen.update(helm_python.parse_set_string(text))
    assert "num_replicas" in render.render(chosen)
    assert flag(words, "--namespace") == [render.RELEASE]


def test_the_secret_of_the_commands_is_the_one_that_the_chart_reads() -> None:
    command = next(c for c in COMMANDS if "create secret" in c)
    name = re.findall(r"generic (\S+) ", command)[0]
    literals = re.findall(r"--from-literal=(\w+)=", command)
    chart = " ".join((render.RENDERED / "cpu-kind.yaml").read_text().split())
    assert literals == ["secret", "auth_token", "admin"]  # KubeRay's validation names the second
    assert f"authOptions: mode: token secretName: {name} " in chart
    assert f"secretKeyRef: name: {name} key: secret " in chart
    assert f"secret: secretName: {name} items: [{{key: admin, path: admin}}]" in chart
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl: its dry run was not tried")
    words = shlex.split(command.replace('"$(openssl rand -hex 16)"', "word"))
    done = run(*words, "--dry-run=client", "--output=yaml")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["data"].keys() == set(literals)


def test_the_fleets_of_the_table_are_those_in_the_folder() -> None:
    named = set(re.findall(r"^\| `([a-z0-9-]+)` \|", TEXT, re.MULTILINE))
    assert named == {path.stem for path in render.FLEETS.glob("*.yaml")}
