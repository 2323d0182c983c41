"""A router of an older term is told so and left; a newer one is followed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from diptych.cluster.wire import connection as connection_module
from diptych.cluster.wire import router_link
from diptych.cluster.wire.connection import FrameConnection, FrameListener
from diptych.cluster.wire.router_link import RouterLink
from diptych.protos import frames as f
from diptych.protos.handshake import PeerIdentity


class FakeRouter:
    """Greets with its term's directory, keeps what it hears."""

    def __init__(self, term: int) -> None:
        self.term, self.heard = term, []
        self.peers: list[FrameConnection] = []
        self.left = asyncio.Event()
        self.listener = FrameListener("s", f.FramesToRouter, self._serve)

    async def _serve(self, peer: FrameConnection, _: f.Hello) -> None:
        self.peers.append(peer)
        peer.send(f.WorkerDirectory(self.term, []))
        async for frame in peer.frames(2.0):
            self.heard.append(frame)
        self.left.set()


async def test_an_older_router_is_told_that_it_is_obsolete_and_is_left() -> None:
    async def test() -> None:
        new, old, newest = FakeRouter(5), FakeRouter(3), FakeRouter(6)
        routers = [new, old, newest]
        addresses = [await router.listener.start("127.0.0.1") for router in routers]
        found = iter(addresses)
        directories: asyncio.Queue = asyncio.Queue()

        async def find() -> str:
            return next(found, addresses[-1])

        def received(frame: Any) -> None:
            directories.put_nowait(frame.term)

        hello = PeerIdentity("w", "worker", "s")
        link = RouterLink(find, hello, 2.0, lambda: None, received)
        running = asyncio.ensure_future(link.run())
        assert await directories.get() == 5
        new.peers[0].abort()
        await old.left.wait()
        assert old.heard == [f.NewerRouterSeen(5)]
        assert await directories.get() == 6
        assert link.term == 6 and link.connected
        running.cancel()

    async with asyncio.timeout(20):
        await test()


@pytest.mark.parametrize("speaks_again", [False, True])
async def test_a_busy_router_that_falls_silent_is_given_up_before_an_idle_one(
    monkeypatch: pytest.MonkeyPatch, speaks_again: bool
) -> None:
    monkeypatch.setattr(connection_module, "SUSPECT_AFTER_S", 0.3)
    lost = asyncio.Event()
    silent = asyncio.Event()

    async def serve(peer: FrameConnection, _: f.Hello) -> None:
        peer.send(f.WorkerDirectory(1, []))  # the traffic; no heartbeat follows
        await peer.receive()
        if speaks_again:
            await asyncio.sleep(0.5)
            peer.send(f.Heartbeat())
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                async for _ in peer.frames(60.0):
                    pass
        await silent.wait()

    listener = FrameListener("s", f.FramesToRouter, serve)
    address = await listener.start("127.0.0.1")

    async def find() -> str:
        return address

    link = RouterLink(
        find,
        PeerIdentity("g", "gateway", "s"),
        60.0,
        lambda: None,
        lambda _: None,
        on_lost=lambda _: lost.set(),
        busy_silence_s=1.0,
    )
    running = asyncio.ensure_future(link.run())
    if speaks_again:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(lost.wait(), 2.0)
        assert link.connected
    else:
        await asyncio.wait_for(lost.wait(), 20.0)
    silent.set()
    running.cancel()


async def test_links_that_lose_a_router_at_once_do_not_redial_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def recorded_sleep(delay_s: float) -> None:
        pauses.append(delay_s)
        await sleep(0)

    monkeypatch.setattr(router_link.asyncio, "sleep", recorded_sleep)

    async def find() -> str:
        raise OSError("no router")

    hello = PeerIdentity("w", "worker", "s")
    link = RouterLink(find, hello, 2.0, lambda: None, lambda _: None)
    running = asyncio.ensure_future(link.run())
    async with asyncio.timeout(20):
        while len(pauses) < 20:
            await sleep(0)
    running.cancel()
    assert len(set(pauses)) > 10
    assert all(router_link.RETRY_S / 2 <= pause <= router_link.RETRY_S for pause in pauses)
