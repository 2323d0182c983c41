"""Which block is in which tier, and what moves next (pure).

A block is admitted into a memory slot by a store. From there it is copied to disk when there is
time (`Demote`), oldest use first; once it is on disk its memory slot can be given away and nothing
is lost. A block that is only on disk and is used is copied back (`Promote`).

    stored -> memory -> memory + disk -> disk -> (evicted)
                             ^-------------'  used

Every block is in the places that its entry names and nowhere else; a slot is free or has one owner.
What is pinned (a load waits for it, a copy reads or fills it) is never evicted.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

PROMOTIONS_MAX = 64  #: used blocks that wait for their way back to memory; the oldest use goes


@dataclass(slots=True)
class Entry:
    """One block. Slots are numbers of a store's slots."""

    memory: int | None = None
    disk: int | None = None
    filling: int | None = None  #: memory slot that a store or a promotion is copying into
    writing: int | None = None  #: disk slot that a demotion is writing
    pins: int = 0  #: loads and copies in flight


@dataclass(frozen=True, slots=True)
class Demote:
    """Copy `memory` to `disk`; both are slots."""

    content: bytes
    memory: int
    disk: int


@dataclass(frozen=True, slots=True)
class Promote:
    """Copy `disk` to `memory`; both are slots."""

    content: bytes
    memory: int
    disk: int


class TierIndex:
    """Verbs in pairs: `admit` / `admitted`, `pin` / `unpin`, `next_move` / `moved`, `attach` /
    `detach` the disk. Content hashes are 16 bytes; slots are ints from 0."""

    def __init__(self, memory_slots: int) -> None:
        assert memory_slots >= 1, memory_slots
        self.memory_slots, self.disk_slots = memory_slots, 0
        self.counts: Counter[str] = Counter()  #: `tier_event` -> blocks
        self.entered = 0  #: blocks that were in no tier and are in one since
        self.left: Counter[str] = Counter()  #: why blocks are in no tier any more -> blocks
        self._entries: dict[bytes, Entry] = {}
        self._memory: OrderedDict[bytes, None] = OrderedDict()  #: in memory, LRU first
        self._dirty: OrderedDict[bytes, None] = OrderedDict()  #: of these, not on disk
        self._cold: OrderedDict[bytes, None] = OrderedDict()  #: on disk only, LRU first
        self._wanted: OrderedDict[bytes, None] = OrderedDict()  #: of these, used; newest last
        self._memory_free = deque(range(memory_slots))
        self._disk_free: deque[int] = deque()

    def __contains__(self, content: bytes) -> bool:
        return content in self._entries

    @property
    def memory_entries(self) -> int:
        return len(self._memory)

    @property
    def disk_entries(self) -> int:
        return len(self._memory) - len(self._dirty) + len(self._cold)

    @property
    def dirty(self) -> int:
        """Blocks that are in memory and not on disk."""
        return len(self._dirty)

    # ---- lookups ---------------------------------------------------------------------------------

    def held(self, contents: Iterable[bytes]) -> tuple[int, int]:
        """How many leading blocks could be loaded: (from memory, from disk). Changes nothing."""
        memory = disk = 0
        for content in contents:
            entry = self._entries.get(content)
            if entry is None or (entry.memory is None and entry.disk is None):
                break
            memory, disk = memory + (entry.memory is not None), disk + (entry.memory is None)
        return memory, disk

    def where(self, content: bytes) -> tuple[int | None, int | None]:
        """(memory slot, disk slot) to read the block from now."""
        entry = self._entries.get(content)
        return (entry.memory, entry.disk) if entry else (None, None)

    def pin(self, content: bytes) -> bool:
        """Keeps the block in place until `unpin`; False when no tier holds it. Counts as a use."""
        entry = self._entries.get(content)
        if entry is None or (entry.memory is None and entry.disk is None):
            return False
        entry.pins += 1
        self._touch(content)
        if entry.memory is None and entry.filling is None:
            self._wanted[content] = None
            if len(self._wanted) > PROMOTIONS_MAX:
                self._wanted.popitem(last=False)
        return True

    def unpin(self, content: bytes) -> None:
        self._entries[content].pins -= 1
        self._forget_if_nowhere(content)

    def lose(self, content: bytes, tier: str, reason: str) -> None:
        """The bytes in `tier` are bad or unreadable: not there any more, pinned or not.

        No copy out of that slot may be in flight.
        """
        entry = self._entries[content]
        if tier == "memory":
            assert entry.memory is not None and entry.writing is None, entry
            self._leave_memory(content)
        else:
            assert entry.disk is not None, entry
            self._leave_disk(content)
        self._forget_if_nowhere(content, reason)

    # ---- stores ----------------------------------------------------------------------------------

    def admit(self, content: bytes) -> int | None:
        """The memory slot to copy a new block into; `admitted` ends the copy.

        None: it is known already (`content in index`; counts as a use), or every slot is in flight.
        """
        entry = self._entries.get(content)
        if entry is not None:
            self._touch(content)
            if entry.memory is not None or entry.filling is not None:
                return None
        slot = self._memory_slot(clean_only=False)
        if slot is None:
            return None
        if entry is None:
            entry = self._entries[content] = Entry()
        entry.filling, entry.pins = slot, entry.pins + 1
        self._wanted.pop(content, None)
        return slot

    def admitted(self, content: bytes, ok: bool) -> None:
        """The copy into the slot of `admit` ended."""
        if ok:
            self.counts["memory_stored"] += 1
        self._filled(content, ok)

    # ---- moves between tiers ---------------------------------------------------------------------

    def next_move(self, writes: bool) -> Demote | Promote | None:
        """The next copy between tiers, if one is worth while; `moved` ends it.

        Without `writes` nothing goes to disk. A promotion only takes a slot that is free or whose
        block is on disk too; a demotion only one that is free or whose block is not in memory.
        """
        while self._wanted:
            content, _ = self._wanted.popitem()
            slot = self._memory_slot(clean_only=True)
            if slot is None:
                continue
            entry = self._entries[content]
            assert entry.disk is not None and entry.filling is None, entry
            entry.filling, entry.pins = slot, entry.pins + 1
            return Promote(content, slot, entry.disk)
        idle = (c for c in self._dirty if self._entries[c].writing is None)
        dirty = next(idle, None) if writes else None
        disk = self._disk_slot() if dirty is not None else None
        if dirty is None or disk is None:
            return None
        entry = self._entries[dirty]
        assert entry.memory is not None
        entry.writing, entry.pins = disk, entry.pins + 1
        return Demote(dirty, entry.memory, disk)

    def moved(self, move: Demote | Promote, ok: bool) -> None:
        """The copy of `next_move` ended. A demotion that failed is tried again."""
        if isinstance(move, Promote):
            self.counts["memory_promoted"] += ok
            self._filled(move.content, ok)
            return
        entry = self._entries[move.content]
        entry.writing, entry.pins = None, entry.pins - 1
        if ok:
            self.counts["disk_stored"] += 1
            entry.disk = move.disk
            del self._dirty[move.content]
        else:
            self._disk_free.append(move.disk)

    def attach(self, slots: int, found: list[tuple[bytes, int]]) -> None:
        """A disk with `slots` slots is there, and holds `found` (content, slot), oldest first."""
        assert self.disk_slots == 0, self
        self.disk_slots = slots
        taken = set()
        for content, slot in found:
            entry = self._entries.setdefault(content, Entry())
            if entry.disk is not None:
                continue
            entry.disk = slot
            taken.add(slot)
            if entry.memory is None:
                self.entered += 1
                self._cold[content] = None
            self._dirty.pop(content, None)
        self.counts["disk_found"] += len(taken)
        self._disk_free = deque(slot for slot in range(slots) if slot not in taken)

    def detach(self) -> None:
        """The disk is gone with everything on it. No copy to or from it may be in flight."""
        for content in [c for c, entry in self._entries.items() if entry.disk is not None]:
            self._leave_disk(content)
            self._forget_if_nowhere(content, "detached")
        self.disk_slots, self._disk_free = 0, deque()

    # ---- inside ----------------------------------------------------------------------------------

    def _touch(self, content: bytes) -> None:
        for order in (self._memory, self._dirty, self._cold):
            if content in order:
                order.move_to_end(content)

    def _memory_slot(self, clean_only: bool) -> int | None:
        """A free slot, if need be that of the block that nobody used for longest."""
        if self._memory_free:
            return self._memory_free.popleft()
        victim = next((c for c in self._memory if not self._entries[c].pins), None)
        if victim is None or (clean_only and victim in self._dirty):
            return None
        self.counts["memory_evicted"] += 1
        self._leave_memory(victim)
        self._forget_if_nowhere(victim, "evicted_before_disk")
        return self._memory_free.popleft()

    def _disk_slot(self) -> int | None:
        if self._disk_free:
            return self._disk_free.popleft()
        victim = next((c for c in self._cold if not self._entries[c].pins), None)
        if victim is None:
            return None
        self.counts["disk_evicted"] += 1
        self._leave_disk(victim)
        self._forget_if_nowhere(victim, "evicted")
        return self._disk_free.popleft()

    def _filled(self, content: bytes, ok: bool) -> None:
        entry = self._entries[content]
        assert entry.filling is not None and entry.memory is None, entry
        slot, entry.filling, entry.pins = entry.filling, None, entry.pins - 1
        if not ok:
            self._memory_free.append(slot)
            self._forget_if_nowhere(content)
            return
        self.entered += entry.disk is None
        entry.memory = slot
        self._memory[content] = None
        self._cold.pop(content, None)
        self._wanted.pop(content, None)
        if entry.disk is None:
            self._dirty[content] = None

    def _leave_memory(self, content: bytes) -> None:
        entry = self._entries[content]
        assert entry.memory is not None
        self._memory_free.append(entry.memory)
        entry.memory = None
        del self._memory[content]
        self._dirty.pop(content, None)
        if entry.disk is not None:
            self._cold[content] = None

    def _leave_disk(self, content: bytes) -> None:
        entry = self._entries[content]
        assert entry.disk is not None
        self._disk_free.append(entry.disk)
        entry.disk = None
        self._cold.pop(content, None)
        self._wanted.pop(content, None)
        if entry.memory is not None:
            self._dirty[content] = None

    def _forget_if_nowhere(self, content: bytes, reason: str = "") -> None:
        """An entry goes with its last place; one that is pinned, with its last pin.

        `reason` is why it just lost a place.
        """
        entry = self._entries[content]
        if entry.memory is not None or entry.disk is not None:
            return
        if reason:
            self.left[reason] += 1
        if not entry.pins:
            del self._entries[content]

    def validate(self) -> None:
        """Checks that every slot and every block is where it is said to be, once."""
        entries = self._entries
        for total, free, names in (
            (self.memory_slots, self._memory_free, ("memory", "filling")),
            (self.disk_slots, self._disk_free, ("disk", "writing")),
        ):
            owned = [getattr(entry, name) for entry in entries.values() for name in names]
            slots = [*free, *(slot for slot in owned if slot is not None)]
            assert sorted(slots) == list(range(total)), (names, slots)
        in_memory = {c for c, e in entries.items() if e.memory is not None}
        on_disk = {c for c, e in entries.items() if e.disk is not None}
        assert set(self._memory) == in_memory
        assert set(self._dirty) == in_memory - on_disk
        assert set(self._cold) == on_disk - in_memory
        assert set(self._wanted) <= set(self._cold) and len(self._wanted) <= PROMOTIONS_MAX
        for content, entry in entries.items():
            copies = (entry.filling is not None) + (entry.writing is not None)
            assert entry.pins >= copies, entry
            assert entry.pins or content in in_memory | on_disk, entry

    def __repr__(self) -> str:
        return (
            f"<TierIndex {len(self._memory)}/{self.memory_slots} in memory ({len(self._dirty)} "
            f"not on disk), {self.disk_entries}/{self.disk_slots} on disk>"
        )
