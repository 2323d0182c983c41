"""The documents of `diptych simulate -o json`: studies write them, reports read them.

Rates of a load (`..._per_gpu`) are requests per second and GPU. The simulator's own speed
(`requests_per_s...`) is in simulated requests per second. Times are seconds, shares are between 0
and 1. G90 (G99) is the largest offered rate at which 90 % (99 %) of the requests meet their
targets. A study either searches both, or runs at one rate that its user gave or the trace recorded.
"""

from __future__ import annotations

from typing import NotRequired, TypedDict

OWN_POLICY = "diptych"  #: name of the policy that all others are compared with


class RunFigures(TypedDict):
    """`metrics.RunSummary` as plain values: the figures of one rate, over the loads of all seeds.

    Where nothing else is said, percentiles are `p50`, `p90`, `p95` and `p99`, over the served
    requests, and a dictionary of them is empty if no request was served.
    """

    requests: int  #: offered ones, with those that were refused
    attainment: float  #: share of the requests that met their targets
    refused: int
    prefix_hit: float  #: share of the served requests' prompt tokens that were cached
    local: float  #: share of the served requests whose prompt was computed where they decode
    ttft: dict[str, float]  #: percentiles of the time to the first token
    tpot: dict[str, float]  #: percentiles of a request's mean gap between tokens
    first_gap: dict[str, float]  #: percentiles of the gap between first and second token
    deciles: list[float]  #: attainment by tenth of the prompt lengths, the shortest first
    tenants: dict[str, float]  #: attainment by tenant
    #: Median over the served requests of |predicted - observed| / observed, where `predicted` is
    #: the time to the first token by which the router placed the request; 0 without predictions.
    ttft_error: float
    #: `p95` and `p99` of the time to the first token over all requests that were offered; None
    #: where the percentile falls on a refused one
    ttft_offered: dict[str, float | None]
    ttft_by_target: dict[str, float | None]  #: the same of each request's time by its target


class PolicyEntry(TypedDict):
    """One policy in one variant.

    Where no maximum was searched, the figures of G90 and G99 that may be None are None, and the
    shares of bounds that are `NotRequired` are missing. Where one was searched and not even the lowest
    rate was held, the rate is 0, and its split means nothing and may be empty.
    """

    name: str  #: of the policy
    #: `policy-only`: all but the policy is ours; `full`: the rest, too, is as its authors ship it;
    #: `deadline-order`: all but the policy is ours, the order in which workers compute prompts too.
    variant: str
    #: Replicas by role, as `6P2D`: the split that holds G90. Without a search, the one that the
    #: user gave, or else the one at which most requests met their targets.
    split: str
    g90_per_gpu: float | None
    g99_per_gpu: float | None
    g99_split: str | None  #: the one that holds G99
    bound_share: float | None  #: G90 divided by the upper bound for the simulated hardware
    prefix_hit: float | None  #: that of `at_rate`; None where `at_rate` is missing
    requests_per_s_simulated: int  #: of one core
    rate_per_gpu: float  #: G90; without a search, the rate that the user gave or the trace recorded
    #: [low, high], requests/s per GPU: between which rates G90 and G99 lie, of each seed by itself
    #: and by the rates that were tried; missing where no maximum was searched.
    g90_interval: NotRequired[list[float]]
    g99_interval: NotRequired[list[float]]
    g99_bound_share: NotRequired[float]  #: G99 divided by its bound, as `bound_share`
    #: G90 and G99 divided by their bounds at kernel efficiency; missing, too, without these bounds.
    kernel_bound_share: NotRequired[float]
    g99_kernel_bound_share: NotRequired[float]
    #: The run under `split` at `rate_per_gpu`; missing where a search found no rate that is held.
    at_rate: NotRequired[RunFigures]
    #: What a token in time of this run takes of the GPUs' energy, at most, and what a million of them
    #: cost by the prices that the user stated (`expense.py`); missing where it is not known.
    joules_per_token: NotRequired[float]
    price_per_million_tokens: NotRequired[float]


class FidelityFigures(TypedDict):
    """One run in one fidelity."""

    attainment: float  #: share of the requests that met their targets
    ttft_p50: float  #: seconds
    tpot_p50: float  #: seconds
    requests_per_s: int  #: simulated per second of wall time


class Agreement(TypedDict):
    """The same requests in both fidelities: with steps skipped, and with every step."""

    policy: str  #: the study's first one
    split: str
    requests: int  #: of the run, about 2,000
    event_skipping: FidelityFigures  #: by `sim.py`, as in the rest of the study
    step_exact: FidelityFigures  #: by `exact.py`


class LiveComparison(TypedDict):
    """A recorded run beside its simulation."""

    attainment: float  #: of the recorded run
    #: Percentage points, 0 or more, between it and the simulated attainment of the study's first
    #: policy.
    points_apart: float


class StudyDocument(TypedDict):
    """Several policies on one trace."""

    trace: str  #: its name
    requests: int  #: of the trace
    model: str  #: "": the workers have measured coefficients
    engine: str  #: a sentence: on which engine the workers' times were measured
    fit_warnings: list[str]  #: sentences on why the workers' times may be far off
    fleet: str  #: as it was named, such as `H200:32`
    tiers: str  #: below each worker's KV pool, as `memory=256GiB,disk=2TiB`; "": none
    cells: int  #: into which the fleet is divided, each with a router and a queue of its own
    gpus: int  #: the number of GPUs; of CPU workers, the number of their cores
    replicas: int  #: of all roles
    slo: str  #: the targets, as `ttft=2s,itl=50ms`
    seeds: int  #: how many loads are drawn of the trace for each rate
    #: When later turns of a session come: `timestamp`, as recorded; `thinktime`, after an answer.
    dispatch: str
    #: The upper bounds of G90 and G99, in requests/s for each GPU: `simulated_90` and
    #: `simulated_99` for hardware as fast as the simulated one; `kernel_90` and `kernel_99` for
    #: hardware as fast as its kernels, without overheads and all-reduce (`bound.kernel_hardware`).
    #: These two are missing without a `model`.
    bound_per_gpu: dict[str, float]
    policies: list[PolicyEntry]  #: by variant, then in the order in which they were named
    requests_simulated: int  #: of all policies, without `agreement`
    requests_per_s_simulated: int  #: per second of wall time, all cores together
    seconds: float  #: of wall time, without `agreement`
    agreement: NotRequired[Agreement]  #: where it was asked for
    live: NotRequired[LiveComparison]  #: where the trace is a recorded run
