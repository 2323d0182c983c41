"""Ray Serve's view of the pools, and how to change their sizes without a redeploy.

Serve hashes an application's import path and arguments. While both stay the same, applying the
application's config again with another `num_replicas` changes the counts in place and restarts no
replica. All counts are therefore set through Serve's declarative API.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, Protocol

#: The Serve deployment of each pool.
POOL_DEPLOYMENTS = {"prefill": "PrefillWorker", "decode": "DecodeWorker"}
APPLICATION_NAME = "diptych"  #: The Serve application that all our deployments are parts of.

#: Replica states of Serve in which a replica cannot take requests yet.
STARTING_STATES = ("STARTING", "UPDATING", "RECOVERING")
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


class PoolScaler(Protocol):
    """Where the pools' replica counts are set: Serve itself, or KubeRay's RayService."""

    async def observe(self) -> dict[str, PoolObservation]:
        """Return what Serve says of each pool, by the pool's name.

        Raises whatever Ray raises while Serve is away.
        """

    async def resize(self, counts: dict[str, int]) -> None:
        """Set the replica counts of these pools, and return once they are accepted.

        The replicas start and stop after that. Raises ScaleError.
        """


def with_replica_counts(
    applications: list[dict[str, Any]], counts: dict[str, int]
) -> list[dict[str, Any]]:
    """Return a copy of Serve's application configs in which only the replica counts differ.

    `counts` maps pools to replicas. Raises ScaleError where Diptych's application is missing.
    """
    changed = copy.deepcopy(applications)
    application = _find_by_name(changed, APPLICATION_NAME)
    if application is None:
        raise ScaleError(
            f"Serve runs no application {APPLICATION_NAME!r} that was deployed by a config"
        )
    deployments = application.setdefault("deployments", [])
    for pool, count in counts.items():
        name = POOL_DEPLOYMENTS[pool]
        deployment = _find_by_name(deployments, name)
        if deployment is None:
            deployment = {"name": name}
            deployments.append(deployment)
        deployment["num_replicas"] = count
    return changed


def _find_by_name(configs: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((config for config in configs if config.get("name") == name), None)


def pool_observations(details: dict[str, Any]) -> dict[str, PoolObservation]:
    """Return what `details`, the details of Serve's instance, say of each pool."""
    deployments = details["applications"].get(APPLICATION_NAME, {}).get("deployments", {})
    return {
        pool: _observe_deployment(deployments.get(name)) for pool, name in POOL_DEPLOYMENTS.items()
    }


def _observe_deployment(deployment: dict[str, Any] | None) -> PoolObservation:
    if deployment is None:
        return PoolObservation(target=0, running=[], starting=[], stopping=[])

    ids_by_state: dict[str, list[str]] = {}
    for replica in deployment["replicas"]:
        ids_by_state.setdefault(replica["state"], []).append(replica["replica_id"])
    starting: list[str] = []
    for state in STARTING_STATES:
        starting += ids_by_state.get(state, [])

    message = ""
    if deployment["status"] in FAILED_STATES:
        message = _last_line(deployment["message"])
    return PoolObservation(
        target=deployment["target_num_replicas"],
        running=ids_by_state.get("RUNNING", []),
        starting=starting,
        stopping=ids_by_state.get("STOPPING", []),
        message=message,
    )


def _last_line(message: str) -> str:
    """Return the line of a traceback that names the error."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else ""


class ServePools:
    """The `PoolScaler` that asks the Serve controller of this Ray cluster."""

    async def observe(self) -> dict[str, PoolObservation]:
        return pool_observations(await serve_details())

    async def resize(self, counts: dict[str, int]) -> None:
        from ray.serve.schema import ServeDeploySchema

        details = await serve_details()
        deployed_configs = [
            application["deployed_app_config"]
            for application in details["applications"].values()
            if application.get("deployed_app_config")
        ]
        config: dict[str, Any] = {"applications": with_replica_counts(deployed_configs, counts)}
        # Serve's own setting, which an apply without it would take back.
        if details.get("target_capacity") is not None:
            config["target_capacity"] = details["target_capacity"]
        await _controller().apply_config.remote(ServeDeploySchema.model_validate(config))


async def serve_details() -> dict[str, Any]:
    """Return the details of Serve's instance, as the GET of Serve's REST API has them."""
    details: dict[str, Any] = await _controller().get_serve_instance_details.remote()
    return details


def _controller() -> Any:
    """Return the actor handle of Serve's controller in this Ray cluster."""
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client, "no Serve on this Ray cluster"
    return client._controller
