"""What a checksum of a pool in GPU memory is; and such a pool, where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from diptych.engine.gpu.memory import DevicePool
from diptych.kv_transfer import KVLayout
from diptych.kv_transfer.service import TransferService
from diptych.kv_transfer.slices import LaneEnd
from diptych.kv_transfer.transports import open_transport
from diptych.kv_transfer.vram import words_digest

from ..kit.conformance import MemoryPool
from .support import needs_nixl

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
RUNS = [(3, 2), (9, 1)]


Digest = Callable[[int, Sequence[tuple[int, int]], int], int]


def pool(seed: int = 0) -> tuple[Digest, torch.Tensor]:
    """A pool's digest, and its bytes."""
    draw = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (16 * 256,), dtype=torch.uint8, generator=draw)
    return partial(words_digest, data.view(torch.int64)), data


def test_the_digest_is_of_the_bytes_their_order_and_the_seed() -> None:
    (digest, data), (other, copy) = pool(), pool(1)
    expected = digest(256, RUNS, 7)
    copy[5 * 256 : 7 * 256], copy[12 * 256 : 13 * 256] = data[768:1280], data[2304:2560]
    assert other(256, [(5, 2), (12, 1)], 7) == expected, "wherever they lie"
    assert digest(256, RUNS, 8) != expected
    assert digest(256, RUNS[::-1], 7) != expected
    assert digest(128, [(6, 4), (18, 2)], 7) == expected, "however they are cut"


@pytest.mark.parametrize("at", [768, 1000, 1279, 2304, 2559])
def test_every_flipped_bit_changes_the_digest(at: int) -> None:
    digest, data = pool()
    expected = digest(256, RUNS, 7)
    for bit in range(8):
        data[at] ^= 1 << bit
        assert digest(256, RUNS, 7) != expected
        data[at] ^= 1 << bit
    data[0] ^= 1
    assert digest(256, RUNS, 7) == expected, "bytes outside do not count"


def test_two_words_that_change_places_change_the_digest() -> None:
    digest, data = pool()
    expected = digest(256, RUNS, 7)
    words = data.view(torch.int64)
    words[100], words[110] = words[110].clone(), words[100].clone()
    assert digest(256, RUNS, 7) != expected


def test_a_pool_that_the_cpu_cannot_read_needs_checksums_of_its_own() -> None:
    """Else those of an empty buffer would always agree."""
    layout = KVLayout(1, 1, 32, 64, 2, "bfloat16", 1)
    memory = MemoryPool(blocks=2, block_bytes=layout.block_bytes, seed=1)
    memory.memory = "VRAM"
    with pytest.raises(ValueError, match="need its `digester`"):
        TransferService("x", memory, LaneEnd(layout), b"", lambda admit: None, print)


@needs_gpu
@needs_nixl
def test_a_gpu_pool_is_registered_and_reached_by_nixl() -> None:
    layout = KVLayout(1, 1, 32, 64, 2, "bfloat16", 1)
    pool = DevicePool(layout, 2, torch.bfloat16, torch.device("cuda", 0))
    transport = open_transport("nixl", "gpu#0", pool, lambda *_: True, "127.0.0.1", secret="")
    transport.close()
