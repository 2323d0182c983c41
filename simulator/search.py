"""The largest load that a policy serves: over splits, by bisection, several seeds at a time.

G90 (G99) = the largest offered rate per GPU at which 90 % (99 %) of all requests, over all seeds,
are met. A split is looked at only if it holds slightly more than the best one so far; a run ends as
soon as too many requests have missed. The search takes the first seed, the result all of them.
Where cores are spare it asks for what may come next as well: the way it takes, and so the result,
is the same on any number of cores.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import inf

import msgspec

from .bound import classes, simulated
from .case import Case, Cores, Ran, Verdict, holds, simulate
from .fleet import Split, splits
from .metrics import Summary, summarize

TOLERANCE = 0.015  #: relative, of the rates found
GROWTH = 1.25  #: steps before both ends are known
BETTER = 1.01  #: a split must hold so much more than the best before it
AHEAD = 3  #: splits that are looked at together, where cores are spare


@dataclass(slots=True)
class Found:
    """The largest rate per GPU for one share of requests in time."""

    rate: float = 0.0
    split: Split | tuple[Split, ...] = field(default_factory=Split)


@dataclass(slots=True)
class Result:
    """One policy in one variant."""

    policy: str
    variant: str
    found: dict[float, Found] = field(default_factory=dict)
    summary: Summary | None = None  #: at G90, or at the rate that was asked for
    split: Split | tuple[Split, ...] = field(default_factory=Split)  #: of `summary`
    rate: float = 0.0  #: of `summary`, per GPU
    requests: int = 0  #: simulated in all
    seconds: float = 0.0  #: of one core


def silent(line: str) -> None:
    """Tells nobody."""


class Search:
    """Runs case `number` of `cores`, or `case` in this process; counts what it simulates."""

    def __init__(
        self,
        case: Case,
        tell: Callable[[str], None] = silent,
        cores: Cores | None = None,
        number: int = 0,
    ) -> None:
        self.case, self.tell = case, tell
        self.cores, self.number = cores or Cores([case], 1), number
        self.requests, self.seconds = 0, 0.0

    # ---- runs ------------------------------------------------------------------------------------

    def ask(self, split, rate: float, share: float, seeds: int) -> Future[Verdict]:
        """Whether `share` is met at `rate` per GPU, over these seeds."""
        future = self.cores.submit(holds, self.number, split, rate, share, seeds)
        future.add_done_callback(lambda done: self._note(done, split, rate, share))
        return future

    def _note(self, done: Future[Verdict], split, rate: float, share: float) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        verdict = done.result()
        self.requests += verdict.requests
        self.seconds += verdict.seconds
        said = f"{verdict.met:.3f}" if verdict.held else f"below {share:.2f}"
        name = f"{self.case.policy} ({self.case.variant})"
        self.tell(f"{name} {said_split(split)} {rate:.3f}/GPU: {said}")

    def holds(self, split, rate: float, share: float, seeds: int) -> bool:
        return self.ask(split, rate, share, seeds).result().held

    def measure(self, split, rate: float) -> Summary:
        """Everything about one load, over all seeds."""
        tasks = [
            self.cores.submit(simulate, self.number, split, rate, seed)
            for seed in range(self.case.seeds)
        ]
        runs: list[Ran] = [task.result() for task in tasks]
        self.requests += sum(run.requests for run in runs)
        self.seconds += sum(run.seconds for run in runs)
        return summarize([one for run in runs for one in run.outcomes or ()])

    # ---- search ----------------------------------------------------------------------------------

    def largest(self, split, share: float, start: float, seeds: int, tolerance: float) -> float:
        """By steps from `start`, then bisection of the ratio."""
        asked: dict[float, Future[Verdict]] = {}

        def wanted(low: float, high: float) -> bool:
            return high / low > 1 + tolerance if low else high > start / 64

        state = (0.0, inf, start)
        while wanted(*state[:2]):
            coming = [state]
            if self.cores.spare:
                coming += [_step(*state, held=True), _step(*state, held=False)]
            for low, high, rate in coming:
                if rate not in asked and wanted(low, high):
                    asked[rate] = self.ask(split, rate, share, seeds)
            state = _step(*state, held=asked[state[2]].result().held)
        _cancel(list(asked.values()))
        return state[0]

    def best(self, candidates: list, share: float, start: float) -> Found:
        found = Found()
        left = list(candidates)
        while left:
            split = left.pop(0)
            if found.rate:
                group = [split, *left[: AHEAD - 1]] if self.cores.spare else [split]
                looks = [self.ask(one, found.rate * BETTER, share, 1) for one in group]
                fails = next((i for i, at in enumerate(looks) if at.result().held), len(group))
                _cancel(looks)
                left = ([split, *left])[fails:]
                if fails == len(group):
                    continue
                split = left.pop(0)
            first = found.rate * BETTER * 1.1 if found.rate else start
            rate = self.largest(split, share, first, 1, 4 * TOLERANCE)
            if rate > found.rate:
                found = Found(rate, split)
        if found.rate:
            seeds = self.case.seeds
            found.rate = self.largest(found.split, share, found.rate, seeds, TOLERANCE)
        return found


def _step(low: float, high: float, rate: float, held: bool) -> tuple[float, float, float]:
    """(low, high, the rate to try next)"""
    low, high = (rate, high) if held else (low, rate)
    if low and high < inf:
        return low, high, (low * high) ** 0.5
    return low, high, rate * GROWTH if low else rate / GROWTH


def _cancel(tasks: list[Future[Verdict]]) -> None:
    for task in tasks:
        task.cancel()


def said_split(split: Split | tuple[Split, ...]) -> str:
    return str(split) if isinstance(split, Split) else "+".join(map(str, split))


def candidates(case: Case) -> list[Split]:
    """Splits, the likeliest first: by how far they are from the load's own ratio of work."""
    rates = simulated(case.fleet.reference)
    load = classes(case.trace)
    prefill = (rates.base + rates.token * load.uncached + rates.pair * load.pairs) @ load.share
    step = min(case.slo.itl_s, rates.step + rates.weights + rates.read * rates.memory)
    decode = (load.context @ load.share) * step / rates.memory
    ideal = case.fleet.replicas * prefill / (prefill + decode)
    return sorted(
        splits(case.fleet.replicas, mixed=True), key=lambda s: abs(s.prefill - ideal) + 9 * s.mixed
    )


def find_max(search: Search, split: Split | None, shares=(0.9, 0.99)) -> Result:
    """G90 and G99 with their best splits, and the figures at G90."""
    case = search.case
    tried = [split] if split else candidates(case)
    result = Result(case.policy, case.variant)
    start = 0.15 * case.fleet.replicas / case.fleet.gpus * 4
    for share in shares:
        start = max(result.found[shares[0]].rate * 0.6, 1e-3) if result.found else start
        result.found[share] = search.best(tried, share, start)
    at = result.found[shares[0]]
    result.split, result.rate = at.split, at.rate
    if at.rate:
        result.summary = search.measure(at.split, at.rate)
    result.requests, result.seconds = search.requests, search.seconds
    return result


def measure(search: Search, split: Split | None, rate: float) -> Result:
    """The figures at one rate per GPU; the best split is that of the highest attainment."""
    case = search.case
    result = Result(case.policy, case.variant, rate=rate)
    for one in [split] if split else candidates(case):
        summary = search.measure(one, rate)
        said = f"{said_split(one)}: {summary.attainment:.3f}"
        search.tell(f"{case.policy} ({case.variant}) {said}")
        if result.summary is None or summary.attainment > result.summary.attainment:
            result.summary, result.split = summary, one
    result.requests, result.seconds = search.requests, search.seconds
    return result


def as_json(result: Result, bounds: dict[str, float]) -> dict:
    """The shape of `diptych simulate -o json`; times in seconds, rates per second and GPU."""
    g90, g99 = (result.found.get(share, Found()) for share in (0.9, 0.99))
    entry: dict = {
        "name": result.policy,
        "variant": result.variant,
        "split": said_split(result.split),
        "g90_per_gpu": g90.rate if result.found else None,
        "g99_per_gpu": g99.rate if result.found else None,
        "g99_split": said_split(g99.split) if result.found else None,
        "bound_share": None,
        "prefix_hit": result.summary.prefix_hit if result.summary else None,
        "requests_per_s_simulated": round(result.requests / max(result.seconds, 1e-9)),
        "rate_per_gpu": result.rate,
    }
    if result.found:
        entry["bound_share"] = g90.rate / bounds["simulated_90"]
        entry["g99_bound_share"] = g99.rate / bounds["simulated_99"]
        if "kernel_90" in bounds:
            entry["kernel_bound_share"] = g90.rate / bounds["kernel_90"]
            entry["g99_kernel_bound_share"] = g99.rate / bounds["kernel_99"]
    if result.summary:
        entry["at_rate"] = msgspec.to_builtins(result.summary)
    return _rounded(entry)


def _rounded(value):
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return round(value, 4) if isinstance(value, float) else value
