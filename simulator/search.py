"""The largest load that a policy serves: over splits, by bisection, several seeds at a time.

G90 (G99) = the largest offered rate per GPU at which 90 % (99 %) of all requests, over all seeds,
are met. A split is looked at only if it holds slightly more than the best one so far; a run ends as
soon as too many requests have missed. The search takes the first seed, the result all of them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import msgspec

from ..router import RouterConfig
from .bound import classes, simulated
from .fleet import Faults, Fleet, Split, splits
from .metrics import Slo, Summary, summarize
from .sim import Setting, Simulation
from .trace import Trace
from .trace import total as count_of

TOLERANCE = 0.015  #: relative, of the rates found
GROWTH = 1.25  #: steps before both ends are known
BETTER = 1.01  #: a split must hold so much more than the best before it
OURS = "diptych"


@dataclass(frozen=True, slots=True)
class Case:
    """What does not change while rates and splits are tried."""

    trace: Trace
    fleet: Fleet
    slo: Slo
    policy: str = OURS
    variant: str = "policy-only"
    seeds: int = 3
    closed: bool = False
    faults: Faults = field(default_factory=Faults)
    disaggregate: str = "auto"

    def setting(self, split: Split | tuple[Split, ...]) -> Setting:
        """`full`: a baseline as its authors ship it: always disaggregated, and its first token
        comes from the decode worker. `policy-only`: all that is ours but the policy."""
        shipped = self.variant == "full" and self.policy != OURS
        config = RouterConfig(
            policy=self.policy,
            disaggregate="always" if shipped else self.disaggregate,
            ttft_s=self.slo.ttft_s or 1.0,
            itl_s=self.slo.itl_s,
            settle_s=0.001,
            decisions=0,
            fetch=not shipped,
        )
        handoff = "decode" if shipped else "prefill"
        return Setting(self.fleet, split, config, self.slo, handoff, self.faults)


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
    seconds: float = 0.0


class Search:
    """Runs one case; counts what it simulates."""

    def __init__(self, case: Case, tell: Callable[[str], None] = lambda line: None) -> None:
        self.case, self.tell = case, tell
        self.requests, self.seconds = 0, 0.0

    def run(self, split: Split | tuple[Split, ...], rate: float, seed: int, give_up: float = inf):
        """Outcomes at `rate` per GPU, or None if more than `give_up` requests missed."""
        case, begun = self.case, time.perf_counter()
        requests = case.trace.workload(rate * case.fleet.gpus, seed, case.closed)
        simulation = Simulation(case.setting(split), case.trace, seed)
        gc.disable()  # a run makes no cycles, and what it holds is large
        try:
            outcomes = simulation.run(requests, give_up)
        finally:
            gc.enable()
        self.requests += sum(job is not None for job in simulation.done)
        self.seconds += time.perf_counter() - begun
        return outcomes

    def holds(self, split, rate: float, share: float, seeds: int) -> bool:
        """Whether `share` of all requests of these seeds is met."""
        missed, total = 0, 0
        case = self.case
        load = case.trace.workload(rate * case.fleet.gpus, 0, case.closed)
        expected = count_of(load) * seeds
        for seed in range(seeds):
            allowed = (1 - share) * expected - missed
            outcomes = self.run(split, rate, seed, allowed)
            if outcomes is None:
                break
            missed += sum(not one.met for one in outcomes)
            total += len(outcomes)
        ok = total > 0 and outcomes is not None and missed <= (1 - share) * total
        said = f"{1 - missed / total:.3f}" if ok else f"below {share:.2f}"
        name = f"{self.case.policy} ({self.case.variant})"
        self.tell(f"{name} {said_split(split)} {rate:.3f}/GPU: {said}")
        return ok

    def largest(self, split, share: float, start: float, seeds: int, tolerance: float) -> float:
        """By steps from `start`, then bisection of the ratio."""
        low, high = 0.0, inf
        rate = start
        while high / low > 1 + tolerance if low else high > start / 64:
            if self.holds(split, rate, share, seeds):
                low = rate
            else:
                high = rate
            if low and high < inf:
                rate = (low * high) ** 0.5
            else:
                rate = rate * GROWTH if low else rate / GROWTH
        return low

    def best(self, candidates: list, share: float, start: float) -> Found:
        found = Found()
        for split in candidates:
            if found.rate and not self.holds(split, found.rate * BETTER, share, 1):
                continue
            first = found.rate * BETTER * 1.1 if found.rate else start
            rate = self.largest(split, share, first, 1, 4 * TOLERANCE)
            if rate > found.rate:
                found = Found(rate, split)
        if found.rate:
            seeds = self.case.seeds
            found.rate = self.largest(found.split, share, found.rate, seeds, TOLERANCE)
        return found

    def measure(self, split, rate: float) -> Summary:
        """Everything about one load, over all seeds."""
        outcomes = [one for seed in range(self.case.seeds) for one in self.run(split, rate, seed)]
        return summarize(outcomes)


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


def find_max(
    case: Case, split: Split | None, tell: Callable[[str], None], shares=(0.9, 0.99)
) -> Result:
    """G90 and G99 with their best splits, and the figures at G90."""
    search = Search(case, tell)
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


def measure(case: Case, split, rate: float, tell: Callable[[str], None]) -> Result:
    """The figures at one rate per GPU; the best split is that of the highest attainment."""
    search = Search(case, tell)
    result = Result(case.policy, case.variant, rate=rate)
    for one in [split] if split else candidates(case):
        summary = search.measure(one, rate)
        tell(f"{case.policy} ({case.variant}) {said_split(one)}: {summary.attainment:.3f}")
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
