"""The largest load that a policy serves: over splits, by bisection, several seeds at a time.

G90 (G99) is the largest offered rate per GPU at which 90 % (99 %) of all requests, over all seeds,
meet their targets. The search saves runs in three ways:

* A split is searched only if it holds slightly more than the best one so far.
* A run ends as soon as too many requests have missed their targets.
* Splits are compared on the first seed; the result is found on all of them.

How certain the result is: each seed is then searched by itself. The interval goes from the largest
rate that the worst seed holds to the smallest one that the best seed does not hold.

Where cores are spare, the search also asks for what may come next. The rates that it decides by,
and so the result, are the same on any number of cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, cast

import msgspec

from .bound import classify_requests, mean_request_seconds
from .case import Case, CaseProcesses, LoadVerdict, check_load, simulate_case
from .documents import PolicyEntry
from .fleet import FleetSplit, Split, possible_splits
from .metrics import RunSummary, summarize

G90 = 0.9  #: the share of requests that must meet their targets at the rate G90
G99 = 0.99  #: the same at the rate G99
TOLERANCE = 0.015  #: relative, of the rates found
COARSE_TOLERANCE = 4 * TOLERANCE  #: the same, while splits are compared
GROWTH = 1.25  #: factor from one rate to the next before both ends are known
SEED_GROWTH = 1 + COARSE_TOLERANCE  #: the same, of one seed: its rate is near that of all seeds
MINIMUM_SHARE = 1 / 64  #: of the first rate: where not even this is held, the answer is 0
BETTER = 1.01  #: times the best rate so far that a split must hold to be searched
FIRST_RATE_FACTOR = 1.1  #: times that rate: where the search of this split begins
SPLITS_AHEAD = 3  #: splits that are looked at together where cores are spare
START_RATE_PER_REPLICA = 0.6  #: requests/s at which the first search begins
G99_START_SHARE = 0.6  #: of G90, at which the search for G99 begins
#: Splits are ordered by their distance in prefill workers from the ideal. Each mixed worker counts
#: so much more, so that a split of mixed workers comes last.
MIXED_DISTANCE = 9

ProgressReporter = Callable[[str], None]  #: takes one line for a person
#: A document's value. It has no `int`: to the type checker an integer is a float too.
Json = dict[str, "Json"] | list["Json"] | str | float | bool | None


class RateInterval(NamedTuple):
    """Between which rates per GPU the largest one lies, over seeds and the rates that were tried."""

    low: float
    high: float


NO_INTERVAL = RateInterval(0.0, 0.0)  #: where no rate was found


@dataclass(slots=True)
class HighestRate:
    """The largest rate at which a share of the requests meet their targets."""

    rate: float = 0.0  #: per GPU; 0: none was found
    split: FleetSplit = field(default_factory=Split)  #: that holds it
    #: between which rates it lies, of each seed by itself
    interval: RateInterval = NO_INTERVAL


@dataclass(slots=True)
class PolicyResult:
    """What a search found of one policy in one variant."""

    policy: str  #: name of the router's policy
    variant: str  #: a `case.Variant`: what of another system is simulated
    #: By the share of requests that meet their targets; empty where no maximum was searched.
    highest_rates: dict[float, HighestRate] = field(default_factory=dict)
    summary: RunSummary | None = None  #: at G90, or at the rate that was asked for
    split: FleetSplit = field(default_factory=Split)  #: of `summary`
    rate: float = 0.0  #: of `summary`, per GPU
    requests: int = 0  #: simulated in all
    seconds: float = 0.0  #: of one core


class RateBracket(NamedTuple):
    """Between which rates the largest one lies, and which to try next."""

    low: float  #: held; 0: no rate was held yet
    high: float  #: not held; inf: every rate was held so far
    next_rate: float
    growth: float = GROWTH  #: factor from one rate to the next before both ends are known

    def narrowed(self, held: bool) -> RateBracket:
        """Return the bracket after `next_rate` was tried."""
        low = self.next_rate if held else self.low
        high = self.high if held else self.next_rate
        if not low:
            next_rate = self.next_rate / self.growth
        elif high == inf:
            next_rate = self.next_rate * self.growth
        else:
            next_rate = (low * high) ** 0.5
        return RateBracket(low, high, next_rate, self.growth)

    def is_open(self, tolerance: float, minimum: float) -> bool:
        """Return whether the rate is not known well enough yet."""
        if not self.low:
            return self.high > minimum
        return self.high / self.low > 1 + tolerance


def no_progress(line: str) -> None:
    """Drop a line of progress."""


class Search:
    """Runs the case `case_number` of `processes`, and counts what is simulated for it.

    `case` is that case. Without processes it runs in this process. `report_progress` gets a line
    after each check. A *split* says how many replicas of the fleet have which role; rates are in
    requests/s per GPU, and `share` is that of requests which must meet their targets.
    """

    def __init__(
        self,
        case: Case,
        report_progress: ProgressReporter = no_progress,
        processes: CaseProcesses | None = None,
        case_number: int = 0,
    ) -> None:
        self.case = case
        self.report_progress = report_progress
        self.processes = processes or CaseProcesses([case], jobs=1)
        self.case_number = case_number
        self.requests = 0  #: simulated in all
        self.seconds = 0.0  #: of one core

    # ---- runs ------------------------------------------------------------------------------------

    def submit_check(
        self, split: FleetSplit, rate: float, share: float, seeds: int, first_seed: int = 0
    ) -> Future[LoadVerdict]:
        """Ask whether `share` of the requests of so many seeds meet their targets."""
        future = self.processes.submit(
            check_load,
            self.case_number,
            split,
            rate=rate,
            share=share,
            seeds=seeds,
            first_seed=first_seed,
        )
        future.add_done_callback(lambda done: self._note_check(done, split, rate, share))
        return future

    def _note_check(
        self, done: Future[LoadVerdict], split: FleetSplit, rate: float, share: float
    ) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        verdict = done.result()
        self.requests += verdict.requests
        self.seconds += verdict.seconds
        met = f"{verdict.met_share:.3f}" if verdict.held else f"below {share:.2f}"
        name = f"{self.case.policy} ({self.case.variant})"
        self.report_progress(f"{name} {split_text(split)} {rate:.3f}/GPU: {met}")

    def measure(self, split: FleetSplit, rate: float) -> RunSummary:
        """Return the figures of one load of `rate` requests/s per GPU, over all seeds."""
        futures = [
            self.processes.submit(simulate_case, self.case_number, split, rate=rate, seed=seed)
            for seed in range(self.case.seeds)
        ]
        runs = [future.result() for future in futures]
        self.requests += sum(run.requests for run in runs)
        self.seconds += sum(run.seconds for run in runs)
        return summarize([outcome for run in runs for outcome in run.outcomes or ()])

    # ---- search ----------------------------------------------------------------------------------

    def largest_rate(
        self, split: FleetSplit, share: float, start: float, seeds: int, tolerance: float
    ) -> float:
        """Return the largest rate per GPU that a split holds; 0: not even a 64th of `start`.

        The search goes by steps from `start` until both ends are known, then by bisection of their
        ratio until they differ by less than `tolerance`, relative.
        """
        bracket = RateBracket(0.0, inf, start)
        return self._narrow(bracket, split, share, seeds=seeds, tolerance=tolerance).low

    def rate_interval(self, best: HighestRate, share: float) -> RateInterval:
        """Return between which rates the largest one of a split lies, of each seed by itself."""
        start = RateBracket(0.0, inf, best.rate, SEED_GROWTH)
        brackets = [
            self._narrow(start, best.split, share, seeds=1, tolerance=TOLERANCE, first_seed=seed)
            for seed in range(self.case.seeds)
        ]
        lowest = min(best.rate, *(bracket.low for bracket in brackets))
        return RateInterval(lowest, max(bracket.high for bracket in brackets))

    def _narrow(
        self,
        bracket: RateBracket,
        split: FleetSplit,
        share: float,
        *,
        seeds: int,
        tolerance: float,
        first_seed: int = 0,
    ) -> RateBracket:
        """Try rates until the bracket is narrower than `tolerance`, or its low end is hopeless."""
        minimum = bracket.next_rate * MINIMUM_SHARE
        # Where cores are spare, the two rates that may come next are asked for beforehand.
        checks: dict[float, Future[LoadVerdict]] = {}
        while bracket.is_open(tolerance, minimum):
            coming = [bracket]
            if self.processes.has_spare_cores:
                coming += [bracket.narrowed(held=True), bracket.narrowed(held=False)]
            for possible in coming:
                rate = possible.next_rate
                if rate not in checks and possible.is_open(tolerance, minimum):
                    checks[rate] = self.submit_check(
                        split, rate, share, seeds=seeds, first_seed=first_seed
                    )
            verdict = checks[bracket.next_rate].result()
            bracket = bracket.narrowed(verdict.held)
        _cancel(checks.values())
        return bracket

    def best_split(
        self, candidates: Sequence[FleetSplit], share: float, start: float
    ) -> HighestRate:
        """Return the split that holds the largest rate, and that rate over all seeds.

        Candidates are searched from `start` on until one holds a rate. Each of the others must
        hold slightly more than the best rate so far (`BETTER`), and is searched from a tenth above
        that on (`FIRST_RATE_FACTOR`). The rate is 0 if no candidate holds any.
        """
        best = HighestRate()
        remaining = list(candidates)
        while remaining:
            first_rate = start
            if best.rate:
                rate_to_beat = best.rate * BETTER
                remaining = self._without_worse(remaining, rate_to_beat, share)
                if not remaining:
                    break
                first_rate = rate_to_beat * FIRST_RATE_FACTOR
            split = remaining.pop(0)
            rate = self.largest_rate(split, share, first_rate, seeds=1, tolerance=COARSE_TOLERANCE)
            if rate > best.rate:
                best = HighestRate(rate, split)
        if best.rate:
            best.rate = self.largest_rate(
                best.split, share, best.rate, seeds=self.case.seeds, tolerance=TOLERANCE
            )
        if best.rate:
            best.interval = self.rate_interval(best, share)
        return best

    def _without_worse(
        self, candidates: list[FleetSplit], rate: float, share: float
    ) -> list[FleetSplit]:
        """Return the candidates from the first one on that holds `rate` with the first seed."""
        group_size = SPLITS_AHEAD if self.processes.has_spare_cores else 1
        for group_start in range(0, len(candidates), group_size):
            group = candidates[group_start : group_start + group_size]
            checks = [self.submit_check(split, rate, share, 1) for split in group]
            for index, check in enumerate(checks):
                if check.result().held:
                    _cancel(checks)
                    return candidates[group_start + index :]
        return []


def _cancel(checks: Iterable[Future[LoadVerdict]]) -> None:
    for check in checks:
        check.cancel()


def split_text(split: FleetSplit) -> str:
    """Return `6P2D`; of a split for each pool `1P+1D`."""
    return str(split) if isinstance(split, Split) else "+".join(map(str, split))


def candidate_splits(case: Case) -> list[Split]:
    """Return all splits of a fleet, the likeliest first.

    The likeliest has prefill and decode workers in the ratio of the load's work for them: the
    seconds of its prompts, and the share of a decode worker's memory and time that answers take.
    """
    load = classify_requests(case.trace)
    seconds = mean_request_seconds(case.fleet.reference, load, case.slo.itl_s)
    ideal_prefill = case.fleet.replicas * seconds.prefill_s / (seconds.prefill_s + seconds.decode_s)

    def distance(split: Split) -> float:
        return abs(split.prefill - ideal_prefill) + MIXED_DISTANCE * split.mixed

    return sorted(possible_splits(case.fleet.replicas, mixed=True), key=distance)


def first_rate(case: Case) -> float:
    """Return the rate per GPU at which a search for G90 begins."""
    return START_RATE_PER_REPLICA * case.fleet.replicas / case.fleet.gpus


def find_max(search: Search, split: Split | None) -> PolicyResult:
    """Return G90 and G99 with their best splits, and the figures at G90.

    With a `split` only that one is tried.
    """
    case = search.case
    result = PolicyResult(case.policy, case.variant)
    candidates = [split] if split else candidate_splits(case)
    g90 = search.best_split(candidates, G90, first_rate(case))
    start = max(g90.rate * G99_START_SHARE, 1e-3)
    g99 = search.best_split(candidates, G99, start)
    result.highest_rates = {G90: g90, G99: g99}
    result.split = g90.split
    result.rate = g90.rate
    if g90.rate:
        result.summary = search.measure(g90.split, g90.rate)
    result.requests = search.requests
    result.seconds = search.seconds
    return result


def measure_rate(search: Search, split: Split | None, rate: float) -> PolicyResult:
    """Return the figures at one rate per GPU.

    Without a `split` they are of the split where most requests meet their targets.
    """
    case = search.case
    result = PolicyResult(case.policy, case.variant, rate=rate)
    for candidate in [split] if split else candidate_splits(case):
        summary = search.measure(candidate, rate)
        search.report_progress(
            f"{case.policy} ({case.variant}) {split_text(candidate)}: {summary.attainment:.3f}"
        )
        if result.summary is None or summary.attainment > result.summary.attainment:
            result.summary = summary
            result.split = candidate
    result.requests = search.requests
    result.seconds = search.seconds
    return result


def policy_entry(result: PolicyResult, bounds: dict[str, float]) -> PolicyEntry:
    """Return a result as its part of a study's document, with its share of the bounds."""
    entry: PolicyEntry = {
        "name": result.policy,
        "variant": result.variant,
        "split": split_text(result.split),
        "g90_per_gpu": None,
        "g99_per_gpu": None,
        "g99_split": None,
        "bound_share": None,
        "prefix_hit": result.summary.prefix_hit if result.summary else None,
        "requests_per_s_simulated": round(result.requests / max(result.seconds, 1e-9)),
        "rate_per_gpu": result.rate,
    }
    if result.highest_rates:
        g90 = result.highest_rates[G90]
        g99 = result.highest_rates[G99]
        entry["g90_per_gpu"] = g90.rate
        entry["g99_per_gpu"] = g99.rate
        entry["g99_split"] = split_text(g99.split)
        entry["g90_interval"] = list(g90.interval)
        entry["g99_interval"] = list(g99.interval)
        entry["bound_share"] = _share(g90.rate, bounds["simulated_90"])
        entry["g99_bound_share"] = _share(g99.rate, bounds["simulated_99"])
        if "kernel_90" in bounds:
            entry["kernel_bound_share"] = _share(g90.rate, bounds["kernel_90"])
            entry["g99_kernel_bound_share"] = _share(g99.rate, bounds["kernel_99"])
    if result.summary:
        entry["at_rate"] = msgspec.to_builtins(result.summary)
    return cast(PolicyEntry, _rounded(cast(Json, entry)))


def _share(rate: float, bound: float) -> float:
    """Return the share of a bound; 0 where the bound is 0, as nothing can be held then."""
    return rate / bound if bound else 0.0


def _rounded(value: Json) -> Json:
    """Return the value with all its numbers rounded to four digits behind the point."""
    match value:
        case dict():
            return {key: _rounded(element) for key, element in value.items()}
        case list():
            return [_rounded(element) for element in value]
        case float():
            return round(value, 4)
        case _:
            return value
