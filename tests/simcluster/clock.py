"""An event loop on virtual time: what waits costs nothing, and computing takes no time.

The loop runs the code of all processes of a simulated cluster, each task under the name of its
process. When nothing is ready, the clock jumps to the next timer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context, ContextVar, copy_context
from typing import Any
from unittest import mock
from weakref import WeakSet

#: The simulated process whose code runs; empty: the test's own.
PROCESS: ContextVar[str] = ContextVar("PROCESS", default="")

BEGIN_S = 1_000.0  #: what a monotonic clock says at the beginning
MARGIN_S = 1e-7
TURNS_MAX = 100_000  #: of the loop at one moment
WALL_S = 1_800_000_000.0  #: what the wall clock says then, since 1970


class Stuck(AssertionError):
    """Nothing is left that could happen, but the simulation has not ended."""


class Clock:
    """The time of a simulated cluster, in seconds."""

    def __init__(self) -> None:
        self.now_s = BEGIN_S
        self.wall_step_s = 0.0  #: by how much the wall clock was set forward, or back

    def monotonic(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return WALL_S + self.now_s + self.wall_step_s

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Has all code of this Python process see this clock."""
        with contextlib.ExitStack() as patches:
            for name, function in (
                ("monotonic", self.monotonic),
                ("perf_counter", self.monotonic),
                ("time", self.wall),
                ("time_ns", lambda: int(self.wall() * 1e9)),
            ):
                patches.enter_context(mock.patch.object(time, name, function))
            yield


class _Jump:
    """Stands for a loop's selector: it never has an event, and waiting moves the clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._turns = 0  #: of the loop since the clock last moved

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Stuck("nothing is left to happen")
        self._turns += 1
        if self._turns > TURNS_MAX:
            raise Stuck(
                f"the clock stands at {self._clock.now_s:g} s, and something goes on and on"
            )
        if timeout > 0.0:
            self._turns = 0
            # A little more: a loop runs timers a nanosecond early, which would then see that their
            # time has not come, and wait for it in vain as the clock stands still.
            self._clock.now_s += timeout + MARGIN_S
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """A loop whose time is a `Clock`, and whose connections are those of a simulated network."""

    #: Whoever makes connections sets these two (`network.Network`).
    connect: Callable[..., Coroutine[Any, Any, Any]]
    listen: Callable[..., Any]

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._selector = _Jump(clock)
        self._virtual = clock
        self.tasks: dict[str, WeakSet[asyncio.Task[Any]]] = {}  #: by process
        self.set_task_factory(self._make_task)

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, context=context)
        process = (context or copy_context()).get(PROCESS, "")
        self.tasks.setdefault(process, WeakSet()).add(task)
        return task

    def spawn(self, process: str, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs a coroutine as a task of this process."""
        context = copy_context()
        context.run(PROCESS.set, process)
        return self.create_task(coroutine, context=context)

    def time(self) -> float:
        return self._virtual.now_s

    def run_in_executor(self, executor: Any, function: Any, *args: Any) -> Any:
        """Calls the function at once: there are no threads."""
        future = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Any, host: str, port: int, **_: Any
    ) -> tuple[Any, Any]:
        return await self.connect(protocol_factory, host, port)

    async def create_server(  # type: ignore[override]
        self, protocol_factory: Any, host: str, port: int, **_: Any
    ) -> Any:
        return self.listen(protocol_factory, host)

    def _process_events(self, event_list: Any) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Wakes nobody: the loop never sleeps."""
