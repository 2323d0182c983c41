"""Connections between the processes of a simulated cluster: streams that are late, stop and break.

What was sent arrives in order and whole, or not at all behind the end of its connection, as with
TCP. A process that is cut off neither gets nor sends anything until the cut ends.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from types import SimpleNamespace
from typing import Any

from .clock import MARGIN_S, PROCESS, VirtualLoop

LATENCY_S = (0.0001, 0.003)  #: of what is sent, from least to most


class Network:
    """All listeners and connections. Use one for a loop."""

    def __init__(self, loop: VirtualLoop, draw: random.Random) -> None:
        self.loop = loop
        self.draw = draw
        self._ports = itertools.count(1)
        self._listeners: dict[int, Listener] = {}
        self._ends: list[End] = []
        self._cut_until_s: dict[str, float] = {}  #: by process
        loop.connect = self._connect
        loop.listen = self._listen

    # ---- faults ----------------------------------------------------------------------------------

    def cut_off(self, process: str, seconds: float) -> None:
        """Holds up everything from and to a process for so long."""
        until_s = self.loop.time() + seconds
        self._cut_until_s[process] = max(self._cut_until_s.get(process, 0.0), until_s)

    def end(self, process: str) -> None:
        """The process has died: its listeners are gone, and its peers see their connections end."""
        for port, listener in list(self._listeners.items()):
            if listener.process == process:
                del self._listeners[port]
        for end in [one for one in self._ends if one.process == process]:
            end.die()

    def blocked_until_s(self, one: str, other: str) -> float:
        """Until when nothing passes between two processes."""
        return max(self._cut_until_s.get(one, 0.0), self._cut_until_s.get(other, 0.0))

    # ---- what the loop asks for ------------------------------------------------------------------

    def _listen(self, protocol_factory: Callable[[], Any], host: str) -> Listener:
        port = next(self._ports)
        listener = Listener(self, protocol_factory, host, port)
        self._listeners[port] = listener
        return listener

    async def _connect(
        self, protocol_factory: Callable[[], Any], host: str, port: int
    ) -> tuple[End, Any]:
        await asyncio.sleep(self.draw.uniform(*LATENCY_S))
        listener = self._listeners.get(port)
        if listener is None:
            raise ConnectionRefusedError(f"nobody listens at {host}:{port}")
        here = End(self, PROCESS.get(), copy_context())
        there = End(self, listener.process, listener.context)
        here.peer = there
        there.peer = here
        self._ends += [here, there]
        there.context.run(there.open, listener.protocol_factory())
        protocol = protocol_factory()
        here.open(protocol)
        return here, protocol

    def forget(self, end: End) -> None:
        if end in self._ends:
            self._ends.remove(end)

    def close_listener(self, port: int) -> None:
        self._listeners.pop(port, None)


class Listener:
    """What `loop.create_server` returns."""

    def __init__(
        self, network: Network, protocol_factory: Callable[[], Any], host: str, port: int
    ) -> None:
        self.process = PROCESS.get()
        self.context: Context = copy_context()
        self.protocol_factory = protocol_factory
        self._network = network
        self._port = port
        self.sockets = [SimpleNamespace(getsockname=lambda: (host, port))]

    async def start_serving(self) -> None:
        """It does from the beginning."""

    def close(self) -> None:
        self._network.close_listener(self._port)

    async def wait_closed(self) -> None:
        """It is at once."""


class End(asyncio.Transport):
    """One end of a connection."""

    peer: End

    def __init__(self, network: Network, process: str, context: Context) -> None:
        super().__init__()
        self.process = process
        self.context = context
        self._network = network
        self._loop = network.loop
        self._protocol: Any = None
        self._closing = False
        self._dead = False  #: its process is
        self._paused = False
        #: What is under way to this end, with the time of its arrival; None: the other end's close.
        self._coming: deque[tuple[float, bytes | None]] = deque()
        self._coming_bytes = 0
        self._pump: asyncio.TimerHandle | None = None

    def open(self, protocol: Any) -> None:
        self._protocol = protocol
        protocol.connection_made(self)

    # ---- a transport -----------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        if data and not self._closing:
            self.peer.send(bytes(data))

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if self._closing:
            return
        self._closing = True
        self.peer.send(None)
        self._loop.call_soon(self._lost, None, context=self.context)

    def get_write_buffer_size(self) -> int:
        return self.peer._coming_bytes

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "socket":
            return SimpleNamespace(setsockopt=lambda *_: None)
        return default

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self._arm()

    def is_reading(self) -> bool:
        return not self._paused

    # ---- the network -----------------------------------------------------------------------------

    def send(self, data: bytes | None) -> None:
        """Something is under way to this end."""
        if self._dead or self._closing:
            return
        arrives_at = self._loop.time() + self._network.draw.uniform(*LATENCY_S)
        if self._coming:
            arrives_at = max(arrives_at, self._coming[-1][0])
        self._coming.append((arrives_at, data))
        self._coming_bytes += len(data or b"")
        self._arm()

    def _arm(self) -> None:
        if self._pump is not None or self._paused or not self._coming:
            return
        blocked_until_s = self._network.blocked_until_s(self.process, self.peer.process)
        at = max(self._coming[0][0], blocked_until_s)
        self._pump = self._loop.call_at(at, self._arrive, context=self.context)

    def _arrive(self) -> None:
        self._pump = None
        if self._closing:
            self._coming.clear()
        now = self._loop.time() + MARGIN_S  # a loop runs timers a nanosecond early
        while self._coming and not self._paused and not self._closing:
            if self._coming[0][0] > now:
                break
            if self._network.blocked_until_s(self.process, self.peer.process) > now:
                break
            _, data = self._coming.popleft()
            self._coming_bytes -= len(data or b"")
            if data is not None:
                self._protocol.data_received(data)
                continue
            self._closing = True
            was_reset = self._network.draw.random() < 0.5
            self._lost(ConnectionResetError("reset by the peer") if was_reset else None)
        self._arm()

    def _lost(self, error: Exception | None) -> None:
        self._network.forget(self)
        self._coming.clear()
        if not self._dead:
            self._protocol.connection_lost(error)

    def die(self) -> None:
        """The process of this end has died: its code hears nothing, and the other end does."""
        self._dead = True
        self._coming.clear()
        self._network.forget(self)
        if not self._closing:
            self._closing = True
            self.peer.send(None)
