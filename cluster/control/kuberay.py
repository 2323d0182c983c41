"""Replica counts and pods on KubeRay, whose operator owns the Serve config.

The operator puts the Serve config to Serve only when its text changes. A count is ordered in an
annotation of the RayService (`rayservice.py`), and Control makes Serve follow it, also after the
operator put its own text.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import httpx

from . import rayservice
from .kubernetes import ACCOUNT_FOLDER, KubernetesApi, raise_if_refused
from .rayservice import KubernetesObject
from .serve import PoolObservation, PoolScaler, ScaleError, ServePools

log = logging.getLogger(__name__)

#: Environment variable with the RayService's name; the chart sets it on the head's pod.
RAYSERVICE_VARIABLE = "DIPTYCH_RAYSERVICE"
#: Environment variable with the name of the Ray cluster that a pod belongs to; KubeRay sets it.
RAYCLUSTER_VARIABLE = "RAY_CLUSTER_NAME"
PATCH_ATTEMPTS = 3  #: Somebody else may change the RayService at the same time.
FOLLOW_INTERVAL_S = 5.0  #: Between two looks at the RayService.
APPLY = "application/apply-patch+yaml"
JSON_PATCH = "application/json-patch+json"


class KubeRayPools:
    """The `PoolScaler` that observes the pools in Serve and orders their counts in the RayService.

    `name` is the RayService's, `application` that of the model in Serve. `server_url` is that of
    Kubernetes' API server; None: the one that this pod's environment names. `serve_pools` sets the
    counts in Serve. `resize` raises ScaleError where Kubernetes refuses, or has no slots for so many
    replicas.
    """

    def __init__(
        self,
        name: str,
        application: str,
        account_folder: Path = ACCOUNT_FOLDER,
        server_url: str | None = None,
        *,
        serve_pools: PoolScaler | None = None,
    ) -> None:
        self._name = name
        self._kubernetes = KubernetesApi(account_folder, server_url)
        self._serve_pools = serve_pools or ServePools(application)
        #: Which pods are missing, when Control last looked; empty if none is.
        self._pod_shortage = ""
        #: By pool: the count of the Helm values, when Control last looked; empty before that.
        self._values_counts: dict[str, int] = {}
        #: Held while the RayService is read and Serve is changed by it: what was read before an
        #: order would take the order back.
        self._ordering = asyncio.Lock()

    async def observe(self) -> dict[str, PoolObservation]:
        """Return what Serve says, and how many replicas the Helm values give each pool.

        A pool that lacks replicas also says which pods are missing.
        """
        pools = await self._serve_pools.observe()
        for name, pool in pools.items():
            message = pool.message
            if len(pool.running) < pool.target and not message:
                message = self._pod_shortage
            pools[name] = pool._replace(
                message=message, values_replicas=self._values_counts.get(name)
            )
        return pools

    async def resize(self, counts: dict[str, int]) -> None:
        for _ in range(PATCH_ATTEMPTS):
            async with self._ordering:
                if await self._order(counts):
                    await self._serve_pools.resize(counts)
                    return
        raise ScaleError(
            f"RayService {self._name} was changed by others at the same time; try again"
        )

    async def check(self, counts: dict[str, int]) -> None:
        async with self._kubernetes.client() as client:
            present = await self._get(client, "rayservices", self._name)
        refusal = rayservice.slots_refusal(present, counts)
        if refusal:
            raise ScaleError(refusal)

    async def _order(self, counts: dict[str, int]) -> bool:
        """Write the order into the version of the RayService that is current now.

        Return False if somebody else changed the RayService in between.
        """
        async with self._kubernetes.client() as client:
            present = await self._get(client, "rayservices", self._name)
            refusal = rayservice.slots_refusal(present, counts)
            if refusal:
                raise ScaleError(refusal)
            return await self._apply_counts(client, present, counts)

    async def _apply_counts(
        self, client: httpx.AsyncClient, present: KubernetesObject, counts: dict[str, int]
    ) -> bool:
        """Write Control's annotation; return False if `present` is no longer the newest version."""
        response = await client.patch(
            self._path("rayservices", self._name),
            params={"fieldManager": rayservice.FIELD_MANAGER, "force": "true"},
            json=rayservice.scale_patch(present, counts),
            headers={"content-type": APPLY},
        )
        if response.status_code == httpx.codes.CONFLICT:
            return False
        raise_if_refused(response)
        return True

    async def follow(self, record: Callable[[str, str], None]) -> None:
        """Make Serve and the Ray cluster follow the RayService, until cancelled.

        `record` gets the name and the content of each action.
        """
        while True:
            try:
                await self.follow_once(record)
            except Exception as error:  # Serve, Kubernetes and the network raise many types
                log.warning(
                    "the RayService is not followed: %s", str(error) or type(error).__name__
                )
            await asyncio.sleep(FOLLOW_INTERVAL_S)

    async def follow_once(self, record: Callable[[str, str], None]) -> None:
        """Look once, and change what differs. Raises ScaleError and whatever Ray raises."""
        async with self._ordering:
            async with self._kubernetes.client() as client:
                present = await self._get(client, "rayservices", self._name)
                await self._follow_pods(client, present, record)
                if rayservice.has_ended_orders(present):
                    # The next look tries again where somebody else changed the RayService.
                    await self._apply_counts(client, present, {})
            await self._follow_counts(present, record)

    async def _follow_pods(
        self,
        client: httpx.AsyncClient,
        present: KubernetesObject,
        record: Callable[[str, str], None],
    ) -> None:
        cluster_name = os.environ.get(RAYCLUSTER_VARIABLE)
        if not cluster_name or rayservice.upgrade_is_under_way(present):
            return
        cluster = await self._get(client, "rayclusters", cluster_name)
        self._pod_shortage = rayservice.pod_shortage(cluster)
        changes = rayservice.group_changes(present, cluster)
        if not changes:
            return
        response = await client.patch(
            self._path("rayclusters", cluster_name),
            params={"fieldManager": rayservice.FIELD_MANAGER},
            content=json.dumps(rayservice.group_patch(cluster, changes)),
            headers={"content-type": JSON_PATCH},
        )
        raise_if_refused(response)
        record("pods", ", ".join(str(change) for change in changes))

    async def _follow_counts(
        self, present: KubernetesObject, record: Callable[[str, str], None]
    ) -> None:
        self._values_counts = rayservice.values_counts(present)
        pools = await self._serve_pools.observe()
        counts: dict[str, int] = {}
        for name, count in rayservice.wanted_counts(present).items():
            # Serve has no target before the operator has deployed the application.
            if pools[name].target not in (0, count):
                counts[name] = count
        if counts:
            await self._serve_pools.resize(counts)
            listed = ", ".join(f"{name}={count}" for name, count in counts.items())
            record("scale", f"{listed}, as RayService {self._name} says")

    async def _get(self, client: httpx.AsyncClient, kind: str, name: str) -> KubernetesObject:
        response = await client.get(self._path(kind, name))
        raise_if_refused(response)
        return response.json()

    def _path(self, kind: str, name: str) -> str:
        return f"/apis/ray.io/v1/namespaces/{self._kubernetes.namespace()}/{kind}/{name}"


def find_pool_scaler(application: str) -> PoolScaler:
    """Return what sets the counts of a model's application: in a KubeRay pod, the RayService."""
    if runs_on_kuberay():
        return KubeRayPools(os.environ[RAYSERVICE_VARIABLE], application)
    return ServePools(application)


def runs_on_kuberay() -> bool:
    """Return whether this is a pod of a RayService, whose operator owns the Serve config."""
    return bool(os.environ.get(RAYSERVICE_VARIABLE)) and (ACCOUNT_FOLDER / "token").exists()
