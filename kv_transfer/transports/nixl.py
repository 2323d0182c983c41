"""NIXL over UCX: RDMA, NVLink, shared memory (CMA) or TCP, whichever UCX finds between two agents.

NIXL's progress thread stays off: it spins at a full core and shares a lock with the posting thread.
`poll` and posting drive all progress. On one host `transfer` copies synchronously (CMA) with the GIL released.
Memory of a GPU goes through the same calls, unproven.

NIXL has no type annotations, so its objects are `Any` here. Its exceptions, a class for each status,
have no common base: every exception of a posting call means that the peer is lost.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from logging.handlers import MemoryHandler
from typing import Any

import msgspec
import numpy as np

from ..errors import PeerLost, TransportUnavailable
from ..pinning import check_pinning
from ..transport import (
    NotificationReceived,
    PeerCard,
    PeerDisconnected,
    Pool,
    PostedWriteEnded,
    Spans,
    TransportEvent,
)
from .process import ProcessWatch, own_process_identity

log = logging.getLogger(__name__)

GRACE_S = 1.0  #: a dead peer's bytes in our own socket buffers are applied within this
_OWN_AGENT = "NIXL_INIT_AGENT"  #: NIXL's name for the side that posts a transfer
_DONE = "DONE"  #: NIXL's state of a transfer that has ended well


@contextmanager
def _log_buffers_kept() -> Iterator[None]:
    """Restores the targets of buffering log handlers, which the import of NIXL takes from them.

    NIXL configures logging by `dictConfig`, which closes every handler of the process. Ray Serve
    asks a handler of its own for its target: after the end of Serve's controller, the new one
    would stop every replica that cannot answer.
    """
    names = [None, *logging.root.manager.loggerDict]
    buffers = {
        handler: handler.target
        for name in names
        for handler in logging.getLogger(name).handlers
        if isinstance(handler, MemoryHandler)
    }
    try:
        yield
    finally:
        for handler, target in buffers.items():
            handler.setTarget(target)


class NixlContact(msgspec.Struct, frozen=True, array_like=True):
    """`PeerCard.address` of a NIXL agent."""

    process: str  #: identity of the agent's process (`process.own_process_identity`)
    memory: str  #: DRAM | VRAM
    device: int
    metadata: bytes  #: what NIXL needs to reach the agent


class NixlRegion:
    """One pool as units of any size: a list of descriptors per size, made at first use."""

    def __init__(self, agent: Any, owner: str, base: int, size: int, contact: NixlContact) -> None:
        self._agent = agent
        self._owner = owner
        self._base = base
        self._size = size
        self._contact = contact
        self._descriptors: dict[int, Any] = {}  #: by bytes of a unit

    def units(self, unit: int) -> Any:
        """Returns the prepared descriptors of all units of `unit` bytes."""
        if unit not in self._descriptors:
            # One strided row describes the pool: address, bytes, device, stride, count.
            row = [self._base, unit, self._contact.device, unit, self._size // unit]
            self._descriptors[unit] = self._agent.prep_xfer_dlist(
                self._owner, np.array([row], np.uint64), self._contact.memory
            )
        return self._descriptors[unit]


class NixlPeer:
    """Where a peer's pool is, and what is known of its process."""

    def __init__(self, agent: Any, card: PeerCard) -> None:
        contact = msgspec.msgpack.decode(card.address, type=NixlContact)
        agent.add_remote_agent(contact.metadata)
        self.region = NixlRegion(agent, card.agent, base=card.base, size=card.size, contact=contact)
        self.process = ProcessWatch(contact.process)
        #: Nothing is sent to it any more: a call failed, or the owner asked whether it is `fenced`.
        self.is_lost = False
        #: When `fenced` first found its process gone; None: it has not. The grace begins then.
        self.gone_at: float | None = None
        self.marked_dead = False  #: the cluster has said that the peer's process is gone

    @property
    def process_gone(self) -> bool:
        """True if the peer's process is known to be gone, or is this one.

        `ProcessWatch` cannot tell of this very process (None), whose closed agents are done while
        it lives on; nor of a process elsewhere, of which the cluster's word counts (`marked_dead`).
        """
        has_ended = self.process.has_ended()
        if has_ended is None:
            return self.marked_dead or self.process.is_own_process
        return has_ended


@dataclass(slots=True)
class NixlWrite:
    """A posted transfer that has not ended."""

    peer: str
    transfer: Any  #: NIXL's handle, which has to be released
    is_kept: bool = False  #: NIXL did not release it, though it has failed.


class NixlTransport:
    """One NIXL agent that registers one pool as one region.

    Fulfils `transport.Transport`, which says what each method is for.
    """

    name = "nixl"
    refuses_late = False  #: a write of a peer that was given up still lands: hence `fenced`

    def __init__(self, agent: str, pool: Pool) -> None:
        """Raises TransportUnavailable when NIXL is not installed.

        Raises PinningRefused where UCX may use RDMA and the pool, of host memory, cannot be pinned.
        """
        try:
            with _log_buffers_kept():
                from nixl import _api as api
        except ImportError as error:
            raise TransportUnavailable(f"NIXL is not installed here: {error}") from error
        logging.getLogger("nixl").setLevel(logging.WARNING)  # its import sets another one

        if pool.memory == "DRAM":
            check_pinning(pool.size)
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent: Any = api.nixl_agent(agent, config)
        self._agent.create_backend("UCX", {})
        row = (pool.base, pool.size, pool.device, "")
        self._registration = self._agent.register_memory([row], pool.memory)
        self._contact = NixlContact(
            process=own_process_identity(),
            memory=pool.memory,
            device=pool.device,
            metadata=self._agent.get_agent_metadata(),
        )
        self._own_region = NixlRegion(
            self._agent, _OWN_AGENT, base=pool.base, size=pool.size, contact=self._contact
        )
        self._peers: dict[str, NixlPeer] = {}
        self._writes: dict[int, NixlWrite] = {}  #: by handle
        self._events: list[TransportEvent] = []  #: what the next `poll` returns
        self._handles = itertools.count()

    def address(self) -> bytes:
        return msgspec.msgpack.encode(self._contact)

    def add_peer(self, card: PeerCard) -> None:
        if card.agent not in self._peers:
            self._peers[card.agent] = NixlPeer(self._agent, card)

    def reached(self, peer: str) -> bool:
        return peer in self._peers

    def remove_peer(self, peer: str) -> None:
        removed = self._peers.pop(peer, None)
        if removed is not None:
            removed.process.close()
            self._agent.remove_remote_agent(peer)

    def write(self, peer: str, spans: Spans, note: bytes) -> int:
        return self._post("WRITE", peer, spans, note)

    def read(self, peer: str, spans: Spans, note: bytes) -> int:
        """Copies unit `target_units[i]` of the peer's pool to unit `source_units[i]` of the own.

        The peer gets the note; the handle ends as that of a write does. No other transport reads,
        and only `speed.measure` uses it.
        """
        return self._post("READ", peer, spans, note)

    def _post(self, operation: str, peer: str, spans: Spans, note: bytes) -> int:
        peer_region = self._reachable_peer(peer).region
        handle = next(self._handles)
        transfer = None
        try:
            transfer = self._agent.make_prepped_xfer(
                operation,
                self._own_region.units(spans.unit_bytes),
                np.ascontiguousarray(spans.source_units, np.int32),
                peer_region.units(spans.unit_bytes),
                np.ascontiguousarray(spans.target_units, np.int32),
                note,
            )
            state = self._agent.transfer(transfer)
        except Exception as error:
            if transfer is not None:
                with suppress(Exception):  # it may still be under way: then NIXL keeps it
                    self._agent.release_xfer_handle(transfer)
            self._lose_peer(peer)
            raise PeerLost(f"{peer}: {type(error).__name__}") from error

        if state == _DONE:
            self._agent.release_xfer_handle(transfer)
            self._events.append(PostedWriteEnded(handle, ok=True))
        else:
            self._end_leading_writes()
            self._writes[handle] = NixlWrite(peer, transfer)
        return handle

    def _end_leading_writes(self) -> None:
        """Ends the oldest writes to each peer that are done: NIXL sends their notes only when asked.

        A burst of writes would keep all notes back until the next `poll`, and the peers would begin
        to verify only then.
        """
        waiting_peers: set[str] = set()
        for handle, write in list(self._writes.items()):
            if write.peer not in waiting_peers and not self._end_write(handle, write):
                waiting_peers.add(write.peer)

    def notify(self, peer: str, note: bytes) -> None:
        self._reachable_peer(peer)
        try:
            self._agent.send_notif(peer, note)
        except Exception as error:
            self._lose_peer(peer)
            raise PeerLost(f"{peer}: {type(error).__name__}") from error

    def _reachable_peer(self, name: str) -> NixlPeer:
        peer = self._peers.get(name)
        if peer is None or peer.is_lost:
            raise PeerLost(name)
        return peer

    def _lose_peer(self, name: str) -> None:
        peer = self._peers.get(name)
        if peer is not None and not peer.is_lost:
            peer.is_lost = True
            self._events.append(PeerDisconnected(name))

    @property
    def moving(self) -> bool:
        return bool(self._writes)

    def poll(self) -> list[TransportEvent]:
        for handle, write in list(self._writes.items()):
            self._end_write(handle, write)
        for peer, notes in self._agent.get_new_notifs().items():
            self._events += [NotificationReceived(peer, note) for note in notes]
        events = self._events
        self._events = []
        return events

    def _end_write(self, handle: int, write: NixlWrite) -> bool:
        """Returns False, and changes nothing, while the write is under way."""
        reason = ""
        try:
            if self._agent.check_xfer_state(write.transfer) != _DONE:
                return False
        except Exception as error:
            reason = type(error).__name__
            self._lose_peer(write.peer)
        try:
            self._agent.release_xfer_handle(write.transfer)
        except Exception as error:  # it may still be under way
            if not write.is_kept:
                write.is_kept = True
                log.warning("NIXL keeps a write to %s: %s", write.peer, type(error).__name__)
            return False
        del self._writes[handle]
        self._events.append(PostedWriteEnded(handle, ok=not reason, reason=reason))
        return True

    def fenced(self, peer: str) -> bool:
        """Returns True a grace period after this first found the peer's process gone.

        Asked only of a peer that is given up, which is not reachable from then on. A killed
        writer's bytes may wait in our socket buffers, and polling applies them. Its process must be
        gone before the grace begins: a frozen one may wake up and go on writing. Of a process
        elsewhere the cluster must say so (`mark_process_dead`); until then nothing is fenced.
        """
        known_peer = self._peers.get(peer)
        if known_peer is None:
            return True
        known_peer.is_lost = True
        if not known_peer.process_gone:
            return False
        now = time.monotonic()
        if known_peer.gone_at is None:
            known_peer.gone_at = now
        return now - known_peer.gone_at > GRACE_S

    def mark_process_dead(self, peer: str) -> None:
        if peer in self._peers:
            self._peers[peer].marked_dead = True

    def close(self) -> None:
        for peer in list(self._peers):
            try:
                self.remove_peer(peer)
            except Exception:  # whatever NIXL says, closing goes on
                logging.getLogger(__name__).debug("peer %s was gone already", peer)
        self._agent.deregister_memory(self._registration)
        self._writes.clear()
        # NIXL's agent lives, and peers see it, until no handle of it is left.
        del self._own_region, self._agent
