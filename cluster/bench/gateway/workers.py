"""A token source as a Serve deployment: a worker that sends tokens and computes nothing."""

from __future__ import annotations

from ...router_service import node_host
from .source import TokenSource


class TokenSourceWorker:
    """One replica of a pool that computes nothing.

    `pool` is "prefill" or "decode", `secret` the cluster's. The answers' tokens are `token_ids` in
    turn.
    """

    async def __init__(  # type: ignore[misc]
        self, pool: str, secret: str, token_ids: list[int]
    ) -> None:
        from ray import serve

        replica_id = serve.get_replica_context().replica_id.unique_id
        self._source = TokenSource(
            pool, f"{pool}/{replica_id}", secret, token_ids, find_router=_find_router
        )
        await self._source.start(node_host())


async def _find_router() -> str:
    """Return the "host:port" of the router that Serve runs now."""
    from ray import serve

    address: str = await serve.get_deployment_handle("Router", "diptych").address.remote()
    return address
