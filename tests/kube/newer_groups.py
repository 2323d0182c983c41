"""Versions of built-in kinds that are newer than the box's API server.

Its EndpointSlices and PodDisruptionBudgets are v1beta1; KubeRay reads and the chart writes v1. The
server has v1 as CRDs (`crds.yaml`), and this copies between both: slices to v1, budgets to v1beta1,
where the disruption controller and evictions obey them.
"""

from __future__ import annotations

import httpx

from .api import KubernetesApi, Object

OLD_SLICES = "/apis/discovery.k8s.io/v1beta1"
NEW_SLICES = "/apis/discovery.k8s.io/v1"
OLD_BUDGETS = "/apis/policy/v1beta1"
NEW_BUDGETS = "/apis/policy/v1"


class GroupMirror:
    def __init__(self, api: KubernetesApi) -> None:
        self._api = api
        #: What was copied: the source's resource version by the copy's path.
        self._copied: dict[str, str] = {}

    def update(self) -> None:
        """Copy what changed. It does nothing until the CRDs are there."""
        if self._api.find(NEW_SLICES) is None or self._api.find(NEW_BUDGETS) is None:
            return
        paths: set[str] = set()
        for old_slice in self._list(f"{OLD_SLICES}/endpointslices"):
            path = _collection(NEW_SLICES, old_slice, "endpointslices")
            paths.add(self._copy(old_slice, path, _new_slice(old_slice)))
        for budget in self._list(f"{NEW_BUDGETS}/poddisruptionbudgets"):
            path = _collection(OLD_BUDGETS, budget, "poddisruptionbudgets")
            paths.add(self._copy(budget, path, _old_budget(budget)))
        for path in self._copied.keys() - paths:
            self._api.delete(path)
            del self._copied[path]

    def _list(self, path: str) -> list[Object]:
        return self._api.get(path)["items"]

    def _copy(self, source: Object, collection: str, copy: Object) -> str:
        """Make or renew a copy, and return its path."""
        path = f"{collection}/{source['metadata']['name']}"
        version = source["metadata"]["resourceVersion"]
        if self._copied.get(path) == version:
            return path
        present = self._api.find(path)
        try:
            if present is None:
                self._api.create(collection, copy)
            else:
                copy["metadata"]["resourceVersion"] = present["metadata"]["resourceVersion"]
                self._api.replace(path, copy)
        except httpx.HTTPStatusError as error:
            # Its namespace is going, or others changed it: the next turn tries again.
            if error.response.status_code not in (403, 404, 409):
                raise
            return path
        self._copied[path] = version
        return path


def _collection(group: str, source: Object, kind: str) -> str:
    return f"{group}/namespaces/{source['metadata']['namespace']}/{kind}"


def _metadata(source: Object) -> Object:
    metadata = source["metadata"]
    return {
        "name": metadata["name"],
        "namespace": metadata["namespace"],
        "labels": metadata.get("labels") or {},
    }


def _new_slice(source: Object) -> Object:
    endpoints = source.get("endpoints") or []
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": _metadata(source),
        "addressType": source["addressType"],
        "ports": source.get("ports") or [],
        "endpoints": [
            {key: value for key, value in endpoint.items() if key != "topology"}
            for endpoint in endpoints
        ],
    }


def _old_budget(source: Object) -> Object:
    return {
        "apiVersion": "policy/v1beta1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(source),
        "spec": source["spec"],
    }
