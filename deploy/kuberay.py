"""Finds what KubeRay's operator refuses in a RayService although its schema allows it.

The rules follow `ray-operator/controllers/ray/utils/validation.go` (KubeRay 1.7). They are not all
of it, but those about fields that the chart writes or is likely to. One rule is Ray's: a group may
give only options that `ray start` knows. Each check yields a sentence about each thing that is
wrong, and none if nothing is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from .manifests import Manifest, container_of, groups, ray_cluster, templates

DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  #: DNS-1035
#: The operator appends to a RayService's name for its clusters, their services and pods, whose
#: names are labels of at most 63 characters.
NAME_LENGTH_LIMIT = 47
TOKEN_AUTH_SINCE = (2, 52)  #: The first version of Ray that can ask for a token.
#: Fields that need a feature gate of the operator, which is off unless its values say otherwise.
GATED_FIELDS = ("networkPolicy", "tlsOptions", "historyServerOptions")
#: Options of `ray start` that state what the field `resources` of a group states.
RESOURCE_OPTIONS = {"num-cpus", "num-gpus", "memory", "resources"}


def refusals(service: Manifest) -> list[str]:
    """Returns the reasons to refuse the RayService, one sentence each; none if the rules hold."""
    cluster = ray_cluster(service)
    # The head has no name of its own, and is checked like a group of workers.
    head = {"groupName": "head", **cluster["headGroupSpec"]}
    autoscaling = bool(cluster.get("enableInTreeAutoscaling"))
    found = [*_name(service), *_auth(cluster), *_head(cluster)]
    for field in GATED_FIELDS:
        if field in cluster:
            found.append(f"{field} needs a feature gate of the operator that is off by default")
    for group in (head, *groups(service)):
        found += _group(group)
    for group in groups(service):
        found += _replicas(group, autoscaling)
    found += _autoscaler(service)
    found += _incremental_upgrade(service)
    return found


def _name(service: Manifest) -> Iterator[str]:
    name = service["metadata"]["name"]
    if not DNS_LABEL.fullmatch(name) or len(name) > NAME_LENGTH_LIMIT:
        yield f"RayService {name}: not a DNS-1035 label of at most 47 characters"


def _auth(cluster: Manifest) -> Iterator[str]:
    """Yields what is wrong with the options by which Ray's processes ask for a token."""
    auth = cluster.get("authOptions", {})
    if auth.get("enableK8sTokenAuth"):
        yield "enableK8sTokenAuth is refused for a RayService"
    if auth.get("mode") == "token" and _version(cluster.get("rayVersion", "0")) < TOKEN_AUTH_SINCE:
        yield "token auth needs a rayVersion of 2.52 or later"


def _version(text: str) -> tuple[int, ...]:
    """Returns the first three numbers of a version: "2.52.1" becomes (2, 52, 1)."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _head(cluster: Manifest) -> Iterator[str]:
    head = cluster["headGroupSpec"]
    if head.get("headService", {}).get("metadata", {}).get("name"):
        yield "headService.metadata.name must not be set"
    # The password belongs into gcsFaultToleranceOptions, where these are given.
    start_options = head.get("rayStartParams") or {}
    if cluster.get("gcsFaultToleranceOptions") and "redis-password" in start_options:
        yield "redis-password in rayStartParams, beside gcsFaultToleranceOptions"


def _group(group: Manifest) -> Iterator[str]:
    name = group["groupName"]
    start_options = group.get("rayStartParams") or {}
    if not group["template"]["spec"].get("containers"):
        yield f"group {name} has no container"
    if "labels" in start_options:  # a group has a field of its own for them
        yield f"group {name}: labels in rayStartParams"
    if group.get("resources") and start_options.keys() & RESOURCE_OPTIONS:
        yield f"group {name}: resources in rayStartParams and in resources"
    unknown = sorted(start_options.keys() - _ray_start_options())
    if unknown:
        yield f"group {name}: `ray start` knows no {', '.join(unknown)}"


def _replicas(group: Manifest, autoscaling: bool) -> Iterator[str]:
    """Yields what is wrong with a worker group's bounds, between which Ray's autoscaler moves.

    A bound that is missing with autoscaling counts as 0. (The operator takes it for no bound, but
    the chart writes both.)
    """
    name = group["groupName"]
    minimum = group.get("minReplicas")
    limit = group.get("maxReplicas")
    if (minimum is None or limit is None) and not autoscaling:
        yield f"group {name}: minReplicas and maxReplicas must be set without autoscaling"
    elif not 0 <= (minimum or 0) <= group.get("replicas", 0) <= (limit or 0):
        yield f"group {name}: not 0 <= minReplicas <= replicas <= maxReplicas"


@cache
def _ray_start_options() -> frozenset[str]:
    """Returns the names of `ray start`'s options, without dashes, as the Ray installed here has."""
    from ray.scripts.scripts import start

    options = [option for param in start.params for option in (*param.opts, *param.secondary_opts)]
    return frozenset(option.lstrip("-") for option in options)


def _autoscaler(service: Manifest) -> Iterator[str]:
    cluster = ray_cluster(service)
    options = cluster.get("autoscalerOptions") or {}
    # Both rules below are checked for version 2 of the autoscaler only. (The operator has the
    # second one for every version that the options give.)
    if not cluster.get("enableInTreeAutoscaling") or options.get("version") != "v2":
        return
    for name, template in templates(service).items():
        if template["spec"].get("restartPolicy", "Never") != "Never":
            yield f"group {name}: restartPolicy must be Never with autoscaler v2"
    head_env = container_of(cluster["headGroupSpec"]["template"]).get("env", [])
    if any(entry["name"] == "RAY_enable_autoscaler_v2" for entry in head_env):
        yield "RAY_enable_autoscaler_v2 beside autoscalerOptions.version"


def _incremental_upgrade(service: Manifest) -> Iterator[str]:
    """Yields what is wrong with an upgrade that moves traffic to a second cluster step by step."""
    strategy = service["spec"].get("upgradeStrategy", {})
    if strategy.get("type") != "NewClusterWithIncrementalUpgrade":
        return
    options = strategy.get("clusterUpgradeOptions", {})
    if not ray_cluster(service).get("enableInTreeAutoscaling"):
        yield "an incremental upgrade needs autoscaling"
    if not options.get("gatewayClassName") or options.get("intervalSeconds", 0) <= 0:
        yield "an incremental upgrade needs gatewayClassName and intervalSeconds"
    # A step size that is missing is refused: it counts as 101, and a surge is at most 100. A surge
    # that is missing is 100.
    if options.get("stepSizePercent", 101) > options.get("maxSurgePercent", 100):
        yield "stepSizePercent must be at most maxSurgePercent"
