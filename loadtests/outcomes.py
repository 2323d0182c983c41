"""What happened to each request, whether it met its targets, and the figures of a run. Pure.

A request is met if it was answered, its first token came within the TTFT target, and its gaps keep
the ITL target: their mean, and their p99 if there are 20 at least (as in `simulator.metrics`).
The gap between first and second token is a gap like any other. What was refused, failed or did not
end is a miss. Goodput: the share of offered requests that were met; good_per_s: how many a second.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..router.goodput import GAPS_FOR_P99
from ..simulator.metrics import ROUNDING_FACTOR, Slo, offered_percentiles
from .arrivals import RateStage
from .percentiles import percentiles

QUANTILES = [*(q / 100 for q in range(100)), 0.995, 0.999, 1.0]  #: The points of plotted curves.
LATENCY_RANKS = (50, 90, 95, 99)  #: Percentiles in tables.
TIMELINE_BINS = 40
NARROWEST_BIN_S = 1.0  #: Short runs have fewer bins: a shorter one would hold too few requests.
#: Of the figures of `summarize`, those of each stage.
STAGE_FIGURES = (
    "requests",
    "goodput",
    "offered_per_s",
    "good_per_s",
    "errors",
    "ttft_ms",
    "itl_ms",
)


@dataclass(slots=True)
class LoadOutcome:
    """One request of a load test. Latencies are nan where there is none.

    A piece is what the stream brings at a time: one token with most servers. TTFT and E2E count
    from `sent_s`, not from `arrival_s`: a client that is late is not the server's fault.
    """

    id: str
    arrival_s: float  #: when it was to be sent, since the start of the run
    sent_s: float  #: when it was sent, since the start of the run
    stage_index: int = 0  #: of the run's stages, which differ in their rate
    prompt_tokens: int = 0  #: as planned, until the server tells its own count
    output_tokens: int = 0  #: by the server's count if it tells one, else pieces with text
    cached_tokens: int = 0  #: of the prompt, as the server says
    ttft_s: float = math.nan  #: from sending to the first piece with text
    e2e_s: float = math.nan  #: from sending to the last piece with text
    gaps_s: list[float] = field(default_factory=list)  #: between pieces that bring text
    error: str = ""  #: what went wrong; empty: the request was answered
    server_ttft_s: float = math.nan  #: by the server's own clock, if it says so
    #: for each read whose bytes the kernel stamped: seconds from their arrival to the read
    lags_s: list[float] = field(default_factory=list)

    @property
    def tpot_s(self) -> float:
        """Mean seconds of a token after the first; nan: there is none."""
        count = max(self.output_tokens - 1, len(self.gaps_s))
        return sum(self.gaps_s) / count if count else math.nan

    @property
    def ended_s(self) -> float:
        """When the answer's last token came, since the start of the run."""
        return self.sent_s + self.e2e_s

    def missed(self, slo: Slo) -> str:
        """Returns what the request missed first: error, ttft or itl; "" if it missed nothing."""
        if self.error:
            return "error"
        ttft_target_s = slo.ttft_target_s(self.prompt_tokens)
        if not self.ttft_s <= ttft_target_s * ROUNDING_FACTOR:  # so that nan is a miss
            return "ttft"
        itl_limit_s = slo.itl_s * ROUNDING_FACTOR
        gaps = self.gaps_s
        if gaps and sum(gaps) / len(gaps) > itl_limit_s:
            return "itl"
        if len(gaps) >= GAPS_FOR_P99:
            # The p99 keeps the target if at most `len(gaps) // 100` gaps are longer.
            late_gaps = sum(gap > itl_limit_s for gap in gaps)
            if late_gaps > len(gaps) // 100:
                return "itl"
        return ""

    def packed(self) -> dict[str, Any]:
        """Returns the fields by name, for the way from a worker to the master."""
        return asdict(self)


def summarize(outcomes: list[LoadOutcome], slo: Slo, span_s: float) -> dict[str, Any]:
    """Returns the figures of requests offered within `span_s` seconds.

    `requests`, `errors`, `met`, `missed`, `goodput`, `offered_per_s` and `good_per_s` are of all
    requests. All else but `ttft_offered_ms` is of the served ones, which have no error;
    `tokens_per_s` counts from their first sending to their last end. Figures of a latency that no
    request has are an empty dict. `goodput` is None without a request.

    `ttft_offered_ms` ranks the TTFT of all requests: those that were refused or failed come behind
    the served ones, and a percentile that falls on one of them is None.
    """
    served = _served(outcomes)
    missed = Counter(filter(None, (outcome.missed(slo) for outcome in outcomes)))
    errors = Counter(outcome.error for outcome in outcomes if outcome.error)
    met = len(outcomes) - missed.total()
    output_tokens = sum(outcome.output_tokens for outcome in served)
    active_s = _active_s(served)
    server_ttfts_s = [outcome.server_ttft_s for outcome in served]
    return {
        "requests": len(outcomes),
        "served": len(served),
        "errors": dict(errors.most_common()),
        "met": met,
        "missed": dict(missed),
        "goodput": met / len(outcomes) if outcomes else None,
        "offered_per_s": len(outcomes) / span_s,
        "good_per_s": met / span_s,
        "prompt_tokens": sum(outcome.prompt_tokens for outcome in served),
        "cached_tokens": sum(outcome.cached_tokens for outcome in served),
        "output_tokens": output_tokens,
        "pieces": sum(len(outcome.gaps_s) + 1 for outcome in served),
        "tokens_per_s": output_tokens / active_s if active_s > 0 else 0.0,
        "ttft_ms": _latency_figures(outcome.ttft_s for outcome in served),
        "ttft_offered_ms": _offered_ms([outcome.ttft_s for outcome in served], len(outcomes)),
        "itl_ms": _latency_figures(_all_gaps_s(served)),
        "second_token_ms": _latency_figures(_first_gaps_s(served)),
        "tpot_ms": _latency_figures(outcome.tpot_s for outcome in served if outcome.gaps_s),
        "e2e_ms": _latency_figures(outcome.e2e_s for outcome in served),
        "server_ttft_ms": _latency_figures(
            ttft_s for ttft_s in server_ttfts_s if not math.isnan(ttft_s)
        ),
    }


def _served(outcomes: list[LoadOutcome]) -> list[LoadOutcome]:
    return [outcome for outcome in outcomes if not outcome.error]


def _active_s(served: list[LoadOutcome]) -> float:
    """Returns the seconds from the first request to the end of the last answer; 0 without any."""
    first_sent_s = min((outcome.sent_s for outcome in served), default=0.0)
    last_ended_s = max((outcome.ended_s for outcome in served), default=0.0)
    return last_ended_s - first_sent_s


def _all_gaps_s(outcomes: list[LoadOutcome]) -> list[float]:
    return [gap for outcome in outcomes for gap in outcome.gaps_s]


def _first_gaps_s(outcomes: list[LoadOutcome]) -> list[float]:
    return [outcome.gaps_s[0] for outcome in outcomes if outcome.gaps_s]


def _latency_figures(latencies_s: Iterable[float]) -> dict[str, float]:
    """Returns mean, percentiles and maximum in ms; empty without latencies."""
    seconds = list(latencies_s)
    if not seconds:
        return {}
    return {
        "mean": round(float(np.mean(seconds)) * 1e3, 3),
        **percentiles(seconds, LATENCY_RANKS, factor=1e3, digits=3),
        "max": round(max(seconds) * 1e3, 3),
    }


def _offered_ms(ttfts_s: list[float], offered: int) -> dict[str, float | None]:
    """Returns the TTFT percentiles over all offered requests; None: it falls on a failed one."""
    return {
        rank: None if seconds is None else round(seconds * 1e3, 3)
        for rank, seconds in offered_percentiles(ttfts_s, offered).items()
    }


def distributions(outcomes: list[LoadOutcome]) -> dict[str, Any]:
    """Returns `QUANTILES` of TTFT, every gap and the gap to the second token, in ms.

    With separate prefill and decode workers the second token waits for the transfer between them.
    """
    served = _served(outcomes)
    return {
        "quantiles": QUANTILES,
        "ttft_ms": _quantiles_ms([outcome.ttft_s for outcome in served]),
        "itl_ms": _quantiles_ms(_all_gaps_s(served)),
        "second_token_ms": _quantiles_ms(_first_gaps_s(served)),
    }


def _quantiles_ms(seconds: list[float]) -> list[float]:
    if not seconds:
        return []
    return [round(float(value) * 1e3, 3) for value in np.quantile(seconds, QUANTILES)]


def summarize_stages(
    outcomes: list[LoadOutcome], stages: list[RateStage], slo: Slo
) -> list[dict[str, Any]]:
    """Returns offered and good rate of every stage, with its latencies (`STAGE_FIGURES`).

    Stages without a request, which a ramp did not come to, are left out.
    """
    rows: list[dict[str, Any]] = []
    for index, stage in enumerate(stages):
        members = [outcome for outcome in outcomes if outcome.stage_index == index]
        if members:
            figures = summarize(members, slo, stage.end_s - stage.begin_s)
            rows.append({"label": stage.label} | {name: figures[name] for name in STAGE_FIGURES})
    return rows


def find_knee(stages: list[dict[str, Any]], share: float) -> float | None:
    """Returns the largest offered rate up to which `share` of the requests was met.

    Between the last stage that holds and the first that does not, the rate is interpolated
    linearly. None when not even the lowest stage holds.
    """
    held: dict[str, Any] | None = None  # the last stage of which enough was met
    for stage in stages:
        if stage["goodput"] >= share:
            held = stage
            continue
        if held is None:
            return None
        part = (held["goodput"] - share) / (held["goodput"] - stage["goodput"])
        return held["offered_per_s"] + part * (stage["offered_per_s"] - held["offered_per_s"])
    return held["offered_per_s"] if held else None


def summarize_deciles(outcomes: list[LoadOutcome], slo: Slo) -> list[dict[str, Any]]:
    """Returns the goodput by prompt length, shortest tenth first.

    `longest` is the longest prompt of a tenth, in tokens.
    """
    by_length = sorted(outcomes, key=lambda outcome: outcome.prompt_tokens)
    part_count = min(10, len(by_length))
    if not part_count:
        return []
    rows: list[dict[str, Any]] = []
    for indices in np.array_split(np.arange(len(by_length)), part_count):
        members = [by_length[index] for index in indices]
        met = sum(not outcome.missed(slo) for outcome in members)
        rows.append(
            {
                "longest": members[-1].prompt_tokens,
                "requests": len(members),
                "goodput": met / len(members),
            }
        )
    return rows


def summarize_timeline(
    outcomes: list[LoadOutcome], slo: Slo, span_s: float
) -> list[dict[str, float]]:
    """Returns rates offered and met by time of arrival, and how many requests ran, in equal bins.

    `running` is the mean number of served requests that ran in a bin: a failed one has no end.
    """
    width_s = max(NARROWEST_BIN_S, span_s / TIMELINE_BINS)
    rows: list[dict[str, float]] = []
    for number in range(math.ceil(span_s / width_s)):
        begin_s = number * width_s
        end_s = (number + 1) * width_s
        members = [outcome for outcome in outcomes if begin_s <= outcome.arrival_s < end_s]
        met = sum(not outcome.missed(slo) for outcome in members)
        running_s = sum(
            min(end_s, outcome.ended_s) - max(begin_s, outcome.sent_s)
            for outcome in outcomes
            if outcome.sent_s < end_s and outcome.ended_s > begin_s
        )
        rows.append(
            {
                "at_s": round(begin_s, 3),
                "offered_per_s": round(len(members) / width_s, 3),
                "good_per_s": round(met / width_s, 3),
                "running": round(running_s / width_s, 2),
            }
        )
    return rows


#: What the document has of each request: `at_s` is the planned arrival; prompt, cached and output
#: are in tokens.
REQUEST_COLUMNS = (
    "id",
    "at_s",
    "stage",
    "prompt",
    "cached",
    "output",
    "ttft_ms",
    "tpot_ms",
    "worst_gap_ms",
    "e2e_ms",
    "missed",
    "error",
)


def request_rows(outcomes: list[LoadOutcome], slo: Slo) -> list[list[Any]]:
    """Returns the values of `REQUEST_COLUMNS` for every request, by time of arrival."""
    return [
        [
            outcome.id,
            round(outcome.arrival_s, 3),
            outcome.stage_index,
            outcome.prompt_tokens,
            outcome.cached_tokens,
            outcome.output_tokens,
            _rounded_ms(outcome.ttft_s),
            _rounded_ms(outcome.tpot_s),
            _rounded_ms(max(outcome.gaps_s, default=math.nan)),
            _rounded_ms(outcome.e2e_s),
            outcome.missed(slo),
            outcome.error,
        ]
        for outcome in sorted(outcomes, key=lambda outcome: outcome.arrival_s)
    ]


def _rounded_ms(seconds: float) -> float | None:
    return None if math.isnan(seconds) else round(seconds * 1e3, 2)
