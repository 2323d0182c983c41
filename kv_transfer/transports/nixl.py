"""NIXL over UCX: RDMA, NVLink, shared memory (CMA) or TCP, whichever UCX finds between two agents.

The progress thread stays off: it spins at a full core and shares a lock with the posting thread.
`poll` drives all progress. On one host `transfer` copies synchronously (CMA) with the GIL released.
Memory of a GPU goes through the same calls, unproven.
"""

from __future__ import annotations

import itertools
import logging
import time
from typing import Any

import msgspec
import numpy as np

from ..errors import PeerLost, TransportUnavailable
from ..transport import (
    NotificationReceived,
    PeerCard,
    PeerDisconnected,
    Pool,
    PostedWriteEnded,
    Spans,
    TransportEvent,
)
from .process import Watch, here

GRACE_S = 1.0  #: a dead peer's bytes in our own socket buffers are applied within this


class Contact(msgspec.Struct, frozen=True, array_like=True):
    """`PeerCard.address` of a NIXL agent."""

    process: str
    memory: str
    device: int
    metadata: bytes


class Region:
    """One pool as units of any size: a list of descriptors per size, made at first use."""

    def __init__(self, agent: Any, owner: str, base: int, size: int, contact: Contact) -> None:
        self._agent, self._owner = agent, owner
        self._base, self._size, self._contact = base, size, contact
        self._lists: dict[int, Any] = {}

    def units(self, unit: int) -> Any:
        """The prepared descriptors of all units of `unit` bytes."""
        found = self._lists.get(unit)
        if found is None:
            device = self._contact.device
            row = [self._base, unit, device, unit, self._size // unit]  # one strided row: the pool
            found = self._lists[unit] = self._agent.prep_xfer_dlist(
                self._owner, np.array([row], np.uint64), self._contact.memory
            )
        return found


class Peer:
    """Where a peer's pool is, and what is known of its process."""

    def __init__(self, agent: Any, card: PeerCard) -> None:
        contact = msgspec.msgpack.decode(card.address, type=Contact)
        agent.add_remote_agent(contact.metadata)
        self.region = Region(agent, card.agent, card.base, card.size, contact)
        self.process = Watch(contact.process)
        self.down_at: float | None = None  #: when it was found dead
        self.buried = False  #: the cluster knows that its process is gone

    @property
    def gone(self) -> bool:
        """Its process is known to be gone, or is this one: who closed an agent here is done."""
        known = self.process.gone()
        return known if known is not None else self.buried or self.process.own


class NixlTransport:
    """One NIXL agent that registers one pool as one region."""

    name = "nixl"
    refuses_late = False

    def __init__(self, agent: str, pool: Pool) -> None:
        try:
            from nixl import _api as api
        except ImportError as error:
            raise TransportUnavailable(f"NIXL is not installed here: {error}") from error
        logging.getLogger("nixl").setLevel(logging.WARNING)  # its import sets another one
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent: Any = api.nixl_agent(agent, config)
        self._agent.create_backend("UCX", {})
        row = (pool.base, pool.size, pool.device, "")
        self._registered = self._agent.register_memory([row], pool.memory)
        metadata = self._agent.get_agent_metadata()
        self._contact = Contact(here(), pool.memory, pool.device, metadata)
        self._mine = Region(self._agent, "NIXL_INIT_AGENT", pool.base, pool.size, self._contact)
        self._peers: dict[str, Peer] = {}
        self._writes: dict[int, tuple[str, Any]] = {}  #: handle -> (peer, NIXL transfer)
        self._events: list[TransportEvent] = []
        self._ids = itertools.count()

    def address(self) -> bytes:
        return msgspec.msgpack.encode(self._contact)

    def add_peer(self, card: PeerCard) -> None:
        if card.agent not in self._peers:
            self._peers[card.agent] = Peer(self._agent, card)

    def remove_peer(self, peer: str) -> None:
        gone = self._peers.pop(peer, None)
        if gone is not None:
            gone.process.close()
            self._agent.remove_remote_agent(peer)

    def write(self, peer: str, spans: Spans, note: bytes) -> int:
        return self._post("WRITE", peer, spans, note)

    def read(self, peer: str, spans: Spans, note: bytes) -> int:
        """The other way round: unit `target[i]` of the peer's pool to unit `source[i]` of mine."""
        return self._post("READ", peer, spans, note)

    def _post(self, operation: str, peer: str, spans: Spans, note: bytes) -> int:
        region = self._alive(peer).region
        handle, transfer = next(self._ids), None
        try:
            transfer = self._agent.make_prepped_xfer(
                operation,
                self._mine.units(spans.unit_bytes),
                np.ascontiguousarray(spans.source_units, np.int32),
                region.units(spans.unit_bytes),
                np.ascontiguousarray(spans.target_units, np.int32),
                note,
            )
            state = self._agent.transfer(transfer)
        except Exception as error:  # NIXL raises one exception class per status
            if transfer is not None:
                self._agent.release_xfer_handle(transfer)
            self._lost(peer)
            raise PeerLost(f"{peer}: {type(error).__name__}") from error
        if state == "DONE":
            self._agent.release_xfer_handle(transfer)
            self._events.append(PostedWriteEnded(handle, True))
        else:
            self._writes[handle] = (peer, transfer)
        return handle

    def notify(self, peer: str, note: bytes) -> None:
        self._alive(peer)
        try:
            self._agent.send_notif(peer, note)
        except Exception as error:
            self._lost(peer)
            raise PeerLost(f"{peer}: {type(error).__name__}") from error

    def _alive(self, peer: str) -> Peer:
        known = self._peers.get(peer)
        if known is None or known.down_at is not None:
            raise PeerLost(peer)
        return known

    def _lost(self, peer: str) -> None:
        known = self._peers.get(peer)
        if known is not None and known.down_at is None:
            known.down_at = time.monotonic()
            self._events.append(PeerDisconnected(peer))

    @property
    def moving(self) -> bool:
        return bool(self._writes)

    def poll(self) -> list[TransportEvent]:
        for handle, (peer, transfer) in list(self._writes.items()):
            ok, reason = True, ""
            try:
                if self._agent.check_xfer_state(transfer) != "DONE":
                    continue
            except Exception as error:
                ok, reason = False, type(error).__name__
                self._lost(peer)
            del self._writes[handle]
            self._agent.release_xfer_handle(transfer)
            self._events.append(PostedWriteEnded(handle, ok, reason))
        for peer, notes in self._agent.get_new_notifs().items():
            self._events += [NotificationReceived(peer, data) for data in notes]
        events, self._events = self._events, []
        return events

    def fenced(self, peer: str) -> bool:
        """A killed writer's bytes may wait in our socket buffers: poll on for a grace period.

        Its process must be gone before that begins: a frozen one may wake up and go on writing.
        Of one elsewhere the cluster must say so (`bury`); until then nothing is fenced.
        """
        known = self._peers.get(peer)
        if known is None:
            return True
        if not known.gone or known.down_at is None:
            known.down_at = time.monotonic()
        return known.gone and time.monotonic() - known.down_at > GRACE_S

    def bury(self, peer: str) -> None:
        if peer in self._peers:
            self._peers[peer].buried = True

    def close(self) -> None:
        for peer in list(self._peers):
            try:
                self.remove_peer(peer)
            except Exception:
                logging.getLogger(__name__).debug("peer %s was gone already", peer)
        self._agent.deregister_memory(self._registered)
        self._writes.clear()
        del self._mine, self._agent  # the agent lives, and peers see it, until no handle is left
