"""Aliases of workers: what clients are told in place of an id."""

from __future__ import annotations

from diptych.cluster.control.orders import find_workers
from diptych.cluster.wire.aliases import worker_alias

WORKERS = ["prefill/ab12cd34", "prefill/ab12cd35", "decode/ab12cd34"]


def test_an_alias_names_the_pool_and_nothing_else_of_the_id() -> None:
    aliases = [worker_alias("secret", worker) for worker in WORKERS]
    assert len(set(aliases)) == len(WORKERS)
    for worker, alias in zip(WORKERS, aliases, strict=True):
        pool, replica = worker.split("/")
        assert alias.startswith(f"{pool}/") and replica not in alias


def test_every_process_of_a_cluster_says_the_same_and_no_stranger_can_say_it() -> None:
    worker = WORKERS[0]
    assert worker_alias("secret", worker) == worker_alias("secret", worker)
    assert worker_alias("secret", worker) != worker_alias("guess", worker)


def test_operators_may_name_a_worker_by_its_alias() -> None:
    workers = [
        {"id": worker, "home": worker.split("/")[0], "alias": worker_alias("secret", worker)}
        for worker in WORKERS
    ]
    for worker in workers:
        assert find_workers(workers, worker["alias"]) == [worker]
