"""The image, as far as it can be checked without a container engine, and the scripts in it."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deploy import render

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
DOCKER = ROOT / "deploy/docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    words = [str(part) for part in command]
    return subprocess.run(words, capture_output=True, text=True, check=False, **options)


def test_the_linters_have_nothing_to_say() -> None:
    scripts = sorted((ROOT / "deploy").rglob("*.sh"))
    assert len(scripts) > 1
    for done in run(BIN / "hadolint", DOCKER / "Dockerfile"), run(BIN / "shellcheck", *scripts):
        assert (done.returncode, done.stdout) == (0, "")


def test_the_image_pins_what_the_rest_of_the_repository_pins() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch = re.findall(r"ARG TORCH=(.*)", DOCKERFILE)
    assert [f"torch=={version}" for version in torch] == [
        d for d in project["dependencies"] if d.startswith("torch==")
    ]
    assert f"torch={torch[0]}\n" in (ROOT / "deploy/install.sh").read_text()
    base = re.findall(r"ARG BASE=python:(\d+)\.(\d+)\.\d+-", DOCKERFILE)
    assert base == [("3", "11")] and project["requires-python"].startswith(">=3.11")


def test_the_pods_find_in_the_image_what_the_manifests_call() -> None:
    assert "/usr/local/bin/diptych-drain" in DOCKERFILE
    rendered = [path.read_text() for path in render.RENDERED.glob("*.yaml")]
    users = {user for text in rendered for user in re.findall(r"runAsUser: (\d+)", text)}
    assert users == {"1000"} and "USER 1000:1000" in DOCKERFILE
    assert all(tool in DOCKERFILE for tool in ("procps", "wget", "g++"))


def in_build_context() -> set[str]:
    """Files that .dockerignore lets through; the last line that matches decides."""
    lines = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    kept = set()
    for name in run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).stdout.split():
        hidden = False
        for pattern in patterns:
            bare = pattern.removeprefix("!").replace("**/", "*")
            if name.startswith(bare + "/") or fnmatch.fnmatch(name, bare):
                hidden = not pattern.startswith("!")
        if not hidden and (ROOT / name).is_file():
            kept.add(name)
    return kept


def test_the_build_context_holds_what_the_image_is_made_of_and_no_more() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {"/".join(package.split(".")[1:]) for package in setuptools["packages"]}
    context = in_build_context()
    copied = re.findall(r"^COPY (?!--from)(?:--\S+ )*(\S+) \S+$", DOCKERFILE, re.MULTILINE)
    assert len(copied) == 3 and set(copied) - {"."} <= context
    alone = {name for name in context if not name.startswith(tuple(f"{f}/" for f in folders))}
    assert alone == {"LICENSE", "README.md", "py.typed", "pyproject.toml"} | set(copied) - {"."}
    tracked = run("git", "ls-files", *folders, cwd=ROOT).stdout.split()
    assert {name for name in tracked if (ROOT / name).is_file()} <= context


@pytest.mark.parametrize(("replicas", "refused"), [(3, False), (0, False), (99, False), (1, True)])
def test_the_drain_waits_for_the_replicas_but_not_for_ever(
    tmp_path: Path, replicas: int, refused: bool
) -> None:
    """`ray` and `pgrep` are stand-ins; the replicas leave one with each look."""
    count = tmp_path / "count"
    count.write_text(str(replicas))
    stubs = {
        "ray": f'echo "$@" >>"{tmp_path}/told"; exit {int(refused)}',
        "pgrep": f'n=$(cat {count}); [ "$n" -gt 0 ] && echo $((n - 1)) >{count}',
        "sleep": "exec /bin/sleep 0.05" if replicas < 99 else 'exec /bin/sleep "$1"',
    }
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    limit = "1" if replicas == 99 else "50"  # who leaves in time has much of it
    done = run(DOCKER / "drain.sh", limit, env=env, timeout=60)
    told, *ended = (tmp_path / "told").read_text().splitlines()
    assert told.startswith("drain-node --reason DRAIN_NODE_REASON_PREEMPTION ")
    assert told.endswith(f"--deadline-remaining-seconds {limit}")
    is_empty = replicas < 99 and not refused
    assert ended == (["stop --grace-period 3"] if is_empty else []), "Ray ends once nobody is left"
    left = int(count.read_text())
    assert left == (1 if refused else 0) if replicas < 99 else 0 < left < 99
    assert done.returncode == 0
