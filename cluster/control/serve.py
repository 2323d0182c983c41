"""Ray Serve's view of the pools, and how to change it: by its declarative API, never a redeploy.

Serve hashes an application's import path and arguments: while these stay, another `num_replicas`
changes counts in place and restarts nobody.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, Protocol

HOMES = {"prefill": "PrefillWorker", "decode": "DecodeWorker"}
APP = "diptych"


class ScaleError(Exception):
    """The counts could not be set; the message says why."""


class Seen(NamedTuple):
    """One pool as Serve sees it: replica ids by state."""

    target: int
    running: list[str]
    starting: list[str]
    stopping: list[str]
    message: str = ""  #: why it does not come up


class Pools(Protocol):
    """Where the numbers of replicas are set: Serve itself, or KubeRay's RayService."""

    async def seen(self) -> dict[str, Seen]: ...

    async def resize(self, counts: dict[str, int]) -> None:
        """Sets these pools' numbers of replicas; returns when accepted. Raises ScaleError."""


def resized(applications: list[dict[str, Any]], counts: dict[str, int]) -> list[dict[str, Any]]:
    """Serve application configs with other counts, and nothing else changed. Raises ScaleError."""
    changed = copy.deepcopy(applications)
    named = [one for one in changed if one.get("name") == APP]
    if not named:
        raise ScaleError(f"Serve runs no application {APP!r} that was deployed by a config")
    deployments = named[0].setdefault("deployments", [])
    for home, count in counts.items():
        found = [one for one in deployments if one["name"] == HOMES[home]]
        if not found:
            deployments.append({"name": HOMES[home]})
            found = deployments[-1:]
        found[0]["num_replicas"] = count
    return changed


def view(details: dict[str, Any]) -> dict[str, Seen]:
    """The pools in Serve's own details of the instance (its REST API's GET)."""
    deployments = details["applications"].get(APP, {}).get("deployments", {})
    return {home: _seen(deployments.get(name)) for home, name in HOMES.items()}


def _seen(deployment: dict[str, Any] | None) -> Seen:
    if deployment is None:
        return Seen(0, [], [], [])
    states: dict[str, list[str]] = {}
    for replica in deployment["replicas"]:
        states.setdefault(replica["state"], []).append(replica["replica_id"])
    starting = [
        one for name in ("STARTING", "UPDATING", "RECOVERING") for one in states.get(name, [])
    ]
    failed = deployment["status"] in ("UNHEALTHY", "DEPLOY_FAILED")
    return Seen(
        deployment["target_num_replicas"],
        states.get("RUNNING", []),
        starting,
        states.get("STOPPING", []),
        _last_line(deployment["message"]) if failed else "",
    )


def _last_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else ""


class ServePools:
    """Asks and tells the Serve controller of this Ray cluster."""

    async def seen(self) -> dict[str, Seen]:
        return view(await serve_details())

    async def resize(self, counts: dict[str, int]) -> None:
        from ray.serve.schema import ServeDeploySchema

        details = await serve_details()
        configs = [
            one["deployed_app_config"]
            for one in details["applications"].values()
            if one.get("deployed_app_config")
        ]
        given = {"applications": resized(configs, counts)}
        if details.get("target_capacity") is not None:
            given["target_capacity"] = details["target_capacity"]
        await _controller().apply_config.remote(ServeDeploySchema.model_validate(given))


async def serve_details() -> dict[str, Any]:
    """Return what Serve's controller knows of its instance (its REST API's GET)."""
    details: dict[str, Any] = await _controller().get_serve_instance_details.remote()
    return details


def _controller() -> Any:
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client, "no Serve on this Ray cluster"
    return client._controller
