"""All KV transfer of one worker: a service for each of its ranks, and the `Fan` that joins them.

Rank 0's service is a thread of this process. Those of the ranks above 0 live in their processes
(`rank.py`), where their pools are, and are told through a socket.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from functools import partial

from ...engine.engine import Engine
from ...kv_transfer import PeerCard, tickets
from ...kv_transfer.fan import Fan, ToRank
from ...kv_transfer.service import TransferService
from ...kv_transfer.slices import End
from ...kv_transfer.transport import Admit, Transport
from ...kv_transfer.transports import open_transport
from ..config import TransferSettings
from .rank import RemoteService, Setup


class Transfers:
    """Owned by the event loop. `tell` gets what happened to whole tickets, on the loop.

    Rank 0's thread is bound to `cores`, if there are any.
    """

    def __init__(
        self,
        worker: str,
        engine: Engine,
        settings: TransferSettings,
        host: str,
        corrupt: int,
        tell: Callable[[list], None],
        cores: tuple[int, ...] = (),
    ) -> None:
        self._loop, self._tell = asyncio.get_running_loop(), tell
        pool, ranks = engine.kv, 1 + len(engine.followers)
        name = settings.transport

        def opened(admit: Admit) -> Transport:
            if cores:  # on the transfer thread
                os.sched_setaffinity(0, cores)
            return open_transport(name, f"{worker}:0", pool, admit, host, corrupt)

        self._services: list[TransferService | RemoteService] = [
            TransferService(
                f"{worker}:0",
                pool,
                End(pool.layout, 0, ranks),
                engine.compatibility,
                opened,
                self._outcome,
                tickets.TicketTimeouts(total_s=settings.timeout_s),
                digest=pool.digest,
            )
        ]
        for rank, control in enumerate(engine.followers, 1):
            agent, limit = f"{worker}:{rank}", settings.timeout_s
            setup = Setup(agent, engine.compatibility, name, host, limit)
            self._services.append(RemoteService(rank, control, setup, self._outcome))
        self._fan: Fan

    async def start(self) -> list[PeerCard]:
        """Opens every rank's transport; returns what peers need to know. One at a time: agents
        that start together may hang (nixl issue 1668)."""
        cards = [await asyncio.to_thread(service.start) for service in self._services]
        self._fan = Fan(cards)
        return cards

    def _outcome(self, outcome: object) -> None:
        """From a rank's thread."""
        self._loop.call_soon_threadsafe(partial(self.handle, outcome))

    def handle(self, event: object) -> None:
        """A command for all ranks that have a part in a ticket, or one rank's outcome."""
        for action in self._fan.handle(event):
            if isinstance(action, ToRank):
                self._services[action.rank].submit(action.command)
            else:
                self._tell([action])

    @property
    def alive(self) -> bool:
        return all(service.alive for service in self._services)

    def statistics(self) -> dict:
        return _sum(service.statistics() for service in self._services)

    def stop(self) -> None:
        for service in self._services:
            service.stop()


def _sum(snapshots: Iterable[dict]) -> dict:
    """Numbers added up, whatever they are of; of names the first."""
    total: dict = {}
    for snapshot in snapshots:
        for key, value in snapshot.items():
            if isinstance(value, dict):
                before = total.get(key, {})
                total[key] = {one: before.get(one, 0) + value.get(one, 0) for one in before | value}
            elif isinstance(value, str):
                total.setdefault(key, value)
            else:
                total[key] = total.get(key, 0) + value
    return total
