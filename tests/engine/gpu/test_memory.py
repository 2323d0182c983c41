"""The pool on a device: the layout of the host's, checksums where the bytes are."""

from __future__ import annotations

import torch
from diptych.engine.gpu.memory import DevicePool
from diptych.engine.pool import KVPool
from diptych.kv_transfer import KVLayout
from diptych.kv_transfer.digests import DigestRequest
from diptych.kv_transfer.vram import DIGEST

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYOUT = KVLayout(3, 2, 16, 64, 2, "bfloat16", 1)


def test_blocks_lie_as_in_host_memory() -> None:
    device, host = DevicePool(LAYOUT, 5, torch.bfloat16, DEVICE), KVPool(LAYOUT, 5, torch.bfloat16)
    for layer in range(3):
        for mine, theirs in zip(device.layer(layer), host.layer(layer), strict=True):
            assert (mine.shape, mine.stride()) == (theirs.shape, theirs.stride())
            mine.copy_(drawn := torch.randn(mine.shape).bfloat16())
            theirs.copy_(drawn)
    assert torch.equal(device._flat.cpu(), host._flat)
    device.copy_block(2, 4)
    size = LAYOUT.block_items
    assert torch.equal(device._flat[2 * size : 3 * size], device._flat[4 * size : 5 * size])
    assert device.size == host.size == 5 * LAYOUT.block_bytes


def test_checksums_are_made_on_the_device() -> None:
    pool = DevicePool(LAYOUT, 4, torch.bfloat16, DEVICE)
    pool.layer(0)[0][1].fill_(3.0)
    pool.copy_block(1, 3)
    unit = LAYOUT.block_bytes
    assert pool.memory == "VRAM" and pool.digest_kind == DIGEST
    started = pool.digester.start(DigestRequest(unit, [1, 3, 2], [(0, 1)], [5, 5, 5]))
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    first, copied, other = started.poll()
    assert first == copied != other
    assert (
        KVPool.digester is None and KVPool.digest_kind == b""
    )  # the transfer's own: of its `view`
