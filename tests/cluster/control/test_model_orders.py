"""Models that operators add and remove: what Serve is told, and what is refused."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from diptych.cluster import model_watch
from diptych.cluster.applications import ModelApplication, model_applications
from diptych.cluster.config import ClusterConfig, ConfigError
from diptych.cluster.control import model_orders
from diptych.cluster.control.cluster_operations import ClusterOperations
from diptych.cluster.control.model_orders import ModelOrders
from diptych.cluster.control.serve import ScaleError, with_application, with_leaving
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.launch.checkpoint import find_checkpoint
from diptych.cluster.launch.local_cluster import PreparedModel, serve_applications
from diptych.cluster.model_watch import ModelWatch
from diptych.engine.demo import CHECKPOINT
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve.schema import ServeApplicationSchema

from tests.support.adapters import make_adapter

CONFIG = ClusterConfig.model_validate(
    {"models": {"one": None, "two": {"model": {"served_names": ["zwei"]}}}}
)


class Controlled:
    """A model of Control, whose router says which gateways are connected."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.application_name = f"diptych-{name}"
        self.operations = SimpleNamespace(config=CONFIG.of_model(name), is_leaving=False)
        self.gateways = ["gateway/a"]
        self.plane = self

    async def inspect(self) -> tuple[dict[str, Any], list]:
        return {"connected_gateways": len(self.gateways)}, []


class Cluster:
    """Serve's applications, and Control in front of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        prepared = [
            PreparedModel(f"diptych-{name}", tree, find_checkpoint(tree))
            for name in names
            for tree in [CONFIG.of_model(name)]
        ]
        self.applications = serve_applications(CONFIG, prepared)
        self.models = {name: Controlled(name) for name in names}
        operations = ClusterOperations(CONFIG)
        for model in self.models.values():
            operations.add(model)  # type: ignore[arg-type]
        self.orders = ModelOrders(CONFIG, operations)

        async def change(made: Any) -> None:
            self.applications = made(self.applications)

        monkeypatch.setattr(model_orders.serve, "change_applications", change)
        monkeypatch.setattr(model_orders, "REMOVE_POLL_S", 0.01)
        monkeypatch.setattr(model_orders, "CALM_S", 0.05)
        monkeypatch.setattr(model_orders, "RETRY_S", 0.01)

    @property
    def found(self) -> list[ModelApplication]:
        details = {
            app["name"]: {"deployed_app_config": app, "deployments": {}}
            for app in self.applications
        }
        return model_applications({"applications": details})


def code(application: dict[str, Any]) -> str:
    """Serve restarts replicas when this changes."""
    return get_app_code_version(ServeApplicationSchema.model_validate(application))


def test_an_added_model_is_one_more_application(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, "one")
    before = list(cluster.applications)
    tree = {"model": {"path": str(CHECKPOINT)}, "slo": {"ttft_ms": 7}}
    told = asyncio.run(cluster.orders.add("Org/new", tree, dry_run=False))
    assert told["application"] == "diptych-org-new"
    assert cluster.applications[:-1] == before, "the others are as they were"
    added = cluster.found[-1]
    config = added.config(CONFIG)
    assert (config.model.name, config.slo.ttft_ms) == ("Org/new", 7)
    assert Path(config.model.path or "") == CHECKPOINT.resolve()
    assert "secret" not in added.args


def test_models_that_are_added_with_one_folder_for_logs_have_a_folder_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch, "one")
    # `diptych model add -c FILE` sends the second folder.
    for name, folder in (("Org/new", "/logs"), ("other", "/logs/other"), ("plain", None)):
        tree = {"model": {"path": str(CHECKPOINT)}, "router": {"log_folder": folder}}
        asyncio.run(cluster.orders.add(name, tree, dry_run=False))
    folders = [added.config(CONFIG).router.log_folder for added in cluster.found]
    assert folders == [None, "/logs/org-new", "/logs/other", None]


@pytest.mark.parametrize(
    ("name", "tree", "message"),
    [
        ("one", {}, "another model has the name one"),
        ("zwei", {}, "another model has the name zwei"),
        ("new", {"model": {"served_names": ["two"]}}, "another model has the name two"),
        ("///", {}, "neither a letter nor a digit"),
        ("new", {"slo": {"ttft_ms": -1}}, r"slo\.ttft_ms: "),
        ("new", {"router": {"classes": {"x": {}}}}, "the whole cluster's"),
        ("new", {"model": {"path": "./missing"}}, "missing is not a folder"),
        ("new", {"model": {"tool_format": "nonsense"}}, "tool_format"),
        ("ONE", {}, "'diptych-one' already"),
        ("new", {"models": {"new": None}}, "models: not of one model; its sections are model, "),
        ("new", {"gateway": {}, "scaling": {}}, "gateway, scaling: not of one model"),
    ],
)
def test_what_cannot_be_added_is_refused_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str, tree: dict[str, Any], message: str
) -> None:
    cluster = Cluster(monkeypatch, "one", "two")
    before = list(cluster.applications)
    with pytest.raises(ApiError, match=message):
        asyncio.run(cluster.orders.add(name, tree, dry_run=False))
    assert cluster.applications == before


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "just added"])
def test_no_adapter_has_the_name_of_another_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_known: bool
) -> None:
    """Not of one that Control knows, nor of one that Serve was told of just now."""
    folder = make_adapter(tmp_path / "adapter", CHECKPOINT)
    hosted = {"kind": "vllm", "python": sys.executable}
    cluster = Cluster(monkeypatch, *(["one", "two"] if is_known else ["one"]))
    tree = {"model": {"path": str(CHECKPOINT), "adapters": {"two": str(folder)}}, "engine": hosted}
    if is_known:
        with pytest.raises(ApiError, match="another model has the name two"):
            asyncio.run(cluster.orders.add("new", tree, dry_run=False))
        return
    asyncio.run(cluster.orders.add("new", tree, dry_run=False))
    assert cluster.applications[-1]["args"]["model"]["adapters"] == {"two": str(folder)}
    with pytest.raises(ApiError, match="another model has the name two"):
        asyncio.run(cluster.orders.add("two", {}, dry_run=False))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (("b", ["y"]), ("c", ["y"]), "another model has the name y"),
        (("b", ["y"]), ("y", []), "another model has the name y"),
        (("b", []), ("c", ["b"]), "another model has the name b"),
        (("b", []), ("b", []), "'diptych-b' already"),
    ],
)
def test_of_two_models_added_at_once_under_one_name_the_second_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    first: tuple[str, list[str]],
    second: tuple[str, list[str]],
    message: str,
) -> None:
    """Control does not know the first one until `ModelWatch` has looked."""
    cluster = Cluster(monkeypatch, "one")
    name, served_names = first
    tree = {"model": {"served_names": served_names}}
    asyncio.run(cluster.orders.add(name, tree, dry_run=False))
    before = list(cluster.applications)
    name, served_names = second
    tree = {"model": {"served_names": served_names}}
    with pytest.raises(ApiError, match=message):
        asyncio.run(cluster.orders.add(name, tree, dry_run=False))
    assert cluster.applications == before


def test_an_order_to_a_serve_that_does_not_take_it_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch, "one")
    monkeypatch.setattr(model_orders, "RESIZE_TIMEOUT_S", 0.01, raising=False)

    async def lose(_: Any) -> None:
        raise RuntimeError("the actor died")

    async def hang(_: Any) -> None:
        await asyncio.sleep(10.0)

    for change, reason in ((lose, "the actor died"), (hang, "TimeoutError")):
        monkeypatch.setattr(model_orders.serve, "change_applications", change)
        with pytest.raises(ApiError, match=reason) as refusal:
            asyncio.run(cluster.orders.add("new", {}, dry_run=False))
        assert refusal.value.reason == "no_capacity"


def test_a_model_is_deleted_once_no_gateway_is_connected_to_its_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        cluster = Cluster(monkeypatch, "one", "two")
        versions = {app["name"]: code(app) for app in cluster.applications}
        await cluster.orders.remove("two", dry_run=False)
        leaving = {one.name: one.leaving for one in cluster.found}
        assert leaving == {"diptych-one": False, "diptych-two": True}
        stands = {name: model.operations.is_leaving for name, model in cluster.models.items()}
        assert stands == {"one": False, "two": True}, "what the status says of the models"
        marked = {app["name"]: code(app) for app in cluster.applications}
        assert marked == versions, "the mark restarts nothing"
        await asyncio.sleep(0.1)
        assert len(cluster.found) == 2, "a gateway still has requests for it"
        cluster.models["two"].gateways = []
        async with asyncio.timeout(10):
            await asyncio.gather(*cluster.orders._removals.values())
        assert [one.name for one in cluster.found] == ["diptych-one"]

    asyncio.run(test())


def test_a_gateway_that_does_not_leave_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        cluster = Cluster(monkeypatch, "one", "two")
        monkeypatch.setattr(model_orders, "REMOVE_LIMIT_S", 0.05)
        cluster.orders.finish_removal(cluster.models["two"])  # type: ignore[arg-type]
        async with asyncio.timeout(10):
            await asyncio.gather(*cluster.orders._removals.values())
        assert [one.name for one in cluster.found] == ["diptych-one"]

    asyncio.run(test())


def test_one_look_without_gateways_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that has restarted has none for a moment."""

    async def test() -> None:
        cluster = Cluster(monkeypatch, "one", "two")
        gateways = cluster.models["two"].gateways
        await cluster.orders.remove("two", dry_run=False)
        for turn in range(20):
            cluster.models["two"].gateways = [] if turn % 2 else gateways
            await asyncio.sleep(0.012)
        assert len(cluster.found) == 2
        await cluster.orders.stop()

    asyncio.run(test())


@pytest.mark.parametrize("failures", [1, 2])
def test_a_removal_outlives_serves_controller(
    monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    async def test() -> None:
        cluster = Cluster(monkeypatch, "one", "two")
        cluster.models["two"].gateways = []
        change = model_orders.serve.change_applications
        left = {"mark": failures, "delete": failures}

        async def lose(made: Any) -> None:
            step = "mark" if any(not one.leaving for one in cluster.found[1:]) else "delete"
            left[step] -= 1
            if left[step] >= 0:
                raise RuntimeError("the actor died")
            await change(made)

        monkeypatch.setattr(model_orders.serve, "change_applications", lose)
        async with asyncio.timeout(10):
            await cluster.orders.remove("two", dry_run=False)
            await asyncio.gather(*cluster.orders._removals.values())
        assert [one.name for one in cluster.found] == ["diptych-one"]

    asyncio.run(test())


def test_the_last_model_that_stays_is_not_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        cluster = Cluster(monkeypatch, "one", "two")
        await cluster.orders.remove("two", dry_run=False)
        with pytest.raises(ApiError, match="the only model"):
            await cluster.orders.remove("one", dry_run=False)
        await cluster.orders.stop()

    asyncio.run(test())


def test_a_model_that_is_deleted_and_still_known_does_not_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`ModelWatch` misses a deleted application only after some looks."""

    async def test() -> None:
        cluster = Cluster(monkeypatch, "one", "two")
        cluster.models["two"].gateways = []
        await cluster.orders.remove("two", dry_run=False)
        async with asyncio.timeout(10):
            await asyncio.gather(*cluster.orders._removals.values())
        assert [one.name for one in cluster.found] == ["diptych-one"]
        with pytest.raises(ApiError, match="the only model"):
            await cluster.orders.remove("one", dry_run=False)

    asyncio.run(test())


def test_the_only_model_and_unknown_ones_are_not_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, "one")
    with pytest.raises(ApiError, match="the only model"):
        asyncio.run(cluster.orders.remove("one", dry_run=False))
    with pytest.raises(ApiError, match="no model x; there are one"):
        asyncio.run(cluster.orders.remove("x", dry_run=False))


def test_dry_runs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, "one", "two")
    before = list(cluster.applications)
    asyncio.run(cluster.orders.add("new", {}, dry_run=True))
    asyncio.run(cluster.orders.remove("two", dry_run=True))
    assert cluster.applications == before


def test_on_kuberay_the_operator_owns_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, "one", "two")
    monkeypatch.setattr(model_orders, "runs_on_kuberay", lambda: True)
    for order in (
        cluster.orders.add("new", {}, dry_run=True),
        cluster.orders.remove("two", dry_run=True),
    ):
        with pytest.raises(ApiError, match="RayService"):
            asyncio.run(order)


def test_configs_are_changed_by_name() -> None:
    with pytest.raises(ScaleError, match="'a' already"):
        with_application([{"name": "a"}], {"name": "a"})
    with pytest.raises(ScaleError, match="no application 'b'"):
        with_leaving([{"name": "a"}], "b")


def test_a_model_that_could_not_be_served_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A download may have failed, say."""
    tries: list[str] = []

    async def find() -> list[ModelApplication]:
        return [ModelApplication("a", {})]

    async def add(application: ModelApplication) -> str:
        tries.append(application.name)
        raise ConfigError("not yet")

    async def look_twice() -> None:
        watch = ModelWatch(find, add, tries.append)
        await watch._look()
        await watch._look()

    asyncio.run(look_twice())
    assert tries == ["a"], "not at each look"
    monkeypatch.setattr(model_watch, "RETRY_S", 0.0)
    asyncio.run(look_twice())
    assert tries == ["a"] * 3


@pytest.mark.parametrize("with_leaving_models", [False, True])
def test_a_marked_model_is_gone_at_once_for_gateways_and_stays_for_control(
    with_leaving_models: bool,
) -> None:
    listed = [ModelApplication("a", {}), ModelApplication("b", {})]
    gone: list[str] = []

    async def test() -> None:
        async def find() -> list[ModelApplication]:
            return listed

        async def add(application: ModelApplication) -> str:
            return application.name

        watch = ModelWatch(find, add, gone.append, with_leaving=with_leaving_models)
        await watch._look()
        listed[1] = ModelApplication("b", {}, leaving=True)
        await watch._look()
        await watch._look()
        assert sorted(watch._served) == (["a", "b"] if with_leaving_models else ["a"])

    asyncio.run(test())
    assert gone == ([] if with_leaving_models else ["b"])
