"""OpenTelemetry spans of a request, in every process that works for it, sent by OTLP/HTTP.

    chat MODEL      gateway: from arrival to the end; its parent is the client's, by `traceparent`
      route         router: from the request's arrival there until it is placed or refused
      prefill       the worker that computes the prompt: until the first token
      kv_transfer   decode worker: from the attempt's arrival until its KV is there
      decode        decode worker: until the last token

The gateway's span travels in the frames as `trace` (W3C traceparent); all others are its children.
Without `observability.otlp_endpoint` nothing of OpenTelemetry is imported, and frames are empty
there; the same for a request that is not sampled. A client that asks for sampling gets it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...protos import frames as f
from ..config import ObservabilitySettings

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from ..gateway.attempt.stream import Request

CLOSE_MS = 2000  #: for spans that were not sent yet when the process ends


def tracer_of(settings: ObservabilitySettings, part: str, name: str) -> Tracer | None:
    """None: nothing is traced. `part`: gateway | router | worker; `name`: of this process."""
    return Tracer(settings, part, name) if settings.otlp_endpoint else None


class Tracer:
    """Makes spans; sends them from a thread of its own."""

    def __init__(self, settings: ObservabilitySettings, part: str, name: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        about = {"service.name": "diptych", "service.instance.id": name, "diptych.part": part}
        sampler = ParentBasedTraceIdRatio(settings.trace_sample)
        self._provider = TracerProvider(sampler=sampler, resource=Resource(about))
        assert settings.otlp_endpoint
        exporter = OTLPSpanExporter(f"{settings.otlp_endpoint.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("diptych")
        self._context = TraceContextTextMapPropagator()

    def begin(self, name: str, trace: str, ago_s: float = 0.0, server: bool = False) -> Span:
        """A span under `trace`, that began `ago_s` ago; a root if that is no traceparent."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        above = self._context.extract({"traceparent": trace}, Context())
        kind = SpanKind.SERVER if server else SpanKind.INTERNAL
        start = time.time_ns() - int(ago_s * 1e9)
        return self._tracer.start_span(name, above, kind, start_time=start)

    def traceparent(self, span: Span) -> str:
        """For frames; empty if the span is not sampled."""
        from opentelemetry.trace import set_span_in_context

        if not span.is_recording():
            return ""
        carrier: dict[str, str] = {}
        self._context.inject(carrier, set_span_in_context(span))
        return carrier["traceparent"]

    def request(self, request: Request, model: str) -> Span:
        """The span of a client's request; what is sent for it goes under that."""
        span = self.begin(f"chat {model}", request.terms.trace, request.age_s, server=True)
        request.trace = self.traceparent(span)
        span.set_attributes(
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": "diptych",
                "gen_ai.request.model": model,
                "gen_ai.usage.input_tokens": len(request.ids),
                "diptych.request_id": request.id,
                "diptych.slo_class": request.terms.slo_class,
            }
        )
        return span

    def close(self) -> None:
        self._provider.force_flush(CLOSE_MS)
        self._provider.shutdown()


def end_request(span: Span, request: Request, outcome: f.RequestOutcome) -> None:
    """`gen_ai.*` as in OpenTelemetry's semantic conventions for generative AI."""
    told: dict[str, Any] = {
        "gen_ai.usage.output_tokens": outcome.tokens,
        "gen_ai.response.finish_reasons": [outcome.reason],
        "diptych.route": request.route,
        "diptych.prefix_hit_tokens": request.hit_tokens,
        "diptych.attempts": request.attempts,
    }
    if request.ttft_s is not None:
        told["gen_ai.response.time_to_first_chunk"] = request.ttft_s
    span.set_attributes(told)
    end(span, "" if outcome.reason in ("stop", "length", "cancelled") else outcome.reason)


def end(span: Span, failed: str = "") -> None:
    from opentelemetry.trace import Status, StatusCode

    if failed:
        span.set_attribute("error.type", failed)
        span.set_status(Status(StatusCode.ERROR, failed))
    span.end()


class Routes:
    """Spans of requests that wait for the router."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._spans: dict[f.AttemptKey, tuple[str, Span]] = {}  #: with the gateway that asked

    def asked(self, gateway: str, place: f.PlaceAttempt) -> None:
        if place.trace and place.attempt_key not in self._spans:
            span = self._tracer.begin("route", place.trace)
            span.set_attribute("diptych.attempt", place.attempt_key[1])
            self._spans[place.attempt_key] = gateway, span

    def answered(self, frame: object) -> None:
        match frame:
            case f.AttemptPlaced(key) if key in self._spans:
                span = self._spans.pop(key)[1]
                span.set_attribute("diptych.prefill", frame.prefill_worker or frame.decode_worker)
                span.set_attribute("diptych.decode", frame.decode_worker)
                span.set_attribute("diptych.prefix_hit_tokens", frame.hit_tokens)
                end(span)
            case f.AttemptRefused(key) | f.AttemptOutcome(key) if key in self._spans:
                end(self._spans.pop(key)[1], frame.reason)

    def gone(self, gateway: str) -> None:
        for key in [key for key, (name, _) in self._spans.items() if name == gateway]:
            end(self._spans.pop(key)[1], "gateway_gone")


@dataclass(slots=True)
class Work:
    """One attempt on a worker. `open`: answers without an end."""

    gateway: str
    span: Span
    trace: str
    open: set[int] = field(default_factory=set)


class Works:
    """Spans of the attempts on a worker, by what it hears and says."""

    def __init__(self, tracer: Tracer, worker: str) -> None:
        self._tracer, self._worker = tracer, worker
        self._works: dict[f.AttemptKey, Work] = {}

    def begin(self, gateway: str, frame: f.StartPrefill | f.StartDecode) -> None:
        if not frame.trace or frame.attempt_key in self._works:
            return
        moves = isinstance(frame, f.StartDecode) and frame.prefill_worker is not None
        span = self._span("kv_transfer" if moves else "prefill", frame.attempt_key, frame.trace)
        answers = set(range(frame.sampling.n)) if isinstance(frame, f.StartDecode) else set()
        self._works[frame.attempt_key] = Work(gateway, span, frame.trace, answers)

    def _span(self, name: str, key: f.AttemptKey, trace: str) -> Span:
        span = self._tracer.begin(name, trace)
        span.set_attributes({"diptych.worker": self._worker, "diptych.attempt": key[1]})
        return span

    def sent(self, frame: object) -> None:
        """What the worker tells a gateway."""
        match frame:
            case f.EngineStepTokens(streams):
                for tokens in streams:
                    work = self._works.get(tokens.attempt_key)
                    if work and tokens.tokens:
                        self._tokens(work, tokens)
            case f.PromptArrived(key, tokens, busy_ms, exposed_ms) if key in self._works:
                work = self._works[key]
                work.span.set_attributes(
                    {
                        "diptych.kv_tokens": tokens,
                        "diptych.kv_busy_s": busy_ms / 1e3,
                        "diptych.kv_exposed_s": exposed_ms / 1e3,
                    }
                )
                end(work.span)
                work.span = self._span("decode", key, work.trace)
            case f.AttemptFailed(key, reason=reason):
                self.over(key, reason)

    def _tokens(self, work: Work, tokens: f.AnswerTokens) -> None:
        if not work.open:  # a prefill worker is done with its first token
            self.over(tokens.attempt_key)
            return
        if getattr(work.span, "name", "") == "prefill":
            end(work.span)
            work.span = self._span("decode", tokens.attempt_key, work.trace)
        if tokens.finish_reason:
            work.open.discard(tokens.answer_index)
            if not work.open:
                self.over(tokens.attempt_key)

    def over(self, key: f.AttemptKey, failed: str = "") -> None:
        work = self._works.pop(key, None)
        if work:
            end(work.span, failed)

    def gone(self, gateway: str) -> None:
        for key in [key for key, work in self._works.items() if work.gateway == gateway]:
            self.over(key, "gateway_gone")
