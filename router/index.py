"""Which worker holds which prefix: chained content hashes -> a bitmask of workers.

A hash names the whole prefix up to its block, so one probe answers for all blocks before it. Only
some positions of a prompt are looked up: each 64-token block of the first 1,024 tokens, where
system prompts differ, and every eighth (512 tokens) behind; the worker itself matches the tail.

Life of an entry:
    reported or predicted -> stored; a predicted one ends after a while if no report confirms it
    demoted               -> kept: only the tiers below the worker's pool hold it, which costs a load
    evicted, or surplus   -> removed; each worker's entries are bounded, those reported or predicted
                             longest ago go first, and of one report the tail before the head
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, islice
from math import inf
from operator import itemgetter

from ..kv_transfer import identity

BLOCK_TOKENS = identity.HASH_TOKENS  #: tokens of a hashed block
#: Which positions are looked up: the first `FRONT_BLOCKS`, and then the last of each `STRIDE`.
#: Workers report the same ones (`identity.is_looked_up`).
FRONT_BLOCKS = identity.FRONT_BLOCKS
STRIDE = identity.LOOKUP_STRIDE
SHARED_MASKS_MAX = 1 << 16  #: masks that entries share; with more, sharing begins anew
#: Up to so many workers that hold the same depth of a prompt are noted one by one; more, as a mask.
LISTED_HOLDERS_MAX = 8


@lru_cache(maxsize=4096)
def positions(count: int) -> tuple[int, ...]:
    """Return which of a prompt's `count` block hashes are looked up."""
    front = range(min(count, FRONT_BLOCKS))
    return (*front, *range(FRONT_BLOCKS + STRIDE - 1, count, STRIDE))


@lru_cache(maxsize=4096)
def _sampler(count: int) -> itemgetter:
    return itemgetter(*positions(count))


def sample(hashes: Sequence[bytes]) -> Sequence[bytes]:
    """Return the hashes at `positions`, root first."""
    return hashes if len(hashes) < 2 else _sampler(len(hashes))(hashes)


def blocks_at(depth: int) -> int:
    """Return the 64-token blocks that a match of `depth` sampled hashes covers."""
    if depth <= FRONT_BLOCKS:
        return depth
    return FRONT_BLOCKS + (depth - FRONT_BLOCKS) * STRIDE


def tokens_at(depth: int) -> int:
    """Return the tokens that a match of `depth` sampled hashes covers."""
    return BLOCK_TOKENS * blocks_at(depth)


def bits(mask: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def some_bits(mask: int, first: int, count: int) -> list[int]:
    """Return the numbers of `count` bits that are set: from `first` on, then from 0 on.

    They are fewer if fewer bits are set.
    """
    from_first = mask >> first << first
    return list(islice(chain(bits(from_first), bits(mask ^ from_first)), count))


class Hits:
    """Who holds how much of one prompt, as of one lookup. Depths count sampled hashes.

    A worker is known by its slot, a small number; a mask has bit k set for the worker of slot k.
    """

    __slots__ = (
        "deepest",
        "demoted_by_slot",
        "depth_by_slot",
        "holders",
        "sampled_hashes",
        "wide_depths",
    )

    def __init__(self) -> None:
        self.deepest = 0  #: the longest match
        self.holders = 0  #: a mask of the workers that have it
        self.depth_by_slot: dict[int, int] = {}  #: where few workers have the same depth
        #: (depth, mask of the workers) where many have it, deepest first
        self.wide_depths: list[tuple[int, int]] = []
        self.sampled_hashes: Sequence[bytes] = ()  #: that were looked up, root first
        #: The index's own: hashes that only the tiers of a worker hold, as they are now.
        self.demoted_by_slot: dict[int, set[bytes]] = {}

    def depth(self, slot: int) -> int:
        """Return how many of the sampled hashes the worker holds."""
        depth = self.depth_by_slot.get(slot)
        if depth is not None:
            return depth
        for wide_depth, mask in self.wide_depths:
            if mask >> slot & 1:
                return wide_depth
        return 0

    def pooled_depth(self, slot: int, depth: int) -> int:
        """Return how many of the sampled hashes the worker's pool holds, without its tiers.

        `depth` is what it holds in both (`depth`). The pool holds the head of a prefix if it holds any
        of it, as it evicts tails first.
        """
        demoted = self.demoted_by_slot.get(slot)
        if not demoted or not depth or self.sampled_hashes[depth - 1] not in demoted:
            return depth
        pooled = 0
        first_demoted = depth - 1  # at the latest
        while pooled < first_demoted:
            middle = (pooled + first_demoted) >> 1
            if self.sampled_hashes[middle] in demoted:
                first_demoted = middle
            else:
                pooled = middle + 1
        return pooled

    def add(self, depth: int, workers: int) -> None:
        """Note that the workers in this mask hold `depth` hashes; deeper ones come first."""
        if workers.bit_count() > LISTED_HOLDERS_MAX:
            self.wide_depths.append((depth, workers))
            return
        for slot in bits(workers):
            self.depth_by_slot[slot] = depth


NOBODY = Hits()


class PrefixIndex:
    """The prefixes of all workers, which are small numbers here (slots): bits of the masks.

    A worker's entries are `per_worker` at most. A predicted one ends after `predicted_ttl_s`
    seconds without a report. To save memory, entries share equal masks, and the hashes are the
    caller's own objects, not copies.
    """

    def __init__(self, per_worker: int = 65536, predicted_ttl_s: float = 120.0) -> None:
        self._per_worker = per_worker
        self._ttl_s = predicted_ttl_s
        self._holders: dict[bytes, int] = {}  #: hash -> mask of the workers that hold it
        #: slot -> hash -> until when it counts; those reported or predicted longest ago first
        self._held: dict[int, dict[bytes, float]] = {}
        self._demoted: dict[int, set[bytes]] = {}  #: slot -> hashes that only its tiers hold
        self._shared_masks: dict[int, int] = {}  #: each mask by itself: equal ones are one object
        #: (until when, slot, hashes) of predictions, the oldest first
        self._predicted: deque[tuple[float, int, Sequence[bytes]]] = deque()

    # ---- what workers hold -----------------------------------------------------------------------

    def store(self, slot: int, hashes: Sequence[bytes]) -> None:
        """Note the hashes that the worker reports; those of one prompt come root first."""
        tail_first = hashes[::-1]
        self._insert(slot, tail_first, inf)
        demoted = self._demoted.get(slot)
        if demoted:
            demoted.difference_update(hashes)
            self._forget_empty(slot, demoted)

    def _forget_empty(self, slot: int, demoted: set[bytes]) -> None:
        """Keep no empty set: so nobody looks further at a worker that has demoted nothing."""
        if not demoted:
            del self._demoted[slot]

    def demote(self, slot: int, hashes: Sequence[bytes]) -> None:
        """Note that only the tiers below the worker's pool hold these prefixes, each root first."""
        held = self._held.get(slot, {})
        # What was stored and demoted between two reports is told here only, and a prediction would end.
        unconfirmed = [content for content in hashes if held.get(content) != inf]
        self._insert(slot, unconfirmed[::-1], inf)
        held = self._held.get(slot, {})
        demoted = [content for content in hashes if content in held]  # without surplus ones
        if demoted:
            self._demoted.setdefault(slot, set()).update(demoted)

    def predict(self, slot: int, sampled: Sequence[bytes], now: float) -> None:
        """Note that the worker will soon hold the prefixes of these hashes, which come root first.

        The entries end `predicted_ttl_s` after `now`, unless the worker reports them before.
        """
        tail_first = sampled[::-1]
        until = now + self._ttl_s
        self._insert(slot, tail_first, until)
        self._predicted.append((until, slot, tail_first))

    def _insert(self, slot: int, tail_first: Sequence[bytes], until: float) -> None:
        """Add or renew entries. If there are too many, the first ones are the first to go.

        `until` is when they end; inf: a worker has reported them.
        """
        held = self._held.setdefault(slot, {})
        holders = self._holders
        shared_masks = self._shared_masks
        own_mask = shared_masks.setdefault(1 << slot, 1 << slot)
        for content in tail_first:
            previous_until = held.pop(content, None)
            if previous_until is not None:
                held[content] = max(until, previous_until)  # behind all others: the last to go
                continue
            other_holders = holders.get(content)
            if other_holders is None:
                holders[content] = own_mask
            else:
                mask = other_holders | own_mask
                holders[content] = shared_masks.setdefault(mask, mask)
            held[content] = until
        if len(shared_masks) > SHARED_MASKS_MAX:
            shared_masks.clear()
        if len(held) > self._per_worker:
            surplus = list(islice(held, len(held) - self._per_worker))
            self.evict(slot, surplus)

    def evict(self, slot: int, hashes: Sequence[bytes]) -> None:
        """Note that the worker holds these prefixes no more."""
        held = self._held.get(slot)
        if not held:
            return
        holders = self._holders
        shared_masks = self._shared_masks
        own_mask = 1 << slot
        demoted = self._demoted.get(slot)
        if demoted:
            demoted.difference_update(hashes)
            self._forget_empty(slot, demoted)
        for content in hashes:
            if held.pop(content, None) is None:
                continue
            mask = holders[content] & ~own_mask
            if mask:
                holders[content] = shared_masks.setdefault(mask, mask)
            else:
                del holders[content]

    def expire(self, now: float) -> None:
        """Remove the predicted entries whose time is up and that no report has confirmed."""
        while self._predicted and self._predicted[0][0] <= now:
            _, slot, hashes = self._predicted.popleft()
            held = self._held.get(slot, {})
            self.evict(slot, [content for content in hashes if held.get(content, inf) <= now])

    def drop(self, slot: int) -> None:
        """Remove everything that the worker holds."""
        self.evict(slot, list(self._held.get(slot, ())))
        self._held.pop(slot, None)
        self._demoted.pop(slot, None)

    # ---- lookups ---------------------------------------------------------------------------------

    def match(self, sampled: Sequence[bytes]) -> Hits:
        """Return everybody's depth, exactly: each hash is looked up until nobody is left.

        `sampled` are the prompt's hashes at `positions`, root first (as for `find`).
        """
        steps: list[tuple[int, int]] = []  #: (depth, mask of the workers that hold at least that)
        holding = -1  # a mask of all workers
        for depth, content in enumerate(sampled):
            mask = self._holders.get(content, 0) & holding
            if depth and mask != holding:
                steps.append((depth, holding))
            holding = mask
            if not holding:
                break
        if sampled and holding:
            steps.append((len(sampled), holding))
        if not steps:
            return NOBODY
        hits = self._new_hits(sampled)
        hits.deepest, hits.holders = steps[-1]
        deeper_holders = 0
        for depth, mask in reversed(steps):
            hits.add(depth, mask & ~deeper_holders)
            deeper_holders |= mask
        return hits

    def _new_hits(self, sampled: Sequence[bytes]) -> Hits:
        hits = Hits()
        hits.sampled_hashes = sampled
        hits.demoted_by_slot = self._demoted
        return hits

    def depth(self, slot: int, sampled: Sequence[bytes]) -> int:
        """Return how many leading hashes of `sampled` one worker holds, exactly."""
        return self.match(sampled).depth(slot)

    def find(self, sampled: Sequence[bytes]) -> Hits:
        """Return everybody's depth, by bisection for the depths at which the holders change.

        This assumes that a worker that holds a block's prefix holds all shorter ones too. Races
        between reports may break that for a while: depths are less exact then.
        """
        get = self._holders.get
        root_holders = get(sampled[0]) if sampled else None
        if not root_holders:
            return NOBODY
        hits = self._new_hits(sampled)
        probes = [(0, root_holders)]  #: (position, who holds it), each deeper than the one before
        self._bisect_last_held(sampled, probes)
        position, mask = probes.pop()
        hits.deepest = position + 1
        hits.holders = mask
        covered = 0
        while True:
            hits.add(position + 1, mask & ~covered)
            if mask == root_holders:
                return hits
            covered |= mask
            position, mask = self._next_shallower(sampled, probes, position, mask)

    def _bisect_last_held(self, sampled: Sequence[bytes], probes: list[tuple[int, int]]) -> None:
        """Look for the last hash that anybody holds; append each that is held to `probes`.

        So the last of `probes` is that hash.
        """
        low = 0
        high = len(sampled) - 1
        while low < high:
            middle = (low + high + 1) >> 1
            mask = self._holders.get(sampled[middle])
            if mask:
                low = middle
                probes.append((middle, mask))
            else:
                high = middle - 1

    def _next_shallower(
        self,
        sampled: Sequence[bytes],
        probes: list[tuple[int, int]],
        position: int,
        mask: int,
    ) -> tuple[int, int]:
        """Return the last position before `position` whose holders are not `mask`, with them.

        `probes` are earlier look-ups before `position`, from which the bisection starts.
        """
        while probes[-1][1] == mask:
            probes.pop()
        low, low_mask = probes[-1]
        high = position - 1
        while low < high:
            middle = (low + high + 1) >> 1
            middle_mask = self._holders.get(sampled[middle], 0)
            if middle_mask == mask:
                high = middle - 1
            else:
                low = middle
                low_mask = middle_mask
        if low == probes[-1][0]:
            probes.pop()
        return low, low_mask

    def stands(self, hits: Hits, sampled: Sequence[bytes]) -> bool:
        """Whether the longest match, and who holds it, is still the one in `hits`."""
        depth = hits.deepest
        if depth and self._holders.get(sampled[depth - 1]) != hits.holders:
            return False
        return depth == len(sampled) or not self._holders.get(sampled[depth])

    def reported_hashes(self, slot: int) -> list[bytes]:
        """Return the hashes that the worker has reported and still holds, without predictions.

        Another index can `store` them as they are: the latest come first, each prompt's root first.
        """
        held = self._held.get(slot, {})
        return [content for content in reversed(held) if held[content] == inf]

    def demoted_hashes(self, slot: int) -> list[bytes]:
        """Return the hashes that only the worker's tiers hold, as it has reported."""
        demoted = self._demoted.get(slot, set())
        return [content for content in self.reported_hashes(slot) if content in demoted]

    def held_count(self, slot: int) -> int:
        """Return how many entries the worker has, predicted ones included."""
        return len(self._held.get(slot, ()))

    def __len__(self) -> int:
        """The entries of all workers: pairs of a worker and a hash."""
        return sum(map(len, self._held.values()))
