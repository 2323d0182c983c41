"""A cluster whose workers are token sources: the real gateway and router, under the real Serve."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .usage import Processes

NAME, HOST = "bench", "127.0.0.1"
READY_S = 300.0
STREAMS_MAX = 8192
LATE_MS = 1e6
#: beside those of `ray_cluster.ENVIRONMENT`
HAPROXY = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
}


class BenchError(Exception):
    """It cannot be measured here; the message says why."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where clients connect."""

    port: int
    processes: Processes = field(default_factory=Processes)

    def left_behind(self, limit_s: float = 10.0) -> int:
        """Requests that the gateway still has, when it should have none any more."""
        deadline = time.monotonic() + limit_s
        while True:
            with urllib.request.urlopen(f"http://{HOST}:{self.port}/metrics", timeout=5) as answer:
                text = answer.read().decode()
            found = re.findall(r"^diptych_inflight_requests\b.* (\S+)$", text, re.MULTILINE)
            count = sum(int(float(value)) for value in found)
            if not count or time.monotonic() > deadline:
                return count if found else -1
            time.sleep(0.2)


@contextlib.contextmanager
def cluster(proxy: str, model: Path) -> Iterator[Cluster]:
    """Starts it in this process: once, as Ray reads its switches at import. Raises BenchError.

    `proxy`: python or haproxy, which are Serve's; none: the gateway's own socket.
    """
    from ...launch.ray_cluster import start_ray

    if proxy == "haproxy":
        ports = {"RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT"}
        os.environ.update(HAPROXY, **{name: str(free_port()) for name in ports})
    port = free_port()
    temporary = tempfile.mkdtemp(prefix="dip", dir="/tmp")
    try:
        start_ray(Path(temporary), "token", cpus=4)
        from ray import serve

        if proxy == "none":
            serve.start(proxy_location="Disabled")
        else:
            serve.start(http_options={"host": HOST, "port": port})
        listen = "gateway" if proxy == "none" else "serve"
        serve.run(_application(model, port, listen), name="diptych", blocking=False)
        _wait(port)
        yield Cluster(port)
    finally:
        import ray
        from ray import serve

        if ray.is_initialized():  # else Serve would start a Ray of its own
            with contextlib.suppress(Exception):
                serve.shutdown()
            ray.shutdown()
        shutil.rmtree(temporary, ignore_errors=True)


def _application(model: Path, port: int, listen: str) -> Any:
    from ray import serve

    from ...config import ClusterConfig
    from ...gateway.gateway import Gateway
    from ...gateway.text.tokenizer import ChatTokenizer
    from ...router_service import RouterService
    from .workers import Worker

    config = ClusterConfig.model_validate(
        {
            "gateway": {
                "host": HOST,
                "http_port": port,
                "grpc_port": free_port(),
                "listen": listen,
                "max_streams": STREAMS_MAX,
            },
            "router": {"queue_max": STREAMS_MAX},
            "slo": {"ttft_ms": LATE_MS, "itl_ms": LATE_MS},  # no stream waits for a better time
            "silence_s": 10.0,
        }
    )
    tree = config.model_dump()
    ids = words(ChatTokenizer(model))

    def deployment(cls: type, name: str, *arguments: Any) -> Any:
        made: Any = serve.deployment(cls)
        options = {"max_ongoing_requests": 2 * STREAMS_MAX, "ray_actor_options": {"num_cpus": 0.01}}
        return made.options(name=name, **options).bind(*arguments)

    parts = [
        deployment(RouterService, "Router", tree),
        deployment(Worker, "PrefillWorker", "prefill", config.secret, ids),
        deployment(Worker, "DecodeWorker", "decode", config.secret, ids),
    ]
    return deployment(Gateway, "Gateway", tree, str(model), NAME, parts)


def words(text: Any) -> list[int]:
    """Ids whose text is a space and letters: a client counts them by their spaces."""
    pieces = ((token, text.piece(token)) for token in range(text.vocab))
    return [token for token, piece in pieces if re.fullmatch(" [a-z]+", piece)][:1024]


def _wait(port: int) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://{HOST}:{port}/ready", timeout=5).close()
            return
        time.sleep(0.2)
    raise BenchError(f"the cluster was not ready after {READY_S:.0f} s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
