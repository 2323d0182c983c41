"""What carries blocks and notes between two agents: the interface that every transport fulfils.

A transport is owned by one thread. `conformance.py` is the suite that each one passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec


class PeerCard(msgspec.Struct, frozen=True):
    """What a worker publishes so that others can reach its pool."""

    agent: str  #: worker id + incarnation: never used twice
    transport: str
    compatibility: bytes  #: `KVLayout.compatibility`; another value is refused before any byte
    address: bytes  #: the transport's own contact data
    base: int  #: address of block 0 in the owner's process
    blocks: int
    block_bytes: int


class Pool(Protocol):
    """The registered memory: block i is `view[i * block_bytes : (i + 1) * block_bytes]`."""

    base: int
    blocks: int
    block_bytes: int
    view: memoryview


@dataclass(frozen=True, slots=True)
class Note:
    """A notification from a peer, delivered once, after the data it was sent with."""

    peer: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Wrote:
    """A posted write is terminal: `ok`, and its source may be reused either way."""

    handle: int
    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Down:
    """The peer's end is closed. Its last writes may still be on the way until `fenced`."""

    peer: str


Event = Note | Wrote | Down

Admit = Callable[[str, bytes], bool]  #: (peer, note) -> may the data that comes with it be stored


class Transport(Protocol):
    """Moves blocks between registered pools. Not thread safe: one thread owns it.

    `add_peer` is idempotent; `remove_peer` forgets the peer, tells no `Down`, and the peer may be
    added again. `write` copies whole blocks `source[i] -> target[i]` and delivers
    `note` after the data; it returns a handle whose one `Wrote` comes from `poll`. `notify` and
    `write` raise `PeerLost`. There is no cancel: after a write was posted its blocks may be reused
    only when it is terminal. `fenced(peer)` says that no write of a peer that went down can land
    any more. `poll` never blocks.
    """

    name: str

    def address(self) -> bytes: ...

    def add_peer(self, card: PeerCard) -> None: ...

    def remove_peer(self, peer: str) -> None: ...

    def write(
        self, peer: str, source: Sequence[int], target: Sequence[int], note: bytes
    ) -> int: ...

    def notify(self, peer: str, note: bytes) -> None: ...

    def poll(self) -> list[Event]: ...

    def fenced(self, peer: str) -> bool: ...

    def close(self) -> None: ...
