"""Which request goes to which pair of workers, and when: the decisions of the router.

Early policies bind each request when it comes, oldest first, as soon as a decode worker has room.
A late policy keeps requests in the line until a worker has credit (`Fleet.credited`):
  push: a new request takes the worker that has its first token earliest, if that one has credit;
        else it waits, for that one's cache (its home) if another would have to compute much more
  pull: a worker with credit takes the most urgent request that it can serve in time, or one that
        waits for its cache, if the urgent one can stand that
  steal: the most urgent choose again every `LOOK_S`, while there are idle workers
Who cannot be served in time any more is demoted, or refused if its class prefers that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

import numpy as np

from ..protos.frames import Key, Place
from . import placement as p
from .config import RouterConfig
from .decisions import Option
from .fleet import Fleet, Stream, Worker
from .index import PrefixIndex, bits, blocks_at
from .line import Line, Waiting
from .placement import Span
from .policies import POLICIES
from .predictor import Residuals

URGENT, HOME = 8, 4  #: requests that a worker chooses among, and of those from its home
SCAN = 64  #: of the line, at most, to find them
SOONER, SOONER_S = 0.9, 0.01  #: by how much a busy worker must be earlier than a free one
SAVES_S, SAVES_SHARE = 0.02, 0.5  #: what a cache must save to go before a more urgent request
LATE_S = 30.0  #: the deadline of one that is late anyway
AGED_TURN = 8  #: every so many pulls are for the oldest late request, once it is old
AGED_SHARE = 0.5  #: of its time to live
LOOK_S, OFFER_S = 0.1, 0.0125  #: between two choices of a request that waits, and of all
LOCAL_TOKENS, LOCAL_HIT, LOCAL_HIT_TOKENS = 512, 0.6, 4096
OPTIONS = 3  #: of each stage in a record
FULL_S = 1e6  #: a worker without room for chunks comes after all others
SHORT = 16  #: decode workers that are compared for one request
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
    passed_over: list[tuple[str, float, str]] = field(default_factory=list)
    prefill_options: list[Option] = field(default_factory=list)
    decode_options: list[Option] = field(default_factory=list)
    others: int = 0


class Try(Enum):
    """What came of an attempt to bind."""

    BOUND = 1
    NOTHING = 2  #: nobody to take it, or nothing to take, now
    NO_ROOM = 3  #: decode workers are full: the line stands


@dataclass(slots=True)
class Rejection:
    """Its answer would come too late, and its class prefers to know."""

    waiting: Waiting
    late_s: float


class Binder:
    """Takes requests out of the line and books them; `bind` says what it decided."""

    def __init__(self, config: RouterConfig, fleet: Fleet, index: PrefixIndex, line: Line) -> None:
        self.config, self.fleet, self.index, self.line = config, fleet, index, line
        self.policy = POLICIES[config.policy](index, config.seed)
        self.residuals = Residuals()
        self.explain = config.decisions > 0
        self._never = config.disaggregate == "never"
        self.fresh: list[Waiting] = []  #: entered, or lost their home, since the last time
        self.idle: set[int] = set()  #: slots that have credit and found nothing to do
        self.stuck = False  #: decode workers have no room for the next one
        self._short: list[Worker] = []
        self._short_uses, self._short_of = 0, -1
        self._pulls, self._offer_at = 0, -np.inf
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

    def enter(self, waiting: Waiting, now: float) -> None:
        """Puts it into the line."""
        capacity = len(self.fleet.prefills) or len(self.fleet.decodes)
        if self.policy.late:
            ok = self.fleet.decode_ok if waiting.local else self.fleet.prefill_ok
            times = self.ask(waiting, now).alone[ok]
            waiting.least_s = float(times.min()) if len(times) else 0.0
            self.fresh.append(waiting)
        self.line.enter(waiting, now, capacity)

    def look(self) -> None:
        """A decode worker can take a prompt again: the most urgent choose at once."""
        self._offer_at = -np.inf
        for *_, waiting in self.line.urgent[:URGENT]:
            waiting.look_at = -np.inf

    def due(self, waiting: Waiting, now: float) -> float:
        """When its prompt should be computed, for the worker's order; 0: as they come."""
        if not self.policy.late:
            return 0.0
        return now + LATE_S if waiting.late else waiting.deadline

    def lost(self, worker: Worker) -> None:
        self.idle.discard(worker.slot)
        self.fresh += self.line.unsettle(worker.slot)

    # ---- the line --------------------------------------------------------------------------------

    def bind(self, now: float) -> list[Binding | Rejection]:
        """Everything that can be decided now."""
        if not self.line:
            return []
        out: list[Binding | Rejection] = []
        if not self.policy.late:
            self._early(now, out)
            return out
        self._demote(now, out)
        self._late(now, out)
        return out

    def next_credit(self, now: float) -> float:
        """When the next worker has credit by prediction, or idle ones are offered more."""
        soon = self.fleet.credit_at[self.pool]
        soon = soon[soon > now]
        credit = float(soon.min()) if len(soon) else np.inf
        if self.stuck:
            return min(credit, now + LOOK_S)
        if not self.idle and self.config.disaggregate != "auto":
            return credit
        looks = [waiting.look_at for *_, waiting in self.line.urgent[:URGENT]]
        late = [now + LOOK_S] if self.line.late and self.idle else []
        return min([credit, *late, *(max(look, self._offer_at) for look in looks)])

    @property
    def pool(self) -> np.ndarray:
        """Who pulls: those that compute prompts."""
        return self.fleet.decode_ok if self._never else self.fleet.prefill_ok

    def _early(self, now: float, out: list) -> None:
        """Oldest first; who finds no room holds up those behind, but for a missing role."""
        for waiting in list(self.line.by_key.values()):
            if self.missing(waiting):
                continue
            ask = self.ask(waiting, now)
            binding: Binding | Rejection | None
            if waiting.local:
                binding = self._local(ask, self._allowed(waiting, self.fleet.decode_ok))
            else:
                binding = self._pair(ask)
            if isinstance(binding, Binding):
                self._book(binding, now)
            if binding is None:
                return
            self.line.leave(waiting.key)
            out.append(binding)

    def _pair(self, ask: p.Ask) -> Binding | Rejection | None:
        """The policy's prefill worker, or a local prefill if that is the better one."""
        waiting, fleet = ask.waiting, self.fleet
        ok = self._allowed(waiting, fleet.prefill_ok)
        cost = np.where(ok, self.policy.prefill(ask, ok), np.inf)
        slot = p.least(cost, waiting.tie)
        if slot is None:
            return None
        times = p.ttft_s(ask)
        ttft = float(times[slot])
        if self.config.disaggregate == "auto":
            local = self._if_local(ask, ttft)
            if local:
                return local
        late_s = ask.now + ttft - waiting.deadline
        if waiting.slo.early_reject and self.config.policy == "mooncake" and late_s > 0:
            return Rejection(waiting, late_s)
        return self._finish(ask, slot, "early", False, (times, cost))

    def _demote(self, now: float, out: list) -> None:
        """The most urgent ones that nobody could serve in time any more."""
        line = self.line
        while line.urgent:
            waiting = line.urgent[0][3]
            late_s = now + waiting.least_s - waiting.deadline
            if late_s <= 0:
                return
            self._give_up(waiting, late_s, out)

    def _give_up(self, waiting: Waiting, late_s: float, out: list) -> None:
        if waiting.slo.early_reject:
            self.line.leave(waiting.key)
            out.append(Rejection(waiting, max(late_s, 0.0)))
        else:
            self.line.demote(waiting)

    def _late(self, now: float, out: list) -> None:
        """Newcomers choose; workers with credit choose; idle workers are offered who waits."""
        fresh, self.fresh, self.stuck = self.fresh, [], False
        for waiting in fresh:
            if waiting.key in self.line and not waiting.late:
                self._push(waiting, now, out)
        for slot in self.fleet.credited(now, self.pool).tolist():
            if slot not in self.idle:
                worker = self.fleet.by_slot[slot]
                assert worker
                tried = self._pull(worker, now, out)
                if tried is Try.NO_ROOM:
                    self.stuck = True
                    break
                if tried is Try.NOTHING:
                    self.idle.add(slot)
        if now >= self._offer_at and (self.idle or self.config.disaggregate == "auto"):
            self._offer_at = now + OFFER_S
            self._offer(now, out)

    def _offer(self, now: float, out: list) -> None:
        """One of the most urgent chooses again; a late one may have a worker that is idle still."""
        for *_, waiting in self.line.urgent[:URGENT]:
            if waiting.look_at <= now:
                self.stuck |= self._push(waiting, now, out) is Try.NO_ROOM
                break
        if self.line.late and self.idle and not self.stuck:
            worker = self.fleet.by_slot[min(self.idle)]
            if worker:
                self.stuck = self._pull(worker, now, out) is Try.NO_ROOM

    # ---- push: a request chooses its worker ------------------------------------------------------

    def _push(self, waiting: Waiting, now: float, out: list) -> Try:
        if self.missing(waiting):
            return Try.NOTHING
        waiting.look_at = now + LOOK_S
        fleet, ask = self.fleet, self.ask(waiting, now)
        gentle = not self._old(waiting, now)
        if waiting.local:
            ok = self._allowed(waiting, fleet.decode_ok) & (fleet.credit_at <= now)
            if not ok.any():
                return Try.NOTHING
            binding = self._local(ask, ok)
            return self._leave(binding, now, out)
        ok = self._allowed(waiting, fleet.prefill_ok)
        times = p.left_s(ask) + fleet.home_s
        if waiting.home:
            times[waiting.home.slot] -= waiting.home_s
        free_ok = fleet.credit_at <= now
        if not waiting.late:
            before = p.interrupts(ask, self.residuals.upper)
            times = np.where(before, np.minimum(times, p.chunk_s(ask)), times)
            free_ok |= before
        times += ask.alone
        masked = np.where(ok, times, np.inf)
        best = p.least(masked, waiting.tie)
        if best is None:
            return Try.NOTHING
        if self.config.disaggregate == "auto":
            local = self._if_local(ask, float(times[best]) + self._ahead(waiting))
            if local:
                return self._leave(local, now, out)
        slot = best
        if not free_ok[best]:
            free = p.least(np.where(free_ok, masked, np.inf), waiting.tie)
            if free is None or self._sooner(waiting, float(times[best]), float(times[free]), now):
                self._stay(waiting, best, ask.alone, ok)
                return Try.NOTHING
            slot = free
        return self._leave(self._finish(ask, slot, "push", gentle, (times, masked)), now, out)

    def _ahead(self, waiting: Waiting) -> float:
        """Seconds that the line before it takes, when nobody is idle."""
        if self.idle or not self.line.urgent:
            return 0.0
        return max(self.line.work_s - self.line.home_s, 0.0) / max(len(self.fleet.prefills), 1)

    def _sooner(self, waiting: Waiting, there_s: float, here_s: float, now: float) -> bool:
        """Whether it had better wait for a busy worker than take this one, if not both are late."""
        there, here = now + there_s, now + here_s
        if here <= waiting.deadline < there:
            return False
        return there_s < SOONER * here_s - SOONER_S

    def _stay(self, waiting: Waiting, slot: int, alone: np.ndarray, ok: np.ndarray) -> None:
        """It waits: for this worker, if its cache saves a lot."""
        saved = float(alone[ok].max() - alone[slot])
        home = self.fleet.by_slot[slot] if saved > SAVES_S else None
        if home is not waiting.home or home is None:
            self.line.settle(waiting, home, float(alone[slot]))

    def _leave(self, binding: Binding | None, now: float, out: list) -> Try:
        if binding is None:
            return Try.NO_ROOM
        self._book(binding, now)
        self.line.leave(binding.waiting.key)
        out.append(binding)
        return Try.BOUND

    # ---- pull: a worker chooses its request ------------------------------------------------------

    def _pull(self, worker: Worker, now: float, out: list) -> Try:
        aged = self._aged(worker, now)
        chosen, notes = (aged, []) if aged else self._best(worker, now)
        if chosen is None:
            some = islice(self.line.late.values(), URGENT)
            chosen = next((w for w in some if self._may(worker, w)), None)
        if chosen is None:
            return Try.NOTHING
        ask = self.ask(chosen, now)
        if chosen.local:
            binding = self._finish_local(ask, worker.slot)
        else:
            binding = self._finish(ask, worker.slot, "pull", gentle=not self._old(chosen, now))
        if binding:
            binding.passed_over = notes
            self._pulls += 1
        return self._leave(binding, now, out)

    def _may(self, worker: Worker, waiting: Waiting) -> bool:
        place = waiting.place
        if waiting.local != self._never or self.missing(waiting):
            return False
        if not place.lost and not place.avoid:
            return True
        return bool(self._allowed(waiting, self.pool)[worker.slot])

    def _old(self, waiting: Waiting, now: float) -> bool:
        return now - waiting.since > AGED_SHARE * (waiting.expires - waiting.since)

    def _aged(self, worker: Worker, now: float) -> Waiting | None:
        """The oldest late request, if it is its turn: nobody starves."""
        if self._pulls % AGED_TURN or not self.line.late:
            return None
        oldest = next(iter(self.line.late.values()))
        return oldest if self._old(oldest, now) and self._may(worker, oldest) else None

    def _best(
        self, worker: Worker, now: float
    ) -> tuple[Waiting | None, list[tuple[str, float, str]]]:
        """The most urgent that it can serve in time, or the one that its cache saves most."""
        fleet, upper = self.fleet, self.residuals.upper
        notes: list[tuple[str, float, str]] = []
        left = max(worker.busy_until - now, 0.0)
        home = self.line.homes.get(worker.slot)
        few = self.line.urgent[:URGENT]
        if home:
            few = sorted({*few[: -min(len(home), HOME)], *home[:HOME]})
        first: Waiting | None = None
        best: Waiting | None = None
        first_s = most = 0.0
        for *_, waiting in few:
            if not self._may(worker, waiting):
                continue
            prompt, hit = waiting.place.prompt_tokens, self.hit(waiting, worker)
            seconds = fleet.prefill_s(worker, prompt - hit, prompt)
            why = self._passes(waiting, worker, left + seconds, now)
            if why:
                notes.append((waiting.key[0], waiting.deadline - now, why))
            elif first is None:
                first, first_s = waiting, seconds
            elif hit:
                saved = fleet.prefill_s(worker, prompt, prompt) - seconds
                stands = now + left + seconds + first_s * upper <= first.deadline
                worth = saved > SAVES_S or hit > SAVES_SHARE * prompt
                if stands and worth and saved > most:
                    best, most = waiting, saved
        if first is not None and best is not None:
            why = f"the cache saves {most * 1e3:.0f} ms for another, and it can wait"
            notes.append((first.key[0], first.deadline - now, why))
        return best or first, notes

    def _passes(self, waiting: Waiting, worker: Worker, here_s: float, now: float) -> str | None:
        """Why the worker leaves this request alone, if so."""
        if now + here_s * self.residuals.upper > waiting.deadline:
            return "too slow here"
        home = waiting.home
        if home is None or home is worker:
            return None
        there_s = max(home.busy_until - now, 0.0) + home.home_s
        sooner = self._sooner(waiting, there_s, here_s, now)
        return "its prefix is on a worker soon free" if sooner else None

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
        hit = self.hit(ask.waiting, worker)
        uncached = ask.prompt - hit
        wait = worker.left_s(self.due(ask.waiting, ask.now), ask.now)
        seconds = fleet.prefill_s(worker, uncached, ask.prompt)
        begins = ask.now + wait
        found = self._decode(ask, (begins, begins + seconds), gentle)
        if found is None:
            return None
        decode, (step, exposed, *_), options = found
        paired = worker if decode is not worker else None
        binding = Binding(
            ask.waiting, kind, paired, decode, uncached, hit, wait, seconds, step, exposed
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

    # ---- booking ---------------------------------------------------------------------------------

    def _book(self, binding: Binding, now: float) -> None:
        """From here on the workers have it."""
        fleet, waiting, decode = self.fleet, binding.waiting, binding.decode
        key, prompt = waiting.key, waiting.place.prompt_tokens
        computes = binding.prefill or decode
        self.idle.discard(computes.slot)
        tokens = (binding.uncached, prompt)
        fleet.give(computes, key, tokens, binding.compute_s, now, self.due(waiting, now))
        whole = -(-(prompt + waiting.output) // fleet.block_tokens)
        stream = Stream(self.need(waiting), int(whole), prompt + waiting.output / 2)
        fleet.reserve(decode, key, stream)
        if binding.prefill:
            cost, begins = decode.cost, max(decode.link_until, now + binding.wait_s)
            moves = prompt - self.hit(waiting, decode)
            decode.link_until = begins + cost.transfer_base + cost.transfer_token * moves
            fleet.link_until[decode.slot] = decode.link_until
        depth = self.index.depth(computes.slot, waiting.sampled)
        self.index.predict(computes.slot, waiting.sampled[depth:], now)
        self.policy.bound(binding.prefill.slot if binding.prefill else None, decode.slot)
