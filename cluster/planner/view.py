"""Makes the planner's observation of a live cluster from the processes' statistics (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from ...protos.frames import Coefficients, WorkerCard
from ...router.demand import OfferedLoad
from .core import FleetObservation, Replica


def observe_fleet(
    router: dict[str, Any],
    cards: Collection[WorkerCard],
    workers: list[dict[str, Any]],
    starting_replicas: dict[str, int],
) -> FleetObservation | None:
    """Return the planner's view; None if no router answers or a worker has not joined it yet.

    `router` and `workers` are the statistics of these processes; `router` is empty where none
    answers. `cards` are those of the workers that a router's directory has named.
    `starting_replicas` counts by pool the replicas that Ray Serve is starting.

    The router knows the speed (`costs`) of each worker that has joined it. After a router has
    started, workers join it one after the other. A fleet without the missing ones would look
    smaller than it is, and the planner could order fewer replicas than there are. This ends: once
    the router has settled, its directory names joined workers only.

    A card without a role belongs to a worker that is drained or changes its role, or that leaves
    for good. Workers in the first two cases are resting: they will take work again. The router's
    `backlog_s` is the sum of the seconds of prefill that workers have been given and have not
    computed. `recent` stays empty, as the planner that runs live does not look at it.
    """
    outlook = router.get("outlook")  # made by `router.demand.outlook`
    if outlook is None:
        return None
    working_cards = [card for card in cards if card.role]
    if any(card.id not in outlook["costs"] for card in working_cards):
        return None
    replicas = tuple(
        Replica(
            name=card.id,
            role=card.role,
            pool=card.pool,
            cost=Coefficients(*outlook["costs"][card.id]),
            kv_tokens=card.blocks * card.block_tokens,
            gpus=card.tensor_parallel,
        )
        for card in working_cards
    )
    leaving_ids = {worker["id"] for worker in workers if worker["state"] == "leaving"}
    return FleetObservation(
        replicas=replicas,
        starting_replicas=starting_replicas,
        demand=OfferedLoad(**outlook["need"]),
        backlog_s=outlook["backlog_s"],
        kv_used_share=_kv_used_share(workers),
        resting_replicas=Counter(
            card.pool for card in cards if not card.role and card.id not in leaving_ids
        ),
    )


def _kv_used_share(workers: list[dict[str, Any]]) -> float:
    """Return the share of the decode workers' KV blocks that running answers hold.

    Blocks that are only cached do not count as held: a new answer may take them. Unlike its card, a
    worker's statistics keep its role, prefill or decode, while it is drained; `mixed` workers exist
    in the simulator only. Without decode workers the share is 0.
    """
    block_counts = [
        worker["engine"]["kv_blocks"] for worker in workers if worker["role"] == "decode"
    ]
    total_blocks = sum(counts["total"] for counts in block_counts)
    active_blocks = sum(counts["active"] for counts in block_counts)
    return active_blocks / total_blocks if total_blocks else 0.0
