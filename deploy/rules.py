"""Checks of Diptych's manifests that no schema can make: what must fit together.

The manifests are those of the Helm chart: one RayService, from which KubeRay makes a Ray cluster (a
head and groups of worker pods) and deploys its Serve config there, and objects beside it. KubeRay's
own refusals are in `kuberay.py`. Every check returns sentences about what is wrong; none means
nothing is. The checks rely on the structure that schemas check.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from math import isnan
from typing import Any

import yaml
from diptych.cluster.config import SECRET, ConfigError, load_config
from pydantic import BaseModel, ValidationError

from .manifests import (
    Manifest,
    container_of,
    groups,
    parse_quantity,
    ray_cluster,
    read,
    serve_config,
    settings,
    templates,
)

#: Variables by which Ray asks for a token; KubeRay sets them from `authOptions`.
TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
SHUTDOWN_S = 15  #: Serve's graceful_shutdown_timeout_s, as cluster/app.py sets it
#: Where the chart mounts clients' keys; looked for where the configuration names no file.
DEFAULT_KEYS_FILE = "/etc/diptych/keys/keys.yaml"
OPERATOR_PORTS = {8000, 8265}  #: Serve's and the dashboard's, which KubeRay's operator calls
COMPONENT = "app.kubernetes.io/component"  #: the label with a pod's kind: `head`, or a group's
#: Resources of which Kubernetes may promise a node's pods more than the node has.
OVERCOMMITTED = ("cpu", "memory", "ephemeral-storage")


# ---- Serve -----------------------------------------------------------------------------------


def serve(service: Manifest) -> list[str]:
    """Checks the Serve config: schema, unknown keys, import path, arguments, deployments.

    Their names must be the builder's. So must the environments of their processes, as Serve takes
    the config's `ray_actor_options` instead of the builder's.

    `service` is the RayService, here and below.
    """
    from ray.serve.schema import ServeDeploySchema

    text = service["spec"].get("serveConfigV2")
    if not text:
        return ["serveConfigV2 is missing"]
    try:
        raw = read(text)
        config = ServeDeploySchema.model_validate(raw)
    except (yaml.YAMLError, ValidationError) as error:
        return [f"serveConfigV2: {error}"]

    found = [f"serveConfigV2: unknown key {key}" for key in unknown_keys(raw, config)]
    for application in config.applications:
        try:
            load_config(None, application.args or {})
            built_names = _deployment_names(application.import_path)
        except (ConfigError, ImportError, AttributeError, TypeError, ValueError) as error:
            found.append(f"serveConfigV2: {application.name}: {error}")
            continue
        # The application's builder may make deployments that the config leaves as they are.
        times = Counter(deployment.name for deployment in application.deployments)
        found += [f"serveConfigV2: no deployment {name}" for name in times.keys() - built_names]
        found += [f"serveConfigV2: {name} twice" for name, count in times.items() if count > 1]
    if not found:
        for application in raw["applications"]:
            found += _other_environments(application)
    return found + list(_differences(raw["applications"]))


def _differences(applications: list[Manifest]) -> Iterator[str]:
    """Yields the settings that are the whole cluster's and that two applications have unlike."""
    known: Manifest = {}
    for application in applications:
        for name, section in application.get("args", {}).items():
            if known.setdefault(name, section) != section:
                yield f"serveConfigV2: {name} differs between the applications"


def unknown_keys(raw: Any, model: Any, where: str = "") -> Iterator[str]:
    """Yields the keys of `raw` that pydantic ignored when it made `model` of it, as dotted paths.

    `where` is the path of `raw` itself, with a point at its end.
    """
    if isinstance(model, BaseModel) and isinstance(raw, dict):
        for key, value in raw.items():
            if key not in type(model).model_fields:
                yield where + key
            else:
                yield from unknown_keys(value, getattr(model, key), f"{where}{key}.")
    elif isinstance(model, list) and isinstance(raw, list):
        for index, (value, child) in enumerate(zip(raw, model, strict=True)):
            yield from unknown_keys(value, child, f"{where}{index}.")


def _other_environments(application: Manifest) -> Iterator[str]:
    """Yields the deployments whose processes would have another environment than the builder's."""
    args = application.get("args", {})
    written = {
        deployment["name"]: deployment["ray_actor_options"].get("runtime_env")
        for deployment in application.get("deployments", [])
        if "ray_actor_options" in deployment
    }
    hosts_vllm = args.get("engine", {}).get("kind") == "vllm"
    if not hosts_vllm and not any(written.values()):
        return  # the builder makes none either; to ask it takes 0.2 s
    for deployment in _built(application["import_path"], {**args, "model": {}}):
        name = deployment.name
        built = (deployment._replica_config.ray_actor_options or {}).get("runtime_env")
        if name in written and written[name] != built:
            yield f"serveConfigV2: {name} has runtime_env {written[name]}, its builder's is {built}"


@cache
def _deployment_names(import_path: str) -> frozenset[str]:
    """Names of what the builder makes; no argument changes them."""
    return frozenset(deployment.name for deployment in _built(import_path, {}))


def _built(import_path: str, args: Manifest) -> list[Any]:
    """Returns the deployments that the builder makes of an application's arguments.

    Here is no Ray that could ask for a token, so the builder is told not to look for one.
    """
    from ray._common.utils import import_attr
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
    from ray.serve._private.build_app import build_app

    arguments = {**args, "ray": {"auth": "disabled"}}
    app = call_user_app_builder_with_args_if_necessary(import_attr(import_path), arguments)
    return list(build_app(app, name="check").deployments)


# ---- replicas and pods -----------------------------------------------------------------------


def placement(service: Manifest) -> Iterator[str]:
    """Checks that the groups offer enough custom resources and GPUs for every replica.

    A pod offers slots as a custom resource of its pool's name, and a replica asks for one of them:
    so Serve starts a replica only where the chart has room for it.
    """
    config = serve_config(service)
    needed: Counter[str] = Counter()  # custom resource -> slots
    replica_gpus: dict[str, float] = {}  # custom resource -> GPUs of a replica that needs it
    deployments = [
        deployment
        for application in config["applications"]
        for deployment in application.get("deployments", [])
    ]
    for deployment in deployments:
        options = deployment.get("ray_actor_options", {})
        for name, slots in options.get("resources", {}).items():
            needed[name] += slots * deployment.get("num_replicas", 1)
            replica_gpus[name] = options.get("num_gpus", 0)

    pools = settings(config).get("pools", {})
    for name in needed.keys() & pools.keys():  # workers' pools; gateways have slots, too
        ranks = pools[name].get("tensor_parallel", 1)
        on_gpus = pools[name].get("engine", {}).get("device") == "cuda"
        if on_gpus and replica_gpus[name] < ranks:
            yield f"a {name} replica has {ranks} ranks on GPUs, it asks for {replica_gpus[name]}"

    offered: Counter[str] = Counter()
    for group in groups(service):
        slots_of_pod = _slots(group)
        for name, slots in slots_of_pod.items():
            if isnan(slots):
                amount = group["resources"][name]
                yield f"group {group['groupName']}: {amount!r} of {name} is no quantity"
                return
            offered[name] += int(slots) * group.get("replicas", 0)
        limits = _amounts(group["template"], "limits")
        pod_gpus = parse_quantity(limits.get("nvidia.com/gpu", "0"))
        slot_gpus = sum(
            int(slots) * replica_gpus.get(name, 0) for name, slots in slots_of_pod.items()
        )
        if slot_gpus > pod_gpus:
            yield (
                f"group {group['groupName']}: its slots want {slot_gpus} GPUs, "
                f"a pod has {pod_gpus:.0f}"
            )

    for name in needed.keys() | offered.keys():
        if name not in needed:
            yield f"a group offers {name}, which no deployment asks for"
        elif needed[name] > offered[name]:
            yield f"replicas want {needed[name]} of {name}, the groups offer {offered[name]}"


def _slots(group: Manifest) -> dict[str, float]:
    """Custom resources that a pod of the group offers; NaN where an amount is no quantity."""
    resources = group.get("resources") or {}
    return {name: parse_quantity(amount) for name, amount in resources.items()}


def _amounts(template: Manifest, kind: str) -> Manifest:
    """Returns what a pod's container asks for; `kind` is `requests` or `limits`."""
    return (container_of(template).get("resources") or {}).get(kind) or {}


def ray_token(service: Manifest) -> Iterator[str]:
    """Checks that Ray's token mode is the configured one, and the token of Diptych's own Secret.

    KubeRay does not overwrite a variable that a container already sets, so `authOptions` would have
    no effect.
    """
    auth = ray_cluster(service).get("authOptions", {})
    mode = auth.get("mode", "disabled")
    configured = settings(serve_config(service)).get("ray", {}).get("auth", "token")
    if mode != configured:
        yield f"authOptions.mode is {mode}, ray.auth is {configured}"
    for name, template in templates(service).items():
        variables = {entry["name"]: entry for entry in container_of(template).get("env", [])}
        for variable in TOKEN_VARIABLES:
            if variable in variables:
                yield f"group {name}: {variable} in env wins over authOptions"
        secret = variables.get(SECRET, {}).get("valueFrom", {}).get("secretKeyRef", {})
        if configured == "token" and secret.get("name") != auth.get("secretName"):
            yield f"group {name}: {SECRET} is of another Secret than authOptions.secretName"


def pods(service: Manifest) -> Iterator[str]:
    """Checks references inside the pods, their sizes, ports and times."""
    config = serve_config(service)
    head = templates(service)["head"]
    yield from _admin(config, head)
    for group in groups(service):
        yield from _drain(group)
        yield from _keys(config, group)
    for name, template in templates(service).items():
        problems = (
            *_ports(config, template),
            *_metrics(config, template),
            *_volumes(template),
            *_environment(template),
            *_resources(template),
            *_memory_volumes(template),
        )
        yield from (f"group {name}: {problem}" for problem in problems)


def _named_ports(template: Manifest) -> dict[str, int]:
    ports = container_of(template).get("ports", [])
    return {port["name"]: port["containerPort"] for port in ports if "name" in port}


def _ports(config: Manifest, template: Manifest) -> Iterator[str]:
    named = _named_ports(template)
    serve_ports = {
        "serve": config.get("http_options", {}).get("port", 8000),  # Serve's own defaults
        "serve-grpc": config.get("grpc_options", {}).get("port", 9000),
    }
    for name, number in serve_ports.items():
        if named.get(name) != number:
            yield f"port {name} is {named.get(name)}, Serve's is {number}"


def _metrics(config: Manifest, template: Manifest) -> Iterator[str]:
    """Checks that the pod's metrics ports follow each other from Diptych's first one on.

    Each process of a pod takes the first free port from there.
    """
    first = settings(config).get("observability", {}).get("metrics_port")
    named = _named_ports(template)
    ports = [number for name, number in named.items() if name.startswith("metrics-")]
    begin = first or 0
    if not ports or ports != list(range(begin, begin + len(ports))):
        yield f"metrics ports are {ports}, Diptych's first one is {first}"


def _volumes(template: Manifest) -> Iterator[str]:
    volumes = {volume["name"] for volume in template["spec"].get("volumes", [])}
    mounted = [mount["name"] for mount in container_of(template).get("volumeMounts", [])]
    if volumes != set(mounted):
        yield f"volumes {sorted(volumes)}, mounted are {sorted(mounted)}"


def _environment(template: Manifest) -> Iterator[str]:
    times = Counter(entry["name"] for entry in container_of(template).get("env", []))
    doubled = [name for name, count in times.items() if count > 1]
    if doubled:
        yield f"{', '.join(doubled)} twice in env"


def _keys(config: Manifest, group: Manifest) -> Iterator[str]:
    """Checks that a worker group has the file of clients' keys exactly if gateways may run there.

    Without such a file in the configuration, no group may have one.
    """
    file = settings(config).get("gateway", {}).get("api_keys_file")
    gateways_may_run = "gateway" in (group.get("resources") or {})
    expected = bool(file and gateways_may_run)
    if expected != _is_mounted(group["template"], file or DEFAULT_KEYS_FILE):
        gateways = "may" if gateways_may_run else "do not"
        yield f"group {group['groupName']}: clients' keys are {file}, gateways {gateways} run"


def _is_mounted(template: Manifest, file: str) -> bool:
    mounts = container_of(template).get("volumeMounts", [])
    return any(file.startswith(f"{mount['mountPath']}/") for mount in mounts)


def _admin(config: Manifest, head: Manifest) -> Iterator[str]:
    """Checks the ports of Control, which runs on the head, and that its key is mounted there."""
    control = settings(config).get("control", {})
    named = _named_ports(head)
    for name, setting in (("admin", "port"), ("admin-grpc", "grpc_port")):
        if control.get(setting) != named.get(name):
            yield f"port {name} is {named.get(name)}, Control's is {control.get(setting)}"
    key_file = control.get("key_file")
    if not key_file:
        yield "control.key_file is missing"
    elif not _is_mounted(head, key_file):
        yield f"nothing is mounted for {key_file}"


def _drain(group: Manifest) -> Iterator[str]:
    """Checks that a pod's workers hand their work over before it stops, and have the time.

    `diptych-drain SECONDS` waits for that. Kubernetes kills the pod after its grace period, which
    is 30 s where none is named.
    """
    name = group["groupName"]
    template = group["template"]
    hook = container_of(template).get("lifecycle", {}).get("preStop", {})
    command = hook.get("exec", {}).get("command") or [""]
    grace_s = template["spec"].get("terminationGracePeriodSeconds", 30)
    if command[0] != "diptych-drain" or not command[-1].isdigit():
        yield f"group {name}: no drain before it stops"
    elif int(command[-1]) + SHUTDOWN_S > grace_s:
        yield (
            f"group {name}: a drain of {command[-1]} s and {SHUTDOWN_S} s to stop, in {grace_s} s"
        )


def _resources(template: Manifest) -> Iterator[str]:
    """Checks amounts and names of resources by Kubernetes' rules.

    Amounts with an exponent ("1e3") are refused, although Kubernetes takes them. Only resources of
    `OVERCOMMITTED` may have a limit above the request. Devices have a "/" in their names. A
    resource with a limit alone requests as much as that.
    """
    requests = _amounts(template, "requests")
    limits = _amounts(template, "limits")
    for amount in [*requests.values(), *limits.values()]:
        if isnan(parse_quantity(amount)):
            yield f"{amount!r} is no quantity"
    for name in requests.keys() | limits.keys():
        may_differ = name in OVERCOMMITTED
        if not may_differ and "/" not in name and not name.startswith("hugepages-"):
            yield f"there is no resource {name}"
        elif not may_differ and requests.get(name, limits.get(name)) != limits.get(name):
            yield f"{name} must have equal request and limit"
        elif name in limits and _amount_of(requests, name) > _amount_of(limits, name):
            yield f"the request of {name} is above its limit"


def _amount_of(resources: Manifest, name: str) -> float:
    return parse_quantity(resources.get(name, "0"))


def _memory_volumes(template: Manifest) -> Iterator[str]:
    """Checks volumes in memory and in huge pages.

    What is in a volume in memory counts against the pod's memory limit. One without a size limit
    may grow to all of the memory, so it is taken for huge (1T). Huge pages do not count there, but
    the pod must ask for them.
    """
    limits = _amounts(template, "limits")
    for volume in template["spec"].get("volumes", []):
        directory = volume.get("emptyDir", {})
        medium = directory.get("medium")
        if medium == "Memory" and "memory" in limits:
            size = parse_quantity(directory.get("sizeLimit", "1T"))
            if size > parse_quantity(limits["memory"]) / 2:
                yield f"{volume['name']} takes over half of the memory limit"
        elif medium == "HugePages-2Mi" and "hugepages-2Mi" not in limits:
            yield "huge pages are mounted and not asked for"


# ---- objects beside the RayService -----------------------------------------------------------


def selectors(documents: list[Manifest]) -> Iterator[str]:
    """Checks the objects beside the RayService: what they pick, open and permit.

    Every selector must pick pods that are there, and policies must open ports that pods have.
    `documents` are all manifests, the RayService included.
    """
    service = next(document for document in documents if document["kind"] == "RayService")
    pod_templates = list(templates(service).values())
    for document in documents:
        where = f"{document['kind']} {document['metadata']['name']}"
        match document["kind"]:
            case "PodDisruptionBudget":
                problems = _disruption_budget(document["spec"], pod_templates)
            case "RoleBinding":
                problems = _account(documents, document, service)
            case "PodMonitor":
                problems = _monitor(document["spec"], pod_templates)
            case "NetworkPolicy":
                problems = _network_policy(document["spec"], pod_templates)
            case _:
                continue
        yield from (f"{where} {problem}" for problem in problems)


def _disruption_budget(spec: Manifest, pod_templates: list[Manifest]) -> Iterator[str]:
    picked = _picked_components(spec.get("selector"), pod_templates)
    if len(picked) != 1:
        yield f"must pick the pods of the head or of one worker group, not {picked}"
    if not isinstance(spec.get("minAvailable"), int) or "maxUnavailable" in spec:
        # Kubernetes cannot tell how many pods a Ray cluster should have, and so refuses every
        # eviction for a budget that needs that number.
        yield "must have a number as minAvailable, and no maxUnavailable"


def _account(documents: list[Manifest], binding: Manifest, service: Manifest) -> Iterator[str]:
    """Checks what the head's account may change: its RayService, Ray clusters, pods' statuses.

    Control runs on the head. It sets the counts of replicas and of pods, and marks lost pods.
    """
    by_name = {(document["kind"], document["metadata"]["name"]): document for document in documents}
    role = by_name.get((binding["roleRef"]["kind"], binding["roleRef"]["name"]))
    subjects = [(subject["kind"], subject["name"]) for subject in binding.get("subjects", [])]
    account_name = templates(service)["head"]["spec"].get("serviceAccountName")
    account = ("ServiceAccount", account_name)
    if role is None or account not in by_name or subjects != [account]:
        yield f"does not bind {account_name} to a role that is here"
        return
    own_service = {
        "apiGroups": ["ray.io"],
        "resources": ["rayservices"],
        "resourceNames": [service["metadata"]["name"]],
        "verbs": ["get", "patch"],
    }
    clusters = {"apiGroups": ["ray.io"], "resources": ["rayclusters"], "verbs": ["get", "patch"]}
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
    pod_statuses = {"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]}
    if role.get("rules") != [own_service, clusters, pods, pod_statuses]:
        yield f"gives {role.get('rules')}"


def _monitor(spec: Manifest, pod_templates: list[Manifest]) -> Iterator[str]:
    """Checks that the monitor picks every pod and asks for every port that metrics are on."""
    if not _picks_every_pod(spec.get("selector"), pod_templates):
        yield "does not pick every pod"
    port_names = {name for template in pod_templates for name in _named_ports(template)}
    metrics_ports = {name for name in port_names if name.startswith("metrics-")}
    monitored_ports = {endpoint.get("port") for endpoint in spec["podMetricsEndpoints"]}
    if monitored_ports != metrics_ports:
        asked_for = sorted(map(str, monitored_ports))
        yield f"asks for {asked_for}, the pods have {sorted(metrics_ports)}"


def _picked_components(selector: Manifest | None, pod_templates: list[Manifest]) -> list[str]:
    """Returns the components of the pods that a selector picks.

    An empty selector would pick all pods of the namespace, others' too, so it counts as wrong: it
    picks none of Diptych's here.
    """
    labels_to_match = (selector or {}).get("matchLabels", {}).items()
    if not labels_to_match:
        return []
    labels = [template.get("metadata", {}).get("labels", {}) for template in pod_templates]
    return [str(pod.get(COMPONENT)) for pod in labels if labels_to_match <= pod.items()]


def _picks_every_pod(selector: Manifest | None, pod_templates: list[Manifest]) -> bool:
    return len(_picked_components(selector, pod_templates)) == len(pod_templates)


def _network_policy(spec: Manifest, pod_templates: list[Manifest]) -> Iterator[str]:
    """Checks that the policy admits the operator and the pods themselves, and nobody unnamed."""
    if not _picks_every_pod(spec.get("podSelector"), pod_templates):
        yield "does not pick every pod"
    ingress = spec.get("ingress", [])
    pod_ports = {
        port["containerPort"]
        for template in pod_templates
        for port in container_of(template).get("ports", [])
    }
    opened_ports = {port.get("port") for rule in ingress for port in rule.get("ports", [])}
    if opened_ports - pod_ports:
        yield f"opens {sorted(opened_ports - pod_ports, key=str)}, where nothing listens"
    if not opened_ports >= OPERATOR_PORTS:
        yield "keeps the operator from Serve's or the dashboard's port"
    if not all(rule.get("from") for rule in ingress):
        yield "lets everybody in"
    peers = [peer.get("podSelector") for rule in ingress for peer in rule.get("from") or []]
    if spec.get("podSelector") not in peers:
        yield "keeps the pods from each other"
