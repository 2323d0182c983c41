"""What the transports over sockets share: one connection per direction, dialled by the writer.

Nothing blocks: a dial is under way until the peer answers or `DIAL_S` is over, and what is sent
meanwhile waits in the peer's queue. A frame is a header and a note; the first one names the writer.
A lost peer is hung up on in both directions.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Generator, Iterator

import numpy as np

from ..errors import PeerLost
from ..transport import (
    NotificationReceived,
    PeerCard,
    PeerDisconnected,
    PostedWriteEnded,
    Spans,
    TransportEvent,
)

HEADER = struct.Struct("<BIII")  #: kind, bytes of note, bytes of a unit, number of runs
NAME, NOTE, WRITE = 0, 1, 2
NOTE_MAX = 1 << 20
WAITING_MAX = 16 << 20  #: bytes of notes and headers that wait for one peer
DIAL_S = 2.0
_CALLS_MAX, _VIEWS_MAX = 64, 64  #: system calls per look at a socket, buffers per system call


def runs(*units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Runs that are contiguous in all of `units` (int [n] each): index of the first, length."""
    cuts = np.zeros(max(len(units[0]) - 1, 0), bool)
    for each in units:
        cuts |= np.diff(each) != 1
    first = np.concatenate(([0], np.flatnonzero(cuts) + 1))[: len(units[0])]
    return first, np.diff(np.append(first, len(units[0])))


def pieces(spans: Spans, most: int) -> np.ndarray:
    """Byte in the source, byte in the target, and bytes (int64 [n, 3]) of each run of `spans`.

    Runs of more than `most` bytes are cut.
    """
    first, count = runs(spans.source_units, spans.target_units)
    size = count * spans.unit_bytes
    parts = -(-size // most)
    row = np.repeat(np.arange(len(first)), parts)
    at = (np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)) * most
    source = spans.source_units[first].astype(np.int64)[row] * spans.unit_bytes + at
    target = spans.target_units[first].astype(np.int64)[row] * spans.unit_bytes + at
    return np.stack((source, target, np.minimum(size[row] - at, most)), axis=1)


def head(kind: int, note: bytes, unit: int = 0, table: bytes = b"") -> memoryview:
    """A frame without data; `table` is start and length in units, int32, of each run of a write."""
    assert len(note) <= NOTE_MAX, len(note)
    return memoryview(HEADER.pack(kind, len(note), unit, len(table) // 8) + note + table)


class Outgoing:
    """The connection to a peer that is written to: what waits for it, and what ends with that."""

    def __init__(self, peer: str, sock: socket.socket, connected: bool) -> None:
        self.peer, self.sock, self.connected = peer, sock, connected
        self.deadline = time.monotonic() + DIAL_S
        self.held = False  #: what waits goes on waiting, though the peer has taken the call
        self._frames: deque[tuple[int, Iterator[memoryview | int]]] = deque()
        self._parts: deque[memoryview | int] = deque()  #: of the next frames: data, or a handle
        self._waiting = 0  #: bytes of `_frames` that only exist because they wait

    def put(self, size: int, frame: Iterator[memoryview | int]) -> None:
        """Queues a frame of `size` bytes besides the pool's; PeerLost when too much waits."""
        if self._waiting + size > WAITING_MAX:
            raise PeerLost(f"{self.peer}: it does not read")
        self._waiting += size
        self._frames.append((size, frame))

    @property
    def idle(self) -> bool:
        return not (self._frames or self._parts)

    def flush(self) -> list[int]:
        """Sends what the socket takes; returns the handles that are complete."""
        done: list[int] = []
        for _ in range(_CALLS_MAX if self.connected else 0):
            self._fill()
            while self._parts and isinstance(self._parts[0], int):
                done.append(self._parts.popleft())  # type: ignore[arg-type]
            views = list(itertools.takewhile(lambda p: not isinstance(p, int), self._parts))
            if not views:
                break
            try:
                self._sent(self.sock.sendmsg(views))  # type: ignore[arg-type]
            except BlockingIOError:
                break
        return done

    def _fill(self) -> None:
        while self._frames and not self.held and len(self._parts) < _VIEWS_MAX:
            size, frame = self._frames[0]
            part = next(frame, None)
            if part is not None:
                self._parts.append(part)
            else:
                self._frames.popleft()
                self._waiting -= size

    def _sent(self, count: int) -> None:
        while count:
            part = self._parts[0]
            assert not isinstance(part, int)
            if count < len(part):
                self._parts[0] = part[count:]
                return
            count -= len(part)
            self._parts.popleft()


class Incoming:
    """Parser of the frames of a peer that writes; `_data` stores what comes with them."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.peer = sock, ""
        self.notes: list[NotificationReceived] = []
        self.resumed = False  #: set when time has passed since the last bytes
        self._parser = self._parse()
        self._want: list[memoryview] = next(self._parser)

    def read(self) -> bool:
        """Reads what is there; False at the end of the stream. ValueError on nonsense."""
        self.resumed = True
        self._want = self._parser.send(0)
        for _ in range(_CALLS_MAX):
            try:
                count = self.sock.recvmsg_into(self._want)[0]
            except BlockingIOError:
                return True
            except OSError:
                return False
            if count == 0:
                return False
            self._want = self._parser.send(count)
        return True

    def _parse(self) -> Generator[list[memoryview], int, None]:
        header = memoryview(bytearray(HEADER.size))
        while True:
            yield from exactly(header)
            kind, note_bytes, unit, count = HEADER.unpack(header)
            expected = kind in (NOTE, WRITE) if self.peer else kind == NAME
            if not expected or note_bytes > NOTE_MAX or (count > 0) != (kind == WRITE):
                raise ValueError("malformed frame")
            body = memoryview(bytearray(note_bytes))
            yield from exactly(body)
            note = bytes(body)
            if kind == NAME:
                self.peer = note.decode()
                continue
            if kind == WRITE:
                yield from self._data(note, unit, count)
            self.notes.append(NotificationReceived(self.peer, note))

    def _data(self, note: bytes, unit: int, count: int) -> Generator[list[memoryview], int, None]:
        raise ValueError("no data travels here")
        yield []


def exactly(buffer: memoryview) -> Generator[list[memoryview], int, None]:
    while buffer:
        buffer = buffer[(yield [buffer]) :]


class Streams:
    """The connections of one agent, in and out. A transport adds what a write is."""

    name: str

    def __init__(self, agent: str, listener: socket.socket) -> None:
        self.agent = agent
        self._listener = listener
        self._listener.setblocking(False)
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._listener, selectors.EVENT_READ)
        self._cards: dict[str, PeerCard] = {}
        self._out: dict[str, Outgoing] = {}
        self._owner: dict[int, str] = {}  #: handle -> peer of a write under way
        self._down: set[str] = set()
        self._events: list[TransportEvent] = []
        self._ids = itertools.count()
        self.moving = False

    # ---- what differs ----------------------------------------------------------------------------

    def _socket(self, card: PeerCard) -> tuple[socket.socket, object]:
        """A socket that fits, and the address of the peer's listener."""
        raise NotImplementedError

    def _accepted(self, sock: socket.socket) -> Incoming:
        """OSError when the caller may not talk to us."""
        return Incoming(sock)

    def _named(self, incoming: Incoming) -> None:
        """The caller has said who it is."""

    def _opened(self, out: Outgoing) -> None:
        """The peer has taken the call."""

    def _answered(self, out: Outgoing) -> bool:
        """The peer, which only listens here, said something; False when it hung up."""
        return False

    # ---- peers -----------------------------------------------------------------------------------

    def add_peer(self, card: PeerCard) -> None:
        self._cards.setdefault(card.agent, card)

    def remove_peer(self, peer: str) -> None:
        self._cards.pop(peer, None)
        self._drop(peer, "removed", tell=False)
        self._down.discard(peer)

    def notify(self, peer: str, note: bytes) -> None:
        out, frame = self._dial(peer), head(NOTE, note)
        self._queue(out, len(frame), iter((frame,)))
        self._flush(out)

    def _queue(self, out: Outgoing, size: int, frame: Iterator[memoryview | int]) -> None:
        try:
            out.put(size, frame)
        except PeerLost:
            self._drop(out.peer, "does not read")
            raise

    def _dial(self, peer: str) -> Outgoing:
        if peer in self._out:
            return self._out[peer]
        if peer not in self._cards or peer in self._down:
            raise PeerLost(peer)
        try:
            sock, address = self._socket(self._cards[peer])
            sock.setblocking(False)
            failed = sock.connect_ex(address)  # type: ignore[arg-type]
            if failed not in (0, errno.EINPROGRESS):
                sock.close()
                raise OSError(failed, os.strerror(failed))
        except (OSError, OverflowError, ValueError) as error:
            self._drop(peer, "unreachable")
            raise PeerLost(f"{peer}: {error}") from error
        out = self._out[peer] = Outgoing(peer, sock, connected=False)
        self._ready.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, out)
        name = head(NAME, self.agent.encode())
        out.put(len(name), iter((name,)))
        if not failed:
            self._connected(out)
            self._dial(peer)  # it may have hung up at once
        return out

    def _connected(self, out: Outgoing) -> None:
        out.connected = True
        self._ready.modify(out.sock, selectors.EVENT_READ, out)
        self._opened(out)

    def _flush(self, out: Outgoing) -> None:
        try:
            done = out.flush()
        except (OSError, PeerLost) as error:
            self._drop(out.peer, type(error).__name__)
            return
        for handle in done:
            del self._owner[handle]
            self._events.append(PostedWriteEnded(handle, True))

    def _drop(self, peer: str, reason: str, tell: bool = True) -> None:
        """Hangs up on the peer in both directions: what it still sends is never read."""
        out = self._out.pop(peer, None)
        if out:
            self._hang_up(out)
        for each in [k.data for k in self._ready.get_map().values()]:
            if isinstance(each, Incoming) and each.peer == peer:
                self._hang_up(each)
        for handle in [h for h, owner in self._owner.items() if owner == peer]:
            del self._owner[handle]
            self._events.append(PostedWriteEnded(handle, False, reason))
        if peer not in self._down:
            self._down.add(peer)
            if tell:
                self._events.append(PeerDisconnected(peer))

    def _hang_up(self, end: Incoming | Outgoing) -> None:
        self._ready.unregister(end.sock)
        end.sock.close()

    # ---- polling ---------------------------------------------------------------------------------

    def poll(self) -> list[TransportEvent]:
        ready = self._ready.select(0)
        self.moving = bool(ready)
        for key, mask in ready:
            end = key.data
            if end is None:
                self._accept()
            elif end.sock.fileno() < 0:  # hung up a moment ago
                continue
            elif isinstance(end, Incoming):
                self._receive(end)
            elif not end.connected:
                self._answer(end)
            elif mask & selectors.EVENT_READ:
                self._hear(end)
        now = time.monotonic()
        for out in list(self._out.values()):
            if not out.idle and out.connected:
                self.moving = True
                self._flush(out)
            elif not out.connected and now > out.deadline:
                self._drop(out.peer, "unreachable")
        events, self._events = self._events, []
        return events

    def _hear(self, out: Outgoing) -> None:
        try:
            there = self._answered(out)
        except OSError:
            there = False
        if not there:
            self._drop(out.peer, "closed")

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it left again, or there is none
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            self._ready.register(sock, selectors.EVENT_READ, self._accepted(sock))

    def _answer(self, out: Outgoing) -> None:
        """The dial has ended, well or not."""
        failed = out.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            self._drop(out.peer, "unreachable")
        else:
            self._connected(out)

    def _receive(self, incoming: Incoming) -> None:
        stranger = not incoming.peer
        try:
            alive = incoming.read()
        except ValueError:  # a frame that makes no sense, a name that is no text
            alive = False
        if stranger and incoming.peer:
            self._named(incoming)
        self._events += incoming.notes
        incoming.notes = []
        if not alive and incoming.sock.fileno() >= 0:
            self._hang_up(incoming)
            if incoming.peer:
                self._drop(incoming.peer, "closed")

    def bury(self, peer: str) -> None:
        """Not needed: `fenced` sees for itself."""

    def fenced(self, peer: str) -> bool:
        """Always: its bytes come by its connection only, and that one is closed here and now."""
        self._drop(peer, "fenced", tell=False)
        return True

    def close(self) -> None:
        for key in list(self._ready.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._ready.close()
