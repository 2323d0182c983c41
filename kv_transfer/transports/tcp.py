"""Plain TCP: for platforms without NIXL, and the one that can refuse late bytes.

One connection per direction: the writer dials. A frame is a header (kind, lengths), the note and,
for a write, the target block ids followed by the blocks. The reader asks `admit` before it stores
a write's data; data of a closed ticket is read into a scratch block and dropped. A lost peer is
fenced by hanging up on it.
"""

from __future__ import annotations

import contextlib
import itertools
import selectors
import socket
import struct
from collections import deque
from collections.abc import Sequence

from ..errors import PeerLost
from ..transport import Admit, Down, Event, Note, PeerCard, Pool, Wrote

_HEADER = struct.Struct("<BII")  # kind, bytes of note, number of blocks
_NAME, _NOTE, _WRITE = 0, 1, 2
_NOTE_MAX, _READ_MAX = 1 << 20, 64


class _Outgoing:
    """Bytes that wait for a peer's socket, and the writes that end with them."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.queue: deque[memoryview | int] = deque()  #: data, or the handle that it completes

    def flush(self) -> list[int]:
        """Sends what the socket takes; returns the handles that are complete."""
        done: list[int] = []
        while self.queue:
            head = self.queue[0]
            if isinstance(head, int):
                done.append(head)
                self.queue.popleft()
                continue
            try:
                sent = self.sock.send(head)
            except BlockingIOError:
                break
            if sent < len(head):
                self.queue[0] = head[sent:]
            else:
                self.queue.popleft()
        return done


class _Incoming:
    """Parser of one peer's byte stream; writes land straight in the pool."""

    def __init__(self, sock: socket.socket, pool: Pool, admit: Admit) -> None:
        self.sock, self.pool, self.admit = sock, pool, admit
        self.peer = ""
        self._reader = self._parse()
        self._want: memoryview = next(self._reader)
        self.notes: list[Note] = []

    def read(self) -> bool:
        """Reads what is there; False at the end of the stream."""
        for _ in range(_READ_MAX):
            try:
                count = self.sock.recv_into(self._want)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if count == 0:
                return False
            self._want = self._want[count:]
            if not self._want:
                self._want = next(self._reader)
        return True

    def _parse(self):
        scratch = memoryview(bytearray(self.pool.block_bytes))
        while True:
            header = bytearray(_HEADER.size)
            yield memoryview(header)
            kind, note_bytes, blocks = _HEADER.unpack(header)
            expected = kind in (_NOTE, _WRITE) if self.peer else kind == _NAME
            if not expected or note_bytes > _NOTE_MAX or blocks > self.pool.blocks:
                raise ValueError("malformed frame")
            body = bytearray(note_bytes + 4 * blocks)
            if body:
                yield memoryview(body)
            note = bytes(body[:note_bytes])
            if kind == _NAME:
                self.peer = note.decode()
                continue
            targets = struct.unpack_from(f"<{blocks}I", body, note_bytes)
            size, admitted = self.pool.block_bytes, self.admit(self.peer, note)
            for block in targets:
                inside = admitted and block < self.pool.blocks
                yield self.pool.view[block * size : (block + 1) * size] if inside else scratch
            self.notes.append(Note(self.peer, note))


class TcpTransport:
    """Listens for peers that write into the pool, dials those that it writes to."""

    name = "tcp"

    def __init__(self, agent: str, pool: Pool, admit: Admit, host: str = "127.0.0.1") -> None:
        self.agent, self.pool, self.admit = agent, pool, admit
        self._listener = socket.create_server((host, 0))
        self._listener.setblocking(False)
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._listener, selectors.EVENT_READ)
        self._cards: dict[str, PeerCard] = {}
        self._out: dict[str, _Outgoing] = {}
        self._owner: dict[int, str] = {}  #: handle -> peer of a write under way
        self._down: set[str] = set()
        self._events: list[Event] = []
        self._ids = itertools.count()

    def address(self) -> bytes:
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}".encode()

    def add_peer(self, card: PeerCard) -> None:
        self._cards.setdefault(card.agent, card)

    def remove_peer(self, peer: str) -> None:
        self._cards.pop(peer, None)
        self._drop(peer, "removed", tell=False)
        self._down.discard(peer)

    def write(self, peer: str, source: Sequence[int], target: Sequence[int], note: bytes) -> int:
        handle, size = next(self._ids), self.pool.block_bytes
        blocks = [self.pool.view[b * size : (b + 1) * size] for b in source]
        self._send(peer, _WRITE, note, list(target), blocks, handle)
        return handle

    def notify(self, peer: str, note: bytes) -> None:
        self._send(peer, _NOTE, note, [], [], None)

    def _send(
        self,
        peer: str,
        kind: int,
        note: bytes,
        target: list[int],
        blocks: list[memoryview],
        handle: int | None,
    ) -> None:
        out = self._dial(peer)
        ids = struct.pack(f"<{len(target)}I", *target)
        out.queue.append(memoryview(_HEADER.pack(kind, len(note), len(target)) + note + ids))
        out.queue.extend(blocks)
        if handle is not None:
            out.queue.append(handle)
            self._owner[handle] = peer
        self._flush(peer, out)

    def _dial(self, peer: str) -> _Outgoing:
        if peer in self._out:
            return self._out[peer]
        if peer not in self._cards or peer in self._down:
            raise PeerLost(peer)
        host, port = self._cards[peer].address.decode().rsplit(":", 1)
        try:
            sock = socket.create_connection((host, int(port)), timeout=2.0)
        except OSError as error:
            self._drop(peer, "unreachable")
            raise PeerLost(f"{peer}: {error}") from error
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        name = self.agent.encode()
        out = self._out[peer] = _Outgoing(sock)
        out.queue.append(memoryview(_HEADER.pack(_NAME, len(name), 0) + name))
        return out

    def _flush(self, peer: str, out: _Outgoing) -> None:
        try:
            done = out.flush()
        except OSError as error:
            self._drop(peer, type(error).__name__)
            return
        for handle in done:
            del self._owner[handle]
            self._events.append(Wrote(handle, True))

    def _drop(self, peer: str, reason: str, tell: bool = True) -> None:
        """Hangs up on the peer in both directions: what it still sends is never read."""
        out = self._out.pop(peer, None)
        if out:
            out.sock.close()
        for incoming in [k.data for k in self._ready.get_map().values() if k.data is not None]:
            if incoming.peer == peer:
                self._hang_up(incoming)
        for handle in [h for h, owner in self._owner.items() if owner == peer]:
            del self._owner[handle]
            self._events.append(Wrote(handle, False, reason))
        if peer not in self._down:
            self._down.add(peer)
            if tell:
                self._events.append(Down(peer))

    def poll(self) -> list[Event]:
        for peer, out in list(self._out.items()):
            if out.queue:
                self._flush(peer, out)
        for key, _ in self._ready.select(0):
            if key.data is None:
                with contextlib.suppress(OSError):  # it left again, or there is none
                    sock, _ = self._listener.accept()
                    sock.setblocking(False)
                    incoming = _Incoming(sock, self.pool, self.admit)
                    self._ready.register(sock, selectors.EVENT_READ, incoming)
            elif key.data.sock.fileno() >= 0:  # not hung up a moment ago
                self._receive(key.data)
        events, self._events = self._events, []
        return events

    def _receive(self, incoming: _Incoming) -> None:
        try:
            alive = incoming.read()
        except ValueError:  # a frame that makes no sense, a name that is no text
            alive = False
        self._events += incoming.notes
        incoming.notes = []
        if alive:
            return
        self._hang_up(incoming)
        if incoming.peer:
            self._drop(incoming.peer, "closed")

    def _hang_up(self, incoming: _Incoming) -> None:
        self._ready.unregister(incoming.sock)
        incoming.sock.close()

    def fenced(self, peer: str) -> bool:
        """Always: its bytes come by its connection only, and that one is closed here and now."""
        self._drop(peer, "fenced", tell=False)
        return True

    def close(self) -> None:
        for key in list(self._ready.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._ready.close()
        for out in self._out.values():
            out.sock.close()
