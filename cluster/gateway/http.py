"""The HTTP face: Starlette routes over a `Gateway`, and what errors look like."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from . import sse
from .api import Api
from .doctor import parse_size
from .errors import ApiError
from .messages import error_body

if TYPE_CHECKING:
    from .gateway import Gateway

log = logging.getLogger(__name__)


def build(gateway: Gateway) -> Starlette:
    """The ASGI application of one gateway."""
    face, api = _Face(gateway), Api(gateway)
    routes = [
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/responses", api.responses, methods=["POST"]),
        Route("/v1/messages", api.messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", api.count_tokens, methods=["POST"]),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/v1/models", face.models),
        Route("/v1/models/{model:path}", face.model),
        Route("/health", face.health),
        Route("/ready", face.ready),
        Route("/admin/v1/cluster", face.cluster),
        Route("/admin/v1/requests/{request}", face.explain),
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

    async def explain(self, http: HttpRequest) -> Response:
        request = http.path_params["request"]
        decisions = await self.gateway.plane.explain(request)
        if decisions is None:
            raise ApiError("no_capacity", "no router answers")
        if not decisions:
            message = f"the router knows no decision about {request} (it keeps the last ones only)"
            raise ApiError("not_found", message)
        return JSONResponse({"request": request, "decisions": decisions})

    async def doctor(self, http: HttpRequest) -> Response:
        """Server-sent events: `{"progress": ..}` while it measures, at last `{"report": ..}`."""
        events = self.gateway.doctor.run(parse_size(await sse.read_body(http)))
        first = await anext(events)  # refusals get their own status
        return sse.EventStream(_told(first, events), {})


async def _told(first: dict, events: AsyncGenerator[dict, None]) -> AsyncGenerator[bytes, None]:
    try:
        yield sse.event(first)
        async for event in events:
            yield sse.event(event)
    finally:
        await events.aclose()


def _request_id(http: HttpRequest) -> str:
    return getattr(http.state, "request_id", "")


def _body(http: HttpRequest, error: ApiError) -> dict:
    """The error in the shape of the API that was called."""
    if http.url.path.startswith("/v1/messages"):
        return error_body(error, _request_id(http))
    return error.body(_request_id(http))


async def _api_error(http: HttpRequest, error: ApiError) -> Response:
    return JSONResponse(_body(http, error), error.kind.http, error.headers())


async def _http_error(http: HttpRequest, error: HTTPException) -> Response:
    message = f"{http.method} {http.url.path}: {error.detail.lower()}"
    reason = "not_found" if error.status_code == 404 else "invalid_request"
    body = _body(http, ApiError(reason, message))
    return JSONResponse(body, error.status_code, error.headers)


async def _internal(http: HttpRequest, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    log.exception("request %s failed", _request_id(http), exc_info=error)
    told = ApiError("internal", "internal error; the gateway's log has it under the request id")
    return JSONResponse(_body(http, told), 500)
