"""The sink of a ticket, event by event: what it tells, and when its blocks are free."""

import pytest
from diptych.kv_transfer import messages as m
from diptych.kv_transfer import tickets as t

X, P = "request#0", "prefill#1"
LIMITS = t.Limits(total_s=30, idle_s=1, resend_s=0.2, quarantine_s=10, offer_s=20, remember=4)
STOP, DRAINED, FREED = m.Stop(X), m.Drained(X), t.Freed(X)


def sink(blocks=(7, 8, 9)):
    """A sink with one open ticket."""
    end = t.Sink(LIMITS)
    assert end.handle(t.Open(X, P, list(blocks)), 0.0) == [t.Send(P, m.Offer(X, list(blocks)))]
    return end


def note(end, message, now=1.0, peer=P):
    return end.handle(t.Noted(peer, message), now)


def land(end, seq, first, count, ok=True, now=1.0):
    """Chunk `seq` arrives and its checksums are computed."""
    verify = note(end, m.Chunk(X, seq, first, [0] * count), now)
    assert [type(action) for action in verify] == [t.Verify]
    return end.handle(t.Verified(X, seq, ok), now)


def broken(end, now=1.0):
    """The sink gives up on its ticket: nothing is free yet."""
    assert end.handle(t.Cancel(X, "aborted"), now) == [t.Broken(X, "aborted"), t.Send(P, STOP)]
    return end


def test_a_chunk_is_verified_on_the_blocks_that_were_offered_for_it():
    end = sink()
    assert note(end, m.Chunk(X, 0, 1, [11, 12])) == [t.Verify(X, 0, 1, [8, 9], [11, 12])]


def test_a_ticket_lands_when_all_chunks_are_verified_and_the_final_is_there():
    end = sink()
    assert land(end, 0, 0, 2) == []
    assert land(end, 1, 2, 1) == []
    assert note(end, m.Final(X, 2, b"meta")) == [t.Landed(X, b"meta")]
    assert end.tickets == {}


@pytest.mark.parametrize("order", ["final first", "chunks backwards", "final between"])
def test_the_order_of_arrival_does_not_matter(order):
    end = sink()
    steps = {"f": lambda: note(end, m.Final(X, 2, b"")), "0": lambda: land(end, 0, 0, 2)}
    steps["1"] = lambda: land(end, 1, 2, 1)
    sequence = {"final first": "f01", "chunks backwards": "10f", "final between": "1f0"}[order]
    outcomes = [steps[step]() for step in sequence]
    assert outcomes == [[], [], [t.Landed(X, b"")]]


def test_a_chunk_that_arrived_but_was_not_verified_does_not_count():
    end = sink()
    note(end, m.Chunk(X, 0, 0, [0, 0, 0]))
    assert note(end, m.Final(X, 1, b"")) == []
    assert end.handle(t.Verified(X, 0, True), 1.0) == [t.Landed(X, b"")]


def test_a_chunk_that_comes_twice_counts_once():
    end = sink()
    land(end, 0, 0, 2)
    assert note(end, m.Chunk(X, 0, 0, [0, 0])) == []
    assert note(end, m.Final(X, 2, b"")) == []
    assert land(end, 1, 2, 1) == [t.Landed(X, b"")]


def test_a_second_final_changes_nothing():
    end = sink()
    assert note(end, m.Final(X, 1, b"meta")) == []
    assert note(end, m.Final(X, 1, b"meta")) == []
    assert land(end, 0, 0, 3) == [t.Landed(X, b"meta")]
    assert note(end, m.Final(X, 1, b"meta")) == []


def test_chunks_that_do_not_cover_all_blocks_never_land():
    end = sink()
    land(end, 0, 0, 2)
    assert note(end, m.Final(X, 1, b"")) == [t.Broken(X, "incomplete"), t.Send(P, STOP)]


def test_chunks_that_overlap_do_not_make_up_for_a_missing_block():
    end = sink()
    land(end, 0, 0, 2)
    land(end, 1, 1, 1)
    assert note(end, m.Final(X, 2, b"")) == [t.Broken(X, "incomplete"), t.Send(P, STOP)]


def test_a_final_of_no_chunks_does_not_land_reserved_blocks():
    assert note(sink(), m.Final(X, 0, b""))[0] == t.Broken(X, "incomplete")


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (2, 2), (3, 1), (0, 4)])
def test_a_chunk_outside_of_the_offer_breaks_the_ticket(first, count):
    actions = note(sink(), m.Chunk(X, 0, first, [0] * count))
    assert actions == [t.Broken(X, "bad_chunk"), t.Send(P, STOP)]


def test_a_bad_checksum_breaks_once_and_frees_only_after_drained():
    end = sink()
    assert land(end, 0, 0, 1, ok=False) == [t.Broken(X, "checksum"), t.Send(P, STOP)]
    assert note(end, m.Chunk(X, 1, 1, [0])) == []
    assert end.handle(t.Verified(X, 1, False), 1.0) == []
    assert note(end, m.Final(X, 2, b"")) == []
    assert end.handle(t.Cancel(X, "aborted"), 1.0) == []
    assert note(end, DRAINED) == [FREED]
    assert end.tickets == {}


def test_a_void_ends_the_ticket_at_once():
    end = sink()
    assert note(end, m.Void(X, "finished")) == [t.Broken(X, "finished"), FREED]


def test_a_void_that_crosses_a_stop_frees_without_a_second_broken():
    assert note(broken(sink()), m.Void(X, "finished")) == [FREED]


def test_drained_without_a_stop_changes_nothing():
    end = sink()
    assert note(end, DRAINED) == []
    assert land(end, 0, 0, 3) == []
    assert note(end, m.Final(X, 1, b"")) == [t.Landed(X, b"")]


@pytest.mark.parametrize("late", [DRAINED, m.Void(X, "x"), m.Final(X, 1, b""), m.Unknown(X)])
def test_nothing_frees_a_ticket_twice(late):
    end = broken(sink())
    assert note(end, DRAINED) == [FREED]
    assert note(end, late) == []
    assert end.handle(t.Fenced(P), 9.0) == []


def test_a_note_of_another_peer_changes_nothing():
    end = sink()
    for message in (m.Void(X, "x"), m.Chunk(X, 0, 0, [0] * 3), m.Final(X, 1, b"")):
        assert note(end, message, peer="prefill#2") == []
    assert note(broken(end), DRAINED, peer="prefill#2") == []


def test_a_lost_peer_breaks_the_ticket_and_only_its_fence_frees_the_blocks():
    end = sink()
    down = end.handle(t.PeerDown(P), 1.0)
    assert down == [t.Broken(X, "peer_lost"), t.Send(P, STOP)]
    assert end.handle(t.PeerDown(P), 1.1) == []
    assert end.handle(t.Fenced("prefill#2"), 1.2) == []
    assert end.handle(t.Fenced(P), 2.0) == [FREED]


def test_a_ticket_that_opens_while_its_peer_is_being_fenced_is_told_broken_before_freed():
    assert sink().handle(t.Fenced(P), 1.0) == [t.Broken(X, "peer_lost"), FREED]


def test_the_loss_of_one_peer_leaves_the_tickets_of_others_alone():
    end = sink()
    end.handle(t.Open("other#0", "prefill#2", [1]), 0.0)
    end.handle(t.PeerDown(P), 1.0)
    assert end.tickets["other#0"].state == "RESERVED"


def test_stop_is_repeated_until_it_is_answered():
    end = broken(sink(), now=1.0)
    assert end.handle(t.Tick(), 1.1) == []
    assert end.handle(t.Tick(), 1.25) == [t.Send(P, STOP)]  # 0.25 > resend_s
    assert end.handle(t.Tick(), 1.3) == []
    assert end.handle(t.Tick(), 1.5) == [t.Send(P, STOP)]
    assert note(end, DRAINED, 1.6) == [FREED]
    assert end.handle(t.Tick(), 2.0) == []


@pytest.mark.parametrize("last", [DRAINED, m.Void(X, "x"), None], ids=["drained", "void", "fence"])
def test_a_silent_source_quarantines_the_blocks_until_it_proves_to_be_done(last):
    end = broken(sink(), now=0.0)
    end.handle(t.Tick(), 9.9)
    assert end.tickets[X].state == "ABORTING"
    end.handle(t.Tick(), 10.1)  # > quarantine_s
    assert end.tickets[X].state == "QUARANTINED"
    assert end.handle(t.Tick(), 1000.0) == [t.Send(P, STOP)]
    freed = note(end, last, 1001.0) if last else end.handle(t.Fenced(P), 1001.0)
    assert freed == [FREED]


def test_silence_asks_and_a_lost_final_comes_again():
    end = sink()
    land(end, 0, 0, 3, now=1.0)
    assert end.handle(t.Tick(), 1.9) == []
    assert end.handle(t.Tick(), 2.1) == [t.Send(P, m.Query(X))]  # 1.1 > idle_s
    assert end.handle(t.Tick(), 2.2) == []
    assert note(end, m.Final(X, 1, b"meta"), 2.3) == [t.Landed(X, b"meta")]


def test_progress_quiets_the_sink_for_another_while():
    end = sink()
    assert end.handle(t.Tick(), 1.1) == [t.Send(P, m.Query(X))]
    assert note(end, m.Progress(X), 2.0) == []
    assert end.handle(t.Tick(), 2.9) == []
    assert end.handle(t.Tick(), 3.1) == [t.Send(P, m.Query(X))]


def test_a_source_that_never_saw_the_offer_gets_it_again():
    assert note(sink(), m.Unknown(X)) == [t.Send(P, m.Offer(X, [7, 8, 9]))]


def test_a_source_that_forgot_a_ticket_in_the_middle_breaks_it():
    end = sink()
    land(end, 0, 0, 1)
    assert note(end, m.Unknown(X)) == [t.Broken(X, "source_forgot"), t.Send(P, STOP)]


def test_a_ticket_that_takes_too_long_is_broken_however_lively_its_source():
    end = sink()
    for second in range(1, 31):
        assert note(end, m.Progress(X), second) == []
        assert end.handle(t.Tick(), second) == []
    actions = end.handle(t.Tick(), 30.1)  # > total_s
    assert actions == [t.Broken(X, "timeout"), t.Send(P, STOP)]


def test_a_cancel_of_an_unknown_ticket_changes_nothing():
    assert t.Sink().handle(t.Cancel(X, "aborted"), 0.0) == []
