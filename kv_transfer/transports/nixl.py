"""NIXL over UCX: RDMA, NVLink, shared memory (CMA) or TCP, whichever UCX finds between two agents.

The progress thread stays off: it spins at a full core and shares a lock with the posting thread.
`poll` drives all progress. On one host `transfer` copies synchronously (CMA) with the GIL released.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import PeerLost, TransportUnavailable
from ..transport import Down, Event, Note, PeerCard, Pool, Wrote

GRACE_S = 1.0  #: a dead peer's bytes in our own socket buffers are applied within this


class NixlTransport:
    """One NIXL agent that registers one pool as one region."""

    name = "nixl"

    def __init__(self, agent: str, pool: Pool) -> None:
        logging.getLogger("nixl").setLevel(logging.WARNING)
        try:
            from nixl import _api as api
        except ImportError as error:
            raise TransportUnavailable(f"NIXL is not installed here: {error}") from error
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent: Any = api.nixl_agent(agent, config)
        self._agent.create_backend("UCX", {})
        size = pool.blocks * pool.block_bytes
        self._region = self._agent.register_memory([(pool.base, size, 0, "")], "DRAM")
        self._local = self._prepare("NIXL_INIT_AGENT", pool.base, pool.block_bytes, pool.blocks)
        self._remote: dict[str, Any] = {}  #: peer -> prepared descriptors of its pool
        self._writes: dict[int, tuple[str, Any]] = {}  #: handle -> (peer, NIXL transfer)
        self._events: list[Event] = []
        self._down: dict[str, float] = {}  #: peer -> when it was found dead
        self._ids = itertools.count()

    def _prepare(self, agent: str, base: int, block: int, count: int) -> Any:
        row = np.array([[base, block, 0, block, count]], np.uint64)  # one strided row: the pool
        return self._agent.prep_xfer_dlist(agent, row, "DRAM")

    def address(self) -> bytes:
        return self._agent.get_agent_metadata()

    def add_peer(self, card: PeerCard) -> None:
        if card.agent in self._remote:
            return
        self._agent.add_remote_agent(card.address)
        self._remote[card.agent] = self._prepare(
            card.agent, card.base, card.block_bytes, card.blocks
        )
        self._down.pop(card.agent, None)

    def remove_peer(self, peer: str) -> None:
        if self._remote.pop(peer, None) is not None:
            self._agent.remove_remote_agent(peer)

    def write(self, peer: str, source: Sequence[int], target: Sequence[int], note: bytes) -> int:
        remote = self._peer(peer)
        handle, transfer = next(self._ids), None
        try:
            transfer = self._agent.make_prepped_xfer(
                "WRITE",
                self._local,
                np.asarray(source, np.int32),
                remote,
                np.asarray(target, np.int32),
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
            self._events.append(Wrote(handle, True))
        else:
            self._writes[handle] = (peer, transfer)
        return handle

    def notify(self, peer: str, note: bytes) -> None:
        self._peer(peer)
        try:
            self._agent.send_notif(peer, note)
        except Exception as error:
            self._lost(peer)
            raise PeerLost(f"{peer}: {type(error).__name__}") from error

    def _peer(self, peer: str) -> Any:
        if peer not in self._remote or peer in self._down:
            raise PeerLost(peer)
        return self._remote[peer]

    def _lost(self, peer: str) -> None:
        if peer not in self._down:
            self._down[peer] = time.monotonic()
            self._events.append(Down(peer))

    def poll(self) -> list[Event]:
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
            self._events.append(Wrote(handle, ok, reason))
        for peer, notes in self._agent.get_new_notifs().items():
            self._events += [Note(peer, data) for data in notes]
        events, self._events = self._events, []
        return events

    def fenced(self, peer: str) -> bool:
        """A killed writer's bytes may wait in our socket buffers: poll on for a grace period."""
        return time.monotonic() - self._down.setdefault(peer, time.monotonic()) > GRACE_S

    def close(self) -> None:
        for peer in list(self._remote):
            self._remote.pop(peer)
            try:
                self._agent.remove_remote_agent(peer)
            except Exception:
                logging.getLogger(__name__).debug("peer %s was gone already", peer)
        self._agent.deregister_memory(self._region)
        self._writes.clear()
        del self._local, self._agent  # the agent lives, and peers see it, until no handle is left
