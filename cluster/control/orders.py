"""Rules for operators' orders (pure): which pools may be scaled, which workers drained or flipped.

Each refusal is a sentence that says why not. `scale` sets how many replicas a pool should have. A
drained worker gets no new requests. A flip changes the role in which a worker works, and leaves the
worker in its pool. Nothing is carried out here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..config import ClusterConfig

#: The roles in which a worker can work; the pools have the same names.
ROLES = ("prefill", "decode")

#: What a worker says of itself. `id` is `pool/replica`, `home` its pool, `role` what it works as
#: (a drained worker keeps the role), `state` its phase: starting, ready, draining, flipping or
#: leaving.
WorkerStatistics = dict[str, Any]


class PoolChange(NamedTuple):
    """How many replicas a pool should have before and after an order; both may be equal."""

    pool: str
    before: int
    after: int

    def __str__(self) -> str:
        if self.before == self.after:
            return f"{self.pool} is {self.after} already"
        return f"{self.pool} {self.before} -> {self.after}"


def planned_changes(targets: dict[str, int], counts: dict[str, int]) -> list[PoolChange]:
    """Return one change for each pool in `counts`, also for those that have the count already.

    `targets` are the replica counts that the pools should have now.
    """
    return [
        PoolChange(pool=pool, before=targets[pool], after=count) for pool, count in counts.items()
    ]


def scale_refusal(config: ClusterConfig, counts: dict[str, int]) -> str | None:
    """Return why the pools may not have these replica counts, or None if they may."""
    for pool, count in counts.items():
        settings = config.pools.of(pool)
        if not settings.replicas:
            return f"the cluster was started without a {pool} pool (pools.{pool}.replicas 0)"
        if not settings.replicas_minimum <= count <= settings.replicas_maximum:
            return (
                f"{pool}={count}: the configuration allows {settings.replicas_minimum} to "
                f"{settings.replicas_maximum} "
                f"(pools.{pool}.min_replicas, pools.{pool}.max_replicas)"
            )
    return None


def undo_command(changes: list[PoolChange]) -> str | None:
    """Return the shell command that takes the changes back, or None if nothing changes."""
    counts_before = [
        f"{change.pool}={change.before}" for change in changes if change.before != change.after
    ]
    return f"diptych scale {' '.join(counts_before)}" if counts_before else None


def find_exact(workers: list[WorkerStatistics], name: str) -> list[WorkerStatistics]:
    """Return the workers that have this very id or alias."""
    return [worker for worker in workers if name in (worker["id"], worker.get("alias"))]


def find_workers(workers: list[WorkerStatistics], name: str) -> list[WorkerStatistics]:
    """Return the workers that `name` means.

    A pool's name means all its workers. Else `name` is a worker's id (`pool/replica`) or alias, the
    name that clients are told; or the beginning of the id or of its replica part. A beginning that
    several workers share means none of them. The list is empty if nobody is meant.
    """
    if name in ROLES:
        return [worker for worker in workers if worker["home"] == name]
    exact_matches = find_exact(workers, name)
    if exact_matches:
        return exact_matches
    prefix_matches = [
        worker
        for worker in workers
        if worker["id"].startswith(name) or worker["id"].partition("/")[2].startswith(name)
    ]
    return prefix_matches if len(prefix_matches) == 1 else []


def drain_refusal(
    workers: list[WorkerStatistics], drained_workers: list[WorkerStatistics]
) -> str | None:
    """Return why these workers may not be drained without force, or None if they may.

    For each role of a ready worker among them, another ready worker of that role must remain.
    """
    drained_ids = {worker["id"] for worker in drained_workers}
    affected_roles = {worker["role"] for worker in drained_workers if worker["state"] == "ready"}
    for role in sorted(affected_roles):
        if not _has_other_ready_worker(workers, role, drained_ids):
            return (
                f"nobody else works as {role} and is ready: requests would wait in vain; "
                "scale up first"
            )
    return None


def flip_refusal(
    config: ClusterConfig, workers: list[WorkerStatistics], worker: WorkerStatistics, role: str
) -> str | None:
    """Return why `worker` may not take that role now, or None if it may.

    A worker may always take the role that it has, if it is ready and both pools have the same
    `tensor_parallel`.
    """
    if worker["state"] != "ready":
        return f"{worker['id']} is {worker['state']}; wait until it is ready"
    prefill_ranks = config.pools.prefill.tensor_parallel
    decode_ranks = config.pools.decode.tensor_parallel
    if prefill_ranks != decode_ranks:
        return (
            f"the pools differ in tensor_parallel ({prefill_ranks} and {decode_ranks}): "
            "a worker of one does not fit the other"
        )
    present_role = worker["role"]
    if present_role != role and not _has_other_ready_worker(workers, present_role, {worker["id"]}):
        return (
            f"{worker['id']} is the last one that works as {present_role} and is ready; "
            f"scale up first: diptych scale {present_role}=2"
        )
    return None


def _has_other_ready_worker(
    workers: list[WorkerStatistics], role: str, excluded_ids: set[str]
) -> bool:
    return any(
        worker["role"] == role and worker["state"] == "ready" and worker["id"] not in excluded_ids
        for worker in workers
    )
