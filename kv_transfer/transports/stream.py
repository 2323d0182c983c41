"""What the transports over sockets share: one connection per direction, dialled by the writer.

Life of a connection:

1. The first `notify` or `write` to a peer dials it. Frames wait in the connection's queue until the
   peer has accepted (`DIAL_TIMEOUT_S`) and the handshake is done (`HANDSHAKE_TIMEOUT_S`).
2. The handshake (`protos/handshake.py`) proves to both ends that the other one knows the cluster's
   secret, to the reader the writer's agent name, and to the writer that it reached the agent which
   it dialled. A caller that has proved nothing is nobody: however it ends, no peer is lost by it.
3. Every frame is a notification, or a write with its data and its notification. A frame is
   `HEADER`, the note, and for a write the table of its runs.
4. When either end closes, or a peer does not read, the agent hangs up in both directions, ends all
   writes to the peer and reports one `PeerDisconnected`.

No call blocks: sockets are non-blocking, and `poll` drives all progress.
"""

from __future__ import annotations

import enum
import errno
import itertools
import logging
import os
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from ...protos.handshake import (
    HANDSHAKE_TIMEOUT_S,
    LENGTH,
    UNPROVED_CALLERS_MAX,
    DiallerHandshake,
    HandshakeRefused,
    ListenerHandshake,
    PeerIdentity,
    message_size,
    secret_of_listener,
    with_length,
)
from ..errors import PeerLost
from ..transport import (
    NotificationReceived,
    PeerCard,
    PeerDisconnected,
    PostedWriteEnded,
    TransportEvent,
)

log = logging.getLogger(__name__)


class FrameKind(enum.IntEnum):
    """What a frame carries; the values travel on the wire."""

    NOTIFICATION = 1  #: a note alone
    WRITE = 2  #: the table of runs follows, then their bytes; the note is delivered after these


HEADER = struct.Struct("<BIII")  #: kind, bytes of the note, bytes of a unit, number of runs
RUN_BYTES = 8  #: one run in a frame's table: first unit and number of units, int32 each
NOTE_BYTES_LIMIT = 1 << 20  #: more than any note has; a larger one is a malformed frame
#: Notes and tables of runs that wait for one peer. A peer with more waiting does not read: it is
#: lost.
WAITING_BYTES_LIMIT = 16 << 20
DIAL_TIMEOUT_S = 2.0  #: for the peer's kernel to accept the connection
NO_ANSWER = "it does not answer"
HUNG_UP = "it hung up before it had proved who it is"
REFUSAL_LOG_S = 60.0  #: between two lines of the log about callers that were refused
ACCEPT_LIMIT = 64  #: callers that one poll accepts
SYSTEM_CALL_LIMIT = 64  #: system calls at one look at a socket: one busy peer starves no other
SEND_BUFFER_LIMIT = 64  #: buffers in one `sendmsg`


@dataclass(frozen=True, slots=True)
class EndOfWrite:
    """A place in a queue: once all before it has been sent, the write's source may be reused."""

    handle: int  #: of the write, as `write` returned it


FramePart = memoryview | EndOfWrite  #: what a connection's queue holds: bytes, and marks in them
#: Yields the buffers to fill next, and is sent the number of bytes that were read into them.
FrameParser = Generator[list[memoryview], int, None]
SocketAddress = tuple[str, int] | bytes  #: of TCP: host and port; of a unix socket: its name
KIND = "kv"  #: what a dialling agent calls itself in the handshake


def frame_header(kind: FrameKind, note: bytes, unit: int = 0, table: bytes = b"") -> memoryview:
    """Returns a frame up to its data: header, note and table.

    `unit` is the bytes of a unit of the write, `table` holds `RUN_BYTES` for each of its runs;
    both are empty for a notification.
    """
    assert len(note) <= NOTE_BYTES_LIMIT, len(note)
    header = HEADER.pack(kind, len(note), unit, len(table) // RUN_BYTES)
    return memoryview(header + note + table)


def read_exactly(buffer: memoryview) -> FrameParser:
    """Fills the whole of `buffer`, as a part of a parser."""
    while buffer:
        received_bytes = yield [buffer]
        buffer = buffer[received_bytes:]


def read_message() -> Generator[list[memoryview], int, bytes]:
    """Reads one message of the handshake, as a part of a parser. Raises HandshakeRefused."""
    header = memoryview(bytearray(LENGTH.size))
    yield from read_exactly(header)
    message = memoryview(bytearray(message_size(header)))
    yield from read_exactly(message)
    return bytes(message)


def send_message(sock: socket.socket, message: bytes) -> None:
    """Sends one message of the handshake. Raises OSError.

    The socket takes the message at once: nothing was sent before but a shorter message.
    """
    data = with_length(message)
    if sock.send(data) != len(data):
        raise BlockingIOError("the socket does not take a message of the handshake")


class OutgoingConnection:
    """The connection to a peer that this agent writes to, and the frames that wait for it."""

    def __init__(self, peer: str, sock: socket.socket, handshake: DiallerHandshake) -> None:
        """`sock` is non-blocking, and is being connected."""
        self.peer = peer
        self.sock = sock
        self.connected = False  #: True once the peer has accepted the connection.
        self.proved = False  #: True once both ends have proved who they are.
        #: True while no frame may begin: the connection is still being set up.
        self.frames_paused = True
        #: When the setting up fails; the peer's accepting gives it `HANDSHAKE_TIMEOUT_S` more.
        self.setup_deadline_s = time.monotonic() + DIAL_TIMEOUT_S
        self._handshake = handshake
        self._replies = self._parse_replies()
        self._buffers: list[memoryview] = next(self._replies)  #: where the next bytes go
        #: Frames with the bytes that exist only because they wait (not those of the pool).
        self._frames: deque[tuple[int, Iterator[FramePart]]] = deque()
        self._parts: deque[FramePart] = deque()  #: the frames whose turn has come, in parts
        self._waiting_bytes = 0  #: sum over `_frames`

    def put(self, waiting_bytes: int, frame: Iterator[FramePart]) -> None:
        """Queues a frame, whose parts are made when its turn comes.

        `waiting_bytes` counts its bytes outside of the pool. Raises PeerLost when too much waits.
        """
        if self._waiting_bytes + waiting_bytes > WAITING_BYTES_LIMIT:
            raise PeerLost(f"{self.peer}: it does not read")
        self._waiting_bytes += waiting_bytes
        self._frames.append((waiting_bytes, frame))

    def accepted(self) -> None:
        """The peer has accepted the connection; the handshake follows."""
        self.connected = True
        self.setup_deadline_s = time.monotonic() + HANDSHAKE_TIMEOUT_S

    def read_handshake(self) -> bool:
        """Reads what is there of the handshake; returns False at the end of the connection.

        Not a byte behind the handshake is read: what follows may carry files (`shm`). Raises
        HandshakeRefused and OSError.
        """
        while not self.proved:
            try:
                received_bytes = self.sock.recvmsg_into(self._buffers)[0]
            except BlockingIOError:
                return True
            if received_bytes == 0:
                return False
            try:
                self._buffers = self._replies.send(received_bytes)
            except StopIteration:
                self.proved = True
        return True

    def _parse_replies(self) -> FrameParser:
        challenge = yield from read_message()
        send_message(self.sock, self._handshake.answer(challenge))
        welcome = yield from read_message()
        self._handshake.conclude(welcome)

    @property
    def idle(self) -> bool:
        """True when nothing waits to be sent."""
        return not self._frames and not self._parts

    def flush(self) -> list[int]:
        """Sends what the socket takes now; returns the handles of the writes that are complete.

        Raises OSError when the connection is broken, and what making a part raises: PeerLost of a
        peer that the data cannot be copied to.
        """
        completed: list[int] = []
        if not self.connected:
            return completed
        for _ in range(SYSTEM_CALL_LIMIT):
            self._begin_frames()
            completed += self._take_ended_writes()
            buffers = self._leading_buffers()
            if not buffers:
                break
            try:
                sent_bytes = self.sock.sendmsg(buffers)
            except BlockingIOError:
                break
            self._remove_sent(sent_bytes)
        return completed

    def _begin_frames(self) -> None:
        """Makes parts until there are enough for one `sendmsg`, or the frame has no more.

        Where making a part copies the data (`shm`), the peer must hear of each write before the
        next one is copied: otherwise it would begin to verify when all have been copied.
        """
        while self._frames and not self.frames_paused and len(self._parts) < SEND_BUFFER_LIMIT:
            waiting_bytes, frame = self._frames[0]
            part = next(frame, None)
            if part is not None:
                self._parts.append(part)
                continue
            self._frames.popleft()
            self._waiting_bytes -= waiting_bytes
            if self._parts:
                return

    def _take_ended_writes(self) -> list[int]:
        ended: list[int] = []
        while self._parts and isinstance(self._parts[0], EndOfWrite):
            ended.append(self._parts[0].handle)
            self._parts.popleft()
        return ended

    def _leading_buffers(self) -> list[memoryview]:
        """Returns the parts to send before the next `EndOfWrite`."""
        buffers: list[memoryview] = []
        for part in self._parts:
            if isinstance(part, EndOfWrite):
                break
            buffers.append(part)
        return buffers

    def _remove_sent(self, sent_bytes: int) -> None:
        while sent_bytes:
            part = self._parts[0]
            assert isinstance(part, memoryview)
            if sent_bytes < len(part):
                self._parts[0] = part[sent_bytes:]
                return
            sent_bytes -= len(part)
            self._parts.popleft()


class IncomingConnection:
    """The connection of a peer that writes to this agent, and the parser of its frames."""

    def __init__(self, sock: socket.socket, secret: str) -> None:
        """Sends the first message of the handshake. `secret` is this listener's. Raises OSError."""
        self.sock = sock
        self.peer = ""  #: the writer's agent name; empty until the writer has proved it
        self.handshake_deadline_s = time.monotonic() + HANDSHAKE_TIMEOUT_S
        self._handshake = ListenerHandshake(secret)
        self.notifications: list[NotificationReceived] = []  #: parsed, and not taken yet
        #: True after a pause between two looks at the socket; a parser that cares resets it.
        self.resumed = False
        self._parser = self._parse()
        self._buffers: list[memoryview] = next(self._parser)  #: where the next bytes go
        send_message(sock, self._handshake.challenge())

    def read(self) -> bool:
        """Reads what is there; returns False at the end of the connection.

        Raises ValueError when the bytes are no frame, HandshakeRefused when the caller proves
        nothing, and OSError when it has left before its Welcome.
        """
        self.resumed = True
        self._buffers = self._parser.send(0)  # lets a parser that cares look at `resumed`
        for _ in range(SYSTEM_CALL_LIMIT):
            try:
                received_bytes = self.sock.recvmsg_into(self._buffers)[0]
            except BlockingIOError:
                return True
            except OSError:
                return False
            if received_bytes == 0:
                return False
            self._buffers = self._parser.send(received_bytes)
        return True

    def _parse(self) -> FrameParser:
        hello = yield from read_message()
        send_message(self.sock, self._handshake.admit(hello))
        assert self._handshake.hello is not None
        self.peer = self._handshake.hello.name

        header = memoryview(bytearray(HEADER.size))
        while True:
            yield from read_exactly(header)
            kind, note_bytes, unit, run_count = HEADER.unpack(header)
            self._check_header(FrameKind(kind), note_bytes, run_count)

            body = memoryview(bytearray(note_bytes))
            yield from read_exactly(body)
            note = bytes(body)
            if kind == FrameKind.WRITE:
                yield from self._read_write(note, unit, run_count)
            # Behind the data: who takes a write's note finds its bytes in place.
            self.notifications.append(NotificationReceived(self.peer, note))

    def _check_header(self, kind: FrameKind, note_bytes: int, run_count: int) -> None:
        if note_bytes > NOTE_BYTES_LIMIT:
            raise ValueError(f"malformed frame: a note of {note_bytes} bytes")
        if (run_count > 0) != (kind is FrameKind.WRITE):
            raise ValueError("malformed frame: writes have runs, other frames none")

    def _read_write(self, note: bytes, unit: int, run_count: int) -> FrameParser:
        """Reads the table and the data of a write, as a part of the parser.

        Overridden where data comes by the socket. `unit` is the bytes of a unit. Raises ValueError
        when the frame is malformed.
        """
        raise ValueError("malformed frame: no data travels on this connection")


class SocketTransport:
    """The connections of one agent, in both directions. A subclass says what a write is.

    Fulfils `transport.Transport`, which says what each method is for, but for `name`,
    `refuses_late`, `address` and `write`.
    """

    name: str

    def __init__(self, agent: str, listener: socket.socket, secret: str) -> None:
        """`listener` is bound and listens; the transport closes it.

        `secret` is the cluster's: whoever does not know it is nobody's peer.
        """
        self.agent = agent
        self._secret = secret
        self._own_secret = secret_of_listener(secret, KIND, agent)
        self.moving = False  #: True when the last `poll` found bytes under way.
        self._listener = listener
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._cards: dict[str, PeerCard] = {}
        self._outgoing: dict[str, OutgoingConnection] = {}  #: by peer
        #: Callers that have proved nothing yet, the oldest first.
        self._unproved: dict[IncomingConnection, None] = {}
        self._writes: dict[int, str] = {}  #: handle -> peer, of the writes under way
        #: Peers that were lost and not removed since; nobody dials them.
        self._disconnected: set[str] = set()
        self._events: list[TransportEvent] = []  #: what the next `poll` returns
        self._handles = itertools.count()
        self._next_refusal_log_s = 0.0  #: when the log may have the next line about a refusal
        self._unlogged_refusals = 0  #: since the last such line

    # ---- what a subclass says --------------------------------------------------------------------

    def _socket_for(self, card: PeerCard) -> tuple[socket.socket, SocketAddress]:
        """Makes a socket that fits the peer, and returns it with the peer's listening address."""
        raise NotImplementedError

    def _accept_caller(self, sock: socket.socket) -> IncomingConnection:
        """Wraps a caller's socket. Raises OSError when the caller may not connect."""
        return IncomingConnection(sock, self._own_secret)

    def _on_caller_proved(self, connection: IncomingConnection) -> None:
        """The caller has just proved its name."""

    def _on_peer_proved(self, connection: OutgoingConnection) -> None:
        """The peer has just proved to be who was dialled."""
        connection.frames_paused = False

    def _read_reply(self, connection: OutgoingConnection) -> bool:
        """Reads what the peer sent, behind the handshake, on a connection that this agent dialled.

        Returns False when the peer hung up, or sent what it must not.
        """
        return False

    # ---- peers -----------------------------------------------------------------------------------

    def add_peer(self, card: PeerCard) -> None:
        self._cards.setdefault(card.agent, card)

    def reached(self, peer: str) -> bool:
        connection = self._outgoing.get(peer)
        return connection is not None and not connection.frames_paused

    def remove_peer(self, peer: str) -> None:
        self._cards.pop(peer, None)
        self._disconnect(peer, "removed", report=False)
        self._disconnected.discard(peer)

    def notify(self, peer: str, note: bytes) -> None:
        connection = self._dial(peer)
        frame = frame_header(FrameKind.NOTIFICATION, note)
        self._put(connection, len(frame), iter((frame,)))
        self._flush(connection)

    def _post_write(
        self,
        connection: OutgoingConnection,
        waiting_bytes: int,
        handle: int,
        data: Iterator[FramePart],
    ) -> int:
        """Queues the frame of a write and sends what can be sent; returns its handle."""
        self._put(connection, waiting_bytes, data)
        self._writes[handle] = connection.peer
        self._flush(connection)
        return handle

    def _put(
        self, connection: OutgoingConnection, waiting_bytes: int, frame: Iterator[FramePart]
    ) -> None:
        """Queues a frame. A peer for which too much waits is lost. Raises PeerLost."""
        try:
            connection.put(waiting_bytes, frame)
        except PeerLost:
            self._disconnect(connection.peer, "does not read")
            raise

    def _dial(self, peer: str) -> OutgoingConnection:
        """Returns the connection to the peer, dialled now if need be. Raises PeerLost."""
        if peer in self._outgoing:
            return self._outgoing[peer]
        if peer not in self._cards or peer in self._disconnected:
            raise PeerLost(peer)
        try:
            sock, error_number = self._begin_dial(self._cards[peer])
        except (OSError, OverflowError, ValueError) as error:  # the last two: no valid address
            self._disconnect(
                peer, "unreachable", error=getattr(error, "strerror", None) or str(error)
            )
            raise PeerLost(f"{peer}: {error}") from error

        peer_secret = secret_of_listener(self._secret, KIND, peer)
        handshake = DiallerHandshake(PeerIdentity(self.agent, KIND, peer_secret))
        connection = OutgoingConnection(peer, sock, handshake)
        self._outgoing[peer] = connection
        self._selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
        if error_number == 0:
            self._finish_dial(connection)
        return connection

    def _begin_dial(self, card: PeerCard) -> tuple[socket.socket, int]:
        """Returns the socket with 0 when it is connected at once, else with EINPROGRESS."""
        sock, address = self._socket_for(card)
        sock.setblocking(False)
        error_number = sock.connect_ex(address)
        if error_number not in (0, errno.EINPROGRESS):
            sock.close()
            raise OSError(error_number, os.strerror(error_number))
        return sock, error_number

    def _finish_dial(self, connection: OutgoingConnection) -> None:
        connection.accepted()
        self._selector.modify(connection.sock, selectors.EVENT_READ, connection)

    def _flush(self, connection: OutgoingConnection) -> None:
        try:
            completed = connection.flush()
        except (OSError, PeerLost) as error:
            self._disconnect(connection.peer, type(error).__name__)
            return
        for handle in completed:
            del self._writes[handle]
            self._events.append(PostedWriteEnded(handle, ok=True))

    def _disconnect(self, peer: str, reason: str, report: bool = True, error: str = "") -> None:
        """Hangs up on the peer in both directions: what it still sends is never read.

        Ends all writes to the peer. With `report`, the first time also says `PeerDisconnected`.
        `error` says why the peer was not reached at all.
        """
        outgoing = self._outgoing.pop(peer, None)
        if outgoing is not None:
            self._hang_up(outgoing)
        # A peer may have dialled more than once; each connection is found at the selector.
        for key in list(self._selector.get_map().values()):
            connection = key.data
            if isinstance(connection, IncomingConnection) and connection.peer == peer:
                self._hang_up(connection)

        failed_writes = [handle for handle, target in self._writes.items() if target == peer]
        for handle in failed_writes:
            del self._writes[handle]
            self._events.append(PostedWriteEnded(handle, ok=False, reason=reason))

        if peer not in self._disconnected:
            self._disconnected.add(peer)
            if report:
                self._events.append(PeerDisconnected(peer, error))

    def _hang_up(self, connection: IncomingConnection | OutgoingConnection) -> None:
        if isinstance(connection, IncomingConnection):
            self._unproved.pop(connection, None)
        self._selector.unregister(connection.sock)
        connection.sock.close()

    # ---- polling ---------------------------------------------------------------------------------

    def poll(self) -> list[TransportEvent]:
        """Drives all connections as far as they go now; returns what has happened."""
        ready = self._selector.select(0)
        self.moving = bool(ready)
        listener_is_ready = False
        for key, mask in ready:
            connection: IncomingConnection | OutgoingConnection | None = key.data
            if connection is None:  # the listener
                listener_is_ready = True
            elif connection.sock.fileno() < 0:  # hung up by what came before it in this loop
                continue
            elif isinstance(connection, IncomingConnection):
                self._receive(connection)
            elif not connection.connected:
                self._conclude_dial(connection)
            elif mask & selectors.EVENT_READ:
                self._receive_reply(connection)
        # Last: a new caller may take the place of the oldest unproved one, whose proof is read now.
        if listener_is_ready:
            self._accept()

        self._send_what_waits()
        self._drop_slow_callers()
        events = self._events
        self._events = []
        return events

    def _send_what_waits(self) -> None:
        now = time.monotonic()
        for connection in list(self._outgoing.values()):
            # Room to send is tried, not watched: an idle socket would report it at every poll.
            if connection.frames_paused and now > connection.setup_deadline_s:
                self._disconnect(connection.peer, "unreachable", error=NO_ANSWER)
            elif connection.connected and not connection.idle:
                self.moving = True
                self._flush(connection)

    def _accept(self) -> None:
        for _ in range(ACCEPT_LIMIT):
            try:
                sock, _ = self._listener.accept()
            except OSError:  # nobody is left, or the caller has left again
                return
            sock.setblocking(False)
            try:
                connection = self._accept_caller(sock)
            except OSError:
                sock.close()
                continue
            self._selector.register(sock, selectors.EVENT_READ, connection)
            self._unproved[connection] = None
            if len(self._unproved) > UNPROVED_CALLERS_MAX:
                self._hang_up(next(iter(self._unproved)))

    def _drop_slow_callers(self) -> None:
        """Hangs up on callers that have proved nothing in time; nobody is told of them."""
        now = time.monotonic()
        while self._unproved:
            oldest = next(iter(self._unproved))
            if now <= oldest.handshake_deadline_s:
                return
            self._hang_up(oldest)

    def _conclude_dial(self, connection: OutgoingConnection) -> None:
        error_number = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error_number:
            self._disconnect(connection.peer, "unreachable", error=os.strerror(error_number))
        else:
            self._finish_dial(connection)

    def _receive_reply(self, connection: OutgoingConnection) -> None:
        was_unproved = not connection.proved
        refusal = HUNG_UP
        try:
            peer_alive = (
                connection.read_handshake() if was_unproved else self._read_reply(connection)
            )
        except HandshakeRefused as error:
            log.warning("%s at the address of %s: hung up", error, connection.peer)
            refusal = str(error)
            peer_alive = False
        except OSError:
            peer_alive = False
        if peer_alive and was_unproved and connection.proved:
            self._on_peer_proved(connection)
        if not peer_alive:
            never_reached = connection.frames_paused
            self._disconnect(connection.peer, "closed", error=refusal if never_reached else "")

    def _receive(self, connection: IncomingConnection) -> None:
        was_unproved = not connection.peer
        try:
            alive = connection.read()
        except HandshakeRefused as error:
            self._log_refusal(error)
            alive = False
        except (ValueError, OSError):  # malformed, or the caller left: it is hung up on
            alive = False
        if was_unproved and connection.peer:
            del self._unproved[connection]
            self._on_caller_proved(connection)

        # What was parsed counts even if the connection ends here: it was sent before the end. (A
        # proved caller may have been hung up on in `_on_caller_proved`; then there is no socket.)
        self._events += connection.notifications
        connection.notifications = []
        if not alive and connection.sock.fileno() >= 0:
            self._hang_up(connection)
            if connection.peer:
                self._disconnect(connection.peer, "closed")

    def _log_refusal(self, error: HandshakeRefused) -> None:
        """Logs that a caller was refused; at most once in `REFUSAL_LOG_S`, as anybody may call."""
        now = time.monotonic()
        if now < self._next_refusal_log_s:
            self._unlogged_refusals += 1
            return
        log.warning(
            "refused a connection: %s (and %d others since the last such line)",
            error,
            self._unlogged_refusals,
        )
        self._next_refusal_log_s = now + REFUSAL_LOG_S
        self._unlogged_refusals = 0

    # ---- the end ---------------------------------------------------------------------------------

    def mark_process_dead(self, peer: str) -> None:
        """Changes nothing: `fenced` needs no help."""

    def fenced(self, peer: str) -> bool:
        """Always True: bytes of a peer come by its connection only, and this call closes it."""
        self._disconnect(peer, "fenced", report=False)
        return True

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
