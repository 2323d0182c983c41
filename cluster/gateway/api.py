"""The APIs over HTTP: a body becomes requests, their tokens become the shape that was asked for."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from . import sse
from .answers import Answers, Delta, Output
from .chat import ChatRequest, ChatShape
from .completions import (
    CompletionRequest,
    CompletionShape,
    DetokenizeRequest,
    TokenizeRequest,
)
from .errors import ApiError
from .messages import CountRequest, MessageShape, MessagesRequest, error_body
from .responses import ResponseShape, ResponsesRequest
from .schema import REQUEST_ID, parse
from .stream import Request

if TYPE_CHECKING:
    from .gateway import Gateway


class Shape(Protocol):
    """What is told of the answers. Events are dicts; with a `type`, that names the event."""

    @property
    def output(self) -> Output: ...
    def begin(self) -> list[dict]: ...
    def delta(self, delta: Delta) -> list[dict]: ...
    def end(self, used: int) -> list[dict]: ...
    def whole(self, deltas: list[Delta], used: int) -> dict: ...


@dataclass(slots=True)
class Call:
    """A body that was understood: its answers are those of all `requests`, in this order."""

    requests: list[Request]
    shape: Shape
    stream: bool
    closing: bytes = b"data: [DONE]\n\n"  #: of a stream
    named: bool = False  #: events have names
    error: Callable[[ApiError, str], dict] = ApiError.body


class Api:
    """Handlers of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    async def chat(self, http: HttpRequest) -> Response:
        request_id = identify(http, "chatcmpl-")
        asked = parse(ChatRequest, await sse.read_body(http))
        request, prompt = await self.gateway.prepare(asked, request_id)
        text, model = self.gateway.text, self.gateway.model
        shape = ChatShape(asked, request, text, model, prompt)
        return await self._answer(Call([request], shape, asked.stream))

    async def completions(self, http: HttpRequest) -> Response:
        request_id = identify(http, "cmpl-")
        asked = parse(CompletionRequest, await sse.read_body(http))
        prompts = asked.prompts()
        names = (
            [request_id]
            if len(prompts) == 1
            else [f"{request_id[:120]}-{number}" for number in range(len(prompts))]
        )
        requests = [
            (await self.gateway.prepare(one, name))[0]
            for one, name in zip(prompts, names, strict=True)
        ]
        text, model = self.gateway.text, self.gateway.model
        shape = CompletionShape(asked, requests, text, model, request_id)
        return await self._answer(Call(requests, shape, asked.stream))

    async def responses(self, http: HttpRequest) -> Response:
        request_id = identify(http, "resp_")
        asked = parse(ResponsesRequest, await sse.read_body(http))
        chat = asked.as_chat()
        request, prompt = await self.gateway.prepare(chat, request_id)
        text, model = self.gateway.text, self.gateway.model
        shape = ResponseShape(asked, chat, request, text, model, prompt)
        return await self._answer(Call([request], shape, asked.stream, b"", True))

    async def messages(self, http: HttpRequest) -> Response:
        request_id = identify(http, "msg_")
        asked = parse(MessagesRequest, await sse.read_body(http))
        text, model = self.gateway.text, self.gateway.model
        chat = asked.as_chat(text)
        request, prompt = await self.gateway.prepare(chat, request_id)
        shape = MessageShape(chat, request, text, model, prompt)
        return await self._answer(Call([request], shape, asked.stream, b"", True, error_body))

    async def count_tokens(self, http: HttpRequest) -> Response:
        identify(http, "msg_")
        asked = parse(CountRequest, await sse.read_body(http))
        self.gateway.check_model(asked.model)
        chat = asked.chat(self.gateway.text)
        chat.check(self.gateway.text, self.gateway.limits)
        prompt = await self.gateway.tokenize(lambda: chat.prompt(self.gateway.text))
        return _json({"input_tokens": len(prompt.ids)})

    async def tokenize(self, http: HttpRequest) -> Response:
        asked = parse(TokenizeRequest, await sse.read_body(http))
        text, limits = self.gateway.text, self.gateway.limits
        self.gateway.check_model(asked.model)
        asked.check(text, limits)
        ids = await self.gateway.tokenize(lambda: asked.ids(text))
        return _json(asked.answer(ids, text, limits))

    async def detokenize(self, http: HttpRequest) -> Response:
        asked = parse(DetokenizeRequest, await sse.read_body(http))
        self.gateway.check_model(asked.model)
        return _json(await self.gateway.tokenize(lambda: asked.answer(self.gateway.text)))

    async def _answer(self, call: Call) -> Response:
        run = Run(self.gateway, call)
        deltas = run.deltas()
        if not call.stream:
            async with aclosing(deltas):
                told = [delta async for batch in deltas for delta in batch]
            body = call.shape.whole(_joined(told), run.used)
            return _json(body, headers_of(call.requests[0]))
        try:
            first = await anext(deltas)  # errors until here get their own status
        except BaseException:
            await deltas.aclose()
            raise
        events = self._events(call, run, first, deltas)
        return sse.EventStream(events, headers_of(call.requests[0]))

    async def _events(
        self, call: Call, run: Run, first: list[Delta], deltas: AsyncGenerator[list[Delta], None]
    ) -> AsyncGenerator[bytes, None]:
        """SSE events; an error after the first token becomes an `error` event."""

        def told(events: list[dict]) -> bytes:
            return b"".join(sse.event(one, one["type"] if call.named else "") for one in events)

        try:
            yield told(call.shape.begin())
            batch: list[Delta] | None = first
            while batch is not None:
                events = [event for delta in batch for event in call.shape.delta(delta)]
                if events:
                    yield told(events)
                batch = await anext(deltas, None)
            yield told(call.shape.end(run.used)) + call.closing
        except ApiError as error:
            yield sse.event(call.error(error, call.requests[0].id), "error")
        finally:
            await deltas.aclose()


class Run:
    """The requests of a call, at the same time. An answer's index counts over all of them."""

    def __init__(self, gateway: Gateway, call: Call) -> None:
        self._gateway, self._requests = gateway, call.requests
        output, text = call.shape.output, gateway.text
        self._answers = [Answers(request, text, output) for request in call.requests]

    @property
    def used(self) -> int:
        return sum(answers.used for answers in self._answers)

    async def deltas(self) -> AsyncGenerator[list[Delta], None]:
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

    async def _one(self, number: int) -> AsyncGenerator[list[Delta], None]:
        request, answers = self._requests[number], self._answers[number]
        base = number * len(request.answers)
        async with aclosing(self._gateway.generate(request)) as news:
            async for batch in news:
                deltas = answers.feed(batch)
                yield [replace(one, index=base + one.index) for one in deltas] if base else deltas


def _json(body: dict, headers: dict[str, str] | None = None) -> Response:
    return Response(sse.encode(body), 200, headers, "application/json")


def _joined(deltas: list[Delta]) -> list[Delta]:
    """One delta per answer, in the order of their indices."""
    found: dict[int, list[Delta]] = {}
    for delta in deltas:
        found.setdefault(delta.index, []).append(delta)
    return [
        Delta(
            index,
            "".join(one.text for one in parts),
            [token for one in parts for token in one.tokens],
            parts[-1].finish,
            parts[-1].stop,
        )
        for index, parts in sorted(found.items())
    ]


def identify(http: HttpRequest, prefix: str) -> str:
    """The request's id: the client's, or a new one. Raises ApiError."""
    request_id = http.headers.get("x-request-id") or f"{prefix}{uuid.uuid4().hex}"
    http.state.request_id = request_id
    if not REQUEST_ID.fullmatch(request_id):
        http.state.request_id = ""
        message = "x-request-id must be 1 to 128 of letters, digits and . _ : -"
        raise ApiError("invalid_request", message, "x-request-id")
    return request_id


def headers_of(request: Request) -> dict[str, str]:
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
