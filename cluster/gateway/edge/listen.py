"""HTTP on the gateway's own socket (`gateway.listen: gateway`), without Serve's proxy in between.

What the proxy did and this does too: a request id for who sent none, and the id in the answer.
What it adds: a client that dribbles its headers is cut off, as is one whose headers never end.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
import uuid
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ...config import GatewaySettings
from .guard import ARRIVED, HEADERS_MAX
from .sse import RAW_SEND

HEAD_S = 10.0  #: for a client to send a request's headers
HEAD_MAX = HEADERS_MAX + (8 << 10)  #: bytes until they are complete
KEEP_ALIVE_S = 75
BACKLOG = 2048


class Protocol(HttpToolsProtocol):
    """Closes connections on which no request comes, or its headers do not end."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._head: asyncio.TimerHandle | None = None
        self._head_size = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._settle()
        # its task begins when others have had their turn
        self.scope[ARRIVED] = time.monotonic()  # type: ignore[literal-required]
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        begun = self._head
        super().data_received(data)
        if begun is not None and begun is self._head:
            self._head_size += len(data)
            if self._head_size > HEAD_MAX:
                self._cut()

    def connection_lost(self, exc: Exception | None) -> None:
        self._settle()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._settle()
        self._head = self.loop.call_later(HEAD_S, self._cut)
        self._head_size = 0

    def _settle(self) -> None:
        if self._head:
            self._head.cancel()
            self._head = None

    def _cut(self) -> None:
        self._settle()
        if not self.transport.is_closing():
            self.transport.abort()


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Serve ends this process, not a signal."""
        yield


class Listener:
    """One gateway's HTTP server; gateways of one machine share the port."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self._settings = settings
        config = uvicorn.Config(
            named(app),
            http=Protocol,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
        )
        self._server = _Uvicorn(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises OSError."""
        host, port = self._settings.host, self._settings.http_port
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        self._task = asyncio.get_running_loop().create_task(self._server.serve([listener]))

    async def stop(self, grace: float) -> None:
        """Accepts nobody from now on; what runs has `grace` seconds."""
        self._server.config.timeout_graceful_shutdown = round(grace)
        self._server.should_exit = True
        if self._task:
            await self._task


def named(app: ASGIApp) -> ASGIApp:
    """`app`, whose requests have an id, which its answers say."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = scope["headers"]
        found = next((value for name, value in headers if name == b"x-request-id"), b"")
        if not found:
            found = str(uuid.uuid4()).encode()
            headers.append((b"x-request-id", found))

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                told = [*message.get("headers", ()), (b"x-request-id", found)]
                message = {**message, "headers": told}
            await send(message)

        scope[RAW_SEND] = send
        await app(scope, receive, answer)

    return wrapped
