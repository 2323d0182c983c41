"""Spans of a request, as a collector gets them."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from diptych.cluster.config import ObservabilitySettings
from diptych.cluster.gateway.attempt.request import Request
from diptych.cluster.gateway.attempt.terms import Terms
from diptych.cluster.telemetry import tracing
from diptych.cluster.telemetry.gateway_metrics import outcome_of
from diptych.cluster.telemetry.tracing import (
    RoutingSpans,
    Tracer,
    WorkerSpans,
    end_request_span,
    tracer_of,
)
from diptych.protos import frames as f

from tests.support.collector import Collector, collecting

TRACE, PARENT = "ab" * 16, "cd" * 8
SAMPLED, NOT = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
KEY = ("r~1", 0)


def tracer(collector: Collector, part: str, sample: float = 1.0) -> Tracer:
    settings = ObservabilitySettings(otlp_endpoint=collector.url, trace_sample=sample)
    made = tracer_of(settings, part, f"{part}/1")
    assert made
    return made


def request(trace: str = "") -> Request:
    return Request("r", [1, 2, 3], [], f.Sampling(8), terms=Terms(traceparent=trace))


def test_a_request_is_one_trace_below_the_clients_span() -> None:
    with collecting() as collector:
        gateway, router = tracer(collector, "gateway"), tracer(collector, "router")
        prefill, decode = tracer(collector, "worker"), tracer(collector, "worker")
        asked = request(SAMPLED)
        root = gateway.start_request_span(asked, "m")
        routing_spans = RoutingSpans(router)
        routing_spans.begin("g", f.PlaceAttempt(KEY, 3, 8, [], trace=asked.trace))
        routing_spans.handle_reply(f.AttemptPlaced(KEY, 1, "prefill/1", "decode/1", 0, 0.0))
        source, sink = WorkerSpans(prefill, "prefill/1"), WorkerSpans(decode, "decode/1")
        common = KEY, 1, [1, 2, 3], f.Sampling(8)
        sink.begin("g", f.StartDecode(*common, "prefill/1", trace=asked.trace))
        source.begin("g", f.StartPrefill(*common, "decode/1", trace=asked.trace))
        source.handle_reply(f.EngineStepTokens([f.AnswerTokens(KEY, 0, [f.Token(5)])]))
        sink.handle_reply(f.PromptArrived(KEY, 3, 2.0, 1.0))
        sink.handle_reply(f.EngineStepTokens([f.AnswerTokens(KEY, 1, [f.Token(6)])]))
        sink.handle_reply(f.EngineStepTokens([f.AnswerTokens(KEY, 2, [f.Token(7)], "stop")]))
        end_request_span(root, asked, outcome_of(asked, "stop"))
        for one in (gateway, router, prefill, decode):
            one.close()
        spans = collector.of(TRACE)
    assert set(spans) == {"chat m", "route", "prefill", "kv_transfer", "decode"}
    top = spans.pop("chat m")
    assert top.parent == PARENT and top.part == "gateway"
    assert top.attributes["gen_ai.usage.input_tokens"] == 3
    assert {span.parent for span in spans.values()} == {top.id}
    parts = {name: span.part for name, span in spans.items()}
    assert parts == dict.fromkeys(("prefill", "kv_transfer", "decode"), "worker") | {
        "route": "router"
    }
    assert spans["route"].attributes["diptych.decode"] == "decode/1"
    assert spans["kv_transfer"].attributes["diptych.kv_busy_s"] == 0.002
    assert spans["kv_transfer"].end <= spans["decode"].start
    assert not any(span.failed for span in (top, *spans.values()))


def test_failures_are_said_and_nothing_is_left_open() -> None:
    with collecting() as collector:
        worker, router = tracer(collector, "worker"), tracer(collector, "router")
        worker_spans, routing_spans = WorkerSpans(worker, "decode/1"), RoutingSpans(router)
        for number, gateway in enumerate(("g", "g", "h")):
            frame = f.StartDecode((f"r{number}", 0), 1, [1], f.Sampling(8), "p", trace=SAMPLED)
            worker_spans.begin(gateway, frame)
            routing_spans.begin(gateway, f.PlaceAttempt((f"r{number}", 0), 1, 1, [], trace=SAMPLED))
        worker_spans.handle_reply(f.AttemptFailed(("r0", 0), "decode/1", "kv_checksum"))
        routing_spans.handle_reply(f.AttemptRefused(("r0", 0), "queue_full", "", 1.0))
        worker_spans.end_gateway("g")
        routing_spans.end_gateway("g")
        worker_spans.end_attempt(("r2", 0))
        routing_spans.handle_reply(f.AttemptOutcome(("r2", 0), reason="cancelled"))
        assert worker_spans._attempts == {} and routing_spans._attempts == {}
        worker.close()
        router.close()
        failed = sorted(span.failed for span in collector.spans)
    said = ["gateway_gone", "gateway_gone", "kv_checksum", "queue_full"]
    assert failed == ["", "", *said], "a client that leaves is no failure"


@pytest.mark.parametrize(
    ("reason", "error_type"),
    [
        (f.HANDOVER, None),
        ("no_capacity", "no_capacity"),
        ("RuntimeError: the engine's own words, 4711 of them", "engine_error"),
    ],
)
def test_an_attempt_that_is_handed_over_has_not_failed(reason: str, error_type: str | None) -> None:
    class FakeSpan:
        def __init__(self) -> None:
            self.attributes: dict[str, object] = {}

        def set_attributes(self, attributes: dict[str, object]) -> None:
            self.attributes |= attributes

        def set_attribute(self, name: str, value: object) -> None:
            self.attributes[name] = value

        def set_status(self, status: object) -> None:
            self.attributes["status"] = status

        def end(self) -> None:
            self.attributes["ended"] = True

    span = FakeSpan()
    fake_tracer: Any = SimpleNamespace(start_span=lambda *_: span)
    spans = WorkerSpans(fake_tracer, "decode/1")
    spans.begin("g", f.StartDecode(("r", 0), 1, [1], f.Sampling(8), "p", trace=SAMPLED))
    spans.handle_reply(f.AttemptFailed(("r", 0), "decode/1", reason))
    assert span.attributes["ended"]
    assert span.attributes.get("error.type") == error_type
    assert ("status" in span.attributes) == (error_type is not None)


def test_a_collector_that_does_not_answer_holds_no_process_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "FLUSH_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        made = tracer_of(ObservabilitySettings(otlp_endpoint=address), "worker", "w")
        assert made
        made.start_span("prefill", SAMPLED).end()
        begun_s = time.monotonic()
        made.close()
        assert time.monotonic() - begun_s < 2.0


def test_a_local_prefill_turns_into_decode_and_ends_with_its_last_answer() -> None:
    with collecting() as collector:
        worker = tracer(collector, "worker")
        worker_spans = WorkerSpans(worker, "decode/1")
        worker_spans.begin("g", f.StartDecode(KEY, 1, [1], f.Sampling(8, n=2), None, trace=SAMPLED))
        worker_spans.handle_reply(
            f.EngineStepTokens(
                [f.AnswerTokens(KEY, 0, [f.Token(1)], answer_index=i) for i in range(2)]
            )
        )
        worker_spans.handle_reply(
            f.EngineStepTokens([f.AnswerTokens(KEY, 1, [f.Token(1)], "stop", answer_index=0)])
        )
        assert KEY in worker_spans._attempts
        worker_spans.handle_reply(
            f.EngineStepTokens([f.AnswerTokens(KEY, 1, [f.Token(1)], "length", answer_index=1)])
        )
        assert worker_spans._attempts == {}
        worker.close()
        assert [span.name for span in collector.spans] == ["prefill", "decode"]


def test_what_is_not_sampled_leaves_frames_empty() -> None:
    with collecting() as collector:
        gateway = tracer(collector, "gateway", sample=0.0)
        for trace in ("", NOT, "nonsense"):
            asked = request(trace)
            end_request_span(
                gateway.start_request_span(asked, "m"), asked, outcome_of(asked, "stop")
            )
            assert asked.trace == ""
        worker_spans = WorkerSpans(gateway, "w")
        worker_spans.begin("g", f.StartDecode(KEY, 1, [1], f.Sampling(8), None))
        assert worker_spans._attempts == {}
        wanted = request(SAMPLED)
        gateway.start_request_span(wanted, "m")
        assert TRACE in wanted.trace
        gateway.close()
        assert collector.spans == []


def test_without_an_endpoint_nothing_of_opentelemetry_is_loaded() -> None:
    code = (
        "import sys\n"
        "from diptych.cluster.telemetry import tracing\n"
        "from diptych.cluster.config import ObservabilitySettings\n"
        "assert tracing.tracer_of(ObservabilitySettings(), 'gateway', 'g') is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
