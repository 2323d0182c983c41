"""Counts on KubeRay: its operator owns the Serve config, so they are set in the RayService.

A count that was set in Serve itself would be taken back at the operator's next look.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import yaml

from .serve import ScaleError, Seen, ServePools, resized

#: set by the chart on the head's pod
RAYSERVICE = "DIPTYCH_RAYSERVICE"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TRIES = 3  #: somebody else may write at the same time


class KubeRayPools:
    """Serve is asked what is; the RayService is told what should be."""

    def __init__(self, name: str, account: Path = ACCOUNT, server: str | None = None) -> None:
        self._name, self._account = name, account
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
        self._server = server or f"https://{host}:{port}"
        self._serve = ServePools()

    async def seen(self) -> dict[str, Seen]:
        return await self._serve.seen()

    async def resize(self, counts: dict[str, int]) -> None:
        for _ in range(TRIES):
            if await self._patch(counts):
                return
        raise ScaleError(
            f"RayService {self._name} was changed by others at the same time; try again"
        )

    async def _patch(self, counts: dict[str, int]) -> bool:
        """Replaces the Serve config of the version that was read; False: there is a newer one."""
        namespace = (self._account / "namespace").read_text().strip()
        path = f"/apis/ray.io/v1/namespaces/{namespace}/rayservices/{self._name}"
        async with self._client() as client:
            service = self._checked(await client.get(path)).json()
            config = yaml.safe_load(service["spec"]["serveConfigV2"])
            config["applications"] = resized(config["applications"], counts)
            patch = {
                "metadata": {"resourceVersion": service["metadata"]["resourceVersion"]},
                "spec": {"serveConfigV2": yaml.safe_dump(config, sort_keys=False)},
            }
            kind = {"content-type": "application/merge-patch+json"}
            answer = await client.patch(path, json=patch, headers=kind)
            if answer.status_code == 409:
                return False
            self._checked(answer)
            return True

    def _client(self) -> httpx.AsyncClient:
        """The token is read each time: Kubernetes renews it."""
        token = (self._account / "token").read_text().strip()
        authority = self._account / "ca.crt"
        verify: Any = str(authority) if authority.exists() else True
        headers = {"authorization": f"Bearer {token}"}
        return httpx.AsyncClient(
            base_url=self._server, headers=headers, verify=verify, timeout=10.0
        )

    def _checked(self, answer: httpx.Response) -> httpx.Response:
        if answer.is_error:
            try:
                said = answer.json()["message"]
            except (ValueError, KeyError, TypeError):
                said = answer.text[:200]
            raise ScaleError(f"Kubernetes refuses ({answer.status_code}): {said}")
        return answer


def pools_here() -> ServePools | KubeRayPools:
    name = os.environ.get(RAYSERVICE)
    return KubeRayPools(name) if name and (ACCOUNT / "token").exists() else ServePools()
