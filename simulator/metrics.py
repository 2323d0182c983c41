"""Targets, what came of each request, and the figures of a run.

A request meets its targets if it was served, its first token came within its TTFT target, and its
gaps keep the ITL target: their mean and, if there are 20 at least, their p99. No more than one gap
in a hundred is late then. The gap between first and second token is a gap like any other. Refused
requests miss their targets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

import msgspec
import numpy as np

from ..router.goodput import GAPS_FOR_P99
from .errors import SimulationError
from .hardware import Hardware
from .trace import WorkloadRequest

ROUNDING_FACTOR = 1.0 + 1e-9  #: a time of up to its target times this keeps the target
PERCENTILES = (50, 90, 99)  #: of a summary's times; they are named `p50` and so on


class MeasuredRequest(Protocol):
    """What a run knows of a request that has ended. Times in seconds of virtual time."""

    request: WorkloadRequest  #: what was offered: its lengths
    refusal: str  #: why the request was refused; "": it was served
    arrived_at: float
    first_token_at: float  #: when the client got it
    ended_at: float  #: when the client got the last token
    ttft_target_s: float  #: for the seconds from arrival to first token
    late_gaps: int  #: number of gaps over the ITL target


@dataclass(frozen=True, slots=True)
class Slo:
    """The targets of all requests of a run: `ttft=max(1s,3x),itl=50ms`.

    The TTFT target is the largest of a time and a multiple of the request's isolated prefill, with
    nothing cached, on the reference replica.
    """

    ttft_s: float = 1.0  #: target from arrival to first token, at least
    ttft_multiple: float = 3.0  #: times the isolated prefill; 0: it is not used
    itl_s: float = 0.05  #: target between two tokens (inter-token latency)
    reference_hardware: Hardware | None = None  #: None: the multiple is not used

    @staticmethod
    def parse(text: str, reference: Hardware | None = None) -> Slo:
        """Return the targets of a text like `ttft=max(1s,3x),itl=50ms`, or `ttft=2s,itl=50ms`.

        `reference` is the replica whose isolated prefill counts. Raises SimulationError.
        """
        values: dict[str, str] = {}
        for part in re.split(r",(?![^(]*\))", text.replace(" ", "")):
            name, _, value = part.partition("=")
            values[name] = value
        if set(values) != {"ttft", "itl"}:
            raise SimulationError(f"slo {text}: expected ttft=...,itl=..., as in ttft=2s,itl=50ms")

        terms = [values["ttft"]]
        maximum = re.fullmatch(r"max\((.*)\)", values["ttft"])
        if maximum:
            terms = maximum[1].split(",")
        times_s = [_parse_seconds(term, text) for term in terms if not term.endswith("x")]
        multiples = [_parse_multiple(term, text) for term in terms if term.endswith("x")]
        return Slo(
            ttft_s=max(times_s, default=0.0),
            ttft_multiple=max(multiples, default=0.0),
            itl_s=_parse_seconds(values["itl"], text),
            reference_hardware=reference,
        )

    def ttft_target_s(self, prompt_tokens: int) -> float:
        """Return the TTFT target, in seconds, of a prompt of so many tokens."""
        if not self.ttft_multiple or self.reference_hardware is None:
            return self.ttft_s
        isolated_s = self.reference_hardware.cost.prefill_s(prompt_tokens, prompt_tokens)
        return max(self.ttft_s, self.ttft_multiple * isolated_s)

    def is_met(self, measured: MeasuredRequest) -> bool:
        """Return whether a request that has ended met its targets."""
        if measured.refusal:
            return False
        if measured.first_token_at - measured.arrived_at > measured.ttft_target_s * ROUNDING_FACTOR:
            return False

        gaps = measured.request.output_tokens - 1
        if gaps <= 0:
            return True
        if (measured.ended_at - measured.first_token_at) / gaps > self.itl_s * ROUNDING_FACTOR:
            return False
        # The 99th percentile is in time if no more than one gap in a hundred is late.
        return gaps < GAPS_FOR_P99 or measured.late_gaps <= gaps // 100

    def __str__(self) -> str:
        ttft = f"{self.ttft_s:g}s"
        if self.ttft_multiple:
            ttft = f"max({ttft},{self.ttft_multiple:g}x)"
        return f"ttft={ttft},itl={self.itl_s * 1e3:g}ms"


def _parse_seconds(text: str, slo_text: str) -> float:
    """Return the seconds of `50ms` or `2s`. Raises SimulationError, which names the whole Slo."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)", text)
    if not match:
        raise SimulationError(f"slo {slo_text}: {text} is no time like 50ms or 2s")
    return float(match[1]) * (1e-3 if match[2] == "ms" else 1.0)


def _parse_multiple(text: str, slo_text: str) -> float:
    """Return the number of `3x`. Raises SimulationError, which names the whole Slo."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)x", text)
    if not match:
        raise SimulationError(f"slo {slo_text}: {text} is no multiple like 3x")
    return float(match[1])


class SimulatedOutcome(msgspec.Struct, frozen=True, gc=False):
    """What came of one request."""

    arrival_s: float  #: since the start of the run
    prompt_tokens: int
    output_tokens: int
    tenant: str
    refusal_reason: str  #: "": the request was served
    ttft_s: float  #: inf: the request was refused
    ttft_target_s: float
    tpot_s: float  #: mean gap; 0: there is none
    first_gap_s: float  #: from the first token to the second; 0: there is no second
    late_gaps: int  #: number of gaps over the ITL target
    cached_tokens: int  #: tokens of the prompt that were cached where it was computed
    #: tokens whose KV went to a decode worker; 0: the prompt was computed on that worker
    moved_tokens: int
    targets_met: bool  #: by `Slo.is_met`
    predicted_ttft_s: float  #: by the router; 0: it predicted nothing


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What the outcomes of one load amount to. The fields are keys of `diptych simulate -o json`.

    The dictionaries of percentiles (`p50`, `p90`, `p99`) are in seconds over served requests, and
    empty where there are none.
    """

    requests: int
    attainment: float  #: share of the requests that met their targets
    refused: int
    prefix_hit: float  #: share of the served requests' prompt tokens that were cached
    local: float  #: share of the served requests whose prompt was computed where they decode
    ttft: dict[str, float] = field(default_factory=dict)  #: from arrival to first token
    #: A request's mean gap between tokens; of requests with a gap.
    tpot: dict[str, float] = field(default_factory=dict)
    first_gap: dict[str, float] = field(default_factory=dict)  #: of requests with a gap
    #: Attainment of each tenth of the requests, sorted by prompt length, the shortest first.
    deciles: list[float] = field(default_factory=list)
    tenants: dict[str, float] = field(default_factory=dict)  #: attainment by tenant
    #: Median of |predicted - observed| / observed TTFT, over served requests with a prediction.
    ttft_error: float = 0.0


def summarize(outcomes: list[SimulatedOutcome]) -> RunSummary:
    """Return the figures of these requests; those of several runs may be put together."""
    served = [outcome for outcome in outcomes if not outcome.refusal_reason]
    with_gaps = [outcome for outcome in served if outcome.output_tokens > 1]
    prompt_tokens = sum(outcome.prompt_tokens for outcome in served)
    cached_tokens = sum(outcome.cached_tokens for outcome in served)
    local_count = sum(outcome.moved_tokens == 0 for outcome in served)

    met = np.array([outcome.targets_met for outcome in outcomes], dtype=float)
    by_length = np.argsort([outcome.prompt_tokens for outcome in outcomes], kind="stable")
    tenths = np.array_split(met[by_length], 10)
    return RunSummary(
        requests=len(outcomes),
        attainment=_share(met),
        refused=len(outcomes) - len(served),
        prefix_hit=cached_tokens / max(1, prompt_tokens),
        local=local_count / max(1, len(served)),
        ttft=_percentiles([outcome.ttft_s for outcome in served]),
        tpot=_percentiles([outcome.tpot_s for outcome in with_gaps]),
        first_gap=_percentiles([outcome.first_gap_s for outcome in with_gaps]),
        deciles=[_share(tenth) for tenth in tenths],
        tenants=_attainment_by_tenant(outcomes),
        ttft_error=_median_ttft_error(served),
    )


def _share(met: np.ndarray) -> float:
    """Return the mean of ones and zeros; 1 if there are none."""
    return float(met.mean()) if len(met) else 1.0


def _attainment_by_tenant(outcomes: list[SimulatedOutcome]) -> dict[str, float]:
    met_by_tenant: dict[str, list[bool]] = {}
    for outcome in outcomes:
        met_by_tenant.setdefault(outcome.tenant, []).append(outcome.targets_met)
    return {tenant: sum(met) / len(met) for tenant, met in sorted(met_by_tenant.items())}


def _median_ttft_error(served: list[SimulatedOutcome]) -> float:
    errors = [
        abs(outcome.predicted_ttft_s / outcome.ttft_s - 1)
        for outcome in served
        if outcome.predicted_ttft_s and outcome.ttft_s < inf
    ]
    return float(np.median(errors)) if errors else 0.0


def _percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    figures = np.percentile(values, PERCENTILES)
    return {f"p{rank}": float(value) for rank, value in zip(PERCENTILES, figures, strict=True)}
