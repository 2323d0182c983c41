"""Counts in a Serve config: nothing else changes, on Serve itself and in a RayService."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from diptych.cluster.applications import model_applications
from diptych.cluster.config import ClusterConfig
from diptych.cluster.control.kuberay import KubeRayPools
from diptych.cluster.control.serve import ScaleError, pool_observations, with_replica_counts
from diptych.cluster.launch.checkpoint import find_checkpoint
from diptych.cluster.launch.local_cluster import PreparedModel, serve_applications
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


def test_only_the_front_application_takes_clients_calls() -> None:
    schemas = [ServeApplicationSchema.model_validate(app) for app in APPS]
    assert [schema.route_prefix for schema in schemas[:2]] == ["/", None]


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
    assert seen["prefill"] == (4, ["r0", "r4"], ["r1", "r2"], ["r3"], "")
    assert seen["decode"].message == "no memory"
    assert pool_observations({"applications": {}}, MODEL)["decode"] == (0, [], [], [], "")


# ---- KubeRay -------------------------------------------------------------------------------------


class Kubernetes:
    """An API server with one RayService; `conflicts` patches find a newer version."""

    def __init__(self) -> None:
        self.version, self.conflicts, self.requests = 7, 0, list[tuple[str, str, dict]]()
        self.config: dict[str, Any] = {"proxy_location": "EveryNode", "applications": APPS}
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
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, http: BaseHTTPRequestHandler, patch: dict | None) -> None:
        assert http.path == "/apis/ray.io/v1/namespaces/pd/rayservices/serving"
        self.requests.append((http.command, http.headers["authorization"], patch or {}))
        code, body = self._do(patch, http.headers.get("content-type", ""))
        raw = json.dumps(body).encode()
        http.send_response(code)
        http.send_header("content-length", str(len(raw)))
        http.end_headers()
        http.wfile.write(raw)

    def _do(self, patch: dict | None, kind: str) -> tuple[int, dict]:
        if patch is None:
            spec = {"serveConfigV2": yaml.safe_dump(self.config)}
            return 200, {"metadata": {"resourceVersion": str(self.version)}, "spec": spec}
        assert kind == "application/merge-patch+json"
        if self.conflicts:
            self.conflicts -= 1
            self.version += 1
            return 409, {"message": "the object has been modified"}
        if patch["metadata"]["resourceVersion"] != str(self.version):
            return 409, {"message": "the object has been modified"}
        self.config = yaml.safe_load(patch["spec"]["serveConfigV2"])
        return 200, {}


@pytest.fixture
def kubernetes() -> Iterator[Kubernetes]:
    api = Kubernetes()
    yield api
    api.server.shutdown()
    api.server.server_close()


def rayservice(api: Kubernetes, folder: Path) -> KubeRayPools:
    (folder / "namespace").write_text("pd")
    (folder / "token").write_text("word\n")
    return KubeRayPools("serving", MODEL, folder, api.url)


def test_on_kuberay_the_rayservice_gets_the_counts(kubernetes: Kubernetes, tmp_path: Path) -> None:
    pools = rayservice(kubernetes, tmp_path)
    kubernetes.conflicts = 1
    before = copy.deepcopy(kubernetes.config)
    asyncio.run(pools.resize({"decode": 5}))
    changed = kubernetes.config
    counts = {one["name"]: one["num_replicas"] for one in changed["applications"][1]["deployments"]}
    assert counts == {"PrefillWorker": 1, "DecodeWorker": 5}
    before["applications"][1]["deployments"] = changed["applications"][1]["deployments"]
    assert changed == before, "nothing else is changed"
    assert [verb for verb, _, _ in kubernetes.requests] == ["GET", "PATCH", "GET", "PATCH"]
    assert {word for _, word, _ in kubernetes.requests} == {"Bearer word"}
    assert set(kubernetes.requests[-1][2]["spec"]) == {"serveConfigV2"}


def test_a_rayservice_that_others_keep_changing_is_given_up(
    kubernetes: Kubernetes, tmp_path: Path
) -> None:
    kubernetes.conflicts = 99
    with pytest.raises(ScaleError, match="changed by others"):
        asyncio.run(rayservice(kubernetes, tmp_path).resize({"decode": 5}))


def test_what_kubernetes_says_is_passed_on(
    kubernetes: Kubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "rayservices.ray.io is forbidden: User cannot get it"
    monkeypatch.setattr(kubernetes, "_do", lambda *_: (403, {"message": told}))
    with pytest.raises(ScaleError, match=r"refuses \(403\): rayservices.ray.io is forbidden"):
        asyncio.run(rayservice(kubernetes, tmp_path).resize({"decode": 5}))
