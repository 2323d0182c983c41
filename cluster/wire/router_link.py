"""A worker's or gateway's connection to the active router, for as long as the process lives.

The link finds the router, connects, and hands its frames on. When the connection ends, the link
finds the router again and reconnects. Routers have terms. A router whose term is lower than the
highest one seen has been replaced: the link tells it that, and closes the connection.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from ...protos import frames
from ...protos.handshake import PeerIdentity
from .connection import FrameConnection, dial

log = logging.getLogger(__name__)

#: The longest pause between the end of a connection, or a try that failed, and the next try. Each
#: pause is drawn from the upper half: all links lose a router at once, and must not redial at once.
RETRY_S = 0.5
FIND_TIMEOUT_S = 10.0  #: Limit of one call of `find_router`.


class RouterLink:
    """Keeps a connection to the router.

    `find_router` returns the router's "host:port". `identity` is what this process proves to the
    router. A router that sends nothing for `silence_s` is given up; one with which there was
    traffic a moment ago, for `busy_silence_s` if that is given. `on_connected` is called for each
    new connection, before its first frame. `on_frame` is called for each frame but heartbeats and
    the directory of a replaced router. `on_lost` is called when a connection has ended, with the
    seconds since the router's last frame; it must not raise. All are called on the loop that runs
    `run`; if `on_connected` or `on_frame` raises, the error is logged and the link connects again.
    """

    def __init__(
        self,
        find_router: Callable[[], Awaitable[str]],
        identity: PeerIdentity,
        silence_s: float,
        on_connected: Callable[[], None],
        on_frame: Callable[[Any], None],
        on_lost: Callable[[float], None] = lambda _: None,
        busy_silence_s: float | None = None,
    ) -> None:
        self._find_router = find_router
        self._identity = identity
        self._silence_s = silence_s
        self._on_connected = on_connected
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._busy_silence_s = busy_silence_s
        self._connection: FrameConnection | None = None
        self.term = 0  #: The highest term of a router so far; 0: none was heard of.

    @property
    def connected(self) -> bool:
        """Whether there is a connection that has not ended; a silent router may be frozen."""
        return self._connection is not None and not self._connection.closed

    def send(self, frame: msgspec.Struct) -> None:
        """Send to the router, or drop the frame if there is none.

        Nothing is lost by that, because a process tells a new router everything again.
        """
        if self._connection:
            self._connection.send(frame)

    async def run(self) -> None:
        """Connect to the router, again and again, until the task is cancelled."""
        while True:
            try:
                await self._run_connection()
            except (OSError, TimeoutError) as error:
                log.info("no connection to the router: %s", str(error) or type(error).__name__)
            # Errors of Ray Serve, which finds the router, or of a callback: the link outlives them.
            except Exception:
                log.exception("the link to the router failed")
            if self._connection:
                silent_s = self._connection.silent_s
                self._connection = None
                self._on_lost(silent_s)
            await asyncio.sleep(RETRY_S * random.uniform(0.5, 1.0))

    async def _run_connection(self) -> None:
        """Find the router, connect, and hand its frames on, until the connection ends."""
        async with asyncio.timeout(FIND_TIMEOUT_S):
            address = await self._find_router()
        connection = await dial(address, self._identity, frames.FramesFromRouter, "router")
        self._connection = connection
        if self._busy_silence_s is not None:
            connection.on_suspected = lambda: self._close_if_silent(connection)
        try:
            self._on_connected()
        except BaseException:
            connection.abort()
            raise
        async with aclosing(connection.frames(self._silence_s)) as received:
            async for frame in received:
                if isinstance(frame, frames.WorkerDirectory):
                    if frame.term < self.term:
                        connection.send(frames.NewerRouterSeen(self.term))
                        return
                    self.term = frame.term
                self._on_frame(frame)

    def _close_if_silent(self, connection: FrameConnection) -> None:
        """Close a connection whose router may be frozen, once it was silent for long enough."""
        assert self._busy_silence_s is not None  # for the type checker: else nobody asks
        if connection.closed or not connection.suspected:
            return
        remaining_s = self._busy_silence_s - connection.silent_s
        if remaining_s > 0.0:  # not long enough yet; or it spoke, and is suspected a moment longer
            loop = asyncio.get_running_loop()
            loop.call_later(remaining_s, self._close_if_silent, connection)
            return
        log.warning("the router was silent for %.1f s: connection closed", connection.silent_s)
        connection.abort()
