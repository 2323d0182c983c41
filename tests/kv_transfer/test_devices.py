"""Each thread that touches a GPU's pool chooses that GPU first."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diptych.engine.loop import EngineThread
from diptych.kv_transfer.devices import enter_device
from diptych.kv_transfer.digests import HostDigester
from diptych.kv_transfer.service import TransferService
from diptych.kv_transfer.slices import LaneEnd

from ..kit.conformance import MemoryPool
from .support import BLOCK, eventually


class FakeCuda:
    """The calls that make a GPU a thread's, with the thread that made each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, int, str]] = []
        monkeypatch.setattr(torch.cuda, "set_device", self.set_device)
        monkeypatch.setattr(torch.cuda, "current_stream", self.current_stream)

    def note(self, call: str, device: int) -> None:
        self.calls.append((call, device, threading.current_thread().name))

    def set_device(self, device: int) -> None:
        self.note("set", device)

    def current_stream(self, device: int) -> Any:
        return SimpleNamespace(query=lambda: self.note("query", device))


def device_pool() -> MemoryPool:
    pool = MemoryPool(blocks=2, block_bytes=BLOCK.block_bytes, seed=1)
    pool.memory, pool.device = "VRAM", 3
    return pool


def test_the_transfer_thread_enters_the_pool_s_gpu_before_its_transport_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    pool = device_pool()
    opened: list[int] = []

    def open_transport(_: object) -> Any:
        opened.append(len(cuda.calls))
        raise RuntimeError("the test needs no transport")

    service = TransferService(
        "x", pool, LaneEnd(BLOCK), b"", open_transport, print, digester=HostDigester(pool.view)
    )
    with pytest.raises(RuntimeError, match="needs no transport"):
        service.start()
    assert cuda.calls == [("set", 3, "kv-transfer"), ("query", 3, "kv-transfer")]
    assert opened == [2]


def test_the_engine_s_thread_enters_the_pool_s_gpu_before_its_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    stepped: list[int] = []
    engine: Any = SimpleNamespace(
        kv_pool=device_pool(),
        cores=(),
        core_sharing=None,
        step=lambda: stepped.append(len(cuda.calls)) or [],
        idle=lambda: True,
        pin_for_demotion=list,
    )
    thread = EngineThread(engine, print)
    thread.start()
    eventually(lambda: stepped, "a step")
    thread.stop()
    assert cuda.calls[0] == ("set", 3, "engine")
    assert stepped[0] == 2


def test_memory_of_the_host_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    enter_device(MemoryPool(blocks=2, block_bytes=BLOCK.block_bytes, seed=1))
    assert not cuda.calls
