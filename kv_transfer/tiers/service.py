"""The tiers' thread: copies KV blocks that a pool is about to evict, to host memory and disk.

Life of a request:

1. Any thread calls `store` or `load`. Neither waits: a refusal and `count_held_blocks` are answered
   under a lock that is only ever held for look-ups.
2. The request joins a queue. This thread serves loads first (a prompt waits for them), then stores
   (pool blocks are pinned for them).
3. The thread copies the bytes and calls the request's `done`.

When nobody waits, the thread copies blocks between memory and disk, one at a time.

A block's *content* is the 16-byte hash of its tokens and of all before them: its key. A tier has
slots of one block each; a block is *dirty* while only memory has it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, assert_never

from .disk import DiskStore
from .faults import DiskUnavailable, Tier, TierFault, checksum_seed
from .gate import DiskGate
from .index import CopyToDisk, CopyToMemory, TierIndex, TierMove
from .memory import MemoryStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Bounds of the tiers, and of what may be waiting or under way at one time."""

    memory_bytes: int
    disk_bytes: int = 0  #: of the file; it helps from several times `memory_bytes`
    request_limit: int = 256  #: stores and loads; further ones are refused
    #: Bytes of the blocks in them, which are pinned in the pool; a request alone may be larger.
    in_flight_bytes_limit: int = 1 << 30


@dataclass(frozen=True, slots=True, eq=False)
class StoreRequest:
    """A block to keep."""

    content: bytes
    view: memoryview  #: the block's bytes in the pool
    done: Callable[[bool], None]  #: is told whether a tier holds the block
    slot: int | None  #: memory slot to fill; None when the block is known already


@dataclass(frozen=True, slots=True, eq=False)
class LoadRequest:
    """Blocks to bring back, in the order of a prompt."""

    pairs: list[tuple[bytes, memoryview]]  #: content, and where its bytes shall go
    done: Callable[[list[bytes]], None]  #: is told the leading contents that came
    pinned: int  #: leading pairs that a tier holds


TierRequest = StoreRequest | LoadRequest


class BlockLoads(NamedTuple):
    """What has come back from the tiers since the start."""

    blocks: int
    seconds: float  #: that the thread took for it, without what loads waited for each other


class TieredStore:
    """A bounded store of KV blocks in host memory and, with a `folder`, on disk.

    Keys are 16-byte content hashes, values `block_bytes` bytes. Views are contiguous uint8
    [block_bytes]; they belong to the store from an accepted request until its `done`, which is
    called once, on the tiers' thread, and must not block. `compatibility` is 16 bytes
    (`KVLayout.compatibility`): blocks stored under another value are never returned. `folder` is
    where the disk's file goes; None: there is no disk tier. `clock` times the disk's retries.
    `tell_left` is told, on the tiers' thread, which contents no tier holds any more. What it and the
    `done` of stores say, in their order, is where each content is in the end.
    Raises ValueError when the memory is smaller than a block, and OSError when it cannot be
    reserved; nothing else raises, a block is a miss instead.
    """

    def __init__(
        self,
        block_bytes: int,
        compatibility: bytes,
        limits: TierLimits,
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        tell_left: Callable[[list[bytes]], None] = lambda contents: None,
    ) -> None:
        self.block_bytes = block_bytes
        self.limits = limits
        self._compatibility = compatibility
        self._folder = folder
        self._clock = clock
        self._tell_left = tell_left
        if limits.memory_bytes < block_bytes:
            raise ValueError(
                f"the memory tier has {limits.memory_bytes} bytes, and a block of KV {block_bytes}: "
                f"kv_tiers.memory_mib must be at least {-(-block_bytes // (1 << 20))}"
            )
        self._memory = MemoryStore(limits.memory_bytes // block_bytes, block_bytes)
        self._index = TierIndex(self._memory.slots)
        self._disk: DiskStore | None = None  #: None while there is none; the tiers' thread's own
        self._gate = DiskGate()
        self._loads: deque[LoadRequest] = deque()
        self._stores: deque[StoreRequest] = deque()
        self._requests = 0  #: waiting or under way
        self._in_flight_bytes = 0  #: of the blocks in these requests
        self._lookups: Counter[str] = Counter()  #: of `count_held_blocks`: hits, misses by tier
        self._counts: Counter[str] = Counter()  #: loads by tier, refusals, switching off
        self._failures: dict[Tier, Counter[str]] = {tier: Counter() for tier in Tier}
        self._loads_done = BlockLoads(0, 0.0)
        self._copy_s = 0.0  #: in copies into and out of memory, checksums included
        self._disk_s = 0.0  #: in reads and writes of the file
        self._open = True  #: False from `close` on, or once the thread has failed
        self._wake = threading.Condition()  #: its lock guards all of the above
        self._thread = threading.Thread(target=self._run, name="kv-tiers", daemon=True)
        self._thread.start()

    # ---- any thread ------------------------------------------------------------------------------

    def store(self, content: bytes, view: memoryview, done: Callable[[bool], None]) -> bool:
        """Keeps a copy of a block; `done(held)` says whether a tier holds it now.

        Returns False, and never calls `done`, when the request is refused: too much is waiting,
        every memory slot is in flight, or the store is closed.
        """
        assert view.nbytes == self.block_bytes and len(content) == 16, (view.nbytes, content)
        with self._wake:
            if not self._accepts(self.block_bytes, "store"):
                return False
            slot = self._index.begin_store(content)
            if slot is None and content not in self._index:
                self._counts["refused_store"] += 1
                return False
            self._stores.append(StoreRequest(content, view, done, slot))
            self._count_request(self.block_bytes)
        return True

    def count_held_blocks(self, contents: Sequence[bytes]) -> int:
        """Returns how many leading blocks a `load` would find now.

        This is what counts as look-up: all blocks behind the first miss are misses too.
        """
        with self._wake:
            held = self._index.count_held(contents if self._open else ())
            self._lookups["memory_hits"] += held.memory
            self._lookups["memory_misses"] += len(contents) - held.memory
            self._lookups["disk_hits"] += held.disk
            self._lookups["disk_misses"] += len(contents) - held.total
        return held.total

    def load(
        self, pairs: Sequence[tuple[bytes, memoryview]], done: Callable[[list[bytes]], None]
    ) -> bool:
        """Copies blocks into their views; `done(contents)` names the leading ones that arrived.

        `pairs` are (content, view) in the order of a prompt. A block is worth nothing without those
        before it, so the first miss ends the load. The blocks that arrived were verified; the other
        views may hold anything. Returns False, and never calls `done`, when the request is refused.
        """
        assert all(view.nbytes == self.block_bytes and not view.readonly for _, view in pairs)
        size = len(pairs) * self.block_bytes
        with self._wake:
            if not self._accepts(size, "load"):
                return False
            pinned = self._index.pin_prefix([content for content, _ in pairs])
            self._loads.append(LoadRequest(list(pairs), done, pinned))
            self._count_request(size)
        return True

    @property
    def is_open(self) -> bool:
        """False from `close` on, and once the thread has failed: every request is refused then."""
        return self._open

    @property
    def loads_done(self) -> BlockLoads:
        """What has come back so far. Any thread."""
        return self._loads_done

    def statistics(self) -> dict[str, Any]:
        """Blocks and bytes by tier, look-ups, deliveries, evictions, faults by reason.

        "left" counts the blocks that are in no tier any more, by reason. The keys are what metrics
        and people see.
        """
        with self._wake:
            index = self._index
            memory = self._tier_statistics(Tier.MEMORY, index.memory_blocks, index.memory_slots)
            disk = self._tier_statistics(Tier.DISK, index.disk_blocks, index.disk_slots)
            memory["promoted"] = index.event_counts["memory_promoted"]
            memory["dirty"] = index.dirty_blocks
            disk["found"] = index.event_counts["disk_found"]
            disk["state"] = self._disk_state()
            return {
                "memory": memory,
                "disk": disk,
                "left": dict(index.removal_reasons),
                "requests": self._requests,
                "in_flight_bytes": self._in_flight_bytes,
                "refused": {kind: self._counts[f"refused_{kind}"] for kind in ("store", "load")},
                "switched_off": self._counts["switched_off"],
                "copy_s": round(self._copy_s, 6),
                "disk_s": round(self._disk_s, 6),
            }

    def _tier_statistics(self, tier: Tier, blocks: int, slots: int) -> dict[str, Any]:
        return {
            "entries": blocks,
            "bytes": blocks * self.block_bytes,
            "bytes_max": slots * self.block_bytes,
            "hits": self._lookups[f"{tier}_hits"],
            "misses": self._lookups[f"{tier}_misses"],
            "stored": self._index.event_counts[f"{tier}_stored"],
            "loaded": self._counts[f"{tier}_loaded"],
            "evicted": self._index.event_counts[f"{tier}_evicted"],
            "failures": dict(self._failures[tier]),
        }

    def close(self) -> None:
        """Ends after the block in hand; requests that wait fail. Blocks on disk stay there.

        Must not be called from a `done`: it waits for the thread.
        """
        with self._wake:
            self._open = False
            self._wake.notify()
        self._thread.join()

    def __repr__(self) -> str:
        return f"<Tiers {self._index!r}, disk {self._disk_state()}, {self._requests} requests>"

    def _accepts(self, size: int, kind: str) -> bool:
        too_many = self._requests >= self.limits.request_limit
        in_flight_bytes = self._in_flight_bytes + size
        too_large = (
            self._in_flight_bytes > 0 and in_flight_bytes > self.limits.in_flight_bytes_limit
        )
        if self._open and not too_many and not too_large:
            return True
        self._counts[f"refused_{kind}"] += 1
        return False

    def _count_request(self, size: int) -> None:
        self._requests += 1
        self._in_flight_bytes += size
        self._wake.notify()

    def _disk_state(self) -> str:
        if self._folder is None or not self.limits.disk_bytes:
            return "none"
        if self._gate.reason:
            return f"off: {self._gate.reason}"
        return "on" if self._disk else "opens"

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._open:
                self._step()
        except Exception:
            log.exception("the tiers' thread ended: no block is stored or loaded any more")
        finally:
            with self._wake:
                self._open = False
                left = self._index.take_left() + self._index.contents()
            self._fail_waiting_requests()
            self._tell_of(left)
            if self._disk:
                self._disk.close()

    def _step(self) -> None:
        """Does the first thing that there is to do, in this order.

        The order is: serve a load, open the disk, serve a store, move a block between tiers, wait.
        """
        self._tell_what_left()
        with self._wake:
            if not self._open:
                return
            now = self._clock()
            request: TierRequest | None = None
            move: TierMove | None = None
            may_open_disk = self._may_open_disk(now)
            if self._loads:
                request = self._loads.popleft()
            elif not may_open_disk and self._stores:
                request = self._stores.popleft()
            elif self._disk:
                move = self._index.begin_move(writes=self._gate.allows(now))
            if request is None and move is None and not may_open_disk:
                self._wake.wait(self._idle_s(now))
                return

        if request is not None:
            self._serve(request)
        elif move is not None:
            self._move(move)
        else:
            self._open_disk()

    def _idle_s(self, now: float) -> float | None:
        """Returns the seconds until the disk is tried again; None: wait for the next request."""
        retry_is_useful = self._index.dirty_blocks > 0 or self._disk is None
        if retry_is_useful and self._gate.retry_at > now:
            return self._gate.retry_at - now
        return None

    def _serve(self, request: TierRequest) -> None:
        """Calls `done` once, whatever happens."""
        match request:
            case LoadRequest():
                arrived: list[bytes] = []
                try:
                    self._load(request, arrived)
                finally:
                    self._end_load(request, arrived)
            case StoreRequest():
                held = False
                try:
                    held = self._store(request)
                finally:
                    self._end_store(request, held)
            case _:
                assert_never(request)

    def _tell_what_left(self) -> None:
        with self._wake:
            left = self._index.take_left()
        self._tell_of(left)

    def _tell_of(self, left: list[bytes]) -> None:
        if not left:
            return
        try:
            self._tell_left(left)
        except Exception:
            self._counts["callback_failures"] += 1
            log.exception("a tiers callback failed")

    def _fail_waiting_requests(self) -> None:
        """Calls `done` of each, empty-handed. The index is left as it is: nobody asks it again."""
        for load in self._loads:
            self._end_load(load, [])
        for store in self._stores:
            self._end_store(store, held=False)
        self._loads.clear()
        self._stores.clear()

    def _end_load(self, load: LoadRequest, arrived: list[bytes]) -> None:
        with self._wake:
            self._uncount_request(len(load.pairs))
        self._call_done(partial(load.done, arrived))

    def _end_store(self, store: StoreRequest, held: bool) -> None:
        """Calls `done` with whether a tier holds the block still.

        Another thread's `store` may have evicted it since it was copied. What has left by now is told
        before `done`; what leaves later is told later.
        """
        with self._wake:
            self._uncount_request(1)
            left = self._index.take_left()
            held = held and self._index.count_held([store.content]).total > 0
        self._tell_of(left)
        self._call_done(partial(store.done, held))

    def _uncount_request(self, blocks: int) -> None:
        self._requests -= 1
        self._in_flight_bytes -= blocks * self.block_bytes

    def _call_done(self, call_done: Callable[[], None]) -> None:
        try:
            call_done()
        except Exception:
            self._counts["callback_failures"] += 1
            log.exception("a tiers callback failed")

    def _store(self, store: StoreRequest) -> bool:
        if store.slot is not None:
            began = time.perf_counter()
            seed = checksum_seed(self._compatibility, store.content)
            self._memory.put(store.slot, store.view, seed)
            self._copy_s += time.perf_counter() - began
        with self._wake:
            if store.slot is not None:
                self._index.end_store(store.content, ok=True)
            return self._index.count_held([store.content]).total > 0

    def _load(self, load: LoadRequest, arrived: list[bytes]) -> None:
        """Appends to `arrived` the leading blocks that were loaded."""
        began = time.perf_counter()
        pinned_pairs = load.pairs[: load.pinned]
        for content, view in pinned_pairs:
            if not self._open or not self._load_block(content, view):
                break
            arrived.append(content)
        seconds = time.perf_counter() - began
        with self._wake:
            done = self._loads_done
            self._loads_done = BlockLoads(done.blocks + len(arrived), done.seconds + seconds)
            for content, _ in pinned_pairs:
                self._index.unpin(content)

    def _load_block(self, content: bytes, view: memoryview) -> bool:
        """Loads a block from the fastest tier whose copy is good; False when none is."""
        seed = checksum_seed(self._compatibility, content)
        slots = self._index.find_slots(content)
        if slots.memory is not None:
            began = time.perf_counter()
            fault = self._memory.get(slots.memory, view, seed)
            self._copy_s += time.perf_counter() - began
            if fault is None:
                self._counts["memory_loaded"] += 1
                return True
            self._remove_bad_copy(content, Tier.MEMORY, fault)

        if slots.disk is not None:
            fault = self._read_disk(slots.disk, view, seed)
            if fault is None:
                self._counts["disk_loaded"] += 1
                return True
            self._remove_bad_copy(content, Tier.DISK, fault)
        return False

    def _remove_bad_copy(self, content: bytes, tier: Tier, fault: TierFault) -> None:
        with self._wake:
            self._failures[tier][fault] += 1
            disk_slot = self._index.find_slots(content).disk
            self._index.remove_copy(content, tier, fault)
        if tier is Tier.DISK and disk_slot is not None and self._disk:
            self._disk.erase(disk_slot)

    def _read_disk(self, slot: int, view: memoryview, seed: int) -> TierFault | None:
        assert self._disk
        began = time.perf_counter()
        fault = self._disk.read(slot, view, seed)
        self._disk_s += time.perf_counter() - began
        return fault

    # ---- the disk --------------------------------------------------------------------------------

    def _move(self, move: TierMove) -> None:
        match move:
            case CopyToMemory():
                self._copy_to_memory(move)
            case CopyToDisk():
                self._copy_to_disk(move)
            case _:
                assert_never(move)

    def _copy_to_memory(self, move: CopyToMemory) -> None:
        assert self._disk
        seed = checksum_seed(self._compatibility, move.content)
        fault = self._read_disk(move.disk_slot, self._memory.view(move.memory_slot), seed)
        # Also after a fault: the slot is free then, and its checksum means nothing.
        self._memory.set_checksum(move.memory_slot, self._disk.checksum_of(move.disk_slot))
        with self._wake:
            self._index.end_move(move, ok=fault is None)
        if fault:
            self._remove_bad_copy(move.content, Tier.DISK, fault)

    def _copy_to_disk(self, move: CopyToDisk) -> None:
        assert self._disk
        now = self._clock()
        view = self._memory.view(move.memory_slot)
        block_checksum = self._memory.checksum_of(move.memory_slot)
        began = time.perf_counter()
        fault = self._disk.write(move.disk_slot, move.content, view, block_checksum)
        self._disk_s += time.perf_counter() - began

        with self._wake:
            self._index.end_move(move, ok=fault is None)
            if fault is None:
                if self._gate.record_success():
                    log.warning("the disk tier in %s works again", self._folder)
            else:
                self._record_disk_failure(fault, f"writing failed: {fault}", now)
            if fault is TierFault.VANISHED:
                self._index.detach_disk()
        # The folder was removed: `_step` makes a new file once the gate allows that.
        if fault is TierFault.VANISHED:
            self._disk.close()
            self._disk = None

    def _may_open_disk(self, now: float) -> bool:
        configured = self._folder is not None and self.limits.disk_bytes > 0
        return configured and self._disk is None and self._gate.allows(now)

    def _open_disk(self) -> None:
        assert self._folder is not None
        began = self._clock()
        try:
            disk = DiskStore(
                self._folder, self.block_bytes, self.limits.disk_bytes, self._compatibility
            )
        except DiskUnavailable as error:
            with self._wake:
                self._record_disk_failure(error.fault, str(error), began, conclusive=True)
            return

        if disk.was_emptied:
            log.warning("%s held blocks of another model, layout or size: emptied", disk.path)
        with self._wake:
            self._disk = disk
            self._index.attach_disk(disk.slots, disk.found_blocks)
            self._failures[Tier.DISK].update(disk.header_faults)
            if self._gate.record_success():
                log.warning("the disk tier in %s is there again", self._folder)

    def _record_disk_failure(
        self, fault: TierFault, text: str, now: float, conclusive: bool = False
    ) -> None:
        self._failures[Tier.DISK][fault] += 1
        if self._gate.record_failure(fault, now, conclusive):
            self._counts["switched_off"] += 1
            log.error("the disk tier in %s is switched off (%s)", self._folder, text)
