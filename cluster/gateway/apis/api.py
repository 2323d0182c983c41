"""The APIs over HTTP: a body becomes requests, and their tokens the events or the object to send.

The way of a token, in callbacks of one reading of a worker's connection:
    journal (`Generator`) -> text (`TextSink`) -> events (`EventEncoder`) -> socket (`ResponseBody`)
An answer that is not streamed takes the same way, and is collected before its object is made.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
import xxhash
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..attempt.generator import run_together
from ..attempt.held_bytes import ReaderCutOff
from ..attempt.request import Request, SinkError
from ..attempt.resume import NOT_RESUMED, Resume, event_id_of
from ..attempt.terms import Terms
from ..edge import sse
from ..errors import ApiError
from ..served_model import ServedModel
from ..service import GatewayService
from ..text.answers import (
    AnswerTexts,
    DeltaCollector,
    Output,
    TextDelta,
    TextSink,
    TextWriter,
)
from .chat import ChatRequest
from .chat_shape import ChatShape
from .completions import CompletionRequest, CompletionShape, DetokenizeRequest, TokenizeRequest
from .messages import CountTokensRequest, MessageShape, MessagesRequest, anthropic_error_body
from .response_items import InputItem, ItemReference, read_items
from .response_shape import ResponseShape
from .response_store import Turn, check_referenced_bytes, deleted_response
from .responses import ResponsesRequest, error_of_responses
from .schema import REQUEST_ID_PATTERN, ApiBody, BodyType, parse_body

log = logging.getLogger(__name__)

Event = dict[str, Any]  #: A JSON object that becomes one server-sent event.

#: Stands for the text of an event that is encoded once, and split there. No name or id of an event
#: has its control characters, so it is found once.
TEXT_MARK = "\x1dtext\x1d"
#: An id has 128 characters at most. The end of a longer one than this is hashed, so that the number
#: of a prompt fits behind.
NUMBERED_ID_CHARS_MAX = 120
#: The routes that ask workers for an answer.
GENERATING_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/invocations",
    }
)
#: In a body: the client continues an answer behind these ids.
RESUME_FIELD = b'"resume_token_ids"'
MEDIA_TYPE_CHARS_MAX = 60  #: Of a client's content type, as an error shows it.
OPENAI_CLOSING = b"data: [DONE]\n\n"  #: The last bytes of a stream of chats and completions.


class Shape(Protocol):
    """What one API says of the answers to one call.

    Events are dicts; where an API names its events, the name is in `type`. A stream is `begin`,
    then `plain` or `delta` for each delta, then `end`. Answers that are not streamed are one
    `whole`. `used_tokens` are the generated tokens of all answers, as usage counts them.
    """

    @property
    def output(self) -> Output:
        """How the answers' text is made."""

    def begin(self) -> list[Event]:
        """The events before the first text."""

    def plain(self, index: int, text: str, /) -> Event | None:
        """The event of a delta of answer `index` that is nothing but `text`, and not its last.

        None: `delta` makes the events of such deltas too. It must be the same for every text, as
        the event is made once for each answer, and only the text in it replaced.
        """

    def delta(self, delta: TextDelta, /) -> list[Event]:
        """The events of a delta."""

    def end(self, used_tokens: int, /) -> list[Event]:
        """The events behind the last delta."""

    def whole(self, deltas: list[TextDelta], used_tokens: int, /) -> dict[str, Any]:
        """The object of whole answers, one delta for each."""


@dataclass(slots=True)
class ApiCall:
    """A body that was understood: its answers are those of all `requests`, in this order."""

    requests: list[Request]
    shape: Shape
    stream: bool  #: The answers are sent as events, not as one object.
    resume: Resume = NOT_RESUMED
    closing: bytes = OPENAI_CLOSING  #: The last bytes of a stream.
    named_events: bool = False  #: The `type` of each event is sent as its name, too.
    #: Makes the API's error object of an error and the call's id.
    error_body: Callable[[ApiError, str], dict[str, Any]] = ApiError.body
    #: Makes what comes in front of the `error` event of a stream that breaks off.
    failure_events: Callable[[ApiError], list[Event]] = lambda _: []

    #: The header that names what the client sent without effect; empty if there is nothing.
    ignored_fields_headers: dict[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The id of the first request, by which logs and errors name the call."""
        return self.requests[0].id

    def headers(self) -> dict[str, str]:
        """Return the headers of the response, as they are known once there are tokens."""
        return response_headers(self.requests[0]) | self.ignored_fields_headers


class Api:
    """Handlers of the routes that take a body, of one gateway. Each may raise ApiError.

    Before a handler is called, `http.state.terms` holds the terms of the request: its key, class,
    targets and deadline.
    """

    def __init__(self, service: GatewayService) -> None:
        self.service = service

    async def refuse_unparsed(self, http: HttpRequest) -> None:
        """Refuse a call for an answer that would be refused whatever it says. Raises ApiError.

        The guard asks this before a route is looked for: most of the cost of a refusal would be
        routing, parsing and tokenizing. A client that continues an answer behind the ids that it
        has says so in the body alone, so that is received, and searched for the field's name.
        """
        model = self.service.model_with_closed_router()
        if model is None:
            return
        if http.method != "POST" or http.scope["path"] not in GENERATING_PATHS:
            return
        body = http.state.body = await self._bytes_of(http)
        if RESUME_FIELD not in body:
            request_id = http.headers.get("x-request-id", "")
            # A call of several prompts is kept under ids of its own, if it is kept.
            request_ids = [request_id, prompt_request_ids(request_id, 2)[0]]
            model.check_router_is_open(request_ids, http.state.terms)

    async def chat(self, http: HttpRequest) -> Response:
        """Answer `/v1/chat/completions`."""
        request_id = identify(http, "chatcmpl-")
        body = await self._read(http, ChatRequest)
        model = self._find(http, body.model)
        terms = http.state.terms
        request, prompt = await model.prepare(body, request_id, terms)
        shape = ChatShape(
            body, request, model.text, model=model.answering_name(body.model), prompt=prompt
        )
        call = ApiCall(
            [request],
            shape,
            body.stream,
            terms.resume,
            ignored_fields_headers=_note_ignored(model, body),
        )
        return await self._answer(http, model, call)

    async def completions(self, http: HttpRequest) -> Response:
        """Answer `/v1/completions`, whose body may have several prompts."""
        request_id = identify(http, "cmpl-")
        body = await self._read(http, CompletionRequest)
        model = self._find(http, body.model)
        terms = http.state.terms
        prompts = body.prompts()
        if len(prompts) > 1 and terms.resume.cursors:
            # Before any answer is kept, which would begin with ids that this call is refused for.
            raise _not_resumable()
        prompt_ids = prompt_request_ids(request_id, len(prompts))
        if not model.shelf.keeps(terms.tenant, prompt_ids[0]):  # else most of it may run already
            self.service.capacity.check_room(len(prompts))
        call_answers = len(prompts) * (body.n or 1)
        self.service.door.check_answers(terms.api_key, call_answers)
        self.service.door.charge_prompts(terms.api_key, len(prompts) - 1, call_answers=call_answers)
        terms = replace(terms, call_answers=call_answers)
        requests = [
            (await model.prepare(prompt, prompt_id, terms))[0]
            for prompt, prompt_id in zip(prompts, prompt_ids, strict=True)
        ]
        shape = CompletionShape(
            body,
            requests,
            tokenizer=model.text,
            model=model.answering_name(body.model),
            call_id=request_id,
        )
        call = ApiCall(
            requests,
            shape,
            body.stream,
            terms.resume,
            ignored_fields_headers=_note_ignored(model, body),
        )
        return await self._answer(http, model, call)

    async def invocations(self, http: HttpRequest) -> Response:
        """Answer SageMaker's route.

        A body with `prompt` and without `messages` is a completion's, any other one a chat's.
        """
        http.state.body = await self._bytes_of(http)
        try:
            fields = msgspec.json.decode(http.state.body, type=dict[str, msgspec.Raw])
        except (msgspec.MsgspecError, RecursionError):
            return await self.chat(http)  # which says what is wrong
        is_completion = "prompt" in fields and "messages" not in fields
        return await (self.completions(http) if is_completion else self.chat(http))

    async def responses(self, http: HttpRequest) -> Response:
        """Answer `/v1/responses`; the input goes on behind a stored response, if it names one."""
        request_id = identify(http, "resp_")
        body = await self._read(http, ResponsesRequest)
        model = self._find(http, body.model)
        terms = http.state.terms
        store = self.service.responses
        previous_turns: tuple[Turn, ...] = ()
        if body.previous_response_id is not None:
            previous_turns = await self.service.finder.turns(
                terms.tenant, body.previous_response_id
            )
        input_items = await self._resolved_items(body.input_items, terms.tenant)
        earlier_items = [item for turn in previous_turns for item in read_items(turn.items)]
        items = [*earlier_items, *input_items]
        try:
            chat = await self.service.capacity.tokenize(
                lambda: body.as_chat(model.text, model.limits, items)
            )
            request, prompt = await model.prepare(chat, request_id, terms)
        except ApiError as error:
            raise error_of_responses(error) from None

        def keep(response: dict[str, Any]) -> None:
            items = [item.model_dump(exclude_none=True) for item in input_items]
            store.put(terms.tenant, response, items, previous_turns)

        shape = ResponseShape(
            body,
            chat,
            request,
            model.text,
            model=model.answering_name(body.model),
            prompt=prompt,
            store=keep if store.is_enabled and body.store is not False else None,
        )
        call = ApiCall(
            [request],
            shape,
            body.stream,
            terms.resume,
            closing=b"",
            named_events=True,
            failure_events=shape.failed,
            ignored_fields_headers=_note_ignored(model, body),
        )
        return await self._answer(http, model, call)

    async def _resolved_items(self, items: list[InputItem], tenant: str) -> list[InputItem]:
        """Return the items, each reference replaced by the item of a stored response that it names.

        Raises ApiError if there is none, or if the items are too long together.
        """
        # Each once, in their order: an error names the first that is missing.
        item_ids = dict.fromkeys(item.id for item in items if isinstance(item, ItemReference))
        named_items = await self.service.finder.items(tenant, item_ids)
        texts = {item_id: sse.encode([named_items[item_id]]) for item_id in item_ids}
        check_referenced_bytes(
            sum(len(texts[item.id]) for item in items if isinstance(item, ItemReference))
        )
        items_by_id = {item_id: read_items(text) for item_id, text in texts.items()}
        resolved: list[InputItem] = []
        for item in items:
            if isinstance(item, ItemReference):
                resolved += items_by_id[item.id]
            else:
                resolved.append(item)
        return resolved

    async def stored_response(self, http: HttpRequest) -> Response:
        """Return a response that the tenant has stored, or delete it."""
        response_id = http.path_params["response_id"]
        tenant = http.state.terms.tenant
        if http.method == "DELETE":
            await self.service.finder.delete(tenant, response_id)
            return _json(deleted_response(response_id))
        if http.query_params.get("stream", "").lower() == "true":
            message = "stream: a stored response is whole; leave it out"
            raise ApiError("invalid_request", message, "stream")
        stored = await self.service.finder.get(tenant, response_id)
        return Response(stored.response, 200, media_type="application/json")

    async def cancel_response(self, http: HttpRequest) -> Response:
        """Raise ApiError: no response runs in the background, so there is none to cancel."""
        await self.service.finder.get(http.state.terms.tenant, http.path_params["response_id"])
        # The first sentence is vLLM's, which clients may look for.
        message = (
            "Cannot cancel a synchronous response. It has ended; one that is being generated ends "
            "when its client leaves"
        )
        raise ApiError("invalid_request", message)

    async def messages(self, http: HttpRequest) -> Response:
        """Answer Anthropic's `/v1/messages`."""
        request_id = identify(http, "msg_")
        body = await self._read(http, MessagesRequest)
        model = self._find(http, body.model)
        terms = http.state.terms
        chat = body.as_chat(model.text)
        request, prompt = await model.prepare(chat, request_id, terms)
        shape = MessageShape(
            chat,
            request,
            model.text,
            model=model.answering_name(body.model),
            prompt=prompt,
            block_tokens=model.limits.block_tokens,
        )
        call = ApiCall(
            [request],
            shape,
            body.stream,
            terms.resume,
            closing=b"",
            named_events=True,
            error_body=anthropic_error_body,
            ignored_fields_headers=_note_ignored(model, body),
        )
        return await self._answer(http, model, call)

    async def count_tokens(self, http: HttpRequest) -> Response:
        """Answer Anthropic's `/v1/messages/count_tokens`."""
        identify(http, "msg_")  # for the body of an error
        body = await self._read(http, CountTokensRequest)
        model = self._find(http, body.model)
        text = model.text
        chat = body.as_chat(text)
        chat.check(text, model.limits)
        prompt = await self.service.capacity.tokenize(lambda: chat.prompt(text))
        return _json({"input_tokens": len(prompt.token_ids)}, _note_ignored(model, body))

    async def tokenize(self, http: HttpRequest) -> Response:
        """Answer vLLM's `/tokenize`: the ids of a text or of a chat."""
        body = await self._read(http, TokenizeRequest)
        model = self._find(http, body.model)
        text = model.text
        body.check(text, model.limits)
        # The names of a million tokens take half a second, too long for the event loop.
        answer = await self.service.capacity.tokenize(
            lambda: body.response_body(body.token_ids(text), text, model.limits)
        )
        return _json(answer, _note_ignored(model, body))

    async def detokenize(self, http: HttpRequest) -> Response:
        """Answer vLLM's `/detokenize`: the text of ids."""
        http.state.body = await sse.read_body(http)
        if self.service.models:  # without one, the body is read, and `_find` refuses the call
            DetokenizeRequest.check_size(http.state.body, self.service.longest_context)
        body = await self._read(http, DetokenizeRequest)
        model = self._find(http, body.model)
        DetokenizeRequest.check_size(http.state.body, model.limits.max_model_len)
        texts = await self.service.capacity.tokenize(lambda: body.response_body(model.text))
        return _json(texts, _note_ignored(model, body))

    async def _bytes_of(self, http: HttpRequest) -> bytes:
        """Return the body of a request, which is received once. Raises ApiError."""
        body: bytes | None = getattr(http.state, "body", None)
        return await sse.read_body(http) if body is None else body

    async def _read(self, http: HttpRequest, model: type[BodyType]) -> BodyType:
        """Read the body of a request. Raises ApiError."""
        check_content_type(http.headers.get("content-type", ""))
        parsed = parse_body(model, await self._bytes_of(http), self.service.reading)
        if isinstance(parsed, ChatRequest | CompletionRequest) and parsed.resume_token_ids:
            if not parsed.stream:
                message = "resume_token_ids: only a stream goes on behind ids; set stream: true"
                raise ApiError("invalid_request", message, "resume_token_ids")
            terms: Terms = http.state.terms
            resume = terms.resume.behind(parsed.resume_token_ids)
            http.state.terms = replace(terms, resume=resume)
        if not getattr(parsed, "stream", True) and http.state.terms.resume.cursors:
            # Before the answer is looked for: its live reader would lose it.
            raise _not_resumable()
        return parsed

    def _find(self, http: HttpRequest, name: str) -> ServedModel:
        """Return the model that a body names, by which an error is counted. Raises ApiError."""
        model = self.service.find(name)
        http.state.model = model
        return model

    async def _answer(self, http: HttpRequest, model: ServedModel, call: ApiCall) -> Response:
        """Return the response: a stream, which runs as it is sent, or one object of all answers.

        A client that leaves before the object is there ends the work.
        """
        answers = CallAnswers(model, call)
        if call.stream:
            return CallStream(call, answers)

        collector = DeltaCollector()
        try:
            await sse.while_connected(http.receive, answers.push_into(collector))
        except ReaderCutOff as cut_off:
            raise cut_off_error(cut_off) from None
        answer = call.shape.whole(collector.joined(), answers.used_tokens)
        return _json(answer, call.headers())


class CallAnswers:
    """The answers to all requests of a call, as text.

    An answer's index counts over all requests: those of the first come first.
    """

    def __init__(self, model: ServedModel, call: ApiCall) -> None:
        self._shelf = model.shelf
        self._call = call
        self._texts = [
            AnswerTexts(request, model.text, call.shape.output) for request in call.requests
        ]

    async def push_into(self, writer: TextWriter) -> None:
        """Writes all answers into `writer` as they come. Cancelling ends all requests.

        Raises ApiError and SinkError; the first error of a request ends the others.
        """
        works = []
        first_index = 0
        for request, texts in zip(self._call.requests, self._texts, strict=True):
            sink = TextSink(texts, writer, first_index)
            works.append(self._shelf.push_answers(request, sink, self._call.resume.cursors))
            first_index += len(request.answers)
        await run_together(works)

    @property
    def used_tokens(self) -> int:
        """Generated tokens of all answers so far, as usage counts them."""
        return sum(texts.used_tokens for texts in self._texts)

    @property
    def event_id(self) -> str:
        """The id of an event behind all that was written, by which a client comes back for more."""
        return event_id_of(cursor for texts in self._texts for cursor in texts.cursors)


class CallStream(sse.EventStream):
    """The events of a streamed call. The head waits for the first tokens.

    So an error before them has a status of its own; an error after them becomes an `error` event.
    """

    def __init__(self, call: ApiCall, answers: CallAnswers) -> None:
        super().__init__(self._write_answers, {})
        self._call = call
        self._answers = answers
        self._encoder = EventEncoder(call, answers)

    def late_headers(self) -> dict[str, str]:
        """Return the headers, which say where the answers run: known with the first tokens."""
        return self._call.headers()

    def on_opened(self) -> None:
        """Let the first tokens count as having come now, as they waited for the head.

        Not so if the client comes back, or if an answer does not wait for its reader: then their
        tokens came at their own times.
        """
        if self._call.resume.cursors:
            return
        for request in self._call.requests:
            if not request.shared:
                request.mark_written()

    async def _write_answers(self, body: sse.ResponseBody) -> None:
        """Write all events of the stream, and an error as the last one if it breaks off."""
        encoder = self._encoder
        try:
            await self._answers.push_into(EventWriter(encoder, body))
            await body.end(encoder.end(self._answers.used_tokens))
        except ApiError as error:
            if not body.begun.done():
                raise  # the head is not sent, so the error has a status of its own
            await body.write(encoder.error(error))
        except ReaderCutOff as cut_off:
            if not body.begun.done():
                raise cut_off_error(cut_off) from None
            raise  # the client does not read, an error neither
        except Exception as error:
            if not body.begun.done():
                raise
            cause = error.__cause__ if isinstance(error, SinkError) else error
            log.error("request %s failed", self._call.id, exc_info=cause)
            internal = ApiError("internal", "internal error; the gateway's log has it")
            await body.write(encoder.error(internal))


class EventEncoder:
    """Makes the bytes of a call's events.

    What surrounds the text of a plain delta is encoded once for each answer.
    """

    def __init__(self, call: ApiCall, answers: CallAnswers) -> None:
        self._call = call
        self._shape = call.shape
        self._answers = answers
        self._has_event_ids = call.resume.event_ids
        #: Of each answer, the bytes before and behind the text of a plain delta; None: the API
        #: makes each of its events from the delta.
        self._envelopes: dict[int, tuple[bytes, bytes] | None] = {}

    def begin(self) -> bytes:
        """Returns the events before the first text."""
        return self._events(self._shape.begin())

    def deltas(self, deltas: list[TextDelta]) -> bytes:
        """Returns the events of deltas; the last one gets an id, if the client wants ids."""
        if len(deltas) == 1:
            data = self._delta(deltas[0])
        else:
            data = b"".join([self._delta(delta) for delta in deltas])
        if self._has_event_ids and data:
            return sse.with_event_id(data, self._answers.event_id)
        return data

    def end(self, used_tokens: int) -> bytes:
        """Returns the events behind the last delta, and what closes a stream of the API."""
        return self._events(self._shape.end(used_tokens)) + self._call.closing

    def error(self, error: ApiError) -> bytes:
        """Returns the events of a stream that breaks off: the last one is named `error`."""
        failure = self._events(self._call.failure_events(error))
        return failure + sse.event(self._call.error_body(error, self._call.id), "error")

    def _events(self, events: Iterable[Event]) -> bytes:
        named = self._call.named_events
        return b"".join(sse.event(event, event["type"] if named else "") for event in events)

    def _delta(self, delta: TextDelta) -> bytes:
        """Returns the events of one delta; those of plain text by putting it into its envelope."""
        index = delta.index
        try:
            envelope = self._envelopes[index]
        except KeyError:
            envelope = self._envelopes[index] = self._find_envelope(index)
        if envelope is None or delta.finish_reason is not None:
            return self._events(self._shape.delta(delta))
        if not delta.text:
            return b""
        return envelope[0] + sse.encode(delta.text) + envelope[1]

    def _find_envelope(self, index: int) -> tuple[bytes, bytes] | None:
        """Returns what surrounds the text of an answer's plain deltas, or None (`_envelopes`)."""
        event = self._shape.plain(index, TEXT_MARK)
        if event is None:
            return None
        head, tail = self._events([event]).split(sse.encode(TEXT_MARK))
        return head, tail


class EventWriter:
    """A `TextWriter` that writes events into the body of a response."""

    def __init__(self, encoder: EventEncoder, body: sse.ResponseBody) -> None:
        self._encoder = encoder
        self._body = body
        self._begun = False  #: True once the events before the first text were made.

    def write_deltas(self, deltas: list[TextDelta]) -> bool:
        if not self._begun:
            self._begun = True
            begin = self._encoder.begin()
            return self._body.write_now(begin + self._encoder.deltas(deltas))
        data = self._encoder.deltas(deltas)
        return self._body.write_now(data) if data else True

    @property
    def held_bytes(self) -> int:
        return self._body.held_bytes

    def skip_deltas(self, deltas: list[TextDelta]) -> None:
        # Events are made and dropped, so that the shape goes on behind them: it counts calls, say.
        if not self._begun:
            self._begun = True
            self._encoder.begin()
        self._encoder.deltas(deltas)
        self._body.begin()

    async def drain(self) -> None:
        await self._body.drain()


def cut_off_error(cut_off: ReaderCutOff) -> ApiError:
    """Return the error of an answer that is given up while its client can still be told."""
    return ApiError("no_capacity", f"the gateway has no room for this answer: {cut_off}")


def check_content_type(content_type: str) -> None:
    """Raise ApiError for a body that the client declares to be something else than JSON."""
    media_type = content_type.partition(";")[0].strip().lower()
    is_json = media_type in ("", "application/json") or media_type.endswith("+json")
    if not is_json:
        shown_type = media_type[:MEDIA_TYPE_CHARS_MAX]
        message = f"bodies are application/json, not {shown_type!r}"
        raise ApiError("unsupported_media_type", message, "content-type")


def _not_resumable() -> ApiError:
    message = "only a stream of one prompt's answers can be resumed half-way"
    return ApiError("invalid_request", message, "x-resume-from")


def _note_ignored(model: ServedModel, body: ApiBody) -> dict[str, str]:
    """Count the fields that had no effect; return the header that names them."""
    model.tally.count_ignored_fields(body.api, body.ignored_fields.counts)
    return body.ignored_fields.headers()


def _json(body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(sse.encode(body), 200, headers, "application/json")


def identify(http: HttpRequest, prefix: str) -> str:
    """Returns the request's id: the client's, or a new one, which begins with `prefix`.

    The id is put into `http.state` for the body of an error. Raises ApiError.
    """
    request_id = http.headers.get("x-request-id") or f"{prefix}{uuid.uuid4().hex}"
    http.state.request_id = request_id
    if not REQUEST_ID_PATTERN.fullmatch(request_id):
        http.state.request_id = ""
        message = "x-request-id must be 1 to 128 of letters, digits and . _ : -"
        raise ApiError("invalid_request", message, "x-request-id")
    return request_id


def prompt_request_ids(call_id: str, prompts: int) -> list[str]:
    """Returns the ids of the requests that a call of so many prompts becomes.

    Two calls of several prompts share an id only if they have the same `call_id`.
    """
    if prompts == 1:
        return [call_id]
    if len(call_id) > NUMBERED_ID_CHARS_MAX:
        digest = xxhash.xxh3_64_hexdigest(call_id.encode())
        call_id = f"{call_id[: NUMBERED_ID_CHARS_MAX - len(digest) - 1]}-{digest}"
    return [f"{call_id}-{number}" for number in range(prompts)]


def response_headers(request: Request) -> dict[str, str]:
    """Returns the headers that say where the request ran, and how long that took, in milliseconds.

    Times that are not known are left out: a kept answer that is sent again was not placed again.
    `x-request-id` is not among the headers: Serve, or the gateway's own listener, adds it.
    """
    timing: dict[str, float] = {}
    if request.times.placed_s:
        timing["queue"] = (request.times.placed_s - request.times.arrived_s) * 1e3
        if request.ttft_s is not None:
            timing["prefill"] = request.ttft_s * 1e3 - timing["queue"]
    if request.times.first_token_release:
        timing["first-token-held"] = request.times.first_token_held_s * 1e3
    gaps_s = request.gaps_s
    if gaps_s:
        timing["second-token"] = gaps_s[0] * 1e3
    arrived = request.prompt_arrived
    if arrived:
        timing["kv"] = arrived.busy_ms
        timing["kv-exposed"] = arrived.exposed_ms
    headers = {
        "x-route": request.route,
        "x-lane": "background" if request.background else "urgent",
        "x-prefix-hit-tokens": str(request.hit_tokens),
    }
    if timing:
        headers["server-timing"] = ", ".join(f"{name};dur={ms:.1f}" for name, ms in timing.items())
    return headers
