"""One process of a run: offers requests, keeps their outcomes. The shell between plan and Locust.

Life of a run:

1. `offer` is called by the one user of an open loop, or `converse` by every user of a chat load. In
   an open loop requests are sent at planned times, whatever becomes of those before.
2. Each request is a `LoadOutcome`: under way, then ended.
3. The run is `done` when all arrivals were offered, or its time is over, and nothing is under way.

No request outlives duration + drain, in seconds: then it is cut, and counts as unfinished.
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

from .arrivals import Arrival, RateStage, planned_arrivals, rate_stages
from .endpoint import EndpointFacts, HttpLoadClient
from .outcomes import LoadOutcome
from .plan import LoadPlan

SYSTEM_PROMPTS = 4  #: of the chat load: sessions with the same one share a prefix
MEAN_TURNS = 4.0  #: of a session
KNEE_SHARE = 0.5  #: a ramp ends behind a stage of which less is met
SLICE_S = 0.5  #: the longest wait between two looks at whether the run is being stopped
UNFINISHED = "unfinished"  #: the error of a request that was cut

ChatMessage = dict[str, str]  #: `role` and `content`, as in OpenAI's API
IsStopping = Callable[[], bool]  #: whether somebody stops the run before its time
OnEnd = Callable[[LoadOutcome, RateStage], None]


class ChatClient(Protocol):
    """Whatever sends requests to the endpoint: by HTTP, or by gRPC."""

    def chat(self, outcome: LoadOutcome, messages: list[ChatMessage], tokens: int) -> str:
        """Sends a request for `tokens` tokens, fills in its outcome, returns the answer's text."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessShare:
    """Which part of the arrivals is this process's: every `count`-th, beginning at `index`."""

    index: int = 0
    count: int = 1


@dataclass(slots=True)
class StageTally:
    """The requests of a stage that have ended."""

    met: int = 0
    ended: int = 0


class LoadRun:
    """Offers `plan` to the endpoint of `facts`; calls `on_end` when a request has ended."""

    def __init__(
        self,
        plan: LoadPlan,
        facts: EndpointFacts,
        share: ProcessShare,
        key: str,
        on_end: OnEnd,
        name: str,
    ) -> None:
        """`key` is the endpoint's API key; empty: none. Request ids begin with `name`.

        The run's clock starts here.
        """
        self.plan = plan
        self.facts = facts
        self.stages: list[RateStage] = rate_stages(plan)
        self.outcomes: list[LoadOutcome] = []  #: ended, and not fetched yet
        self.under_way: dict[str, LoadOutcome] = {}  #: by request id
        self.offering = False  #: True from the first `offer` on
        self._share = share
        self._on_end = on_end
        self._name = name
        self._words = facts.words(plan.seed)
        self._client = self._connect(key)
        self._sessions = Group()  #: the greenlets of an open loop
        self._number = 0  #: of the latest request
        self._user_number = 0  #: of the latest user
        self._active_users = 0  #: Locust's users that have not ended their part
        self._tallies = [StageTally() for _ in self.stages]
        self._targets = plan.targets
        self._own_arrivals: list[Arrival] = []
        if plan.load != "chat":
            fitting = [arrival for arrival in planned_arrivals(plan) if self.fits(arrival)]
            self._own_arrivals = fitting[share.index :: share.count]
        self._began = time.perf_counter()
        self._cpu_began = time.process_time()

    def _connect(self, key: str) -> ChatClient:
        if not self.plan.grpc:
            return HttpLoadClient(self.facts, key)
        from .rpc import GrpcLoadClient

        return GrpcLoadClient(self.facts, key)

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._began

    @property
    def done(self) -> bool:
        """Whether this process has ended its part of the run."""
        if self._active_users or self.under_way or len(self._sessions):
            return False
        return self.offering or self.now >= self.plan.duration

    @property
    def usage(self) -> tuple[float, float]:
        """Returns the CPU seconds and the wall seconds so far."""
        return time.process_time() - self._cpu_began, self.now

    def fetch(self) -> list[LoadOutcome]:
        """Returns the outcomes that ended since the last call."""
        fetched = self.outcomes
        self.outcomes = []
        return fetched

    def cut(self) -> None:
        """Ends the requests that are under way, with the error `UNFINISHED`."""
        self._sessions.kill()
        for outcome in list(self.under_way.values()):
            self._end(outcome, UNFINISHED)

    # ---- open loop -------------------------------------------------------------------------------

    def offer(self, stopping: IsStopping) -> None:
        """Sends every arrival of this process at its time; returns when all have ended.

        A second user has nothing to do. A ramp ends early, behind its knee: the stage of which too
        little was met.
        """
        if self.offering:
            return
        self.offering = True
        self._active_users += 1
        try:
            stage_index = 0
            for arrival in self._own_arrivals:
                if not self._wait_until(arrival.arrival_s, stopping):
                    break
                if arrival.stage_index != stage_index and self._is_beyond_knee(stage_index):
                    break
                stage_index = arrival.stage_index
                self._sessions.spawn(self._run_session, arrival)
            self._sessions.join()
        finally:
            self._active_users -= 1

    def fits(self, arrival: Arrival) -> bool:
        """Returns whether the model's context has room for the prompt and the answer."""
        return arrival.prompt_tokens + arrival.output_tokens <= self.facts.context

    def _wait_until(self, time_s: float, stopping: IsStopping) -> bool:
        """Returns False, without further waiting, when the run is being stopped."""
        while (left_s := time_s - self.now) > 0:
            if stopping():
                return False
            gevent.sleep(min(left_s, SLICE_S))
        return not stopping()

    def _is_beyond_knee(self, stage_index: int) -> bool:
        """Returns whether too little of a stage was met for a higher rate to be worth trying.

        It is judged by the requests of this process that have ended.
        """
        tally = self._tallies[stage_index]
        if self.plan.load != "ramp" or not tally.ended:
            return False
        return tally.met / tally.ended < KNEE_SHARE

    def _run_session(self, first_turn: Arrival) -> None:
        """Sends an arrival, then each next turn of its session once the one before has ended.

        A session ends with a turn that failed, before one that the context has no room for, or
        when the run's time is over.
        """
        turn: Arrival | None = first_turn
        sent_at_s = first_turn.arrival_s
        while turn is not None and sent_at_s < self.plan.duration:
            message = _message("user", self._words.text(turn))
            outcome = self._new_outcome(sent_at_s, turn.stage_index, turn.prompt_tokens)
            self._ask(outcome, [message], turn.output_tokens)
            turn = turn.next_turn
            if outcome.error or turn is None or not self.fits(turn):
                return
            sent_at_s = self.now + turn.think_s
            if sent_at_s < self.plan.duration:
                gevent.sleep(turn.think_s)

    # ---- chat ------------------------------------------------------------------------------------

    def converse(self, stopping: IsStopping) -> None:
        """Acts as one user: sessions of turns, with time to think, until the run's time is over.

        Users begin at random moments of the first `think` seconds, so that they do not go in step.
        """
        self._user_number += 1
        rng = random.Random(f"{self.plan.seed}/user/{self._share.index}/{self._user_number}")
        self._active_users += 1
        try:
            first_turn_s = min(self.plan.duration, rng.random() * self.plan.think)
            if self._wait_until(first_turn_s, stopping):
                while self.now < self.plan.duration and not stopping():
                    self._talk(rng, stopping)
                    gevent.sleep(0)  # a turn may have had no room at all
        finally:
            self._active_users -= 1

    def _talk(self, rng: random.Random, stopping: IsStopping) -> None:
        """Runs a session: its turns, until it ends by chance, by an error, or for want of room."""
        plan = self.plan
        template = self._words.template  # tokens that the chat template adds to a message, about
        messages: list[ChatMessage] = []
        prompt_tokens = template
        if plan.shared:
            system_prompt = f"system {rng.randrange(SYSTEM_PROMPTS)}"
            messages.append(_message("system", self._words.message(system_prompt, plan.shared)))
            prompt_tokens += plan.shared + template

        while self.now < plan.duration:
            message_tokens = plan.prompts.draw(rng)
            answer_tokens = plan.outputs.draw(rng)
            prompt_tokens += message_tokens + template
            if prompt_tokens + answer_tokens > self.facts.context:
                return
            text = self._words.message(f"message {rng.getrandbits(48)}", message_tokens)
            messages.append(_message("user", text))
            outcome = self._new_outcome(self.now, 0, prompt_tokens)
            answer = self._ask(outcome, messages, answer_tokens)

            think_s = rng.expovariate(1 / plan.think) if plan.think else 0.0
            next_turn_s = min(plan.duration, self.now + think_s)
            if not self._wait_until(next_turn_s, stopping) or outcome.error:
                return
            if rng.random() < 1 / MEAN_TURNS:
                return
            # The outcome has the server's own count by now.
            prompt_tokens = outcome.prompt_tokens + outcome.output_tokens
            messages.append(_message("assistant", answer))

    # ---- one request -----------------------------------------------------------------------------

    def _new_outcome(self, arrival_s: float, stage_index: int, prompt_tokens: int) -> LoadOutcome:
        self._number += 1
        return LoadOutcome(
            id=f"{self._name}-{self._share.index}-{self._number}",
            arrival_s=arrival_s,
            sent_s=self.now,
            stage_index=stage_index,
            prompt_tokens=prompt_tokens,
        )

    def _ask(self, outcome: LoadOutcome, messages: list[ChatMessage], tokens: int) -> str:
        """Sends a request and waits for its end; returns the answer's text."""
        self.under_way[outcome.id] = outcome
        left_s = self.plan.duration + self.plan.drain - self.now
        error = UNFINISHED
        text = ""
        with gevent.Timeout(max(0.01, left_s), False):  # False: the block ends without an error
            text = self._client.chat(outcome, messages, tokens)
            error = outcome.error
        self._end(outcome, error)
        return text

    def _end(self, outcome: LoadOutcome, error: str) -> None:
        """Notes the end of a request; one that failed has no latencies."""
        outcome.error = error
        if error:
            outcome.ttft_s = math.nan
            outcome.e2e_s = math.nan
            outcome.gaps_s = []
        self.under_way.pop(outcome.id, None)
        self.outcomes.append(outcome)
        tally = self._tallies[outcome.stage_index]
        tally.ended += 1
        if not outcome.missed(self._targets):
            tally.met += 1
        self._on_end(outcome, self.stages[outcome.stage_index])


def _message(role: str, text: str) -> ChatMessage:
    return {"role": role, "content": text}
