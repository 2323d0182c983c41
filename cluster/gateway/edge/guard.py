"""What every HTTP request passes before its route: its page, its key, its limits, its headers.

A request passes with its terms (key, class, targets, deadline) in `state.terms`. Its route sees a
body that ends in time, or gets an error when it reads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..attempt.terms import read_terms
from ..errors import ApiError
from .browsers import BrowserPolicy
from .keys import AccessControl, ApiKey
from .sse import BODY_MAX

log = logging.getLogger(__name__)

#: For probes, and for people with a browser: both have no keys.
UNGUARDED_PATHS = {"/health", "/ready", "/ping", "/docs"}
HEADERS_MAX = 32 << 10  #: Bytes of all names and values: far more than clients need.
#: Of an ASGI scope: when the request's headers were there, on the monotonic clock. The gateway's
#: own listener sets it; other servers do not, and the time of the first check stands in.
ARRIVED_SCOPE_KEY = "diptych.arrived"

#: Refuses a call before its route is looked for; it may receive the body. Raises ApiError.
RefuseEarly = Callable[[HttpRequest], Awaitable[None]]
MakeErrorResponse = Callable[[HttpRequest, ApiError], Awaitable[Response]]


class RequestGuard:
    """ASGI middleware around the routes of a gateway.

    `classes` are the SLO classes of the configuration, `body_timeout_s` is how long a body may
    take. `refuse_early` is asked of each request that passes. `make_error_response` gives an error
    the form of the path's API. Without a `browser_policy` any page may ask.
    """

    def __init__(
        self,
        app: ASGIApp,
        access_control: AccessControl,
        classes: Collection[str],
        body_timeout_s: float,
        refuse_early: RefuseEarly,
        make_error_response: MakeErrorResponse,
        browser_policy: BrowserPolicy | None = None,
    ) -> None:
        self._app = app
        self._access_control = access_control
        self._classes = classes
        self._body_timeout_s = body_timeout_s
        self._refuse_early = refuse_early
        self._make_error_response = make_error_response
        self._browser_policy = browser_policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})  # before it is accepted: the client gets a 403
            return
        # Other types are the server's own, as "lifespan" for its start and stop.
        if scope["type"] != "http" or scope["path"] in UNGUARDED_PATHS:
            await self._app(scope, receive, send)
            return
        arrived_s = scope.get(ARRIVED_SCOPE_KEY) or time.monotonic()
        try:
            api_key = self._check(scope, arrived_s)
            with self._access_control.admit(api_key, arrived_s):
                receive_in_time = _with_body_timeout(receive, self._body_timeout_s)
                await self._refuse_early(HttpRequest(scope, receive_in_time))
                await self._app(scope, receive_in_time, send)
        except ClientDisconnect:  # while its body was received early; nobody reads an answer
            return
        except ApiError as error:  # of a check: the app answers the errors of its routes itself
            response = await self._make_error_response(HttpRequest(scope), error)
            await response(scope, receive, send)

    def _check(self, scope: Scope, arrived_s: float) -> ApiKey | None:
        """Return the request's key and set its terms. Raises ApiError."""
        headers: dict[str, str] = {}  # each is looked up in turn, so one pass is less work
        headers_bytes = 0
        for name, value in scope["headers"]:
            headers_bytes += len(name) + len(value)
            headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
        if headers_bytes > HEADERS_MAX:
            message = f"the headers have {headers_bytes} bytes, the limit is {HEADERS_MAX}"
            raise ApiError("headers_too_large", message)
        if headers.get("upgrade", "").lower() == "websocket":
            raise ApiError("invalid_request", "no WebSockets here: use HTTP, with stream: true")
        if self._browser_policy:
            self._browser_policy.check(headers.get("host"), headers.get("origin"))
        api_key = self._access_control.authenticate(
            headers.get("authorization"), headers.get("x-api-key"), arrived_s
        )
        # A body that does not say its length is measured by its route.
        body_bytes = headers.get("content-length", "")
        if body_bytes.isdigit() and int(body_bytes) > BODY_MAX:
            raise ApiError("too_large", f"the body is larger than {BODY_MAX >> 20} MiB")
        terms = read_terms(headers.get, api_key, self._classes, arrived_s)
        scope.setdefault("state", {})["terms"] = terms
        return api_key


def _with_body_timeout(receive: Receive, timeout_s: float) -> Receive:
    """Return `receive`, which raises ApiError when the body is not complete after `timeout_s`.

    It raises `no_capacity` if `receive` itself fails: Serve's does when its proxy is lost.

    Once the body is complete, what comes (that the client left) may take any time. The error
    comes once; what is received after it has no limit.
    """
    loop = asyncio.get_running_loop()
    body_deadline_s: float | None = loop.time() + timeout_s

    async def receive_in_time() -> Message:
        nonlocal body_deadline_s
        if body_deadline_s is None:
            return await receive()
        try:
            async with asyncio.timeout_at(body_deadline_s):
                message = await receive()
        except TimeoutError:
            body_deadline_s = None
            raise ApiError("slow_body", f"the body did not come in {timeout_s:g} s") from None
        except Exception as error:  # of Ray's, where a proxy of Serve's brings the body
            body_deadline_s = None
            log.warning("the proxy was lost while a body came: %s", error)
            raise ApiError("no_capacity", "the proxy was lost while the body came") from None
        if not message.get("more_body"):
            body_deadline_s = None
        return message

    return receive_in_time
