"""Every command of the alerts' runbooks, typed as it stands into a release in the box.

A runbook names REQUEST, REPLICA and POD; here they are a chat, a worker and that worker's pod. Each
kind of command has a check that it took effect, as far as a release without a fault can show it. A
command of no known kind fails.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from . import box, settings
from .api import Object
from .release import RECOVERY_LIMIT_S, Release, wait_until

pytestmark = [pytest.mark.timeout(900)]
PAGES = sorted((settings.REPOSITORY / "deploy/observability/runbooks").glob("*.md"))
SHELL_BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)
#: The sizes of the release's pools, to which each test returns.
SIZES = ("prefill=3", "decode=3")
METRICS_PARTS = {"control", "gateway", "router", "worker"}
DEGRADED_CODE = 3  #: `diptych doctor` ends with it after a warning.


@dataclass(frozen=True, slots=True)
class Incident:
    """What an operator who reads a runbook has before it: a release, and names in it."""

    release: Release
    request: str
    worker: Object
    pod: str

    def filled(self, command: str) -> str:
        """Return a runbook's command with the names put in."""
        names = {"REQUEST": self.request, "REPLICA": self.worker["id"], "POD": self.pod}
        for placeholder, name in names.items():
            command = re.sub(rf"\b{placeholder}\b", name, command)
        return command

    def target(self, pool: str) -> int:
        """Return how many workers a pool should have."""
        return self.release.status()["pools"][pool]["target"]

    def worker_state(self) -> str | None:
        """Return the worker's state, or None if it is gone."""
        states = {one["id"]: one["state"] for one in self.release.status()["workers"]}
        return states.get(self.worker["id"])


@pytest.fixture
def incident(release: Release) -> Iterator[Incident]:
    """A decode worker that is ready; afterwards the release is as it was."""
    release.wait_for_recovery()
    workers = release.status()["workers"]
    worker = next(one for one in workers if one["home"] == "decode" and one["state"] == "ready")
    address = worker["address"].rpartition(":")[0]
    pod = next(
        one["metadata"]["name"] for one in release.pods("all") if one["status"]["podIP"] == address
    )
    incident = Incident(release, release.ask(), worker, pod)
    yield incident
    assert release.diptych("scale", *SIZES).returncode == 0
    if incident.worker_state() == "draining":
        assert release.diptych("undrain", worker["id"]).returncode == 0
    release.wait_for_recovery()


def _see_json(incident: Incident, command: str, output: str) -> None:
    for worker in json.loads(output)["workers"]:
        blocks = worker["engine"]["kv_blocks"]
        assert blocks["orphaned"] == 0
        assert "quarantined" in blocks


def _see_status(incident: Incident, command: str, output: str) -> None:
    assert "HEALTHY" in output
    assert "prefill" in output and "decode" in output
    if "wide" in command:
        assert incident.worker["id"] in output


def _see_explanation(incident: Incident, command: str, output: str) -> None:
    assert incident.request in output
    assert "PREDICTED" in output and "OBSERVED" in output


def _see_every_pair(incident: Incident, command: str, output: str) -> None:
    """Between pods without RDMA, NIXL moves KV by TCP, which is a finding with its next step."""
    workers = len(incident.release.status()["workers"])
    assert f"all {workers * (workers - 1)} ordered pairs of {workers} workers" in output
    assert "warning: NIXL fell back to TCP" in output
    assert "\n  next " in output


def _scale_as_announced(incident: Incident, command: str, output: str) -> None:
    assert "(dry run)" in output
    sizes = dict(re.findall(r"(\w+)=(\d+)", command))
    for pool, size in sizes.items():
        assert size != "3", "the release has this size already"
        assert incident.target(pool) == 3
    result = incident.release.run_in_head("sh", "-c", command.removesuffix(" --dry-run"))
    assert result.returncode == 0, result.stderr
    for pool, size in sizes.items():
        assert incident.target(pool) == int(size)


def _see_it_draining(incident: Incident, command: str, output: str) -> None:
    assert incident.worker_state() == "draining"
    if "--hand-over" in command:
        assert incident.release.ask()


def _see_pods(incident: Incident, command: str, output: str) -> None:
    assert incident.pod in output


def _see_a_log(incident: Incident, command: str, output: str) -> None:
    assert "raylet" in output


def _see_another_pod(incident: Incident, command: str, output: str) -> None:
    def is_replaced() -> bool:
        names = [one["metadata"]["name"] for one in incident.release.pods("all")]
        return len(names) == 2 and incident.pod not in names

    wait_until(is_replaced, RECOVERY_LIMIT_S, "the deleted pod has no successor")


def _see_targets(incident: Incident, command: str, output: str) -> None:
    entries = json.loads(output)
    assert {entry["labels"]["part"] for entry in entries} == METRICS_PARTS
    assert all(entry["targets"] for entry in entries)


def _see_a_monitor(incident: Incident, command: str, output: str) -> None:
    assert output.splitlines()[1].startswith("diptych ")


#: What a command begins with, and what is seen of it then. The first one that fits counts.
CHECKS: dict[str, Callable[[Incident, str, str], None]] = {
    "diptych status -o json": _see_json,
    "diptych status": _see_status,
    "diptych explain": _see_explanation,
    "diptych doctor": _see_every_pair,
    "diptych scale": _scale_as_announced,
    "diptych drain": _see_it_draining,
    "curl": _see_targets,
    "kubectl --namespace diptych get pods": _see_pods,
    "kubectl --namespace diptych logs": _see_a_log,
    "kubectl --namespace diptych delete pod": _see_another_pod,
    "kubectl --namespace diptych get podmonitor": _see_a_monitor,
}


def _type_command(incident: Incident, command: str) -> subprocess.CompletedProcess[str]:
    """Run kubectl as the operator's machine would, and everything else in the head's pod."""
    if command.startswith("kubectl "):
        return box.kubectl(*command.split()[1:], check=False)
    return incident.release.run_in_head("sh", "-c", command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_runbook_do_what_it_says(incident: Incident, page: Path) -> None:
    blocks = SHELL_BLOCK.findall(page.read_text())
    for command in "".join(blocks).splitlines():
        check = next((one for start, one in CHECKS.items() if command.startswith(start)), None)
        assert check is not None, f"{command}: a command of no known kind"
        typed = incident.filled(command)
        result = _type_command(incident, typed)
        expected = DEGRADED_CODE if command.startswith("diptych doctor") else 0
        assert result.returncode == expected, f"{typed}: {result.stderr}"
        check(incident, typed, result.stdout)
