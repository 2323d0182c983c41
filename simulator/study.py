"""Several policies on one trace: what `diptych simulate` runs, on all cores.

Each policy is a search in a thread; their runs share the processes of `Cores`. Each result is a
plain dict, so that the report needs nothing else, and they come in the order of the policies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ..router import RouterConfig
from ..router.policies import POLICIES
from .bound import bound
from .case import OURS, Case, Cores
from .errors import SimulationError
from .fleet import Faults, Fleet, Split
from .metrics import Slo, summarize
from .search import Search, as_json, find_max, measure
from .sim import Simulation
from .trace import Trace


@dataclass(frozen=True, slots=True)
class Study:
    """`rate`: requests/s to run at if no maximum is searched; None: the recorded one."""

    trace: Trace
    model: str  #: "" for measured coefficients: no kernel bound then
    fleet: Fleet
    fleet_name: str
    slo: Slo
    policies: tuple[str, ...] = (OURS,)
    variants: tuple[str, ...] = ("policy-only",)
    split: Split | None = None
    seeds: int = 3
    find_max: bool = False
    rate: float | None = None
    closed: bool = False
    faults: Faults = field(default_factory=Faults)
    jobs: int = 1
    agreement: bool = False  #: run the first policy step by step too; say how far apart they are
    router: RouterConfig | None = None  #: of a recorded run


def policies_named(names: list[str]) -> tuple[str, ...]:
    if names == ["all"]:
        return tuple(POLICIES)
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        raise SimulationError(f"policy {unknown[0]}: expected all or one of {', '.join(POLICIES)}")
    return tuple(names)


def run(study: Study, tell: Callable[[str], None] = lambda line: None) -> dict:
    """The whole report as a dict: the document of `-o json`."""
    begun = time.perf_counter()
    bounds = _bounds(study)
    tell("bound " + "  ".join(f"{name} {value:.3f}" for name, value in bounds.items()))
    cases = [
        Case(
            study.trace,
            study.fleet,
            study.slo,
            policy,
            variant,
            study.seeds,
            study.closed,
            study.faults,
            router=study.router,
        )
        for variant in study.variants
        for policy in study.policies
    ]
    entries = _each(study, cases, bounds, tell)
    simulated = sum(entry.pop("_requests") for entry in entries)
    seconds = time.perf_counter() - begun
    document = {
        "trace": study.trace.name,
        "requests": len(study.trace.items),
        "model": study.model,
        "fleet": study.fleet_name,
        "gpus": study.fleet.gpus,
        "replicas": study.fleet.replicas,
        "slo": str(study.slo),
        "seeds": study.seeds,
        "dispatch": "thinktime" if study.closed else "timestamp",
        "bound_per_gpu": {name: round(value, 4) for name, value in bounds.items()},
        "policies": entries,
        "requests_simulated": simulated,
        "requests_per_s_simulated": round(simulated / seconds),
        "seconds": round(seconds, 1),
    }
    if study.agreement:
        document["agreement"] = _agreement(study, cases[0], entries[0], tell)
    return document


AGREEMENT_REQUESTS = 2000  #: of a run in both fidelities, about


def _agreement(study: Study, case: Case, entry: dict, tell: Callable[[str], None]) -> dict:
    """One seed of the first policy, at its rate and split, in both fidelities."""
    from .exact import ExactSimulation

    trace = study.trace
    rate = entry["rate_per_gpu"] * study.fleet.gpus
    copies = max(1.0, rate / trace.rate)
    trace = trace.head(min(1.0, AGREEMENT_REQUESTS / copies / len(trace.items)))
    split = study.split or Split.of(entry["split"])
    found: dict = {"policy": case.policy, "split": entry["split"]}
    for name, kind in (("event_skipping", Simulation), ("step_exact", ExactSimulation)):
        requests = trace.workload(rate, 0, study.closed)
        begun = time.perf_counter()
        outcomes = kind(case.setting(split), trace).run(requests)
        assert outcomes is not None
        seconds = time.perf_counter() - begun
        summary = summarize(outcomes)
        found["requests"] = summary.requests
        found[name] = {
            "attainment": round(summary.attainment, 4),
            "ttft_p50": round(summary.ttft.get("p50", 0.0), 4),
            "tpot_p50": round(summary.tpot.get("p50", 0.0), 5),
            "requests_per_s": round(summary.requests / seconds),
        }
        tell(f"agreement: {name} {found[name]}")
    return found


def _bounds(study: Study) -> dict[str, float]:
    found = {}
    for share in (0.9, 0.99):
        name = f"{share:.0%}".rstrip("%")
        found[f"simulated_{name}"] = bound(study.trace, study.fleet, study.slo, share)
        if study.model:
            found[f"kernel_{name}"] = bound(study.trace, study.fleet, study.slo, share, study.model)
    return found


def _each(study: Study, cases: list[Case], bounds: dict, tell: Callable) -> list[dict]:
    highest = bounds["simulated_90"] * study.fleet.gpus
    study.trace.prepare(highest * LIKELY if study.find_max else study.rate or study.trace.rate)
    with Cores(cases, study.jobs) as cores:
        searches = [Search(case, tell, cores, number) for number, case in enumerate(cases)]
        if study.jobs <= 1:
            return [_one(study, search, bounds) for search in searches]
        with ThreadPoolExecutor(len(cases)) as threads:
            return list(threads.map(lambda search: _one(study, search, bounds), searches))


LIKELY = 0.5  #: of the bound: loads up to there are made once, before the processes are forked


def _one(study: Study, search: Search, bounds: dict) -> dict:
    if study.find_max:
        result = find_max(search, study.split)
    else:
        rate = study.rate or study.trace.rate
        result = measure(search, study.split, rate / study.fleet.gpus)
    return as_json(result, bounds) | {"_requests": result.requests}
