"""`diptych.simulate` and `diptych.plan` in Python: the numbers of the commands, and their sentences."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import diptych
import msgspec
import pytest
import typer
from diptych.cluster.cli import app
from diptych.simulator import entry, load_trace
from typer.testing import CliRunner

from .support import COST

RUN = CliRunner()
#: figures of the machine's speed, which no two runs share
SPEEDS = {"seconds", "requests_per_s_simulated"}
README = Path(__file__).parents[2] / "simulator/README.md"


def without_speeds(value: Any) -> Any:
    """Return a document without the figures of `SPEEDS`, at any depth."""
    if isinstance(value, dict):
        return {key: without_speeds(part) for key, part in value.items() if key not in SPEEDS}
    if isinstance(value, list):
        return [without_speeds(part) for part in value]
    return value


def command_document(*arguments: str) -> Any:
    done = RUN.invoke(app, [*arguments, "-o", "json", "--jobs", "1"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["simulate", "plan"])
def test_defaults_are_those_of_the_command(name: str) -> None:
    options = {
        parameter.name: parameter.default
        for parameter in typer.main.get_command(app).commands[name].params  # type: ignore[attr-defined]
    }
    for parameter in inspect.signature(getattr(diptych, name)).parameters.values():
        # The command has None or a text in place of the default of several values.
        if parameter.name not in (
            "policy",
            "fleet",
            "price",
            "tp",
            "calibrate_from_live",
            "report_progress",
        ):
            default = options[parameter.name]
            assert parameter.default in (inspect.Parameter.empty, default), parameter.name


#: Every option of each command, at another value than its default.
OTHER_VALUES = {
    "simulate": (
        "--model m --engine e --tp 2 --price H100=2 --tiers memory=1GiB --fleet H100:8 --split 1P1D --policy all "
        "--variant both --slo ttft=9s,itl=9s --seeds 9 --find-max --rate 9 --dispatch thinktime --head 0.5 --faults stale=9s --agreement "
        "--early-reject --no-pace-first-token --cells 2 --calibrate-from-live file --jobs 9"
    ),
    "plan": (
        "--model m --engine e --tp 2,8 --fleet H100:8 --price H100=2 --tiers memory=1GiB --rate 9 --share 0.9 "
        "--slo ttft=9s,itl=9s --seeds 9 --dispatch thinktime --head 0.5 --calibrate-from-live file --jobs 9"
    ),
}


@pytest.mark.parametrize("name", ["simulate", "plan"])
def test_the_command_passes_every_option_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signature = inspect.signature(getattr(entry, name))
    passed: dict[str, Any] = {}

    def record(trace: str, **options: Any) -> None:
        passed.update(options)
        raise diptych.SimulationError("recorded")

    monkeypatch.setattr(entry, name, record)
    monkeypatch.chdir(tmp_path)
    done = RUN.invoke(app, [name, "synthetic:60", *OTHER_VALUES[name].split()])
    assert done.output == "diptych: recorded\n"
    assert {"trace", *passed} == set(signature.parameters)
    assert [
        key for key, value in passed.items() if value == signature.parameters[key].default
    ] == []


def test_simulate_has_the_numbers_of_the_command() -> None:
    study = diptych.simulate(
        "synthetic:60", split="6P2D", seeds=1, policy=["diptych", "min_ttft"], jobs=1
    )
    arguments = ["synthetic:60", "--split", "6P2D", "--seeds", "1"]
    document = command_document(
        "simulate", *arguments, "--policy", "diptych", "--policy", "min_ttft"
    )
    assert without_speeds(study.document) == without_speeds(document)
    assert [entry["name"] for entry in study.policies] == ["diptych", "min_ttft"]


@pytest.mark.slow
def test_plan_has_the_numbers_of_the_command(tmp_path: Path) -> None:
    lines: list[str] = []
    found = diptych.plan(
        "synthetic:60", fleet="H200:8", rate=1.0, jobs=1, report_progress=lines.append
    )
    path = tmp_path / "cluster.yaml"
    arguments = ["synthetic:60", "--fleet", "H200:8", "--rate", "1"]
    document = command_document("plan", *arguments, "--write", str(path))
    assert found.document == document
    assert found.cluster_yaml == path.read_text()
    assert found.verdict == document["verdict"] and found.best == document["best"]
    assert lines[0].endswith("layouts of 1 fleets")


def test_a_trace_that_was_loaded_before_is_as_good_as_its_name() -> None:
    options: dict[str, Any] = {"split": "6P2D", "seeds": 1, "jobs": 1}
    loaded = diptych.simulate(load_trace("synthetic:60"), **options)
    named = diptych.simulate("synthetic:60", **options)
    assert without_speeds(loaded.document) == without_speeds(named.document)


def test_results_print_as_the_commands_print_them(tmp_path: Path) -> None:
    study = diptych.simulate("synthetic:20", split="6P2D", seeds=1, jobs=1)
    assert repr(study).startswith("trace synthetic-20, 20 requests;")
    assert "\nPOLICY " in repr(study)
    assert "<svg" in study.html()
    found = diptych.plan("synthetic:20", fleet="H200:8", rate=1.0, jobs=1)
    arguments = ["synthetic:20", "--fleet", "H200:8", "--rate", "1", "--jobs", "1"]
    done = RUN.invoke(app, ["plan", *arguments, "--write", str(tmp_path / "cluster.yaml")])
    assert done.stdout.startswith(repr(found))


def recorded_run(tmp_path: Path) -> Path:
    """The file of a calibration with a run of four requests, a second apart."""
    requests = [{"at": 5.0 + at, "prompt": 100, "output": 9} for at in range(4)]
    calibration = {
        "model": "m",
        "cores": 2,
        "workers": [{"kv_tokens": 9000, "cost": msgspec.to_builtins(COST)}],
        "run": {"split": "1P1D", "slo": "ttft=2s,itl=50ms", "requests": requests},
    }
    path = tmp_path / "live.json"
    path.write_text(json.dumps(calibration))
    return path


def test_a_few_recorded_requests_have_a_page_and_an_agreement(tmp_path: Path) -> None:
    study = diptych.simulate(
        "recorded", calibrate_from_live=recorded_run(tmp_path), seeds=1, jobs=1, agreement=True
    )
    assert study.document["live"]["points_apart"] == 0
    assert study.document["agreement"]["requests"] % 4 == 0, "copies of all four"
    assert len(study.policies[0]["at_rate"]["deciles"]) == 4
    assert "<svg" in study.html()


@pytest.mark.parametrize(
    ("options", "requests"),
    [
        ({"rate": 2.0}, 4),
        ({"faults": "slow=2x@0"}, 4),
        ({"find_max": True}, 4),
        ({"head": 0.5}, 2),
    ],
)
def test_another_load_than_the_recorded_one_is_not_laid_beside_it(
    options: dict[str, Any], requests: int, tmp_path: Path
) -> None:
    study = diptych.simulate(
        "recorded", calibrate_from_live=recorded_run(tmp_path), seeds=1, jobs=1, **options
    )
    assert "live" not in study.document
    assert study.document["requests"] == requests


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"trace": "nothing.jsonl"}, "no such file"),
        ({"rate": 0.0}, "rate 0: expected"),
        ({"seeds": 0}, "seeds 0: expected"),
        ({"jobs": 0}, "jobs 0: expected"),
        ({"head": 2.0}, "head 2: expected"),
        ({"tp": 0}, "tp 0: expected"),
        ({"dispatch": "now"}, "dispatch now: expected"),
        ({"variant": "half"}, "variant half: expected"),
        ({"policy": "best"}, "policy best: expected"),
        ({"faults": "kill=99@1s"}, "no worker 99"),
    ],
)
def test_what_is_wrong_with_a_simulation_is_a_sentence(
    options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(diptych.SimulationError, match=sentence):
        diptych.simulate(**{"trace": "synthetic:60", **options})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"share": 0.2}, "share 0.2: expected"),
        ({"tp": [2, 0]}, "tp 0: expected"),
        ({"fleet": []}, "no fleet"),
        ({"rate": -1.0}, "rate -1: expected"),
    ],
)
def test_what_is_wrong_with_a_plan_is_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(diptych.SimulationError, match=sentence):
        diptych.plan("synthetic:60", **options)


@pytest.mark.slow
def test_the_page_that_shows_a_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = README.read_text().split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(example, names)
    assert 0 <= names["attainment"] <= 1
    assert "isaggregation" in capsys.readouterr().out


def test_planning_in_python_loads_neither_ray_nor_torch() -> None:
    code = (
        "import sys, diptych;"
        "print(*sorted({'diptych.simulator', 'diptych.cluster'} & set(sys.modules)));"
        "diptych.plan, diptych.simulate;"
        "print(*sorted({'torch', 'ray', 'matplotlib', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
