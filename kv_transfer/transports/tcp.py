"""Plain TCP: for platforms without NIXL, and the one that can refuse late bytes.

A write's frame names the runs of the target pool, and their bytes follow. The reader asks `admit`
before it stores data, and again whenever the stream goes on after a pause; data of a ticket that is
closed is read into scratch memory and dropped. A lost peer is fenced by hanging up on it.
"""

from __future__ import annotations

import socket
from collections.abc import Generator, Iterator

import numpy as np

from ..transport import AdmitData, PeerCard, Pool, Spans
from .stream import WRITE, Incoming, Streams, exactly, head, runs

RUNS_MAX = 1 << 20  #: in one write
_SCRATCH = 1 << 16
_VIEWS_MAX = 64


class Stored(Incoming):
    """Writes land straight in the pool, as long as they are admitted."""

    def __init__(self, sock: socket.socket, pool: Pool, admit: AdmitData) -> None:
        self._pool, self._admit = pool, admit
        self._scratch = memoryview(bytearray(_SCRATCH))
        super().__init__(sock)

    def _data(self, note: bytes, unit: int, count: int) -> Generator[list[memoryview], int, None]:
        if count > RUNS_MAX:
            raise ValueError("malformed frame")
        table = memoryview(bytearray(8 * count))
        yield from exactly(table)
        rows = (np.frombuffer(table, np.int32).reshape(-1, 2).astype(np.int64) * unit).tolist()
        if any(size <= 0 for _, size in rows):
            raise ValueError("malformed frame")
        admitted, self.resumed = self._admit(self.peer, note), False
        index, done = 0, 0  # runs that are complete, bytes of the next one that are there
        while index < count:
            if self.resumed:
                admitted, self.resumed = admitted and self._admit(self.peer, note), False
            start, size = rows[index]
            if admitted and self._inside(start, size):
                want = [self._pool.view[start + done : start + size]]
                for start, size in rows[index + 1 : index + _VIEWS_MAX]:
                    if not self._inside(start, size):
                        break
                    want.append(self._pool.view[start : start + size])
            else:
                want = [self._scratch[: size - done]]
            got = yield want
            while got:
                part = min(got, rows[index][1] - done)
                got, done = got - part, done + part
                if done == rows[index][1]:
                    index, done = index + 1, 0

    def _inside(self, start: int, size: int) -> bool:
        return start >= 0 and start + size <= self._pool.size


class TcpTransport(Streams):
    """Listens for peers that write into the pool, dials those that it writes to."""

    name = "tcp"
    refuses_late = True

    def __init__(self, agent: str, pool: Pool, admit: AdmitData, host: str = "127.0.0.1") -> None:
        self.pool, self.admit = pool, admit
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__(agent, socket.create_server((host, 0), family=family))

    def address(self) -> bytes:
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}".encode()

    def _socket(self, card: PeerCard) -> tuple[socket.socket, object]:
        host, port = card.address.decode().rsplit(":", 1)
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock, (host, int(port))

    def _accepted(self, sock: socket.socket) -> Incoming:
        return Stored(sock, self.pool, self.admit)

    def write(self, peer: str, spans: Spans, note: bytes) -> int:
        out, handle = self._dial(peer), next(self._ids)
        first, count = runs(spans.target_units)
        assert len(first) <= RUNS_MAX, len(first)
        table = np.stack((spans.target_units[first], count), axis=1).astype(np.int32)
        frame = head(WRITE, note, spans.unit_bytes, table.tobytes())
        first, count = runs(spans.source_units)
        starts = spans.source_units[first].astype(np.int64) * spans.unit_bytes
        assert starts.min() >= 0 and (starts + count * spans.unit_bytes).max() <= self.pool.size
        size = len(frame) + starts.nbytes + count.nbytes
        self._queue(out, size, self._frame(frame, starts, count * spans.unit_bytes, handle))
        self._owner[handle] = peer
        self._flush(out)
        return handle

    def _frame(
        self, frame: memoryview, starts: np.ndarray, sizes: np.ndarray, handle: int
    ) -> Iterator[memoryview | int]:
        yield frame
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            yield self.pool.view[start : start + size]
        yield handle
