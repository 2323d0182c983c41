"""Two Ray nodes on this host, KV over TCP between their workers: by the same commands as one.

The head holds Control, the router and the gateway; whole workers live on either node.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from diptych.cluster.launch.ray_cluster import ENVIRONMENT

from tests.deploy.test_live import ray_node, raylet
from tests.live.test_scaling import command
from tests.support.live import Live, eventually, free_port, running
from tests.support.ray_token import token_environment
from tests.support.streams import Streams

pytestmark = [pytest.mark.long, pytest.mark.cluster]


@contextmanager
def two_nodes() -> Iterator[tuple[Live, subprocess.Popen]]:
    """A cluster served over both, and the second node's process."""
    gcs, dashboard = free_port(), free_port()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dip", dir="/tmp")))
        env = {**token_environment(folder), **ENVIRONMENT}
        head = ["--head", "--port", str(gcs), "--dashboard-port", str(dashboard)]
        head += ["--include-dashboard", "false", "--temp-dir", str(folder / "ray")]
        head += ["--num-cpus", "4"]
        stack.enter_context(ray_node(env, folder / "head", *head))
        pod = ["--address", f"127.0.0.1:{gcs}", "--num-cpus", "4"]
        second = stack.enter_context(ray_node(env, folder / "second", *pod))
        small = [f"pools.{home}.engine.kv_mib=64" for home in ("prefill", "decode")]
        flags = ["--ray-address", f"127.0.0.1:{gcs}", "--prefill", "2", "--decode", "2"]
        flags += [p for one in (*small, "kv_transfer.transport=tcp") for p in ("--set", one)]
        live = stack.enter_context(running(folder / "serve.log", *flags, environment=env))
        yield live, second


def below(process: subprocess.Popen) -> list[int]:
    """Process ids of a node's replicas."""
    command = ["pgrep", "-P", str(raylet(process))]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return [int(word) for word in told.split()]


def test_two_nodes_serve_scale_and_lose_one_by_the_same_commands() -> None:
    with two_nodes() as (live, second):
        streams = Streams(live.url, 8, 200)
        streams.learn()
        workers = {w["id"]: w["pid"] for w in live.status()["workers"]}
        theirs = {name for name, pid in workers.items() if pid in below(second)}
        assert 0 < len(theirs) < 4, "Serve spreads the workers over both nodes"
        sent = {w["id"]: w["transfer"] for w in live.status()["workers"]}
        assert {one["transport"] for one in sent.values()} == {"tcp"}
        with streams.running():
            command(live, "scale", "decode=3", "--wait")
            command(live, "scale", "decode=2", "--wait")
            os.killpg(second.pid, signal.SIGKILL)

            def recovered() -> bool:
                status = live.status()
                names = {w["id"] for w in status["workers"]}
                return status["state"] == "healthy" and not names & theirs

            eventually(recovered, 120)
        assert not streams.wrong and streams.ended >= 8
        eventually(live.idle)
