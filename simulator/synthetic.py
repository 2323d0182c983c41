"""A trace from a seed: tenants with system prompts, sessions that grow, bursts.

Committed so that everything runs without public traces. Tenants are Zipf(1); a session goes on with
probability 0.6 after a think time of 20 s on average; a turn adds a log-normal message to all that
was said; session starts come in a two-state Poisson process (bursts of 4 times the base rate,
one tenth of the time).
"""

from __future__ import annotations

import heapq
import random

from .errors import SimulationError
from .trace import HASH_TOKENS, Item, Trace

TENANTS = 8
SYSTEM_TOKENS = (512, 4096)  #: of a tenant's system prompt
MESSAGE = (6.8, 1.1)  #: log-normal tokens of a message: median 900
ANSWER = (5.3, 0.7)  #: log-normal tokens of an answer: median 200
LONGEST = 65536
GO_ON = 0.6
THINK_S = 20.0
SESSIONS_PER_S = 1.4
BURST, BURST_S, CALM_S = 4.0, 6.0, 54.0


def named(source: str, seed: int = 0) -> Trace:
    """`synthetic[:REQUESTS]` or `poisson:LOW-HIGH:LOW-HIGH[:REQUESTS]`."""
    kind, *parts = source.split(":")
    try:
        if kind == "synthetic" and len(parts) <= 1:
            return generate(int(parts[0]) if parts else 4000, seed)
        lengths = [tuple(int(x) for x in part.split("-")) for part in parts[:2]]
        (low, high), (least, most) = lengths
        return poisson((low, high), (least, most), int(parts[2]) if parts[2:] else 600, seed)
    except ValueError:
        raise SimulationError(
            f"trace {source}: expected synthetic[:REQUESTS] or poisson:LOW-HIGH:LOW-HIGH[:REQUESTS]"
        ) from None


def poisson(prompt: tuple[int, int], output: tuple[int, int], count: int, seed: int) -> Trace:
    """Uniform lengths, nothing shared, one request per second."""
    rng = random.Random(f"poisson/{seed}")
    at, items = 0.0, []
    for _ in range(count):
        at += rng.expovariate(1.0)
        items.append(Item(at, rng.randint(*prompt), rng.randint(*output)))
    return Trace(f"poisson-{count}", items, HASH_TOKENS, span_s=float(count))


def generate(count: int, seed: int = 0) -> Trace:
    """`count` requests; equal arguments, equal trace."""
    rng = random.Random(f"synthetic/{seed}")
    weights = [1 / (rank + 1) for rank in range(TENANTS)]
    systems = [rng.randint(*SYSTEM_TOKENS) for _ in range(TENANTS)]
    heap: list[tuple[float, int, int, int, int]] = []  #: time, session, tenant, history, output
    for session, at in enumerate(_starts(count, rng)):
        tenant = rng.choices(range(TENANTS), weights)[0]
        heapq.heappush(heap, (at, session, tenant, systems[tenant], 0))
    items: list[Item] = []
    while heap and len(items) < count:
        at, session, tenant, history, _ = heapq.heappop(heap)
        prompt = min(LONGEST, history + max(8, int(rng.lognormvariate(*MESSAGE))))
        output = min(2000, max(2, int(rng.lognormvariate(*ANSWER))))
        items.append(_item(at, session, tenant, systems[tenant], prompt, output))
        if prompt < LONGEST and rng.random() < GO_ON:
            later = at + output * 0.03 + rng.expovariate(1 / THINK_S)
            heapq.heappush(heap, (later, session, tenant, prompt + output, 0))
    return Trace(f"synthetic-{count}", items, HASH_TOKENS)


def _starts(count: int, rng: random.Random) -> list[float]:
    times: list[float] = []
    at, until, bursting = 0.0, rng.expovariate(1 / CALM_S), False
    while len(times) < count:
        at += rng.expovariate(SESSIONS_PER_S * (BURST if bursting else 1.0))
        if at > until:
            bursting = not bursting
            until = at + rng.expovariate(1 / (BURST_S if bursting else CALM_S))
        times.append(at)
    return times


def _item(at: float, session: int, tenant: int, system: int, prompt: int, output: int) -> Item:
    """Block ids: the system prompt's are the tenant's, those behind are the session's."""
    total = (prompt + output) // HASH_TOKENS
    shared = system // HASH_TOKENS
    ids = [
        (tenant << 20 | index) if index < shared else ((session + 1) << 24 | 1 << 23 | index)
        for index in range(total)
    ]
    whole = prompt // HASH_TOKENS
    return Item(
        at, prompt, output, tuple(ids[:whole]), f"tenant{tenant}", answer=tuple(ids[whole:])
    )
