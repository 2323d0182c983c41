"""Who owns which KV block: free list, reference counts, prefix cache (pure).

Every block is in exactly one place: free (nobody's), used (referenced by sequences) or cached (not
referenced, content known, evicted in LRU order when blocks run short). Block 0 is nobody's ever: it
pads batches.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence


class BlockPool:
    """Verbs: `allocate` / `release`, `match` a prefix, `seal` a block whose content is final."""

    def __init__(self, total: int) -> None:
        assert total >= 2, total
        self.total = total - 1  #: blocks that can be used
        self._free: deque[int] = deque(range(1, total))
        self._refs: dict[int, int] = {}  #: used blocks -> references
        self._cached: OrderedDict[int, bytes] = OrderedDict()  #: LRU first
        self._by_hash: dict[bytes, int] = {}  #: sealed blocks, used or cached
        self._hash_of: dict[int, bytes] = {}
        self._marks: dict[bytes, Sequence[bytes]] = {}  #: what is told of each known content
        self._told: dict[bytes, int] = {}  #: those, and how many contents each is told of
        self._below: set[bytes] = set()  #: of the known contents, those that a tier has too
        self._demoting: dict[int, bytes] = {}  #: pinned until a tier has copied them
        self.stored: list[bytes] = []  #: since the last `drain_events`
        self.evicted: list[bytes] = []

    @property
    def available(self) -> int:
        """Blocks that `allocate` could give out now."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        return len(self._refs)

    @property
    def cached(self) -> int:
        return len(self._cached)

    def allocate(self, count: int, keep: int = 0) -> list[int] | None:
        """`count` blocks with one reference each, or None (and nothing changes).

        `keep` blocks stay available for others.
        """
        if count > self.available - keep:
            return None
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def _take(self) -> int:
        if self._free:
            return self._free.popleft()
        block, content = self._cached.popitem(last=False)
        del self._hash_of[block]
        self._forget(content)
        return block

    def _forget(self, content: bytes) -> None:
        del self._by_hash[content]
        self._below.discard(content)
        self._untell(self._marks.pop(content))

    def mark(self, content: bytes, marks: Sequence[bytes]) -> None:
        """What routers are told of a known content from now on."""
        before = self._marks.get(content, ())
        self._marks[content] = marks
        for mark in marks:
            self._told[mark] = self._told.get(mark, 0) + 1
            if self._told[mark] == 1:
                self.stored.append(mark)
        self._untell(before)

    def _untell(self, marks: Sequence[bytes]) -> None:
        for mark in marks:
            self._told[mark] -= 1
            if not self._told[mark]:
                del self._told[mark]
                self.evicted.append(mark)

    def match(self, hashes: list[bytes]) -> list[int]:
        """The blocks of the longest known prefix of `hashes`, each with one more reference."""
        blocks: list[int] = []
        for content in hashes:
            block = self._by_hash.get(content)
            if block is None:
                break
            self._cached.pop(block, None)
            self._refs[block] = self._refs.get(block, 0) + 1
            blocks.append(block)
        return blocks

    def known(self, hashes: list[bytes]) -> int:
        """How many leading ones `match` would find."""
        return next((i for i, one in enumerate(hashes) if one not in self._by_hash), len(hashes))

    def share(self, blocks: list[int]) -> list[int]:
        """The same used blocks, each with one more reference."""
        for block in blocks:
            self._refs[block] += 1
        return blocks

    def seal(self, block: int, content: bytes, marks: Sequence[bytes] | None = None) -> None:
        """`block` holds the KV of the prefix `content` from now on. The first one of two wins.

        `marks`: what routers are told of it (None: its content).
        """
        assert block in self._refs, block
        if content not in self._by_hash and block not in self._hash_of:
            self._by_hash[content] = block
            self._hash_of[block] = content
            self.mark(content, (content,) if marks is None else marks)

    def unseal(self, blocks: list[int]) -> None:
        """Nobody finds these used blocks any more."""
        for block in blocks:
            content = self._hash_of.pop(block, None)
            if content is not None:
                self._forget(content)

    def release(self, blocks: list[int]) -> None:
        """Takes one reference from each block; the last one caches or frees it."""
        for block in reversed(blocks):  # a prefix's tail is evicted before its head
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            del self._refs[block]
            content = self._hash_of.get(block)
            if content is None:
                self._free.append(block)
            else:
                self._cached[block] = content

    def demote(self, most: int) -> list[tuple[int, bytes]]:
        """Up to `most` cached blocks that no tier has, next to be evicted, pinned for a copy."""
        chosen: list[tuple[int, bytes]] = []
        for block, content in self._cached.items():
            if len(self._demoting) + len(chosen) >= most:
                break
            if content not in self._below:
                chosen.append((block, content))
        for block, content in chosen:
            del self._cached[block]
            self._refs[block] = 1
            self._demoting[block] = content
        return chosen

    def demoted(self, block: int, kept: bool) -> None:
        """A block that `demote` pinned is the first to be evicted again."""
        content = self._demoting.pop(block)
        if kept and self._hash_of.get(block) == content:
            self._below.add(content)
        self.release([block])
        if block in self._cached:
            self._cached.move_to_end(block, last=False)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def demoting(self) -> int:
        return len(self._demoting)

    def drain_events(self) -> tuple[list[bytes], list[bytes]]:
        """Marks (stored, evicted) since the last call, as they ended: none is in both lists."""
        stored = [mark for mark in self.stored if mark in self._told]
        evicted = [mark for mark in self.evicted if mark not in self._told]
        self.stored, self.evicted = [], []
        return stored, evicted

    def hashes(self) -> list[bytes]:
        """The marks of every content that `match` would find."""
        return list(self._told)

    def validate(self) -> None:
        """Checks that every block is in exactly one place."""
        places = [*self._free, *self._refs, *self._cached]
        assert len(places) == len(set(places)) == self.total, self
        assert 0 not in places and all(n > 0 for n in self._refs.values()), self
        assert set(self._hash_of) <= set(self._refs) | set(self._cached), self
        assert {b: h for h, b in self._by_hash.items()} == self._hash_of, self
        marks = Counter(mark for content in self._by_hash for mark in self._marks[content])
        assert marks == self._told and len(self._marks) == len(self._by_hash), self

    def __repr__(self) -> str:
        return f"<BlockPool {len(self._free)} free, {self.cached} cached, {self.used} used>"
