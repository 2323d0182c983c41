"""The tiers' thread: takes blocks from the pool's edge, gives them back, moves them meanwhile.

Requests come from any thread and never wait: what is known at once (`held`, a refusal) is answered
under a lock that is only ever held for look-ups, the bytes are copied on this thread. It serves
loads first (a prompt waits for them), then stores (pool blocks are pinned for them), and copies
between memory and disk when nobody waits, a block at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .disk import DiskStore
from .faults import DiskUnavailable, Fault, seed_of
from .gate import Gate
from .index import Demote, Promote, TierIndex
from .memory import MemoryStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the tiers, and of what may be waiting or under way at one time."""

    memory_bytes: int
    disk_bytes: int = 0  #: of the file; it helps from several times `memory_bytes`
    requests_max: int = 256  #: stores and loads
    in_flight_bytes_max: int = 1 << 30  #: of blocks in them; a request alone may be larger


@dataclass(frozen=True, slots=True, eq=False)
class _Store:
    content: bytes
    view: memoryview
    done: Callable[[bool], None]
    slot: int | None  #: memory slot to fill; None when the block is known


@dataclass(frozen=True, slots=True, eq=False)
class _Load:
    pairs: list[tuple[bytes, memoryview]]
    done: Callable[[list[bytes]], None]
    pinned: int  #: leading pairs that a tier holds


class Tiers:
    """A bounded store of KV blocks in host memory and, with a `folder`, on disk.

    Keys are 16-byte content hashes, values `block_bytes` bytes. Views are contiguous uint8
    [block_bytes]; they belong to the tiers from an accepted request until its `done`, which is
    called once, on the tiers' thread, and must not block. `compatibility` is 16 bytes
    (`KVLayout.compatibility`): blocks stored under another value are never returned. Raises
    OSError when the memory cannot be reserved; nothing else raises, a block is a miss instead.
    """

    def __init__(
        self,
        block_bytes: int,
        compatibility: bytes,
        limits: Limits,
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_bytes, self.limits = block_bytes, limits
        self._compatibility, self._folder, self._clock = compatibility, folder, clock
        self._memory = MemoryStore(limits.memory_bytes // block_bytes, block_bytes)
        self._index = TierIndex(self._memory.slots)
        self._disk: DiskStore | None = None  #: this thread's; None while there is none
        self._gate = Gate()
        self._loads: deque[_Load] = deque()
        self._stores: deque[_Store] = deque()
        self._requests = self._in_flight_bytes = 0
        self._lookups: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._failures: dict[str, Counter[str]] = {"memory": Counter(), "disk": Counter()}
        self._copy_s = self._disk_s = 0.0
        self._open = True
        self._wake = threading.Condition()  #: its lock guards all of the above
        self._thread = threading.Thread(target=self._run, name="kv-tiers", daemon=True)
        self._thread.start()

    # ---- any thread ------------------------------------------------------------------------------

    def store(self, content: bytes, view: memoryview, done: Callable[[bool], None]) -> bool:
        """Keeps a copy of a block; `done(held)`. False, and no `done`, when it is refused: too much
        is waiting, every memory slot is in flight, or the tiers are closed."""
        assert view.nbytes == self.block_bytes and len(content) == 16, (view.nbytes, content)
        with self._wake:
            if not self._accepts(self.block_bytes, "store"):
                return False
            slot = self._index.admit(content)
            if slot is None and content not in self._index:
                self._counts["refused_store"] += 1
                return False
            self._stores.append(_Store(content, view, done, slot))
            self._begin(self.block_bytes)
        return True

    def held(self, contents: Sequence[bytes]) -> int:
        """How many leading blocks a `load` would find now."""
        with self._wake:
            memory, disk = self._index.held(contents) if self._open else (0, 0)
            self._lookups["memory_hits"] += memory
            self._lookups["memory_misses"] += len(contents) - memory
            self._lookups["disk_hits"] += disk
            self._lookups["disk_misses"] += len(contents) - memory - disk
        return memory + disk

    def load(
        self, pairs: Sequence[tuple[bytes, memoryview]], done: Callable[[list[bytes]], None]
    ) -> bool:
        """Copies blocks into their views; `done(contents)` names the leading ones that arrived and
        were verified. The other views hold anything. False, and no `done`, when it is refused.

        A block is worth nothing without those before it, so the first miss ends the load.
        """
        assert all(v.nbytes == self.block_bytes and not v.readonly for _, v in pairs)
        size = len(pairs) * self.block_bytes
        with self._wake:
            if not self._accepts(size, "load"):
                return False
            pinned = 0
            while pinned < len(pairs) and self._index.pin(pairs[pinned][0]):
                pinned += 1
            self._loads.append(_Load(list(pairs), done, pinned))
            self._begin(size)
        return True

    def statistics(self) -> dict:
        """Blocks and bytes by tier, look-ups of `held`, deliveries, evictions, faults by reason."""
        with self._wake:
            index = self._index
            sizes = {
                "memory": (index.memory_entries, index.memory_slots),
                "disk": (index.disk_entries, index.disk_slots),
            }
            tiers: dict = {
                tier: {
                    "entries": entries,
                    "bytes": entries * self.block_bytes,
                    "bytes_max": slots * self.block_bytes,
                    "hits": self._lookups[f"{tier}_hits"],
                    "misses": self._lookups[f"{tier}_misses"],
                    "stored": index.counts[f"{tier}_stored"],
                    "loaded": self._counts[f"{tier}_loaded"],
                    "evicted": index.counts[f"{tier}_evicted"],
                    "failures": dict(self._failures[tier]),
                }
                for tier, (entries, slots) in sizes.items()
            }
            tiers["memory"] |= {"promoted": index.counts["memory_promoted"], "dirty": index.dirty}
            tiers["disk"] |= {"found": index.counts["disk_found"], "state": self._disk_state()}
            return tiers | {
                "left": dict(index.left),
                "requests": self._requests,
                "in_flight_bytes": self._in_flight_bytes,
                "refused": {k: self._counts[f"refused_{k}"] for k in ("store", "load")},
                "switched_off": self._counts["switched_off"],
                "copy_s": round(self._copy_s, 6),
                "disk_s": round(self._disk_s, 6),
            }

    def close(self) -> None:
        """Ends after the block in hand; what waits is told that it failed. Blocks on disk stay.

        Not from a callback: it waits for the thread.
        """
        with self._wake:
            self._open = False
            self._wake.notify()
        self._thread.join()

    def __repr__(self) -> str:
        return f"<Tiers {self._index!r}, disk {self._disk_state()}, {self._requests} requests>"

    def _accepts(self, size: int, kind: str) -> bool:
        full = self._requests >= self.limits.requests_max or (
            self._in_flight_bytes and self._in_flight_bytes + size > self.limits.in_flight_bytes_max
        )
        if self._open and not full:
            return True
        self._counts[f"refused_{kind}"] += 1
        return False

    def _begin(self, size: int) -> None:
        self._requests += 1
        self._in_flight_bytes += size
        self._wake.notify()

    def _disk_state(self) -> str:
        if self._folder is None or not self.limits.disk_bytes:
            return "none"
        return f"off: {self._gate.reason}" if self._gate.reason else "on" if self._disk else "opens"

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except Exception:
            log.exception("the tiers' thread ended: no block is stored or loaded any more")
        finally:
            with self._wake:
                self._open = False
            self._answer_the_rest()
            if self._disk:
                self._disk.close()

    def _step(self) -> bool:
        """One request, opening or move; False when it is time to end."""
        with self._wake:
            if not self._open:
                return False
            now = self._clock()
            request: _Load | _Store | None = self._loads.popleft() if self._loads else None
            if request is None and not self._may_open(now):
                request = self._stores.popleft() if self._stores else None
            move = None
            if request is None and self._disk:
                move = self._index.next_move(writes=self._gate.allows(now))
            if request is None and move is None and not self._may_open(now):
                self._wake.wait(self._idle_s(now))
                return True
        if request:
            self._serve(request)
        elif move:
            self._move(move)
        else:
            self._open_disk()
        return True

    def _idle_s(self, now: float) -> float | None:
        """Until the disk is to be tried again, if there is something to try it with."""
        retry = self._index.dirty > 0 or self._disk is None
        return self._gate.until - now if retry and self._gate.until > now else None

    def _serve(self, request: _Load | _Store) -> None:
        """Whatever happens, `done` is called once."""
        if isinstance(request, _Load):
            arrived: list[bytes] = []
            try:
                self._load(request, arrived)
            finally:
                self._answer(request.done, arrived, len(request.pairs))
        else:
            held = False
            try:
                held = self._store(request)
            finally:
                self._answer(request.done, held, 1)

    def _answer_the_rest(self) -> None:
        for load in self._loads:
            self._answer(load.done, [], len(load.pairs))
        for store in self._stores:
            self._answer(store.done, False, 1)
        self._loads.clear()
        self._stores.clear()

    def _answer(self, done: Callable, outcome: object, blocks: int) -> None:
        with self._wake:
            self._requests -= 1
            self._in_flight_bytes -= blocks * self.block_bytes
        try:
            done(outcome)
        except Exception:
            self._counts["callback_failures"] += 1
            log.exception("a tiers callback failed")

    def _store(self, store: _Store) -> bool:
        if store.slot is not None:
            began = time.perf_counter()
            self._memory.put(store.slot, store.view, seed_of(self._compatibility, store.content))
            self._copy_s += time.perf_counter() - began
        with self._wake:
            if store.slot is not None:
                self._index.admitted(store.content, ok=True)
            return self._index.held([store.content]) != (0, 0)

    def _load(self, load: _Load, arrived: list[bytes]) -> None:
        for content, view in load.pairs[: load.pinned]:
            if not (self._open and self._fetch(content, view)):
                break
            arrived.append(content)
        with self._wake:
            for content, _ in load.pairs[: load.pinned]:
                self._index.unpin(content)

    def _fetch(self, content: bytes, view: memoryview) -> bool:
        """One block from the fastest tier whose copy is good."""
        seed = seed_of(self._compatibility, content)
        memory, disk = self._index.where(content)
        if memory is not None:
            began = time.perf_counter()
            fault = self._memory.get(memory, view, seed)
            self._copy_s += time.perf_counter() - began
            if fault is None:
                self._counts["memory_loaded"] += 1
                return True
            self._bad(content, "memory", fault)
        if disk is not None:
            assert self._disk
            fault = self._read(disk, view, seed)
            if fault is None:
                self._counts["disk_loaded"] += 1
                return True
            self._bad(content, "disk", fault)
        return False

    def _bad(self, content: bytes, tier: str, fault: Fault) -> None:
        with self._wake:
            self._failures[tier][fault] += 1
            _, disk = self._index.where(content)
            self._index.lose(content, tier, fault)
        if tier == "disk" and disk is not None and self._disk:
            self._disk.erase(disk)

    def _read(self, slot: int, view: memoryview, seed: int) -> Fault | None:
        assert self._disk
        began = time.perf_counter()
        fault = self._disk.read(slot, view, seed)
        self._disk_s += time.perf_counter() - began
        return fault

    # ---- the disk --------------------------------------------------------------------------------

    def _move(self, move: Demote | Promote) -> None:
        assert self._disk
        view, now = self._memory.view(move.memory), self._clock()
        if isinstance(move, Promote):
            seed = seed_of(self._compatibility, move.content)
            fault = self._read(move.disk, view, seed)
            self._memory.label(move.memory, self._disk.sum(move.disk))
            with self._wake:
                self._index.moved(move, fault is None)
            if fault:
                self._bad(move.content, "disk", fault)
            return
        began = time.perf_counter()
        total = self._memory.sum(move.memory)
        fault = self._disk.write(move.disk, move.content, view, total)
        self._disk_s += time.perf_counter() - began
        with self._wake:
            self._index.moved(move, fault is None)
            if fault is None and self._gate.succeeded():
                log.warning("the disk tier in %s works again", self._folder)
            if fault:
                self._failed(fault, f"writing failed: {fault}", now)
            if fault is Fault.VANISHED:
                self._index.detach()
        if fault is Fault.VANISHED:
            self._disk.close()
            self._disk = None

    def _may_open(self, now: float) -> bool:
        wanted = self._folder is not None and self.limits.disk_bytes > 0
        return wanted and self._disk is None and self._gate.allows(now)

    def _open_disk(self) -> None:
        assert self._folder is not None
        began, size = self._clock(), self.limits.disk_bytes
        try:
            disk = DiskStore(self._folder, self.block_bytes, size, self._compatibility)
        except DiskUnavailable as error:
            with self._wake:
                self._failed(error.fault, str(error), began, final=True)
            return
        if disk.emptied:
            log.warning("%s held blocks of another model, layout or size: emptied", disk.path)
        with self._wake:
            self._disk = disk
            self._index.attach(disk.slots, disk.found)
            self._failures["disk"].update(disk.faults)
            if self._gate.succeeded():
                log.warning("the disk tier in %s is there again", self._folder)

    def _failed(self, fault: Fault, text: str, now: float, final: bool = False) -> None:
        self._failures["disk"][fault] += 1
        if self._gate.failed(fault, now, final):
            self._counts["switched_off"] += 1
            log.error("the disk tier in %s is switched off (%s)", self._folder, text)
