"""`diptych simulate` and `diptych plan` as commands."""

import json
import subprocess
import sys

import pytest
from diptych.cluster.cli import app
from typer.testing import CliRunner

RUN = CliRunner()


def test_simulate_prints_the_stated_document():
    done = RUN.invoke(
        app,
        [
            "simulate",
            "synthetic:60",
            "--seeds",
            "1",
            "--split",
            "6P2D",
            "-o",
            "json",
            "--jobs",
            "1",
        ],
    )
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["policies"]
    assert (row["name"], row["variant"], row["split"]) == ("diptych", "policy-only", "6P2D")
    keys = {"g90_per_gpu", "g99_per_gpu", "bound_share", "prefix_hit", "requests_per_s_simulated"}
    assert keys <= set(row)


def test_simulate_writes_a_report(tmp_path):
    page = tmp_path / "r.html"
    done = RUN.invoke(
        app,
        ["simulate", "synthetic:60", "--seeds", "1", "--split", "6P2D", "--html", str(page)],
    )
    assert done.exit_code == 0, done.output
    assert "synthetic-60" in done.stdout and "<svg" in page.read_text()


def test_wrong_arguments_end_with_one_sentence_and_code_2(tmp_path):
    for arguments in (
        ["nothing.jsonl"],
        ["synthetic:60", "--policy", "best"],
        ["synthetic:60", "--split", "6P"],
        ["synthetic:60", "--split", "3P1D"],
        ["synthetic:60", "--slo", "ttft=1s"],
        ["synthetic:60", "--fleet", "H200"],
        ["synthetic:60", "--model", "llama9"],
        ["synthetic:60", "--faults", "slow=3"],
        ["recorded"],
        ["synthetic:60", "-o", "yaml"],
        ["synthetic:60", "--rate", "nan"],
        ["synthetic:60", "--rate", "0"],
        ["synthetic:60", "--faults", "kill=99@1s"],
        ["synthetic:60", "--html", str(tmp_path / "nowhere" / "r.html")],
    ):
        done = RUN.invoke(app, ["simulate", *arguments])
        assert done.exit_code == 2, (arguments, done.output)
        assert "diptych: " in done.output


def test_what_is_not_written_is_left_as_it_was(tmp_path):
    link, empty = tmp_path / "null", tmp_path / "empty"
    link.symlink_to("/dev/null")
    empty.touch()
    for path in (link, empty):
        done = RUN.invoke(app, ["simulate", "nothing.jsonl", "--html", str(path)])
        assert done.exit_code == 2 and (path.is_symlink() or path.exists())


def test_a_full_disk_takes_the_report_and_not_the_result():
    done = RUN.invoke(
        app, ["simulate", "synthetic:60", "--seeds", "1", "--split", "6P2D", "--html", "/dev/full"]
    )
    assert done.exit_code == 1 and "synthetic-60" in done.stdout and "cannot write" in done.output


def test_plan_does_not_overwrite_a_file_unasked(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("model: {}\n")
    done = RUN.invoke(app, ["plan", "synthetic:60", "--write", str(path)])
    assert done.exit_code == 2 and "--force" in done.output
    assert path.read_text() == "model: {}\n"


def test_the_simulator_loads_neither_ray_nor_torch_and_other_commands_do_not_load_it():
    code = (
        "import sys, diptych.cluster.cli;"
        "print(*sorted({'scipy', 'matplotlib', 'diptych.simulator'} & set(sys.modules)));"
        "import diptych.simulator.study, diptych.simulator.exact, diptych.simulator.plan;"
        "print(*sorted({'torch', 'ray', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_plan_that_cannot_be_made_or_written_is_refused_before_the_work(tmp_path):
    here = ["--write", str(tmp_path / "c.yaml")]
    for arguments in (
        ["--rate", "-1", *here],
        ["--tp", "0", *here],
        ["--write", str(tmp_path / "nowhere" / "c.yaml")],
    ):
        done = RUN.invoke(app, ["plan", "synthetic:60", *arguments])
        assert done.exit_code == 2 and done.output.startswith("diptych: "), (arguments, done.output)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "broken",
    [
        {"workers": []},
        {"workers": [{"kv_tokens": 0, "cost": [0.0] * 10}]},
        {"workers": [{"kv_tokens": 9, "threads": 0, "cost": [0.0] * 10}]},
        {"run": {"split": "1P1D", "slo": "ttft=1s,itl=1s", "requests": []}},
    ],
)
def test_a_calibration_that_makes_no_sense_is_refused_in_a_sentence(tmp_path, broken):
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"model": "m", "workers": [], **broken}))
    done = RUN.invoke(app, ["simulate", "recorded", "--calibrate-from-live", str(file)])
    assert done.exit_code == 2 and done.output.startswith("diptych: calibration "), done.output
