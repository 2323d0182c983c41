"""`diptych simulate` and `diptych plan` as commands."""

import json
import subprocess
import sys

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
    ):
        done = RUN.invoke(app, ["simulate", *arguments])
        assert done.exit_code == 2, (arguments, done.output)
        assert "diptych: " in done.output


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
