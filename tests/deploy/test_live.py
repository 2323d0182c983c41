"""The rendered Serve config on three real Ray nodes: deployed as KubeRay does it, grown, drained.

Pods, probes and the operator itself are not here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from diptych.cluster.launch.ray_cluster import TOKEN_PATH

from deploy import render
from tests.support.live import eventually, free_port
from tests.support.ray_token import token_environment

BIN = Path(sys.executable).parent
DRAIN = render.ROOT / "docker/drain.sh"
pytestmark = [pytest.mark.long, pytest.mark.cluster]


@dataclass
class Pods:
    """Ray nodes that stand for a head and two pods of the group."""

    folder: Path
    env: dict[str, str]
    dashboard: str
    url: str
    control: str
    config: dict[str, Any]
    raylets: list[int]  #: one a pod; a drained one ends on its own

    def deploy(self) -> None:
        """What the operator does with serveConfigV2."""
        where = f"{self.dashboard}/api/serve/applications/"
        token = Path(self.env[TOKEN_PATH]).read_text()
        headers = {"authorization": f"Bearer {token}"}
        assert httpx.put(where, json=self.config, timeout=60).status_code == 401
        httpx.put(where, json=self.config, headers=headers, timeout=60).raise_for_status()

    def workers(self) -> dict[str, int]:
        """Process ids of the workers that the gateway knows, by id; none while it is not ready."""
        try:
            if httpx.get(f"{self.url}/ready", timeout=10).status_code != 200:
                return {}
            status = httpx.get(f"{self.control}/admin/v1/cluster", timeout=10).json()
        except httpx.HTTPError:  # no proxy listens yet
            return {}
        return {worker["id"]: worker["pid"] for worker in status["workers"]}

    def replicas(self, pod: int) -> list[str]:
        """Names of the Serve replicas' processes below a node."""
        command = ["ps", "-o", "args=", "--ppid", str(self.raylets[pod])]
        told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        return [line for line in told.split("\n") if line.startswith("ray::ServeReplica:")]

    def node_id(self, pod: int) -> str:
        words = Path(f"/proc/{self.raylets[pod]}/cmdline").read_text().split("\0")
        return next(word.split("=")[1] for word in words if word.startswith("--node_id="))


@contextmanager
def ray_node(env: dict[str, str], log: Path, *flags: str) -> Iterator[subprocess.Popen]:
    command = [BIN / "ray", "start", "--block", "--node-ip-address", "127.0.0.1", *flags]
    command += ["--object-store-memory", "104857600", "--disable-usage-stats"]
    command += ["--dashboard-agent-listen-port", str(free_port())]
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        eventually(lambda: "Ray runtime started" in log.read_text(), 60)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def raylet(node: subprocess.Popen) -> int:
    """Its process id: the parent of the node's workers."""
    command = ["pgrep", "-P", str(node.pid), "-f", "/raylet "]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@contextmanager
def pods() -> Iterator[Pods]:
    text = (render.RENDERED / "cpu-kind.yaml").read_text()
    service = next(d for d in yaml.safe_load_all(text) if d["kind"] == "RayService")
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    http, grpc, gcs, dashboard, admin, admin_grpc = (free_port() for _ in range(6))
    config |= {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": http}}
    config["grpc_options"]["port"] = grpc
    config["applications"][0]["args"]["control"] = {"port": admin, "grpc_port": admin_grpc}
    switches = yaml.safe_load((render.CHART / "files/environment.yaml").read_text())
    slots = '{"prefill": 1, "decode": 1, "gateway": 1, "router": 1}'
    # Ray's sockets have long names, and pytest's folders too
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dip", dir="/tmp")))
        # The operator takes the token from the Secret and gives it to each pod in the same way.
        env = {**token_environment(folder), **switches, "DIPTYCH_SECRET": "word"}
        env["RAY_ADDRESS"] = f"127.0.0.1:{gcs}"
        head = ("--head", "--port", gcs, "--dashboard-port", dashboard, "--num-cpus", 0)
        head += ("--temp-dir", folder / "ray")
        stack.enter_context(ray_node(env, folder / "head", *map(str, head)))
        pod = ("--address", env["RAY_ADDRESS"], "--num-cpus", "2", "--resources", slots)
        nodes = [stack.enter_context(ray_node(env, folder / f"pod{n}", *pod)) for n in range(2)]
        urls = [f"http://127.0.0.1:{port}" for port in (dashboard, http, admin)]
        yield Pods(folder, env, *urls, config, [raylet(node) for node in nodes])


def drain(cluster: Pods, pod: int) -> int:
    """The pod's preStop hook. A pod sees one node and its processes; here there are three."""
    shims = {
        # `ray stop` would end all Ray on this machine: here it ends the pod's.
        "ray": f'[ "$1" != stop ] || exec kill {cluster.raylets[pod]}\n'
        f'exec {BIN}/ray "$@" --node-id {cluster.node_id(pod)}',
        "pgrep": f'exec /usr/bin/pgrep -P {cluster.raylets[pod]} "$@"',
    }
    bin_ = cluster.folder / "bin"
    bin_.mkdir()
    for name, body in shims.items():
        (bin_ / name).write_text(f"#!/bin/sh\n{body}\n")
        (bin_ / name).chmod(0o755)
    env = {**cluster.env, "PATH": f"{bin_}:{os.environ['PATH']}"}
    return subprocess.run([DRAIN, "45"], env=env, check=False, timeout=90).returncode


def ask(url: str) -> str:
    body = {"messages": [{"role": "user", "content": "What is prefill?"}]}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    return reply.json()["choices"][0]["message"]["content"] if reply.status_code == 200 else ""


def test_the_rendered_config_serves_grows_in_place_and_leaves_a_drained_pod() -> None:
    with pods() as cluster:
        cluster.deploy()
        before = eventually(cluster.workers, 90)
        answer = ask(cluster.url)
        assert answer.startswith("Prefill is the first phase")

        for deployment in cluster.config["applications"][1]["deployments"]:
            if deployment["name"].endswith("Worker"):
                deployment["num_replicas"] = 2
        cluster.deploy()
        grown = eventually(lambda: (w := cluster.workers()) and len(w) == 4 and w, 90)
        assert before.items() <= grown.items()  # nobody was restarted

        answers, over = [], threading.Event()

        def client() -> None:
            while not over.is_set():
                answers.append(ask(cluster.url))

        thread = threading.Thread(target=client)
        thread.start()
        try:
            leaves = 0 if not any("Gateway" in r for r in cluster.replicas(0)) else 1
            assert cluster.replicas(leaves)
            assert drain(cluster, leaves) == 0
            assert cluster.replicas(leaves) == []
        finally:
            over.set()
            thread.join(90)
        assert len(answers) > 3 and set(answers) == {answer}
        assert ask(cluster.url) == answer
