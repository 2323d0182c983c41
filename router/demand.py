"""What is asked of the fleet, counted when it arrives: what the planner plans for. Pure.

Sums by second, so that a minute costs sixty rows at any rate. Which share of the prompts is cached
is known at the binding; the share of the same window is used for all.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from msgspec import structs

from ..protos.frames import Coefficients

if TYPE_CHECKING:
    from .fleet import Fleet, Worker

WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Need:
    """The mean request of a window; `rate` in requests/s, the others in tokens."""

    rate: float = 0.0
    uncached: float = 0.0
    pairs: float = 0.0  #: of query and key that its prefill computes
    output: float = 0.0  #: expected: nobody knows an answer's length before it ends
    context: float = 0.0  #: KV tokens read over all steps of its answer


@dataclass(slots=True)
class Second:
    at: float
    requests: int = 0
    prompt: float = 0.0
    square: float = 0.0
    output: float = 0.0
    context: float = 0.0
    bound: float = 0.0  #: prompt tokens of requests that were bound
    hit: float = 0.0


class Demand:
    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.window_s = window_s
        self._seconds: deque[Second] = deque()
        self._began: float | None = None

    def asked(self, prompt: int, output: float, now: float) -> None:
        """A new request, with its expected answer. Tokens."""
        row = self._row(now)
        row.requests += 1
        row.prompt += prompt
        row.square += prompt * prompt
        row.output += output
        row.context += output * (prompt + output / 2)

    def bound(self, prompt: int, hit: int, now: float) -> None:
        row = self._row(now)
        row.bound += prompt
        row.hit += hit

    def need(self, now: float) -> Need:
        self._row(now)
        rows = self._seconds
        count = sum(row.requests for row in rows)
        if not count or self._began is None:
            return Need()
        bound = sum(row.bound for row in rows)
        cached = sum(row.hit for row in rows) / bound if bound else 0.0
        return Need(
            count / min(self.window_s, max(now - self._began, 1.0)),
            sum(row.prompt for row in rows) * (1 - cached) / count,
            sum(row.square for row in rows) * (1 - cached**2) / 2 / count,
            sum(row.output for row in rows) / count,
            sum(row.context for row in rows) / count,
        )

    def _row(self, now: float) -> Second:
        rows = self._seconds
        if self._began is None:
            self._began = now
        while rows and rows[0].at <= now - self.window_s:
            rows.popleft()
        if not rows or now - rows[-1].at >= 1.0:
            rows.append(Second(now))
        return rows[-1]


def outlook(demand: Demand, fleet: Fleet, now: float) -> dict:
    """What a planner needs to know of this moment: plain values, as they travel in a frame."""
    workers = fleet.workers.values()
    return {
        "need": asdict(demand.need(now)),
        "backlog_s": sum(max(0.0, one.busy_until - now) for one in workers if one.prefills),
        "costs": {one.card.id: structs.astuple(_corrected(one)) for one in workers},
    }


def _corrected(worker: Worker) -> Coefficients:
    """Its coefficients as they turned out to be."""
    prefill, step = worker.prefill.factor, worker.step.factor
    factors = {"prefill": prefill, "step": step}
    changed = {
        name: getattr(worker.cost, name) * factors[kind]
        for name in worker.cost.__struct_fields__
        if (kind := name.partition("_")[0]) in factors
    }
    return structs.replace(worker.cost, **changed)
