"""Serve's request router for worker pools: a call goes to the replica that it names."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter


class TargetRouter(RequestRouter):
    """Routes by the keyword `_target` (a replica's unique id).

    A replica that is gone is replaced by any other, whose method must be fit for that: an empty
    choice would be tried again for ever, and without `should_backoff` in a loop that never yields
    to the event loop. No FIFOMixin: it gives the replica that was found to the oldest pending call.
    """

    async def choose_replicas(
        self, candidate_replicas: list, pending_request: Any = None
    ) -> list[list]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        target = pending_request.kwargs.get("_target")
        named = [r for r in candidate_replicas if r.replica_id.unique_id == target]
        return [named or candidate_replicas]
