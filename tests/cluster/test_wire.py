"""Framed connections: secret, version, garbage, silence, slow readers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from diptych.cluster import wire
from diptych.protos import frames as f


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(bounded())


class Server:
    """Collects what arrives, per connection."""

    def __init__(self) -> None:
        self.frames: list = []
        self.names: list[str] = []
        self.ended = asyncio.Event()
        self.listener = wire.Listener("secret", f.ToWorker, self._serve)

    async def _serve(self, peer: wire.Connection, hello: f.Hello) -> None:
        self.names.append(hello.name)
        async for frame in peer.frames(1.0):
            self.frames.append(frame)
            peer.send(f.Failed(("r", 0), "w", "seen"))
        self.ended.set()


async def dialled(address: str, **changes: Any) -> wire.Connection:
    hello = f.Hello(**{"name": "g", "kind": "gateway", "secret": "secret", **changes})
    return await wire.dial(address, hello, f.FromWorker, "w")


def test_frames_go_both_ways_in_order() -> None:
    async def test() -> None:
        server = Server()
        peer = await dialled(await server.listener.start("127.0.0.1"))
        for attempt in range(50):
            peer.send(f.Abort(("r", attempt)))
        answers = [await peer.receive() for _ in range(50)]
        assert [frame.key[1] for frame in server.frames] == list(range(50))
        assert all(isinstance(answer, f.Failed) for answer in answers)
        peer.abort()
        await server.ended.wait()

    run(test)


@pytest.mark.parametrize("changes", [{"secret": "guess"}, {"protocol": 99}])
def test_a_peer_without_the_secret_or_of_another_version_is_refused(changes: dict) -> None:
    async def test() -> None:
        server = Server()
        peer = await dialled(await server.listener.start("127.0.0.1"), **changes)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await peer.receive()
        assert server.names == []

    run(test)


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x01\xc1", b"\xff" * 9]
)
def test_garbage_ends_the_connection_and_nothing_else(garbage: bytes) -> None:
    async def test() -> None:
        server = Server()
        address = await server.listener.start("127.0.0.1")
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(garbage)
        writer.write_eof()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        peer = await dialled(address)
        peer.send(f.Abort(("r", 0)))
        assert isinstance(await peer.receive(), f.Failed)

    run(test)


def test_heartbeats_keep_an_idle_connection_and_silence_ends_it() -> None:
    async def test() -> None:
        server = Server()
        address = await server.listener.start("127.0.0.1")
        peer = await dialled(address)
        beating = asyncio.ensure_future(anext(peer.frames(1.0), None))
        mute = await dialled(address)  # says hello, then nothing: no task sends its beats
        await server.ended.wait()  # the server gave up on the mute one only
        assert not beating.done() and not peer.closed
        peer.send(f.Abort(("r", 0)))
        assert isinstance(await beating, f.Failed)
        mute.abort()

    run(test)


def test_a_peer_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        server = Server()
        peer = await dialled(await server.listener.start("127.0.0.1"))
        monkeypatch.setattr(wire, "BUFFER_MAX", 1 << 20)
        step = f.Prefill(("r", 0), 1, list(range(100_000)), f.Sampling(1), "d")
        sent = 0
        while not peer.closed:
            peer.send(step)  # never yields: the other side cannot read meanwhile
            sent += 1
            assert sent < 1000
        peer.send(step)  # harmless afterwards

    run(test)
