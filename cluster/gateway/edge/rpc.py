"""The gRPC face: `diptych.v1.Inference` and gRPC's health service over a `GatewayService`.

The gateway listens itself (`listen`): on its own address, with TLS. Or Serve's gRPC proxies call
the same methods (`gateway.listen: serve`). These send no trailing metadata with an exception, so
nothing is raised here: an error sets code, details and metadata, and ends a stream with a message
that says it too.

Life of a call: its request is prepared, and a task pushes the answers' tokens through text into a
`ReplyQueue`. The method of the service yields the replies of that queue, as gRPC asks for them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import grpc
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ....protos import frames, inference_pb2_grpc
from ....protos import inference_pb2 as pb
from ...config import GatewaySettings
from ..apis.api import cut_off_error, response_headers
from ..apis.chat import ChatRequest
from ..apis.chat_shape import ChatShape
from ..apis.completions import CompletionRequest
from ..apis.parameters import SEED_MAX
from ..apis.schema import REQUEST_ID_PATTERN, Reading, parse_body
from ..attempt.backlog import FRAME_BYTES
from ..attempt.held_bytes import ReaderCutOff
from ..attempt.request import Request
from ..attempt.terms import Terms, read_terms
from ..errors import ApiError
from ..served_model import ServedModel
from ..service import GatewayService
from ..text.answers import AnswerTexts, Output, TextDelta, TextSink
from ..text.tokenizer import ChatTokenizer
from .grpc_edge import DETAILS, bind, connection_limits, status_of
from .guard import HEADERS_MAX
from .keys import ApiKey
from .sse import BODY_MAX, STALL_S, Stalled

log = logging.getLogger(__name__)

SERVICE = "diptych.v1.Inference"
#: When so many replies wait for gRPC to take them, further tokens wait in their attempt's inbox.
REPLIES_MAX = 32

Reply = TypeVar("Reply", pb.ChatResponse, pb.GenerateResponse)


@dataclass(slots=True)
class PreparedCall(Generic[Reply]):
    """A call whose request may run, and how its replies are made."""

    request: Request
    output: Output  #: How the answers' text is made.
    #: Makes the replies of a delta; the last one of an answer has its finish reason.
    replies_of: Callable[[TextDelta], Iterable[Reply]]
    #: Returns how many tokens of the answers were reasoning so far.
    reasoning_tokens: Callable[[], int]


class ReplyQueue(Generic[Reply]):
    """A `TextWriter` that holds the replies which gRPC has not taken yet.

    Usage goes with the last reply.
    """

    def __init__(self, call: PreparedCall[Reply], texts: AnswerTexts) -> None:
        self._call: PreparedCall[Reply] = call
        self._texts = texts
        self._open_answers = len(call.request.answers)  #: Answers whose last reply is not made.
        self._replies: deque[Reply] = deque()  #: Those that gRPC has not taken.
        self._changed = asyncio.Event()  #: There are replies, or the end.
        self._has_room = asyncio.Event()  #: Fewer than `REPLIES_MAX` wait.
        self._has_room.set()
        self._ended = False  #: No more replies will come.

    @property
    def held_bytes(self) -> int:
        """About how many bytes wait: each reply counts as the newest one, and what Python adds."""
        if not self._replies:
            return 0
        return len(self._replies) * (FRAME_BYTES + self._replies[-1].ByteSize())

    def write_deltas(self, deltas: list[TextDelta]) -> bool:
        for delta in deltas:
            for reply in self._call.replies_of(delta):
                if reply.finish_reason:
                    self._open_answers -= 1
                if not self._open_answers:
                    self._add_usage(reply)
                self._replies.append(reply)
        self._changed.set()
        if len(self._replies) < REPLIES_MAX:
            return True
        self._has_room.clear()
        return False

    def skip_deltas(self, deltas: list[TextDelta]) -> None:
        raise AssertionError("a call of gRPC cannot be resumed half-way")

    async def drain(self) -> None:
        """Waits until there is room.

        Raises Stalled, a `ReaderCutOff`, if there is none in `STALL_S`.
        """
        if self._has_room.is_set():
            return
        try:
            async with asyncio.timeout(STALL_S):
                await self._has_room.wait()
        except TimeoutError:
            raise Stalled from None

    def end(self, _: asyncio.Task[None]) -> None:
        """Marks the end of the replies, as the task that makes them is done."""
        self._ended = True
        self._changed.set()

    async def next(self) -> Reply | None:
        """Returns the next reply; None behind the last one."""
        while not self._replies and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        if not self._replies:
            return None
        reply = self._replies.popleft()
        if len(self._replies) < REPLIES_MAX:
            self._has_room.set()
        return reply

    def _add_usage(self, reply: Reply) -> None:
        """Adds the usage of the whole call, which is complete by then."""
        request = self._call.request
        reply.usage.prompt_tokens = len(request.prompt_ids)
        reply.usage.completion_tokens = self._texts.used_tokens
        reply.usage.cached_tokens = request.hit_tokens
        reply.usage.reasoning_tokens = self._call.reasoning_tokens()


async def _prepare_chat(
    served: ServedModel, message: pb.ChatRequest, request_id: str, terms: Terms
) -> PreparedCall[pb.ChatResponse]:
    """Prepares a chat, whose replies are the chunks of the HTTP API. Raises ApiError."""
    # Strict: a field that a message has and the API does not is a mistake of this file, or of the
    # client's JSON in tools, tool_choice or tool_calls.
    body = parse_body(ChatRequest, _chat_body(message), Reading.STRICT)
    request, prompt = await served.prepare(body, request_id, terms)
    shape = ChatShape(
        body, request, served.text, model=served.answering_name(body.model), prompt=prompt
    )

    def replies_of(delta: TextDelta) -> list[pb.ChatResponse]:
        replies = [_chat_reply(event["choices"][0], request) for event in shape.delta(delta)]
        if replies and body.logprobs:
            replies[0].logprobs.extend(_logprobs(delta.tokens, served.text))
        return replies

    return PreparedCall(request, shape.output, replies_of, lambda: shape.reasoning_tokens)


async def _prepare_generate(
    served: ServedModel, message: pb.GenerateRequest, request_id: str, terms: Terms
) -> PreparedCall[pb.GenerateResponse]:
    """Prepares a plain prompt, which has one reply for each delta. Raises ApiError."""
    body = parse_body(CompletionRequest, _generate_body(message), Reading.STRICT)
    request, _ = await served.prepare(body.prompts()[0], request_id, terms)

    def replies_of(delta: TextDelta) -> list[pb.GenerateResponse]:
        scored_tokens = delta.tokens if body.logprobs is not None else []
        reply = pb.GenerateResponse(
            request_id=request.id,
            index=delta.index,
            text=delta.text,
            token_ids=[token.id for token in delta.tokens],
            finish_reason=delta.finish_reason or "",
            route=request.route,
            logprobs=_logprobs(scored_tokens, served.text),
        )
        return [reply]

    return PreparedCall(request, body.output(), replies_of, lambda: 0)


def _streaming_method(
    reply_type: type[Reply],
    prepare: Callable[[ServedModel, Any, str, Terms], Awaitable[PreparedCall[Reply]]],
) -> Callable[[Inference, Any, Any], AsyncGenerator[Reply, None]]:
    """Returns a method of the service: an async generator, as gRPC takes the replies when it can.

    `prepare` takes the model, the message, the request's id and its terms, and returns the
    prepared call. Whatever goes wrong is said in the last reply, and in the status. Closing the
    generator cancels the task that makes the replies, and so the work on the workers, unless the
    client asked to keep its answer (`x-resume: keep`).
    """

    async def method(
        self: Inference, request: Any, grpc_context: Any
    ) -> AsyncGenerator[Reply, None]:
        service = self.service
        now = time.monotonic()
        request_id = ""
        served: ServedModel | None = None  # the model that is asked for, once it is known
        try:
            key, terms = self._admit(grpc_context, now)
            request_id = _request_id(request, grpc_context) or service.peers.new_request_id()
            if terms.resume.cursors:
                message = "calls of gRPC cannot be resumed half-way"
                raise ApiError("invalid_request", message, "x-resume-from")
            with service.door.admit(key, now):
                served = service.find(request.model)
                call = await prepare(served, request, request_id, terms)
                texts = AnswerTexts(call.request, served.text, call.output)
                queue = ReplyQueue(call, texts)
                # The model's shelf starts the generation, and keeps answers for a while.
                answers = served.shelf.push_answers(call.request, TextSink(texts, queue))
                answering = asyncio.ensure_future(answers)
                answering.add_done_callback(queue.end)
                try:
                    while (reply := await queue.next()) is not None:
                        # The last reply, unless an error follows: the metadata are set before it.
                        if reply.HasField("usage"):
                            headers: dict[str, str] = response_headers(call.request)
                            metadata = [("x-request-id", request_id), *headers.items()]
                            grpc_context.set_trailing_metadata(metadata)
                        yield reply
                    await answering  # raises what went wrong
                finally:
                    answering.cancel()
                    await asyncio.gather(answering, return_exceptions=True)
        except ApiError as error:
            if not error.counted_in_metrics:
                service.count_refused(error.http_status, served)
            failure = _set_status(grpc_context, error, request_id)
            yield reply_type(request_id=request_id, error=failure)
        except ReaderCutOff as cut_off:
            log.warning("request %s: its client was cut off: %s", request_id, cut_off)
            failure = _set_status(grpc_context, cut_off_error(cut_off), request_id)
            yield reply_type(request_id=request_id, error=failure)
        except Exception:
            log.exception("request %s failed", request_id)
            internal = ApiError("internal", "internal error; the gateway's log has it")
            failure = _set_status(grpc_context, internal, request_id)
            yield reply_type(request_id=request_id, error=failure)

    return method


class Inference:
    """The methods of `diptych.v1.Inference`, and `Check` of gRPC's health service, by their names.

    A `grpc_context` is grpc.aio's or Serve's, which has less: no time that remains, for one.
    """

    def __init__(self, service: GatewayService) -> None:
        self.service = service

    Chat = _streaming_method(pb.ChatResponse, _prepare_chat)
    Generate = _streaming_method(pb.GenerateResponse, _prepare_generate)

    async def ListModels(
        self, request: pb.ListModelsRequest, grpc_context: Any
    ) -> pb.ListModelsResponse:
        """Answers with all names of all models; without a valid key with none, and an error."""
        try:
            self._admit(grpc_context, time.monotonic())
        except ApiError as error:
            _set_status(grpc_context, error, "")
            return pb.ListModelsResponse()
        return pb.ListModelsResponse(models=self.service.names)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Any
    ) -> health_pb2.HealthCheckResponse:
        """Answers gRPC's health service. It needs no key, as probes have none."""
        kinds = health_pb2.HealthCheckResponse
        if request.service not in ("", SERVICE):
            error = ApiError("not_found", f"no service {request.service!r}")
            _set_status(grpc_context, error, "")
            return kinds(status=kinds.SERVICE_UNKNOWN)
        return kinds(status=kinds.NOT_SERVING if self.service.missing() else kinds.SERVING)

    def _admit(self, context: Any, now: float) -> tuple[ApiKey | None, Terms]:
        """Returns who calls, and on what terms; gRPC's deadline is one of them. Raises ApiError."""
        get_metadata = _metadata(context)
        authorization = get_metadata("authorization")
        key = self.service.door.authenticate(authorization, get_metadata("x-api-key"), now)
        terms = read_terms(get_metadata, key, self.service.classes, now)
        remaining_s = context.time_remaining() if hasattr(context, "time_remaining") else None
        if remaining_s is not None:
            terms = replace(terms, deadline=min(terms.deadline, now + remaining_s))
        return key, terms


class _Health(health_pb2_grpc.HealthServicer):
    """gRPC's health service; `Watch` is not there."""

    def __init__(self, inference: Inference) -> None:
        self.Check = inference.Check


async def listen(inference: Inference, settings: GatewaySettings) -> grpc.aio.Server:
    """Returns a server on the gateway's own socket; gateways of one machine share the port."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", BODY_MAX),
            ("grpc.max_metadata_size", HEADERS_MAX),
            *connection_limits(),
            ("grpc.so_reuseport", 1),
        ]
    )
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)
    health_pb2_grpc.add_HealthServicer_to_server(_Health(inference), server)
    names = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
    reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
    bind(server, settings)
    await server.start()
    return server


# ---- in and out ----------------------------------------------------------------------------------


def _metadata(context: Any) -> Callable[[str], str | None]:
    """Returns what looks metadata up by name; no header of ours has a binary value."""
    pairs = context.invocation_metadata() or ()
    return {name: value for name, value in pairs if isinstance(value, str)}.get


def _request_id(message: pb.ChatRequest | pb.GenerateRequest, context: Any) -> str:
    """Returns the client's id of the request; empty if there is none. Raises ApiError."""
    request_id = message.request_id or _metadata(context)("x-request-id") or ""
    if request_id and not REQUEST_ID_PATTERN.fullmatch(request_id):
        error = "request_id must be 1 to 128 of letters, digits and . _ : -"
        raise ApiError("invalid_request", error, "request_id")
    return request_id


def _set_status(context: Any, error: ApiError, request_id: str) -> pb.Error:
    """Makes an error the status of the call; returns the same for a last message."""
    metadata: list[tuple[str, str | bytes]] = [(DETAILS, status_of(error))]
    if request_id:
        metadata.insert(0, ("x-request-id", request_id))
    context.set_code(error.kind.grpc_status)
    context.set_details(error.message)
    context.set_trailing_metadata(metadata)
    return pb.Error(
        reason=error.reason,
        message=error.message,
        param=error.param or "",
        retry_after_s=error.retry_after_s or 0.0,
    )


def _chat_reply(choice: dict[str, Any], request: Request) -> pb.ChatResponse:
    """Returns a choice of a chunk of the HTTP API as a reply. Protobuf has no null: empty texts."""
    delta = choice["delta"]
    tool_calls = [
        pb.ToolCall(index=tool_call["index"], id=tool_call.get("id", ""), **tool_call["function"])
        for tool_call in delta.get("tool_calls", ())
    ]
    return pb.ChatResponse(
        request_id=request.id,
        index=choice["index"],
        delta=delta.get("content") or "",
        reasoning=delta.get("reasoning_content") or "",
        tool_calls=tool_calls,
        finish_reason=choice["finish_reason"] or "",
        route=request.route,
    )


def _logprobs(tokens: list[frames.Token], text: ChatTokenizer) -> list[pb.TokenLogprob]:
    """Returns the logprobs of the tokens, each with those of the likeliest ones."""
    return [
        pb.TokenLogprob(
            id=token.id,
            text=text.token_text(token.id),
            logprob=token.logprob or 0.0,
            top=[
                pb.Alternative(id=token_id, text=text.token_text(token_id), logprob=logprob)
                for token_id, logprob in token.top
            ],
        )
        for token in tokens
    ]


def _chat_body(message: pb.ChatRequest) -> bytes:
    """Returns a message as the body of `/v1/chat/completions`, whose reader then checks it.

    Raises ApiError.
    """
    body = _sampling_fields(message)
    # A number in gRPC; in HTTP a flag, and the number in a field of its own.
    if "logprobs" in body:
        body["top_logprobs"] = body["logprobs"]
        body["logprobs"] = True
    body["messages"] = [_message_fields(turn) for turn in message.messages]
    for name in ("tools", "chat_template_kwargs"):
        if getattr(message, name):
            body[name] = _parsed(getattr(message, name), name)
    if message.tool_choice.startswith("{"):
        body["tool_choice"] = _parsed(message.tool_choice, "tool_choice")
    elif message.tool_choice:
        body["tool_choice"] = message.tool_choice
    return _encoded(body)


def _generate_body(message: pb.GenerateRequest) -> bytes:
    """Returns a message as the body of `/v1/completions`. Raises ApiError."""
    body = _sampling_fields(message)
    has_ids = message.WhichOneof("prompt") == "ids"
    body["prompt"] = list(message.ids.ids) if has_ids else message.text
    body["add_special_tokens"] = not message.without_special_tokens
    return _encoded(body)


def _message_fields(turn: pb.Message) -> dict[str, Any]:
    """Returns a message of a conversation as a chat's body has it. Raises ApiError."""
    fields = {field.name: value for field, value in turn.ListFields()}
    if turn.tool_calls:
        fields["tool_calls"] = _parsed(turn.tool_calls, "messages.tool_calls")
    elif turn.role != "assistant":
        fields.setdefault("content", "")  # protobuf leaves an empty text out
    return fields


def _sampling_fields(message: pb.ChatRequest | pb.GenerateRequest) -> dict[str, Any]:
    """Returns the model, and what both kinds of messages say of sampling, under HTTP's names.

    Raises ApiError.
    """
    body: dict[str, Any] = {"model": message.model}
    for name in ("max_tokens", "temperature", "seed"):
        if message.HasField(name):
            body[name] = getattr(message, name)
    if body.get("seed", 0) > SEED_MAX:
        body["seed"] -= 1 << 64  # HTTP has the same 64 bits with a sign
    if isinstance(message, pb.ChatRequest) and "temperature" in body:
        # Of a chat, 0.7 travels in single precision, and would come out as 0.699999988.
        body["temperature"] = float(f"{body['temperature']:.7g}")
    for field, value in message.sampling.ListFields():
        match field.name:
            case "grammar":
                body["guided_grammar"] = value
            case "json_object":
                body["response_format"] = {"type": "json_object"}
            case "logit_bias":
                body["logit_bias"] = dict(value)
            case name:
                is_scalar = isinstance(value, bool | str | int | float)
                body[name] = value if is_scalar else [*value]
    # JSON has no NaN and no infinity.
    for name, value in body.items():
        numbers = value.values() if name == "logit_bias" else [value]
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            raise ApiError("invalid_request", f"{name} is not a number", name)
    return body


def _encoded(body: dict[str, Any]) -> bytes:
    """Returns the JSON of a body. Raises ApiError."""
    try:
        return msgspec.json.encode(body)
    except (UnicodeEncodeError, RecursionError):
        message = "a JSON text has half of a surrogate pair, or is nested too deeply"
        raise ApiError("invalid_request", message) from None


def _parsed(text: str, name: str) -> Any:
    """Returns the value of a field that holds JSON. Raises ApiError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ApiError("invalid_request", f"{name} is not valid JSON", name) from None
