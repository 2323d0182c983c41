"""Targets, what came of each request, and the figures of a run.

A request meets its targets if it was served, its first token came within its TTFT target, and its
gaps keep the ITL target: their mean and, if there are 20 at least, their p99. No more than one gap
in a hundred is late then. The gap between first and second token is a gap like any other. Refused
requests miss their targets.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Protocol

import msgspec
import numpy as np

from ..protos.frames import Coefficients
from ..protos.targets import TargetError, TtftTarget, parse_time
from ..router.goodput import GAPS_FOR_P99
from .errors import SimulationError
from .trace import WorkloadRequest

ROUNDING_FACTOR = 1.0 + 1e-9  #: a time of up to its target times this keeps the target
PERCENTILES = (50, 90, 95, 99)  #: of a summary's times; they are named `p50` and so on
DEFAULT_TTFT = TtftTarget.flat(2.0)  #: of runs whose targets nobody asks for
OFFERED_RANKS = (95, 99)  #: of a time over all requests that were offered


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
    """The targets of all requests of a run: `ttft=max(1s, 3x),itl=50ms`.

    The TTFT target is an expression of `protos/targets.py`.
    """

    ttft: TtftTarget = DEFAULT_TTFT  #: from arrival to first token
    itl_s: float = 0.05  #: target between two tokens (inter-token latency)
    #: Of each kind of replica; the fastest one says how long an isolated prefill takes. Without
    #: any, the TTFT target can be no multiple of that.
    costs: tuple[Coefficients, ...] = ()

    @staticmethod
    def flat(ttft_s: float, itl_s: float) -> Slo:
        """Return targets that are the same times for every request, in seconds."""
        return Slo(TtftTarget.flat(ttft_s), itl_s)

    @staticmethod
    def parse(text: str, costs: tuple[Coefficients, ...] = ()) -> Slo:
        """Return the targets of a text like `ttft=max(1s, 3x),itl=50ms`, or `ttft=2s,itl=50ms`.

        `costs` are those of the fleet's kinds of replicas. Raises SimulationError.
        """
        values: dict[str, str] = {}
        for part in re.split(r",(?![^(]*\))", text.replace(" ", "")):
            name, _, value = part.partition("=")
            values[name] = value
        if set(values) != {"ttft", "itl"}:
            raise SimulationError(f"slo {text}: expected ttft=...,itl=..., as in ttft=2s,itl=50ms")
        try:
            return Slo(TtftTarget.parse(values["ttft"]), parse_time(values["itl"]), costs)
        except TargetError as error:
            raise SimulationError(f"slo {text}: {error}") from None

    @property
    def ttft_s(self) -> float:
        """The fixed part of the TTFT target: no request has less than this."""
        return self.ttft.least_s

    def isolated_s(self, prompt_tokens: int) -> float:
        """Return the seconds of a whole prompt alone on the fastest kind of replica.

        Raises SimulationError if no replica's cost is known.
        """
        if not self.costs:
            raise SimulationError(
                f"ttft {self.ttft}: multiples of the isolated prefill need its cost; give times"
            )
        return min([cost.prefill_s(prompt_tokens, prompt_tokens) for cost in self.costs])

    def ttft_target_s(self, prompt_tokens: int) -> float:
        """Return the TTFT target, in seconds, of a prompt of so many tokens."""
        isolated_s = self.isolated_s(prompt_tokens) if self.ttft.needs_isolated else 0.0
        return self.ttft.seconds(prompt_tokens, isolated_s)

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
        return f"ttft={self.ttft},itl={self.itl_s * 1e3:g}ms"


def isolated_cost(text: str) -> Coefficients:
    """Return the cost of prompts that take so long alone: `20ms + 150ms/1k`, as measured.

    The text is a target without multiples (`protos/targets.py`). Only the cost of prompts is filled in;
    what grows with the square of a prompt's length, and what steps of decode cost, is 0, as nobody asks.
    Raises SimulationError.
    """
    try:
        target = TtftTarget.parse(text)
    except TargetError as error:
        raise SimulationError(f"isolated {error}") from None
    if len(target.sums) > 1 or target.needs_isolated:
        raise SimulationError(f"isolated {text}: expected a time like 20ms + 150ms/1k")
    (line,) = target.sums
    return Coefficients(
        prefill_base=line.fixed_s,
        prefill_token=line.per_1k_s / 1000,
        prefill_pair=0.0,
        step_base=0.0,
        step_row=0.0,
        step_weights=0.0,
        step_token=0.0,
    )


def offered_percentiles(served_s: Sequence[float], offered: int) -> dict[str, float | None]:
    """Return the percentiles `OFFERED_RANKS` of a time over all requests that were offered.

    What was refused, or failed, never got there: it stands behind all that were served. A
    percentile that falls on such a request is None. Ranks are nearest ranks.
    """
    ordered_s = sorted(served_s)
    figures: dict[str, float | None] = {}
    for rank in OFFERED_RANKS:
        place = max(0, ceil(offered * rank / 100) - 1)
        figures[f"p{rank}"] = ordered_s[place] if place < len(ordered_s) else None
    return figures if offered else {}


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

    The dictionaries of percentiles (`p50`, `p90`, `p95`, `p99`) are in seconds over served
    requests, and empty where there are none.
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
    #: `p95` and `p99` of the time to the first token over all requests, the refused ones included:
    #: None where the percentile falls on one of these.
    ttft_offered: dict[str, float | None] = field(default_factory=dict)
    #: The same of each request's time divided by its target.
    ttft_by_target: dict[str, float | None] = field(default_factory=dict)


def summarize(outcomes: list[SimulatedOutcome]) -> RunSummary:
    """Return the figures of these requests; those of several runs may be put together."""
    served = [outcome for outcome in outcomes if not outcome.refusal_reason]
    with_gaps = [outcome for outcome in served if outcome.output_tokens > 1]
    prompt_tokens = sum(outcome.prompt_tokens for outcome in served)
    cached_tokens = sum(outcome.cached_tokens for outcome in served)
    local_count = sum(outcome.moved_tokens == 0 for outcome in served)

    met = np.array([outcome.targets_met for outcome in outcomes], dtype=float)
    by_length = np.argsort([outcome.prompt_tokens for outcome in outcomes], kind="stable")
    # Of fewer than 10 requests each is a part of its own: an empty part has no share.
    tenths = np.array_split(met[by_length], max(1, min(10, len(met))))
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
        ttft_offered=offered_percentiles([outcome.ttft_s for outcome in served], len(outcomes)),
        ttft_by_target=offered_percentiles(
            [outcome.ttft_s / outcome.ttft_target_s for outcome in served], len(outcomes)
        ),
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
