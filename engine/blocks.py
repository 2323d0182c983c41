"""Who owns which KV block: free list, reference counts, prefix cache (pure).

A block has room for the KV of a fixed number of tokens; it is named by its index in the pool. Its
content is the chained hash of the tokens up to its end, so equal contents mean equal prefixes.

Every block is in exactly one place: free (nobody's), used (referenced by sequences) or cached (not
referenced, its content known, evicted in LRU order when blocks run short). Block 0 is nobody's: it
pads batches.

Life of a block: `allocate` takes it from the free list, or evicts the oldest cached one. `publish`
says what it holds, and from then on `match` finds it by that content. The last `release` puts it
into the cache if its content is known, else back on the free list.

Routers are told of contents by *marks*, of which a block has one, several or none. A mark is the
hash of a prefix that routers look up; a block larger than they count in has several that end in
it, and of a long prompt they look up only some. A mark is reported as stored with the first block
that has it, and as evicted with the last.

Demotion: when the pool runs low, tiers (host memory, disk) copy cached blocks before these are
evicted. A block that a tier copies is pinned, so that nobody overwrites it meanwhile.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence


class BlockPool:
    """Owns all blocks of a pool. Numbers of blocks do not count block 0."""

    def __init__(self, block_count: int) -> None:
        """`block_count`: all blocks of the memory, block 0 included."""
        assert block_count >= 2, block_count
        self.total_blocks = block_count - 1
        self._free: deque[int] = deque(range(1, block_count))
        self._references: dict[int, int] = {}  #: used blocks -> how often each is referenced
        self._cached: OrderedDict[int, bytes] = OrderedDict()  #: cached blocks, next evicted first
        self._block_of: dict[bytes, int] = {}  #: content -> published block, used or cached
        self._content_of: dict[int, bytes] = {}  #: the inverse of `_block_of`
        self._marks_of: dict[bytes, Sequence[bytes]] = {}  #: marks of each published content
        self._mark_counts: dict[bytes, int] = {}  #: how many published contents have each mark
        self._in_tiers: set[bytes] = set()  #: of the published contents, those that a tier has too
        self._demoting: dict[int, bytes] = {}  #: used blocks that are pinned until a tier has them
        self.stored_marks: list[bytes] = []  #: since the last `drain_events`
        self.evicted_marks: list[bytes] = []  #: since the last `drain_events`

    @property
    def available_blocks(self) -> int:
        """Blocks that `allocate` could give out now."""
        return len(self._free) + len(self._cached)

    @property
    def free_blocks(self) -> int:
        """Blocks of no known content; cached ones are not among them."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Blocks that are referenced, by one user or by several."""
        return len(self._references)

    @property
    def cached_blocks(self) -> int:
        """Blocks that nobody references and whose content is known."""
        return len(self._cached)

    @property
    def demoting_blocks(self) -> int:
        """Blocks that are pinned for the tiers; `used_blocks` counts them too."""
        return len(self._demoting)

    # ---- references --------------------------------------------------------------------------

    def allocate(self, count: int, keep: int = 0) -> list[int] | None:
        """Returns `count` blocks with one reference each, or None (and nothing changes).

        `keep` blocks stay available for others.
        """
        if count > self.available_blocks - keep:
            return None
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _take(self) -> int:
        """A free block, or else the cached one that is next to be evicted."""
        if self._free:
            return self._free.popleft()
        block, content = self._cached.popitem(last=False)
        del self._content_of[block]
        self._forget(content)
        return block

    def share(self, blocks: list[int]) -> list[int]:
        """Adds one reference to each of these used blocks; returns them."""
        for block in blocks:
            self._references[block] += 1
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Takes one reference from each block; the last one caches or frees it."""
        for block in reversed(blocks):  # a prefix's tail is evicted before its head
            self._references[block] -= 1
            if self._references[block]:
                continue
            del self._references[block]
            content = self._content_of.get(block)
            if content is None:
                self._free.append(block)
            else:
                self._cached[block] = content

    # ---- contents ----------------------------------------------------------------------------

    def match(self, hashes: list[bytes]) -> list[int]:
        """Returns the blocks of the longest cached prefix, each with one more reference.

        `hashes` are the contents of a prompt's blocks, in order. The caller must `release` what it
        got.
        """
        blocks: list[int] = []
        for content in hashes:
            block = self._block_of.get(content)
            if block is None:
                break
            self._cached.pop(block, None)
            self._references[block] = self._references.get(block, 0) + 1
            blocks.append(block)
        return blocks

    def prefix_length(self, hashes: list[bytes]) -> int:
        """How many leading blocks `match` would find; takes no reference."""
        for length, content in enumerate(hashes):
            if content not in self._block_of:
                return length
        return len(hashes)

    def publish(self, block: int, content: bytes, marks: Sequence[bytes] | None = None) -> None:
        """Lets `match` find this used block by `content` from now on.

        If another block of this content is found already, that one stays, and this block becomes
        free with its last release. `marks`: what routers are told of it (None: its content).
        """
        assert block in self._references, block
        if content not in self._block_of and block not in self._content_of:
            self._block_of[content] = block
            self._content_of[block] = content
            self.set_marks(content, (content,) if marks is None else marks)

    def unpublish(self, blocks: list[int]) -> None:
        """Takes care that nobody finds these used blocks any more."""
        for block in blocks:
            content = self._content_of.pop(block, None)
            if content is not None:
                self._forget(content)

    def _forget(self, content: bytes) -> None:
        del self._block_of[content]
        self._in_tiers.discard(content)
        self._remove_marks(self._marks_of.pop(content))

    # ---- what routers are told ---------------------------------------------------------------

    def set_marks(self, content: bytes, marks: Sequence[bytes]) -> None:
        """Replaces the marks of a published content."""
        # The new marks are counted before the old ones are removed: a mark that is among both is
        # reported neither as stored nor as evicted.
        previous_marks = self._marks_of.get(content, ())
        self._marks_of[content] = marks
        for mark in marks:
            count = self._mark_counts.get(mark, 0) + 1
            self._mark_counts[mark] = count
            if count == 1:
                self.stored_marks.append(mark)
        self._remove_marks(previous_marks)

    def _remove_marks(self, marks: Sequence[bytes]) -> None:
        for mark in marks:
            self._mark_counts[mark] -= 1
            if not self._mark_counts[mark]:
                del self._mark_counts[mark]
                self.evicted_marks.append(mark)

    def drain_events(self) -> tuple[list[bytes], list[bytes]]:
        """Returns the marks (stored, evicted) since the last call; none is in both lists.

        What was stored and evicted between two calls is in one list only, by what holds now.
        """
        stored = [mark for mark in self.stored_marks if mark in self._mark_counts]
        evicted = [mark for mark in self.evicted_marks if mark not in self._mark_counts]
        self.stored_marks = []
        self.evicted_marks = []
        return stored, evicted

    def hashes(self) -> list[bytes]:
        """Returns the marks of every content that `match` would find."""
        return list(self._mark_counts)

    # ---- tiers -------------------------------------------------------------------------------

    def pin_for_demotion(self, limit: int) -> list[tuple[int, bytes]]:
        """Pins cached blocks that no tier has, next to be evicted, so that a tier can copy them.

        At most `limit` blocks are pinned at a time. Returns (block, content) of the new ones; the
        caller must `finish_demotion` of each.
        """
        chosen: list[tuple[int, bytes]] = []
        for block, content in self._cached.items():
            if len(self._demoting) + len(chosen) >= limit:
                break
            if content not in self._in_tiers:
                chosen.append((block, content))
        for block, content in chosen:
            del self._cached[block]
            self._references[block] = 1
            self._demoting[block] = content
        return chosen

    def finish_demotion(self, block: int, copied: bool) -> None:
        """Unpins a block, which a tier has `copied` or not: it is the first to be evicted again."""
        content = self._demoting.pop(block)
        # its content may have been unpublished in the meantime
        if copied and self._content_of.get(block) == content:
            self._in_tiers.add(content)
        self.release([block])
        if block in self._cached:
            self._cached.move_to_end(block, last=False)

    def validate(self) -> None:
        """Checks that every block is in exactly one place. For tests and after failures."""
        places = [*self._free, *self._references, *self._cached]
        assert len(places) == len(set(places)) == self.total_blocks, self
        assert 0 not in places, self
        assert all(count > 0 for count in self._references.values()), self
        assert set(self._content_of) <= set(self._references) | set(self._cached), self
        inverse = {block: content for content, block in self._block_of.items()}
        assert inverse == self._content_of, self
        marks = Counter(mark for content in self._block_of for mark in self._marks_of[content])
        assert marks == self._mark_counts, self
        assert len(self._marks_of) == len(self._block_of), self

    def __repr__(self) -> str:
        return (
            f"<BlockPool {self.free_blocks} free, {self.cached_blocks} cached, "
            f"{self.used_blocks} used>"
        )
