"""The HTTP routes of a gateway, and the responses that errors become.

A request passes the `RequestGuard`, then its route: the APIs' are in `Api`, the others here. An
error is a response in the shape of the API that was called.
"""

from __future__ import annotations

import logging
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ..apis.api import Api
from ..apis.messages import anthropic_error_body
from ..apis.openapi import openapi_document
from ..apis.schema import REQUEST_ID_PATTERN
from ..errors import ApiError
from ..service import GatewayService
from .guard import RequestGuard

log = logging.getLogger(__name__)

CLIENT_LEFT_STATUS = 499  #: nginx's code for a client that closed its connection.


def build_app(gateway: GatewayService) -> ASGIApp:
    """Return the ASGI application of one gateway."""
    api = Api(gateway)
    status_routes = _StatusRoutes(gateway)
    routes = [
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/responses", api.responses, methods=["POST"]),
        Route("/v1/responses/{response_id}", api.stored_response, methods=["GET", "DELETE"]),
        Route("/v1/messages", api.messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", api.count_tokens, methods=["POST"]),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/v1/models", status_routes.models),
        Route("/v1/models/{model:path}", status_routes.model),
        Route("/health", status_routes.health),
        Route("/ready", status_routes.ready),
        Route("/metrics", status_routes.metrics),
        Route("/openapi.json", status_routes.openapi),
    ]

    async def counted_error_response(http: HttpRequest, error: ApiError) -> Response:
        if not error.counted_in_metrics:
            gateway.tally.count_refused(error.http_status)
        return await error_response(http, error)

    exception_handlers = {
        ApiError: counted_error_response,
        HTTPException: _http_exception_response,
        ClientDisconnect: _client_left_response,
        Exception: _internal_error_response,
    }
    app = Starlette(routes=routes, exception_handlers=exception_handlers)  # type: ignore[arg-type]
    return RequestGuard(
        app,
        access_control=gateway.door,
        classes=gateway.classes,
        body_timeout_s=gateway.config.gateway.body_timeout_s,
        make_error_response=counted_error_response,
    )


class _StatusRoutes:
    """Handlers of the routes that only show what the gateway knows."""

    def __init__(self, gateway: GatewayService) -> None:
        self._gateway = gateway

    async def health(self, _: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, _: HttpRequest) -> Response:
        missing = self._gateway.missing()
        if missing:
            return JSONResponse({"status": "not ready", "missing": missing}, 503)
        return JSONResponse({"status": "ready"})

    async def models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._gateway.model_card()]})

    async def model(self, http: HttpRequest) -> Response:
        self._gateway.check_model(http.path_params["model"])
        return JSONResponse(self._gateway.model_card())

    async def openapi(self, _: HttpRequest) -> Response:
        return JSONResponse(openapi_document(self._gateway.reading))

    async def metrics(self, http: HttpRequest) -> Response:
        content_type, page = self._gateway.metrics.render(http.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})


def _request_id(http: HttpRequest) -> str:
    """Return the request's id; of a request that was refused before it got one, the client's."""
    client_id = http.headers.get("x-request-id", "")
    if not REQUEST_ID_PATTERN.fullmatch(client_id):
        client_id = ""
    request_id: str = getattr(http.state, "request_id", client_id)
    return request_id


def _error_body(http: HttpRequest, error: ApiError) -> dict[str, Any]:
    """Return the error in the shape of the API that was called."""
    if http.url.path.startswith("/v1/messages"):
        return anthropic_error_body(error, _request_id(http))
    return error.body(_request_id(http))


async def error_response(http: HttpRequest, error: ApiError) -> Response:
    return JSONResponse(_error_body(http, error), error.http_status, error.headers())


async def _http_exception_response(http: HttpRequest, error: HTTPException) -> Response:
    """Answer what Starlette itself refuses: paths and methods that do not exist."""
    reason = "not_found" if error.status_code == 404 else "invalid_request"
    message = f"{http.method} {http.url.path}: {error.detail.lower()}"
    body = _error_body(http, ApiError(reason, message))
    return JSONResponse(body, error.status_code, error.headers)


async def _client_left_response(_: HttpRequest, __: ClientDisconnect) -> Response:
    """Return what nobody reads, as the client is gone."""
    return Response(status_code=CLIENT_LEFT_STATUS)


async def _internal_error_response(http: HttpRequest, error: Exception) -> Response:
    log.exception("request %s failed", _request_id(http), exc_info=error)
    message = "internal error; the gateway's log has it under the request id"
    return JSONResponse(_error_body(http, ApiError("internal", message)), 500)
