"""Server-sent events as raw ASGI messages, and bodies of requests as they are read.

Life of a streamed response:
    1. Its task runs, and nothing is sent. An exception becomes the response: a status of HTTP.
    2. The task has written its first events. The head is sent, and the body is opened.
    3. Events go to the server at once, without a task, while it takes them. If the server has to
       wait for the client, the rest is kept, and the writer's task waits (`ResponseBody.drain`).
    4. The task ends, or the client leaves; then the task is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..attempt.held_bytes import CutReason, ReaderCutOff
from ..errors import ApiError

log = logging.getLogger(__name__)
Result = TypeVar("Result")

BODY_MAX = 8 << 20  #: Bytes of a request's body: about two million tokens of text.
STALL_S = 20.0  #: a client that takes nothing for so long, with its buffers full, is dropped
ABORT = "diptych.abort"  #: in the scope: closes the connection at once, with what is unsent
RAW_SEND = "diptych.send"  #: in the scope: the server's own `send`, without what wraps it
#: In the scope: returns how many bytes the process holds because the client does not take them.
UNSENT_BYTES = "diptych.unsent_bytes"
encode = msgspec.json.Encoder().encode  #: The JSON bytes of a value; one encoder serves all.


def event(data: dict[str, Any], name: str = "") -> bytes:
    """Returns the bytes of one event; `name` is its type, and empty for an event without one."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + encode(data) + b"\n\n"


def with_event_id(events: bytes, event_id: str) -> bytes:
    """Returns the bytes of these events, the last of which gets this id."""
    # An event ends with an empty line: the id's line takes its place, and another one follows.
    return events[:-1] + b"id: " + event_id.encode() + b"\n\n"


async def read_body(http: HttpRequest) -> bytes:
    """Returns the whole body. Raises ApiError if it is larger than `BODY_MAX`."""
    parts = []
    size = 0
    async for part in http.stream():
        size += len(part)
        if size > BODY_MAX:
            raise ApiError("too_large", f"the body is larger than {BODY_MAX >> 20} MiB")
        parts.append(part)
    return b"".join(parts)


class Stalled(ReaderCutOff):
    """The client has taken nothing for `STALL_S`, so it is cut off."""

    def __init__(self) -> None:
        super().__init__(CutReason.READER_STALLED, f"the client took nothing for {STALL_S:g} s")


async def wait_for_reader(
    waiting: Awaitable[None], unsent_bytes: Callable[[], int] | None = None
) -> None:
    """Waits for what ends when the client takes enough. Raises Stalled, and cancels `waiting`.

    That happens if the client takes nothing for `STALL_S`: `unsent_bytes` says what it has not
    taken yet. Without that count a client that takes too little counts as one that takes nothing.
    """
    loop = asyncio.get_running_loop()
    unsent_bytes_before = unsent_bytes() if unsent_bytes else 0
    timeout = asyncio.timeout(None)
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal unsent_bytes_before, timer
        unsent_bytes_now = unsent_bytes() if unsent_bytes else 0
        if unsent_bytes_now >= unsent_bytes_before:
            timeout.reschedule(loop.time())
            return
        unsent_bytes_before = unsent_bytes_now
        timer = loop.call_later(STALL_S, look)

    timer = loop.call_later(STALL_S, look)
    try:
        async with timeout:
            await waiting
    except TimeoutError:
        raise Stalled from None
    finally:
        timer.cancel()


class ResponseBody:
    """What follows the head of a response. It may be written before the head is sent."""

    def __init__(self) -> None:
        self._send: Send | None = None  #: The server's `send`, once the head is out.
        #: Returns what the client has not taken; None if the server does not say.
        self._unsent_bytes: Callable[[], int] | None = None
        self._opened = asyncio.Event()  #: The head is out.
        #: Is done once something was written, so that the head can be sent.
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: True while the server has taken all that was written; False before the head is out.
        self._ready = False
        self._unsent = b""  #: What was written while the server was not ready.
        self._sending: _StartedCoroutine | None = None  #: A `send` that waits for the client.
        self._drain_lock = asyncio.Lock()  #: Of the tasks that wait, one goes on with `_sending`.
        self._stalled = False  #: The client has taken nothing for `STALL_S`.
        self._ended = False  #: The response's last bytes were given to the server.

    @property
    def held_bytes(self) -> int:
        """What was written while the server was not ready."""
        return len(self._unsent)

    def open(self, send: Send, unsent_bytes: Callable[[], int] | None = None) -> None:
        """Sends what was written so far. Call it when the head of the response is out.

        `unsent_bytes` says how much the client has not taken of what the server has.
        """
        self._send = send
        self._unsent_bytes = unsent_bytes
        self._ready = True
        self._flush()
        self._opened.set()

    def write_now(self, data: bytes) -> bool:
        """Writes without waiting, also from callbacks. False: call `drain` before the next write.

        The server's `send` is started without a task. If it ends at once, the data is in the
        socket's buffer; if not, it waits for the client, and `drain` goes on with it.
        """
        if self._send is None or not self._ready:
            self._unsent += data
            self.begin()
            return False
        return self._start_sending(data)

    def _start_sending(self, data: bytes, *, is_last: bool = False) -> bool:
        """Start the server's `send`, as `write_now` says. The server must be ready."""
        assert self._send is not None
        message = {"type": "http.response.body", "body": data, "more_body": not is_last}
        coroutine = self._send(message)
        try:
            future = coroutine.send(None)  # type: ignore[attr-defined]
        except StopIteration:
            return True
        self._sending = _StartedCoroutine(coroutine, future)
        self._ready = False
        return False

    def begin(self) -> None:
        """Lets the head of the response be sent."""
        if not self.begun.done():
            self.begun.set_result(None)

    async def write(self, data: bytes) -> None:
        """Writes, and waits until the server has taken it. Raises Stalled."""
        await self.drain()
        self.write_now(data)
        await self.drain()

    async def drain(self) -> None:
        """Waits until the server has taken all that was written.

        Several tasks may wait. Raises Stalled when the client takes nothing for `STALL_S`.
        """
        if self._ready or not self.begun.done():
            return
        await self._opened.wait()
        async with self._drain_lock:
            while not self._ready:
                await self._finish_sending()
                self._flush()

    async def _finish_sending(self) -> None:
        """Waits for the `send` under way. Raises Stalled, to all who wait."""
        if self._stalled:
            raise Stalled
        assert self._sending is not None
        try:
            await wait_for_reader(self._sending, self._unsent_bytes)
        except Stalled:
            self._stalled = True
            raise
        self._sending = None
        self._ready = True

    def _flush(self) -> None:
        """Writes what is kept.

        The first write is made even if it is empty, as a server may hold the head back until then.
        """
        first_write = not self._opened.is_set()
        if self._unsent or first_write:
            data = self._unsent
            self._unsent = b""
            self.write_now(data)

    async def end(self, last: bytes = b"") -> None:
        """Ends the response with the bytes `last`, which leave together with its end.

        The head is sent first if nothing was written. A second call does nothing. Raises Stalled.
        """
        if self._ended:
            return
        self._ended = True
        self.begin()
        await self.drain()
        self._start_sending(last, is_last=True)
        await self.drain()

    def close(self) -> None:
        """Gives up what the server has not taken. Nobody may wait in `drain` any more."""
        if self._sending is not None:
            self._sending.coroutine.close()


@dataclass(slots=True)
class _StartedCoroutine:
    """A coroutine that was started outside any task, and the future that it waits for.

    Awaiting it goes on with the coroutine where it stopped.
    """

    coroutine: Any
    future: Any  #: What the coroutine has yielded last, as it would to its task.

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            while True:
                try:
                    value = yield self.future
                except BaseException as error:  # a cancelled task: the coroutine has to know
                    self.future = self.coroutine.throw(error)
                else:
                    self.future = self.coroutine.send(value)
        except StopIteration:
            return


class EventStream(Response):
    """A response of server-sent events that `write_events` writes into the body it is given.

    That task is cancelled when the client leaves. Calling the response raises ClientDisconnect, and
    what `write_events` raises, while the head is not sent; a later error is only logged. `headers`
    are what `late_headers` returns unless a subclass knows better.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        write_events: Callable[[ResponseBody], Coroutine[Any, Any, None]],
        headers: dict[str, str],
    ) -> None:
        super().__init__()
        self._write_events = write_events
        self._own_headers = headers

    def late_headers(self) -> dict[str, str]:
        """Returns the headers, as they are known once the first events are written."""
        return self._own_headers

    def on_opened(self) -> None:
        """Is called once, when the head and the first events are sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = ResponseBody()
        writing = asyncio.ensure_future(self._write(body))
        leaving = asyncio.ensure_future(_disconnected(receive))
        head_sent = False
        try:
            await asyncio.wait({writing, leaving, body.begun}, return_when=asyncio.FIRST_COMPLETED)
            if not body.begun.done():
                if writing.done():
                    await writing  # raises: it cannot end before it has begun
                raise ClientDisconnect

            self.init_headers({**self.late_headers(), "cache-control": "no-cache"})
            # Starlette takes the body for empty, as it knows of no content.
            del self.headers["content-length"]
            head_sent = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            body.open(scope.get(RAW_SEND, send), scope.get(UNSENT_BYTES))
            self.on_opened()
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._write_events  # it may be a method of this very object: a circle
            leaving.cancel()
            writing.cancel()
            failure, _ = await asyncio.gather(writing, leaving, return_exceptions=True)
            if isinstance(failure, ReaderCutOff):
                log.warning("a client was cut off: %s", failure)
                abort = scope.get(ABORT)
                if abort is not None:
                    abort()
            elif isinstance(failure, Exception) and head_sent:
                log.error("a stream broke off", exc_info=failure)
            body.close()

    async def _write(self, body: ResponseBody) -> None:
        """Writes all events, and ends the response if the writer has not."""
        await self._write_events(body)
        await body.end()


def each(
    events: AsyncGenerator[bytes, None],
) -> Callable[[ResponseBody], Coroutine[Any, Any, None]]:
    """Returns a writer of the events that a generator makes, for `EventStream`.

    The head is sent before the first event.
    """

    async def write_events(body: ResponseBody) -> None:
        body.begin()
        async with aclosing(events):
            async for event in events:
                await body.write(event)

    return write_events


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of `work`, which is cancelled when the client leaves.

    The request's body must have been read. Raises ClientDisconnect, and what `work` raises.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return await working
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    """Waits until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
