"""Which worker holds which prefix: chained content hashes -> a bitmask of workers.

A hash names the whole prefix up to its block, so one probe answers for all blocks before it. Only
some positions of a prompt are looked up: each 64-token block of the first 1,024 tokens, where
system prompts differ, and every eighth (512 tokens) behind; the worker itself matches the tail.

Entries come from reports, and from placements before any report says so (*predicted*; they end
after a while if none confirms them). Each worker's entries are bounded; the least recently used go
first, and of one prefix the tail before the head.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from math import inf
from operator import itemgetter

import numpy as np

FRONT_BLOCKS, STRIDE = 16, 8  #: as `kv_transfer.identity.looked_up`, by which workers report
GROUPS_MAX = 1 << 16  #: shared bitmasks; more are not shared
FEW = 8  #: workers that are known one by one


@lru_cache(maxsize=4096)
def positions(count: int) -> tuple[int, ...]:
    """Which of a prompt's `count` block hashes are looked up."""
    front = range(min(count, FRONT_BLOCKS))
    return (*front, *range(FRONT_BLOCKS + STRIDE - 1, count, STRIDE))


@lru_cache(maxsize=4096)
def _sampler(count: int) -> itemgetter:
    return itemgetter(*positions(count))


def sample(hashes: Sequence[bytes]) -> Sequence[bytes]:
    """The hashes at `positions`, root first."""
    return hashes if len(hashes) < 2 else _sampler(len(hashes))(hashes)


def blocks_at(depth: int) -> int:
    """64-token blocks that a match of `depth` sampled hashes covers."""
    return depth if depth <= FRONT_BLOCKS else FRONT_BLOCKS + (depth - FRONT_BLOCKS) * STRIDE


def tokens_at(depth: int) -> int:
    """The same in tokens."""
    return depth * 64 if depth <= FRONT_BLOCKS else 512 * depth - 7168


def bits(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Hits:
    """Who holds how much of one prompt, as of one lookup. Depths count sampled hashes."""

    __slots__ = ("deepest", "holders", "known", "wide")

    def __init__(self) -> None:
        self.deepest, self.holders = 0, 0  #: the longest match, and a mask of those that have it
        self.known: dict[int, int] = {}  #: slot -> depth, where few workers hold as much
        self.wide: list[tuple[int, int]] = []  #: (depth, mask) where many do, deepest first

    def depth(self, slot: int) -> int:
        found = self.known.get(slot)
        if found is None:
            for depth, mask in self.wide:
                if mask >> slot & 1:
                    return depth
            return 0
        return found


NOBODY = Hits()


class PrefixIndex:
    """Workers are small numbers (slots). Masks are shared between entries, keys with senders."""

    positions = staticmethod(positions)

    def __init__(self, per_worker: int = 65536, predicted_ttl_s: float = 120.0) -> None:
        self._per_worker, self._ttl_s = per_worker, predicted_ttl_s
        self._holders: dict[bytes, int] = {}
        self._held: dict[int, dict[bytes, float]] = {}  #: hash -> until when, LRU first
        self._groups: dict[int, int] = {}
        self._predicted: deque[tuple[float, int, Sequence[bytes]]] = deque()

    # ---- what workers hold -----------------------------------------------------------------------

    def store(self, slot: int, hashes: Sequence[bytes]) -> None:
        """The worker says that it holds these."""
        self._insert(slot, hashes, inf)

    def predict(self, slot: int, sampled: Sequence[bytes], now: float) -> None:
        """The worker is about to compute the prefixes `sampled`, root first."""
        content, until = sampled[::-1], now + self._ttl_s
        self._insert(slot, content, until)
        self._predicted.append((until, slot, content))

    def _insert(self, slot: int, hashes: Sequence[bytes], until: float) -> None:
        held = self._held.get(slot)
        if held is None:
            held = self._held[slot] = {}
        holders, groups = self._holders, self._groups
        bit = groups.setdefault(1 << slot, 1 << slot)
        known, get = held.pop, holders.get
        for content in hashes:
            before = known(content, None)
            if before is None:
                others = get(content)
                if others is None:
                    holders[content] = bit
                else:
                    mask = others | bit
                    holders[content] = groups.setdefault(mask, mask)
                held[content] = until
            else:
                held[content] = until if until > before else before
        if len(groups) > GROUPS_MAX:
            groups.clear()
        if len(held) > self._per_worker:
            surplus = list(islice(held, len(held) - self._per_worker))
            self.evict(slot, surplus)

    def evict(self, slot: int, hashes: Sequence[bytes]) -> None:
        held = self._held.get(slot)
        if not held:
            return
        holders, groups, bit = self._holders, self._groups, 1 << slot
        known = held.pop
        for content in hashes:
            if known(content, None) is not None:
                mask = holders[content]
                if mask == bit:
                    del holders[content]
                else:
                    mask &= ~bit
                    holders[content] = groups.setdefault(mask, mask)

    def expire(self, now: float) -> None:
        """Ends predicted entries that no report confirmed."""
        while self._predicted and self._predicted[0][0] <= now:
            _, slot, hashes = self._predicted.popleft()
            held = self._held.get(slot, {})
            self.evict(slot, [h for h in hashes if held.get(h, inf) <= now])

    def drop(self, slot: int) -> None:
        self.evict(slot, list(self._held.get(slot, ())))
        self._held.pop(slot, None)

    # ---- lookups ---------------------------------------------------------------------------------

    def depth(self, slot: int, sampled: Sequence[bytes]) -> int:
        """Leading hashes of `sampled` that the worker holds. Bisects: who holds a prefix holds
        its front, but for races between reports that only cost precision."""
        held = self._held.get(slot)
        if not held or not sampled or sampled[0] not in held:
            return 0
        low, high = 1, len(sampled)
        while low < high:
            middle = (low + high + 1) >> 1
            if sampled[middle - 1] in held:
                low = middle
            else:
                high = middle - 1
        return low

    def find(self, sampled: Sequence[bytes]) -> Hits:
        """Everybody's depth, by bisection for the depths at which holders change: like `depth`
        it trusts that who holds a prefix holds its front."""
        get = self._holders.get
        all_of = get(sampled[0]) if sampled else None
        if not all_of:
            return NOBODY
        hits = Hits()
        low, high, probes = 0, len(sampled) - 1, [(0, all_of)]
        while low < high:  # the last hash that anybody holds
            middle = (low + high + 1) >> 1
            found = get(sampled[middle])
            if found:
                low = middle
                probes.append((low, found))
            else:
                high = middle - 1
        high, mask = probes.pop()
        hits.deepest, hits.holders, covered, known = high + 1, mask, 0, hits.known
        while True:
            fresh = mask & ~covered
            if fresh.bit_count() > FEW:
                hits.wide.append((high + 1, fresh))
            else:
                while fresh:
                    bit = fresh & -fresh
                    known[bit.bit_length() - 1] = high + 1
                    fresh ^= bit
            if mask == all_of:
                return hits
            covered |= mask
            while probes[-1][1] == mask:
                probes.pop()
            low, below = probes.pop()
            probes.append((low, below))
            high -= 1
            while low < high:  # the last hash that others hold too
                middle = (low + high + 1) >> 1
                found = get(sampled[middle], 0)
                if found == mask:
                    high = middle - 1
                else:
                    low, below = middle, found
            if low != probes[-1][0]:
                probes.append((low, below))
            high, mask = probes.pop()

    def stands(self, hits: Hits, sampled: Sequence[bytes]) -> bool:
        """Whether the longest match is still the one in `hits`."""
        get, depth = self._holders.get, hits.deepest
        if depth and get(sampled[depth - 1]) != hits.holders:
            return False
        return depth == len(sampled) or not get(sampled[depth])

    def deepest(self, sampled: Sequence[bytes], within: int) -> tuple[int, int]:
        """(depth, mask) of those in the mask `within` that hold most; bisects like `depth`."""
        holders, low, mask, high = self._holders, 0, 0, len(sampled)
        while low < high:
            middle = (low + high + 1) >> 1
            found = holders.get(sampled[middle - 1], 0) & within
            if found:
                low, mask = middle, found
            else:
                high = middle - 1
        return low, mask

    def match(self, sampled: Sequence[bytes]) -> list[tuple[int, int]]:
        """[(depth, mask of the workers that hold as many leading hashes or more)], both strictly
        monotone; workers without any are left out."""
        steps: list[tuple[int, int]] = []
        holders, alive, depth = self._holders, -1, 0
        for content in sampled:
            mask = holders.get(content, 0) & alive
            if mask != alive:
                if depth:
                    steps.append((depth, alive))
                if not mask:
                    return steps
                alive = mask
            depth += 1
        if depth:
            steps.append((depth, alive))
        return steps

    def tokens(self, steps: list[tuple[int, int]], size: int, block_tokens: int) -> np.ndarray:
        """float64 [size]: tokens of a match on each slot."""
        out = np.zeros(size)
        for depth, mask in steps:
            covered = blocks_at(depth) * block_tokens
            if mask.bit_count() <= 8:
                for slot in bits(mask):
                    out[slot] = covered
            else:
                raw = np.frombuffer(mask.to_bytes((size + 7) >> 3, "little"), np.uint8)
                out[np.unpackbits(raw, count=size, bitorder="little").view(bool)] = covered
        return out

    def hashes(self, slot: int) -> list[bytes]:
        """What the worker has said that it holds."""
        return [content for content, until in self._held.get(slot, {}).items() if until == inf]

    def held(self, slot: int) -> int:
        """Prefixes that the worker holds."""
        return len(self._held.get(slot, ()))

    def __len__(self) -> int:
        """Pairs of a worker and a prefix that it holds."""
        return sum(map(len, self._held.values()))
