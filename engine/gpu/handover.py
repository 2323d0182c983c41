"""Measures KV going from one process to another on the same device, as between two workers.

Both processes have a pool of their own, and the transport that workers use. The sender writes its
blocks to scattered places of the receiver's pool; the receiver then compares every byte. On a GPU
the bytes stay there (CUDA IPC, if NIXL finds it).

Life: the sender starts the receiver; both open a pool and a transport and exchange their cards over
a pipe; the sender writes all blocks ROUNDS times; a note with the last write tells the receiver to
compare, and the verdict comes back over the pipe.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from operator import eq

import numpy as np
import torch

from ...kv_transfer import KVLayout
from ...kv_transfer.digests import DigestRequest
from ...kv_transfer.speed import poll_until
from ...kv_transfer.transport import (
    NotificationReceived,
    PeerCard,
    PostedWriteEnded,
    Spans,
    Transport,
    TransportEvent,
    card_of,
)
from ...kv_transfer.transports import open_transport
from ..pool import KVPool
from .memory import DevicePool

#: Seconds that either process waits for the other: it has to import torch and open the device.
PATIENCE_S = 60.0

#: How often all blocks are written; the best round counts, as the first one also sets up.
ROUNDS = 3

#: The note of the last write.
LAST_WRITE = b"last"


@dataclass(frozen=True, slots=True)
class HandoverResult:
    """How fast the bytes went, and whether they arrived."""

    transport: str  #: Its name, as `open_transport` takes it.
    nbytes: int  #: Bytes of one round.
    gb_s: float  #: 10^9 bytes per second, in the best of ROUNDS.
    intact: bool  #: True: the receiver has the sender's bytes, and has said so in time.

    #: 10^9 bytes per second that one end makes checksums of, best of ROUNDS; None in host memory.
    checksum_gb_s: float | None


@dataclass(frozen=True, slots=True)
class _Handover:
    """What both processes know."""

    transport: str
    device: str
    layout: KVLayout
    blocks: int
    order: list[int]  #: Where each block of the sender's goes in the receiver's pool.


def _admit_all(peer: str, note: bytes) -> bool:
    """Let TCP store the data of every write: none comes too late to be wanted here."""
    return True


class _Endpoint:
    """One process's pool and transport, and bytes that both ends can draw."""

    def __init__(self, handover: _Handover, name: str) -> None:
        layout = handover.layout
        blocks = handover.blocks
        device = torch.device(handover.device)
        dtype = getattr(torch, layout.dtype)
        self.pool: KVPool
        if device.type == "cpu":
            self.pool = KVPool(layout, blocks, dtype)
        else:
            self.pool = DevicePool(layout, blocks, dtype, device)
        self.agent = f"{name}-{os.getpid()}"
        self.transport: Transport = open_transport(
            handover.transport,
            self.agent,
            self.pool,
            admit=_admit_all,
            host="127.0.0.1",
            secret="handover",
        )
        # both processes draw the same bytes, so the receiver knows what has to arrive
        generator = torch.Generator(device).manual_seed(1)

        #: What the sender's pool holds, uint8 [blocks, block_bytes].
        self.drawn_bytes = torch.randint(
            0,
            256,
            (blocks, layout.block_bytes),
            dtype=torch.uint8,
            device=device,
            generator=generator,
        )

    def card(self) -> PeerCard:
        """Return what the other end needs to write to this one's pool."""
        return card_of(self.agent, self.transport, self.pool)

    def bytes(self) -> torch.Tensor:
        """Return the pool's memory, uint8 [blocks, block_bytes]."""
        return self.pool._flat.view(torch.uint8).view(self.pool.blocks, self.pool.block_bytes)

    def wait_for_event(self, is_awaited: Callable[[TransportEvent], bool]) -> None:
        """Poll the transport until an event is the awaited one. Raises TimeoutError."""
        poll_until(self.transport, is_awaited, PATIENCE_S)

    def wait_for_device(self) -> None:
        if self.pool.memory != "DRAM":
            torch.cuda.synchronize()


def _receive(handover: _Handover, pipe: Connection) -> None:
    """Run the receiving process: open a pool, wait for the last write, compare."""
    endpoint = _Endpoint(handover, "receiver")
    endpoint.wait_for_device()  # the pool's zeros are written before any byte arrives
    endpoint.transport.add_peer(pipe.recv())  # as workers do, which know each other
    pipe.send(endpoint.card())
    endpoint.wait_for_event(
        lambda event: isinstance(event, NotificationReceived) and event.data == LAST_WRITE
    )
    pipe.send(bool(torch.equal(endpoint.bytes()[handover.order], endpoint.drawn_bytes)))
    endpoint.transport.close()


def _checksum_seconds(pool: KVPool) -> float | None:
    """Return the seconds that the checksums of all blocks take, best of ROUNDS.

    None for a pool in host memory, whose checksums are the CPU's.
    """
    if not isinstance(pool, DevicePool):
        return None
    digester = pool.digester
    assert digester is not None, "a pool on a device has one"
    blocks = list(range(pool.blocks))
    request = DigestRequest(
        # Of each block one run, which is the whole block. Any seeds take the same time.
        unit_bytes=pool.block_bytes,
        first_units=blocks,
        runs=[(0, 1)],
        seeds=blocks,
    )
    durations_s: list[float] = []
    for _ in range(1 + ROUNDS):  # the first one compiles the kernel, and is never the best
        started_at = time.perf_counter()
        started = digester.start(request)
        while started.poll() is None:
            pass
        durations_s.append(time.perf_counter() - started_at)
    return min(durations_s)


@contextmanager
def _other_process_lives() -> Iterator[None]:
    """Turn what a pipe says of a process that has ended into TimeoutError."""
    try:
        yield
    except (EOFError, ConnectionError):
        raise TimeoutError("the other process ended: its error stands above") from None


def _send(handover: _Handover, pipe: Connection) -> HandoverResult:
    """Write all blocks to the receiver's, ROUNDS times.

    Raises TimeoutError, also where the receiver ends or a write fails: only a good end is waited
    for.
    """
    endpoint = _Endpoint(handover, "sender")
    endpoint.bytes().copy_(endpoint.drawn_bytes)
    endpoint.wait_for_device()  # NIXL does not know the stream that writes these bytes
    with _other_process_lives():
        pipe.send(endpoint.card())
        if not pipe.poll(PATIENCE_S):
            raise TimeoutError("the other process did not open its transport")
        peer = pipe.recv()
    endpoint.transport.add_peer(peer)
    source_blocks = np.arange(handover.blocks, dtype=np.int32)
    target_blocks = np.array(handover.order, np.int32)
    spans = Spans(handover.layout.block_bytes, source_blocks, target_blocks)
    best_s = float("inf")
    for round_index in range(ROUNDS):
        note = LAST_WRITE if round_index == ROUNDS - 1 else b""  # the receiver ignores empty notes
        started_at = time.perf_counter()
        handle = endpoint.transport.write(peer.agent, spans, note)
        endpoint.wait_for_event(partial(eq, PostedWriteEnded(handle, ok=True)))
        best_s = min(best_s, time.perf_counter() - started_at)
    with _other_process_lives():
        intact = pipe.poll(PATIENCE_S) and pipe.recv()
    endpoint.transport.close()
    size = endpoint.pool.size
    checksums_s = _checksum_seconds(endpoint.pool)
    return HandoverResult(
        transport=handover.transport,
        nbytes=size,
        gb_s=size / best_s / 1e9,
        intact=bool(intact),
        checksum_gb_s=None if checksums_s is None else size / checksums_s / 1e9,
    )


def measure_handover(
    transport_name: str, device_name: str, layout: KVLayout, blocks: int
) -> HandoverResult:
    """Write all blocks of a pool to another process's pool, in another order, ROUNDS times.

    Raises TransportUnavailable where the transport cannot run here, TimeoutError if nothing
    arrives.
    """
    order = torch.randperm(blocks).tolist()
    handover = _Handover(transport_name, device_name, layout, blocks=blocks, order=order)
    context = multiprocessing.get_context("spawn")
    sender_pipe, receiver_pipe = context.Pipe()
    receiver = context.Process(target=_receive, args=(handover, receiver_pipe), daemon=True)
    receiver.start()
    receiver_pipe.close()
    try:
        return _send(handover, sender_pipe)
    finally:
        sender_pipe.close()
        receiver.join(timeout=5.0)
        receiver.terminate()
