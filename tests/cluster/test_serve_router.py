"""A call goes to the replica that it names; a replica that is gone never wedges the caller."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from diptych.cluster.serve_router import TargetRouter


def choose(names: list[str], target: str | None) -> tuple[list[str], bool]:
    """The chosen replicas' names, and whether Serve waits between tries."""
    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in names]
    context = SimpleNamespace(should_backoff=False)
    request = SimpleNamespace(kwargs={"_target": target}, routing_context=context)
    router = TargetRouter.__new__(TargetRouter)
    (ranked,) = asyncio.run(router.choose_replicas(replicas, request))
    return [replica.replica_id.unique_id for replica in ranked], context.should_backoff


def test_the_named_replica_is_the_only_choice() -> None:
    assert choose(["a", "b", "c"], "b") == (["b"], True)


def test_a_replica_that_is_gone_is_replaced_by_any_other_not_by_none() -> None:
    assert choose(["a", "c"], "b") == (["a", "c"], True)
