"""The Serve deployment `Control`, where operators talk to the cluster. One replica, on Ray's head.

Control has HTTP and gRPC servers on ports of its own, with a key of its own: a client who may ask
the gateway for tokens must not be able to change the cluster. It follows which models there are,
and puts together a `ModelControl` for each with the servers and the metrics. While Control is away,
requests are served as before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from ray import serve

from ..applications import ModelApplication, find_models
from ..config import ClusterConfig
from ..launch.checkpoint import find_checkpoint
from ..model_watch import ModelWatch
from ..planner.sharing import GpuBudget
from ..router_service import node_host
from ..telemetry import Exporter, logs
from ..telemetry.page import MetricRow
from ..termination import drain_on_sigterm
from . import http, rpc
from .cluster_operations import ClusterOperations
from .model_control import ModelControl, SharedPlanning
from .model_orders import ModelOrders
from .pod_watch import make_pod_watch
from .serve_watch import ServeWatch, ask_serve_controller, end_serve_controller

GRPC_STOP_S = 1.0  #: For open gRPC calls to end when Control stops.
END_LIMIT_S = 5.0  #: For everything to end at SIGTERM.


class Control:
    """Starts everything that operators need in one process, and ends it with the replica.

    `config` is the front application's configuration in plain types, as Serve passes it on.
    """

    async def __init__(self, config: dict[str, Any]) -> None:  # type: ignore[misc]
        self._config = ClusterConfig.model_validate(config)
        settings = self._config.control
        observability = self._config.observability
        logs.configure(observability.log, "control")
        self._name = f"control/{serve.get_replica_context().replica_id.unique_id}"
        self._metrics = Exporter(observability, {"model": ""}, self._metric_rows)
        await self._metrics.start(node_host())

        self._models: dict[str, ModelControl] = {}
        self._planning = SharedPlanning(GpuBudget(self._config.scaling.gpus))
        self._operations = ClusterOperations(self._config)
        self._closing: set[asyncio.Task[None]] = set()  #: asyncio itself keeps no tasks.
        self._model_orders = ModelOrders(self._config, self._operations)
        self._watch = ModelWatch(find_models, self._add, self._take_away, with_leaving=True)
        await self._watch.start()
        serve_watch = ServeWatch(ask_serve_controller, end_serve_controller)
        self._watching = [asyncio.create_task(serve_watch.run())]
        pod_watch = make_pod_watch()
        if pod_watch is not None:
            self._watching.append(asyncio.create_task(pod_watch.run()))

        # The address is for the list of what Prometheus scrapes.
        application = http.build(self._operations, self._model_orders, self._metrics.address)
        self._http_server = http.AdminHttpServer(application, settings)
        await self._http_server.start()
        admin_service = rpc.AdminService(self._operations, http.AdminGuard(settings))
        self._grpc_server = await rpc.listen(admin_service, settings)
        self._ending: asyncio.Task[None] | None = None  #: Once Serve or SIGTERM ends Control.
        # Else the process would live on for as long as Ray waits for it, and Serve replaces it only
        # when it has ended.
        drain_on_sigterm(self.__del__, END_LIMIT_S)

    def check_health(self) -> None:
        """Raises RuntimeError when the HTTP server has ended, so that Serve replaces Control."""
        self._http_server.check()

    async def __del__(self) -> None:
        """Ends Control. Serve awaits this before the replica ends, and SIGTERM calls it.

        Whoever comes second waits for the first.
        """
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        for watching in self._watching:
            watching.cancel()
        await self._watch.stop()
        await self._model_orders.stop()
        await asyncio.gather(
            self._http_server.stop(),
            self._grpc_server.stop(GRPC_STOP_S),
            *(model.close() for model in self._models.values()),
            *self._closing,
        )
        self._metrics.close()

    async def _add(self, application: ModelApplication) -> ModelControl:
        """Take orders for a model from now on. Raises ConfigError."""
        config = application.config(self._config)
        name = config.model.name
        if not name:  # `find_checkpoint` takes an empty name for none, too
            name = (await asyncio.to_thread(find_checkpoint, config)).name
        model = ModelControl(application, name, config, self._name, planning=self._planning)
        self._models[name] = model
        self._operations.add(model)
        if application.leaving:  # the Control before this one was ordered to remove it
            self._model_orders.finish_removal(model)
        return model

    def _take_away(self, model: ModelControl) -> None:
        del self._models[model.name]
        self._operations.remove(model)
        closing = asyncio.get_running_loop().create_task(model.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _metric_rows(self) -> Iterator[MetricRow]:
        for model in self._models.values():
            yield from model.metric_rows()
