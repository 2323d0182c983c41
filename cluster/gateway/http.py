"""The HTTP face: Starlette routes over a `Gateway`, streams written as raw ASGI events."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from . import openai
from .doctor import parse_size
from .errors import ApiError
from .stream import Request

if TYPE_CHECKING:
    from .gateway import Gateway

log = logging.getLogger(__name__)

BODY_MAX = 8 << 20
_json = msgspec.json.Encoder().encode


def build(gateway: Gateway) -> Starlette:
    """The ASGI application of one gateway."""
    face = _Face(gateway)
    routes = [
        Route("/v1/chat/completions", face.chat, methods=["POST"]),
        Route("/v1/models", face.models),
        Route("/v1/models/{model:path}", face.model),
        Route("/health", face.health),
        Route("/ready", face.ready),
        Route("/admin/v1/cluster", face.cluster),
        Route("/admin/v1/doctor", face.doctor, methods=["POST"]),
    ]
    handlers = {ApiError: _api_error, HTTPException: _http_error, Exception: _internal}
    return Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]


class _Face:
    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    async def health(self, _: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, _: HttpRequest) -> Response:
        missing = self.gateway.missing()
        status = {"status": "not ready", "missing": missing} if missing else {"status": "ready"}
        return JSONResponse(status, 503 if missing else 200)

    async def models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self.gateway.model_card()]})

    async def model(self, http: HttpRequest) -> Response:
        self.gateway.check_model(http.path_params["model"])
        return JSONResponse(self.gateway.model_card())

    async def cluster(self, _: HttpRequest) -> Response:
        return JSONResponse(await self.gateway.status())

    async def doctor(self, http: HttpRequest) -> Response:
        """Server-sent events: `{"progress": ..}` while it measures, at last `{"report": ..}`."""
        events = self.gateway.doctor.run(parse_size(await _body(http)))
        first = await anext(events)  # refusals get their own status
        return _EventStream(_told(first, events), {})

    async def chat(self, http: HttpRequest) -> Response:
        request_id = http.headers.get("x-request-id") or f"chatcmpl-{uuid.uuid4().hex}"
        http.state.request_id = request_id
        if not openai.REQUEST_ID.fullmatch(request_id):
            http.state.request_id = ""
            message = "x-request-id must be 1 to 128 of letters, digits and . _ : -"
            raise ApiError("invalid_request", message, "x-request-id")
        chat = openai.parse_chat(await _body(http))
        request = await self.gateway.prepare(chat, request_id)
        tokens = self.gateway.generate(request)
        if not chat.stream:
            return await self._whole(chat, request, tokens)
        try:
            first = await anext(tokens)  # errors until here get their own status
        except BaseException:
            await tokens.aclose()
            raise
        events = self._events(chat, request, first, tokens)
        return _EventStream(events, _headers(request))

    async def _whole(
        self, chat: openai.ChatRequest, request: Request, tokens: AsyncGenerator
    ) -> Response:
        async for _ in tokens:
            pass
        text = self.gateway.text
        stream = text.stream()
        content = stream.feed([t.id for t in request.journal]) + stream.flush()
        lps = openai.logprobs(request.journal, text) if chat.logprobs else None
        body = openai.completion(request, self.gateway.model, content, lps)
        return Response(_json(body), 200, _headers(request), "application/json")

    async def _events(
        self, chat: openai.ChatRequest, request: Request, first: list, tokens: AsyncGenerator
    ) -> AsyncGenerator[bytes, None]:
        """SSE events; an error after the first token becomes an `error` event."""
        chunks = openai.Chunks(request, self.gateway.model)
        stream = self.gateway.text.stream()
        try:
            yield _event(chunks.delta({"role": "assistant", "content": ""}))
            batch: list | None = first
            while batch is not None:
                delta = stream.feed([token.id for token in batch])
                lps = openai.logprobs(batch, self.gateway.text) if chat.logprobs else None
                if delta or lps:
                    yield _event(chunks.delta({"content": delta}, lps=lps))
                batch = await anext(tokens, None)
            rest = stream.flush()
            yield _event(chunks.delta({"content": rest} if rest else {}, finish=request.finish))
            if chat.stream_options and chat.stream_options.include_usage:
                yield _event(chunks.usage(request))
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            yield b"event: error\n" + _event(error.body(request.id))
        finally:
            await tokens.aclose()


async def _told(first: dict, events: AsyncGenerator[dict, None]) -> AsyncGenerator[bytes, None]:
    try:
        yield _event(first)
        async for event in events:
            yield _event(event)
    finally:
        await events.aclose()


def _event(data: dict) -> bytes:
    return b"data: " + _json(data) + b"\n\n"


def _headers(request: Request) -> dict[str, str]:
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


async def _body(http: HttpRequest) -> bytes:
    parts, size = [], 0
    async for part in http.stream():
        size += len(part)
        if size > BODY_MAX:
            raise ApiError("too_large", f"the body is larger than {BODY_MAX >> 20} MiB")
        parts.append(part)
    return b"".join(parts)


class _EventStream(Response):
    """Server-sent events, one ASGI message each; stops generating when the client leaves."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        super().__init__(None, 200, {**headers, "cache-control": "no-cache"}, "text/event-stream")
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        body = asyncio.ensure_future(self._write(start, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({body, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not body.done():
                body.cancel()
            failed, _ = await asyncio.gather(body, gone, return_exceptions=True)
            if isinstance(failed, Exception):
                log.error("a stream broke off", exc_info=failed)
            await self._events.aclose()

    async def _write(self, start: dict, send: Send) -> None:
        await send(start)
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _request_id(http: HttpRequest) -> str:
    return getattr(http.state, "request_id", "")


async def _api_error(http: HttpRequest, error: ApiError) -> Response:
    request_id = _request_id(http)
    return JSONResponse(error.body(request_id), error.kind.http, error.headers())


async def _http_error(http: HttpRequest, error: HTTPException) -> Response:
    message = f"{http.method} {http.url.path}: {error.detail.lower()}"
    reason = "not_found" if error.status_code == 404 else "invalid_request"
    body = ApiError(reason, message).body(_request_id(http))
    return JSONResponse(body, error.status_code, error.headers)


async def _internal(http: HttpRequest, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    log.exception("request %s failed", _request_id(http), exc_info=error)
    body = ApiError("internal", "internal error; the gateway's log has it under the request id")
    return Response(json.dumps(body.body(_request_id(http))), 500, media_type="application/json")
