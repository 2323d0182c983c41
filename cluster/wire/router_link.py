"""A worker's or gateway's connection to the active router, for as long as the process lives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

from ...protos import frames as f
from .connection import Connection, dial
from .handshake import Caller

log = logging.getLogger(__name__)

RETRY_S = 0.5


class RouterLink:
    """Finds the router, says hello, passes its frames on; again and again when it goes away.

    A router with a lower term than one seen before is told so and left.
    """

    def __init__(
        self,
        find: Callable[[], Awaitable[str]],
        caller: Caller,
        silence_s: float,
        joined: Callable[[], None],
        received: Callable[[Any], None],
    ) -> None:
        self._find, self._caller, self._silence_s = find, caller, silence_s
        self._joined, self._received = joined, received
        self._connection: Connection | None = None
        self.term = 0

    @property
    def connected(self) -> bool:
        return self._connection is not None and not self._connection.closed

    def send(self, frame: Any) -> None:
        """Sends to the router, or drops: everything is said again when a router is there."""
        if self._connection:
            self._connection.send(frame)

    async def run(self) -> None:
        while True:
            try:
                await self._once()
            except (OSError, TimeoutError) as error:
                log.info("no router yet: %s", error or type(error).__name__)
            except Exception:  # Serve's own errors: this must go on for as long as the process
                log.exception("no router yet")
            self._connection = None
            await asyncio.sleep(RETRY_S)

    async def _once(self) -> None:
        async with asyncio.timeout(10.0):
            address = await self._find()
        connection = await dial(address, self._caller, f.FramesFromRouter, "router")
        self._connection = connection
        self._joined()
        async with aclosing(connection.frames(self._silence_s)) as frames:
            async for frame in frames:
                if isinstance(frame, f.WorkerDirectory):
                    if frame.term < self.term:
                        connection.send(f.NewerRouterSeen(self.term))
                        return
                    self.term = frame.term
                self._received(frame)
