"""The gRPC face: `diptych.v1.Inference` and gRPC's health service over a `Gateway`.

The gateway listens itself (`listen`): on its own address, with TLS. Or Serve's gRPC proxies call
the same methods (`gateway.listen: serve`). These send no trailing metadata with an exception, so
nothing is raised here: an error sets code, details and metadata; the last message says it too.
"""

from __future__ import annotations

import json
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ....protos import frames as f
from ....protos import inference_pb2 as pb
from ....protos import inference_pb2_grpc
from ...config import GatewaySettings
from ..apis.api import response_headers
from ..apis.chat import ChatRequest, ChatShape
from ..apis.completions import CompletionRequest
from ..apis.schema import REQUEST_ID_PATTERN, parse_body
from ..attempt.request import Request
from ..attempt.terms import Terms, read_terms
from ..errors import ApiError
from ..text.answers import AnswerTexts, Output, TextDelta
from ..text.tokenizer import ChatTokenizer
from .grpc_edge import DETAILS, bind, status_of
from .guard import HEADERS_MAX
from .keys import ApiKey
from .sse import BODY_MAX

if TYPE_CHECKING:
    from ..gateway import Gateway

log = logging.getLogger(__name__)

SERVICE = "diptych.v1.Inference"
HANDSHAKE_MS = 10_000

Reply = TypeVar("Reply", pb.ChatResponse, pb.GenerateResponse)


class Inference:
    """The methods of both services. A `grpc_context` is grpc.aio's or Serve's."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    async def Chat(
        self, request: pb.ChatRequest, grpc_context: Any
    ) -> AsyncGenerator[pb.ChatResponse, None]:
        calls = self._call(request, grpc_context, pb.ChatResponse, self._chat)
        async with aclosing(calls) as replies:
            async for reply in replies:
                yield reply

    async def Generate(
        self, request: pb.GenerateRequest, grpc_context: Any
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        calls = self._call(request, grpc_context, pb.GenerateResponse, self._generate)
        async with aclosing(calls) as replies:
            async for reply in replies:
                yield reply

    async def ListModels(
        self, request: pb.ListModelsRequest, grpc_context: Any
    ) -> pb.ListModelsResponse:
        try:
            self._admit(grpc_context, time.monotonic())
        except ApiError as error:
            _tell(grpc_context, error, "")
        return pb.ListModelsResponse(models=[self.gateway.model])

    async def Check(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Any
    ) -> health_pb2.HealthCheckResponse:
        """Needs no key: probes have none."""
        kinds = health_pb2.HealthCheckResponse
        if request.service not in ("", SERVICE):
            _tell(grpc_context, ApiError("not_found", f"no service {request.service!r}"), "")
            return kinds(status=kinds.SERVICE_UNKNOWN)
        return kinds(status=kinds.NOT_SERVING if self.gateway.missing() else kinds.SERVING)

    # ---- calls -----------------------------------------------------------------------------------

    async def _call(
        self,
        asked: Any,
        context: Any,
        kind: type[Reply],
        work: Callable[[Any, str, Terms, dict], AsyncGenerator[Reply, None]],
    ) -> AsyncGenerator[Reply, None]:
        """`work`'s replies; whatever goes wrong is told."""
        now, get = time.monotonic(), _metadata(context)
        request_id = ""
        sent: dict[str, str] = {}
        try:
            key, terms = self._admit(context, now)
            name = asked.request_id or get("x-request-id") or f"grpc-{uuid.uuid4().hex}"
            if not REQUEST_ID_PATTERN.fullmatch(name):
                message = "request_id must be 1 to 128 of letters, digits and . _ : -"
                raise ApiError("invalid_request", message, "request_id")
            request_id = name
            with self.gateway.door.admit(key, now):
                async with aclosing(work(asked, name, terms, sent)) as replies:
                    async for reply in replies:
                        if reply.HasField("usage"):  # the last one: metadata goes with it
                            context.set_trailing_metadata([("x-request-id", name), *sent.items()])
                        yield reply
        except ApiError as error:
            if not error.counted_in_metrics:
                self.gateway.tally.count_refused(error.http_status)
            yield kind(request_id=request_id, error=_tell(context, error, request_id))
        except Exception:
            log.exception("request %s failed", request_id)
            internal = ApiError("internal", "internal error; the gateway's log has it")
            yield kind(request_id=request_id, error=_tell(context, internal, request_id))

    def _admit(self, context: Any, now: float) -> tuple[ApiKey | None, Terms]:
        get = _metadata(context)
        key = self.gateway.door.authenticate(get("authorization"), get("x-api-key"), now)
        terms = read_terms(get, key, self.gateway.classes, now)
        left = context.time_remaining() if hasattr(context, "time_remaining") else None
        if left is not None:
            terms = replace(terms, deadline=min(terms.deadline, now + left))
        return key, terms

    async def _chat(
        self, asked: pb.ChatRequest, request_id: str, terms: Terms, sent: dict
    ) -> AsyncGenerator[pb.ChatResponse, None]:
        gateway = self.gateway
        body = parse_body(ChatRequest, _chat_body(asked))
        request, prompt = await gateway.prepare(body, request_id, terms)
        shape = ChatShape(body, request, gateway.text, gateway.model, prompt)

        def replies(delta: TextDelta) -> Iterator[pb.ChatResponse]:
            scores = _logprobs(delta.tokens, gateway.text) if body.logprobs else []
            for event in shape.delta(delta):
                reply = _chat_reply(event["choices"][0], request)
                reply.logprobs.extend(scores)
                scores = []
                yield reply

        async for reply in self._replies(request, shape.output, replies, sent):
            yield reply

    async def _generate(
        self, asked: pb.GenerateRequest, request_id: str, terms: Terms, sent: dict
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        gateway = self.gateway
        body = parse_body(CompletionRequest, _generate_body(asked))
        request, _ = await gateway.prepare(body.prompts()[0], request_id, terms)

        def replies(delta: TextDelta) -> Iterator[pb.GenerateResponse]:
            scored = delta.tokens if body.logprobs is not None else []
            yield pb.GenerateResponse(
                request_id=request.id,
                index=delta.index,
                text=delta.text,
                token_ids=[token.id for token in delta.tokens],
                finish_reason=delta.finish_reason or "",
                route=request.route,
                logprobs=_logprobs(scored, gateway.text),
            )

        async for reply in self._replies(request, body.output(), replies, sent):
            yield reply

    async def _replies(
        self,
        request: Request,
        output: Output,
        replies: Callable[[TextDelta], Iterator[Reply]],
        sent: dict,
    ) -> AsyncGenerator[Reply, None]:
        """Usage goes with the message that ends the last answer."""
        answers = AnswerTexts(request, self.gateway.text, output)
        going = len(request.answers)
        async with aclosing(self.gateway.generate(request)) as news:
            async for batch in news:
                for delta in answers.feed(batch):
                    for reply in replies(delta):
                        going -= bool(reply.finish_reason)
                        if going:
                            yield reply
                            continue
                        reply.usage.prompt_tokens = len(request.prompt_ids)
                        reply.usage.completion_tokens = answers.used
                        reply.usage.cached_tokens = request.hit_tokens
                        sent.update(response_headers(request))
                        yield reply


class _Health(health_pb2_grpc.HealthServicer):
    """gRPC's health service; `Watch` is not there."""

    def __init__(self, inference: Inference) -> None:
        self.Check = inference.Check


async def listen(inference: Inference, settings: GatewaySettings) -> grpc.aio.Server:
    """A server on the gateway's own socket; gateways of one machine share the port."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", BODY_MAX),
            ("grpc.max_metadata_size", HEADERS_MAX),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
            ("grpc.so_reuseport", 1),
        ]
    )
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)
    health_pb2_grpc.add_HealthServicer_to_server(_Health(inference), server)
    names = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
    reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
    bind(server, settings.host, settings.grpc_port, settings.tls_cert, settings.tls_key)
    await server.start()
    return server


# ---- in and out ----------------------------------------------------------------------------------


def _metadata(context: Any) -> Callable[[str], str | None]:
    """Looks metadata up; binary values are none of ours."""
    pairs = context.invocation_metadata() or ()
    found = {name: value for name, value in pairs if isinstance(value, str)}
    return found.get


def _tell(context: Any, error: ApiError, request_id: str) -> pb.Error:
    """Sets the status; returns the same for a last message."""
    binary = DETAILS, status_of(error)
    context.set_code(error.kind.grpc_status)
    context.set_details(error.message)
    context.set_trailing_metadata(
        [("x-request-id", request_id), binary] if request_id else [binary]
    )
    return pb.Error(
        reason=error.reason,
        message=error.message,
        param=error.param or "",
        retry_after_s=error.retry_after_s or 0.0,
    )


def _chat_reply(choice: dict, request: Request) -> pb.ChatResponse:
    delta = choice["delta"]
    return pb.ChatResponse(
        request_id=request.id,
        index=choice["index"],
        delta=delta.get("content") or "",
        reasoning=delta.get("reasoning_content") or "",
        tool_calls=[
            pb.ToolCall(index=call["index"], id=call["id"], **call["function"])
            for call in delta.get("tool_calls", ())
        ],
        finish_reason=choice["finish_reason"] or "",
        route=request.route,
    )


def _logprobs(tokens: list[f.Token], text: ChatTokenizer) -> list[pb.TokenLogprob]:
    return [
        pb.TokenLogprob(
            id=token.id,
            text=text.token_text(token.id),
            logprob=token.logprob or 0.0,
            top=[pb.Alternative(id=i, text=text.token_text(i), logprob=at) for i, at in token.top],
        )
        for token in tokens
    ]


def _chat_body(asked: pb.ChatRequest) -> bytes:
    """A request as the body that the one reader of all APIs knows."""
    body = _sampling(asked)
    if "logprobs" in body:
        body["top_logprobs"] = body["logprobs"]
        body["logprobs"] = True
    body["messages"] = [_message(message) for message in asked.messages]
    for name in ("tools", "chat_template_kwargs"):
        if getattr(asked, name):
            body[name] = _parsed(getattr(asked, name), name)
    if asked.tool_choice:
        named = asked.tool_choice.startswith("{")
        body["tool_choice"] = (
            _parsed(asked.tool_choice, "tool_choice") if named else asked.tool_choice
        )
    return msgspec.json.encode(body)


def _generate_body(asked: pb.GenerateRequest) -> bytes:
    body = _sampling(asked)
    given = asked.WhichOneof("prompt")
    body["prompt"] = list(asked.ids.ids) if given == "ids" else asked.text
    body["add_special_tokens"] = not asked.without_special_tokens
    return msgspec.json.encode(body)


def _message(message: pb.Message) -> dict[str, Any]:
    fields = {field.name: value for field, value in message.ListFields()}
    if message.tool_calls:
        fields["tool_calls"] = _parsed(message.tool_calls, "messages.tool_calls")
    elif message.role != "assistant":
        fields.setdefault("content", "")
    return fields


def _sampling(asked: pb.ChatRequest | pb.GenerateRequest) -> dict[str, Any]:
    """What both requests say of sampling. Raises ApiError."""
    body: dict[str, Any] = {"model": asked.model}
    for name in ("max_tokens", "temperature", "seed"):
        if asked.HasField(name):
            body[name] = getattr(asked, name)
    if isinstance(asked, pb.ChatRequest) and "temperature" in body:
        body["temperature"] = float(f"{body['temperature']:.7g}")  # 0.7, not single precision's
    for field, value in asked.sampling.ListFields():
        if field.name == "grammar":
            body["guided_grammar"] = value
        elif field.name == "json_object":
            body["response_format"] = {"type": "json_object"}
        elif field.name == "logit_bias":
            body["logit_bias"] = dict(value)
        else:
            body[field.name] = value if isinstance(value, bool | str | int | float) else [*value]
    for name, value in body.items():
        values = value.values() if name == "logit_bias" else [value]
        if any(isinstance(one, float) and not math.isfinite(one) for one in values):
            raise ApiError("invalid_request", f"{name} is not a number", name)
    return body


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ApiError("invalid_request", f"{name} is not valid JSON", name) from None
