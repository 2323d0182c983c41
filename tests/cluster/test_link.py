"""A router of an older term is told so and left; a newer one is followed."""

from __future__ import annotations

import asyncio
from typing import Any

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
