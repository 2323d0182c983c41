"""A cluster whose workers are token sources: the real gateway and router, under the real Serve.

A token source (`source.py`) computes nothing. It sends tokens in real frames, as fast as is asked.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....loadtests.ports import free_ports
from .usage import Processes

if TYPE_CHECKING:
    from ...gateway.text.tokenizer import ChatTokenizer

MODEL_NAME = "bench"
HOST = "127.0.0.1"
READY_LIMIT_S = 300.0  #: From the deployment until the gateway can serve requests.
STREAMS_LIMIT = 8192  #: Streams at a time; above any load of the bench.
#: Of TTFT (time to the first token) and ITL (time between tokens): so lax that no stream waits in
#: the router for a better time.
TARGET_MS = 1e6
TOKEN_IDS_LIMIT = 1024  #: Tokens that a source's answers are made of, in turn.
#: Switches for Serve's HAProxy, beside those of `ray_cluster.ENVIRONMENT`: it takes requests, and
#: the cluster's end does not wait for a draining period.
HAPROXY_ENVIRONMENT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
}
#: Ports of HAProxy's own, which would be the same for every cluster on this machine.
HAPROXY_PORT_VARIABLES = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")


#: No proxy of the environment (`http_proxy`) knows a server of this machine.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class BenchError(Exception):
    """Something cannot be measured here; the message says why."""


@dataclass(frozen=True, slots=True)
class MeasuredCluster:
    """A running cluster: the port of 127.0.0.1 where clients connect, and its processes."""

    port: int
    processes: Processes = field(default_factory=Processes)

    def left_behind(self, limit_s: float = 10.0) -> int:
        """Return how many requests the gateway still has when no client is left; 0 is right.

        The gateway gets `limit_s` seconds to notice. -1: the gateway's metrics do not say.
        """
        deadline = time.monotonic() + limit_s
        while True:
            with OPENER.open(f"http://{HOST}:{self.port}/metrics", timeout=5) as answer:
                text = answer.read().decode()
            values = re.findall(r"^diptych_inflight_requests\b.* (\S+)$", text, re.MULTILINE)
            count = sum(int(float(value)) for value in values)
            if not count or time.monotonic() > deadline:
                return count if values else -1
            time.sleep(0.2)


@contextlib.contextmanager
def run_cluster(proxy: str, model: Path) -> Iterator[MeasuredCluster]:
    """Run a cluster in this process, once: Ray reads its switches at import. Raises BenchError.

    `proxy` is `python` or `haproxy`, which are Serve's, or `none`: the gateway's own socket. Of
    `model`, a checkpoint's folder, the tokenizer is used.
    """
    from ...applications import FRONT_APPLICATION
    from ...launch.ray_cluster import start_ray

    if proxy == "haproxy":
        os.environ.update(HAPROXY_ENVIRONMENT)
        ports = free_ports(len(HAPROXY_PORT_VARIABLES))
        os.environ.update(
            {name: str(port) for name, port in zip(HAPROXY_PORT_VARIABLES, ports, strict=True)}
        )
    port, grpc_port = free_ports(2)
    # In /tmp, as paths of Ray's Unix sockets must be short.
    temporary_folder = tempfile.mkdtemp(prefix="dip", dir="/tmp")
    try:
        # Ray asks its callers for a token. It binds nothing to the four cores that it is told of.
        start_ray(Path(temporary_folder), auth="token", cpus=4)
        from ray import serve

        if proxy == "none":
            serve.start(proxy_location="Disabled")
        else:
            serve.start(http_options={"host": HOST, "port": port})
        listen = "gateway" if proxy == "none" else "serve"
        serve.run(
            _application(model, port, grpc_port, listen), name=FRONT_APPLICATION, blocking=False
        )
        _wait_until_ready(port)
        yield MeasuredCluster(port)
    finally:
        import ray
        from ray import serve

        if ray.is_initialized():  # else Serve would start a Ray of its own
            with contextlib.suppress(Exception):
                serve.shutdown()
            ray.shutdown()
        shutil.rmtree(temporary_folder, ignore_errors=True)


def _application(model: Path, port: int, grpc_port: int, listen: str) -> Any:
    """Return the Serve application; `listen` is the setting gateway.listen."""
    from ray import serve

    from ...applications import FRONT_APPLICATION, ModelApplication
    from ...config import ClusterConfig
    from ...gateway.gateway import Gateway
    from ...gateway.text.tokenizer import ChatTokenizer
    from ...router_service import RouterService
    from .workers import TokenSourceWorker

    config = ClusterConfig.model_validate(
        {
            "gateway": {
                "host": HOST,
                "http_port": port,
                "grpc_port": grpc_port,
                "listen": listen,
                "max_streams": STREAMS_LIMIT,
            },
            "router": {"queue_max": STREAMS_LIMIT},
            "slo": {"ttft_ms": TARGET_MS, "itl_ms": TARGET_MS},
            # Longer than by default: token sources that share the cores with a load may be late
            # with their signs of life, and must not be given up.
            "silence_s": 10.0,
        }
    )
    tree = config.model_dump()
    token_ids = countable_token_ids(ChatTokenizer(model))

    def bind(deployment_class: type, name: str, arguments: Sequence[Any]) -> Any:
        deployment: Any = serve.deployment(deployment_class)
        configured = deployment.options(
            name=name,
            max_ongoing_requests=2 * STREAMS_LIMIT,
            ray_actor_options={"num_cpus": 0.01},
        )
        return configured.bind(*arguments)

    others = [
        bind(RouterService, "Router", [tree]),
        bind(TokenSourceWorker, "PrefillWorker", ["prefill", config.secret, token_ids]),
        bind(TokenSourceWorker, "DecodeWorker", ["decode", config.secret, token_ids]),
    ]
    # A gateway looks for its models in the configurations that Serve was given. `serve.run` gives it
    # none, so the gateway is told: the model's workers are in its own application.
    front = tree | {"model": tree["model"] | {"path": str(model), "name": MODEL_NAME}}
    models = [ModelApplication(FRONT_APPLICATION, front)]
    return bind(Gateway, "Gateway", [front, models, others])


def countable_token_ids(tokenizer: ChatTokenizer) -> list[int]:
    """Return ids whose text is a space and letters: a client counts such tokens by their spaces."""
    token_ids = [
        token_id
        for token_id in range(tokenizer.vocabulary_size)
        if re.fullmatch(" [a-z]+", tokenizer.token_text(token_id))
    ]
    return token_ids[:TOKEN_IDS_LIMIT]


def _wait_until_ready(port: int) -> None:
    """Wait until the gateway can serve requests. Raises BenchError after `READY_LIMIT_S`."""
    deadline = time.monotonic() + READY_LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            OPENER.open(f"http://{HOST}:{port}/ready", timeout=5).close()
            return
        time.sleep(0.2)
    raise BenchError(f"the cluster was not ready after {READY_LIMIT_S:.0f} s")
