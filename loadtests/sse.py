"""Streaming HTTP/1.1 over one socket, with the time at which the kernel got each piece.

`HttpResponseDecoder` and `EventDecoder` are pure: bytes in, body and events out. `HttpConnection`
reads with `recvmsg`. Where the kernel stamps received data (Linux, SO_TIMESTAMPNS, no TLS), a piece
counts from that moment, and not from when this process came to read it; the difference is kept as
`lags_s`. A read that takes several pieces has the stamp of the last one. Under gevent the socket is
cooperative; nothing else here knows of gevent.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Iterator
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

import httptools

SO_TIMESTAMPNS = 35  #: Linux's socket option; its messages with stamps have the same number
TIMESPEC = struct.Struct("qq")  #: seconds and nanoseconds of such a message
EVENT_BYTES_LIMIT = 8 << 20  #: of one event: more without an end is no event stream
READ_BYTES = 65536  #: taken by one read, at most
OLDEST_STAMP_S = 60.0  #: an older stamp is a clock that was set


class ProtocolError(Exception):
    """The answer is not HTTP as this client knows it."""


class HttpResponseDecoder:
    """Decodes one response. `feed` returns the body's new bytes. Raises ProtocolError."""

    def __init__(self) -> None:
        self.status = 0  #: 0 until the head is complete
        self.headers: dict[str, str] = {}  #: by name in lower case
        self.done = False  #: True once the whole response has been fed
        self._parser = httptools.HttpResponseParser(self)
        self._keep_alive = False
        self._body_parts: list[bytes] = []  #: that `feed` has not returned yet

    @property
    def reusable(self) -> bool:
        """True when the connection can carry another request."""
        return self.done and self._keep_alive

    def feed(self, data: bytes) -> bytes:
        """Takes what was received; no bytes are the end of the connection."""
        if not data:
            self._end()
            return b""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self.done:  # what follows the answer is of no interest
                raise ProtocolError(f"no HTTP response: {error}") from None
        body = b"".join(self._body_parts)
        self._body_parts.clear()
        return body

    def _end(self) -> None:
        """Takes the end of the connection. Raises ProtocolError if the response was not whole."""
        has_length = "content-length" in self.headers or "transfer-encoding" in self.headers
        if self.status and not has_length:
            self.done = True  # the body is what came until the end
        if not self.done:
            raise ProtocolError("the connection was closed in mid-answer")

    # ---- called by the parser --------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # an interim response: the real one follows
            self.headers.clear()
            return
        self.status = status
        self._keep_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._body_parts.append(body)

    def on_message_complete(self) -> None:
        self.done = self.status > 0


class ServerSentEvent(NamedTuple):
    """One event of a stream."""

    name: str  #: empty if the server gave none
    data: bytes  #: its data lines, joined by newlines


class EventDecoder:
    """Decodes server-sent events: bytes in, each complete event with data out.

    httpx-sse's public parser pulls text from an `httpx.Response`. Where each event comes in a piece
    of its own it takes 3.6 us an event, against 2.3 us here, and the pieces' times get lost in it.
    """

    def __init__(self) -> None:
        self._buffer = b""  #: the event that is not complete

    def feed(self, data: bytes) -> list[ServerSentEvent]:
        """Takes what was received; returns the events that are complete now.

        Raises ProtocolError for an event above `EVENT_BYTES_LIMIT`.
        """
        self._buffer = (self._buffer + data).replace(b"\r\n", b"\n")
        if len(self._buffer) > EVENT_BYTES_LIMIT:
            raise ProtocolError("an event without an end")
        *blocks, self._buffer = self._buffer.split(b"\n\n")
        events = map(_parse_event, blocks)
        return [event for event in events if event is not None]


def _parse_event(block: bytes) -> ServerSentEvent | None:
    """Returns None for an event without data."""
    name = ""
    data_lines: list[bytes] = []
    for line in block.split(b"\n"):
        key, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if key == b"data":
            data_lines.append(value)
        elif key == b"event":
            name = value.decode()
    return ServerSentEvent(name, b"\n".join(data_lines)) if data_lines else None


def _address_family(host: str) -> socket.AddressFamily | None:
    """Returns the family of an IP address; None for a name, or an address with a scope (`%eth0`).

    `connect` takes the scope apart from the address; `socket.create_connection` finds it out.
    """
    try:
        address = ip_address(host)
    except ValueError:
        return None
    if "%" in host:
        return None
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


def _connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Returns a connected socket. Raises OSError.

    A host that is an IP address is connected to directly. Under gevent `socket.create_connection`
    asks a thread even for that, and thousands of new connections wait for ten such threads.
    """
    family = _address_family(host)
    if family is None:
        return socket.create_connection((host, port), timeout_s)
    connecting = socket.socket(family, socket.SOCK_STREAM)
    try:
        connecting.settimeout(timeout_s)
        connecting.connect((host, port))
    except BaseException:  # gevent's timeouts derive from it
        connecting.close()
        raise
    return connecting


class HttpConnection:
    """One connection, one request at a time. Raises OSError and ProtocolError.

    After `send`, read `pieces` or `body` to the end; then the connection takes another request if
    `response.reusable` is true.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        """Connects. `timeout_s` bounds the connecting, and each wait for bytes."""
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        self._host = parts.netloc.rpartition("@")[2]
        self._prefix = parts.path.rstrip("/")
        port = parts.port or (443 if secure else 80)
        self._socket = _connect(parts.hostname or "", port, timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if secure:
            context = ssl.create_default_context()
            self._socket = context.wrap_socket(self._socket, server_hostname=parts.hostname)
        #: True when the kernel stamps what is received.
        self._stamped = not secure and self._enable_stamps()
        self.lags_s: list[float] = []  #: from the kernel's stamp to this process, of each read
        self.response = HttpResponseDecoder()

    def _enable_stamps(self) -> bool:
        """Asks the kernel for stamps; returns whether this system has them."""
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        except OSError:
            return False
        return True

    def send(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> float:
        """Sends a request; returns when it was handed over, by `perf_counter`."""
        self.response = HttpResponseDecoder()
        lines = [f"{method} {self._prefix}{path} HTTP/1.1", f"host: {self._host}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"content-length: {len(body)}", "", ""]
        sent_s = time.perf_counter()
        self._socket.sendall("\r\n".join(lines).encode() + body)
        return sent_s

    def pieces(self) -> Iterator[tuple[float, bytes]]:
        """Yields (when it arrived by `perf_counter`, bytes) of the body until its end."""
        while not self.response.done:
            stamp_s, data = self._read()
            body = self.response.feed(data)
            if body:
                yield stamp_s, body

    def body(self) -> bytes:
        """Returns the whole body; waits for its end."""
        return b"".join(body for _, body in self.pieces())

    def measure_round_trip(self, path: str) -> float:
        """Returns the seconds from a GET until the first piece of the answer's body.

        Until the end of an answer without a body, such as that of vLLM's `/health`.
        """
        sent_s = self.send("GET", path, b"", {})
        arrivals_s = [arrived_s for arrived_s, _ in self.pieces()]
        arrived_s = arrivals_s[0] if arrivals_s else time.perf_counter()
        return arrived_s - sent_s

    def _read(self) -> tuple[float, bytes]:
        """Returns (when the data arrived, by `perf_counter`; the data, empty at the end)."""
        if not self._stamped:
            data = self._socket.recv(READ_BYTES)
            return time.perf_counter(), data
        data, messages, _, _ = self._socket.recvmsg(READ_BYTES, 64)
        # Stamps are of the wall clock: the same moment on both clocks turns one into the other.
        now_s = time.perf_counter()
        wall_s = time.time()
        for level, kind, value in messages:
            is_stamp = level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS
            if is_stamp and len(value) == TIMESPEC.size:
                seconds, nanoseconds = TIMESPEC.unpack(value)
                lag_s = wall_s - seconds - nanoseconds / 1e9
                if 0 <= lag_s < OLDEST_STAMP_S:
                    self.lags_s.append(lag_s)
                    return now_s - lag_s, data
        return now_s, data

    def close(self) -> None:
        """Closes the connection; a second call does nothing."""
        self._socket.close()
