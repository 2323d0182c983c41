"""Every metric that Diptych exports: its kind, its labels, what it says (pure).

Names carry the prefix `diptych_`, base units, and `_total` where they only grow. Every sample of
them also has the label `model`; those of workers have `pool` (the pool that the worker belongs to)
and `replica`. Samples under vLLM's names have `model_name` alone in place of these three.

No label holds a request's id. Labels from outside are bounded: a router counts the first
`goodput.NAMED` tenants and as many classes by name, a gateway `gateway_metrics.CLASSES_MAX` classes,
and a worker `page.LABEL_VALUES_MAX` peers, and as many reasons of failures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

PREFIX = "diptych_"
VLLM_PREFIX = "vllm:"


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """What one metric is, as Prometheus is told; its name is its key in the tables below."""

    kind: str  #: counter | gauge | histogram
    help: str  #: What Prometheus shows beside the name.
    labels: tuple[str, ...]  #: Beside the base labels of the part's processes.
    part: str = ""  #: The part of the program: gateway | router | worker | control.


def _counter(help_text: str, *labels: str) -> MetricDefinition:
    return MetricDefinition("counter", help_text, labels)


def _gauge(help_text: str, *labels: str) -> MetricDefinition:
    return MetricDefinition("gauge", help_text, labels)


def _histogram(help_text: str, *labels: str) -> MetricDefinition:
    return MetricDefinition("histogram", help_text, labels)


def _metrics_of(
    part: str, prefix: str = PREFIX, **metrics: MetricDefinition
) -> dict[str, MetricDefinition]:
    """Return a part's metrics by their whole names."""
    return {prefix + name: replace(metric, part=part) for name, metric in metrics.items()}


GATEWAY = _metrics_of(
    "gateway",
    requests_total=_counter("Requests by HTTP status, or its equivalent", "code", "slo_class"),
    request_ttft_seconds=_histogram("From arrival to the first token", "slo_class"),
    # A gap lies between two tokens of one answer; "the first" is that before its second token.
    request_itl_seconds=_histogram("Gaps between tokens, the first included", "slo_class"),
    request_first_gap_seconds=_histogram("Between first and second token", "slo_class"),
    # `reason`: a word of `router.first_token.ReleaseReason`.
    request_first_token_held_seconds=_histogram("First token held back", "slo_class"),
    first_tokens_total=_counter("First tokens, by why they went out then", "reason", "slo_class"),
    request_tpot_seconds=_histogram("Mean gap of a request", "slo_class"),
    request_e2e_seconds=_histogram("From arrival to the end", "slo_class"),
    request_prompt_tokens=_histogram("Prompt length in tokens", "slo_class"),
    request_output_tokens=_histogram("Tokens generated, of all answers", "slo_class"),
    inflight_requests=_gauge("Requests that run now"),
    request_retries_total=_counter("Attempts that failed, also the last one of a request"),
    # A healthy worker hands its work over when it is drained, leaves or changes its role.
    request_handovers_total=_counter("Attempts that a worker handed over"),
    # `flaw`: `unread` came out as content, `cut` and `no_json` are calls all the same.
    tool_call_flaws_total=_counter("Calls that models wrote with a flaw", "flaw"),
    ignored_fields_total=_counter("Fields of requests that had no effect", "api", "kind"),
    # `kind`: `unread` waits for clients, `kept` is what they have, or may come back for.
    answer_bytes=_gauge("Memory that answers take, of all models", "kind"),
    answer_bytes_limit=_gauge("Memory that answers may take (gateway.answers_mib)"),
    # `reason`: `reader_lags`, `reader_stalled` or `memory_full`.
    cut_readers_total=_counter("Clients that were cut off as they did not read", "reason"),
    forgotten_answers_total=_counter("Answers without a reader that were forgotten for room"),
)
ROUTER = _metrics_of(
    "router",
    # `met`: the targets that the request met, `both`, `ttft`, `itl` or `none`.
    goodput_requests_total=_counter("By the targets that were met", "slo_class", "tenant", "met"),
    routing_decisions_total=_counter("Placements, and refusals", "decision", "reason"),
    # The time in which the router handles one of its events, say the arrival of a request.
    routing_duration_seconds=_histogram("Time the router took for an event that placed requests"),
    # `side`: the first token came `late` or `early`; the value is the difference, never negative.
    ttft_prediction_error_seconds=_histogram("TTFT observed, against predicted", "side"),
    prefix_hit_tokens_total=_counter("Prompt tokens that the chosen workers had, or fetched"),
    prefix_query_tokens_total=_counter("Prompt tokens of requests that were placed"),
    queue_depth=_gauge("Requests that wait for a worker"),
    queue_late=_gauge("Requests that wait for a worker and cannot meet their TTFT target any more"),
    urgent_admitted_total=_counter("First attempts that were to be in time when they came"),
    urgent_moved_total=_counter("Of these, were moved behind the others while they waited"),
    urgent_in_time_total=_counter("Of the rest, sent their first token within its target"),
    queue_wait_seconds=_histogram("From a request's arrival at the router until it was placed"),
    rejected_total=_counter("Refusals", "reason"),
    workers=_gauge("Workers that the router knows, by pool and by the role now", "pool", "role"),
)
ENGINE = _metrics_of(
    "worker",
    worker_info=_gauge("1 for what this worker is now", "role", "state"),
    # A quarantined block may still be written by a peer that fell silent: on the rank that has most
    # of them. An orphaned block belongs to an attempt that the worker does not know.
    kv_blocks=_gauge("KV blocks; those `quarantined` and `orphaned` should be 0", "state"),
    running_requests=_gauge("Sequences in the running batch"),
    waiting_requests=_gauge("Sequences that wait for blocks or for their turn"),
    batch_tokens=_histogram("Tokens of a step: of prompts, and new ones"),
    step_duration_seconds=_histogram("A step, with prefill in it or without", "phase"),
    prefill_tokens_total=_counter("Prompt tokens that were computed"),
    preemptions_total=_counter("Sequences that gave their blocks up to others"),
    draft_tokens_total=_counter("Guessed tokens that were verified", "result"),
)
#: With `engine.kind: vllm` only: what the hosted vLLM says of itself. Not `vllm:`, under which
#: Diptych's own numbers are exported for boards that were made for vLLM.
HOSTED_VLLM = _metrics_of(
    "worker",
    hosted_vllm_running_requests=_gauge("Requests that the hosted vLLM computes"),
    hosted_vllm_waiting_requests=_gauge("Requests that wait in the hosted vLLM, for KV too"),
    hosted_vllm_kv_cache_usage_ratio=_gauge("Share of its blocks that the hosted vLLM counts used"),
    hosted_vllm_prefix_cache_queries_total=_counter("Prompt tokens looked up in vLLM's cache"),
    hosted_vllm_prefix_cache_hits_total=_counter("Prompt tokens found in vLLM's cache"),
)
TRANSFER = _metrics_of(
    "worker",
    kv_transfer_bytes_total=_counter("KV that was sent, or has arrived", "direction"),
    # These two are observed once for each transfer that arrived: on the rank that took longest.
    kv_transfer_duration_seconds=_histogram("How long a transfer had a write under way"),
    kv_transfer_exposed_seconds=_histogram("From the end of the prefill to a transfer's arrival"),
    kv_transfer_checksum_seconds_total=_counter("CPU time of checksums"),
    # A transfer counts once, whatever the number of ranks; a peer's failure on each rank.
    kv_transfer_failures_total=_counter("Failures of transfers, and of peers' ranks", "reason"),
    kv_sessions=_gauge("Open transfers by state, on all ranks together", "state"),
    kv_peers=_gauge("Other workers' ranks that are reached, from all ranks together"),
    kv_peer_bytes_total=_counter("KV that has arrived from this worker", "peer"),
    kv_peer_transport=_gauge("1 for the transport that really ran", "peer", "transport"),
)
CONTROL = _metrics_of(
    "control",
    replicas=_gauge("Replicas by state, and the target", "pool", "state"),
    scale_actions_total=_counter("Orders to change a pool's size", "pool", "direction"),
    flips_total=_counter("Workers that were given another role", "from", "to"),
    build_info=_gauge("1", "version", "python"),
)
METRICS = GATEWAY | ROUTER | ENGINE | HOSTED_VLLM | TRANSFER | CONTROL

#: What Diptych has too, under vLLM's names: vLLM's boards and llm-d's endpoint picker use them. The
#: processes export them if `observability.metrics_compat` asks for it. "As" names our metric.
VLLM_METRICS = {
    **_metrics_of(
        "worker",
        VLLM_PREFIX,
        num_requests_running=_gauge("As running_requests"),
        num_requests_waiting=_gauge("As waiting_requests"),
        kv_cache_usage_perc=_gauge("Share of KV blocks in use"),
    ),
    **_metrics_of(
        "router",
        VLLM_PREFIX,
        prefix_cache_queries_total=_counter("As prefix_query_tokens"),
        prefix_cache_hits_total=_counter("As prefix_hit_tokens"),
        request_queue_time_seconds=_histogram("As queue_wait"),
    ),
    **_metrics_of(
        "gateway",
        VLLM_PREFIX,
        time_to_first_token_seconds=_histogram("As request_ttft"),
        inter_token_latency_seconds=_histogram("As request_itl"),
        e2e_request_latency_seconds=_histogram("As request_e2e"),
    ),
}
#: What only the page on a gateway's main port has, under vLLM's names (`vllm_metrics.py`). Numbers
#: of the router and of workers are those of the whole cluster, as one vLLM server would have them.
#: Refusals, tokens and the numbers of requests (`request_...`, but for preemptions) are those of this
#: gateway alone.
VLLM_PAGE_METRICS = _metrics_of(
    "gateway",
    VLLM_PREFIX,
    num_requests_waiting_by_reason=_gauge("At the router, and on workers", "reason"),
    cache_config_info=_gauge(
        "1; the KV of all workers together",
        "block_size",
        "num_gpu_blocks",
        "kv_cache_size_tokens",
        "kv_cache_max_concurrency",
    ),
    num_preemptions_total=_counter("As preemptions, of all workers"),
    iteration_tokens_total=_histogram("As batch_tokens, of all workers"),
    request_num_preemptions=_histogram("How often an answer was preempted, of all workers"),
    admission_rejections_total=_counter("Requests refused with HTTP 429", "reason"),
    prompt_tokens_total=_counter("Tokens of prompts"),
    generation_tokens_total=_counter("Tokens generated"),
    request_success_total=_counter("Requests that ended", "finished_reason"),
    request_prompt_tokens=_histogram("As request_prompt_tokens, without classes"),
    request_generation_tokens=_histogram("As request_output_tokens, without classes"),
    request_params_n=_histogram("Answers asked for"),
    request_params_max_tokens=_histogram("Tokens that an answer might have"),
    request_inference_time_seconds=_histogram("From the placement to the last token"),
    request_prefill_time_seconds=_histogram("From the placement to the first token"),
    request_decode_time_seconds=_histogram("From the first token to the last"),
)
