"""A transport around another one: the base of those that damage, delay or watch what is carried."""

from __future__ import annotations

from ..transport import PeerCard, Spans, Transport, TransportEvent


class WrappedTransport:
    """Passes every call on to `inner`. A subclass overrides what it changes.

    What each member means is said at `transport.Transport`: for one, `refuses_late` is whether data
    of a peer that was given up is refused as it comes in, `fenced` whether none can come any more,
    and `write` returns the handle that is named when the write has ended.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.name = inner.name
        self.refuses_late = inner.refuses_late

    @property
    def moving(self) -> bool:
        return self.inner.moving

    def address(self) -> bytes:
        return self.inner.address()

    def add_peer(self, card: PeerCard) -> None:
        self.inner.add_peer(card)

    def reached(self, peer: str) -> bool:
        return self.inner.reached(peer)

    def remove_peer(self, peer: str) -> None:
        self.inner.remove_peer(peer)

    def write(self, peer: str, spans: Spans, note: bytes) -> int:
        return self.inner.write(peer, spans, note)

    def notify(self, peer: str, note: bytes) -> None:
        self.inner.notify(peer, note)

    def poll(self) -> list[TransportEvent]:
        return self.inner.poll()

    def fenced(self, peer: str) -> bool:
        return self.inner.fenced(peer)

    def mark_process_dead(self, peer: str) -> None:
        self.inner.mark_process_dead(peer)

    def close(self) -> None:
        self.inner.close()
