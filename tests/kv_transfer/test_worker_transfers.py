"""The services of a worker's ranks as one: who gets which command, and who hears what on which thread."""

from __future__ import annotations

import queue
import threading

import pytest
from diptych.kv_transfer import commands as c
from diptych.kv_transfer.statistics import TRANSFER_S, Histogram
from diptych.kv_transfer.worker_transfers import WorkerTransfers

from .test_fan import D, P, X, cards


class RecordingService:
    """Stands for the service of one rank: keeps the commands, does nothing."""

    def __init__(self, card, order, error=None):
        self.card = card
        self.order = order  #: What all ranks of the worker did, in order.
        self.error = error
        self.commands = []
        self.alive = True

    def start(self):
        if self.error:
            raise self.error
        self.order.append(("start", self.card.rank))
        return self.card

    def submit(self, command):
        self.commands.append(command)

    def statistics(self):
        return {
            "transport": "tcp",
            "sessions": 1,
            "tickets": {"sending": 2},
            "quarantined": 4 - self.card.rank,
            "failures": {"malformed": 1},
            "failed_lanes": {"checksum": 3},
        }

    def stop(self):
        self.order.append(("stop", self.card.rank))


class Owner:
    """A decode worker of two ranks, whose owner's thread is the test's."""

    def __init__(self):
        self.calls = queue.SimpleQueue()
        self.order = []
        self.outcomes = []  #: (thread, outcome)
        self.transfers = WorkerTransfers(self.calls.put, self._hear)
        self.services = [RecordingService(card, self.order) for card in cards(D, 2)]

    def _hear(self, outcomes):
        self.outcomes += [(threading.current_thread(), outcome) for outcome in outcomes]

    def make_calls(self):
        while not self.calls.empty():
            self.calls.get()()


def from_rank_thread(owner, outcome):
    thread = threading.Thread(target=owner.transfers.take_outcome, args=(outcome,))
    thread.start()
    thread.join(timeout=5)


@pytest.fixture
def owner():
    made = Owner()
    assert made.transfers.start(made.services) == cards(D, 2)
    made.transfers.handle(c.AddPeer(P, cards(P, 2)))
    return made


def test_each_rank_gets_its_part_and_the_owner_hears_of_the_whole_on_its_own_thread(owner):
    owner.transfers.handle(c.OfferBlocks(X, P, [3, 4], 128))
    names = [[command.ticket_id for command in each.commands[1:]] for each in owner.services]
    assert names == [[f"{X}/0>0"], [f"{X}/1>1"]]
    from_rank_thread(owner, c.BlocksArrived(f"{X}/0>0", b"", 128))
    from_rank_thread(owner, c.BlocksArrived(f"{X}/1>1", b"", 128))
    assert owner.outcomes == [], "the ranks' threads tell the owner nothing themselves"
    owner.make_calls()
    assert owner.outcomes == [(threading.current_thread(), c.BlocksArrived(X, b"", 128))]


def test_a_lane_that_fails_has_the_other_ranks_cancel_theirs(owner):
    owner.transfers.handle(c.OfferBlocks(X, P, [3, 4], 128))
    from_rank_thread(owner, c.TransferFailed(f"{X}/1>1", "checksum"))
    owner.make_calls()
    assert [outcome for _, outcome in owner.outcomes] == [c.TransferFailed(X, "checksum")]
    assert owner.services[0].commands[-1] == c.CancelTransfer(f"{X}/0>0", "checksum")


def test_a_ticket_that_fails_counts_once_whatever_its_lanes_say(owner):
    """Every rank reports its lane with the reason of the first: Control would see a series."""
    for ticket_id, reason in ((X, "checksum"), ("other#0", "finished")):
        owner.transfers.handle(c.OfferBlocks(ticket_id, P, [3, 4], 128))
        for lane in ("0>0", "1>1"):
            from_rank_thread(owner, c.TransferFailed(f"{ticket_id}/{lane}", reason))
            from_rank_thread(owner, c.BlocksFreed(f"{ticket_id}/{lane}"))
    owner.make_calls()
    assert len(owner.outcomes) == 4
    # "finished": the answer ended with its first token and needs no KV elsewhere.
    assert owner.transfers.statistics()["failures"] == {"malformed": 2, "checksum": 1}


def test_a_ticket_that_arrives_counts_once_with_the_times_of_its_slowest_lane(owner):
    """Alerts compare the number of these with that of the failures."""
    owner.transfers.handle(c.OfferBlocks(X, P, [3, 4], 128))
    times = {"0>0": (0.02, 0.3), "1>1": (0.01, 0.4)}
    for lane, (busy_s, exposed_s) in times.items():
        arrival = c.BlocksArrived(f"{X}/{lane}", b"", 128, busy_s=busy_s, exposed_s=exposed_s)
        from_rank_thread(owner, arrival)
    owner.make_calls()
    snapshot = owner.transfers.statistics()
    for name, slowest_s in (("busy", 0.01), ("exposed", 0.4)):
        expected = Histogram(TRANSFER_S)
        expected.observe(slowest_s)
        assert snapshot[name] == expected.values()


def test_ranks_start_one_after_the_other_and_are_counted_together(owner):
    assert owner.order == [("start", 0), ("start", 1)]
    snapshot = owner.transfers.statistics()
    assert snapshot.pop("busy") == snapshot.pop("exposed") == Histogram(TRANSFER_S).values()
    assert snapshot == {
        "transport": "tcp",
        "sessions": 2,
        "tickets": {"sending": 4},
        "quarantined": 4,  # a block has the same number in the pools of all ranks
        "failures": {"malformed": 2},
    }
    assert owner.transfers.alive
    owner.services[1].alive = False
    assert not owner.transfers.alive
    owner.transfers.stop()
    assert owner.order[2:] == [("stop", 0), ("stop", 1)]


def test_a_rank_that_does_not_start_is_reported():
    made = Owner()
    made.services[1].error = RuntimeError("no such transport")
    with pytest.raises(RuntimeError, match="no such transport"):
        made.transfers.start(made.services)
