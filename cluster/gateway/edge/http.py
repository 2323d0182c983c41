"""The HTTP face: Starlette routes over a `Gateway`, and what errors look like."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ..apis.api import Api
from ..apis.messages import error_body
from ..apis.openapi import document
from ..apis.schema import REQUEST_ID
from ..errors import ApiError
from .guard import Guard

if TYPE_CHECKING:
    from ..gateway import Gateway

log = logging.getLogger(__name__)


def build(gateway: Gateway) -> ASGIApp:
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
        Route("/metrics", face.metrics),
        Route("/openapi.json", face.openapi),
    ]

    async def api_error(http: HttpRequest, error: ApiError) -> Response:
        if not error.counted:
            gateway.tally.refused(error.http)
        return await _api_error(http, error)

    handlers = {
        ApiError: api_error,
        HTTPException: _http_error,
        ClientDisconnect: _left,
        Exception: _internal,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]
    body_s = gateway.config.gateway.body_timeout_s
    return Guard(app, gateway.door, gateway.classes, body_s, api_error)


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

    async def openapi(self, _: HttpRequest) -> Response:
        return JSONResponse(document())

    async def metrics(self, http: HttpRequest) -> Response:
        kind, page = self.gateway.metrics.page(http.headers.get("accept", ""))
        return Response(page, headers={"content-type": kind})


def _request_id(http: HttpRequest) -> str:
    """The one of its answer; of a request that was refused before it had one, the client's."""
    given = http.headers.get("x-request-id", "")
    return getattr(http.state, "request_id", given if REQUEST_ID.fullmatch(given) else "")


def _body(http: HttpRequest, error: ApiError) -> dict:
    """The error in the shape of the API that was called."""
    if http.url.path.startswith("/v1/messages"):
        return error_body(error, _request_id(http))
    return error.body(_request_id(http))


async def _api_error(http: HttpRequest, error: ApiError) -> Response:
    return JSONResponse(_body(http, error), error.http, error.headers())


async def _http_error(http: HttpRequest, error: HTTPException) -> Response:
    message = f"{http.method} {http.url.path}: {error.detail.lower()}"
    reason = "not_found" if error.status_code == 404 else "invalid_request"
    body = _body(http, ApiError(reason, message))
    return JSONResponse(body, error.status_code, error.headers)


async def _left(_: HttpRequest, __: ClientDisconnect) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _internal(http: HttpRequest, error: Exception) -> Response:
    log.exception("request %s failed", _request_id(http), exc_info=error)
    told = ApiError("internal", "internal error; the gateway's log has it under the request id")
    return JSONResponse(_body(http, told), 500)
