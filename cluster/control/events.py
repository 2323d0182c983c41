"""The live feed of a cluster: its status, the router's decisions, and operators' actions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from ..gateway.edge import sse
from .cluster_operations import ClusterOperations
from .operations import Operations

INTERVAL_S = 1.0  #: Between two statuses.
#: Decisions that are looked at after each status. Older ones are left out: at more than 50 requests
#: a second the feed shows a part of them.
DECISIONS_LIMIT = 50


async def events(operations: ClusterOperations) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events until the generator is closed, a batch each second.

    `cluster` is the status. `decision` is one decision of a router: it comes when the decision
    is new, and again when more has been observed of its outcome. `action` is one order, once; the
    first batch has all orders that are remembered. Decisions and actions say their `model`, and are
    numbered within it.
    """
    feeds: dict[str, _ModelFeed] = {}
    while True:
        yield sse.event(await operations.status(), "cluster")
        models = dict(operations.models)
        feeds = {name: feed for name, feed in feeds.items() if name in models}
        for name, model in models.items():
            # A model that is added again, or was deployed anew, numbers its actions anew.
            if name not in feeds or feeds[name].operations is not model.operations:
                feeds[name] = _ModelFeed(model.operations)
            feed = feeds[name]
            decisions = await model.operations.plane.latest(DECISIONS_LIMIT)
            # None is a late answer, after which what was sent is not new again.
            for decision in [] if decisions is None else feed.new_decisions(decisions):
                yield sse.event({**decision, "model": name}, "decision")
            for action in feed.new_actions(list(model.operations.actions)):
                yield sse.event({**action, "model": name}, "action")
        await asyncio.sleep(INTERVAL_S)


class _ModelFeed:
    """What was sent of one model's decisions and actions."""

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        #: Of the decisions sent in the last batch: number -> how many observations they had.
        self._sent_observations: dict[int, int] = {}
        self._last_action_number = 0

    def new_decisions(self, decisions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return those of the latest decisions that say something new, the oldest first."""
        new_decisions = [
            decision
            for decision in reversed(decisions)
            if self._sent_observations.get(decision["number"]) != len(decision["observed"])
        ]
        self._sent_observations = {
            decision["number"]: len(decision["observed"]) for decision in decisions
        }
        return new_decisions

    def new_actions(self, actions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the actions that were not sent yet, the oldest first."""
        new_actions = [action for action in actions if action["number"] > self._last_action_number]
        if new_actions:
            self._last_action_number = new_actions[-1]["number"]
        return new_actions
