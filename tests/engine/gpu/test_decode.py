"""What a decode step is told: its bucket, its padding, and only what is new in block tables."""

from __future__ import annotations

import numpy as np
from diptych.engine.gpu.plan import DUMMY, Row, Tables, bucket, buckets, inputs


def row(blocks: list[int], position: int = 0, source: int = 1, seed: int = 0) -> Row:
    return Row(source, position, blocks, seed, position + 1, 0.5)


def test_a_bucket_holds_its_rows_and_wastes_little() -> None:
    assert buckets(17) == [24, 16, 8, 4, 2, 1]
    for rows in range(1, 600):
        size = bucket(rows)
        assert rows <= size and bucket(size) == size
        assert size - rows < max(4, size // 2) and (rows < 16 or size <= 1.5 * rows)
    assert buckets(256)[:3] == [256, 224, 192]


def test_padding_has_no_position_and_seeds_keep_their_bits() -> None:
    told = inputs([row([4], 7, source=-3, seed=2**64 - 1)], 4)
    assert told[:4, 0].tolist() == [-3, 7, -1, 8]
    assert told[4].view(np.float64)[0] == 0.5
    assert told[1].tolist() == [7, -1, -1, -1]
    assert DUMMY == 0  # block 0 is nobody's (`blocks.BlockPool`)


def test_only_rows_whose_blocks_changed_are_sent() -> None:
    tables = Tables(np.zeros((4, 5), np.int32), [[]] * 4, [0] * 4)
    first, second, third = [3], [4, 5], [6]
    rows = [row(first), row(second), row(third)]
    assert tables.update(rows) == (0, 3)
    assert tables.update(rows) is None
    second.append(9)
    assert tables.update(rows) == (1, 2)
    assert tables.known[1, :3].tolist() == [4, 5, 9]
    rows[1] = row([4, 7, 9])  # another sequence with the same ends
    assert tables.update(rows) == (1, 2)
    assert tables.known[1, :3].tolist() == [4, 7, 9]
