"""Orders and questions where there are several models: which one they are for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from diptych.cluster.config import ClusterConfig
from diptych.cluster.control.cluster_operations import ClusterOperations
from diptych.cluster.control.operations import Operations
from diptych.cluster.control.rpc import pools_of
from diptych.cluster.control.serve import PoolObservation
from diptych.cluster.control.status import summarize_models
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.telemetry import ControlTally

from .test_status import ROUTER, told, worker


class Model:
    """A model with two workers of each pool; it is its own plane, and its own pools."""

    def __init__(self, name: str, *, replicas: str) -> None:
        self.name = name
        self.hello = SimpleNamespace(name="control/c")
        self.roles = {f"{pool}/{one}": pool for pool in ("prefill", "decode") for one in replicas}
        self.steered: list[tuple[str, str]] = []
        self.sizes: list[dict[str, int]] = []
        self.known_requests: list[str] = []
        #: Number and time, newest first; None: no router answers.
        self.decisions: list[tuple[int, float]] | None = []
        config = ClusterConfig.model_validate({"model": {"name": name}})
        scaler: Any = self
        self.operations = Operations(config, scaler, scaler, ControlTally())

    async def inspect(self) -> tuple[dict, list[dict[str, Any]]]:
        return ROUTER, [worker(name, role) for name, role in self.roles.items()]

    async def steer(self, name: str, role: str, hand_over: bool) -> dict[str, Any]:
        self.steered.append((name, role))
        return {"refused": None}

    async def observe(self) -> dict[str, PoolObservation]:
        return {pool: PoolObservation(2, [], [], []) for pool in ("prefill", "decode")}

    async def resize(self, counts: dict[str, int]) -> None:
        self.sizes.append(counts)

    async def check(self, counts: dict[str, int]) -> None: ...

    async def latest(self, count: int) -> list[dict[str, Any]] | None:
        if self.decisions is None:
            return None
        return [{"number": number, "at": at} for number, at in self.decisions][:count]

    async def explain(self, request_id: str) -> list[dict[str, Any]] | None:
        return [{"request": request_id}] if request_id in self.known_requests else []


def cluster(*models: Model) -> ClusterOperations:
    operations = ClusterOperations(ClusterConfig())
    for model in models:
        operations.add(model)  # type: ignore[arg-type]
    return operations


def two() -> tuple[Model, Model, ClusterOperations]:
    qwen, tiny = Model("org/qwen", replicas="ab"), Model("tiny", replicas="cd")
    return qwen, tiny, cluster(qwen, tiny)


def test_a_named_model_is_scaled_and_its_undo_names_it() -> None:
    qwen, tiny, operations = two()
    result = asyncio.run(operations.scale({"decode": 3}, dry_run=False, model="org/qwen"))
    assert (qwen.sizes, tiny.sizes) == ([{"decode": 3}], [])
    assert result["undo"] == "diptych scale org/qwen/decode=2"


def test_a_command_that_takes_an_order_back_is_one_for_a_shell() -> None:
    operations = cluster(Model("my model", replicas="ab"), Model("tiny", replicas="cd"))
    counts = {"prefill": 1, "decode": 3}
    result = asyncio.run(operations.scale(counts, dry_run=False, model="my model"))
    assert result["undo"] == "diptych scale 'my model/prefill=2' 'my model/decode=2'"


def test_pools_of_no_named_model_are_nobody_s_where_there_are_several() -> None:
    qwen, tiny, operations = two()
    with pytest.raises(ApiError, match="there are org/qwen, tiny"):
        asyncio.run(operations.scale({"decode": 3}, dry_run=False))
    with pytest.raises(ApiError, match=r"org/qwen/decode, tiny/decode"):
        asyncio.run(operations.drain("decode", force=True, hand_over=False, dry_run=False))
    with pytest.raises(ApiError, match="no model x"):
        asyncio.run(operations.scale({"decode": 3}, dry_run=False, model="x"))
    assert qwen.sizes == tiny.sizes == [] and qwen.steered == tiny.steered == []


def test_an_only_model_needs_no_name() -> None:
    model = Model("demo", replicas="ab")
    operations = cluster(model)
    result = asyncio.run(operations.scale({"decode": 3}, dry_run=False))
    assert result["undo"] == "diptych scale decode=2" and model.sizes == [{"decode": 3}]
    asyncio.run(operations.drain("decode", force=True, hand_over=False, dry_run=False))
    assert model.steered == [("decode/a", ""), ("decode/b", "")]


def test_an_only_model_may_be_named_all_the_same() -> None:
    model = Model("demo", replicas="ab")
    asyncio.run(cluster(model).flip("demo/decode/a", "prefill", dry_run=False))
    assert model.steered == [("decode/a", "prefill")]


@pytest.mark.parametrize("name", ["decode/d", "tiny/decode/d"])
def test_a_worker_s_id_says_whose_it_is(name: str) -> None:
    qwen, tiny, operations = two()
    asyncio.run(operations.flip(name, "prefill", dry_run=False))
    assert tiny.steered == [("decode/d", "prefill")] and qwen.steered == []


@pytest.mark.parametrize("swapped", [False, True])
def test_the_longest_name_of_a_model_is_meant_and_a_worker_before_a_model(swapped: bool) -> None:
    org, qwen = Model("org", replicas="ab"), Model("org/qwen", replicas="cd")
    models = [org, qwen][:: -1 if swapped else 1]
    asyncio.run(cluster(*models).flip("org/qwen/decode/c", "prefill", dry_run=False))
    asyncio.run(cluster(*models).flip("org/decode/a", "prefill", dry_run=False))
    assert (org.steered, qwen.steered) == ([("decode/a", "prefill")], [("decode/c", "prefill")])

    odd, tiny = Model("decode", replicas="ab"), Model("tiny", replicas="cd")
    models = [odd, tiny][:: -1 if swapped else 1]
    asyncio.run(cluster(*models).flip("decode/d", "prefill", dry_run=False))
    asyncio.run(cluster(*models).flip("decode/a", "prefill", dry_run=False))
    asyncio.run(
        cluster(*models).drain("decode/prefill", force=True, hand_over=False, dry_run=False)
    )
    assert tiny.steered == [("decode/d", "prefill")]
    assert odd.steered == [("decode/a", "prefill"), ("prefill/a", ""), ("prefill/b", "")]


@pytest.mark.parametrize("name", ["", "tiny/"])
def test_an_empty_name_means_no_worker(name: str) -> None:
    """Without a name in it, an order would be for the worker that is alone in its model."""
    tiny, empty = Model("tiny", replicas="a"), Model("empty", replicas="")
    del tiny.roles["prefill/a"]
    for operations in (cluster(tiny), cluster(tiny, empty)):
        for order in (
            operations.drain(name, force=True, hand_over=False, dry_run=False),
            operations.undrain(name, dry_run=False),
            operations.flip(name, "decode", dry_run=False),
        ):
            with pytest.raises(ApiError, match="name a worker or a pool") as refusal:
                asyncio.run(order)
            assert refusal.value.reason == "invalid_request"
    assert tiny.steered == []


def test_a_pool_of_a_model_is_drained_by_both_names() -> None:
    qwen, tiny, operations = two()
    asyncio.run(operations.drain("tiny/decode", force=True, hand_over=False, dry_run=False))
    assert tiny.steered == [("decode/c", ""), ("decode/d", "")] and qwen.steered == []


def test_a_beginning_that_workers_of_two_models_have_means_none() -> None:
    qwen, tiny = Model("qwen", replicas="ab"), Model("tiny", replicas="ac")
    with pytest.raises(ApiError, match="workers of qwen, tiny"):
        asyncio.run(cluster(qwen, tiny).undrain("decode/a", dry_run=False))
    with pytest.raises(ApiError, match=r"no worker x; there are .*decode/c"):
        asyncio.run(cluster(qwen, tiny).undrain("x", dry_run=False))


def test_a_request_is_explained_by_the_router_that_knows_it() -> None:
    _, tiny, operations = two()
    tiny.known_requests = ["r"]
    assert asyncio.run(operations.explain("r")) == [{"request": "r"}]
    with pytest.raises(ApiError, match="no decision about other"):
        asyncio.run(operations.explain("other"))
    with pytest.raises(ApiError, match="name a request") as refusal:
        asyncio.run(operations.explain(""))
    assert refusal.value.reason == "invalid_request"


def test_the_latest_decisions_are_those_of_all_routers_by_time() -> None:
    qwen, tiny, operations = two()
    qwen.decisions, tiny.decisions = [(2, 30.0), (1, 10.0)], [(7, 20.0)]
    told = asyncio.run(operations.latest_decisions(2))
    assert [(one["model"], one["number"]) for one in told] == [("org/qwen", 2), ("tiny", 7)]
    told = asyncio.run(operations.latest_decisions(5, "org/qwen"))
    assert [one["number"] for one in told] == [2, 1]


def test_a_router_that_is_away_hides_no_decisions_of_the_others() -> None:
    qwen, tiny, operations = two()
    qwen.decisions, tiny.decisions = None, [(7, 20.0)]
    told = asyncio.run(operations.latest_decisions(5))
    assert [(one["model"], one["number"]) for one in told] == [("tiny", 7)]
    with pytest.raises(ApiError, match="no router answers"):
        asyncio.run(operations.latest_decisions(5, "org/qwen"))
    tiny.decisions = None
    with pytest.raises(ApiError, match="no router answers"):
        asyncio.run(operations.latest_decisions(5))


def test_a_question_without_a_name_is_about_the_first_model() -> None:
    qwen, tiny, operations = two()
    assert operations.find_or_first("") is qwen  # type: ignore[comparison-overlap]
    assert operations.find_or_first("tiny") is tiny  # type: ignore[comparison-overlap]
    with pytest.raises(ApiError, match="no model x"):
        operations.find_or_first("x")


def test_before_a_model_is_known_orders_are_to_be_tried_again() -> None:
    with pytest.raises(ApiError) as refusal:
        asyncio.run(cluster().status())
    assert refusal.value.reason == "no_capacity"


def test_the_status_of_several_models_adds_up_what_is_of_all() -> None:
    _, _, operations = two()
    status = asyncio.run(operations.status())
    assert list(status["models"]) == ["org/qwen", "tiny"]
    assert status["requests"]["finished"] == 32, "of two gateways, by each of two routers"
    assert [gateway["requests"]["finished"] for gateway in status["gateways"]] == [16, 16]
    assert {one["id"]: one["model"] for one in status["workers"]} == {
        **{f"{pool}/{one}": "org/qwen" for pool in ("prefill", "decode") for one in "ab"},
        **{f"{pool}/{one}": "tiny" for pool in ("prefill", "decode") for one in "cd"},
    }
    assert list(pools_of(status)) == [
        *("org/qwen/prefill", "org/qwen/decode", "tiny/prefill", "tiny/decode")
    ]


def test_one_model_that_lacks_something_degrades_the_cluster_and_is_named() -> None:
    whole = told([worker("prefill/a"), worker("decode/a"), worker("decode/b")])
    broken = told([worker("prefill/a")])
    status = summarize_models({"a": whole, "b": broken})
    assert (whole["state"], status["state"]) == ("healthy", "degraded")
    assert status["missing"] == ["b: decode"]
    assert summarize_models({"a": whole}) == {**whole, "models": {"a": whole}}
