"""Ten baselines, written from their published formulas (named in the README).

Two systems whose choice has several stages stand in files of their own: `llm_d.py`, `aibrix.py`.

They are early policies: a request gets its workers as soon as a decode worker has room. (The
router's own policy, `deadline.py`, keeps requests in the queue until a worker can begin.) A
baseline says what each worker would cost; the least wins. What it does not say is `EarlyPolicy`'s.

They see our prefix index, which is at least as true as trees of their own, and no policy moves KV
between prefill workers on its own. Room, ties, the hand-over of the first token and conditional
disaggregation are the same for all policies (`placer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import xxhash

from ..costs import PrefillSpan
from ..placer import Placement, Placer
from ..request_queue import QueuedRequest
from ..worker_state import WorkerState
from .policy import EarlyPolicy

BLOCK_TOKENS = 64  #: Dynamo's costs count in blocks of so many tokens. The size scales all alike.


def decoded_tokens(workers: Sequence[WorkerState]) -> list[float]:
    """Return the KV tokens that each worker's step reads."""
    return [worker.kv_tokens for worker in workers]


def two_random_choices(
    request: QueuedRequest, workers: Sequence[WorkerState], stage: str, seed: int
) -> list[float]:
    """Return the load of two random workers, inf for all others: the power of two choices.

    The load is pending prompts and decoding rows. The draws are hashes of the request, the `stage`
    ("prefill" or "decode") and `seed`, so that a run can be repeated.
    """
    costs = [inf] * len(workers)
    if not workers:
        return costs
    for draw in (0, 1):
        name = f"{request.attempt_key}|{stage}|{draw}"
        position = xxhash.xxh3_64_intdigest(name.encode(), seed) % len(workers)
        costs[position] = workers[position].active_requests
    return costs


class MinTtft(EarlyPolicy):
    """Chooses as `EarlyPolicy` does by default.

    That is the least predicted sum of queue and prefill, and for decode the least predicted step.
    """

    def mixed_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], now: float
    ) -> list[float]:
        return [self.local_first_token_s(request, worker, now) for worker in workers]


class RoundRobin(EarlyPolicy):
    """Lets the workers take turns, in order of their slots: their numbers in the router's fleet."""

    def __init__(self, placer: Placer) -> None:
        super().__init__(placer)
        self._last_prefill_slot = -1
        self._last_decode_slot = -1

    def prefill_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], now: float
    ) -> list[float]:
        return self._turns_until(workers, self._last_prefill_slot)

    def decode_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], span: PrefillSpan
    ) -> list[float]:
        return self._turns_until(workers, self._last_decode_slot)

    def mixed_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], now: float
    ) -> list[float]:
        return self._turns_until(workers, self._last_decode_slot)

    def placed(self, placement: Placement) -> None:
        self._last_decode_slot = placement.decode_worker.slot
        if placement.prefill_worker is not None:
            self._last_prefill_slot = placement.prefill_worker.slot

    def _turns_until(self, workers: Sequence[WorkerState], last_slot: int) -> list[float]:
        slots = len(self.placer.fleet.by_slot)
        return [(worker.slot - last_slot - 1) % slots for worker in workers]


class LeastWork(EarlyPolicy):
    """Chooses the fewest pending tokens (uncached ones of prompts).

    For decode it chooses the fewest KV tokens, for mixed workers the fewest of both.
    """

    def mixed_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], now: float
    ) -> list[float]:
        return [worker.pending_tokens + worker.kv_tokens for worker in workers]

    def prefill_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], now: float
    ) -> list[float]:
        return [worker.pending_tokens for worker in workers]

    def decode_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], span: PrefillSpan
    ) -> list[float]:
        return decoded_tokens(workers)


class PowerOfTwo(EarlyPolicy):
    """Chooses the less busy of two random workers."""

    def prefill_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], now: float
    ) -> list[float]:
        return two_random_choices(request, workers, "prefill", self.placer.config.seed)

    def decode_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], span: PrefillSpan
    ) -> list[float]:
        return two_random_choices(request, workers, "decode", self.placer.config.seed)


class LongestPrefix(EarlyPolicy):
    """Chooses the longest cached prefix; of equal ones the fewest pending tokens."""

    def prefill_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], now: float
    ) -> list[float]:
        # The factor is so small that pending tokens decide only between equal prefixes.
        return [-request.cached_tokens(worker) + 1e-7 * worker.pending_tokens for worker in workers]

    def decode_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], span: PrefillSpan
    ) -> list[float]:
        return decoded_tokens(workers)


class Dynamo(EarlyPolicy):
    """The cost of Dynamo's KV router with its defaults.

    These are overlap credit 1, prefill load scale 1, and temperature 0: the least cost wins.

    Prefill: max((pending + incoming tokens) / block - overlap blocks, 0). Its router of a prefill
    pool does not count the blocks of prompts (`router_track_active_blocks` is off there).
    Decode: blocks of KV. Mixed workers: both together.
    """

    def prefill_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], now: float
    ) -> list[float]:
        prompt_blocks = request.prompt_tokens / BLOCK_TOKENS
        costs = []
        for worker in workers:
            overlap_blocks = request.cached_tokens(worker) / BLOCK_TOKENS
            pending_blocks = worker.pending_tokens / BLOCK_TOKENS
            costs.append(max(pending_blocks + prompt_blocks - overlap_blocks, 0.0))
        return costs

    def mixed_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], now: float
    ) -> list[float]:
        costs = self.prefill_costs(request, workers, now)
        return [
            cost + worker.kv_tokens / BLOCK_TOKENS
            for cost, worker in zip(costs, workers, strict=True)
        ]

    def decode_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], span: PrefillSpan
    ) -> list[float]:
        return [worker.kv_tokens / BLOCK_TOKENS for worker in workers]


class LMetric(EarlyPolicy):
    """Chooses the least product of new prefill tokens (the pending ones and the request's) and
    batch size.

    For prefill the batch is the queue; on mixed workers it is the queue and what decodes.
    """

    def prefill_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], now: float
    ) -> list[float]:
        batch_sizes = [len(worker.pending_prefills) + 1 for worker in workers]
        return self._products(request, workers, batch_sizes)

    def mixed_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], now: float
    ) -> list[float]:
        batch_sizes = [worker.active_requests + 1 for worker in workers]
        return self._products(request, workers, batch_sizes)

    def decode_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], span: PrefillSpan
    ) -> list[float]:
        # A decode worker has no new prefill tokens: of the product, the batch size is left.
        return [worker.rows + 1 for worker in workers]

    def _products(
        self,
        request: QueuedRequest,
        workers: Sequence[WorkerState],
        batch_sizes: Sequence[int],
    ) -> list[float]:
        costs = []
        for worker, batch_size in zip(workers, batch_sizes, strict=True):
            own_tokens = request.prompt_tokens - request.cached_tokens(worker)
            costs.append(float((worker.pending_tokens + own_tokens) * batch_size))
        return costs


class SglangCacheAware(EarlyPolicy):
    """The best match, if it covers enough of the prompt while the loads are balanced.

    Otherwise the least load. Balanced: max - min <= 64 requests, or max <= 1.5 min. Enough: more
    than 0.3 of the prompt. Decode: power of two choices.
    """

    match_share = 0.3  #: of the prompt, that the best match must exceed
    load_difference = 64  #: requests: SGLang's defaults, as the other two
    load_ratio = 1.5  #: of the largest load to the least

    def prefill_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], now: float
    ) -> list[float]:
        loads: list[float] = [worker.active_requests for worker in workers]
        if not loads:
            return loads
        unbalanced = max(loads) - min(loads) > self.load_difference
        skewed = unbalanced and max(loads) > self.load_ratio * min(loads)
        cached_tokens = [request.cached_tokens(worker) for worker in workers]
        if not skewed and max(cached_tokens) / request.prompt_tokens > self.match_share:
            return [-tokens for tokens in cached_tokens]
        return loads

    def decode_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], span: PrefillSpan
    ) -> list[float]:
        return two_random_choices(request, workers, "decode", self.placer.config.seed)


class RayPrefix(EarlyPolicy):
    """The shortest queue among candidates that are chosen by their caches.

    Candidates: the workers with the longest match if it covers 0.1 of the prompt, otherwise those
    with the least stored. Decode: power of two choices.
    """

    match_share = 0.1  #: of the prompt, that the longest match must reach

    def prefill_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], now: float
    ) -> list[float]:
        if not workers:
            return []
        cached_tokens = [request.cached_tokens(worker) for worker in workers]
        longest = max(cached_tokens)
        if longest / request.prompt_tokens >= self.match_share:
            is_candidate = [tokens == longest for tokens in cached_tokens]
        else:
            stored = [self.placer.index.held_count(worker.slot) for worker in workers]
            is_candidate = [count == min(stored) for count in stored]
        return [
            worker.active_requests if candidate else inf
            for worker, candidate in zip(workers, is_candidate, strict=True)
        ]

    def decode_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], span: PrefillSpan
    ) -> list[float]:
        return two_random_choices(request, workers, "decode", self.placer.config.seed)


class Mooncake(EarlyPolicy):
    """Mooncake's algorithm 1, without its migration of hot prefixes.

    It chooses the least queue and prefill, and for decode the least time between tokens.
    """

    #: Refuses a request that would miss its TTFT target, if its SLO class prefers an early no.
    rejects_late = True

    def mixed_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], now: float
    ) -> list[float]:
        return [self.local_first_token_s(request, worker, now) for worker in workers]

    def decode_costs(
        self, request: QueuedRequest, workers: Sequence[WorkerState], span: PrefillSpan
    ) -> list[float]:
        # `memory_s` makes a worker whose KV pool fills up dearer: it would soon have to preempt.
        return [worker.step_with(request.kv_tokens_read) + worker.memory_s for worker in workers]
