"""The Gateway deployment: Ray Serve's ingress, and what it consists of.

HTTP arrives at a socket of the gateway's own, or by Serve's proxies at `__call__`, and goes to the
app of `edge.http`. gRPC arrives at a socket of its own, or by Serve's proxies, which call methods
of the names in `protos/inference.proto` and of gRPC's health protocol. Both ask the
`GatewayService`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Sequence
from typing import Any, Protocol

from ray import serve
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..applications import FindModels, ModelApplication, find_models
from ..config import ClusterConfig
from ..descriptors import reserve_descriptors
from ..router_service import node_host
from ..telemetry import logs
from ..termination import drain_on_sigterm
from .edge import http, rpc
from .edge.listen import HttpListener
from .edge.sse import RAW_SEND
from .model_directory import ModelDirectory
from .served_model import CLOSE_S
from .service import GatewayService

#: For open answers, when the gateway is told to end; Serve kills the process after 15 s.
DRAIN_S = 10.0
DRAIN_POLL_S = 0.05  #: Between two looks whether a request runs, while the gateway ends.
#: For `gc.set_threshold`: the young are collected after 5,000 new objects, the older after ten such
#: collections, all after twenty of those. By Python's default, 1,200 streams were held up for 0.3 s
#: every 5 s.
COLLECTOR_THRESHOLDS = (5_000, 10, 20)


class ListeningServer(Protocol):
    """A server on a socket of the gateway's own."""

    async def stop(self, grace: float) -> object:
        """Accepts nobody any more, and waits up to `grace` seconds for open calls."""


class Gateway:
    """One replica of the ingress. Serve makes it, calls it, and awaits `__del__` at its end."""

    async def __init__(  # type: ignore[misc]
        self,
        config: dict[str, Any],
        models: Sequence[ModelApplication] | None = None,
        deployments: Sequence[object] = (),
    ) -> None:
        """Starts the gateway, and returns once it can be called.

        `config` is the front application's configuration. `models` are the models to serve; None:
        those that Serve names. `deployments` are not used: binding them here makes Serve deploy
        them with the gateway.
        """
        reserve_descriptors()  # else some clients wait for the kernel
        settings = ClusterConfig.model_validate(config)
        name = f"gateway/{serve.get_replica_context().replica_id.unique_id}"
        logs.configure(settings.observability.log, "gateway")
        self.service = GatewayService(settings, name)
        host = node_host()
        await self.service.metrics.start(host)
        await self.service.peers.start(host)
        finding = find_models if models is None else _naming(models)
        self._directory = ModelDirectory(settings, self.service, finding, name)
        await self._directory.start()

        self._app = http.build_app(self.service)
        # Serve's gRPC proxies look methods up by these names.
        calls = rpc.Inference(self.service)
        self.Chat = calls.Chat
        self.Generate = calls.Generate
        self.ListModels = calls.ListModels
        self.Check = calls.Check
        self.service.memory.start()
        self._servers: list[ListeningServer] = []  #: None of its own if Serve's proxies listen.
        if settings.gateway.listen == "gateway":
            listener = HttpListener(self._app, settings.gateway, self.service.peers.tag)
            self.service.memory.list_connections = lambda: [*listener.connections]
            self._servers = [listener, await rpc.listen(calls, settings.gateway)]
            await listener.start()
        self._ending: asyncio.Task[None] | None = None  #: Once Serve or SIGTERM ends the gateway.
        drain_on_sigterm(self.__del__)
        gc.collect()
        gc.freeze()  # else each full collection walks what imports made: 100 ms between two tokens
        gc.set_threshold(*COLLECTOR_THRESHOLDS)

    async def __del__(self) -> None:
        """Ends the gateway: takes no new requests, and gives those that run `DRAIN_S` in all.

        What is still open shortly before gets the error `draining`. Serve awaits this method before
        the replica ends, and SIGTERM calls it; whoever comes second waits for the first.
        """
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        stopping = [asyncio.ensure_future(server.stop(DRAIN_S)) for server in self._servers]
        if stopping:
            await asyncio.wait(stopping, timeout=DRAIN_S - CLOSE_S)
        else:  # Serve's proxies take the answers, and may still send requests
            self.service.refuse_requests()
            await _wait_for_requests(self.service, DRAIN_S - CLOSE_S)
        await self._directory.stop()
        await self.service.end_requests()
        await asyncio.gather(*stopping)
        await self.service.close()

    async def __call__(self, request: HttpRequest) -> Response:
        """Answer a request that came by Serve's HTTP proxy."""
        return _Delegate(self._app)


async def _wait_for_requests(service: GatewayService, limit_s: float) -> None:
    """Wait until no request runs, `limit_s` seconds at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while service.running:  # noqa: ASYNC110  # no event says it
                await asyncio.sleep(DRAIN_POLL_S)


def _naming(models: Sequence[ModelApplication]) -> FindModels:
    """Return what always names the same models."""

    async def name_models() -> list[ModelApplication]:
        return [*models]

    return name_models


class _Delegate(Response):
    """Lets Serve's non-ASGI ingress hand the whole connection to an ASGI app."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[RAW_SEND] = send  # streams write to it without what the app wraps around `send`
        await self._app(scope, receive, send)
