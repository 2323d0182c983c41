"""The router (pure): `handle(event, now) -> [action]`. Actions are `Deliver`s to gateways and
workers, `Disconnect` and `StepDown`.

Life of a placement:
    Place     -> a pair with room is bound at once (least predicted wait, then the longest prefix
                 hit), else the request waits, oldest first, at most `queue_ttl_s`
    Prefilled -> the prefill worker's predicted queue shrinks
    Over      -> the decode worker's blocks are free again; those who wait are looked at
All state is soft: a new router (higher term) rebuilds it from Joins and resubmitted Places.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from ..protos.frames import (
    Deliver,
    Directory,
    Key,
    Place,
    Placed,
    Refused,
    Report,
    WorkerCard,
)
from . import events as e
from .index import PrefixIndex
from .policy import Candidate, choose


@dataclass(frozen=True, slots=True)
class RouterConfig:
    disaggregate: str = "always"  #: always | never
    queue_max: int = 1024  #: requests that wait for a worker
    queue_ttl_s: float = 30.0  #: how long one waits
    growth_tokens: int = 256  #: what decode reserves behind the prompt, at most
    settle_s: float = 3.0  #: after its first event, a router does not know yet who is missing
    prior_tokens_per_s: float = 2000.0  #: prefill rate of a worker that has not reported yet


@dataclass(slots=True)
class WorkerState:
    card: WorkerCard
    rate: float  #: prefill tokens per second, EWMA of its reports
    seq: int = 0  #: last report
    queued: dict[Key, int] = field(default_factory=dict)  #: uncached prompt tokens, no first token
    reserved: dict[Key, int] = field(default_factory=dict)  #: decode blocks

    @property
    def wait_s(self) -> float:
        return sum(self.queued.values()) / self.rate

    @property
    def room(self) -> int:
        kept = self.card.kept if self.reserved else 0  # alone, a request may have all of it
        return self.card.blocks - sum(self.reserved.values()) - kept


@dataclass(slots=True)
class Waiting:
    gateway: str
    place: Place
    since: float


@dataclass(slots=True)
class Bound:
    gateway: str
    prefill: str | None
    decode: str
    placed: Placed


class Router:
    """One active router per model. `term` must be higher than any router's before it."""

    def __init__(self, config: RouterConfig, term: int) -> None:
        self.config, self.term = config, term
        self.active = True
        self.settles: float | None = None  #: when, by the clock of `now`
        self.settled = False
        self.workers: dict[str, WorkerState] = {}
        self.gateways: set[str] = set()
        self.index = PrefixIndex()
        self.waiting: OrderedDict[Key, Waiting] = OrderedDict()
        self.bound: dict[Key, Bound] = {}
        self.placed = self.refused = 0
        self.hit_tokens = self.prompt_tokens = 0

    def handle(self, event: e.Event, now: float) -> list:
        if not self.active:
            return []
        return [*self._settle(now), *self._handle(event, now)]

    def _handle(self, event: e.Event, now: float) -> list:
        match event:
            case e.Asked(gateway, place):
                return self._asked(gateway, place, now)
            case e.FirstToken(key):
                bound = self.bound.get(key)
                worker = self.workers.get(bound.prefill or bound.decode) if bound else None
                if worker:
                    worker.queued.pop(key, None)
            case e.Ended(key):
                self._unbind(key)
                return self._retry(now)
            case e.Reported(worker, report):
                return self._reported(worker, report)
            case e.Joined(card, term, cached):
                return self._joined(card, term, cached, now)
            case e.Lost(worker):
                return self._lost(worker)
            case e.GatewayJoined(gateway):
                self.gateways.add(gateway)
                return [Deliver(gateway, self.directory())]
            case e.GatewayLost(gateway):
                return self._gateway_lost(gateway, now)
            case e.Outdated(term):
                return self._outdated(term)
            case e.Tick():
                return self._retry(now)
        return []

    # ---- membership ----------------------------------------------------------------------------

    def directory(self) -> Directory:
        cards = [worker.card for worker in self.workers.values()]
        return Directory(self.term, cards, self.settled)

    def _settle(self, now: float) -> list:
        """Whoever has not joined by now is gone: says so once."""
        if self.settles is None:
            self.settles = now + self.config.settle_s
        if self.settled or now < self.settles:
            return []
        self.settled = True
        return self._announce()

    def _announce(self) -> list:
        directory = self.directory()
        return [Deliver(peer, directory) for peer in (*self.gateways, *self.workers)]

    def _joined(self, card: WorkerCard, term: int, cached: list[bytes], now: float) -> list:
        if term > self.term:
            return self._outdated(term)
        before = self.workers.get(card.id)
        state = before or WorkerState(card, self.config.prior_tokens_per_s)
        state.card, state.seq = card, 0
        self.workers[card.id] = state
        self.index.drop(card.id)
        self.index.store(card.id, cached)
        return [*self._announce(), *self._retry(now)]

    def _lost(self, worker: str) -> list:
        if self.workers.pop(worker, None) is None:
            return []
        self.index.drop(worker)
        return self._announce()

    def _gateway_lost(self, gateway: str, now: float) -> list:
        self.gateways.discard(gateway)
        for key in [k for k, w in self.waiting.items() if w.gateway == gateway]:
            del self.waiting[key]
        for key in [k for k, b in self.bound.items() if b.gateway == gateway]:
            self._unbind(key)
        return self._retry(now)

    def _outdated(self, term: int) -> list:
        if term <= self.term:
            return []
        self.active = False
        return [e.StepDown(term)]

    def _reported(self, worker: str, report: Report) -> list:
        state = self.workers.get(worker)
        if state is None:
            return []
        if report.seq != state.seq + 1:
            return [e.Disconnect(worker)]
        state.seq = report.seq
        self.index.evict(worker, report.evicted)
        self.index.store(worker, report.stored)
        if report.prefill_seconds > 0:
            rate = report.prefill_tokens / report.prefill_seconds
            state.rate = max(1.0, 0.8 * state.rate + 0.2 * rate)
        return []

    # ---- placement -----------------------------------------------------------------------------

    def _asked(self, gateway: str, place: Place, now: float) -> list:
        bound = self.bound.get(place.key)
        if bound:  # the answer got lost
            return [Deliver(gateway, bound.placed)]
        if place.key in self.waiting:  # it knows better now whom it has lost
            self.waiting[place.key].place = place
            return self._retry(now)
        if len(self.waiting) >= self.config.queue_max:
            message = f"{len(self.waiting)} requests wait already"
            return [self._refuse(gateway, place.key, "queue_full", message)]
        self.waiting[place.key] = Waiting(gateway, place, now)
        return self._retry(now)

    def _refuse(self, gateway: str, key: Key, reason: str, message: str) -> Deliver:
        self.refused += 1
        return Deliver(gateway, Refused(key, reason, message, retry_after_s=1.0))

    def _retry(self, now: float) -> list:
        """Places those who wait, oldest first, until one finds no room.

        Who waits for a worker that is not there does not hold up those behind it.
        """
        actions: list = []
        for key, waiting in list(self.waiting.items()):
            if now - waiting.since > self.config.queue_ttl_s:
                del self.waiting[key]
                actions.append(self._expired(waiting))
            elif not self._missing(waiting.place):
                placed = self._place(waiting)
                if placed is None:
                    break
                del self.waiting[key]
                actions.append(placed)
        return actions

    def _missing(self, place: Place) -> set[str]:
        """Roles that the request needs and no worker has, but those that it has seen die."""
        alive = [w.card for w in self.workers.values() if w.card.id not in place.lost]
        wanted = {"decode"} if self._local(place) else {"prefill", "decode"}
        return wanted - {card.role for card in alive}

    def _expired(self, waiting: Waiting) -> Deliver:
        waited = f"waited {self.config.queue_ttl_s:g} s for a worker"
        missing = self._missing(waiting.place)
        if missing:
            message = f"{waited}: no {' or '.join(sorted(missing))} worker is up"
            return self._refuse(waiting.gateway, waiting.place.key, "no_capacity", message)
        message = f"{waited}: all are busy"
        return self._refuse(waiting.gateway, waiting.place.key, "deadline_exceeded", message)

    def _local(self, place: Place) -> bool:
        return place.local or self.config.disaggregate == "never"

    def _place(self, waiting: Waiting) -> Deliver | None:
        place = waiting.place
        depths = self.index.depths(place.hashes)
        prefill = None if self._local(place) else self._best("prefill", place, depths, 0)
        if prefill is None and not self._local(place):
            return None
        tokens = place.prompt_tokens + min(place.max_tokens, self.config.growth_tokens)
        size = next((w.card.block_tokens for w in self.workers.values()), 64)
        need = -(-tokens // size)
        decode = self._best("decode", place, depths, need)
        if decode is None:
            return None
        computes = prefill or decode
        hit = min(computes.hit_tokens, place.prompt_tokens - 1)
        self.hit_tokens += hit
        self.prompt_tokens += place.prompt_tokens
        name = prefill.worker if prefill else None
        wait_ms = computes.wait_s * 1e3
        placed = Placed(place.key, self.term, name, decode.worker, hit, wait_ms)
        self._bind(waiting, placed, computes, need)
        return Deliver(waiting.gateway, placed)

    def _best(self, role: str, place: Place, depths: dict[str, int], need: int) -> Candidate | None:
        alive = [w for w in self.workers.values() if w.card.id not in place.lost]
        fits = [w for w in alive if w.card.role == role and w.room >= need]
        fits = [w for w in fits if w.card.id not in place.avoid] or fits
        return choose(
            [
                Candidate.of(
                    w.card.id,
                    place.prompt_tokens,
                    depths.get(w.card.id, 0) * w.card.block_tokens,
                    w.wait_s,
                    w.rate,
                    w.room,
                )
                for w in fits
            ],
            place.key,
            by_room=role == "decode",
        )

    def _bind(self, waiting: Waiting, placed: Placed, computes: Candidate, need: int) -> None:
        key = placed.key
        self.bound[key] = Bound(waiting.gateway, placed.prefill, placed.decode, placed)
        self.workers[computes.worker].queued[key] = computes.uncached_tokens
        self.workers[placed.decode].reserved[key] = need
        self.placed += 1

    def _unbind(self, key: Key) -> None:
        self.waiting.pop(key, None)
        bound = self.bound.pop(key, None)
        if bound is None:
            return
        for name in (bound.prefill, bound.decode):
            worker = self.workers.get(name or "")
            if worker:
                worker.queued.pop(key, None)
                worker.reserved.pop(key, None)

    def statistics(self) -> dict:
        return {
            "term": self.term,
            "active": self.active,
            "waiting": len(self.waiting),
            "bound": len(self.bound),
            "placed": self.placed,
            "refused": self.refused,
            "hit_tokens": self.hit_tokens,
            "prompt_tokens": self.prompt_tokens,
            "index_entries": len(self.index),
        }

    def __repr__(self) -> str:
        roles = [worker.card.role for worker in self.workers.values()]
        return (
            f"<Router term {self.term}: {roles.count('prefill')} prefill, "
            f"{roles.count('decode')} decode | {len(self.bound)} bound, "
            f"{len(self.waiting)} waiting>"
        )
