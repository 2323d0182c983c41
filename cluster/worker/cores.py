"""CPU cores of a host, shared out among its workers: no two engines compute on the same one.

`diptych serve` offers them where they suffice for all workers, by naming a folder in the
environment. A worker claims as many as its engine has threads: a lock on a file per core, which
ends with the process at the latest. The thread that steps the engine is bound to them, and so are
OpenMP's, which it starts. The rest of the worker may run anywhere, but where the engines leave no
core, a worker's transfers stay on its own: copies of a prefill worker are not to slow decode down.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from ..config import ClusterConfig

VARIABLE = "DIPTYCH_CORES"


def usable() -> list[int]:
    """Cores that this process may run on; none where threads cannot be bound."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def suffice(config: ClusterConfig, cores: int) -> bool:
    """Every thread of every engine can have a core of its own.

    Not if ranks share a model: those are processes of their own, which nobody binds.
    """
    pools = (config.pools.prefill, config.pools.decode)
    if any(pool.tensor_parallel > 1 for pool in pools):
        return False
    return _threads(config) <= cores


def spare(config: ClusterConfig, cores: int) -> bool:
    """The engines leave some core to everything else."""
    return _threads(config) < cores


def _threads(config: ClusterConfig) -> int:
    pools = (config.pools.prefill, config.pools.decode)
    return sum(pool.replicas * pool.engine.threads for pool in pools)


def offer(config: ClusterConfig) -> None:
    """Lets this process's children claim cores, if those suffice."""
    if suffice(config, len(usable())):
        folder = Path(tempfile.gettempdir()) / f"diptych-cores-{os.getuid()}"
        os.environ.setdefault(VARIABLE, str(folder))


class Claim:
    """`count` cores that nobody else holds, until `close`; none if so many are not to be had."""

    def __init__(self, folder: Path, count: int, among: Sequence[int]) -> None:
        self.cores: tuple[int, ...] = ()
        self._locks: dict[int, IO[str]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for core in among:
            if len(self._locks) == count:
                break
            lock = (folder / str(core)).open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
            else:
                self._locks[core] = lock
        if len(self._locks) == count:
            self.cores = tuple(self._locks)
        else:
            self.close()

    def close(self) -> None:
        for lock in self._locks.values():
            lock.close()
        self._locks, self.cores = {}, ()


def claim(count: int) -> Claim:
    """Of the cores on offer; none if there is no offer."""
    folder = os.environ.get(VARIABLE)
    return Claim(Path(folder or tempfile.gettempdir()), count, usable() if folder else ())
