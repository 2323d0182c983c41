"""When requests come and how long they are. Pure: equal plan, equal arrivals.

Open loop: an arrival never waits for the answer of another (`then` aside, which is a session's
next turn). Each arrival belongs to a `stage`: its label, and the rate that is offered in it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from ..simulator import trace as traces
from ..simulator.errors import SimulationError
from .errors import LoadError
from .plan import Plan

BURST_EVERY_S, BURST_S, BURST = 15.0, 3.0, 4.0  #: for 3 of 15 s the rate is 4 times the rest's
SHARED = -1  #: block id of what all prompts begin with


@dataclass(frozen=True, slots=True)
class Stage:
    """A span of the run with one rate. Seconds since the start."""

    label: str
    begin_s: float
    end_s: float
    rate: float  #: offered requests per second


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to come. `blocks`: (id, tokens) of the prompt's leading blocks; equal ids, equal
    text; what is left of `prompt` is its own."""

    at: float
    prompt: int
    output: int
    blocks: tuple[tuple[int, int], ...] = ()
    stage: int = 0
    then: Arrival | None = None
    think_s: float = 0.0
    index: int = 0


def stages(plan: Plan) -> list[Stage]:
    """A ramp's rates grow geometrically."""
    low, high = plan.rates
    if plan.load != "ramp":
        return [Stage(plan.label, 0.0, plan.duration, low)]
    span = plan.duration / plan.steps
    growth = (high / low) ** (1 / max(1, plan.steps - 1))
    rates = [low * growth**step for step in range(plan.steps)]
    return [
        Stage(f"{rate:.3g}/s", span * step, span * (step + 1), rate)
        for step, rate in enumerate(rates)
    ]


@lru_cache(1)  # a trace takes seconds
def arrivals(plan: Plan) -> list[Arrival]:
    """By time, numbered; a trace's later turns hang on their predecessors. Raises LoadError."""
    rng = random.Random(f"{plan.seed}/arrivals")
    if plan.load == "trace":
        return _traced(plan)
    made: list[Arrival] = []
    head = ((SHARED, plan.shared),) if plan.shared else ()
    for number, stage in enumerate(stages(plan)):
        for at in _times(plan.load, stage, rng):
            prompt = plan.shared + rng.randint(*plan.prompts)
            made.append(Arrival(at, prompt, rng.randint(*plan.outputs), head, number))
    return [replace(one, index=index) for index, one in enumerate(made)]


def _times(load: str, stage: Stage, rng: random.Random) -> Iterator[float]:
    if load == "constant":
        for number in range(int((stage.end_s - stage.begin_s) * stage.rate)):
            yield stage.begin_s + number / stage.rate
        return
    share = BURST_S / BURST_EVERY_S
    calm = stage.rate / (1 - share + share * BURST) if load == "burst" else stage.rate
    peak = calm * BURST if load == "burst" else calm
    at = stage.begin_s + rng.expovariate(peak)
    while at < stage.end_s:  # thinning: calm seconds keep one candidate in BURST
        bursting = at % BURST_EVERY_S >= BURST_EVERY_S - BURST_S
        if bursting or rng.random() * peak < calm:
            yield at
        at += rng.expovariate(peak)


def _traced(plan: Plan) -> list[Arrival]:
    try:
        trace = traces.load(plan.trace, plan.seed)
    except SimulationError as error:
        raise LoadError(str(error)) from None
    rate = plan.rates[0] or trace.rate
    size = max(1, round(trace.block_tokens * plan.scale))
    count = 0

    def converted(request: traces.Request) -> Arrival:
        nonlocal count
        index, count = count, count + 1
        prompt = max(1, round(request.prompt * plan.scale))
        output = max(1, round(request.output * plan.scale))
        blocks = tuple((block, size) for block in request.blocks[: request.whole])
        then = converted(request.then) if request.then else None
        return Arrival(request.at, prompt, output, blocks, 0, then, request.think_s, index)

    requests = trace.workload(rate, plan.seed, plan.dispatch == "thinktime")
    found = [converted(one) for one in requests if one.at < plan.duration]
    if not found:
        raise LoadError(f"trace {plan.trace}: nothing arrives in its first {plan.duration:g} s")
    return found
