"""The end of a gateway's connections: one model of several may go while the process stays."""

from __future__ import annotations

import asyncio
import time

from diptych.cluster.gateway.attempt.plane import Plane
from diptych.cluster.wire.connection import FrameConnection, FrameListener
from diptych.protos import frames as f

from tests.support.fleet import until

SECRET = "s"


class Peer:
    """A router, or a worker: it greets each caller, and notes when the caller has gone."""

    def __init__(self, receives: object, *greeting: object) -> None:
        self.greeting = list(greeting)
        self.callers = 0
        self.left = 0
        self.listener = FrameListener(SECRET, receives, self._serve)

    async def _serve(self, peer: FrameConnection, _: f.Hello) -> None:
        self.callers += 1
        for frame in self.greeting:
            peer.send(frame)
        async for _frame in peer.frames(5.0):
            pass
        self.left += 1


async def test_a_closed_plane_leaves_its_peers_fails_its_attempts_and_keeps_no_task() -> None:
    worker = Peer(f.FramesToWorker)
    worker_address = await worker.listener.start("127.0.0.1")
    gone = "127.0.0.1:1"  # nobody listens there: this one is dialled for as long as it is named
    cards = [
        f.WorkerCard("decode/a", "decode", "decode", worker_address, "a", 0),
        f.WorkerCard("decode/b", "decode", "decode", gone, "b", 0),
    ]
    router = Peer(f.FramesToRouter, f.WorkerDirectory(1, cards, True))
    address = await router.listener.start("127.0.0.1")

    async def find() -> str:
        return address

    tasks_before = asyncio.all_tasks()
    async with asyncio.timeout(20):
        plane = Plane("gateway/g", SECRET, 5.0, find)
        await until(lambda: plane.connected("decode/a"), 10.0, lambda: "no connection")
        inbox = plane.watch(("r", 0))
        plane.submit("decode/a", f.StartDecode(("r", 0), 1, [1], f.Sampling(1), None))
        await plane.close()
        assert inbox.get_nowait() == f.AttemptFailed(("r", 0), "decode/a", "worker_lost")
        late_inbox = plane.watch(("s", 0))
        plane.submit("decode/a", f.StartDecode(("s", 0), 1, [1], f.Sampling(1), None))
        assert late_inbox.get_nowait() == f.AttemptFailed(("s", 0), "decode/a", "worker_gone")
        assert not plane.connected("decode/a") and not plane.link.connected
        await until(lambda: (router.left, worker.left) == (1, 1), 10.0, lambda: "still connected")
        assert (router.callers, worker.callers) == (1, 1), "nobody is dialled again"
        own_tasks = [
            task
            for task in asyncio.all_tasks() - tasks_before
            if "plane.py" in str(task.get_coro()) or "Plane" in task.get_coro().__qualname__
        ]
        assert not own_tasks
    router.listener.close()
    worker.listener.close()


async def test_a_router_that_comes_later_hears_how_long_a_request_has_waited() -> None:
    class Router(Peer):
        def __init__(self) -> None:
            super().__init__(f.FramesToRouter, f.WorkerDirectory(1, [], True))
            self.asked: list[f.PlaceAttempt] = []

        async def _serve(self, peer: FrameConnection, _: f.Hello) -> None:
            async for frame in peer.frames(5.0):
                if isinstance(frame, f.PlaceAttempt):
                    self.asked.append(frame)

    router = Router()
    address = ""

    async def find() -> str:
        if not address:
            raise OSError("there is no router")
        return address

    async with asyncio.timeout(20):
        plane = Plane("gateway/g", SECRET, 5.0, find)
        asked_at = time.monotonic()
        plane.place(f.PlaceAttempt(("r", 0), 3, 4, [], waited_s=1.0))
        await asyncio.sleep(0.3)
        address = await router.listener.start("127.0.0.1")
        await until(lambda: router.asked, 10.0, lambda: "the router was not asked")
        waited_s = router.asked[0].waited_s
        assert 1.3 <= waited_s <= 1.0 + time.monotonic() - asked_at
        await plane.close()
    router.listener.close()
