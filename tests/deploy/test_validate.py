"""The validation itself: right manifests pass, twenty kinds of damage at random places do not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import crds, manifests, render, validate

FOLDER = validate.crd_folder()
FILES = sorted(render.RENDERED.glob("*.yaml"))

Documents = list[dict[str, Any]]
#: Maps whose keys users choose: another key there is no mistake.
FREE = {"labels", "annotations", "nodeSelector", "matchLabels", "resources", "requests", "limits"}
needs_crds = pytest.mark.skipif(
    FOLDER is None, reason="no CRDs: set DIPTYCH_CRD_DIR (see deploy/README.md)"
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_committed_manifests_are_right(path: Path) -> None:
    assert validate.problems(path.read_text(), FOLDER) == []


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("metadata: {name: x}", "one RayService is wanted, here are"),
        ("{apiVersion: v1, kind: Secret, metadata: null}", "Secret None: "),
        ("{apiVersion: v1, kind: Secret, metadata: x}", "Secret None: "),
    ],
)
def test_an_object_without_a_kind_or_a_name_is_reported(extra: str, expected: str) -> None:
    text = f"{FILES[0].read_text()}\n---\n{extra}\n"
    assert any(problem.startswith(expected) for problem in validate.problems(text, None))


def test_a_wrong_structure_is_reported_without_crds_too() -> None:
    text = "{apiVersion: ray.io/v1, kind: RayService, metadata: {name: x}, spec: {}}"
    (problem,) = validate.problems(text, None)
    assert "structure is wrong" in problem and "rayClusterConfig" in problem


def test_a_head_needs_no_start_options_beside_its_redis() -> None:
    documents = list(yaml.load_all(FILES[0].read_text(), Loader=yaml.CSafeLoader))
    cluster = manifests.ray_cluster(service(documents))
    cluster["gcsFaultToleranceOptions"] = {"redisAddress": "redis:6379"}
    del cluster["headGroupSpec"]["rayStartParams"]
    assert validate.problems(dump(documents), FOLDER) == []
    cluster["headGroupSpec"]["rayStartParams"] = {"redis-password": "x"}
    assert "redis-password" in str(validate.problems(dump(documents), FOLDER))


#: The path of a field of a RayService that its CRD lets be as it is here, or missing (None), and
#: what is said of it.
ALLOWED: list[tuple[str, Any, str]] = [
    ("spec.serveConfigV2", None, "serveConfigV2 is missing"),
    ("WORKERS.resources", {"decode": "two"}, "'two' of decode is no quantity"),
    ("WORKERS.replicas", None, "not 0 <= minReplicas"),
    ("WORKERS.template.metadata", None, "does not pick every pod"),
    ("CONTAINER.env", None, "is of another Secret"),
    ("CONTAINER.resources", None, ""),
    ("CONTAINER.resources.requests", None, ""),
    ("CONTAINER.resources.limits", None, ""),
    ("CONTAINER.ports.0.name", None, "port"),
]


@needs_crds
@pytest.mark.parametrize(
    ("path", "value", "expected"), ALLOWED, ids=lambda part: str(part).replace(" ", "-")
)
def test_what_the_schemas_allow_is_a_sentence_or_right(
    path: str, value: object, expected: str
) -> None:
    documents = list(yaml.load_all(FILES[0].read_text(), Loader=yaml.CSafeLoader))
    path = path.replace("CONTAINER", "WORKERS.template.spec.containers.0")
    path = path.replace("WORKERS", "spec.rayClusterConfig.workerGroupSpecs.0")
    *steps, field = path.split(".")
    place: Any = service(documents)
    for step in steps:
        place = place[int(step) if isinstance(place, list) else step]
    if value is None:
        del place[field]
    else:
        place[field] = value
    assert expected in "\n".join(validate.problems(dump(documents), FOLDER))


# ---- mutations -------------------------------------------------------------------------------


def dump(documents: Documents) -> str:
    return yaml.dump_all(documents, Dumper=yaml.CSafeDumper)


def places(node: Any, inside: str = "") -> Iterator[tuple[Any, Any]]:
    """(container, key) of every field of known name below a document."""
    if isinstance(node, dict):
        for key, child in node.items():
            if inside not in FREE:
                yield node, key
            yield from places(child, str(key))
    elif isinstance(node, list):
        for child in node:
            yield from places(child, inside)


def service(documents: Documents) -> dict[str, Any]:
    return next(d for d in documents if d["kind"] == "RayService")


def any_spec(documents: Documents, rng: random.Random) -> tuple[Any, Any]:
    return rng.choice(list(places(rng.choice(with_spec(documents))["spec"], "spec")))


def with_spec(documents: Documents, but: str = "") -> list[Any]:
    return [d for d in documents if "spec" in d and d["kind"] != but]


def pod(documents: Documents, rng: random.Random) -> dict[str, Any]:
    """A worker's pod spec."""
    return rng.choice(manifests.groups(service(documents)))["template"]["spec"]


def container(documents: Documents, rng: random.Random) -> dict[str, Any]:
    return pod(documents, rng)["containers"][0]


def unknown_key(documents: Documents, rng: random.Random) -> None:
    node, _ = any_spec(documents, rng)
    node["unheardOf"] = 1


def misspelt_key(documents: Documents, rng: random.Random) -> None:
    node, key = any_spec(documents, rng)
    middle = rng.randrange(len(key))
    node[key[:middle] + key[middle] + key[middle:]] = node.pop(key)


def wrong_type(documents: Documents, rng: random.Random) -> None:
    node, key = any_spec(documents, rng)
    node[key] = [7] if not isinstance(node[key], list) else {"seven": 7}


def no_api(documents: Documents, rng: random.Random) -> None:
    rng.choice(documents)["apiVersion"] = "ray.io/v7"


def selecting(documents: Documents) -> list[Any]:
    return [d for d in documents if {"selector", "podSelector"} & d.get("spec", {}).keys()]


def missing_selector(documents: Documents, rng: random.Random) -> None:
    chosen = rng.choice(selecting(documents))
    chosen["spec"].pop("selector", None)
    chosen["spec"].pop("podSelector", None)


def selector_of_nothing(documents: Documents, rng: random.Random) -> None:
    chosen = rng.choice(selecting(documents))["spec"]
    labels = (chosen.get("selector") or chosen["podSelector"])["matchLabels"]
    labels[rng.choice(sorted(labels))] = "nobody"


def wrong_container_port(documents: Documents, rng: random.Random) -> None:
    rng.choice(container(documents, rng)["ports"])["containerPort"] = 8002


def wrong_policy_port(documents: Documents, rng: random.Random) -> None:
    policy = next(d for d in documents if d["kind"] == "NetworkPolicy")
    rule = rng.choice([r for r in policy["spec"]["ingress"] if "ports" in r])
    rng.choice(rule["ports"])["port"] = 8888


def open_policy(documents: Documents, rng: random.Random) -> None:
    policy = next(d for d in documents if d["kind"] == "NetworkPolicy")
    rng.choice(policy["spec"]["ingress"]).pop("from")


def serve_port(documents: Documents, rng: random.Random) -> None:
    serve(documents, lambda config: config[rng.choice(["http_options", "grpc_options"])], "port", 1)


def serve(documents: Documents, where: Callable[[Any], Any], key: str, value: Any) -> None:
    spec = service(documents)["spec"]
    config = yaml.safe_load(spec["serveConfigV2"])
    where(config)[key] = value
    spec["serveConfigV2"] = yaml.safe_dump(config)


def deployments(config: Any) -> Any:
    """Gateway, Router, PrefillWorker and DecodeWorker."""
    front, model = config["applications"]
    return [*front["deployments"], *model["deployments"]]


def serve_unknown_key(documents: Documents, rng: random.Random) -> None:
    def where(config: Any) -> Any:
        application = rng.choice(config["applications"])
        deployment = rng.choice(application["deployments"])
        return rng.choice([config, application, deployment, deployment["ray_actor_options"]])

    serve(documents, where, "max_ongoing_request", 3)


def serve_autoscaling(documents: Documents, rng: random.Random) -> None:
    where = rng.choice([0, 2, 3])  # those that have num_replicas
    value = {"min_replicas": 1, "max_replicas": 2}
    serve(documents, lambda c: deployments(c)[where], "autoscaling_config", value)


def unknown_deployment(documents: Documents, rng: random.Random) -> None:
    where = rng.randrange(4)
    serve(documents, lambda c: deployments(c)[where], "name", "Worker")


def bad_import_path(documents: Documents, rng: random.Random) -> None:
    path = rng.choice(["diptych.cluster.app:aplication", "diptych.cluster.ap:front_application"])
    serve(documents, lambda c: rng.choice(c["applications"]), "import_path", path)


def bad_argument(documents: Documents, rng: random.Random) -> None:
    key, value = rng.choice(
        [("slos", {}), ("slo", {"ttft_ms": -1}), ("router", {"queue_max": "x"})]
    )
    serve(documents, lambda c: rng.choice(c["applications"])["args"], key, value)


def rank_without_gpu(documents: Documents, rng: random.Random) -> None:
    def pools(config: dict[str, Any]) -> dict[str, Any]:
        args = config["applications"][1]["args"]
        args["kv_transfer"] = {"transport": "nixl"}
        return args.setdefault("pools", {})

    split = {"tensor_parallel": rng.randrange(9, 17), "engine": {"device": "cuda"}}
    serve(documents, pools, "decode", split)


def no_home(documents: Documents, rng: random.Random) -> None:
    where = rng.randrange(2, 4)
    serve(documents, lambda c: deployments(c)[where], "num_replicas", 99)


def misnamed_slot(documents: Documents, rng: random.Random) -> None:
    slots = rng.choice(manifests.groups(service(documents)))["resources"]
    name = rng.choice(sorted(slots))
    slots[name + "s"] = slots.pop(name)


def bad_volume(documents: Documents, rng: random.Random) -> None:
    container(documents, rng).setdefault("volumeMounts", []).append(
        {"name": "lost", "mountPath": "/lost"}
    )


def no_secret_key(documents: Documents, rng: random.Random) -> None:
    entry = next(e for e in container(documents, rng)["env"] if "valueFrom" in e)
    del entry["valueFrom"]["secretKeyRef"]["key"]


def ray_without_token(documents: Documents, rng: random.Random) -> None:
    """Whoever reaches a pod could run code there; or the operator has another token."""
    cluster = service(documents)["spec"]["rayClusterConfig"]
    kind = rng.randrange(4)
    if kind == 0:
        del cluster["authOptions"]
    elif kind == 1:
        cluster["authOptions"]["mode"] = "disabled"
    elif kind == 2:
        cluster["authOptions"]["secretName"] = "another"
    else:
        variable = {"name": "RAY_AUTH_MODE", "value": "disabled"}
        container(documents, rng)["env"].append(variable)


def requests_above_limits(documents: Documents, rng: random.Random) -> None:
    resources = container(documents, rng)["resources"]
    key = rng.choice(sorted(resources["limits"]))
    resources["requests"][key] = "9000Gi" if key != "nvidia.com/gpu" else "9"


def bad_quantity(documents: Documents, rng: random.Random) -> None:
    container(documents, rng)["resources"]["limits"]["memory"] = rng.choice(["6 Gi", "6GB", "lots"])


def no_drain(documents: Documents, rng: random.Random) -> None:
    chosen = pod(documents, rng)
    if rng.random() < 0.5:
        chosen["terminationGracePeriodSeconds"] = 30
    else:
        del chosen["containers"][0]["lifecycle"]


def long_name(documents: Documents, rng: random.Random) -> None:
    service(documents)["metadata"]["name"] = rng.choice(["a" * 48, "7up", "Diptych"])


def replicas_out_of_bounds(documents: Documents, rng: random.Random) -> None:
    rng.choice(manifests.groups(service(documents)))["minReplicas"] = 99


def start_parameter(documents: Documents, rng: random.Random) -> None:
    group = rng.choice(manifests.groups(service(documents)))
    key = rng.choice(["labels", "num-cpus", "dashbord-host"])
    group["rayStartParams"][key] = "1"


def upgrade_without_autoscaling(documents: Documents, rng: random.Random) -> None:
    options = {"gatewayClassName": "istio", "stepSizePercent": 20, "intervalSeconds": 60}
    service(documents)["spec"]["upgradeStrategy"] = {
        "type": "NewClusterWithIncrementalUpgrade",
        "clusterUpgradeOptions": options,
    }


def gated_field(documents: Documents, rng: random.Random) -> None:
    cluster = service(documents)["spec"]["rayClusterConfig"]
    field, value = rng.choice([("tlsOptions", {}), ("networkPolicy", {"mode": "DenyAllIngress"})])
    cluster[field] = value


def wrong_account(documents: Documents, rng: random.Random) -> None:
    """Control could not scale, or could do more than that."""
    kind = rng.choice(["ServiceAccount", "Role", "RoleBinding", "RayService"])
    chosen = next(d for d in documents if d["kind"] == kind)
    if kind == "RoleBinding":
        chosen["roleRef"]["name"] = "admin"
    elif kind == "Role":
        rule = rng.choice(chosen["rules"])
        key = rng.choice(["resources", "verbs", "resourceNames", "apiGroups"])
        rule[key] = rng.choice([["*"], []])
    elif kind == "ServiceAccount":
        documents.remove(chosen)
    else:
        head = chosen["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
        head["serviceAccountName"] = "default"


def wrong_admin_port(documents: Documents, rng: random.Random) -> None:
    port = rng.choice(["port", "grpc_port"])
    serve(documents, lambda c: c["applications"][0]["args"]["control"], port, 8002)


def wrong_metrics_port(documents: Documents, rng: random.Random) -> None:
    """Prometheus would miss a process, or all of them."""
    monitors = [d for d in documents if d["kind"] == "PodMonitor"]
    if monitors and rng.random() < 0.5:
        rng.choice(monitors[0]["spec"]["podMetricsEndpoints"])["port"] = "metrics"
    else:
        serve(documents, lambda c: c["applications"][0]["args"]["observability"], "metrics_port", 0)


STRUCTURE = [unknown_key, misspelt_key, wrong_type]  # of a RayService: the CRD's
MUTATIONS = [
    *STRUCTURE,
    *(no_api, missing_selector, selector_of_nothing, wrong_container_port, wrong_policy_port),
    *(open_policy, serve_port, serve_unknown_key, serve_autoscaling, unknown_deployment),
    *(bad_import_path, bad_argument, no_home, misnamed_slot, bad_volume, no_secret_key),
    *(requests_above_limits, bad_quantity, no_drain, long_name, replicas_out_of_bounds),
    *(start_parameter, upgrade_without_autoscaling, gated_field, wrong_account, wrong_admin_port),
    *(wrong_metrics_port, rank_without_gpu, ray_without_token),
]


def found(mutation: Callable[[Documents, random.Random], None], seed: int) -> list[str]:
    """What the validation says of a random fleet after the mutation."""
    rng = random.Random(f"{mutation.__name__} {seed}")
    documents = list(yaml.load_all(rng.choice(FILES).read_text(), Loader=yaml.CSafeLoader))
    before = dump(documents)
    mutation(documents, rng)
    after = dump(documents)
    assert after != before
    return validate.problems(after, FOLDER)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_damage_is_caught(mutation: Callable[[Documents, random.Random], None]) -> None:
    if FOLDER is None and mutation in [*STRUCTURE, no_api]:
        pytest.skip("no CRDs: set DIPTYCH_CRD_DIR (see deploy/README.md)")
    assert len(MUTATIONS) >= 20
    assert found(mutation, 0)


@needs_crds
@pytest.mark.long
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_damage_is_caught_at_many_places(
    mutation: Callable[[Documents, random.Random], None],
) -> None:
    """With `-s`: deploy/README.md's table."""
    told = {seed: found(mutation, seed) for seed in range(1, 30)}
    caught = [seed for seed in told if told[seed]]
    words = " ".join(told[1][0].split())[:110].replace("|", "/") if told[1] else "-"
    print(f"| {mutation.__name__} | {len(caught)} of {len(told)} | {words} |")
    assert len(caught) == len(told)


# ---- the CRD check ---------------------------------------------------------------------------


SCHEMA = {
    "type": "object",
    "properties": {
        "spec": {
            "type": "object",
            "required": ["mode", "port"],
            "properties": {
                "mode": {"type": "string", "default": "on"},
                "port": {"x-kubernetes-int-or-string": True},
                "most": {"type": "integer"},
                "maybe": {"type": "string", "nullable": True},
                "any": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
            },
            "x-kubernetes-validations": [
                {"rule": "!has(self.most) || self.most < 10", "message": "most is below 10"},
                {"rule": "self.port == oldSelf.port"},
            ],
        }
    },
}


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"port": 1}, []),  # the default counts for `required`; a rule on a change does not run
        ({"port": "http", "maybe": None, "any": {"x": 1}}, []),
        ({"port": 1, "most": None}, []),  # dropped, as the API server does
        ({"port": 1, "moist": 1}, ["moist"]),
        ({"port": 1.5}, ["1.5 is not valid"]),
        ({"port": 1, "most": 10}, ["spec: most is below 10"]),
        ({}, ["'port' is a required property"]),
    ],
)
def test_a_custom_object_is_checked_as_the_api_server_would(spec: dict, told: list[str]) -> None:
    found = crds.problems({"spec": spec, "metadata": {}}, SCHEMA)
    assert len(found) == len(told)
    assert all(wanted in line for wanted, line in zip(told, found, strict=True))


@needs_crds
def test_rules_in_cel_of_the_real_crds_run() -> None:
    assert FOLDER
    route = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": "x"},
        "spec": {"rules": [{"backendRefs": [{"name": "serve", "port": 8000}]}]},
    }
    schema = crds.load(FOLDER)[("gateway.networking.k8s.io/v1", "HTTPRoute")]
    assert crds.problems(route, schema) == []
    del route["spec"]["rules"][0]["backendRefs"][0]["port"]
    assert any("port" in line.lower() for line in crds.problems(route, schema))


def test_a_pool_of_nobody_is_no_deployment() -> None:
    """As `diptych plan` writes it when disaggregation does not pay."""
    sizes = {"prefill": {"replicas": 0}, "decode": {"replicas": 2}}
    memory = {"requests": {"memory": "6Gi"}, "limits": {"memory": "6Gi"}}
    group = {"name": "all", "pods": 1, "resources": memory, "slots": {"decode": 2, "gateway": 1}}
    never = {"router": {"disaggregate": "never"}}
    text = render.render({"pools": sizes, "groups": [group], "config": never})
    assert validate.problems(text, FOLDER) == []
    assert "DecodeWorker" in text and "PrefillWorker" not in text


def test_resources_that_kubernetes_takes_are_right() -> None:
    """Storage may be promised twice; a device with a limit alone is requested as often."""
    requests = {"cpu": "2", "memory": "6Gi", "ephemeral-storage": "1Gi"}
    limits = {"memory": "6Gi", "ephemeral-storage": "2Gi", "nvidia.com/gpu": "1"}
    resources = {"requests": requests, "limits": limits}
    slots = {"prefill": 2, "decode": 2, "gateway": 1}
    group = {"name": "all", "pods": 1, "resources": resources, "slots": slots}
    assert validate.problems(render.render({"groups": [group]}), FOLDER) == []
    limits["ephemeral-storage"] = "1Mi"
    assert validate.problems(render.render({"groups": [group]}), FOLDER)
