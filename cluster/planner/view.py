"""What the planner sees of a live cluster (pure): made of everybody's statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from ...protos.frames import Coefficients, WorkerCard
from ...router.demand import OfferedLoad
from .core import Observation, Replica


def observation(
    router: dict[str, Any],
    cards: Collection[WorkerCard],
    workers: list[dict[str, Any]],
    starting: dict[str, int],
) -> Observation | None:
    """`router`, `workers`: their statistics. None: the router cannot say yet."""
    outlook = router.get("outlook")
    if outlook is None:
        return None
    replicas = [
        Replica(
            card.id,
            card.role,
            card.pool,
            Coefficients(*outlook["costs"][card.id]),
            card.blocks * card.block_tokens,
            card.tensor_parallel,
        )
        for card in cards
        if card.role and card.id in outlook["costs"]
    ]
    decoding = [one["engine"]["kv_blocks"] for one in workers if one["role"] == "decode"]
    total = sum(blocks["total"] for blocks in decoding)
    share = sum(blocks["active"] for blocks in decoding) / total if total else 0.0
    need = OfferedLoad(**outlook["need"])
    leaving = {one["id"] for one in workers if one["state"] == "leaving"}
    resting = Counter(card.pool for card in cards if not card.role and card.id not in leaving)
    return Observation(
        tuple(replicas), starting, need, outlook["backlog_s"], share, resting=resting
    )
