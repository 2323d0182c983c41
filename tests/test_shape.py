"""The shape of the repository: layers, purity, packaging. How it reads is printed by `measures.py`."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
FOLDERS = [
    *("cluster", "decode_worker", "deploy", "engine", "kv_transfer", "loadtests"),
    *("prefill_worker", "protos", "router", "simulator", "tests"),
]


def tracked(suffix: str) -> list[Path]:
    """Files that git knows or would add; everything outside a checkout's ignore list."""
    command = ["git", "ls-files", "-co", "--exclude-standard", f"*{suffix}"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.split("\n") if name and "_pb2" not in name]


def test_every_folder_says_what_it_is() -> None:
    missing = [folder for folder in FOLDERS if not (ROOT / folder / "README.md").exists()]
    assert not missing


def test_imports_go_down_only() -> None:
    done = subprocess.run(
        [BIN / "lint-imports", "--no-logo", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for types count, and those inside of functions."""
    import grimp

    folders = (
        *("cluster", "decode_worker", "engine", "kv_transfer"),
        *("prefill_worker", "protos", "router"),
    )
    graph = grimp.build_graph("diptych", cache_dir=None)
    imports = {
        name: graph.find_modules_directly_imported_by(name)
        for name in graph.modules
        if name.split(".")[1:2] and name.split(".")[1] in folders
    }
    assert len(imports) > 250
    list(TopologicalSorter(imports).static_order())  # raises CycleError, which names the circle


def test_packages_in_pyproject_are_those_in_the_tree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    outside = {"tests", "deploy"}
    found = {
        ".".join(("diptych", *path.parent.relative_to(ROOT).parts))
        for path in tracked("__init__.py")
        if not outside.intersection(path.parent.relative_to(ROOT).parts[:1])
    }
    data = {"diptych.deploy.fleets", "diptych.deploy.helm"}  # no code: `diptych render` reads it
    assert listed == found | data


@pytest.mark.slow
def test_the_wheel_holds_the_model_and_nothing_but_diptych(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT]
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
    import zipfile

    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    top = {name.split("/")[0] for name in names}
    assert top == {"diptych", next(t for t in top if t.endswith(".dist-info"))}
    assert "diptych/engine/demo/checkpoint/model.safetensors" in names
    assert "diptych/protos/inference.proto" in names
    assert "diptych/engine/native/attention_amx.cpp" in names
    assert "diptych/deploy/helm/diptych/Chart.yaml" in names


def test_without_a_gpu_no_cuda_package_came_along() -> None:
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has an NVIDIA driver: CUDA packages belong here")
    import torch

    names = [str(d.metadata["Name"]).lower() for d in distributions()]
    cuda = [n for n in names if n.startswith(("nvidia-", "cuda-"))]  # triton brings none along
    assert torch.version.cuda is None and cuda == []


def test_the_generated_protos_are_those_of_the_proto_files(tmp_path: Path) -> None:
    (tmp_path / "diptych").symlink_to(ROOT)
    out = tmp_path / "out"
    out.mkdir()
    flags = [f"--{kind}={out}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    protos = [str(path) for path in (ROOT / "protos").glob("*.proto")]
    where = f"-Idiptych/protos={ROOT / 'protos'}"
    command = [sys.executable, "-m", "grpc_tools.protoc", where, *flags, *protos]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    for made in (out / "diptych/protos").iterdir():
        assert made.read_text() == (ROOT / "protos" / made.name).read_text(), made.name


def test_no_file_names_a_path_of_the_machine_it_was_made_on() -> None:
    import re

    pattern = re.compile(r"(?<![\w.])/(root|home|work)/[a-z.]")
    files = [p for suffix in (".py", ".md", ".toml", ".sh", ".json") for p in tracked(suffix)]
    named = [p.relative_to(ROOT) for p in files if pattern.search(p.read_text())]
    assert not named
