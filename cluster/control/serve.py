"""Ray Serve's view of the pools, and how to change their sizes without a redeploy.

Serve hashes an application's import path and arguments. While both stay the same, applying the
application's config again with another `num_replicas` changes the counts in place and restarts no
replica. All counts are therefore set through Serve's declarative API.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from ..applications import (
    LEAVING,
    POOL_DEPLOYMENTS,
    ROUTER_DEPLOYMENT,
    serve_controller,
    serve_details,
)
from ..config import ClusterConfig

#: Replica states of Serve in which a replica cannot take requests yet.
STARTING_STATES = ("STARTING", "UPDATING", "RECOVERING")
#: Replica states of Serve in which a replica takes requests. A replica whose node drains takes some
#: until its successor runs.
RUNNING_STATES = ("RUNNING", "PENDING_MIGRATION")
#: Deployment states of Serve in which its message says what went wrong.
FAILED_STATES = ("UNHEALTHY", "DEPLOY_FAILED")


class ScaleError(Exception):
    """The replica counts could not be set. The message says why."""


class PoolObservation(NamedTuple):
    """What Serve says of one pool."""

    #: Replicas that the pool should have.
    target: int
    #: Ids of replicas that take requests.
    running: list[str]
    #: Ids of replicas that do not take requests yet.
    starting: list[str]
    #: Ids of replicas that are shutting down.
    stopping: list[str]
    #: Why the deployment failed; empty if it did not.
    message: str = ""
    #: On Kubernetes: how many replicas the Helm values give the pool, whatever was ordered since.
    #: None elsewhere, where the model's configuration says that, and before the values are known.
    values_replicas: int | None = None


class PoolScaler(Protocol):
    """Where one model's replica counts are set: Serve itself, or KubeRay's RayService."""

    async def observe(self) -> dict[str, PoolObservation]:
        """Return what Serve says of each pool, by the pool's name.

        Raises whatever Ray raises while Serve is away.
        """

    async def resize(self, counts: dict[str, int]) -> None:
        """Set the replica counts of these pools, and return once they are accepted.

        The replicas start and stop after that. Raises ScaleError.
        """

    async def check(self, counts: dict[str, int]) -> None:
        """Change nothing. Raises ScaleError if it is known that `resize` would."""


def with_values_replicas(config: ClusterConfig, pools: dict[str, PoolObservation]) -> ClusterConfig:
    """Return the configuration with the counts that the pools were started with.

    On Kubernetes the Helm values have them. Else nothing changes.
    """
    counts = {
        name: pool.values_replicas
        for name, pool in pools.items()
        if pool.values_replicas is not None
    }
    return config.with_replicas(counts)


def with_replica_counts(
    applications: list[dict[str, Any]], name: str, counts: dict[str, int]
) -> list[dict[str, Any]]:
    """Return a copy of Serve's application configs in which only the replica counts differ.

    `counts` maps pools of the application `name` to replicas. Raises ScaleError if there is no such
    application.
    """
    changed = copy.deepcopy(applications)
    for pool, count in counts.items():
        _deployment_config(changed, name, POOL_DEPLOYMENTS[pool])["num_replicas"] = count
    return changed


def _deployment_config(
    applications: list[dict[str, Any]], name: str, deployment_name: str
) -> dict[str, Any]:
    """Return the config of a deployment of the application `name`, an empty one if it has none.

    Raises ScaleError if there is no such application.
    """
    application = _find_by_name(applications, name)
    if application is None:
        raise ScaleError(f"Serve runs no application {name!r} that was deployed by a config")
    deployments = application.setdefault("deployments", [])
    deployment = _find_by_name(deployments, deployment_name)
    if deployment is None:
        deployment = {"name": deployment_name}
        deployments.append(deployment)
    return deployment


def _find_by_name(configs: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((config for config in configs if config.get("name") == name), None)


def pool_observations(details: dict[str, Any], name: str) -> dict[str, PoolObservation]:
    """Return what the details of Serve's instance say of each pool of the application `name`."""
    deployments = details["applications"].get(name, {}).get("deployments", {})
    return {
        pool: _observe_deployment(deployments.get(deployment_name))
        for pool, deployment_name in POOL_DEPLOYMENTS.items()
    }


def _observe_deployment(deployment: dict[str, Any] | None) -> PoolObservation:
    if deployment is None:
        return PoolObservation(target=0, running=[], starting=[], stopping=[])

    ids_by_state: dict[str, list[str]] = {}
    for replica in deployment["replicas"]:
        ids_by_state.setdefault(replica["state"], []).append(replica["replica_id"])

    def ids_in(states: tuple[str, ...]) -> list[str]:
        return [replica_id for state in states for replica_id in ids_by_state.get(state, [])]

    message = ""
    if deployment["status"] in FAILED_STATES:
        message = _last_line(deployment["message"])
    return PoolObservation(
        target=deployment["target_num_replicas"],
        running=ids_in(RUNNING_STATES),
        starting=ids_in(STARTING_STATES),
        stopping=ids_by_state.get("STOPPING", []),
        message=message,
    )


def _last_line(message: str) -> str:
    """Return the line of a traceback that names the error."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else ""


class ServePools:
    """The `PoolScaler` of one model's application, which asks Serve's controller."""

    def __init__(self, application: str) -> None:
        self._application = application

    async def observe(self) -> dict[str, PoolObservation]:
        return pool_observations(await serve_details(), self._application)

    async def resize(self, counts: dict[str, int]) -> None:
        await change_applications(
            lambda applications: with_replica_counts(applications, self._application, counts)
        )

    async def check(self, counts: dict[str, int]) -> None:
        """Do nothing: Serve takes any count, and says later which replicas find no room."""


#: Held while the applications are read, changed and applied: two orders at once, for two models,
#: would take each other's changes back.
_changing = asyncio.Lock()
#: Makes new application configs of those that there are.
ApplicationsChange = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


async def change_applications(change: ApplicationsChange) -> None:
    """Let Serve run what `change` makes of the applications' configs.

    Serve deletes an application that is left out. Raises what `change` raises.
    """
    from ray.serve.schema import ServeDeploySchema

    async with _changing:
        details = await serve_details()
        deployed_configs = [
            application["deployed_app_config"]
            for application in details["applications"].values()
            if application.get("deployed_app_config")
        ]
        config: dict[str, Any] = {"applications": change(deployed_configs)}
        # Serve's own setting, which an apply without it would take back.
        if details.get("target_capacity") is not None:
            config["target_capacity"] = details["target_capacity"]
        await serve_controller().apply_config.remote(ServeDeploySchema.model_validate(config))


def with_application(
    applications: list[dict[str, Any]], added: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return Serve's application configs and one more. Raises ScaleError if its name is taken."""
    if _find_by_name(applications, added["name"]) is not None:
        raise ScaleError(f"Serve runs an application {added['name']!r} already")
    return [*applications, added]


def without_application(applications: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return Serve's application configs without one."""
    return [application for application in applications if application["name"] != name]


def with_leaving(applications: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return Serve's application configs in which one says that its model leaves.

    The mark is in its router's `user_config`, which Serve changes in place: nothing restarts. The router
    does nothing about it. Gateways and Control see the mark in what Serve tells of its applications:
    gateways take no more requests for the model, and Control then deletes the application.
    Raises ScaleError if there is no such application.
    """
    changed = copy.deepcopy(applications)
    _deployment_config(changed, name, ROUTER_DEPLOYMENT)["user_config"] = {LEAVING: True}
    return changed
