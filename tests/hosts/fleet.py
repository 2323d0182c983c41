"""A cluster whose Ray nodes are hosts of `host.py`: a head, and hosts with workers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diptych.cluster.launch.ray_cluster import ENVIRONMENT, LOST_HEAD_ENVIRONMENT

from tests.support.live import eventually
from tests.support.ray_token import token_environment
from tests.support.streams import Streams

from .host import Host, Machines, end, machines

BIN = Path(sys.executable).parent
HEAD = "head"
STORE = "store"  #: The host whose Redis keeps what Ray's head knows, in fleets that have one.
GCS_PORT = 6379
STORE_PORT = 6399
#: What Ray's processes need where there is such a store; how long nodes wait is as KubeRay sets it.
STORE_ENVIRONMENT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600", **LOST_HEAD_ENVIRONMENT}
HEAD_STARTS = 6  #: How often a head is started that does not come up, as a kubelet would.
HTTP_PORT = 8000
ADMIN_PORT = 8001
START_S = 180.0
STOP_S = 30.0
WHOLE_S = 150.0
STREAMS = 6  #: How many answers are streamed at a time.
ANSWER_TOKENS = 150
#: Where the folder for tokens and logs is made, which all hosts see.
SHARED = Path("/run")
#: Flags of `diptych serve` for small caches.
SMALL = [
    words for pool in ("prefill", "decode") for words in ("--set", f"pools.{pool}.engine.kv_mib=64")
]


@dataclass
class Fleet:
    """A running cluster on some hosts."""

    machines: Machines
    environment: dict[str, str]
    folder: Path
    #: What the head's processes are told besides: where its store is, if it has one.
    head_environment: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def head(self) -> Host:
        return self.machines.hosts[HEAD]

    @property
    def url(self) -> str:
        return f"http://{self.head.address}:{HTTP_PORT}"

    def diptych(self, *words: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Runs a command of the CLI on the head."""
        admin = f"DIPTYCH_ADMIN=http://127.0.0.1:{ADMIN_PORT}"
        endpoint = f"DIPTYCH_ENDPOINT=http://127.0.0.1:{HTTP_PORT}"
        command = ("env", admin, endpoint, str(BIN / "diptych"), *words)
        return self.head.run(*command, timeout_s=timeout_s)

    def status(self) -> dict[str, Any]:
        """Returns the cluster's status; empty where Control does not answer the command."""
        done = self.diptych("status", "-o", "json")
        found: dict[str, Any] = json.loads(done.stdout) if done.stdout.startswith("{") else {}
        return found

    def hosts_of_workers(self) -> dict[str, str]:
        """Returns the host of each worker that is there, by the worker's id."""
        addresses = {host.address: name for name, host in self.machines.hosts.items()}
        workers = self.status().get("workers", [])
        return {
            worker["id"]: addresses.get(worker["address"].rpartition(":")[0], "?")
            for worker in workers
        }

    def is_whole(self) -> bool:
        """Whether all replicas are ready, and nothing is wrong."""
        status = self.status()
        if status.get("state") != "healthy":
            return False
        return all(pool["ready"] == pool["target"] for pool in status["pools"].values())

    def is_idle(self) -> bool:
        """Whether no block and no job is held."""
        workers = self.status().get("workers", [])
        blocks = [worker["engine"]["kv_blocks"] for worker in workers]
        return (
            bool(workers)
            and all(one["free"] + one["cached"] == one["total"] for one in blocks)
            and not any(worker["jobs"] for worker in workers)
        )

    def join(self, name: str, *flags: str, environment: Mapping[str, str] | None = None) -> None:
        """Starts a Ray node on a host, and waits until it runs."""
        host = self.machines.hosts[name]
        log = self.folder / f"{name}.log"
        command = [str(BIN / "ray"), "start", "--block", "--node-ip-address", host.address]
        command += ["--object-store-memory", "104857600", "--disable-usage-stats", *flags]
        with log.open("w") as output:
            node = host.start(command, output, environment or self.environment)
        self.nodes[name] = node
        eventually(lambda: "Ray runtime started" in log.read_text(), 90.0)

    def start_head(self) -> None:
        """Starts the head's Ray node, with what its store knows."""
        self.join(
            HEAD,
            *("--head", "--port", str(GCS_PORT), "--include-dashboard", "false"),
            *("--num-cpus", "0"),
            environment={**self.environment, **self.head_environment},
        )

    def kill_head(self, *, silently: bool = False) -> None:
        """Ends all processes of the head at once, and forgets its files: a pod's are gone, too.

        `silently`: as when its node dies, nobody is told that the connections are closed, neither
        now nor later.
        """
        if silently:
            self.machines.isolate(HEAD)
            resets = ("OUTPUT", "-p", "tcp", "--tcp-flags", "RST", "RST", "-j", "DROP")
            dropped = self.head.run("iptables", "-A", *resets)
            assert dropped.returncode == 0, dropped.stderr
        self.head.run("sh", "-c", "kill -9 -1")
        self.nodes.pop(HEAD).wait(10.0)
        if silently:
            self.machines.heal()
        self.head.run("sh", "-c", "rm -rf /tmp/* /dev/shm/*")

    def start_head_again(self) -> None:
        """Starts a killed head until it runs.

        Ray ends a node whose agents are not up within 15 s, as they are not while streams keep both
        cores busy. A kubelet would start it again, too.
        """
        for _ in range(HEAD_STARTS - 1):
            try:
                self.start_head()
            except AssertionError:  # it is not up
                self.kill_head()
            else:
                return
        self.start_head()

    def join_for_workers(self, name: str, environment: Mapping[str, str] | None = None) -> None:
        """Starts a Ray node for workers on a host."""
        address = f"{self.head.address}:{GCS_PORT}"
        self.join(name, "--address", address, "--num-cpus", "4", environment=environment)

    def end(self, name: str) -> None:
        """Stops a Ray node as its service manager would."""
        end(self.nodes.pop(name), signal.SIGTERM, STOP_S)


@contextmanager
def fleet(
    hosts: tuple[str, ...],
    *arguments: str,
    spares: tuple[str, ...] = (),
    code: Path | None = None,
    has_store: bool = False,
) -> Iterator[Fleet]:
    """Serves on a head and on `hosts`; `spares` are hosts that run nothing yet.

    The workers import Diptych from the folder `code`, if it is given. `has_store`: a Redis on
    another host keeps what Ray's head knows, so that a head can be started again.
    """
    with ExitStack() as stack:
        made = stack.enter_context(machines(HEAD, *hosts, *spares, *([STORE] if has_store else [])))
        folder = Path(tempfile.mkdtemp(prefix="dip", dir=SHARED))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        environment = {**token_environment(folder), **ENVIRONMENT, "OMP_NUM_THREADS": "1"}
        running = Fleet(made, environment, folder)
        if has_store:
            environment |= STORE_ENVIRONMENT
            running.head_environment = stack.enter_context(_store(made.hosts[STORE], folder))
        running.start_head()
        of_workers = environment
        if code:  # that they import from there is seen by the bytecode which Python leaves there
            of_workers = {**environment, "PYTHONPATH": str(code), "PYTHONDONTWRITEBYTECODE": ""}
        for name in hosts:
            running.join_for_workers(name, of_workers)
        stack.enter_context(_serving(running, *arguments))
        yield running


@contextmanager
def _store(host: Host, folder: Path) -> Iterator[dict[str, str]]:
    """Runs a Redis; yields what makes Ray's head keep there what it knows."""
    command = ["redis-server", "--bind", "0.0.0.0", "--port", str(STORE_PORT), "--save", ""]
    with (folder / "redis.log").open("w") as output:
        redis = host.start([*command, "--protected-mode", "no"], output, dict(os.environ))
    try:
        yield {
            "RAY_REDIS_ADDRESS": f"{host.address}:{STORE_PORT}",
            "RAY_external_storage_namespace": "diptych",
        }
    finally:
        end(redis, signal.SIGTERM, STOP_S)


@contextmanager
def _serving(running: Fleet, *arguments: str) -> Iterator[None]:
    log = running.folder / "serve.log"
    command = [str(BIN / "diptych"), "serve"]
    command += ["--ray-address", f"{running.head.address}:{GCS_PORT}"]
    command += ["--set", "gateway.host=0.0.0.0", *arguments]
    with log.open("w") as output:
        serve = running.head.start(command, output, running.environment)

    def is_ready() -> bool:
        assert serve.poll() is None, f"serve ended: {log.read_text()}"
        return "] ready" in log.read_text()

    try:
        eventually(is_ready, START_S)
        eventually(running.is_whole, 60.0, every=1.0)
        yield
    finally:
        end(serve, signal.SIGINT, STOP_S)


def raw_tcp_gib_s(sender: Host, receiver: Host, mib: int = 256) -> float:
    """Returns how fast a plain TCP connection carries zeros from one host to another, in GiB/s."""
    listen = (
        "import socket,time\n"
        "s=socket.create_server(('0.0.0.0',5999))\nprint('ready',flush=True)\n"
        "c,_=s.accept()\nn=0\nbegan=time.perf_counter()\n"
        "while True:\n d=c.recv(1<<20)\n"
        " if not d: break\n n+=len(d)\n"
        "print(n/(time.perf_counter()-began)/2**30)\n"
    )
    send = (
        f"import socket\nc=socket.create_connection(('{receiver.address}',5999))\n"
        f"d=bytes(1<<20)\nfor _ in range({mib}): c.sendall(d)\nc.close()\n"
    )
    found: list[float] = []
    ready = threading.Event()

    def receive() -> None:
        command = receiver.command([sys.executable, "-c", listen])
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            ready.set()
            found.append(float(process.stdout.readline()))

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    assert ready.wait(20.0)
    sent = sender.run(sys.executable, "-c", send, timeout_s=120.0)
    assert sent.returncode == 0, sent.stderr
    thread.join(120.0)
    return found[0]


def seconds_until(check: Callable[[], Any], limit_s: float) -> float:
    """Waits until `check` is true; returns how long that took."""
    began_at = time.monotonic()
    eventually(check, limit_s, every=0.5)
    return time.monotonic() - began_at


def streams_of(running: Fleet, url: str = "", count: int = STREAMS) -> Streams:
    """Returns streams whose right tokens were learnt from the undisturbed fleet.

    `url` is that of a gateway; empty: the head's.
    """
    streams = Streams(url or running.url, count, ANSWER_TOKENS)
    streams.learn()
    return streams


def assert_sound(running: Fleet, streams: Streams) -> None:
    """Some streams ended, none was wrong, and nothing is held for them."""
    assert not streams.wrong, streams.wrong[:3]
    assert streams.ended >= STREAMS
    eventually(running.is_idle, 60.0, every=1.0)
