"""The processes in which simulations run on every core."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context

from .errors import SimulationError


def fork_processes(jobs: int) -> ProcessPoolExecutor:
    """Return a pool of `jobs` processes (at least one), forked so that these share this one's data.

    A forked process begins with copies of everything here. Some of it must not be destroyed there:
    a library's connection, for instance, whose threads are not in the copy, aborts the process. So
    the garbage collector of a forked process leaves alone whatever it began with.
    """
    return ProcessPoolExecutor(max(1, jobs), get_context("fork"), initializer=gc.freeze)


@contextmanager
def simulation_processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Give a pool of `jobs` processes. Raises SimulationError if one of these ends in its work."""
    try:
        with fork_processes(jobs) as pool:
            yield pool
    except BrokenProcessPool as error:
        raise lost_process() from error


def lost_process() -> SimulationError:
    """Return what to tell a user when a process of a pool has ended in the middle of its work."""
    return SimulationError(
        "a process that simulated was killed: if memory was short, use fewer (--jobs) or a shorter "
        "trace (--head)"
    )
