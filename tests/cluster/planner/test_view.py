"""What the planner sees of a live cluster."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec
from diptych.cluster.planner.view import observe_fleet
from diptych.protos.frames import Coefficients, WorkerCard
from diptych.router.demand import OfferedLoad, _values_of

COST = (0.0, 1e-3, 0.0, 0.01, 1e-3, 0.0, 1e-6)


def card(name: str, role: str | None = None) -> WorkerCard:
    pool, _, replica = name.partition("/")
    return WorkerCard(
        name,
        pool,
        pool if role is None else role,
        address="",
        replica=replica,
        pid=1,
        blocks=100,
        block_tokens=64,
        tensor_parallel=2,
    )


def worker(name: str, state: str = "ready", active: int = 10) -> dict[str, Any]:
    engine = {"kv_blocks": {"total": 100, "active": active}}
    return {"id": name, "role": name.partition("/")[0], "state": state, "engine": engine}


def router(*joined: str) -> dict[str, Any]:
    load = OfferedLoad(2.0, 100, 5e3, 50, 6e3)
    costs = dict.fromkeys(joined, COST)
    return {"outlook": {"need": asdict(load), "backlog_s": 1.5, "costs": costs}}


def test_cards_and_statistics_make_an_observation() -> None:
    names = ["prefill/a", "decode/a", "decode/b"]
    observation = observe_fleet(
        router=router(*names),
        cards=[*map(card, names), card("decode/drained", ""), card("decode/leaving", "")],
        workers=[*map(worker, names), worker("decode/leaving", "leaving", active=40)],
        starting_replicas={"decode": 1},
    )
    assert observation is not None
    replicas = [(one.name, one.role, one.kv_tokens, one.gpus) for one in observation.replicas]
    assert replicas == [(name, name.partition("/")[0], 6400, 2) for name in names]
    assert observation.resting_replicas == {"decode": 1}
    assert observation.starting_replicas == {"decode": 1}
    assert (observation.demand.rate, observation.backlog_s) == (2.0, 1.5)
    assert observation.kv_used_share == 0.2


def test_without_a_router_nothing_is_seen() -> None:
    assert observe_fleet({}, [card("decode/a")], [worker("decode/a")], {}) is None


def test_a_worker_that_has_not_joined_a_new_router_yet_hides_the_fleet() -> None:
    """Else the planner would count fewer replicas than there are, and order this smaller number."""
    names = ["prefill/a", "decode/a", "decode/b"]
    cards = [*map(card, names)]
    assert observe_fleet(router(*names[:2]), cards, [], {}) is None
    assert observe_fleet(router(*names), cards, [], {}) is not None
    # One without a role is resting, whether or not it has joined.
    drained = [*cards[:2], card("decode/b", "")]
    assert observe_fleet(router(*names[:2]), drained, [], {}) is not None


def test_a_version_that_knows_no_experts_reads_the_outlook_of_a_fleet_without_them() -> None:
    """It makes its `Coefficients`, which end with `exposed_share`, of the values in order."""
    dense = Coefficients(*COST, exposed_share=0.5)
    with_experts = msgspec.structs.replace(dense, step_experts=0.02, expert_miss=0.9)
    told = {cost: _values_of(cost) for cost in (dense, with_experts)}
    assert told[dense][-1] == 0.5
    assert all(Coefficients(*values) == cost for cost, values in told.items())
