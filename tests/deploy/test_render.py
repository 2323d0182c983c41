"""The chart: generated files are current, values are typed, what cannot fit is refused."""

from __future__ import annotations

import copy
import re
import tomllib
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from diptych.cluster import app
from diptych.cluster.applications import (
    FRONT_APPLICATION,
    FRONT_BUILDER,
    MODEL_BUILDER,
    ONLY_MODEL_SLUG,
    model_application_name,
)
from diptych.cluster.config import ClusterConfig
from diptych.cluster.control.rayservice import VALUES_ANNOTATION
from diptych.cluster.launch.ray_cluster import LOST_HEAD_ENVIRONMENT

from deploy import manifests, render, validate, values

ROOT = Path(__file__).parents[2]
FLEETS = sorted(render.FLEETS.glob("*.yaml"))
FOLDER = validate.crd_folder()


def fleet(name: str) -> dict[str, Any]:
    return yaml.safe_load((render.FLEETS / f"{name}.yaml").read_text())


def service(text: str) -> dict[str, Any]:
    return next(
        d for d in yaml.load_all(text, Loader=yaml.CSafeLoader) if d["kind"] == "RayService"
    )


def test_rendering_again_gives_the_same_bytes() -> None:
    made = render.generated()
    assert {path for path in made if path.parent == render.RENDERED} == set(
        render.RENDERED.glob("*.yaml")
    )
    stale = [path.name for path, text in made.items() if path.read_text() != text]
    assert not stale, "run .venv/bin/python deploy/render.py"


@pytest.mark.parametrize("path", FLEETS, ids=lambda path: path.stem)
def test_helm_lints_every_fleet(path: Path) -> None:
    told = helm_python.lint(str(render.CHART), yaml.safe_load(path.read_text()), strict=True)
    assert told["errors"] == []
    assert [m for m in told["messages"] if m["severity"] > 1] == []


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ({"config": {"slo": {"tfft_ms": 1}}}, "tfft_ms"),
        ({"config": {"router": {"disaggregate": "sometimes"}}}, "disaggregate"),
        ({"config": {"secret": "in the open"}}, "secret"),
        ({"config": {"gateway": {"http_port": 80}}}, "http_port"),
        ({"config": {"ray": {"auth": "disabled"}}}, "ray"),
        ({"ray": {"auth": "off"}}, "auth"),
        ({"config": {"pools": {"decode": {"replicas": 2}}}}, "replicas"),
        ({"groups": []}, "groups"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"pool": {}}, "pool"),
        ({"head": {"faultTolerance": {"redisAddress": "valkey"}}}, "redisAddress"),
        ({"head": {"faultTolerance": {"redisPasswordSecret": "valkey"}}}, "no redisAddress"),
    ],
)
def test_values_are_typed_by_the_configuration(override: dict[str, Any], told: str) -> None:
    with pytest.raises(helm_python.HelmError, match=told):
        render.render(override)


def groups_of(**changes: Any) -> list[dict[str, Any]]:
    """The values' only group, changed."""
    memory = {"requests": {"memory": "6Gi"}, "limits": {"memory": "6Gi"}}
    slots = {"prefill": 1, "decode": 1, "gateway": 1}
    return [{"name": "all", "pods": 1, "slots": slots, "resources": memory, **changes}]


def container_of(text: str) -> dict[str, Any]:
    """The container of the first group's pod."""
    (group, *_) = service(text)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return group["template"]["spec"]["containers"][0]


def test_a_node_of_its_own_comes_beside_the_affinity_of_the_values() -> None:
    term = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": "noisy"}}}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    preferred = [{"weight": 1, "podAffinityTerm": term}]
    apart = {required: [term], "preferredDuringSchedulingIgnoredDuringExecution": preferred}
    affinity = {"podAntiAffinity": apart}
    text = render.render({"groups": groups_of(affinity=affinity, ownNode=True)})
    (group,) = service(text)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    made = group["template"]["spec"]["affinity"]["podAntiAffinity"]
    theirs, own = made.pop(required)
    assert theirs == term and own["topologyKey"] == "kubernetes.io/hostname"
    assert own["labelSelector"]["matchLabels"]["app.kubernetes.io/part-of"] == "diptych"
    assert made == {"preferredDuringSchedulingIgnoredDuringExecution": preferred}
    assert validate.problems(text, FOLDER) == []


def test_a_group_s_variable_replaces_the_chart_s_own() -> None:
    env = {"OMP_NUM_THREADS": "4", "RAY_LOG_TO_STDERR": "0", "MINE": "x"}
    text = render.render({"groups": groups_of(env=env)})
    entries = [(entry["name"], entry.get("value")) for entry in container_of(text)["env"]]
    assert {name: value for name, value in entries if name in env} == env
    assert len(entries) == len(dict(entries)), "each name once, or the API server refuses the pod"
    assert validate.problems(text, FOLDER) == []


@pytest.mark.parametrize("name", ["DIPTYCH_SECRET", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"])
def test_a_group_may_not_have_words_of_its_own(name: str) -> None:
    with pytest.raises(helm_python.HelmRenderError, match=f"may not have {name}"):
        render.render({"groups": groups_of(env={name: "x"})})


@pytest.mark.parametrize(
    ("amount", "allowed"),
    [("64Ki", True), ("64k", True), ("1.5Gi", True), ("64ki", False), ("64K", False)],
)
def test_amounts_are_those_that_kubernetes_knows(amount: str, allowed: bool) -> None:
    resources = {"requests": {"memory": amount}, "limits": {"memory": amount}}
    chosen = {"groups": groups_of(resources=resources)}
    if allowed:
        assert container_of(render.render(chosen))["resources"] == resources
    else:
        with pytest.raises(helm_python.HelmError, match="memory"):
            render.render(chosen)


@pytest.mark.parametrize("name", ["head", "all"])
def test_groups_have_names_of_their_own(name: str) -> None:
    with pytest.raises(helm_python.HelmRenderError, match=f"{name} is taken"):
        render.render({"groups": [*groups_of(), *groups_of(name=name)]})


def test_every_field_of_the_configuration_is_a_value_or_decided_elsewhere() -> None:
    fields = ClusterConfig.model_json_schema()
    sections = {"ClusterConfig": fields, **fields["$defs"]}
    made = values.schema()["$defs"]
    gone = {
        f"{name}.{field}"
        for name, section in sections.items()
        for field in section["properties"].keys() - made[name]["properties"].keys()
    }
    assert gone == values.DECIDED_ELSEWHERE.keys()


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_a_pool_that_finds_no_home_is_refused(pool: str) -> None:
    chosen = fleet("h100-ib")
    chosen["pools"][pool]["replicas"] += 1
    with pytest.raises(helm_python.HelmRenderError, match=f"17 {pool} replicas want a home"):
        render.render(chosen)


def test_a_pool_grows_without_a_change_of_what_restarts_the_others() -> None:
    """Serve restarts everything when import path or arguments change, KubeRay makes a new cluster
    when pods change; neither when counts do. Control carries those of pods over."""
    before = fleet("h100-ib")
    after = copy.deepcopy(before)
    after["pools"]["prefill"]["replicas"], after["groups"][0]["pods"] = 24, 3
    old, new = (service(render.render(chosen)) for chosen in (before, after))
    serve_old, serve_new = (yaml.safe_load(s["spec"]["serveConfigV2"]) for s in (old, new))
    args_old, args_new = (
        [application["args"] for application in config["applications"]]
        for config in (serve_old, serve_new)
    )
    assert args_new == args_old and all(args_new)
    for one in old, new:
        del one["spec"]["serveConfigV2"], one["metadata"]["annotations"]
        for group in one["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
            del group["replicas"], group["minReplicas"], group["maxReplicas"]
    assert new == old


def test_keys_of_clients_are_where_gateways_may_run_and_nowhere_else() -> None:
    chosen = fleet("h200-b200-mixed")
    chosen["gateway"] = {**chosen["gateway"], "keysSecret": "acme-keys"}
    text = render.render(chosen)
    made = service(text)
    args = yaml.safe_load(made["spec"]["serveConfigV2"])["applications"][0]["args"]
    file = args["gateway"]["api_keys_file"]
    assert ClusterConfig.model_validate(args).gateway.api_keys_file == file
    found = {}
    for group in made["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        mounts = {m["name"]: m["mountPath"] for m in pod["containers"][0].get("volumeMounts", [])}
        volumes = {v["name"]: v for v in pod.get("volumes", [])}
        if "keys" in mounts:
            secret = volumes["keys"]["secret"]
            assert secret["secretName"] == "acme-keys"
            assert file == f"{mounts['keys']}/{secret['items'][0]['path']}"
        found["gateway" in group["resources"]] = "keys" in mounts
    assert found == {True: True, False: False}
    assert validate.problems(text, FOLDER) == []
    damaged = text.replace("mountPath: /etc/diptych/keys", "mountPath: /etc/keys")
    assert any("clients' keys" in one for one in validate.problems(damaged, FOLDER))


def test_ray_asks_for_a_token_unless_the_values_say_otherwise() -> None:
    open_to_all = render.render({**fleet("cpu-kind"), "ray": {"auth": "disabled"}})
    cluster = service(open_to_all)["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "disabled"}
    config = yaml.safe_load(service(open_to_all)["spec"]["serveConfigV2"])
    for application in config["applications"]:
        assert application["args"]["ray"] == {"auth": "disabled"}
    assert validate.problems(open_to_all, FOLDER) == []


def test_ranks_of_a_replica_share_its_bundles() -> None:
    chosen = fleet("one-node-8gpu")
    chosen["config"]["pools"]["decode"]["tensor_parallel"] = 4
    chosen["pools"]["decode"] = {"replicas": 1, "gpus": 4}
    text = service(render.render(chosen))["spec"]["serveConfigV2"]
    deployments = {d["name"]: d for d in yaml.safe_load(text)["applications"][1]["deployments"]}
    bundles = deployments["DecodeWorker"]["placement_group_bundles"]
    assert bundles == [{"CPU": 0.01, "decode": 1, "GPU": 4}, *[{"CPU": 0.01}] * 3]
    assert "placement_group_bundles" not in deployments["PrefillWorker"]


def test_workers_that_host_vllm_run_in_vllm_s_environment() -> None:
    """Serve takes the config's options of an actor instead of the builder's, and merges nothing."""
    engine = {"kind": "vllm", "python": "/opt/vllm/bin/python"}
    pools = {"decode": {"engine": {"threads": 3}}}
    transfer = {"transport": "tcp"}
    text = render.render({"config": {"engine": engine, "pools": pools, "kv_transfer": transfer}})
    applications = yaml.safe_load(service(text)["spec"]["serveConfigV2"])["applications"]
    environments = {
        deployment["name"]: deployment["ray_actor_options"].get("runtime_env")
        for application in applications
        for deployment in application["deployments"]
    }
    python = "/opt/vllm/bin/python"
    assert environments == {
        "Gateway": None,
        "Router": None,
        "PrefillWorker": {"env_vars": {"OMP_NUM_THREADS": "1"}, "py_executable": python},
        "DecodeWorker": {"env_vars": {"OMP_NUM_THREADS": "3"}, "py_executable": python},
    }
    assert validate.problems(text, FOLDER) == []
    (problem,) = validate.problems(text.replace('"OMP_NUM_THREADS":"3"', ""), FOLDER)
    assert "DecodeWorker has runtime_env" in problem


def test_versions_and_constants_agree_with_the_code() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((render.CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == project["version"]
    made = service((render.RENDERED / "cpu-kind.yaml").read_text())
    ray = next(d for d in project["dependencies"] if d.startswith("ray["))
    assert made["spec"]["rayClusterConfig"]["rayVersion"] == ray.split("==")[1]
    text = made["spec"]["serveConfigV2"]
    assert set(re.findall(r"num_cpus: (\S+)", text)) == {str(app.ACTOR_CPUS)}
    applications = yaml.safe_load(text)["applications"]
    assert [(one["name"], one["import_path"], one["route_prefix"]) for one in applications] == [
        (FRONT_APPLICATION, FRONT_BUILDER, "/"),
        (model_application_name(ONLY_MODEL_SLUG), MODEL_BUILDER, None),
    ]
    env = made["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert app.SECRET in [entry["name"] for entry in env["env"]]


# ---- gateways ------------------------------------------------------------------------------------


def two_gateways() -> str:
    chosen = fleet("cpu-kind")
    resources = {"requests": {"cpu": "2", "memory": "6Gi"}, "limits": {"memory": "6Gi"}}
    chosen["gateway"] = {"replicas": 2, "listen": "gateway"}
    chosen["groups"] = [
        {"name": "front", "pods": 2, "slots": {"gateway": 1}, "resources": resources},
        {"name": "work", "pods": 1, "slots": {"prefill": 1, "decode": 1}, "resources": resources},
    ]
    return render.render(chosen)


def test_gateways_on_their_own_sockets_stand_behind_a_service_when_ready() -> None:
    text = two_gateways()
    documents = [document for document in yaml.safe_load_all(text) if document]
    (endpoint,) = [document for document in documents if document["kind"] == "Service"]
    assert {port["port"]: port["targetPort"] for port in endpoint["spec"]["ports"]} == {
        8000: "serve",
        9000: "serve-grpc",
    }
    groups = service(text)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    picked = {
        group["groupName"]
        for group in groups
        if endpoint["spec"]["selector"].items() <= group["template"]["metadata"]["labels"].items()
    }
    assert picked == {"front"}
    probes = {
        group["groupName"]: group["template"]["spec"]["containers"][0]["readinessProbe"]["exec"]
        for group in groups
    }
    assert "http://localhost:8000/ready" in probes["front"]["command"][-1]
    assert ":8000" not in probes["work"]["command"][-1]
    if FOLDER is not None:
        assert validate.problems(text, FOLDER) == []


def test_gateways_on_their_own_sockets_have_no_proxy_in_the_way() -> None:
    config = yaml.safe_load(service(two_gateways())["spec"]["serveConfigV2"])
    assert config["proxy_location"] == "Disabled"
    settings = ClusterConfig.model_validate(config["applications"][0]["args"]).gateway
    assert (settings.listen, settings.host, settings.http_port) == ("gateway", "0.0.0.0", 8000)
    assert "diptych-gateway.diptych.svc" in (settings.hosts or ())
    assert "diptych-serve-svc" in (settings.hosts or ())


# ---- budgets and orders --------------------------------------------------------------------------


def test_budgets_count_what_must_stay_for_the_head_and_each_group() -> None:
    chosen = fleet("h100-ib")
    budgets = {
        document["metadata"]["name"]: document["spec"]["minAvailable"]
        for document in yaml.safe_load_all(render.render(chosen))
        if document and document["kind"] == "PodDisruptionBudget"
    }
    expected = {f"diptych-{group['name']}": group["pods"] - 1 for group in chosen["groups"]}
    assert budgets == expected | {"diptych-head": 1}
    chosen["head"] = {"evictable": True}
    budgets = {
        document["metadata"]["name"]: document["spec"]["minAvailable"]
        for document in yaml.safe_load_all(render.render(chosen))
        if document and document["kind"] == "PodDisruptionBudget"
    }
    assert budgets["diptych-head"] == 0


@pytest.mark.parametrize("secret", ["", "valkey"])
def test_what_the_head_knows_is_kept_where_the_values_say(secret: str) -> None:
    chosen = fleet("h100-ib")
    assert (
        "gcsFaultToleranceOptions" not in service(render.render(chosen))["spec"]["rayClusterConfig"]
    )
    chosen["head"]["faultTolerance"] = {
        "redisAddress": "valkey.valkey:6379",
        "redisPasswordSecret": secret,
    }
    text = render.render(chosen)
    kept = service(text)["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert kept["redisAddress"] == "valkey.valkey:6379"
    password = {"valueFrom": {"secretKeyRef": {"name": "valkey", "key": "password"}}}
    assert kept.get("redisPassword") == (password if secret else None)
    assert validate.problems(text, FOLDER) == []
    for template in manifests.templates(service(text)).values():
        variables = manifests.container_of(template)["env"]
        environment = {one["name"]: one.get("value") for one in variables}
        assert environment.items() >= LOST_HEAD_ENVIRONMENT.items()


def test_the_values_counts_stand_beside_what_is_rendered_of_them() -> None:
    chosen = fleet("h100-ib")
    made = service(render.render(chosen))
    counts = yaml.safe_load(made["metadata"]["annotations"][VALUES_ANNOTATION])
    sizes = {pool: size["replicas"] for pool, size in chosen["pools"].items()}
    assert counts == sizes
