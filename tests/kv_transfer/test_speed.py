"""The speed of transports: what is measured is there, and is right in kind, not in size."""

import multiprocessing
import os
import threading

import pytest
from diptych.kv_transfer import speed, ticket_speed
from diptych.kv_transfer.transport import NotificationReceived, PeerCard, PostedWriteEnded

from .support import needs_nixl

LINUX = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory files are Linux's")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["tcp", pytest.param("shm", marks=LINUX), pytest.param("nixl", marks=needs_nixl)]
)
def test_every_size_of_run_gets_a_row(name):
    rows = speed.measure(name, 1 << 20, (4096, 65536))
    ops = ("write", "read") if name == "nixl" else ("write",)
    assert [(row.transport, row.op, row.run_bytes) for row in rows] == [
        (name, op, run) for op in ops for run in (4096, 65536)
    ]
    assert all(row.gib_s > 0 and row.of_memcpy > 0 for row in rows)


class SlowFarEnd:
    """A transport whose writes end at once, while their bytes take three polls to arrive."""

    name = "tcp"

    def __init__(self):
        self.polls_until_arrival = 0
        self.writes = 0
        self.note = b""
        self.events = []

    def write(self, peer, spans, note):
        assert self.polls_until_arrival == 0, "the bytes before are still under way"
        self.polls_until_arrival = 3
        self.note = note
        self.writes += 1
        self.events = [PostedWriteEnded(self.writes, ok=True)]
        return self.writes

    def poll(self):
        events, self.events = self.events, []
        self.polls_until_arrival -= 1
        if self.polls_until_arrival == 0:
            events.append(NotificationReceived("far", self.note))
        return events


def test_a_write_of_tcp_takes_until_its_bytes_have_arrived(monkeypatch):
    monkeypatch.setattr(speed, "ROUNDS", 2)
    transport = SlowFarEnd()
    far = PeerCard("far", "tcp", b"", b"", 0, 1 << 16, speed.SpeedPool.layout)
    speed._measure_row("write", transport.write, transport, far, run_bytes=4096)
    assert transport.writes == 2 * speed.PARTS


@pytest.mark.parametrize("when", ["before it is told", "after it is told"])
def test_a_far_process_that_cannot_open_its_transport_is_reported(when):
    near, far = multiprocessing.Pipe()
    if when == "before it is told":
        far.close()
    else:
        threading.Timer(0.1, lambda: (far.recv(), far.close())).start()
    with pytest.raises(TimeoutError, match="did not open"):
        speed._exchange_cards(near, "a card")
    near.close()


def test_a_receiver_that_ends_before_it_is_told_of_the_sender_is_reported(monkeypatch):
    receiver = object.__new__(ticket_speed.ReceiverProcess)
    receiver._pipe, far = multiprocessing.Pipe()
    far.close()
    with pytest.raises(TimeoutError, match="has ended"):
        receiver.connect("the sender")
    with pytest.raises(TimeoutError, match="has ended"):
        receiver.ask("an exchange")
    with pytest.raises(TimeoutError, match="has ended"):
        receiver.received()
    receiver._pipe.close()


def test_memcpy_and_checksum_are_measured():
    assert speed.memcpy(1 << 20) > 0
    if hasattr(os, "memfd_create"):
        assert speed.memcpy(1 << 20, shared=True) > speed.first_copy(1 << 20) > 0
    assert speed.checksum(1 << 20) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["tcp", pytest.param("shm", marks=LINUX), pytest.param("nixl", marks=needs_nixl)]
)
def test_tickets_between_two_processes_get_a_row_beside_raw_nixl(name):
    row = ticket_speed.measure_tickets(name, tokens=128, rounds=2)
    assert row.transport == name
    figures = [row.ticket]
    for raw in (row.raw, row.raw_pieces):
        assert (raw is None) == (row.raw is None)
        if raw is not None:
            assert raw.rate_ratio > 0 and raw.cpu_ratio > 0
            figures.append(raw.figures)
    assert all(each.gib_s > 0 and each.sender_cpu_ms > 0 for each in figures)
    assert all(each.receiver_cpu_ms > 0 for each in figures)


@needs_nixl
def test_a_raw_write_that_does_not_end_is_reported(monkeypatch):
    monkeypatch.setattr(ticket_speed, "DEADLINE_S", 0.01)
    raw = ticket_speed.RawNixl("raw-stuck", ticket_speed.LAYOUT.block_bytes)
    monkeypatch.setattr(raw, "_is_done", lambda transfer: False)
    with pytest.raises(TimeoutError, match="does not end"):
        raw._drain(["a write"])


def test_a_receiver_that_cannot_open_its_transport_is_reported():
    with pytest.raises(TimeoutError, match="did not open"):
        ticket_speed.ReceiverProcess(
            "tcp",
            layout=ticket_speed.LAYOUT,
            tokens=-64,  # no pool has so many bytes
            with_raw=False,
            before_others=False,
        )
