"""What happened to each request, whether it met its targets, and the figures of a run. Pure.

A request is met if it was answered, its first token came within the TTFT target, and its gaps keep
the ITL target: their mean, and their p99 if there are 20 at least (as in `simulator.metrics`).
The gap between first and second token is a gap like any other. What was refused, failed or did not
end is a miss. Goodput: the share of offered requests that were met; good_per_s: how many a second.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..router.goodput import FEW
from ..simulator.metrics import SLACK, Slo
from .arrivals import Stage

QUANTILES = [*(q / 100 for q in range(100)), 0.995, 0.999, 1.0]
BINS, NARROWEST_S = 40, 1.0  #: of a timeline


@dataclass(slots=True)
class Outcome:
    """One request. Times in seconds; `at`, `sent` since the start of the run. `gaps_s`: between
    pieces that bring text; `output`: tokens, by the server's count if it tells them."""

    id: str
    at: float
    sent: float
    stage: int = 0
    prompt: int = 0
    output: int = 0
    cached: int = 0
    ttft_s: float = math.nan
    e2e_s: float = math.nan
    gaps_s: list[float] = field(default_factory=list)
    error: str = ""
    server_ttft_s: float = math.nan  #: by the server's own clock, if it says so
    lags_s: list[float] = field(default_factory=list)  #: of the client's reads

    @property
    def tpot_s(self) -> float:
        """Mean seconds of a token after the first; nan: there is none."""
        count = max(self.output - 1, len(self.gaps_s))
        return sum(self.gaps_s) / count if count else math.nan

    def missed(self, slo: Slo) -> str:
        """Empty, or what the request missed first: error, ttft, itl."""
        if self.error:
            return "error"
        if not self.ttft_s <= slo.ttft_s * SLACK:
            return "ttft"
        gaps, limit = self.gaps_s, slo.itl_s * SLACK
        if gaps and sum(gaps) / len(gaps) > limit:
            return "itl"
        late = sum(gap > limit for gap in gaps) if len(gaps) >= FEW else 0
        return "itl" if late > len(gaps) // 100 else ""

    def packed(self) -> dict[str, Any]:
        """For the way from a worker to the master."""
        return asdict(self)


def summarize(outcomes: list[Outcome], slo: Slo, span_s: float) -> dict[str, Any]:
    """Figures of requests offered within `span_s` seconds."""
    served = [one for one in outcomes if not one.error]
    missed = Counter(reason for one in outcomes if (reason := one.missed(slo)))
    met = len(outcomes) - missed.total()
    tokens = sum(one.output for one in outcomes)
    active_s = max((one.sent + one.e2e_s for one in served), default=0.0)
    begun = min((one.sent for one in served), default=0.0)
    firsts = [one.gaps_s[0] for one in served if one.gaps_s]
    return {
        "requests": len(outcomes),
        "served": len(served),
        "errors": dict(Counter(one.error for one in outcomes if one.error).most_common()),
        "met": met,
        "missed": dict(missed),
        "goodput": met / len(outcomes) if outcomes else None,
        "offered_per_s": len(outcomes) / span_s,
        "good_per_s": met / span_s,
        "prompt_tokens": sum(one.prompt for one in served),
        "cached_tokens": sum(one.cached for one in served),
        "output_tokens": tokens,
        "pieces": sum(len(one.gaps_s) + 1 for one in served),
        "tokens_per_s": tokens / (active_s - begun) if active_s > begun else 0.0,
        "ttft_ms": _ranks([one.ttft_s for one in served]),
        "itl_ms": _ranks([gap for one in served for gap in one.gaps_s]),
        "second_token_ms": _ranks(firsts),
        "tpot_ms": _ranks([one.tpot_s for one in served if one.gaps_s]),
        "e2e_ms": _ranks([one.e2e_s for one in served]),
        "server_ttft_ms": _ranks(
            [one.server_ttft_s for one in served if not math.isnan(one.server_ttft_s)]
        ),
    }


def _ranks(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values = np.array(seconds) * 1e3
    ranks = np.percentile(values, (50, 90, 95, 99)).tolist()
    found = dict(zip(("p50", "p90", "p95", "p99"), ranks, strict=True))
    return {
        "mean": round(float(values.mean()), 3),
        **{name: round(value, 3) for name, value in found.items()},
        "max": round(float(values.max()), 3),
    }


def distributions(outcomes: list[Outcome]) -> dict[str, Any]:
    """`QUANTILES` of TTFT, every ITL and the gap to the second token, in ms."""
    served = [one for one in outcomes if not one.error]
    kinds = {
        "ttft": [one.ttft_s for one in served],
        "itl": [gap for one in served for gap in one.gaps_s],
        "second_token": [one.gaps_s[0] for one in served if one.gaps_s],
    }
    found: dict[str, Any] = {"quantiles": QUANTILES}
    for name, values in kinds.items():
        points = (np.quantile(values, QUANTILES) * 1e3).tolist() if values else []
        found[f"{name}_ms"] = [round(point, 3) for point in points]
    return found


def by_stage(outcomes: list[Outcome], stages: list[Stage], slo: Slo) -> list[dict[str, Any]]:
    """Offered and good rate of every stage, with its latencies. Stages without a request, that a
    ramp did not come to, are left out."""
    rows = []
    for number, stage in enumerate(stages):
        members = [one for one in outcomes if one.stage == number]
        if not members:
            continue
        figures = summarize(members, slo, stage.end_s - stage.begin_s)
        kept = ("requests", "goodput", "offered_per_s", "good_per_s", "errors", "ttft_ms", "itl_ms")
        rows.append({"label": stage.label} | {name: figures[name] for name in kept})
    return rows


def knee(stages: list[dict[str, Any]], share: float) -> float | None:
    """Largest offered rate up to which `share` of the requests was met, between two stages by
    linear interpolation; None: not even the lowest."""
    best = None
    for before, row in zip([None, *stages], stages):  # noqa: B905
        if row["goodput"] >= share:
            best = row["offered_per_s"]
            continue
        if before is not None:
            part = (before["goodput"] - share) / (before["goodput"] - row["goodput"])
            best = before["offered_per_s"] + part * (row["offered_per_s"] - before["offered_per_s"])
        return best
    return best


def deciles(outcomes: list[Outcome], slo: Slo) -> list[dict[str, Any]]:
    """Attainment by prompt length, shortest tenth first."""
    order = sorted(outcomes, key=lambda one: one.prompt)
    rows = []
    for part in np.array_split(np.arange(len(order)), min(10, len(order)) or 1):
        members = [order[index] for index in part]
        if members:
            met = sum(not one.missed(slo) for one in members) / len(members)
            longest, count = members[-1].prompt, len(members)
            rows.append({"longest": longest, "requests": count, "goodput": met})
    return rows


def timeline(outcomes: list[Outcome], slo: Slo, span_s: float) -> list[dict[str, float]]:
    """By time of arrival: rates offered and met; by time of arrival and end: how many ran."""
    width = max(NARROWEST_S, span_s / BINS)
    rows = []
    for number in range(math.ceil(span_s / width)):
        begin, end = number * width, (number + 1) * width
        members = [one for one in outcomes if begin <= one.at < end]
        met = sum(not one.missed(slo) for one in members)
        running = sum(
            min(end, one.sent + one.e2e_s) - max(begin, one.sent)
            for one in outcomes
            if one.sent < end and one.sent + one.e2e_s > begin
        )
        rows.append(
            {
                "at_s": round(begin, 3),
                "offered_per_s": round(len(members) / width, 3),
                "good_per_s": round(met / width, 3),
                "running": round(running / width, 2),
            }
        )
    return rows


ROW = ("id", "at_s", "stage", "prompt", "cached", "output", "ttft_ms", "tpot_ms", "worst_gap_ms",
       "e2e_ms", "missed", "error")  # fmt: skip


def rows(outcomes: list[Outcome], slo: Slo) -> list[list[Any]]:
    """The columns of `ROW` for every request."""

    def ms(seconds: float) -> float | None:
        return None if math.isnan(seconds) else round(seconds * 1e3, 2)

    return [
        [
            *(one.id, round(one.at, 3), one.stage, one.prompt, one.cached, one.output),
            *(ms(one.ttft_s), ms(one.tpot_s), ms(max(one.gaps_s, default=math.nan))),
            *(ms(one.e2e_s), one.missed(slo), one.error),
        ]
        for one in sorted(outcomes, key=lambda one: one.at)
    ]
