"""Shared memory on one host: the writer maps the peer's pool and copies into it by itself.

The pool lies in a memory file; its owner hands the file to who dials in, over a unix socket that
carries the notes too and, when it closes, the news of a death. It needs neither ptrace permission
(CMA) nor a network.

A lost peer is fenced by its *gate*, one file per caller: the writer holds a shared lock on it while
it copies and looks inside first; the owner takes the lock alone and marks the gate shut. Then no
copy is under way and none begins. The kernel drops the lock of a dead writer. One that is frozen
in the middle of a copy keeps it, and is not fenced until it wakes up or dies.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
import struct
import uuid
from collections.abc import Iterator

import numpy as np

from ..errors import PeerLost, TransportUnavailable
from ..transport import PeerCard, Pool, Spans
from .stream import NOTE, Incoming, Outgoing, Streams, head, pieces

GATE_BYTES = 2 << 20  #: at most twice as much is copied in one hold of the gate
_SIZE = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("3i")  # process, user, group: unix(7)


class Gate:
    """The owner's end: `shut` says that the writer it was handed to copies nothing any more."""

    def __init__(self) -> None:
        self._file = os.memfd_create("diptych-gate")
        os.ftruncate(self._file, 1)
        # Opened again: locks belong to openings, and the two must exclude each other.
        self.handed = os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY)

    def shut(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        os.pwrite(self._file, b"\1", 0)
        os.close(self._file)
        return True


class Mapped:
    """A peer's pool in our memory, and our end of its gate."""

    def __init__(self, pool: int, gate: int, size: int) -> None:
        self._gate, self._size = gate, size
        try:
            self._map = mmap.mmap(pool, size)
        finally:
            os.close(pool)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def copy(self, pool: Pool, spans: Spans) -> None:
        """`spans` from `pool`, one hold of the gate after the other; PeerLost when it is shut."""
        table = pieces(spans, GATE_BYTES)
        source, target, size = table.T
        if _outside(source, size, pool.size) or _outside(target, size, self._size):
            raise PeerLost("a unit outside of the pool")
        table += (pool.base, self._base, 0)
        holds = np.flatnonzero(np.diff(np.cumsum(size) // GATE_BYTES)) + 1
        try:
            for hold in np.split(table, holds):
                self._pass()
                for here, there, count in hold.tolist():
                    ctypes.memmove(there, here, count)  # without the GIL
        finally:
            fcntl.flock(self._gate, fcntl.LOCK_UN)

    def _pass(self) -> None:
        """Lets the owner shut the gate, then holds it open again."""
        fcntl.flock(self._gate, fcntl.LOCK_UN)
        try:
            fcntl.flock(self._gate, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PeerLost("revoked") from None
        if os.pread(self._gate, 1, 0) != b"\0":
            raise PeerLost("revoked")

    def close(self) -> None:
        os.close(self._gate)


def _outside(start: np.ndarray, sizes: np.ndarray, size: int) -> bool:
    return bool((start < 0).any() or (start + sizes > size).any())


class ShmTransport(Streams):
    """Listens on an abstract unix socket; hands its pool to processes of the same user."""

    name = "shm"
    refuses_late = False

    def __init__(self, agent: str, pool: Pool) -> None:
        if pool.fd is None:
            raise TransportUnavailable("the pool is not in shared memory, or has no file there")
        self.pool = pool
        self._maps: dict[str, Mapped] = {}
        self._gates: dict[str, list[Gate]] = {}  #: writer -> those that may not be shut yet
        self._name = f"diptych-kv-{uuid.uuid4().hex}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0{self._name}")
        listener.listen(1024)
        super().__init__(agent, listener)

    def address(self) -> bytes:
        return self._name.encode()

    # ---- as the writer ---------------------------------------------------------------------------

    def write(self, peer: str, spans: Spans, note: bytes) -> int:
        out, handle = self._dial(peer), next(self._ids)
        size = len(note) + spans.source_units.nbytes + spans.target_units.nbytes
        self._queue(out, size, self._frame(peer, spans, note, handle))
        self._owner[handle] = peer
        self._flush(out)
        return handle

    def _frame(
        self, peer: str, spans: Spans, note: bytes, handle: int
    ) -> Iterator[memoryview | int]:
        """Data is copied when its turn has come; then its source is free, then the note goes."""
        self._maps[peer].copy(self.pool, spans)
        yield handle
        yield head(NOTE, note)

    def _socket(self, card: PeerCard) -> tuple[socket.socket, object]:
        return socket.socket(socket.AF_UNIX), b"\0" + card.address

    def _opened(self, out: Outgoing) -> None:
        """Tells our name, then waits for the peer's pool."""
        self._flush(out)
        out.held = True

    def _answered(self, out: Outgoing) -> bool:
        data, files, _, _ = socket.recv_fds(out.sock, _SIZE.size, 2)
        if len(files) != 2 or data != _SIZE.pack(self._cards[out.peer].size):
            for file in files:
                os.close(file)
            return False
        self._maps[out.peer] = Mapped(files[0], files[1], self._cards[out.peer].size)
        out.held = False
        return True

    # ---- as the owner ----------------------------------------------------------------------------

    def _accepted(self, sock: socket.socket) -> Incoming:
        size = _CREDENTIALS.size
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        if _CREDENTIALS.unpack(raw)[1] != os.getuid():
            sock.close()
            raise PermissionError("another user")
        return Incoming(sock)

    def _named(self, incoming: Incoming) -> None:
        assert self.pool.fd is not None
        try:
            gate = Gate()
        except OSError:
            self._hang_up(incoming)
            return
        try:
            files = [self.pool.fd, gate.handed]
            socket.send_fds(incoming.sock, [_SIZE.pack(self.pool.size)], files)
        except OSError:
            self._hang_up(incoming)
        finally:
            os.close(gate.handed)
        self._gates.setdefault(incoming.peer, []).append(gate)

    def _hang_up(self, end: Incoming | Outgoing) -> None:
        super()._hang_up(end)
        if isinstance(end, Outgoing) and end.peer in self._maps:
            self._maps.pop(end.peer).close()
        elif isinstance(end, Incoming):
            self._shut(end.peer)

    def _shut(self, peer: str) -> bool:
        left = [gate for gate in self._gates.pop(peer, []) if not gate.shut()]
        if left:
            self._gates[peer] = left
        return not left

    def fenced(self, peer: str) -> bool:
        """Its gates are shut: it is in no copy, and begins none. See above for a frozen writer."""
        return super().fenced(peer) and self._shut(peer)

    def close(self) -> None:
        super().close()
        for peer in list(self._gates):
            self._shut(peer)
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()
