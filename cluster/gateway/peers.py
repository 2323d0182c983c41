"""The other gateways of a cluster: what they keep for clients, and what API keys use with them.

Gateways learn of each other from the models' routers. Each dials every other one, again and again
while a router names it, and answers those that dial it. A gateway is asked for what only one of
them has: a stored response, or the answers that are kept for a client whose connection broke. Ids
that a gateway gives begin with its tag (`wire.aliases.gateway_tag`), so that the right one is asked
first; an id that a client chose may be with any of them.

Several times a second each tells the others what the API keys use (`edge/key_limits.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import aclosing
from typing import Protocol, TypeVar, assert_never

from ...protos import frames
from ...protos.handshake import PeerIdentity
from ..wire.aliases import ALIAS_DIGITS, gateway_tag
from ..wire.connection import FrameConnection, FrameListener, dial
from .edge.keys import AccessControl
from .errors import ApiError

log = logging.getLogger(__name__)

KIND = "gateway"  #: What a gateway says of itself to whom it dials.
REDIAL_S = 0.5  #: Between two tries to connect to a gateway.
CALL_LIMIT_S = 2.0  #: For a gateway to answer.
CALLS_MAX = 256  #: Calls without an answer; one more is refused.
#: No response has a longer id, as ids of requests have at most 128 characters. A longer one would
#: only fill the gateways' connections.
RESPONSE_ID_CHARS_MAX = 200
EXCHANGE_S = 0.25  #: Between two reports of what the API keys use.

Reply = TypeVar("Reply", frames.ResponseFound, frames.AnswerTaken)


class KeptForClients(Protocol):
    """What this gateway has for clients that are at another one now."""

    def find_response(self, frame: frames.FindResponse) -> frames.ResponseFound:
        """Returns a stored response, or that it is not there."""

    def take_answer(self, frame: frames.TakeAnswer) -> frames.AnswerTaken:
        """Gives kept answers away, or returns that there are none."""


class GatewayPeers:
    """The connections of one gateway to the others."""

    def __init__(
        self, name: str, secret: str, silence_s: float, *, kept: KeptForClients, door: AccessControl
    ) -> None:
        """Knows no other gateway yet, and reaches none before `start`.

        `name` is this gateway's in the cluster. A gateway is given up after `silence_s` without a
        sign of life. `kept` answers the others; `door` is told what keys use with them.
        """
        self._identity = PeerIdentity(name, KIND, secret)
        self._silence_s = silence_s
        self._kept = kept
        self._door = door
        self.tag = gateway_tag(secret, name)  #: What the ids that this gateway gives begin with.
        self.address = ""  #: host:port where the others reach this gateway; empty before `start`.
        self._listener = FrameListener(secret, frames.FramesToGateway, self._serve)
        self._exchange: asyncio.Task[None] | None = None  #: Tells the others what keys use.

        self._introduced = False  #: True once any router has told of the others.
        #: The gateways that each router names, by what stands for the router.
        self._directories: dict[object, dict[str, str]] = {}
        self._names: dict[str, str] = {}  #: Of the other gateways, by their tags.
        #: The task that keeps a gateway connected, by the gateway's name.
        self._dialing: dict[str, asyncio.Task[None]] = {}
        self._connections: dict[str, FrameConnection] = {}  #: That were dialled, by name.
        self._callers: dict[str, FrameConnection] = {}  #: Gateways that dialled this one, by name.

        #: Calls that wait for their reply, by call id: with the name of who is asked.
        self._calls: dict[int, tuple[str, asyncio.Future[frames.FramesFromGateway]]] = {}
        self._last_call_id = 0

    async def start(self, host: str) -> None:
        """Listens on a free port of `host`, and begins to tell others what keys use."""
        self.address = await self._listener.start(host)
        self._exchange = asyncio.get_running_loop().create_task(self._tell_usage())

    async def close(self) -> None:
        """Ends all connections. Calls that wait are answered as by a gateway that is gone."""
        self._listener.close()
        self._directories.clear()
        tasks = [task for task in (self._exchange, *self._dialing.values()) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for name in self._dialing:
            self._end_calls(name)
        self._dialing.clear()
        for connection in [*self._callers.values(), *self._connections.values()]:
            connection.abort()

    @property
    def name(self) -> str:
        """This gateway's name in the cluster."""
        return self._identity.name

    @property
    def gateways(self) -> int:
        """How many gateways there are, this one included."""
        return 1 + len(self._dialing)

    @property
    def alone(self) -> bool:
        """Whether this gateway is known to be the only one, so that there is nobody to ask."""
        return self._introduced and not self._dialing

    @property
    def connected(self) -> int:
        """How many other gateways can be asked now."""
        return len(self._connections)

    def new_request_id(self) -> str:
        """Returns an id for a request without one: other gateways see by it who gave the id."""
        # The tag replaces as many random digits, so that an id's length does not show the tag.
        return self.tag + uuid.uuid4().hex[len(self.tag) :]

    # ---- who there is ----------------------------------------------------------------------------

    def update(self, router: object, cards: Iterable[frames.GatewayCard]) -> None:
        """Takes the gateways that a router names now; `router` is any hashable that stands for it.

        A gateway is gone when no router names it and its connection has ended: a router that is
        new does not know all of them yet.
        """
        self._introduced = True
        own_name = self.name
        directory = {card.name: card.address for card in cards if card.name != own_name}
        self._replace_directory(router, directory)

    def forget_router(self, router: object) -> None:
        """Forgets what a router has named, whose model is gone."""
        self._replace_directory(router, {})
        del self._directories[router]

    def _replace_directory(self, router: object, directory: dict[str, str]) -> None:
        """Takes what a router names now, and gives up the gateways that are gone."""
        self._directories[router] = directory
        for name in list(self._dialing):
            if not self._is_named(name) and name not in self._connections:
                self._dialing[name].cancel()
                self._forget(name)
        for name, address in directory.items():
            if name not in self._dialing:
                dialing = self._keep_connected(name, address)
                self._dialing[name] = asyncio.get_running_loop().create_task(dialing)
                self._names[gateway_tag(self._identity.secret, name)] = name

    def _forget(self, name: str) -> None:
        """Forgets a gateway that is gone."""
        del self._dialing[name]
        del self._names[gateway_tag(self._identity.secret, name)]

    def _is_named(self, name: str) -> bool:
        return any(name in directory for directory in self._directories.values())

    async def _keep_connected(self, name: str, address: str) -> None:
        """Keeps one gateway connected for as long as a router names it."""
        while True:
            try:
                connection = await dial(address, self._identity, frames.FramesFromGateway, name)
                self._connections[name] = connection
                async with aclosing(connection.frames(self._silence_s)) as received:
                    async for frame in received:
                        self._take_reply(frame)
            except (OSError, TimeoutError) as error:
                log.info("%s: %s", name, str(error) or type(error).__name__)
            except Exception:
                log.exception("connection to %s failed", name)
            self._connections.pop(name, None)
            self._end_calls(name)
            if not self._is_named(name):
                self._forget(name)
                return
            await asyncio.sleep(REDIAL_S)

    # ---- what others are asked -------------------------------------------------------------------

    async def find_response(
        self, tenant: str, response_id: str, *, with_turns: bool = False, delete: bool = False
    ) -> frames.ResponseFound | None:
        """Returns a response that another gateway has stored; None if none of them has it.

        Raises ApiError if that cannot be said, as a gateway does not answer or is not known yet.
        """
        if len(response_id) > RESPONSE_ID_CHARS_MAX:
            return None
        return await self._ask(
            response_id,
            lambda call_id: frames.FindResponse(
                call_id,
                tenant=tenant,
                response_id=response_id,
                with_turns=with_turns,
                delete=delete,
            ),
            lambda reply: reply.response is not None,
            frames.ResponseFound,
        )

    async def take_answer(
        self, model: str, tenant: str, request_id: str, digest: bytes
    ) -> frames.AnswerTaken | None:
        """Returns the answers that another gateway has kept, which it forgets; None if none has.

        Raises ApiError if that cannot be said, as a gateway does not answer or is not known yet.
        """
        return await self._ask(
            request_id,
            lambda call_id: frames.TakeAnswer(
                call_id, model=model, tenant=tenant, request_id=request_id, digest=digest
            ),
            lambda reply: bool(reply.journals),
            frames.AnswerTaken,
        )

    def gave(self, client_id: str) -> bool:
        """Returns whether another gateway that lives has given this id."""
        return self._giver(client_id) is not None

    def _giver(self, client_id: str) -> str | None:
        """Returns the name of the other gateway that gave an id, if it lives."""
        return self._names.get(client_id[:ALIAS_DIGITS])

    async def _ask(
        self,
        client_id: str,
        frame_of: Callable[[int], frames.FindResponse | frames.TakeAnswer],
        is_found: Callable[[Reply], bool],
        reply_type: type[Reply],
    ) -> Reply | None:
        """Asks the gateway that gave an id, and then the others, until one has what is asked for.

        Raises ApiError if none has it and one of them did not answer, or if no router has told of
        the others yet.
        """
        if not self._introduced:
            message = "this gateway does not know the other gateways yet; try again"
            raise ApiError("no_capacity", message)
        giver = self._giver(client_id)
        others = [name for name in self._dialing if name != giver]
        silent = 0
        for names in ([giver] if giver else [], others):
            calls = (self._call(name, frame_of, reply_type) for name in names)
            for reply in await asyncio.gather(*calls):
                if reply is None:
                    silent += 1
                elif is_found(reply):
                    return reply
        if silent:
            message = "the gateway that may have this does not answer now; try again"
            raise ApiError("no_capacity", message)
        return None

    async def _call(
        self,
        name: str,
        frame_of: Callable[[int], frames.FindResponse | frames.TakeAnswer],
        reply_type: type[Reply],
    ) -> Reply | None:
        """Returns a gateway's reply; None if it does not answer. Raises ApiError."""
        connection = self._connections.get(name)
        if connection is None:
            return None
        if len(self._calls) >= CALLS_MAX:
            raise ApiError("no_capacity", "too many questions to other gateways; try again")
        self._last_call_id += 1
        call_id = self._last_call_id
        waiting: asyncio.Future[frames.FramesFromGateway]
        waiting = asyncio.get_running_loop().create_future()
        self._calls[call_id] = (name, waiting)
        connection.send(frame_of(call_id))
        try:
            async with asyncio.timeout(CALL_LIMIT_S):
                reply = await waiting
        except TimeoutError:
            return None
        finally:
            del self._calls[call_id]
        return reply if isinstance(reply, reply_type) else None

    def _take_reply(self, frame: frames.FramesFromGateway) -> None:
        match frame:
            case frames.ResponseFound(call_id) | frames.AnswerTaken(call_id):
                _, waiting = self._calls.get(call_id, ("", None))
                if waiting and not waiting.done():
                    waiting.set_result(frame)
            case frames.Heartbeat():
                pass
            case _:
                assert_never(frame)

    def _end_calls(self, name: str) -> None:
        """Ends the calls to a gateway whose connection has ended."""
        for called, waiting in list(self._calls.values()):
            if called == name and not waiting.done():
                waiting.set_result(frames.Heartbeat())  # no reply of any call

    # ---- what others ask -------------------------------------------------------------------------

    async def _serve(self, peer: FrameConnection, hello: frames.Hello) -> None:
        """Answers another gateway until its connection ends."""
        if hello.kind != KIND:
            peer.abort()
            return
        previous = self._callers.get(peer.name)
        if previous:  # it is back before the end of its old connection was seen
            previous.abort()
            # What it told there may be over, of which it says nothing on a new connection.
            self._door.take_usage(peer.name, {})
        self._callers[peer.name] = peer
        try:
            async with aclosing(peer.frames(self._silence_s)) as received:
                async for frame in received:
                    self._take_frame(peer, frame)
                    # A long reply leaves before the next one is made: two of them would be more
                    # than a connection may hold.
                    await peer.drain()
        except ConnectionError:
            pass  # while it drained; the end of `frames` raises nothing
        finally:
            if self._callers.get(peer.name) is peer:
                del self._callers[peer.name]
                self._door.take_usage(peer.name, {})

    def _take_frame(self, peer: FrameConnection, frame: frames.FramesToGateway) -> None:
        match frame:
            case frames.FindResponse():
                peer.send(self._kept.find_response(frame))
            case frames.TakeAnswer():
                peer.send(self._kept.take_answer(frame))
            case frames.KeyUsageReport(usage):
                self._door.take_usage(peer.name, usage)
            case frames.Heartbeat():
                pass
            case _:
                assert_never(frame)

    async def _tell_usage(self) -> None:
        """Tells the other gateways again and again what keys use at this one.

        Nothing is told while no key uses anything, but for the first time, which ends what was told
        before.
        """
        told_any = False
        while True:
            await asyncio.sleep(EXCHANGE_S)
            self._door.share_between(self.gateways)
            usage = self._door.usage(time.monotonic()) if self._connections else {}
            if usage or told_any:
                for connection in self._connections.values():
                    connection.send(frames.KeyUsageReport(usage))
            told_any = bool(usage)
