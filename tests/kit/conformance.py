"""The suite that every `Transport` passes: give it an opener, and it opens pairs and checks them.

    for check in CHECKS:
        run(check, lambda agent, pool, admit: MyTransport(agent, pool))

A pair is two transports over two pools in one process. One loop polls them in turn until what the
check waits for has happened; `DEADLINE_S` only bounds a failure. A broken contract raises
`AssertionError`.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from diptych.kv_transfer.errors import PeerLost
from diptych.kv_transfer.layout import KVLayout
from diptych.kv_transfer.transport import (
    AdmitData,
    NotificationReceived,
    PeerCard,
    PeerDisconnected,
    PostedWriteEnded,
    Spans,
    Transport,
    TransportEvent,
    card_of,
)

DEADLINE_S = 20.0
PAUSE_S = 0.001  #: between two looks at something that needs the kernel or a grace period

_incarnations = itertools.count()


class MemoryPool:
    """A `Pool` of host memory, shared where the platform can, with other bytes in every block."""

    memory = "DRAM"
    device = 0

    def __init__(self, blocks: int = 32, block_bytes: int = 16384, seed: int = 0) -> None:
        self.blocks = blocks
        self.block_bytes = block_bytes
        self.size = blocks * block_bytes
        self.fd = os.memfd_create("diptych-kv") if hasattr(os, "memfd_create") else None
        if self.fd is not None:
            os.ftruncate(self.fd, self.size)
        self._map = mmap.mmap(-1 if self.fd is None else self.fd, self.size)
        self._map[:] = random.Random(seed).randbytes(self.size)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.view = memoryview(self._map)

    def __del__(self) -> None:
        if self.fd is not None:
            os.close(self.fd)

    @property
    def layout(self) -> KVLayout:
        """One that has the size of the blocks: bytes, one layer, one head."""
        assert self.block_bytes % 128 == 0, self.block_bytes
        return KVLayout(1, 1, self.block_bytes // 128, 64, 1, "uint8", 1)

    def block(self, index: int) -> bytes:
        return bytes(self.view[index * self.block_bytes : (index + 1) * self.block_bytes])

    def fill(self, index: int, data: bytes) -> None:
        assert len(data) == self.block_bytes, len(data)
        self.view[index * self.block_bytes : (index + 1) * self.block_bytes] = data


Opener = Callable[[str, MemoryPool, AdmitData], Transport]


@dataclass(slots=True)
class TransportEnd:
    """One transport, its pool, and all events that `poll` has returned."""

    agent: str
    pool: MemoryPool
    transport: Transport
    events: list[TransportEvent] = field(default_factory=list)
    open: bool = True

    def poll(self) -> list[TransportEvent]:
        if not self.open:
            return []
        new_events = self.transport.poll()
        self.events += new_events
        return new_events

    def card(self) -> PeerCard:
        return card_of(self.agent, self.transport, self.pool)

    def notes(self) -> list[bytes]:
        return [event.data for event in self.events if isinstance(event, NotificationReceived)]

    def wrote(self) -> dict[int, list[bool]]:
        """The `ok` of each handle's `PostedWriteEnded` events."""
        ends: dict[int, list[bool]] = {}
        for event in self.events:
            if isinstance(event, PostedWriteEnded):
                ends.setdefault(event.handle, []).append(event.ok)
        return ends

    def downs(self) -> int:
        return sum(isinstance(event, PeerDisconnected) for event in self.events)

    def close(self) -> None:
        if self.open:
            self.open = False
            self.transport.close()


def open_end(opener: Opener, name: str, seed: int, admit: AdmitData) -> TransportEnd:
    agent = f"{name}#{next(_incarnations)}"
    pool = MemoryPool(seed=seed)
    return TransportEnd(agent, pool, opener(agent, pool, admit))


class TransportPair:
    """Two ends that may know each other."""

    def __init__(self, opener: Opener) -> None:
        self.refused: set[bytes] = set()  #: notes whose data neither end admits
        self.admit_calls: list[tuple[str, bytes]] = []  #: peer and note
        self.left = open_end(opener, "left", 1, self._admit)
        self.right = open_end(opener, "right", 2, self._admit)

    def _admit(self, peer: str, note: bytes) -> bool:
        self.admit_calls.append((peer, note))
        return note not in self.refused

    def connect(self) -> TransportPair:
        """Both ends know each other, and both directions have carried a note."""
        left, right = self.left, self.right
        left.transport.add_peer(right.card())
        right.transport.add_peer(left.card())
        left.transport.notify(right.agent, b"hello")
        right.transport.notify(left.agent, b"hello")
        self.until(lambda: bool(left.notes() and right.notes()), "the first notes")
        left.events.clear()
        right.events.clear()
        return self

    def poll(self) -> None:
        if not self.left.poll() + self.right.poll():
            time.sleep(0)

    def until(self, done: Callable[[], bool], what: str) -> None:
        _until(done, self.poll, what)

    def close(self) -> None:
        self.left.close()
        self.right.close()


def run(check: Callable[[TransportPair], None], opener: Opener) -> None:
    """Opens a pair for `check` alone and closes it afterwards."""
    pair = TransportPair(opener)
    try:
        check(pair)
    finally:
        pair.close()


def _until(done: Callable[[], bool], step: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        step()


def spans(unit: int, source: Sequence[int], target: Sequence[int]) -> Spans:
    return Spans(unit, np.array(source, np.int32), np.array(target, np.int32))


def write(
    source: TransportEnd,
    target: TransportEnd,
    blocks: Sequence[int],
    to: Sequence[int],
    note: bytes,
) -> int:
    """Writes whole blocks; returns the handle."""
    block_spans = spans(source.pool.block_bytes, blocks, to)
    return source.transport.write(target.agent, block_spans, note)


def _raises_peer_lost(call: Callable[[], object]) -> bool:
    try:
        call()
    except PeerLost:
        return True
    return False


# ---- data ----------------------------------------------------------------------------------------


def blocks_arrive_exactly_at_their_targets(pair: TransportPair) -> None:
    pair.connect()
    left = pair.left
    right = pair.right
    indices = list(range(left.pool.blocks))
    source = random.Random(3).sample(indices, 20)
    target = random.Random(4).sample(indices, 20)
    source_blocks = [left.pool.block(i) for i in indices]
    expected = [right.pool.block(i) for i in indices]
    for source_index, target_index in zip(source, target, strict=True):
        expected[target_index] = source_blocks[source_index]
    write(left, right, source, target, b"shuffled")
    pair.until(lambda: bool(right.notes() and left.wrote()), "a write and its note")
    assert [right.pool.block(i) for i in indices] == expected, "a block is wrong, or out of place"
    assert [left.pool.block(i) for i in indices] == source_blocks, "a write changed its source"


def units_of_any_size_arrive_exactly_at_their_targets(pair: TransportPair) -> None:
    """Smaller than a block or across blocks, in runs and scattered, from either end."""
    pair.connect()
    left = pair.left
    right = pair.right
    rng = random.Random(7)
    for unit in (64, 1000, 4096, 12288, 40960):
        for source, target in ((left, right), (right, left)):
            units = source.pool.size // unit
            from_units, to_units = _two_scattered(rng, units)
            expected = bytearray(target.pool.view)
            _copy_units(bytes(source.pool.view), expected, unit, from_units, to_units)
            previous_notes = len(target.notes())
            source.transport.write(target.agent, spans(unit, from_units, to_units), b"units")
            _noted(pair, target, previous_notes + 1)
            assert bytes(target.pool.view) == bytes(expected), f"units of {unit} bytes"


def _two_scattered(rng: random.Random, units: int) -> tuple[list[int], list[int]]:
    """Two scattered selections of equal size."""
    first = _scattered(rng, units)
    second = _scattered(rng, units)
    size = min(len(first), len(second))
    return first[:size], second[:size]


def _copy_units(
    source: bytes, target: bytearray, unit: int, from_units: list[int], to_units: list[int]
) -> None:
    """Copies what a write with these units should copy."""
    for from_unit, to_unit in zip(from_units, to_units, strict=True):
        data = source[from_unit * unit : (from_unit + 1) * unit]
        target[to_unit * unit : (to_unit + 1) * unit] = data


def _noted(pair: TransportPair, end: TransportEnd, count: int) -> None:
    pair.until(lambda: len(end.notes()) >= count, f"{count} notes")


def a_read_fetches_units_of_the_peer(pair: TransportPair) -> None:
    """For transports that have one: the other way round, and the peer gets the note."""
    pair.connect()
    left = pair.left
    right = pair.right
    read = getattr(left.transport, "read", None)
    if read is None:
        return
    unit = 4096
    own_units, peer_units = _two_scattered(random.Random(8), left.pool.size // unit)
    source = bytes(right.pool.view)
    expected = bytearray(left.pool.view)
    _copy_units(source, expected, unit, peer_units, own_units)
    handle = read(right.agent, spans(unit, own_units, peer_units), b"read")
    pair.until(lambda: bool(right.notes() and left.wrote()), "a read and its note")
    assert left.wrote() == {handle: [True]}
    assert bytes(left.pool.view) == bytes(expected)
    assert bytes(right.pool.view) == source, "a read changed its source"


def _scattered(rng: random.Random, units: int) -> list[int]:
    """About half of the units once: runs of one to four, in any order."""
    cuts = list(itertools.accumulate(rng.choices((1, 2, 3, 4), k=units), initial=0))
    pieces = [list(range(a, b)) for a, b in itertools.pairwise(cuts) if b <= units]
    return list(itertools.chain.from_iterable(rng.sample(pieces, -(-len(pieces) // 2))))


def a_note_comes_once_and_after_its_data(pair: TransportPair) -> None:
    """Each write fills its own blocks: they must be complete when its note is seen."""
    pair.connect()
    left = pair.left
    right = pair.right
    for index in range(8):
        blocks = list(range(index * 4, index * 4 + 4))
        write(left, right, blocks, blocks, bytes([index]))
    noted: list[int] = []

    def look() -> None:
        left.poll()
        for event in right.poll():
            assert isinstance(event, NotificationReceived) and event.peer == left.agent, event
            index = event.data[0]
            noted.append(index)
            for block in range(index * 4, index * 4 + 4):
                same = right.pool.block(block) == left.pool.block(block)
                assert same, f"note {index} came before its data"

    _until(lambda: len(noted) >= 8 and len(left.wrote()) == 8, look, "eight notes")
    for _ in range(50):
        look()
    assert sorted(noted) == list(range(8)), f"lost or doubled notes: {noted}"


def both_directions_carry_data_at_once(pair: TransportPair) -> None:
    pair.connect()
    left = pair.left
    right = pair.right
    ends = ((left, right), (right, left))
    before = {id(end): end.pool.block(0) for end in (left, right)}
    for source, target in ends:
        write(source, target, [0], [5], b"crossing")
    pair.until(lambda: all(e.notes() and e.wrote() for e in (left, right)), "both writes")
    for source, target in ends:
        assert target.pool.block(5) == before[id(source)]


def every_write_ends_exactly_once(pair: TransportPair) -> None:
    pair.connect()
    left = pair.left
    right = pair.right
    rng = random.Random(5)
    count = 300
    handles: list[int] = []
    for index in range(count):
        source = rng.sample(range(left.pool.blocks), rng.randint(1, 4))
        target = rng.sample(range(right.pool.blocks), len(source))
        handles.append(write(left, right, source, target, b"%d" % index))
        pair.poll()
    assert len(set(handles)) == count, "a handle was given twice"
    pair.until(lambda: len(left.wrote()) == count == len(right.notes()), "all writes and notes")
    for _ in range(50):
        pair.poll()
    assert left.wrote() == {handle: [True] for handle in handles}
    assert sorted(right.notes()) == sorted(b"%d" % index for index in range(count))


def a_refused_write_leaves_no_byte(pair: TransportPair) -> None:
    """For transports that can: data whose ticket is closed is not stored; the note still comes."""
    pair.connect()
    left = pair.left
    right = pair.right
    if not right.transport.refuses_late:
        return
    before = bytes(right.pool.view)
    pair.refused.add(b"late")
    write(left, right, [1, 2, 3], [4, 9, 6], b"late")
    pair.until(lambda: bool(right.notes() and left.wrote()), "the refused write")
    assert (left.agent, b"late") in pair.admit_calls
    assert right.notes() == [b"late"]
    assert bytes(right.pool.view) == before, "data of a refused write was stored"
    write(left, right, [1], [4], b"in time")
    pair.until(lambda: b"in time" in right.notes(), "the write after it")
    assert right.pool.block(4) == left.pool.block(1)


# ---- notes ---------------------------------------------------------------------------------------


def notes_go_both_ways_and_none_is_lost(pair: TransportPair) -> None:
    pair.connect()
    left = pair.left
    right = pair.right
    rng = random.Random(6)
    sent: dict[str, list[bytes]] = {left.agent: [], right.agent: []}
    for index in range(500):
        for source, target in ((left, right), (right, left)):
            note = b"%d|" % index + rng.randbytes(rng.choice((0, 1, 100, 20_000)))
            source.transport.notify(target.agent, note)
            sent[target.agent].append(note)
        pair.poll()

    def all_noted() -> bool:
        return all(len(end.notes()) >= 500 for end in (left, right))

    pair.until(all_noted, "a thousand notes")
    for end in (left, right):
        assert Counter(end.notes()) == Counter(sent[end.agent])


# ---- peers ---------------------------------------------------------------------------------------


def adding_a_peer_again_changes_nothing(pair: TransportPair) -> None:
    pair.connect()
    left = pair.left
    right = pair.right
    card = right.card()
    left.transport.add_peer(card)
    write(left, right, [1], [2], b"one")
    left.transport.add_peer(card)
    write(left, right, [3], [4], b"two")
    pair.until(lambda: len(right.notes()) == 2 == len(left.wrote()), "two writes")
    assert right.pool.block(2) == left.pool.block(1)
    assert right.pool.block(4) == left.pool.block(3)
    assert left.downs() == right.downs() == 0


def an_unknown_peer_is_lost(pair: TransportPair) -> None:
    left = pair.left
    one_unit = spans(64, [0], [0])
    assert _raises_peer_lost(lambda: left.transport.notify("nobody#0", b"x")), (
        "notify to an unknown peer"
    )
    assert _raises_peer_lost(lambda: left.transport.write("nobody#0", one_unit, b"x")), (
        "write to one"
    )
    left.poll()
    assert not left.wrote(), "a write that raised must not end as well"


def a_removed_peer_is_lost(pair: TransportPair) -> None:
    pair.connect()
    left = pair.left
    right = pair.right
    left.transport.remove_peer(right.agent)
    left.transport.remove_peer(right.agent)
    assert _raises_peer_lost(lambda: left.transport.notify(right.agent, b"x")), (
        "notify to a removed peer"
    )
    assert _raises_peer_lost(lambda: write(left, right, [0], [0], b"x")), "write to a removed peer"


def a_removed_peer_may_come_back(pair: TransportPair) -> None:
    """The cluster may take a worker for dead that is alive: added again, it is reachable again."""
    pair.connect()
    left = pair.left
    right = pair.right
    left_card = left.card()
    right_card = right.card()
    left.transport.remove_peer(right.agent)
    right.transport.remove_peer(left.agent)
    for _ in range(50):
        pair.poll()
    left.transport.add_peer(right_card)
    right.transport.add_peer(left_card)
    for end in (left, right):
        end.events.clear()
    write(left, right, [7], [8], b"again")
    pair.until(lambda: bool(right.notes() and left.wrote()), "a write after the peer came back")
    assert right.pool.block(8) == left.pool.block(7)


# ---- failure -------------------------------------------------------------------------------------


def a_closed_peer_is_noticed_and_fenced(pair: TransportPair) -> None:
    """Noticed: a call raises `PeerLost`, or `PeerDisconnected` comes; then nothing reaches it."""
    pair.connect()
    left = pair.left
    right = pair.right
    right.close()
    lost: list[bool] = []

    def knock() -> None:
        lost.append(_raises_peer_lost(lambda: left.transport.notify(right.agent, b"anybody?")))
        left.poll()
        time.sleep(PAUSE_S)

    _until(lambda: any(lost) or left.downs() > 0, knock, "the peer's end is noticed")
    left.poll()
    assert left.downs() == 1, "exactly one PeerDisconnected tells it"
    assert _raises_peer_lost(lambda: left.transport.notify(right.agent, b"x"))
    assert _raises_peer_lost(lambda: write(left, right, [0], [0], b"x"))

    def wait() -> None:
        left.poll()
        time.sleep(PAUSE_S)

    _until(lambda: left.transport.fenced(right.agent), wait, "the fence of a closed peer")
    left.transport.remove_peer(right.agent)


def writes_to_a_closed_peer_end_exactly_once(pair: TransportPair) -> None:
    pair.connect()
    left = pair.left
    right = pair.right
    blocks = list(range(left.pool.blocks))
    handles = [write(left, right, blocks, blocks, b"%d" % i) for i in range(4)]
    right.close()

    def post() -> None:
        left.poll()
        if not left.downs() and len(handles) < 1000:
            _raises_peer_lost(lambda: handles.append(write(left, right, blocks, blocks, b"late")))
        time.sleep(PAUSE_S)

    def all_ended() -> bool:
        return left.downs() > 0 and set(left.wrote()) >= set(handles)

    _until(all_ended, post, "every write to a closed peer ends")
    for _ in range(50):
        left.poll()
    assert set(left.wrote()) == set(handles)
    assert all(len(ends) == 1 for ends in left.wrote().values()), "a write ended twice"


def a_peer_that_never_polls_blocks_nobody(pair: TransportPair) -> None:
    """Calls return while it sleeps. What waits is bounded: it is lost, or gets everything."""
    pair.connect()
    left = pair.left
    right = pair.right
    blocks = list(range(left.pool.blocks))
    sent: list[bytes] = []
    handles: list[int] = []

    def send(index: int) -> None:
        note = b"%d|" % index + bytes(20_000)
        if index % 20:
            left.transport.notify(right.agent, note)
        else:
            handles.append(write(left, right, blocks, blocks, note))
        sent.append(note)

    for index in range(2000):
        if _raises_peer_lost(lambda i=index: send(i)):  # type: ignore[misc]
            break
        left.poll()
    left.poll()
    if left.downs():
        assert set(left.wrote()) == set(handles), "a write has no end"
        assert all(len(ends) == 1 for ends in left.wrote().values()), "a write ended twice"
        return
    pair.until(lambda: len(right.notes()) >= len(sent), "all that was sent")
    assert Counter(right.notes()) == Counter(sent)


CHECKS: tuple[Callable[[TransportPair], None], ...] = (
    blocks_arrive_exactly_at_their_targets,
    units_of_any_size_arrive_exactly_at_their_targets,
    a_read_fetches_units_of_the_peer,
    a_note_comes_once_and_after_its_data,
    both_directions_carry_data_at_once,
    every_write_ends_exactly_once,
    a_refused_write_leaves_no_byte,
    notes_go_both_ways_and_none_is_lost,
    adding_a_peer_again_changes_nothing,
    an_unknown_peer_is_lost,
    a_removed_peer_is_lost,
    a_removed_peer_may_come_back,
    a_closed_peer_is_noticed_and_fenced,
    writes_to_a_closed_peer_end_exactly_once,
    a_peer_that_never_polls_blocks_nobody,
)
