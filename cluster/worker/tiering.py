"""A worker's tiers below its KV pool: which folder is its own, and what moves between them."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ...engine.commands import BlockDemoted, BlocksLoaded, DemoteBlocks, LoadBlocks
from ...engine.engine import Engine
from ...kv_transfer.tiers import Limits, Tiers
from ..config import TierSettings

log = logging.getLogger(__name__)

FOLDERS = 64  #: workers of one pool on one machine that can have a folder


class Tiering:
    """`tell` gets `Loaded` for the role, `submit` gets `Demoted` for the engine. Any thread."""

    def __init__(
        self,
        home: str,
        engine: Engine,
        settings: TierSettings,
        tell: Callable[[object], None],
        submit: Callable[[object], None],
    ) -> None:
        self._pool, self._tell, self._submit = engine.kv, tell, submit
        self._lock: int | None = None  #: of our folder, until we close
        folder = self._claim(Path(settings.folder), home) if settings.folder else None
        limits = Limits(settings.memory_mib << 20, settings.disk_mib << 20 if folder else 0)
        size = self._pool.block_bytes
        self.tiers = Tiers(size, engine.compatibility, limits, folder)
        engine.below = self.tiers.held

    def _claim(self, root: Path, home: str) -> Path | None:
        """The first folder that no other worker has: a restarted worker finds its blocks again."""
        for index in range(FOLDERS):
            folder = root / f"{home}-{index}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                file = os.open(folder / "worker.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except OSError as error:
                log.error("no disk tier: %s", error)
                return None
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(file)
                continue
            self._lock = file
            return folder
        log.error("no disk tier: %d workers have folders in %s", FOLDERS, root)
        return None

    def _view(self, block: int) -> memoryview:
        size = self._pool.block_bytes
        return self._pool.view[block * size : (block + 1) * size]

    def load(self, command: LoadBlocks) -> None:
        """Answered by `Loaded`, whatever happens."""
        pairs = [(h, self._view(b)) for h, b in zip(command.hashes, command.blocks, strict=True)]

        def done(arrived: list[bytes]) -> None:
            self._tell(BlocksLoaded(command.attempt_key, command.held_blocks + len(arrived)))

        if not self.tiers.load(pairs, done):
            done([])

    def demote(self, command: DemoteBlocks) -> None:
        """Each block is answered by `Demoted`."""
        for block, content in command.blocks:
            done = partial(self._demoted, block)
            if not self.tiers.store(content, self._view(block), done):
                done(False)

    def _demoted(self, block: int, kept: bool) -> None:
        self._submit(BlockDemoted(block, kept))

    def close(self) -> None:
        self.tiers.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
