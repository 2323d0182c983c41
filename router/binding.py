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

from . import placement as p
from .config import RouterConfig
from .fleet import Fleet, Stream, Worker
from .index import PrefixIndex
from .line import Line, Waiting
from .pairing import Binding, Pairing

URGENT, HOME = 8, 4  #: requests that a worker chooses among, and of those from its home
SCAN = 64  #: of the line, at most, to find them
SOONER, SOONER_S = 0.9, 0.01  #: by how much a busy worker must be earlier than a free one
SAVES_S, SAVES_SHARE = 0.02, 0.5  #: what a cache must save to go before a more urgent request
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
        self._never = config.disaggregate == "never"
        self.fresh: list[Waiting] = []  #: entered, or lost their home, since the last time
        self.idle: set[int] = set()  #: slots that have credit and found nothing to do
        self.stuck = False  #: decode workers have no room for the next one
        self._pulls, self._offer_at = 0, -np.inf

    def enter(self, waiting: Waiting, now: float) -> None:
        """Puts it into the line."""
        capacity = len(self.fleet.prefills) or len(self.fleet.decodes)
        self.find_holder(waiting)
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
        fresh, self.fresh = self.fresh, []
        if self.stuck:  # perhaps there is room now
            fresh = [*(entry[3] for entry in self.line.urgent[:URGENT]), *fresh]
        self.stuck = False
        for waiting in fresh:
            if waiting.key in self.line and not waiting.late and not self.stuck:
                self.stuck = self._push(waiting, now, out) is Try.NO_ROOM
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
        if waiting.look_at:
            self.find_holder(waiting)
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
            ahead = 0.0 if free_ok[best] else self._ahead(waiting)
            local = self._if_local(ask, float(times[best]) + ahead)
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
        own = 0.0 if waiting.home else waiting.least_s
        return max(self.line.work_s - self.line.home_s - own, 0.0) / max(
            len(self.fleet.prefills), 1
        )

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
            ours = waiting.home is worker or waiting.holder is worker
            if first is not None and not ours:
                continue  # its cache is no reason to go before a more urgent one
            prompt = waiting.place.prompt_tokens
            seconds, hit, _ = self.compute(waiting, worker)
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

    # ---- booking ---------------------------------------------------------------------------------

    def _book(self, binding: Binding, now: float) -> None:
        """From here on the workers have it."""
        fleet, waiting, decode = self.fleet, binding.waiting, binding.decode
        key, prompt = waiting.key, waiting.place.prompt_tokens
        computes = binding.prefill or decode
        self.idle.discard(computes.slot)
        tokens = (binding.uncached, prompt)
        due, fetches = self.due(waiting, now), binding.fetch is not None
        fleet.give(computes, key, tokens, binding.compute_s, now, due, fetches)
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
