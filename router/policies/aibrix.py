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


def balanced(counts: Sequence[int], spread: int, costs: Sequence[float]) -> list[float]:
    """Return the costs of workers with these numbers of requests, as far as they are in balance.

    Where the numbers differ by `spread` or more, they are the costs themselves: the fewest win. A worker
    with more than the mean and one standard deviation costs inf.
    """
    if max(counts) - min(counts) >= spread:
        return [float(count) for count in counts]
    mean = sum(counts) / len(counts)
    squares = sum((count - mean) ** 2 for count in counts)
    deviation = sqrt(squares / (len(counts) - 1)) if len(counts) > 1 else 0.0
    return [
        cost if count <= mean + deviation else inf
        for count, cost in zip(counts, costs, strict=True)
    ]


def cached_percents(request: QueuedRequest, workers: Sequence[WorkerState]) -> list[int]:
    """Return the whole percent of the prompt that each worker has cached."""
    return [100 * request.cached_tokens(worker) // request.prompt_tokens for worker in workers]


class Aibrix(EarlyPolicy):
    """The cached share and the load of a prefill worker; the load and the free KV of a decode one."""

    def prefill_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], now: float
    ) -> list[float]:
        if not workers:
            return []
        counts = [len(worker.pending_prefills) for worker in workers]
        most = max(1, *counts)
        costs = [
            (100 - percent) * MISS_COST + count / most
            for percent, count in zip(cached_percents(request, workers), counts, strict=True)
        ]
        return balanced(counts, PREFILL_SPREAD, costs)

    def mixed_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], now: float
    ) -> list[float]:
        if not workers:
            return []
        counts = [worker.active_requests for worker in workers]
        # The longest match wins, and of equal ones the fewest requests.
        costs = [
            float((100 - percent) * MORE_THAN_REQUESTS + count)
            for percent, count in zip(cached_percents(request, workers), counts, strict=True)
        ]
        return balanced(counts, MIXED_SPREAD, costs)

    def decode_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], span: PrefillSpan
    ) -> list[float]:
        if not workers:
            return []
        counts = [worker.rows for worker in workers]
        if max(counts) - min(counts) >= DECODE_SPREAD:
            return [float(count) for count in counts]
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
