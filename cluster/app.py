"""The Serve application: Gateway (ingress), Router, PrefillWorker and DecodeWorker.

`Gateway`'s constructor takes the other deployments' handles only so that Serve deploys the graph;
at run time they find each other through the router.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from .checkpoint import find
from .config import ClusterConfig, PoolConfig, load_config
from .gateway.gateway import Gateway
from .router_service import RouterService
from .worker import Worker

APP = "diptych"
SECRET = "DIPTYCH_SECRET"
HEALTH: dict[str, Any] = {"health_check_period_s": 1.0, "health_check_timeout_s": 5.0}
TARGET_ROUTER: Any = "diptych.cluster.serve_router:TargetRouter"
CPUS = 0.01  #: Ray does not count cores here: the engine's threads are a setting
SHUTDOWN: dict[str, Any] = {
    "graceful_shutdown_wait_loop_s": 0.2,
    "graceful_shutdown_timeout_s": 15.0,
}


def build(config: ClusterConfig, model: Path, name: str) -> serve.Application:
    """The application for one model. `model` must be readable on every node."""
    tree = config.model_dump()
    router = _deployment(RouterService, "Router", 1).bind(tree)
    pools = config.pools
    workers = [
        _pool("PrefillWorker", pools.prefill).bind("prefill", tree, str(model)),
        _pool("DecodeWorker", pools.decode).bind("decode", tree, str(model)),
    ]
    return _deployment(Gateway, "Gateway", 1).bind(tree, str(model), name, [router, *workers])


def application(args: dict[str, Any]) -> serve.Application:
    """The builder of a Serve config file: `import_path: diptych.cluster.app:application`.

    `args` is the configuration tree of `config.py`. Serve runs this on any node, so the model must
    be at the same path on all of them; whether it fits there is not checked. The cluster's secret
    is taken from the environment (`DIPTYCH_SECRET`), where it does not stand in a file that many
    may read. Raises ConfigError.
    """
    given = {"secret": os.environ[SECRET]} if os.environ.get(SECRET) else {}
    config = load_config(None, {**args, **given})
    model = find(config)
    return build(config, model.folder, model.name)


def _deployment(cls: type, name: str, replicas: int, **options: Any) -> serve.Deployment:
    deployment: serve.Deployment = serve.deployment(cls)  # type: ignore[assignment]
    return deployment.options(
        name=name,
        num_replicas=replicas,
        max_ongoing_requests=4096,
        ray_actor_options={"num_cpus": CPUS},
        **HEALTH,
        **SHUTDOWN,
        **options,
    )


def _pool(name: str, pool: PoolConfig) -> serve.Deployment:
    options: dict[str, Any] = {
        "request_router_config": RequestRouterConfig(request_router_class=TARGET_ROUTER)
    }
    if pool.tensor_parallel > 1:  # all ranks of a replica on one node
        options["placement_group_bundles"] = [{"CPU": CPUS}] * pool.tensor_parallel
        options["placement_group_strategy"] = "STRICT_PACK"
    return _deployment(Worker, name, pool.replicas, **options)
