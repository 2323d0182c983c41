"""HTTP on the gateway's own socket: ids, headers that never end, two gateways on one port."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import re
import resource
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvloop
from diptych.cluster.cli.serve import welcome
from diptych.cluster.config import ClusterConfig, ConfigError, GatewaySettings, load_config
from diptych.cluster.gateway.attempt.held_bytes import CutReason
from diptych.cluster.gateway.edge import listen, sse
from diptych.cluster.gateway.edge.guard import ARRIVED_SCOPE_KEY
from diptych.cluster.gateway.edge.sse import STALL_S
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.launch.local_cluster import LocalCluster
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.support.certificate import certify
from tests.support.fleet import until
from tests.support.live import free_port


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Says the request's id and the size of its body."""
    request = Request(scope, receive)
    told = {
        "id": request.headers["x-request-id"],
        "in": 0 <= time.monotonic() - scope[ARRIVED_SCOPE_KEY] < 30,
    }
    told["size"] = len(await request.body())
    await JSONResponse(told)(scope, receive, send)


def run(
    test: Callable[[int], Awaitable[None]],
    app: ASGIApp = app,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    **settings: Any,
) -> None:
    async def bounded() -> None:
        gateway_settings = GatewaySettings(http_port=free_port(), **settings)
        listener = listen.HttpListener(app, gateway_settings)
        async with asyncio.timeout(30):
            await listener.start()
            await test(gateway_settings.http_port)
            await listener.stop(1.0)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(bounded())


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    """Connections of an event loop that has ended would count as open for ever."""
    yield
    listen.HeaderLimitProtocol.open_connections.clear()
    listen.HeaderLimitProtocol.resting.clear()


async def until_closed(port: int, parts: list[bytes]) -> bytes:
    """Sends, then waits for the other end to hang up; what it said."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    said = b""
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        while part := await reader.read(4096):
            said += part
    except ConnectionError:
        pass
    writer.transport.abort()
    return said


def test_a_request_has_an_id_and_its_answer_says_it() -> None:
    async def test(port: int) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            mine = await client.post("/", headers={"x-request-id": "mine"}, content=b"12345")
            assert (mine.headers["x-request-id"], mine.json()) == (
                "mine",
                {"id": "mine", "size": 5, "in": True},
            )
            others = [(await client.post("/")) for _ in range(2)]
            ids = [other.json()["id"] for other in others]
            assert ids == [other.headers["x-request-id"] for other in others]
            assert len({*ids, "mine"}) == 3
            assert all(re.fullmatch("[0-9a-f]{32}", id) for id in ids), "as long as vLLM's"

    run(test)


def test_an_empty_id_is_none() -> None:
    async def test(port: int) -> None:
        request = b"GET / HTTP/1.1\r\nhost: g\r\nx-request-id:\r\n\r\n"
        said = await said_to(port, request, b'"size":0}')
        (request_id,) = re.findall(rb"x-request-id: ([0-9a-f]{32})\r\n", said)
        assert b'"id":"%s"' % request_id in said, "what the request is told is its response's"

    run(test)


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b"GET / HT"],
        [b"GET / HTTP/1.1\r\nhost: g\r\n", b"x-a: "],
        [b"GET / HTTP/1.1\r\nhost: g\r\n\r\n", b"GET / HTTP/1.1\r\n"],  # a second one
    ],
)
def test_who_does_not_end_its_headers_is_cut_off(
    parts: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "HEADERS_TIMEOUT_S", 0.2)

    async def test(port: int) -> None:
        said = await until_closed(port, parts)
        assert said.count(b"200 OK") == int(len(parts) > 1 and b"\r\n\r\n" in parts[0])

    run(test)


def test_headers_without_end_are_cut_off_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "HEADERS_TIMEOUT_S", 3600.0)

    async def test(port: int) -> None:
        endless = [b"GET / HTTP/1.1\r\nhost: g\r\nx-a: "] + [b"a" * 65536] * 100
        assert b"200 OK" not in await until_closed(port, endless)

    run(test)


def test_the_time_of_headers_bounds_neither_a_body_nor_an_idle_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listen, "HEADERS_TIMEOUT_S", 0.1)

    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(b"POST / HTTP/1.1\r\nhost: g\r\ncontent-length: 4\r\n\r\n12")
            await asyncio.sleep(0.3)
            writer.write(b"34")
            assert b"200 OK" in await reader.readuntil(b'"size":4}')
            await asyncio.sleep(0.3)
        writer.transport.abort()

    run(test)


LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


class Refusing:
    """Refuses all requests, as the guard does without a key, and keeps the headers."""

    def __init__(self) -> None:
        self.headers: list[list[tuple[bytes, bytes]]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers.append(scope["headers"])
        await JSONResponse({"error": "no key"}, 401)(scope, receive, send)


CHUNKED = b"POST / HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("refusing", [True, False], ids=["refused", "its body is awaited"])
@pytest.mark.parametrize(
    ("begin", "part"),
    [
        (b"0\r\n", b"x: y\r\n"),
        (b"0\r\nx: ", b"y"),
        (b"0\r\n", b"x"),
        (b"4;", b"x"),
        (b"4\r\n1234\r\n0\r\n", b"x: y\r\n"),
    ],
    ids=["trailers", "a trailer's value", "a trailer's name", "a chunk's head", "behind a chunk"],
)
def test_what_stands_behind_the_headers_without_end_is_cut_off_by_its_size(
    begin: bytes, part: bytes, refusing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "HEADERS_TIMEOUT_S", 3600.0)
    refusing_app = Refusing()

    async def test(port: int) -> None:
        endless = [CHUNKED, begin] + [part * (65536 // len(part))] * 100
        said = await until_closed(port, endless)
        assert b"200 OK" not in said
        for headers in refusing_app.headers:
            assert len(headers) == 3, "host, transfer-encoding, and the id that it got"

    run(test, refusing_app if refusing else app)


def test_trailers_are_no_headers_and_a_few_of_them_are_no_fault() -> None:
    seen: list[list[bytes]] = []

    async def naming(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, send)
        seen.append([name for name, _ in scope["headers"]])

    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for body in (b"2\r\n12\r\n0\r\n", b"0\r\n"):
            size = b'"size":%d}' % (2 if b"12" in body else 0)
            writer.write(
                CHUNKED + body + b"authorization: Bearer k\r\nexpect: 100-continue\r\n\r\n"
            )
            said = await reader.readuntil(size)
            assert said.startswith(b"HTTP/1.1 200 OK")
        writer.write(b"GET / HTTP/1.1\r\nhost: g\r\nx-a: b\r\n\r\n")
        assert b"200 OK" in await reader.readuntil(b'"size":0}')
        writer.transport.abort()

    run(test, naming)
    chunked = [b"host", b"transfer-encoding", b"x-request-id"]
    assert seen == [chunked, chunked, [b"host", b"x-a", b"x-request-id"]]


@pytest.mark.parametrize("body", [b"", b"4\r\n12", b"0\r\nx: y\r\n"])
def test_who_is_answered_and_does_not_end_its_body_is_cut_off(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "REST_OF_BODY_S", 0.3)

    async def test(port: int) -> None:
        begun = time.monotonic()
        assert b"401" in await until_closed(port, [CHUNKED, body])
        assert 0.25 < time.monotonic() - begun < 10

    run(test, Refusing())


def test_who_dribbles_the_body_of_an_answered_request_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listen, "REST_OF_BODY_S", 0.3)

    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CHUNKED)
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"1\r\nx\r\n")
                await writer.drain()
                await asyncio.sleep(0.02)
                if reader.exception():
                    break
        writer.transport.abort()

    run(test, Refusing())


def test_a_client_may_send_a_whole_body_before_it_reads_the_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then its connection rests as others do."""
    monkeypatch.setattr(listen, "REST_OF_BODY_S", 0.8)
    monkeypatch.setattr(listen, "KEEP_ALIVE_S", 1.5)

    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        size = 4 << 20
        for _ in range(2):
            writer.write(b"POST / HTTP/1.1\r\nhost: g\r\ncontent-length: %d\r\n\r\n" % size)
            await asyncio.sleep(0.1)
            writer.write(b"x" * size)
            await writer.drain()
            assert b"401" in await reader.readuntil(b"no key")
            await asyncio.sleep(0.9)
        begun = time.monotonic()
        await reader.read()
        assert time.monotonic() - begun < 10
        writer.transport.abort()

    run(test, Refusing())


@pytest.mark.parametrize("queued", [0, 1, 2])
def test_half_a_request_does_not_end_the_answer_to_the_one_before(
    queued: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time begins once nothing runs on the connection."""
    monkeypatch.setattr(listen, "HEADERS_TIMEOUT_S", 0.3)
    request = b"GET / HTTP/1.1\r\nhost: g\r\n\r\n"

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.5)
        await app(scope, receive, send)

    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        await asyncio.sleep(0.1)
        writer.write(request * queued + b"GET / HTTP/1.1\r\nhos")
        for _ in range(1 + queued):
            assert b"200 OK" in await reader.readuntil(b'"size":0}')
        writer.write(b"t: g\r\n\r\n")
        assert b"200 OK" in await reader.readuntil(b'"size":0}')
        writer.write(request + b"GET / HT")
        assert b"200 OK" in await reader.readuntil(b'"size":0}')
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b"", "half a request with nothing before it"
        writer.transport.abort()

    run(test, slow)


@pytest.mark.parametrize("reason", ["too_large", "unsupported_media_type"])
def test_a_client_that_sends_its_whole_body_first_reads_why_it_was_refused(reason: str) -> None:
    """http.client does so, and most of its users; its connection then serves the next request."""

    async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
        error = ApiError(reason, "no")
        await JSONResponse(error.body("r"), error.http_status, error.headers())(
            scope, receive, send
        )

    def post_twice(port: int) -> list[int]:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        client.connect()
        first_socket = client.sock
        statuses = []
        for _ in range(2):
            client.request("POST", "/", body=b"x" * (9 << 20))
            response = client.getresponse()
            response.read()
            statuses.append(response.status)
        assert client.sock is first_socket
        client.close()
        return statuses

    async def test(port: int) -> None:
        status = ApiError(reason, "no").http_status
        assert await asyncio.to_thread(post_twice, port) == [status, status]

    run(test, refusing)


@pytest.mark.parametrize("queued", [1, 2, 3 * listen.QUEUED_REQUESTS_MAX])
@pytest.mark.parametrize("loop_factory", LOOPS, ids=["asyncio", "uvloop"])
def test_requests_that_wait_behind_one_that_runs_are_all_answered_in_order(
    queued: int, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.01)
        await app(scope, receive, send)

    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in range(queued + 1):
            writer.write(b"GET / HTTP/1.1\r\nhost: g\r\nx-request-id: %d\r\n\r\n" % number)
            await asyncio.sleep(0)
        for number in range(queued + 1):
            assert b'"id":"%d"' % number in await reader.readuntil(b'"size":0}')
        writer.transport.abort()

    run(test, slow, loop_factory)


@pytest.mark.parametrize("loop_factory", LOOPS, ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("queued", [0, 1, 3])
def test_a_client_that_leaves_ends_its_request_though_others_wait_behind_it(
    queued: int, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    begun = asyncio.Event()
    left = asyncio.Event()
    started = []

    async def waiting(scope: Scope, receive: Receive, send: Send) -> None:
        started.append(scope["path"])
        await receive()  # the body
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async def test(port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(1 + queued):
            writer.write(b"GET / HTTP/1.1\r\nhost: g\r\n\r\n")
            await begun.wait()
            await asyncio.sleep(0.01)
        writer.transport.abort()
        async with asyncio.timeout(3):
            await left.wait()
        assert len(started) == 1

    run(test, waiting, loop_factory)


def test_an_empty_line_between_requests_does_not_end_the_time_of_an_idle_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listen, "KEEP_ALIVE_S", 0.1)

    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: g\r\n\r\n")
        await reader.readuntil(b'"size":0}')
        async with asyncio.timeout(3):
            with contextlib.suppress(ConnectionError):
                while not reader.at_eof():
                    writer.write(b"\r\n")
                    await writer.drain()  # says if the connection was reset: no end of file
                    await asyncio.sleep(0.02)
        writer.transport.abort()

    run(test)


@pytest.mark.parametrize("loop_factory", LOOPS, ids=["asyncio", "uvloop"])
def test_a_client_that_reads_nothing_is_cut_off_though_its_next_request_waits(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request has run; its response waits until the client has read the first one."""
    monkeypatch.setattr(sse, "STALL_S", 0.2)

    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(b"x" * (2 << 20))(scope, receive, send)

    async def test(port: int) -> None:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
        client.connect(("127.0.0.1", port))
        client.sendall(b"GET / HTTP/1.1\r\nhost: g\r\n\r\n" * 2)
        connections = listen.HeaderLimitProtocol.open_connections
        await until(lambda: bool(connections), 3.0, lambda: "it is not open")
        await until(lambda: not connections, 3.0, lambda: "it is not cut off")
        client.close()

    run(test, large, loop_factory)


@pytest.mark.parametrize("loop_factory", LOOPS, ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
def test_what_a_client_does_not_read_is_counted_and_it_is_seen_to_stall(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], tls: bool, tmp_path: Path
) -> None:
    cert, key = certify(tmp_path)
    files = {"tls_cert": str(cert), "tls_key": str(key)} if tls else {}
    size = 16 << 20

    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(b"x" * size)(scope, receive, send)

    def ask(port: int) -> socket.socket:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
        client.settimeout(20)
        client.connect(("127.0.0.1", port))
        if tls:
            context = ssl.create_default_context(cafile=cert)
            client = context.wrap_socket(client, server_hostname="127.0.0.1")
        client.sendall(b"GET / HTTP/1.1\r\nhost: g\r\n\r\n")
        return client

    def read(client: socket.socket, count: int) -> None:
        while count > 0:
            part = client.recv(min(count, 1 << 16))
            assert part
            count -= len(part)

    async def settle() -> None:
        """Waits until the kernel has taken what it takes."""
        before: list[int] = [-1]
        while before != (now := [one.unsent_bytes for one in connections]):
            before = now
            await asyncio.sleep(0.3)

    connections = listen.HeaderLimitProtocol.open_connections

    async def test(port: int) -> None:
        client = await asyncio.to_thread(ask, port)
        held_now = lambda: sum(connection.unsent_bytes for connection in connections)  # noqa: E731
        await until(held_now, 10.0, lambda: "nothing is held")
        await settle()
        (connection,) = connections
        held = connection.unsent_bytes
        assert 0.8 * size < held < 1.01 * size, "what the kernel does not take"
        assert not connection.is_stalled(1.0)
        assert not connection.is_stalled(STALL_S)
        assert connection.is_stalled(1.0 + STALL_S)

        await asyncio.to_thread(read, client, size // 2)
        await settle()
        assert 0.3 * size < connection.unsent_bytes < 0.51 * size
        assert not connection.is_stalled(2.0 + STALL_S), "it has read some"
        assert connection.is_stalled(2.0 + 2 * STALL_S)
        await asyncio.to_thread(read, client, size // 2)
        await settle()
        assert connection.unsent_bytes == 0 and not connection.is_stalled(2.0 + 3 * STALL_S)

        client.close()
        await until(lambda: not connections, 10.0, lambda: "it is closed")

    run(test, large, loop_factory, **files)


@pytest.mark.parametrize("loop_factory", LOOPS, ids=["asyncio", "uvloop"])
def test_a_client_of_tls_that_stalls_is_cut_off(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path
) -> None:
    cert, key = certify(tmp_path)

    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(b"x" * (16 << 20))(scope, receive, send)

    async def test(port: int) -> None:
        context = ssl.create_default_context(cafile=cert)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(b"GET / HTTP/1.1\r\nhost: g\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        (connection,) = listen.HeaderLimitProtocol.open_connections
        connection.cut_off(CutReason.READER_STALLED)
        with pytest.raises((ConnectionError, ssl.SSLError, asyncio.IncompleteReadError)):
            await reader.readexactly(16 << 20)
        assert not listen.HeaderLimitProtocol.open_connections
        writer.transport.abort()

    run(test, large, loop_factory, tls_cert=str(cert), tls_key=str(key))


@pytest.mark.parametrize("limited_by", ["the constant", "the files that may be open"])
def test_of_too_many_connections_without_a_request_the_oldest_goes(
    monkeypatch: pytest.MonkeyPatch, limited_by: str
) -> None:
    """Strangers that say nothing, or ask once and stay, keep no client out."""
    if limited_by == "the constant":
        monkeypatch.setattr(listen, "RESTING_CONNECTIONS_MAX", 8)
    else:  # another limit than when the module was imported
        monkeypatch.setattr(resource, "getrlimit", lambda _: (32, 32))
    request = b"GET / HTTP/1.1\r\nhost: g\r\n\r\n"

    async def test(port: int) -> None:
        slow_reader, slow_writer = await asyncio.open_connection("127.0.0.1", port)
        slow_writer.write(b"POST / HTTP/1.1\r\nhost: g\r\ncontent-length: 4\r\n\r\n12")
        strangers = []
        for number in range(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            strangers.append((reader, writer))
            if number % 2:
                writer.write(request)
                await reader.readuntil(b'"size":0')
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            for _ in range(3):
                assert (await client.get("/")).status_code == 200
        for reader, _ in strangers[:20]:
            with contextlib.suppress(ConnectionError):
                await reader.read()  # until its end
        slow_writer.write(b"34")
        assert b"200 OK" in await slow_reader.readuntil(b'"size":4'), "its request ran"
        for _, writer in (*strangers, (slow_reader, slow_writer)):
            writer.transport.abort()

    run(test)


async def said_to(port: int, request: bytes, until: bytes) -> bytes:
    """What the server says to a request, up to some bytes of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await reader.readuntil(until)
    finally:
        writer.close()


def test_a_response_without_a_body_is_not_held() -> None:
    async def test(port: int) -> None:
        for _ in range(2):
            said = await said_to(port, b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n", b"\r\n\r\n")
            assert said.startswith(b"HTTP/1.1 200 OK\r\n")

    run(test)


def test_a_client_that_waits_for_leave_to_send_its_body_gets_it_at_once() -> None:
    async def test(port: int) -> None:
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n"
        assert await said_to(port, head, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"

    run(test)


def test_head_and_body_leave_in_one_write_and_later_writes_as_they_are() -> None:
    writes: list[bytes] = []
    transport = SimpleNamespace(write=writes.append, close=lambda: writes.append(b"closed"))
    cycle = SimpleNamespace(transport=transport, response_started=True)
    cycle.transport = listen.HeadHolder(cycle)
    for part in (b"head ", b"body", b"more"):
        cycle.transport.write(part)
    assert writes == [b"head body", b"more"] and cycle.transport is transport

    writes.clear()
    cycle.transport = listen.HeadHolder(cycle)
    cycle.transport.write(b"head")
    cycle.transport.close()
    assert writes == [b"head", b"closed"], "an app that fails between the two"


def test_gateways_of_one_machine_share_the_port() -> None:
    async def test(port: int) -> None:
        second = listen.HttpListener(app, GatewaySettings(http_port=port))
        await second.start()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.get("/")).status_code == 200
        await second.stop(1.0)

    run(test)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tls_cert": "c.pem"}, "tls_cert and tls_key"),
        ({"tls_cert": "c", "tls_key": "k", "listen": "serve"}, "TLS"),
    ],
)
def test_settings_that_cannot_be_kept_to_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, {f"gateway.{name}": value for name, value in given.items()})
    assert says.lower() in str(error.value)


def test_a_gateway_is_exposed_that_others_reach_and_that_asks_for_no_key() -> None:
    assert not GatewaySettings().exposed
    assert GatewaySettings(host="0.0.0.0").exposed
    assert not GatewaySettings(host="0.0.0.0", api_keys_file="keys.yaml").exposed


def test_serve_warns_of_a_gateway_that_anybody_may_use() -> None:
    def told(**given: Any) -> str:
        config = ClusterConfig(gateway=GatewaySettings(**given))
        model: Any = SimpleNamespace(checkpoint=SimpleNamespace(name="demo"))
        return welcome(LocalCluster(config, [model]))

    assert "WARNING" in told(host="0.0.0.0") and "diptych keys add" in told(host="0.0.0.0")
    assert "WARNING" not in told() + told(host="0.0.0.0", api_keys_file="keys.yaml")
