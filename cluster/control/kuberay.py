"""Replica counts on KubeRay, whose operator owns the Serve config: they go into the RayService.

A count that was set in Serve itself would be reverted when the operator next compares Serve with
the RayService.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import yaml

from .serve import PoolObservation, PoolScaler, ScaleError, ServePools, with_replica_counts

#: Environment variable with the RayService's name; the chart sets it on the head's pod.
RAYSERVICE_VARIABLE = "DIPTYCH_RAYSERVICE"
#: Where Kubernetes puts a pod's namespace, its token and the authority of the API server.
ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PATCH_ATTEMPTS = 3  #: Somebody else may change the RayService at the same time.
REQUEST_TIMEOUT_S = 10.0  #: For one answer of Kubernetes.


class KubeRayPools:
    """The `PoolScaler` that observes the pools in Serve and sets their counts in the RayService.

    `name` is the RayService's, `application` that of the model in Serve. `server_url` is that of Kubernetes' API server; None: the one that
    this pod's environment names. `resize` raises ScaleError where Kubernetes refuses.
    """

    def __init__(
        self,
        name: str,
        application: str,
        account_folder: Path = ACCOUNT_FOLDER,
        server_url: str | None = None,
    ) -> None:
        self._name = name
        self._application = application
        self._account_folder = account_folder
        self._server_url = server_url or _server_url_of_this_pod()
        self._serve_pools = ServePools(application)

    async def observe(self) -> dict[str, PoolObservation]:
        return await self._serve_pools.observe()

    async def resize(self, counts: dict[str, int]) -> None:
        for _ in range(PATCH_ATTEMPTS):
            if await self._patch(counts):
                return
        raise ScaleError(
            f"RayService {self._name} was changed by others at the same time; try again"
        )

    async def _patch(self, counts: dict[str, int]) -> bool:
        """Set the counts in the version of the RayService that is current now.

        Return False if somebody else changed the RayService in between.
        """
        namespace = (self._account_folder / "namespace").read_text().strip()
        path = f"/apis/ray.io/v1/namespaces/{namespace}/rayservices/{self._name}"
        async with self._client() as client:
            response = await client.get(path)
            _raise_if_refused(response)
            rayservice = response.json()
            response = await client.patch(
                path,
                json=_patch_of(rayservice, self._application, counts),
                headers={"content-type": "application/merge-patch+json"},
            )
            if response.status_code == httpx.codes.CONFLICT:
                return False
            _raise_if_refused(response)
            return True

    def _client(self) -> httpx.AsyncClient:
        # The token is read for each client, as Kubernetes renews it.
        token = (self._account_folder / "token").read_text().strip()
        authority = self._account_folder / "ca.crt"
        verify: Any = str(authority) if authority.exists() else True
        return httpx.AsyncClient(
            base_url=self._server_url,
            headers={"authorization": f"Bearer {token}"},
            verify=verify,
            timeout=REQUEST_TIMEOUT_S,
        )


def _patch_of(
    rayservice: dict[str, Any], application: str, counts: dict[str, int]
) -> dict[str, Any]:
    """Return a merge patch that Kubernetes refuses if `rayservice` is no longer the newest.

    The resource version in it makes Kubernetes compare. The Serve config is YAML text in one field.
    """
    config = yaml.safe_load(rayservice["spec"]["serveConfigV2"])
    config["applications"] = with_replica_counts(config["applications"], application, counts)
    return {
        "metadata": {"resourceVersion": rayservice["metadata"]["resourceVersion"]},
        "spec": {"serveConfigV2": yaml.safe_dump(config, sort_keys=False)},
    }


def _raise_if_refused(response: httpx.Response) -> None:
    """Raise ScaleError with Kubernetes' own sentence, or the beginning of whatever came instead."""
    if not response.is_error:
        return
    try:
        message = response.json()["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    raise ScaleError(f"Kubernetes refuses ({response.status_code}): {message}")


def _server_url_of_this_pod() -> str:
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "")
    return f"https://{host}:{port}"


def find_pool_scaler(application: str) -> PoolScaler:
    """Return what sets the counts of a model's application: the RayService in a KubeRay pod, Serve anywhere else."""
    if runs_on_kuberay():
        return KubeRayPools(os.environ[RAYSERVICE_VARIABLE], application)
    return ServePools(application)


def runs_on_kuberay() -> bool:
    """Return whether this is a pod of a RayService, whose operator owns the Serve config."""
    return bool(os.environ.get(RAYSERVICE_VARIABLE)) and (ACCOUNT_FOLDER / "token").exists()
