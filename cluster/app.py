"""The Serve applications: one in front (Gateway, Control), and one for each model.

A model's application has its Router, PrefillWorker and DecodeWorker. Each of these is a deployment
of Ray Serve, which starts, restarts and counts its replicas. The constructors of `Gateway` and
`RouterService` take the other deployments' handles only so that Serve deploys the graph. At run
time workers and gateways find each other through the model's router, and gateways and Control find
the models in Serve (`applications.py`).
"""

from __future__ import annotations

import os
from typing import Any

import ray
from ray import serve

from .applications import POOL_DEPLOYMENTS, ROUTER_DEPLOYMENT
from .config import (
    SECRET,
    ClusterConfig,
    ConfigError,
    EngineKindSettings,
    PoolConfig,
    load_config,
)
from .control.control import Control
from .gateway.gateway import Gateway
from .launch.checkpoint import find_checkpoint
from .launch.ray_cluster import AUTH_MODE, shared_secret
from .router_service import RouterService
from .worker.process import WorkerProcess

#: Serve asks `check_health` of each replica every second. An error, or no answer in 5 s, is a failed
#: check, and Serve replaces a replica that failed three in a row, or at once if its process ended.
HEALTH_OPTIONS: dict[str, Any] = {"health_check_period_s": 1.0, "health_check_timeout_s": 5.0}
#: A gateway on an overloaded machine may answer Serve late while it still answers clients, so it has
#: longer. The end of the process is seen within a second whatever this limit is.
GATEWAY_HEALTH_OPTIONS: dict[str, Any] = {"health_check_timeout_s": 20.0}
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
#: Options of an actor that runs on the node of Ray's head, if the Serve config says nothing else. The
#: URLs of gateway and Control lead to that node, and a model's router stays there while nodes with
#: workers come and go. The node may offer no cores, so all that is asked of it is a bit of the
#: resource that Ray gives to the head alone.
HEAD_NODE: dict[str, Any] = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
#: How many requests Serve lets run in one replica; the limit that counts is the router's queue.
ONGOING_REQUESTS_LIMIT = 4096


def front_application(args: dict[str, Any]) -> serve.Application:
    """Return the application in front: gateways and Control.

    A Serve config file names it: `import_path: diptych.cluster.app:front_application`. `args` is
    the configuration tree of `config.py`. Of its sections of single models only `router.classes` is
    read, though all are checked. Raises ConfigError.
    """
    config = _read(args)
    tree = config.model_dump()
    control = _deployment(Control, "Control", 1, HEAD_NODE).bind(tree)
    replicas = config.gateway.replicas
    # Serve spreads several gateways over the nodes; a single one is where the URLs lead.
    node = HEAD_NODE if replicas == 1 else ANY_NODE
    gateway = _deployment(Gateway, "Gateway", replicas, node, **GATEWAY_HEALTH_OPTIONS)
    return gateway.bind(tree, deployments=[control])


def model_application(args: dict[str, Any]) -> serve.Application:
    """Return one model's application: its router and its workers.

    A Serve config file names it: `import_path: diptych.cluster.app:model_application`. Its
    `route_prefix` must be null, as the front application takes all calls. `args` is the
    configuration tree of `config.py`. Serve runs this on any node, so the model must be at the same
    path on all of them, and its adapters; whether it fits there is not checked. Raises ConfigError.
    """
    config = _read(args)
    if config.models:  # `model` is then the bundled one, which nobody has asked for
        raise ConfigError("an application serves one model: set model, not models")
    checkpoint = find_checkpoint(config)
    tree = config.model_dump()
    tree["model"]["name"] = checkpoint.name
    # All workers get the same files, also where an id stands for them and what it means changes.
    tree["model"]["adapters"] = checkpoint.adapter_settings
    workers = []
    for pool_name, deployment in POOL_DEPLOYMENTS.items():
        pool = config.pools.of(pool_name)
        if pool.replicas:  # Serve knows no deployment without a replica
            workers.append(
                _worker_deployment(deployment, pool, config.engine).bind(
                    pool_name, tree, str(checkpoint.folder)
                )
            )
    return _deployment(RouterService, ROUTER_DEPLOYMENT, 1, HEAD_NODE).bind(tree, workers)


def _read(args: dict[str, Any]) -> ClusterConfig:
    """Return the configuration of an application's arguments.

    All applications of a cluster must have one secret. The environment's `DIPTYCH_SECRET`, if it is
    set, replaces the one in `args`, so that the secret need not stand in a file that many may read.
    Where neither gives one, the applications' builders draw one together. Raises ConfigError if the
    configuration is wrong, or if Ray runs without tokens although `ray.auth` is `token`.
    """
    if os.environ.get(SECRET):
        args = {**args, "secret": os.environ[SECRET]}
    config = load_config(None, args)
    if "secret" not in config.model_fields_set and ray.is_initialized():
        config = config.model_copy(update={"secret": shared_secret()})
    if config.ray.auth == "token" and os.environ.get(AUTH_MODE, "").lower() != "token":
        raise ConfigError(
            f"Ray runs without {AUTH_MODE}=token: whoever reaches it can run code here; start its "
            "nodes with a token (KubeRay: authOptions), or accept that with ray.auth: disabled"
        )
    return config


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
        **{**HEALTH_OPTIONS, **SHUTDOWN_OPTIONS, **options},
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
