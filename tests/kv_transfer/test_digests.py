"""Checksums that a device computes while the transfer service goes on: nobody waits, none is skipped."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from diptych.kv_transfer import commands as c
from diptych.kv_transfer.commands import AddPeer
from diptych.kv_transfer.digests import DigestRequest, HostDigester
from diptych.kv_transfer.slices import LaneEnd
from diptych.kv_transfer.ticket_events import TicketTimeouts
from diptych.kv_transfer.tickets import PushEnded

from .support import BLOCK, Worker, eventually

X = "request#0"
TOKENS = BLOCK.block_tokens


class SlowDigester:
    """A host's checksums that are there when the test says so."""

    def __init__(self) -> None:
        self.host: HostDigester | None = None
        self.started: list[DigestRequest] = []
        self.polls = 0
        self.ready = threading.Event()

    def start(self, request: DigestRequest) -> SlowDigests:
        self.started.append(request)
        return SlowDigests(self, request)


class SlowDigests:
    def __init__(self, owner: SlowDigester, request: DigestRequest) -> None:
        self.owner = owner
        self.request = request

    def poll(self) -> list[int] | None:
        self.owner.polls += 1
        if not self.owner.ready.is_set():
            return None
        assert self.owner.host
        return self.owner.host.start(self.request).poll()


Pair = tuple[Worker, SlowDigester, Worker, SlowDigester]


@pytest.fixture
def pair() -> Iterator[Pair]:
    opened: list[tuple[Worker, SlowDigester]] = []
    for name, seed in (("prefill#d", 1), ("decode#d", 2)):
        digester = SlowDigester()
        timeouts = TicketTimeouts(resend_s=0.02)
        worker = Worker("tcp", name, seed, end=LaneEnd(BLOCK), digester=digester, timeouts=timeouts)
        digester.host = HostDigester(worker.pool.view)
        opened.append((worker, digester))
    (prefill, source), (decode, target) = opened
    prefill.submit(AddPeer(decode.name, [decode.card]))
    decode.submit(AddPeer(prefill.name, [prefill.card]))
    yield prefill, source, decode, target
    for worker, _ in opened:
        worker.service.stop()


def begin(prefill: Worker, decode: Worker, source: list[int], target: list[int]) -> None:
    count = len(source) * TOKENS
    decode.submit(c.OfferBlocks(X, prefill.agent, target, count))
    prefill.submit(c.ExpectOffer(X, decode.agent, count), c.PushBlocks(X, 0, source))


def polled_again(digester: SlowDigester) -> None:
    """The service's loop has gone round: it looks at the checksums, and does not wait for them."""
    before = digester.polls
    eventually(lambda: digester.polls > before + 2, "the service looks at its checksums again")


def test_a_write_goes_out_with_its_checksums_and_lands_when_they_are_verified(pair: Pair) -> None:
    prefill, source, decode, target = pair
    begin(prefill, decode, [1, 2, 3], [4, 9, 5])
    prefill.submit(c.FinishPush(X, b"first token"))
    eventually(lambda: source.started, "the checksums are started")
    polled_again(source)
    assert prefill.service.statistics()["bytes_sent"] == 0, "nothing travels without checksums"
    source.ready.set()
    assert prefill.next() == PushEnded(X, ok=True)
    eventually(lambda: target.started, "the sink verifies")
    polled_again(target)
    assert decode.outcomes.empty(), "blocks that are not verified are nobody's"
    target.ready.set()
    arrived = decode.next()
    assert isinstance(arrived, c.BlocksArrived) and arrived.tokens == 3 * TOKENS
    assert decode.blocks([4, 9, 5]) == prefill.blocks([1, 2, 3])


def test_one_push_is_one_request_whatever_its_length(pair: Pair) -> None:
    prefill, source, decode, target = pair
    source.ready.set()
    target.ready.set()
    begin(prefill, decode, list(range(1, 13)), list(range(3, 15)))
    prefill.submit(c.FinishPush(X, b""))
    assert isinstance(decode.next(), c.BlocksArrived)
    assert [len(request.seeds) for request in source.started] == [12]
    assert [len(request.seeds) for request in target.started] == [12]


def test_blocks_of_a_cancelled_push_stay_until_their_checksums_are_over(pair: Pair) -> None:
    """The device reads them, so another prompt's KV may not be written over them; and no write
    goes out any more."""
    prefill, source, decode, _ = pair
    begin(prefill, decode, [1, 2], [4, 9])
    eventually(lambda: source.started, "the checksums are started")
    prefill.submit(c.CancelTransfer(X, "aborted"))
    polled_again(source)
    assert prefill.outcomes.empty() and decode.outcomes.empty()
    source.ready.set()
    assert prefill.next() == PushEnded(X, ok=False, reason="aborted")
    assert decode.next() == c.TransferFailed(X, "aborted")
    assert decode.next() == c.BlocksFreed(X)
    assert prefill.service.statistics()["bytes_sent"] == 0


def test_blocks_of_a_failed_ticket_are_freed_when_the_device_reads_them_no_more(
    pair: Pair,
) -> None:
    prefill, source, decode, target = pair
    source.ready.set()
    begin(prefill, decode, [1, 2], [4, 9])
    eventually(lambda: target.started, "the sink verifies")
    decode.submit(c.CancelTransfer(X, "aborted"))
    assert decode.next() == c.TransferFailed(X, "aborted")
    assert prefill.next() == PushEnded(X, ok=False, reason="aborted")
    eventually(lambda: not decode.service.statistics()["tickets"], "the sender has stopped")
    polled_again(target)
    assert decode.outcomes.empty(), "the blocks are still read"
    target.ready.set()
    assert decode.next() == c.BlocksFreed(X)
    assert decode.outcomes.empty()


def test_what_the_sink_computes_otherwise_fails_the_ticket(pair: Pair) -> None:
    prefill, source, decode, target = pair
    source.ready.set()
    begin(prefill, decode, [1], [4])
    eventually(lambda: target.started, "the sink verifies")
    decode.pool.view[4 * BLOCK.block_bytes] ^= 1
    target.ready.set()
    assert decode.next() == c.TransferFailed(X, "checksum")
    assert decode.next() == c.BlocksFreed(X)


def test_a_source_that_dies_meanwhile_frees_the_sink_s_blocks_once(pair: Pair) -> None:
    prefill, source, decode, target = pair
    source.ready.set()
    begin(prefill, decode, [1, 2], [4, 9])
    eventually(lambda: target.started, "the sink verifies")
    prefill.service.stop()
    assert decode.next() == c.TransferFailed(X, "peer_lost")
    eventually(lambda: not decode.service.statistics()["tickets"], "the fence passes")
    polled_again(target)
    assert decode.outcomes.empty()
    target.ready.set()
    assert decode.next() == c.BlocksFreed(X)
    assert decode.outcomes.empty()
