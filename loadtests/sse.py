"""Streaming HTTP/1.1 over one socket, with the time at which the kernel got each piece.

`Response` and `Events` are pure: bytes in, body and events out. `Connection` reads with
`recvmsg`: where the kernel stamps received data (Linux, SO_TIMESTAMPNS, no TLS), a piece counts
from that moment, and not from when this process came to read it; the difference is kept as
`lags_s`. A read that takes several pieces has the stamp of the last one. Under gevent the socket is
cooperative; nothing else here knows it.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

SO_TIMESTAMPNS = 35  #: Linux; the same number as its ancillary message
HEAD_MAX, EVENT_MAX = 64 << 10, 8 << 20
OLDEST_S = 60.0  #: an older stamp is a clock that was set


class ProtocolError(Exception):
    """The answer is not HTTP as we know it."""


class Response:
    """Decoder of one response. `feed` returns the body's new bytes."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.done = False
        self._buffer = b""
        self._left = -1  #: bytes of the body or of a chunk; -1: not known
        self._chunked = False

    @property
    def reusable(self) -> bool:
        return self.done and self.headers.get("connection", "").lower() != "close"

    def feed(self, data: bytes) -> bytes:
        if not data:
            return self._end()
        self._buffer += data
        if not self.status and not self._head():
            return b""
        return self._chunks() if self._chunked else self._plain()

    def _end(self) -> bytes:
        if self.status and not self._chunked and self._left < 0:
            self.done = True  # the body is what came until the end
        if not self.done:
            raise ProtocolError("the connection was closed in mid-answer")
        return b""

    def _head(self) -> bool:
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            if len(self._buffer) > HEAD_MAX:
                raise ProtocolError("no HTTP response")
            return False
        lines = head.decode("latin-1").split("\r\n")
        parts = lines[0].split(" ", 2)
        if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdigit():
            raise ProtocolError("no HTTP response")
        self._buffer = rest
        if parts[1].startswith("1"):  # interim
            return self._head() if rest else False
        self.status = int(parts[1])
        for line in lines[1:]:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self._chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        if not self._chunked and "content-length" in self.headers:
            self._left = int(self.headers["content-length"])
        return True

    def _plain(self) -> bytes:
        body, self._buffer = self._buffer, b""
        if self._left >= 0:
            body = body[: self._left]
            self._left -= len(body)
            self.done = self._left == 0
        return body

    def _chunks(self) -> bytes:
        parts = []
        while not self.done:
            if self._left < 0:
                line, found, rest = self._buffer.partition(b"\r\n")
                if not found:
                    break
                try:
                    self._left = int(line.split(b";")[0], 16)
                except ValueError:
                    raise ProtocolError("a chunk without a size") from None
                self._buffer = rest
            if len(self._buffer) < self._left + 2:
                break
            self.done = self._left == 0
            parts.append(self._buffer[: self._left])
            self._buffer = self._buffer[self._left + 2 :]
            self._left = -1
        return b"".join(parts)


class Events:
    """Server-sent events: bytes in, (type, data) of each complete event out."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        self._buffer = (self._buffer + data).replace(b"\r\n", b"\n")
        if len(self._buffer) > EVENT_MAX:
            raise ProtocolError("an event without an end")
        *blocks, self._buffer = self._buffer.split(b"\n\n")
        return [found for block in blocks if (found := _event(block))]


def _event(block: bytes) -> tuple[str, bytes] | None:
    name, data = "", []
    for line in block.split(b"\n"):
        key, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if key == b"data":
            data.append(value)
        elif key == b"event":
            name = value.decode()
    return (name, b"\n".join(data)) if data else None


class Connection:
    """One connection, one request at a time. Raises OSError and ProtocolError."""

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        self._host = parts.netloc.rpartition("@")[2]
        self._prefix = parts.path.rstrip("/")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        self._socket = socket.create_connection((parts.hostname or "", port), timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stamped = parts.scheme != "https"
        if parts.scheme == "https":
            context = ssl.create_default_context()
            self._socket = context.wrap_socket(self._socket, server_hostname=parts.hostname)
        else:
            try:
                self._socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            except OSError:
                self._stamped = False
        self.lags_s: list[float] = []  #: from the kernel's stamp to ours, of each read
        self.response = Response()

    def send(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> float:
        """When it was handed over, by `perf_counter`."""
        self.response = Response()
        lines = [f"{method} {self._prefix}{path} HTTP/1.1", f"host: {self._host}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"content-length: {len(body)}", "", ""]
        sent = time.perf_counter()
        self._socket.sendall("\r\n".join(lines).encode() + body)
        return sent

    def pieces(self) -> Iterator[tuple[float, bytes]]:
        """(when it arrived, bytes) of the body until its end."""
        while not self.response.done:
            stamp, data = self._read()
            body = self.response.feed(data)
            if body:
                yield stamp, body

    def body(self) -> bytes:
        return b"".join(body for _, body in self.pieces())

    def _read(self) -> tuple[float, bytes]:
        if not self._stamped:
            data = self._socket.recv(65536)
            return time.perf_counter(), data
        data, extra, _, _ = self._socket.recvmsg(65536, 64)
        now, wall = time.perf_counter(), time.time()
        for level, kind, value in extra:
            if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS and len(value) == 16:
                seconds, nanoseconds = struct.unpack("qq", value)
                lag = wall - seconds - nanoseconds / 1e9
                if 0 <= lag < OLDEST_S:
                    self.lags_s.append(lag)
                    return now - lag, data
        return now, data

    def close(self) -> None:
        self._socket.close()
