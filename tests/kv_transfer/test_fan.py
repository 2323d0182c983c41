"""One ticket across ranks: who is told what, and when the whole ends."""

from __future__ import annotations

import itertools

import pytest
from diptych.kv_transfer import KVLayout, PeerCard
from diptych.kv_transfer import commands as c
from diptych.kv_transfer import tickets as t
from diptych.kv_transfer.fan import Fan, RankCommand
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples

X, P, D = "request#0", "prefill", "decode"
PAIRS = [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4)]  #: ranks of the prefill and the decode worker
LANES = {
    (1, 1): {X: (0, 0)},
    (1, 2): {f"{X}/0>0": (0, 0), f"{X}/0>1": (0, 1)},
    (2, 1): {f"{X}/0>0": (0, 0), f"{X}/1>0": (1, 0)},
    (2, 2): {f"{X}/0>0": (0, 0), f"{X}/1>1": (1, 1)},
    (2, 4): {f"{X}/{d // 2}>{d}": (d // 2, d) for d in range(4)},
}


def cards(worker, ranks):
    """Of a worker whose ranks share four heads."""
    layout = KVLayout(2, 4 // ranks, 8, 64, 2, "bfloat16", 1)
    return [
        PeerCard(f"{worker}:{rank}", "tcp", b"same", b"", 0, 0, layout, rank, ranks)
        for rank in range(ranks)
    ]


def fan(ranks, sink):
    """The decode worker's, if `sink`, that knows the prefill worker; or the other way round."""
    mine, peer = ((D, ranks[1]), (P, ranks[0])) if sink else ((P, ranks[0]), (D, ranks[1]))
    made = Fan(cards(*mine))
    made.handle(c.AddPeer(peer[0], cards(*peer)))
    return made


def receive(ticket_id=X, **more):
    return c.OfferBlocks(ticket_id, P, [3, 4], 128, **more)


def opened(ranks, sink):
    made = fan(ranks, sink)
    made.handle(receive() if sink else c.ExpectOffer(X, D, 128))
    return made


def cancels(actions):
    return sorted((a.rank, a.command.ticket_id) for a in actions if isinstance(a, RankCommand))


def told(actions):
    return [action for action in actions if not isinstance(action, RankCommand)]


both = pytest.mark.parametrize("sink", [True, False], ids=["sink", "source"])
every_pair = pytest.mark.parametrize("ranks", PAIRS, ids=lambda pair: f"{pair[0]}:{pair[1]}")


# ---- commands ------------------------------------------------------------------------------------


@every_pair
def test_a_receive_opens_a_lane_for_each_pair_of_ranks_with_common_heads(ranks):
    actions = fan(ranks, sink=True).handle(receive(held_tokens=64, hashes=(b"h",)))
    assert actions == [
        RankCommand(mine, c.OfferBlocks(lane, f"{P}:{other}", [3, 4], 128, 64, (b"h",)))
        for lane, (other, mine) in LANES[ranks].items()
    ]


@every_pair
def test_both_ends_give_a_lane_the_same_name(ranks):
    actions = fan(ranks, sink=False).handle(c.ExpectOffer(X, D, 128))
    assert actions == [
        RankCommand(mine, c.ExpectOffer(lane, f"{D}:{other}", 128))
        for lane, (mine, other) in LANES[ranks].items()
    ]


@every_pair
@pytest.mark.parametrize(
    "command",
    [c.PushBlocks(X, 1, [7, 8], 2), c.FinishPush(X, b"meta"), c.CancelTransfer(X, "aborted")],
)
def test_a_command_goes_to_every_lane(ranks, command):
    actions = opened(ranks, sink=False).handle(command)
    assert {action.command.ticket_id: action.rank for action in actions} == {
        lane: mine for lane, (mine, _) in LANES[ranks].items()
    }
    for action in actions:
        assert type(action.command) is type(command)
        rest = action.command.__struct_fields__[1:]
        assert all(getattr(action.command, name) == getattr(command, name) for name in rest)


@every_pair
@both
def test_each_rank_learns_of_the_ranks_that_it_talks_to(ranks, sink):
    mine, others = (ranks[1], ranks[0]) if sink else ranks
    made = Fan(cards("me", mine))
    actions = made.handle(c.AddPeer("peer", cards("peer", others)))
    pairs = {(a.rank, card.rank) for a in actions for card in a.command.cards}
    wanted = LANES[ranks].values()
    assert pairs == ({(d, p) for p, d in wanted} if sink else set(wanted))
    lost = made.handle(c.LosePeer("peer"))
    assert lost == [RankCommand(rank, c.LosePeer("peer")) for rank in range(mine)]


@both
def test_a_ticket_with_an_unknown_worker_ends_at_once(sink):
    made = Fan(cards("me", 2))
    if sink:
        assert made.handle(receive()) == [t.TransferFailed(X, "peer_lost"), t.BlocksFreed(X)]
    else:
        assert made.handle(c.ExpectOffer(X, D, 128)) == [t.PushEnded(X, False, "peer_lost")]
    assert made.tickets == {}
    assert made.handle(c.CancelTransfer(X, "aborted")) == []


@both
def test_a_ticket_with_a_worker_that_was_lost_since_ends_at_once(sink):
    made = opened((2, 2), sink)
    made.handle(c.LosePeer(P if sink else D))
    late = receive("late#0") if sink else c.ExpectOffer("late#0", D, 128)
    assert told(made.handle(late))[-1] in (
        t.BlocksFreed("late#0"),
        t.PushEnded("late#0", False, "peer_lost"),
    )
    assert list(made.tickets) == [X], "the open one ends by its lanes' outcomes"


def test_what_follows_the_end_of_a_ticket_reaches_no_rank():
    made = opened((1, 1), sink=False)
    assert made.handle(t.PushEnded(X, True)) == [t.PushEnded(X, True, "")]
    for command in (c.PushBlocks(X, 0, [1]), c.FinishPush(X, b""), c.CancelTransfer(X, "aborted")):
        assert made.handle(command) == []
    assert made.handle(t.PushEnded(X, True)) == []


# ---- how the whole ends, in every order ----------------------------------------------------------


def orders(ranks):
    return list(itertools.permutations(LANES[ranks]))


@every_pair
def test_the_whole_lands_with_its_last_lane_and_counts_what_all_have(ranks):
    for order in orders(ranks):
        made = opened(ranks, sink=True)
        for number, lane in enumerate(order[:-1]):
            assert made.handle(c.BlocksArrived(lane, b"meta", 128 - number, 1.0, number)) == []
        last = len(order) - 1
        slowest = c.BlocksArrived(X, b"meta", 128 - last, 1.0, last)
        assert made.handle(c.BlocksArrived(order[-1], b"meta", 128 - last, 1.0, last)) == [slowest]
        assert made.tickets == {}


@every_pair
@both
def test_a_lane_that_fails_cancels_the_others_once(ranks, sink):
    for failing in LANES[ranks]:
        made = opened(ranks, sink)
        side = 1 if sink else 0
        others = sorted((pair[side], x) for x, pair in LANES[ranks].items() if x != failing)
        fail = t.TransferFailed(failing, "bad") if sink else t.PushEnded(failing, False, "bad")
        actions = made.handle(fail)
        assert cancels(actions) == others
        if sink:
            assert told(actions) == [t.TransferFailed(X, "bad")]
            assert made.handle(fail) == []
        for _, lane in others:
            again = (
                t.TransferFailed(lane, "aborted") if sink else t.PushEnded(lane, False, "aborted")
            )
            assert cancels(made.handle(again)) == []


@every_pair
def test_a_broken_whole_is_freed_with_its_last_lane_even_if_that_one_arrived(ranks):
    """A cancel and an arrival may cross."""
    for order in orders(ranks):
        made = opened(ranks, sink=True)
        made.handle(t.TransferFailed(order[0], "bad"))
        assert all(made.handle(c.BlocksArrived(lane, b"", 128)) == [] for lane in order[1:])
        assert made.handle(t.BlocksFreed(order[0])) == [t.BlocksFreed(X)]
        made = opened(ranks, sink=True)
        made.handle(t.TransferFailed(order[0], "bad"))
        ends = [t.BlocksFreed(order[0]), *(c.BlocksArrived(lane, b"", 128) for lane in order[1:])]
        assert [made.handle(end) for end in ends] == [[]] * (len(ends) - 1) + [[t.BlocksFreed(X)]]


@every_pair
def test_a_whole_that_failed_in_one_lane_is_closed_as_failed(ranks):
    for failing, order in itertools.product(LANES[ranks], orders(ranks)):
        made = opened(ranks, sink=False)
        ends = [t.PushEnded(x, x != failing, "bad" if x == failing else "") for x in order]
        actions = [action for end in ends for action in told(made.handle(end))]
        assert actions == [t.PushEnded(X, False, "bad")]


@every_pair
def test_a_prefix_request_is_told_once_for_all_lanes_with_the_workers_name(ranks):
    for order in orders(ranks):
        made = fan(ranks, sink=False)
        asks = [t.PrefixRequested(x, f"{D}:{LANES[ranks][x][1]}", (b"h",)) for x in order]
        actions = [action for ask in asks for action in made.handle(ask)]
        assert actions == [t.PrefixRequested(X, D, (b"h",))]
        made.handle(c.ExpectOffer(X, D, 128))
        assert [made.handle(ask) for ask in asks] == [[]] * len(asks)


def test_a_prefix_request_of_nobody_known_is_not_told():
    made = fan((1, 1), sink=False)
    assert made.handle(t.PrefixRequested(X, "stranger:0", (b"h",))) == []
    assert made.handle(t.PrefixRequested(X, f"{D}:0", (b"h",))) == [
        t.PrefixRequested(X, D, (b"h",))
    ]


def test_a_request_may_have_any_name():
    made = fan((2, 1), sink=True)
    for ticket_id in ("a/b#c/d#3", "#7", "x>1#0"):
        lanes = [action.command.ticket_id for action in made.handle(receive(ticket_id))]
        assert len(set(lanes)) == 2
        assert made.handle(c.BlocksArrived(lanes[1], b"", 128)) == []
        assert made.handle(c.BlocksArrived(lanes[0], b"", 128)) == [
            c.BlocksArrived(ticket_id, b"", 128)
        ]


# ---- any order -----------------------------------------------------------------------------------


class Lanes:
    """What the ranks' machines may answer: each lane ends once, a cancel makes it fail."""

    def __init__(self, ranks, sink):
        self.fan, self.sink = opened(ranks, sink), sink
        self.open = dict.fromkeys(LANES[ranks], "RESERVED")
        self.cancelled: list[str] = []
        self.told: list = []

    def play(self, lane, good):
        state = self.open[lane]
        if not self.sink:
            outcome = t.PushEnded(lane, good, "" if good else f"{lane} failed")
        elif state == "BROKEN":
            outcome = t.BlocksFreed(lane)
        else:
            outcome = (
                c.BlocksArrived(lane, b"meta", 128)
                if good
                else t.TransferFailed(lane, f"{lane} failed")
            )
        if isinstance(outcome, t.TransferFailed):
            self.open[lane] = "BROKEN"
        else:
            del self.open[lane]
        self.note(self.fan.handle(outcome))

    def cancel(self):
        self.cancelled.clear()
        self.note(self.fan.handle(c.CancelTransfer(X, "aborted")))
        self.cancelled.clear()

    def note(self, actions):
        for action in actions:
            if isinstance(action, RankCommand):
                assert isinstance(action.command, c.CancelTransfer)
                self.cancelled.append(action.command.ticket_id)
            else:
                self.told.append(action)
                ends = not isinstance(action, t.TransferFailed)
                assert not (ends and self.open), f"{action} while {self.open}"


@settings(max_examples=examples(300))
@given(st.sampled_from(PAIRS), st.booleans(), st.data())
def test_in_any_order_the_whole_ends_once_and_never_while_a_lane_is_open(ranks, sink, data):
    lanes = Lanes(ranks, sink)
    bad = 0
    while lanes.open:
        if data.draw(st.integers(0, 9)) == 0:
            lanes.cancel()
        lane = data.draw(st.sampled_from(sorted(lanes.open)))
        good = data.draw(st.booleans())
        bad += not good and lanes.open[lane] == "RESERVED"
        lanes.play(lane, good)
        if bad:
            assert len(lanes.cancelled) == len(set(lanes.cancelled)), "cancelled twice"
    kinds = [type(outcome) for outcome in lanes.told]
    if not sink:
        assert kinds == [t.PushEnded] and lanes.told[0].ok == (not bad)
    else:
        assert kinds == ([t.TransferFailed, t.BlocksFreed] if bad else [c.BlocksArrived])
    assert all(outcome.ticket_id == X for outcome in lanes.told)
    assert lanes.fan.tickets == {}
    event(f"{ranks} {'failed' if bad else 'good'}")
