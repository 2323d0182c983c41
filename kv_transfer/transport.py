"""What carries blocks and notes between two agents: the interface that every transport fulfils.

A transport is owned by one thread. `conformance.py` is the suite that each one passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from .layout import KVLayout


class PeerCard(msgspec.Struct, frozen=True):
    """What one rank of a worker publishes so that others can reach its pool."""

    agent: str  #: worker id + incarnation + rank: never used twice
    transport: str
    compatibility: bytes  #: model, numbers and format; another value is refused before any byte
    address: bytes  #: the transport's own contact data
    base: int  #: address of byte 0 of the pool in the owner's process
    size: int  #: bytes
    layout: KVLayout  #: how the pool's bytes are KV blocks; transports do not look at it
    rank: int = 0
    ranks: int = 1


class Pool(Protocol):
    """The registered memory of one rank."""

    base: int
    size: int
    view: memoryview  #: its bytes; of memory that the CPU cannot read, empty
    memory: str  #: DRAM | VRAM
    device: int  #: number of the GPU, 0 for DRAM
    fd: int | None  #: file of shared memory behind it, if any; byte 0 of the pool is byte 0 of it


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """What one write copies: unit `source[i]` of my pool to unit `target[i]` of the peer's.

    Unit k of a pool begins at byte `k * unit`. Both arrays are int32 [n]; runs that are contiguous
    on both sides may travel as one.
    """

    unit: int  #: bytes
    source: np.ndarray
    target: np.ndarray

    @property
    def bytes(self) -> int:
        return self.unit * len(self.source)


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
    added again. `write` copies `spans` and delivers `note` after the data; it returns a handle
    whose one `Wrote` comes from `poll`. `notify` and `write` raise `PeerLost`. There is no cancel:
    after a write was posted its source may be reused only when it is terminal. `fenced(peer)` says
    that no write of a peer that went down can land any more. No call blocks.
    """

    name: str
    refuses_late: bool  #: data is stored only if the receiver's `Admit` says so, while it comes in

    @property
    def moving(self) -> bool:
        """Bytes were on their way at the last `poll`, as far as this end can tell."""
        ...

    def address(self) -> bytes: ...

    def add_peer(self, card: PeerCard) -> None: ...

    def remove_peer(self, peer: str) -> None: ...

    def write(self, peer: str, spans: Spans, note: bytes) -> int: ...

    def notify(self, peer: str, note: bytes) -> None: ...

    def poll(self) -> list[Event]: ...

    def fenced(self, peer: str) -> bool: ...

    def bury(self, peer: str) -> None:
        """The cluster knows that the peer's process is gone: what some fences wait for."""

    def close(self) -> None: ...
