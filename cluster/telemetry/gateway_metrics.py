"""What a gateway counts of its requests: each run of a request once, at its end.

A client that comes back for the rest of its answer makes a run of its own (`count_ended`).
Nothing is counted per token. The histograms are `kv_transfer.statistics.Histogram`, which takes all
gaps of a request in one call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ...kv_transfer.statistics import Histogram
from ...protos import frames
from ...protos.targets import parse_cached
from ...router.goodput import p99
from .page import MetricRow
from .vllm_metrics import VllmTally

if TYPE_CHECKING:
    from ..config import ClassSettings, ClusterConfig, TenantTargets
    from ..gateway.apis.ignored_fields import IgnoredKind
    from ..gateway.attempt.request import Request
    from ..gateway.text.formats.parts import CallFlaw

# Upper bounds of buckets, in seconds or tokens. Those of TTFT (time to the first token) and ITL
# (gaps between tokens) get one more for each target that is configured, of classes and tenants too,
# or for the fixed part of a target for TTFT that depends on the prompt, as `max(1s, 3x)` does.
TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0)
ITL_S = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
E2E_S = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0)
TOKENS = tuple(2.0**power for power in range(18))

TARGETS_MAX = 16  #: Targets that have a bucket of their own; each is a time series of each class.
CLASSES_MAX = 16  #: Classes that have histograms of their own; each is many time series.
OTHER_CLASS = "other"  #: Stands for classes beyond `CLASSES_MAX`, or not in the configuration.
CODE_CLIENT_LEFT = 499  #: The client went away before the answer's end.
#: The cluster or the client's API key has no room for the request, or the router predicts that its
#: answer would be late and its class prefers a refusal.
CODE_TOO_MANY_REQUESTS = 429
CODE_COMPLETE = 200

#: vLLM's histograms, and ours that they are the sum of, over all classes.
VLLM_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "request_ttft_seconds",
    "vllm:inter_token_latency_seconds": "request_itl_seconds",
    "vllm:e2e_request_latency_seconds": "request_e2e_seconds",
}


class GatewayTally:
    """Counts of one model on one gateway since the model was added there, by class of service level.

    `classes` are the names of the classes in the configuration.
    """

    def __init__(self, config: ClusterConfig, classes: list[str]) -> None:
        groups: list[ClassSettings | TenantTargets] = [
            *config.router.classes.values(),
            *config.slo.tenants.values(),
        ]
        ttft_targets_s = [parse_cached(group.ttft).least_s for group in groups if group.ttft]
        itl_targets_s = [group.itl_ms / 1e3 for group in groups if group.itl_ms]
        ttft_bounds = _with_targets(TTFT_S, [config.slo.ttft_target.least_s, *ttft_targets_s])
        itl_bounds = _with_targets(ITL_S, [config.slo.itl_ms / 1e3, *itl_targets_s])
        bounds_by_metric = {
            "request_ttft_seconds": ttft_bounds,
            "request_itl_seconds": itl_bounds,
            "request_first_gap_seconds": itl_bounds,
            "request_first_token_held_seconds": itl_bounds,
            "request_tpot_seconds": itl_bounds,
            "request_e2e_seconds": E2E_S,
            "request_prompt_tokens": TOKENS,
            "request_output_tokens": TOKENS,
        }
        self._classes = set(classes[:CLASSES_MAX])
        self._histograms_by_class = {
            slo_class: {name: Histogram(bounds) for name, bounds in bounds_by_metric.items()}
            for slo_class in (*sorted(self._classes), OTHER_CLASS)
        }
        #: Requests by the HTTP status that they ended with (or its equivalent), and class.
        self.codes: Counter[tuple[int, str]] = Counter()
        #: First tokens that went through a `FirstTokenGate`, by the `ReleaseReason` why each went
        #: out when it did, and class.
        self.first_token_releases: Counter[tuple[str, str]] = Counter()
        self.vllm = VllmTally()
        #: Fields of bodies that had no effect, by the API that got them, and by why.
        self.ignored_fields: Counter[tuple[str, str]] = Counter()
        #: What was wrong with calls in answers. The gateway's parsers count here.
        self.call_flaws: Counter[CallFlaw] = Counter()

    def count_refused(self, code: int, slo_class: str = "") -> None:
        """Count only the code of a request: it never ran, or its latencies are counted already."""
        self.codes[code, self._counted_class(slo_class)] += 1

    def count_ignored_fields(self, api: str, counts: Mapping[IgnoredKind, int]) -> None:
        """Count what a request sent without effect. The labels are never the client's words."""
        for kind, count in counts.items():
            self.ignored_fields[api, kind] += count

    def count_ended(self, request: Request, outcome: frames.RequestOutcome, code: int) -> None:
        """Count a request that ran, with all its latencies.

        A client that comes back for the rest of an answer makes a new request, which has the
        answer's earlier tokens but not their times. All latencies are then those of the new run:
        the TTFT is the time from the client's return to the first token that was generated for it,
        as in the `RequestOutcome` that the router judges.
        """
        slo_class = self._counted_class(outcome.slo_class)
        self.codes[code, slo_class] += 1
        self.vllm.count_ended(request, outcome.reason)
        histograms = self._histograms_by_class[slo_class]
        histograms["request_prompt_tokens"].observe(len(request.prompt_ids))
        # A request that failed or was left has those latencies that it got to.
        if request.ttft_s is not None:
            histograms["request_ttft_seconds"].observe(request.ttft_s)
            histograms["request_output_tokens"].observe(request.generated_tokens)
        times = request.times
        if times.first_token_release:
            histograms["request_first_token_held_seconds"].observe(times.first_token_held_s)
            self.first_token_releases[times.first_token_release, slo_class] += 1
        gaps_s = request.gaps_s
        if gaps_s:
            histograms["request_itl_seconds"].observe_all(gaps_s)
            histograms["request_tpot_seconds"].observe(outcome.itl_mean_s)
            # The hand-over from prefill to decode lies between an answer's first two tokens. Where
            # earlier tokens have no times, the first two times are those of later tokens.
            first_gaps_s = [
                answer.token_times[1] - answer.token_times[0]
                for answer in request.answers
                if 1 < len(answer.token_times) == len(answer.journal)
            ]
            histograms["request_first_gap_seconds"].observe_all(first_gaps_s)
        if code == CODE_COMPLETE:  # the time of half an answer would say nothing
            histograms["request_e2e_seconds"].observe(request.age_s)

    def vllm_rows(self) -> Iterator[MetricRow]:
        """Yield what vLLM counts beyond `rows`, of this gateway's requests."""
        rejected = sum(
            count for (code, _), count in self.codes.items() if code == CODE_TOO_MANY_REQUESTS
        )
        return self.vllm.rows(rejected)

    def _counted_class(self, slo_class: str) -> str:
        """Return the class to count under: clients may name any, and must not make time series."""
        return slo_class if slo_class in self._classes else OTHER_CLASS

    def rows(self, running: int, retries: int, handovers: int) -> Iterator[MetricRow]:
        """Yield all counts.

        `running` requests run now. `retries` attempts failed, those included after which their
        request was given up. `handovers` attempts were handed over by their worker.
        """
        for (code, slo_class), count in sorted(self.codes.items()):
            labels = {"code": str(code), "slo_class": slo_class}
            yield MetricRow("requests_total", count, labels)
        for slo_class, histograms in self._histograms_by_class.items():
            # Most clusters see no other class: its empty histograms are left out.
            if slo_class == OTHER_CLASS and not histograms["request_prompt_tokens"].count:
                continue
            for name, histogram in histograms.items():
                yield MetricRow(name, histogram.values(), {"slo_class": slo_class})
        for (reason, slo_class), count in sorted(self.first_token_releases.items()):
            labels = {"reason": reason, "slo_class": slo_class}
            yield MetricRow("first_tokens_total", count, labels)
        for (api, kind), count in sorted(self.ignored_fields.items()):
            yield MetricRow("ignored_fields_total", count, {"api": api, "kind": kind})
        for flaw, count in sorted(self.call_flaws.items()):
            yield MetricRow("tool_call_flaws_total", count, {"flaw": flaw})
        yield MetricRow("inflight_requests", running)
        yield MetricRow("request_retries_total", retries)
        yield MetricRow("request_handovers_total", handovers)
        for vllm_name, name in VLLM_HISTOGRAMS.items():
            values = Counter[str]()
            for histograms in self._histograms_by_class.values():
                values.update(histograms[name].values())
            yield MetricRow(vllm_name, values)


def outcome_of(request: Request, reason: str) -> frames.RequestOutcome:
    """Return what the router judges goodput by.

    `reason` is `stop`, `length`, `cancelled` or the reason of an error. Without a first token,
    `waited_s` is how long the client waited for one.
    """
    terms = request.terms
    gaps_s = request.gaps_s
    return frames.RequestOutcome(
        tenant=terms.tenant,
        slo_class=terms.slo_class,
        reason=reason,
        waited_s=request.age_s if request.ttft_s is None else request.ttft_s,
        tokens=request.generated_tokens,
        gaps=len(gaps_s),
        itl_mean_s=sum(gaps_s) / len(gaps_s) if gaps_s else 0.0,
        itl_p99_s=p99(gaps_s),
        ttft_target_s=request.targets.ttft_s or terms.ttft_target_s,
        itl_target_s=request.targets.itl_s or terms.itl_target_s,
        prompt_tokens=len(request.prompt_ids),
    )


def _with_targets(bounds: tuple[float, ...], targets: list[float]) -> tuple[float, ...]:
    """Add buckets that end at `targets`, so that attainment is read and not interpolated.

    Of a target that depends on the prompt, `targets` has the fixed part. A target without a fixed
    part (0), such as `3x`, gets no bucket. Nor do those after the first `TARGETS_MAX`.
    """
    distinct_targets = list(dict.fromkeys(target for target in targets if target))
    return tuple(sorted({*bounds, *distinct_targets[:TARGETS_MAX]}))
