"""The types of the Helm chart's values; `render.py` writes them as values.schema.json.

What each value does, and its default, stands in helm/diptych/values.yaml. Names are in camel case,
as Helm's and Kubernetes' are. A field without a default has its default in values.yaml. Objects
that go to Kubernetes as they are (resources, tolerations, ...) are checked after rendering.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from diptych.cluster.config import ClusterConfig, RaySettings
from pydantic import BaseModel, ConfigDict, Field

#: Fields of Diptych's configuration (cluster/config.py) that no value sets, and what decides
#: instead: by class and field. The schema refuses them.
DECIDED_ELSEWHERE = {
    "ClusterConfig.secret": "the Secret named by secretName",
    "ClusterConfig.models": "config.model: a release serves one model",
    "ClusterConfig.ray": "ray.auth, as KubeRay must be told too",
    "GatewaySettings.host": "Serve's http_options",
    "GatewaySettings.http_port": "Serve's http_options",
    "GatewaySettings.grpc_port": "Serve's grpc_options",
    "GatewaySettings.replicas": "gateway.replicas: a change there restarts no other replica",
    "GatewaySettings.listen": "gateway.listen",
    "GatewaySettings.api_keys_file": "gateway.keysSecret",
    "GatewaySettings.tls_cert": "TLS ends before the cluster, at an Ingress or in a mesh",
    "GatewaySettings.tls_key": "TLS ends before the cluster, at an Ingress or in a mesh",
    "ControlSettings.host": "the head's pod",
    "ControlSettings.port": "the head's pod",
    "ControlSettings.grpc_port": "the head's pod",
    "ControlSettings.key_file": "the key `admin` of the Secret named by secretName",
    "ControlSettings.tls_cert": "kubectl port-forward, or a mesh",
    "ControlSettings.tls_key": "kubectl port-forward, or a mesh",
    "ObservabilitySettings.metrics_host": "the pods' own addresses",
    "ObservabilitySettings.metrics_port": "the pods' ports metrics-*",
    "PoolConfig.replicas": "pools.*.replicas: a change there restarts no other replica",
}

Text = Annotated[str, Field(min_length=1)]
#: A worker group's name: at most 30 characters, as KubeRay makes longer names of it.
Name = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]{0,28}[a-z0-9])?$")]
Count = Annotated[int, Field(ge=0)]
#: An amount as Kubernetes writes it: `64Gi`, `500m`.
Quantity = Annotated[str, Field(pattern=r"^[0-9]+([.][0-9]+)?([EPTGMK]i|[EPTGMkm])?$")]
#: Objects of Kubernetes, as they are.
Objects = list[dict[str, Any]]


# A comment, not a docstring, says what a section is: pydantic would put it into the schema.


# The base of every section: an unknown key is an error.
class ValuesSection(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Image(ValuesSection):
    repository: Text
    tag: str = ""  #: Empty: the chart's appVersion.
    digest: Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64})?$")] = ""  #: Wins over the tag.
    pullPolicy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    pullSecrets: Objects = []


class PoolSize(ValuesSection):
    replicas: Count
    gpus: Count = 0  #: Of each replica.


class PoolSizes(ValuesSection):
    prefill: PoolSize
    decode: PoolSize


class GatewayValues(ValuesSection):
    replicas: Annotated[int, Field(ge=1)]
    listen: Literal["serve", "gateway"]  #: Who listens: Serve's proxies, or each gateway itself.
    keysSecret: str = ""  #: The Secret with clients' keys; empty: no client needs one.


class Model(ValuesSection):
    mountPath: Annotated[str, Field(pattern="^/")] = "/models"  #: On every pod.
    volume: dict[str, Any] = {}  #: A Kubernetes volume source; empty: nothing is mounted.


class Resources(ValuesSection):
    requests: dict[str, Quantity]
    limits: dict[str, Quantity]


# Where Ray keeps what its head knows, so that a head that is lost can be started again.
class FaultTolerance(ValuesSection):
    redisAddress: Annotated[str, Field(pattern=r"^(\S+:[0-9]+)?$")] = Field(
        "", description="host:port of a Redis or Valkey; empty: nowhere"
    )
    redisPasswordSecret: str = Field(
        "", description="a Secret whose key `password` Redis asks for; empty: it asks for none"
    )


class Head(ValuesSection):
    resources: Resources
    nodeSelector: dict[str, str] = {}
    tolerations: Objects = []
    evictable: bool = False  #: Whether draining its node may stop it.
    faultTolerance: FaultTolerance = FaultTolerance()


# How many replicas Serve may start in one pod of a group, and nowhere else.
class Slots(ValuesSection):
    prefill: Count = 0
    decode: Count = 0
    gateway: Count = 0


# A kind of pods, of which KubeRay makes `pods`.
class Group(ValuesSection):
    name: Name
    pods: Count
    slots: Slots
    resources: Resources
    nodeSelector: dict[str, str] = {}
    tolerations: Objects = []
    affinity: dict[str, Any] = {}
    ownNode: bool = Field(False, description="no other Diptych pod on its node, the head apart")
    capabilities: list[Literal["IPC_LOCK", "SYS_RESOURCE"]] = []
    shm: Quantity | None = Field(None, description="size of /dev/shm; counts as memory")
    hugepages: bool = Field(False, description="mounts /dev/hugepages; ask for hugepages-2Mi")
    env: dict[str, str] = {}


class Drain(ValuesSection):
    seconds: Annotated[int, Field(ge=0)]  #: For replicas to leave a pod that is told to stop.
    graceSeconds: Annotated[int, Field(ge=1)]  #: Until Kubernetes kills the pod.


# The lists are NetworkPolicyPeers, which say who may reach which ports.
class NetworkPolicy(ValuesSection):
    enabled: bool
    operatorNamespace: Text  #: Of KubeRay's operator, which talks to Ray's dashboard.
    clients: Objects  #: The gateway's HTTP and gRPC.
    admins: Objects  #: Control's HTTP and gRPC, on the head.
    scrapers: Objects  #: Metrics.


# A PodMonitor and a PrometheusRule for the Prometheus operator.
class Monitoring(ValuesSection):
    enabled: bool
    interval: Annotated[str, Field(pattern=r"^[0-9]+(s|m)$")]  #: Between two scrapes.
    labels: dict[str, str]  #: By which a Prometheus selects the two objects.


class Chart(ValuesSection):
    """values.yaml of the chart `diptych`."""

    image: Image
    secretName: Text  #: The Secret with the cluster's secret, Ray's token and the admin key.
    ray: RaySettings
    #: As in cluster.yaml, without what `DECIDED_ELSEWHERE` names.
    config: ClusterConfig
    pools: PoolSizes
    gateway: GatewayValues
    model: Model
    head: Head
    groups: Annotated[list[Group], Field(min_length=1)]
    #: When the Ray cluster itself changes, a second one is started beside it, or nothing is done.
    upgradeStrategy: Literal["NewCluster", "None"]
    drain: Drain
    networkPolicy: NetworkPolicy
    monitoring: Monitoring
    global_: dict[str, Any] = Field({}, alias="global", description="Helm's own")


def schema() -> dict[str, Any]:
    """Returns the JSON Schema (2020-12) of the values, by which Helm checks them."""
    chart_schema = Chart.model_json_schema()
    for path in DECIDED_ELSEWHERE:
        model, field = path.split(".")
        del chart_schema["$defs"][model]["properties"][field]
    _drop_titles(chart_schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **chart_schema}


def _drop_titles(node: Any) -> None:
    """Removes titles: pydantic names every field after itself, which says nothing."""
    if isinstance(node, dict):
        if isinstance(node.get("title"), str):
            del node["title"]
        for child in node.values():
            _drop_titles(child)
    elif isinstance(node, list):
        for child in node:
            _drop_titles(child)
