"""A token source as a Serve deployment."""

from __future__ import annotations

from ...router_service import node_host
from .source import Source


class Worker:
    """One replica of a pool that computes nothing."""

    async def __init__(self, home: str, secret: str, ids: list[int]) -> None:  # type: ignore[misc]
        from ray import serve

        replica = serve.get_replica_context().replica_id.unique_id
        self._source = Source(home, f"{home}/{replica}", secret, ids, _find_router)
        await self._source.start(node_host())

    async def lifetime(self, key: list, _target: str = "") -> None:
        """Serve's view of a stream, where gateways open one."""


async def _find_router() -> str:
    from ray import serve

    address: str = await serve.get_deployment_handle("Router", "diptych").address.remote()
    return address
