"""The live feed of a cluster: snapshots, the router's decisions, operators' orders."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from ..gateway.edge import sse

if TYPE_CHECKING:
    from .control import Control

EVERY_S = 1.0
DECISIONS = 50  #: at most, between two snapshots


async def events(control: Control) -> AsyncGenerator[bytes, None]:
    """`cluster`: the status, each second; `decision`: each one, and again when more is known of
    what came of it; `action`: each order, once."""
    told: dict[int, int] = {}
    orders = 0
    while True:
        yield sse.event(await control.status(), "cluster")
        latest = await control.plane.latest(DECISIONS) or []
        for decision in reversed(latest):
            if told.get(decision["number"]) != len(decision["observed"]):
                yield sse.event(decision, "decision")
        told = {decision["number"]: len(decision["observed"]) for decision in latest}
        for action in list(control.actions):
            if action["number"] > orders:
                orders = action["number"]
                yield sse.event(action, "action")
        await asyncio.sleep(EVERY_S)
