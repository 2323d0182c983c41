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
    """Return the planner's view, or None if no router answers; `router` is then empty.

    `router` and `workers` are the statistics of these processes. `starting_replicas` counts by pool
    the replicas that Ray Serve is starting. The router knows the speed of each worker that has
    joined it (`costs`); a worker that has not joined yet is none of the view's `replicas`, though
    its KV blocks count. A card without a role belongs to a worker that is drained or changes its
    role, or that leaves for good. Workers in the first two cases are resting: they will take work
    again. The router's `backlog_s` is the sum of the seconds of prefill that workers have been
    given and have not computed. `recent` stays empty, as the planner that runs live does not look
    at it.
    """
    outlook = router.get("outlook")  # made by `router.demand.outlook`
    if outlook is None:
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
        for card in cards
        if card.role and card.id in outlook["costs"]
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
