"""What a choice would cost: vectors over all workers for one request, in seconds.

TTFT on p    = what p has left + prefill(u_p, n)
locally on d = what d has left of prompts + u_d in chunks of c tokens beside its decodes, after a
               fetch of what another holds where that is sooner; where
               c is the largest chunk whose step stays within `ITL_SHARE` of the target
decode on d  = step with this request + exposed transfer + memory, where
               exposed = max(share * transfer, transfer behind the link's backlog - rest of prefill)
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np

from .fleet import Fleet, Worker
from .index import PrefixIndex
from .line import Waiting

ITL_SHARE = 0.5  #: of the target for a step with a prefill in it: who joins waits for two steps
HASH_TOKENS = 64
FETCH_TOKENS = 256  #: fewer are computed rather than fetched
FETCH_S, FETCH_MARGIN = 0.002, 1.5  #: a fetch takes this at least, and must pay so many times
GROWTH = 1.15  #: by how much a step may grow while a prompt is computed beside
CHUNK_MIN = 64  #: tokens: with less room than that beside its decodes, a worker takes no prompt


class Ask:
    """One request's view of the fleet at a moment."""

    __slots__ = ("_alone", "_hits", "fleet", "index", "need", "now", "prompt", "waiting")

    def __init__(
        self, fleet: Fleet, index: PrefixIndex, waiting: Waiting, need: int, now: float
    ) -> None:
        self.fleet, self.index, self.waiting, self.now = fleet, index, waiting, now
        self.need = need  #: decode blocks to reserve
        self.prompt = waiting.place.prompt_tokens
        self._hits: np.ndarray | None = None
        self._alone: np.ndarray | None = None

    @property
    def hits(self) -> np.ndarray:
        """float64 per slot: cached tokens of its prompt; at least one is always computed."""
        if self._hits is None:
            steps = self.index.match(self.waiting.sampled)
            self._hits = self.index.tokens(steps, len(self.fleet.by_slot), HASH_TOKENS)
            np.minimum(self._hits, self.prompt - 1, out=self._hits)
        return self._hits

    @property
    def uncached(self) -> np.ndarray:
        return self.prompt - self.hits

    @property
    def alone(self) -> np.ndarray:
        """Seconds of the prefill alone, or of fetching most of it and computing the rest.

        Speeds hardly change at one moment: computed once.
        """
        if self._alone is None:
            self._alone = self.cheapest(self._prefill_s)
        return self._alone

    def cheapest(self, seconds: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """`seconds` of what is not cached, or of what is not held anywhere and a fetch before."""
        computed, holder = seconds(self.uncached), self.waiting.holder
        if holder is None or not self.waiting.fetches:
            return computed
        more = np.maximum(self.waiting.held - self.hits, 0.0)
        moves = FETCH_MARGIN * (holder.cost.transfer_token * more + FETCH_S)
        fetched = seconds(self.uncached - more) + moves
        return np.where(more >= FETCH_TOKENS, fetched, inf).clip(max=computed)

    def _prefill_s(self, uncached: np.ndarray) -> np.ndarray:
        fleet = self.fleet
        each = fleet.prefill_token + fleet.prefill_pair * (self.prompt - uncached / 2)
        return fleet.prefill_base + uncached * each


def left_s(ask: Ask) -> np.ndarray:
    return np.maximum(ask.fleet.busy_until - ask.now, 0.0)


def ttft_s(ask: Ask) -> np.ndarray:
    return left_s(ask) + ask.alone


def local_s(ask: Ask) -> np.ndarray:
    """Time to the first token if the decode worker computes the prompt; inf where its running
    streams leave no room for chunks."""
    return ask.cheapest(lambda uncached: _local_s(ask, uncached))


def _local_s(ask: Ask, uncached: np.ndarray) -> np.ndarray:
    fleet = ask.fleet
    each = fleet.prefill_token + fleet.prefill_pair * (ask.prompt - uncached / 2)
    spare = ITL_SHARE * ask.waiting.itl_s - GROWTH * fleet.step_next
    chunk = np.minimum(spare / each, fleet.chunk)
    chunk = np.where(fleet.rows == 0, fleet.chunk, chunk)
    steps = uncached / np.maximum(chunk, CHUNK_MIN)
    time = left_s(ask) + fleet.prefill_base + steps * fleet.step_now + uncached * each
    return np.where(chunk < CHUNK_MIN, inf, time)


Span = tuple[float, float] | None  #: from when to when the prompt is computed elsewhere
#: step (the predicted gap between tokens), exposed transfer, memory, and what the gap between first
#: and second token exceeds the target by: who joins waits for the running step and then for its own
Terms = tuple[float, float, float, float]


def decode_terms(ask: Ask, worker: Worker, computed: Span, moves: int) -> Terms:
    """Of one worker; `moves`: tokens of the prompt that it does not hold."""
    reads = worker.step_token * ask.waiting.reads
    step, memory = worker.step_next + reads, worker.decode_s - worker.step_next
    if computed is None:
        return step, 0.0, memory, 0.0
    begins, ends = computed
    c = worker.cost
    transfer = c.transfer_base + c.transfer_token * moves
    tail = (worker.link_until if worker.link_until > begins else begins) + transfer - ends
    exposed = max(c.exposed_share * transfer, tail)
    running = worker.step_next
    if worker.busy_until > ends:  # it computes a prompt of its own then
        running = max(running, ITL_SHARE * ask.waiting.itl_s)
    handover = max(exposed + running + step - ask.waiting.itl_s, 0.0)
    return step, exposed, memory, handover


def decode_s(ask: Ask, computed: Span) -> np.ndarray:
    """The sum of those terms for each worker, as if all of the prompt moved."""
    fleet = ask.fleet
    total = fleet.decode_s + fleet.step_token * ask.waiting.reads
    if computed is None:
        return total
    begins, ends = computed
    transfer = fleet.transfer_base + fleet.transfer_token * ask.prompt
    tail = np.maximum(fleet.link_until, begins) + (transfer - ends)
    return total + np.maximum(tail, fleet.exposed * transfer)


def gentle(ask: Ask) -> np.ndarray:
    """Where it breaks nobody's target and the pool will hold what is expected of it."""
    fleet, waiting = ask.fleet, ask.waiting
    reads = waiting.reads
    calm = fleet.calm_tokens
    if waiting.itl_s != fleet.itl_s:
        calm = np.full(len(fleet.by_slot), inf)
        for worker in fleet.workers.values():
            if worker.streams:
                calm[worker.slot] = fleet.calm(worker, waiting.itl_s)
    return (calm >= reads) & (fleet.expected_tokens >= waiting.whole)


def least(masked: np.ndarray, tie: int) -> int | None:
    """The slot of the least cost (inf: not to be had); equal ones share by the request's hash."""
    best = int(masked.argmin())
    value = masked[best]
    if value == inf:
        return None
    equal = (masked <= value + 1e-12).nonzero()[0]
    return best if len(equal) == 1 else int(equal[tie % len(equal)])


def best_few(masked: np.ndarray, chosen: int, few: int) -> list[int]:
    """`chosen`, then the slots of the least cost."""
    slots = masked.argpartition(few)[:few].tolist() if few < len(masked) else range(len(masked))
    others = sorted((float(masked[s]), s) for s in slots if s != chosen and masked[s] < inf)
    return [chosen, *(slot for _, slot in others[: few - 1])]
