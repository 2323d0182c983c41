"""The processes that simulate: what they leave alone, and what a user hears when one is killed."""

from __future__ import annotations

import gc
import os
import signal

import pytest
from diptych.simulator.case import Case, CaseProcesses
from diptych.simulator.errors import SimulationError
from diptych.simulator.processes import simulation_processes
from diptych.simulator.sources import load_trace

from .support import h200

TRACE = load_trace("synthetic:10")


class AbortsWhereCopied:
    """Stands for a library's object: its end in a forked process is the end of that process."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self._process:
            os.abort()


def collect_garbage() -> int:
    gc.collect()
    return os.getpid()


def be_killed(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_process_began_with_is_not_destroyed_in_it() -> None:
    gc.disable()
    try:
        cycle: list[object] = [AbortsWhereCopied()]
        cycle.append(cycle)  # only the garbage collector ends it
        del cycle
        with simulation_processes(1) as pool:
            assert pool.submit(collect_garbage).result() != os.getpid()
    finally:
        gc.enable()


def test_a_killed_process_is_a_sentence() -> None:
    with (
        pytest.raises(SimulationError, match="was killed: if memory was short"),
        simulation_processes(1) as pool,
    ):
        pool.submit(be_killed).result()


def test_a_killed_process_of_a_study_is_a_sentence() -> None:
    with (
        pytest.raises(SimulationError, match="was killed: if memory was short"),
        CaseProcesses([Case(TRACE, *h200())], 2) as processes,
    ):
        processes.submit(be_killed, 0).result()
