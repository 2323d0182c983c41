"""Server-sent events as raw ASGI messages, and bodies as they are read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import ApiError

log = logging.getLogger(__name__)
T = TypeVar("T")

BODY_MAX = 8 << 20
STALL_S = 20.0  #: a client that takes nothing for so long, with its buffers full, is dropped
RAW_SEND = "diptych.send"  #: in the scope: the server's own `send`, without what wraps it
encode = msgspec.json.Encoder().encode


def event(data: dict, name: str = "") -> bytes:
    """One event; `name` is its type."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + encode(data) + b"\n\n"


def marked(events: bytes, name: str) -> bytes:
    """The last of the events gets this id."""
    return events[:-1] + b"id: " + name.encode() + b"\n\n"


async def read_body(http: HttpRequest) -> bytes:
    """The whole body. Raises ApiError if it is larger than `BODY_MAX`."""
    parts, size = [], 0
    async for part in http.stream():
        size += len(part)
        if size > BODY_MAX:
            raise ApiError("too_large", f"the body is larger than {BODY_MAX >> 20} MiB")
        parts.append(part)
    return b"".join(parts)


class Body:
    """What follows the head of a response. Raises Stalled when the client takes nothing."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._rest: _Rest | None = None

    @property
    def ready(self) -> bool:
        """The client has taken what was written, or the server holds it."""
        return self._rest is None

    def write_now(self, data: bytes) -> None:
        """Without waiting; only when `ready`. What the server does not take yet is kept."""
        message = {"type": "http.response.body", "body": data, "more_body": True}
        sending = self._send(message)
        try:
            waits_for = sending.send(None)  # type: ignore[attr-defined]
        except StopIteration:
            return
        self._rest = _Rest(sending, waits_for)

    async def write(self, data: bytes) -> None:
        await self.drain()
        self.write_now(data)
        await self.drain()

    async def drain(self) -> None:
        if self._rest is not None:
            try:
                async with asyncio.timeout(STALL_S):
                    await self._rest
            except TimeoutError:
                raise Stalled(f"the client took nothing for {STALL_S:g} s") from None
            self._rest = None

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def close(self) -> None:
        """Gives up what was not taken."""
        if self._rest is not None:
            self._rest.sending.close()


class Stalled(Exception):
    """A client does not read."""


@dataclass(slots=True)
class _Rest:
    """A coroutine that has begun outside any task, and the future that it waits for."""

    sending: Any
    waits_for: Any

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            while True:
                try:
                    said = yield self.waits_for
                except BaseException as error:  # cancelled: that is for the coroutine to know
                    self.waits_for = self.sending.throw(error)
                else:
                    self.waits_for = self.sending.send(said)
        except StopIteration:
            return


class EventStream(Response):
    """Server-sent events that `tell` writes; it is cancelled when the client leaves."""

    def __init__(
        self, tell: Callable[[Body], Coroutine[Any, Any, None]], headers: dict[str, str]
    ) -> None:
        super().__init__(None, 200, {**headers, "cache-control": "no-cache"}, "text/event-stream")
        del self.headers["content-length"]
        self._tell = tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        body = Body(scope.get(RAW_SEND, send))
        telling = asyncio.ensure_future(self._write(body))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({telling, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            telling.cancel()
            failed, _ = await asyncio.gather(telling, gone, return_exceptions=True)
            if isinstance(failed, Stalled):
                log.warning("a client was dropped: %s", failed)
            elif isinstance(failed, Exception):
                log.error("a stream broke off", exc_info=failed)
            body.close()

    async def _write(self, body: Body) -> None:
        await self._tell(body)
        await body.end()


def each(events: AsyncGenerator[bytes, None]) -> Callable[[Body], Coroutine[Any, Any, None]]:
    """Writes what comes."""

    async def tell(body: Body) -> None:
        async with aclosing(events):
            async for event in events:
                await body.write(event)

    return tell


async def while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Its result; cancelled when the client leaves. The request's body must have been read.

    Raises ClientDisconnect, and what `work` raises.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return await working
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
