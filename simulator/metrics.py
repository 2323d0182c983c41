"""Targets, what happened to each request, and the figures made of it.

A request is met if it was served, its first token came within its TTFT target, and its gaps keep
the ITL target: their p99 (if there are 20 at least) and their mean. The gap between first and
second token is a gap like any other. Refusals are misses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ..router.goodput import GAPS_FOR_P99
from .errors import SimulationError
from .hardware import Hardware, prefill_s

if TYPE_CHECKING:
    from .worker import Job

SLACK = 1.0 + 1e-9


@dataclass(frozen=True, slots=True)
class Slo:
    """`ttft=max(1s,3x),itl=50ms`: TTFT target = the largest of a time and a multiple of the
    request's isolated prefill (nothing cached) on the reference replica."""

    ttft_s: float = 1.0
    multiple: float = 3.0
    itl_s: float = 0.05
    reference: Hardware | None = None

    @staticmethod
    def of(text: str, reference: Hardware | None = None) -> Slo:
        values: dict[str, str] = {}
        for part in re.split(r",(?![^(]*\))", text.replace(" ", "")):
            name, _, value = part.partition("=")
            values[name] = value
        if set(values) != {"ttft", "itl"}:
            raise SimulationError(f"slo {text}: expected ttft=...,itl=..., as in ttft=2s,itl=50ms")
        inner = re.fullmatch(r"max\((.*)\)", values["ttft"])
        terms = inner[1].split(",") if inner else [values["ttft"]]
        flat = [_seconds(term, text) for term in terms if not term.endswith("x")]
        times = [float(term[:-1]) for term in terms if term.endswith("x")]
        return Slo(max(flat, default=0.0), max(times, default=0.0), _seconds(values["itl"], text),
                   reference)  # fmt: skip

    def ttft(self, prompt: int) -> float:
        if not self.multiple or self.reference is None:
            return self.ttft_s
        return max(self.ttft_s, self.multiple * prefill_s(self.reference.cost, prompt, prompt))

    def met(self, job: Job) -> bool:
        if job.outcome or job.first - job.arrived > job.target * SLACK:
            return False
        gaps = job.request.output - 1
        if gaps <= 0:
            return True
        if (job.ended - job.first) / gaps > self.itl_s * SLACK:
            return False
        return gaps < GAPS_FOR_P99 or job.late <= gaps // 100

    def __str__(self) -> str:
        flat = f"{self.ttft_s:g}s"
        ttft = f"max({flat},{self.multiple:g}x)" if self.multiple else flat
        return f"ttft={ttft},itl={self.itl_s * 1e3:g}ms"


def _seconds(text: str, whole: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)", text)
    if not found:
        raise SimulationError(f"slo {whole}: {text} is no time like 50ms or 2s")
    return float(found[1]) * (1e-3 if found[2] == "ms" else 1.0)


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """One request. Times in seconds; `tpot`: mean gap; `late`: gaps over the target."""

    at: float
    prompt: int
    output: int
    tenant: str
    refused: str
    ttft: float
    target: float
    tpot: float
    first_gap: float
    late: int
    hit: int
    moved: int
    met: bool
    predicted: float


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run amounts to. Percentiles in seconds over served requests."""

    requests: int
    attainment: float
    refused: int
    prefix_hit: float  #: of prompt tokens
    local: float  #: share of requests whose prompt was computed where they decode
    ttft: dict[str, float] = field(default_factory=dict)
    tpot: dict[str, float] = field(default_factory=dict)
    first_gap: dict[str, float] = field(default_factory=dict)
    deciles: list[float] = field(default_factory=list)  #: attainment by prompt length
    tenants: dict[str, float] = field(default_factory=dict)
    ttft_error: float = 0.0  #: median of |predicted - observed| / observed


def summarize(outcomes: list[Outcome]) -> Summary:
    served = [one for one in outcomes if not one.refused]
    met = np.array([one.met for one in outcomes], dtype=float)
    order = np.argsort([one.prompt for one in outcomes], kind="stable")
    parts = np.array_split(met[order], 10)
    tenants: dict[str, list[bool]] = {}
    for one in outcomes:
        tenants.setdefault(one.tenant, []).append(one.met)
    told = [abs(o.predicted / o.ttft - 1) for o in served if o.predicted and o.ttft < inf]
    gaps = [one for one in served if one.output > 1]
    return Summary(
        requests=len(outcomes),
        attainment=float(met.mean()) if len(met) else 1.0,
        refused=len(outcomes) - len(served),
        prefix_hit=sum(o.hit for o in served) / max(1, sum(o.prompt for o in served)),
        local=sum(o.moved == 0 for o in served) / max(1, len(served)),
        ttft=_percentiles([one.ttft for one in served]),
        tpot=_percentiles([one.tpot for one in gaps]),
        first_gap=_percentiles([one.first_gap for one in gaps]),
        deciles=[float(part.mean()) if len(part) else 1.0 for part in parts],
        tenants={name: sum(values) / len(values) for name, values in sorted(tenants.items())},
        ttft_error=float(np.median(told)) if told else 0.0,
    )


def _percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    found = np.percentile(values, (50, 90, 99))
    return {f"p{p}": float(value) for p, value in zip((50, 90, 99), found, strict=True)}
