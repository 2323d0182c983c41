"""The admin API: routes over a `Control`, who may use them, and the server."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ...router.policies import POLICIES
from ..config import LOOPBACK, ControlSettings
from ..gateway.edge import sse
from ..gateway.errors import ApiError
from . import ray_dashboard
from .doctor import parse_size
from .events import events

if TYPE_CHECKING:
    from .control import Control

log = logging.getLogger(__name__)

WEB = Path(__file__).parent / "web"  #: the live page: files that say nothing of this cluster
BIND_S = 10.0  #: a replica before this one may still have the port


class Scale(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prefill: int | None = None
    decode: int | None = None
    dry_run: bool = False


class Drain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    force: bool = False
    hand_over: bool = False
    dry_run: bool = False


class Undrain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dry_run: bool = False


class Flip(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    to: str
    dry_run: bool = False


class WhatIf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    policy: str
    prefill: int
    decode: int
    load: float = 1.0


Body = TypeVar("Body", bound=msgspec.Struct)


def build(control: Control) -> Starlette:
    face = _Face(control)
    replica = "/admin/v1/replicas/{replica:path}"
    routes = [
        Route("/health", face.health),
        Route("/dashboard", _page),
        Mount("/dashboard", StaticFiles(directory=WEB)),
        Route("/metrics/targets", face.targets),
        Route("/admin/v1/cluster", face.cluster),
        Route("/admin/v1/pools", face.pools),
        Route("/admin/v1/pools:scale", face.scale, methods=["POST"]),
        Route("/admin/v1/replicas", face.replicas),
        Route(f"{replica}:drain", face.drain, methods=["POST"]),
        Route(f"{replica}:undrain", face.undrain, methods=["POST"]),
        Route(f"{replica}:flip", face.flip, methods=["POST"]),
        Route("/admin/v1/decisions", face.decisions),
        Route("/admin/v1/requests/{request}/explain", face.explain),
        Route("/admin/v1/planner", face.planner),
        Route("/admin/v1/whatif", face.policies),
        Route("/admin/v1/whatif", face.whatif, methods=["POST"]),
        Route("/admin/v1/config", face.config),
        Route("/admin/v1/doctor", face.doctor, methods=["POST"]),
        Route("/admin/v1/events", face.events),
        *ray_dashboard.routes(),
    ]
    handlers = {ApiError: _api_error, HTTPException: _http_error, Exception: _internal}
    guard = Middleware(BaseHTTPMiddleware, dispatch=Guard(control.config.control))
    return Starlette(
        routes=routes,
        middleware=[guard],
        exception_handlers=handlers,  # type: ignore[arg-type]
    )


class Guard:
    """Who may ask: whoever has the key. Without one, programs of this machine, but no web page.

    The key file is read at each request: a new key needs no restart.
    """

    def __init__(self, settings: ControlSettings) -> None:
        self._file = Path(settings.key_file) if settings.key_file else None

    async def __call__(self, http: HttpRequest, go_on: RequestResponseEndpoint) -> Response:
        path = http.url.path
        if path == "/health" or path.startswith("/dashboard"):
            return await go_on(http)
        if path in ray_dashboard.PATHS and ray_dashboard.ray_asks_for_token():
            refusal = ray_dashboard.token_refusal(http.headers)
        else:
            refusal = self.refusal(http.headers)
        return _error(refusal) if refusal else await go_on(http)

    def refusal(self, headers: Any) -> ApiError | None:
        if self._file is None:
            return self._stranger(headers)
        return self.wrong_key(headers.get("authorization", ""))

    def wrong_key(self, authorization: str) -> ApiError | None:
        if self._file is None:
            return None
        try:
            key = self._file.read_text().strip()
        except OSError as error:
            return ApiError("internal", f"the key file cannot be read: {error.strerror}")
        kind, _, given = authorization.partition(" ")
        right = kind.lower() == "bearer" and hmac.compare_digest(given.encode(), key.encode())
        if key and right:
            return None
        return ApiError("bad_key", "the admin key is missing or wrong; give it with --token")

    def _stranger(self, headers: Any) -> ApiError | None:
        """A page that a browser shows may send requests here; its origin, or the name by which it
        found this machine, tells."""
        host = headers.get("host", "")
        name = host.rpartition(":")[0] or host
        own = headers.get("origin") in (None, f"http://{host}")  #: the live page's requests
        if name.strip("[]") in LOOPBACK and own:
            return None
        return ApiError(
            "forbidden", "without control.key_file only this machine's programs may ask"
        )


async def _page(_: HttpRequest) -> Response:
    policy = {"content-security-policy": "default-src 'self'"}
    return FileResponse(WEB / "index.html", headers=policy)


class _Face:
    def __init__(self, control: Control) -> None:
        self.control = control

    async def health(self, _: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def targets(self, _: HttpRequest) -> Response:
        return JSONResponse(await self.control.targets())

    async def cluster(self, _: HttpRequest) -> Response:
        return JSONResponse(await self.control.status())

    async def pools(self, _: HttpRequest) -> Response:
        return JSONResponse((await self.control.status())["pools"])

    async def replicas(self, _: HttpRequest) -> Response:
        return JSONResponse({"replicas": await self.control.workers()})

    async def planner(self, http: HttpRequest) -> Response:
        return JSONResponse(self.control.autopilot.statistics())

    async def config(self, _: HttpRequest) -> Response:
        return JSONResponse(self.control.config.model_dump(exclude={"secret"}))

    async def decisions(self, http: HttpRequest) -> Response:
        text = http.query_params.get("limit", "20")
        if not text.isdecimal() or not 1 <= int(text) <= 1000:
            raise ApiError("invalid_request", "limit must be between 1 and 1000", "limit")
        decisions = await self.control.plane.latest(int(text))
        if decisions is None:
            raise ApiError("no_capacity", "no router answers")
        return JSONResponse({"decisions": decisions})

    async def explain(self, http: HttpRequest) -> Response:
        request = http.path_params["request"]
        decisions = await self.control.explain(request)
        return JSONResponse({"request": request, "decisions": decisions})

    async def policies(self, _: HttpRequest) -> Response:
        """What a what-if can be asked of."""
        return JSONResponse(
            {"policies": list(POLICIES), "policy": self.control.config.router.policy}
        )

    async def whatif(self, http: HttpRequest) -> Response:
        asked = await _body(http, WhatIf)
        return JSONResponse(await self.control.whatif(**msgspec.structs.asdict(asked)))

    async def scale(self, http: HttpRequest) -> Response:
        body = await _body(http, Scale)
        asked = {"prefill": body.prefill, "decode": body.decode}
        counts = {pool: count for pool, count in asked.items() if count is not None}
        return JSONResponse(await self.control.scale(counts, body.dry_run))

    async def drain(self, http: HttpRequest) -> Response:
        body, name = await _body(http, Drain), http.path_params["replica"]
        order = self.control.drain(name, body.force, body.hand_over, body.dry_run)
        return JSONResponse(await order)

    async def undrain(self, http: HttpRequest) -> Response:
        body = await _body(http, Undrain)
        order = self.control.undrain(http.path_params["replica"], body.dry_run)
        return JSONResponse(await order)

    async def flip(self, http: HttpRequest) -> Response:
        body = await _body(http, Flip)
        order = self.control.flip(http.path_params["replica"], body.to, body.dry_run)
        return JSONResponse(await order)

    async def doctor(self, http: HttpRequest) -> Response:
        """Server-sent events: `{"progress": ..}` while it measures, at last `{"report": ..}`."""
        found = self.control.doctor.run(parse_size(await sse.read_body(http)))
        first = await anext(found)  # refusals get their own status
        return sse.EventStream(sse.each(_told(first, found)), {})

    async def events(self, _: HttpRequest) -> Response:
        """Server-sent events `cluster`, `decision` and `action`, until the client leaves."""
        return sse.EventStream(sse.each(events(self.control)), {})


async def _told(first: dict, found: AsyncGenerator[dict, None]) -> AsyncGenerator[bytes, None]:
    try:
        yield sse.event(first)
        async for event in found:
            yield sse.event(event)
    finally:
        await found.aclose()


async def _body(http: HttpRequest, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(await sse.read_body(http) or b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise ApiError("invalid_request", f"the body: {error}") from None


def _error(error: ApiError) -> Response:
    return JSONResponse(error.body(""), error.kind.http_status, error.headers())


async def _api_error(_: HttpRequest, error: ApiError) -> Response:
    return _error(error)


async def _http_error(http: HttpRequest, error: HTTPException) -> Response:
    message = f"{http.method} {http.url.path}: {error.detail.lower()}"
    reason = "not_found" if error.status_code == 404 else "invalid_request"
    return JSONResponse(ApiError(reason, message).body(""), error.status_code, error.headers)


async def _internal(http: HttpRequest, error: Exception) -> Response:
    log.exception("%s %s failed", http.method, http.url.path, exc_info=error)
    return _error(ApiError("internal", "internal error; Control's log has it"))


# ---- the server ----------------------------------------------------------------------------------


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Serve ends this process, not a signal."""
        yield


class Server:
    """Serves an ASGI application on this event loop."""

    def __init__(self, app: Callable[..., Awaitable[None]], settings: ControlSettings) -> None:
        self._host, self._port = settings.host, settings.port
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
        )
        self._uvicorn = _Uvicorn(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises OSError when the port does not become free."""
        listener = await self._bind()
        self._task = asyncio.create_task(self._uvicorn.serve(sockets=[listener]))

    async def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        limit = asyncio.get_running_loop().time() + BIND_S
        while True:
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((self._host, self._port))
                return listener
            except OSError:
                listener.close()
                if asyncio.get_running_loop().time() > limit:
                    raise
                await asyncio.sleep(0.2)

    def check(self) -> None:
        """Raises RuntimeError when it serves no more."""
        if self._task is None or self._task.done():
            raise RuntimeError("the admin server ended: see this process's log")

    async def stop(self) -> None:
        self._uvicorn.should_exit = True
        if self._task:
            with contextlib.suppress(Exception):
                await self._task
