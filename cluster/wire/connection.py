"""Framed connections: length-prefixed MessagePack over TCP, both ways, with heartbeats.

`dial` and `FrameListener` make a `FrameConnection` once both ends have proved that they know the
cluster's secret (`handshake`). A proof holds only for the address that was dialled, so a stranger
who listens where a process was before cannot pass it on to another process.

A connection ends when the peer closes it, is silent for the limit of its reader, sends a malformed
frame, or lets more than `BUFFER_BYTES_MAX` bytes pile up.

A peer is busy if frames other than heartbeats went either way in the last `BUSY_FOR_S`. A busy peer
that falls silent is suspected to be frozen after `SUSPECT_AFTER_S`, and later than that after false
alarms. The connection's owner may then use other peers; if the peer speaks again, nothing is lost.
Where the silence limit is no longer than that, the connection ends without a suspicion.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import struct
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec

from ...protos.frames import Heartbeat, Hello
from ...protos.handshake import (
    HANDSHAKE_TIMEOUT_S,
    UNPROVED_CALLERS_MAX,
    PeerIdentity,
    secret_of_listener,
)
from .handshake import admit, greet

log = logging.getLogger(__name__)

#: A frame listener's own secret is derived from the cluster's secret, this kind and its address.
LISTENER_KIND = "frames"
BUSY_HEARTBEAT_S = 0.25  #: Between heartbeats while there is traffic, and for `BUSY_FOR_S` after.
BUSY_FOR_S = 5.0  #: After the last frame that was no heartbeat.
IDLE_HEARTBEAT_S = 1.0  #: Between heartbeats otherwise.
#: A busy peer that is silent for longer is suspected to be frozen. Each false alarm doubles the
#: time for that peer.
SUSPECT_AFTER_S = 1.0
BUFFER_BYTES_MAX = 16 << 20  #: Unsent bytes; a peer that lets more pile up is cut off.
#: The receiver refuses a longer frame. The sender's own limit hardly lets one out: unsent, it alone
#: would exceed `BUFFER_BYTES_MAX`.
FRAME_BYTES_MAX = BUFFER_BYTES_MAX
#: When so many seconds have passed since it last did so, `frames` lets the loop's other tasks run
#: once after the frame at hand.
TURN_S = 0.005
#: Frames that are sent in one turn of the loop leave together, as each write is a system call that
#: wakes the peer; but no later than when so many bytes wait, or after so many seconds if there are
#: further frames.
GATHERED_BYTES_MAX = 64 << 10
GATHERED_S_MAX = 0.001
REFUSAL_LOG_S = 60.0  #: Between two lines of the log about callers that were refused.
_LENGTH = struct.Struct(">I")  #: Stands in front of each frame: its bytes.
_HEARTBEAT = Heartbeat()  #: The one that is sent: `send` tells it from other frames by identity.


class FrameConnection:
    """A connection to one peer.

    `send` never blocks. Iterate over `frames` until the connection ends. `receives` is the union
    of the frame types that the peer may send.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, receives: Any, name: str
    ) -> None:
        self.name = name  #: Of the peer.
        self._reader = reader
        self._writer = writer
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(receives).decode
        self._loop = asyncio.get_running_loop()
        #: Times of the loop's clock: of the last frame out, the last one in, and the last one of
        #: either that was no heartbeat. The second moves on by this process's own delays.
        self._sent_at = self._loop.time()
        self._received_at = self._sent_at
        self._busy_at = self._sent_at
        self._gathered = bytearray()  #: Frames that leave at the end of the loop's turn.
        self._gathered_since = 0.0  #: When the first of them was sent (`time.monotonic`).
        self.suspected = False  #: True while the peer is suspected to be frozen.
        self.on_suspected: Callable[[], None] | None = None  #: Called when a suspicion begins.
        self.ended_by_silence = False  #: True once the peer was given up as it said nothing.
        #: Seconds of a busy peer's silence before it is suspected; doubles with each false alarm.
        self._patience = SUSPECT_AFTER_S
        raw_socket = writer.get_extra_info("socket")
        # Small frames leave at once, instead of waiting for the acknowledgement of those before.
        raw_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def closed(self) -> bool:
        """Whether this end has closed, or is closing."""
        return self._writer.is_closing()

    @property
    def silent_s(self) -> float:
        """Seconds for which the peer has sent no frame, not even a heartbeat.

        Time in which this process itself was held up does not count. It is subtracted even if a
        frame came after it, so for a moment the value may be below 0.
        """
        return self._loop.time() - self._received_at

    async def drain(self) -> None:
        """Wait until the peer has taken most of what was sent. Raises ConnectionError."""
        self._write_gathered()
        await self._writer.drain()

    def send(self, frame: Any) -> None:
        """Queue a frame of `protos.frames`, which leaves before the loop's next turn is over.

        A peer that does not read is cut off; it never stalls the sender. A frame for a connection
        that is closed is dropped.
        """
        if self.closed:
            return
        data = self._encode(frame)
        is_first = not self._gathered
        self._gathered += _LENGTH.pack(len(data))
        self._gathered += data
        self._sent_at = self._loop.time()
        if frame is not _HEARTBEAT:
            self._busy_at = self._sent_at
        if is_first:
            self._gathered_since = time.monotonic()
            self._loop.call_soon(self._write_gathered)
        if (
            len(self._gathered) > GATHERED_BYTES_MAX
            or time.monotonic() - self._gathered_since > GATHERED_S_MAX
        ):
            self._write_gathered()

    def _write_gathered(self) -> None:
        """Give what was gathered to the socket, and close if the peer lets too much pile up."""
        if not self._gathered or self.closed:
            return
        gathered, self._gathered = self._gathered, bytearray()
        self._writer.write(gathered)
        if self._writer.transport.get_write_buffer_size() > BUFFER_BYTES_MAX:
            log.warning("%s does not read: connection closed", self.name)
            self.abort()

    async def receive(self) -> Any:
        """Return the next frame, heartbeats included.

        Raises ConnectionError or IncompleteReadError at the end of the connection.
        """
        (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        if size > FRAME_BYTES_MAX:
            raise ConnectionError(f"{self.name}: frame of {size} bytes")
        data = await self._reader.readexactly(size)
        self._received_at = self._loop.time()
        try:
            frame = self._decode(data)
        # RecursionError: the arrays in it are nested deeper than the decoder goes.
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConnectionError(f"{self.name}: malformed frame: {error}") from None
        if not isinstance(frame, Heartbeat):
            self._busy_at = self._received_at
        return frame

    async def frames(self, silence_limit_s: float) -> AsyncGenerator[Any, None]:
        """Yield frames, without heartbeats, until the connection ends.

        Heartbeats are sent and awaited meanwhile: a peer that sends nothing at all for longer than
        `silence_limit_s` ends the connection. Closing the generator closes the connection. The end
        raises nothing, whatever its reason.
        """
        heartbeats = self._loop.create_task(self._exchange_heartbeats(silence_limit_s))
        turn_began = time.monotonic()
        try:
            while True:
                frame = await self.receive()  # does not yield to the loop while a frame is there
                if not isinstance(frame, Heartbeat):
                    yield frame
                if time.monotonic() - turn_began > TURN_S:
                    await asyncio.sleep(0)
                    turn_began = time.monotonic()
        except (ConnectionError, asyncio.IncompleteReadError, OSError) as error:
            # A peer that just closes (IncompleteReadError) is nothing to log.
            if isinstance(error, ConnectionError) and str(error):
                log.info("connection to %s ended: %s", self.name, error)
        finally:
            heartbeats.cancel()
            self.abort()

    async def _exchange_heartbeats(self, silence_limit_s: float) -> None:
        """Send heartbeats when nothing else is sent; close when the peer is silent for too long.

        Every frame of the peer counts, not only its heartbeats.
        """
        checked_at = self._loop.time()
        while True:
            busy = checked_at - self._busy_at < BUSY_FOR_S
            # Three heartbeats fit into the peer's limit, if that is as long as this end's. (The
            # configuration's minimum is 1 s, so those of a busy connection do, too.)
            interval_s = BUSY_HEARTBEAT_S if busy else min(IDLE_HEARTBEAT_S, silence_limit_s / 3)
            await asyncio.sleep(interval_s)
            now = self._loop.time()
            # When this process itself was held up, that is not the peer's silence: it could not
            # read what the peer sent.
            lateness_s = now - checked_at - interval_s
            self._received_at += max(lateness_s, 0.0)
            checked_at = now
            # 0.9: the last heartbeat was sent just after `checked_at` was noted, so a little less
            # than a whole interval may have passed.
            if now - self._sent_at >= interval_s * 0.9:
                self.send(_HEARTBEAT)
            silence_s = now - self._received_at
            if silence_s > silence_limit_s:
                log.warning(
                    "%s was silent for %.1f s: connection closed", self.name, silence_limit_s
                )
                self.ended_by_silence = True
                self.abort()
                return
            self._update_suspicion(silence_s, busy)

    def _update_suspicion(self, silence_s: float, busy: bool) -> None:
        """Begin or end the suspicion that the peer is frozen.

        A suspicion is cheap: streams go on elsewhere, and if the peer speaks again nothing is lost.
        """
        if self.suspected and silence_s <= self._patience:
            self.suspected = False
            self._patience *= 2
            log.warning("%s speaks again: it was no failure", self.name)
        elif not self.suspected and busy and silence_s > self._patience:
            self.suspected = True
            if self.on_suspected:
                self.on_suspected()

    def abort(self) -> None:
        """Close at once. Whoever iterates over `frames` sees the end.

        What the socket takes of what was sent still leaves.
        """
        self._write_gathered()
        self._writer.transport.abort()


async def dial(
    address: str, identity: PeerIdentity, receives: Any, peer_name: str
) -> FrameConnection:
    """Connect to "host:port"; both sides prove that they know the secret.

    `receives` is as in `FrameConnection`. `peer_name` becomes the connection's name; nobody checks
    it. Raises OSError, or TimeoutError after `HANDSHAKE_TIMEOUT_S`.
    """
    host, port = address.rsplit(":", 1)
    identity = replace(identity, secret=secret_of_listener(identity.secret, LISTENER_KIND, address))
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            await greet(reader, writer, identity)
        except BaseException:
            writer.transport.abort()
            raise
    return FrameConnection(reader, writer, receives, peer_name)


class FrameListener:
    """Accepts peers that know the secret and hands them to `serve(connection, hello)`.

    `receives` is the union of the frame types that peers may send. `serve` runs in a task of the
    connection, and has to read `connection.frames`: only a reader notices silence, or the end.
    """

    def __init__(
        self,
        secret: str,
        receives: Any,
        serve: Callable[[FrameConnection, Hello], Awaitable[None]],
    ) -> None:
        self._secret = secret
        self._own_secret = ""  #: What callers prove to know; set by `start`.
        self._receives = receives
        self._serve = serve
        self._server: asyncio.Server | None = None
        #: Callers that have proved nothing yet, the oldest first.
        self._unproved: dict[asyncio.StreamWriter, None] = {}
        self._next_refusal_log_s = -math.inf  #: No line about refused callers before this time.
        self._unlogged_refusals = 0  #: Since the last such line.

    async def start(self, host: str) -> str:
        """Listen on a free port of `host`; return "host:port"."""
        # The kernel lets so many callers wait; with fewer, peers that dial at once lose a second.
        self._server = await asyncio.start_server(
            self._accept, host, 0, backlog=UNPROVED_CALLERS_MAX, start_serving=False
        )
        address = f"{host}:{self._server.sockets[0].getsockname()[1]}"
        self._own_secret = secret_of_listener(self._secret, LISTENER_KIND, address)
        await self._server.start_serving()
        return address

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Let a caller prove itself in time, and serve it. This is a task for each caller."""
        self._unproved[writer] = None
        if len(self._unproved) > UNPROVED_CALLERS_MAX:
            oldest = next(iter(self._unproved))
            del self._unproved[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                hello = await admit(reader, writer, self._own_secret)
        except (OSError, TimeoutError) as error:  # a ConnectionError of `admit` is an OSError
            self._log_refusal(str(error) or type(error).__name__)
            writer.transport.abort()
            return
        finally:
            self._unproved.pop(writer, None)
        connection = FrameConnection(reader, writer, self._receives, hello.name)
        await self._serve(connection, hello)

    def _log_refusal(self, why: str) -> None:
        """Log that a caller was refused; at most once in `REFUSAL_LOG_S`, as anybody may call."""
        now = time.monotonic()
        if now < self._next_refusal_log_s:
            self._unlogged_refusals += 1
            return
        others = ""
        if self._unlogged_refusals:
            others = f" (and {self._unlogged_refusals} others since the last such line)"
        log.warning("refused a connection: %s%s", why, others)
        self._next_refusal_log_s = now + REFUSAL_LOG_S
        self._unlogged_refusals = 0

    def close(self) -> None:
        """Accept no more peers. Open connections stay open."""
        if self._server:
            self._server.close()
