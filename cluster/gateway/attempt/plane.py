"""The gateway's connections: one to the router, one to each worker, and who gets which frame."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from ....protos import frames as f
from ...wire.connection import FrameConnection, dial
from ...wire.handshake import PeerIdentity
from ...wire.router_link import RouterLink

log = logging.getLogger(__name__)

REDIAL_S, INSPECT_S = 0.5, 2.0


async def nothing() -> None:
    """There is nothing to close."""


class Inbox:
    """Frames about one attempt, in order, for the one task that waits for them.

    `short`, if set, is asked first while that task waits and nothing is queued: a frame that it
    takes (True) wakes nobody. It must not raise.
    """

    def __init__(self) -> None:
        self._frames: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.short: Callable[[Any], bool] | None = None

    def put_nowait(self, frame: Any) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done():
            self._frames.append(frame)
        elif self.short is None or not self.short(frame):
            self._frames.append(frame)
            waiter.set_result(None)

    def empty(self) -> bool:
        return not self._frames

    def get_nowait(self) -> Any:
        return self._frames.popleft()

    async def get(self) -> Any:
        while not self._frames:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._frames.popleft()


class Plane:
    """Frames in and out. `watch(key, inbox)` receives everything about one attempt."""

    def __init__(
        self,
        name: str,
        secret: str,
        silence_s: float,
        find_router: Callable[[], Awaitable[str]],
        kind: str = "gateway",
        told: Callable[[], dict] = dict,
        close: Callable[[], Awaitable[None]] = nothing,
    ) -> None:
        """`told`: statistics of this process, for whoever asks the router; `close`: ends it all."""
        self._close = close
        self._ending: asyncio.Task | None = None
        self.hello, self._told = PeerIdentity(name, kind, secret), told
        self._silence_s = silence_s
        self.cards: dict[str, f.WorkerCard] = {}
        self._workers: dict[str, FrameConnection] = {}
        self._dialing: dict[str, asyncio.Task] = {}
        self._unsent: dict[
            str, list[f.StartPrefill | f.StartDecode]
        ] = {}  #: until the worker is connected
        self._inboxes: dict[f.AttemptKey, Inbox] = {}
        self._using: dict[f.AttemptKey, set[str]] = {}  #: workers that an attempt was sent to
        self._asked: dict[
            f.AttemptKey, f.PlaceAttempt
        ] = {}  #: unanswered: said again to a new router
        self.suspicions = 0  #: workers whose streams went on elsewhere, as they may be frozen
        self._calls: dict[int, asyncio.Future[dict]] = {}
        self._next_call = 0
        self.link = RouterLink(find_router, self.hello, silence_s, self._joined, self._routed)
        self._task = asyncio.get_running_loop().create_task(self.link.run())

    @property
    def ready(self) -> bool:
        """Every role that the directory names is connected, and there is at least one worker."""
        return (
            self.link.connected and bool(self.cards) and self.cards.keys() <= self._workers.keys()
        )

    def connected(self, worker: str) -> bool:
        connection = self._workers.get(worker)
        return connection is not None and not connection.closed

    # ---- attempts --------------------------------------------------------------------------------

    def watch(self, key: f.AttemptKey) -> Inbox:
        """The frames about `key` until `forget`; at most one per generated token."""
        inbox = self._inboxes[key] = Inbox()
        self._using[key] = set()
        return inbox

    def place(self, frame: f.PlaceAttempt) -> None:
        self._asked[frame.attempt_key] = frame
        self.link.send(frame)

    def submit(self, worker: str, frame: f.StartPrefill | f.StartDecode) -> None:
        """Sends an attempt to a worker, as soon as it is connected; `Failed` if it never is."""
        self._using[frame.attempt_key].add(worker)
        if self.connected(worker) and self._workers[worker].suspected and self._others(worker):
            self._deliver(frame.attempt_key, f.AttemptFailed(frame.attempt_key, worker, "silent"))
        elif self.connected(worker):
            self._workers[worker].send(frame)
        elif worker in self._dialing:
            self._unsent.setdefault(worker, []).append(frame)
        else:
            self._deliver(
                frame.attempt_key, f.AttemptFailed(frame.attempt_key, worker, "worker_lost")
            )

    def forget(self, over: f.AttemptOutcome, abort: bool) -> None:
        """The attempt is over; `abort` tells the workers so."""
        key = over.attempt_key
        self._inboxes.pop(key, None)
        self._asked.pop(key, None)
        self.link.send(over)
        for worker in self._using.pop(key, set()):
            if abort and worker in self._workers:
                self._workers[worker].send(f.CancelAttempt(key))

    def end(self, error: Exception, wire: str = "") -> None:
        """Whoever waits for frames about this request, or about any, gets the error instead."""
        for key, inbox in list(self._inboxes.items()):
            if wire in ("", key[0]) or key[0].startswith(f"{wire}."):
                inbox.put_nowait(error)

    def _deliver(self, key: f.AttemptKey, frame: Any) -> None:
        inbox = self._inboxes.get(key)
        if inbox is not None:
            inbox.put_nowait(frame)

    # ---- router ----------------------------------------------------------------------------------

    def _joined(self) -> None:
        for place in self._asked.values():
            self.link.send(place)

    def _routed(self, frame: Any) -> None:
        match frame:
            case f.AttemptPlaced(key) | f.AttemptRefused(key):
                self._asked.pop(key, None)
                self._deliver(key, frame)
            case f.WorkerDirectory(_, workers, settled):
                cards = {card.id: card for card in workers}
                self._update(cards if settled else {**self.cards, **cards})
            case f.CallReply(call, values):
                self._answer(call, values)
            case f.InspectProcess(call):
                self.link.send(f.CallReply(call, self._told()))
            case f.CloseGateway(call):
                self._ending = asyncio.get_running_loop().create_task(self._end_all(call))

    async def _end_all(self, call: int) -> None:
        await self._close()
        self.link.send(f.CallReply(call, {}))

    def _update(self, cards: dict[str, f.WorkerCard]) -> None:
        for name in self.cards.keys() - cards.keys():
            if not self.connected(name):  # who still talks to us is not gone, whoever says so
                self._dialing.pop(name).cancel()
                self._lost(name)
        self.cards = cards
        for name, card in cards.items():
            if name not in self._dialing:
                self._dialing[name] = asyncio.get_running_loop().create_task(self._serve(card))

    # ---- workers ---------------------------------------------------------------------------------

    async def _serve(self, card: f.WorkerCard) -> None:
        """Keeps one worker connected for as long as the directory names it."""
        while True:
            try:
                connection = await dial(card.address, self.hello, f.FramesFromWorker, card.id)
                connection.on_suspected = lambda: self._suspect(card.id)
                self._connected(card.id, connection)
                async with aclosing(connection.frames(self._silence_s)) as frames:
                    async for frame in frames:
                        self._from_worker(frame)
            except (OSError, TimeoutError) as error:
                log.info("%s: %s", card.id, error or type(error).__name__)
            except Exception:
                log.exception("connection to %s failed", card.id)
            self._lost(card.id)
            if card.id not in self.cards:
                del self._dialing[card.id]
                return
            await asyncio.sleep(REDIAL_S)

    def _connected(self, worker: str, connection: FrameConnection) -> None:
        """Sends what waited for the worker, and lifts its ban from requests that still wait."""
        self._workers[worker] = connection
        for unsent in self._unsent.pop(worker, []):
            if unsent.attempt_key in self._using:
                connection.send(unsent)
        for place in [place for place in self._asked.values() if worker in place.lost_workers]:
            lost = [name for name in place.lost_workers if name != worker]
            self.place(msgspec.structs.replace(place, lost_workers=lost))

    def _from_worker(self, frame: Any) -> None:
        match frame:
            case f.EngineStepTokens(streams):
                for tokens in streams:
                    self._deliver(tokens.attempt_key, tokens)
            case f.AttemptFailed(key) | f.PromptArrived(key):
                self._deliver(key, frame)
            case f.CallReply(call, values):
                self._answer(call, values)

    def _lost(self, worker: str) -> None:
        connection = self._workers.pop(worker, None)
        self._unsent.pop(worker, None)
        if connection:
            connection.abort()
        self._fail(worker, "worker_lost")

    def _suspect(self, worker: str) -> None:
        """It may be frozen. Its streams go on elsewhere, if there is an elsewhere."""
        if self._others(worker):
            self.suspicions += 1
            log.warning("%s is silent: its streams go on elsewhere", worker)
            self._fail(worker, "silent")

    def _others(self, worker: str) -> bool:
        """Somebody else has its role, and speaks."""
        card = self.cards.get(worker)
        return card is not None and any(
            self.connected(name) and not self._workers[name].suspected
            for name, other in self.cards.items()
            if other.role == card.role and name != worker
        )

    def _fail(self, worker: str, reason: str) -> None:
        for key, users in self._using.items():
            if worker in users:
                self._deliver(key, f.AttemptFailed(key, worker, reason))

    # ---- statistics ------------------------------------------------------------------------------

    async def inspect(self) -> tuple[dict | None, list[dict]]:
        """Statistics of the router (None: not there) and of every worker that answers in time."""
        workers = [self._workers[name] for name in sorted(self._workers)]
        router = self._ask(self.link) if self.link.connected else None
        answers = await asyncio.gather(*(self._ask(w) for w in workers), return_exceptions=True)
        values = [answer for answer in answers if isinstance(answer, dict)]
        try:
            return (await router if router else None), values
        except TimeoutError:
            return None, values

    async def explain(self, request: str) -> list[dict] | None:
        """The router's decisions about a client's request; None: there is no router."""
        return await self._decisions(lambda call: f.InspectProcess(call, request))

    async def latest(self, count: int) -> list[dict] | None:
        """The router's last decisions, newest first; None: there is no router."""
        return await self._decisions(lambda call: f.InspectProcess(call, latest_decisions=count))

    async def _decisions(self, frame: Callable[[int], f.InspectProcess]) -> list[dict] | None:
        if not self.link.connected:
            return None
        try:
            return (await self._ask(self.link, frame))["decisions"]
        except TimeoutError:
            return None

    async def steer(self, worker: str, role: str, hand_over: bool) -> dict | None:
        """A worker's answer to `Steer`; None: it is gone."""
        if not self.connected(worker):
            return None
        try:
            asked = lambda call: f.ChangeRole(call, role, hand_over)  # noqa: E731
            return await self._ask(self._workers[worker], asked)
        except TimeoutError:
            return None

    async def probe(
        self, worker: str, limit_s: float, peer: str | None = None, **fields: Any
    ) -> dict | None:
        """A worker's answer to `Probe` with these fields; None: it is gone, or too slow."""
        if not self.connected(worker):
            return None
        try:
            asked = lambda call: f.ProbeTransfer(call, peer, **fields)  # noqa: E731
            return await self._ask(self._workers[worker], asked, limit_s)
        except TimeoutError:
            return None

    async def _ask(
        self,
        peer: FrameConnection | RouterLink,
        frame: Callable[[int], Any] = f.InspectProcess,
        limit_s: float = INSPECT_S,
    ) -> dict:
        self._next_call += 1
        call = self._next_call
        future = self._calls[call] = asyncio.get_running_loop().create_future()
        peer.send(frame(call))
        try:
            async with asyncio.timeout(limit_s):
                return await future
        finally:
            del self._calls[call]

    def _answer(self, call: int, values: dict) -> None:
        future = self._calls.get(call)
        if future and not future.done():
            future.set_result(values)
