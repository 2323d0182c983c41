"""Metrics, traces, logs and goodput of a live cluster: they say what was sent."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import grpc
import httpx
import pytest
from diptych.cluster.telemetry.catalogue import METRICS, VLLM_METRICS
from diptych.protos import inference_pb2 as pb
from diptych.protos import inference_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from tests.support.collector import Collector, collecting
from tests.support.live import Live, eventually, running

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

MARK = "Xylophone-Quokka"  #: in every prompt, and in no log
TOKENS, REQUESTS, REFUSED = 6, 5, 2
TRACES = ["a1" * 16, "b2" * 16]


def pages(live: Live) -> dict[str, str]:
    """What every target serves, by address; parts must be those of a whole cluster."""
    told = httpx.get(f"{live.control}/metrics/targets", timeout=10).json()
    count = {group["labels"]["part"]: len(group["targets"]) for group in told}
    assert count == {"control": 1, "gateway": 1, "router": 1, "worker": 2}
    addresses = [address for group in told for address in group["targets"]]
    return {address: httpx.get(f"http://{address}/metrics").text for address in addresses}


def totals(texts: dict[str, str]) -> Counter[str]:
    """Every sample's value, summed over processes and labels; `name{label=value}` too."""
    summed = Counter[str]()
    for text in texts.values():
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                summed[sample.name] += sample.value
                for label, value in sample.labels.items():
                    summed[f"{sample.name}{{{label}={value}}}"] += sample.value
    return summed


def send(live: Live) -> list[str]:
    """`REQUESTS` that are answered, the last by gRPC, and `REFUSED` that are not."""
    ids = []
    for number in range(REQUESTS - 1):
        named = {"x-request-id": f"seen-{number}"}
        if number == 1:
            named["traceparent"] = f"00-{TRACES[0]}-{'cd' * 8}-01"
        body = {
            "messages": [{"role": "user", "content": f"{number}. {MARK}: what is prefill? " * 12}],
            "max_tokens": TOKENS,
            "min_tokens": TOKENS,
        }
        url = f"{live.url}/v1/chat/completions"
        answer = httpx.post(url, json=body, headers=named, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == TOKENS
        ids.append(named["x-request-id"])
    for _ in range(REFUSED):
        assert httpx.post(f"{live.url}/v1/chat/completions", json={}).status_code == 400
    with grpc.insecure_channel(f"127.0.0.1:{live.grpc}") as channel:
        message = pb.Message(role="user", content=f"{MARK}! {MARK}! {MARK}?")
        asked = pb.ChatRequest(messages=[message], max_tokens=TOKENS)
        about = [("traceparent", f"00-{TRACES[1]}-{'ef' * 8}-01")]
        told = list(inference_pb2_grpc.InferenceStub(channel).Chat(asked, metadata=about))
        assert told[-1].finish_reason
    return ids


def test_metrics_traces_and_logs_say_what_was_sent(tmp_path: Path) -> None:
    with collecting() as collector:
        settings = {
            "observability.otlp_endpoint": collector.url,
            "observability.trace_sample": 0,
            "observability.log": "json",
            "observability.metrics_compat": "[vllm]",
            "kv_transfer.faults.corrupt_writes": 1,
            "gateway.rehearsal": "false",  # the first write is a client's, and all are counted
        }
        arguments = [
            part for key, value in settings.items() for part in ("--set", f"{key}={value}")
        ]
        with running(tmp_path / "serve.log", *arguments) as live:
            ids = send(live)
            eventually(live.idle)
            texts = pages(live)
            check_metrics(live, texts)
            eventually(lambda: replicas(live) == {"running": 2, "target": 2})
            check_traces(collector)
            check_logs(live, ids)


def check_metrics(live: Live, texts: dict[str, str]) -> None:
    seen = totals(texts)
    assert seen["diptych_requests_total{code=200}"] == REQUESTS
    assert seen["diptych_requests_total{code=400}"] == REFUSED
    for name in ("ttft_seconds", "e2e_seconds", "prompt_tokens", "first_gap_seconds"):
        assert seen[f"diptych_request_{name}_count"] == REQUESTS, name
    assert seen["vllm:time_to_first_token_seconds_count"] == REQUESTS
    made = seen["diptych_request_output_tokens_sum"]
    assert made - REQUESTS == seen["diptych_request_itl_seconds_count"]
    assert seen["diptych_goodput_requests_total"] == REQUESTS
    # the first write was corrupt: one transfer failed, one attempt was made again
    assert seen["diptych_kv_transfer_failures_total{reason=checksum}"] == 1
    assert seen["diptych_request_retries_total"] == 1
    placed = seen["diptych_routing_decisions_total{decision=disagg}"]
    assert placed == REQUESTS + 1 == seen["diptych_queue_wait_seconds_count"]
    assert seen["diptych_kv_transfer_duration_seconds_count"] == REQUESTS
    sent = seen["diptych_kv_transfer_bytes_total{direction=sent}"]
    assert 0 < seen["diptych_kv_peer_bytes_total"] <= sent
    assert seen["diptych_kv_peer_transport"] == 1
    for state in ("active", "reserved", "staged", "quarantined", "orphaned"):
        assert seen[f"diptych_kv_blocks{{state={state}}}"] == 0, state
    total = live.worker("prefill")["engine"]["kv_blocks"]["total"]
    assert seen["diptych_kv_blocks{pool=prefill}"] == total
    assert seen["diptych_workers"] == 2 and seen["diptych_build_info"] == 1
    goodput = live.status()["router"]["goodput"]
    assert goodput["requests"] == REQUESTS == goodput["classes"]["interactive"]["requests"]
    known = set(METRICS | VLLM_METRICS)
    lines = [
        line.split()[2] for text in texts.values() for line in text.splitlines() if "TYPE" in line
    ]
    assert {name for name in lines if not name.startswith("process_")} <= known
    main = httpx.get(f"{live.url}/metrics").text
    assert "diptych_request_ttft_seconds_bucket" in main
    if shutil.which("promtool"):
        for text in texts.values():
            plain = "".join(f"{x}\n" for x in text.splitlines() if "vllm:" not in x)
            command = ["promtool", "check", "metrics"]
            done = subprocess.run(command, input=plain, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stdout + done.stderr) == (0, "")


def replicas(live: Live) -> dict[str, float]:
    """Control looks every few seconds."""
    seen = totals(pages(live))
    return {state: seen[f"diptych_replicas{{state={state}}}"] for state in ("running", "target")}


def check_traces(collector: Collector) -> None:
    """Each traced request is one tree: the client's span, the gateway's, and those below it."""
    wanted = {"route", "prefill", "kv_transfer", "decode"}
    for trace, parent in zip(TRACES, ("cd" * 8, "ef" * 8), strict=True):
        complete = lambda: wanted | {"chat demo"} <= collector.of(trace).keys()  # noqa: B023, E731
        eventually(complete, 20.0)
        spans = collector.of(trace)
        top = spans["chat demo"]
        assert top.parent == parent and top.part == "gateway"
        assert {spans[name].parent for name in wanted} == {top.id}
        assert spans["route"].part == "router" and spans["decode"].part == "worker"
        assert all(top.start <= spans[n].start <= spans[n].end <= top.end for n in ("route",))
        assert spans["route"].start <= spans["prefill"].start <= spans["decode"].start
    assert {span.trace for span in collector.spans} == set(TRACES)  # the others were not sampled


def check_logs(live: Live, ids: list[str]) -> None:
    """Every replica's standard error is in a file of Ray's; only the retry is about a request."""
    status = live.status()
    found = [status["router"]["pid"], *(one["pid"] for one in status["gateways"])]
    found += [worker["pid"] for worker in status["workers"]]
    said = []
    for pid in found:
        text = Path(f"/proc/{pid}/fd/2").read_text()
        assert MARK not in text
        said += [json.loads(line) for line in text.splitlines() if line.startswith('{"time"')]
    about = [line for line in said if line.get("request_id") in ids]
    (retry,) = [line for line in about if "attempt 0" in line["message"]]
    assert retry["request_id"] == ids[0] and retry["level"] == "warning"
    assert retry["part"] == "gateway" and "checksum" in retry["message"]
