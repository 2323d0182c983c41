"""The router (pure): `handle(event, now) -> [action]`. Actions are `Deliver`s to gateways and
workers, `Disconnect` and `StepDown`.

Life of a placement:
    Place     -> the request joins the line (`line`)
    ...       -> a policy binds it to a pair (`binding`): at once, or when a worker has credit
    Prefilled -> its prefill worker has credit again; the prediction is corrected
    Over      -> the decode worker's blocks are free; the outcome joins the decision record
All state is soft: a new router (higher term) rebuilds it from Joins and resubmitted Places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any

import xxhash

from ..protos.frames import (
    AttemptKey,
    AttemptOutcome,
    AttemptPlaced,
    AttemptRefused,
    DeliverFrame,
    PlaceAttempt,
    WorkerDirectory,
)
from . import events as e
from .binding import Binder, Rejection
from .config import RouterConfig
from .decisions import Decision, Decisions
from .demand import Demand, outlook
from .fleet import Fleet, Stream, Worker
from .goodput import Goodput
from .index import PrefixIndex, sample
from .line import Line, Waiting
from .pairing import Binding
from .predictor import OutputLengths, prefill_s
from .tally import Tally


class Bound:
    """A request that two workers (or one) have. `prefill` is whoever computes the prompt."""

    def __init__(
        self,
        gateway: str,
        waiting: Waiting,
        prefill: Worker,
        decode: Worker,
        placed: AttemptPlaced,
    ) -> None:
        self.gateway = gateway
        self.waiting = waiting
        self.prefill = prefill
        self.decode = decode
        self.placed = placed
        self.computed: bool = False
        self.ended: bool = False  #: the decode worker says so, its gateway not yet


class Router:
    """One active router per model. `term` must be higher than any router's before it."""

    def __init__(self, config: RouterConfig, term: int) -> None:
        self.config, self.term = config, term
        self.active = True
        self.settles: float | None = None  #: when, by the clock of `now`
        self.settled = False
        self.gateways: dict[str, None] = {}
        self.fleet = Fleet(config.prior_tokens_per_s, config.rtt_s, config.itl_s)
        self._index = PrefixIndex(config.index_per_worker, config.predicted_ttl_s)
        self.line = Line(self.fleet)
        self.binder = Binder(config, self.fleet, self._index, self.line)
        self.lengths = OutputLengths()
        self._demand = Demand()
        self._heard: list[tuple[int, float, float]] = []  #: what `_demand` is told of later
        self._decisions = Decisions(config.decisions)
        self.goodput = Goodput(config.ttft_s, config.itl_s)
        self.tally = Tally()
        self.bound: dict[AttemptKey, Bound] = {}
        self.held: dict[AttemptKey, Worker] = {}  #: streams whose gateways we do not hear of
        self.placed = self.refused = 0
        self.hit_tokens = self.prompt_tokens = 0
        self._now = -inf
        self._to_tidy: deque[tuple[Binding, int, float, float, int]] = deque()
        self._handlers: dict[type, Callable[[Any, float], list]] = {
            e.PlacementRequested: self._asked,
            e.FirstTokenSent: self._first_token,
            e.AttemptEnded: self._ended,
            e.RequestEnded: self._answered,
            e.WorkerReported: self._reported,
            e.WorkerJoined: self._joined,
            e.WorkerLost: self._lost,
            e.GatewayJoined: self._gateway_joined,
            e.GatewayLost: self._gateway_lost,
            e.NewerRouterReported: self._outdated,
            e.RouterTick: self._tick,
        }

    def handle(self, event: e.RouterEvent, now: float) -> list:
        if not self.active:
            return []
        self._now = now
        if self._to_tidy or self._heard:
            self.tidy()
        if self.settled:
            return self._handlers[type(event)](event, now)
        return [*self._settle(now), *self._handlers[type(event)](event, now)]

    def tidy(self) -> None:
        """What can be done after the answer is on its way: the index learns of placements, and
        their records are written. Call it after sending; the next `handle` does it otherwise."""
        for asked in self._heard:
            self._demand.asked(*asked)
        self._heard.clear()
        while self._to_tidy:
            binding, number, ttft_s, now, in_line = self._to_tidy.popleft()
            waiting, computes = binding.waiting, binding.prefill or binding.decode
            self.tally.bound(binding.prefill is not None, binding.kind, now - waiting.since)
            self._demand.bound(waiting.prompt, binding.hit, now)
            self.hit_tokens += binding.hit
            self.prompt_tokens += waiting.prompt
            if computes.alive:
                depth = waiting.hits.depth(computes.slot)
                self._index.predict(computes.slot, waiting.sampled[depth:], now)
            if number:
                self._record(number, waiting, now, in_line, binding, ttft_s)
        self.binder.few.refresh(self._now)

    def _gateway_joined(self, event: e.GatewayJoined, now: float) -> list:
        self.gateways[event.gateway] = None
        return [DeliverFrame(event.gateway, self.directory())]

    def _answered(self, event: e.RequestEnded, now: float) -> list:
        self.goodput.observe(event.outcome, now)
        return []

    def _tick(self, event: e.RouterTick, now: float) -> list:
        self._index.expire(now)
        return self._bind(now)

    @property
    def decisions(self) -> Decisions:
        self.tidy()
        return self._decisions

    @property
    def demand(self) -> Demand:
        self.tidy()
        return self._demand

    @property
    def index(self) -> PrefixIndex:
        self.tidy()
        return self._index

    @property
    def next_wake(self) -> float | None:
        """When a `Tick` would change something; None: not before the next event."""
        times = [] if self.settled or self.settles is None else [self.settles]
        if self.line:
            times.append(self.line.next_expiry)
            if self.binder.policy.late:
                times.append(self.binder.next_credit(self._now))
        wake = min(times, default=inf)
        return wake if wake < inf else None

    # ---- membership ------------------------------------------------------------------------------

    @property
    def workers(self) -> dict[str, Worker]:
        return self.fleet.workers

    def directory(self) -> WorkerDirectory:
        cards = [worker.card for worker in self.workers.values()]
        return WorkerDirectory(self.term, cards, self.settled)

    def _settle(self, now: float) -> list:
        """Whoever has not joined by now is gone: says so once."""
        if self.settles is None:
            self.settles = now + self.config.settle_s
        if self.settled or now < self.settles:
            return []
        self.settled = True
        self.binder.membership(True, now)
        return self._announce()

    def _announce(self) -> list:
        directory = self.directory()
        return [DeliverFrame(peer, directory) for peer in (*self.gateways, *self.workers)]

    def _joined(self, event: e.WorkerJoined, now: float) -> list:
        if event.term > self.term:
            return self._outdated(e.NewerRouterReported(event.term), now)
        worker = self.fleet.join(event.card)
        self._index.drop(worker.slot)
        self._index.store(worker.slot, event.cached_hashes)
        self._hold(worker, event)
        self.binder.membership(self.settled, now)
        return [*self._announce(), *self._bind(now)]

    def _hold(self, worker: Worker, event: e.WorkerJoined) -> None:
        """Reserves what already runs there: streams of another router, or from before a
        connection broke."""
        for key in [k for k, w in self.held.items() if w is worker]:
            self._let_go(key)
        told = {(name, attempt) for name, attempt, _ in event.held_reservations}
        for key in worker.streams.keys() & self.bound.keys() - told:
            self.bound[key].ended |= self.bound[key].computed
        size = worker.card.block_tokens
        for name, attempt, blocks in event.held_reservations:
            key = (name, attempt)
            bound = self.bound.get(key)
            if key in worker.streams or (bound and bound.decode.card.id != worker.card.id):
                continue
            if key in self.line or blocks > worker.card.blocks - worker.reserved:
                continue
            self._let_go(key)
            self.fleet.reserve(worker, key, Stream(blocks, blocks, 0.75 * size * blocks))
            if bound:
                bound.decode = worker
            else:
                self.held[key] = worker

    def _let_go(self, key: AttemptKey) -> None:
        worker = self.held.pop(key, None)
        if worker:
            self.fleet.release(worker, key)

    def _lost(self, event: e.WorkerLost, now: float) -> list:
        worker = self.fleet.lose(event.worker)
        if worker is None:
            return []
        self._index.drop(worker.slot)
        self.binder.lost(worker)
        self.binder.membership(self.settled, now)
        for key in [k for k, w in self.held.items() if w is worker]:
            del self.held[key]
        return [*self._announce(), *self._bind(now)]

    def _gateway_lost(self, event: e.GatewayLost, now: float) -> list:
        gateway = event.gateway
        self.gateways.pop(gateway, None)
        for key in [k for k, w in self.line.by_key.items() if w.gateway == gateway]:
            self.line.leave(key)
        for key, bound in [(k, b) for k, b in self.bound.items() if b.gateway == gateway]:
            if bound.computed and bound.decode.alive and not bound.ended:
                del self.bound[key]  # it goes on if only the connection broke: its worker knows
                self.held[key] = bound.decode
            else:
                self._unbind(key, now)
        return self._bind(now)

    def _outdated(self, event: e.NewerRouterReported, now: float) -> list:
        if event.term <= self.term:
            return []
        self.active = False
        return [e.StepDown(event.term)]

    def _reported(self, event: e.WorkerReported, now: float) -> list:
        worker, report = self.workers.get(event.worker), event.report
        if worker is None:
            return []
        if report.seq != worker.seq + 1:
            return [e.DisconnectWorker(event.worker)]
        worker.seq = report.seq
        if report.evicted:
            self._index.evict(worker.slot, report.evicted)
        if report.stored:
            self._index.store(worker.slot, report.stored)
        relieved = self.fleet.report(worker, report)
        for key in report.ended:
            if key in self.held:
                self._let_go(key)
                relieved = True
            elif key in self.bound:
                self.bound[key].ended = True
        if self.held and report.free_blocks >= worker.card.blocks > 0 and not report.running:
            idle = [k for k, w in self.held.items() if w is worker]
            for key in idle:  # their end was told to nobody
                self._let_go(key)
            relieved |= bool(idle)
        return self._bind(now) if relieved else []

    # ---- requests --------------------------------------------------------------------------------

    def _asked(self, event: e.PlacementRequested, now: float) -> list:
        gateway, place = event.gateway, event.place
        bound = self.bound.get(place.attempt_key)
        if bound:  # the answer got lost
            return [DeliverFrame(gateway, bound.placed)]
        waiting = self.line.by_key.get(place.attempt_key)
        if waiting:  # it knows better now whom it has lost
            waiting.place = place
            waiting.picky = bool(place.lost_workers or place.avoided_workers)
            waiting.local = self.binder.is_local(place)
            self.binder.offer(waiting)
            return self._bind(now)
        if len(self.line) >= self.config.queue_max:
            message = f"{len(self.line)} requests wait already"
            return [self._refuse(gateway, place.attempt_key, "queue_full", message)]
        self._let_go(place.attempt_key)
        self._index.expire(now)
        waiting = self._waiting(gateway, place, now)
        if place.attempt_key[1] == 0:  # not again
            self._heard.append((waiting.prompt, waiting.whole - waiting.prompt, now))
        binding = self.binder.arrive(waiting, now)
        if binding:
            return [self._place(binding, now), *self._bind(now)]
        return self._bind(now)

    def _waiting(self, gateway: str, place: PlaceAttempt, now: float) -> Waiting:
        config = self.config
        known = config.classes.get(place.slo_class)
        ttft_s = place.ttft_s or config.ttft_s
        arrived = now - place.waited_s
        ttl_s, key = config.queue_ttl_s, place.attempt_key
        prompt, answers = place.prompt_tokens, place.answer_count
        output = self.lengths.expect(place.tenant, place.slo_class, place.max_tokens)
        return Waiting(
            gateway,
            key,
            place,
            known or next(iter(config.classes.values())),
            now,
            arrived,
            arrived + ttft_s,
            now + (ttl_s if ttl_s > ttft_s else ttft_s),
            place.itl_s or config.itl_s,
            sample(place.hashes),
            xxhash.xxh3_64_intdigest(f"{key[0]}|{key[1]}".encode(), config.seed),
            output,
            self.binder.is_local(place),
            prompt,
            bool(place.lost_workers or place.avoided_workers),
            answers * (prompt + output / 2),
            prompt + answers * output,
        )

    def _refuse(
        self, gateway: str, key: AttemptKey, reason: str, message: str, retry_after_s: float = 1.0
    ) -> DeliverFrame:
        self.refused += 1
        self.tally.refused[reason] += 1
        return DeliverFrame(gateway, AttemptRefused(key, reason, message, retry_after_s))

    def _bind(self, now: float) -> list:
        """Gives up those whose time is over, and places all who can be placed."""
        if not self.line:
            return []
        actions: list = []
        if self.line.next_expiry <= now:
            actions = [self._expired(waiting) for waiting in self.line.expired(now)]
        for decided in self.binder.bind(now):
            if isinstance(decided, Binding):
                actions.append(self._place(decided, now))
            else:
                actions.append(self._reject(decided, now))
        return actions

    def _expired(self, waiting: Waiting) -> DeliverFrame:
        waited = f"waited {waiting.expires - waiting.since:g} s for a worker"
        missing = self.binder.missing(waiting)
        if missing:
            message = f"{waited}: no {' or '.join(sorted(missing))} worker is up"
            return self._refuse(waiting.gateway, waiting.key, "no_capacity", message)
        message = f"{waited}: all are busy"
        return self._refuse(waiting.gateway, waiting.key, "deadline_exceeded", message)

    def _reject(self, rejection: Rejection, now: float) -> DeliverFrame:
        waiting, late_s = rejection.waiting, rejection.late_s
        message = f"the first token would be {late_s:.1f} s late"
        if self.config.decisions:
            number = self._decisions.next_number()
            self._record(number, waiting, now, len(self.line), note=message)
        retry_s = max(1.0, late_s)
        return self._refuse(waiting.gateway, waiting.key, "slo_unattainable", message, retry_s)

    def _place(self, binding: Binding, now: float) -> DeliverFrame:
        waiting, key = binding.waiting, binding.waiting.key
        ttft_s = now - waiting.arrived + binding.wait_s + binding.compute_s
        number = self._decisions.next_number() if self.config.decisions else 0
        self._to_tidy.append((binding, number, ttft_s, now, len(self.line)))
        placed = AttemptPlaced(
            key,
            self.term,
            binding.prefill.card.id if binding.prefill else None,
            binding.decode.card.id,
            binding.hit,
            (binding.wait_s + binding.compute_s) * 1e3,
            ttft_s * 1e3,
            binding.itl_s * 1e3,
            number,
            max(binding.due - now, 0.001) if binding.due else 0.0,
            binding.fetch.card.id if binding.fetch else None,
        )
        computes = binding.prefill or binding.decode
        self.bound[key] = Bound(waiting.gateway, waiting, computes, binding.decode, placed)
        self.placed += 1
        return DeliverFrame(waiting.gateway, placed)

    def _first_token(self, event: e.FirstTokenSent, now: float) -> list:
        key = event.attempt_key
        bound = self.bound.get(key)
        if bound is None or bound.computed:
            return []
        bound.computed = True
        self.tally.predicted(bound.placed.predicted_ttft_ms / 1e3, now - bound.waiting.arrived)
        worker = bound.prefill
        done = self.fleet.computed(worker, key, now)
        self.fleet.revisit(now)
        if done and bound.placed.prefill_worker and done[1] > 0:
            work, took = done
            self.binder.residuals.observe(took / work.seconds if work.seconds else 1.0)
            nominal = prefill_s(worker.cost, work.uncached, work.prompt)
            self.fleet.corrected(worker, took / nominal if nominal else 1.0, now)
        elif done and not bound.placed.prefill_worker:
            self.binder.offer_again()
        decision = self._decisions.get(key)
        if decision:
            decision.observed["ttft_ms"] = round(1e3 * (now - bound.waiting.arrived), 3)
        return self._bind(now)

    def _ended(self, event: e.AttemptEnded, now: float) -> list:
        self._over(event.attempt_key, event.outcome, now)
        return self._bind(now)

    def _over(self, key: AttemptKey, outcome: AttemptOutcome | None, now: float) -> None:
        bound = self.bound.get(key)
        self._let_go(key)
        self._unbind(key, now)
        if outcome is None:
            return
        if bound and outcome.tokens and outcome.reason in ("stop", "length"):
            place = bound.waiting.place
            self.lengths.observe(place.tenant, place.slo_class, outcome.tokens / place.answer_count)
        decision = self._decisions.get(key)
        if decision:
            seen = {"tokens": outcome.tokens, "reason": outcome.reason}
            for name in ("ttft_ms", "itl_p99_ms"):
                value = getattr(outcome, name)
                if value is not None:
                    seen[name] = round(value, 3)
            decision.observed.update(seen)

    def _unbind(self, key: AttemptKey, now: float) -> None:
        self.line.leave(key)
        bound = self.bound.pop(key, None)
        if bound:
            self.fleet.withdrawn(bound.prefill, key, now)
            self.fleet.release(bound.decode, key)

    # ---- explain ---------------------------------------------------------------------------------

    def _record(
        self,
        number: int,
        waiting: Waiting,
        now: float,
        in_line: int,
        binding: Binding | None = None,
        ttft_s: float = 0.0,
        note: str = "",
    ) -> None:
        """Notes a placement or a refusal."""
        place = waiting.place
        told = (
            number,
            now,
            waiting.key,
            self.config.policy,
            binding.kind if binding else "refused",
            waiting.prompt,
            place.slo_class,
            place.tenant,
            waiting.deadline - waiting.arrived,
            waiting.itl_s,
            now - waiting.arrived,
            in_line,
        )
        if binding is None:
            self._decisions.add(Decision(*told, note=note, session=place.session))
            return
        binding.name_options()
        decision = Decision(
            *told,
            binding.prefill.card.id if binding.prefill else None,
            binding.decode.card.id,
            binding.fetch.card.id if binding.fetch else None,
            binding.hit,
            list(binding.passed_over),
            list(binding.prefill_options),
            list(binding.decode_options),
            len(self.fleet.decodes) - len(binding.decode_options),
            note,
            binding.wait_s,
            binding.compute_s,
            ttft_s,
            binding.itl_s,
            binding.exposed_s,
            session=place.session,
        )
        self._decisions.add(decision)

    def statistics(self, now: float | None = None) -> dict:
        """`now`: goodput's window ends there, not at the last event."""
        now = self._now if now is None else now
        self.tidy()
        self.goodput.forget(now)
        return {
            "term": self.term,
            "active": self.active,
            "policy": self.config.policy,
            "waiting": len(self.line),
            "late": len(self.line.late),
            "bound": len(self.bound),
            "placed": self.placed,
            "refused": self.refused,
            "hit_tokens": self.hit_tokens,
            "prompt_tokens": self.prompt_tokens,
            "index_entries": len(self._index),
            "decisions": self._decisions.count,
            "goodput": self.goodput.statistics(),
            "outlook": outlook(self.demand, self.fleet, now),
        }

    def __repr__(self) -> str:
        roles = [worker.card.role for worker in self.workers.values()]
        return (
            f"<Router term {self.term}: {roles.count('prefill')} prefill, "
            f"{roles.count('decode')} decode | {len(self.bound)} bound, "
            f"{len(self.line)} waiting>"
        )
