"""Our engine passes the kit for engines, the kit covers the protocol, and broken engines fail it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from diptych.engine.commands import PrefixStaged, StagePrefix
from diptych.engine.engine import Engine
from diptych.engine.engine_like import EngineLike
from diptych.engine.options import EngineOptions, SchedulerLimits
from diptych.engine.sequence import Sequence, SequenceOutput
from diptych.protos.frames import AttemptKey

from tests.support.checkpoints import VOCAB

from ..kit import engine_conformance
from ..kit.engine_conformance import CHECKS, TIER_CHECKS, EngineKit
from .rig import block_bytes


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama")


def opener(folder: Path, kind: type[Engine] = Engine) -> EngineKit:
    def open_with_blocks(limits: SchedulerLimits, blocks: int) -> EngineLike:
        size = (blocks + 1) * block_bytes(folder, "bfloat16")
        return kind(EngineOptions(folder, kv_bytes=size, limits=limits))

    return EngineKit(open_with_blocks, VOCAB)


EVERY_CHECK = (*CHECKS, *TIER_CHECKS)


@pytest.mark.parametrize("check", EVERY_CHECK, ids=lambda check: check.__name__)
def test_engine(check: Callable[[EngineKit], None], folder: Path) -> None:
    check(opener(folder))


def test_every_member_of_the_protocol_is_in_a_check() -> None:
    members = {*EngineLike.__annotations__, *vars(EngineLike)}
    members = {name for name in members if not name.startswith("_")}
    assert len(members) > 25
    source = inspect.getsource(engine_conformance)
    assert [name for name in sorted(members) if f".{name}" not in source] == []


class ForgetsToRelease(Engine):
    def release(self, attempt_key: AttemptKey) -> None:
        pass


class LosesAToken(Engine):
    def step(self) -> list[SequenceOutput]:
        return [output for output in super().step() if output.offset != 3]


class AnnouncesNothing(Engine):
    def _announce_prefills(self, prefills: Any) -> None:
        return None


class ReservesTooMuch(Engine):
    def required_blocks(self, sequence: Sequence) -> int:
        return super().required_blocks(sequence) + 1


class HidesWhoHoldsBlocks(Engine):
    def block_holders(self) -> Any:
        return iter(())


class CachesWhatHasNotCome(Engine):
    def cache_staged(self, attempt_key: AttemptKey, block_count: int) -> None:
        super().cache_staged(attempt_key, block_count + 1)


class ForgetsTheTiers(Engine):
    def stage(self, command: StagePrefix) -> PrefixStaged:
        self.count_tier_blocks = lambda hashes: 0
        return super().stage(command)


class KeepsDemotedBlocks(Engine):
    def finish_demotion(self, block: int, copied: bool) -> None:
        pass


class TellsStoredBlocksTwice(Engine):
    def observe(self) -> Any:
        observation = super().observe()
        observation.stored.extend(observation.hashes)
        return observation


class IgnoresFurtherAnswers(Engine):
    def commit(self, sequence: Sequence, *_: Any, **__: Any) -> None:
        super().commit(sequence)


BROKEN = [
    ForgetsToRelease,
    LosesAToken,
    AnnouncesNothing,
    ReservesTooMuch,
    HidesWhoHoldsBlocks,
    CachesWhatHasNotCome,
    ForgetsTheTiers,
    KeepsDemotedBlocks,
    TellsStoredBlocksTwice,
    IgnoresFurtherAnswers,
]


@pytest.mark.parametrize(
    "kind", [*BROKEN[:2], *(pytest.param(kind, marks=pytest.mark.slow) for kind in BROKEN[2:])]
)
def test_a_broken_engine_fails(kind: type[Engine], folder: Path) -> None:
    failures = []
    for check in EVERY_CHECK:
        try:
            check(opener(folder, kind))
        except (AssertionError, KeyError, IndexError):
            failures.append(check.__name__)
            break
    assert failures
