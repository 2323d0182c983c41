"""The transports, and the choice of one by name."""

from __future__ import annotations

from ..errors import TransportUnavailable
from ..transport import AdmitData, Pool, Transport


def open_transport(
    name: str,
    agent: str,
    pool: Pool,
    admit: AdmitData,
    host: str,
    corrupt: int = 0,
    *,
    secret: str,
) -> Transport:
    """Opens `nixl`, `shm`, `tcp`, or `auto`: NIXL wherever it is installed, else TCP.

    `agent` is the name of this end, which no other has. `admit` says whether incoming data may be
    stored; only TCP can ask. `host` is where TCP listens. `secret` is the cluster's; peers prove to
    `shm` and `tcp` that they know it. UCX, below NIXL, asks for none. The first `corrupt` writes
    are damaged, for tests.
    Raises TransportUnavailable when the library is missing, or `shm` got a pool that no file is
    behind.
    """
    transport = _open_by_name(name, agent, pool, admit, host=host, secret=secret)
    if corrupt:
        from .faulty import FaultyTransport

        return FaultyTransport(transport, pool, corrupt)
    return transport


def _open_by_name(
    name: str, agent: str, pool: Pool, admit: AdmitData, *, host: str, secret: str
) -> Transport:
    # Each transport is imported when it is opened: nobody loads NIXL who does not use it.
    if name in ("auto", "nixl"):
        from .nixl import NixlTransport

        try:
            return NixlTransport(agent, pool)
        except TransportUnavailable:
            if name == "nixl":
                raise
    if name == "shm":
        from .shm import ShmTransport

        return ShmTransport(agent, pool, secret=secret)
    from .tcp import TcpTransport

    return TcpTransport(agent, pool, admit, host, secret=secret)
