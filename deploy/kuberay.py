"""What KubeRay's operator refuses in a RayService, beyond its schema.

The rules are those of `ray-operator/controllers/ray/utils/validation.go` (KubeRay 1.7), for the
fields that the chart writes. Every function returns sentences; none means nothing wrong.
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
#: Options of `ray start` that say what `resources` of a group says.
RESOURCE_OPTIONS = {"num-cpus", "num-gpus", "memory", "resources"}


def refusals(service: Manifest) -> list[str]:
    """Returns the reasons for which KubeRay would refuse the RayService."""
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
    # With fault tolerance, the password is one of its options.
    if cluster.get("gcsFaultToleranceOptions") and "redis-password" in head["rayStartParams"]:
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
    """Yields what is wrong with a worker group's bounds, between which Ray's autoscaler moves."""
    name = group["groupName"]
    minimum = group.get("minReplicas")
    limit = group.get("maxReplicas")
    if (minimum is None or limit is None) and not autoscaling:
        yield f"group {name}: minReplicas and maxReplicas must be set without autoscaling"
    elif not 0 <= (minimum or 0) <= group.get("replicas", 0) <= (limit or 0):
        yield f"group {name}: not 0 <= minReplicas <= replicas <= maxReplicas"


@cache
def _ray_start_options() -> frozenset[str]:
    """Returns the long names of `ray start`'s options, as the Ray installed here has them."""
    from ray.scripts.scripts import start

    options = [option for param in start.params for option in (*param.opts, *param.secondary_opts)]
    return frozenset(option.lstrip("-") for option in options)


def _autoscaler(service: Manifest) -> Iterator[str]:
    cluster = ray_cluster(service)
    options = cluster.get("autoscalerOptions") or {}
    # Both rules are those of the second version of the autoscaler.
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
    # A step size must be given; a surge that is not given is 100.
    if options.get("stepSizePercent", 101) > options.get("maxSurgePercent", 100):
        yield "stepSizePercent must be at most maxSurgePercent"
