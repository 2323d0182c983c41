"""Has Serve's controller replaced when it does not answer any more, without having ended.

After SIGTERM the controller neither answers nor ends for most of a minute. Until it has ended, Ray
starts no other, and replicas that are lost meanwhile stay lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from enum import Enum

from ..applications import serve_controller

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0  #: From an answer to the next question.
#: For an answer. A controller that is stopped or busy may take some seconds.
SILENCE_LIMIT_S = 10.0
RESTART_LIMIT_S = 60.0  #: For a new controller to come up, on a machine that is overloaded.


class Reply(Enum):
    """What a question to the controller has met."""

    ANSWER = "answer"
    ERROR = "error"
    SILENCE = "silence"


class ServeWatch:
    """Asks Serve's controller again and again, and ends one that is silent.

    `ask` returns when the controller has answered, and raises whatever Ray raises. `end` ends its
    process; Ray then starts another, which finds the replicas as they are.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[None]],
        end: Callable[[], None],
        *,
        interval_s: float = LOOK_INTERVAL_S,
        silence_limit_s: float = SILENCE_LIMIT_S,
        restart_limit_s: float = RESTART_LIMIT_S,
    ) -> None:
        self._ask = ask
        self._end = end
        self._interval_s = interval_s
        self._silence_limit_s = silence_limit_s
        self._restart_limit_s = restart_limit_s

    async def run(self) -> None:
        """Watch until cancelled."""
        limit_s = self._silence_limit_s
        while True:
            await asyncio.sleep(self._interval_s)
            match await self._ask_once(limit_s):
                case Reply.ANSWER:
                    limit_s = self._silence_limit_s
                case Reply.ERROR:
                    pass  # Ray knows that it has ended, and starts another
                case Reply.SILENCE:
                    await self._end_it(limit_s)
                    limit_s = self._restart_limit_s

    async def _ask_once(self, limit_s: float) -> Reply:
        """Ask, and return what came within `limit_s`."""
        try:
            async with asyncio.timeout(limit_s) as limit:
                await self._ask()
        except Exception:
            # Ray has timeouts of its own: only that of the limit is silence.
            return Reply.SILENCE if limit.expired() else Reply.ERROR
        return Reply.ANSWER

    async def _end_it(self, silence_s: float) -> None:
        log.warning("Serve's controller was silent for %.0f s: ending it", silence_s)
        try:
            await asyncio.to_thread(self._end)
        except Exception as error:  # it may have ended by itself
            log.warning("could not end it: %s", str(error) or type(error).__name__)


async def ask_serve_controller() -> None:
    """Return when Serve's controller has answered. Raises whatever Ray raises."""
    await serve_controller().check_alive.remote()


def end_serve_controller() -> None:
    """End the process of Serve's controller, and let Ray start another. Raises Ray's errors."""
    import ray

    ray.kill(serve_controller(), no_restart=False)
