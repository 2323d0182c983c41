"""Both stages of one request: its prefill worker is given, or the request itself asks; found are
the decode worker, whose blocks are reserved with the choice, and what it costs. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..protos.frames import Key, Place
from . import placement as p
from .config import RouterConfig
from .decisions import Option
from .fleet import Fleet, Worker
from .index import PrefixIndex, bits, blocks_at
from .line import Waiting
from .placement import Span
from .policies import POLICIES
from .predictor import Residuals

LATE_S = 30.0  #: the deadline of one that is late anyway
LOCAL_TOKENS, LOCAL_HIT, LOCAL_HIT_TOKENS = 512, 0.6, 4096
OPTIONS = 3  #: of each stage in a record
FULL_S = 1e6  #: a worker without room for chunks comes after all others
SHORT = 8  #: decode workers that are compared for one request
HASH_TOKENS = 64
_NONE: set[str] = set()


@dataclass(slots=True)
class Binding:
    """What was decided for one request. Seconds; `wait_s` is until its prefill ends."""

    waiting: Waiting
    kind: str
    prefill: Worker | None
    decode: Worker
    uncached: int
    hit: int
    wait_s: float
    compute_s: float
    itl_s: float
    exposed_s: float
    fetch: Worker | None = None
    passed_over: list[tuple[str, float, str]] = field(default_factory=list)
    prefill_options: list[Option] = field(default_factory=list)
    decode_options: list[Option] = field(default_factory=list)
    others: int = 0


class Pairing:
    """Looks at the fleet for one request at a time."""

    def __init__(self, config: RouterConfig, fleet: Fleet, index: PrefixIndex) -> None:
        self.config, self.fleet, self.index = config, fleet, index
        self.policy = POLICIES[config.policy](index, config.seed)
        self.residuals = Residuals()
        self.explain = config.decisions > 0
        self._short: list[Worker] = []
        self._short_uses, self._short_of = 0, -1
        self._asks: dict[Key, p.Ask] = {}
        self._asks_at = -np.inf

    # ---- what the request is ---------------------------------------------------------------------

    def is_local(self, place: Place) -> bool:
        return place.local or self.config.disaggregate == "never"

    def missing(self, waiting: Waiting) -> set[str]:
        """Roles that it needs and no worker has, but those that it has seen die."""
        fleet, lost = self.fleet, waiting.place.lost
        if not lost and fleet.decodes and (fleet.prefills or waiting.local):
            return _NONE
        wanted = {"decode": fleet.decodes}
        if not waiting.local:
            wanted["prefill"] = fleet.prefills
        return {role for role, names in wanted.items() if not names.difference(lost)}

    def need(self, waiting: Waiting) -> int:
        """Blocks: prompt and growth allowance."""
        place = waiting.place
        tokens = place.prompt_tokens + min(place.max_tokens, self.config.growth_tokens)
        return -(-tokens // self.fleet.block_tokens)

    def ask(self, waiting: Waiting, now: float) -> p.Ask:
        """Made once for a request at a moment."""
        if now != self._asks_at:
            self._asks_at = now
            self._asks.clear()
        ask = self._asks.get(waiting.key)
        if ask is None or ask.waiting is not waiting:
            ask = p.Ask(self.fleet, self.index, waiting, self.need(waiting), now)
            self._asks[waiting.key] = ask
        return ask

    def hit(self, waiting: Waiting, worker: Worker) -> int:
        """Cached tokens of its prompt; at least one is always computed."""
        depth = self.index.depth(worker.slot, waiting.sampled)
        return min(blocks_at(depth) * HASH_TOKENS, waiting.place.prompt_tokens - 1)

    def find_holder(self, waiting: Waiting) -> None:
        """Sets who has most of its prompt, and whether that can be moved from there."""
        waiting.holder, waiting.held, waiting.fetches = None, 0, False
        if not waiting.sampled:
            return
        depth, mask = self.index.deepest(waiting.sampled, self.fleet.bits)
        if not mask or mask.bit_count() > SHORT:
            return
        slots = list(bits(mask))
        holder = self.fleet.by_slot[slots[waiting.tie % len(slots)]]
        if holder is not None:
            waiting.fetches = self.config.fetch and holder.cost.transfer_token > 0
            prompt = waiting.place.prompt_tokens
            waiting.holder, waiting.held = holder, min(blocks_at(depth) * HASH_TOKENS, prompt - 1)

    def compute(self, waiting: Waiting, worker: Worker) -> tuple[float, int, Worker | None]:
        """(seconds, cached or fetched tokens, who they are fetched from) of a prefill there."""
        prompt, hit = waiting.place.prompt_tokens, self.hit(waiting, worker)
        seconds = self.fleet.prefill_s(worker, prompt - hit, prompt)
        holder = waiting.holder
        if holder is None or holder is worker or not waiting.fetches or not holder.alive:
            return seconds, hit, None
        held = self.hit(waiting, holder)
        if held - hit < p.FETCH_TOKENS:
            return seconds, hit, None
        moves = p.FETCH_S + holder.cost.transfer_token * (held - hit)
        rest = self.fleet.prefill_s(worker, prompt - held, prompt)
        if rest + p.FETCH_MARGIN * moves >= seconds:
            return seconds, hit, None
        return rest + moves, held, holder

    def due(self, waiting: Waiting, now: float) -> float:
        """When its prompt should be computed, for the worker's order; 0: as they come."""
        if not self.policy.late:
            return 0.0
        return now + LATE_S if waiting.late else waiting.deadline

    # ---- both stages -----------------------------------------------------------------------------

    def _allowed(self, waiting: Waiting, ok: np.ndarray) -> np.ndarray:
        """Without lost workers, and without those to avoid if there are others."""
        place = waiting.place
        if not place.lost and not place.avoid:
            return ok
        alive = self.fleet.mask(ok, place.lost)
        better = self.fleet.mask(alive, place.avoid)
        return better if better.any() else alive

    def _finish(
        self,
        ask: p.Ask,
        slot: int,
        kind: str,
        gentle: bool,
        shown: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> Binding | None:
        """The decode worker for a prompt on `slot`; None if none has room now.

        `shown`: times to the first token and costs, to explain.
        """
        fleet = self.fleet
        worker = fleet.by_slot[slot]
        assert worker
        seconds, hit, holder = self.compute(ask.waiting, worker)
        uncached = ask.prompt - hit
        wait = worker.left_s(self.due(ask.waiting, ask.now), ask.now)
        begins = ask.now + wait
        found = self._decode(ask, (begins, begins + seconds), gentle)
        if found is None:
            return None
        decode, (step, exposed, *_), options = found
        paired = worker if decode is not worker else None
        binding = Binding(
            ask.waiting, kind, paired, decode, uncached, hit, wait, seconds, step, exposed, holder
        )
        if self.explain:
            binding.decode_options = options
            binding.others = len(fleet.decodes) - len(options)
            if shown:
                binding.prefill_options = self._prefill_options(ask, slot, *shown)
        return binding

    def _prefill_options(
        self, ask: p.Ask, slot: int, times: np.ndarray, masked: np.ndarray
    ) -> list[Option]:
        def of(other: int) -> tuple[float, float]:
            return float(times[other] - ask.alone[other]), float(ask.alone[other])

        return self._options(masked, slot, of)

    def _decode(
        self, ask: p.Ask, computed: Span, gentle: bool
    ) -> tuple[Worker, p.Terms, list[Option]] | None:
        """The decode worker, its terms and the options; None if nobody has room."""
        if self.policy.late:
            found = self._of_few(ask, computed, gentle)
            if found:
                return found
        ok = self._allowed(ask.waiting, self.fleet.decode_ok) & (self.fleet.fit >= ask.need)
        if gentle:
            ok &= p.gentle(ask)
        masked = np.where(ok, self.policy.decode(ask, ok, computed), np.inf)
        slot = p.least(masked, ask.waiting.tie)
        if slot is None:
            return None

        def of(other: int) -> p.Terms:
            worker = self.fleet.by_slot[other]
            assert worker
            moves = ask.prompt - self.hit(ask.waiting, worker)
            return p.decode_terms(ask, worker, computed, moves)

        worker = self.fleet.by_slot[slot]
        assert worker
        return worker, of(slot), self._options(masked, slot, of) if self.explain else []

    def _of_few(
        self, ask: p.Ask, computed: Span, gentle: bool
    ) -> tuple[Worker, p.Terms, list[Option]] | None:
        """The same, of the shortlist and of those that hold most of the prompt."""
        waiting, prompt = ask.waiting, ask.prompt
        depth, mask = self.index.deepest(waiting.sampled, self.fleet.decode_bits)
        held = min(blocks_at(depth) * HASH_TOKENS, prompt - 1)
        if mask.bit_count() > SHORT:  # everybody's
            mask = 0
        few = self._shortlist()
        if mask:
            holders = [self.fleet.by_slot[slot] for slot in bits(mask)]
            few = [*few, *(w for w in holders if w and w not in few)]
        reads, whole, place = prompt + waiting.output / 2, prompt + waiting.output, waiting.place
        alike = waiting.itl_s == self.fleet.itl_s
        ranked = []
        for order, worker in enumerate(few):
            if worker.fit < ask.need or worker.card.id in place.lost:
                continue
            if place.avoid and worker.card.id in place.avoid:
                continue
            if gentle and worker.streams:
                calm = worker.calm_tokens if alike else self.fleet.calm(worker, waiting.itl_s)
                if calm < reads or worker.expected_tokens < whole:
                    continue
            moves = prompt - held if mask >> worker.slot & 1 else prompt
            terms = p.decode_terms(ask, worker, computed, moves)
            tie = (waiting.tie + order * 0x9E3779B1) & 0xFFFF
            ranked.append((sum(terms), tie, order, worker, terms))
        if not ranked:
            return None
        ranked.sort()
        best = ranked[0]
        options: list[Option] = [(w.card.id, cost, t) for cost, _, _, w, t in ranked[:OPTIONS]]
        return best[3], best[4], options

    def _shortlist(self) -> list[Worker]:
        """The decode workers that cost least without regard to the request: all of a small fleet,
        otherwise found again every few placements."""
        self._short_uses += 1
        if self._short_uses > SHORT // 2 or self._short_of != self.fleet.joins:
            fleet = self.fleet
            masked = np.where(fleet.decode_ok, fleet.decode_s, np.inf)
            few = min(SHORT, len(fleet.decodes))
            slots = masked.argpartition(few)[:few] if few < len(masked) else masked.argsort()
            workers = (fleet.by_slot[slot] for slot in sorted(slots.tolist()))
            self._short = [w for w in workers if w and fleet.decode_ok[w.slot]]
            self._short_uses, self._short_of = 0, fleet.joins
        return self._short

    def _options(
        self, masked: np.ndarray, chosen: int, of: Callable[[int], tuple[float, ...]]
    ) -> list[Option]:
        """The chosen worker and the best others."""
        options = []
        for slot in p.best_few(masked, chosen, OPTIONS):
            worker = self.fleet.by_slot[slot]
            assert worker
            options.append((worker.card.id, float(masked[slot]), of(slot)))
        return options

    # ---- local prefill ---------------------------------------------------------------------------

    def _if_local(self, ask: p.Ask, remote_s: float) -> Binding | None:
        """Local if it is done as early, or is short, or mostly cached there; and in time."""
        fleet, waiting = self.fleet, ask.waiting
        ok = self._allowed(waiting, fleet.decode_ok) & (fleet.fit >= ask.need)
        ok &= (fleet.credit_at <= ask.now) & (fleet.expected_tokens >= ask.prompt + waiting.output)
        if not ok.any():
            return None
        times = p.local_s(ask)
        slot = p.least(np.where(ok, times, np.inf), waiting.tie)
        if slot is None:
            return None
        local_s, hit = float(times[slot]), float(ask.hits[slot])
        uncached = ask.prompt - hit
        short = uncached <= LOCAL_TOKENS
        cached = hit >= LOCAL_HIT * ask.prompt and uncached <= LOCAL_HIT_TOKENS
        in_time = ask.now + local_s * self.residuals.upper <= waiting.deadline
        if local_s <= remote_s or ((short or cached) and in_time):
            return self._finish_local(ask, slot, times)
        return None

    def _local(self, ask: p.Ask, ok: np.ndarray) -> Binding | None:
        """A request that has to be local: the decode worker that has its first token earliest.

        One whose streams leave no room for chunks is better than none: its engine keeps its pace.
        """
        times = p.local_s(ask)
        times = np.where(np.isinf(times), FULL_S + p.ttft_s(ask), times)
        ok = ok & (self.fleet.fit >= ask.need)
        slot = p.least(np.where(ok, times, np.inf), ask.waiting.tie)
        return None if slot is None else self._finish_local(ask, slot)

    def _finish_local(
        self, ask: p.Ask, slot: int, times: np.ndarray | None = None
    ) -> Binding | None:
        if self.fleet.fit[slot] < ask.need:
            return None
        worker = self.fleet.by_slot[slot]
        assert worker
        times = p.local_s(ask) if times is None else times
        seconds = float(times[slot])
        wait = worker.left_s(self.due(ask.waiting, ask.now), ask.now)
        hit = int(ask.hits[slot])
        if seconds == np.inf:
            seconds = wait + self.fleet.prefill_s(worker, ask.prompt - hit, ask.prompt)
        step, *_ = p.decode_terms(ask, worker, None, 0)
        binding = Binding(
            ask.waiting, "local", None, worker, ask.prompt - hit, hit, wait, seconds - wait,
            step, 0.0,
        )  # fmt: skip
        if self.explain:
            masked = np.where(self.fleet.decode_ok, times, np.inf)
            binding.decode_options = self._options(masked, slot, lambda other: (times[other],))
        return binding
