"""Makes the transfer services of a worker's ranks, which `kv_transfer.worker_transfers` joins.

A rank is one of the processes that share a worker's model; each has its part of the KV. Rank 0's
service is a thread of this process. The services of the other ranks live in the ranks' own
processes (`rank.py`), where their pools are, and take commands through a socket.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from ...engine.engine_like import EngineLike
from ...kv_transfer.commands import TransferOutcome
from ...kv_transfer.service import TransferService
from ...kv_transfer.slices import LaneEnd
from ...kv_transfer.ticket_events import TicketTimeouts
from ...kv_transfer.transport import AdmitData, Transport
from ...kv_transfer.transports import open_transport
from ...kv_transfer.worker_transfers import RankService
from ..config import TransferSettings
from .rank import RankSetup, RemoteService


def make_rank_services(
    worker: str,
    engine: EngineLike,
    settings: TransferSettings,
    host: str,
    *,
    secret: str,
    corrupt_writes: int,
    on_outcome: Callable[[TransferOutcome], None],
    cores: tuple[int, ...] = (),
) -> list[RankService]:
    """Return the services of all ranks of a worker, not started yet.

    `worker` is the worker's id, `host` the address on which transports listen. `on_outcome` gets
    what happened to one rank's lane of a ticket, on that rank's thread. `secret` is the cluster's,
    which transports ask peers for. Of rank 0's writes the first `corrupt_writes` are damaged on
    purpose, for tests. Rank 0's thread is bound to `cores`, if any are named.
    """
    pool = engine.kv_pool
    ranks = 1 + len(engine.rank_sockets)
    agent = f"{worker}:0"

    def open_own_transport(admit: AdmitData) -> Transport:
        if cores:  # this runs on the transfer thread
            os.sched_setaffinity(0, cores)
        return open_transport(
            settings.transport,
            agent,
            pool,
            admit,
            host=host,
            corrupt=corrupt_writes,
            secret=secret,
        )

    own_service = TransferService(
        agent=agent,
        pool=pool,
        end=LaneEnd(pool.layout, 0, ranks),
        compatibility=engine.compatibility,
        open_transport=open_own_transport,
        deliver=on_outcome,
        timeouts=TicketTimeouts(chunk_s=settings.timeout_s),
        digester=pool.digester,
        facts=engine.format_facts,
    )
    services: list[RankService] = [own_service]
    for rank, control in enumerate(engine.rank_sockets, 1):
        setup = RankSetup(
            agent=f"{worker}:{rank}",
            compatibility=engine.compatibility,
            transport=settings.transport,
            host=host,
            timeout_s=settings.timeout_s,
            secret=secret,
        )
        services.append(RemoteService(rank, control, setup, on_outcome))
    return services
