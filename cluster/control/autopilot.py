"""The planner at work: every few seconds it observes the fleet, and proposes or gives orders.

`scaling.mode` decides what happens to an order: `off` plans nothing, `propose` records every order
and carries out none, `act` carries them out. Orders go through `Operations`, whose refusals stand,
so the planner never ends work that is under way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Any, assert_never

from ..config import ClusterConfig
from ..gateway.errors import ApiError
from ..planner.core import (
    FlipWorker,
    Planner,
    PlannerAction,
    PlannerConfig,
    ReplicaBounds,
    ScalePool,
)
from ..planner.sharing import GpuBudget
from ..planner.view import observe_fleet
from .operations import Operations
from .serve import with_values_replicas

log = logging.getLogger(__name__)

ORDERS_LIMIT = 100  #: How many orders, the last ones, `GET /admin/v1/planner` shows.


class Autopilot:
    """Runs one model's planner and keeps a record of its orders.

    `gpus` is shared by the planners of all models, which plan one at a time: the one that plans
    holds the lock `turn`. An order that Operations refuses with an ApiError is recorded, too. One
    that fails with another error is only logged, and the rest of its turn is left out.
    """

    def __init__(
        self, operations: Operations, model: str, gpus: GpuBudget, turn: asyncio.Lock
    ) -> None:
        self._operations = operations
        self._model = model
        self._gpus = gpus
        self._turn = turn
        self._settings = operations.config.scaling
        self._planner = Planner(planner_config(operations.config))
        self._orders: deque[dict[str, Any]] = deque(maxlen=ORDERS_LIMIT)
        #: The planner's pressure at the last observation: the load over the capacity within the
        #: targets, so above 1 targets are missed. None before the first observation, without
        #: demand, and while a role has no worker.
        self._pressure: float | None = None

    async def run(self) -> None:
        """Plan every `scaling.interval_s` until cancelled; return at once if the mode is off.

        An error ends one turn and is logged; the next turn observes the fleet anew.
        """
        while self._settings.mode != "off":
            await asyncio.sleep(self._settings.interval_s)
            try:
                async with self._turn:
                    await self._plan(time.monotonic())
            except Exception as error:  # mostly of a peer that is away: the next turn may work
                log.warning("the planner's turn failed: %s", str(error) or type(error).__name__)

    def statistics(self) -> dict[str, Any]:
        """Return what `GET /admin/v1/planner` shows.

        Each order has the wall clock's time `at`, what it was, `why`, and what it `is`: ordered,
        proposed, or refused with a reason.
        """
        return {
            "mode": self._settings.mode,
            "pressure": None if self._pressure is None else round(self._pressure, 4),
            "orders": list(self._orders),
        }

    async def _plan(self, now: float) -> None:
        (router, workers), pools = await asyncio.gather(
            self._operations.plane.inspect(), self._operations.pool_scaler.observe()
        )
        observation = observe_fleet(
            router=router or {},  # statistics; None: no router answers
            cards=self._operations.plane.cards.values(),  # what each worker says that it can do
            workers=workers,  # statistics
            starting_replicas={name: len(pool.starting) for name, pool in pools.items()},
        )
        targets = {name: pool.target for name, pool in pools.items()}
        self._note_gpus(targets)
        if observation is None:  # no router, or one that not all workers have joined yet
            return
        config = with_values_replicas(self._operations.config, pools)
        self._planner.config = planner_config(config)
        self._planner.gpu_limit = self._gpus.limit_of(self._model)
        self._pressure = self._planner.present_pressure(observation)
        for action in self._planner.handle(observation, now):
            await self._order(action)
            if isinstance(action, ScalePool) and self._settings.mode == "act":
                # The ordered replicas count at once, so that the other models' planners leave them
                # their GPUs. Serve may start them later or refuse; the next turn corrects this.
                targets[action.pool] = max(targets[action.pool], action.replicas)
                self._note_gpus(targets)

    def _note_gpus(self, targets: dict[str, int]) -> None:
        """Tell the other models' planners how many GPUs this model's replicas have.

        `targets` is how many replicas each pool should have.
        """
        pools = self._operations.config.pools
        gpus = sum(count * pools.of(pool).tensor_parallel for pool, count in targets.items())
        self._gpus.note(self._model, gpus)

    async def _order(self, action: PlannerAction) -> None:
        """Carry an action out, or check that it could be, and record what became of it.

        Errors other than ApiError go on to the caller, and nothing is recorded then.
        """
        acting = self._settings.mode == "act"
        outcome = "ordered" if acting else "proposed"
        try:
            await self._carry_out(action, dry_run=not acting)
        except ApiError as error:
            outcome = f"refused: {error}"
        order = str(action)
        log.info("planner: %s (%s): %s", order, action.reason, outcome)
        self._operations.record_action(f"planner: {outcome}", order, action.reason)
        self._orders.append(
            {"at": time.time(), "order": order, "why": action.reason, "is": outcome}
        )

    async def _carry_out(self, action: PlannerAction, *, dry_run: bool) -> None:
        match action:
            case FlipWorker(worker, role):
                await self._operations.flip(worker, role, dry_run=dry_run)
            case ScalePool(pool, replicas):
                await self._operations.scale({pool: replicas}, dry_run=dry_run)
            case _:
                assert_never(action)


def planner_config(config: ClusterConfig) -> PlannerConfig:
    """Return the planner's own settings from the configuration tree."""
    bounds = {}
    for pool in ("prefill", "decode"):
        settings = config.pools.of(pool)
        bounds[pool] = ReplicaBounds(
            minimum=settings.replicas_minimum, limit=settings.replicas_maximum
        )
    return PlannerConfig(
        itl_s=config.slo.itl_ms / 1e3,
        pools=bounds,
        scaling_enabled=config.scaling.replicas,
        flips_enabled=config.pools.prefill.tensor_parallel == config.pools.decode.tensor_parallel,
        gpu_limit=config.scaling.gpus,
        flip_dwell_s=config.scaling.flip_dwell_s,
        scale_down_dwell_s=config.scaling.down_dwell_s,
    )
