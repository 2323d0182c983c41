"""A transport that damages what it carries, for tests of a live cluster (`kv_transfer.faults`)."""

from __future__ import annotations

from collections.abc import Sequence

from ..transport import Event, PeerCard, Transport


class FaultyTransport:
    """Passes everything on, but the first `corrupt` writes carry block 0 (zeros) instead of theirs.

    The pool's block 0 is never used, so the source stays intact and only the wire is wrong.
    """

    def __init__(self, inner: Transport, corrupt: int) -> None:
        self.inner, self.corrupt = inner, corrupt
        self.name = inner.name

    def address(self) -> bytes:
        return self.inner.address()

    def add_peer(self, card: PeerCard) -> None:
        self.inner.add_peer(card)

    def remove_peer(self, peer: str) -> None:
        self.inner.remove_peer(peer)

    def write(self, peer: str, source: Sequence[int], target: Sequence[int], note: bytes) -> int:
        if self.corrupt > 0:
            self.corrupt -= 1
            source = [0, *source[1:]]
        return self.inner.write(peer, source, target, note)

    def notify(self, peer: str, note: bytes) -> None:
        self.inner.notify(peer, note)

    def poll(self) -> list[Event]:
        return self.inner.poll()

    def fenced(self, peer: str) -> bool:
        return self.inner.fenced(peer)

    def close(self) -> None:
        self.inner.close()
