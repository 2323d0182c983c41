"""All KV transfer of one worker: a service for each of its ranks, and the `Fan` that joins them.

A rank is one of the processes that share a worker's model; each has its part of the KV. Rank 0's
service is a thread of this process. The services of the other ranks live in the ranks' own
processes (`rank.py`), where their pools are, and take commands through a socket. A ticket is one
transfer between two workers; its lanes are the parts of pairs of ranks. `Fan` splits a command for
a ticket into the ranks' commands, and makes one outcome of the ranks' outcomes.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

from ...engine.engine_like import EngineLike
from ...kv_transfer import PeerCard
from ...kv_transfer.commands import TransferCommand, TransferOutcome
from ...kv_transfer.fan import Fan, RankCommand
from ...kv_transfer.service import TransferService
from ...kv_transfer.slices import LaneEnd
from ...kv_transfer.ticket_events import TicketTimeouts
from ...kv_transfer.transport import AdmitData, Transport
from ...kv_transfer.transports import open_transport
from ..config import TransferSettings
from .rank import RankSetup, RemoteService


class Transfers:
    """A worker's transfers, owned by the event loop that makes the object.

    `worker` is the worker's id, `host` the address on which transports listen. `on_outcomes` gets
    what happened to whole tickets, on the loop. `secret` is the cluster's, which transports ask
    peers for. Of rank 0's writes the first `corrupt_writes` are damaged on purpose, for tests. Rank
    0's thread is bound to `cores`, if any are named.
    """

    def __init__(
        self,
        worker: str,
        engine: EngineLike,
        settings: TransferSettings,
        host: str,
        *,
        secret: str,
        corrupt_writes: int,
        on_outcomes: Callable[[Collection[TransferOutcome]], None],
        cores: tuple[int, ...] = (),
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_outcomes = on_outcomes
        self._fan: Fan
        pool = engine.kv_pool
        ranks = 1 + len(engine.rank_sockets)

        def open_own_transport(admit: AdmitData) -> Transport:
            if cores:  # this runs on the transfer thread
                os.sched_setaffinity(0, cores)
            agent = f"{worker}:0"
            return open_transport(
                settings.transport, agent, pool, admit, host, corrupt_writes, secret=secret
            )

        own_service = TransferService(
            f"{worker}:0",
            pool,
            LaneEnd(pool.layout, 0, ranks),
            engine.compatibility,
            open_own_transport,
            self._take_outcome,
            TicketTimeouts(total_s=settings.timeout_s),
            digest=pool.digest,
        )
        self._services: list[TransferService | RemoteService] = [own_service]
        for rank, control in enumerate(engine.rank_sockets, 1):
            setup = RankSetup(
                agent=f"{worker}:{rank}",
                compatibility=engine.compatibility,
                transport=settings.transport,
                host=host,
                timeout_s=settings.timeout_s,
                secret=secret,
            )
            self._services.append(RemoteService(rank, control, setup, self._take_outcome))

    async def start(self) -> list[PeerCard]:
        """Open every rank's transport; return what peers need to know, by rank.

        Everything else but `stop` needs this first. The ranks start one at a time, as agents that
        start together may hang (nixl issue 1668). Raises what the first service that fails raises.
        """
        cards = [await asyncio.to_thread(service.start) for service in self._services]
        self._fan = Fan(cards)
        return cards

    def _take_outcome(self, outcome: TransferOutcome) -> None:
        """Take what happened to one rank's lane of a ticket, from that rank's thread."""
        self._loop.call_soon_threadsafe(partial(self.handle, outcome))

    def handle(self, event: TransferCommand | TransferOutcome) -> None:
        """Take a command for all ranks that have a part in a ticket, or one rank's outcome."""
        for action in self._fan.handle(event):
            if isinstance(action, RankCommand):
                self._services[action.rank].submit(action.command)
            else:
                self._on_outcomes([action])

    @property
    def alive(self) -> bool:
        """Whether every rank's service runs."""
        return all(service.alive for service in self._services)

    def statistics(self) -> dict[str, Any]:
        """Return the sum of all ranks' snapshots; those of ranks above 0 are a call old."""
        return sum_snapshots(service.statistics() for service in self._services)

    def stop(self) -> None:
        for service in self._services:
            service.stop()


def sum_snapshots(snapshots: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Add up numbers and the values of mappings, key by key; of texts keep the first."""
    total: dict[str, Any] = {}
    for snapshot in snapshots:
        for key, value in snapshot.items():
            if isinstance(value, dict):
                counts = Counter(total.get(key, {}))
                counts.update(value)
                total[key] = dict(counts)
            elif isinstance(value, str):
                total.setdefault(key, value)
            else:
                total[key] = total.get(key, 0) + value
    return total
