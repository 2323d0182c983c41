"""The Serve application: Gateway (ingress), Router, Control, PrefillWorker and DecodeWorker.

`Gateway`'s constructor takes the other deployments' handles only so that Serve deploys the graph;
at run time they find each other through the router.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ray import serve

from .config import SECRET, ClusterConfig, ConfigError, PoolConfig, load_config
from .control.control import Control
from .control.serve import HOMES
from .gateway.gateway import Gateway
from .launch.checkpoint import find
from .launch.ray_cluster import AUTH_MODE
from .router_service import RouterService
from .worker.process import WorkerProcess

HEALTH: dict[str, Any] = {"health_check_period_s": 1.0, "health_check_timeout_s": 5.0}
CPUS = 0.01  #: Ray does not count cores here: the engine's threads are a setting
ANYWHERE: dict[str, Any] = {"num_cpus": CPUS}
#: where the URLs lead, if the Serve config says nothing else; Ray's head may offer no cores
HEAD: dict[str, Any] = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
SHUTDOWN: dict[str, Any] = {
    "graceful_shutdown_wait_loop_s": 0.2,
    "graceful_shutdown_timeout_s": 15.0,
}


def build(config: ClusterConfig, model: Path, name: str) -> serve.Application:
    """The application for one model. `model` must be readable on every node."""
    tree = config.model_dump()
    tree["model"]["name"] = name
    router = _deployment(RouterService, "Router", 1, HEAD).bind(tree)
    control = _deployment(Control, "Control", 1, HEAD).bind(tree)
    workers = [
        _pool(deployment, getattr(config.pools, home)).bind(home, tree, str(model))
        for home, deployment in HOMES.items()
        if getattr(config.pools, home).replicas  # Serve knows no deployment of none
    ]
    others = [router, control, *workers]
    return _deployment(Gateway, "Gateway", 1, HEAD).bind(tree, str(model), name, others)


def application(args: dict[str, Any]) -> serve.Application:
    """The builder of a Serve config file: `import_path: diptych.cluster.app:application`.

    `args` is the configuration tree of `config.py`. Serve runs this on any node, so the model must
    be at the same path on all of them; whether it fits there is not checked. The cluster's secret
    is taken from the environment (`DIPTYCH_SECRET`), where it does not stand in a file that many
    may read. Raises ConfigError, also where Ray's processes ask nobody for a token and
    `ray.auth` does not allow that.
    """
    given = {"secret": os.environ[SECRET]} if os.environ.get(SECRET) else {}
    config = load_config(None, {**args, **given})
    if config.ray.auth == "token" and os.environ.get(AUTH_MODE, "").lower() != "token":
        raise ConfigError(
            f"Ray runs without {AUTH_MODE}=token: whoever reaches it can run code here; start its "
            "nodes with a token (KubeRay: authOptions), or accept that with ray.auth: disabled"
        )
    model = find(config)
    return build(config, model.folder, model.name)


def _deployment(
    cls: type, name: str, replicas: int, actor: dict[str, Any] = ANYWHERE, **options: Any
) -> serve.Deployment:
    deployment: serve.Deployment = serve.deployment(cls)  # type: ignore[assignment]
    return deployment.options(
        name=name,
        num_replicas=replicas,
        max_ongoing_requests=4096,
        ray_actor_options=actor,
        **HEALTH,
        **SHUTDOWN,
        **options,
    )


def _pool(name: str, pool: PoolConfig) -> serve.Deployment:
    options: dict[str, Any] = {}
    actor, ranks = ANYWHERE, pool.tensor_parallel
    if pool.engine.device == "cuda":  # rank 0 starts the others: it sees the GPUs of all
        actor = {**ANYWHERE, "num_gpus": ranks}
    elif ranks > 1:  # all ranks of a replica on one node
        options["placement_group_bundles"] = [{"CPU": CPUS}] * ranks
        options["placement_group_strategy"] = "STRICT_PACK"
    return _deployment(WorkerProcess, name, pool.replicas, actor, **options)
