"""A transport that damages what it carries, for tests of a live cluster (`kv_transfer.faults`)."""

from __future__ import annotations

import numpy as np

from ..transport import Pool, Spans, Transport
from .wrapped import WrappedTransport


class FaultyTransport(WrappedTransport):
    """Passes every call on to `inner`, and damages the first `corrupt` writes.

    The first unit of a damaged write is replaced by another unit of the same pool that holds other
    bytes: the source stays intact, only what arrives is wrong.
    """

    def __init__(self, inner: Transport, pool: Pool, corrupt: int) -> None:
        super().__init__(inner)
        self.pool = pool
        self.corrupt = corrupt  #: writes that are still to be damaged

    def write(self, peer: str, spans: Spans, note: bytes) -> int:
        if self.corrupt > 0:
            self.corrupt -= 1
            source = spans.source_units.copy()  # the caller's array stays as it is
            source[0] = self._different_unit(int(source[0]), spans.unit_bytes)
            spans = Spans(spans.unit_bytes, source, spans.target_units)
        return self.inner.write(peer, spans, note)

    def _different_unit(self, index: int, unit_bytes: int) -> int:
        """Returns the first unit whose bytes are not those of unit `index`.

        Equal bytes would do no damage: a pool that is mostly zeros has many such units.
        """
        pool_bytes = np.frombuffer(self.pool.view, np.uint8)
        unit_count = len(pool_bytes) // unit_bytes
        units = pool_bytes[: unit_count * unit_bytes].reshape(-1, unit_bytes)
        for candidate in range(unit_count):
            if not np.array_equal(units[candidate], units[index]):
                return candidate
        raise AssertionError("every unit of the pool holds the same bytes")
