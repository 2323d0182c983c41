"""What a decode step is told: its bucket, its padding, and only what is new in block tables."""

from __future__ import annotations

import datetime
import math
import subprocess
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diptych.engine.gpu.decode import DecodeRunner, PendingRows
from diptych.engine.gpu.plan import (
    PADDING_BLOCK,
    ROW_FIELDS,
    BlockTables,
    DecodeRows,
    RowField,
    bucket_size,
    bucket_sizes,
    pad_rows,
    plain_fields,
)
from diptych.engine.gpu.random_model import make_random_model
from diptych.engine.gpu.roofline import LLAMA_3_8B
from diptych.engine.gpu.sampling import SampledRows
from diptych.engine.options import DecodeLimits
from diptych.engine.rank_processes import RankLost, RankProcesses

TINY = {
    **{"vocab": 128, "hidden": 64, "intermediate": 64, "layers": 1, "heads": 2, "kv_heads": 1},
    **{"head_dim": 16, "max_positions": 256, "dtype": "float32"},
}


@dataclass(frozen=True)
class Row:
    blocks: list[int]
    position: int = 0
    source: int = 1
    seed: int = 0


def rows_of(rows: list[Row]) -> DecodeRows:
    return DecodeRows.build(
        [plain_fields(row.seed, 0.5) for row in rows],
        sources=[row.source for row in rows],
        lengths=[row.position + 1 for row in rows],
        blocks=[row.blocks for row in rows],
    )


def test_a_bucket_holds_its_rows_and_wastes_little() -> None:
    assert bucket_sizes(17) == [24, 16, 8, 4, 2, 1]
    for rows in range(1, 600):
        size = bucket_size(rows)
        assert rows <= size and bucket_size(size) == size
        assert size - rows < max(4, size // 2) and (rows < 16 or size <= 1.5 * rows)
    assert bucket_sizes(256)[:3] == [256, 224, 192]


def test_padding_has_no_position_and_seeds_keep_their_bits() -> None:
    told = pad_rows(rows_of([Row([4], 7, source=-3, seed=2**64 - 1)]).packed, 4)
    assert told.shape == (ROW_FIELDS, 4)
    assert told[:4, 0].tolist() == [-3, 7, -1, 8]
    assert told[RowField.TEMPERATURE].view(np.float64)[0] == 0.5
    assert told[RowField.POSITION].tolist() == [7, -1, -1, -1]
    assert PADDING_BLOCK == 0  # block 0 is nobody's (`blocks.BlockPool`)


def test_only_rows_whose_blocks_changed_are_sent() -> None:
    tables = BlockTables(np.zeros((4, 5), np.int32), [[]] * 4, [0] * 4)
    first, second, third = [3], [4, 5], [6]
    lists = [first, second, third]
    assert tables.update(lists) == [0, 1, 2]
    assert tables.update(lists) == []
    second.append(9)
    assert tables.update(lists) == [1]
    assert tables.device_tables[1, :3].tolist() == [4, 5, 9]
    lists[1] = [4, 7, 9]  # another sequence with the same ends
    assert tables.update(lists) == [1]
    assert tables.device_tables[1, :3].tolist() == [4, 7, 9]


def test_padding_touches_nobodys_blocks() -> None:
    """A row that left is padding now, and the device still knows its blocks."""
    spec = replace(LLAMA_3_8B, **TINY, windows=(None,))
    decoder, ops = make_random_model(spec, torch.device("cpu"), blocks=9)
    runner = DecodeRunner(decoder, ops, DecodeLimits(rows=4, max_model_len=256, block_tokens=64))
    rows = [Row([1 + 2 * i, 2 + 2 * i], 64 * (i % 2) + i) for i in range(4)]
    runner.launch(rows_of(rows)).read()
    keys = decoder.pool.layer(0)[0]
    before = keys.clone()
    runner.launch(rows_of([replace(one, position=one.position + 1) for one in rows[:3]])).read()
    changed = (keys != before).any(-1).any(1).nonzero().tolist()
    assert changed == [[0, 0], [1, 1], [4, 2], [5, 3]]


def test_a_row_that_gave_no_token_does_not_end_the_step_behind_it() -> None:
    """Sampling gives 0 for a row of NaN, so an id of no token is damage that nobody has seen."""
    spec = replace(LLAMA_3_8B, **TINY, windows=(None,))
    decoder, ops = make_random_model(spec, torch.device("cpu"), blocks=9)
    runner = DecodeRunner(decoder, ops, DecodeLimits(rows=2, max_model_len=256, block_tokens=64))
    runner._sampled.token_ids.fill_(2**31 - 1)
    drawn = runner.launch(rows_of([Row([1], 0, source=-1)])).read()
    assert math.isfinite(drawn.peaks[0]) and 0 <= drawn.token_ids[0] < TINY["vocab"]


class Stuck:
    """An event that is over after so many looks."""

    def __init__(self, looks: float) -> None:
        self.looks = looks

    def record(self) -> None: ...
    def synchronize(self) -> None:
        raise AssertionError("nobody could be told that a rank is gone")

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_a_step_of_ranks_ends_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    host = SampledRows.allocate(1, torch.device("cpu"))
    host.token_ids[0] = 7
    follower = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ranks = RankProcesses(dist.HashStore(), [follower])
    assert PendingRows(1, host, Stuck(3), ranks).read().token_ids == [7]
    monkeypatch.setattr(
        "diptych.engine.rank_processes.COLLECTIVE_TIMEOUT", datetime.timedelta(seconds=0.05)
    )
    with pytest.raises(RankLost, match="hangs"):
        PendingRows(1, host, Stuck(math.inf), ranks).read()
    monkeypatch.undo()
    follower.communicate()
    with pytest.raises(RankLost, match="ended"):
        PendingRows(1, host, Stuck(math.inf), ranks).read()


def test_scores_of_ranks_end_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that ended before the logits were joined leaves the device of rank 0 waiting."""
    spec = replace(LLAMA_3_8B, **TINY, windows=(None,))
    decoder, ops = make_random_model(spec, torch.device("cpu"), blocks=9)
    limits = DecodeLimits(rows=2, max_model_len=256, block_tokens=64)
    follower = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    runner = DecodeRunner(decoder, ops, limits, RankProcesses(dist.HashStore(), [follower]))
    monkeypatch.setattr(runner, "_make_event", lambda: Stuck(math.inf))
    scores = runner.score_rows(torch.zeros(1, TINY["vocab"]), rows_of([Row([], 4)]))
    follower.communicate()
    with pytest.raises(RankLost, match="ended"):
        scores.read()


def test_ids_come_from_the_step_before() -> None:
    """What row i gave, whichever row takes it."""
    spec = replace(LLAMA_3_8B, **TINY, windows=(None,))
    decoder, ops = make_random_model(spec, torch.device("cpu"), blocks=9)
    runner = DecodeRunner(decoder, ops, DecodeLimits(rows=2, max_model_len=256, block_tokens=64))
    first = rows_of([Row([1], 0, source=5, seed=1), Row([2], 0, source=9, seed=2)])
    ids = runner.launch(first).read().token_ids
    assert ids[0] != ids[1]
    ahead = runner.launch(rows_of([Row([2], 1, source=-2)])).read().token_ids
    runner.launch(first).read()
    assert runner.launch(rows_of([Row([2], 1, source=ids[1])])).read().token_ids == ahead
