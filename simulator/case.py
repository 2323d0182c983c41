"""A case to study: a trace on a fleet under one policy; and its runs, here or on every core.

`CaseProcesses` runs in processes that were forked when the cases, their traces included, were
there. A task names its case by number and sends back counts, so nothing large is copied. Tasks come
from threads, one for each case, and are done in the order in which they came.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from ..router import RouterConfig, SloClass
from ..router.config import CLASSES
from .cells import DividedSimulation
from .documents import OWN_POLICY
from .fleet import Faults, Fleet, FleetSplit
from .metrics import SimulatedOutcome, Slo
from .processes import fork_processes, lost_process
from .sim import Setting, Simulation
from .trace import Trace, count_turns

P = ParamSpec("P")
T = TypeVar("T")

#: Seconds after the router's first event, from which it takes the fleet for complete. In a
#: simulation all workers join at once, so there is nothing to wait for.
SETTLE_S = 0.001
ROUNDING_SHARE = 1e-9  #: of the requests: by how much rounding may change a share of them
DEFAULT_CLASS = "interactive"  #: of the requests of a load, as frames have it by default


class Variant(StrEnum):
    """What of a baseline, another system whose policy is compared with ours, is simulated."""

    POLICY_ONLY = "policy-only"  #: its policy; all else is ours
    #: The baseline as its authors ship it: always disaggregated, and the first token comes from
    #: the decode worker.
    FULL = "full"
    #: Its policy, on workers that compute prompts by deadline, as they do under ours.
    DEADLINE_ORDER = "deadline-order"


@dataclass(frozen=True, slots=True)
class Case:
    """What stays the same while rates and splits are tried."""

    trace: Trace
    fleet: Fleet
    slo: Slo
    policy: str = OWN_POLICY  #: the router's, by which it places requests
    variant: str = Variant.POLICY_ONLY  #: of no effect under our own policy
    seeds: int = 3  #: how many loads are drawn of the trace, with the seeds from 0
    closed_loop: bool = False  #: later turns of a session wait for the end of the one before
    faults: Faults = field(default_factory=Faults)
    disaggregate: str = "auto"  #: as `RouterConfig.disaggregate`: always, auto or never
    #: a recorded run's; only its policy is replaced, and what the next two fields ask for
    router_config: RouterConfig | None = None
    #: Requests that would be late are refused at once, by policies that know: ours and Mooncake's.
    early_reject: bool = False
    #: The fleet is divided into so many cells, each with a router and a queue (`cells.py`).
    cells: int = 1
    #: Gateways hold first tokens back; None: as `RouterConfig` has it by default, or as recorded.
    pace_first_token: bool | None = None

    def setting(self, split: FleetSplit) -> Setting:
        """Return what a simulation of this case runs on a split, the roles of its replicas.

        With `decisions=0` the router keeps no records of its decisions.
        """
        as_shipped = self.variant == Variant.FULL and self.policy != OWN_POLICY
        deadline_order = self.variant == Variant.DEADLINE_ORDER
        # Mooncake's scheduler refuses what would be late; the others' serve it after all.
        early_reject = self.early_reject or (as_shipped and self.policy == "mooncake")
        if self.router_config is not None:
            as_shipped = False
            config = replace(
                self.router_config,
                policy=self.policy,
                deadline_order=deadline_order,
                settle_s=SETTLE_S,
                decisions=0,
            )
            if self.early_reject:
                recorded_class = config.classes.get(DEFAULT_CLASS, SloClass())
                changed_class = replace(recorded_class, early_reject=True)
                classes = {**config.classes, DEFAULT_CLASS: changed_class}
                config = replace(config, classes=classes)
        else:
            config = RouterConfig(
                policy=self.policy,
                deadline_order=deadline_order,
                disaggregate="always" if as_shipped else self.disaggregate,
                ttft=str(self.slo.ttft),
                itl_s=self.slo.itl_s,
                settle_s=SETTLE_S,
                decisions=0,
                fetch=not as_shipped,
                classes={**CLASSES, DEFAULT_CLASS: SloClass(early_reject=early_reject)},
            )
        if self.pace_first_token is not None:
            config = replace(config, pace_first_token=self.pace_first_token)
        return Setting(
            fleet=self.fleet,
            split=split,
            config=config,
            slo=self.slo,
            handoff="decode" if as_shipped else "prefill",
            faults=self.faults,
        )


class CaseRun(NamedTuple):
    """What came of one run."""

    outcomes: list[SimulatedOutcome] | None  #: None: more requests missed than were allowed to
    requests: int  #: that ended
    seconds: float  #: of wall time


class LoadVerdict(NamedTuple):
    """Whether a case meets the targets of a share of its requests."""

    held: bool  #: True: the share is met
    met_share: float  #: of the requests; 0: the runs were cut short
    requests: int  #: simulated
    seconds: float  #: of wall time


def simulate_case(
    case: Case, split: FleetSplit, rate: float, seed: int, missed_limit: float = inf
) -> CaseRun:
    """Run one load of `rate` requests/s per GPU; equal seeds draw equal requests.

    The run ends early once more than `missed_limit` requests have missed their targets. Then it has
    no outcomes.
    """
    started_at = time.perf_counter()
    gc.disable()  # a run makes no cycles, and what it holds is large: to search it takes time
    try:
        requests = case.trace.workload(rate * case.fleet.gpus, seed, case.closed_loop)
        setting = case.setting(split)
        if case.cells > 1:
            divided = DividedSimulation(setting, case.trace, case.cells, seed)
            outcomes = divided.run(requests, missed_limit)
            ended_count = divided.ended_requests
        else:
            simulation = Simulation(setting, case.trace, seed)
            outcomes = simulation.run(requests, missed_limit)
            ended_count = len(simulation.last_attempts)
    finally:
        gc.enable()
    return CaseRun(outcomes, ended_count, time.perf_counter() - started_at)


def check_load(
    case: Case,
    split: FleetSplit,
    rate: float,
    share: float,
    *,
    seeds: int,
    first_seed: int = 0,
) -> LoadVerdict:
    """Say whether `share` of all requests of these seeds meet their targets at `rate` per GPU.

    The seeds are so many from `first_seed` on. The runs end as soon as that cannot be. Without any request the answer is no.
    """
    # Only counted: the loads of all seeds have equally many requests.
    load = case.trace.workload(rate * case.fleet.gpus, 0, case.closed_loop)
    missed_limit = _missed_limit(share, count_turns(load) * seeds)
    missed = 0
    ended = 0
    simulated = 0
    seconds = 0.0
    for seed in range(first_seed, first_seed + seeds):
        run = simulate_case(case, split, rate, seed, missed_limit=missed_limit - missed)
        simulated += run.requests
        seconds += run.seconds
        if run.outcomes is None:
            return LoadVerdict(False, 0.0, simulated, seconds)
        missed += sum(not outcome.targets_met for outcome in run.outcomes)
        ended += len(run.outcomes)
    if not ended:
        return LoadVerdict(False, 0.0, simulated, seconds)
    held = missed <= _missed_limit(share, ended)
    return LoadVerdict(held, 1 - missed / ended, simulated, seconds)


def _missed_limit(share: float, requests: int) -> float:
    """Return how many of the requests may miss their targets if `share` of them must meet them.

    One of 10 may miss a share of 0.9, though (1 - 0.9) * 10 is a little less than 1.
    """
    return (1 - share) * requests + ROUNDING_SHARE * requests


class InlineExecutor(Executor):
    """Does what is submitted at once, in this process. What fails is raised by `submit`."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


#: The cases of the pool that this process works for. They are set before its processes are forked,
#: which is how those get them.
_forked_cases: list[Case] = []


def _run_forked(
    function: Callable[..., T], case_number: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> T:
    """Do one task, in a process of the pool."""
    return function(_forked_cases[case_number], *args, **kwargs)


class CaseProcesses:
    """A pool of `jobs` processes that have the cases; with one job, this process alone.

    `submit(function, number, ...)` computes `function(cases[number], ...)`. Leaving the context
    cancels what has not begun, and makes a SimulationError of a process that has ended.
    """

    def __init__(self, cases: list[Case], jobs: int) -> None:
        self._cases = cases
        #: There are more cores than cases: a search may ask for more than it needs next.
        self.has_spare_cores = jobs > len(cases)
        self._pool: ProcessPoolExecutor | None = None
        if jobs > 1:
            _forked_cases[:] = cases
            self._pool = fork_processes(jobs)
            # A first task, which does nothing, forks all processes now, before there are threads.
            self._pool.submit(int).result()

    def submit(
        self,
        function: Callable[Concatenate[Case, P], T],
        case_number: int,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Future[T]:
        """Compute `function` of a case and the other arguments.

        An error of the function is the future's; with one job it is raised here.
        """
        if self._pool is None:
            case = self._cases[case_number]
            return InlineExecutor().submit(function, case, *args, **kwargs)
        return self._pool.submit(_run_forked, function, case_number, args=args, kwargs=kwargs)

    def __enter__(self) -> CaseProcesses:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise lost_process() from error
