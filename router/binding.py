"""Which request goes to which pair of workers, and when: the decisions of the router.

Early policies bind each request when it comes, oldest first, as soon as a decode worker has room.
A late policy keeps requests in the line until a worker has credit (`Fleet.credited`):
  push: a new request takes the worker that has its first token earliest, if that one has credit;
        else it waits, for that one's cache (its home) if another would have to compute much more
  pull: a worker with credit takes the most urgent request that it can serve in time, or one that
        waits for its cache, if the urgent one can stand that
  steal: the most urgent choose again every `LOOK_S`, while there are idle workers
Urgent is who must begin first to be in time. Who cannot be any more is demoted, or refused if its
class prefers that.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import islice

import numpy as np

from ..protos.frames import AttemptKey, PlaceAttempt
from . import placement as p
from .config import RouterConfig
from .fleet import HALTED_MAX, Fleet, Stream, Worker
from .index import PrefixIndex, tokens_at
from .line import Line, Waiting
from .pairing import SPREAD, Binding, Pairing, Ranked

URGENT, HOME = 8, 4  #: requests that a worker chooses among, and of those from its home
SCAN = 64  #: of the line, at most, to find them
SOONER, SOONER_S = 0.9, 0.01  #: by how much a busy worker must be earlier than a free one
SAVES_S, SAVES_SHARE = 0.02, 0.5  #: what a cache must save to go before a more urgent request
PUT_OFF = 2.0  #: what a newcomer goes before must stand so many times the newcomer's prefill
MARGIN = 1.4  #: of its predicted wait and prefill, that a request must have left to be pulled
AGED_TURN = 8  #: every so many pulls are for the oldest late request, once it is old
AGED_SHARE = 0.5  #: of its time to live
LOOK_S, OFFER_S = 0.1, 0.0125  #: between two choices of a request that waits, and of all


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


class Binder(Pairing):
    """Takes requests out of the line and books them; `bind` says what it decided."""

    def __init__(self, config: RouterConfig, fleet: Fleet, index: PrefixIndex, line: Line) -> None:
        super().__init__(config, fleet, index)
        self.line = line
        self._never = config.disaggregate == "never"  #: decode workers compute all prompts
        self.fresh: list[Waiting] = []  #: entered, or lost their home, since the last time
        self._locals: dict[
            AttemptKey, Waiting
        ] = {}  #: a decode worker has to compute these, no others
        self.idle: set[int] = set()  #: slots that have credit and found nothing to do
        self.stuck = False  #: decode workers have no room for the next one
        self._pulls, self._offer_at = 0, -np.inf

    def arrive(self, waiting: Waiting, now: float) -> Binding | None:
        """A newcomer takes a worker at once (a late policy only), or joins the line."""
        self.look(waiting)
        capacity = len(self.fleet.prefills) or len(self.fleet.decodes)
        if self.policy.late:
            if waiting.local or self.stuck or waiting.picky or self.missing(waiting):
                few = self.few.fastest(waiting.hits, waiting.local)
                waiting.least_s = min([self.alone(waiting, worker) for worker in few], default=0.0)
                self.offer(waiting)
            else:
                few = self.few.prefills(waiting.hits, None, now)
                ranked = self._ranked(waiting, few, now)
                waiting.least_s = min([one[4] for one in ranked])
                waiting.look_at = now + LOOK_S
                if now + waiting.least_s <= waiting.deadline:
                    out: list[Binding] = []
                    tried = self._choose(waiting, ranked, now, out)
                    if tried is Try.BOUND:
                        self.line.charge(waiting, now, capacity)
                        return out[0]
                    if tried is Try.NO_ROOM:
                        self.fresh.append(waiting)
        self.line.enter(waiting, now, capacity)
        return None

    def offer(self, waiting: Waiting) -> None:
        """It chooses at the next `bind`; a policy that is not late looks at all of them anyway."""
        if not self.policy.late:
            return
        if waiting.local and not self._never:
            self._locals[waiting.key] = waiting
        else:
            self.fresh.append(waiting)

    def membership(self, settled: bool, now: float) -> None:
        """Somebody came or went. `auto` without any prefill worker is `never`, for so long."""
        mode = self.config.disaggregate
        never = mode == "never" or (mode == "auto" and settled and not self.fleet.prefills)
        if never == self._never:
            return
        self._never = never
        self.idle.clear()
        self._locals.clear()
        self.fleet.ready.update(w.slot for w in self.fleet.workers.values() if w.credit_at <= now)
        for waiting in self.line.by_key.values():
            waiting.local = self.is_local(waiting.place)
            self.offer(waiting)

    def is_local(self, place: PlaceAttempt) -> bool:
        return place.local_prefill or self._never

    def offer_again(self) -> None:
        """A decode worker can take a prompt again: the most urgent choose at once."""
        self._offer_at = -np.inf
        for *_, waiting in self.line.urgent[:URGENT]:
            waiting.look_at = -np.inf

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
        credit = self.fleet.next_credit(now, self._never)
        if self.stuck or self._locals:
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
            self.look(waiting)
            binding: Binding | Rejection | None
            if waiting.local:
                binding = self._local(waiting, self._allowed(waiting, self.fleet.decode_ok), now)
            else:
                binding = self._pair(waiting, now)
            if isinstance(binding, Binding):
                self._book(binding, now)
            if binding is None:
                return
            self.line.leave(waiting.key)
            out.append(binding)

    def _pair(self, waiting: Waiting, now: float) -> Binding | Rejection | None:
        """The policy's prefill worker, or a local prefill if that is the better one."""
        ask = self.ask(waiting, now)
        ok = self._allowed(waiting, self.fleet.prefill_ok)
        cost = np.where(ok, self.policy.prefill(ask, ok), np.inf)
        slot = p.least(cost, waiting.tie)
        worker = None if slot is None else self.fleet.by_slot[slot]
        if slot is None or worker is None:
            return None
        times = p.ttft_s(ask)
        ttft = float(times[slot])
        if self.config.disaggregate == "auto":
            local = self._if_local(waiting, ttft, now)
            if local:
                return local
        late_s = now + ttft - waiting.deadline
        if waiting.slo.early_reject and self.config.policy == "mooncake" and late_s > 0:
            return Rejection(waiting, late_s)
        binding = self._finish(waiting, worker, "early", False, now)
        if binding and self.explain:
            binding.prefill_options = self._prefill_options(ask, slot, times, cost)
        return binding

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
        fresh, self.fresh = self.fresh, []
        if self.stuck:  # perhaps there is room now
            fresh = [*(entry[3] for entry in self.line.urgent[:URGENT]), *fresh]
        self.stuck = False
        for waiting in fresh:
            if waiting.key in self.line and not waiting.late and not self.stuck:
                self.stuck = self._push(waiting, now, out) is Try.NO_ROOM
        for waiting in [*islice(self._locals.values(), URGENT)]:
            waits = self.line.by_key.get(waiting.key) is waiting
            tried = self._push_local(waiting, now, out) if waits else Try.BOUND
            self.stuck |= tried is Try.NO_ROOM
            if tried is Try.BOUND:
                del self._locals[waiting.key]
        for worker in self.fleet.credited(now):
            slot = worker.slot
            if slot in self.idle or not (worker.decodes_ok if self._never else worker.prefills_ok):
                self.fleet.ready.discard(slot)
                continue
            tried = self._pull(worker, now, out)
            if tried is Try.NO_ROOM:
                self.stuck = True
                break
            if tried is Try.NOTHING:
                self.idle.add(slot)
                self.fleet.ready.discard(slot)
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
            worker = self._idle_one()
            if worker:
                self.stuck = self._pull(worker, now, out) is Try.NO_ROOM

    def _idle_one(self) -> Worker | None:
        """An idle worker that may have one of the first late requests."""
        for waiting in islice(self.line.late.values(), URGENT):
            if waiting.local != self._never or self.missing(waiting):
                continue
            ok = self._allowed(waiting, self.pool)
            for slot in sorted(self.idle):
                if ok[slot]:
                    return self.fleet.by_slot[slot]
        return None

    # ---- push: a request chooses its worker ------------------------------------------------------

    def _push(self, waiting: Waiting, now: float, out: list) -> Try:
        if self.missing(waiting):
            return Try.NOTHING
        if waiting.look_at:
            self.look_again(waiting)
        waiting.look_at = now + LOOK_S
        if waiting.local:
            return self._push_local(waiting, now, out)
        few = self.few.prefills(waiting.hits, waiting.home, now)
        ranked = self._ranked(waiting, self._of(waiting, few, self.fleet.prefills), now)
        return self._choose(waiting, ranked, now, out)

    def _choose(self, waiting: Waiting, ranked: list[Ranked], now: float, out: list) -> Try:
        """The worker that has its first token earliest, if that one takes it now."""
        if not ranked:
            return Try.NOTHING
        best_s, _, _, best, alone_s, free = min(ranked)
        if self.config.disaggregate == "auto":
            ahead = 0.0 if free else self._ahead(waiting)
            local = self._if_local(waiting, best_s + ahead, now)
            if local:
                return self._leave(local, now, out)
        if not free:
            there_s = best_s
            open_to = [one for one in ranked if one[5]]
            best_s, _, _, worker, _, _ = min(open_to, default=ranked[0])
            if not open_to or self._sooner(waiting, there_s, best_s, now):
                self._stay(waiting, best, alone_s, max(one[4] for one in ranked))
                return Try.NOTHING
            best = worker
        binding = self._finish(waiting, best, "push", not self._old(waiting, now), now)
        if binding and self.explain:
            binding.compared = ranked
        return self._leave(binding, now, out)

    def _push_local(self, waiting: Waiting, now: float, out: list) -> Try:
        self.fleet.sync()
        ok = self._allowed(waiting, self.fleet.decode_ok) & (self.fleet.credit_at <= now)
        if not ok.any():
            return Try.NOTHING
        return self._leave(self._local(waiting, ok, now), now, out)

    def _ranked(self, waiting: Waiting, few: list[Worker], now: float) -> list[Ranked]:
        """Each of these workers. It may go before all that one has, if nothing of that becomes
        late by it."""
        due, upper, tie = waiting.deadline, self.residuals.upper, waiting.tie & 0xFFFF
        home, early, prompt, held = waiting.home, not waiting.late, waiting.prompt, waiting.held
        known, wide = waiting.hits.known, waiting.hits.wide
        fetched = held - p.FETCH_TOKENS if waiting.fetches else -1
        moved_s = waiting.holder.transfer_token if waiting.holder else 0.0
        far = prompt - held
        ranked = []
        for worker in few:
            slot = worker.slot
            if slot in known:
                hit = tokens_at(known[slot])
            else:
                hit = 0
                for depth, mask in wide:
                    if mask >> slot & 1:
                        hit = tokens_at(depth)
                        break
            if hit >= prompt:
                hit = prompt - 1
            # the same as `alone`, without the calls
            token, pair = worker.prefill_token, worker.prefill_pair
            rest = prompt - hit
            alone_s = worker.prefill_base + rest * (token + pair * (prompt - rest / 2))
            if hit <= fetched:
                moves = p.FETCH_S + moved_s * (held - hit)
                there_s = worker.prefill_base + far * (token + pair * (prompt - far / 2))
                there_s += p.FETCH_MARGIN * moves
                if there_s < alone_s:
                    alone_s = there_s
            left = worker.busy_until - now
            left = worker.home_s + left if left > 0.0 else worker.home_s
            if worker is home:
                left -= waiting.home_s
            free = worker.credit_at <= now
            if (
                early
                and worker.first_due > due
                and worker.slack_s >= PUT_OFF * upper * alone_s
                and worker.prompts < HALTED_MAX
            ):
                free = True
                if worker.chunk_s < left:
                    left = worker.chunk_s
            spread = tie + slot * SPREAD & 0xFFFF
            ranked.append((left + alone_s, spread, slot, worker, alone_s, free))
        return ranked

    def _ahead(self, waiting: Waiting) -> float:
        """Seconds that the line before it takes, when nobody is idle."""
        if self.idle or not self.line.urgent:
            return 0.0
        own = 0.0 if waiting.home or waiting.key not in self.line else waiting.least_s
        return max(self.line.work_s - self.line.home_s - own, 0.0) / max(
            len(self.fleet.prefills), 1
        )

    def _sooner(self, waiting: Waiting, there_s: float, here_s: float, now: float) -> bool:
        """Whether it had better wait for a busy worker than take this one, if not both are late."""
        there, here = now + there_s, now + here_s
        if here <= waiting.deadline < there:
            return False
        return there_s < SOONER * here_s - SOONER_S

    def _stay(self, waiting: Waiting, worker: Worker, alone_s: float, most_s: float) -> None:
        """It waits: for this worker, if its cache saves a lot."""
        home = worker if most_s - alone_s > SAVES_S else None
        if waiting.key not in self.line:
            waiting.home, waiting.home_s = home, alone_s
        elif home is not waiting.home or home is None:
            self.line.settle(waiting, home, alone_s)

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
        self.look_again(chosen)
        if chosen.local:
            seconds = float(p.local_s(self.ask(chosen, now))[worker.slot])
            binding = self._finish_local(chosen, worker, seconds, now)
        else:
            binding = self._finish(chosen, worker, "pull", not self._old(chosen, now), now)
        if binding:
            binding.passed_over = notes
            self._pulls += 1
        return self._leave(binding, now, out)

    def _may(self, worker: Worker, waiting: Waiting) -> bool:
        if waiting.local != self._never or self.missing(waiting):
            return False
        return not waiting.picky or bool(self._allowed(waiting, self.pool)[worker.slot])

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
        upper = self.residuals.upper
        notes: list[tuple[str, float, str]] = []
        if not self.fleet.decodes:
            return None, notes
        left = max(worker.busy_until - now, 0.0)
        home = self.line.homes.get(worker.slot)
        few = self.line.urgent[:URGENT]
        if home:  # both are in the same order
            few = few[: -min(len(home), HOME)]
            few += [one for one in home[:HOME] if one[:3] > few[-1][:3]] if few else home[:HOME]
        first: Waiting | None = None
        best: Waiting | None = None
        first_s = most = 0.0
        for *_, waiting in few:
            if (waiting.picky or waiting.local or self._never) and not self._may(worker, waiting):
                continue
            ours = waiting.home is worker or waiting.holder is worker
            if first is not None and not ours:
                continue  # its cache is no reason to go before a more urgent one
            prompt = waiting.prompt
            seconds, hit, _ = self.compute(waiting, worker)
            why = self._passes(waiting, worker, left + seconds, now)
            if why:
                notes.append((waiting.key[0], waiting.deadline - now, why))
            elif first is None:
                first, first_s = waiting, seconds
            elif hit:
                saved = worker.prefill_s(prompt, prompt) - seconds
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
        if now + MARGIN * here_s * self.residuals.upper > waiting.deadline:
            return "too slow here"
        home = waiting.home
        if home is None or home is worker:
            return None
        there_s = max(home.busy_until - now, 0.0) + home.home_s
        sooner = self._sooner(waiting, there_s, here_s, now)
        return "its prefix is on a worker soon free" if sooner else None

    # ---- booking ---------------------------------------------------------------------------------

    def _book(self, binding: Binding, now: float) -> None:
        """From here on the workers have it."""
        fleet, waiting, decode = self.fleet, binding.waiting, binding.decode
        key, prompt, answers = waiting.key, waiting.prompt, waiting.place.answer_count
        computes = binding.prefill or decode
        self.idle.discard(computes.slot)
        tokens = (binding.uncached, prompt)
        fetches = binding.fetch is not None
        fleet.give(computes, key, tokens, binding.compute_s, now, binding.due, fetches)
        whole = -(-int(waiting.whole) // fleet.block_tokens)
        stream = Stream(binding.need, whole, waiting.reads, answers)
        fleet.reserve(decode, key, stream)
        if binding.prefill:
            begins = max(decode.link_until, now + binding.wait_s)
            transfer = decode.transfer_base + decode.transfer_token * binding.moves
            decode.link_until = begins + transfer
        self.policy.bound(binding.prefill.slot if binding.prefill else None, decode.slot)
