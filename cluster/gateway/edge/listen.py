"""HTTP on the gateway's own socket (`gateway.listen: gateway`), without Serve's proxy in between.

As the proxy does, this server gives an id to a request without one, and says it in the response.
Beyond that it cuts off clients that send their headers too slowly, or without end, those that do
not end a body whose response is complete, those whose next response waits while they read nothing,
and those that hold connections on which nothing happens while too many others do the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
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
from .sse import ABORT, RAW_SEND, STALL_S, UNSENT_BYTES, Stalled, wait_for_reader

log = logging.getLogger(__name__)

HEADERS_TIMEOUT_S = 10.0  #: A client has this long to send the headers of a request.
#: A client whose response is complete has this long to send the rest of its request's body. Many
#: clients send a whole body before they read why it was refused.
REST_OF_BODY_S = 30.0
#: A client may send so many bytes that neither end the headers of a request nor belong to a body:
#: what the guard takes, and room for what stands around names and values. The read that brings a
#: request's beginning, or bytes of a body, is not counted.
HEADERS_BYTES_MAX = HEADERS_MAX + (8 << 10)
#: A connection stays open for so long after a request: more than the 60 s after which usual load
#: balancers close theirs, so that none sends a request into a connection that is being closed.
KEEP_ALIVE_S = 75
#: So many connections may be open without a request, if the process may open files enough.
RESTING_CONNECTIONS_MAX = 4096
#: So many requests may wait behind the one that runs on their connection, and what follows is still
#: read: only by reading does the server see that the client has left.
QUEUED_REQUESTS_MAX = 16
BACKLOG = 2048  #: Connections that the kernel holds until the server accepts them.
#: The kernel takes so much of a connection that is not sent yet; the rest stays with the process,
#: which then knows that the client lags. By default it takes 4 MiB.
UNSENT_IN_KERNEL_BYTES = 128 << 10
REQUEST_ID_HEADER = b"x-request-id"


def resting_connections_limit() -> int:
    """Return how many connections of this process may wait without a request.

    They take a quarter of the files that the process may open, so that it can still open others.
    """
    # Read anew each time: Ray raises the limit after the fork server has imported this module.
    soft_limit, _hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == resource.RLIM_INFINITY:
        return RESTING_CONNECTIONS_MAX
    return min(RESTING_CONNECTIONS_MAX, soft_limit // 4)


class HeaderLimitProtocol(HttpToolsProtocol):
    """uvicorn's protocol of one connection, which is closed if headers come too slowly or too long.

    While no request runs, its client has a limited time: for the headers of the next request, from
    the connection's start and from that request's beginning; and for the rest of the body of a
    request whose response is complete. What stands around the pieces of a chunked body has the same
    limit of bytes as headers. Its trailers are dropped: headers behind a body, which nobody needs.
    """

    #: The connections of this process on which no request runs, those that wait longest first.
    resting: ClassVar[dict[HeaderLimitProtocol, None]] = {}
    #: All connections of this process, in the order in which they came.
    open_connections: ClassVar[dict[HeaderLimitProtocol, None]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Closes the connection when it runs out. None while the client has no limited time.
        self._timer: asyncio.TimerHandle | None = None
        self._awaits_headers = False  #: The headers of a request are awaited, or their rest.
        self._awaits_body = False  #: The body of the last request is not complete.
        self._has_advanced = False  #: A request has got further by the data that is read now.
        self._running_cycle: Any = None  #: uvicorn's request that was begun last; None before it.
        self._idle_bytes = 0  #: Bytes since a request has last got further.
        self._tcp_below_tls: Any = None  #: The transport below TLS; None if there is no TLS.
        self._unsent_bytes_before = 0  #: When `is_stalled` last looked.
        self._taken_s = 0.0  #: When the client was last seen to take something.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.open_connections[self] = None
        self._tcp_below_tls = find_tcp_below_tls(transport)
        self._awaits_headers = True
        self._start_timer(HEADERS_TIMEOUT_S)
        self._rest()

    def on_message_begin(self) -> None:
        # uvicorn's parser calls this at the first byte of a request.
        super().on_message_begin()
        self._has_advanced = True
        self._awaits_headers = True
        # Half a request may stand behind one that runs: the time of its headers begins when nothing
        # runs.
        if not self._request_runs:
            self._start_timer(HEADERS_TIMEOUT_S)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._awaits_headers:  # else this is a trailer
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._has_advanced = True
        self._awaits_headers = False
        self._awaits_body = True
        self.resting.pop(self, None)
        # Noted here, because the request's task begins only when others have had their turn.
        self.scope[ARRIVED_SCOPE_KEY] = time.monotonic()  # type: ignore[literal-required]
        self.scope[ABORT] = self._cut_off  # type: ignore[literal-required]
        self.scope[UNSENT_BYTES] = self._count_unsent_bytes  # type: ignore[literal-required]
        cycle_before = self.cycle
        super().on_headers_complete()
        has_body = self.scope["method"] != "HEAD"
        if has_body and self.cycle is not None and self.cycle is not cycle_before:
            self.cycle.transport = HeadHolder(self.cycle)  # type: ignore[assignment]
        # uvicorn stops reading at the first request that has to wait.
        if 0 < len(self.pipeline) <= QUEUED_REQUESTS_MAX:
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running_cycle = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._has_advanced = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_advanced = True
        self._awaits_body = False
        super().on_message_complete()
        if not self._request_runs:
            # The rest of the body has ended the time that uvicorn gives to a resting connection.
            self._start_timer(KEEP_ALIVE_S)

    def data_received(self, data: bytes) -> None:
        self._has_advanced = False
        super().data_received(data)
        self._idle_bytes = 0 if self._has_advanced else self._idle_bytes + len(data)
        if self._idle_bytes > HEADERS_BYTES_MAX:
            self._cut_off()
            return
        # An empty line between two requests has ended the time that uvicorn gives to a resting
        # connection. Further ones do not make the new time longer.
        is_at_rest = not (self._request_runs or self._awaits_headers or self._awaits_body)
        if is_at_rest and not self._has_advanced and self._timer is None:
            self._start_timer(KEEP_ALIVE_S)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._request_runs or self.transport.is_closing():
            return
        self._rest()
        if self._awaits_headers:
            self._start_timer(HEADERS_TIMEOUT_S)
        elif self._awaits_body:
            self._start_timer(REST_OF_BODY_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.resting.pop(self, None)
        self.open_connections.pop(self, None)
        self._tcp_below_tls = None  # it refers to this object: a circle
        # uvicorn tells only the newest request, which may wait behind the one that runs.
        running_cycle = self._running_cycle
        if running_cycle is not None and not running_cycle.response_complete:
            running_cycle.disconnected = True
            running_cycle.message_event.set()
        self._running_cycle = None
        self.pipeline.clear()
        super().connection_lost(exc)

    @property
    def unsent_bytes(self) -> int:
        """What the process holds because the client does not take it."""
        unsent_bytes = self.transport.get_write_buffer_size()
        # TLS counts what it has not encrypted; the rest is with the transport below.
        if self._tcp_below_tls is not None:
            unsent_bytes += self._tcp_below_tls.get_write_buffer_size()
        return unsent_bytes

    def _count_unsent_bytes(self) -> int:
        return self.unsent_bytes

    def is_stalled(self, now: float) -> bool:
        """Return whether the client has taken nothing for `STALL_S`, though its answer is complete.

        A response that is not complete looks after that itself.
        """
        unsent_bytes = self.unsent_bytes
        if (
            not unsent_bytes
            or unsent_bytes < self._unsent_bytes_before
            or not self._taken_s
            or (self._request_runs and not self.transport.is_closing())
        ):
            self._taken_s = now
        self._unsent_bytes_before = unsent_bytes
        return now - self._taken_s >= STALL_S

    def cut_off(self, reason: CutReason) -> None:
        """Close the connection at once, with what is unsent."""
        unsent_bytes = self.unsent_bytes
        log.warning("a client was cut off with %d bytes unsent: %s", unsent_bytes, reason)
        self._cut_off()

    @property
    def _request_runs(self) -> bool:
        """Whether a request runs. Responses are in order, so the last request ends last."""
        return self.cycle is not None and not self.cycle.response_complete

    def _rest(self) -> None:
        """Take note that no request runs on this connection.

        If that is so of too many, the one that has waited longest is closed.
        """
        self.resting[self] = None
        if len(self.resting) > resting_connections_limit():
            longest = next(iter(self.resting))
            del self.resting[longest]
            longest._cut_off()

    def _start_timer(self, seconds: float) -> None:
        """Close the connection after so many seconds, and not when the timer before says."""
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._cut_off)

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _cut_off(self) -> None:
        """Close the connection at once, without a response and with what is unsent.

        One that is closing already would else wait for its client.
        """
        self._stop_timer()
        self.transport.abort()


def find_tcp_below_tls(transport: asyncio.Transport) -> Any:
    """Return the transport that sends what this one has encrypted; None if it is no TLS."""
    tls = getattr(transport, "_ssl_protocol", None)  # asyncio's
    if tls is not None:
        return tls._transport
    tls = transport.get_extra_info("uvloop.sslproto")
    if tls is None:
        return None
    # uvloop's keeps its transport in C, where the garbage collector sees it. The other transport
    # that it refers to is the one that it serves.
    transports = [
        referent
        for referent in gc.get_referents(tls)
        if hasattr(referent, "get_write_buffer_size") and referent is not transport
    ]
    return transports[0] if transports else None


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
        """Leave signals alone: the gateway handles SIGTERM (`termination.drain_on_sigterm`)."""
        yield


class HttpListener:
    """One gateway's HTTP server. Gateways of one machine share the port."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings, tag: str = "") -> None:
        """`tag` is what ids begin with that this gateway gives to requests."""
        self._settings = settings
        config = uvicorn.Config(
            with_request_id(app, tag),
            http=HeaderLimitProtocol,
            # An upgrade is a request like others, and the guard refuses those to WebSockets.
            ws="none",
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

    An id that is given here begins with `tag`. The scope gets the server's own `send` for streams,
    whose events need no wrapper.
    """

    async def app_with_request_id(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        headers = scope["headers"]
        request_id = next((value for name, value in headers if name == REQUEST_ID_HEADER), b"")
        if not request_id:
            # An empty header would be a second id.
            headers[:] = [header for header in headers if header[0] != REQUEST_ID_HEADER]
            # The tag replaces as many random digits, so that an id's length does not show the tag.
            request_id = (tag + uuid.uuid4().hex[len(tag) :]).encode()
            headers.append((REQUEST_ID_HEADER, request_id))

        async def send_with_id(message: Message) -> None:
            if message["type"] != "http.response.start":
                await send(message)
                return
            response_headers = [*message.get("headers", ()), (REQUEST_ID_HEADER, request_id)]
            sending = send({**message, "headers": response_headers})
            try:
                # The head waits until the client has read the response before this one.
                await wait_for_reader(sending, scope.get(UNSENT_BYTES))
            except Stalled as stalled:
                log.warning("a client was cut off: %s", stalled)
                scope[ABORT]()

        scope[RAW_SEND] = send
        await app(scope, receive, send_with_id)

    return app_with_request_id
