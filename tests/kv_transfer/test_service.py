"""Two transfer services in one process, over real transports."""

import itertools
import threading

import pytest
from diptych.kv_transfer import tickets as t
from diptych.kv_transfer.errors import PeerLost
from diptych.kv_transfer.service import AddPeer, LosePeer
from diptych.kv_transfer.transport import Down

from .support import Worker, eventually, needs_nixl

X = "request#0"
_names = itertools.count()


@pytest.fixture(params=["tcp", pytest.param("nixl", marks=needs_nixl)])
def open_pair(request):
    """Opens a prefill and a decode worker that know each other."""
    opened = []

    def make(connect=True, **decode):
        number = next(_names)
        faults = {name: decode.pop(name) for name in ("corrupt", "wrap") if name in decode}
        prefill = Worker(request.param, f"prefill#{number}", 1, **faults)
        opened.append(prefill)
        opened.append(Worker(request.param, f"decode#{number}", 2, **decode))
        if connect:
            meet(*opened[-2:])
        return opened[-2:]

    yield make
    for worker in opened:
        worker.service.stop()


def meet(one, other):
    one.submit(AddPeer(other.card))
    other.submit(AddPeer(one.card))


def ship(prefill, decode, xid=X, source=(1, 2, 3), target=(4, 9, 5)):
    """All commands of a ticket whose blocks are pushed in two chunks."""
    source, target = list(source), list(target)
    decode.submit(t.Open(xid, prefill.agent, target))
    prefill.submit(t.Expect(xid, decode.agent), t.Push(xid, 0, source[:1]))
    prefill.submit(t.Push(xid, 1, source[1:]), t.Finish(xid, b"first token"))


def test_a_ticket_lands_with_the_bytes_of_its_source_and_is_counted(open_pair):
    prefill, decode = open_pair()
    untouched = decode.blocks([0, 1, 2, 3])
    ship(prefill, decode)
    assert decode.next() == t.Landed(X, b"first token")
    assert prefill.next() == t.Closed(X, True)
    assert decode.blocks([4, 9, 5]) == prefill.blocks([1, 2, 3])
    assert decode.blocks([0, 1, 2, 3]) == untouched
    sent, received = prefill.service.statistics(), decode.service.statistics()
    assert sent["bytes_sent"] == received["bytes_received"] == 3 * 4096
    assert sent["transfers"] == received["transfers"] == 1
    assert sent["sessions"] == received["sessions"] == 1
    assert sent["failures"] == received["failures"] == {}
    assert sent["tickets"] == received["tickets"] == {}


def test_many_tickets_at_once_all_land(open_pair):
    prefill, decode = open_pair()
    wanted = {f"r{i}#0": (i, 15 - i) for i in range(1, 15)}
    for xid, (source, target) in wanted.items():
        decode.submit(t.Open(xid, prefill.agent, [target]))
        prefill.submit(t.Expect(xid, decode.agent), t.Push(xid, 0, [source]), t.Finish(xid, b""))
    assert {decode.next() for _ in wanted} == {t.Landed(xid, b"") for xid in wanted}
    for source, target in wanted.values():
        assert decode.pool.block(target) == prefill.pool.block(source)


def test_a_spoiled_block_breaks_the_ticket_and_never_lands(open_pair):
    prefill, decode = open_pair(corrupt=1)
    ship(prefill, decode)
    assert decode.next() == t.Broken(X, "checksum")
    assert decode.next() == t.Freed(X)
    assert isinstance(prefill.next(), t.Closed)
    assert decode.service.statistics()["failures"] == {"checksum": 1}
    ship(prefill, decode, "request#1")
    assert decode.next() == t.Landed("request#1", b"first token")
    assert decode.blocks([4, 9, 5]) == prefill.blocks([1, 2, 3])
    assert decode.outcomes.empty()


def test_a_cancel_at_the_sink_frees_its_blocks_and_closes_the_source(open_pair):
    prefill, decode = open_pair()
    prefill.submit(t.Expect(X, decode.agent), t.Push(X, 0, [1]))
    decode.submit(t.Open(X, prefill.agent, [4, 9]))
    eventually(lambda: decode.service.statistics()["bytes_received"] == 4096, "the first chunk")
    decode.submit(t.Cancel(X, "aborted"))
    assert decode.next() == t.Broken(X, "aborted")
    assert decode.next() == t.Freed(X)
    assert prefill.next() == t.Closed(X, False, "aborted")
    before = decode.pool.block(9)
    prefill.submit(t.Push(X, 1, [2]), t.Finish(X, b""))
    ship(prefill, decode, "request#1", source=(3, 4), target=(6, 7))
    assert decode.next() == t.Landed("request#1", b"first token")
    assert decode.pool.block(9) == before


def test_a_cancel_at_the_source_breaks_and_frees_the_sink(open_pair):
    prefill, decode = open_pair()
    decode.submit(t.Open(X, prefill.agent, [4]))
    prefill.submit(t.Expect(X, decode.agent), t.Cancel(X, "finished"))
    assert [decode.next(), decode.next()] == [t.Broken(X, "finished"), t.Freed(X)]
    assert prefill.next() == t.Closed(X, False, "finished")


def test_an_incompatible_peer_is_refused_and_counted(open_pair):
    prefill, decode = open_pair(compatibility=b"another model")
    for worker in (prefill, decode):
        eventually(
            lambda w=worker: w.service.statistics()["failures"].get("incompatible_peer") == 1,
            "the refusal is counted",
        )
        assert worker.service.statistics()["sessions"] == 0
    before = bytes(decode.pool.view)
    ship(prefill, decode)
    assert [decode.next(), decode.next()] == [t.Broken(X, "peer_lost"), t.Freed(X)]
    assert bytes(decode.pool.view) == before


def test_a_peer_that_nobody_introduced_breaks_the_ticket_at_once(open_pair):
    prefill, decode = open_pair(connect=False)
    decode.submit(t.Open(X, prefill.agent, [4]))
    assert [decode.next(), decode.next()] == [t.Broken(X, "peer_lost"), t.Freed(X)]


def test_a_peer_that_the_cluster_lost_breaks_its_open_tickets(open_pair):
    prefill, decode = open_pair()
    decode.submit(t.Open(X, prefill.agent, [4, 9]))
    prefill.submit(t.Expect(X, decode.agent), t.Push(X, 0, [1]))
    eventually(lambda: decode.service.statistics()["bytes_received"] == 4096, "the first chunk")
    decode.submit(LosePeer(prefill.agent))
    assert [decode.next(), decode.next()] == [t.Broken(X, "peer_lost"), t.Freed(X)]
    prefill.submit(LosePeer(decode.agent))
    closed = prefill.next()
    assert isinstance(closed, t.Closed) and not closed.ok


def test_a_peer_that_stops_breaks_its_open_tickets_and_its_blocks_are_freed(open_pair):
    prefill, decode = open_pair()
    decode.submit(t.Open(X, prefill.agent, [4, 9]))
    prefill.submit(t.Expect(X, decode.agent), t.Push(X, 0, [1]))
    eventually(lambda: decode.service.statistics()["bytes_received"] == 4096, "the first chunk")
    prefill.service.stop()
    assert [decode.next(), decode.next()] == [t.Broken(X, "peer_lost"), t.Freed(X)]
    decode.submit(t.Open("request#1", prefill.agent, [4]))
    assert [decode.next(), decode.next()] == [
        t.Broken("request#1", "peer_lost"),
        t.Freed("request#1"),
    ]


@pytest.mark.parametrize("forgetful", ["both", "decode", "prefill"])
def test_a_peer_that_was_lost_by_mistake_is_reached_again(open_pair, forgetful):
    """A restarted router's first directories name few workers: who is missing is lost, and back."""
    prefill, decode = open_pair()
    ship(prefill, decode)
    assert decode.next() == t.Landed(X, b"first token")
    if forgetful != "prefill":
        decode.submit(LosePeer(prefill.agent), AddPeer(prefill.card))
    if forgetful != "decode":
        prefill.submit(LosePeer(decode.agent), AddPeer(decode.card))
    attempts = (f"request#{number}" for number in itertools.count(1))

    def lands():
        xid = next(attempts)
        ship(prefill, decode, xid)
        outcome = decode.next()
        if isinstance(outcome, t.Landed):
            return True
        assert isinstance(outcome, t.Broken) and decode.next() == t.Freed(xid)
        return False

    lands()  # all commands before it are done
    eventually(lambda: not (prefill.service._dying or decode.service._dying), "the fences pass")
    eventually(lands, "a ticket lands again")


class LosesPeerOnce:
    """Takes the peer of its first write for lost, until that peer is removed and added again."""

    def __init__(self, inner):
        self.inner, self.lost, self.events = inner, None, []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def write(self, peer, *rest):
        if self.lost is None:
            self.lost = peer
            self.events.append(Down(peer))
        return self._on(peer, "write", *rest)

    def notify(self, peer, note):
        self._on(peer, "notify", note)

    def _on(self, peer, call, *rest):
        if peer == self.lost:
            raise PeerLost(peer)
        return getattr(self.inner, call)(peer, *rest)

    def remove_peer(self, peer):
        self.inner.remove_peer(peer)
        self.lost = "" if peer == self.lost else self.lost

    def poll(self):
        events, self.events = self.events + self.inner.poll(), []
        return events


def test_a_sink_that_its_source_lost_hears_so_when_it_asks(open_pair):
    prefill, decode = open_pair(wrap=LosesPeerOnce)
    ship(prefill, decode)
    closed = prefill.next()
    assert isinstance(closed, t.Closed) and not closed.ok
    outcomes = [decode.next(), decode.next()]
    assert isinstance(outcomes[0], t.Broken) and outcomes[1] == t.Freed(X)
    ship(prefill, decode, "request#1")
    assert decode.next() == t.Landed("request#1", b"first token")


def test_a_note_that_nobody_understands_is_counted_and_ignored(open_pair):
    prefill, decode = open_pair()
    ship(prefill, decode)
    decode.next()
    prefill.service._transport.notify(decode.agent, b"\xc1 no message")
    eventually(lambda: decode.service.statistics()["failures"].get("malformed") == 1, "a count")
    assert decode.service.alive


def test_stop_ends_the_thread(open_pair):
    threads = set(threading.enumerate())
    prefill, decode = open_pair()
    started = set(threading.enumerate()) - threads
    for worker in (prefill, decode):
        worker.service.stop()
        assert not worker.service.alive
    assert not any(thread.is_alive() for thread in started)
