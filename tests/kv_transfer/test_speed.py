"""The speed of transports: what is measured is there, and is right in kind, not in size."""

import os

import pytest
from diptych.kv_transfer import speed, ticket_speed

from .support import needs_nixl

LINUX = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory files are Linux's")


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


def test_memcpy_and_checksum_are_measured():
    assert speed.memcpy(1 << 20) > 0
    if hasattr(os, "memfd_create"):
        assert speed.memcpy(1 << 20, shared=True) > speed.first_copy(1 << 20) > 0
    assert speed.checksum(1 << 20) > 0


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
