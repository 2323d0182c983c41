"""How fast the transports of this host move bytes, against memcpy of the same minute.

Two processes: this one holds a pool and writes (or reads), the other one holds a pool and polls.
Speeds are in GiB/s, the best of several rounds: what the machine can do when left alone. The bytes
to move are one pool's, whole: `total_bytes`, a multiple of `PARTS` times the longest run.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Protocol

import msgspec
import numpy as np
import xxhash

from .layout import KVLayout
from .transport import (
    NotificationReceived,
    PeerCard,
    PostedWriteEnded,
    Spans,
    Transport,
    TransportEvent,
    card_of,
)
from .transports import open_transport

GIB = 1 << 30
RUNS = tuple(1 << shift for shift in range(12, 21))  #: bytes of a run: 4 KiB .. 1 MiB
ROUNDS = 30  #: each part counts with its best; with so many, one of them is left alone
PARTS = 8  #: what is moved is cut into so many parts, timed one by one
DEADLINE_S = 60.0  #: for the other process to start beside other work, and for anything to arrive
_HUGE_PAGE = 2 << 20
_POLL_PAUSE_S = 0.0002  #: of the other process, where the writer copies without its help
_HELLO = b"hello"
_WRITE_NOTE = b"write"  #: comes with a write of `tcp`; the other process sends it back

PartAction = Callable[[int], object]  #: moves the part of this number


class SpeedRow(msgspec.Struct, frozen=True):
    """One cell of the table: bytes moved in runs that are scattered on both sides."""

    transport: str
    op: str  #: write | read
    run_bytes: int  #: of each run
    gib_s: float
    of_memcpy: float  #: `gib_s` over that of a memcpy of as many bytes, in huge pages, then


class Poster(Protocol):
    """`Transport.write`, or a transport's `read`."""

    def __call__(self, peer: str, spans: Spans, note: bytes) -> int: ...


class SpeedPool:
    """A `Pool` of `size` bytes: private and in huge pages, or in a memory file for `shm`."""

    memory = "DRAM"
    device = 0
    #: Any that is allowed: transports do not look at it.
    layout = KVLayout(
        layers=1,
        heads=1,
        head_dim=64,
        block_tokens=64,
        item_bytes=1,
        dtype="uint8",
        group_layers=1,
    )

    def __init__(self, size: int, shared: bool) -> None:
        self.size = size
        self.fd: int | None = None
        if shared:
            self.fd = os.memfd_create("diptych-speed")
            os.ftruncate(self.fd, size)
            self._map = mmap.mmap(self.fd, size)
        else:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._map = mmap.mmap(-1, size + _HUGE_PAGE, flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages refuses the advice
                self._map.madvise(mmap.MADV_HUGEPAGE)

        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        start = 0 if shared else -address % _HUGE_PAGE
        self.base = address + start
        self.view = memoryview(self._map)[start : start + size]
        np.frombuffer(self.view, np.uint8)[:] = 1  # every page is there before the clock runs


def _pool_copy(total_bytes: int, shared: bool) -> PartAction:
    """Returns what copies a part, by its number, from one new pool to another."""
    source = SpeedPool(total_bytes, shared)
    target = SpeedPool(total_bytes, shared)
    part_bytes = total_bytes // PARTS

    def copy(part: int) -> None:
        offset = part * part_bytes
        ctypes.memmove(target.base + offset, source.base + offset, part_bytes)

    return copy


def memcpy(total_bytes: int, shared: bool = False) -> float:
    """GiB/s of one thread from one pool to another: in huge pages, or in memory files."""
    return _best_gib_s(total_bytes, _pool_copy(total_bytes, shared))[0]


def first_copy(total_bytes: int) -> float:
    """GiB/s into a memory file that was just mapped: every page costs a fault."""
    source = SpeedPool(total_bytes, shared=True)
    target = SpeedPool(total_bytes, shared=True)
    assert target.fd is not None
    part_bytes = total_bytes // PARTS
    # A new mapping of the same pages for each copy: only a mapping's first use costs faults.
    maps = [mmap.mmap(target.fd, part_bytes) for _ in range(ROUNDS * PARTS)]
    addresses = iter([ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in maps])

    def copy(_part: int) -> None:
        ctypes.memmove(next(addresses), source.base, part_bytes)

    return _best_gib_s(total_bytes, copy)[0]


def checksum(total_bytes: int) -> float:
    """GiB/s of xxh3 over an eighth of the bytes at a time, on one core."""
    view = SpeedPool(total_bytes, shared=False).view
    part_bytes = total_bytes // PARTS

    def compute(part: int) -> None:
        xxhash.xxh3_64_intdigest(view[part * part_bytes : (part + 1) * part_bytes])

    return _best_gib_s(total_bytes, compute)[0]


def measure(
    name: str, total_bytes: int = 64 << 20, run_bytes: Iterable[int] = RUNS
) -> list[SpeedRow]:
    """Measures a transport's writes in runs of each size, and reads too if it can read (`nixl`).

    `name` is `nixl`, `shm` or `tcp`. A run is one contiguous piece of the moved bytes. A write of
    `tcp` takes until the other process has answered its note.

    Raises TransportUnavailable when the transport cannot run in this process, TimeoutError when the
    other process does not open its transport, or nothing arrives.
    """
    sizes = list(run_bytes)
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    child = context.Process(target=_serve, args=(name, total_bytes, far), daemon=True)
    child.start()
    far.close()
    try:
        agent = f"speed-near-{os.getpid()}"
        pool, transport = _open(name, agent, total_bytes)
        peer = _exchange_cards(near, card_of(agent, transport, pool))
        transport.add_peer(peer)
        transport.notify(peer.agent, _HELLO)
        poll_until(transport, lambda event: isinstance(event, NotificationReceived))

        posters: dict[str, Poster] = {"write": transport.write}
        if hasattr(transport, "read"):
            posters["read"] = transport.read
        rows = [
            _measure_row(op, poster, transport, peer, run_bytes=size)
            for op, poster in posters.items()
            for size in sizes
        ]
        transport.close()
        return rows
    finally:
        near.close()
        child.join(timeout=5.0)
        child.terminate()


def _exchange_cards(near: Connection, card: PeerCard) -> PeerCard:
    """Sends a card to the other process and returns that process's. Raises TimeoutError."""
    try:
        near.send(card)
        if near.poll(DEADLINE_S):
            peer: PeerCard = near.recv()
            return peer
    except (EOFError, ConnectionError):  # the process has ended: its transport cannot run there
        pass
    raise TimeoutError("the other process did not open its transport")


def _measure_row(
    op: str, post: Poster, transport: Transport, peer: PeerCard, run_bytes: int
) -> SpeedRow:
    shuffle = random.Random(run_bytes)
    run_count = peer.size // run_bytes
    source = np.array(shuffle.sample(range(run_count), run_count), np.int32)
    target = np.array(shuffle.sample(range(run_count), run_count), np.int32)
    source_parts = np.array_split(source, PARTS)
    target_parts = np.array_split(target, PARTS)
    # A write of tcp has ended once the kernel's socket holds its bytes: only the answer to its note
    # says that they are in the other pool.
    ends_by_answer = transport.name == "tcp"
    answer = NotificationReceived(peer.agent, _WRITE_NOTE)

    def move(part: int) -> None:
        spans = Spans(run_bytes, source_parts[part], target_parts[part])
        handle = post(peer.agent, spans, _WRITE_NOTE if ends_by_answer else b"")
        ended = answer if ends_by_answer else PostedWriteEnded(handle, ok=True)
        poll_until(transport, lambda event: event == ended)

    copy = _pool_copy(peer.size, shared=False)
    transport_gib_s, memcpy_gib_s = _best_gib_s(peer.size, move, copy)
    return SpeedRow(
        transport=transport.name,
        op=op,
        run_bytes=run_bytes,
        gib_s=round(transport_gib_s, 2),
        of_memcpy=round(transport_gib_s / memcpy_gib_s, 3),
    )


def _best_gib_s(total_bytes: int, *actions: PartAction) -> list[float]:
    """GiB/s of each action over all parts: from the sum of every part's best time.

    The actions take turns, so they see the same machine. A part is short enough to be over before
    a busy machine takes the core away.
    """
    best_s = np.full((len(actions), PARTS), np.inf)
    for _ in range(ROUNDS):
        for part in range(PARTS):
            for index, action in enumerate(actions):
                began = time.perf_counter()
                action(part)
                took_s = time.perf_counter() - began
                best_s[index, part] = min(best_s[index, part], took_s)
    return (total_bytes / best_s.sum(axis=1) / GIB).tolist()


def poll_until(
    transport: Transport, matches: Callable[[TransportEvent], bool], timeout_s: float = DEADLINE_S
) -> None:
    """Polls until an event matches; others are dropped. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not any(matches(event) for event in transport.poll()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{transport.name}: nothing arrives")


def _open(name: str, agent: str, size: int) -> tuple[SpeedPool, Transport]:
    pool = SpeedPool(size, shared=name == "shm")
    transport = open_transport(
        name, agent, pool, admit=lambda *_: True, host="127.0.0.1", secret="speed"
    )
    return pool, transport


def _serve(name: str, size: int, pipe: Connection) -> None:
    """Serves the other process: sends notes back until the pipe is closed."""
    agent = f"speed-far-{os.getpid()}"
    pool, transport = _open(name, agent, size)
    peer: PeerCard = pipe.recv()
    transport.add_peer(peer)
    pipe.send(card_of(agent, transport, pool))
    while not pipe.poll(0):
        for event in transport.poll():
            if isinstance(event, NotificationReceived) and event.data:
                transport.notify(peer.agent, event.data)
        if transport.name != "tcp":
            time.sleep(_POLL_PAUSE_S)  # the writer copies by itself; who spins here takes a core
    transport.close()
