"""Peers that may be frozen: their streams go on elsewhere long before they are given up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from diptych.cluster.gateway.attempt.plane import Plane
from diptych.cluster.wire import connection as wire
from diptych.protos import frames as f

from tests.support.fleet import until


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(bounded())


async def _pair() -> tuple[wire.FrameConnection, wire.FrameConnection]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours, theirs = socket.create_connection(server.getsockname()), server.accept()[0]
    return await _connection(ours), await _connection(theirs)


async def _connection(end: socket.socket) -> wire.FrameConnection:
    reader, writer = await asyncio.open_connection(sock=end)
    return wire.FrameConnection(reader, writer, f.FramesFromWorker, "peer")


def test_a_busy_peer_that_falls_silent_is_suspected_long_before_it_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "BUSY_HEARTBEAT_S", 0.02)
    monkeypatch.setattr(wire, "SUSPECT_AFTER_S", 0.1)

    async def test() -> None:
        (mine, theirs), suspected = await _pair(), asyncio.Event()
        mine.on_suspected = suspected.set
        reading = asyncio.create_task(anext(mine.frames(60.0)))
        mine.send(f.AttemptFailed(("r", 0), "w", "whatever"))  # so much for busy; and then, nothing
        await suspected.wait()
        assert mine.suspected and not mine.closed
        theirs.send(f.AttemptFailed(("r", 0), "w", "still here"))
        assert (await reading).reason == "still here"
        await until(lambda: not mine.suspected, 5.0, lambda: "it speaks")
        assert mine._patience == 0.2, "it was a false alarm: twice the time, from now on"
        mine.abort()
        theirs.abort()

    run(test)


def test_an_idle_peer_is_not_suspected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BUSY_FOR_S", 0.0)
    monkeypatch.setattr(wire, "IDLE_HEARTBEAT_S", 0.02)
    monkeypatch.setattr(wire, "SUSPECT_AFTER_S", 0.05)

    async def test() -> None:
        mine, theirs = await _pair()
        mine.on_suspected = lambda: pytest.fail("suspected")
        async for _ in mine.frames(0.5):
            pass
        assert mine.closed and not mine.suspected, "it was given up all the same"
        theirs.abort()

    run(test)


@pytest.mark.parametrize("another", ["ready", "of another role", "silent too", "closed"])
def test_streams_leave_a_silent_worker_only_if_another_speaks(another: str) -> None:
    """Beside the connection itself, all is as in a gateway."""

    async def never() -> str:
        return await asyncio.Future()

    async def test() -> None:
        plane = Plane("g", "secret", 3.0, never)
        roles = {"a": "decode", "b": "prefill" if another == "of another role" else "decode"}
        for name, role in roles.items():
            silent = name == "a" or another == "silent too"
            closed = name == "b" and another == "closed"
            peer = SimpleNamespace(suspected=silent, closed=closed, send=said.append)
            plane.cards[name] = f.WorkerCard(name, role, role, "", "", 0)
            plane._workers[name] = peer  # type: ignore[assignment]
        inbox = plane.watch(("r", 0))
        decode = f.StartDecode(("r", 0), 1, [1], f.Sampling(1), None)
        plane.submit("a", decode)
        later = plane.watch(("r", 1))
        plane._attempt_workers["r", 1].add("a")
        plane._suspect("a")
        if another == "ready":
            assert inbox.get_nowait() == f.AttemptFailed(("r", 0), "a", "silent")
            assert later.get_nowait() == f.AttemptFailed(("r", 1), "a", "silent")
            assert said == []
        else:
            assert inbox.empty() and later.empty() and said == [decode]
        plane._task.cancel()

    said: list = []
    run(test)
