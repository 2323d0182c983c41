"""The HTTP routes of a gateway, and the responses that errors become.

A request passes the `RequestGuard`, then its route: the APIs' are in `Api`, the others here. An
error is a response in the shape of the API that was called.
"""

from __future__ import annotations

import functools
import logging
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ..apis.api import Api
from ..apis.docs_page import CONTENT_SECURITY_POLICY, docs_page
from ..apis.messages import anthropic_error_body
from ..apis.openapi import openapi_document
from ..apis.schema import REQUEST_ID_PATTERN, Reading
from ..errors import ApiError
from ..service import GatewayService
from .browsers import BrowserPolicy
from .guard import RequestGuard

log = logging.getLogger(__name__)

#: Headers of answers that pages of other origins may read.
EXPOSED_HEADERS = (
    "x-request-id",
    "x-ignored-fields",
    "x-route",
    "x-lane",
    "x-prefix-hit-tokens",
    "server-timing",
    "retry-after",
    "x-should-retry",
)
PREFLIGHT_AGE_S = 600  #: For so long a browser need not ask again.
CLIENT_LEFT_STATUS = 499  #: nginx's code for a client that closed its connection.


def build_app(gateway: GatewayService) -> ASGIApp:
    """Return the ASGI application of one gateway: its routes, behind the guard and CORS."""
    api = Api(gateway)
    status_routes = _StatusRoutes(gateway)
    routes = [
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/responses", api.responses, methods=["POST"]),
        Route("/v1/responses/{response_id}", api.stored_response, methods=["GET", "DELETE"]),
        Route("/v1/responses/{response_id}/cancel", api.cancel_response, methods=["POST"]),
        Route("/v1/messages", api.messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", api.count_tokens, methods=["POST"]),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/invocations", api.invocations, methods=["POST"]),
        Route("/v1/models", status_routes.models),
        Route("/v1/models/{model:path}", status_routes.model),
        Route("/health", status_routes.health),
        Route("/ping", status_routes.health, methods=["GET", "POST"]),
        Route("/version", status_routes.version),
        Route("/load", status_routes.load),
        Route("/docs", status_routes.docs),
        Route("/ready", status_routes.ready),
        Route("/metrics", status_routes.metrics),
        Route("/openapi.json", status_routes.openapi),
    ]

    async def counted_error_response(http: HttpRequest, error: ApiError) -> Response:
        # A request that ran was counted when it ended.
        if not error.counted_in_metrics:
            gateway.count_refused(error.http_status, getattr(http.state, "model", None))
        return await error_response(http, error)

    exception_handlers = {
        ApiError: counted_error_response,
        HTTPException: _http_exception_response,
        ClientDisconnect: _client_left_response,
        Exception: _internal_error_response,
    }
    browser_policy = BrowserPolicy(gateway.config.gateway)
    # Starlette's types want handlers of any Exception; each of these takes its own kind.
    app = Starlette(routes=routes, exception_handlers=exception_handlers)  # type: ignore[arg-type]
    guarded_app = RequestGuard(
        app,
        access_control=gateway.door,
        browser_policy=browser_policy,
        classes=gateway.classes,
        body_timeout_s=gateway.config.gateway.body_timeout_s,
        refuse_early=api.refuse_unparsed,
        make_error_response=counted_error_response,
    )
    return _open_to_pages(guarded_app, browser_policy)


def _open_to_pages(app: ASGIApp, browser_policy: BrowserPolicy) -> ASGIApp:
    """Return `app`, whose answers web pages may read as far as the policy lets them (CORS).

    Browsers ask before they send a key, so the question itself (`OPTIONS`) needs none. Cookies and
    the like never count: no answer is opened to a page that has no key where one is needed.
    """
    cors_arguments = browser_policy.cors_arguments()
    if cors_arguments is None:
        return app
    return CORSMiddleware(
        app,
        **cors_arguments,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        allow_credentials=False,
        expose_headers=EXPOSED_HEADERS,
        max_age=PREFLIGHT_AGE_S,
    )


class _StatusRoutes:
    """Handlers of the routes that only show what the gateway knows.

    `health` says that the process lives, `ready` that a client may come.
    """

    def __init__(self, gateway: GatewayService) -> None:
        self._gateway = gateway

    async def health(self, _: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, http: HttpRequest) -> Response:
        """Answer whether any model can be served, or the one that `?model=` names.

        No key is needed here, so a name that is not served is no error that lists those that are.
        """
        missing = self._gateway.missing(http.query_params.get("model", ""))
        if missing:
            return JSONResponse({"status": "not ready", "missing": missing}, 503)
        return JSONResponse({"status": "ready"})

    async def models(self, _: HttpRequest) -> Response:
        models = self._gateway.models.values()
        cards = [model.card(name) for model in models for name in model.names]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, http: HttpRequest) -> Response:
        name = http.path_params["model"]
        if not name:  # `/v1/models/`
            return await self.models(http)
        return JSONResponse(self._gateway.find(name).card(name))

    async def version(self, _: HttpRequest) -> Response:
        return JSONResponse({"version": version("diptych")})

    async def load(self, _: HttpRequest) -> Response:
        # Under the name that vLLM's clients read: how many requests run on this gateway.
        return JSONResponse({"server_load": self._gateway.running})

    async def docs(self, _: HttpRequest) -> Response:
        page = _docs_page_bytes(self._gateway.reading)
        return HTMLResponse(page, headers={"content-security-policy": CONTENT_SECURITY_POLICY})

    async def openapi(self, _: HttpRequest) -> Response:
        return Response(_openapi_bytes(self._gateway.reading), media_type="application/json")

    async def metrics(self, http: HttpRequest) -> Response:
        content_type, page = await self._gateway.metrics_page(http.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})


# Making the document takes about 0.1 s, in which no stream goes on, and `/docs` needs no key. So
# each process makes it once.
@functools.cache
def _openapi_bytes(reading: Reading) -> bytes:
    """Return the OpenAPI document of gateways that read bodies like this, as JSON."""
    return bytes(JSONResponse(openapi_document(reading)).body)


@functools.cache
def _docs_page_bytes(reading: Reading) -> bytes:
    """Return the page that shows people the same document."""
    return docs_page(openapi_document(reading)).encode()


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
    """Return the response that an error becomes."""
    return JSONResponse(_error_body(http, error), error.http_status, error.headers())


async def _http_exception_response(http: HttpRequest, error: HTTPException) -> Response:
    """Answer what Starlette itself refuses: paths and methods that do not exist."""
    # The table of errors has no reason for a wrong method: the response keeps Starlette's status.
    reason = "not_found" if error.status_code == 404 else "invalid_request"
    message = f"{http.method} {http.url.path}: {error.detail.lower()}"
    body = _error_body(http, ApiError(reason, message))
    return JSONResponse(body, error.status_code, error.headers)


async def _client_left_response(_: HttpRequest, __: ClientDisconnect) -> Response:
    """Return what nobody reads, as the client is gone."""
    return Response(status_code=CLIENT_LEFT_STATUS)


async def _internal_error_response(http: HttpRequest, error: Exception) -> Response:
    """Answer an error that is the gateway's own: its cause goes to the log, not to the client."""
    log.exception("request %s failed", _request_id(http), exc_info=error)
    message = "internal error; the gateway's log has it under the request id"
    return JSONResponse(_error_body(http, ApiError("internal", message)), 500)
