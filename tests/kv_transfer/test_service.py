"""Two transfer services in one process, over real transports."""

import itertools
import threading

import pytest
from diptych.kv_transfer import KVLayout, service
from diptych.kv_transfer import commands as c
from diptych.kv_transfer import tickets as t
from diptych.kv_transfer.commands import AddPeer, LosePeer
from diptych.kv_transfer.errors import PeerLost
from diptych.kv_transfer.fan import Fan, RankCommand
from diptych.kv_transfer.slices import LaneEnd
from diptych.kv_transfer.transport import PeerDisconnected

from .support import Worker, eventually, needs_nixl

X = "request#0"
_names = itertools.count()


KINDS = ["tcp", "shm", pytest.param("nixl", marks=needs_nixl)]


@pytest.fixture(params=KINDS)
def open_pair(request):
    """Opens a prefill and a decode worker that know each other."""
    opened = []

    def make(connect=True, source=None, **decode):
        number = next(_names)
        faults = {name: decode.pop(name) for name in ("corrupt", "wrap") if name in decode}
        prefill = Worker(request.param, f"prefill#{number}", 1, **faults, **(source or {}))
        opened.append(prefill)
        opened.append(Worker(request.param, f"decode#{number}", 2, **decode))
        if connect:
            meet(*opened[-2:])
        return opened[-2:]

    yield make
    for worker in opened:
        worker.service.stop()


def meet(one, other):
    one.submit(AddPeer(other.name, [other.card]))
    other.submit(AddPeer(one.name, [one.card]))


def receive(prefill, blocks, ticket_id=X, **more):
    return c.OfferBlocks(ticket_id, prefill.agent, list(blocks), 64 * len(blocks), **more)


def expect(decode, blocks, ticket_id=X):
    return c.ExpectOffer(ticket_id, decode.agent, 64 * blocks)


def landed(ticket_id, tokens=192, meta=b"first token"):
    """An `Arrived`, whatever its times."""
    return ticket_id, meta, tokens


def arrived(outcome):
    assert isinstance(outcome, c.BlocksArrived), outcome
    assert outcome.busy_s >= 0 and outcome.exposed_s >= 0
    return outcome.ticket_id, outcome.meta, outcome.tokens


def ship(prefill, decode, ticket_id=X, source=(1, 2, 3), target=(4, 9, 5)):
    """All commands of a ticket whose blocks are pushed in two chunks."""
    source, target = list(source), list(target)
    decode.submit(receive(prefill, target, ticket_id))
    prefill.submit(expect(decode, len(source), ticket_id), c.PushBlocks(ticket_id, 0, source[:1]))
    prefill.submit(c.PushBlocks(ticket_id, 1, source[1:]), c.FinishPush(ticket_id, b"first token"))


def test_a_ticket_lands_with_the_bytes_of_its_source_and_is_counted(open_pair):
    prefill, decode = open_pair()
    untouched = decode.blocks([0, 1, 2, 3])
    ship(prefill, decode)
    assert arrived(decode.next()) == landed(X)
    assert prefill.next() == t.PushEnded(X, True)
    assert decode.blocks([4, 9, 5]) == prefill.blocks([1, 2, 3])
    assert decode.blocks([0, 1, 2, 3]) == untouched
    sent, received = prefill.service.statistics(), decode.service.statistics()
    assert sent["bytes_sent"] == received["bytes_received"] == 3 * 4096
    assert sent["transfers"] == received["transfers"] == 1
    assert sent["sessions"] == received["sessions"] == 1
    assert sent["failures"] == received["failures"] == {}
    assert sent["failed_lanes"] == received["failed_lanes"] == {}
    assert sent["tickets"] == received["tickets"] == {}


def test_quarantined_blocks_are_those_of_the_pool_each_once(open_pair):
    """A lane's tiles may be parts of a block, and lanes from several ranks share the blocks."""
    two_tiles = KVLayout(1, 1, 32, 128, 1, "uint8", 1)
    prefill, decode = open_pair(end=LaneEnd(two_tiles))
    for ticket_id, blocks in ((X, [4, 9]), ("request#1", [9, 5])):
        decode.submit(c.OfferBlocks(ticket_id, prefill.agent, blocks, 256))
    received = decode.service._receiver.tickets
    eventually(lambda: len(received) == 2, "both are offered")
    assert decode.service.statistics()["quarantined"] == 0
    for ticket in received.values():
        ticket.state = t.ReceivingState.QUARANTINED
        assert len(ticket.offer.tiles) == 4
    assert decode.service.statistics()["quarantined"] == 3


def test_many_tickets_at_once_all_land(open_pair):
    prefill, decode = open_pair()
    wanted = {f"r{i}#0": (i, 15 - i) for i in range(1, 15)}
    for ticket_id, (source, target) in wanted.items():
        decode.submit(receive(prefill, [target], ticket_id))
        prefill.submit(
            expect(decode, 1, ticket_id),
            c.PushBlocks(ticket_id, 0, [source]),
            c.FinishPush(ticket_id, b""),
        )
    assert {arrived(decode.next()) for _ in wanted} == {landed(x, 64, b"") for x in wanted}
    for source, target in wanted.values():
        assert decode.pool.block(target) == prefill.pool.block(source)


def test_a_spoiled_block_breaks_the_ticket_and_never_lands(open_pair):
    prefill, decode = open_pair(corrupt=1)
    ship(prefill, decode)
    assert decode.next() == t.TransferFailed(X, "checksum")
    assert decode.next() == t.BlocksFreed(X)
    assert isinstance(prefill.next(), t.PushEnded)
    assert decode.service.statistics()["failed_lanes"] == {"checksum": 1}
    assert decode.service.statistics()["failures"] == {}
    ship(prefill, decode, "request#1")
    assert arrived(decode.next()) == landed("request#1")
    assert decode.blocks([4, 9, 5]) == prefill.blocks([1, 2, 3])
    assert decode.outcomes.empty()


def test_a_cancel_at_the_sink_frees_its_blocks_and_closes_the_source(open_pair):
    prefill, decode = open_pair()
    prefill.submit(expect(decode, 2), c.PushBlocks(X, 0, [1]))
    decode.submit(receive(prefill, [4, 9]))
    eventually(lambda: decode.service.statistics()["bytes_received"] == 4096, "the first chunk")
    decode.submit(c.CancelTransfer(X, "aborted"))
    assert decode.next() == t.TransferFailed(X, "aborted")
    assert decode.next() == t.BlocksFreed(X)
    assert prefill.next() == t.PushEnded(X, False, "aborted")
    before = decode.pool.block(9)
    prefill.submit(c.PushBlocks(X, 1, [2]), c.FinishPush(X, b""))
    ship(prefill, decode, "request#1", source=(3, 4), target=(6, 7))
    assert arrived(decode.next()) == landed("request#1", 128)
    assert decode.pool.block(9) == before


def test_a_cancel_at_the_source_breaks_and_frees_the_sink(open_pair):
    prefill, decode = open_pair()
    decode.submit(receive(prefill, [4]))
    prefill.submit(expect(decode, 1), c.CancelTransfer(X, "finished"))
    assert [decode.next(), decode.next()] == [t.TransferFailed(X, "finished"), t.BlocksFreed(X)]
    assert prefill.next() == t.PushEnded(X, False, "finished")


def test_an_incompatible_peer_is_refused_and_counted(open_pair):
    prefill, decode = open_pair(compatibility=b"another model")
    for worker in (prefill, decode):
        eventually(
            lambda w=worker: w.service.statistics()["failures"].get("incompatible_peer") == 1,
            "the refusal is counted",
        )
        assert worker.service.statistics()["sessions"] == 0
        other = decode if worker is prefill else prefill
        assert list(worker.service.statistics()["refused_peers"]) == [other.agent]
    before = bytes(decode.pool.view)
    ship(prefill, decode)
    assert [decode.next(), decode.next()] == [t.TransferFailed(X, "peer_lost"), t.BlocksFreed(X)]
    assert bytes(decode.pool.view) == before


def test_a_peer_that_nobody_introduced_breaks_the_ticket_at_once(open_pair):
    prefill, decode = open_pair(connect=False)
    decode.submit(receive(prefill, [4]))
    assert [decode.next(), decode.next()] == [t.TransferFailed(X, "peer_lost"), t.BlocksFreed(X)]


def test_a_peer_that_the_cluster_lost_breaks_its_open_tickets(open_pair):
    prefill, decode = open_pair()
    decode.submit(receive(prefill, [4, 9]))
    prefill.submit(expect(decode, 2), c.PushBlocks(X, 0, [1]))
    eventually(lambda: decode.service.statistics()["bytes_received"] == 4096, "the first chunk")
    decode.submit(LosePeer(prefill.name))
    assert [decode.next(), decode.next()] == [t.TransferFailed(X, "peer_lost"), t.BlocksFreed(X)]
    prefill.submit(LosePeer(decode.name))
    closed = prefill.next()
    assert isinstance(closed, t.PushEnded) and not closed.ok


def test_a_peer_that_stops_breaks_its_open_tickets_and_its_blocks_are_freed(open_pair):
    prefill, decode = open_pair()
    decode.submit(receive(prefill, [4, 9]))
    prefill.submit(expect(decode, 2), c.PushBlocks(X, 0, [1]))
    eventually(lambda: decode.service.statistics()["bytes_received"] == 4096, "the first chunk")
    prefill.service.stop()
    assert [decode.next(), decode.next()] == [t.TransferFailed(X, "peer_lost"), t.BlocksFreed(X)]
    decode.submit(receive(prefill, [4], "request#1"))
    assert [decode.next(), decode.next()] == [
        t.TransferFailed("request#1", "peer_lost"),
        t.BlocksFreed("request#1"),
    ]


@pytest.mark.parametrize("forgetful", ["both", "decode", "prefill"])
def test_a_peer_that_was_lost_by_mistake_is_reached_again(open_pair, forgetful):
    """A restarted router's first directories name few workers: who is missing is lost, and back."""
    prefill, decode = open_pair()
    ship(prefill, decode)
    assert arrived(decode.next()) == landed(X)
    if forgetful != "prefill":
        decode.submit(LosePeer(prefill.name), AddPeer(prefill.name, [prefill.card]))
    if forgetful != "decode":
        prefill.submit(LosePeer(decode.name), AddPeer(decode.name, [decode.card]))
    attempts = (f"request#{number}" for number in itertools.count(1))

    def lands():
        ticket_id = next(attempts)
        ship(prefill, decode, ticket_id)
        outcome = decode.next()
        if isinstance(outcome, c.BlocksArrived):
            return True
        assert isinstance(outcome, t.TransferFailed) and decode.next() == t.BlocksFreed(ticket_id)
        return False

    lands()  # all commands before it are done
    eventually(
        lambda: not (prefill.service._unfenced or decode.service._unfenced), "the fences pass"
    )
    eventually(lands, "a ticket lands again")


class ForgetsPeer:
    """Takes a peer for lost as soon as it is told to, until that peer is removed and added again."""

    def __init__(self, inner):
        self.inner, self.lost = inner, ""

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def notify(self, peer, note):
        if peer == self.lost:
            raise PeerLost(peer)
        self.inner.notify(peer, note)

    def remove_peer(self, peer):
        self.inner.remove_peer(peer)
        self.lost = "" if peer == self.lost else self.lost


def test_blocks_come_free_once_the_cluster_names_a_lost_peer_again(open_pair):
    """Also if the peer, which knows of no loss, has nothing to say by itself."""
    decode, prefill = open_pair(wrap=ForgetsPeer)  # the first one has the wrapped transport
    transport = decode.service._transport
    decode.submit(receive(prefill, [4, 9]))
    prefill.submit(expect(decode, 2), c.PushBlocks(X, 0, [1]))
    eventually(lambda: decode.service.statistics()["bytes_received"] == 4096, "the first chunk")
    transport.lost = prefill.agent
    decode.submit(LosePeer(prefill.name))
    assert decode.next() == t.TransferFailed(X, "peer_lost")
    decode.submit(AddPeer(prefill.name, [prefill.card]))
    assert decode.next() == t.BlocksFreed(X)
    assert isinstance(prefill.next(), t.PushEnded)


class LosesPeerOnce:
    """Takes the peer of its first write for lost, until that peer is removed and added again."""

    def __init__(self, inner):
        self.inner, self.lost, self.events = inner, None, []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def write(self, peer, *rest):
        if self.lost is None:
            self.lost = peer
            self.events.append(PeerDisconnected(peer))
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
    assert isinstance(closed, t.PushEnded) and not closed.ok
    outcomes = [decode.next(), decode.next()]
    assert isinstance(outcomes[0], t.TransferFailed) and outcomes[1] == t.BlocksFreed(X)
    ship(prefill, decode, "request#1")
    assert arrived(decode.next()) == landed("request#1")


@pytest.mark.parametrize(
    "note", [b"\xc1 no message", b"\x93\xa1G\xa0" + b"\x91" * 3500 + b"\xc0"], ids=["bytes", "deep"]
)
def test_a_note_that_nobody_understands_is_counted_and_ignored(open_pair, note):
    prefill, decode = open_pair()
    ship(prefill, decode)
    decode.next()
    transport = prefill.service._transport
    poll = transport.poll

    def notify_and_poll():  # on the thread of the transport, which no other thread may use
        transport.poll = poll
        transport.notify(decode.agent, note)
        return poll()

    transport.poll = notify_and_poll
    eventually(lambda: decode.service.statistics()["failures"].get("malformed") == 1, "a count")
    assert decode.service.alive


def test_who_waits_long_polls_less_often_and_never_much_later_than_it_would_have() -> None:
    quiet = [0.0, 0.001, 0.005, 0.01, 0.1, 60.0]
    pauses = [service.poll_interval_s(each, moving=False) for each in quiet]
    assert pauses == sorted(pauses) and pauses[0] == service.ACTIVE_POLL_S
    assert pauses[-1] == service.SLOW_POLL_S
    late = [
        one / each for one, each in zip(pauses, quiet, strict=True) if one > service.ACTIVE_POLL_S
    ]
    assert late and max(late) <= service.QUIET_SHARE
    assert service.poll_interval_s(60.0, moving=True) == service.ACTIVE_POLL_S, (
        "bytes are on the way"
    )


def test_stop_ends_the_thread(open_pair):
    threads = set(threading.enumerate())
    prefill, decode = open_pair()
    started = set(threading.enumerate()) - threads
    for worker in (prefill, decode):
        worker.service.stop()
        assert not worker.service.alive
    assert not any(thread.is_alive() for thread in started)


# ---- what need not travel, and what is asked for -------------------------------------------------


@pytest.mark.parametrize("held", [1, 2, 3])
def test_only_blocks_that_the_sink_does_not_hold_travel(open_pair, held):
    prefill, decode = open_pair()
    before = decode.blocks([4, 9, 5])
    decode.submit(receive(prefill, [4, 9, 5], held_tokens=64 * held))
    prefill.submit(
        expect(decode, 3), c.PushBlocks(X, 0, [1, 2]), c.PushBlocks(X, 2, [3]), c.FinishPush(X, b"")
    )
    assert arrived(decode.next()) == landed(X, 192, b"")
    assert decode.blocks([4, 9, 5]) == before[:held] + prefill.blocks([1, 2, 3])[held:]
    assert prefill.next() == t.PushEnded(X, True)
    assert prefill.service.statistics()["bytes_sent"] == (3 - held) * 4096


def test_a_prompt_that_does_not_fill_its_last_block_arrives_with_its_tokens(open_pair):
    prefill, decode = open_pair()
    decode.submit(c.OfferBlocks(X, prefill.agent, [4, 9], 100))
    prefill.submit(
        c.ExpectOffer(X, decode.agent, 100), c.PushBlocks(X, 0, [1, 2]), c.FinishPush(X, b"")
    )
    assert arrived(decode.next()) == landed(X, 100, b"")
    assert decode.blocks([4, 9]) == prefill.blocks([1, 2])


def test_a_prefix_is_asked_for_once_and_comes_as_far_as_the_peer_has_it(open_pair):
    prefill, decode = open_pair()
    before = decode.blocks([5])
    decode.submit(receive(prefill, [4, 9, 5], hashes=(b"h0", b"h1", b"h2")))
    assert prefill.next() == t.PrefixRequested(X, decode.agent, (b"h0", b"h1", b"h2"))
    prefill.submit(expect(decode, 2), c.PushBlocks(X, 0, [1, 2]), c.FinishPush(X, b""))
    assert arrived(decode.next()) == landed(X, 128, b"")
    assert decode.blocks([4, 9, 5]) == prefill.blocks([1, 2]) + before
    assert prefill.next() == t.PushEnded(X, True)
    assert prefill.outcomes.empty()


def test_a_prefix_that_the_peer_lacks_breaks_the_request_for_it(open_pair):
    prefill, decode = open_pair()
    decode.submit(receive(prefill, [4], hashes=(b"h0",)))
    assert isinstance(prefill.next(), t.PrefixRequested)
    prefill.submit(expect(decode, 1), c.CancelTransfer(X, "not_held"))
    assert [decode.next(), decode.next()] == [t.TransferFailed(X, "not_held"), t.BlocksFreed(X)]
    assert prefill.next() == t.PushEnded(X, False, "not_held")


# ---- pieces, events, other layouts ---------------------------------------------------------------

LARGE = KVLayout(4, 2, 256, 64, 2, "uint16", 1)  #: 512 KiB in two pieces of two layers


def test_a_block_travels_in_pieces_and_lands_when_all_are_there(open_pair):
    prefill, decode = open_pair(source={"end": LaneEnd(LARGE)}, end=LaneEnd(LARGE))
    decode.submit(receive(prefill, [4, 9]))
    prefill.submit(expect(decode, 2), c.PushBlocks(X, 0, [1, 2], 1), c.FinishPush(X, b""))
    assert [type(decode.next()), decode.next()] == [t.TransferFailed, t.BlocksFreed(X)]
    assert decode.seen[0].reason == "incomplete"
    decode.submit(receive(prefill, [4, 9], "request#1"))
    prefill.submit(expect(decode, 2, "request#1"))
    for first, piece in ((1, 0), (0, -1), (1, 1)):
        prefill.submit(c.PushBlocks("request#1", first, [1 + first], piece))
    prefill.submit(c.FinishPush("request#1", b""))
    assert arrived(decode.next()) == landed("request#1", 128, b"")
    assert decode.blocks([4, 9]) == prefill.blocks([1, 2])


def test_pools_with_blocks_of_other_sizes_hold_the_same_afterwards(open_pair):
    wide = KVLayout(2, 2, 8, 128, 1, "uint8", 2)
    narrow = KVLayout(2, 2, 8, 64, 1, "uint8", 1)
    prefill, decode = open_pair(source={"end": LaneEnd(wide)}, end=LaneEnd(narrow))
    decode.submit(c.OfferBlocks(X, prefill.agent, [4, 9, 5], 150, held_tokens=64))
    prefill.submit(
        c.ExpectOffer(X, decode.agent, 150), c.PushBlocks(X, 0, [3, 1]), c.FinishPush(X, b"")
    )
    before = decode.blocks([4])
    assert arrived(decode.next()) == landed(X, 150, b"")
    assert decode.blocks([4]) == before
    here = [rows(prefill, wide, block, half) for block, half in ((3, 1), (1, 0))]
    assert [rows(decode, narrow, block, 0) for block in (9, 5)] == here


def rows(worker, layout, block, half):
    """Every 64-token run of the `half`-th 64 tokens of a block: by layer, part and head."""
    data, run = worker.pool.block(block), 64 * layout.head_dim
    starts = [
        layout.offset(layer, part) + head * layout.strides()[1] + half * run
        for layer in range(layout.layers)
        for part in (0, 1)
        for head in range(layout.heads)
    ]
    return [data[start : start + run] for start in starts]


def test_a_peer_whose_blocks_do_not_divide_is_told_as_lost(open_pair):
    ends = [LaneEnd(KVLayout(1, 1, 8, tokens, 1, "uint8", 1)) for tokens in (128, 192)]
    prefill, decode = open_pair(source={"end": ends[0]}, end=ends[1])
    decode.submit(c.OfferBlocks(X, prefill.agent, [4], 150))
    assert [decode.next(), decode.next()] == [t.TransferFailed(X, "peer_lost"), t.BlocksFreed(X)]
    prefill.submit(c.ExpectOffer(X, decode.agent, 150))
    assert prefill.next() == t.PushEnded(X, False, "peer_lost")


# ---- ranks ---------------------------------------------------------------------------------------


class Group:
    """The ranks of one worker and their fan, driven by the test's own thread."""

    def __init__(self, kind, name, ranks, heads=4):
        layout = KVLayout(2, heads // ranks, 16, 64, 1, "uint8", 1)
        ends = [LaneEnd(layout, rank, ranks) for rank in range(ranks)]
        self.name, self.layout = name, layout
        self.ranks = [Worker(kind, f"{name}:{e.rank}", e.rank, end=e) for e in ends]
        self.cards = [rank.card for rank in self.ranks]
        self.fan, self.told = Fan(self.cards), []

    def handle(self, *events):
        for event in events:
            for action in self.fan.handle(event):
                if isinstance(action, RankCommand):
                    self.ranks[action.rank].submit(action.command)
                else:
                    self.told.append(action)

    def poll(self):
        for rank in self.ranks:
            while not rank.outcomes.empty():
                self.handle(rank.outcomes.get())

    def heads(self, block):
        """The runs of all heads of the model, whichever rank has them."""
        return sorted(run for rank in self.ranks for run in rows(rank, self.layout, block, 0))


@pytest.fixture(params=KINDS)
def open_groups(request):
    opened = []

    def make(source, target):
        number = next(_names)
        for name, ranks in (("prefill", source), ("decode", target)):
            opened.append(Group(request.param, f"{name}#{number}", ranks))
        prefill, decode = opened
        prefill.handle(AddPeer(decode.name, decode.cards))
        decode.handle(AddPeer(prefill.name, prefill.cards))
        return prefill, decode

    yield make
    for group in opened:
        for rank in group.ranks:
            rank.service.stop()


def until(groups, done, what):
    eventually(lambda: [group.poll() for group in groups] and done(), what)


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (2, 4)], ids=str)
def test_ranks_that_share_the_heads_otherwise_ship_one_ticket(open_groups, ranks):
    prefill, decode = groups = open_groups(*ranks)
    decode.handle(c.OfferBlocks(X, prefill.name, [4, 9], 128))
    prefill.handle(
        c.ExpectOffer(X, decode.name, 128), c.PushBlocks(X, 0, [1]), c.PushBlocks(X, 1, [2])
    )
    prefill.handle(c.FinishPush(X, b"first token"))
    until(groups, lambda: decode.told and prefill.told, "both ends are told")
    assert arrived(decode.told[0]) == landed(X, 128)
    assert prefill.told == [t.PushEnded(X, True)]
    assert [decode.heads(block) for block in (4, 9)] == [prefill.heads(block) for block in (1, 2)]
    assert len(decode.told) == 1


def test_a_rank_that_stops_breaks_the_ticket_and_all_blocks_are_freed(open_groups):
    prefill, decode = groups = open_groups(2, 1)
    decode.handle(c.OfferBlocks(X, prefill.name, [4, 9], 128))
    prefill.handle(c.ExpectOffer(X, decode.name, 128), c.PushBlocks(X, 0, [1]))
    received = decode.ranks[0].service.statistics
    until(groups, lambda: received()["bytes_received"] == prefill.layout.block_bytes * 2, "a block")
    prefill.ranks[1].service.stop()
    until(groups, lambda: len(decode.told) == 2, "broken, then freed")
    assert [type(outcome) for outcome in decode.told] == [t.TransferFailed, t.BlocksFreed]
    until(groups, lambda: not received()["tickets"], "no lane is left")
