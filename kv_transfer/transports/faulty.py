"""A transport that damages what it carries, for tests of a live cluster (`kv_transfer.faults`)."""

from __future__ import annotations

import numpy as np

from ..transport import PeerCard, Pool, Spans, Transport, TransportEvent


class FaultyTransport:
    """Passes everything on, but the first unit of the first `corrupt` writes is another one.

    One of the same pool that holds other bytes: the source stays intact, only the wire is wrong.
    """

    def __init__(self, inner: Transport, pool: Pool, corrupt: int) -> None:
        self.inner, self.pool, self.corrupt = inner, pool, corrupt
        self.name, self.refuses_late = inner.name, inner.refuses_late

    @property
    def moving(self) -> bool:
        return self.inner.moving

    def address(self) -> bytes:
        return self.inner.address()

    def add_peer(self, card: PeerCard) -> None:
        self.inner.add_peer(card)

    def remove_peer(self, peer: str) -> None:
        self.inner.remove_peer(peer)

    def write(self, peer: str, spans: Spans, note: bytes) -> int:
        if self.corrupt > 0:
            self.corrupt -= 1
            source = spans.source_units.copy()
            source[0] = self._other(int(source[0]), spans.unit_bytes)
            spans = Spans(spans.unit_bytes, source, spans.target_units)
        return self.inner.write(peer, spans, note)

    def _other(self, index: int, unit: int) -> int:
        """A unit whose bytes are not those of unit `index`."""
        whole = np.frombuffer(self.pool.view, np.uint8)
        units = whole[: len(whole) // unit * unit].reshape(-1, unit)
        for other in range(len(units)):
            if not np.array_equal(units[other], units[index]):
                return other
        raise AssertionError("every unit of the pool holds the same bytes")

    def notify(self, peer: str, note: bytes) -> None:
        self.inner.notify(peer, note)

    def poll(self) -> list[TransportEvent]:
        return self.inner.poll()

    def fenced(self, peer: str) -> bool:
        return self.inner.fenced(peer)

    def bury(self, peer: str) -> None:
        self.inner.bury(peer)

    def close(self) -> None:
        self.inner.close()
