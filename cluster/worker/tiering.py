"""A worker's tiers below its KV pool: which folder is its own, and what moves between them.

The tiers are host memory and disk. They hold blocks of KV that the pool had no room for.
"""

from __future__ import annotations

import fcntl
import logging
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from ...engine.commands import (
    BlockDemoted,
    BlocksLeftTiers,
    BlocksLoaded,
    DemoteBlocks,
    LoadBlocks,
)
from ...engine.engine_like import EngineLike
from ...kv_transfer.tiers import TieredStore, TierLimits
from ...kv_transfer.tiers.faults import checksum
from ..config import TierSettings

log = logging.getLogger(__name__)

#: Workers of one pool on one machine that can have a folder; the next ones go without a disk tier.
FOLDER_LIMIT = 64
MEASURED_COPIES = 5  #: of blocks, at the start, at least; the median counts
MEASURED_BYTES = 32 << 20  #: of small blocks so many are copied


class Tiering:
    """Moves blocks between the engine's pool and the tiers, on the tiers' thread.

    `pool` is the worker's pool, `prefill` or `decode`.

    The worker's role has prefixes loaded: `tell_role` gets a `BlocksLoaded` for each `LoadBlocks`.
    The engine demotes blocks by itself: `submit_to_engine` gets a `BlockDemoted` for each block of
    a `DemoteBlocks`, and a `BlocksLeftTiers` for what the tiers drop. Both callables must be safe to
    call from any thread: they are called on the tiers' thread, or on the caller's where the tiers
    refuse a request.
    """

    def __init__(
        self,
        pool: str,
        engine: EngineLike,
        settings: TierSettings,
        tell_role: Callable[[BlocksLoaded], None],
        submit_to_engine: Callable[[BlockDemoted | BlocksLeftTiers], None],
    ) -> None:
        self._engine = engine
        self._kv = engine.kv_pool
        self._tell_role = tell_role
        self._submit_to_engine = submit_to_engine
        self._folder_lock: int | None = None  #: the file that keeps other workers off our folder
        folder = self._claim_folder(Path(settings.folder), pool) if settings.folder else None
        disk_bytes = settings.disk_mib << 20 if folder else 0
        limits = TierLimits(settings.memory_mib << 20, disk_bytes)
        # Files that another model or KV layout has left in the folder are of another compatibility.
        self.tiers = TieredStore(
            self._kv.block_bytes, engine.compatibility, limits, folder, tell_left=self._forget
        )
        #: What the engine counts by where it has no tiers.
        self._count_without_tiers = engine.count_tier_blocks
        # The engine calls this for how much of a prefix the tiers hold, before it reserves blocks.
        engine.count_tier_blocks = self.tiers.count_held_blocks

    def _claim_folder(self, root: Path, pool: str) -> Path | None:
        """Return the first folder that no other worker has; None (no disk tier) if there is none.

        None also if a folder cannot be made, or its lock file cannot be opened or locked: the
        folders after it are not tried. A `~` in front of `root` is the home folder of the user who
        runs the worker. A worker that starts again finds the blocks of the last worker with this
        folder, whose lock ended with its process.
        """
        try:
            root = root.expanduser()
        except RuntimeError as error:  # there is no such user, or the user has no home folder
            log.error("no disk tier: %s", error)
            return None
        for index in range(FOLDER_LIMIT):
            folder = root / f"{pool}-{index}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC
                lock = os.open(folder / "worker.lock", flags, 0o600)
            except OSError as error:
                log.error("no disk tier: %s", error)
                return None
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another worker has this folder
                os.close(lock)
                continue
            except OSError as error:
                os.close(lock)
                log.error("no disk tier: %s", error)
                return None
            self._folder_lock = lock
            return folder
        log.error("no disk tier: %d workers have folders in %s", FOLDER_LIMIT, root)
        return None

    def _block_view(self, block: int) -> memoryview:
        """Return the bytes of the pool's block of this number; writing to them changes the pool."""
        size = self._kv.block_bytes
        return self._kv.view[block * size : (block + 1) * size]

    def load(self, command: LoadBlocks) -> None:
        """Copy blocks from the tiers into the pool; `BlocksLoaded` follows, whatever happens.

        The command's blocks follow the `held_blocks` leading blocks of a prompt that the pool has.
        The answer counts the prompt's leading blocks that the pool has now: the `held_blocks` and
        those just loaded.
        """
        pairs = [
            (content, self._block_view(block))
            for content, block in zip(command.hashes, command.blocks, strict=True)
        ]

        def loading_ended(loaded: list[bytes]) -> None:  # the leading ones that the tiers held
            block_count = command.held_blocks + len(loaded)
            self._tell_role(BlocksLoaded(command.attempt_key, block_count))

        accepted = self.tiers.load(pairs, loading_ended)
        if not accepted:  # too much waits there: `loading_ended` is not going to be called
            loading_ended([])

    def demote(self, command: DemoteBlocks) -> None:
        """Copy blocks of the pool into the tiers; each is answered by `BlockDemoted`.

        The engine does not use a block again before its answer: until then it may be read. The
        answer says whether the tiers hold a copy now.
        """
        for block, content in command.blocks:
            copying_ended = partial(self._copying_ended, block)
            accepted = self.tiers.store(content, self._block_view(block), copying_ended)
            if not accepted:
                copying_ended(copied=False)
        if not self.tiers.is_open:  # their thread has ended: the engine need not offer them more
            self._engine.count_tier_blocks = self._count_without_tiers

    def _copying_ended(self, block: int, copied: bool) -> None:
        self._submit_to_engine(BlockDemoted(block, copied))

    def _forget(self, contents: list[bytes]) -> None:
        self._submit_to_engine(BlocksLeftTiers(contents))

    def measure_load_s(self) -> float:
        """Return the seconds in which one block comes back from host memory, measured now.

        It is the time of a copy and a checksum, of blocks outside of pool and tiers: so many that most
        are in no cache of the CPU. A load from disk takes longer: the router learns that from reports.
        """
        count = max(MEASURED_COPIES, MEASURED_BYTES // self._kv.block_bytes)
        blocks = np.ones((count, self._kv.block_bytes), np.uint8)
        copies = np.ones_like(blocks)
        seconds = []
        for block, copy in zip(blocks, copies, strict=True):
            began = time.perf_counter()
            np.copyto(copy, block)
            checksum(copy.data, 0)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)

    def close(self) -> None:
        """End the tiers' thread and give the folder back."""
        self.tiers.close()
        if self._folder_lock is not None:
            os.close(self._folder_lock)
            self._folder_lock = None
