"""What TCP promises besides the conformance kit: late bytes, strangers, dials, bounds."""

import contextlib
import socket
from collections import deque

import msgspec
import pytest
from diptych.kv_transfer.errors import PeerLost
from diptych.kv_transfer.transport import PeerDisconnected, PostedWriteEnded, card_of
from diptych.kv_transfer.transports import stream, tcp
from diptych.kv_transfer.transports.tcp import TcpTransport

from ..kit.conformance import DEADLINE_S, MemoryPool, TransportPair, spans, write
from .support import eventually


@pytest.fixture
def both():
    pair = TransportPair(TcpTransport)
    yield pair.connect()
    pair.close()


def test_a_write_that_is_refused_half_way_stops_there(both, monkeypatch):
    """One look at the socket takes some of it; then the ticket is closed."""
    monkeypatch.setattr(stream, "SYSTEM_CALL_LIMIT", 3)
    monkeypatch.setattr(tcp, "READ_BUFFER_LIMIT", 2)
    left, right = both.left, both.right
    before, blocks = bytes(right.pool.view), list(range(0, right.pool.blocks, 2))
    write(left, right, blocks, blocks, b"big")
    landed = lambda: sum(right.pool.block(b) == left.pool.block(b) for b in blocks)  # noqa: E731
    both.until(lambda: landed() > 0, "the first blocks")
    both.refused.add(b"big")
    seen, whole = bytes(right.pool.view), landed()
    assert 0 < whole < len(blocks), "the write was there at once: nothing to refuse"
    both.until(lambda: bool(right.notes() and left.wrote()), "the rest of the write")
    assert bytes(right.pool.view) == seen != before
    both.refused.clear()
    write(left, right, blocks, blocks, b"again")
    both.until(lambda: b"again" in right.notes(), "a write after it")
    assert landed() == len(blocks)


@pytest.mark.parametrize("unit", [-1, 32, 1 << 20])
def test_units_outside_of_the_pool_are_dropped(both, unit):
    before = bytes(both.right.pool.view)
    outside = spans(both.left.pool.block_bytes, [1], [unit])
    both.left.transport.write(both.right.agent, outside, b"outside")
    both.until(lambda: bool(both.right.notes()), "the note")
    assert bytes(both.right.pool.view) == before


def frame(kind, note=b"", note_bytes=None, unit=0, runs=0, rest=b""):
    size = len(note) if note_bytes is None else note_bytes
    return stream.HEADER.pack(kind, size, unit, runs) + note + rest


GUEST = frame(stream.FrameKind.NAME, b"guest")
GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: example\r\n\r\n",
    "a name that is no text": frame(stream.FrameKind.NAME, b"\xff\xfe\xfd\xfc"),
    "a write of nobody": frame(stream.FrameKind.WRITE, b"x", unit=64, runs=1, rest=b"x" * 100),
    "a note that is too long": frame(stream.FrameKind.NAME, note_bytes=1 << 31),
    "zeros": bytes(4096),
    "half a header": b"\0",
    "an unknown kind": GUEST + frame(9, b"?"),
    "too many runs": GUEST + frame(stream.FrameKind.WRITE, b"?", unit=64, runs=1 << 31),
    "a run of nothing": GUEST + frame(stream.FrameKind.WRITE, b"?", unit=64, runs=1, rest=bytes(8)),
    "units of nothing": GUEST + frame(stream.FrameKind.WRITE, b"?", runs=1, rest=b"\1\0\0\0" * 2),
    "a note with runs": GUEST + frame(stream.FrameKind.NOTIFICATION, b"?", runs=1),
    "nothing": b"",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=list(GARBAGE))
def test_a_stranger_that_talks_garbage_changes_nothing(both, garbage):
    before = bytes(both.right.pool.view)
    host, port = both.right.transport.address().decode().rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as stranger:
        stranger.sendall(garbage)
        for _ in range(20):
            both.poll()
    for _ in range(20):
        both.poll()
    assert bytes(both.right.pool.view) == before
    assert both.right.notes() == []
    write(both.left, both.right, [1], [2], b"still here")
    both.until(lambda: b"still here" in both.right.notes(), "a write after the garbage")
    assert both.right.pool.block(2) == both.left.pool.block(1)


@pytest.fixture
def deaf():
    """A host that does not take calls: its backlog is full, what dials in gets no answer."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    callers = []
    for _ in range(4):
        callers.append(socket.socket())
        callers[-1].setblocking(False)
        callers[-1].connect_ex(listener.getsockname())
    yield listener
    for each in (listener, *callers):
        each.close()


def test_a_dial_without_an_answer_waits_for_its_deadline_and_ends_its_writes(deaf, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stream.time, "monotonic", lambda: now[0])
    pool = MemoryPool()
    transport = TcpTransport("near#0", pool, lambda *_: True)
    host, port = deaf.getsockname()
    card = card_of("far#0", transport, pool)
    transport.add_peer(msgspec.structs.replace(card, address=f"{host}:{port}".encode()))
    transport.notify("far#0", b"hello")
    handle = transport.write("far#0", spans(64, [0], [0]), b"data")
    now[0] += stream.DIAL_TIMEOUT_S * 0.99
    assert transport.poll() == []
    now[0] += stream.DIAL_TIMEOUT_S * 0.02
    assert transport.poll() == [
        PostedWriteEnded(handle, False, "unreachable"),
        PeerDisconnected("far#0"),
    ]
    with pytest.raises(PeerLost):
        transport.notify("far#0", b"hello?")
    transport.close()


@pytest.mark.parametrize("address", [b"127.0.0.1:1", b"no port", b"", b"999.1.1.1:70000"])
def test_a_peer_that_cannot_be_dialled_is_lost(both, address):
    left = both.left
    card = msgspec.structs.replace(both.right.card(), agent="nowhere#0", address=address)
    left.transport.add_peer(card)

    def knock():
        left.poll()
        with contextlib.suppress(PeerLost):
            left.transport.notify("nowhere#0", b"x")

    eventually(lambda: knock() or left.downs() == 1, "the dial fails")
    with pytest.raises(PeerLost):
        left.transport.notify("nowhere#0", b"x")


def test_what_waits_for_a_peer_is_bounded(both, monkeypatch):
    """The peer never polls: once the socket is full, notes wait here up to the bound."""
    monkeypatch.setattr(stream, "WAITING_BYTES_LIMIT", 1 << 20)
    left, note = both.left, bytes(64 << 10)
    handle = write(left, both.right, [0], [0], b"before")
    sends = (left.transport.notify(both.right.agent, note) for _ in range(2000))
    with pytest.raises(PeerLost, match="does not read"):
        deque(sends, maxlen=0)
    left.poll()
    assert left.downs() == 1
    assert left.wrote()[handle] in ([True], [False])


def test_what_has_been_sent_waits_no_longer(both, monkeypatch):
    """A peer that reads may be sent any amount, bit by bit."""
    monkeypatch.setattr(stream, "WAITING_BYTES_LIMIT", 1 << 20)
    left, note = both.left, bytes(512 << 10)
    for count in range(1, 9):
        left.transport.notify(both.right.agent, note)
        both.until(lambda c=count: len(both.right.notes()) == c, "a note")
