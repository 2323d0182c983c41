"""The builder that a Serve config file names: arguments in, application out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from diptych.cluster.app import SECRET, front_application, model_application
from diptych.cluster.config import ConfigError
from diptych.cluster.launch.ray_cluster import AUTH_MODE
from diptych.engine.demo import CHECKPOINT
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve._private.build_app import build_app


@pytest.fixture(autouse=True)
def ray_asks_for_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AUTH_MODE, "token")


def deployments(args: dict[str, Any], builder: Any = model_application) -> dict[str, Any]:
    """What Serve deploys for these arguments, by name; Serve's own steps, without a cluster."""
    app = call_user_app_builder_with_args_if_necessary(builder, args)
    built = build_app(app, name="diptych")
    return {deployment.name: deployment for deployment in built.deployments}


def test_the_arguments_reach_every_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    args = {"slo": {"ttft_ms": 321}, "pools": {"decode": {"tensor_parallel": 2}}, "secret": "s"}
    made = deployments(args)
    assert sorted(made) == ["DecodeWorker", "PrefillWorker", "Router"]
    front = deployments(args, front_application)
    assert sorted(front) == ["Control", "Gateway"]
    made |= front
    trees = {
        "Router": made["Router"].init_args[0],
        "Gateway": made["Gateway"].init_args[0],
        "Control": made["Control"].init_args[0],
        "PrefillWorker": made["PrefillWorker"].init_args[1],
        "DecodeWorker": made["DecodeWorker"].init_args[1],
    }
    for name, tree in trees.items():
        assert tree["slo"]["ttft_ms"] == 321 and tree["secret"] == "s", name
    assert [made[name].init_args[0] for name in ("PrefillWorker", "DecodeWorker")] == [
        "prefill",
        "decode",
    ]
    assert Path(made["PrefillWorker"].init_args[2]) == CHECKPOINT.resolve()
    config = made["DecodeWorker"]._replica_config
    assert len(config.placement_group_bundles) == 2


def test_one_gateway_stays_at_the_head_and_several_run_on_any_node() -> None:
    head = {"node:__internal_head__": 0.001}
    one = deployments({}, front_application)["Gateway"]
    assert one._deployment_config.num_replicas == 1
    assert one._replica_config.ray_actor_options["resources"] == head
    made = deployments({"gateway": {"replicas": 3}}, front_application)
    assert made["Gateway"]._deployment_config.num_replicas == 3
    assert not made["Gateway"]._replica_config.ray_actor_options.get("resources")
    assert made["Control"]._replica_config.ray_actor_options["resources"] == head


def test_serve_waits_longer_for_a_slow_gateway_than_for_a_worker() -> None:
    front, model = deployments({}, front_application), deployments({})
    waits = {
        name: deployment._deployment_config.health_check_timeout_s
        for name, deployment in {**front, **model}.items()
    }
    assert waits.pop("Gateway") >= 20
    assert set(waits.values()) == {5.0}


@pytest.mark.parametrize("replicas", [0, 65])
def test_the_number_of_gateways_is_bounded(replicas: int) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.replicas"):
        front_application({"gateway": {"replicas": replicas}})


def test_a_replica_on_gpus_sees_those_of_all_its_ranks() -> None:
    decode = {"tensor_parallel": 4, "engine": {"device": "cuda"}}
    args = {"pools": {"decode": decode}, "kv_transfer": {"transport": "nixl"}}
    config = deployments(args)["DecodeWorker"]._replica_config
    assert config.ray_actor_options["num_gpus"] == 4
    assert not config.placement_group_bundles


def test_the_secret_of_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "from the environment")
    made = deployments({"secret": "from a file"})
    assert made["Router"].init_args[0]["secret"] == "from the environment"


def test_a_model_that_is_too_large_for_this_machine_is_no_reason_to_refuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("diptych.cluster.launch.checkpoint.available_memory", lambda: 1)
    assert deployments({})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"slo": {"tfft_ms": 1}}, r"slo\.tfft_ms: extra inputs"),
        ({"model": {"path": "./missing"}}, "missing is not a folder"),
    ],
)
def test_wrong_arguments_are_refused_by_name(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_application(args)


def test_an_application_of_one_model_refuses_several_instead_of_serving_the_demo(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"set model, not models"):
        model_application({"models": {"a": str(tmp_path)}})
    assert deployments({"models": {"a": str(tmp_path)}}, front_application)


@pytest.mark.parametrize("mode", [None, "disabled", "tokens"])
def test_a_ray_that_asks_nobody_for_a_token_gets_no_application(
    monkeypatch: pytest.MonkeyPatch, mode: str | None
) -> None:
    if mode is None:
        monkeypatch.delenv(AUTH_MODE)
    else:
        monkeypatch.setenv(AUTH_MODE, mode)
    for builder in (front_application, model_application):
        with pytest.raises(ConfigError, match="RAY_AUTH_MODE=token"):
            builder({})
        assert deployments({"ray": {"auth": "disabled"}}, builder)
