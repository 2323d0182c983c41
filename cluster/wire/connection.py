"""Framed connections: length-prefixed MessagePack over TCP, both ways, with heartbeats.

`dial` and `Listener` make `Connection`s, once both ends have proved that they know the cluster's
secret (`handshake`). A connection ends when the peer closes it, is silent for `limit_s`, sends a
malformed frame, or lets more than `BUFFER_MAX` bytes pile up.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec

from ...protos.frames import Heartbeat, Hello
from .handshake import Caller, admit, greet

log = logging.getLogger(__name__)

BEAT_S, IDLE_BEAT_S, BUSY_S = 0.25, 1.0, 5.0  # quick while there is traffic, and a while after
SUSPECT_S = 1.0  #: a peer that had much to say and is as silent as this may be frozen
FRAME_MAX = 64 << 20
BUFFER_MAX = 16 << 20
HELLO_S = 5.0
TURN_S = 0.005  #: a peer that never ceases to speak leaves the loop to others after this
_LENGTH = struct.Struct(">I")
_BEAT = Heartbeat()


class Connection:
    """One peer. `send` never blocks; iterate `frames()` until the connection ends."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, receives: Any, name: str
    ) -> None:
        self.name = name
        self._reader, self._writer = reader, writer
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(receives).decode
        self._loop = asyncio.get_running_loop()
        self._sent = self._heard = self._busy = self._loop.time()
        self.silent = False  #: suspected to be frozen
        self.suspect: Callable[[], None] | None = None  #: called when it falls silent
        self._patience = SUSPECT_S  #: doubles with each false alarm
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def closed(self) -> bool:
        return self._writer.is_closing()

    async def drain(self) -> None:
        """Waits until the peer has taken most of what was sent. Raises ConnectionError."""
        await self._writer.drain()

    def send(self, frame: Any) -> None:
        """Queues a frame. A peer that does not read is cut off, it never stalls the sender."""
        if self.closed:
            return
        data = self._encode(frame)
        self._writer.write(_LENGTH.pack(len(data)) + data)
        self._sent = self._loop.time()
        if frame is not _BEAT:
            self._busy = self._sent
        if self._writer.transport.get_write_buffer_size() > BUFFER_MAX:
            log.warning("%s does not read: connection closed", self.name)
            self.abort()

    async def receive(self) -> Any:
        """The next frame. Raises ConnectionError or IncompleteReadError at the end."""
        (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        if size > FRAME_MAX:
            raise ConnectionError(f"{self.name}: frame of {size} bytes")
        data = await self._reader.readexactly(size)
        self._heard = self._loop.time()
        try:
            frame = self._decode(data)
            if not isinstance(frame, Heartbeat):
                self._busy = self._heard
            return frame
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConnectionError(f"{self.name}: malformed frame: {error}") from None

    async def frames(self, limit_s: float) -> AsyncGenerator[Any, None]:
        """Frames until the end; sends and checks heartbeats meanwhile."""
        beats = self._loop.create_task(self._keep_alive(limit_s))
        turn = time.monotonic()
        try:
            while True:
                frame = await self.receive()  # does not wait while it has one
                if not isinstance(frame, Heartbeat):
                    yield frame
                    if time.monotonic() - turn > TURN_S:
                        await asyncio.sleep(0)
                        turn = time.monotonic()
        except (ConnectionError, asyncio.IncompleteReadError, OSError) as error:
            if isinstance(error, ConnectionError) and str(error):
                log.info("connection to %s ended: %s", self.name, error)
        finally:
            beats.cancel()
            self.abort()

    async def _keep_alive(self, limit_s: float) -> None:
        checked = self._loop.time()
        while True:
            beat = BEAT_S if checked - self._busy < BUSY_S else min(IDLE_BEAT_S, limit_s / 3)
            await asyncio.sleep(beat)
            now = self._loop.time()
            late = now - checked - beat  # we were held up ourselves: that is not its silence
            checked = now
            self._heard += max(late, 0.0)
            if now - self._sent >= beat * 0.9:
                self.send(_BEAT)
            if now - self._heard > limit_s:
                log.warning("%s was silent for %.1f s: connection closed", self.name, limit_s)
                self.abort()
                return
            self._listen(now - self._heard, beat == BEAT_S)

    def _listen(self, silence: float, busy: bool) -> None:
        """Suspicion is cheap: streams go on elsewhere, and if it speaks again nothing is lost."""
        if self.silent and silence <= self._patience:
            self.silent = False
            self._patience *= 2
            log.warning("%s speaks again: it was no failure", self.name)
        elif not self.silent and busy and silence > self._patience:
            self.silent = True
            if self.suspect:
                self.suspect()

    def abort(self) -> None:
        """Closes at once; whoever reads sees the end."""
        self._writer.transport.abort()


async def dial(address: str, caller: Caller, receives: Any, name: str) -> Connection:
    """Connects; both sides prove that they know the secret. Raises OSError or TimeoutError."""
    host, port = address.rsplit(":", 1)
    async with asyncio.timeout(HELLO_S):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            await greet(reader, writer, caller)
        except BaseException:
            writer.transport.abort()
            raise
    return Connection(reader, writer, receives, name)


class Listener:
    """Accepts peers that know the secret and hands them to `serve(connection, hello)`."""

    def __init__(
        self, secret: str, receives: Any, serve: Callable[[Connection, Hello], Awaitable[None]]
    ) -> None:
        self._secret, self._receives, self._serve = secret, receives, serve
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> str:
        """Listens on a free port of `host`; returns "host:port"."""
        self._server = await asyncio.start_server(self._accept, host, 0)
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HELLO_S):
                hello = await admit(reader, writer, self._secret)
        except (OSError, TimeoutError) as error:
            log.warning("refused a connection: %s", error or type(error).__name__)
            writer.transport.abort()
            return
        await self._serve(Connection(reader, writer, self._receives, hello.name), hello)

    def close(self) -> None:
        if self._server:
            self._server.close()
