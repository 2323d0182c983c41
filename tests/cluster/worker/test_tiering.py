"""Blocks on their way between an engine's pool and the tiers below it."""

from __future__ import annotations

import errno
import fcntl
import os
import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from diptych.cluster.config import TierSettings
from diptych.cluster.worker.tiering import Tiering
from diptych.engine.commands import (
    BlockDemoted,
    BlocksLeftTiers,
    BlocksLoaded,
    DemoteBlocks,
    LoadBlocks,
)
from diptych.engine.engine import no_tier_blocks

BLOCK_BYTES = 64 << 10
CONTENTS = [bytes([number]) * 16 for number in range(2)]


def stand_in_engine(block_bytes: int = BLOCK_BYTES) -> Any:
    """Returns what the tiers see of an engine: a pool of three blocks."""
    view = memoryview(bytearray(3 * block_bytes))
    return SimpleNamespace(
        kv_pool=SimpleNamespace(block_bytes=block_bytes, view=view),
        compatibility=b"model and layout",
        count_tier_blocks=no_tier_blocks,
    )


Answers = queue.SimpleQueue[BlockDemoted | BlocksLeftTiers]


def open_tiers(engine: Any) -> tuple[Tiering, Answers]:
    answers: Answers = queue.SimpleQueue()
    settings = TierSettings(memory_mib=1)
    return Tiering("prefill", engine, settings, lambda loaded: None, answers.put), answers


def test_tiers_that_have_ended_are_taken_from_the_engine() -> None:
    """Else the engine offers its blocks for ever, and a prompt asks for what nobody loads."""
    engine = stand_in_engine()
    tiering, answers = open_tiers(engine)
    tiering.demote(DemoteBlocks([(1, CONTENTS[0])]))
    assert answers.get(timeout=10) == BlockDemoted(1, copied=True)
    assert engine.count_tier_blocks(CONTENTS) == 1
    tiering.close()
    assert answers.get(timeout=10) == BlocksLeftTiers(CONTENTS[:1])
    tiering.demote(DemoteBlocks([(2, CONTENTS[1])]))
    assert answers.get(timeout=10) == BlockDemoted(2, copied=False)
    assert engine.count_tier_blocks is no_tier_blocks


def test_a_memory_tier_smaller_than_a_block_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"kv_tiers\.memory_mib must be at least 3"):
        open_tiers(stand_in_engine((2 << 20) + 1))


def test_the_engine_hears_of_what_the_tiers_drop() -> None:
    tiering, answers = open_tiers(stand_in_engine(block_bytes=768 << 10))  # memory holds one
    for number, content in enumerate(CONTENTS):
        tiering.demote(DemoteBlocks([(number, content)]))
        heard = [answers.get(timeout=10) for _ in range(1 + number)]
        assert BlockDemoted(number, copied=True) in heard
    assert heard[0] == BlocksLeftTiers(CONTENTS[:1])
    tiering.close()


def test_a_load_is_measured_and_counted() -> None:
    engine = stand_in_engine()
    loaded: queue.SimpleQueue[BlocksLoaded] = queue.SimpleQueue()
    stored: Answers = queue.SimpleQueue()
    tiering = Tiering("prefill", engine, TierSettings(memory_mib=1), loaded.put, stored.put)
    assert 0 < tiering.measure_load_s() < 1
    tiering.load(LoadBlocks(("r", 0), 0, CONTENTS[:1], [1]))
    assert loaded.get(timeout=10).block_count == 0
    assert tiering.tiers.loads_done.blocks == 0
    tiering.demote(DemoteBlocks([(1, CONTENTS[0])]))
    stored.get(timeout=10)
    tiering.load(LoadBlocks(("r", 0), 0, CONTENTS[:1], [2]))
    assert loaded.get(timeout=10).block_count == 1
    tiering.close()
    assert tiering.tiers.loads_done.blocks == 1 and tiering.tiers.loads_done.seconds > 0


def claim(root: Path) -> tuple[Path | None, Tiering]:
    tiering = object.__new__(Tiering)
    tiering._folder_lock = None
    return tiering._claim_folder(root, "prefill"), tiering


def test_a_disk_tier_in_the_home_folder_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    settings = TierSettings(memory_mib=1, disk_mib=1, folder="~/kv")
    tiering = Tiering("prefill", stand_in_engine(), settings, print, print)
    tiering.close()
    assert (tmp_path / "home" / "kv" / "prefill-0").is_dir()
    assert not (tmp_path / "~").exists()


def test_a_home_folder_that_nobody_has_leaves_the_worker_without_a_disk_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = TierSettings(memory_mib=1, disk_mib=1, folder="~nobody-has-this-name/kv")
    Tiering("prefill", stand_in_engine(), settings, print, print).close()
    assert "no disk tier" in caplog.text


def test_each_worker_has_a_folder_of_its_own(tmp_path: Path) -> None:
    first, holder = claim(tmp_path)
    second, other = claim(tmp_path)
    assert first == tmp_path / "prefill-0" and second == tmp_path / "prefill-1"
    for each in (holder, other):
        assert each._folder_lock is not None
        os.close(each._folder_lock)


def test_a_folder_that_cannot_be_locked_is_not_called_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(fcntl, "flock", refuse)
    folder, _ = claim(tmp_path)
    assert folder is None
    assert "no disk tier" in caplog.text and "No locks available" in caplog.text
    assert len(os.listdir("/proc/self/fd")) == files
