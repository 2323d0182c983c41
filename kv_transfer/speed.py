"""How fast the transports of this host move bytes, against memcpy of the same minute.

Two processes: this one holds a pool and writes (or reads), the other one holds a pool and polls.
All figures are GiB/s, the best of several rounds: what the machine can do when left alone.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import xxhash

from .layout import KVLayout
from .transport import NotificationReceived, PeerCard, PostedWriteEnded, Spans, Transport

GIB = 1 << 30
RUNS = tuple(1 << shift for shift in range(12, 21))  #: 4 KiB .. 1 MiB
ROUNDS = 30
PARTS = 8  #: of what is moved, timed one by one
DEADLINE_S = 30.0
_PAGE = 2 << 20


class Row(msgspec.Struct, frozen=True):
    """One cell of the table: bytes moved in runs that are scattered on both sides."""

    transport: str
    op: str  #: write | read
    run_bytes: int
    gib_s: float
    of_memcpy: float


class SpeedPool:
    """A `Pool` of `size` bytes: private and in huge pages, or in a memory file for `shm`."""

    memory, device = "DRAM", 0

    def __init__(self, size: int, shared: bool) -> None:
        self.size, start = size, 0
        self.fd: int | None = None
        if shared:
            self.fd = os.memfd_create("diptych-speed")
            os.ftruncate(self.fd, size)
            self._map = mmap.mmap(self.fd, size)
        else:
            self._map = mmap.mmap(-1, size + _PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if not shared:
            start = -address % _PAGE
        self.base = address + start
        self.view = memoryview(self._map)[start : start + size]
        np.frombuffer(self.view, np.uint8)[:] = 1  # every page is there before the clock runs


def memcpy(total_bytes: int, shared: bool = False) -> float:
    """GiB/s of one thread from one pool to another: in huge pages, or in memory files."""
    source, target = SpeedPool(total_bytes, shared), SpeedPool(total_bytes, shared)
    step = total_bytes // PARTS

    def copy(part: int) -> None:
        ctypes.memmove(target.base + part * step, source.base + part * step, step)

    return _best(total_bytes, copy)[0]


def first_copy(total_bytes: int) -> float:
    """GiB/s into a memory file that was just mapped: every page costs a fault."""
    source, target = SpeedPool(total_bytes, True), SpeedPool(total_bytes, True)
    assert target.fd is not None
    step = total_bytes // PARTS
    maps = [mmap.mmap(target.fd, step) for _ in range(ROUNDS * PARTS)]
    fresh = iter([ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in maps])
    return _best(total_bytes, lambda _: ctypes.memmove(next(fresh), source.base, step))[0]


def checksum(total_bytes: int) -> float:
    """GiB/s of xxh3 over blocks of an eighth of the bytes, one core."""
    view, step = SpeedPool(total_bytes, False).view, total_bytes // PARTS
    hash_of = xxhash.xxh3_64_intdigest
    return _best(total_bytes, lambda part: hash_of(view[part * step : (part + 1) * step]))[0]


def measure(name: str, total_bytes: int = 64 << 20, run_bytes: Iterable[int] = RUNS) -> list[Row]:
    """Rows of WRITE in runs of each size, for `nixl` of READ too.

    TransportUnavailable when the transport cannot run here; TimeoutError when nothing arrives.
    """
    sizes = list(run_bytes)
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    child = context.Process(target=_serve, args=(name, total_bytes, far), daemon=True)
    child.start()
    far.close()
    try:
        pool, transport = _open(name, f"speed-near-{os.getpid()}", total_bytes)
        near.send(_card(f"speed-near-{os.getpid()}", transport, pool))
        if not near.poll(DEADLINE_S):
            raise TimeoutError("the other process did not open its transport")
        peer = near.recv()
        transport.add_peer(peer)
        transport.notify(peer.agent, b"hello")
        _until(transport, lambda events: any(isinstance(e, NotificationReceived) for e in events))
        rows = [_row(name, "write", transport.write, transport, peer, size) for size in sizes]
        if hasattr(transport, "read"):
            rows += [_row(name, "read", transport.read, transport, peer, size) for size in sizes]
        transport.close()
        return rows
    finally:
        near.close()
        child.join(timeout=5.0)
        child.terminate()


def _row(
    name: str,
    op: str,
    post: Callable[[str, Spans, bytes], int],
    transport: Transport,
    peer: PeerCard,
    run: int,
) -> Row:
    rng, count = random.Random(run), peer.size // run
    scattered = [np.array(rng.sample(range(count), count), np.int32) for _ in range(2)]
    parts = list(zip(*(np.array_split(each, PARTS) for each in scattered), strict=True))

    def move(part: int) -> None:
        handle = post(peer.agent, Spans(run, *parts[part]), b"")
        _until(transport, lambda events: any(e == PostedWriteEnded(handle, True) for e in events))

    source, target = SpeedPool(peer.size, False), SpeedPool(peer.size, False)
    step = peer.size // PARTS

    def copy(part: int) -> None:
        ctypes.memmove(target.base + part * step, source.base + part * step, step)

    ours, floor = _best(peer.size, move, copy)
    return Row(name, op, run, round(ours, 2), round(ours / floor, 3))


def _best(total: int, *acts: Callable[[int], object]) -> list[float]:
    """GiB/s of each act over all parts: the sum of every part's best time.

    They take turns, so they see the same machine; a part is over before a busy one takes the core.
    """
    best = np.full((len(acts), PARTS), np.inf)
    for _ in range(ROUNDS):
        for part in range(PARTS):
            for index, act in enumerate(acts):
                began = time.perf_counter()
                act(part)
                best[index, part] = min(best[index, part], time.perf_counter() - began)
    return (total / best.sum(axis=1) / GIB).tolist()


def _until(transport: Transport, seen: Callable[[list[Any]], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not seen(transport.poll()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{transport.name}: nothing arrives")


def _open(name: str, agent: str, size: int) -> tuple[SpeedPool, Any]:
    from .transports import open_transport

    pool = SpeedPool(size, shared=name == "shm")
    return pool, open_transport(name, agent, pool, lambda *_: True, "127.0.0.1")


def _card(agent: str, transport: Transport, pool: SpeedPool) -> PeerCard:
    layout = KVLayout(1, 1, 64, 64, 1, "uint8", 1)  # transports do not look at it
    return PeerCard(agent, transport.name, b"", transport.address(), pool.base, pool.size, layout)


def _serve(name: str, size: int, pipe: Connection) -> None:
    """The other process: answers the first note, then polls until the pipe is closed."""
    agent = f"speed-far-{os.getpid()}"
    pool, transport = _open(name, agent, size)
    peer = pipe.recv()
    transport.add_peer(peer)
    pipe.send(_card(agent, transport, pool))
    while not pipe.poll(0):
        for event in transport.poll():
            if isinstance(event, NotificationReceived) and event.data == b"hello":
                transport.notify(peer.agent, b"hello")
        if transport.name != "tcp":
            time.sleep(0.0002)  # the writer copies by itself; who spins here takes a core
    transport.close()
