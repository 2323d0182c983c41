"""HTTP on the gateway's own socket (`gateway.listen: gateway`), without Serve's proxy in between.

As the proxy does, this server gives a request without an id one, and says the id in the response.
Beyond that it cuts off clients that send their headers too slowly, or without end, and those that
hold connections on which nothing happens while too many others do the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ...config import GatewaySettings
from ..attempt.held_bytes import CutReason
from .guard import ARRIVED_SCOPE_KEY, HEADERS_MAX
from .sse import ABORT, RAW_SEND, STALL_S

log = logging.getLogger(__name__)

HEADERS_TIMEOUT_S = 10.0  #: A client has this long to send the headers of a request.
#: A connection may send so many bytes before a request's headers are complete: what the guard
#: takes, and room for what stands around names and values.
HEADERS_BYTES_MAX = HEADERS_MAX + (8 << 10)
#: An idle connection stays open for so long: more than the 60 s after which usual load balancers
#: close theirs, so that none sends a request into a connection that is being closed.
KEEP_ALIVE_S = 75
#: Connections of this process on which no request runs. One more, and the one that has waited
#: longest is closed, which leaves files to others.
RESTING_CONNECTIONS_MAX = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
BACKLOG = 2048  #: Connections that the kernel holds until the server accepts them.
#: The kernel takes so much of a connection that is not sent yet; the rest stays with the process,
#: which then knows that the client lags. By default it takes 4 MiB.
UNSENT_IN_KERNEL_BYTES = 128 << 10
REQUEST_ID_HEADER = b"x-request-id"


class HeaderLimitProtocol(HttpToolsProtocol):
    """uvicorn's protocol of one connection, which is closed if headers come too slowly or too long.

    That is so from the connection's start, and from the beginning of each further request.
    """

    #: The connections of this process on which no request runs, those that wait longest first.
    resting: ClassVar[dict[HeaderLimitProtocol, None]] = {}
    #: All connections of this process, in the order in which they came.
    open_connections: ClassVar[dict[HeaderLimitProtocol, None]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Closes the connection when it runs out. None while no headers are awaited.
        self._headers_timer: asyncio.TimerHandle | None = None
        self._headers_bytes = 0  #: Bytes since the headers are awaited.
        self._unsent_bytes_before = 0  #: When `is_stalled` last looked.
        self._taken_s = 0.0  #: When the client was last seen to take something.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.open_connections[self] = None
        self._await_headers()
        self._rest()

    def on_message_begin(self) -> None:
        # uvicorn's parser calls this at the first byte of a request.
        super().on_message_begin()
        self._await_headers()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self.resting.pop(self, None)
        # Noted here, because the request's task begins only when others have had their turn.
        self.scope[ARRIVED_SCOPE_KEY] = time.monotonic()  # type: ignore[literal-required]
        self.scope[ABORT] = self._cut_off  # type: ignore[literal-required]
        cycle_before = self.cycle
        super().on_headers_complete()
        has_body = self.scope["method"] != "HEAD"
        if has_body and self.cycle is not None and self.cycle is not cycle_before:
            self.cycle.transport = HeadHolder(self.cycle)  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        timer_before = self._headers_timer
        super().data_received(data)
        # The timer is another one if a request has begun in this data: what came before is no part
        # of its headers.
        same_headers = timer_before is not None and timer_before is self._headers_timer
        if same_headers:
            self._headers_bytes += len(data)
            if self._headers_bytes > HEADERS_BYTES_MAX:
                self._cut_off()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        next_request_runs = self.cycle is not None and not self.cycle.response_complete
        if not next_request_runs and not self.transport.is_closing():
            self._rest()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.resting.pop(self, None)
        self.open_connections.pop(self, None)
        super().connection_lost(exc)

    @property
    def unsent_bytes(self) -> int:
        """What the process holds because the client does not take it."""
        transport = self.transport
        unsent_bytes = transport.get_write_buffer_size()
        # asyncio's TLS counts what it has not encrypted; the rest is with the transport below.
        tls = getattr(transport, "_ssl_protocol", None)
        below = getattr(tls, "_transport", None)
        return unsent_bytes + (below.get_write_buffer_size() if below is not None else 0)

    def is_stalled(self, now: float) -> bool:
        """Return whether the client has taken nothing for `STALL_S`, though its answer is complete.

        A stream that still runs looks after that itself.
        """
        unsent_bytes = self.unsent_bytes
        runs = self.cycle is not None and not self.cycle.response_complete
        if (
            not unsent_bytes
            or unsent_bytes < self._unsent_bytes_before
            or not self._taken_s
            or (runs and not self.transport.is_closing())
        ):
            self._taken_s = now
        self._unsent_bytes_before = unsent_bytes
        return now - self._taken_s >= STALL_S

    def cut_off(self, reason: CutReason) -> None:
        """Close the connection at once, with what is unsent."""
        unsent_bytes = self.unsent_bytes
        log.warning("a client was cut off with %d bytes unsent: %s", unsent_bytes, reason)
        self._cut_off()

    def _rest(self) -> None:
        """Take note that no request runs on this connection, and close one if too many are so."""
        self.resting[self] = None
        if len(self.resting) > RESTING_CONNECTIONS_MAX:
            longest = next(iter(self.resting))
            del self.resting[longest]
            longest._cut_off()

    def _await_headers(self) -> None:
        """Give the client the whole time, and all bytes, for the headers of a request."""
        self._stop_timer()
        self._headers_timer = self.loop.call_later(HEADERS_TIMEOUT_S, self._cut_off)
        self._headers_bytes = 0

    def _stop_timer(self) -> None:
        if self._headers_timer:
            self._headers_timer.cancel()
            self._headers_timer = None

    def _cut_off(self) -> None:
        """Close the connection at once, without a response and with what is unsent.

        One that is closing already would else wait for its client.
        """
        self._stop_timer()
        self.transport.abort()


class HeadHolder:
    """Stands for a response's transport until its body begins: head and body leave in one write.

    uvicorn writes the head by itself; each write is a system call that wakes the client.
    """

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle  #: uvicorn's request and response, whose transport this is.
        self._transport: asyncio.Transport = cycle.transport
        self._head = b""

    def write(self, data: bytes) -> None:
        """Hold the head, or send it with what follows; later writes do not come here."""
        if not self._cycle.response_started:  # "100 Continue", which the client waits for
            self._transport.write(data)
        elif not self._head:
            self._head = data
        else:
            self._cycle.transport = self._transport
            self._transport.write(self._head + data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        """Close once what is held has left."""
        self._cycle.transport = self._transport
        if self._head:
            self._transport.write(self._head)
        self._transport.close()


class _SignalFreeServer(uvicorn.Server):
    """uvicorn's server inside a process that is somebody else's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone, because Serve ends this process, not a signal."""
        yield


class HttpListener:
    """One gateway's HTTP server. Gateways of one machine share the port."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings, tag: str = "") -> None:
        """`tag` is what ids begin with that this gateway gives to requests."""
        self._settings = settings
        config = uvicorn.Config(
            with_request_id(app, tag),
            http=HeaderLimitProtocol,
            ws="none",  # an upgrade is a request like others, which the guard refuses
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
        )
        self._server = _SignalFreeServer(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def connections(self) -> Iterable[HeaderLimitProtocol]:
        """The open connections."""
        return HeaderLimitProtocol.open_connections

    async def start(self) -> None:
        """Listen, and serve in a task of its own. Raises OSError."""
        host = self._settings.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # With SO_REUSEPORT the kernel spreads connections over all gateways that listen here.
        listening_socket = socket.socket(family)
        listening_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Connections that are accepted have this from here.
        listening_socket.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_IN_KERNEL_BYTES
        )
        listening_socket.bind((host, self._settings.http_port))
        listening_socket.listen(BACKLOG)
        serving = self._server.serve([listening_socket])
        self._task = asyncio.get_running_loop().create_task(serving)

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections; wait `grace_s` seconds at most until open requests end."""
        self._server.config.timeout_graceful_shutdown = round(grace_s)
        self._server.should_exit = True
        if self._task:
            await self._task


def with_request_id(app: ASGIApp, tag: str = "") -> ASGIApp:
    """Return `app`, whose requests all have an id, which its responses repeat.

    An id that is given here begins with `tag`. The scope gets the server's own `send`, for streams, whose events need no wrapper.
    """

    async def app_with_request_id(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        headers = scope["headers"]
        request_id = next((value for name, value in headers if name == REQUEST_ID_HEADER), b"")
        if not request_id:
            # The tag takes the place of random digits: an id shows that it has one to nobody.
            request_id = (tag + uuid.uuid4().hex[len(tag) :]).encode()
            headers.append((REQUEST_ID_HEADER, request_id))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                response_headers = [*message.get("headers", ()), (REQUEST_ID_HEADER, request_id)]
                message = {**message, "headers": response_headers}
            await send(message)

        scope[RAW_SEND] = send
        await app(scope, receive, send_with_id)

    return app_with_request_id
