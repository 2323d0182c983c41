"""A token source as a Serve deployment: a worker that sends tokens and computes nothing."""

from __future__ import annotations

from ...applications import router_finder
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

        context = serve.get_replica_context()
        self._source = TokenSource(
            pool,
            f"{pool}/{context.replica_id.unique_id}",
            secret,
            token_ids,
            find_router=router_finder(context.app_name),
        )
        await self._source.start(node_host())
