"""Policies by name: ours and the baselines, behind one interface.

A policy says what each worker would cost a request, in any unit: `prefill(ask, ok)` and
`decode(ask, ok, computed)` return a vector over the workers, the least wins. All else is the same
for all: room, ties, first-token hand-over, conditional disaggregation. Only a `late` policy leaves
requests in the router until a worker has credit; the others bind at once.

The baselines are written from their published formulas (sources: README). They see our index, which
is at least as true as their own trees, and no policy moves KV between prefill workers.
"""

from __future__ import annotations

from math import inf

import numpy as np
import xxhash

from .index import PrefixIndex
from .placement import Ask, Span, decode_s, ttft_s

BLOCK = 64


class Policy:
    """Late binding: least predicted TTFT on whoever is free; least predicted gap to decode."""

    late = False

    def __init__(self, index: PrefixIndex, seed: int) -> None:
        self.index, self.seed = index, seed

    def prefill(self, ask: Ask, ok: np.ndarray) -> np.ndarray:
        return ttft_s(ask)

    def decode(self, ask: Ask, ok: np.ndarray, computed: Span) -> np.ndarray:
        return decode_s(ask, computed)

    def bound(self, prefill: int | None, decode: int) -> None:
        """It was placed there."""

    def _two(self, ask: Ask, ok: np.ndarray, stage: str) -> np.ndarray:
        """Power of two choices: the requests that each of two random workers has."""
        cost, slots = np.full(len(ok), inf), np.flatnonzero(ok)
        for draw in (0, 1) if len(slots) else ():
            name = f"{ask.waiting.key}|{stage}|{draw}"
            slot = slots[xxhash.xxh3_64_intdigest(name.encode(), self.seed) % len(slots)]
            cost[slot] = ask.fleet.active[slot]
        return cost


class Diptych(Policy):
    late = True


class MinTtft(Policy):
    """argmin of queue + prefill, both predicted."""


class RoundRobin(Policy):
    def __init__(self, index: PrefixIndex, seed: int) -> None:
        super().__init__(index, seed)
        self._last = {"prefill": -1, "decode": -1}

    def _turn(self, stage: str, size: int) -> np.ndarray:
        return (np.arange(size) - self._last[stage] - 1.0) % size

    def prefill(self, ask: Ask, ok: np.ndarray) -> np.ndarray:
        return self._turn("prefill", len(ok))

    def decode(self, ask: Ask, ok: np.ndarray, computed: Span) -> np.ndarray:
        return self._turn("decode", len(ok))

    def bound(self, prefill: int | None, decode: int) -> None:
        self._last["decode"] = decode
        if prefill is not None:
            self._last["prefill"] = prefill


class LeastWork(Policy):
    """Fewest pending prompt tokens; fewest KV tokens."""

    def prefill(self, ask: Ask, ok: np.ndarray) -> np.ndarray:
        return ask.fleet.queued_tokens

    def decode(self, ask: Ask, ok: np.ndarray, computed: Span) -> np.ndarray:
        return ask.fleet.kv_tokens


class PowerOfTwo(Policy):
    """The less busy of two random workers."""

    def prefill(self, ask: Ask, ok: np.ndarray) -> np.ndarray:
        return self._two(ask, ok, "prefill")

    def decode(self, ask: Ask, ok: np.ndarray, computed: Span) -> np.ndarray:
        return self._two(ask, ok, "decode")


class LongestPrefix(Policy):
    """The longest hit; of equal ones the fewest pending tokens."""

    def prefill(self, ask: Ask, ok: np.ndarray) -> np.ndarray:
        return -ask.hits + 1e-7 * ask.fleet.queued_tokens

    def decode(self, ask: Ask, ok: np.ndarray, computed: Span) -> np.ndarray:
        return ask.fleet.kv_tokens


class Dynamo(Policy):
    """cost = max((active prefill tokens + incoming) / block - overlap blocks, 0) + decode blocks
    (active + incoming); decode stage: decode blocks only. Weights at their defaults: 1, 1, 0."""

    def prefill(self, ask: Ask, ok: np.ndarray) -> np.ndarray:
        fleet, blocks = ask.fleet, ask.prompt / BLOCK
        adjusted = np.maximum(fleet.queued_tokens / BLOCK + blocks - ask.hits / BLOCK, 0.0)
        return adjusted + fleet.prompt_tokens / BLOCK + blocks

    def decode(self, ask: Ask, ok: np.ndarray, computed: Span) -> np.ndarray:
        return ask.fleet.kv_tokens / BLOCK


class LMetric(Policy):
    """New prefill tokens (queued and own) x batch size; for prefill the batch is the queue."""

    def prefill(self, ask: Ask, ok: np.ndarray) -> np.ndarray:
        return (ask.fleet.queued_tokens + ask.uncached) * (ask.fleet.prompts + 1)

    def decode(self, ask: Ask, ok: np.ndarray, computed: Span) -> np.ndarray:
        return ask.fleet.rows + 1


class SglangCacheAware(Policy):
    """Balanced (max - min <= 64 or max <= 1.5 min): the best match if it covers more than 0.3 of
    the prompt; else the least load. Decode: power of two."""

    threshold = 0.3
    absolute = 64
    relative = 1.5

    def prefill(self, ask: Ask, ok: np.ndarray) -> np.ndarray:
        load = ask.fleet.active
        known = load[ok]
        if not len(known):
            return load
        least, most = known.min(), known.max()
        skewed = most - least > self.absolute and most > self.relative * least
        hits = np.where(ok, ask.hits, 0.0)
        if not skewed and hits.max() / ask.prompt > self.threshold:
            return -hits
        return load

    def decode(self, ask: Ask, ok: np.ndarray, computed: Span) -> np.ndarray:
        return self._two(ask, ok, "decode")


class RayPrefix(Policy):
    """Candidates: those with the longest match if it covers 0.1 of the prompt, else those with the
    least stored; of them the shortest queue. Decode: power of two."""

    threshold = 0.1

    def prefill(self, ask: Ask, ok: np.ndarray) -> np.ndarray:
        hits = np.where(ok, ask.hits, -1.0)
        best = hits.max()
        if best / ask.prompt >= self.threshold:
            chosen = hits == best
        else:
            stored = np.full(len(ok), inf)
            for slot in np.flatnonzero(ok):
                stored[slot] = self.index.held(int(slot))
            chosen = stored == stored.min()
        return np.where(chosen & ok, ask.fleet.active, inf)

    def decode(self, ask: Ask, ok: np.ndarray, computed: Span) -> np.ndarray:
        return self._two(ask, ok, "decode")


class Mooncake(Policy):
    """Algorithm 1 without its migration of hot prefixes: least queue + prefill; decode with the
    least time between tokens. It rejects early where the class allows it."""

    def prefill(self, ask: Ask, ok: np.ndarray) -> np.ndarray:
        return ttft_s(ask)

    def decode(self, ask: Ask, ok: np.ndarray, computed: Span) -> np.ndarray:
        return decode_s(ask, None)


POLICIES: dict[str, type[Policy]] = {
    "diptych": Diptych,
    "round_robin": RoundRobin,
    "least_work": LeastWork,
    "power_of_two": PowerOfTwo,
    "longest_prefix": LongestPrefix,
    "dynamo": Dynamo,
    "lmetric": LMetric,
    "sglang_cache_aware": SglangCacheAware,
    "ray_prefix": RayPrefix,
    "mooncake": Mooncake,
    "min_ttft": MinTtft,
}
