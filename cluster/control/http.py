"""The admin API over HTTP: the routes, who may use them, and the server.

A request passes `AdminGuard`, which checks the key. Its route in `AdminRoutes` reads the body,
calls `Operations`, and answers in JSON. Any `ApiError` becomes the error object of the OpenAI API.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from ...router.policies import POLICIES
from ..config import LOOPBACK, ControlSettings
from ..gateway.edge import sse
from ..gateway.edge.listen import HeaderLimitProtocol
from ..gateway.errors import ApiError
from ..telemetry.targets import KnownRouters, scrape_targets
from . import ray_dashboard
from .bodies import Body, decode_body
from .cluster_operations import ClusterOperations, ControlledModel
from .doctor import parse_probe_size
from .events import events
from .history import INTERVAL_S, History
from .model_orders import ModelOrders

log = logging.getLogger(__name__)

#: The live page: files that say nothing of a cluster, so they are served without a key.
WEB_FOLDER = Path(__file__).parent / "web"
BIND_TIMEOUT_S = 10.0  #: The replica before this one may still hold the port for as long.
BIND_RETRY_S = 0.2  #: Between two tries to take the port.
DECISIONS_LIMIT = 1000  #: Decisions that one request may ask for.


# ---- request bodies ------------------------------------------------------------------------------


class ScaleBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /admin/v1/pools:scale`: replicas by pool; a pool that is left out keeps its own.

    In all orders `dry_run` asks what would be done, and does nothing.
    """

    prefill: int | None = None
    decode: int | None = None
    dry_run: bool = False
    model: str = ""  #: Whose pools; empty: the only model's.


class DrainBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /admin/v1/replicas/{id}:drain`: the worker takes nothing new."""

    force: bool = False  #: Also where nobody else has the worker's role.
    hand_over: bool = False  #: What runs there goes on elsewhere at once; else it ends there.
    dry_run: bool = False


class UndrainBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /admin/v1/replicas/{id}:undrain`: a drained worker takes requests again."""

    dry_run: bool = False


class FlipBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /admin/v1/replicas/{id}:flip`: the new role."""

    to: str  #: prefill or decode
    dry_run: bool = False


class AddModelBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /admin/v1/models`: one more model, beside those that are served."""

    name: str
    config: dict[str, Any] = {}  #: Sections of cluster.yaml that are a model's own.
    dry_run: bool = False


class RemoveModelBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /admin/v1/models/{name}:remove`: no more requests for a model; then it is deleted."""

    dry_run: bool = False


class WhatIfBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /admin/v1/whatif`: what the router's last requests would have met otherwise."""

    policy: str  #: A key of `POLICIES`.
    prefill: int  #: Workers of that role.
    decode: int
    load: float = 1.0  #: Times as many requests a second as there were.


async def _read_body(request: HttpRequest, body_type: type[Body]) -> Body:
    """Decode the body, for which an empty one counts as `{}`. Raises ApiError."""
    return decode_body(await sse.read_body(request), body_type)


# ---- the application -----------------------------------------------------------------------------


def build(
    operations: ClusterOperations, model_orders: ModelOrders, metrics_address: str
) -> Starlette:
    """Return the ASGI application. `metrics_address` is "host:port" of Control's own metrics.

    While it is served, it records the cluster's history.
    """
    history = History()
    admin = AdminRoutes(operations, model_orders, metrics_address, history=history)
    # Starlette's type of a handler takes any Exception; these take their own.
    handlers: dict[Any, Any] = {
        ApiError: _answer_api_error,
        HTTPException: _answer_http_error,
        Exception: _answer_unexpected_error,
    }
    guard = AdminGuard(operations.config.control)

    @contextlib.asynccontextmanager
    async def recording(_: Starlette) -> AsyncGenerator[None, None]:
        task = asyncio.create_task(admin.record_history())
        yield
        task.cancel()

    application = Starlette(
        routes=_routes(admin),
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=guard)],
        exception_handlers=handlers,
        lifespan=recording,
    )
    application.state.history = history
    return application


def _routes(admin: AdminRoutes) -> list[BaseRoute]:
    replica = "/admin/v1/replicas/{replica:path}"
    return [
        Route("/health", admin.health),
        Route("/", _to_the_dashboard),
        Route("/dashboard", _dashboard_page),
        Mount("/dashboard", StaticFiles(directory=WEB_FOLDER)),
        Route("/metrics/targets", admin.metrics_targets),
        Route("/admin/v1/cluster", admin.cluster),
        Route("/admin/v1/pools", admin.pools),
        Route("/admin/v1/pools:scale", admin.scale, methods=["POST"]),
        Route("/admin/v1/replicas", admin.replicas),
        Route(f"{replica}:drain", admin.drain, methods=["POST"]),
        Route(f"{replica}:undrain", admin.undrain, methods=["POST"]),
        Route(f"{replica}:flip", admin.flip, methods=["POST"]),
        Route("/admin/v1/models", admin.add_model, methods=["POST"]),
        Route("/admin/v1/models/{name:path}:remove", admin.remove_model, methods=["POST"]),
        Route("/admin/v1/decisions", admin.decisions),
        Route("/admin/v1/requests/{request}/explain", admin.explain),
        Route("/admin/v1/planner", admin.planner),
        Route("/admin/v1/whatif", admin.whatif_policies),
        Route("/admin/v1/whatif", admin.whatif, methods=["POST"]),
        Route("/admin/v1/config", admin.config),
        Route("/admin/v1/doctor", admin.doctor, methods=["POST"]),
        Route("/admin/v1/events", admin.events),
        Route("/admin/v1/history", admin.history),
        *ray_dashboard.routes(),
    ]


async def _to_the_dashboard(_: HttpRequest) -> Response:
    # Relative, so that it holds behind a proxy that puts a path in front.
    return RedirectResponse("dashboard")


async def _dashboard_page(_: HttpRequest) -> Response:
    return FileResponse(
        WEB_FOLDER / "index.html",
        headers={"content-security-policy": "default-src 'self'"},
    )


class AdminGuard:
    """Decides who may use the admin API.

    With a key file, whoever sends the key may. Without one, programs on this machine may, but no
    web page that a browser shows. The file is read at each request, so a new key needs no restart.
    """

    def __init__(self, settings: ControlSettings) -> None:
        self._key_file = Path(settings.key_file) if settings.key_file else None
        self._scheme = "https" if settings.tls_cert else "http"

    async def __call__(self, request: HttpRequest, call_next: RequestResponseEndpoint) -> Response:
        """Answer a request, or refuse it. Health probes and the live page's files need no key."""
        path = request.scope["path"]  # never by the URL, into which Starlette put the Host header
        if path in ("/", "/health") or path.startswith("/dashboard"):
            return await call_next(request)
        if path in ray_dashboard.PATHS and ray_dashboard.ray_asks_for_token():
            # The command `serve` asks here, and sends Ray's token in place of our key.
            refusal = ray_dashboard.token_refusal(request.headers)
        else:
            refusal = self.refusal(request.headers)
        if refusal:
            return _error_response(refusal)
        return await call_next(request)

    def refusal(self, headers: Mapping[str, str]) -> ApiError | None:
        """Return why a request with these headers is refused, or None if it is not."""
        if self._key_file is None:
            return self._remote_refusal(headers)
        return self.key_refusal(headers.get("authorization", ""))

    def key_refusal(self, authorization: str) -> ApiError | None:
        """Return why this `Authorization` header is refused; None if it is right or none needed."""
        if self._key_file is None:
            return None
        try:
            key = self._key_file.read_bytes().strip()
        except OSError as error:
            return ApiError("internal", f"the key file cannot be read: {error.strerror}")
        scheme, _, sent_key = authorization.partition(" ")
        # Starlette decodes the bytes of a header as Latin-1.
        sent_bytes = sent_key.encode("latin-1", errors="replace")
        # In constant time: how long it takes says nothing of the key.
        keys_match = hmac.compare_digest(sent_bytes, key)
        # An empty file is no key that anybody could send.
        if key and scheme.lower() == "bearer" and keys_match:
            return None
        return ApiError("bad_key", "the admin key is missing or wrong; give it with --token")

    def _remote_refusal(self, headers: Mapping[str, str]) -> ApiError | None:
        """Return why a request comes from elsewhere than a program of this machine, if it does.

        A browser can be made to send requests here by a web page. The page's `Origin`, or the name
        in `Host` by which the page found this machine, gives it away.
        """
        host = headers.get("host", "")
        # An IPv6 address has colons of its own, and brackets around them.
        host_name = host if host.endswith("]") else host.rpartition(":")[0] or host
        # The live page at /dashboard sends this server's own origin.
        has_own_origin = headers.get("origin") in (None, f"{self._scheme}://{host}")
        if host_name.strip("[]") in LOOPBACK and has_own_origin:
            return None
        return ApiError(
            "forbidden", "without control.key_file only this machine's programs may ask"
        )


class AdminRoutes:
    """One method for each route; all of them raise ApiError.

    Where there are several models, a question about one of them names it as `?model=`; without a
    name it is about the first one.
    """

    def __init__(
        self,
        operations: ClusterOperations,
        model_orders: ModelOrders,
        metrics_address: str,
        *,
        history: History,
    ) -> None:
        self._operations = operations
        self._model_orders = model_orders
        self._metrics_address = metrics_address
        self._known_routers = KnownRouters()
        self._history = history

    async def record_history(self) -> None:
        """Add a sample to the history every `INTERVAL_S`, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                self._history.add(await self._operations.status(), time.time())
            except Exception as error:  # of a peer that is away: the next try may work
                log.warning("no sample: %s", str(error) or type(error).__name__)

    def _model_of(self, request: HttpRequest) -> ControlledModel:
        """Return the model that the request names, or the first one. Raises ApiError."""
        return self._operations.find_or_first(request.query_params.get("model", ""))

    # ---- questions -------------------------------------------------------------------------------

    async def health(self, _: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics_targets(self, _: HttpRequest) -> Response:
        """Answer Prometheus's http_sd: where each process exports its metrics."""
        names = list(self._operations.models)
        planes = [self._operations.models[name].operations.plane for name in names]
        inspections = await asyncio.gather(*(plane.inspect() for plane in planes))
        answers = [router for router, _workers in inspections]
        routers = self._known_routers.update(dict(zip(names, answers, strict=True)))
        cards = [card for plane in planes for card in plane.cards.values()]
        return JSONResponse(scrape_targets(self._metrics_address, routers, cards))

    async def cluster(self, _: HttpRequest) -> Response:
        return JSONResponse(await self._operations.status())

    async def pools(self, request: HttpRequest) -> Response:
        status = await self._model_of(request).operations.status()
        return JSONResponse(status["pools"])

    async def replicas(self, _: HttpRequest) -> Response:
        return JSONResponse({"replicas": await self._operations.workers()})

    async def planner(self, request: HttpRequest) -> Response:
        return JSONResponse(self._model_of(request).autopilot.statistics())

    async def config(self, request: HttpRequest) -> Response:
        config = self._model_of(request).operations.config
        return JSONResponse(config.model_dump(exclude={"secret"}))

    async def decisions(self, request: HttpRequest) -> Response:
        text = request.query_params.get("limit", "20")
        try:
            limit = int(text) if text.isdecimal() else 0
        except ValueError:  # Python reads no number of thousands of digits
            limit = 0
        if not 1 <= limit <= DECISIONS_LIMIT:
            message = f"limit must be between 1 and {DECISIONS_LIMIT}"
            raise ApiError("invalid_request", message, "limit")
        model = request.query_params.get("model", "")
        decisions = await self._operations.latest_decisions(limit, model)
        return JSONResponse({"decisions": decisions})

    async def explain(self, request: HttpRequest) -> Response:
        request_id = request.path_params["request"]
        decisions = await self._operations.explain(request_id)
        return JSONResponse({"request": request_id, "decisions": decisions})

    async def whatif_policies(self, request: HttpRequest) -> Response:
        """Answer which policies a what-if can simulate, and which one the cluster runs."""
        policy = self._model_of(request).operations.config.router.policy
        return JSONResponse({"policies": list(POLICIES), "policy": policy})

    async def whatif(self, request: HttpRequest) -> Response:
        body = await _read_body(request, WhatIfBody)
        result = await self._model_of(request).operations.whatif(
            policy=body.policy, prefill=body.prefill, decode=body.decode, load=body.load
        )
        return JSONResponse(result)

    async def doctor(self, request: HttpRequest) -> Response:
        """Answer in server-sent events: `{"progress": ..}` while it measures, then `{"report":..}`.

        A refusal is raised in place of the first item, before the answer begins, and so it gets a
        status of its own.
        """
        doctor = self._model_of(request).doctor
        examination = doctor.run(parse_probe_size(await sse.read_body(request)))
        first_item = await anext(examination)
        return sse.EventStream(sse.each(_doctor_events(first_item, examination)), {})

    async def history(self, request: HttpRequest) -> Response:
        """Answer the samples of the last hour; with `after`, a time, those that are later."""
        text = request.query_params.get("after", "0")
        try:
            after = float(text)
        except ValueError:
            after = math.nan
        if not math.isfinite(after):
            raise ApiError("invalid_request", f"after={text}: expected seconds", "after")
        return JSONResponse(self._history.since(after))

    async def events(self, _: HttpRequest) -> Response:
        """Answer in server-sent events (`events.py`) until the client leaves."""
        return sse.EventStream(sse.each(events(self._operations)), {})

    # ---- orders ----------------------------------------------------------------------------------

    async def scale(self, request: HttpRequest) -> Response:
        body = await _read_body(request, ScaleBody)
        counts: dict[str, int] = {}
        if body.prefill is not None:
            counts["prefill"] = body.prefill
        if body.decode is not None:
            counts["decode"] = body.decode
        result = await self._operations.scale(counts, dry_run=body.dry_run, model=body.model)
        return JSONResponse(result)

    async def add_model(self, request: HttpRequest) -> Response:
        body = await _read_body(request, AddModelBody)
        result = await self._model_orders.add(body.name, body.config, dry_run=body.dry_run)
        return JSONResponse(result)

    async def remove_model(self, request: HttpRequest) -> Response:
        body = await _read_body(request, RemoveModelBody)
        name = request.path_params["name"]
        return JSONResponse(await self._model_orders.remove(name, dry_run=body.dry_run))

    async def drain(self, request: HttpRequest) -> Response:
        body = await _read_body(request, DrainBody)
        result = await self._operations.drain(
            request.path_params["replica"],
            force=body.force,
            hand_over=body.hand_over,
            dry_run=body.dry_run,
        )
        return JSONResponse(result)

    async def undrain(self, request: HttpRequest) -> Response:
        body = await _read_body(request, UndrainBody)
        name = request.path_params["replica"]
        return JSONResponse(await self._operations.undrain(name, dry_run=body.dry_run))

    async def flip(self, request: HttpRequest) -> Response:
        body = await _read_body(request, FlipBody)
        name = request.path_params["replica"]
        return JSONResponse(await self._operations.flip(name, body.to, dry_run=body.dry_run))


async def _doctor_events(
    first_item: dict[str, Any], examination: AsyncGenerator[dict[str, Any], None]
) -> AsyncGenerator[bytes, None]:
    """Yield the doctor's items as events; closing this generator ends the examination."""
    async with contextlib.aclosing(examination):
        yield sse.event(first_item)
        async for item in examination:
            yield sse.event(item)


# ---- errors --------------------------------------------------------------------------------------


def _error_response(error: ApiError) -> Response:
    return JSONResponse(error.body(""), error.kind.http_status, error.headers())


async def _answer_api_error(_: HttpRequest, error: ApiError) -> Response:
    return _error_response(error)


async def _answer_http_error(request: HttpRequest, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail.lower()}"
    reason = "not_found" if error.status_code == 404 else "invalid_request"
    return JSONResponse(ApiError(reason, message).body(""), error.status_code, error.headers)


async def _answer_unexpected_error(request: HttpRequest, error: Exception) -> Response:
    log.exception("%s %s failed", request.method, request.url.path, exc_info=error)
    return _error_response(ApiError("internal", "internal error; Control's log has it"))


# ---- the server ----------------------------------------------------------------------------------


class UvicornWithoutSignals(uvicorn.Server):
    """A uvicorn server that leaves the process's signal handlers alone: Serve ends the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class AdminHttpServer:
    """Serves an ASGI application on this event loop."""

    def __init__(
        self, application: Callable[..., Awaitable[None]], settings: ControlSettings
    ) -> None:
        self._host = settings.host
        self._port = settings.port
        self._uvicorn = UvicornWithoutSignals(
            uvicorn.Config(
                application,
                http=HeaderLimitProtocol,
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="auto",
                timeout_graceful_shutdown=1,  # seconds: live feeds would not end by themselves
                ssl_certfile=settings.tls_cert,
                ssl_keyfile=settings.tls_key,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to serve. Raises OSError when the port is not free after `BIND_TIMEOUT_S`."""
        listener = await self._bind()
        self._task = asyncio.create_task(self._uvicorn.serve(sockets=[listener]))

    async def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        loop = asyncio.get_running_loop()
        deadline = loop.time() + BIND_TIMEOUT_S
        while True:
            listener = socket.socket(family, socket.SOCK_STREAM)
            # Else the port stays taken for a while by connections that have ended.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((self._host, self._port))
                return listener
            except OSError:
                listener.close()
                if loop.time() > deadline:
                    raise
                await asyncio.sleep(BIND_RETRY_S)

    def check(self) -> None:
        """Raises RuntimeError when the server has ended."""
        if self._task is None or self._task.done():
            raise RuntimeError("the admin server ended: see this process's log")

    async def stop(self) -> None:
        """Stop serving; open requests get one second to end."""
        self._uvicorn.should_exit = True
        if self._task:
            with contextlib.suppress(Exception):
                await self._task
