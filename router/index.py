"""Which worker holds which prefix: chained content hashes -> workers."""

from __future__ import annotations


class PrefixIndex:
    """Fed by block events. Bounded by what the workers hold: one entry per cached block."""

    def __init__(self) -> None:
        self._holders: dict[bytes, set[str]] = {}
        self._held: dict[str, set[bytes]] = {}

    def store(self, worker: str, hashes: list[bytes]) -> None:
        mine = self._held.setdefault(worker, set())
        for content in hashes:
            mine.add(content)
            self._holders.setdefault(content, set()).add(worker)

    def evict(self, worker: str, hashes: list[bytes]) -> None:
        mine = self._held.get(worker, set())
        for content in hashes:
            if content in mine:
                mine.discard(content)
                self._forget(worker, content)

    def drop(self, worker: str) -> None:
        for content in self._held.pop(worker, set()):
            self._forget(worker, content)

    def _forget(self, worker: str, content: bytes) -> None:
        holders = self._holders[content]
        holders.discard(worker)
        if not holders:
            del self._holders[content]

    def depths(self, hashes: list[bytes]) -> dict[str, int]:
        """Leading blocks of `hashes` that each worker holds; workers with none are left out."""
        depths: dict[str, int] = {}
        alive: set[str] | None = None
        for depth, content in enumerate(hashes, start=1):
            holders = self._holders.get(content, set())
            alive = set(holders) if alive is None else alive & holders
            if not alive:
                break
            depths.update(dict.fromkeys(alive, depth))
        return depths

    def __len__(self) -> int:
        return len(self._holders)
