"""How AIBrix's gateway chooses workers, from the source of aibrix e3e10f9 (2026-08-22).

These are its `pd` routing for prefill and decode pools, with the scores of its defaults
(`prefix_cache` and `load_balancing`), and its `prefix-cache` routing for mixed workers. Its rule by
the drain rate of the last minute is left out: the router here does not measure one for each worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt

from ..costs import PrefillSpan
from ..request_queue import QueuedRequest
from ..worker_state import WorkerState
from .policy import EarlyPolicy

#: Differences in requests with which the worker with the fewest gets the next: of the pools, and on
#: mixed workers.
PREFILL_SPREAD = 17
DECODE_SPREAD = 16
MIXED_SPREAD = 9
THROUGHPUT_SPREAD_MAX = 2048.0  #: tokens/s: with a larger one the decode worker with the least
MISS_COST = 0.1  #: for each percent of the prompt that is not cached
LEAST_FREE_PERCENT = 0.1  #: of a full KV pool
MORE_THAN_REQUESTS = 100_000  #: a percent counts for more than any number of requests


def fewest_alone(counts: Sequence[int], spread: int) -> list[float] | None:
    """Return costs by which the fewest requests win, if the counts differ by `spread`; else None."""
    if max(counts) - min(counts) < spread:
        return None
    return [float(count) for count in counts]


def busiest_allowed(counts: Sequence[int]) -> float:
    """Return the mean of the counts and one standard deviation: a busier worker is passed over."""
    mean = sum(counts) / len(counts)
    if len(counts) == 1:
        return mean
    variance = sum((count - mean) ** 2 for count in counts) / (len(counts) - 1)
    return mean + sqrt(variance)


class Aibrix(EarlyPolicy):
    """The cached share and the load of a prefill worker; the load and the free KV of a decode one."""

    def prefill_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], now: float
    ) -> list[float]:
        if not workers:
            return []
        counts = [len(worker.pending_prefills) for worker in workers]
        unbalanced = fewest_alone(counts, PREFILL_SPREAD)
        if unbalanced is not None:
            return unbalanced
        limit = busiest_allowed(counts)
        most = max(1, *counts)
        costs = []
        for worker, count in zip(workers, counts, strict=True):
            cached_percent = 100 * request.cached_tokens(worker) // request.prompt_tokens
            cost = (100 - cached_percent) * MISS_COST + count / most
            costs.append(cost if count <= limit else inf)
        return costs

    def mixed_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], now: float
    ) -> list[float]:
        if not workers:
            return []
        counts = [worker.active_requests for worker in workers]
        unbalanced = fewest_alone(counts, MIXED_SPREAD)
        if unbalanced is not None:
            return unbalanced
        limit = busiest_allowed(counts)
        costs = []
        for worker, count in zip(workers, counts, strict=True):
            cached_percent = 100 * request.cached_tokens(worker) // request.prompt_tokens
            # The longest match wins, and of equal ones the fewest requests.
            cost = float((100 - cached_percent) * MORE_THAN_REQUESTS + count)
            costs.append(cost if count <= limit else inf)
        return costs

    def decode_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], span: PrefillSpan
    ) -> list[float]:
        if not workers:
            return []
        counts = [worker.rows for worker in workers]
        unbalanced = fewest_alone(counts, DECODE_SPREAD)
        if unbalanced is not None:
            return unbalanced
        throughputs = [worker.rows / worker.step_s if worker.step_s else 0.0 for worker in workers]
        if max(throughputs) - min(throughputs) > THROUGHPUT_SPREAD_MAX:
            return throughputs
        free = [_free_percent(worker) for worker in workers]
        most = max(1, *counts)
        fastest = max(1.0, *throughputs)
        freest = max(1.0, *free)
        return [
            (count / most + 1.0 - throughput / fastest) / (percent / freest)
            for count, throughput, percent in zip(counts, throughputs, free, strict=True)
        ]


def _free_percent(worker: WorkerState) -> float:
    """Return the percentage of a worker's KV that is free, and a little where none is."""
    if not worker.card.blocks:
        return 100.0
    free = round(100 - 100 * worker.reserved_blocks / worker.card.blocks)
    return max(float(free), LEAST_FREE_PERCENT)
