"""The Serve application: Gateway (ingress), Router, Control, PrefillWorker and DecodeWorker.

Each is a deployment of Ray Serve, which starts, restarts and counts its replicas. `Gateway`'s
constructor takes the other deployments' handles only so that Serve deploys the graph; at run time
they find each other through the router.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ray import serve

from .config import (
    SECRET,
    ClusterConfig,
    ConfigError,
    EngineKindSettings,
    PoolConfig,
    load_config,
)
from .control.control import Control
from .control.serve import POOL_DEPLOYMENTS
from .gateway.gateway import Gateway
from .launch.checkpoint import find_checkpoint
from .launch.ray_cluster import AUTH_MODE
from .router_service import RouterService
from .worker.process import WorkerProcess

#: Serve asks `check_health` of each replica every second, and replaces one that does not answer.
HEALTH_OPTIONS: dict[str, Any] = {"health_check_period_s": 1.0, "health_check_timeout_s": 5.0}
#: A worker needs up to 14 s to hand its work over before it ends (worker/lifecycle.py).
SHUTDOWN_OPTIONS: dict[str, Any] = {
    "graceful_shutdown_wait_loop_s": 0.2,
    "graceful_shutdown_timeout_s": 15.0,
}
#: The CPUs that Ray is asked for, for each actor or rank. They are next to none: Ray does not count
#: cores here, because the engine's threads are a setting.
ACTOR_CPUS = 0.01
#: Options of an actor that may run on any node.
ANY_NODE: dict[str, Any] = {"num_cpus": ACTOR_CPUS}
#: Options of an actor that runs on the node of Ray's head, where the URLs lead, if the Serve config
#: says nothing else. That node may offer no cores, so all that is asked of it is a bit of the
#: resource that Ray gives to the head alone.
HEAD_NODE: dict[str, Any] = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
#: How many requests Serve lets run in one replica; the limit that counts is the router's queue.
ONGOING_REQUESTS_LIMIT = 4096


def build(config: ClusterConfig, model: Path, name: str) -> serve.Application:
    """Return the application for one model.

    `model` is the checkpoint's folder, readable on every node; `name` is the model's name in the
    API.
    """
    tree = config.model_dump()
    tree["model"]["name"] = name
    router = _deployment(RouterService, "Router", 1, HEAD_NODE).bind(tree)
    control = _deployment(Control, "Control", 1, HEAD_NODE).bind(tree)
    workers = []
    for pool_name, deployment in POOL_DEPLOYMENTS.items():
        pool = getattr(config.pools, pool_name)
        if pool.replicas:  # Serve knows no deployment without a replica
            workers.append(
                _worker_deployment(deployment, pool, config.engine).bind(
                    pool_name, tree, str(model)
                )
            )
    others = [router, control, *workers]
    gateway = _deployment(Gateway, "Gateway", 1, HEAD_NODE)
    return gateway.bind(tree, str(model), name, others)


def application(args: dict[str, Any]) -> serve.Application:
    """The builder of a Serve config file: `import_path: diptych.cluster.app:application`.

    `args` is the configuration tree of `config.py`. Serve runs this on any node, so the model must
    be at the same path on all of them; whether it fits there is not checked. The environment's
    `DIPTYCH_SECRET`, if it is set, replaces the cluster's secret in `args`, so that the secret need
    not stand in a file that many may read. Raises ConfigError if the configuration is wrong, if the
    model cannot be used, or if Ray runs without tokens although `ray.auth` is `token`.
    """
    if os.environ.get(SECRET):
        args = {**args, "secret": os.environ[SECRET]}
    config = load_config(None, args)
    if config.ray.auth == "token" and os.environ.get(AUTH_MODE, "").lower() != "token":
        raise ConfigError(
            f"Ray runs without {AUTH_MODE}=token: whoever reaches it can run code here; start its "
            "nodes with a token (KubeRay: authOptions), or accept that with ray.auth: disabled"
        )
    model = find_checkpoint(config)
    return build(config, model.folder, model.name)


def _deployment(
    replica_class: type,
    name: str,
    replicas: int,
    actor_options: dict[str, Any] = ANY_NODE,
    **options: Any,
) -> serve.Deployment:
    """Return a deployment with the options that all of ours share; `options` are further ones."""
    deployment: serve.Deployment = serve.deployment(replica_class)  # type: ignore[assignment]
    return deployment.options(
        name=name,
        num_replicas=replicas,
        max_ongoing_requests=ONGOING_REQUESTS_LIMIT,
        ray_actor_options=actor_options,
        **HEALTH_OPTIONS,
        **SHUTDOWN_OPTIONS,
        **options,
    )


def _worker_deployment(name: str, pool: PoolConfig, engine: EngineKindSettings) -> serve.Deployment:
    """Return the deployment of a pool's workers, with what each replica asks of Ray.

    There are three cases:
    - On GPUs: one actor with a GPU for each rank.
    - On CPUs with several ranks: a placement group with a bundle for each rank, all on one node.
    - On CPUs with one rank: one actor. vLLM's workers belong here, as the configuration refuses
      GPUs and further ranks for them; their processes have an environment of their own.
    """
    ranks = pool.tensor_parallel
    if engine.kind == "vllm":
        runtime_env: dict[str, Any] = {"env_vars": {"OMP_NUM_THREADS": str(pool.engine.threads)}}
        if engine.python:
            runtime_env["py_executable"] = engine.python
        actor_options = {**ANY_NODE, "runtime_env": runtime_env}
        return _deployment(WorkerProcess, name, pool.replicas, actor_options)
    if pool.engine.device == "cuda":  # rank 0 starts the others, so its actor has all GPUs
        actor_options = {**ANY_NODE, "num_gpus": ranks}
        return _deployment(WorkerProcess, name, pool.replicas, actor_options)
    if ranks == 1:
        return _deployment(WorkerProcess, name, pool.replicas)
    return _deployment(  # all ranks of a replica on one node
        WorkerProcess,
        name,
        pool.replicas,
        placement_group_bundles=[{"CPU": ACTOR_CPUS}] * ranks,
        placement_group_strategy="STRICT_PACK",
    )
