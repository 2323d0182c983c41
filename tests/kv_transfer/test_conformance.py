"""Every transport passes the conformance kit, and the faulty one is faulty as promised."""

import time

import pytest
from diptych.kv_transfer.transports import open_transport

from ..kit.conformance import CHECKS, TransportPair, run, write
from ..kit.fabric import Fabric, FabricLink, FenceKind
from .support import SECRET, needs_nixl

KINDS = [
    pytest.param(("tcp", 0), id="tcp"),
    pytest.param(("nixl", 0), id="nixl", marks=needs_nixl),
    pytest.param(("shm", 0), id="shm"),
    pytest.param(FenceKind.GRACE, id="fabric-grace"),
    pytest.param(FenceKind.GONE, id="fabric-gone"),
    pytest.param(FenceKind.REFUSE, id="fabric-refuse"),
    pytest.param(("tcp", -1), id="faulty-but-not-now"),
]

WELL_BEHAVED = FabricLink(delay_s=1e-5, bytes_s=8 << 30)


def opener(kind):
    if isinstance(kind, FenceKind):
        return Fabric(time.monotonic, 0, WELL_BEHAVED, kind, grace_s=0.2).open
    name, corrupt = kind

    def open_named(agent, pool, admit):
        return open_transport(name, agent, pool, admit, "127.0.0.1", corrupt, secret=SECRET)

    return open_named


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_transport(check, kind):
    run(check, opener(kind))


@pytest.fixture
def pair():
    opened = []

    def make(kind):
        opened.append(TransportPair(opener(kind)))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.mark.parametrize("name", [pytest.param("tcp"), pytest.param("nixl", marks=needs_nixl)])
def test_faulty_spoils_the_first_unit_of_the_first_write_and_nothing_else(pair, name):
    both = pair((name, 1)).connect()
    left, right = both.left, both.right
    left.pool.fill(0, left.pool.block(1))  # it must not be taken for another one
    mine = bytes(left.pool.view)
    write(left, right, [1, 2], [11, 12], b"first")
    write(left, right, [3, 4], [13, 14], b"second")
    both.until(lambda: len(right.notes()) == 2 == len(left.wrote()), "two writes")
    assert right.pool.block(11) != left.pool.block(1)
    assert [right.pool.block(i) for i in (12, 13, 14)] == [left.pool.block(i) for i in (2, 3, 4)]
    assert bytes(left.pool.view) == mine


@needs_nixl
def test_nixl_sends_the_notes_of_a_burst_while_the_burst_goes_on(pair):
    """NIXL sends the note of a write only when it is asked about that write."""
    both = pair(("nixl", 0)).connect()
    left, right = both.left, both.right
    for index in range(20):
        write(left, right, [index], [index], b"%d" % index)
        for _ in range(200):
            right.poll()
    assert len(right.notes()) >= 10, "the notes wait for the writer's next poll"
    both.until(lambda: len(right.notes()) == 20 == len(left.wrote()), "every note and end")
