"""Peers lost by mistake and named again, over a transport that does as NIXL does at its worst."""

import itertools
import time
from types import SimpleNamespace

import msgspec
import pytest
from diptych.kv_transfer import commands as c
from diptych.kv_transfer import messages, service
from diptych.kv_transfer import tickets as t
from diptych.kv_transfer.commands import AddPeer, LosePeer
from diptych.kv_transfer.errors import PeerLost
from diptych.kv_transfer.transport import NotificationReceived, PostedWriteEnded

from .support import Worker

X = "request#0"


class Stubborn:
    """Writes end when they are told to; `add_peer` fails while `broken`. No process ever ends."""

    name, refuses_late, moving = "stubborn", False, False

    def __init__(self):
        self.peers, self.down, self.broken = set(), set(), False
        self.added = itertools.count()
        self.handles = itertools.count()

    def add_peer(self, card):
        if self.broken:
            raise OSError("no route")
        self.peers.add(card.agent)
        next(self.added)

    def reached(self, peer):
        return peer in self.peers

    def remove_peer(self, peer):
        self.peers.discard(peer)
        self.down.discard(peer)

    def notify(self, peer, note):
        if peer not in self.peers or peer in self.down:
            raise PeerLost(peer)

    def write(self, peer, spans, note):
        self.notify(peer, note)
        return next(self.handles)

    def fenced(self, peer):
        self.down.add(peer)
        return peer not in self.peers

    def mark_process_dead(self, peer):
        pass


@pytest.fixture
def stubborn():
    """A service that nobody runs, its transport, a peer's card, and what it delivers."""
    made = Worker("tcp", "stubborn#0", 1)
    made.service.stop()
    told = []
    service_ = service.TransferService(
        "me", made.pool, made.service.end, b"x", lambda admit: None, told.append
    )
    service_._transport = Stubborn()
    card = msgspec.structs.replace(made.card, agent="P:0", transport="stubborn", compatibility=b"x")
    service_.card = msgspec.structs.replace(card, agent="me")
    service_._handle_command(AddPeer("P", [card]))
    return service_, service_._transport, card, told


def test_a_peer_that_cannot_be_taken_back_is_not_taken_for_fenced(stubborn, monkeypatch):
    made, transport, card, told = stubborn
    clock = itertools.count()  # a second each time, so that every tick repeats its messages
    fake = SimpleNamespace(monotonic=lambda: next(clock), perf_counter=time.perf_counter)
    monkeypatch.setattr(service, "time", fake)
    made._handle_command(c.OfferBlocks(X, "P:0", [1, 2], 128))
    made._handle_command(LosePeer("P"))
    transport.broken = True
    made._handle_command(AddPeer("P", [card]))
    for _ in range(3):
        made._handle_transport_event(
            NotificationReceived("P:0", messages.encode(messages.ProgressMessage("another")))
        )
        made._check_fences()
        made._to_both_ends(t.TicketTick())
    assert not any(isinstance(one, t.BlocksFreed) for one in told), "it lives, and may write"
    transport.broken = False
    for _ in range(60):  # a minute, so that the next try is due
        next(clock)
    made._handle_transport_event(
        NotificationReceived("P:0", messages.encode(messages.StoppedMessage(X)))
    )
    assert "P:0" in made._peers and told[-1] == t.BlocksFreed(X)


def test_a_lost_peer_that_could_not_be_taken_back_is_fenced_when_it_is_dead(stubborn):
    made, transport, card, told = stubborn
    made._handle_command(c.OfferBlocks(X, "P:0", [1, 2], 128))
    made._handle_command(LosePeer("P"))
    transport.broken = True
    made._handle_command(AddPeer("P", [card]))
    made._handle_transport_event(
        NotificationReceived("P:0", messages.encode(messages.ProgressMessage("another")))
    )
    made._handle_command(LosePeer("P", process_dead=True))
    made._check_fences()
    assert told[-1] == t.BlocksFreed(X)


def test_a_peer_is_not_taken_back_while_writes_to_it_are_under_way(stubborn):
    """NIXL would end them as failed, and go on writing."""
    made, transport, card, told = stubborn
    made._handle_command(c.ExpectOffer(X, "P:0", 128))
    offer = messages.OfferMessage(X, 1, 0, list(range(2)))
    made._handle_transport_event(NotificationReceived("P:0", messages.encode(offer)))
    made._handle_command(c.PushBlocks(X, 0, [1, 2]))
    assert len(made._writes) == 1
    made._handle_command(LosePeer("P"))
    made._handle_command(AddPeer("P", [card]))
    stop = NotificationReceived("P:0", messages.encode(messages.StopMessage(X)))
    made._handle_transport_event(stop)
    assert next(transport.added) == 1 and not any(isinstance(one, t.PushEnded) for one in told)
    made._handle_transport_event(PostedWriteEnded(0, True))
    made._handle_transport_event(stop)
    assert "P:0" in made._peers and isinstance(told[-1], t.PushEnded)
