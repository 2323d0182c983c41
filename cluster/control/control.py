"""The Serve deployment `Control`, where operators talk to the cluster. One replica, on Ray's head.

Control has HTTP and gRPC servers on ports of its own, with a key of its own: a client who may ask
the gateway for tokens must not be able to change the cluster. It puts together `Operations` with
the servers, the planner (`autopilot.py`) and the metrics. While Control is away, requests are
served as before.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray import serve

from ..config import ClusterConfig
from ..gateway.attempt.plane import Plane
from ..router_service import node_host
from ..telemetry import ControlTally, Exporter, logs
from . import http, rpc
from .autopilot import Autopilot
from .doctor import Doctor
from .kuberay import find_pool_scaler
from .operations import Operations

log = logging.getLogger(__name__)

METRICS_INTERVAL_S = 5.0  #: Between two observations of the pools for Prometheus.
GRPC_STOP_S = 1.0  #: For open gRPC calls to end when Control stops.


class Control:
    """Starts everything that operators need in one process, and ends it with the replica.

    `config` is the whole configuration in plain types, as Serve passes it on.
    """

    async def __init__(self, config: dict[str, Any]) -> None:  # type: ignore[misc]
        cluster_config = ClusterConfig.model_validate(config)
        settings = cluster_config.control
        logs.configure(cluster_config.observability.log, "control")

        # Connections to the router and to every worker; a peer that is silent for `silence_s` is
        # given up. They begin with the plane, and end with the process.
        replica_id = serve.get_replica_context().replica_id.unique_id
        self._plane = Plane(
            f"control/{replica_id}",
            cluster_config.secret,
            cluster_config.silence_s,
            _find_router,
            kind="control",
        )
        self._pool_scaler = find_pool_scaler()
        self._tally = ControlTally()
        self._metrics = Exporter(
            cluster_config.observability,
            {"model": cluster_config.model.name or ""},
            self._tally.rows,
        )
        await self._metrics.start(node_host())

        operations = Operations(cluster_config, self._plane, self._pool_scaler, self._tally)
        autopilot = Autopilot(operations)
        self._pool_watch = asyncio.create_task(self._count_replicas())
        self._planning = asyncio.create_task(autopilot.run())

        application = http.build(
            operations,
            # for `diptych doctor`, which tells when workers use another transport than configured
            doctor=Doctor(self._plane, cluster_config.kv_transfer.transport),
            autopilot=autopilot,
            metrics_address=self._metrics.address,  # for the list of what Prometheus scrapes
        )
        self._http_server = http.AdminHttpServer(application, settings)
        await self._http_server.start()
        admin_service = rpc.AdminService(operations, http.AdminGuard(settings))
        self._grpc_server = await rpc.listen(admin_service, settings)

    def check_health(self) -> None:
        """Raises RuntimeError when the HTTP server has ended, so that Serve replaces Control."""
        self._http_server.check()

    async def __del__(self) -> None:
        """Serve's shutdown hook."""
        self._pool_watch.cancel()
        self._planning.cancel()
        self._metrics.close()
        await asyncio.gather(self._http_server.stop(), self._grpc_server.stop(GRPC_STOP_S))

    async def _count_replicas(self) -> None:
        """Update the metrics' replica counts for as long as Control lives."""
        while True:
            try:
                self._tally.observe_pools(await self._pool_scaler.observe())
            except Exception as error:  # Serve and KubeRay raise many types; the next try may work
                log.warning("the pools cannot be seen: %s", str(error) or type(error).__name__)
            await asyncio.sleep(METRICS_INTERVAL_S)


async def _find_router() -> str:
    """Return the address of the router that Serve runs now."""
    return await serve.get_deployment_handle("Router", "diptych").address.remote()
