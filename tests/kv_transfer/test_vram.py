"""The pool in GPU memory, as far as CPU tensors show it, and on a GPU if there is one."""

from __future__ import annotations

import queue

import pytest
import torch
from diptych.kv_transfer import KVLayout
from diptych.kv_transfer import commands as c
from diptych.kv_transfer.service import TransferService
from diptych.kv_transfer.slices import LaneEnd
from diptych.kv_transfer.transports import open_transport
from diptych.kv_transfer.vram import VramPool

from ..kit.conformance import MemoryPool
from .support import eventually, needs_nixl

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
RUNS = [(3, 2), (9, 1)]


def pool(seed: int = 0, device: str = "cpu") -> tuple[VramPool, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    bytes_ = torch.randint(0, 256, (16 * 256,), dtype=torch.uint8, generator=draw).to(device)
    return VramPool(bytes_), bytes_


def test_the_digest_is_of_the_bytes_their_order_and_the_seed() -> None:
    (one, data), (other, copy) = pool(), pool(1)
    expected = one.digest(256, RUNS, 7)
    copy[5 * 256 : 7 * 256], copy[12 * 256 : 13 * 256] = data[768:1280], data[2304:2560]
    assert other.digest(256, [(5, 2), (12, 1)], 7) == expected, "wherever they lie"
    assert one.digest(256, RUNS, 8) != expected
    assert one.digest(256, RUNS[::-1], 7) != expected
    assert one.digest(128, [(6, 4), (18, 2)], 7) == expected, "however they are cut"


@pytest.mark.parametrize("at", [768, 1000, 1279, 2304, 2559])
def test_every_flipped_bit_changes_the_digest(at: int) -> None:
    one, data = pool()
    expected = one.digest(256, RUNS, 7)
    for bit in range(8):
        data[at] ^= 1 << bit
        assert one.digest(256, RUNS, 7) != expected
        data[at] ^= 1 << bit
    data[0] ^= 1
    assert one.digest(256, RUNS, 7) == expected, "bytes outside do not count"


def test_two_words_that_change_places_change_the_digest() -> None:
    one, data = pool()
    expected = one.digest(256, RUNS, 7)
    words = data.view(torch.int64)
    words[100], words[110] = words[110].clone(), words[100].clone()
    assert one.digest(256, RUNS, 7) != expected


class Event:
    def __init__(self, come: bool) -> None:
        self.come = come

    def query(self) -> bool:
        return self.come


def test_an_event_is_reached_when_it_and_all_before_it_have_come() -> None:
    one, _ = pool()
    first, second = Event(False), Event(True)
    one._events.extend([(1, first), (2, second)])
    assert one.reached(0) and not one.reached(1) and not one.reached(2)
    first.come = True
    assert one.reached(1) and one.reached(2)


def test_a_push_waits_for_its_event_and_what_follows_waits_behind_it() -> None:
    """Two services over TCP; the source's gate is opened by the test."""
    gate = {"open": 0}
    layout = KVLayout(1, 1, 32, 64, 2, "bfloat16", 1)
    ends, told = {}, {}
    for name in ("source", "sink"):
        memory = MemoryPool(blocks=8, block_bytes=layout.block_bytes, seed=len(ends))
        told[name] = queue.SimpleQueue()
        ends[name] = TransferService(
            name,
            memory,
            LaneEnd(layout),
            b"same",
            lambda admit, n=name, m=memory: open_transport("tcp", n, m, admit, "127.0.0.1"),
            told[name].put,
            event_reached=(lambda number: number <= gate["open"]) if name == "source" else None,
        )
    cards = {name: end.start() for name, end in ends.items()}
    try:
        for name, other in (("source", "sink"), ("sink", "source")):
            ends[name].submit(c.AddPeer(other, [cards[other]]))
        ends["sink"].submit(c.OfferBlocks("r#0", "source", [1, 2], 128))
        for command in (
            c.ExpectOffer("r#0", "sink", 128),
            c.PushBlocks("r#0", 0, [3], event=1),
            c.PushBlocks("r#0", 1, [4], event=2),
            c.FinishPush("r#0", b"meta"),
        ):
            ends["source"].submit(command)
        gate["open"] = 1
        statistics = ends["sink"].statistics
        eventually(lambda: statistics()["bytes_received"] == layout.block_bytes, "the first block")
        assert told["sink"].empty()
        gate["open"] = 2
        arrived = told["sink"].get(timeout=20)
        assert isinstance(arrived, c.BlocksArrived) and arrived.tokens == 128
    finally:
        for end in ends.values():
            end.stop()


def test_a_pool_that_the_cpu_cannot_read_needs_checksums_of_its_own() -> None:
    """Else those of an empty buffer would always agree."""
    layout = KVLayout(1, 1, 32, 64, 2, "bfloat16", 1)
    memory = MemoryPool(blocks=2, block_bytes=layout.block_bytes, seed=1)
    memory.memory = "VRAM"
    with pytest.raises(ValueError, match="need its `digest`"):
        TransferService("x", memory, LaneEnd(layout), b"", lambda admit: None, print)


@needs_gpu
@needs_nixl
def test_a_gpu_pool_is_registered_and_reached_by_nixl() -> None:
    one, _ = pool(device="cuda")
    transport = open_transport("nixl", "gpu#0", one, lambda *_: True, "127.0.0.1")
    transport.close()
