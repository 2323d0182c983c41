"""Peers that cannot be reached are tried again after pauses that grow, and reached when they can be."""

from __future__ import annotations

import random
from types import SimpleNamespace

import msgspec
import pytest
from diptych.kv_transfer import messages, service
from diptych.kv_transfer import tickets as t
from diptych.kv_transfer.commands import AddPeer, LosePeer, OfferBlocks
from diptych.kv_transfer.redials import FIRST_PAUSE_S, JITTER, LONGEST_PAUSE_S, Redials
from diptych.kv_transfer.transport import NotificationReceived, PeerDisconnected

from .support import Worker, eventually

AGENT = "prefill:0"


def test_pauses_double_up_to_the_longest_and_begin_anew_once_the_peer_was_reached() -> None:
    redials = Redials()
    for number in range(12):
        pause_s = min(FIRST_PAUSE_S * 2**number, LONGEST_PAUSE_S)
        wait_s = redials.note_failure(AGENT, "no route", 0.0)
        assert pause_s * (1 - JITTER) <= wait_s <= pause_s * (1 + JITTER)
    redials.forget(AGENT)
    assert redials.note_failure(AGENT, "no route", 0.0) <= FIRST_PAUSE_S * (1 + JITTER)


def test_workers_that_lose_a_peer_together_do_not_dial_together() -> None:
    waits = {Redials(random.Random(seed)).note_failure(AGENT, "", 0.0) for seed in range(20)}
    assert len(waits) == 20


def test_a_try_is_due_when_its_pause_is_over_and_not_before() -> None:
    redials = Redials()
    assert not redials.must_wait(AGENT, 0.0)
    due_at = 100.0 + redials.note_failure(AGENT, "no route", 100.0)
    assert redials.must_wait(AGENT, due_at - 0.01) and redials.due(due_at - 0.01) == []
    assert not redials.must_wait(AGENT, due_at) and redials.due(due_at) == [AGENT]
    assert redials.errors() == {AGENT: "no route"}
    redials.forget(AGENT)
    assert redials.due(due_at) == [] and redials.errors() == {}


class CutOff:
    """A transport that reaches nobody while `broken`, and counts the tries."""

    name, refuses_late, moving = "cut", False, False

    def __init__(self) -> None:
        self.broken, self.tries = True, 0

    def add_peer(self, card) -> None:
        self.tries += 1
        if self.broken:
            raise OSError("no route")

    def reached(self, peer) -> bool:
        return not self.broken

    def remove_peer(self, peer) -> None:
        pass

    def notify(self, peer, note) -> None:
        pass

    def poll(self) -> list:
        return []


class DialsLate(CutOff):
    """As the transports over sockets: `add_peer` never fails, the first message dials."""

    def __init__(self) -> None:
        super().__init__()
        self._is_dialled = False
        self._events: list = []

    def add_peer(self, card) -> None:
        self._is_dialled = False

    def reached(self, peer) -> bool:
        return self._is_dialled and not self.broken

    def notify(self, peer, note) -> None:
        if self._is_dialled:
            return
        self.tries += 1
        self._is_dialled = True
        if self.broken:
            self._events.append(PeerDisconnected(peer, "no route"))

    def poll(self) -> list:
        events, self._events = self._events, []
        return events

    def fenced(self, peer) -> bool:
        return True


@pytest.fixture(params=[CutOff, DialsLate])
def cut_off(monkeypatch, request):
    """A service that nobody runs, its transport, a peer's card, and its clock."""
    made = Worker("tcp", "stubborn#0", 1)
    made.service.stop()
    told: list = []
    own = service.TransferService(
        "me", made.pool, made.service.end, b"x", lambda admit: None, told.append
    )
    own._transport = transport = request.param()
    card = msgspec.structs.replace(made.card, agent=AGENT, transport="cut", compatibility=b"x")
    own.card = msgspec.structs.replace(card, agent="me")
    clock = SimpleNamespace(now=1000.0)
    fake = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=lambda: clock.now)
    monkeypatch.setattr(service, "time", fake)
    return own, transport, card, clock, told


def pass_time(own, clock, seconds: float) -> None:
    """Runs the service's rounds, each a tenth of a second after the last."""
    for _ in range(round(seconds * 10)):
        clock.now += 0.1
        own._run_round(0.0)


def test_neither_transfers_nor_messages_dial_a_peer_before_its_pause_is_over(cut_off) -> None:
    own, transport, card, _, told = cut_off
    own._handle_command(AddPeer("prefill", [card]))
    own._run_round(0.0)  # transports that dial late say now that nobody is there
    note = NotificationReceived(AGENT, messages.encode(messages.ProgressMessage("another")))
    for number in range(50):
        own._handle_command(OfferBlocks(f"request{number}#0", AGENT, [1, 2], 128))
        own._handle_transport_event(note)
    assert transport.tries == 1
    failed = [one for one in told if isinstance(one, t.TransferFailed)]
    assert len(failed) == 50, "each transfer is told at once, so that its KV is computed here"
    assert own.statistics()["unreachable_peers"] == {AGENT: "no route"}
    assert own.statistics()["failures"] == {"unreachable_peer": 1}


def test_a_peer_is_reached_by_itself_once_it_can_be(cut_off) -> None:
    own, transport, card, clock, _ = cut_off
    own._handle_command(AddPeer("prefill", [card]))
    pass_time(own, clock, 600.0)
    # 600 s hold six pauses up to 32 s, and then one each 30 s: 5 + 19, with a quarter of jitter.
    assert 18 <= transport.tries <= 34
    transport.broken = False
    pass_time(own, clock, LONGEST_PAUSE_S * (1 + JITTER) + 0.2)
    tries = transport.tries
    assert own.statistics()["unreachable_peers"] == {}
    assert own.statistics()["sessions"] == 1
    pass_time(own, clock, 60.0)
    assert transport.tries == tries


def test_a_peer_that_the_cluster_loses_is_dialled_no_more(cut_off) -> None:
    own, transport, card, clock, _ = cut_off
    own._handle_command(AddPeer("prefill", [card]))
    own._run_round(0.0)
    own._handle_command(LosePeer("prefill"))
    pass_time(own, clock, 60.0)
    assert transport.tries == 1 and own.statistics()["unreachable_peers"] == {}


def test_a_peer_that_is_named_anew_is_dialled_at_once(cut_off) -> None:
    own, transport, card, _, _ = cut_off
    own._handle_command(AddPeer("prefill", [card]))
    transport.broken = False
    own._handle_command(AddPeer("prefill", [card]))
    assert own.statistics()["sessions"] == 1


@pytest.mark.parametrize(
    ("kind", "nobody", "told"),
    [
        ("tcp", b"127.0.0.1:1", "Connection refused"),
        ("shm", b"diptych/nobody", "Connection refused"),
    ],
)
def test_who_is_not_there_is_named_with_what_the_system_says(kind, nobody, told) -> None:
    decode, prefill = Worker(kind, "decode#0", 1), Worker(kind, "prefill#0", 2)
    card = msgspec.structs.replace(prefill.card, address=nobody)
    try:
        decode.submit(AddPeer(prefill.name, [card]))
        eventually(lambda: decode.service.statistics()["unreachable_peers"], "it is named")
        assert decode.service.statistics()["unreachable_peers"] == {prefill.agent: told}
        decode.submit(OfferBlocks("request#0", prefill.agent, [1], 64))
        assert decode.next() == t.TransferFailed("request#0", "peer_lost")

        decode.submit(AddPeer(prefill.name, [prefill.card]))
        eventually(lambda: not decode.service.statistics()["unreachable_peers"], "it is reached")
        assert decode.service.statistics()["sessions"] == 1
    finally:
        decode.service.stop()
        prefill.service.stop()
