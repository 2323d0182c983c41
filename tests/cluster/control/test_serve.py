"""Counts in a Serve config, and orders in a RayService: nothing else changes."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from diptych.cluster.applications import model_applications
from diptych.cluster.config import ClusterConfig
from diptych.cluster.control.autopilot import planner_config
from diptych.cluster.control.kuberay import KubeRayPools
from diptych.cluster.control.kubernetes import KubernetesApi
from diptych.cluster.control.operations import Operations
from diptych.cluster.control.rayservice import SCALED_ANNOTATION, VALUES_ANNOTATION
from diptych.cluster.control.serve import (
    PoolObservation,
    ScaleError,
    pool_observations,
    with_replica_counts,
    with_values_replicas,
)
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.launch.checkpoint import find_checkpoint
from diptych.cluster.launch.local_cluster import PreparedModel, serve_applications
from diptych.cluster.telemetry import ControlTally
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve.schema import ServeApplicationSchema

CONFIG = ClusterConfig()
OTHER_APP = {"name": "other", "import_path": "a:b"}
FRONT, MODEL = "diptych", "diptych-model"


def applications_of(config: ClusterConfig) -> list[dict[str, Any]]:
    return serve_applications(config, [PreparedModel(MODEL, config, find_checkpoint(config))])


APPS = [*applications_of(CONFIG), OTHER_APP]


def code(application: dict[str, Any]) -> str:
    """Serve restarts replicas when this changes."""
    return get_app_code_version(ServeApplicationSchema.model_validate(application))


def test_other_counts_are_the_same_code_to_serve() -> None:
    before = copy.deepcopy(APPS)
    changed = with_replica_counts(APPS, MODEL, {"prefill": 3, "decode": 2})
    assert before == APPS, "the given configs are not touched"
    assert [app["name"] for app in changed] == [FRONT, MODEL, "other"]
    assert changed[0] == APPS[0] and changed[2] == APPS[2]
    assert code(changed[1]) == code(APPS[1])
    counts = {one["name"]: one["num_replicas"] for one in changed[1]["deployments"]}
    assert counts == {"PrefillWorker": 3, "DecodeWorker": 2}
    again = {**APPS[1], "args": {**APPS[1]["args"], "silence_s": 4.0}}
    assert code(again) != code(APPS[1]), "or this test can not fail"


def test_another_model_changes_nothing_of_the_front_application() -> None:
    other = ClusterConfig.model_validate(
        {"model": {"name": "other"}, "slo": {"ttft_ms": 7}, "pools": {"decode": {"replicas": 3}}}
    )
    front, model = applications_of(other)
    assert code(front) == code(APPS[0]) and code(model) != code(APPS[1])


def routes(config: ClusterConfig) -> list[str | None]:
    schemas = [ServeApplicationSchema.model_validate(app) for app in applications_of(config)]
    return [schema.route_prefix for schema in schemas]


def test_only_the_front_application_takes_clients_calls() -> None:
    """And only where Serve's proxies take them: else the route is free for others."""
    by_proxies = ClusterConfig.model_validate({"gateway": {"listen": "serve"}})
    assert routes(by_proxies) == ["/", None]
    assert routes(ClusterConfig()) == [None, None]


def test_the_models_are_the_applications_that_our_builder_makes() -> None:
    details = {
        "applications": {
            app["name"]: {"deployed_app_config": app, "deployments": {}} for app in reversed(APPS)
        }
        | {"by serve.run": {"deployments": {}}}
    }
    (found,) = model_applications(details)
    assert found.name == MODEL and found.args["model"]["name"] == "demo"
    config = ClusterConfig().with_model(ClusterConfig.model_validate(found.args))
    assert config.model.path == str(find_checkpoint(CONFIG).folder)


def test_the_secret_is_in_no_config() -> None:
    assert CONFIG.secret and CONFIG.secret not in json.dumps(APPS)


def test_a_pool_that_the_config_does_not_name_is_added() -> None:
    applications = [{"name": MODEL, "import_path": "a:b"}]
    (changed,) = with_replica_counts(applications, MODEL, {"decode": 2})
    assert changed["deployments"] == [{"name": "DecodeWorker", "num_replicas": 2}]


def test_without_the_application_there_is_nothing_to_scale() -> None:
    with pytest.raises(ScaleError, match="no application 'diptych-x'"):
        with_replica_counts(APPS, "diptych-x", {"decode": 2})


def test_replicas_are_sorted_by_what_serve_says_of_them() -> None:
    states = ["RUNNING", "STARTING", "UPDATING", "STOPPING", "RUNNING"]
    replicas = [{"replica_id": f"r{n}", "state": state} for n, state in enumerate(states)]
    worker = {"replicas": replicas, "target_num_replicas": 4, "status": "UPDATING", "message": ""}
    broken = {**worker, "replicas": [], "status": "UNHEALTHY", "message": "Trace\n  no memory\n"}
    deployments = {"PrefillWorker": worker, "DecodeWorker": broken}
    seen = pool_observations({"applications": {MODEL: {"deployments": deployments}}}, MODEL)
    assert seen["prefill"] == PoolObservation(4, ["r0", "r4"], ["r1", "r2"], ["r3"], "")
    assert seen["decode"].message == "no memory"
    assert pool_observations({"applications": {}}, MODEL)["decode"] == PoolObservation(
        0, [], [], [], ""
    )


def test_a_replica_on_a_draining_node_serves_until_its_successor_runs() -> None:
    replicas = [
        {"replica_id": "r0", "state": "RUNNING"},
        {"replica_id": "r1", "state": "PENDING_MIGRATION"},
        {"replica_id": "r2", "state": "STARTING"},
    ]
    worker = {"replicas": replicas, "target_num_replicas": 2, "status": "UPDATING", "message": ""}
    seen = pool_observations(
        {"applications": {MODEL: {"deployments": {"DecodeWorker": worker}}}}, MODEL
    )
    assert seen["decode"] == PoolObservation(2, ["r0", "r1"], ["r2"], [], "")


# ---- KubeRay -------------------------------------------------------------------------------------


class Kubernetes:
    """An API server with a RayService and its Ray cluster; `conflicts` patches find a newer version."""

    def __init__(self) -> None:
        self.version, self.conflicts, self.requests = 7, 0, list[tuple[str, str, Any]]()
        self.annotations = {VALUES_ANNOTATION: json.dumps({"prefill": 1, "decode": 2})}
        group = {"groupName": "all", "replicas": 2, "resources": {"prefill": "1", "decode": "3"}}
        self.groups = [group]
        self.cluster = [{**group, "minReplicas": 2, "maxReplicas": 2}]
        self.status: dict[str, Any] = {}
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                api.answer(self, None)

            def do_PATCH(self) -> None:
                size = int(self.headers["content-length"])
                api.answer(self, json.loads(self.rfile.read(size)))

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, http: BaseHTTPRequestHandler, patch: Any) -> None:
        self.requests.append((http.command, http.headers["authorization"], patch))
        code, body = self._do(http.path, patch, http.headers.get("content-type", ""))
        raw = json.dumps(body).encode()
        http.send_response(code)
        http.send_header("content-length", str(len(raw)))
        http.end_headers()
        http.wfile.write(raw)

    def _do(self, path: str, patch: Any, kind: str) -> tuple[int, dict]:
        path, _, query = path.partition("?")
        if path == "/apis/ray.io/v1/namespaces/pd/rayclusters/serving-x1":
            return self._do_cluster(patch, kind)
        assert path == "/apis/ray.io/v1/namespaces/pd/rayservices/serving"
        if patch is None:
            metadata = {"name": "serving", "resourceVersion": str(self.version)}
            metadata |= {"annotations": self.annotations}
            spec = {"rayClusterConfig": {"workerGroupSpecs": self.groups}}
            return 200, {"metadata": metadata, "spec": spec, "status": self.status}
        assert kind == "application/apply-patch+yaml"
        assert "fieldManager=diptych-control" in query
        if self.conflicts:
            self.conflicts -= 1
            self.version += 1
            return 409, {"message": "the object has been modified"}
        if patch["metadata"]["resourceVersion"] != str(self.version):
            return 409, {"message": "the object has been modified"}
        self.annotations |= patch["metadata"]["annotations"]
        return 200, {}

    def _do_cluster(self, patch: Any, kind: str) -> tuple[int, dict]:
        if patch is None:
            status = {"readyWorkerReplicas": 2}
            return 200, {"spec": {"workerGroupSpecs": self.cluster}, "status": status}
        assert kind == "application/json-patch+json"
        for operation in patch:
            *_, index, field = operation["path"].split("/")
            if operation["op"] == "test":
                assert self.cluster[int(index)][field] == operation["value"]
            else:
                self.cluster[int(index)][field] = operation["value"]
        return 200, {}


class FakeServe:
    """Serve's pools, which have the size that was set last."""

    def __init__(self) -> None:
        self.targets = {"prefill": 1, "decode": 2}

    async def observe(self) -> dict[str, PoolObservation]:
        return {
            name: PoolObservation(target=target, running=["r0"], starting=[], stopping=[])
            for name, target in self.targets.items()
        }

    async def resize(self, counts: dict[str, int]) -> None:
        self.targets |= counts

    async def check(self, counts: dict[str, int]) -> None: ...


@pytest.fixture
def kubernetes() -> Iterator[Kubernetes]:
    api = Kubernetes()
    yield api
    api.server.shutdown()
    api.server.server_close()


@pytest.fixture
def serve() -> FakeServe:
    return FakeServe()


@pytest.fixture
def pools(
    kubernetes: Kubernetes, serve: FakeServe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> KubeRayPools:
    (tmp_path / "namespace").write_text("pd")
    (tmp_path / "token").write_text("word\n")
    monkeypatch.setenv("RAY_CLUSTER_NAME", "serving-x1")
    return KubeRayPools("serving", MODEL, tmp_path, kubernetes.url, serve_pools=serve)


def test_on_kuberay_an_order_is_an_annotation_of_control_alone(
    kubernetes: Kubernetes, serve: FakeServe, pools: KubeRayPools
) -> None:
    kubernetes.conflicts = 1
    asyncio.run(pools.resize({"decode": 5}))
    order = json.loads(kubernetes.annotations[SCALED_ANNOTATION])
    assert order == {"decode": {"replicas": 5, "insteadOf": 2}}
    assert serve.targets == {"prefill": 1, "decode": 5}, "at once, not at the next look"
    assert [verb for verb, _, _ in kubernetes.requests] == ["GET", "PATCH", "GET", "PATCH"]
    assert {word for _, word, _ in kubernetes.requests} == {"Bearer word"}
    applied = kubernetes.requests[-1][2]
    assert set(applied) == {"apiVersion", "kind", "metadata"}, "Helm owns the rest"
    assert set(applied["metadata"]["annotations"]) == {SCALED_ANNOTATION}


def test_more_replicas_than_slots_are_refused_with_their_number(
    kubernetes: Kubernetes, serve: FakeServe, pools: KubeRayPools
) -> None:
    with pytest.raises(ScaleError, match=r"decode=9: the fleet has 6 slots of this kind; .*pods"):
        asyncio.run(pools.resize({"decode": 9}))
    with pytest.raises(ScaleError, match="decode=9: the fleet has 6 slots"):
        asyncio.run(pools.check({"decode": 9}))
    asyncio.run(pools.check({"decode": 6}))
    assert {verb for verb, _, _ in kubernetes.requests} == {"GET"}, "a check writes nothing"
    assert SCALED_ANNOTATION not in kubernetes.annotations
    assert serve.targets["decode"] == 2


def follow(pools: KubeRayPools) -> list[tuple[str, str]]:
    """Look once, and return what was done."""
    actions: list[tuple[str, str]] = []
    asyncio.run(pools.follow_once(lambda what, about: actions.append((what, about))))
    return actions


@pytest.mark.parametrize(
    ("values", "allowed", "refused"),
    [(4, {4, 5}, {3, 1}), (2, {2, 3}, {1}), (100, {99, 100}, {101, 1})],
)
def test_on_kuberay_the_values_counts_are_those_that_a_pool_was_started_with(
    kubernetes: Kubernetes, pools: KubeRayPools, values: int, allowed: set[int], refused: set[int]
) -> None:
    config = ClusterConfig.model_validate({"pools": {"prefill": {"min_replicas": 4}}})
    kubernetes.annotations[VALUES_ANNOTATION] = json.dumps({"prefill": values, "decode": 2})
    kubernetes.groups[0]["resources"] = {"prefill": "200", "decode": "200"}

    async def run() -> None:
        await pools.follow_once(lambda *_: None)
        plane: Any = SimpleNamespace()
        operations = Operations(config, plane=plane, pool_scaler=pools, tally=ControlTally())
        for count in sorted(allowed):
            await operations.scale({"prefill": count}, dry_run=True)
        for count in sorted(refused):
            with pytest.raises(ApiError, match=f"prefill={count}: the configuration allows"):
                await operations.scale({"prefill": count}, dry_run=True)
        started = with_values_replicas(config, await pools.observe())
        bounds = planner_config(started).pools["prefill"]
        assert (bounds.minimum, bounds.limit) == (min(4, values), max(64, values))

    asyncio.run(run())


def test_an_order_outlives_what_the_operator_puts_to_serve(
    serve: FakeServe, pools: KubeRayPools
) -> None:
    asyncio.run(pools.resize({"decode": 5}))
    serve.targets["decode"] = 2  # the operator put the chart's text again
    assert follow(pools) == [("scale", "decode=5, as RayService serving says")]
    assert serve.targets == {"prefill": 1, "decode": 5}
    assert follow(pools) == []


def test_another_count_in_the_values_ends_the_order(
    kubernetes: Kubernetes, serve: FakeServe, pools: KubeRayPools
) -> None:
    asyncio.run(pools.resize({"decode": 5}))
    kubernetes.annotations[VALUES_ANNOTATION] = json.dumps({"prefill": 1, "decode": 3})
    follow(pools)
    assert serve.targets["decode"] == 3
    asyncio.run(pools.resize({"prefill": 2}))
    orders = json.loads(kubernetes.annotations[SCALED_ANNOTATION])
    assert set(orders) == {"prefill"}, "the order that has ended is forgotten"


def test_an_order_that_has_ended_does_not_come_back_with_the_old_values(
    kubernetes: Kubernetes, serve: FakeServe, pools: KubeRayPools
) -> None:
    asyncio.run(pools.resize({"prefill": 2, "decode": 5}))
    kubernetes.annotations[VALUES_ANNOTATION] = json.dumps({"prefill": 1, "decode": 3})
    follow(pools)
    assert serve.targets == {"prefill": 2, "decode": 3}
    orders = json.loads(kubernetes.annotations[SCALED_ANNOTATION])
    assert orders == {"prefill": {"replicas": 2, "insteadOf": 1}}, "orders in force stay"

    kubernetes.annotations[VALUES_ANNOTATION] = json.dumps({"prefill": 1, "decode": 2})
    follow(pools)
    assert serve.targets == {"prefill": 2, "decode": 2}
    kubernetes.requests.clear()
    follow(pools)
    assert {verb for verb, _, _ in kubernetes.requests} == {"GET"}, "nothing is left to forget"


def test_an_ended_order_is_forgotten_at_a_later_look_if_others_change_the_rayservice(
    kubernetes: Kubernetes, serve: FakeServe, pools: KubeRayPools
) -> None:
    asyncio.run(pools.resize({"decode": 5}))
    kubernetes.annotations[VALUES_ANNOTATION] = json.dumps({"prefill": 1, "decode": 3})
    kubernetes.conflicts = 1
    follow(pools)
    assert serve.targets["decode"] == 3, "the counts are followed all the same"
    assert json.loads(kubernetes.annotations[SCALED_ANNOTATION])
    follow(pools)
    assert json.loads(kubernetes.annotations[SCALED_ANNOTATION]) == {}


def test_a_look_does_not_take_back_an_order_that_comes_meanwhile(
    serve: FakeServe, pools: KubeRayPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read of the RayService is older than the order."""
    actions: list[str] = []

    async def order_between() -> None:
        is_read, observe = asyncio.Event(), serve.observe

        async def observe_late() -> Any:
            is_read.set()
            await asyncio.sleep(0.2)
            return await observe()

        monkeypatch.setattr(serve, "observe", observe_late)
        look = asyncio.create_task(pools.follow_once(lambda what, about: actions.append(about)))
        await is_read.wait()
        await asyncio.gather(look, pools.resize({"decode": 5}))

    asyncio.run(order_between())
    assert serve.targets["decode"] == 5 and actions == []


def test_a_model_that_is_not_deployed_yet_is_left_alone(
    serve: FakeServe, pools: KubeRayPools
) -> None:
    serve.targets = {"prefill": 0, "decode": 0}
    assert follow(pools) == []
    assert serve.targets == {"prefill": 0, "decode": 0}


def test_the_ray_cluster_gets_the_pods_that_the_rayservice_has(
    kubernetes: Kubernetes, pools: KubeRayPools
) -> None:
    kubernetes.groups = [{**kubernetes.groups[0], "replicas": 4}]
    assert follow(pools) == [("pods", "all 2 -> 4")]
    (group,) = kubernetes.cluster
    assert {group["replicas"], group["minReplicas"], group["maxReplicas"]} == {4}
    assert follow(pools) == []
    lacking = asyncio.run(pools.observe())["decode"]
    assert lacking.message.startswith("2 of 4 pods are ready")


def test_the_pods_of_a_cluster_that_is_replaced_are_left_alone(
    kubernetes: Kubernetes, pools: KubeRayPools
) -> None:
    kubernetes.groups = [{**kubernetes.groups[0], "replicas": 4}]
    kubernetes.status = {"pendingServiceStatus": {"rayClusterName": "serving-x2"}}
    assert follow(pools) == []
    assert kubernetes.cluster[0]["replicas"] == 2


def test_a_rayservice_that_others_keep_changing_is_given_up(
    kubernetes: Kubernetes, pools: KubeRayPools
) -> None:
    kubernetes.conflicts = 99
    with pytest.raises(ScaleError, match="changed by others"):
        asyncio.run(pools.resize({"decode": 5}))


def test_a_rayservice_of_an_older_chart_is_named(
    kubernetes: Kubernetes, pools: KubeRayPools
) -> None:
    kubernetes.annotations = {}
    with pytest.raises(ScaleError, match="an older chart made it; helm upgrade first"):
        asyncio.run(pools.resize({"decode": 5}))


def test_what_kubernetes_says_is_passed_on(
    kubernetes: Kubernetes, pools: KubeRayPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "rayservices.ray.io is forbidden: User cannot get it"
    monkeypatch.setattr(kubernetes, "_do", lambda *_: (403, {"message": message}))
    with pytest.raises(ScaleError, match=r"refuses \(403\): rayservices.ray.io is forbidden"):
        asyncio.run(pools.resize({"decode": 5}))


@pytest.mark.parametrize(
    ("host", "url"),
    [("10.96.0.1", "https://10.96.0.1:6443"), ("fd00:10:96::1", "https://[fd00:10:96::1]:6443")],
)
def test_the_api_server_is_the_one_of_the_pod_and_asked_without_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, url: str
) -> None:
    """httpx knows no CIDR in NO_PROXY, by which the pod's other programs leave a proxy out."""
    (tmp_path / "token").write_text("word")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    client = KubernetesApi(tmp_path).client()
    assert str(client.base_url) == url
    assert client._mounts == {}, "no proxy"
