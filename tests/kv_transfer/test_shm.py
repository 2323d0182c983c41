"""What shared memory promises besides the conformance kit: the gate, and whom it lets in."""

import errno
import fcntl
import mmap
import os
import socket
import tempfile

import pytest
from diptych.kv_transfer.errors import TransportUnavailable
from diptych.kv_transfer.speed import SpeedPool
from diptych.kv_transfer.tiers.memory import MemoryStore
from diptych.kv_transfer.transports import open_transport, shm
from diptych.kv_transfer.transports.stream import KIND, EndOfWrite, OutgoingConnection
from diptych.protos.handshake import DiallerHandshake, PeerIdentity, with_length

from ..kit.conformance import MemoryPool, TransportPair, spans, write
from .support import SECRET

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory files are Linux's")


@pytest.fixture
def both():
    pair = TransportPair(lambda agent, pool, admit: shm.ShmTransport(agent, pool, secret=SECRET))
    yield pair.connect()
    pair.close()


def mapped(both):
    """The writer's end of the gate, as it is in the middle of a copy or not."""
    return both.left.transport._maps[both.right.agent]


def test_a_writer_in_a_copy_is_not_fenced_until_the_copy_ends(both):
    left, right = both.left, both.right
    gate = mapped(both)
    gate._renew_hold()  # it is frozen here: it holds the gate
    assert not right.transport.fenced(left.agent)
    assert not right.transport.fenced(left.agent)
    fcntl.flock(gate._gate, fcntl.LOCK_UN)
    assert right.transport.fenced(left.agent)


def test_a_fenced_writer_that_wakes_up_writes_nothing(both):
    left, right = both.left, both.right
    assert right.transport.fenced(left.agent)
    before = bytes(right.pool.view)
    handle = write(left, right, [1, 2], [3, 4], b"late")  # it has not heard of anything yet
    both.until(lambda: left.wrote() == {handle: [False]}, "the end of the late write")
    assert left.downs() == 1
    assert bytes(right.pool.view) == before
    assert right.notes() == []


def test_a_copy_looks_at_the_gate_all_the_way(both, monkeypatch):
    """Fenced in the middle of a long copy: it stops at the next look, with the rest unwritten."""
    monkeypatch.setattr(shm, "HOLD_BYTES", 4096)
    left, right = both.left, both.right
    gate, looks = mapped(both), []
    real = gate._renew_hold

    def look():
        looks.append(1)
        if len(looks) == 3:
            fcntl.flock(gate._gate, fcntl.LOCK_UN)
            assert right.transport.fenced(left.agent)
        real()

    monkeypatch.setattr(gate, "_renew_hold", look)
    write(left, right, [0, 1, 2, 3], [8, 9, 10, 11], b"long")
    parts = range(0, 4 * 16384, 4096)
    mine, there = bytes(left.pool.view), bytes(right.pool.view)[8 * 16384 :]
    landed = [at for at in parts if mine[at : at + 4096] == there[at : at + 4096]]
    assert landed == [0, 4096]
    both.until(lambda: left.downs() == 1, "the writer hears of it")


@pytest.mark.parametrize(("source", "target"), [(0, 32), (32, 0), (0, -1), (-1, 0)])
def test_units_outside_of_a_pool_are_not_touched(both, source, target):
    left, right = both.left, both.right
    before = bytes(right.pool.view)
    outside = spans(left.pool.block_bytes, [source], [target])
    handle = left.transport.write(right.agent, outside, b"outside")
    both.until(lambda: left.wrote() == {handle: [False]}, "the end of the write")
    assert bytes(right.pool.view) == before


def test_a_pool_without_a_file_is_refused():
    pool = MemoryPool()
    kept, pool.fd = pool.fd, None
    with pytest.raises(TransportUnavailable):
        open_transport("shm", "near#0", pool, lambda *_: True, "127.0.0.1", secret=SECRET)
    pool.fd = kept


def test_nothing_is_left_open(both):
    """A hundred times away and back: as many files are open as before."""
    left, right = both.left, both.right
    cards = left.card(), right.card()

    def around():
        left.transport.remove_peer(right.agent)
        right.transport.remove_peer(left.agent)
        left.transport.add_peer(cards[1])
        right.transport.add_peer(cards[0])
        both.connect()

    around()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        around()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_caller_that_the_pool_does_not_reach_leaves_no_gate_open(both, monkeypatch):
    left, right = both.left, both.right
    cards = left.card(), right.card()
    left.transport.remove_peer(right.agent)
    right.transport.remove_peer(left.agent)
    left.transport.add_peer(cards[1])
    right.transport.add_peer(cards[0])
    files = len(os.listdir("/proc/self/fd"))

    def send_nothing(*_: object) -> int:
        raise OSError(errno.EPIPE, "the caller has left")

    monkeypatch.setattr(shm.socket, "send_fds", send_nothing)
    write(left, right, [1], [2], b"unsent")
    both.until(lambda: left.downs() == 1, "the writer hears of it")
    assert right.transport._gates == {}
    assert len(os.listdir("/proc/self/fd")) <= files


def test_an_owner_that_leaves_with_unread_notes_is_a_lost_peer():
    """It never dialled back: the news comes by the one connection that there is."""
    pair = TransportPair(lambda agent, pool, admit: shm.ShmTransport(agent, pool, secret=SECRET))
    left, right = pair.left, pair.right
    left.transport.add_peer(right.card())
    left.transport.notify(right.agent, b"read")
    pair.until(lambda: bool(right.notes()), "the first note")
    left.transport.notify(right.agent, b"unread")
    right.close()
    pair.until(lambda: left.downs() == 1, "the peer's end")
    pair.close()


class MapWithoutHugePages(mmap.mmap):
    """A mapping of a kernel that has no huge pages."""

    def madvise(self, *_):
        raise OSError(errno.EINVAL, "Invalid argument")


@pytest.mark.parametrize(
    "reserve",
    [
        lambda: TransportPair(
            lambda agent, pool, admit: shm.ShmTransport(agent, pool, secret=SECRET)
        ).connect(),
        lambda: MemoryStore(slots=2, block_bytes=4096),
        lambda: SpeedPool(1 << 16, shared=False),
        lambda: SpeedPool(1 << 16, shared=True),
    ],
    ids=["a peer's pool", "the memory tier", "a private pool", "a shared pool"],
)
def test_a_kernel_without_huge_pages_is_enough(monkeypatch, reserve):
    monkeypatch.setattr(mmap, "mmap", MapWithoutHugePages)
    reserved = reserve()
    if isinstance(reserved, TransportPair):
        reserved.close()


def test_a_peer_whose_file_is_smaller_than_its_pool_is_lost(both):
    """The mapping fails; no file stays open, and the thread goes on."""
    left, right = both.left, both.right
    card = right.card()
    left.transport.remove_peer(right.agent)
    left.transport.add_peer(card)
    files = len(os.listdir("/proc/self/fd"))
    with tempfile.TemporaryFile() as small:
        right.transport._pool_file = small.fileno()
        handle = write(left, right, [1], [2], b"unsent")
        both.until(lambda: left.downs() == 1, "the writer notices")
        right.transport._pool_file = right.pool.fd
    both.until(lambda: right.downs() >= 1, "the owner notices")
    assert left.wrote()[handle] == [False]
    assert len(os.listdir("/proc/self/fd")) <= files


def test_the_files_of_a_peer_are_not_inherited(both):
    assert not os.get_inheritable(mapped(both)._gate)


def test_a_stranger_that_says_a_deep_hello_changes_nothing(both):
    """More arrays in each other than a decoder goes into: it raises RecursionError."""
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(b"\0" + both.right.transport.address())
        stranger.sendall(with_length(b"\x81\xa1x" + b"\x91" * 3500 + b"\xc0"))
        for _ in range(20):
            both.poll()
    assert not both.right.transport._unproved
    write(both.left, both.right, [1], [2], b"still here")
    both.until(lambda: b"still here" in both.right.notes(), "a write after the stranger")


class RecordingSocket:
    """Takes every byte, and notes that it did."""

    def __init__(self, log):
        self.log = log

    def sendmsg(self, buffers):
        self.log.append("sent")
        return sum(map(len, buffers))


def test_a_peer_hears_of_each_write_before_the_next_one_is_copied():
    """Otherwise it would begin to verify a burst of writes when the last one is copied."""
    log = []

    def frame(number):
        log.append(f"copied {number}")
        yield EndOfWrite(number)
        yield memoryview(b"note")

    handshake = DiallerHandshake(PeerIdentity("near", KIND, SECRET))
    connection = OutgoingConnection("peer", RecordingSocket(log), handshake)
    connection.connected = True
    connection.proved = True
    connection.frames_paused = False
    for number in (1, 2, 3):
        connection.put(4, frame(number))
    assert connection.flush() == [1, 2, 3]
    assert log == ["copied 1", "sent", "copied 2", "sent", "copied 3", "sent"]
    assert connection.idle
