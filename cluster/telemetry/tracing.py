"""OpenTelemetry spans of a request, in every process that works for it, sent by OTLP/HTTP.

    chat MODEL      gateway: from arrival to the end; its parent is the client's, by `traceparent`
      route         router: from the request's arrival there until it is placed or refused
      prefill       the worker that computes the prompt: until the first token
      kv_transfer   decode worker: from the attempt's arrival until its KV is there
      decode        decode worker: until the last token

The gateway's span travels in the frames as `trace` (W3C traceparent); all others are its children.
The `trace` is empty for a request that is not sampled: router and workers make no span for it, and
the gateway's own is not recorded or sent. A client that asks for sampling gets it. Without
`observability.otlp_endpoint` there are no spans, and nothing of OpenTelemetry is imported.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...protos import frames
from ..config import ObservabilitySettings

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from ..gateway.attempt.request import Request

FLUSH_TIMEOUT_S = 2.0  #: For spans that were not sent yet when the process ends.
#: How requests end that have not failed.
SUCCESSFUL_REASONS = ("stop", "length", "cancelled")


def tracer_of(settings: ObservabilitySettings, part: str, name: str) -> Tracer | None:
    """Return the tracer of this process, or None if nothing is traced.

    `part` is gateway, router or worker; `name` is the process's own.
    """
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

        assert settings.otlp_endpoint
        attributes = {
            "service.name": "diptych",
            "service.instance.id": name,
            "diptych.part": part,
        }
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(settings.trace_sample),
            resource=Resource(attributes),
        )
        exporter = OTLPSpanExporter(f"{settings.otlp_endpoint.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("diptych")
        self._propagator = TraceContextTextMapPropagator()

    def start_span(
        self, name: str, traceparent: str, ago_s: float = 0.0, server: bool = False
    ) -> Span:
        """Return a new span that began `ago_s` seconds ago; the caller ends it (`end_span`).

        The span is a child of `traceparent`, or a root if that is empty or malformed. Its kind is
        SERVER if `server` is true, as for the call of a client, and else INTERNAL.
        """
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        parent = self._propagator.extract({"traceparent": traceparent}, Context())
        kind = SpanKind.SERVER if server else SpanKind.INTERNAL
        start_time_ns = time.time_ns() - int(ago_s * 1e9)
        return self._tracer.start_span(name, parent, kind, start_time=start_time_ns)

    def traceparent(self, span: Span) -> str:
        """Return the trace context that frames carry; empty if the span is not sampled."""
        from opentelemetry.trace import set_span_in_context

        if not span.is_recording():
            return ""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return carrier["traceparent"]

    def start_request_span(self, request: Request, model: str) -> Span:
        """Return the span of a client's request.

        The request's frames carry it from now on, so that the spans of other processes become its
        children.
        """
        span = self.start_span(
            f"chat {model}", request.terms.traceparent, ago_s=request.age_s, server=True
        )
        request.trace = self.traceparent(span)
        span.set_attributes(
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": "diptych",
                "gen_ai.request.model": model,
                "gen_ai.usage.input_tokens": len(request.prompt_ids),
                "diptych.request_id": request.id,
                "diptych.slo_class": request.terms.slo_class,
            }
        )
        return span

    def close(self) -> None:
        """Send the spans that were not sent yet, and stop. Blocks for `FLUSH_TIMEOUT_S` at most.

        Spans that a collector has not taken by then are lost.
        """
        # The library itself waits for up to 30 s, whatever timeout it is given.
        closing = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(FLUSH_TIMEOUT_S)


def end_request_span(span: Span, request: Request, outcome: frames.RequestOutcome) -> None:
    """End the span of a client's request, marked as failed unless it ended as it should.

    `gen_ai.*` are as in OpenTelemetry's semantic conventions for generative AI.
    """
    attributes: dict[str, Any] = {
        "gen_ai.usage.output_tokens": outcome.tokens,
        "gen_ai.response.finish_reasons": [outcome.reason],
        "diptych.route": ",".join(request.workers),
        "diptych.prefix_hit_tokens": request.hit_tokens,
        "diptych.attempts": request.attempt_count,
    }
    if request.ttft_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = request.ttft_s
    span.set_attributes(attributes)
    end_span(span, _error_type(outcome.reason))


def _error_type(reason: str) -> str:
    """Return what marks a span as failed that ended for this reason; empty: it has not failed."""
    return "" if reason in SUCCESSFUL_REASONS else reason


def _attempt_error_type(reason: str) -> str:
    """Return what marks a worker's span as failed, as `_error_type`.

    An attempt that is handed over has not failed: another worker goes on with it. An engine's own
    message becomes `engine_error`, as a backend groups spans by this attribute.
    """
    if reason == frames.HANDOVER:
        return ""
    return _error_type(reason) if reason.replace("_", "").isalnum() else "engine_error"


def end_span(span: Span, error_type: str = "") -> None:
    """End a span; with an `error_type` it is marked as failed."""
    from opentelemetry.trace import Status, StatusCode

    if error_type:
        span.set_attribute("error.type", error_type)
        span.set_status(Status(StatusCode.ERROR, error_type))
    span.end()


@dataclass(frozen=True, slots=True)
class PlacementSpan:
    """The span of an attempt that waits for the router's decision."""

    gateway: str  #: The name of the gateway that asked for the placement.
    span: Span


class RoutingSpans:
    """Spans of the attempts that wait for the router, by the frames that it gets and sends.

    An attempt is one placement of a request; its key is (request id, number of the attempt).
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._attempts: dict[frames.AttemptKey, PlacementSpan] = {}

    def begin(self, gateway: str, place: frames.PlaceAttempt) -> None:
        """Begins the span of an attempt, whose gateway asks for a placement."""
        if place.trace and place.attempt_key not in self._attempts:
            span = self._tracer.start_span("route", place.trace)
            span.set_attribute("diptych.attempt", place.attempt_key[1])
            self._attempts[place.attempt_key] = PlacementSpan(gateway, span)

    def handle_reply(self, frame: object) -> None:
        """Ends the span of an attempt that the frame places, refuses or ends.

        `frame` is one that the router sends, or a gateway's `AttemptOutcome`; others do nothing.
        """
        match frame:
            case frames.AttemptPlaced(key) if key in self._attempts:
                span = self._attempts.pop(key).span
                span.set_attribute("diptych.prefill", frame.prefill_worker or frame.decode_worker)
                span.set_attribute("diptych.decode", frame.decode_worker)
                span.set_attribute("diptych.prefix_hit_tokens", frame.hit_tokens)
                end_span(span)
            case frames.AttemptRefused(key) | frames.AttemptOutcome(key) if key in self._attempts:
                end_span(self._attempts.pop(key).span, _error_type(frame.reason))

    def end_gateway(self, gateway: str) -> None:
        """Ends the spans of all attempts of a gateway that is gone."""
        for key, attempt in list(self._attempts.items()):
            if attempt.gateway == gateway:
                del self._attempts[key]
                end_span(attempt.span, error_type="gateway_gone")


@dataclass(slots=True)
class AttemptSpan:
    """The span of what an attempt does now on a worker."""

    gateway: str  #: The name of the gateway that started the attempt.
    phase: str  #: The span's name: prefill, kv_transfer or decode.
    span: Span
    traceparent: str  #: Of the gateway's span, the parent of the next phase's span.
    #: Answers that have no end yet. Empty on a prefill worker, which makes first tokens only.
    open_answers: set[int] = field(default_factory=set)


class WorkerSpans:
    """Spans of the attempts on a worker, by the frames that it gets and sends, and by their ends.

    An attempt has one open span at a time. On a decode worker it is `kv_transfer`, then `decode`;
    where no other worker computes the prompt, it is `prefill` and then `decode`.
    """

    def __init__(self, tracer: Tracer, worker: str) -> None:
        self._tracer = tracer
        self._worker = worker
        self._attempts: dict[frames.AttemptKey, AttemptSpan] = {}

    def begin(self, gateway: str, frame: frames.StartPrefill | frames.StartDecode) -> None:
        """Begins the span of an attempt that a gateway starts on this worker."""
        if not frame.trace or frame.attempt_key in self._attempts:
            return
        phase = "prefill"
        open_answers: set[int] = set()
        if isinstance(frame, frames.StartDecode):
            open_answers = set(range(frame.sampling.n))
            if frame.prefill_worker is not None:
                phase = "kv_transfer"
        self._attempts[frame.attempt_key] = AttemptSpan(
            gateway=gateway,
            phase=phase,
            span=self._start_span(phase, frame.attempt_key, frame.trace),
            traceparent=frame.trace,
            open_answers=open_answers,
        )

    def _start_span(self, phase: str, key: frames.AttemptKey, traceparent: str) -> Span:
        span = self._tracer.start_span(phase, traceparent)
        span.set_attributes({"diptych.worker": self._worker, "diptych.attempt": key[1]})
        return span

    def _begin_decode(self, key: frames.AttemptKey, attempt: AttemptSpan) -> None:
        """End the span of the phase before, and begin that of decoding."""
        end_span(attempt.span)
        attempt.phase = "decode"
        attempt.span = self._start_span(attempt.phase, key, attempt.traceparent)

    def handle_reply(self, frame: object) -> None:
        """Follows the phases of an attempt by the frames that the worker sends to its gateway."""
        match frame:
            case frames.EngineStepTokens(streams):
                for answer_tokens in streams:
                    attempt = self._attempts.get(answer_tokens.attempt_key)
                    if attempt and answer_tokens.tokens:
                        self._handle_tokens(attempt, answer_tokens)
            case frames.PromptArrived(key, tokens, busy_ms, exposed_ms) if key in self._attempts:
                attempt = self._attempts[key]
                attempt.span.set_attributes(
                    {
                        "diptych.kv_tokens": tokens,
                        "diptych.kv_busy_s": busy_ms / 1e3,
                        "diptych.kv_exposed_s": exposed_ms / 1e3,
                    }
                )
                self._begin_decode(key, attempt)
            case frames.AttemptFailed(key, reason=reason):
                self.end_attempt(key, _attempt_error_type(reason))

    def _handle_tokens(self, attempt: AttemptSpan, answer_tokens: frames.AnswerTokens) -> None:
        """Follow an attempt by new tokens of one of its answers."""
        key = answer_tokens.attempt_key
        if not attempt.open_answers:
            self.end_attempt(key)  # a prefill worker is done with its first token
            return
        if attempt.phase == "prefill":
            self._begin_decode(key, attempt)
        if answer_tokens.finish_reason:
            attempt.open_answers.discard(answer_tokens.answer_index)
            if not attempt.open_answers:
                self.end_attempt(key)

    def end_attempt(self, key: frames.AttemptKey, error_type: str = "") -> None:
        """Ends the span of an attempt, if it is open; with an `error_type` it counts as failed.

        It is no failure that a gateway cancels an attempt: a stop string has ended the answer, or
        the client has left. Some attempts end without a frame that says so: where the prefill
        worker has given all tokens of an answer, the decode worker sends none.
        """
        attempt = self._attempts.pop(key, None)
        if attempt:
            end_span(attempt.span, error_type)

    def end_gateway(self, gateway: str) -> None:
        """Ends the spans of all attempts of a gateway that is gone."""
        for key, attempt in list(self._attempts.items()):
            if attempt.gateway == gateway:
                self.end_attempt(key, "gateway_gone")
