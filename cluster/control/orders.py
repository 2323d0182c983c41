"""What operators may order (pure): counts and roles, and why not.

`scale` counts homes; a flip changes what a worker does, not where it belongs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..config import ClusterConfig

ROLES = ("prefill", "decode")


class Change(NamedTuple):
    """Replicas of a pool, before and after."""

    pool: str
    before: int
    after: int

    def __str__(self) -> str:
        same = self.before == self.after
        return f"{self.pool} is {self.after} already" if same else "{} {} -> {}".format(*self)


def scaling(targets: dict[str, int], counts: dict[str, int]) -> list[Change]:
    return [Change(pool, targets[pool], count) for pool, count in counts.items()]


def scale_refusal(config: ClusterConfig, counts: dict[str, int]) -> str | None:
    """Why these counts may not be, if so."""
    for pool, count in counts.items():
        settings = getattr(config.pools, pool)
        if not settings.replicas:
            return f"the cluster was started without a {pool} pool (pools.{pool}.replicas 0)"
        least = min(settings.min_replicas, settings.replicas)
        if not least <= count <= settings.max_replicas:
            return (
                f"{pool}={count}: the configuration allows {least} to {settings.max_replicas} "
                f"(pools.{pool}.min_replicas, pools.{pool}.max_replicas)"
            )
    return None


def undo(changes: list[Change]) -> str | None:
    """The command that takes it back; None: nothing changes."""
    moved = [change for change in changes if change.before != change.after]
    words = " ".join(f"{change.pool}={change.before}" for change in moved)
    return f"diptych scale {words}" if moved else None


def find(workers: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Workers by id, by the id's beginning or the replica's, or all of a pool."""
    if name in ROLES:
        return [worker for worker in workers if worker["home"] == name]
    exact = [worker for worker in workers if worker["id"] == name]
    partial = [
        worker
        for worker in workers
        if worker["id"].startswith(name) or worker["id"].partition("/")[2].startswith(name)
    ]
    return exact or (partial if len(partial) == 1 else [])


def drain_refusal(workers: list[dict[str, Any]], victims: list[dict[str, Any]]) -> str | None:
    """Why these may not be drained without force: somebody must be left to serve each role."""
    gone = {worker["id"] for worker in victims}
    for role in sorted({worker["role"] for worker in victims if worker["state"] == "ready"}):
        if not _others(workers, role, gone):
            return f"nobody else works as {role}: requests would wait in vain; scale up first"
    return None


def flip_refusal(
    config: ClusterConfig, workers: list[dict[str, Any]], one: dict[str, Any], role: str
) -> str | None:
    """Why this worker may not take that role now, if so."""
    if one["state"] != "ready":
        return f"{one['id']} is {one['state']}; wait until it is ready"
    pools = config.pools
    if pools.prefill.tensor_parallel != pools.decode.tensor_parallel:
        sizes = f"{pools.prefill.tensor_parallel} and {pools.decode.tensor_parallel}"
        return (
            f"the pools differ in tensor_parallel ({sizes}): what fits one role is not the other's"
        )
    if one["role"] != role and not _others(workers, one["role"], {one["id"]}):
        return (
            f"{one['id']} is the last one that works as {one['role']}; "
            f"scale up first: diptych scale {one['role']}=2"
        )
    return None


def _others(workers: list[dict[str, Any]], role: str, gone: set[str]) -> list[dict[str, Any]]:
    return [
        worker
        for worker in workers
        if worker["role"] == role and worker["state"] == "ready" and worker["id"] not in gone
    ]
