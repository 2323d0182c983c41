"""One thing to study: a trace on a fleet under one policy; and its runs, here or on every core.

`Cores` runs in processes that were forked when the cases, traces included, were there: a task names
its case by number and sends back counts, so nothing large is copied. Tasks are asked for by threads
(one for each case) and answered in the order they were asked.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from math import inf
from multiprocessing import get_context
from typing import Any, NamedTuple

from ..router import RouterConfig
from .fleet import Faults, Fleet, Split
from .metrics import Outcome, Slo
from .sim import Setting, Simulation
from .trace import Trace
from .trace import total as count_of

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
    router: RouterConfig | None = None  #: of a recorded run: used as it was, but for the policy

    def setting(self, split: Split | tuple[Split, ...]) -> Setting:
        """`full`: a baseline as its authors ship it: always disaggregated, and its first token
        comes from the decode worker. `policy-only`: all that is ours but the policy."""
        if self.router is not None:
            config = replace(self.router, policy=self.policy, settle_s=0.001, decisions=0)
            return Setting(self.fleet, split, config, self.slo, faults=self.faults)
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


class Ran(NamedTuple):
    """One run. `outcomes` is None if more requests missed than were allowed."""

    outcomes: list[Outcome] | None
    requests: int
    seconds: float


class Verdict(NamedTuple):
    """Whether a share of the requests is met; `met` is that share, if the runs went to the end."""

    held: bool
    met: float
    requests: int
    seconds: float


def simulate(
    case: Case, split: Split | tuple[Split, ...], rate: float, seed: int, give_up: float = inf
) -> Ran:
    """`rate` in requests/s per GPU."""
    begun = time.perf_counter()
    requests = case.trace.workload(rate * case.fleet.gpus, seed, case.closed)
    simulation = Simulation(case.setting(split), case.trace, seed)
    gc.disable()  # a run makes no cycles, and what it holds is large
    try:
        outcomes = simulation.run(requests, give_up)
    finally:
        gc.enable()
    ended = sum(job is not None for job in simulation.done)
    return Ran(outcomes, ended, time.perf_counter() - begun)


def holds(
    case: Case, split: Split | tuple[Split, ...], rate: float, share: float, seeds: int
) -> Verdict:
    """Whether `share` of all requests of these seeds is met. Ends as soon as it cannot be."""
    load = case.trace.workload(rate * case.fleet.gpus, 0, case.closed)
    expected, missed, total = count_of(load) * seeds, 0, 0
    requests, seconds = 0, 0.0
    for seed in range(seeds):
        ran = simulate(case, split, rate, seed, (1 - share) * expected - missed)
        requests, seconds = requests + ran.requests, seconds + ran.seconds
        if ran.outcomes is None:
            return Verdict(False, 0.0, requests, seconds)
        missed += sum(not one.met for one in ran.outcomes)
        total += len(ran.outcomes)
    met = 1 - missed / total if total else 0.0
    return Verdict(total > 0 and missed <= (1 - share) * total, met, requests, seconds)


class Here(Executor):
    """Does what is submitted at once, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()
        future.set_result(fn(*args, **kwargs))
        return future


_cases: list[Case] = []  #: of the pool that this process works for


def _work(function: Callable[..., Any], number: int, *args: Any) -> Any:
    return function(_cases[number], *args)


class Cores:
    """`submit(function, number, ...)` = `function(cases[number], ...)` in one of `jobs` processes.

    `spare`: there are more cores than cases, so a search may ask for more than it needs next.
    """

    def __init__(self, cases: list[Case], jobs: int) -> None:
        self._mine = cases
        self.spare = jobs > len(cases)
        self._pool: Executor = Here()
        if jobs > 1:
            _cases[:] = cases
            self._pool = ProcessPoolExecutor(jobs, get_context("fork"))
            self._pool.submit(int).result()  # all are forked now, before there are threads

    def submit(self, function: Callable[..., Any], number: int, *args: Any) -> Future:
        if isinstance(self._pool, Here):
            return self._pool.submit(function, self._mine[number], *args)
        return self._pool.submit(_work, function, number, *args)

    def __enter__(self) -> Cores:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
