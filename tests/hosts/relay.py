"""The cable between hosts: a switch of Ethernet frames in user space, whose links can be made worse.

Kernels here have no netem. So each host's network card is a TAP device, whose other end is read and
written by this process: it delays frames, drops some, limits how many bytes pass, or passes none.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import multiprocessing
import os
import random
import selectors
import struct
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

FRAME_BYTES = 65_536  #: No frame is longer.
MTU = 9000  #: Of all cards: jumbo frames, as fabrics have them.
BACKLOG_S = 0.5  #: A frame that would wait for longer at a narrow link is dropped.
BROADCAST_BIT = 1  #: In the first byte of a destination.

_SET_INTERFACE = 0x400454CA  # TUNSETIFF
_TAP_WITHOUT_HEADER = 0x1002  # IFF_TAP | IFF_NO_PI


@dataclass(frozen=True)
class LinkQuality:
    """What happens to frames between two hosts, in both directions."""

    is_up: bool = True
    delay_s: float = 0.0
    loss: float = 0.0  #: The share of frames that do not arrive.
    bytes_s: float = float("inf")  #: In each direction.


GOOD = LinkQuality()


def open_tap(name: str) -> int:
    """Makes a TAP device of this name; returns the descriptor of its other end. Needs root."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _SET_INTERFACE, struct.pack("16sH", name.encode(), _TAP_WITHOUT_HEADER))
    return descriptor


class Switch:
    """Forwards frames among TAP devices, until its orders end."""

    def __init__(self, taps: dict[str, int], orders: Connection) -> None:
        """`taps` are descriptors by host. An order is two hosts and their `LinkQuality`."""
        self._taps = taps
        self._orders = orders
        self._qualities: dict[frozenset[str], LinkQuality] = {}
        self._places: dict[bytes, str] = {}  #: Hosts by the addresses of their cards.
        self._free_at: dict[tuple[str, str], float] = {}  #: When a direction has sent all it took.
        self._under_way: list[tuple[float, int, str, bytes]] = []  #: A heap, by time of arrival.
        self._numbers = itertools.count()
        self._draw = random.Random(5)

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._orders, selectors.EVENT_READ, "")
            for host, tap in self._taps.items():
                selector.register(tap, selectors.EVENT_READ, host)
            while True:
                for key, _ in selector.select(self._patience_s()):
                    if key.data:
                        try:
                            self._forward(key.data)
                        except OSError:  # the host is gone, with its card
                            selector.unregister(key.fd)
                    elif not self._obey():
                        return
                self._deliver()

    def _patience_s(self) -> float | None:
        if not self._under_way:
            return None
        return max(self._under_way[0][0] - time.monotonic(), 0.0)

    def _obey(self) -> bool:
        try:
            one, other, quality = self._orders.recv()
        except EOFError:
            return False
        self._qualities[frozenset((one, other))] = quality
        self._orders.send(None)  # it is done
        return True

    def _forward(self, host: str) -> None:
        """Takes what a host has sent. Raises OSError when its card is gone."""
        for _ in range(64):  # then it is the turn of others
            try:
                frame = os.read(self._taps[host], FRAME_BYTES)
            except BlockingIOError:
                return
            self._take(host, frame)

    def _take(self, source: str, frame: bytes) -> None:
        self._places[frame[6:12]] = source
        place = self._places.get(frame[:6])
        is_for_all = frame[0] & BROADCAST_BIT or place is None
        for target in list(self._taps) if is_for_all else [place]:
            if target and target != source:
                self._send(source, target, frame)

    def _send(self, source: str, target: str, frame: bytes) -> None:
        quality = self._qualities.get(frozenset((source, target)), GOOD)
        if not quality.is_up or self._draw.random() < quality.loss:
            return
        now = time.monotonic()
        begins_at = max(now, self._free_at.get((source, target), 0.0))
        if begins_at - now > BACKLOG_S:
            return
        ends_at = begins_at + len(frame) / quality.bytes_s
        self._free_at[source, target] = ends_at
        if ends_at + quality.delay_s <= now:
            self._write(target, frame)
            return
        arrival = (ends_at + quality.delay_s, next(self._numbers), target, frame)
        heapq.heappush(self._under_way, arrival)

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            _, _, target, frame = heapq.heappop(self._under_way)
            self._write(target, frame)

    def _write(self, target: str, frame: bytes) -> None:
        # No room in the card, which any network may have; or there is no card any more.
        with contextlib.suppress(OSError):
            os.write(self._taps[target], frame)


class Relay:
    """A `Switch` in a process of its own."""

    def __init__(self, taps: dict[str, int]) -> None:
        received, self._orders = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_run, args=(taps, received, self._orders))
        self._process.start()
        received.close()
        for tap in taps.values():
            os.close(tap)

    def set(self, one: str, other: str, quality: LinkQuality) -> None:
        """Gives the link between two hosts this quality; it has it when this returns."""
        self._orders.send((one, other, quality))
        self._orders.recv()

    def stop(self) -> None:
        self._orders.close()
        self._process.join(5.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _run(taps: dict[str, int], orders: Connection, sending_end: Connection) -> None:
    sending_end.close()  # else this process itself would keep the pipe open
    Switch(taps, orders).run()
