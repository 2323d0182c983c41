"""The documents of `diptych simulate -o json`: studies write them, reports read them.

Rates are requests per second and GPU, times are seconds, shares are between 0 and 1.
"""

from __future__ import annotations

from typing import NotRequired, TypedDict

OWN_POLICY = "diptych"  #: name of the policy that all others are compared with


class RunFigures(TypedDict):
    """`metrics.RunSummary` as plain values."""

    requests: int
    attainment: float
    refused: int
    prefix_hit: float
    local: float
    ttft: dict[str, float]
    tpot: dict[str, float]
    first_gap: dict[str, float]
    deciles: list[float]
    tenants: dict[str, float]
    ttft_error: float


class PolicyEntry(TypedDict):
    """One policy in one variant. The rates, splits and shares of G90 and G99 are None where no
    maximum was searched."""

    name: str
    variant: str
    split: str  #: the one of `at_rate`
    g90_per_gpu: float | None
    g99_per_gpu: float | None
    g99_split: str | None
    bound_share: float | None  #: G90 by the bound of the simulated hardware
    prefix_hit: float | None
    requests_per_s_simulated: int  #: of one core
    rate_per_gpu: float  #: the one of `at_rate`
    g99_bound_share: NotRequired[float]
    kernel_bound_share: NotRequired[float]  #: G90 by the bound at kernel efficiency
    g99_kernel_bound_share: NotRequired[float]
    at_rate: NotRequired[RunFigures]  #: missing where not even the lowest rate was held


class FidelityFigures(TypedDict):
    """One run in one fidelity."""

    attainment: float
    ttft_p50: float
    tpot_p50: float
    requests_per_s: int  #: simulated, of wall time


class Agreement(TypedDict):
    """The same requests in both fidelities."""

    policy: str
    split: str
    requests: int
    event_skipping: FidelityFigures
    step_exact: FidelityFigures


class LiveComparison(TypedDict):
    """A recorded run beside its simulation."""

    attainment: float  #: of the recorded run
    points_apart: float  #: percentage points from it to the simulated attainment


class StudyDocument(TypedDict):
    """Several policies on one trace."""

    trace: str
    requests: int
    model: str  #: "": the workers have measured coefficients
    fleet: str
    gpus: int
    replicas: int
    slo: str
    seeds: int
    dispatch: str
    bound_per_gpu: dict[str, float]  #: `simulated_90`, `simulated_99`, `kernel_90`, `kernel_99`
    policies: list[PolicyEntry]
    requests_simulated: int
    requests_per_s_simulated: int  #: of wall time, all cores together
    seconds: float  #: of wall time
    agreement: NotRequired[Agreement]
    live: NotRequired[LiveComparison]
