"""What is asked of the fleet, counted when it arrives: what the planner plans for (pure).

Sums are kept by second, so that a minute costs sixty rows at any rate. Which share of the prompts
is cached is known when they are placed; the share of the same window is used for all.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from msgspec import structs

if TYPE_CHECKING:
    from ..protos.frames import Coefficients
    from .fleet import WorkerFleet

WINDOW_S = 60.0  #: long enough for a mean over many requests, short enough to follow a rush


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """The mean request of a window. `rate` is in requests/s, all else in tokens."""

    rate: float = 0.0  #: of new requests; further attempts at one do not count
    uncached: float = 0.0  #: prompt tokens that are to be computed
    pairs: float = 0.0  #: of query and key that its prefill computes
    output: float = 0.0  #: expected: nobody knows an answer's length before it ends
    context: float = 0.0  #: KV tokens read over all steps of its answer


@dataclass(slots=True)
class DemandSecond:
    """Sums over the requests of one second. Tokens, and squares of tokens."""

    began_at: float
    requests: int = 0
    prompt_tokens: float = 0.0
    squared_prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    context_tokens: float = 0.0
    placed_prompt_tokens: float = 0.0  #: of requests that were placed in this second
    cached_tokens: float = 0.0  #: of those


class DemandWindow:
    """The requests of the last `window_s` seconds."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.window_s = window_s
        self._seconds: deque[DemandSecond] = deque()
        self._began_at: float | None = None  #: When the first request came.

    def record_arrival(self, prompt_tokens: int, output_tokens: float, now: float) -> None:
        """Count a new request, with its expected answer."""
        if self._began_at is None:
            self._began_at = now
        second = self._second(now)
        second.requests += 1
        second.prompt_tokens += prompt_tokens
        second.squared_prompt_tokens += prompt_tokens * prompt_tokens
        second.output_tokens += output_tokens
        second.context_tokens += output_tokens * (prompt_tokens + output_tokens / 2)

    def record_placement(self, prompt_tokens: int, cached_tokens: int, now: float) -> None:
        """Count a placed request, and how much of its prompt is cached."""
        second = self._second(now)
        second.placed_prompt_tokens += prompt_tokens
        second.cached_tokens += cached_tokens

    def offered_load(self, now: float) -> OfferedLoad:
        """Return the mean request of the window that ends now."""
        self._second(now)
        seconds = self._seconds
        requests = sum(second.requests for second in seconds)
        if not requests or self._began_at is None:
            return OfferedLoad()
        placed_tokens = sum(second.placed_prompt_tokens for second in seconds)
        cached_share = 0.0
        if placed_tokens:
            cached_share = sum(second.cached_tokens for second in seconds) / placed_tokens
        squares = sum(second.squared_prompt_tokens for second in seconds)
        prompt_tokens = sum(second.prompt_tokens for second in seconds)
        return OfferedLoad(
            # By the time since the first request, where that is shorter than the window.
            rate=requests / min(self.window_s, max(now - self._began_at, 1.0)),
            uncached=prompt_tokens * (1 - cached_share) / requests,
            # A prompt of n tokens has n^2 / 2 pairs, its cached share s of them s^2 as many.
            pairs=squares * (1 - cached_share**2) / 2 / requests,
            output=sum(second.output_tokens for second in seconds) / requests,
            context=sum(second.context_tokens for second in seconds) / requests,
        )

    def _second(self, now: float) -> DemandSecond:
        """Return the row of this second, and forget those before the window."""
        seconds = self._seconds
        while seconds and seconds[0].began_at <= now - self.window_s:
            seconds.popleft()
        if not seconds or now - seconds[-1].began_at >= 1.0:
            seconds.append(DemandSecond(now))
        return seconds[-1]


def outlook(demand: DemandWindow, fleet: WorkerFleet, now: float) -> dict[str, Any]:
    """Return what a planner needs to know of this moment, in the plain types of a frame.

    That is the mean request, the seconds of prefill that all workers together have left, and each
    worker's speed as the values of `Coefficients` in order.
    """
    workers = fleet.workers.values()
    return {
        "need": asdict(demand.offered_load(now)),
        "backlog_s": sum(worker.backlog_s(now) for worker in workers),
        "costs": {worker.card.id: _values_of(worker.cost) for worker in workers},
    }


def _values_of(cost: Coefficients) -> tuple[float, ...]:
    """Return the values in order; without the last two where there are no experts.

    A Control of a version that knows no experts takes no more values.
    """
    values = structs.astuple(cost)
    return values if cost.step_experts else values[:-2]
