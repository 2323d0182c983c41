"""The suite that every `Transport` passes: give it an opener, it opens pairs and checks them.

    for check in CHECKS:
        run(check, lambda agent, pool, admit: MyTransport(agent, pool))

A pair is two transports over two pools in one process, polled in turn by one loop until what is
awaited is there; `DEADLINE_S` only bounds a failure. A broken contract raises `AssertionError`.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .errors import PeerLost
from .transport import Admit, Down, Event, Note, PeerCard, Pool, Transport, Wrote

DEADLINE_S = 20.0
PAUSE_S = 0.001  #: between two looks at something that needs the kernel or a grace period

_incarnations = itertools.count()


class MemoryPool:
    """A `Pool` over plain memory, filled with bytes that differ from block to block."""

    def __init__(self, blocks: int = 32, block_bytes: int = 16384, seed: int = 0) -> None:
        self.blocks, self.block_bytes = blocks, block_bytes
        self._memory = bytearray(random.Random(seed).randbytes(blocks * block_bytes))
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.view = memoryview(self._memory)

    def block(self, index: int) -> bytes:
        return bytes(self.view[index * self.block_bytes : (index + 1) * self.block_bytes])

    def fill(self, index: int, data: bytes) -> None:
        assert len(data) == self.block_bytes, len(data)
        self.view[index * self.block_bytes : (index + 1) * self.block_bytes] = data


Opener = Callable[[str, MemoryPool, Admit], Transport]


@dataclass(slots=True)
class End:
    """One transport, its pool, and all that `poll` ever told."""

    agent: str
    pool: MemoryPool
    transport: Transport
    events: list[Event] = field(default_factory=list)
    open: bool = True

    def poll(self) -> list[Event]:
        fresh = self.transport.poll() if self.open else []
        self.events += fresh
        return fresh

    def card(self) -> PeerCard:
        return card_of(self.agent, self.transport, self.pool)

    def notes(self) -> list[bytes]:
        return [event.data for event in self.events if isinstance(event, Note)]

    def wrote(self) -> dict[int, list[bool]]:
        """What each handle's `Wrote` events said."""
        told: dict[int, list[bool]] = {}
        for event in self.events:
            if isinstance(event, Wrote):
                told.setdefault(event.handle, []).append(event.ok)
        return told

    def downs(self) -> int:
        return sum(isinstance(event, Down) for event in self.events)

    def close(self) -> None:
        if self.open:
            self.open = False
            self.transport.close()


def card_of(agent: str, transport: Transport, pool: Pool) -> PeerCard:
    address = transport.address()
    return PeerCard(agent, transport.name, b"", address, pool.base, pool.blocks, pool.block_bytes)


def open_end(opener: Opener, name: str, seed: int, admit: Admit = lambda *_: True) -> End:
    agent, pool = f"{name}#{next(_incarnations)}", MemoryPool(seed=seed)
    return End(agent, pool, opener(agent, pool, admit))


class Pair:
    """Two ends that may know each other."""

    def __init__(self, opener: Opener, admit: Admit = lambda *_: True) -> None:
        self.left = open_end(opener, "left", 1)
        self.right = open_end(opener, "right", 2, admit)

    def connect(self) -> Pair:
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


def run(check: Callable[[Pair], None], opener: Opener) -> None:
    """Opens a fresh pair for `check` and closes it afterwards."""
    pair = Pair(opener)
    try:
        check(pair)
    finally:
        pair.close()


def _until(done: Callable[[], bool], step: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        step()


def _write(source: End, target: End, blocks: Sequence[int], to: Sequence[int], note: bytes) -> int:
    return source.transport.write(target.agent, blocks, to, note)


def _lost(call: Callable[[], object]) -> bool:
    try:
        call()
    except PeerLost:
        return True
    return False


# ---- data ----------------------------------------------------------------------------------------


def blocks_arrive_exactly_at_their_targets(pair: Pair) -> None:
    left, right = pair.connect().left, pair.right
    indices = list(range(left.pool.blocks))
    source = random.Random(3).sample(indices, 20)
    target = random.Random(4).sample(indices, 20)
    mine = [left.pool.block(i) for i in indices]
    wanted = [right.pool.block(i) for i in indices]
    for here, there in zip(source, target, strict=True):
        wanted[there] = mine[here]
    _write(left, right, source, target, b"shuffled")
    pair.until(lambda: bool(right.notes() and left.wrote()), "a write and its note")
    assert [right.pool.block(i) for i in indices] == wanted, "a block is wrong, or out of place"
    assert [left.pool.block(i) for i in indices] == mine, "a write changed its source"


def a_note_comes_once_and_after_its_data(pair: Pair) -> None:
    """Each write fills its own blocks: they must be complete when its note is seen."""
    left, right = pair.connect().left, pair.right
    for index in range(8):
        blocks = list(range(index * 4, index * 4 + 4))
        _write(left, right, blocks, blocks, bytes([index]))
    seen: list[int] = []

    def look() -> None:
        left.poll()
        for event in right.poll():
            assert isinstance(event, Note) and event.peer == left.agent, event
            index = event.data[0]
            seen.append(index)
            for block in range(index * 4, index * 4 + 4):
                same = right.pool.block(block) == left.pool.block(block)
                assert same, f"note {index} came before its data"

    _until(lambda: len(seen) >= 8 and len(left.wrote()) == 8, look, "eight notes")
    for _ in range(50):
        look()
    assert sorted(seen) == list(range(8)), f"lost or doubled notes: {seen}"


def both_directions_carry_data_at_once(pair: Pair) -> None:
    left, right = pair.connect().left, pair.right
    ends = ((left, right), (right, left))
    before = {id(end): end.pool.block(0) for end in (left, right)}
    for source, target in ends:
        _write(source, target, [0], [5], b"crossing")
    pair.until(lambda: all(e.notes() and e.wrote() for e in (left, right)), "both writes")
    for source, target in ends:
        assert target.pool.block(5) == before[id(source)]


def every_write_ends_exactly_once(pair: Pair) -> None:
    left, right = pair.connect().left, pair.right
    rng, count, handles = random.Random(5), 300, []
    for index in range(count):
        source = rng.sample(range(left.pool.blocks), rng.randint(1, 4))
        target = rng.sample(range(right.pool.blocks), len(source))
        handles.append(_write(left, right, source, target, b"%d" % index))
        pair.poll()
    assert len(set(handles)) == count, "a handle was given twice"
    pair.until(lambda: len(left.wrote()) == count == len(right.notes()), "all writes and notes")
    for _ in range(50):
        pair.poll()
    assert left.wrote() == {handle: [True] for handle in handles}
    assert sorted(right.notes()) == sorted(b"%d" % index for index in range(count))


# ---- notes ---------------------------------------------------------------------------------------


def notes_go_both_ways_and_none_is_lost(pair: Pair) -> None:
    left, right = pair.connect().left, pair.right
    rng = random.Random(6)
    sent: dict[str, list[bytes]] = {left.agent: [], right.agent: []}
    for index in range(500):
        for source, target in ((left, right), (right, left)):
            note = b"%d|" % index + rng.randbytes(rng.choice((0, 1, 100, 20_000)))
            source.transport.notify(target.agent, note)
            sent[target.agent].append(note)
        pair.poll()
    done = lambda: all(len(end.notes()) >= 500 for end in (left, right))  # noqa: E731
    pair.until(done, "a thousand notes")
    for end in (left, right):
        assert Counter(end.notes()) == Counter(sent[end.agent])


# ---- peers ---------------------------------------------------------------------------------------


def adding_a_peer_again_changes_nothing(pair: Pair) -> None:
    left, right = pair.connect().left, pair.right
    card = right.card()
    left.transport.add_peer(card)
    _write(left, right, [1], [2], b"one")
    left.transport.add_peer(card)
    _write(left, right, [3], [4], b"two")
    pair.until(lambda: len(right.notes()) == 2 == len(left.wrote()), "two writes")
    assert right.pool.block(2) == left.pool.block(1)
    assert right.pool.block(4) == left.pool.block(3)
    assert left.downs() == right.downs() == 0


def an_unknown_peer_is_lost(pair: Pair) -> None:
    left = pair.left
    assert _lost(lambda: left.transport.notify("nobody#0", b"x")), "notify to an unknown peer"
    assert _lost(lambda: left.transport.write("nobody#0", [0], [0], b"x")), "write to one"
    left.poll()
    assert not left.wrote(), "a write that raised must not end as well"


def a_removed_peer_is_lost(pair: Pair) -> None:
    left, right = pair.connect().left, pair.right
    left.transport.remove_peer(right.agent)
    left.transport.remove_peer(right.agent)
    assert _lost(lambda: left.transport.notify(right.agent, b"x")), "notify to a removed peer"
    assert _lost(lambda: _write(left, right, [0], [0], b"x")), "write to a removed peer"


def a_removed_peer_may_come_back(pair: Pair) -> None:
    """The cluster may take a worker for dead that is alive: added again, it is reachable again."""
    left, right = pair.connect().left, pair.right
    cards = left.card(), right.card()
    for one, other in ((left, right), (right, left)):
        one.transport.remove_peer(other.agent)
    for _ in range(50):
        pair.poll()
    left.transport.add_peer(cards[1])
    right.transport.add_peer(cards[0])
    for end in (left, right):
        end.events.clear()
    _write(left, right, [7], [8], b"again")
    pair.until(lambda: bool(right.notes() and left.wrote()), "a write after the peer came back")
    assert right.pool.block(8) == left.pool.block(7)


# ---- failure -------------------------------------------------------------------------------------


def a_closed_peer_is_noticed_and_fenced(pair: Pair) -> None:
    """Noticed: a call raises `PeerLost` or `Down` comes; nothing reaches the peer from then on."""
    left, right = pair.connect().left, pair.right
    right.close()
    lost: list[bool] = []

    def knock() -> None:
        lost.append(_lost(lambda: left.transport.notify(right.agent, b"anybody?")))
        left.poll()
        time.sleep(PAUSE_S)

    _until(lambda: any(lost) or left.downs() > 0, knock, "the peer's end is noticed")
    left.poll()
    assert left.downs() == 1, "exactly one Down tells it"
    assert _lost(lambda: left.transport.notify(right.agent, b"x"))
    assert _lost(lambda: _write(left, right, [0], [0], b"x"))

    def wait() -> None:
        left.poll()
        time.sleep(PAUSE_S)

    _until(lambda: left.transport.fenced(right.agent), wait, "the fence of a closed peer")
    left.transport.remove_peer(right.agent)


def writes_to_a_closed_peer_end_exactly_once(pair: Pair) -> None:
    left, right = pair.connect().left, pair.right
    blocks = list(range(left.pool.blocks))
    handles = [_write(left, right, blocks, blocks, b"%d" % i) for i in range(4)]
    right.close()

    def post() -> None:
        left.poll()
        if not left.downs() and len(handles) < 1000:
            _lost(lambda: handles.append(_write(left, right, blocks, blocks, b"late")))
        time.sleep(PAUSE_S)

    done = lambda: left.downs() > 0 and set(left.wrote()) >= set(handles)  # noqa: E731
    _until(done, post, "every write to a closed peer ends")
    for _ in range(50):
        left.poll()
    assert set(left.wrote()) == set(handles)
    assert all(len(ends) == 1 for ends in left.wrote().values()), "a write ended twice"


CHECKS: tuple[Callable[[Pair], None], ...] = (
    blocks_arrive_exactly_at_their_targets,
    a_note_comes_once_and_after_its_data,
    both_directions_carry_data_at_once,
    every_write_ends_exactly_once,
    notes_go_both_ways_and_none_is_lost,
    adding_a_peer_again_changes_nothing,
    an_unknown_peer_is_lost,
    a_removed_peer_is_lost,
    a_removed_peer_may_come_back,
    a_closed_peer_is_noticed_and_fenced,
    writes_to_a_closed_peer_end_exactly_once,
)
