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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from operator import eq
from typing import Any

import numpy as np
import torch

from ...kv_transfer import KVLayout
from ...kv_transfer.transport import NotificationReceived, PeerCard, PostedWriteEnded, Spans
from ...kv_transfer.transports import open_transport
from ..pool import KVPool
from .memory import DevicePool

#: Seconds that either process waits for the other.
PATIENCE_S = 60.0

ROUNDS = 3

#: The note of the last write.
LAST_WRITE = b"last"


@dataclass(frozen=True, slots=True)
class HandoverResult:
    """How fast the bytes went, and whether they arrived."""

    transport: str
    nbytes: int  #: Bytes of one round.
    gb_s: float  #: The best of ROUNDS.
    intact: bool  #: True: the receiver has the sender's bytes.


class _Endpoint:
    """One process's pool and transport, and bytes that both ends can draw."""

    def __init__(
        self, transport_name: str, agent: str, device_name: str, layout: KVLayout, blocks: int
    ) -> None:
        device = torch.device(device_name)
        dtype = getattr(torch, layout.dtype)
        self.pool: KVPool
        if device.type == "cpu":
            self.pool = KVPool(layout, blocks, dtype)
        else:
            self.pool = DevicePool(layout, blocks, dtype, device)
        self.agent = agent
        self.transport: Any = open_transport(
            transport_name, agent, self.pool, lambda *_: True, "127.0.0.1"
        )
        generator = torch.Generator(device).manual_seed(1)

        #: What the sender's pool holds, uint8 [blocks, block_bytes].
        self.drawn = torch.randint(
            0,
            256,
            (blocks, layout.block_bytes),
            dtype=torch.uint8,
            device=device,
            generator=generator,
        )

    def card(self) -> PeerCard:
        """Return what the other end needs to write to this one's pool."""
        return PeerCard(
            self.agent,
            self.transport.name,
            b"",
            self.transport.address(),
            self.pool.base,
            self.pool.size,
            self.pool.layout,
        )

    def bytes(self) -> torch.Tensor:
        """Return the pool's memory, uint8 [blocks, block_bytes]."""
        return self.pool._flat.view(torch.uint8).view(self.pool.blocks, self.pool.block_bytes)

    def wait_for_event(self, is_awaited: Callable[[Any], bool]) -> None:
        """Poll the transport until an event is the awaited one. Raises TimeoutError."""
        deadline = time.monotonic() + PATIENCE_S
        while not any(is_awaited(event) for event in self.transport.poll()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.transport.name}: nothing arrives")


def _wait_for_device(device_name: str) -> None:
    if device_name != "cpu":
        torch.cuda.synchronize()


def _receive(
    transport_name: str,
    device_name: str,
    layout: KVLayout,
    blocks: int,
    order: list[int],
    pipe: Connection,
) -> None:
    """Run the receiving process: open a pool, wait for the last write, compare."""
    endpoint = _Endpoint(transport_name, f"receiver-{os.getpid()}", device_name, layout, blocks)
    _wait_for_device(device_name)  # the pool's zeros are written before any byte arrives
    endpoint.transport.add_peer(pipe.recv())
    pipe.send(endpoint.card())
    endpoint.wait_for_event(
        lambda event: isinstance(event, NotificationReceived) and event.data == LAST_WRITE
    )
    pipe.send(bool(torch.equal(endpoint.bytes()[order], endpoint.drawn)))
    endpoint.transport.close()


def _send(
    transport_name: str,
    device_name: str,
    layout: KVLayout,
    blocks: int,
    order: list[int],
    pipe: Connection,
) -> HandoverResult:
    """Write all blocks to the receiver's, ROUNDS times. Raises TimeoutError."""
    endpoint = _Endpoint(transport_name, f"sender-{os.getpid()}", device_name, layout, blocks)
    endpoint.bytes().copy_(endpoint.drawn)
    _wait_for_device(device_name)  # NIXL does not know the stream that writes these bytes
    pipe.send(endpoint.card())
    if not pipe.poll(PATIENCE_S):
        raise TimeoutError("the other process did not open its transport")
    peer = pipe.recv()
    endpoint.transport.add_peer(peer)
    spans = Spans(layout.block_bytes, np.arange(blocks, dtype=np.int32), np.array(order, np.int32))
    best_s = float("inf")
    for round_index in range(ROUNDS):
        note = LAST_WRITE if round_index == ROUNDS - 1 else b""
        started_at = time.perf_counter()
        handle = endpoint.transport.write(peer.agent, spans, note)
        endpoint.wait_for_event(partial(eq, PostedWriteEnded(handle, True)))
        best_s = min(best_s, time.perf_counter() - started_at)
    intact = pipe.poll(PATIENCE_S) and pipe.recv()
    endpoint.transport.close()
    size = endpoint.pool.size
    return HandoverResult(
        transport=transport_name, nbytes=size, gb_s=size / best_s / 1e9, intact=bool(intact)
    )


def measure_handover(
    transport_name: str, device_name: str, layout: KVLayout, blocks: int
) -> HandoverResult:
    """Write all blocks of a pool to another process's pool, in another order, ROUNDS times.

    Raises TransportUnavailable where the transport cannot run here, TimeoutError if nothing
    arrives.
    """
    order = torch.randperm(blocks).tolist()
    context = multiprocessing.get_context("spawn")
    sender_pipe, receiver_pipe = context.Pipe()
    receiver = context.Process(
        target=_receive,
        args=(transport_name, device_name, layout, blocks, order, receiver_pipe),
        daemon=True,
    )
    receiver.start()
    receiver_pipe.close()
    try:
        return _send(transport_name, device_name, layout, blocks, order, sender_pipe)
    finally:
        sender_pipe.close()
        receiver.join(timeout=5.0)
        receiver.terminate()
