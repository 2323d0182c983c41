"""The live feed of a cluster: its status, the router's decisions, and operators' actions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from ..gateway.edge import sse
from .operations import Operations

INTERVAL_S = 1.0  #: Between two statuses.
DECISIONS_LIMIT = 50  #: Decisions that are looked at after each status; older ones are left out.


async def events(operations: Operations) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events until the generator is closed, a batch each second.

    `cluster` is the status. `decision` is one decision of the router: it comes when the decision
    is new, and again when more has been observed of its outcome. `action` is one order, once.
    """
    #: Of the decisions sent in the last batch: number -> how many observations they had.
    sent_observations: dict[int, int] = {}
    last_action_number = 0
    while True:
        yield sse.event(await operations.status(), "cluster")

        decisions = await operations.plane.latest(DECISIONS_LIMIT) or []
        for decision in reversed(decisions):
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
