"""One process of a run: offers requests, keeps their outcomes. The shell between plan and Locust.

Life of a run: `begin` -> `offer` by the first user of an open loop, or `converse` by every user of
a chat load -> each request is an `Outcome`, under way, then done -> `done` when the time is over
and nothing is under way. No request outlives duration + drain: it is cut and counts as unfinished.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import gevent
from gevent.pool import Group

from .arrivals import Arrival, Stage, arrivals, stages
from .endpoint import Client, Facts
from .outcomes import Outcome
from .plan import Plan
from .prompts import Words

SYSTEMS = 4  #: system prompts of the chat load
TURNS = 4.0  #: of a session, on average
KNEE = 0.5  #: a ramp ends behind a stage of which less is met
SLICE_S = 0.5


class Streams(Protocol):
    def chat(self, outcome: Outcome, messages: list[dict[str, str]], tokens: int) -> str: ...


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of the arrivals is this process's."""

    index: int = 0
    count: int = 1


class Run:
    """Offers `plan` to the endpoint of `facts`; `told(outcome, stage)` hears of every end."""

    def __init__(
        self, plan: Plan, facts: Facts, share: Share, key: str, told: Callable, name: str
    ) -> None:
        self.plan, self.facts, self._share, self._told = plan, facts, share, told
        self.stages: list[Stage] = stages(plan)
        self._words: Words = facts.words(plan.seed)
        self._client = self._connect(key)
        self._name = name
        self._group = Group()
        self._count = 0
        self._users = 0
        self._met = [[0, 0] for _ in self.stages]  #: met and offered
        self.outcomes: list[Outcome] = []  #: that nobody has fetched yet
        self.under_way: dict[str, Outcome] = {}
        self.offering = False
        self._slo = plan.targets
        every = [] if plan.load == "chat" else [one for one in arrivals(plan) if self.fits(one)]
        self._mine = every[share.index :: share.count]
        self.begun = time.perf_counter()
        self.cpu_begun = time.process_time()

    def _connect(self, key: str) -> Streams:
        if not self.plan.grpc:
            return Client(self.facts, key)
        from .rpc import GrpcClient

        return GrpcClient(self.facts, key)

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.begun

    @property
    def done(self) -> bool:
        over = self.now >= self.plan.duration or (self.offering and not self._users)
        return over and not self._users and not self.under_way and not len(self._group)

    @property
    def usage(self) -> tuple[float, float]:
        """CPU and wall seconds so far."""
        return time.process_time() - self.cpu_begun, self.now

    def fetch(self) -> list[Outcome]:
        found, self.outcomes = self.outcomes, []
        return found

    def cut(self) -> None:
        """Ends what is under way."""
        self._group.kill()
        for outcome in list(self.under_way.values()):
            self._end(outcome, "unfinished")

    # ---- open loop -------------------------------------------------------------------------------

    def offer(self, stopping: Callable[[], bool]) -> None:
        """Every arrival of this process at its time; returns when all have ended."""
        if self.offering:
            return
        self.offering = True
        self._users += 1
        try:
            stage = 0
            for one in self._mine:
                if not self._wait(one.at, stopping) or self._beyond_knee(stage, one.stage):
                    break
                stage = one.stage
                self._group.spawn(self._session, one)
            self._group.join()
        finally:
            self._users -= 1

    def fits(self, arrival: Arrival) -> bool:
        return arrival.prompt + arrival.output <= self.facts.context

    def _wait(self, at: float, stopping: Callable[[], bool]) -> bool:
        while (left := at - self.now) > 0:
            if stopping():
                return False
            gevent.sleep(min(left, SLICE_S))
        return not stopping()

    def _beyond_knee(self, before: int, stage: int) -> bool:
        if self.plan.load != "ramp" or stage == before:
            return False
        met, ended = self._met[before]
        return ended > 0 and met / ended < KNEE

    def _session(self, arrival: Arrival | None) -> None:
        at = arrival.at if arrival else 0.0
        while arrival and at < self.plan.duration:
            text = self._words.text(arrival)
            said = [_said("user", text)]
            self._ask(at, arrival.stage, said, arrival.output, arrival.prompt)
            arrival = arrival.then
            if arrival:
                at = self.now + arrival.think_s
                gevent.sleep(arrival.think_s)

    # ---- chat ------------------------------------------------------------------------------------

    def converse(self, stopping: Callable[[], bool]) -> None:
        """One user: sessions of turns, with time to think, until the run's time is over."""
        self._count += 1
        rng = random.Random(f"{self.plan.seed}/user/{self._share.index}/{self._count}")
        self._users += 1
        try:
            first = min(self.plan.duration, rng.random() * self.plan.think)
            if self._wait(first, stopping):
                while self.now < self.plan.duration and not stopping():
                    self._talk(rng, stopping)
                    gevent.sleep(0)  # a turn may have had no room at all
        finally:
            self._users -= 1

    def _talk(self, rng: random.Random, stopping: Callable[[], bool]) -> None:
        plan, words = self.plan, self._words
        messages, used = [], words.template
        if plan.shared:
            system = words.message(f"system {rng.randrange(SYSTEMS)}", plan.shared)
            messages, used = [_said("system", system)], used + plan.shared + words.template
        while self.now < plan.duration:
            tokens, answer = rng.randint(*plan.prompts), rng.randint(*plan.outputs)
            used += tokens + words.template
            if used + answer > self.facts.context:
                return
            text = words.message(f"message {rng.getrandbits(48)}", tokens)
            messages.append(_said("user", text))
            outcome, text = self._ask(self.now, 0, messages, answer, used)
            think_s = rng.expovariate(1 / plan.think) if plan.think else 0.0
            stopped = not self._wait(min(plan.duration, self.now + think_s), stopping)
            if stopped or outcome.error or rng.random() < 1 / TURNS:
                return
            used = outcome.prompt + outcome.output
            messages.append(_said("assistant", text))

    # ---- one request -----------------------------------------------------------------------------

    def _ask(
        self, at: float, stage: int, messages: list[dict[str, str]], tokens: int, prompt: int
    ) -> tuple[Outcome, str]:
        self._count += 1
        name = f"{self._name}-{self._share.index}-{self._count}"
        outcome = Outcome(name, at, self.now, stage, prompt)
        self.under_way[name] = outcome
        left = self.plan.duration + self.plan.drain - self.now
        error, text = "unfinished", ""
        with gevent.Timeout(max(0.01, left), False):
            text = self._client.chat(outcome, messages, tokens)
            error = outcome.error
        self._end(outcome, error)
        return outcome, text

    def _end(self, outcome: Outcome, error: str) -> None:
        outcome.error = error
        if error:
            outcome.ttft_s = outcome.e2e_s = math.nan
            outcome.gaps_s = []
        self.under_way.pop(outcome.id, None)
        self.outcomes.append(outcome)
        cell = self._met[outcome.stage]
        cell[0] += not outcome.missed(self._slo)
        cell[1] += 1
        self._told(outcome, self.stages[outcome.stage])


def _said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}
