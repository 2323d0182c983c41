"""What no schema says of Diptych's manifests: KubeRay's own refusals, and what must fit together.

The operator's rules are those of `ray-operator/controllers/ray/utils/validation.go` (KubeRay 1.7),
for the fields that the chart writes. Every function returns sentences; none means nothing wrong.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from math import isnan
from typing import Any

import yaml
from diptych.cluster.config import SECRET, ConfigError, load_config
from pydantic import BaseModel, ValidationError

Object = dict[str, Any]
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # DNS-1035
QUANTITY = re.compile(r"([0-9.]+)([KMGTPE]i?|m|k)?")
SCALE = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20}
SCALE |= {"Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60, "P": 1e15, "E": 1e18}


def amount(text: object) -> float:
    """A Kubernetes quantity as a number; NaN if it is none."""
    match = QUANTITY.fullmatch(str(text))
    return float(match[1]) * SCALE.get(match[2] or "", float("nan")) if match else float("nan")


def read(text: str) -> Any:
    return yaml.load(text, Loader=yaml.CSafeLoader)


def groups(service: Object) -> list[Object]:
    return service["spec"]["rayClusterConfig"].get("workerGroupSpecs", [])


def templates(service: Object) -> dict[str, Object]:
    """Pod templates by the group's name; the head's is `head`."""
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]
    return {"head": head["template"]} | {g["groupName"]: g["template"] for g in groups(service)}


# ---- the operator ----------------------------------------------------------------------------


def operator(service: Object) -> list[str]:
    """KubeRay would refuse the RayService for these."""
    found = []
    name, spec = service["metadata"]["name"], service["spec"]
    cluster = spec["rayClusterConfig"]
    if not LABEL.fullmatch(name) or len(name) > 47:
        found.append(f"RayService {name}: not a DNS-1035 label of at most 47 characters")
    auth = cluster.get("authOptions", {})
    if auth.get("enableK8sTokenAuth"):
        found.append("enableK8sTokenAuth is refused for a RayService")
    if auth.get("mode") == "token" and _version(cluster.get("rayVersion", "0")) < (2, 52):
        found.append("token auth needs a rayVersion of 2.52 or later")
    head = cluster["headGroupSpec"]
    if head.get("headService", {}).get("metadata", {}).get("name"):
        found.append("headService.metadata.name must not be set")
    for gate in ("networkPolicy", "tlsOptions", "historyServerOptions"):
        if gate in cluster:
            found.append(f"{gate} needs a feature gate of the operator that is off by default")
    if cluster.get("gcsFaultToleranceOptions") and "redis-password" in head["rayStartParams"]:
        found.append("redis-password in rayStartParams, beside gcsFaultToleranceOptions")
    for group in [{"groupName": "head", **head}, *groups(service)]:
        found += _group(group, bool(cluster.get("enableInTreeAutoscaling")))
    return [*found, *_autoscaler(service), *_incremental(spec)]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _group(group: Object, autoscaling: bool) -> Iterator[str]:
    name, start = group["groupName"], group.get("rayStartParams") or {}
    if not group["template"]["spec"].get("containers"):
        yield f"group {name} has no container"
    if "labels" in start:
        yield f"group {name}: labels in rayStartParams"
    if group.get("resources") and start.keys() & {"num-cpus", "num-gpus", "memory", "resources"}:
        yield f"group {name}: resources in rayStartParams and in resources"
    unknown = sorted(start.keys() - _start_options())
    if unknown:
        yield f"group {name}: `ray start` knows no {', '.join(unknown)}"
    if name == "head":
        return
    least, most = group.get("minReplicas"), group.get("maxReplicas")
    if (least is None or most is None) and not autoscaling:
        yield f"group {name}: minReplicas and maxReplicas must be set without autoscaling"
    elif not 0 <= (least or 0) <= group.get("replicas", 0) <= (most or 0):
        yield f"group {name}: not 0 <= minReplicas <= replicas <= maxReplicas"


@cache
def _start_options() -> frozenset[str]:
    from ray.scripts.scripts import start

    return frozenset(o.lstrip("-") for p in start.params for o in (*p.opts, *p.secondary_opts))


def _autoscaler(service: Object) -> Iterator[str]:
    cluster = service["spec"]["rayClusterConfig"]
    options = cluster.get("autoscalerOptions") or {}
    if not cluster.get("enableInTreeAutoscaling") or options.get("version") != "v2":
        return
    for name, template in templates(service).items():
        if template["spec"].get("restartPolicy", "Never") != "Never":
            yield f"group {name}: restartPolicy must be Never with autoscaler v2"
    env = cluster["headGroupSpec"]["template"]["spec"]["containers"][0].get("env", [])
    if any(entry["name"] == "RAY_enable_autoscaler_v2" for entry in env):
        yield "RAY_enable_autoscaler_v2 beside autoscalerOptions.version"


def _incremental(spec: Object) -> Iterator[str]:
    strategy = spec.get("upgradeStrategy", {})
    if strategy.get("type") != "NewClusterWithIncrementalUpgrade":
        return
    options = strategy.get("clusterUpgradeOptions", {})
    if not spec["rayClusterConfig"].get("enableInTreeAutoscaling"):
        yield "an incremental upgrade needs autoscaling"
    if not options.get("gatewayClassName") or options.get("intervalSeconds", 0) <= 0:
        yield "an incremental upgrade needs gatewayClassName and intervalSeconds"
    if options.get("stepSizePercent", 101) > options.get("maxSurgePercent", 100):
        yield "stepSizePercent must be at most maxSurgePercent"


# ---- Serve -----------------------------------------------------------------------------------


def serve(service: Object) -> list[str]:
    """The Serve config: its schema, unknown keys, import path, arguments, deployments' names."""
    from ray.serve.schema import ServeDeploySchema

    try:
        raw = read(service["spec"]["serveConfigV2"])
        config = ServeDeploySchema.model_validate(raw)
    except (yaml.YAMLError, ValidationError) as error:
        return [f"serveConfigV2: {error}"]
    found = [f"serveConfigV2: unknown key {key}" for key in unknown_keys(raw, config)]
    for application in config.applications:
        try:
            load_config(None, application.args or {})
            known = _deployments(application.import_path)
        except (ConfigError, ImportError, AttributeError, TypeError, ValueError) as error:
            found.append(f"serveConfigV2: {application.name}: {error}")
            continue
        named = [deployment.name for deployment in application.deployments]
        found += [f"serveConfigV2: no deployment {name}" for name in set(named) - known]
        found += [f"serveConfigV2: {n} twice" for n, times in Counter(named).items() if times > 1]
    return found


def unknown_keys(raw: Any, model: Any, where: str = "") -> Iterator[str]:
    """Keys of `raw` that pydantic ignored when it made `model` of it."""
    if isinstance(model, BaseModel) and isinstance(raw, dict):
        for key, value in raw.items():
            if key not in type(model).model_fields:
                yield where + key
            else:
                yield from unknown_keys(value, getattr(model, key), f"{where}{key}.")
    elif isinstance(model, list) and isinstance(raw, list):
        for index, (value, child) in enumerate(zip(raw, model, strict=True)):
            yield from unknown_keys(value, child, f"{where}{index}.")


@cache
def _deployments(import_path: str) -> frozenset[str]:
    """Names of what the builder makes; no argument changes them.

    Here is no Ray that could ask for a token, so the builder is told not to look for one.
    """
    from ray._common.utils import import_attr
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
    from ray.serve._private.build_app import build_app

    arguments = {"ray": {"auth": "disabled"}}
    app = call_user_app_builder_with_args_if_necessary(import_attr(import_path), arguments)
    return frozenset(deployment.name for deployment in build_app(app, name="check").deployments)


# ---- what must fit together ------------------------------------------------------------------


def placement(service: Object) -> Iterator[str]:
    """Every replica finds a home: custom resources and GPUs that some group offers enough of."""
    config = read(service["spec"]["serveConfigV2"])
    wanted: Counter[str] = Counter()
    gpus: dict[str, float] = {}
    for deployment in config["applications"][0]["deployments"]:
        options = deployment.get("ray_actor_options", {})
        for name, each in options.get("resources", {}).items():
            wanted[name] += each * deployment.get("num_replicas", 1)
            gpus[name] = options.get("num_gpus", 0)
    pools = config["applications"][0].get("args", {}).get("pools", {})
    for name in wanted.keys() & pools.keys():
        ranks, engine = pools[name].get("tensor_parallel", 1), pools[name].get("engine", {})
        if engine.get("device") == "cuda" and gpus[name] < ranks:
            yield f"a {name} replica has {ranks} ranks on GPUs, it asks for {gpus[name]}"
    offered: Counter[str] = Counter()
    for group in groups(service):
        slots = {name: int(amount(n)) for name, n in (group.get("resources") or {}).items()}
        for name, count in slots.items():
            offered[name] += count * group["replicas"]
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        have = amount(limits.get("nvidia.com/gpu", "0"))
        need = sum(count * gpus.get(name, 0) for name, count in slots.items())
        if need > have:
            yield f"group {group['groupName']}: its slots want {need} GPUs, a pod has {have:.0f}"
    for name in wanted.keys() | offered.keys():
        if name not in wanted:
            yield f"a group offers {name}, which no deployment asks for"
        elif wanted[name] > offered[name]:
            yield f"replicas want {wanted[name]} of {name}, the groups offer {offered[name]}"


def ray_token(service: Object) -> Iterator[str]:
    """Ray asks for the token of the Secret that holds Diptych's words, unless values say otherwise.

    KubeRay leaves a variable that stands in a container as it is, so `authOptions` would not count.
    """
    cluster = service["spec"]["rayClusterConfig"]
    config = read(service["spec"]["serveConfigV2"])
    wanted = config["applications"][0].get("args", {}).get("ray", {}).get("auth", "token")
    auth = cluster.get("authOptions", {})
    if auth.get("mode", "disabled") != wanted:
        yield f"authOptions.mode is {auth.get('mode', 'disabled')}, ray.auth is {wanted}"
    for name, template in templates(service).items():
        variables = {entry["name"]: entry for entry in template["spec"]["containers"][0]["env"]}
        for variable in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            if variable in variables:
                yield f"group {name}: {variable} in env wins over authOptions"
        source = variables.get(SECRET, {}).get("valueFrom", {}).get("secretKeyRef", {})
        if wanted == "token" and source.get("name") != auth.get("secretName"):
            yield f"group {name}: {SECRET} is of another Secret than authOptions.secretName"


def pods(service: Object) -> Iterator[str]:
    """References inside the pods, sizes, ports, times."""
    config = read(service["spec"]["serveConfigV2"])
    ports = {"serve": config["http_options"]["port"], "serve-grpc": config["grpc_options"]["port"]}
    slots = {group["groupName"]: group.get("resources") or {} for group in groups(service)}
    for name, template in templates(service).items():
        container = template["spec"]["containers"][0]
        named = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        for port, number in ports.items():
            if named.get(port) != number:
                yield f"group {name}: port {port} is {named.get(port)}, Serve's is {number}"
        yield from (f"group {name}: {line}" for line in _metrics(config, named))
        volumes = {volume["name"] for volume in template["spec"].get("volumes", [])}
        mounts = [mount["name"] for mount in container.get("volumeMounts", [])]
        if volumes != set(mounts):
            yield f"group {name}: volumes {sorted(volumes)}, mounted are {sorted(mounts)}"
        doubled = [n for n, k in Counter(e["name"] for e in container["env"]).items() if k > 1]
        if doubled:
            yield f"group {name}: {', '.join(doubled)} twice in env"
        if name != "head":
            yield from _drain(name, template)
            yield from _keys(config, name, slots[name], template)
        else:
            yield from _admin(config, template, named)
        yield from _resources(name, template)


def _metrics(config: Object, named: dict[str, int]) -> Iterator[str]:
    """Processes take the first free port from Diptych's first one on."""
    first = config["applications"][0].get("args", {}).get("observability", {}).get("metrics_port")
    ports = [number for name, number in named.items() if name.startswith("metrics-")]
    if not ports or ports != list(range(first or 0, (first or 0) + len(ports))):
        yield f"metrics ports are {ports}, Diptych's first one is {first}"


def _keys(config: Object, name: str, slots: Object, template: Object) -> Iterator[str]:
    """The file of clients' keys is there where gateways may run, and nowhere else."""
    gateway = config["applications"][0].get("args", {}).get("gateway", {})
    file, runs = gateway.get("api_keys_file"), "gateway" in slots
    if bool(file and runs) != _mounted(template, file or "/etc/diptych/keys/keys.yaml"):
        yield f"group {name}: clients' keys are {file}, gateways {'may' if runs else 'do not'} run"


def _mounted(template: Object, file: str) -> bool:
    mounts = template["spec"]["containers"][0].get("volumeMounts", [])
    return any(file.startswith(f"{mount['mountPath']}/") for mount in mounts)


def _admin(config: Object, template: Object, named: dict[str, int]) -> Iterator[str]:
    """Control is on the head: its ports, its key, and a service account that is there."""
    control = config["applications"][0].get("args", {}).get("control", {})
    for name, field in (("admin", "port"), ("admin-grpc", "grpc_port")):
        if control.get(field) != named.get(name):
            yield f"port {name} is {named.get(name)}, Control's is {control.get(field)}"
    if not _mounted(template, control["key_file"]):
        yield f"nothing is mounted for {control['key_file']}"


def _drain(name: str, template: Object) -> Iterator[str]:
    hook = template["spec"]["containers"][0].get("lifecycle", {}).get("preStop", {})
    command = hook.get("exec", {}).get("command") or [""]
    grace = template["spec"].get("terminationGracePeriodSeconds", 30)
    if command[0] != "diptych-drain" or not command[-1].isdigit():
        yield f"group {name}: no drain before it stops"
    elif int(command[-1]) + 15 > grace:  # 15 s: Serve's graceful_shutdown_timeout_s
        yield f"group {name}: a drain of {command[-1]} s and 15 s to stop, in {grace} s"


def _resources(name: str, template: Object) -> Iterator[str]:
    spec = template["spec"]
    requests, limits = (spec["containers"][0]["resources"][k] for k in ("requests", "limits"))
    for text in [*requests.values(), *limits.values()]:
        if isnan(amount(text)):
            yield f"group {name}: {text!r} is no quantity"
    for key in requests.keys() | limits.keys():
        if key not in ("cpu", "memory") and "/" not in key and not key.startswith("hugepages-"):
            yield f"group {name}: there is no resource {key}"
        elif key not in ("cpu", "memory") and requests.get(key) != limits.get(key):
            yield f"group {name}: {key} must have equal request and limit"
        elif key in limits and amount(requests.get(key, "0")) > amount(limits[key]):
            yield f"group {name}: the request of {key} is above its limit"
    for volume in spec.get("volumes", []):
        memory = volume.get("emptyDir", {})
        if memory.get("medium") == "Memory":
            if amount(memory.get("sizeLimit", "1T")) > amount(limits["memory"]) / 2:
                yield f"group {name}: {volume['name']} takes over half of the memory limit"
        elif memory.get("medium") == "HugePages-2Mi" and "hugepages-2Mi" not in limits:
            yield f"group {name}: huge pages are mounted and not asked for"


def selectors(documents: list[Object]) -> Iterator[str]:
    """Every selector picks pods that are there, policies open the ports that pods have."""
    service = next(d for d in documents if d["kind"] == "RayService")
    pods = list(templates(service).values())
    labels = [template["metadata"]["labels"] for template in pods]
    for document in documents:
        where = f"{document['kind']} {document['metadata']['name']}"
        if document["kind"] == "PodDisruptionBudget":
            picked = _picked(document["spec"].get("selector"), labels)
            if not picked or "head" in picked:
                yield f"{where} must pick the pods of a worker group, not {picked}"
        elif document["kind"] == "RoleBinding":
            yield from (f"{where} {line}" for line in _account(documents, document, service))
        elif document["kind"] == "PodMonitor":
            yield from (f"{where} {line}" for line in _monitor(document["spec"], service))
        elif document["kind"] == "NetworkPolicy":
            yield from (f"{where} {line}" for line in _policy(document["spec"], pods))


def _account(documents: list[Object], binding: Object, service: Object) -> Iterator[str]:
    """The head's account is bound to a role that lets it change its RayService, and no more."""
    named = {(one["kind"], one["metadata"]["name"]): one for one in documents}
    spec = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    role = named.get((binding["roleRef"]["kind"], binding["roleRef"]["name"]))
    subjects = [(one["kind"], one["name"]) for one in binding["subjects"]]
    account = ("ServiceAccount", spec.get("serviceAccountName"))
    if role is None or account not in named or subjects != [account]:
        yield f"does not bind {account[1]} to a role that is here"
        return
    wanted = {
        "apiGroups": ["ray.io"],
        "resources": ["rayservices"],
        "resourceNames": [service["metadata"]["name"]],
        "verbs": ["get", "patch"],
    }
    if role["rules"] != [wanted]:
        yield f"gives {role['rules']}"


def _monitor(spec: Object, service: Object) -> Iterator[str]:
    """It picks every pod and asks for every port that metrics are on."""
    pods = list(templates(service).values())
    if len(_picked(spec["selector"], [p["metadata"]["labels"] for p in pods])) != len(pods):
        yield "does not pick every pod"
    named = {port["name"] for pod in pods for port in pod["spec"]["containers"][0]["ports"]}
    ports = {name for name in named if name.startswith("metrics-")}
    asked = {endpoint.get("port") for endpoint in spec["podMetricsEndpoints"]}
    if asked != ports:
        yield f"asks for {sorted(map(str, asked))}, the pods have {sorted(ports)}"


def _picked(selector: Object | None, labels: list[dict[str, str]]) -> list[str]:
    """Components that a selector picks; an empty one picks none of ours."""
    wanted = (selector or {}).get("matchLabels", {}).items()
    picked = [one for one in labels if wanted and wanted <= one.items()]
    return [one["app.kubernetes.io/component"] for one in picked]


def _policy(spec: Object, pods: list[Object]) -> Iterator[str]:
    labels = [pod["metadata"]["labels"] for pod in pods]
    ports = {p["containerPort"] for pod in pods for p in pod["spec"]["containers"][0]["ports"]}
    if len(_picked(spec.get("podSelector"), labels)) != len(labels):
        yield "does not pick every pod"
    ingress = spec.get("ingress", [])
    opened = {port["port"] for rule in ingress for port in rule.get("ports", [])}
    if opened - ports:
        yield f"opens {sorted(opened - ports)}, where nothing listens"
    if not {8000, 8265} <= opened:
        yield "keeps the operator from Serve's or the dashboard's port"
    if not all(rule.get("from") for rule in ingress):
        yield "lets everybody in"
    peers = [peer.get("podSelector") for rule in ingress for peer in rule.get("from") or []]
    if spec.get("podSelector") not in peers:
        yield "keeps the pods from each other"
