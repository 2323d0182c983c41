"""The whole cluster on virtual time: promises hold under combined faults, and breaking one is seen."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from diptych.cluster.gateway.attempt.request import Answer
from diptych.engine.scheduler import Scheduler
from diptych.kv_transfer.service import TransferService
from diptych.kv_transfer.ticket_events import ChunkVerified

from .world import Broken, World

SEEDS = [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 24))]
BUSY_SEEDS = range(100, 106)


@pytest.mark.parametrize("seed", SEEDS)
def test_promises_hold_under_combined_faults(seed: int) -> None:
    World(seed).play()


def test_nothing_fails_without_a_fault() -> None:
    report = World(3, faults=0).play()
    assert report.requests > 4 and not report.failed and not report.faults


def _is_broken(seeds: range, **given: Any) -> str:
    for seed in seeds:
        try:
            World(seed, **given).play()
        except Broken as broken:
            return str(broken)
    return ""


def test_blocks_that_nobody_releases_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "remove", lambda *_: None)
    assert "reserved" in _is_broken(BUSY_SEEDS)


def test_a_token_that_comes_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Answer.add

    def twice(answer: Answer, frame: Any) -> Any:
        new = add(answer, frame)
        return [*new, *new[-1:]] if len(answer.journal) > 3 else new

    monkeypatch.setattr(Answer, "add", twice)
    assert "not as alone" in _is_broken(BUSY_SEEDS, faults=0)


def test_kv_that_is_damaged_and_not_verified_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without checksums a write that is wrong by a bit gives another answer."""
    damage = 0.3
    assert not _is_broken(range(100, 102), faults=0, damage=damage), "checksums find it"

    def never_compared(service: TransferService, action: Any, *_: Any) -> None:
        service._to_receiver(_verified(action))

    monkeypatch.setattr(TransferService, "_compare", never_compared)
    assert "not as alone" in _is_broken(BUSY_SEEDS, faults=0, damage=damage)


def _verified(action: Any) -> Any:
    return ChunkVerified(action.ticket_id, action.chunk.chunk_number, True)


#: Runs the command as on a machine that has just started, where the real clocks begin at 0. What
#: a process of the simulation reads from them, and not from the simulated clock, then makes
#: another run.
ON_A_FRESH_MACHINE = """
import runpy, time

def from_zero(clock):
    start = clock()
    return lambda: clock() - start

for name in ("monotonic", "perf_counter", "time"):
    setattr(time, name, from_zero(getattr(time, name)))
runpy.run_module("tests.simcluster.run", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_a_seed_plays_the_same_way_on_another_machine() -> None:
    """A run must not depend on what a real clock says, so that a seed can be played again."""
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    logs = [
        subprocess.run(
            [sys.executable, *command, "--replay", "5"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for command in (["-m", "tests.simcluster.run"], ["-c", ON_A_FRESH_MACHINE])
    ]
    assert logs[0] == logs[1]
    assert "all promises held" in logs[0]
