"""The planner at work: looks every few seconds, and says or does what it asks for.

`scaling.mode`: `off`; `propose` writes every order down and carries out none; `act` does. What it
does is done by `Control`, whose refusals stand: it never kills work in flight.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from ..gateway.errors import ApiError
from ..planner.core import Action, Bounds, Flip, Planner, PlannerConfig
from ..planner.view import observation

if TYPE_CHECKING:
    from ..config import ClusterConfig
    from .control import Control

log = logging.getLogger(__name__)

KEPT = 100  #: orders that are remembered


class Autopilot:
    def __init__(self, control: Control) -> None:
        self.control = control
        self.settings = control.config.scaling
        self.planner = Planner(planner_config(control.config))
        self.orders: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.pressure: float | None = None

    async def run(self) -> None:
        while self.settings.mode != "off":
            await asyncio.sleep(self.settings.interval_s)
            try:
                await self._look(time.monotonic())
            except Exception as error:  # of a peer that is away: the next look may be better
                log.warning("the planner cannot see: %s", error or type(error).__name__)

    def statistics(self) -> dict[str, Any]:
        """For `GET /admin/v1/planner`."""
        pressure = None if self.pressure is None else round(self.pressure, 4)
        return {"mode": self.settings.mode, "pressure": pressure, "orders": list(self.orders)}

    async def _look(self, now: float) -> None:
        (router, workers), pools = await asyncio.gather(
            self.control.plane.inspect(), self.control.pools.seen()
        )
        starting = {name: len(pool.starting) for name, pool in pools.items()}
        seen = observation(router or {}, self.control.plane.cards.values(), workers, starting)
        if seen is None:
            return
        self.pressure = self.planner.pressure_of(seen)
        for action in self.planner.handle(seen, now):
            await self._order(action)

    async def _order(self, action: Action) -> None:
        act = self.settings.mode == "act"
        if isinstance(action, Flip):
            said = f"flip {action.worker} to {action.to}"
        else:
            said = f"scale {action.pool} to {action.replicas}"
        outcome = "ordered" if act else "proposed"
        try:
            if isinstance(action, Flip):
                await self.control.flip(action.worker, action.to, not act)
            else:
                await self.control.scale({action.pool: action.replicas}, not act)
        except ApiError as error:
            outcome = f"refused: {error}"
        log.info("planner: %s (%s): %s", said, action.why, outcome)
        self.control.note(f"planner: {outcome}", said, action.why)
        self.orders.append({"at": time.time(), "order": said, "why": action.why, "is": outcome})


def planner_config(config: ClusterConfig) -> PlannerConfig:
    scaling, pools = config.scaling, config.pools
    bounds = {
        name: Bounds(min(pool.min_replicas, pool.replicas), pool.max_replicas)
        for name, pool in (("prefill", pools.prefill), ("decode", pools.decode))
    }
    return PlannerConfig(
        itl_s=config.slo.itl_ms / 1e3,
        pools=bounds,
        scale=scaling.replicas,
        gpus=scaling.gpus,
        dwell_s=scaling.flip_dwell_s,
        down_dwell_s=scaling.down_dwell_s,
    )
