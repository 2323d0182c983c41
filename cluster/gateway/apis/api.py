"""The APIs over HTTP: a body becomes requests, their tokens become the shape that was asked for."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..attempt.request import AnswerUpdate, Request
from ..attempt.resume import NOT_RESUMED, Resume, event_id_of
from ..edge import sse
from ..errors import ApiError
from ..text.answers import AnswerTexts, Output, TextDelta
from .chat import ChatRequest, ChatShape
from .completions import CompletionRequest, CompletionShape, DetokenizeRequest, TokenizeRequest
from .messages import CountTokensRequest, MessageShape, MessagesRequest, anthropic_error_body
from .responses import ResponseShape, ResponsesRequest
from .schema import REQUEST_ID_PATTERN, parse_body

if TYPE_CHECKING:
    from ..gateway import Gateway


log = logging.getLogger(__name__)

MARK = "\x1dtext\x1d"  #: stands for the text of an event that is encoded once


class Shape(Protocol):
    """What is told of the answers. Events are dicts; with a `type`, that names the event."""

    @property
    def output(self) -> Output: ...
    def begin(self) -> list[dict]: ...

    def plain(self, index: int, text: str) -> dict | None:
        """The event of a delta with nothing but `text`, before the end; None: ask `delta`."""

    def delta(self, delta: TextDelta) -> list[dict]: ...
    def end(self, used: int) -> list[dict]: ...
    def whole(self, deltas: list[TextDelta], used: int) -> dict: ...


@dataclass(slots=True)
class Call:
    """A body that was understood: its answers are those of all `requests`, in this order."""

    requests: list[Request]
    shape: Shape
    stream: bool
    closing: bytes = b"data: [DONE]\n\n"  #: of a stream
    named: bool = False  #: events have names
    error: Callable[[ApiError, str], dict] = ApiError.body
    resume: Resume = NOT_RESUMED


class Api:
    """Handlers of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    async def chat(self, http: HttpRequest) -> Response:
        request_id = identify(http, "chatcmpl-")
        asked = parse_body(ChatRequest, await sse.read_body(http))
        request, prompt = await self.gateway.prepare(asked, request_id, http.state.terms)
        text, model = self.gateway.text, self.gateway.model
        shape = ChatShape(asked, request, text, model, prompt)
        call = Call([request], shape, asked.stream, resume=http.state.terms.resume)
        return await self._answer(http, call)

    async def completions(self, http: HttpRequest) -> Response:
        request_id = identify(http, "cmpl-")
        asked = parse_body(CompletionRequest, await sse.read_body(http))
        prompts = asked.prompts()
        names = (
            [request_id]
            if len(prompts) == 1
            else [f"{request_id[:120]}-{number}" for number in range(len(prompts))]
        )
        requests = [
            (await self.gateway.prepare(one, name, http.state.terms))[0]
            for one, name in zip(prompts, names, strict=True)
        ]
        text, model = self.gateway.text, self.gateway.model
        shape = CompletionShape(asked, requests, text, model, request_id)
        call = Call(requests, shape, asked.stream, resume=http.state.terms.resume)
        return await self._answer(http, call)

    async def responses(self, http: HttpRequest) -> Response:
        request_id = identify(http, "resp_")
        asked = parse_body(ResponsesRequest, await sse.read_body(http))
        chat = asked.as_chat()
        request, prompt = await self.gateway.prepare(chat, request_id, http.state.terms)
        text, model = self.gateway.text, self.gateway.model
        shape = ResponseShape(asked, chat, request, text, model, prompt)
        resume = http.state.terms.resume
        call = Call([request], shape, asked.stream, b"", True, resume=resume)
        return await self._answer(http, call)

    async def messages(self, http: HttpRequest) -> Response:
        request_id = identify(http, "msg_")
        asked = parse_body(MessagesRequest, await sse.read_body(http))
        text, model = self.gateway.text, self.gateway.model
        chat = asked.as_chat(text)
        request, prompt = await self.gateway.prepare(chat, request_id, http.state.terms)
        shape = MessageShape(chat, request, text, model, prompt)
        resume = http.state.terms.resume
        call = Call([request], shape, asked.stream, b"", True, anthropic_error_body, resume)
        return await self._answer(http, call)

    async def count_tokens(self, http: HttpRequest) -> Response:
        identify(http, "msg_")
        asked = parse_body(CountTokensRequest, await sse.read_body(http))
        self.gateway.check_model(asked.model)
        chat = asked.as_chat(self.gateway.text)
        chat.check(self.gateway.text, self.gateway.limits)
        prompt = await self.gateway.tokenize(lambda: chat.prompt(self.gateway.text))
        return _json({"input_tokens": len(prompt.token_ids)})

    async def tokenize(self, http: HttpRequest) -> Response:
        asked = parse_body(TokenizeRequest, await sse.read_body(http))
        text, limits = self.gateway.text, self.gateway.limits
        self.gateway.check_model(asked.model)
        asked.check(text, limits)
        ids = await self.gateway.tokenize(lambda: asked.token_ids(text))
        return _json(asked.response_body(ids, text, limits))

    async def detokenize(self, http: HttpRequest) -> Response:
        asked = parse_body(DetokenizeRequest, await sse.read_body(http))
        self.gateway.check_model(asked.model)
        return _json(await self.gateway.tokenize(lambda: asked.response_body(self.gateway.text)))

    async def _answer(self, http: HttpRequest, call: Call) -> Response:
        if call.resume.cursors and (len(call.requests) > 1 or not call.stream):
            message = "only a stream of one prompt's answers can be resumed half-way"
            raise ApiError("invalid_request", message, "x-resume-from")
        run = Run(self.gateway, call)
        deltas = run.deltas()
        if not call.stream:
            told = await sse.while_there(http.receive, _all(deltas))
            body = call.shape.whole(_joined(told), run.used)
            return _json(body, response_headers(call.requests[0]))
        # errors until the first tokens get their own status
        first = await sse.while_there(http.receive, _first(deltas))
        tell = partial(self._tell, call, run, first, deltas)
        return sse.EventStream(tell, response_headers(call.requests[0]))

    async def _tell(
        self,
        call: Call,
        run: Run,
        first: list[TextDelta],
        deltas: AsyncGenerator[list[TextDelta], None],
        body: sse.Body,
    ) -> None:
        """SSE events; an error after the first token becomes an `error` event."""
        told = Told(call, run)
        tap = Tap(body, told, run)
        try:
            begin = told.events(call.shape.begin()) + told.deltas(first)
            await body.write(b"" if call.resume.cursors else begin)  # the client has it
            for request in call.requests:
                if not (call.resume.cursors or request.shared):
                    request.told()
            run.attach(tap)
            async for batch in deltas:
                await body.write(told.deltas(batch))
            await body.write(told.events(call.shape.end(run.used)) + call.closing)
        except ApiError as error:
            await body.write(sse.event(call.error(error, call.requests[0].id), "error"))
        except sse.Stalled:
            raise
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and tap.error is None:
                raise
            log.error("request %s failed", call.requests[0].id, exc_info=tap.error or error)
            told_of = ApiError("internal", "internal error; the gateway's log has it")
            await body.write(sse.event(call.error(told_of, call.requests[0].id), "error"))
        finally:
            await deltas.aclose()


class Told:
    """The bytes of a stream of events; ids say how far `run` is."""

    def __init__(self, call: Call, run: Run) -> None:
        self._shape, self._named = call.shape, call.named
        self._run = run if call.resume.event_ids else None
        self._around: dict[int, tuple[bytes, bytes] | None] = {}  #: a plain delta's text, by index

    def events(self, events: list[dict]) -> bytes:
        return b"".join(sse.event(one, one["type"] if self._named else "") for one in events)

    def deltas(self, deltas: list[TextDelta]) -> bytes:
        if len(deltas) == 1:
            told = self._one(deltas[0])
        else:
            told = b"".join([self._one(delta) for delta in deltas])
        return sse.marked(told, self._run.place) if self._run and told else told

    def _one(self, delta: TextDelta) -> bytes:
        around = self._around.get(delta.index, ...)
        if around is ...:
            around = self._around[delta.index] = self._find_around(delta.index)
        if around is None or delta.finish_reason is not None:
            return self.events(self._shape.delta(delta))
        return around[0] + sse.encode(delta.text) + around[1] if delta.text else b""

    def _find_around(self, index: int) -> tuple[bytes, bytes] | None:
        event = self._shape.plain(index, MARK)
        if event is None:
            return None
        head, tail = self.events([event]).split(sse.encode(MARK))
        return head, tail


class Tap:
    """Tokens of a request on the short way: from their frame to the client's socket at once."""

    def __init__(self, body: sse.Body, told: Told, run: Run) -> None:
        self._body, self._told, self._run = body, told, run
        self._task = asyncio.current_task()
        self.error: Exception | None = None

    @property
    def ready(self) -> bool:
        return self._body.ready

    def take(self, news: list[AnswerUpdate]) -> None:
        try:
            data = self._told.deltas(self._run.feed(news))
            if data:
                self._body.write_now(data)
        except Exception as error:  # for the task: its neighbours' frames must go on
            self.error = error
            if self._task:
                self._task.cancel()


class Run:
    """The requests of a call, at the same time. An answer's index counts over all of them."""

    def __init__(self, gateway: Gateway, call: Call) -> None:
        self._gateway, self._requests = gateway, call.requests
        self._seen = call.resume.cursors
        output, text = call.shape.output, gateway.text
        self._answers = [AnswerTexts(request, text, output) for request in call.requests]

    @property
    def used(self) -> int:
        return sum(answers.used for answers in self._answers)

    @property
    def place(self) -> str:
        """How far it is, as the id of an event."""
        return event_id_of([seen for answers in self._answers for seen in answers.seen])

    def attach(self, tap: Tap) -> None:
        """For a call of one request: what it gave so far is told."""
        if len(self._requests) == 1 and not self._requests[0].shared:
            self._requests[0].tap = tap

    def feed(self, news: list[AnswerUpdate]) -> list[TextDelta]:
        """Of a call of one request."""
        return self._answers[0].feed(news)

    async def deltas(self) -> AsyncGenerator[list[TextDelta], None]:
        """Raises ApiError. Closing it ends every request."""
        if len(self._requests) == 1:
            async with aclosing(self._one(0)) as deltas:
                async for batch in deltas:
                    yield batch
            return
        queue: asyncio.Queue = asyncio.Queue(2 * len(self._requests))
        loop = asyncio.get_running_loop()
        numbers = range(len(self._requests))
        tasks = [loop.create_task(self._pump(number, queue)) for number in numbers]
        try:
            running = len(tasks)
            while running:
                batch = await queue.get()
                if isinstance(batch, BaseException):
                    raise batch
                if batch is None:
                    running -= 1
                else:
                    yield batch
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, number: int, queue: asyncio.Queue) -> None:
        try:
            async with aclosing(self._one(number)) as deltas:
                async for batch in deltas:
                    await queue.put(batch)
            await queue.put(None)
        except Exception as error:  # told to who waits for the answers
            await queue.put(error)

    async def _one(self, number: int) -> AsyncGenerator[list[TextDelta], None]:
        request, answers = self._requests[number], self._answers[number]
        base = number * len(request.answers)
        async with aclosing(self._gateway.generate(request, self._seen)) as news:
            async for batch in news:
                deltas = answers.feed(batch)
                shifted = msgspec.structs.replace
                yield [shifted(one, index=base + one.index) for one in deltas] if base else deltas


async def _all(deltas: AsyncGenerator[list[TextDelta], None]) -> list[TextDelta]:
    async with aclosing(deltas):
        return [delta async for batch in deltas for delta in batch]


async def _first(deltas: AsyncGenerator[list[TextDelta], None]) -> list[TextDelta]:
    try:
        return await anext(deltas)
    except BaseException:
        await deltas.aclose()
        raise


def _json(body: dict, headers: dict[str, str] | None = None) -> Response:
    return Response(sse.encode(body), 200, headers, "application/json")


def _joined(deltas: list[TextDelta]) -> list[TextDelta]:
    """One delta per answer, in the order of their indices."""
    found: dict[int, list[TextDelta]] = {}
    for delta in deltas:
        found.setdefault(delta.index, []).append(delta)
    return [
        TextDelta(
            index,
            "".join(one.text for one in parts),
            [token for one in parts for token in one.tokens],
            parts[-1].finish_reason,
            parts[-1].stop_string,
        )
        for index, parts in sorted(found.items())
    ]


def identify(http: HttpRequest, prefix: str) -> str:
    """The request's id: the client's, or a new one. Raises ApiError."""
    request_id = http.headers.get("x-request-id") or f"{prefix}{uuid.uuid4().hex}"
    http.state.request_id = request_id
    if not REQUEST_ID_PATTERN.fullmatch(request_id):
        http.state.request_id = ""
        message = "x-request-id must be 1 to 128 of letters, digits and . _ : -"
        raise ApiError("invalid_request", message, "x-request-id")
    return request_id


def response_headers(request: Request) -> dict[str, str]:
    """Serve adds `x-request-id` itself."""
    queue = (request.placed - request.arrived) * 1e3
    prefill = (request.ttft_s or 0.0) * 1e3 - queue
    timing = {"queue": queue, "prefill": prefill}
    gaps = request.gaps_s
    if gaps:
        timing["second-token"] = gaps[0] * 1e3
    if request.moved:
        timing |= {"kv": request.moved.busy_ms, "kv-exposed": request.moved.exposed_ms}
    return {
        "x-route": request.route,
        "x-prefix-hit-tokens": str(request.hit_tokens),
        "server-timing": ", ".join(f"{name};dur={ms:.1f}" for name, ms in timing.items()),
    }
