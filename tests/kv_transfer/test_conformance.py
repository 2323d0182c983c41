"""Every transport passes the conformance kit; what TCP and the faulty transport promise besides."""

import socket
import struct

import pytest
from diptych.kv_transfer.conformance import CHECKS, DEADLINE_S, Pair, run
from diptych.kv_transfer.transports import open_transport

from .support import needs_nixl

KINDS = [
    pytest.param(("tcp", 0), id="tcp"),
    pytest.param(("nixl", 0), id="nixl", marks=needs_nixl),
    pytest.param(("tcp", -1), id="faulty-but-not-now"),
]


def opener(kind):
    name, corrupt = kind
    return lambda agent, pool, admit: open_transport(name, agent, pool, admit, "127.0.0.1", corrupt)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_transport(check, kind):
    run(check, opener(kind))


@pytest.fixture
def pair():
    opened = []

    def make(kind=("tcp", 0), admit=lambda *_: True):
        opened.append(Pair(opener(kind), admit))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def test_tcp_drops_the_data_of_a_refused_write_and_delivers_its_note(pair):
    asked = []

    def refuse(peer, note):
        asked.append((peer, note))
        return note != b"late"

    both = pair(admit=refuse).connect()
    before = bytes(both.right.pool.view)
    both.left.transport.write(both.right.agent, [1, 2, 3], [4, 5, 6], b"late")
    both.until(lambda: bool(both.right.notes() and both.left.wrote()), "the refused write")
    assert (both.left.agent, b"late") in asked
    assert both.right.notes() == [b"late"]
    assert bytes(both.right.pool.view) == before
    both.left.transport.write(both.right.agent, [1], [4], b"in time")
    both.until(lambda: b"in time" in both.right.notes(), "the write after it")
    assert both.right.pool.block(4) == both.left.pool.block(1)


def test_tcp_drops_blocks_outside_of_the_pool(pair):
    both = pair().connect()
    before = bytes(both.right.pool.view)
    both.left.transport.write(both.right.agent, [1], [both.right.pool.blocks], b"outside")
    both.until(lambda: bool(both.right.notes()), "the note")
    assert bytes(both.right.pool.view) == before


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: example\r\n\r\n",
    "a name that is no text": struct.pack("<BII", 0, 4, 0) + b"\xff\xfe\xfd\xfc",
    "a write of nobody": struct.pack("<BII", 2, 1, 1) + b"x" * 100,
    "a note that is too long": struct.pack("<BII", 0, 1 << 31, 0),
    "zeros": bytes(4096),
    "half a header": b"\0",
    "an unknown kind": struct.pack("<BII", 0, 5, 0)
    + b"guest"
    + struct.pack("<BII", 9, 1, 0)
    + b"?",
    "nothing": b"",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=list(GARBAGE))
def test_tcp_survives_a_stranger_that_talks_garbage(pair, garbage):
    both = pair().connect()
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
    both.left.transport.write(both.right.agent, [1], [2], b"still here")
    both.until(lambda: b"still here" in both.right.notes(), "a write after the garbage")
    assert both.right.pool.block(2) == both.left.pool.block(1)


@pytest.mark.parametrize("name", [pytest.param("tcp"), pytest.param("nixl", marks=needs_nixl)])
def test_faulty_spoils_the_first_block_of_the_first_write_and_nothing_else(pair, name):
    both = pair((name, 1)).connect()
    left, right = both.left, both.right
    left.pool.fill(0, bytes(left.pool.block_bytes))
    mine = bytes(left.pool.view)
    left.transport.write(right.agent, [1, 2], [11, 12], b"first")
    left.transport.write(right.agent, [3, 4], [13, 14], b"second")
    both.until(lambda: len(right.notes()) == 2 == len(left.wrote()), "two writes")
    assert right.pool.block(11) == bytes(left.pool.block_bytes)
    assert [right.pool.block(i) for i in (12, 13, 14)] == [left.pool.block(i) for i in (2, 3, 4)]
    assert bytes(left.pool.view) == mine
