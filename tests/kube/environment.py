"""Makes a container's environment: services, Secrets, config maps, and the pod's own fields."""

from __future__ import annotations

import base64

from . import settings
from .api import KubernetesApi, Object, path_of
from .sandbox import expand

UNITS = {
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
}
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def container_environment(
    api: KubernetesApi, pod: Object, container: Object, services: list[Object], address: str
) -> dict[str, str]:
    """Return the container's variables. Raises httpx.HTTPError and KeyError for what is missing."""
    environment = {"PATH": SEARCH_PATH, "HOSTNAME": pod["metadata"]["name"]}
    if pod["spec"].get("enableServiceLinks", True):
        for service in services:
            environment |= _service_variables(service, pod["metadata"]["namespace"])
    for entry in container.get("env") or []:
        if "valueFrom" not in entry:
            environment[entry["name"]] = expand(entry.get("value", ""), environment)
            continue
        value = _referred_value(api, pod, container, entry["valueFrom"], address)
        if value is not None:
            environment[entry["name"]] = value
    return environment


def _service_variables(service: Object, namespace: str) -> dict[str, str]:
    metadata = service["metadata"]
    address = service["spec"].get("clusterIP", "None")
    is_visible = metadata["namespace"] == namespace or metadata["name"] == "kubernetes"
    if address == "None" or not is_visible:
        return {}
    prefix = metadata["name"].upper().replace("-", "_")
    ports = service["spec"]["ports"]
    return {
        f"{prefix}_SERVICE_HOST": address,
        f"{prefix}_SERVICE_PORT": str(ports[0]["port"]),
        f"{prefix}_PORT": f"tcp://{address}:{ports[0]['port']}",
    }


def _referred_value(
    api: KubernetesApi, pod: Object, container: Object, source: Object, address: str
) -> str | None:
    """Return the value, or None for an optional one that is not there."""
    namespace = pod["metadata"]["namespace"]
    if "secretKeyRef" in source:
        reference = source["secretKeyRef"]
        secret = api.find(path_of("secrets", namespace, reference["name"]))
        if secret is None and reference.get("optional"):
            return None
        if secret is None:
            raise KeyError(f'secret "{reference["name"]}" not found')
        return base64.b64decode(secret["data"][reference["key"]]).decode()
    if "configMapKeyRef" in source:
        reference = source["configMapKeyRef"]
        return api.get(path_of("configmaps", namespace, reference["name"]))["data"][
            reference["key"]
        ]
    if "fieldRef" in source:
        return _field(pod, source["fieldRef"]["fieldPath"], address)
    if "resourceFieldRef" in source:
        return str(_resource(container, source["resourceFieldRef"]["resource"]))
    raise KeyError(f"the box knows no source of {sorted(source)}")


def _field(pod: Object, path: str, address: str) -> str:
    if path == "status.podIP":
        return address
    if path == "status.hostIP":
        return settings.GATEWAY
    if "[" in path:  # metadata.labels['name']
        _, key, _ = path.split("'")
        part = "labels" if "labels" in path else "annotations"
        return pod["metadata"].get(part, {}).get(key, "")
    node: Object = pod
    *folders, last = path.split(".")
    for folder in folders:
        node = node[folder]
    return str(node.get(last, ""))


def _resource(container: Object, path: str) -> int:
    """Return a limit or request in whole units; without one, what a node promises."""
    kind, name = path.split(".")
    resources = container.get("resources") or {}
    amount = (resources.get(kind) or {}).get(name) or (resources.get("requests") or {}).get(name)
    if amount is None:
        amount = settings.NODE_MEMORY if name == "memory" else settings.NODE_CPU
    return quantity(amount)


def quantity(text: str) -> int:
    """Return an amount such as "6Gi" or "500m" in whole units, rounded up."""
    if text.endswith("m"):
        return -(-int(text[:-1]) // 1000)
    for suffix, factor in UNITS.items():
        if text.endswith(suffix):
            return int(float(text.removesuffix(suffix)) * factor)
    return int(text)
