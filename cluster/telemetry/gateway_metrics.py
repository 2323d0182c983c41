"""What a gateway counts of its requests: once for each, at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...kv_transfer.statistics import Histogram
from ...protos import frames as f
from ...router.goodput import p99
from .page import Row

if TYPE_CHECKING:
    from ..config import ClusterConfig
    from ..gateway.attempt.stream import Request

TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0)
ITL_S = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
E2E_S = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0)
TOKENS = tuple(2.0**power for power in range(18))
CLASSES_MAX = 16
LEFT = 499  #: the client went away before the answer's end
DONE = 200


class GatewayTally:
    """Seconds, tokens. `classes` are those of the configuration: others count as `other`."""

    def __init__(self, config: ClusterConfig, classes: list[str]) -> None:
        ttft, itl = config.slo.ttft_ms / 1e3, config.slo.itl_ms / 1e3
        bounds = {
            "request_ttft_seconds": _with(TTFT_S, ttft),
            "request_itl_seconds": _with(ITL_S, itl),
            "request_first_gap_seconds": _with(ITL_S, itl),
            "request_tpot_seconds": _with(ITL_S, itl),
            "request_e2e_seconds": E2E_S,
            "request_prompt_tokens": TOKENS,
            "request_output_tokens": TOKENS,
        }
        self._classes = {*classes[:CLASSES_MAX]}
        self._seen = {
            one: {name: Histogram(bound) for name, bound in bounds.items()}
            for one in (*sorted(self._classes), "other")
        }
        self.codes: Counter[tuple[int, str]] = Counter()

    def refused(self, code: int, slo_class: str = "") -> None:
        """It never ran, or it counts already."""
        self.codes[code, self._class(slo_class)] += 1

    def over(self, request: Request, outcome: f.RequestOutcome, code: int) -> None:
        gaps = request.gaps_s
        slo_class = self._class(outcome.slo_class)
        self.codes[code, slo_class] += 1
        seen = self._seen[slo_class]
        seen["request_prompt_tokens"].observe(len(request.ids))
        if request.ttft_s is not None:
            seen["request_ttft_seconds"].observe(request.ttft_s)
            seen["request_output_tokens"].observe(request.generated)
        if gaps:
            seen["request_itl_seconds"].observe_all(gaps)
            seen["request_tpot_seconds"].observe(outcome.itl_mean_s)
            firsts = [one.times[1] - one.times[0] for one in request.answers if len(one.times) > 1]
            seen["request_first_gap_seconds"].observe_all(firsts)
        if code == DONE:
            seen["request_e2e_seconds"].observe(request.age_s)

    def _class(self, name: str) -> str:
        return name if name in self._classes else "other"

    def rows(self, running: int, retries: int, handovers: int) -> Iterator[Row]:
        """Requests that run; attempts that were made again, and that were handed over."""
        for (code, slo_class), count in sorted(self.codes.items()):
            labels = {"code": str(code), "slo_class": slo_class}
            yield Row("requests_total", count, labels)
        for slo_class, seen in self._seen.items():
            if seen["request_prompt_tokens"].count or slo_class != "other":
                for name, histogram in seen.items():
                    yield Row(name, histogram.values(), {"slo_class": slo_class})
        yield Row("inflight_requests", running)
        yield Row("request_retries_total", retries)
        yield Row("request_handovers_total", handovers)
        for theirs, ours in (
            ("vllm:time_to_first_token_seconds", "request_ttft_seconds"),
            ("vllm:inter_token_latency_seconds", "request_itl_seconds"),
            ("vllm:e2e_request_latency_seconds", "request_e2e_seconds"),
        ):
            whole = Counter[str]()
            for seen in self._seen.values():
                whole.update(seen[ours].values())
            yield Row(theirs, whole)


def outcome_of(request: Request, reason: str) -> f.RequestOutcome:
    """`reason`: stop, length, cancelled or an error's."""
    terms, ttft = request.terms, request.ttft_s
    gaps = request.gaps_s
    return f.RequestOutcome(
        tenant=terms.tenant,
        slo_class=terms.slo_class,
        reason=reason,
        waited_s=request.age_s if ttft is None else ttft,
        tokens=request.generated,
        gaps=len(gaps),
        itl_mean_s=sum(gaps) / len(gaps) if gaps else 0.0,
        itl_p99_s=p99(gaps),
        ttft_target_s=terms.ttft_s,
        itl_target_s=terms.itl_s,
    )


def _with(bounds: tuple[float, ...], target: float) -> tuple[float, ...]:
    """Attainment is read off the bucket that ends at the target, not interpolated."""
    return tuple(sorted({*bounds, target}))
