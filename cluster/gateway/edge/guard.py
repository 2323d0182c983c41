"""What stands before every HTTP route: keys, their limits, headers, and how long a body may take.

A request passes with `state.terms` set. Handlers see a body that ends in time or not at all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection

from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..attempt.terms import read_terms
from ..errors import ApiError
from .keys import Door, Key
from .sse import BODY_MAX

OPEN = {"/health", "/ready"}  #: for probes, which have no keys
HEADERS_MAX = 32 << 10  #: bytes of all names and values
ARRIVED = "diptych.arrived"  #: of a scope: when its headers were in, by the monotonic clock

Refuse = Callable[[HttpRequest, ApiError], Awaitable[Response]]


class Guard:
    """ASGI middleware. `refuse` makes the response of an error."""

    def __init__(
        self, app: ASGIApp, door: Door, classes: Collection[str], body_s: float, refuse: Refuse
    ) -> None:
        self._app, self._door, self._classes = app, door, classes
        self._body_s, self._refuse = body_s, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        now = scope.get(ARRIVED) or time.monotonic()
        try:
            key = self._check(scope, now)
            with self._door.inside(key, now):
                await self._app(scope, _timely(receive, self._body_s), send)
        except ApiError as error:
            response = await self._refuse(HttpRequest(scope), error)
            await response(scope, receive, send)

    def _check(self, scope: Scope, now: float) -> Key | None:
        headers = Headers(scope=scope)
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size > HEADERS_MAX:
            message = f"the headers have {size} bytes, the limit is {HEADERS_MAX}"
            raise ApiError("headers_too_large", message)
        key = self._door.check(headers.get("authorization"), headers.get("x-api-key"), now)
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > BODY_MAX:
            raise ApiError("too_large", f"the body is larger than {BODY_MAX >> 20} MiB")
        terms = read_terms(headers.get, key, self._classes, now)
        scope.setdefault("state", {})["terms"] = terms
        return key


def _timely(receive: Receive, limit_s: float) -> Receive:
    """`receive`, which raises ApiError when the body is not there after `limit_s`."""
    loop = asyncio.get_running_loop()
    deadline: float | None = loop.time() + limit_s

    async def timely() -> Message:
        nonlocal deadline
        if deadline is None:
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            deadline = None
            raise ApiError("slow_body", f"the body did not come in {limit_s:g} s") from None
        if not message.get("more_body", False):
            deadline = None
        return message

    return timely
