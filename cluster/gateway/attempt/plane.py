"""The gateway's connections: one to the router, one to each worker, and who gets which frame.

Life of a worker's connection: the router's directory names the worker, and it is dialled, again and
again while the directory names it. Frames for a worker that is being dialled wait for it. When the
connection ends, every attempt on that worker gets `AttemptFailed` with the reason `worker_lost`;
`worker_gone` if the worker had ended before the attempt came; or `worker_silent` if it is given up as
nothing came from it for long.
A worker that is silent may be frozen: its attempts fail with `silent` if another worker can go on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Set
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias, assert_never

import msgspec

from ....protos import frames
from ....protos.handshake import PeerIdentity
from ...wire.aliases import worker_alias
from ...wire.connection import FrameConnection, dial
from ...wire.router_link import RouterLink
from ..errors import ApiError
from .backlog import Backlog, PackedTokens, frame_bytes, is_packable
from .fallback import FALLBACK_AFTER_S, KnownWorker, place_without_router

log = logging.getLogger(__name__)

#: So many events wait in an inbox as they are; behind them tokens are packed.
UNPACKED_EVENTS = 8
REDIAL_S = 0.5  #: between two tries to connect to a worker
CALL_TIMEOUT_S = 2.0  #: for a peer to answer a call, unless the caller says otherwise

#: What a request's task may find in the inbox of its attempt. An ApiError ends the request.
AttemptEvent: TypeAlias = (
    frames.AttemptPlaced
    | frames.AttemptRefused
    | frames.AnswerTokens
    | frames.AttemptFailed
    | frames.PromptArrived
    | ApiError
)


async def close_nothing() -> None:
    """Stands for the end of a process that has nothing to close."""


class Inbox:
    """Events about one attempt, in order, for the one task that waits for them.

    They count in `backlog` while they wait. Behind the first few, whose task is about to run, the
    tokens of a client that lags are packed: as objects they took ten times as much, and left holes
    in Python's memory that the system never got back.
    """

    def __init__(self, backlog: Backlog | None = None) -> None:
        self._events: deque[AttemptEvent | PackedTokens] = deque()
        #: By answer, what further tokens may join: behind it there are tokens only.
        self._packs: dict[int, PackedTokens] = {}
        self._backlog = backlog or Backlog()
        self._waiter: asyncio.Future[None] | None = None  #: There while the task waits.
        #: If set, this is asked first while the task waits and nothing is queued. An event that it
        #: takes (True) wakes nobody. It must not raise.
        self.take_at_once: Callable[[AttemptEvent], bool] | None = None

    def put_nowait(self, event: AttemptEvent) -> None:
        """Queues the event and wakes the task, unless `take_at_once` takes the event."""
        waiter = self._waiter
        # The task is busy, or woken already: it will look at the queue, where order must hold.
        if waiter is None or waiter.done():
            self._append(event)
        elif self.take_at_once is None or not self.take_at_once(event):
            self._append(event)
            if not waiter.done():  # else the reader was cut off, as too much waits for it
                waiter.set_result(None)

    def _append(self, event: AttemptEvent) -> None:
        if len(self._events) < UNPACKED_EVENTS or not is_packable(event):
            self._events.append(event)
            self._packs.clear()
            self._backlog.add(frame_bytes(event))
            return
        pack = self._packs.get(event.answer_index)
        if pack is None or not pack.can_take(event):
            pack = self._packs[event.answer_index] = PackedTokens(event)
            self._events.append(pack)
            self._backlog.add(pack.nbytes)
            return
        bytes_before = pack.nbytes
        pack.take(event)
        self._backlog.add(pack.nbytes - bytes_before)

    def empty(self) -> bool:
        return not self._events

    def get_nowait(self) -> AttemptEvent:
        event = self._events.popleft()
        if not isinstance(event, PackedTokens):
            self._backlog.add(-frame_bytes(event))
            return event
        if self._packs.get(event.answer_index) is event:
            del self._packs[event.answer_index]
        self._backlog.add(-event.nbytes)
        return event.unpacked()

    def clear(self) -> None:
        """Drops all events, as nobody waits for them any more."""
        while self._events:
            self.get_nowait()

    async def get(self) -> AttemptEvent:
        """Waits for the next event and takes it. Only one task may wait."""
        while not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.get_nowait()


@dataclass(frozen=True, slots=True)
class UnplacedAttempt:
    """An attempt that waits for a place."""

    frame: frames.PlaceAttempt
    asked_at_s: float  #: When the frame was made, of the monotonic clock.

    def asked_now(self) -> frames.PlaceAttempt:
        """Returns the question as it is to be asked now: the request has waited longer."""
        waited_s = self.frame.waited_s + time.monotonic() - self.asked_at_s
        return msgspec.structs.replace(self.frame, waited_s=waited_s)


class Plane:
    """The connections of one process. `watch` gives an attempt the inbox of what is said of it."""

    def __init__(
        self,
        name: str,
        secret: str,
        silence_s: float,
        find_router: Callable[[], Awaitable[str]],
        kind: str = "gateway",
        statistics: Callable[[], dict[str, Any]] = dict,
        close: Callable[[], Awaitable[None]] = close_nothing,
        address: str = "",
        on_gateways: Callable[[list[frames.GatewayCard]], None] = lambda _: None,
    ) -> None:
        """Connects to the router, whose "host:port" `find_router` returns, in a task of its own.

        `name`, `kind` ("gateway" or "control") and the cluster's `secret` are what this process
        says of itself to its peers. A peer is given up after `silence_s` without a sign of life.
        `statistics` are those of this process, for whoever asks the router. `close` is called when
        the router wants this gateway to end its requests. `address` is where other gateways reach
        this one; `on_gateways` is called with all gateways that the router knows, whenever these
        change.
        """
        self.hello = PeerIdentity(name, kind, secret)
        self._silence_s = silence_s
        self._statistics = statistics
        self._close = close
        self._address = address
        self._on_gateways = on_gateways
        #: The task that closes; asyncio itself keeps no tasks.
        self._closing: asyncio.Task[None] | None = None

        self.cards: dict[str, frames.WorkerCard] = {}  #: Workers that the directory names.
        #: Aliases by worker, made when they are asked for since the directory last changed.
        self._aliases: dict[str, str] = {}
        self._workers: dict[str, FrameConnection] = {}  #: Connections, by the worker's id.
        #: The task that keeps a worker connected, for each worker that is dialled or connected.
        self._dialing: dict[str, asyncio.Task[None]] = {}
        #: Frames that wait until their worker is connected.
        self._unsent: dict[str, list[frames.StartPrefill | frames.StartDecode]] = {}

        self._inboxes: dict[frames.AttemptKey, Inbox] = {}  #: Of the attempts under way.
        #: Workers that an attempt was sent to.
        self._attempt_workers: dict[frames.AttemptKey, set[str]] = {}
        #: Workers with which an attempt counts without a router: from its placement here, or from
        #: when it was sent there, until its part there has ended. These are kept apart, because an
        #: attempt that was not sent to a worker does not fail with it.
        self._busy_workers: dict[frames.AttemptKey, set[str]] = {}
        #: Attempts whose worker was asked for a sign of life and has given none yet, by call id.
        self._unconfirmed: dict[int, tuple[frames.AttemptKey, str]] = {}
        #: Requests for a place without an answer: said again to a new router.
        self._unplaced: dict[frames.AttemptKey, UnplacedAttempt] = {}
        #: How often a silent worker's requests went on elsewhere, as it may be frozen.
        self.suspicions = 0

        #: Calls that wait for their `CallReply`, by call id.
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next_call = 0  #: The last call id that was given.
        self.link = RouterLink(
            find_router,
            self.hello,
            silence_s,
            on_connected=self._router_joined,
            on_frame=self._router_said,
            on_lost=self._router_lost,
            busy_silence_s=FALLBACK_AFTER_S,  # while attempts are placed, they go on at once then
        )
        #: Runs out when the last router has been away for `FALLBACK_AFTER_S`.
        self._fallback_timer: asyncio.TimerHandle | None = None
        self._without_router = False  #: True from then on, until a router is there again.
        self.fallbacks = 0  #: Attempts that were placed without a router.
        self._task = asyncio.get_running_loop().create_task(self.link.run())

    async def close(self) -> None:
        """Ends all connections, and fails the attempts that are under way on workers.

        Requests that wait for a place are not told: the caller ends them before (`end_requests`).
        """
        tasks = [self._task, *self._dialing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._dialing.clear()
        for worker in list(self._workers):
            self._worker_lost(worker)

    @property
    def ready(self) -> bool:
        """Is True if every worker of the directory is connected, and there is at least one."""
        return (
            self.link.connected and bool(self.cards) and self.cards.keys() <= self._workers.keys()
        )

    @property
    def reachable_roles(self) -> set[str]:
        """The roles of the workers that get attempts while there is no router.

        None where this gateway places nothing itself: it has met no router yet, or workers know a
        newer one.
        """
        goes_on_alone = self._without_router or self._fallback_timer is not None
        if not goes_on_alone:
            return set()
        return {worker.card.role for worker in self._known_workers()}

    def connected(self, worker: str) -> bool:
        """Returns whether a worker, by its id, can get frames now."""
        connection = self._workers.get(worker)
        return connection is not None and not connection.closed

    def alias(self, worker: str) -> str:
        """Returns what clients are told in place of a worker's id."""
        alias = self._aliases.get(worker)
        if alias is None:
            alias = self._aliases[worker] = worker_alias(self.hello.secret, worker)
        return alias

    # ---- attempts --------------------------------------------------------------------------------

    def watch(self, key: frames.AttemptKey, backlog: Backlog | None = None) -> Inbox:
        """Returns the inbox that an attempt's events go to until `forget`.

        What waits in it counts in the request's `backlog`, which has a limit.
        """
        inbox = Inbox(backlog)
        self._inboxes[key] = inbox
        self._attempt_workers[key] = set()
        return inbox

    def place(self, frame: frames.PlaceAttempt) -> None:
        """Asks the router for workers; a router that comes later is asked too.

        Without a router for long, workers are chosen here, if they have little to do.
        """
        self._unplaced[frame.attempt_key] = UnplacedAttempt(frame, time.monotonic())
        self.link.send(frame)
        if self._without_router:
            self._place_alone(frame)

    def submit(
        self,
        worker: str,
        frame: frames.StartPrefill | frames.StartDecode,
        ask_for_life: bool = False,
    ) -> None:
        """Sends an attempt to a worker, once it is connected.

        The inbox gets `AttemptFailed` if the worker is gone, or is silent while another worker of
        its role is not. With `ask_for_life` the worker is asked to answer before it begins, so that
        its end tells whether it lived until then: `worker_lost`, or else `worker_gone`.
        """
        key = frame.attempt_key
        self._attempt_workers[key].add(worker)
        self._busy_workers.setdefault(key, set()).add(worker)
        if self.connected(worker):
            connection = self._workers[worker]
            if connection.suspected and self._another_can_go_on(worker):
                self._deliver(key, frames.AttemptFailed(key, worker, "silent"))
                return
            if ask_for_life:
                self._next_call += 1
                self._unconfirmed[self._next_call] = (key, worker)
                connection.send(frames.InspectProcess(self._next_call))
            connection.send(frame)
        elif worker in self._dialing:
            self._unsent.setdefault(worker, []).append(frame)
        else:
            self._deliver(key, frames.AttemptFailed(key, worker, "worker_gone"))

    def prompt_prefilled(self, placed: frames.AttemptPlaced) -> None:
        """Tells the router that all answers have begun: the prefill worker's part has ended."""
        self.link.send(frames.PromptPrefilled(placed.attempt_key))
        busy_workers = self._busy_workers.get(placed.attempt_key)
        if busy_workers and placed.prefill_worker in busy_workers:
            busy_workers.remove(placed.prefill_worker)
            if self._without_router:
                self._place_waiting()

    def forget(self, outcome: frames.AttemptOutcome, cancel: bool) -> None:
        """Ends an attempt and tells the router; with `cancel` the workers are told too."""
        key = outcome.attempt_key
        inbox = self._inboxes.pop(key, None)
        if inbox is not None:
            inbox.clear()
        self._unplaced.pop(key, None)
        if self._unconfirmed:  # nearly never
            self._unconfirmed = {
                call_id: asked for call_id, asked in self._unconfirmed.items() if asked[0] != key
            }
        self.link.send(outcome)
        for worker in self._attempt_workers.pop(key, set()):
            if cancel and worker in self._workers:
                self._workers[worker].send(frames.CancelAttempt(key))
        self._busy_workers.pop(key, None)
        if self._without_router:
            self._place_waiting()

    def end_requests(self, error: ApiError, wire_id: str = "") -> None:
        """Gives `error` to the request of this id and to its parts; without an id, to all.

        A part is one answer that goes on by itself: its id is the request's id, a dot and more.
        """
        for key, inbox in list(self._inboxes.items()):
            if wire_id in ("", key[0]) or key[0].startswith(f"{wire_id}."):
                inbox.put_nowait(error)

    def _deliver(self, key: frames.AttemptKey, event: AttemptEvent) -> None:
        inbox = self._inboxes.get(key)
        if inbox is not None:
            inbox.put_nowait(event)

    # ---- router ----------------------------------------------------------------------------------

    @property
    def router_connected(self) -> bool:
        """Whether there is a connection to a router now."""
        return self.link.connected

    def _router_joined(self) -> None:
        """Tells a new router of the attempts that wait for a place, as it has not heard of them."""
        self._without_router = False
        if self._fallback_timer:
            self._fallback_timer.cancel()
            self._fallback_timer = None
        if self._address:
            self.link.send(frames.IntroduceGateway(self._address))
        for unplaced in self._unplaced.values():
            self.link.send(unplaced.asked_now())

    def _router_lost(self, silent_s: float) -> None:
        loop = asyncio.get_running_loop()
        # A frozen router is lost because it has been silent: for so long nobody has answered.
        delay_s = max(FALLBACK_AFTER_S - silent_s, 0.0)
        self._fallback_timer = loop.call_later(delay_s, self._go_on_alone)

    def _go_on_alone(self) -> None:
        """Places what waits: no router has come back so far."""
        self._fallback_timer = None
        self._without_router = True
        self._place_waiting()

    def _wait_for_newer_router(self) -> None:
        """Places nothing alone any more: there is a router, though this process has not met it.

        Workers know it, and refuse what was placed in the name of the one before.
        """
        self._without_router = False
        if self._fallback_timer:
            self._fallback_timer.cancel()
            self._fallback_timer = None

    def _place_waiting(self) -> None:
        for unplaced in list(self._unplaced.values()):
            self._place_alone(unplaced.frame)

    def _place_alone(self, place: frames.PlaceAttempt) -> None:
        """Chooses workers for an attempt without a router; it waits on if there are none."""
        placed = place_without_router(place, self.link.term, self._known_workers())
        if placed is None:
            return
        self.fallbacks += 1
        del self._unplaced[place.attempt_key]
        # Its task sends the attempt to these later, and the next attempt may be placed before.
        chosen_workers = {placed.decode_worker}
        if placed.prefill_worker:
            chosen_workers.add(placed.prefill_worker)
        self._busy_workers[place.attempt_key] = chosen_workers
        self._deliver(place.attempt_key, placed)

    def _known_workers(self) -> list[KnownWorker]:
        """Returns the workers that are connected and not silent, with this gateway's attempts."""
        attempts = Counter(chain.from_iterable(self._busy_workers.values()))
        return [
            KnownWorker(card, attempts[name])
            for name, card in self.cards.items()
            if self.connected(name) and not self._workers[name].suspected
        ]

    def _router_said(self, frame: frames.FramesFromRouter) -> None:
        match frame:
            case frames.AttemptPlaced(key) | frames.AttemptRefused(key):
                self._unplaced.pop(key, None)
                self._deliver(key, frame)
            case frames.WorkerDirectory(_, workers, settled):
                # A router that is not settled does not know all workers yet: add, and take none.
                cards = {card.id: card for card in workers}
                self._update_directory(cards if settled else {**self.cards, **cards})
            case frames.CallReply(call_id, values):
                self._take_reply(call_id, values)
            case frames.InspectProcess(call_id):
                self.link.send(frames.CallReply(call_id, self._statistics()))
            case frames.GatewayDirectory(gateways):
                self._on_gateways(gateways)
            case frames.CloseGateway(call_id):
                closing = self._close_and_reply(call_id)
                self._closing = asyncio.get_running_loop().create_task(closing)
            case frames.Heartbeat():
                pass
            case _:
                assert_never(frame)

    async def _close_and_reply(self, call_id: int) -> None:
        await self._close()
        self.link.send(frames.CallReply(call_id, {}))

    def _update_directory(self, cards: dict[str, frames.WorkerCard]) -> None:
        """Dials the workers that are new, and gives up those that are gone."""
        for name in self.cards.keys() - cards.keys():
            # A worker that still talks to this process is there, though the router misses it.
            if not self.connected(name):
                self._dialing.pop(name).cancel()
                self._worker_lost(name)
        self.cards = cards
        self._aliases.clear()  # else the aliases of all workers that ever were would stay
        for name, card in cards.items():
            if name not in self._dialing:
                dialing = self._keep_connected(card)
                self._dialing[name] = asyncio.get_running_loop().create_task(dialing)

    # ---- workers ---------------------------------------------------------------------------------

    async def _keep_connected(self, card: frames.WorkerCard) -> None:
        """Keeps one worker connected for as long as the directory names it."""
        while True:
            try:
                connection = await dial(card.address, self.hello, frames.FramesFromWorker, card.id)
                connection.on_suspected = lambda: self._suspect(card.id)
                self._worker_connected(card.id, connection)
                async with aclosing(connection.frames(self._silence_s)) as received:
                    async for frame in received:
                        self._worker_said(frame)
            except (OSError, TimeoutError) as error:
                log.info("%s: %s", card.id, str(error) or type(error).__name__)
            except Exception:
                log.exception("connection to %s failed", card.id)
            self._worker_lost(card.id)
            if card.id not in self.cards:
                del self._dialing[card.id]
                return
            await asyncio.sleep(REDIAL_S)

    def _worker_connected(self, worker: str, connection: FrameConnection) -> None:
        """Sends what waited for the worker, and lets requests that wait for a place have it.

        Those for which the worker was lost are placed again without that exclusion.
        """
        self._workers[worker] = connection
        for frame in self._unsent.pop(worker, []):
            if frame.attempt_key in self._attempt_workers:
                connection.send(frame)
        for unplaced in list(self._unplaced.values()):
            if worker in unplaced.frame.lost_workers:
                place = unplaced.asked_now()
                lost_workers = [name for name in place.lost_workers if name != worker]
                self.place(msgspec.structs.replace(place, lost_workers=lost_workers))

    def _worker_said(self, frame: frames.FramesFromWorker) -> None:
        match frame:
            case frames.EngineStepTokens(answers):
                for tokens in answers:
                    self._deliver(tokens.attempt_key, tokens)
            case frames.AttemptFailed(key) | frames.PromptArrived(key):
                if isinstance(frame, frames.AttemptFailed) and frame.reason == frames.STALE_TERM:
                    self._wait_for_newer_router()
                self._deliver(key, frame)
            case frames.CallReply(call_id, values):
                self._take_reply(call_id, values)
            case frames.Heartbeat():
                pass
            case _:
                assert_never(frame)

    def _worker_lost(self, worker: str) -> None:
        """Fails all attempts on a worker whose connection has ended, or cannot be made."""
        connection = self._workers.pop(worker, None)
        unsent = {frame.attempt_key for frame in self._unsent.pop(worker, [])}
        unconfirmed = {key for key, asked in self._unconfirmed.values() if asked == worker}
        reason = "worker_lost"
        if connection:
            connection.abort()
            if connection.ended_by_silence:
                reason = "worker_silent"
        self._fail_attempts(worker, reason, gone_for=unsent | unconfirmed)

    def _suspect(self, worker: str) -> None:
        """Fails the attempts of a worker that may be frozen, if another can go on with them."""
        if self._another_can_go_on(worker):
            self.suspicions += 1
            log.warning("%s is silent: its streams go on elsewhere", worker)
            self._fail_attempts(worker, "silent")

    def _another_can_go_on(self, worker: str) -> bool:
        """Is True if another worker has this one's role, and speaks."""
        card = self.cards.get(worker)
        return card is not None and any(
            self.connected(name) and not self._workers[name].suspected
            for name, other in self.cards.items()
            if other.role == card.role and name != worker
        )

    def _fail_attempts(
        self, worker: str, reason: str, gone_for: Set[frames.AttemptKey] = frozenset()
    ) -> None:
        """Fails all attempts on a worker; for those of `gone_for` it had ended before they came."""
        for key, workers in self._attempt_workers.items():
            if worker in workers:
                why = "worker_gone" if key in gone_for else reason
                self._deliver(key, frames.AttemptFailed(key, worker, why))

    # ---- calls -----------------------------------------------------------------------------------

    async def inspect(self) -> tuple[dict | None, list[dict]]:
        """Returns the statistics of the router, and those of every worker that answers in time.

        They are what each process says of itself. The workers are in the order of their ids. None:
        no router answered.
        """
        workers = [self._workers[name] for name in sorted(self._workers)]
        router = self._call(self.link) if self.link.connected else None
        replies = await asyncio.gather(
            *(self._call(worker) for worker in workers), return_exceptions=True
        )
        statistics = [reply for reply in replies if isinstance(reply, dict)]
        try:
            return (await router if router else None), statistics
        except TimeoutError:
            return None, statistics

    async def explain(self, request_id: str) -> list[dict] | None:
        """Returns the router's decisions about the request that its client named `request_id`.

        None: no router answered.
        """
        return await self._decisions(lambda call_id: frames.InspectProcess(call_id, request_id))

    async def latest(self, count: int) -> list[dict] | None:
        """Returns the router's last `count` decisions, newest first; None: no router answered."""
        return await self._decisions(
            lambda call_id: frames.InspectProcess(call_id, latest_decisions=count)
        )

    async def _decisions(
        self, frame_of: Callable[[int], frames.InspectProcess]
    ) -> list[dict] | None:
        if not self.link.connected:
            return None
        try:
            return (await self._call(self.link, frame_of))["decisions"]
        except TimeoutError:
            return None

    async def steer(self, worker: str, role: str, hand_over: bool) -> dict | None:
        """Orders a worker into a role; returns its answer to `ChangeRole`.

        With `hand_over` the worker's requests go on elsewhere at once. None: the worker is gone, or
        does not answer.
        """
        return await self._call_worker(
            worker, lambda call_id: frames.ChangeRole(call_id, role, hand_over)
        )

    async def probe(
        self, worker: str, limit_s: float, peer: str | None = None, **fields: Any
    ) -> dict | None:
        """Orders a worker to move test bytes from `peer`; returns its answer to `ProbeTransfer`.

        `fields` are further fields of that frame. Without a peer the worker tells of its host.
        None: the worker is gone, or took longer than `limit_s` seconds.
        """
        return await self._call_worker(
            worker, lambda call_id: frames.ProbeTransfer(call_id, peer, **fields), limit_s
        )

    async def _call_worker(
        self, worker: str, frame_of: Callable[[int], Any], limit_s: float = CALL_TIMEOUT_S
    ) -> dict | None:
        if not self.connected(worker):
            return None
        try:
            return await self._call(self._workers[worker], frame_of, limit_s)
        except TimeoutError:
            return None

    async def _call(
        self,
        peer: FrameConnection | RouterLink,
        frame_of: Callable[[int], Any] = frames.InspectProcess,
        limit_s: float = CALL_TIMEOUT_S,
    ) -> dict[str, Any]:
        """Sends the frame for a new call id; returns the reply. Raises TimeoutError."""
        self._next_call += 1
        call_id = self._next_call
        reply = asyncio.get_running_loop().create_future()
        self._calls[call_id] = reply
        peer.send(frame_of(call_id))
        try:
            async with asyncio.timeout(limit_s):
                return await reply
        finally:
            del self._calls[call_id]

    def _take_reply(self, call_id: int, values: dict[str, Any]) -> None:
        self._unconfirmed.pop(call_id, None)
        reply = self._calls.get(call_id)
        if reply and not reply.done():
            reply.set_result(values)
