"""Plain TCP: for platforms without NIXL, and the transport that can refuse late bytes.

A write's frame names the runs of the target pool, and their bytes follow. The reader asks `admit`
before it stores data, and again whenever the connection goes on after a pause. Data that is not
admitted is read into scratch memory and dropped: its ticket is closed, and its blocks may belong to
somebody else. A lost peer is fenced by hanging up on it. Who is not known to be a peer, by the
handshake of `stream`, gets neither data nor notes in.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..transport import AdmitData, PeerCard, Pool, Spans
from .runs import contiguous_runs
from .stream import (
    RUN_BYTES,
    EndOfWrite,
    FrameKind,
    FrameParser,
    FramePart,
    IncomingConnection,
    SocketAddress,
    SocketTransport,
    frame_header,
    read_exactly,
)

RUN_LIMIT = 1 << 20  #: runs in one write; more than any write has
READ_BUFFER_LIMIT = 64  #: buffers in one `recvmsg_into`
BACKLOG = 1024  #: callers that may wait at a time to be accepted
SCRATCH_BYTES = 1 << 16  #: dropped data is read in parts of so many


@dataclass(slots=True)
class WriteProgress:
    """How far the data of one write has come."""

    starts: list[int]  #: first byte in the pool of each run
    sizes: list[int]  #: bytes of each run
    complete_runs: int = 0  #: leading runs whose bytes are all there
    partial_bytes: int = 0  #: bytes that are there of the first run that is not complete

    @property
    def complete(self) -> bool:
        return self.complete_runs == len(self.sizes)

    def advance(self, received_bytes: int) -> None:
        """Counts bytes that came; they may end several runs."""
        while received_bytes:
            run_bytes = self.sizes[self.complete_runs]
            part_bytes = min(received_bytes, run_bytes - self.partial_bytes)
            received_bytes -= part_bytes
            self.partial_bytes += part_bytes
            if self.partial_bytes == run_bytes:
                self.complete_runs += 1
                self.partial_bytes = 0


class StoringConnection(IncomingConnection):
    """A peer's connection whose writes go straight into the pool, as long as they are admitted."""

    def __init__(self, sock: socket.socket, secret: str, pool: Pool, admit: AdmitData) -> None:
        self._pool = pool
        self._admit = admit
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        super().__init__(sock, secret)

    def _read_write(self, note: bytes, unit: int, run_count: int) -> FrameParser:
        if run_count > RUN_LIMIT:
            raise ValueError(f"malformed frame: a write of {run_count} runs")
        table = memoryview(bytearray(RUN_BYTES * run_count))
        yield from read_exactly(table)
        # In 64 bits: units are numbered in 32, but their bytes may be beyond that.
        starts, sizes = np.frombuffer(table, np.int32).reshape(-1, 2).T.astype(np.int64) * unit
        progress = WriteProgress(starts.tolist(), sizes.tolist())
        if (sizes <= 0).any():
            raise ValueError("malformed frame: a run of no bytes")

        admitted = self._admit(self.peer, note)
        self.resumed = False
        while not progress.complete:
            if self.resumed:
                admitted = admitted and self._admit(self.peer, note)
                self.resumed = False
            received_bytes = yield self._buffers_for(progress, admitted)
            progress.advance(received_bytes)

    def _buffers_for(self, progress: WriteProgress, admitted: bool) -> list[memoryview]:
        """Returns where the next bytes of a write go: into the pool, or into scratch memory.

        Runs outside of the pool are dropped like those that are not admitted.
        """
        first = progress.complete_runs
        start = progress.starts[first]
        size = progress.sizes[first]
        if not admitted or not self._is_inside_pool(start, size):
            return [self._scratch[: size - progress.partial_bytes]]

        buffers = [self._pool.view[start + progress.partial_bytes : start + size]]
        following = slice(first + 1, first + READ_BUFFER_LIMIT)
        next_runs = zip(progress.starts[following], progress.sizes[following], strict=True)
        for start, size in next_runs:
            if not self._is_inside_pool(start, size):
                break
            buffers.append(self._pool.view[start : start + size])
        return buffers

    def _is_inside_pool(self, start: int, size: int) -> bool:
        return start >= 0 and start + size <= self._pool.size


class TcpTransport(SocketTransport):
    """Listens for peers that write into the pool, and dials those that it writes to.

    Fulfils `transport.Transport`, which says what each method is for.
    """

    name = "tcp"
    refuses_late = True

    def __init__(
        self,
        agent: str,
        pool: Pool,
        admit: AdmitData,
        host: str = "127.0.0.1",
        *,
        secret: str,
    ) -> None:
        """`host` is the address to listen on; the system chooses the port.

        `admit` says whether the data that comes with a note may be stored. Raises OSError.
        """
        self.pool = pool
        self.admit = admit
        listener = socket.create_server((host, 0), family=_family_of(host), backlog=BACKLOG)
        super().__init__(agent, listener, secret)

    def address(self) -> bytes:
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}".encode()

    def _socket_for(self, card: PeerCard) -> tuple[socket.socket, SocketAddress]:
        host, port = card.address.decode().rsplit(":", 1)
        sock = socket.socket(_family_of(host))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock, (host, int(port))

    def _accept_caller(self, sock: socket.socket) -> IncomingConnection:
        return StoringConnection(sock, self._own_secret, self.pool, self.admit)

    def write(self, peer: str, spans: Spans, note: bytes) -> int:
        """Queues the frame of a write. Raises PeerLost.

        The table names the target's runs and the data follows in the source's. Both have the same
        units in the same order, so that the two may be cut into runs differently.
        """
        connection = self._dial(peer)
        handle = next(self._handles)

        first, lengths = contiguous_runs(spans.target_units)
        assert len(first) <= RUN_LIMIT, len(first)
        table = np.stack((spans.target_units[first], lengths), axis=1).astype(np.int32)
        header = frame_header(FrameKind.WRITE, note, spans.unit_bytes, table.tobytes())

        first, lengths = contiguous_runs(spans.source_units)
        starts = spans.source_units[first].astype(np.int64) * spans.unit_bytes
        sizes = lengths * spans.unit_bytes
        assert starts.min() >= 0 and (starts + sizes).max() <= self.pool.size

        waiting_bytes = len(header) + starts.nbytes + sizes.nbytes
        frame = self._frame(header, starts, sizes, handle)
        return self._post_write(connection, waiting_bytes, handle, frame)

    def _frame(
        self, header: memoryview, starts: np.ndarray, sizes: np.ndarray, handle: int
    ) -> Iterator[FramePart]:
        yield header
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            yield self.pool.view[start : start + size]
        yield EndOfWrite(handle)


def _family_of(host: str) -> socket.AddressFamily:
    """IPv6 for an address with colons, else IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
