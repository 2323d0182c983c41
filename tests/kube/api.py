"""The few calls of Kubernetes' API that the box itself makes."""

from __future__ import annotations

from typing import Any

import httpx

from . import settings

Object = dict[str, Any]
MERGE_PATCH = {"content-type": "application/merge-patch+json"}
REQUEST_TIMEOUT_S = 30.0
GROUPS = {
    "endpoints": "/api/v1",
    "events": "/api/v1",
    "namespaces": "/api/v1",
    "nodes": "/api/v1",
    "pods": "/api/v1",
    "secrets": "/api/v1",
    "services": "/api/v1",
    "serviceaccounts": "/api/v1",
    "configmaps": "/api/v1",
    "networkpolicies": "/apis/networking.k8s.io/v1",
    "rayclusters": "/apis/ray.io/v1",
    "rayservices": "/apis/ray.io/v1",
}


def path_of(kind: str, namespace: str = "", name: str = "", part: str = "") -> str:
    """Return the path of a collection, an object, or a part of one, such as `status`."""
    path = GROUPS[kind]
    if namespace:
        path += f"/namespaces/{namespace}"
    path += f"/{kind}"
    if name:
        path += f"/{name}"
    if part:
        path += f"/{part}"
    return path


class KubernetesApi:
    """A client of the box's API server, as its administrator.

    Every method raises httpx.HTTPError where the server is away or refuses. Threads may share it.
    """

    def __init__(self) -> None:
        token = (settings.PKI / "tokens.csv").read_text().split(",")[0]
        self.client = httpx.Client(
            base_url=settings.API_URL,
            headers={"authorization": f"Bearer {token}"},
            verify=str(settings.PKI / "ca.crt"),
            timeout=REQUEST_TIMEOUT_S,
        )

    def get(self, path: str) -> Object:
        return self.client.get(path).raise_for_status().json()

    def find(self, path: str) -> Object | None:
        """Return the object, or None if there is none."""
        response = self.client.get(path)
        if response.status_code == httpx.codes.NOT_FOUND:
            return None
        return response.raise_for_status().json()

    def list(self, kind: str) -> list[Object]:
        """Return all objects of a kind in all namespaces."""
        return self.get(path_of(kind))["items"]

    def create(self, path: str, body: Object) -> Object:
        return self.client.post(path, json=body).raise_for_status().json()

    def replace(self, path: str, body: Object) -> Object:
        return self.client.put(path, json=body).raise_for_status().json()

    def merge(self, path: str, body: Object) -> None:
        """Patch an object; one that is gone is left so."""
        response = self.client.patch(path, json=body, headers=MERGE_PATCH)
        if response.status_code != httpx.codes.NOT_FOUND:
            response.raise_for_status()

    def delete(self, path: str, options: Object | None = None) -> None:
        """Delete an object; one that is gone is left so."""
        response = self.client.request("DELETE", path, json=options or {})
        if response.status_code not in (httpx.codes.NOT_FOUND, httpx.codes.CONFLICT):
            response.raise_for_status()
