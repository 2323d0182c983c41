"""How llm-d's router chooses workers, from the source of llm-d-router ebab687 (2026-08-22).

Its router (the endpoint picker) is a chain of filters, scorers and a picker that operators put
together. Two chains are here, with the defaults of each part:

- `LlmD`: for prefill the prefix affinity filter and the token load, for decode active requests, as
  its guide for both pools puts them together, and flow control with `slo-deadline-ordering-policy`,
  which is off by default. On mixed workers the chart's default: the queue, the KV in use and the
  prefix, weighted 2, 2 and 3.
- `LlmDLatency`: the chart's chain with its latency predictor. The predictor is ours, which knows the
  workers' speeds; llm-d's is learned.

Left out: what llm-d explores by chance, one request in a hundred; and its decider, by which a decode
worker computes a prompt of which fewer than 16 tokens are not cached there.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import xxhash

from ..costs import PrefillSpan
from ..request_queue import QueuedRequest
from ..worker_state import WorkerState
from .policy import EarlyPolicy

# prefix-cache-affinity-filter
STICKY_SHARE = 0.80  #: of the prompt: a worker that has as much of it cached is sticky
STRICT_SHARE = 0.99  #: the same for the first of two filters in the chain with the predictor
#: Peak prefill throughput, by which tokens in flight become seconds.
PREFILL_TOKENS_PER_S = 15_928.0
TOKEN_PENALTY_S = 18.0  #: by so much later a sticky worker may begin, by that throughput
PREDICTED_PENALTY_S = 5.0  #: the same by a prediction

# utilization-detector, the gate of flow control
QUEUE_DEPTH = 5  #: waiting prompts with which a worker is saturated
KV_SHARE = 0.8  #: of its KV with which a worker is saturated

# weights of the chart's scorers for mixed workers
QUEUE_WEIGHT = 2.0
FREE_KV_WEIGHT = 2.0
PREFIX_WEIGHT = 3.0

# latency-scorer
TTFT_WEIGHT = 0.8
TPOT_WEIGHT = 0.2
HIGHEST_SCORE = 100
LEAST_SPREAD_S = 1e-9  #: latencies that differ by no more are the same


def prefix_shares(request: QueuedRequest, workers: Sequence[WorkerState]) -> list[float]:
    """Return the share of the prompt that each worker has cached."""
    return [request.cached_tokens(worker) / request.prompt_tokens for worker in workers]


def sticky_positions(
    positions: list[int],
    shares: Sequence[float],
    ready_s: Sequence[float],
    sticky_share: float,
    penalty_s: float,
) -> list[int]:
    """Return those of `positions` that have `sticky_share` of the prompt cached.

    All are returned if none has, or if the best of the others would be ready more than `penalty_s`
    sooner. `shares` and `ready_s` are by position.
    """
    sticky = [position for position in positions if shares[position] >= sticky_share]
    others = [position for position in positions if shares[position] < sticky_share]
    if not sticky or not others:
        return positions
    best_sticky_s = min(ready_s[position] for position in sticky)
    best_other_s = min(ready_s[position] for position in others)
    if best_sticky_s - best_other_s > penalty_s:
        return positions
    return sticky


def waiting_prompts(worker: WorkerState) -> int:
    """Return how many prompts wait on a worker: the first one is being computed."""
    return max(len(worker.pending_prefills) - 1, 0)


def kv_share_in_use(worker: WorkerState) -> float:
    """Return the share of a worker's KV blocks that is reserved."""
    return worker.reserved_blocks / worker.card.blocks if worker.card.blocks else 0.0


def pressure(workers: Sequence[WorkerState]) -> float:
    """Return how busy a pool is: 1 where it is saturated, 0 where it has no workers."""
    if not workers:
        return 0.0
    shares = [
        max(waiting_prompts(worker) / QUEUE_DEPTH, kv_share_in_use(worker) / KV_SHARE)
        for worker in workers
    ]
    return sum(shares) / len(shares)


class LlmD(EarlyPolicy):
    """Prefix affinity, then the fewest tokens in flight; and a queue in order of deadlines.

    Flow control holds all requests back while one of the pools is saturated, as the mean over its
    workers of max(waiting prompts / 5, KV in use / 0.8) reaches 1, and lets the earliest deadline go
    first.
    """

    def is_saturated(self) -> bool:
        fleet = self.placer.fleet
        return max(pressure(fleet.prefill_workers), pressure(fleet.decode_workers)) >= 1.0

    def in_order(self, requests: list[QueuedRequest]) -> list[QueuedRequest]:
        return sorted(requests, key=_deadline_of)

    def prefill_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], now: float
    ) -> list[float]:
        shares = prefix_shares(request, workers)
        ready_s = [worker.pending_tokens / PREFILL_TOKENS_PER_S for worker in workers]
        positions = list(range(len(workers)))
        kept = sticky_positions(positions, shares, ready_s, STICKY_SHARE, TOKEN_PENALTY_S)
        costs = [inf] * len(workers)
        for position in kept:
            worker = workers[position]
            own_tokens = request.prompt_tokens - request.cached_tokens(worker)
            costs[position] = float(worker.pending_tokens + own_tokens)
        return costs

    def mixed_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], now: float
    ) -> list[float]:
        shares = prefix_shares(request, workers)
        queues = [waiting_prompts(worker) for worker in workers]
        longest = max(queues, default=0)
        spread = longest - min(queues, default=0)
        costs = []
        for worker, share, queue in zip(workers, shares, queues, strict=True):
            queue_score = (longest - queue) / spread if spread else 1.0
            free_score = 1.0 - kv_share_in_use(worker)
            score = QUEUE_WEIGHT * queue_score + FREE_KV_WEIGHT * free_score + PREFIX_WEIGHT * share
            costs.append(-score)
        return costs

    def decode_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], span: PrefillSpan
    ) -> list[float]:
        return [float(worker.rows) for worker in workers]


class LlmDLatency(EarlyPolicy):
    """The worker whose predicted latency is close to its target, by weighted chance.

    *Headroom* is the target minus the prediction. Workers that meet the targets come first, and of
    these the ones that just do: the others stay free for later requests. Where none does, idle
    workers come first, then those that miss the target between tokens alone, then those that miss
    the one to the first token alone, and of these the ones that miss by least.
    """

    def prefill_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], now: float
    ) -> list[float]:
        ready_s = [self.first_token_s(request, worker, now) for worker in workers]
        headrooms = [[request.deadline - now - seconds] for seconds in ready_s]
        return self._choose(request, workers, ready_s, headrooms, [1.0], "prefill")

    def mixed_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], now: float
    ) -> list[float]:
        ready_s = [self.local_first_token_s(request, worker, now) for worker in workers]
        headrooms = [
            [
                request.deadline - now - seconds,
                request.itl_s - worker.step_with(request.kv_tokens_read),
            ]
            for worker, seconds in zip(workers, ready_s, strict=True)
        ]
        weights = [TTFT_WEIGHT, TPOT_WEIGHT]
        return self._choose(request, workers, ready_s, headrooms, weights, "mixed")

    def decode_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], span: PrefillSpan
    ) -> list[float]:
        headrooms = [
            [request.itl_s - worker.step_with(request.kv_tokens_read)] for worker in workers
        ]
        no_wait = [0.0] * len(workers)
        return self._choose(request, workers, no_wait, headrooms, [1.0], "decode")

    def _choose(
        self,
        request: QueuedRequest,
        workers: Sequence[WorkerState],
        ready_s: Sequence[float],
        headrooms: Sequence[Sequence[float]],
        weights: Sequence[float],
        stage: str,
    ) -> list[float]:
        """Return 0 for the chosen worker and inf for the others.

        `headrooms` has for each worker its headroom in each latency, `weights` their weights.
        """
        costs = [inf] * len(workers)
        if not workers:
            return costs
        shares = prefix_shares(request, workers)
        kept = list(range(len(workers)))
        if stage != "decode":
            kept = sticky_positions(kept, shares, ready_s, STRICT_SHARE, PREDICTED_PENALTY_S)
        in_time = [position for position in kept if min(headrooms[position]) >= 0]
        if in_time:
            kept = in_time
        if stage != "decode":
            kept = sticky_positions(kept, shares, ready_s, STICKY_SHARE, PREDICTED_PENALTY_S)
        if not in_time:
            idle = [position for position in kept if not workers[position].active_requests]
            kept = idle or least_severe(kept, headrooms)
        scores = closeness_scores([headrooms[position] for position in kept], weights)
        name = f"{request.attempt_key}|{stage}"
        draw = xxhash.xxh3_64_intdigest(name.encode(), self.placer.config.seed) % sum(scores)
        for position, score in zip(kept, scores, strict=True):
            draw -= score
            if draw < 0:
                costs[position] = 0.0
                break
        return costs


def least_severe(positions: list[int], headrooms: Sequence[Sequence[float]]) -> list[int]:
    """Return the workers of the least severe kind of miss: only the last latency, only the first,
    both.
    """

    def severity(position: int) -> tuple[bool, int]:
        missed = [headroom < 0 for headroom in headrooms[position]]
        return missed[0], sum(missed)

    least = min(map(severity, positions))
    return [position for position in positions if severity(position) == least]


def closeness_scores(headrooms: Sequence[Sequence[float]], weights: Sequence[float]) -> list[int]:
    """Return a score from 1 to 101 for each worker: the highest for the least headroom.

    Each latency's headrooms are brought to the range from 0 to 1. One that is the same for all
    counts for nothing, if another is not.
    """
    combined = [0.0] * len(headrooms)
    total_weight = 0.0
    for number, weight in enumerate(weights):
        sizes = [abs(headroom[number]) for headroom in headrooms]
        least = min(sizes)
        spread = max(sizes) - least
        if spread <= LEAST_SPREAD_S:
            continue
        total_weight += weight
        for position, size in enumerate(sizes):
            combined[position] += weight * (size - least) / spread
    if not total_weight:
        return [HIGHEST_SCORE] * len(headrooms)
    return [int((1.0 - value / total_weight) * HIGHEST_SCORE) + 1 for value in combined]


def _deadline_of(request: QueuedRequest) -> float:
    return request.deadline
