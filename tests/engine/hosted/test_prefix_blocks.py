"""Which blocks of a prefix are staged in vLLM's pool, with a pool that stands for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from diptych.engine.commands import PrefixStaged, StagePrefix
from diptych.engine.vllm.prefix_blocks import PrefixBlocks
from diptych.engine.vllm.prefix_names import PrefixNames

KEY = ("request", 0)
THEIRS = [b"t0", b"t1"]
OURS = [b"o0", b"o1"]


@dataclass
class PoolBlock:
    """Stands for vLLM's `KVCacheBlock`."""

    block_id: int
    ref_cnt: int


class BlockPool:
    """Stands for vLLM's: two cached blocks, and so many free ones that hold nothing."""

    def __init__(self, references: int, empty_blocks: int) -> None:
        self.cached = [PoolBlock(1, references), PoolBlock(2, references)]
        self.empty_blocks = empty_blocks

    def get_cached_block(self, their_hash: bytes, groups: list[int]) -> list[PoolBlock]:
        return [self.cached[THEIRS.index(their_hash)]]

    def get_num_free_blocks(self) -> int:
        return self.empty_blocks + sum(block.ref_cnt == 0 for block in self.cached)

    def get_new_blocks(self, count: int) -> list[PoolBlock]:
        assert count <= self.empty_blocks
        self.empty_blocks -= count
        return [PoolBlock(3 + index, 1) for index in range(count)]

    def touch(self, blocks: list[PoolBlock]) -> None:
        for block in blocks:
            block.ref_cnt += 1


def stage(pool: Any, reserve_blocks: int, **command: Any) -> PrefixStaged:
    names = PrefixNames(64)
    names.learn(0, THEIRS, OURS)
    for theirs in THEIRS:
        names.record_stored(theirs)
    prefixes = PrefixBlocks(pool, names, 64, None, {})
    return prefixes.stage(StagePrefix(KEY, OURS, **command), reserve_blocks)


def test_blocks_in_use_are_pinned_for_a_peer_however_full_the_pool_is() -> None:
    pool = BlockPool(references=1, empty_blocks=1)
    assert stage(pool, reserve_blocks=3, pin_only=True).blocks == [1, 2]
    assert [block.ref_cnt for block in pool.cached] == [2, 2]


@pytest.mark.parametrize(("empty_blocks", "blocks"), [(2, []), (3, [1, 2])])
def test_blocks_that_nobody_uses_are_pinned_only_above_the_reserve(
    empty_blocks: int, blocks: list[int]
) -> None:
    pool = BlockPool(references=0, empty_blocks=empty_blocks)
    assert stage(pool, reserve_blocks=3, pin_only=True).blocks == blocks
    assert [block.ref_cnt for block in pool.cached] == [int(bool(blocks))] * 2


@pytest.mark.parametrize(("references", "empty_blocks"), [(0, 4), (1, 4)])
def test_new_blocks_leave_the_reserve(references: int, empty_blocks: int) -> None:
    pool = BlockPool(references, empty_blocks)
    assert stage(pool, reserve_blocks=3, peer_blocks=4).blocks == []
    assert [block.ref_cnt for block in pool.cached] == [references] * 2
    assert stage(pool, reserve_blocks=2, peer_blocks=4).blocks == [1, 2, 3, 4]
