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
that has it. With the last one it is reported as demoted where a tier has its content, else as evicted.

Demotion: when the pool runs low, tiers (host memory, disk) copy cached blocks before these are
evicted. A block that a tier copies is pinned, so that nobody overwrites it meanwhile. A block that
was used since is offered to them again, which counts as a use there: they copy nothing if they still
have it. `forget_in_tiers` is told of the copies that they drop.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple


class Block:
    """One block: how often it is used, and what it holds."""

    __slots__ = (
        "content",
        "in_tier",
        "marks",
        "next",
        "number",
        "previous",
        "references",
        "refused_at",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.references = 0  #: how often it is referenced; 0: it is free or cached
        self.content: bytes | None = None  #: once that is published
        self.marks: Sequence[bytes] = ()  #: of its content
        #: A tier copied its content while it was cached, and it was not used since. The tier may
        #: have dropped the copy in the meantime.
        self.in_tier = False
        #: How many blocks the tiers had copied when they refused this one; None: they did not
        #: refuse it since it was used last.
        self.refused_at: int | None = None
        #: its neighbours in the `EvictionOrder`, while it is cached; the block itself, otherwise
        self.previous: Block = self
        self.next: Block = self


class MarkChanges(NamedTuple):
    """What became of marks in a while, by where they are at its end; each is in one list only."""

    stored: list[bytes]  #: in the pool
    evicted: list[bytes]  #: in the pool no more, nor in a tier
    demoted: list[bytes]  #: in a tier only


class EvictionOrder:
    """The cached blocks in the order in which they are evicted: a ring, closed by block 0."""

    def __init__(self, block_0: Block) -> None:
        self._block_0 = block_0
        #: Where a block comes back to from a demotion: behind this one, or in front if it is block
        #: 0. It is the last that came back, or stood before the first that was pinned.
        self._resume_behind = block_0
        self._count = 0

    def append(self, block: Block) -> None:
        """Puts a block at the end: it is evicted last."""
        self._insert(block, behind=self._block_0.previous)

    def begin_demotion(self, first: Block) -> None:
        """Blocks are about to be taken out, of which `first` would be evicted first.

        `put_back` puts them to where `first` stands now.
        """
        assert first.next is not first, first.number
        self._resume_behind = first.previous

    def put_back(self, block: Block) -> None:
        """Puts a block back that was taken out for a demotion.

        The blocks that came back before it are evicted before it, as they were to be.
        """
        self._insert(block, behind=self._resume_behind)
        self._resume_behind = block

    def remove(self, block: Block) -> None:
        """Takes a block out, which is in it."""
        assert block.next is not block, block.number
        if block is self._resume_behind:
            self._resume_behind = block.previous
        block.previous.next = block.next
        block.next.previous = block.previous
        block.previous = block
        block.next = block
        self._count -= 1

    def pop_first(self) -> Block:
        """Takes out the block that is next to be evicted. There must be one."""
        first = self._block_0.next
        self.remove(first)
        return first

    def _insert(self, block: Block, behind: Block) -> None:
        assert block.next is block, block.number
        block.previous = behind
        block.next = behind.next
        behind.next.previous = block
        behind.next = block
        self._count += 1

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Block]:
        block = self._block_0.next
        while block is not self._block_0:
            yield block
            block = block.next


class BlockPool:
    """Owns all blocks of a pool. Numbers of blocks do not count block 0."""

    def __init__(self, block_count: int) -> None:
        """`block_count`: all blocks of the memory, block 0 included."""
        assert block_count >= 2, block_count
        self.total_blocks = block_count - 1
        self._blocks = [Block(number) for number in range(block_count)]
        self._free: deque[Block] = deque(self._blocks[1:])
        self._cached = EvictionOrder(self._blocks[0])
        self._published: dict[bytes, Block] = {}  #: by content; used or cached
        self._mark_counts: dict[bytes, int] = {}  #: how many published contents have each mark
        self._demoting: dict[int, bytes] = {}  #: used blocks that are pinned until a tier has them
        self._copied_blocks = 0  #: how many of them the tiers have copied since the start
        self.stored_marks: list[bytes] = []  #: since the last `drain_events`
        #: That left the pool, or the tiers, since the last `drain_events`.
        self.removed_marks: list[bytes] = []
        #: The marks of contents that a tier holds: by content, and how many contents have each.
        self._tier_marks: dict[bytes, Sequence[bytes]] = {}
        self._tier_mark_counts: dict[bytes, int] = {}
        #: Marks that only the tiers have, as a set in the order in which they left the pool.
        self._demoted_marks: dict[bytes, None] = {}
        #: Called with content and marks before a cached block is overwritten; None: nobody asks. A
        #: simulation's tiers take the block then.
        self.before_eviction: Callable[[bytes, Sequence[bytes]], None] | None = None

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
        return self.total_blocks - self.available_blocks

    @property
    def cached_blocks(self) -> int:
        """Blocks that nobody references and whose content is known."""
        return len(self._cached)

    @property
    def demoting_blocks(self) -> int:
        """Blocks that are pinned for the tiers; `used_blocks` counts them too."""
        return len(self._demoting)

    def references(self, block: int) -> int:
        """Returns how often a block is referenced: 0 for a free or a cached one."""
        return self._blocks[block].references

    def content(self, block: int) -> bytes | None:
        """Returns the content hash of a block; None if none was published."""
        return self._blocks[block].content

    # ---- references --------------------------------------------------------------------------

    def allocate(self, count: int, keep: int = 0) -> list[int] | None:
        """Returns `count` blocks with one reference each, or None (and nothing changes).

        `keep` blocks stay available for others.
        """
        if count > self.available_blocks - keep:
            return None
        numbers: list[int] = []
        for _ in range(count):
            block = self._take()
            block.references = 1
            numbers.append(block.number)
        return numbers

    def _take(self) -> Block:
        """Returns a free block, or else evicts the cached one that is next, and returns that."""
        if self._free:
            return self._free.popleft()
        block = self._cached.pop_first()
        assert block.content is not None, block.number
        if self.before_eviction is not None:
            self.before_eviction(block.content, block.marks)
        self._forget(block)
        return block

    def share(self, blocks: list[int]) -> list[int]:
        """Adds one reference to each of these used blocks; returns them."""
        for number in blocks:
            block = self._blocks[number]
            assert block.references, number
            block.references += 1
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Takes one reference from each block; the last one caches or frees it."""
        for number in reversed(blocks):  # a prefix's tail is evicted before its head
            block = self._blocks[number]
            assert block.references, number
            block.references -= 1
            if block.references:
                continue
            if block.content is None:
                self._free.append(block)
            else:
                self._cached.append(block)

    # ---- contents ----------------------------------------------------------------------------

    def match(self, hashes: list[bytes]) -> list[int]:
        """Returns the blocks of the longest cached prefix, each with one more reference.

        `hashes` are the contents of a prompt's blocks, in order. The caller must `release` what it
        got.
        """
        numbers: list[int] = []
        for content in hashes:
            block = self._published.get(content)
            if block is None:
                break
            if not block.references:
                self._cached.remove(block)
                block.in_tier = False
                block.refused_at = None
            block.references += 1
            numbers.append(block.number)
        return numbers

    def prefix_length(self, hashes: list[bytes]) -> int:
        """Returns how many leading blocks `match` would find; takes no reference."""
        for length, content in enumerate(hashes):
            if content not in self._published:
                return length
        return len(hashes)

    def publish(self, number: int, content: bytes, marks: Sequence[bytes] | None = None) -> None:
        """Lets `match` find this used block by `content` from now on.

        If another block of this content is found already, that one stays, and this block becomes
        free with its last release. `marks`: what routers are told of it (None: its content).
        """
        block = self._blocks[number]
        assert block.references, number
        if block.content is None and content not in self._published:
            self._published[content] = block
            block.content = content
            self._set_marks(block, (content,) if marks is None else marks)

    def unpublish(self, blocks: list[int]) -> None:
        """Takes care that nobody finds these used blocks any more."""
        for number in blocks:
            if self._blocks[number].content is not None:
                self._forget(self._blocks[number])

    def _forget(self, block: Block) -> None:
        assert block.content is not None, block.number
        del self._published[block.content]
        self._remove_marks(block.marks)
        block.content = None
        block.marks = ()
        block.in_tier = False
        block.refused_at = None

    # ---- what routers are told ---------------------------------------------------------------

    def set_marks(self, number: int, marks: Sequence[bytes]) -> None:
        """Replaces the marks of a published block, also for its copy in a tier."""
        block = self._blocks[number]
        assert block.content is not None, number
        self._set_marks(block, marks)
        if block.content in self._tier_marks:
            self.note_in_tier(block.content, marks)

    def _set_marks(self, block: Block, marks: Sequence[bytes]) -> None:
        # The new marks are counted before the old ones are removed: a mark that is among both is
        # reported neither as stored nor as evicted.
        previous_marks = block.marks
        block.marks = marks
        for mark in marks:
            count = self._mark_counts.get(mark, 0) + 1
            self._mark_counts[mark] = count
            if count == 1:
                self.stored_marks.append(mark)
                self._demoted_marks.pop(mark, None)
        self._remove_marks(previous_marks)

    def _remove_marks(self, marks: Sequence[bytes]) -> None:
        for mark in marks:
            count = self._mark_counts[mark] - 1
            if count:
                self._mark_counts[mark] = count
            else:
                del self._mark_counts[mark]
                self.removed_marks.append(mark)
                if mark in self._tier_mark_counts:
                    self._demoted_marks[mark] = None

    def drain_events(self) -> MarkChanges:
        """Returns what became of marks since the last call, by where they are now.

        A prefix's demoted marks come head first, as the stored ones do.
        """
        stored = [mark for mark in self.stored_marks if mark in self._mark_counts]
        # A mark that left both the pool and the tiers is there twice.
        removed = dict.fromkeys(
            mark for mark in self.removed_marks if mark not in self._mark_counts
        )
        evicted = [mark for mark in removed if mark not in self._tier_mark_counts]
        # Tails leave the pool before their heads.
        demoted = [mark for mark in reversed(removed) if mark in self._tier_mark_counts]
        self.stored_marks = []
        self.removed_marks = []
        return MarkChanges(stored, evicted, demoted)

    def hashes(self) -> list[bytes]:
        """Returns the marks of every content that `match` would find."""
        return list(self._mark_counts)

    def demoted_hashes(self) -> list[bytes]:
        """Returns the marks of contents that only a tier holds, a prefix's head before its tail.

        Those that a tier held before this pool was made are not known here.
        """
        return list(reversed(self._demoted_marks))

    # ---- tiers -------------------------------------------------------------------------------

    def pin_for_demotion(self, limit: int) -> list[tuple[int, bytes]]:
        """Pins cached blocks, next to be evicted, so that a tier can copy them.

        Blocks that a tier has copied, and that were not used since, are left out. So are those that
        the tiers have refused, until these copy a block again or the block is used.

        At most `limit` blocks are pinned at a time. Returns (block, content) of the new ones; the
        caller must `finish_demotion` of each.
        """
        room = max(limit - len(self._demoting), 0)
        unsaved = list(islice(filter(self._may_be_offered, self._cached), room))
        if unsaved:
            self._cached.begin_demotion(unsaved[0])
        chosen: list[tuple[int, bytes]] = []
        for block in unsaved:
            assert block.content is not None, block.number
            self._cached.remove(block)
            block.references = 1
            self._demoting[block.number] = block.content
            chosen.append((block.number, block.content))
        return chosen

    def _may_be_offered(self, block: Block) -> bool:
        # A refused block is not offered at once again: the tiers may be overloaded, or have ended,
        # and an idle worker would do nothing else.
        return not block.in_tier and block.refused_at != self._copied_blocks

    def finish_demotion(self, number: int, copied: bool) -> None:
        """Unpins a block, which a tier has `copied` or not.

        It is evicted where it would have been without the demotion: before blocks that were behind
        it, and behind those that came back before it. A block that is used meanwhile stays used.
        """
        content = self._demoting.pop(number)
        self._copied_blocks += copied
        block = self._blocks[number]
        if copied and block.content == content:
            self.note_in_tier(content, block.marks)
        block.references -= 1
        if block.references:
            return
        if block.content is None:  # it was unpublished in the meantime
            self._free.append(block)
            return
        if block.content == content:  # else it was unpublished, and holds something else since
            block.in_tier = copied
            block.refused_at = None if copied else self._copied_blocks
        self._cached.put_back(block)

    def note_in_tier(self, content: bytes, marks: Sequence[bytes]) -> None:
        """Notes that a tier holds this content, which is in the pool, and which marks it has."""
        for mark in marks:
            self._tier_mark_counts[mark] = self._tier_mark_counts.get(mark, 0) + 1
        # After the new marks are counted: what is among both stays.
        self._remove_tier_marks(content)
        self._tier_marks[content] = marks

    def forget_in_tiers(self, contents: Iterable[bytes]) -> None:
        """Notes that no tier holds these contents any more; unknown ones change nothing."""
        for content in contents:
            self._remove_tier_marks(content)

    def _remove_tier_marks(self, content: bytes) -> None:
        for mark in self._tier_marks.pop(content, ()):
            count = self._tier_mark_counts[mark] - 1
            if count:
                self._tier_mark_counts[mark] = count
            else:
                del self._tier_mark_counts[mark]
                self.removed_marks.append(mark)
                self._demoted_marks.pop(mark, None)

    def validate(self) -> None:
        """Checks that every block is in exactly one place. For tests and after failures."""
        used = [block for block in self._blocks if block.references]
        places = [block.number for block in (*self._free, *used, *self._cached)]
        assert len(places) == len(set(places)) == self.total_blocks, self
        assert 0 not in places, self
        assert len(used) == self.used_blocks, self
        assert all(block.references > 0 for block in used), self
        assert all(block.content is None for block in self._free), self
        assert all(block.content is not None for block in self._cached), self
        published = {block.content: block for block in self._blocks if block.content is not None}
        assert published == self._published, self
        marks = Counter(mark for block in published.values() for mark in block.marks)
        assert marks == self._mark_counts, self
        tier_marks = Counter(mark for marks in self._tier_marks.values() for mark in marks)
        assert tier_marks == self._tier_mark_counts, self
        assert self._demoted_marks.keys() == tier_marks.keys() - marks.keys(), self
        assert all(not block.marks for block in self._blocks if block.content is None), self

    def __repr__(self) -> str:
        return (
            f"<BlockPool {self.free_blocks} free, {self.cached_blocks} cached, "
            f"{self.used_blocks} used>"
        )
