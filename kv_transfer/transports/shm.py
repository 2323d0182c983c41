"""Shared memory on one host: the writer maps the peer's pool and copies into it by itself.

The pool lies in a memory file. Its owner hands the file to every peer that dials in, over a unix
socket, behind the handshake. The same connection carries the notes and, when it closes, tells of a
death. Neither ptrace permission (as for CMA, cross-memory attach) nor a network is needed.

A lost peer is fenced by its *gate*, one file per caller. The writer holds a shared lock on the file
while it copies, and reads the file's one byte first. The owner takes the lock alone and marks the
gate shut: then no copy is under way and none begins. The kernel drops the lock of a dead writer. A
writer that is frozen in the middle of a copy keeps the lock, and is not fenced until it wakes up or
dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import socket
import struct
import uuid
from array import array
from collections.abc import Iterator

import numpy as np

from ..errors import PeerLost, TransportUnavailable
from ..transport import PeerCard, Pool, Spans
from .runs import bounded_pieces
from .stream import (
    EndOfWrite,
    FrameKind,
    FramePart,
    IncomingConnection,
    OutgoingConnection,
    SocketAddress,
    SocketTransport,
    frame_header,
)

#: Bytes copied in one hold of the gate, about; never more than twice as many. A hold is short, so
#: that the owner seldom finds the lock taken.
HOLD_BYTES = 2 << 20
_GATE_OPEN = b"\0"
_GATE_SHUT = b"\1"
_POOL_SIZE = struct.Struct("<Q")  #: sent along with the pool's file and the gate's
_CREDENTIALS = struct.Struct("3i")  #: process, user, group: unix(7)


class WriterGate:
    """The owner's end of the gate of one writer."""

    def __init__(self) -> None:
        self._file = os.memfd_create("diptych-gate")
        os.ftruncate(self._file, len(_GATE_OPEN))
        #: The writer's end. Opened again: locks belong to openings, and these must exclude each
        #: other.
        self.writer_file = os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY)

    def shut(self) -> bool:
        """Returns True when the writer copies nothing any more; False while it is in a copy.

        Once it was True, the gate is over and must not be shut again.
        """
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        os.pwrite(self._file, _GATE_SHUT, 0)
        os.close(self._file)
        return True


class MappedPool:
    """A peer's pool in this process's memory, and the writer's end of the gate in front of it."""

    def __init__(self, pool_file: int, gate_file: int, size: int) -> None:
        """Takes over both files; `size` is that of the pool in bytes.

        Raises OSError or ValueError when the pool cannot be mapped; both files are closed then.
        """
        self._gate = gate_file
        self._size = size
        try:
            self._map = mmap.mmap(pool_file, size)
        except BaseException:
            os.close(gate_file)
            raise
        finally:
            os.close(pool_file)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages refuses the advice
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def copy(self, pool: Pool, spans: Spans) -> None:
        """Copies `spans` from `pool`, in pieces; the gate is held for one piece at a time.

        A piece is a run of units that lie together in both pools. Raises PeerLost when the gate is
        shut, or a piece lies outside of a pool.
        """
        pieces = bounded_pieces(spans, HOLD_BYTES)
        source, target, size = pieces.T
        if _is_outside(source, size, pool.size) or _is_outside(target, size, self._size):
            raise PeerLost("a unit outside of the pool")

        pieces += (pool.base, self._base, 0)
        # A new hold begins wherever the bytes up to a piece's end pass a multiple of HOLD_BYTES.
        hold_ends = np.flatnonzero(np.diff(np.cumsum(size) // HOLD_BYTES)) + 1
        try:
            for pieces_of_hold in np.split(pieces, hold_ends):
                self._renew_hold()
                for source_address, target_address, byte_count in pieces_of_hold.tolist():
                    # ctypes releases the GIL.
                    ctypes.memmove(target_address, source_address, byte_count)
        finally:
            fcntl.flock(self._gate, fcntl.LOCK_UN)

    def _renew_hold(self) -> None:
        """Lets the owner shut the gate, then holds it open again. Raises PeerLost when shut."""
        fcntl.flock(self._gate, fcntl.LOCK_UN)
        try:
            fcntl.flock(self._gate, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PeerLost("revoked") from None
        if os.pread(self._gate, 1, 0) != _GATE_OPEN:
            raise PeerLost("revoked")

    def close(self) -> None:
        """Closes the gate's file. The mapping goes with the object, when no copy uses it."""
        os.close(self._gate)


def _is_outside(starts: np.ndarray, sizes: np.ndarray, pool_bytes: int) -> bool:
    return bool((starts < 0).any() or (starts + sizes > pool_bytes).any())


def _receive_files(
    sock: socket.socket, data_bytes: int, file_limit: int
) -> tuple[bytes, list[int]]:
    """Returns what came, at most `data_bytes`, and the files that came with it. Raises OSError.

    No program that this process starts inherits the files: `socket.recv_fds`, which ignores its
    `flags` in Python 3.11, would let them through.
    """
    files = array("i")
    data, ancillary, _, _ = sock.recvmsg(
        data_bytes, socket.CMSG_LEN(file_limit * files.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            files.frombytes(content[: len(content) - len(content) % files.itemsize])
    return data, files.tolist()


class ShmTransport(SocketTransport):
    """Listens on an abstract unix socket; hands its pool to peers of the same user.

    Fulfils `transport.Transport`, which says what each method is for.
    """

    name = "shm"
    #: The writer copies by itself, so data cannot be refused here when it comes in.
    refuses_late = False

    def __init__(self, agent: str, pool: Pool, *, secret: str) -> None:
        """Raises TransportUnavailable when no file is behind the pool."""
        if pool.fd is None:
            raise TransportUnavailable("the pool is not in shared memory, or has no file there")
        self.pool = pool
        self._pool_file: int = pool.fd
        self._maps: dict[str, MappedPool] = {}  #: pools of the peers that this agent writes to
        self._gates: dict[str, list[WriterGate]] = {}  #: by writer; none is known to be shut
        self._socket_name = f"diptych-kv-{uuid.uuid4().hex}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0{self._socket_name}")
        listener.listen(1024)  # callers that may wait at a time to be accepted
        super().__init__(agent, listener, secret)

    def address(self) -> bytes:
        return self._socket_name.encode()

    # ---- as the writer ---------------------------------------------------------------------------

    def write(self, peer: str, spans: Spans, note: bytes) -> int:
        """Queues a copy of `spans` and the note behind it. Raises PeerLost.

        Returns a handle: `poll` returns one `PostedWriteEnded` with it. What waits in the queue is
        the note and the list of units, not the data.
        """
        connection = self._dial(peer)
        handle = next(self._handles)
        waiting_bytes = len(note) + spans.source_units.nbytes + spans.target_units.nbytes
        frame = self._frame(peer, spans, note, handle)
        return self._post_write(connection, waiting_bytes, handle, frame)

    def _frame(self, peer: str, spans: Spans, note: bytes, handle: int) -> Iterator[FramePart]:
        """Copies the data when its turn has come; then its source is free, then the note goes."""
        self._maps[peer].copy(self.pool, spans)
        yield EndOfWrite(handle)
        yield frame_header(FrameKind.NOTIFICATION, note)

    def _socket_for(self, card: PeerCard) -> tuple[socket.socket, SocketAddress]:
        return socket.socket(socket.AF_UNIX), b"\0" + card.address

    def _on_peer_proved(self, connection: OutgoingConnection) -> None:
        """Waits for the peer's pool, which follows, before anything is sent."""

    def _read_reply(self, connection: OutgoingConnection) -> bool:
        """Maps the pool that the peer hands over."""
        pool_bytes = self._cards[connection.peer].size
        data, files = _receive_files(connection.sock, _POOL_SIZE.size, file_limit=2)
        # Anything else: a later message, which peers do not send, or another pool's size.
        if len(files) != 2 or data != _POOL_SIZE.pack(pool_bytes):
            for file in files:
                os.close(file)
            return False
        pool_file, gate_file = files
        try:
            self._maps[connection.peer] = MappedPool(pool_file, gate_file, pool_bytes)
        except ValueError:  # the file is smaller than the pool
            return False
        connection.frames_paused = False
        return True

    # ---- as the owner ----------------------------------------------------------------------------

    def _accept_caller(self, sock: socket.socket) -> IncomingConnection:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user_id, _ = _CREDENTIALS.unpack(raw)
        if user_id != os.getuid():
            raise PermissionError("another user")
        return super()._accept_caller(sock)

    def _on_caller_proved(self, connection: IncomingConnection) -> None:
        """Hands the pool to the caller, behind a gate of its own."""
        try:
            gate = WriterGate()
        except OSError:
            self._hang_up(connection)
            return
        self._gates.setdefault(connection.peer, []).append(gate)
        try:
            size = _POOL_SIZE.pack(self.pool.size)
            socket.send_fds(connection.sock, [size], [self._pool_file, gate.writer_file])
        except OSError:
            self._hang_up(connection)
        finally:
            os.close(gate.writer_file)

    def _hang_up(self, connection: IncomingConnection | OutgoingConnection) -> None:
        super()._hang_up(connection)
        if isinstance(connection, IncomingConnection):
            self._shut_gates(connection.peer)
        elif connection.peer in self._maps:
            self._maps.pop(connection.peer).close()

    def _shut_gates(self, writer: str) -> bool:
        """Returns True when every gate of the writer is shut."""
        still_open = [gate for gate in self._gates.pop(writer, []) if not gate.shut()]
        if still_open:
            self._gates[writer] = still_open
        return not still_open

    def fenced(self, peer: str) -> bool:
        """Returns True once the peer is in no copy, and can begin none: its gates are shut."""
        return super().fenced(peer) and self._shut_gates(peer)

    def close(self) -> None:
        super().close()
        for writer in list(self._gates):
            self._shut_gates(writer)
        for mapped_pool in self._maps.values():
            mapped_pool.close()
        self._maps.clear()
