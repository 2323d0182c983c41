"""When requests come and how long they are. Pure: equal plan, equal arrivals.

Times are in seconds since the start of the run, lengths in tokens.

Open loop: an arrival never waits for the answer of another one; only `next_turn` does, the next
turn of the same session. Each arrival belongs to a stage: its label, and the rate offered in it.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ..simulator.errors import SimulationError
from ..simulator.sources import load_trace
from ..simulator.trace import WorkloadRequest, count_turns
from .errors import LoadError
from .plan import LoadPlan

#: In the last 3 of each 15 s a burst load's rate is 4 times that of the rest. The mean is the
#: plan's rate in a run of any duration.
BURST_EVERY_S = 15.0
BURST_S = 3.0
BURST_FACTOR = 4.0
SHARED = -1  #: block id of what all prompts begin with


@dataclass(frozen=True, slots=True)
class RateStage:
    """A span of the run with one rate; it is in seconds since the start."""

    label: str
    begin_s: float
    end_s: float
    #: Offered requests per second. 0 for a trace at the rate at which it was recorded; of a chat load,
    #: whose users send when they like, it means nothing.
    rate: float


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that is going to be sent, and when."""

    #: Since the start of the run. A `next_turn` is sent by its `think_s` instead.
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    #: (id, tokens) of the prompt's leading blocks: equal ids, equal text. `prompts.Words.text` cuts
    #: what exceeds `prompt_tokens`, and makes what is left of the prompt this arrival's own.
    blocks: tuple[tuple[int, int], ...] = ()
    stage_index: int = 0
    next_turn: Arrival | None = None  #: is sent `think_s` after this one's answer
    think_s: float = 0.0  #: of the user, before this turn
    index: int = 0  #: counts the arrivals of a run; makes the text of its own differ from others'

    def exceeds(self, context: int) -> bool:
        """Returns whether a turn of the session is longer than the context, at which the session ends."""
        turn: Arrival | None = self
        while turn is not None:
            if turn.prompt_tokens + turn.output_tokens > context:
                return True
            turn = turn.next_turn
        return False


def rate_stages(plan: LoadPlan) -> list[RateStage]:
    """Returns the stages of a run: one, or those of a ramp, whose rates grow geometrically.

    A trace's stage ends with the trace where that is shorter than the plan's duration. Raises
    LoadError if the trace cannot be read.
    """
    low, high = plan.rates
    if plan.load == "trace":
        end_s = min(plan.duration, _read_trace(plan).span_s)
        return [RateStage(plan.label, 0.0, end_s, low)]
    if plan.load != "ramp":
        return [RateStage(plan.label, 0.0, plan.duration, low)]
    span_s = plan.duration / plan.steps
    growth = (high / low) ** (1 / max(1, plan.steps - 1))
    stages: list[RateStage] = []
    for step in range(plan.steps):
        rate = low * growth**step
        stages.append(RateStage(f"{rate:.3g}/s", span_s * step, span_s * (step + 1), rate))
    return stages


@lru_cache(1)
def planned_arrivals(plan: LoadPlan) -> list[Arrival]:
    """Returns the arrivals by time, numbered; later turns of a trace with think times are in `next_turn`.

    Not for a chat load, whose users send when they like. Raises LoadError.
    """
    if plan.load == "trace":
        return _read_trace(plan).arrivals
    rng = random.Random(f"{plan.seed}/arrivals")
    shared_blocks = ((SHARED, plan.shared),) if plan.shared else ()
    arrivals: list[Arrival] = []
    for stage_index, stage in enumerate(rate_stages(plan)):
        for arrival_s in _arrival_times_s(plan.load, stage, rng):
            own_tokens = plan.prompts.draw(rng)
            arrival = Arrival(
                arrival_s=arrival_s,
                prompt_tokens=plan.shared + own_tokens,
                output_tokens=plan.outputs.draw(rng),
                blocks=shared_blocks,
                stage_index=stage_index,
            )
            arrivals.append(arrival)
    return [replace(arrival, index=index) for index, arrival in enumerate(arrivals)]


def _arrival_times_s(load: str, stage: RateStage, rng: random.Random) -> Iterator[float]:
    """Yields the times of a stage: evenly, or at random as independent users come (Poisson)."""
    if load == "constant":
        # Rounded first, as 1.1 requests/s make 99.00000000000001 in 90 s, which are 99.
        count = math.ceil(round((stage.end_s - stage.begin_s) * stage.rate, 9))
        for number in range(count):
            yield stage.begin_s + number / stage.rate
        return

    # Thinning: candidates come at the peak rate, and calm seconds keep one in BURST_FACTOR.
    calm_rate = stage.rate
    peak_rate = stage.rate
    if load == "burst":
        burst_share = _burst_s(stage.end_s) / stage.end_s  # the one stage begins at 0
        calm_rate = stage.rate / (1 - burst_share + burst_share * BURST_FACTOR)
        peak_rate = calm_rate * BURST_FACTOR
    time_s = stage.begin_s + rng.expovariate(peak_rate)
    while time_s < stage.end_s:
        in_burst = time_s % BURST_EVERY_S >= BURST_EVERY_S - BURST_S
        if in_burst or rng.random() * peak_rate < calm_rate:
            yield time_s
        time_s += rng.expovariate(peak_rate)


def _burst_s(duration_s: float) -> float:
    """Returns how many of a run's first `duration_s` seconds are seconds of bursts."""
    whole_periods, rest_s = divmod(duration_s, BURST_EVERY_S)
    return whole_periods * BURST_S + max(0.0, rest_s - (BURST_EVERY_S - BURST_S))


class TraceLoad(NamedTuple):
    """A trace at a plan's rate and with its lengths scaled."""

    span_s: float  #: seconds that the whole trace takes at this rate
    arrivals: list[Arrival]  #: within the plan's duration


@lru_cache(1)  # a trace takes seconds
def _read_trace(plan: LoadPlan) -> TraceLoad:
    """Returns the load that a recorded or synthetic trace makes. Raises LoadError."""
    try:
        trace = load_trace(plan.trace, plan.seed)
    except SimulationError as error:
        raise LoadError(str(error)) from None
    lowest_rate, _ = plan.rates
    rate = lowest_rate or trace.rate
    block_tokens = max(1, round(trace.block_tokens * plan.scale))
    numbers = itertools.count()

    def to_arrival(request: WorkloadRequest) -> Arrival:
        index = next(numbers)  # before the next turn takes one
        return Arrival(
            arrival_s=request.arrival_s,
            prompt_tokens=max(1, round(request.prompt_tokens * plan.scale)),
            output_tokens=max(1, round(request.output_tokens * plan.scale)),
            blocks=tuple((block, block_tokens) for block in request.prompt_block_ids),
            next_turn=to_arrival(request.next_turn) if request.next_turn else None,
            think_s=request.think_s,
            index=index,
        )

    # With `thinktime` later turns follow answers, in `next_turn`; with `timestamp` they are arrivals
    # of their own, when they were recorded.
    requests = trace.workload(rate, plan.seed, plan.dispatch == "thinktime")
    arrivals = [to_arrival(request) for request in requests if request.arrival_s < plan.duration]
    if not arrivals:
        raise LoadError(f"trace {plan.trace}: nothing arrives in its first {plan.duration:g} s")
    return TraceLoad(span_s=count_turns(requests) / rate, arrivals=arrivals)
