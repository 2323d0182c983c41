"""The five examples do what examples/README.md says; two of them share a cluster."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from diptych.cluster.config import load_config

from tests.support.live import BIN, Live, running

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
ON_A_CLUSTER = [pytest.mark.cluster, pytest.mark.slow]


def commands() -> list[str]:
    """Return the README's commands."""
    return re.findall(r"```sh\n(.*?)```", (EXAMPLES / "README.md").read_text(), re.DOTALL)[
        0
    ].splitlines()


def run(name: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """Run the README's command in which `name` is, with further arguments; return its stdout."""
    (command,) = [command for command in commands() if name in command]
    words = [word.replace(".venv/bin", str(BIN)) for word in command.split()]
    done = subprocess.run(
        [*words, *arguments],
        cwd=ROOT,
        env={**os.environ, "BIN": str(BIN), **(environment or {})},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def options_of(example: str) -> list[str]:
    """Return what the example gives to `diptych serve`."""
    return runpy.run_path(str(EXAMPLES / example))["SERVE_OPTIONS"]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    log = tmp_path_factory.mktemp("examples") / "serve.log"
    with running(log, *options_of("agents_with_tools/agents.py")) as cluster:
        yield cluster


def test_the_table_and_the_commands_name_the_same_files() -> None:
    table = re.findall(r"^\| `([\w/.]+)` \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert len(table) == 5
    assert [command.split()[-1] for command in commands()] == [f"examples/{row}" for row in table]


class TestOnACluster:
    pytestmark = ON_A_CLUSTER

    @pytest.mark.long
    def test_a_laptop_gives_the_tokens_of_one_engine(self) -> None:
        printed = run("laptop_pd.py")
        assert "the same token ids as one engine alone: 4 of 4 answers" in printed
        routes = re.findall(r"^prefill/\S+ -> decode/\S+   TTFT", printed, re.MULTILINE)
        assert len(routes) == 4

    def test_agents_call_their_tool_and_answer_what_it_returned(self, live: Live) -> None:
        printed = run("agents.py", environment={"DIPTYCH_ENDPOINT": live.url})
        calls = re.findall(
            r"^agent (\d): draw_question\((serving|diptych)\) -> ", printed, re.MULTILINE
        )
        assert len(calls) == 9 and {number for number, _ in calls} == {"1", "2", "3"}
        cached = [int(count) for count in re.findall(r"(\d+) of \d+ prompt tokens", printed)]
        assert len(cached) == 18 and sum(cached) > 0

    @pytest.mark.slow
    def test_the_load_test_keeps_its_targets_or_fails(self, live: Live, tmp_path: Path) -> None:
        environment = {"DURATION": "5s", "SLO": "ttft=20s,itl=20s"}
        assert "goodput" in run("slo_loadtest.sh", live.url, environment=environment)
        document = json.loads((ROOT / "build/slo.json").read_text())
        assert document["summary"]["served"] > 0
        with pytest.raises(AssertionError, match="assert 4 == 0"):
            run("slo_loadtest.sh", live.url, environment={**environment, "SLO": "ttft=1ms,itl=1ms"})


@pytest.mark.slow
def test_a_log_becomes_a_plan(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    printed = run("own_trace.py", "--write", str(file))
    assert "requests.csv: 240 requests" in printed and "round_robin" in printed
    assert re.search(r"^Disaggregation (pays|may pay|does not pay)", printed, re.MULTILINE)
    config = load_config(file, {})
    assert config.slo.ttft == "2s" and config.pools.decode.replicas > 0


@pytest.mark.slow
def test_a_fleet_is_rendered_and_right() -> None:
    printed = run("render.sh")
    assert printed.rstrip().endswith("ok")
    documents = list(yaml.safe_load_all((ROOT / "build/manifests/fleet.yaml").read_text()))
    (service,) = [document for document in documents if document["kind"] == "RayService"]
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert {group["groupName"] for group in groups} == {"prefill", "decode"}
