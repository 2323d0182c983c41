"""Whether Ray knows that a lost worker's process is gone: what a fence on another host needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ray_token import token_environment

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SCRIPT = """
import os, signal, time
import ray
from ray.serve._private.common import DeploymentID, ReplicaID
from diptych.cluster.worker.process import replica_has_ended
from diptych.protos.frames import WorkerCard

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)

@ray.remote(num_cpus=0)
class Replica:
    def pid(self):
        return os.getpid()

def start(replica):
    options = {"name": f"SERVE_REPLICA::diptych-m#PrefillWorker#{replica}", "namespace": "serve"}
    return Replica.options(**options).remote()

def card(replica):
    return WorkerCard(f"prefill/{replica}", "prefill", "prefill", "", replica, 0)

def has_ended(replica):
    own_id = ReplicaID("asking", DeploymentID("PrefillWorker", "diptych-m"))
    return replica_has_ended(card(replica), own_id)

asking, frozen, killed = start("asking"), start("frozen"), start("killed")
ray.get(asking.pid.remote())
pids = ray.get([frozen.pid.remote(), killed.pid.remote()])
assert not has_ended("frozen") and not has_ended("killed")
os.kill(pids[0], signal.SIGSTOP)
os.kill(pids[1], signal.SIGKILL)
deadline = time.monotonic() + 60
while not has_ended("killed"):
    assert time.monotonic() < deadline
    time.sleep(0.1)
assert not has_ended("frozen"), "a frozen process may wake up"
os.kill(pids[0], signal.SIGCONT)
print("right")
"""


def test_a_killed_replica_has_ended_and_a_frozen_one_has_not(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=token_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.stdout.strip().endswith("right"), done.stderr[-2000:]
