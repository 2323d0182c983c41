"""Several policies on one trace: what `diptych simulate` runs, on all cores.

Each policy in each variant is a `Search` in a thread of its own; the searches share the processes
of `CaseProcesses`. The result is a plain document, in the order of the policies.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ..router import RouterConfig
from ..router.policies import POLICIES
from .bound import goodput_bound
from .case import Case, CaseProcesses, Variant
from .documents import OWN_POLICY, Agreement, FidelityFigures, PolicyEntry, StudyDocument
from .errors import SimulationError
from .exact import ExactSimulation
from .expense import Prices, joules_per_token, price_per_million_tokens
from .fleet import Faults, Fleet, Split
from .hardware import describe_doubts, describe_engine
from .metrics import Slo, summarize
from .search import (
    G90,
    G99,
    PolicyResult,
    ProgressReporter,
    Search,
    find_max,
    measure_rate,
    no_progress,
    policy_entry,
)
from .sim import Simulation
from .trace import Trace

#: Of the bound's rate. What loads up to there need is made once, before the processes are forked,
#: which then share the memory; each process makes what higher loads need.
PREPARED_SHARE = 0.5
AGREEMENT_REQUESTS = 2000  #: of a run in both fidelities, about


@dataclass(frozen=True, slots=True)
class Study:
    """What to simulate."""

    trace: Trace
    model: str  #: "": the workers have measured coefficients, so there is no kernel bound
    fleet: Fleet
    fleet_name: str  #: as the document names it
    slo: Slo
    policies: tuple[str, ...] = (OWN_POLICY,)  #: keys of the router's `POLICIES`
    #: What of another system is simulated beside its policy (`case.Variant`).
    variants: tuple[str, ...] = (Variant.POLICY_ONLY,)
    split: Split | None = None  #: replicas by role; None: the best one of all
    seeds: int = 3  #: loads that are drawn of the trace
    #: Search G90 and G99, the largest rates at which 90 % and 99 % of requests meet their targets.
    find_max: bool = False
    rate: float | None = None  #: requests/s without `find_max`; None: as recorded
    closed_loop: bool = False  #: later turns of a session wait for the end of the one before
    faults: Faults = field(default_factory=Faults)
    jobs: int = 1  #: processes
    agreement: bool = (
        False  #: run the first policy step by step too, and say how far apart they are
    )
    router_config: RouterConfig | None = None  #: of a recorded run; None: the cases make one
    early_reject: bool = False  #: refuse late requests at once, where the policy knows them
    pace_first_token: bool | None = None  #: gateways hold first tokens back; None: by default
    prices: Prices = field(default_factory=Prices)  #: of GPU hours, for what a token costs
    cells: int = 1  #: into which the fleet is divided, each with a router and a queue
    tiers: str = ""  #: below each worker's KV pool, as the document names them; the fleet has them

    @property
    def offered_rate(self) -> float:
        """Requests/s where no maximum is searched."""
        return self.rate or self.trace.rate


def parse_policies(names: list[str]) -> tuple[str, ...]:
    """Return the policies of these names, or every one for `all`. Raises SimulationError."""
    if names == ["all"]:
        return tuple(POLICIES)
    for name in names:
        if name not in POLICIES:
            raise SimulationError(f"policy {name}: expected all or one of {', '.join(POLICIES)}")
    return tuple(names)


def run_study(study: Study, report_progress: ProgressReporter = no_progress) -> StudyDocument:
    """Run everything that the study asks for, and return its document."""
    started_at = time.perf_counter()
    bounds = _bounds(study)
    bound_texts = [f"{name} {value:.3f}" for name, value in bounds.items()]
    report_progress("bound " + "  ".join(bound_texts))

    cases = [
        Case(
            trace=study.trace,
            fleet=study.fleet,
            slo=study.slo,
            policy=policy,
            variant=variant,
            seeds=study.seeds,
            closed_loop=study.closed_loop,
            faults=study.faults,
            router_config=study.router_config,
            early_reject=study.early_reject,
            pace_first_token=study.pace_first_token,
            cells=study.cells,
        )
        for variant in study.variants
        for policy in study.policies
    ]
    results = _run_cases(study, cases, bounds, report_progress)
    simulated = sum(result.requests for result in results)
    seconds = time.perf_counter() - started_at
    document: StudyDocument = {
        "trace": study.trace.name,
        "requests": len(study.trace.requests),
        "model": study.model,
        "engine": describe_engine(study.fleet.reference),
        "fit_warnings": describe_doubts(hardware for hardware, _ in study.fleet.pools),
        "fleet": study.fleet_name,
        "tiers": study.tiers,
        "cells": study.cells,
        "gpus": study.fleet.gpus,
        "replicas": study.fleet.replicas,
        "slo": str(study.slo),
        "seeds": study.seeds,
        "dispatch": "thinktime" if study.closed_loop else "timestamp",
        "bound_per_gpu": {name: round(value, 4) for name, value in bounds.items()},
        "policies": [
            _entry_with_expense(study, policy_entry(result, bounds)) for result in results
        ],
        "requests_simulated": simulated,
        "requests_per_s_simulated": round(simulated / seconds),
        "seconds": round(seconds, 1),
    }
    first_entry = document["policies"][0]
    if study.agreement and not first_entry["rate_per_gpu"]:
        report_progress("agreement: the first policy holds no rate, so there is none to compare at")
    elif study.agreement:
        document["agreement"] = _compare_fidelities(study, cases[0], first_entry, report_progress)
    return document


def _entry_with_expense(study: Study, entry: PolicyEntry) -> PolicyEntry:
    """Return the entry with what a token in time takes and costs at its rate, where it is known."""
    if "at_rate" not in entry:
        return entry
    met_per_s = entry["rate_per_gpu"] * study.fleet.gpus * entry["at_rate"]["attainment"]
    tokens_per_s = met_per_s * study.trace.mean_output_tokens
    joules = joules_per_token(study.fleet, tokens_per_s)
    price = price_per_million_tokens(study.prices.of_fleet_hour(study.fleet), tokens_per_s)
    if joules is not None:
        entry["joules_per_token"] = round(joules, 3)
    if price is not None:
        entry["price_per_million_tokens"] = round(price, 4)
    return entry


def _bounds(study: Study) -> dict[str, float]:
    """Return the bounds of G90 and G99 in requests/s/GPU, by their names in the document."""
    bounds: dict[str, float] = {}
    for share, percent in ((G90, "90"), (G99, "99")):
        bounds[f"simulated_{percent}"] = goodput_bound(study.trace, study.fleet, study.slo, share)
        if study.model:
            kernel_bound = goodput_bound(
                study.trace, study.fleet, study.slo, share, model=study.model
            )
            bounds[f"kernel_{percent}"] = kernel_bound
    return bounds


def _run_cases(
    study: Study, cases: list[Case], bounds: dict[str, float], report_progress: ProgressReporter
) -> list[PolicyResult]:
    """Run every case; with several jobs a thread for each, which waits for its processes."""
    prepared_rate = study.offered_rate
    if study.find_max:
        prepared_rate = PREPARED_SHARE * bounds["simulated_90"] * study.fleet.gpus
    study.trace.prepare_copies(prepared_rate)

    with CaseProcesses(cases, study.jobs) as processes:
        searches = [
            Search(case, report_progress, processes, case_number)
            for case_number, case in enumerate(cases)
        ]
        if study.jobs <= 1:
            return [_run_search(study, search) for search in searches]
        with ThreadPoolExecutor(len(cases)) as threads:
            return list(threads.map(lambda search: _run_search(study, search), searches))


def _run_search(study: Study, search: Search) -> PolicyResult:
    if study.find_max:
        return find_max(search, study.split)
    return measure_rate(search, study.split, study.offered_rate / study.fleet.gpus)


def _compare_fidelities(
    study: Study, case: Case, entry: PolicyEntry, report_progress: ProgressReporter
) -> Agreement:
    """Run one seed of the first policy in both fidelities, at its rate and split."""
    rate = entry["rate_per_gpu"] * study.fleet.gpus
    # A load has at least as many copies of the trace as this: a part of the trace is enough.
    copies = max(1.0, rate / study.trace.rate)
    trace = study.trace.head(min(1.0, AGREEMENT_REQUESTS / copies / len(study.trace.requests)))
    setting = case.setting(study.split or Split.parse(entry["split"]))

    def run_fidelity(name: str, kind: type[Simulation]) -> tuple[int, FidelityFigures]:
        """Return the requests of the run and its figures."""
        requests = trace.workload(rate, 0, study.closed_loop)
        started_at = time.perf_counter()
        outcomes = kind(setting, trace).run(requests)
        assert outcomes is not None, "a run without a limit of misses does not end early"
        seconds = time.perf_counter() - started_at
        summary = summarize(outcomes)
        figures: FidelityFigures = {
            "attainment": round(summary.attainment, 4),
            "ttft_p50": round(summary.ttft.get("p50", 0.0), 4),
            "tpot_p50": round(summary.tpot.get("p50", 0.0), 5),
            "requests_per_s": round(summary.requests / seconds),
        }
        report_progress(f"agreement: {name} {figures}")
        return summary.requests, figures

    _, event_skipping = run_fidelity("event_skipping", Simulation)
    request_count, step_exact = run_fidelity("step_exact", ExactSimulation)
    return {
        "policy": case.policy,
        "split": entry["split"],
        "requests": request_count,
        "event_skipping": event_skipping,
        "step_exact": step_exact,
    }
