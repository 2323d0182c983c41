"""vLLM's metrics on a gateway's main port, for clients that read them there beside the API.

vLLM is one process, and Diptych is many. So this page joins what the gateway counts of its own
requests with what the router and the workers say when they are asked. Prometheus reads each
process's own page instead, where no number is exported twice (`exporter.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...kv_transfer.statistics import Histogram
from .page import MetricRow

if TYPE_CHECKING:
    from ..gateway.attempt.request import Request

# Upper bounds of buckets, in seconds, tokens and answers (the `n` of a request).
SECONDS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0)
TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)
ANSWERS = (1.0, 2.0, 5.0, 10.0, 20.0)
BOUNDS = {
    "vllm:request_prompt_tokens": TOKENS,
    "vllm:request_generation_tokens": TOKENS,
    "vllm:request_params_max_tokens": TOKENS,
    "vllm:request_params_n": ANSWERS,
    "vllm:request_queue_time_seconds": SECONDS,
    "vllm:request_inference_time_seconds": SECONDS,
    "vllm:request_prefill_time_seconds": SECONDS,
    "vllm:request_decode_time_seconds": SECONDS,
}
#: vLLM's words for how a request ended; all others are `error`.
FINISHED_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort"}


class VllmTally:
    """Counts the requests of one gateway as vLLM counts those of an engine."""

    def __init__(self) -> None:
        self._histograms = {name: Histogram(bounds) for name, bounds in BOUNDS.items()}
        self._ended = Counter(dict.fromkeys(FINISHED_REASONS.values(), 0))

    def count_ended(self, request: Request, reason: str) -> None:
        """Count a request that ran and has ended. Its times are counted if it had a first token.

        `reason` says how it ended: a key of `FINISHED_REASONS`, or an error's.
        """
        self._ended[FINISHED_REASONS.get(reason, "error")] += 1
        self._observe("request_prompt_tokens", len(request.prompt_ids))
        self._observe("request_generation_tokens", request.generated_tokens)
        self._observe("request_params_max_tokens", request.sampling.max_tokens)
        self._observe("request_params_n", request.sampling.n)
        ttft_s = request.ttft_s
        if ttft_s is None:
            return
        queue_s = max(0.0, request.times.placed_s - request.times.arrived_s)
        # All times are of one clock; the request has one answer or more.
        last_tokens_s = [answer.token_times[-1] for answer in request.answers if answer.token_times]
        end_s = max(last_tokens_s) - request.times.arrived_s
        self._observe("request_queue_time_seconds", queue_s)
        self._observe("request_inference_time_seconds", end_s - queue_s)
        self._observe("request_prefill_time_seconds", ttft_s - queue_s)
        self._observe("request_decode_time_seconds", end_s - ttft_s)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[f"vllm:{name}"].observe(value)

    def rows(self, rejected: int) -> Iterator[MetricRow]:
        """Yield all counts; `rejected` requests were refused because of load."""
        for name, histogram in self._histograms.items():
            yield MetricRow(name, histogram.values())
        prompt_tokens = self._histograms["vllm:request_prompt_tokens"].sum
        generated_tokens = self._histograms["vllm:request_generation_tokens"].sum
        yield MetricRow("vllm:prompt_tokens_total", prompt_tokens)
        yield MetricRow("vllm:generation_tokens_total", generated_tokens)
        for reason, count in sorted(self._ended.items()):
            yield MetricRow("vllm:request_success_total", count, {"finished_reason": reason})
        yield MetricRow("vllm:admission_rejections_total", rejected, {"reason": "load"})


def cluster_rows(
    router: dict[str, Any] | None,
    workers: list[dict[str, Any]],
    block_tokens: int,
    max_model_len: int,
) -> Iterator[MetricRow]:
    """Yield what the statistics of the router (None: it is not there) and of the workers say.

    Numbers of workers are added up. A block of KV has `block_tokens` tokens. `max_model_len` is the
    largest number of tokens that a prompt and its answer may have together: so many tokens must the
    KV pools have for each request that is sure to fit.
    """
    engines = [worker["engine"] for worker in workers]
    yield from _request_rows(router["waiting"] if router else 0, engines)
    yield from _kv_rows(engines, block_tokens, max_model_len)
    if router:  # else the counters would go back to 0, and come again as news
        yield MetricRow("vllm:prefix_cache_queries_total", router["prompt_tokens"])
        yield MetricRow("vllm:prefix_cache_hits_total", router["hit_tokens"])
    yield MetricRow("vllm:num_preemptions_total", sum(engine["preemptions"] for engine in engines))
    yield from _histogram_rows(engines)


def _request_rows(queued: int, engines: list[dict[str, Any]]) -> Iterator[MetricRow]:
    """Yield how many requests run and wait; `queued` of them wait in the router."""
    # A sequence on a worker runs, or it waits there for blocks (`waiting`) or its turn (`ready`).
    running = sum(engine["running"] + engine["prefilling"] for engine in engines)
    deferred = sum(engine["waiting"] + engine["ready"] for engine in engines)
    yield MetricRow("vllm:num_requests_running", running)
    yield MetricRow("vllm:num_requests_waiting", queued + deferred)
    for reason, count in (("capacity", queued), ("deferred", deferred)):
        yield MetricRow("vllm:num_requests_waiting_by_reason", count, {"reason": reason})


def _kv_rows(
    engines: list[dict[str, Any]], block_tokens: int, max_model_len: int
) -> Iterator[MetricRow]:
    """Yield how large the KV pools of all workers are together, and which share is in use."""
    blocks = [engine["kv_blocks"] for engine in engines]
    total_blocks = sum(counts["total"] for counts in blocks)
    idle_blocks = sum(counts["free"] + counts["cached"] for counts in blocks)
    used_share = (total_blocks - idle_blocks) / total_blocks if total_blocks else 0.0
    yield MetricRow("vllm:kv_cache_usage_perc", used_share)
    cache_tokens = total_blocks * block_tokens
    cache_labels = {
        "block_size": str(block_tokens),
        "num_gpu_blocks": str(total_blocks),
        "kv_cache_size_tokens": str(cache_tokens),
        "kv_cache_max_concurrency": f"{cache_tokens / max_model_len:.2f}",
    }
    yield MetricRow("vllm:cache_config_info", 1, cache_labels)


def _histogram_rows(engines: list[dict[str, Any]]) -> Iterator[MetricRow]:
    """Yield the histograms that engines keep, if any engine does."""
    for name, key in (
        ("vllm:iteration_tokens_total", "step_tokens"),
        ("vllm:request_num_preemptions", "request_preemptions"),
    ):
        values = Counter[str]()
        for engine in engines:
            values.update(engine.get(key, {}))  # another version may not have it
        if values:
            yield MetricRow(name, values)
