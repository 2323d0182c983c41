"""Which block is in which tier, and what moves next (pure).

A store brings a block into a memory slot. From there the block is copied to disk when there is time
(`CopyToDisk`), oldest use first. Once it is on disk, its memory slot can be given away at no loss.
A block that is only on disk and is used is copied back (`CopyToMemory`).

    stored -> memory -> memory + disk -> disk -> (evicted)
                             ^-------------'  used

Every block is in the slots that its entry names and nowhere else; a slot is free or has one owner.
What is pinned is never evicted: a load waits for it, or a copy reads or fills it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .faults import Tier

#: Used blocks that wait for their way back to memory, at most. Of more, that of the oldest use is
#: given up, and stays on disk.
PROMOTION_LIMIT = 64


@dataclass(slots=True)
class TierEntry:
    """Where one block is: the numbers of its slots in the stores of memory and disk."""

    memory: int | None = None  #: memory slot that holds the block
    disk: int | None = None  #: disk slot that holds the block
    filling: int | None = None  #: memory slot that a store or a `CopyToMemory` is copying into
    writing: int | None = None  #: disk slot that a `CopyToDisk` is writing
    pins: int = 0  #: loads and copies in flight

    @property
    def in_a_tier(self) -> bool:
        """Whether a slot holds the block; one that is being filled does not yet."""
        return self.memory is not None or self.disk is not None


class BlockSlots(NamedTuple):
    """Where a block can be read now."""

    memory: int | None
    disk: int | None


class HeldBlocks(NamedTuple):
    """How many blocks are in memory, and how many on disk only."""

    memory: int
    disk: int

    @property
    def total(self) -> int:
        """Blocks in either tier."""
        return self.memory + self.disk


@dataclass(frozen=True, slots=True)
class CopyToDisk:
    """Says that a block which only memory has is to be copied."""

    content: bytes
    memory_slot: int
    disk_slot: int


@dataclass(frozen=True, slots=True)
class CopyToMemory:
    """Says that a block which only disk has, and which was used, is to be copied back."""

    content: bytes
    memory_slot: int
    disk_slot: int


TierMove = CopyToDisk | CopyToMemory
#: A set of content hashes in the order of their last use, oldest first. A block that joins the set
#: without a use, by a move or an eviction, comes last: the moment of its last use is not kept.
UseOrder = OrderedDict[bytes, None]


class TierIndex:
    """The state of both tiers, without their bytes.

    Content hashes are 16 bytes; slots count from 0. Methods come in pairs: `begin_store` and
    `end_store`, `pin_prefix` and `unpin`, `begin_move` and `end_move`, `attach_disk` and `detach_disk`.
    """

    def __init__(self, memory_slots: int) -> None:
        assert memory_slots >= 1, memory_slots
        self.memory_slots = memory_slots
        self.disk_slots = 0  #: 0 while no disk is attached
        #: What happened in a tier, such as `memory_stored` or `disk_evicted` -> blocks.
        self.event_counts: Counter[str] = Counter()
        self.entered_blocks = 0  #: blocks that were in no tier and are in one since
        self.removal_reasons: Counter[str] = Counter()  #: why blocks left their last tier -> blocks
        self._left: list[bytes] = []  #: blocks that left their last tier, since `take_left`
        self._entries: dict[bytes, TierEntry] = {}
        self._in_memory: UseOrder = OrderedDict()
        self._not_on_disk: UseOrder = OrderedDict()  #: the part of `_in_memory` that disk lacks
        self._only_on_disk: UseOrder = OrderedDict()
        #: the part of `_only_on_disk` that was used and waits for its way back to memory
        self._promotions: UseOrder = OrderedDict()
        self._free_memory = deque(range(memory_slots))
        self._free_disk: deque[int] = deque()

    def __contains__(self, content: bytes) -> bool:
        return content in self._entries

    @property
    def memory_blocks(self) -> int:
        """Blocks that are in memory, on disk too or not."""
        return len(self._in_memory)

    @property
    def disk_blocks(self) -> int:
        """Blocks that are on disk, in memory too or not."""
        return len(self._in_memory) - len(self._not_on_disk) + len(self._only_on_disk)

    @property
    def dirty_blocks(self) -> int:
        """Blocks that are in memory and not on disk."""
        return len(self._not_on_disk)

    # ---- loads: pin, find the slots, copy, unpin -------------------------------------------------

    def count_held(self, contents: Iterable[bytes]) -> HeldBlocks:
        """Counts the leading blocks of `contents` that a tier holds. Changes nothing."""
        in_memory = 0
        only_on_disk = 0
        for content in contents:
            slots = self.find_slots(content)
            if slots.memory is not None:
                in_memory += 1
            elif slots.disk is not None:
                only_on_disk += 1
            else:
                break
        return HeldBlocks(in_memory, only_on_disk)

    def find_slots(self, content: bytes) -> BlockSlots:
        """Returns the block's slot in each tier; None where the tier does not hold the block."""
        entry = self._entries.get(content)
        if entry is None:
            return BlockSlots(None, None)
        return BlockSlots(entry.memory, entry.disk)

    def pin_prefix(self, contents: Sequence[bytes]) -> int:
        """Keeps the leading blocks that a tier holds in place until `unpin`; returns how many.

        This counts as a use of each, the tail's before the head's: without its head a prefix is worth
        nothing, so the tail is to be evicted first.
        """
        count = self.count_held(contents).total
        for content in reversed(contents[:count]):
            self._pin(content)
        return count

    def _pin(self, content: bytes) -> None:
        entry = self._entries[content]
        entry.pins += 1
        self._mark_used(content)
        if entry.memory is None and entry.filling is None:
            self._promotions[content] = None
            if len(self._promotions) > PROMOTION_LIMIT:
                self._promotions.popitem(last=False)

    def unpin(self, content: bytes) -> None:
        """Ends one pin of `pin_prefix`. A block that no tier holds any more is forgotten with its last pin."""
        self._entries[content].pins -= 1
        self._forget_if_in_no_tier(content)

    def remove_copy(self, content: bytes, tier: Tier, reason: str) -> None:
        """Removes the copy in `tier`, whose bytes are bad or unreadable, pinned or not.

        No copy out of that slot may be in flight.
        """
        entry = self._entries[content]
        if tier is Tier.MEMORY:
            assert entry.memory is not None and entry.writing is None, entry
            self._remove_from_memory(content)
        else:
            assert entry.disk is not None, entry
            self._remove_from_disk(content)
        self._forget_if_in_no_tier(content, reason)

    def take_left(self) -> list[bytes]:
        """Returns the blocks that left their last tier since the last call, and are in none now."""
        left = [content for content in self._left if not self._is_in_a_tier(content)]
        self._left = []
        return left

    def contents(self) -> list[bytes]:
        """Returns the blocks that a tier holds."""
        return [content for content in self._entries if self._is_in_a_tier(content)]

    def _is_in_a_tier(self, content: bytes) -> bool:
        entry = self._entries.get(content)
        return entry is not None and entry.in_a_tier

    # ---- stores ----------------------------------------------------------------------------------

    def begin_store(self, content: bytes) -> int | None:
        """Returns the memory slot to copy a new block into; `end_store` ends the copy.

        None when memory holds the block or is being filled with it, or when no slot can be freed.
        For a block that is known (`content in index`), on disk too, this counts as a use.
        """
        entry = self._entries.get(content)
        if entry is not None:
            self._mark_used(content)
            if entry.memory is not None or entry.filling is not None:
                return None
        slot = self._take_memory_slot(clean_only=False)
        if slot is None:
            return None
        if entry is None:
            entry = TierEntry()
            self._entries[content] = entry
        entry.filling = slot
        entry.pins += 1
        self._promotions.pop(content, None)
        return slot

    def end_store(self, content: bytes, ok: bool) -> None:
        """Ends the copy that `begin_store` began; `ok` says if the slot now holds the block."""
        if ok:
            self.event_counts["memory_stored"] += 1
        self._end_filling(content, ok)

    # ---- moves between tiers ---------------------------------------------------------------------

    def begin_move(self, writes: bool) -> TierMove | None:
        """Returns the next copy between tiers, if one is worth while; `end_move` ends it.

        Without `writes` nothing goes to disk. A `CopyToMemory` takes only a slot that is free or
        whose block is on disk too; a `CopyToDisk` only one that is free or whose block is not in
        memory.
        """
        promotion = self._begin_promotion()
        if promotion is not None:
            return promotion
        return self._begin_demotion() if writes else None

    def _begin_promotion(self) -> CopyToMemory | None:
        while self._promotions:
            content, _ = self._promotions.popitem()  # the latest use first
            slot = self._take_memory_slot(clean_only=True)
            if slot is None:
                continue  # the promotion is given up; the block's next use asks for it again
            entry = self._entries[content]
            assert entry.disk is not None and entry.filling is None, entry
            entry.filling = slot
            entry.pins += 1
            return CopyToMemory(content, slot, entry.disk)
        return None

    def _begin_demotion(self) -> CopyToDisk | None:
        # A block stays in `_not_on_disk` while it is being written.
        not_being_written = (c for c in self._not_on_disk if self._entries[c].writing is None)
        content = next(not_being_written, None)
        if content is None:
            return None
        slot = self._take_disk_slot()
        if slot is None:
            return None
        entry = self._entries[content]
        assert entry.memory is not None
        entry.writing = slot
        entry.pins += 1
        return CopyToDisk(content, entry.memory, slot)

    def end_move(self, move: TierMove, ok: bool) -> None:
        """Ends the copy that `begin_move` began. A `CopyToDisk` that failed is tried again."""
        if isinstance(move, CopyToMemory):
            self.event_counts["memory_promoted"] += ok
            self._end_filling(move.content, ok)
            return
        entry = self._entries[move.content]
        entry.writing = None
        entry.pins -= 1
        if ok:
            self.event_counts["disk_stored"] += 1
            entry.disk = move.disk_slot
            del self._not_on_disk[move.content]
        else:
            self._free_disk.append(move.disk_slot)

    def attach_disk(self, slots: int, found_blocks: list[tuple[bytes, int]]) -> None:
        """Takes a disk with `slots` slots into use.

        `found_blocks` are the (content, slot) that it holds, oldest first.
        """
        assert self.disk_slots == 0, self
        self.disk_slots = slots
        taken_slots: set[int] = set()
        for content, slot in found_blocks:
            entry = self._entries.setdefault(content, TierEntry())
            if entry.disk is not None:
                continue  # the disk holds this content twice: the second slot is free
            entry.disk = slot
            taken_slots.add(slot)
            if entry.memory is None:  # new to both tiers: an earlier user of the disk left it
                self.entered_blocks += 1
                self._only_on_disk[content] = None
            self._not_on_disk.pop(content, None)
        self.event_counts["disk_found"] += len(taken_slots)
        self._free_disk = deque(slot for slot in range(slots) if slot not in taken_slots)

    def detach_disk(self) -> None:
        """Forgets a disk and everything on it. No copy to or from the disk may be in flight."""
        on_disk = [content for content, entry in self._entries.items() if entry.disk is not None]
        for content in on_disk:
            self._remove_from_disk(content)
            self._forget_if_in_no_tier(content, "detached")
        self.disk_slots = 0
        self._free_disk = deque()

    # ---- inside ----------------------------------------------------------------------------------

    def _mark_used(self, content: bytes) -> None:
        """Makes this the latest use, in every order that has the block."""
        orders = (self._in_memory, self._not_on_disk, self._only_on_disk, self._promotions)
        for order in orders:
            if content in order:
                order.move_to_end(content)

    def _unpinned(self, order: UseOrder) -> Iterator[bytes]:
        """Yields the blocks that may be evicted, oldest use first."""
        return (content for content in order if not self._entries[content].pins)

    def _take_memory_slot(self, clean_only: bool) -> int | None:
        """Returns a free slot, if need be that of the block that was not used for longest.

        With `clean_only` that block must be on disk too. None when there is no such slot.
        """
        if self._free_memory:
            return self._free_memory.popleft()
        victim = next(self._unpinned(self._in_memory), None)
        if victim is None or (clean_only and victim in self._not_on_disk):
            return None
        self.event_counts["memory_evicted"] += 1
        self._remove_from_memory(victim)
        self._forget_if_in_no_tier(victim, "evicted_before_disk")
        return self._free_memory.popleft()

    def _take_disk_slot(self) -> int | None:
        """Returns a free slot, if need be that of the oldest block that is on disk only."""
        if self._free_disk:
            return self._free_disk.popleft()
        victim = next(self._unpinned(self._only_on_disk), None)
        if victim is None:
            return None
        self.event_counts["disk_evicted"] += 1
        self._remove_from_disk(victim)
        self._forget_if_in_no_tier(victim, "evicted")
        return self._free_disk.popleft()

    def _end_filling(self, content: bytes, ok: bool) -> None:
        """Ends a copy into memory: the slot holds the block, or is free again."""
        entry = self._entries[content]
        assert entry.filling is not None and entry.memory is None, entry
        slot = entry.filling
        entry.filling = None
        entry.pins -= 1
        if not ok:
            self._free_memory.append(slot)
            self._forget_if_in_no_tier(content)
            return

        entry.memory = slot
        self._in_memory[content] = None
        self._only_on_disk.pop(content, None)
        self._promotions.pop(content, None)
        if entry.disk is None:
            self.entered_blocks += 1
            self._not_on_disk[content] = None

    def _remove_from_memory(self, content: bytes) -> None:
        entry = self._entries[content]
        assert entry.memory is not None
        self._free_memory.append(entry.memory)
        entry.memory = None
        del self._in_memory[content]
        self._not_on_disk.pop(content, None)
        if entry.disk is not None:
            self._only_on_disk[content] = None

    def _remove_from_disk(self, content: bytes) -> None:
        entry = self._entries[content]
        assert entry.disk is not None
        self._free_disk.append(entry.disk)
        entry.disk = None
        self._only_on_disk.pop(content, None)
        self._promotions.pop(content, None)
        if entry.memory is not None:
            self._not_on_disk[content] = None

    def _forget_if_in_no_tier(self, content: bytes, reason: str = "") -> None:
        """Removes an entry with its last slot; one that is pinned, with its last pin.

        `reason` is why the block has just lost a slot.
        """
        entry = self._entries[content]
        if entry.in_a_tier:
            return
        if reason:
            self.removal_reasons[reason] += 1
            self._left.append(content)
        if not entry.pins:
            del self._entries[content]

    # ---- checks ----------------------------------------------------------------------------------

    def validate(self) -> None:
        """Asserts that every slot and every block is where it is said to be, once."""
        entries = self._entries.values()
        memory_owners = [slot for entry in entries for slot in (entry.memory, entry.filling)]
        disk_owners = [slot for entry in entries for slot in (entry.disk, entry.writing)]
        _check_slots(self.memory_slots, self._free_memory, memory_owners)
        _check_slots(self.disk_slots, self._free_disk, disk_owners)

        in_memory = {c for c, entry in self._entries.items() if entry.memory is not None}
        on_disk = {c for c, entry in self._entries.items() if entry.disk is not None}
        assert set(self._in_memory) == in_memory
        assert set(self._not_on_disk) == in_memory - on_disk
        assert set(self._only_on_disk) == on_disk - in_memory
        assert set(self._promotions) <= set(self._only_on_disk)
        assert len(self._promotions) <= PROMOTION_LIMIT
        for entry in entries:
            copies_in_flight = (entry.filling is not None) + (entry.writing is not None)
            assert entry.pins >= copies_in_flight, entry
            assert entry.pins or entry.in_a_tier, entry

    def __repr__(self) -> str:
        return (
            f"<TierIndex {len(self._in_memory)}/{self.memory_slots} in memory "
            f"({len(self._not_on_disk)} not on disk), "
            f"{self.disk_blocks}/{self.disk_slots} on disk>"
        )


def _check_slots(total: int, free: Iterable[int], owners: list[int | None]) -> None:
    """Asserts that each of `total` slots is free or has one owner."""
    slots = [*free, *(slot for slot in owners if slot is not None)]
    assert sorted(slots) == list(range(total)), slots
