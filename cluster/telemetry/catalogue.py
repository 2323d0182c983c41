"""Every metric that Diptych exports: its kind, its labels, what it says (pure).

Names carry the prefix `diptych_`, base units, and `_total` where they only grow. Every sample
has the label `model` too; those of workers have `pool` (the worker's home) and `replica`. No label
holds a request's id; tenants, classes, peers and reasons are bounded (`page.MANY`).
"""

from __future__ import annotations

from typing import NamedTuple

PREFIX = "diptych_"
BASE = ("model",)
WORKER = ("model", "pool", "replica")


class Metric(NamedTuple):
    """`labels` are those beside the base ones of its process."""

    part: str  #: gateway | router | worker | control
    kind: str  #: counter | gauge | histogram
    labels: tuple[str, ...]
    help: str


def _all(part: str, *metrics: tuple[str, str, str, str]) -> dict[str, Metric]:
    return {
        PREFIX + name: Metric(part, kind, tuple(labels.split()), text)
        for name, kind, labels, text in metrics
    }


GATEWAY = _all(
    "gateway",
    ("requests_total", "counter", "code slo_class", "Requests by HTTP status, or its equivalent"),
    ("request_ttft_seconds", "histogram", "slo_class", "From arrival to the first token"),
    ("request_itl_seconds", "histogram", "slo_class", "Gaps between tokens, the first included"),
    ("request_first_gap_seconds", "histogram", "slo_class", "Between first and second token"),
    ("request_tpot_seconds", "histogram", "slo_class", "Mean gap of a request"),
    ("request_e2e_seconds", "histogram", "slo_class", "From arrival to the end"),
    ("request_prompt_tokens", "histogram", "slo_class", "Prompt length in tokens"),
    ("request_output_tokens", "histogram", "slo_class", "Tokens generated, of all answers"),
    ("inflight_requests", "gauge", "", "Requests that run now"),
    ("request_retries_total", "counter", "", "Attempts that failed and were made again"),
    ("request_handovers_total", "counter", "", "Attempts that a worker handed over"),
)
ROUTER = _all(
    "router",
    (
        "goodput_requests_total",
        "counter",
        "slo_class tenant met",
        "By the targets that were met",
    ),
    ("routing_decisions_total", "counter", "decision reason", "Placements, and refusals"),
    ("routing_duration_seconds", "histogram", "", "CPU time of an event that placed a request"),
    ("ttft_prediction_error_seconds", "histogram", "side", "TTFT observed, against predicted"),
    ("prefix_hit_tokens_total", "counter", "", "Prompt tokens that the workers chosen held"),
    ("prefix_query_tokens_total", "counter", "", "Prompt tokens of requests that were placed"),
    ("queue_depth", "gauge", "", "Requests that wait for a worker"),
    ("queue_late", "gauge", "", "Of these, who cannot be in time any more"),
    ("queue_wait_seconds", "histogram", "", "From a request's arrival here until it was placed"),
    ("rejected_total", "counter", "reason", "Refusals"),
    ("workers", "gauge", "pool role", "Workers that the router knows, by home and by role now"),
)
ENGINE = _all(
    "worker",
    ("worker_info", "gauge", "role state", "1 for what this worker is now"),
    ("kv_blocks", "gauge", "state", "KV blocks; quarantined and orphaned ones should be 0"),
    ("running_requests", "gauge", "", "Sequences in the running batch"),
    ("waiting_requests", "gauge", "", "Sequences that wait for blocks or for their turn"),
    ("batch_tokens", "histogram", "", "Rows of a step"),
    ("step_duration_seconds", "histogram", "phase", "A step, with prefill in it or without"),
    ("prefill_tokens_total", "counter", "", "Prompt tokens that were computed"),
    ("preemptions_total", "counter", "", "Sequences that gave their blocks up to others"),
    ("draft_tokens_total", "counter", "result", "Guessed tokens that were verified"),
)
TRANSFER = _all(
    "worker",
    ("kv_transfer_bytes_total", "counter", "direction", "KV that was sent, or has arrived"),
    (
        "kv_transfer_duration_seconds",
        "histogram",
        "",
        "Of what arrived: with a write under way",
    ),
    ("kv_transfer_exposed_seconds", "histogram", "", "Of these: after the prefill's end"),
    ("kv_transfer_checksum_seconds_total", "counter", "", "CPU time of checksums"),
    ("kv_transfer_failures_total", "counter", "reason", "Transfers that did not arrive"),
    ("kv_sessions", "gauge", "state", "Open transfers by state"),
    ("kv_peers", "gauge", "", "Workers' ranks that the transport reaches"),
    ("kv_peer_bytes_total", "counter", "peer", "KV that has arrived from this worker"),
    ("kv_peer_transport", "gauge", "peer transport", "1 for the transport that really ran"),
)
CONTROL = _all(
    "control",
    ("replicas", "gauge", "pool state", "Replicas by state, and the target"),
    ("scale_actions_total", "counter", "pool direction", "Orders to change a pool's size"),
    ("flips_total", "counter", "from to", "Workers that were given another role"),
    ("build_info", "gauge", "version python", "1"),
)
METRICS = GATEWAY | ROUTER | ENGINE | TRANSFER | CONTROL

#: vLLM's names for what we have too: its boards, and llm-d's endpoint picker, work with them
VLLM: dict[str, Metric] = {
    "vllm:num_requests_running": Metric("worker", "gauge", (), "As running_requests"),
    "vllm:num_requests_waiting": Metric("worker", "gauge", (), "As waiting_requests"),
    "vllm:kv_cache_usage_perc": Metric("worker", "gauge", (), "Share of KV blocks in use"),
    "vllm:prefix_cache_queries_total": Metric("router", "counter", (), "As prefix_query_tokens"),
    "vllm:prefix_cache_hits_total": Metric("router", "counter", (), "As prefix_hit_tokens"),
    "vllm:request_queue_time_seconds": Metric("router", "histogram", (), "As queue_wait"),
    "vllm:time_to_first_token_seconds": Metric("gateway", "histogram", (), "As request_ttft"),
    "vllm:inter_token_latency_seconds": Metric("gateway", "histogram", (), "As request_itl"),
    "vllm:e2e_request_latency_seconds": Metric("gateway", "histogram", (), "As request_e2e"),
}


def series() -> set[str]:
    """Every name that a query may ask for."""
    names = set()
    for name, metric in {**METRICS, **VLLM}.items():
        ends = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        names |= {name + end for end in ends}
    return names
