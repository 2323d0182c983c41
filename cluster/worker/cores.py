"""Shares a host's CPU cores out among its workers.

Where the cores suffice for all workers, each engine claims its own. Another engine computes on them
only while their owner is idle (`engine/core_sharing.py`).

`diptych serve` offers cores where they suffice for all workers, by naming a folder in the
environment. A worker claims as many as its engine has threads: it locks one file of the folder for
each core, and the locks end with the process at the latest. The thread that steps the engine is
bound to these cores, and so are OpenMP's threads, which it starts. The rest of the worker may run
anywhere. Where the engines leave no core over (`spare` is false), a worker's transfer thread stays
on that worker's own cores, so that a prefill worker's copies do not slow a decode worker down. A
core is named by its number in the kernel.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from ..config import ClusterConfig

log = logging.getLogger(__name__)

STATES_FILE = "states"  #: in that folder, beside a file for each core: see `engine/core_sharing.py`
VARIABLE = "DIPTYCH_CORES"  #: the environment variable with the path of the folder with the locks
#: Environment variable with the number of threads that compute in all replicas of all models at the
#: start. Ranks above 0 are not counted: where there are any, no thread is bound to a core.
THREADS_VARIABLE = "DIPTYCH_ENGINE_THREADS"


def usable() -> list[int]:
    """Return the cores that this process may run on; none where the system cannot bind threads."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    return sorted(os.sched_getaffinity(0))


def suffice(models: Sequence[ClusterConfig], cores: int) -> bool:
    """Return whether `cores` cores give every thread of every engine of all models one of its own.

    They never do with tensor parallelism: each rank is a process of its own, whose threads are not
    bound to cores.
    """
    pools = [pool for config in models for pool in (config.pools.prefill, config.pools.decode)]
    if any(pool.tensor_parallel > 1 for pool in pools):
        return False
    return _engine_threads(models) <= cores


def spare(config: ClusterConfig, cores: int) -> bool:
    """Return whether the engines leave at least one of `cores` cores to everything else.

    `config` is that of one model; the environment may say how many threads all models have.
    """
    threads = int(os.environ.get(THREADS_VARIABLE, "0")) or _engine_threads([config])
    return threads < cores


def _engine_threads(models: Sequence[ClusterConfig]) -> int:
    """Return how many threads compute in all replicas, without those of ranks above 0."""
    pools = [pool for config in models for pool in (config.pools.prefill, config.pools.decode)]
    return sum(pool.replicas * pool.engine.threads for pool in pools)


def offer(models: Sequence[ClusterConfig]) -> None:
    """Let this process's children claim cores, if there are enough for all engines of all models.

    If the environment names a folder already, that one stays, and the children claim from it.
    """
    os.environ[THREADS_VARIABLE] = str(_engine_threads(models))
    if suffice(models, len(usable())):
        # One folder for each user: clusters of one user share the machine's cores out, too.
        folder = Path(tempfile.gettempdir()) / f"diptych-cores-{os.getuid()}"
        os.environ.setdefault(VARIABLE, str(folder))


class Claim:
    """Holds `count` cores that nobody else holds, until `close`; none if fewer than that are free.

    `folder` has a file for each core, whose lock is the claim; it is made if it is missing. In a
    folder where other users can write nothing is claimed. `candidates` are the cores to try, in
    order. `cores` are the held ones, and `states` is the file by which their holders share them while
    they are idle; None without cores.
    """

    def __init__(self, folder: Path, count: int, candidates: Sequence[int]) -> None:
        self.cores: tuple[int, ...] = ()
        self.states: Path | None = None
        self._locks: dict[int, IO[str]] = {}
        if not candidates:
            return
        with suppress(FileExistsError):  # what is there in place of a folder is looked at below
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_of_this_user(folder):
            log.warning("%s is not a folder of this user alone: no core is claimed", folder)
            return
        # The lock of an open file ends with the process, so a worker that is killed keeps no core.
        for core in candidates:
            if len(self._locks) == count:
                break
            try:
                lock = _open_lock(folder / str(core))
            except OSError:  # a link, for instance
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # another claim has the core
                lock.close()
            else:
                self._locks[core] = lock
        if len(self._locks) == count:
            self.cores = tuple(self._locks)
            self.states = folder / STATES_FILE
        else:
            self.close()

    def close(self) -> None:
        """Release the cores."""
        for lock in self._locks.values():
            lock.close()
        self._locks = {}
        self.cores = ()


def _is_of_this_user(folder: Path) -> bool:
    """Return whether the folder is this user's; if so, nobody else can write there from now on.

    In /tmp anybody could have made it, with links in it to files of this user. Earlier versions
    made it with the user's mask, which may let a group write there.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return False
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        folder.chmod(0o700)
    return True


def _open_lock(file: Path) -> IO[str]:
    """Open a file that is locked, and make it if it is missing. Raises OSError for a link."""
    return os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "w")


def claim(count: int) -> Claim:
    """Claim `count` of the cores on offer; the claim is empty without an offer."""
    folder = os.environ.get(VARIABLE)
    if folder is None:  # without candidates no folder is looked at, so any will do
        return Claim(Path(tempfile.gettempdir()), count, ())
    return Claim(Path(folder), count, usable())
