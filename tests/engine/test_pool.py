"""The memory of a KV pool: what layers see is what transfers read and write."""

from __future__ import annotations

import errno
import mmap

import pytest
import torch
from diptych.engine import huge, pool
from diptych.kv_transfer import KVLayout

LAYOUT = KVLayout(3, 2, 32, 64, 2, "bfloat16", 3)


@pytest.mark.parametrize("shift", [0, 4096])
def test_layers_lie_where_blocks_are_sent_from(monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    """Wherever in its mapping the pool begins: a huge page's start need not be the mapping's."""

    def allocate(size: int, what: str) -> tuple:
        memory, start = huge.allocate(size + shift, what)
        return memory, start + shift

    monkeypatch.setattr(pool, "allocate", allocate)
    kv = pool.KVPool(LAYOUT, 4, torch.bfloat16)
    parts = [part for index in range(LAYOUT.layers) for part in kv.layer(index)]
    assert min(part.data_ptr() for part in parts) == kv.base
    for part in parts:
        part[2] = 1
    sent = torch.frombuffer(kv.view, dtype=torch.bfloat16).view(4, -1)
    assert sent[2].eq(1).all() and sent[[0, 1, 3]].eq(0).all()
    kv.copy_block(2, 3)
    assert all(part[3].eq(1).all() for part in parts)


def test_a_shared_pool_is_the_file_that_others_map() -> None:
    kv = pool.KVPool(LAYOUT, 4, torch.bfloat16, shared=True)
    assert kv.fd is not None and kv.size == 4 * LAYOUT.block_bytes
    kv.layer(0)[0][1] = 1
    with mmap.mmap(kv.fd, kv.size) as other:
        assert other[:] == bytes(kv.view)
        other[:] = bytes(kv.size)
    assert kv.layer(0)[0].eq(0).all()


class MapWithoutHugePages(mmap.mmap):
    """A mapping of a kernel that has no huge pages."""

    def madvise(self, *_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


def test_a_kernel_without_huge_pages_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", MapWithoutHugePages)
    memory, start = huge.allocate(1 << 16, "a pool")
    assert len(memory) - start >= 1 << 16
