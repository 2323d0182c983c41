"""What carries blocks and notes between two agents: the interface that every transport fulfils.

An agent is one rank of one worker. One thread owns a transport; `tests/kit/conformance.py` is the
suite that each transport passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import msgspec
import numpy as np

from .layout import KVLayout


class PeerCard(msgspec.Struct, frozen=True):
    """What one rank of a worker publishes so that others can reach its pool."""

    agent: str  #: Worker id, incarnation and rank; a name is never used twice.
    transport: str  #: The transport's name; a peer with another one is refused.
    #: A hash of the model, the type of its numbers and the format of blocks. The transfer service
    #: refuses a peer with another value; transports do not look at it.
    compatibility: bytes
    address: bytes  #: Where the agent is reached, in the transport's own format.
    base: int  #: Address of byte 0 of the pool in the owner's process.
    size: int  #: Bytes of the pool.
    layout: KVLayout  #: How the pool's bytes are KV blocks; transports do not look at it.
    rank: int = 0  #: Number of this rank within its worker, from 0.
    ranks: int = 1  #: How many ranks the worker has.
    #: What `compatibility` is a hash of beside the layout's numbers, by name: to say what differs.
    facts: dict[str, str] = {}

    def describe_mismatch(self, peer: PeerCard) -> str | None:
        """Returns in what a peer differs though it must not, as `engine: vllm (here: diptych)`.

        None if the two may exchange KV.
        """
        if peer.transport != self.transport:
            return f"transport: {peer.transport} (here: {self.transport})"
        if peer.compatibility == self.compatibility:
            return None
        own_facts = self._all_facts()
        peer_facts = peer._all_facts()
        if peer_facts.get("engine") != own_facts.get("engine"):
            own_facts = {"engine": own_facts.get("engine", "unknown")}
            peer_facts = {"engine": peer_facts.get("engine", "unknown")}
        differing = [
            f"{name}: {peer_facts.get(name, 'none')} (here: {own_facts.get(name, 'none')})"
            for name in {**own_facts, **peer_facts}
            if peer_facts.get(name) != own_facts.get(name)
        ]
        return "; ".join(differing) or "model, numbers or format of blocks"

    def _all_facts(self) -> dict[str, str]:
        """Returns everything that both ends must have in common, by name, as far as it is known."""
        layout = self.layout
        return {
            **self.facts,
            "layers": str(layout.layers),
            "KV heads": str(layout.heads * self.ranks),
            "numbers per head": str(layout.head_dim),
            "type of numbers": layout.dtype,
        }


class Pool(Protocol):
    """The registered memory of one rank."""

    base: int  #: Address of byte 0 in this process.
    size: int  #: In bytes.
    view: memoryview  #: Its bytes; empty where the CPU cannot read the memory.
    memory: str  #: DRAM or VRAM.
    device: int  #: The number of the GPU; 0 for DRAM.
    fd: int | None  #: The file of shared memory behind it, if any; byte 0 of both is the same.


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """What one write copies: `source_units[i]` of the own pool to `target_units[i]` of the peer's.

    Unit k of a pool begins at byte `k * unit_bytes`. Both arrays are int32 [n]; runs that are
    contiguous on both sides may travel as one.
    """

    unit_bytes: int
    source_units: np.ndarray
    target_units: np.ndarray

    @property
    def bytes(self) -> int:
        """Bytes of the whole write."""
        return self.unit_bytes * len(self.source_units)


@dataclass(frozen=True, slots=True)
class NotificationReceived:
    """A note from a peer, delivered once, after the data that it was sent with."""

    peer: str
    data: bytes


@dataclass(frozen=True, slots=True)
class PostedWriteEnded:
    """A posted write has ended, well or not: its source may be reused."""

    handle: int  #: What `Transport.write` returned.
    ok: bool
    reason: str = ""  #: Why not, if it is not `ok`.


@dataclass(frozen=True, slots=True)
class PeerDisconnected:
    """The peer's end is closed. Its last writes may still be on the way until `fenced`."""

    peer: str
    error: str = field(default="", compare=False)  #: Why, if the peer was never reached.


TransportEvent: TypeAlias = NotificationReceived | PostedWriteEnded | PeerDisconnected

#: `(peer, note)` -> whether the data that comes with the note may be stored. A transport that
#: `refuses_late` gets the callable when it is made. Refused data is dropped: the note is delivered
#: and the write ends well all the same, as the sender's ticket is over for the receiver.
AdmitData: TypeAlias = Callable[[str, bytes], bool]


class Transport(Protocol):
    """Moves blocks between registered pools.

    It is not thread safe: one thread owns it, and no call blocks. `notify` and `write` raise
    `PeerLost`. There is no cancel: after a write was posted, its source may be reused only when
    the write has completed.
    """

    name: str  #: Both ends of a connection must have the same one.
    refuses_late: bool  #: True if data is stored only while `AdmitData` says so, as it comes in.

    @property
    def moving(self) -> bool:
        """True if bytes were on their way at the last `poll`, as far as this end can tell.

        The owner polls more often then.
        """
        ...

    def address(self) -> bytes:
        """Returns the contact data that goes into this end's `PeerCard`."""
        ...

    def add_peer(self, card: PeerCard) -> None:
        """Makes a peer reachable; a second call for the same peer changes nothing.

        Raises what it likes if the peer cannot be reached. A transport that dials with the first
        message says so later, by the `error` of a `PeerDisconnected`.
        """
        ...

    def reached(self, peer: str) -> bool:
        """Returns whether the peer has answered since it was added."""
        ...

    def remove_peer(self, peer: str) -> None:
        """Forgets a peer, without a `PeerDisconnected`. The peer may be added again."""
        ...

    def write(self, peer: str, spans: Spans, note: bytes) -> int:
        """Posts a copy of `spans`, and of `note` behind the data.

        Returns a handle; `poll` returns exactly one `PostedWriteEnded` for it.
        """
        ...

    def notify(self, peer: str, note: bytes) -> None:
        """Sends a note without data."""
        ...

    def poll(self) -> list[TransportEvent]:
        """Returns what has happened since the last call, in order."""
        ...

    def fenced(self, peer: str) -> bool:
        """Returns whether no write of a peer that went down can land any more.

        The owner asks again and again until it is True; some transports hang up by being asked.
        """
        ...

    def mark_process_dead(self, peer: str) -> None:
        """Takes note that the cluster knows the peer's process to be gone.

        Some fences wait for this.
        """

    def close(self) -> None:
        """Ends all connections. No other call may follow."""


class LaidOutPool(Pool, Protocol):
    """A pool that knows how its bytes are KV blocks."""

    @property
    def layout(self) -> KVLayout:
        """How the pool's bytes are blocks."""
        ...


def card_of(agent: str, transport: Transport, pool: LaidOutPool) -> PeerCard:
    """Returns the card by which peers reach an agent that is the only rank of its worker.

    Its `compatibility` is empty, for uses of a transport without the service that compares them.
    """
    return PeerCard(
        agent=agent,
        transport=transport.name,
        compatibility=b"",
        address=transport.address(),
        base=pool.base,
        size=pool.size,
        layout=pool.layout,
    )
