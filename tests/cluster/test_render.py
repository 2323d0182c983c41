"""`diptych render`: the chart's manifests with a cluster.yaml of `serve` in them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from diptych.cluster.cli import app
from diptych.cluster.cli.render import FLEETS
from typer.testing import CliRunner

CLUSTER = """
slo: {ttft_ms: 700}
pools: {decode: {replicas: 3, engine: {kv_mib: 128}}}
"""


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["render", *map(str, words)])
    return done.exit_code, done.output


def service(text: str) -> dict[str, Any]:
    return next(d for d in yaml.safe_load_all(text) if d["kind"] == "RayService")


def test_without_a_cluster_file_it_is_the_fleet_that_is_kept_rendered() -> None:
    code, said = run("--fleet", "h100-ib")
    kept = (FLEETS.parent / "rendered/h100-ib.yaml").read_text()
    assert code == 0 and kept.partition("---")[2] == said.partition("---")[2]


def test_the_cluster_file_wins_and_counts_restart_nobody(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER)
    words = ("--fleet", "h100-ib", "-c", file, "--namespace", "prod", "-o", tmp_path / "made")
    code, said = run(*words)
    made = tmp_path / "made/h100-ib.yaml"
    assert code == 0 and f"kubectl --namespace prod apply -f {made}" in said
    ray = service(made.read_text())
    assert ray["metadata"]["namespace"] == "prod"
    _, serve = yaml.safe_load(ray["spec"]["serveConfigV2"])["applications"]
    assert serve["args"]["slo"] == {"ttft_ms": 700}
    engine = {"device": "cuda", "kv_mib": 128, "max_running": 256}
    assert serve["args"]["pools"]["decode"] == {"engine": engine}
    assert serve["args"]["pools"]["prefill"]["engine"]["kv_mib"] == 49152, "the fleet's own"
    decode = next(one for one in serve["deployments"] if one["name"] == "DecodeWorker")
    assert decode["num_replicas"] == 3


def test_the_cluster_file_decides_whether_ray_asks_for_a_token(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("ray: {auth: disabled}")
    code, said = run("-c", file)
    spec = service(said)["spec"]
    assert code == 0 and spec["rayClusterConfig"]["authOptions"] == {"mode": "disabled"}
    serve = yaml.safe_load(spec["serveConfigV2"])["applications"][0]
    assert serve["args"]["ray"] == {"auth": "disabled"}
    file.write_text("ray:")
    assert run("-c", file)[0] == 1


@pytest.mark.parametrize(
    ("words", "text", "code", "told"),
    [
        (("--fleet", "h200"), "", 2, "fleets are cpu-kind, "),
        ((), "slo: {tfft_ms: 1}", 1, "tfft_ms"),
        ((), "gateway: {http_port: 80}", 1, "'http_port' not allowed"),
        ((), "[1]", 1, "not a mapping"),
    ],
)
def test_what_cannot_be_rendered_is_refused_by_name(
    tmp_path: Path, words: tuple[str, ...], text: str, code: int, told: str
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    assert run(*words, "-c", file)[0] == code
    assert told in run(*words, "-c", file)[1]


def test_without_helms_code_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "helm_python", None)
    code, said = run()
    assert code == 1 and "diptych[deploy]" in said


def test_the_commands_start_without_what_only_few_of_them_need() -> None:
    slow = {"helm_python", "locust", "numpy", "pydantic", "ray", "textual", "torch", "yaml"}
    code = f"import sys, diptych.cluster.cli; print(*({slow!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_cluster_file_of_several_models_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("models: {a: /a, b: /b}")
    code, said = run("--fleet", "h100-ib", "-c", file)
    assert code == 1 and "the chart serves one model" in said
