"""Serve's request router for worker pools: a call goes to the replica that it names."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter


class TargetRouter(RequestRouter):
    """Routes by the keyword `_target` (a replica's unique id); without it, to any replica.

    No FIFOMixin: it gives the replica that was found to the oldest pending call.
    """

    async def choose_replicas(
        self, candidate_replicas: list, pending_request: Any = None
    ) -> list[list]:
        target = pending_request.kwargs.get("_target") if pending_request is not None else None
        if not target:
            return [candidate_replicas]
        return [[r for r in candidate_replicas if r.replica_id.unique_id == target]]
