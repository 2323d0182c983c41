"""The requests of a cell (pure): equal options and seed, equal requests, whoever serves them.

A cell is one measurement, of a fresh server under one load. It offers one of three loads:

* `PoissonLoad`: an open loop. Arrivals never wait for answers.
* `ClosedLoad`: `users` users, each of whom sends the next request as soon as the answer before has
  ended. How many requests end per second is the server's capacity.
* `ChatLoad`: sessions whose history grows. A turn waits for the answer of the one before.

Texts are made by `Words`, so that lengths are exact. An arrival is the load test's own: when a
request is sent, how many tokens its prompt and its answer have, and the index that makes its text.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from ....loadtests.arrivals import Arrival
from ....loadtests.prompts import Words

#: Added to a load's seed when the lengths of its warm-up are drawn: with the load's own seed they
#: would be those of its first requests. That the texts differ too is the client's part: it makes
#: them with other `Words`.
WARM_UP_SEED_OFFSET = 10_007
SESSION_START_S = 1.0  #: mean seconds from the start of one chat to that of the next


class LengthRange(msgspec.Struct, frozen=True):
    """Uniform numbers of tokens, both ends included."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low}-{self.high}"


class PoissonLoad(msgspec.Struct, frozen=True, tag="poisson"):
    """`requests` requests that arrive on average `rate` times a second."""

    rate: float
    requests: int
    prompt: LengthRange  #: of a prompt, with the tokens that the chat template adds
    output: LengthRange  #: of an answer
    seed: int


class ClosedLoad(msgspec.Struct, frozen=True, tag="closed"):
    """`users` users for `seconds` seconds, each with one request at a time."""

    users: int
    seconds: float
    prompt: LengthRange
    output: LengthRange
    seed: int


class ChatLoad(msgspec.Struct, frozen=True, tag="chat"):
    """`sessions` chats of `turns` turns: `prompt` tokens in the first, `message` in later ones."""

    sessions: int
    turns: int
    prompt: LengthRange
    message: LengthRange
    output: LengthRange
    think_s: float  #: mean seconds between an answer and the next message
    seed: int


Load = PoissonLoad | ClosedLoad | ChatLoad


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A user's message: what it adds to the prompt, when it is sent, and how long its answer is."""

    name: str  #: which, with `message_tokens`, decides the message's text
    message_tokens: int
    output_tokens: int
    think_s: float  #: after the answer of the turn before; of the first turn 0


@dataclass(frozen=True, slots=True)
class ChatSession:
    """One chat of a `ChatLoad`."""

    start_s: float  #: seconds from the load's start to the first turn
    turns: tuple[ChatTurn, ...]


def poisson_arrivals(load: PoissonLoad) -> list[Arrival]:
    """Return the arrivals of an open loop, by time."""
    rng = random.Random(f"{load.seed}/live")
    arrivals: list[Arrival] = []
    time_s = 0.0
    for index in range(load.requests):
        time_s += rng.expovariate(load.rate)
        arrivals.append(_arrival(rng, load.prompt, load.output, index=index, arrival_s=time_s))
    return arrivals


def closed_requests(load: ClosedLoad) -> Iterator[Arrival]:
    """Yield the requests of a closed loop without end, in the order in which they are sent."""
    rng = random.Random(f"{load.seed}/live")
    for index in itertools.count():
        yield _arrival(rng, load.prompt, load.output, index=index, arrival_s=0.0)


def _arrival(
    rng: random.Random, prompt: LengthRange, output: LengthRange, *, index: int, arrival_s: float
) -> Arrival:
    return Arrival(
        arrival_s=arrival_s,
        prompt_tokens=rng.randint(prompt.low, prompt.high),
        output_tokens=rng.randint(output.low, output.high),
        index=index,
    )


def chat_sessions(load: ChatLoad) -> list[ChatSession]:
    """Return the chats, by the time at which they start."""
    rng = random.Random(f"{load.seed}/chats")
    sessions: list[ChatSession] = []
    start_s = 0.0
    for session in range(load.sessions):
        start_s += rng.expovariate(1 / SESSION_START_S)
        turns: list[ChatTurn] = []
        for number in range(load.turns):
            message = load.message if number else load.prompt
            turn = ChatTurn(
                name=f"session {session} turn {number}",
                message_tokens=rng.randint(message.low, message.high),
                output_tokens=rng.randint(load.output.low, load.output.high),
                think_s=rng.expovariate(1 / load.think_s) if number and load.think_s else 0.0,
            )
            turns.append(turn)
        sessions.append(ChatSession(start_s, tuple(turns)))
    return sessions


def warm_up_requests(load: Load, count: int) -> list[Arrival]:
    """Return `count` requests with lengths like the load's, to be sent at once."""
    rng = random.Random(f"{load.seed + WARM_UP_SEED_OFFSET}/live")
    return [
        _arrival(rng, load.prompt, load.output, index=index, arrival_s=0.0)
        for index in range(count)
    ]


def offered_seconds(load: Load) -> float:
    """Return about how long requests are offered.

    For chats this is the time until all sessions have started, plus one session's pauses: how long
    servers take to answer the turns is not known before.
    """
    match load:
        case PoissonLoad():
            return load.requests / load.rate
        case ClosedLoad():
            return load.seconds
        case ChatLoad():
            return load.sessions * SESSION_START_S + load.turns * load.think_s


def digest(load: Load, words: Words) -> str:
    """Return a hash of all that the load sends, so that two servers' requests can be compared.

    The hash leaves out what differs between servers. Of a closed loop, whose number of requests
    depends on the server's speed, it has only the first one's text. Of chats it has the users'
    messages, without the answers that are sent back with later turns.
    """
    hasher = hashlib.sha256(msgspec.json.encode(load))
    hasher.update(" ".join(words.alphabet).encode())
    match load:
        case PoissonLoad():
            for arrival in poisson_arrivals(load):
                hasher.update(f"{arrival.arrival_s} {arrival.output_tokens} ".encode())
                hasher.update(words.text(arrival).encode())
        case ClosedLoad():
            hasher.update(words.text(next(closed_requests(load))).encode())
        case ChatLoad():
            for session in chat_sessions(load):
                for turn in session.turns:
                    hasher.update(f"{session.start_s} {turn}".encode())
                    hasher.update(words.message(turn.name, turn.message_tokens).encode())
    return hasher.hexdigest()[:16]
