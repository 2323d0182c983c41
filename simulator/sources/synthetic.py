"""Traces from a seed, so that everything runs without public traces.

`generate` draws tenants with system prompts, sessions that grow, and bursts:

* Tenants are Zipf(1) distributed. Each has a system prompt.
* A session goes on with probability 0.6, after a think time of 20 s on average. A turn adds a
  log-normal message to all that was said.
* Sessions start in a two-state Poisson process: bursts of 4 times the base rate, one tenth of the
  time.

`poisson` draws requests with uniform lengths that share nothing.
"""

from __future__ import annotations

import heapq
import random
from typing import NamedTuple

from ..errors import SimulationError
from ..trace import HASH_TOKENS, Trace, TraceRequest

GENERATORS = ("synthetic", "poisson")  #: first words of the sources that `parse_source` takes
SYNTHETIC_REQUESTS = 4000  #: where the source names no count
POISSON_REQUESTS = 600  #: where the source names no count
TENANTS = 8
PROMPT_LIMIT = 65536  #: tokens; a session ends when its prompt reaches them
OUTPUT_LIMIT = 2000  #: tokens; a longer answer is cut
TOKEN_S = 0.03  #: from one token of an answer to the next, when a session's next turn is timed
NEXT_TURN_PROBABILITY = 0.6  #: after each turn
THINK_S = 20.0  #: mean seconds between an answer and the session's next turn
SESSIONS_PER_S = 1.4  #: new ones, outside of bursts
BURST_FACTOR = 4.0  #: times as many sessions start a second in a burst
BURST_S = 6.0  #: mean seconds of a burst
CALM_S = 54.0  #: mean seconds between two bursts


class TokenRange(NamedTuple):
    """Uniformly distributed token counts."""

    low: int
    high: int  #: included

    def draw(self, rng: random.Random) -> int:
        """Return one count."""
        return rng.randint(self.low, self.high)


class LogNormalTokens(NamedTuple):
    """Log-normally distributed token counts."""

    mu: float  #: mean of the logarithm: the median is exp(mu)
    sigma: float  #: standard deviation of the logarithm

    def draw(self, rng: random.Random) -> int:
        """Return one count, rounded down; it may be 0."""
        return int(rng.lognormvariate(self.mu, self.sigma))


SYSTEM_TOKENS = TokenRange(512, 4096)  #: of a tenant's system prompt
MESSAGE_TOKENS = LogNormalTokens(mu=6.8, sigma=1.1)  #: their median is 900
ANSWER_TOKENS = LogNormalTokens(mu=5.3, sigma=0.7)  #: their median is 200


class SessionTurn(NamedTuple):
    """The next turn of a session. Turns are ordered by arrival, then by session."""

    arrival_s: float
    session: int
    tenant: int
    history_tokens: int  #: the system prompt, and all that was said


def parse_source(source: str, seed: int = 0) -> Trace:
    """Return the trace of `synthetic[:REQUESTS]` or `poisson:LOW-HIGH:LOW-HIGH[:REQUESTS]`.

    Raises SimulationError.
    """
    kind, *parts = source.split(":")
    try:
        if kind == "synthetic":
            (count_text,) = parts or (str(SYNTHETIC_REQUESTS),)
            return generate(int(count_text), seed)
        prompt_range, output_range = (_parse_range(part) for part in parts[:2])
        count = int(parts[2]) if parts[2:] else POISSON_REQUESTS
        return poisson(prompt_range, output_range, count, seed)
    except ValueError:
        raise SimulationError(
            f"trace {source}: expected synthetic[:REQUESTS] or "
            "poisson:LOW-HIGH:LOW-HIGH[:REQUESTS], with a LOW of 1 or more"
        ) from None


def _parse_range(text: str) -> TokenRange:
    """Return the range `LOW-HIGH`. Raises ValueError, also for a range that begins below 1."""
    low, high = (int(number) for number in text.split("-"))
    if low < 1:
        raise ValueError(text)
    return TokenRange(low, high)


def poisson(prompt_range: TokenRange, output_range: TokenRange, count: int, seed: int) -> Trace:
    """Return requests of uniform lengths that share nothing, one a second on average."""
    rng = random.Random(f"poisson/{seed}")
    arrival_s = 0.0
    requests: list[TraceRequest] = []
    for _ in range(count):
        arrival_s += rng.expovariate(1.0)
        prompt_tokens = prompt_range.draw(rng)
        output_tokens = output_range.draw(rng)
        requests.append(TraceRequest(arrival_s, prompt_tokens, output_tokens))
    return Trace(f"poisson-{count}", requests, HASH_TOKENS, span_s=float(count))


def generate(count: int, seed: int = 0) -> Trace:
    """Return `count` requests of tenants' sessions; equal arguments give an equal trace."""
    rng = random.Random(f"synthetic/{seed}")
    weights = [1 / (rank + 1) for rank in range(TENANTS)]
    system_tokens = [SYSTEM_TOKENS.draw(rng) for _ in range(TENANTS)]
    turns: list[SessionTurn] = []  #: a heap
    for session, arrival_s in enumerate(_session_starts_s(count, rng)):
        tenant = rng.choices(range(TENANTS), weights)[0]
        heapq.heappush(turns, SessionTurn(arrival_s, session, tenant, system_tokens[tenant]))

    requests: list[TraceRequest] = []
    while turns and len(requests) < count:
        turn = heapq.heappop(turns)
        message_tokens = max(8, MESSAGE_TOKENS.draw(rng))
        prompt_tokens = min(PROMPT_LIMIT, turn.history_tokens + message_tokens)
        output_tokens = min(OUTPUT_LIMIT, max(2, ANSWER_TOKENS.draw(rng)))
        requests.append(
            _turn_request(turn, system_tokens[turn.tenant], prompt_tokens, output_tokens)
        )
        if prompt_tokens < PROMPT_LIMIT and rng.random() < NEXT_TURN_PROBABILITY:
            answered_s = turn.arrival_s + output_tokens * TOKEN_S
            next_turn = turn._replace(
                arrival_s=answered_s + rng.expovariate(1 / THINK_S),
                history_tokens=prompt_tokens + output_tokens,
            )
            heapq.heappush(turns, next_turn)
    return Trace(f"synthetic-{count}", requests, HASH_TOKENS)


def _session_starts_s(count: int, rng: random.Random) -> list[float]:
    """Return when `count` sessions start, in seconds.

    A phase, burst or calm, ends at the first start after its drawn end.
    """
    starts_s: list[float] = []
    now_s = 0.0
    phase_end_s = rng.expovariate(1 / CALM_S)
    bursting = False
    while len(starts_s) < count:
        now_s += rng.expovariate(SESSIONS_PER_S * (BURST_FACTOR if bursting else 1.0))
        if now_s > phase_end_s:
            bursting = not bursting
            phase_end_s = now_s + rng.expovariate(1 / (BURST_S if bursting else CALM_S))
        starts_s.append(now_s)
    return starts_s


def _turn_request(
    turn: SessionTurn, system_tokens: int, prompt_tokens: int, output_tokens: int
) -> TraceRequest:
    """Return a turn as a request: the system prompt's block ids are the tenant's, others its own.

    The last block of the system prompt is shared only if it is full.
    """
    shared_blocks = system_tokens // HASH_TOKENS
    full_prompt_blocks = prompt_tokens // HASH_TOKENS
    tenant_ids = turn.tenant << 20
    session_ids = (turn.session + 1) << 24 | 1 << 23
    block_ids = tuple(
        (tenant_ids if index < shared_blocks else session_ids) | index
        for index in range((prompt_tokens + output_tokens) // HASH_TOKENS)
    )
    return TraceRequest(
        arrival_s=turn.arrival_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prompt_blocks=block_ids[:full_prompt_blocks],
        tenant=f"tenant{turn.tenant}",
        answer_blocks=block_ids[full_prompt_blocks:],
    )
