"""What Control does for one model: operators' orders, the planner, the doctor, its metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..applications import ModelApplication, router_finder
from ..config import ClusterConfig
from ..gateway.attempt.plane import Plane
from ..planner.sharing import GpuBudget
from ..telemetry import ControlTally
from ..telemetry.page import MetricRow
from .autopilot import Autopilot
from .doctor import Doctor
from .kuberay import KubeRayPools, find_pool_scaler
from .operations import Operations

log = logging.getLogger(__name__)

METRICS_INTERVAL_S = 5.0  #: Between two observations of the pools for Prometheus.


@dataclass(frozen=True, slots=True)
class SharedPlanning:
    """What the planners of all models share."""

    gpus: GpuBudget
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  #: Who holds it plans.


class ModelControl:
    """One model in Control: its connections begin with this object, and end with `close`."""

    def __init__(
        self,
        application: ModelApplication,
        name: str,
        config: ClusterConfig,
        control: str,
        *,
        planning: SharedPlanning,
    ) -> None:
        """Begin to watch the model `name`, and to plan for it.

        `config` is the tree by which the model is served. `control` is this Control's name in the
        cluster.
        """
        self.name = name
        self.application_name = application.name
        self._planning = planning
        #: The connections to the router and to every worker. A peer that is silent for `silence_s`
        #: is given up.
        self.plane = Plane(
            control,
            config.secret,
            config.silence_s,
            router_finder(application.name),
            kind="control",
        )
        self._pool_scaler = find_pool_scaler(application.name)
        self._tally = ControlTally()
        self.operations = Operations(config, self.plane, self._pool_scaler, self._tally)
        self.autopilot = Autopilot(self.operations, name, planning.gpus, planning.turn)
        #: For `diptych doctor`, which tells when workers use another transport than configured.
        self.doctor = Doctor(self.plane, config.kv_transfer.transport)
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._count_replicas()),
            loop.create_task(self.autopilot.run()),
        ]
        if isinstance(self._pool_scaler, KubeRayPools):
            following = self._pool_scaler.follow(self.operations.record_action)
            self._tasks.append(loop.create_task(following))

    async def close(self) -> None:
        """End the planner and the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._planning.gpus.forget(self.name)
        await self.plane.close()

    def metric_rows(self) -> Iterator[MetricRow]:
        """Return the model's rows of Control's page of metrics, with the model's label."""
        labels = {"model": self.name}
        return (row._replace(base_labels=labels) for row in self._tally.rows())

    async def _count_replicas(self) -> None:
        """Update the metrics' replica counts for as long as this object lives."""
        while True:
            try:
                self._tally.observe_pools(await self._pool_scaler.observe())
            except Exception as error:  # Serve and KubeRay raise many types; the next try may work
                log.warning("the pools cannot be seen: %s", str(error) or type(error).__name__)
            await asyncio.sleep(METRICS_INTERVAL_S)
