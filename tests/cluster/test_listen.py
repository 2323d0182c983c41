"""HTTP on the gateway's own socket: ids, headers that never end, two gateways on one port."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from diptych.cluster.cli.serve import welcome
from diptych.cluster.config import ClusterConfig, ConfigError, GatewaySettings, load_config
from diptych.cluster.gateway.edge import listen
from diptych.cluster.gateway.edge.guard import ARRIVED_SCOPE_KEY
from diptych.cluster.launch.local_cluster import LocalCluster
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

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


def run(test: Callable[[int], Awaitable[None]]) -> None:
    async def bounded() -> None:
        settings = GatewaySettings(http_port=free_port())
        listener = listen.HttpListener(app, settings)
        async with asyncio.timeout(30):
            await listener.start()
            await test(settings.http_port)
            await listener.stop(1.0)

    asyncio.run(bounded())


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


def test_of_too_many_connections_without_a_request_the_oldest_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Strangers that say nothing, or ask once and stay, keep no client out."""
    monkeypatch.setattr(listen, "RESTING_CONNECTIONS_MAX", 8)
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
