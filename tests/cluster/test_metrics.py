"""What the processes export: names, labels and numbers as Prometheus reads them."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from diptych.cluster.config import ClusterConfig, ObservabilitySettings
from diptych.cluster.gateway import service
from diptych.cluster.gateway.answer_memory import AnswerMemory
from diptych.cluster.gateway.apis.ignored_fields import IgnoredKind
from diptych.cluster.gateway.attempt.held_bytes import AnswerLimits
from diptych.cluster.gateway.attempt.request import Answer, Request
from diptych.cluster.gateway.attempt.terms import Terms
from diptych.cluster.gateway.capacity import GatewayCapacity
from diptych.cluster.gateway.text.formats.parts import CallFlaw
from diptych.cluster.telemetry import ControlTally, Exporter, GatewayTally, RouterTally
from diptych.cluster.telemetry.catalogue import METRICS, VLLM_METRICS
from diptych.cluster.telemetry.exporter import PORTS_TRIED
from diptych.cluster.telemetry.gateway_metrics import CODE_COMPLETE, outcome_of
from diptych.cluster.telemetry.page import (
    LABEL_VALUES_MAX,
    MetricRow,
    cumulative_buckets,
    limit_label_values,
)
from diptych.cluster.telemetry.targets import KnownRouters, scrape_targets
from diptych.cluster.telemetry.vllm_metrics import cluster_rows
from diptych.cluster.telemetry.worker_metrics import (
    MINIMUM_KV_BYTES,
    TransportDetector,
    worker_rows,
)
from diptych.engine.step_counters import STEP_SECONDS_BOUNDS, STEP_TOKENS_BOUNDS
from diptych.engine.vllm.statistics import VllmStatistics
from diptych.kv_transfer.statistics import Histogram, TransferStatistics
from diptych.protos import frames as f
from diptych.router import Router, RouterConfig
from prometheus_client.parser import text_string_to_metric_families

from tests.support.live import free_port
from tests.support.standin import checkpoint, standing_in

BASE = {"model": "m"}
#: EXPECTED_METRICS_V1 of vLLM 0.33.0's test_metrics.py; of a histogram the name alone.
VLLM_EXPECTED = [
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions_total",
    "admission_rejections_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "iteration_tokens_total",
    "cache_config_info",
    "request_success_total",
    "request_prompt_tokens_sum",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_params_n_bucket",
    "request_params_max_tokens_count",
    "time_to_first_token_seconds_sum",
    "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_sum",
    "request_queue_time_seconds_bucket",
    "request_inference_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "request_num_preemptions_sum",
    "request_num_preemptions_bucket",
    "request_num_preemptions_count",
]
BOTH = ObservabilitySettings(metrics_compat=("vllm",))


def parsed(exporter: Exporter) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(sample's name, its labels but the base ones) -> value."""
    text = exporter.render()[1].decode()
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    drop = ("model", "model_name")
    return {
        (one.name, tuple(sorted((k, v) for k, v in one.labels.items() if k not in drop))): one.value
        for one in samples
        if not one.name.startswith("process_")
    }


def request(times: list[float], **changes: Any) -> Request:
    """Arrived at 100; one answer with tokens at these times."""
    made = Request("r", [1] * 10, [], f.Sampling(64), terms=Terms(slo_class="interactive"))
    made.times.arrived_s = 100.0
    tokens = [f.Token(1)] * len(times)
    made.answers = [Answer(journal=tokens, token_times=times, finish_reason="stop")]
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def gateway() -> GatewayTally:
    config = ClusterConfig.model_validate({"slo": {"ttft_ms": 1234.5, "itl_ms": 77}})
    return GatewayTally(config, ["interactive", "batch"])


def worker_statistics() -> dict[str, Any]:
    """As a worker tells them, with a number of its own for each."""
    gauges, steps, tokens = (
        TransferStatistics(),
        Histogram(STEP_SECONDS_BOUNDS),
        Histogram(STEP_TOKENS_BOUNDS),
    )
    gauges.record_received_bytes("prefill/a:0", 3 * MINIMUM_KV_BYTES)
    gauges.record_arrival(0.004, 0.001)
    gauges.failures["peer_lost: it said so"] += 2
    gauges.failures["peer_lost"] += 1
    steps.observe(0.004)
    tokens.observe(64)
    states = ("free", "cached", "reserved", "staged", "demoting", "active")
    blocks = dict.fromkeys(states, 5) | {"total": 30, "quarantined": 1, "orphaned": 2}
    engine = {"running": 3, "prefilling": 1, "waiting": 2, "ready": 1, "preemptions": 4}
    engine |= {"drafted": 9, "accepted": 6, "prefill_tokens": 640, "kv_blocks": blocks}
    engine |= {"vllm": VllmStatistics().values()}
    engine |= {"step_s": {"prefill": steps.values(), "decode": steps.values()}}
    transfer = {"transport": "nixl", "sessions": 1, "tickets": {"reserved": 2}, **gauges.values()}
    seen = {"role": "decode", "state": "ready", "transfer": transfer}
    return {**seen, "engine": {**engine, "step_tokens": tokens.values()}}


def pages(settings: ObservabilitySettings = BOTH) -> list[Exporter]:
    """One of each part, with something in it."""
    tally, router, control = gateway(), Router(RouterConfig(), 1), ControlTally()
    ended = request([100.5, 100.6])
    ended.times.first_token_release = "second_came"
    tally.count_ended(ended, outcome_of(ended, "stop"), CODE_COMPLETE)
    tally.count_ignored_fields("chat", {IgnoredKind.UNKNOWN: 1})
    tally.call_flaws[CallFlaw.CUT] += 1
    router.counts.count_placement(True, "push", 0.1)
    router.counts.count_first_token(0.2, 0.3)
    router.counts.refused["queue_full"] += 1
    router.goodput.observe(outcome_of(ended, "stop"), 2.0, 0.2, 1.0)
    card = f.WorkerCard("prefill/a", "prefill", "prefill", "h:1", "a", 1)
    router.fleet.join(card)
    control.pools = {"prefill": {"running": 1, "target": 2}}
    control.count_scaling("prefill", 1, 2)
    control.flips["prefill", "decode"] += 1
    memory = AnswerMemory(AnswerLimits(), GatewayCapacity(1), list)
    detector, seen = TransportDetector(lambda: 0), worker_statistics()
    worker = {**BASE, "pool": "decode", "replica": "a"}
    return [
        Exporter(settings, BASE, lambda: [*tally.rows(1, 2, 3), *memory.metric_rows()]),
        Exporter(settings, BASE, RouterTally(router).rows),
        Exporter(settings, worker, lambda: worker_rows(seen, detector, 1)),
        Exporter(settings, BASE, control.rows),
    ]


def test_every_metric_of_the_catalogue_is_exported_and_no_other() -> None:
    text = b"".join(exporter.render()[1] for exporter in pages()).decode()
    lines = [line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE")]
    found = {name: kind for name, kind in lines if not name.startswith("process_")}
    assert found == {name: metric.kind for name, metric in {**METRICS, **VLLM_METRICS}.items()}


def test_the_main_port_s_page_has_what_vllm_s_own_test_expects() -> None:
    tally = gateway()
    ended = request([100.5, 100.6, 101.0])
    ended.times.placed_s = 100.2
    tally.count_ended(ended, outcome_of(ended, "stop"), CODE_COMPLETE)
    tally.count_refused(429)
    workers = [worker_statistics(), worker_statistics()]
    for worker in workers:
        worker["engine"]["request_preemptions"] = {"0": 2, "1": 1, "inf": 0, "sum": 1}
    router = {"waiting": 5, "hit_tokens": 7, "prompt_tokens": 9}
    without_router = {row.name for row in cluster_rows(None, workers, 16, 96)}
    assert not any("prefix_cache" in name for name in without_router), "counters would fall to 0"
    exporter = Exporter(ObservabilitySettings(), BASE, lambda: tally.rows(0, 0, 0))
    rows = [*tally.vllm_rows(), *cluster_rows(router, workers, 16, 96)]
    page = exporter.render_with(rows)[1].decode()
    for name in VLLM_EXPECTED:
        assert f"vllm:{name}" in page, name
    families = {family.name: family for family in text_string_to_metric_families(page)}
    values = {
        sample.name: sample.value
        for name, family in families.items()
        if name.startswith("vllm:")
        for sample in family.samples
        if "le" not in sample.labels
    }
    assert values["vllm:num_requests_running"] == 8 and values["vllm:num_requests_waiting"] == 11
    assert values["vllm:kv_cache_usage_perc"] == pytest.approx(40 / 60)
    assert values["vllm:num_preemptions_total"] == 8
    assert values["vllm:request_num_preemptions_count"] == 6
    assert values["vllm:prefix_cache_hits_total"] == 7
    assert values["vllm:prompt_tokens_total"] == 10
    assert values["vllm:generation_tokens_total"] == 3
    assert values["vllm:request_queue_time_seconds_sum"] == pytest.approx(0.2)
    assert values["vllm:request_prefill_time_seconds_sum"] == pytest.approx(0.3)
    assert values["vllm:request_decode_time_seconds_sum"] == pytest.approx(0.5)
    assert values["vllm:request_inference_time_seconds_sum"] == pytest.approx(0.8)
    assert values["vllm:admission_rejections_total"] == 1
    (cache,) = families["vllm:cache_config_info"].samples
    assert cache.labels["kv_cache_size_tokens"] == "960"
    assert cache.labels["kv_cache_max_concurrency"] == "10.00"
    assert "vllm:" not in exporter.render()[1].decode(), "Prometheus reads the other page"


def test_the_main_port_s_page_is_whole_without_router_and_workers() -> None:
    exporter = Exporter(ObservabilitySettings(), BASE, lambda: gateway().rows(0, 0, 0))
    rows = [*gateway().vllm_rows(), *cluster_rows(None, [], 16, 96)]
    page = exporter.render_with(rows)[1].decode()
    assert "vllm:num_requests_running" in page and "vllm:kv_cache_usage_perc" in page


@pytest.mark.parametrize(
    "accept",
    ['application/openmetrics-text;version="1.0.0"', "text/plain;version=x"],
)
def test_a_format_that_cannot_be_understood_gets_the_usual_page(accept: str) -> None:
    exporter = Exporter(ObservabilitySettings(), BASE, lambda: gateway().rows(0, 0, 0))
    for content_type, page in (exporter.render(accept), exporter.render_with([], accept)):
        assert content_type == exporter.render()[0]
        assert b"diptych_request_ttft_seconds_count{" in page


def test_vllm_s_names_keep_their_colons_in_the_format_that_prometheus_2_asks_for() -> None:
    accept = (
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;"
        "q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    )
    newer = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6"
    exporter = Exporter(BOTH, BASE, lambda: gateway().rows(0, 0, 0))
    plain = Exporter(ObservabilitySettings(), BASE, lambda: gateway().rows(0, 0, 0))
    for asked in (accept, newer, "application/openmetrics-text"):
        for _, page in (exporter.render(asked), plain.render_with([], asked)):
            assert b"\nvllm:time_to_first_token_seconds_bucket{" in page, asked
            assert b"vllm_" not in page, asked
    # Pages without a colon in a name go out as they are asked for.
    for type_asked in (plain.render(accept)[0], exporter.render(newer)[0]):
        assert type_asked.startswith("application/openmetrics-text")


def test_a_gateway_asks_the_cluster_once_for_scrapes_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "INSPECTION_AGE_S", 5.0)
    with standing_in(checkpoint(tmp_path / "demo")) as running:
        pages = [httpx.get(f"{running.url}/metrics").text for _ in range(3)]
        assert 'vllm:num_requests_waiting{model_name="demo"} 5.0' in pages[0]
        asked = []
        inspect = running.workers.inspect

        async def counted() -> tuple[dict, list[dict]]:
            asked.append(1)
            return await inspect()

        running.workers.inspect = counted  # type: ignore[method-assign]
        running.gateway._inspected_s -= 10
        for _ in range(5):
            assert "vllm:cache_config_info" in httpx.get(f"{running.url}/metrics").text
        assert len(asked) == 1


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_promtool_finds_nothing_wrong_with_the_pages() -> None:
    for exporter in pages(ObservabilitySettings()):
        command, page = ["promtool", "check", "metrics"], exporter.render()[1]
        done = subprocess.run(command, input=page, capture_output=True, check=False)
        assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_a_request_counts_once_with_every_gap_the_first_one_too() -> None:
    tally = gateway()
    ended = request([100.5, 101.5, 101.52, 101.54])
    tally.count_ended(ended, outcome_of(ended, "stop"), CODE_COMPLETE)
    tally.count_refused(429, "batch")
    tally.count_refused(401)
    seen = parsed(Exporter(ObservabilitySettings(), BASE, lambda: tally.rows(0, 0, 0)))
    mine = (("slo_class", "interactive"),)
    assert seen["diptych_requests_total", (("code", "200"), *mine)] == 1
    assert seen["diptych_requests_total", (("code", "429"), ("slo_class", "batch"))] == 1
    assert seen["diptych_requests_total", (("code", "401"), ("slo_class", "other"))] == 1
    assert seen["diptych_request_ttft_seconds_count", mine] == 1
    assert seen["diptych_request_ttft_seconds_sum", mine] == pytest.approx(0.5)
    assert seen["diptych_request_itl_seconds_count", mine] == 3
    assert seen["diptych_request_itl_seconds_sum", mine] == pytest.approx(1.04)
    assert seen["diptych_request_first_gap_seconds_sum", mine] == pytest.approx(1.0)
    assert seen["diptych_request_tpot_seconds_sum", mine] == pytest.approx(1.04 / 3)
    assert seen["diptych_request_output_tokens_sum", mine] == 4
    # the buckets that end at the targets: attainment is no guess
    ttft = {labels: value for (name, labels), value in seen.items() if "ttft_seconds_b" in name}
    assert ttft[("le", "1.2345"), *mine] == 1
    itl = {labels: value for (name, labels), value in seen.items() if "itl_seconds_b" in name}
    assert itl[("le", "0.077"), *mine] == 2 and itl[("le", "+Inf"), *mine] == 3


def test_the_gap_behind_a_client_s_return_is_not_the_first_of_its_answer() -> None:
    tally = gateway()
    returned = request([100.5, 101.5, 101.52])
    returned.answers[0].journal = [f.Token(1)] * 100 + returned.answers[0].journal
    tally.count_ended(returned, outcome_of(returned, "stop"), CODE_COMPLETE)
    seen = parsed(Exporter(ObservabilitySettings(), BASE, lambda: tally.rows(0, 0, 0)))
    mine = (("slo_class", "interactive"),)
    assert seen["diptych_request_first_gap_seconds_count", mine] == 0
    assert seen["diptych_request_itl_seconds_count", mine] == 2
    assert seen["diptych_request_ttft_seconds_sum", mine] == pytest.approx(0.5)


def test_buckets_end_at_the_targets_of_classes_and_tenants_too() -> None:
    tree = {
        "slo": {"ttft": "3x", "itl_ms": 77, "tenants": {"acme": {"ttft": "max(321ms, 2x)"}}},
        "router": {"classes": {"chat": {"itl_ms": 33}, "batch": {"ttft": "45s", "itl_ms": 77}}},
    }
    tally = GatewayTally(ClusterConfig.model_validate(tree), ["chat", "batch"])
    rows = {row.name: row.value for row in tally.rows(0, 0, 0)}
    assert {"0.321", "45.0"} <= rows["request_ttft_seconds"].keys()  # type: ignore[union-attr]
    assert {"0.077", "0.033"} <= rows["request_itl_seconds"].keys()  # type: ignore[union-attr]
    many = {f"t{number}": {"itl_ms": 1000 + number} for number in range(100)}
    crowd = GatewayTally(ClusterConfig.model_validate({"slo": {"tenants": many}}), ["chat"])
    values = next(row.value for row in crowd.rows(0, 0, 0) if row.name == "request_itl_seconds")
    assert len(values) < 40, "tenants do not fill Prometheus' memory"  # type: ignore[arg-type]


def test_a_class_that_nobody_configured_counts_as_other() -> None:
    tally = gateway()
    for number in range(100):
        tally.count_refused(400, f"made-up-{number}")
    assert tally.codes == {(400, "other"): 100}


def test_the_outcome_of_an_answer_that_never_began_waited_until_its_end() -> None:
    never = request([])
    outcome = outcome_of(never, "queue_full")
    assert (outcome.tokens, outcome.gaps, outcome.reason) == (0, 0, "queue_full")
    assert outcome.waited_s == pytest.approx(never.age_s, rel=0.1)


def test_buckets_hold_those_before_them() -> None:
    histogram = Histogram((0.5, 1.0, 10))
    histogram.observe_all([0.2, 0.5, 0.7, 3.0, 99.0])
    assert histogram.count == 5
    buckets, total = cumulative_buckets(histogram.values())
    assert buckets == [("0.5", 2), ("1.0", 3), ("10.0", 4), ("+Inf", 5)]
    assert total == pytest.approx(103.4)


def test_labels_from_outside_are_bounded() -> None:
    counts = {f"peer-{number:03}": float(number) for number in range(100)}
    kept = limit_label_values(counts, 10)
    assert len(kept) == 11 and sum(kept.values()) == sum(counts.values())
    assert "peer-099" in kept and "peer-000" not in kept


def test_reasons_lose_what_follows_the_colon() -> None:
    (name,) = {row.labels["reason"] for row in _of("kv_transfer_failures_total")}
    assert name == "peer_lost"
    assert [row.value for row in _of("kv_transfer_failures_total")] == [3]


def test_what_the_hosted_vllm_says_of_itself_is_there_only_with_vllm() -> None:
    statistics = worker_statistics()
    told = VllmStatistics()
    cache = SimpleNamespace(queries=640, hits=128)
    step = SimpleNamespace(num_running_reqs=2, num_waiting_reqs=1, num_skipped_waiting_reqs=3)
    step.kv_cache_usage, step.prefix_cache_stats = 0.5, cache
    told.take(step)
    told.take(step)
    statistics["engine"]["vllm"] = told.values()
    rows = {row.name: row.value for row in worker_rows(statistics, TransportDetector(lambda: 0), 1)}
    assert rows["hosted_vllm_running_requests"] == 2
    assert rows["hosted_vllm_waiting_requests"] == 4
    assert rows["hosted_vllm_kv_cache_usage_ratio"] == 0.5
    assert rows["hosted_vllm_prefix_cache_queries_total"] == 1280, "those of a step are its own"
    assert rows["hosted_vllm_prefix_cache_hits_total"] == 256
    del statistics["engine"]["vllm"]
    rows = {row.name: row.value for row in worker_rows(statistics, TransportDetector(lambda: 0), 1)}
    assert not any(name.startswith("hosted_vllm") for name in rows)


def _of(name: str, detector: TransportDetector | None = None) -> list[MetricRow]:
    made = worker_rows(worker_statistics(), detector or TransportDetector(lambda: 0), 1)
    return [row for row in made if row.name == name]


@pytest.mark.parametrize(
    ("tcp", "transport"),
    [(3 * MINIMUM_KV_BYTES, "nixl (tcp)"), (MINIMUM_KV_BYTES // 4, "nixl"), (None, "nixl")],
)
def test_kv_that_came_over_tcp_is_called_so(tcp: int | None, transport: str) -> None:
    (row,) = _of("kv_peer_transport", TransportDetector(lambda: tcp))
    assert row.labels == {"peer": "prefill/a", "transport": transport}


def test_a_fallback_is_seen_from_the_look_on_in_which_it_happens() -> None:
    tcp = {"bytes": 0}
    detector = TransportDetector(lambda: tcp["bytes"])
    mib = MINIMUM_KV_BYTES
    assert detector.workers_using_tcp({"a": 10 * mib}, 1) == {"a": False}
    tcp["bytes"] = 2 * mib
    assert detector.workers_using_tcp({"a": 10 * mib + 5}, 1) == {
        "a": False
    }  # too little KV came to say
    assert detector.workers_using_tcp({"a": 12 * mib, "b": mib}, 1) == {"a": True, "b": True}
    assert detector.workers_using_tcp({"a": 20 * mib, "b": mib}, 1) == {"a": False, "b": True}


def test_kv_of_a_time_without_a_tcp_count_is_compared_once_the_count_is_there() -> None:
    tcp: dict[str, int | None] = {"bytes": 0}
    detector = TransportDetector(lambda: tcp["bytes"])
    mib = MINIMUM_KV_BYTES
    assert detector.workers_using_tcp({"a": 10 * mib}, 1) == {"a": False}
    tcp["bytes"] = None
    assert detector.workers_using_tcp({"a": 110 * mib}, 1) == {"a": False}
    tcp["bytes"] = 4 * mib  # of the 110 MiB since the last count, not of the last 10
    assert detector.workers_using_tcp({"a": 120 * mib}, 1) == {"a": False}


def test_heartbeats_of_a_night_without_kv_are_not_taken_for_kv() -> None:
    tcp = {"bytes": 8 * MINIMUM_KV_BYTES}  # weights that were loaded
    detector = TransportDetector(lambda: tcp["bytes"])
    mib = MINIMUM_KV_BYTES
    assert detector.workers_using_tcp({}, 1) == {}
    assert detector.workers_using_tcp({"a": 2 * mib}, 1) == {"a": False}
    tcp["bytes"] += 2 * mib
    assert detector.workers_using_tcp({"a": 2 * mib}, 1) == {"a": False}
    assert detector.workers_using_tcp({"a": 4 * mib}, 1) == {"a": False}
    tcp["bytes"] += 2 * mib
    assert detector.workers_using_tcp({"a": 6 * mib}, 1) == {"a": True}


def test_a_connection_that_closes_is_no_sign_that_kv_came_by_another_way() -> None:
    mib = MINIMUM_KV_BYTES
    tcp = {"bytes": 50 * mib}
    detector = TransportDetector(lambda: tcp["bytes"])
    assert detector.workers_using_tcp({"a": 40 * mib}, 1) == {"a": True}
    tcp["bytes"] = 10 * mib  # one that had received 45 closed, and 5 came over another
    assert detector.workers_using_tcp({"a": 45 * mib}, 1) == {"a": True}
    tcp["bytes"] = 15 * mib
    assert detector.workers_using_tcp({"a": 50 * mib}, 1) == {"a": True}
    assert detector.workers_using_tcp({"a": 60 * mib}, 1) == {"a": False}


def test_the_bytes_of_peers_never_fall_whoever_comes_goes_or_sends_more() -> None:
    statistics, detector = worker_statistics(), TransportDetector(lambda: 0)
    received = {f"p/{number}": 100 + number for number in range(LABEL_VALUES_MAX + 6)}

    def totals() -> dict[str, float]:
        statistics["transfer"]["received_from"] = dict(received)
        rows = worker_rows(statistics, detector, 1)
        return {r.labels["peer"]: r.value for r in rows if r.name == "kv_peer_bytes_total"}

    first = totals()
    assert len(first) == LABEL_VALUES_MAX + 1
    assert first["other"] == 100 + 101 + 102 + 103 + 104 + 105
    received["p/0"] += 1000  # now the largest
    second = totals()
    assert second.keys() == first.keys() and second["other"] == first["other"] + 1000
    del received["p/1"], received["p/69"]  # one of the others, and one with a name
    received["p/new"] = 7
    third = totals()
    assert third["other"] == second["other"] and third["p/new"] == 7 and "p/69" not in third
    received["p/1"] = 30  # it has come back
    assert totals()["other"] == second["other"] + 30


def test_peers_without_a_label_of_their_own_show_that_one_of_them_uses_tcp() -> None:
    statistics = worker_statistics()
    detector = TransportDetector(lambda: MINIMUM_KV_BYTES)
    over_tcp = {"prefill/tcp": MINIMUM_KV_BYTES}
    assert detector.workers_using_tcp(over_tcp, 1) == {"prefill/tcp": True}
    larger = {f"prefill/{number}": 2 * MINIMUM_KV_BYTES for number in range(LABEL_VALUES_MAX + 1)}
    statistics["transfer"]["received_from"] = over_tcp | larger
    rows = worker_rows(statistics, detector, 1)
    transports = {
        row.labels["peer"]: row.labels["transport"]
        for row in rows
        if row.name == "kv_peer_transport"
    }
    assert transports["other"] == "nixl (tcp)"
    assert transports["prefill/0"] == "nixl"


def test_a_dictionary_that_changes_meanwhile_is_read_again() -> None:
    tries = []

    def shaky():
        tries.append(1)
        yield MetricRow("queue_depth", 1)
        if len(tries) < 3:
            raise RuntimeError("dictionary changed size during iteration")

    assert parsed(Exporter(ObservabilitySettings(), BASE, shaky))["diptych_queue_depth", ()] == 1
    assert len(tries) == 3


def test_targets_are_grouped_by_part_and_without_those_that_have_none() -> None:
    card = f.WorkerCard("prefill/a", "prefill", "prefill", "h:1", "a", 1, metrics="h:2")
    silent = f.WorkerCard("decode/b", "decode", "decode", "h:3", "b", 1)
    router = {"metrics": "h:5", "gateways": [{"metrics": "h:6"}, {}]}
    told = scrape_targets("h:9", [router], [card, silent])
    assert told == [
        {"targets": ["h:9"], "labels": {"part": "control"}},
        {"targets": ["h:6"], "labels": {"part": "gateway"}},
        {"targets": ["h:5"], "labels": {"part": "router"}},
        {"targets": ["h:2"], "labels": {"part": "worker"}},
    ]
    other_model = {"metrics": "h:7", "gateways": [{"metrics": "h:6"}]}
    _, gateways, routers = scrape_targets("h:9", [router, other_model], [])
    assert gateways["targets"] == ["h:6"], "once, though each router names it"
    assert routers["targets"] == ["h:5", "h:7"]
    assert scrape_targets("h:9", [], []) == [{"targets": ["h:9"], "labels": {"part": "control"}}]


def test_the_targets_that_a_router_has_named_stay_while_it_does_not_answer() -> None:
    known = KnownRouters()
    first, second = {"metrics": "a:1", "gateways": []}, {"metrics": "b:1", "gateways": []}
    assert known.update({"a": first, "b": None}) == [first]
    assert known.update({"a": None, "b": second}) == [first, second]
    assert known.update({"b": None}) == [second], "a model that was removed is forgotten"


def test_the_exporter_listens_where_the_configuration_says() -> None:
    async def address(host: str | None) -> str:
        exporter = Exporter(ObservabilitySettings(metrics_host=host), BASE, list)
        await exporter.start("127.0.0.1")
        try:
            async with httpx.AsyncClient(base_url=f"http://{exporter.address}") as client:
                assert (await client.get("/metrics")).status_code == 200
        finally:
            exporter.close()
        return exporter.address.rpartition(":")[0]

    assert asyncio.run(address(None)) == "127.0.0.1"
    assert asyncio.run(address("127.0.0.2")) == "127.0.0.2"
    for wildcard in ("0.0.0.0", "::", ""):
        with pytest.raises(ValueError, match="one address of this machine"):
            ObservabilitySettings(metrics_host=wildcard)


async def test_the_exporter_serves_one_page_and_nothing_else() -> None:
    rows = [MetricRow("queue_depth", 7)]
    base = free_port()
    settings = ObservabilitySettings(metrics_port=base)
    first = Exporter(settings, BASE, lambda: rows)
    second = Exporter(settings, BASE, lambda: rows)
    await first.start("127.0.0.1")
    await second.start("127.0.0.1")  # its port is taken: the next one
    ports = [int(one.address.rpartition(":")[2]) for one in (first, second)]
    assert base <= ports[0] < ports[1] < base + PORTS_TRIED
    async with httpx.AsyncClient(base_url=f"http://{second.address}") as client:
        page = await client.get("/metrics")
        assert page.status_code == 200 and "diptych_queue_depth" in page.text
        assert page.headers["content-type"].startswith("text/plain")
        asked = {"accept": "application/openmetrics-text; version=1.0.0"}
        page = await client.get("/metrics?name[]=x", headers=asked)
        assert page.text.endswith("# EOF\n")
        assert (await client.get("/")).status_code == 404
        assert (await client.post("/metrics")).status_code == 404
        rows[0] = MetricRow("no_such_metric", 1)
        assert (await client.get("/metrics")).status_code == 500
    first.close()
    second.close()


def test_the_rows_of_two_models_stand_on_one_page_each_with_its_own_label() -> None:
    tallies = {name: gateway() for name in ("one", "two")}
    tallies["one"].count_refused(429)
    tallies["two"].count_refused(400)

    def rows() -> list[MetricRow]:
        return [
            row._replace(base_labels={"model": name})
            for name, tally in tallies.items()
            for row in [*tally.rows(1, 2, 3), *tally.vllm_rows()]
        ]

    page = Exporter(BOTH, {"model": ""}, rows).render()[1].decode()

    families = {family.name: family for family in text_string_to_metric_families(page)}
    refused = {
        (sample.labels["model"], sample.labels["code"])
        for sample in families["diptych_requests"].samples
    }
    assert refused == {("one", "429"), ("two", "400")}
    names = {
        sample.labels["model_name"]
        for sample in families["vllm:time_to_first_token_seconds"].samples
    }
    assert names == {"one", "two"}
    assert 'model=""' not in page


def test_a_row_may_not_bring_a_label_that_the_process_does_not_have() -> None:
    row = MetricRow("inflight_requests", 1, base_labels={"pool": "decode"})
    with pytest.raises(AssertionError):
        Exporter(BOTH, BASE, lambda: [row]).render()


def test_the_router_tells_what_became_of_those_that_were_to_be_in_time() -> None:
    router = Router(RouterConfig(), 1)
    router.counts.urgent_admitted = 5
    router.counts.urgent_in_time = 2
    router.queue.moved_behind = 1
    told = {row.name: row.value for row in RouterTally(router).rows()}
    names = ("urgent_admitted_total", "urgent_moved_total", "urgent_in_time_total")
    assert [told[name] for name in names] == [5, 1, 2]
    assert router.statistics()["urgent"] == {"admitted": 5, "moved": 1, "in_time": 2}
