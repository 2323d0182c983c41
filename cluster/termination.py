"""SIGTERM of a replica's process: the replica begins at once to end, as if Serve had stopped it.

Ray handles the signal with a Python function of the main thread, which waits in C++: the signal did
nothing for up to 32 s, and then the process exited under its streams. `faulthandler` handles it in
C, in whatever thread, and writes to a file: that is a socket which the replica's loop reads.

Life of an ending:
    1. SIGTERM comes: `end` is called once, in the replica's loop.
    2. It returns, or `limit_s` is over: the process exits. If something blocks the loop, the
       process exits `BLOCKED_LIMIT_S` later. Serve sees that within a second, and starts another
       replica.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

#: As Serve gives a replica (`graceful_shutdown_timeout_s` in cluster/app.py).
LIMIT_S = 15.0
#: Behind its limit a process has so long to exit by itself; a loop that is blocked cannot.
BLOCKED_LIMIT_S = 1.0
STDERR = 2  #: The file descriptor, as `sys.stderr` may be somebody's object without one.


def drain_on_sigterm(end: Callable[[], Awaitable[None]], limit_s: float = LIMIT_S) -> None:
    """Let SIGTERM call `end` and end the process; `end` has `limit_s` seconds.

    If `end` blocks the loop, the process ends `BLOCKED_LIMIT_S` after that, and writes to stderr
    where each of its threads stood. Call this once, in the replica's loop.
    """
    _Termination(end, limit_s)  # the loop keeps it


class _Termination:
    """Ends this process when it gets SIGTERM."""

    def __init__(self, end: Callable[[], Awaitable[None]], limit_s: float) -> None:
        self._end = end
        self._limit_s = limit_s
        self._task: asyncio.Task[None] | None = None
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reader, self._on_signal)
        faulthandler.register(signal.SIGTERM, self._writer, all_threads=False, chain=False)

    def _on_signal(self) -> None:
        self._reader.recv(1 << 16)  # where the signal met the process does not matter
        if self._task is None:
            self._task = self._loop.create_task(self._end_process())

    async def _end_process(self) -> None:
        began = time.monotonic()
        log.warning("SIGTERM: this process drains and ends, in %g s or soon after", self._limit_s)
        # In C, in a thread of its own: neither a blocked loop nor Python's lock stops it.
        faulthandler.dump_traceback_later(self._limit_s + BLOCKED_LIMIT_S, file=STDERR, exit=True)
        try:
            async with asyncio.timeout(self._limit_s):
                await self._end()
                await asyncio.sleep(0)  # frames that were just sent leave in the loop's next turn
        except Exception:
            log.exception("SIGTERM: draining failed")
        finally:  # also where Serve's own shutdown cancels `end`
            log.warning("SIGTERM: the process ends after %.2f s", time.monotonic() - began)
            logging.shutdown()
            os._exit(0)
