"""The documents of `diptych simulate -o json`: studies write them, reports read them.

Rates are requests per second and GPU, times are seconds, shares are between 0 and 1. G90 (G99) is
the largest offered rate at which 90 % (99 %) of the requests meet their targets.
"""

from __future__ import annotations

from typing import NotRequired, TypedDict

OWN_POLICY = "diptych"  #: name of the policy that all others are compared with


class RunFigures(TypedDict):
    """`metrics.RunSummary` as plain values. The percentiles are `p50`, `p90` and `p99`."""

    requests: int
    attainment: float  #: share of the requests that met their targets
    refused: int
    prefix_hit: float  #: share of the prompt tokens that were cached
    local: float  #: share of the served requests whose prompt was computed where they decode
    ttft: dict[str, float]  #: percentiles of the time to the first token
    tpot: dict[str, float]  #: percentiles of a request's mean gap between tokens
    first_gap: dict[str, float]  #: percentiles of the gap between first and second token
    deciles: list[float]  #: attainment by tenth of the prompt lengths, the shortest first
    tenants: dict[str, float]  #: attainment by tenant
    ttft_error: float  #: median of |predicted - observed| / observed


class PolicyEntry(TypedDict):
    """One policy in one variant. The rates, splits and shares of G90 and G99 are None where no
    maximum was searched."""

    name: str  #: of the policy
    variant: str  #: `policy-only`, or `full`: also as the policy's authors ship the rest
    split: str  #: replicas by role, as `6P2D`: the one of `at_rate`
    g90_per_gpu: float | None
    g99_per_gpu: float | None
    g99_split: str | None  #: the one that holds G99; `split` holds G90
    bound_share: float | None  #: G90 by the bound of the simulated hardware
    prefix_hit: float | None  #: that of `at_rate`
    requests_per_s_simulated: int  #: of one core
    rate_per_gpu: float  #: the one of `at_rate`
    g99_bound_share: NotRequired[float]
    kernel_bound_share: NotRequired[float]  #: G90 by the bound at kernel efficiency
    g99_kernel_bound_share: NotRequired[float]
    at_rate: NotRequired[RunFigures]  #: missing where not even the lowest rate was held


class FidelityFigures(TypedDict):
    """One run in one fidelity."""

    attainment: float  #: share of the requests that met their targets
    ttft_p50: float
    tpot_p50: float
    requests_per_s: int  #: simulated, of wall time


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
    points_apart: float  #: percentage points from it to the simulated attainment


class StudyDocument(TypedDict):
    """Several policies on one trace."""

    trace: str  #: its name
    requests: int  #: of the trace
    model: str  #: "": the workers have measured coefficients
    engine: str  #: whose engine the times of the workers are, as a sentence
    fleet: str  #: as it was named, such as `H200:32`
    gpus: int  #: of CPU workers, their cores
    replicas: int
    slo: str  #: the targets, as `ttft=2s,itl=50ms`
    seeds: int
    #: When later turns of a session come: `timestamp`, as recorded; `thinktime`, after an answer.
    dispatch: str
    bound_per_gpu: dict[str, float]  #: `simulated_90`, `simulated_99`, `kernel_90`, `kernel_99`
    policies: list[PolicyEntry]
    requests_simulated: int
    requests_per_s_simulated: int  #: of wall time, all cores together
    seconds: float  #: of wall time
    agreement: NotRequired[Agreement]
    live: NotRequired[LiveComparison]
