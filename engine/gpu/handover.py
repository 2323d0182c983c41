"""KV from one process to another on the same device, over the transport that workers use.

Both have a pool of their own; the sender writes its blocks to scattered places of the receiver's,
which then compares every byte. On a GPU the bytes stay there (CUDA IPC, if NIXL finds it).
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

PATIENCE_S = 60.0
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Moved:
    """`intact`: the receiver has the sender's bytes."""

    transport: str
    nbytes: int
    gb_s: float  #: the best of ROUNDS
    intact: bool


def _end(
    name: str, agent: str, device: str, layout: KVLayout, blocks: int, seed: int
) -> tuple[KVPool, Any, torch.Tensor]:
    """A pool, its transport, and bytes that both ends can draw, [blocks, block_bytes]."""
    on = torch.device(device)
    dtype = getattr(torch, layout.dtype)
    host = on.type == "cpu"
    pool = KVPool(layout, blocks, dtype) if host else DevicePool(layout, blocks, dtype, on)
    transport = open_transport(name, agent, pool, lambda *_: True, "127.0.0.1")
    generator = torch.Generator(on).manual_seed(seed)
    shape = blocks, layout.block_bytes
    drawn = torch.randint(0, 256, shape, dtype=torch.uint8, device=on, generator=generator)
    return pool, transport, drawn


def _card(agent: str, transport: Any, pool: KVPool) -> PeerCard:
    return PeerCard(
        agent, transport.name, b"", transport.address(), pool.base, pool.size, pool.layout
    )


def _until(transport: Any, seen: Callable[[Any], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not any(seen(event) for event in transport.poll()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{transport.name}: nothing arrives")


def _bytes(pool: KVPool) -> torch.Tensor:
    return pool._flat.view(torch.uint8).view(pool.blocks, pool.block_bytes)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _receive(
    name: str, device: str, layout: KVLayout, blocks: int, order: list[int], pipe: Connection
) -> None:
    """The other process: opens its pool, waits for the last write, compares."""
    agent = f"receiver-{os.getpid()}"
    pool, transport, expected = _end(name, agent, device, layout, blocks, seed=1)
    _wait(device)  # its zeros are written before any byte arrives
    transport.add_peer(pipe.recv())
    pipe.send(_card(agent, transport, pool))
    _until(
        transport, lambda event: isinstance(event, NotificationReceived) and event.data == b"last"
    )
    pipe.send(bool(torch.equal(_bytes(pool)[order], expected)))
    transport.close()


def move(name: str, device: str, layout: KVLayout, blocks: int) -> Moved:
    """Writes all blocks of a pool to another process's, in another order, ROUNDS times.

    Raises TransportUnavailable where `name` cannot run here, TimeoutError if nothing arrives.
    """
    order = torch.randperm(blocks).tolist()
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    arguments = name, device, layout, blocks, order, far
    child = context.Process(target=_receive, args=arguments, daemon=True)
    child.start()
    far.close()
    try:
        agent = f"sender-{os.getpid()}"
        pool, transport, drawn = _end(name, agent, device, layout, blocks, seed=1)
        _bytes(pool).copy_(drawn)
        _wait(device)  # NIXL does not know the stream that writes them
        near.send(_card(agent, transport, pool))
        if not near.poll(PATIENCE_S):
            raise TimeoutError("the other process did not open its transport")
        peer = near.recv()
        transport.add_peer(peer)
        spans = Spans(
            layout.block_bytes, np.arange(blocks, dtype=np.int32), np.array(order, np.int32)
        )
        best = float("inf")
        for round in range(ROUNDS):
            began = time.perf_counter()
            handle = transport.write(peer.agent, spans, b"last" if round == ROUNDS - 1 else b"")
            _until(transport, partial(eq, PostedWriteEnded(handle, True)))
            best = min(best, time.perf_counter() - began)
        intact = near.poll(PATIENCE_S) and near.recv()
        transport.close()
        return Moved(name, pool.size, pool.size / best / 1e9, bool(intact))
    finally:
        near.close()
        child.join(timeout=5.0)
        child.terminate()
