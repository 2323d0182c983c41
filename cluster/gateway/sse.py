"""Server-sent events as raw ASGI messages, and bodies as they are read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ApiError

log = logging.getLogger(__name__)

BODY_MAX = 8 << 20
encode = msgspec.json.Encoder().encode


def event(data: dict, name: str = "") -> bytes:
    """One event; `name` is its type."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + encode(data) + b"\n\n"


async def read_body(http: HttpRequest) -> bytes:
    """The whole body. Raises ApiError if it is larger than `BODY_MAX`."""
    parts, size = [], 0
    async for part in http.stream():
        size += len(part)
        if size > BODY_MAX:
            raise ApiError("too_large", f"the body is larger than {BODY_MAX >> 20} MiB")
        parts.append(part)
    return b"".join(parts)


class EventStream(Response):
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
