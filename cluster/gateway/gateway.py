"""The Gateway deployment: Ray Serve's ingress, and what it consists of.

HTTP arrives at a socket of the gateway's own, or by Serve's proxies at `__call__`, and goes to the
app of `edge.http`. gRPC arrives at a socket of its own, or by Serve's proxies, which call methods
of the names in `protos/inference.proto` and of gRPC's health protocol. Both ask the
`GatewayService`.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from ray import serve
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..config import ClusterConfig
from ..router_service import node_host
from ..telemetry import logs
from .attempt.plane import Plane
from .edge import http, rpc
from .edge.listen import HttpListener
from .edge.sse import RAW_SEND
from .service import CLOSE_S, GatewayService

DRAIN_S = 10.0  #: for open answers, when the gateway is told to end; less than Serve's own limit
#: New objects until the young are collected, and how often that until the older and all are. By
#: Python's default, 1,200 streams were held up for 0.3 s every 5 s.
COLLECTOR_THRESHOLDS = (5_000, 10, 20)


class ListeningServer(Protocol):
    """A server on a socket of the gateway's own."""

    async def stop(self, grace: float) -> object:
        """Accepts nobody any more, and waits up to `grace` seconds for open calls."""


class Gateway:
    """One replica of the ingress."""

    async def __init__(  # type: ignore[misc]
        self,
        config: dict[str, Any],
        model_folder: str,
        model: str,
        deployments: Sequence[object] = (),
    ) -> None:
        """`deployments` are there so that Serve deploys what the gateway finds by the router."""
        settings = ClusterConfig.model_validate(config)
        replica = serve.get_replica_context().replica_id.unique_id
        plane = Plane(
            f"gateway/{replica}",
            settings.secret,
            settings.silence_s,
            _find_router,
            statistics=lambda: self.service.statistics(),
            close=lambda: self.service.end_requests(),
        )
        logs.configure(settings.observability.log, "gateway")
        self.service = GatewayService(settings, Path(model_folder), model, plane)
        await self.service.metrics.start(node_host())

        self._app = http.build_app(self.service)
        calls = rpc.Inference(self.service)
        self.Chat = calls.Chat
        self.Generate = calls.Generate
        self.ListModels = calls.ListModels
        self.Check = calls.Check
        self._servers: list[ListeningServer] = []
        if settings.gateway.listen == "gateway":
            listener = HttpListener(self._app, settings.gateway)
            self._servers = [listener, await rpc.listen(calls, settings.gateway)]
            await listener.start()
        gc.collect()
        gc.freeze()  # else each full collection walks what imports made: 100 ms between two tokens
        gc.set_threshold(*COLLECTOR_THRESHOLDS)

    async def __del__(self) -> None:
        """Serve awaits it before the replica ends. No new requests; those that run have a while."""
        stopping = [asyncio.ensure_future(server.stop(DRAIN_S)) for server in self._servers]
        if stopping:
            await asyncio.wait(stopping, timeout=DRAIN_S - CLOSE_S)
        await self.service.end_requests()
        await asyncio.gather(*stopping)
        await self.service.close()

    async def __call__(self, request: HttpRequest) -> Response:
        return _Delegate(self._app)


class _Delegate(Response):
    """Lets Serve's non-ASGI ingress hand the whole connection to an ASGI app."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[RAW_SEND] = send
        await self._app(scope, receive, send)


async def _find_router() -> str:
    return await serve.get_deployment_handle("Router", "diptych").address.remote()
