"""The live feed of a cluster: its status, the router's decisions, and operators' actions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from ..gateway.edge import sse
from .operations import Operations

INTERVAL_S = 1.0  #: Between two statuses.
#: Decisions that are looked at after each status. Older ones are left out: at more than 50 requests
#: a second the feed shows a part of them.
DECISIONS_LIMIT = 50


async def events(operations: Operations) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events until the generator is closed, a batch each second.

    `cluster` is the status. `decision` is one decision of the router: it comes when the decision
    is new, and again when more has been observed of its outcome. `action` is one order, once; the
    first batch has all orders that are remembered.
    """
    #: Of the decisions sent in the last batch: number -> how many observations they had.
    sent_observations: dict[int, int] = {}
    last_action_number = 0
    while True:
        yield sse.event(await operations.status(), "cluster")

        decisions = await operations.plane.latest(DECISIONS_LIMIT) or []  # None: no router answers
        for decision in reversed(decisions):  # the oldest first
            if sent_observations.get(decision["number"]) != len(decision["observed"]):
                yield sse.event(decision, "decision")
        sent_observations = {
            decision["number"]: len(decision["observed"]) for decision in decisions
        }

        for action in list(operations.actions):
            if action["number"] > last_action_number:
                last_action_number = action["number"]
                yield sse.event(action, "action")

        await asyncio.sleep(INTERVAL_S)
