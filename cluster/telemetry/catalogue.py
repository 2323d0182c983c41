"""Every metric that Diptych exports: its kind, its labels, what it says (pure).

Names carry the prefix `diptych_`, base units, and `_total` where they only grow. Every sample also
has the label `model`; those of workers have `pool` (the pool that the worker belongs to) and
`replica`. No label holds a request's id. Tenants, classes, peers and reasons are bounded
(`page.LABEL_VALUES_MAX`).
"""

from __future__ import annotations

from typing import NamedTuple

PREFIX = "diptych_"
VLLM_PREFIX = "vllm:"
BASE_LABELS = ("model",)
WORKER_LABELS = ("model", "pool", "replica")


class MetricDefinition(NamedTuple):
    part: str  #: The part of the program: gateway | router | worker | control.
    kind: str  #: counter | gauge | histogram
    labels: tuple[str, ...]  #: Beside the base labels of the part's processes.
    help: str


def _with_prefix(metrics: dict[str, MetricDefinition]) -> dict[str, MetricDefinition]:
    return {PREFIX + name: definition for name, definition in metrics.items()}


GATEWAY = _with_prefix(
    {
        "requests_total": MetricDefinition(
            "gateway",
            "counter",
            ("code", "slo_class"),
            "Requests by HTTP status, or its equivalent",
        ),
        "request_ttft_seconds": MetricDefinition(
            "gateway", "histogram", ("slo_class",), "From arrival to the first token"
        ),
        "request_itl_seconds": MetricDefinition(
            "gateway", "histogram", ("slo_class",), "Gaps between tokens, the first included"
        ),
        "request_first_gap_seconds": MetricDefinition(
            "gateway", "histogram", ("slo_class",), "Between first and second token"
        ),
        "request_tpot_seconds": MetricDefinition(
            "gateway", "histogram", ("slo_class",), "Mean gap of a request"
        ),
        "request_e2e_seconds": MetricDefinition(
            "gateway", "histogram", ("slo_class",), "From arrival to the end"
        ),
        "request_prompt_tokens": MetricDefinition(
            "gateway", "histogram", ("slo_class",), "Prompt length in tokens"
        ),
        "request_output_tokens": MetricDefinition(
            "gateway", "histogram", ("slo_class",), "Tokens generated, of all answers"
        ),
        "inflight_requests": MetricDefinition("gateway", "gauge", (), "Requests that run now"),
        "request_retries_total": MetricDefinition(
            "gateway", "counter", (), "Attempts that failed and were made again"
        ),
        "request_handovers_total": MetricDefinition(
            "gateway", "counter", (), "Attempts that a worker handed over"
        ),
    }
)
ROUTER = _with_prefix(
    {
        "goodput_requests_total": MetricDefinition(
            "router", "counter", ("slo_class", "tenant", "met"), "By the targets that were met"
        ),
        "routing_decisions_total": MetricDefinition(
            "router", "counter", ("decision", "reason"), "Placements, and refusals"
        ),
        "routing_duration_seconds": MetricDefinition(
            "router", "histogram", (), "CPU time of an event that placed a request"
        ),
        "ttft_prediction_error_seconds": MetricDefinition(
            "router", "histogram", ("side",), "TTFT observed, against predicted"
        ),
        "prefix_hit_tokens_total": MetricDefinition(
            "router", "counter", (), "Prompt tokens that the workers chosen held"
        ),
        "prefix_query_tokens_total": MetricDefinition(
            "router", "counter", (), "Prompt tokens of requests that were placed"
        ),
        "queue_depth": MetricDefinition("router", "gauge", (), "Requests that wait for a worker"),
        "queue_late": MetricDefinition(
            "router", "gauge", (), "Of these, who cannot be in time any more"
        ),
        "queue_wait_seconds": MetricDefinition(
            "router", "histogram", (), "From a request's arrival here until it was placed"
        ),
        "rejected_total": MetricDefinition("router", "counter", ("reason",), "Refusals"),
        "workers": MetricDefinition(
            "router",
            "gauge",
            ("pool", "role"),
            "Workers that the router knows, by home and by role now",
        ),
    }
)
ENGINE = _with_prefix(
    {
        "worker_info": MetricDefinition(
            "worker", "gauge", ("role", "state"), "1 for what this worker is now"
        ),
        "kv_blocks": MetricDefinition(
            "worker", "gauge", ("state",), "KV blocks; quarantined and orphaned ones should be 0"
        ),
        "running_requests": MetricDefinition(
            "worker", "gauge", (), "Sequences in the running batch"
        ),
        "waiting_requests": MetricDefinition(
            "worker", "gauge", (), "Sequences that wait for blocks or for their turn"
        ),
        "batch_tokens": MetricDefinition("worker", "histogram", (), "Rows of a step"),
        "step_duration_seconds": MetricDefinition(
            "worker", "histogram", ("phase",), "A step, with prefill in it or without"
        ),
        "prefill_tokens_total": MetricDefinition(
            "worker", "counter", (), "Prompt tokens that were computed"
        ),
        "preemptions_total": MetricDefinition(
            "worker", "counter", (), "Sequences that gave their blocks up to others"
        ),
        "draft_tokens_total": MetricDefinition(
            "worker", "counter", ("result",), "Guessed tokens that were verified"
        ),
    }
)
TRANSFER = _with_prefix(
    {
        "kv_transfer_bytes_total": MetricDefinition(
            "worker", "counter", ("direction",), "KV that was sent, or has arrived"
        ),
        "kv_transfer_duration_seconds": MetricDefinition(
            "worker", "histogram", (), "Of what arrived: with a write under way"
        ),
        "kv_transfer_exposed_seconds": MetricDefinition(
            "worker", "histogram", (), "Of these: after the prefill's end"
        ),
        "kv_transfer_checksum_seconds_total": MetricDefinition(
            "worker", "counter", (), "CPU time of checksums"
        ),
        "kv_transfer_failures_total": MetricDefinition(
            "worker", "counter", ("reason",), "Transfers that did not arrive"
        ),
        "kv_sessions": MetricDefinition("worker", "gauge", ("state",), "Open transfers by state"),
        "kv_peers": MetricDefinition(
            "worker", "gauge", (), "Workers' ranks that the transport reaches"
        ),
        "kv_peer_bytes_total": MetricDefinition(
            "worker", "counter", ("peer",), "KV that has arrived from this worker"
        ),
        "kv_peer_transport": MetricDefinition(
            "worker", "gauge", ("peer", "transport"), "1 for the transport that really ran"
        ),
    }
)
CONTROL = _with_prefix(
    {
        "replicas": MetricDefinition(
            "control", "gauge", ("pool", "state"), "Replicas by state, and the target"
        ),
        "scale_actions_total": MetricDefinition(
            "control", "counter", ("pool", "direction"), "Orders to change a pool's size"
        ),
        "flips_total": MetricDefinition(
            "control", "counter", ("from", "to"), "Workers that were given another role"
        ),
        "build_info": MetricDefinition("control", "gauge", ("version", "python"), "1"),
    }
)
METRICS = GATEWAY | ROUTER | ENGINE | TRANSFER | CONTROL

#: What Diptych has too, under vLLM's names: vLLM's boards and llm-d's endpoint picker use them.
VLLM_METRICS: dict[str, MetricDefinition] = {
    "vllm:num_requests_running": MetricDefinition("worker", "gauge", (), "As running_requests"),
    "vllm:num_requests_waiting": MetricDefinition("worker", "gauge", (), "As waiting_requests"),
    "vllm:kv_cache_usage_perc": MetricDefinition(
        "worker", "gauge", (), "Share of KV blocks in use"
    ),
    "vllm:prefix_cache_queries_total": MetricDefinition(
        "router", "counter", (), "As prefix_query_tokens"
    ),
    "vllm:prefix_cache_hits_total": MetricDefinition(
        "router", "counter", (), "As prefix_hit_tokens"
    ),
    "vllm:request_queue_time_seconds": MetricDefinition("router", "histogram", (), "As queue_wait"),
    "vllm:time_to_first_token_seconds": MetricDefinition(
        "gateway", "histogram", (), "As request_ttft"
    ),
    "vllm:inter_token_latency_seconds": MetricDefinition(
        "gateway", "histogram", (), "As request_itl"
    ),
    "vllm:e2e_request_latency_seconds": MetricDefinition(
        "gateway", "histogram", (), "As request_e2e"
    ),
}


def series_names() -> set[str]:
    """Return every name that a query may ask for."""
    names: set[str] = set()
    for name, metric in {**METRICS, **VLLM_METRICS}.items():
        if metric.kind == "histogram":
            names |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
        else:
            names.add(name)
    return names
