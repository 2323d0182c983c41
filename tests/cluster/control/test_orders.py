"""What operators may order, and the sentence that says why not."""

from __future__ import annotations

from typing import Any

import pytest
from diptych.cluster.config import ClusterConfig
from diptych.cluster.control import orders


def worker(name: str, role: str = "", state: str = "ready") -> dict[str, Any]:
    home = name.partition("/")[0]
    return {"id": name, "home": home, "role": role or home, "state": state}


CONFIG = ClusterConfig()
TWO = [worker("prefill/aa"), worker("decode/aa"), worker("decode/bb")]


def test_a_change_says_what_it_does_and_how_to_take_it_back() -> None:
    changes = orders.planned_changes({"prefill": 1, "decode": 2}, {"prefill": 3, "decode": 2})
    assert [str(change) for change in changes] == ["prefill 1 -> 3", "decode is 2 already"]
    assert orders.undo_command(changes) == "diptych scale prefill=1"
    assert orders.undo_command(changes[1:]) is None


@pytest.mark.parametrize(
    ("pool", "count", "refused"),
    [
        ({}, 1, False),
        ({}, 0, True),
        ({}, 64, False),
        ({}, 65, True),
        ({"max_replicas": 2}, 3, True),
        ({"min_replicas": 2, "replicas": 2}, 1, True),
        ({"replicas": 0}, 1, None),
        ({"min_replicas": 2, "replicas": 1}, 1, False),  # what it started with cannot be wrong
        ({"replicas": 70}, 70, False),
        ({"replicas": 70}, 71, True),
    ],
)
def test_limits_of_a_pool_hold(pool: dict[str, int], count: int, refused: bool | None) -> None:
    config = ClusterConfig.model_validate(
        {"pools": {"prefill": pool}, "router": {"disaggregate": "auto"}}
    )
    told = orders.scale_refusal(config, {"prefill": count})
    if refused is None:
        assert "without a prefill pool" in str(told)
        return
    assert bool(told) is refused
    assert not told or f"prefill={count}: the configuration allows" in told


def test_workers_are_found_by_name_by_its_beginning_and_by_pool() -> None:
    workers = [*TWO, worker("decode/bc")]
    assert [w["id"] for w in orders.find_workers(workers, "decode/bb")] == ["decode/bb"]
    assert [w["id"] for w in orders.find_workers(workers, "bb")] == ["decode/bb"]
    assert len(orders.find_workers(workers, "decode")) == 3
    assert orders.find_workers(workers, "b") == [], "two of them begin so"
    assert orders.find_workers(workers, "aa") == [], "one of each pool"
    assert orders.find_workers(workers, "nobody") == []


def test_a_flip_counts_by_role_a_pool_by_home() -> None:
    flipped = [worker("prefill/aa", "decode"), worker("prefill/bb"), worker("decode/aa")]
    assert [w["id"] for w in orders.find_workers(flipped, "prefill")] == [
        "prefill/aa",
        "prefill/bb",
    ]
    assert orders.flip_refusal(CONFIG, flipped, flipped[2], "prefill") is None
    assert "last one that works as prefill" in str(
        orders.flip_refusal(CONFIG, flipped, flipped[1], "decode")
    )


@pytest.mark.parametrize(
    ("state", "says"), [("flipping", "is flipping"), ("draining", "draining"), ("leaving", "leav")]
)
def test_only_a_ready_worker_flips(state: str, says: str) -> None:
    busy = worker("decode/aa", state=state)
    assert says in str(orders.flip_refusal(CONFIG, [*TWO, busy], busy, "prefill"))


def test_a_worker_that_drains_or_flips_does_not_stand_in_for_another() -> None:
    for state in ("draining", "flipping", "leaving"):
        others = [worker("decode/aa"), worker("decode/bb", state=state)]
        assert orders.flip_refusal(CONFIG, others, others[0], "prefill")
        assert orders.drain_refusal(others, others[:1])


def test_pools_of_different_ranks_cannot_lend_each_other_workers() -> None:
    config = ClusterConfig.model_validate({"pools": {"decode": {"tensor_parallel": 2}}})
    assert "tensor_parallel (1 and 2)" in str(orders.flip_refusal(config, TWO, TWO[1], "prefill"))


def test_somebody_must_be_left_when_workers_drain() -> None:
    assert orders.drain_refusal(TWO, [TWO[1]]) is None
    assert "nobody else works as decode" in str(orders.drain_refusal(TWO, TWO[1:]))
    assert "nobody else works as prefill" in str(orders.drain_refusal(TWO, TWO[:1]))
    drained = [worker("decode/aa", state="draining"), worker("decode/bb")]
    assert orders.drain_refusal(drained, drained[:1]) is None, "it is drained already"
