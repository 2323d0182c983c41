"""What a RayService wants of its Ray cluster, and what Control writes into both (pure).

Helm and Control have fields of their own, so that neither takes the other's back. Helm applies the
chart with the counts of its values, and repeats them in the annotation `VALUES_ANNOTATION`. Control
applies nothing but the annotation `SCALED_ANNOTATION`: what was ordered, and instead of which count
of the values. An order holds until the values have another count for that pool; then Control
removes the order, so that it does not come back with the count that it was instead of. The chart
reads Control's annotation back, so that `helm upgrade` renders the size that `scale` has given.

KubeRay hands a changed number of pods of a group to nobody: it leaves `replicas` out when it
compares a RayService with its Ray cluster. Control carries them over.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from .serve import ScaleError

FIELD_MANAGER = "diptych-control"
VALUES_ANNOTATION = "diptych.io/values-replicas"
SCALED_ANNOTATION = "diptych.io/scaled-replicas"
#: The fields of a worker group that say how many pods it has.
POD_COUNTS = ("replicas", "minReplicas", "maxReplicas")

#: An object of Kubernetes, as JSON has it.
KubernetesObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ScaledCount:
    """An order to scale one pool."""

    replicas: int
    insteadOf: int  #: The count of the values when it was ordered.


@dataclass(frozen=True, slots=True)
class GroupChange:
    """The number of pods of a worker group before and after a change."""

    group: str
    before: int
    after: int

    def __str__(self) -> str:
        return f"{self.group} {self.before} -> {self.after}"


# ---- replicas ------------------------------------------------------------------------------------


def wanted_counts(rayservice: KubernetesObject) -> dict[str, int]:
    """Return how many replicas each pool should have: as ordered, else as the values say.

    Raises ScaleError if the chart's annotation is missing.
    """
    counts = values_counts(rayservice)
    for pool, scaled in _scaled_counts(rayservice).items():
        if counts.get(pool) == scaled.insteadOf:
            counts[pool] = scaled.replicas
    return counts


def has_ended_orders(rayservice: KubernetesObject) -> bool:
    """Return whether an order stands there that the values have ended.

    `scale_patch` without counts removes such orders. Raises ScaleError as `wanted_counts`.
    """
    values = values_counts(rayservice)
    scaled = _scaled_counts(rayservice)
    return any(values.get(pool) != order.insteadOf for pool, order in scaled.items())


def scale_patch(rayservice: KubernetesObject, counts: dict[str, int]) -> KubernetesObject:
    """Return what Control applies so that the pools in `counts` get these sizes.

    Orders for other pools stay, but for those that the values have ended. Kubernetes refuses the
    patch if `rayservice` is no longer the newest. Raises ScaleError as `wanted_counts`.
    """
    values = values_counts(rayservice)
    scaled = _scaled_counts(rayservice)
    for pool, count in counts.items():
        scaled[pool] = ScaledCount(replicas=count, insteadOf=values[pool])
    in_force = {
        pool: asdict(order) for pool, order in scaled.items() if values.get(pool) == order.insteadOf
    }
    metadata = rayservice["metadata"]
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {
            "name": metadata["name"],
            "resourceVersion": metadata["resourceVersion"],
            "annotations": {SCALED_ANNOTATION: json.dumps(in_force, sort_keys=True)},
        },
    }


def slots_refusal(rayservice: KubernetesObject, counts: dict[str, int]) -> str | None:
    """Return why the fleet cannot hold so many replicas, or None if it can.

    Each replica needs a slot, which the worker groups' pods offer as Ray resources.
    """
    for pool, count in counts.items():
        slots = 0
        for group in _groups(rayservice):
            slots += group["replicas"] * int((group.get("resources") or {}).get(pool, 0))
        if count > slots:
            return (
                f"{pool}={count}: the fleet has {slots} slots of this kind; first give a group "
                "more pods or slots (groups[].pods, groups[].slots) by helm upgrade"
            )
    return None


def values_counts(rayservice: KubernetesObject) -> dict[str, int]:
    """Return how many replicas the Helm values give each pool.

    Raises ScaleError if the chart's annotation is missing.
    """
    text = _annotations(rayservice).get(VALUES_ANNOTATION)
    if text is None:
        name = rayservice["metadata"]["name"]
        raise ScaleError(
            f"RayService {name} has no annotation {VALUES_ANNOTATION}: an older chart made it; "
            "helm upgrade first"
        )
    return json.loads(text)


def _scaled_counts(rayservice: KubernetesObject) -> dict[str, ScaledCount]:
    orders = json.loads(_annotations(rayservice).get(SCALED_ANNOTATION, "{}"))
    return {pool: ScaledCount(**order) for pool, order in orders.items()}


def _annotations(rayservice: KubernetesObject) -> dict[str, str]:
    return rayservice["metadata"].get("annotations") or {}


def _groups(rayservice: KubernetesObject) -> list[KubernetesObject]:
    return rayservice["spec"]["rayClusterConfig"]["workerGroupSpecs"]


# ---- pods ----------------------------------------------------------------------------------------


def upgrade_is_under_way(rayservice: KubernetesObject) -> bool:
    """Return whether KubeRay starts a second Ray cluster, which has the new numbers of pods."""
    pending = rayservice.get("status", {}).get("pendingServiceStatus") or {}
    return bool(pending.get("rayClusterName"))


def group_changes(rayservice: KubernetesObject, raycluster: KubernetesObject) -> list[GroupChange]:
    """Return which groups of the Ray cluster have another number of pods than the RayService."""
    wanted = {group["groupName"]: group["replicas"] for group in _groups(rayservice)}
    changes: list[GroupChange] = []
    for group in raycluster["spec"]["workerGroupSpecs"]:
        name = group["groupName"]
        after = wanted.get(name, group["replicas"])
        if after != group["replicas"]:
            changes.append(GroupChange(group=name, before=group["replicas"], after=after))
    return changes


def group_patch(
    raycluster: KubernetesObject, changes: list[GroupChange]
) -> list[dict[str, str | int]]:
    """Return the JSON patch that makes the changes.

    Kubernetes refuses it if the groups stand in another order by then.
    """
    places = {
        group["groupName"]: f"/spec/workerGroupSpecs/{index}"
        for index, group in enumerate(raycluster["spec"]["workerGroupSpecs"])
    }
    operations: list[dict[str, str | int]] = []
    for change in changes:
        place = places[change.group]
        operations.append({"op": "test", "path": f"{place}/groupName", "value": change.group})
        for field in POD_COUNTS:
            operations.append({"op": "add", "path": f"{place}/{field}", "value": change.after})
    return operations


def pod_shortage(raycluster: KubernetesObject) -> str:
    """Return a sentence if fewer pods are ready than asked for, else an empty text."""
    asked = sum(group["replicas"] for group in raycluster["spec"]["workerGroupSpecs"])
    ready = raycluster.get("status", {}).get("readyWorkerReplicas", 0)
    if ready >= asked:
        return ""
    return f"{ready} of {asked} pods are ready: kubectl get pods says what they wait for"
