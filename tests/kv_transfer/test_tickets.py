"""The sink of a ticket, event by event: what it tells, and when its blocks are free."""

import itertools

import pytest
from diptych.kv_transfer import messages as m
from diptych.kv_transfer import tickets as t

X, P = "request#0", "prefill#1"
LIMITS = t.TicketTimeouts(
    chunk_s=30, idle_s=1, resend_s=0.2, quarantine_s=10, offer_s=20, history_limit=4
)
STOP, DRAINED, FREED = m.StopMessage(X), m.StoppedMessage(X), t.BlocksFreed(X)


def sink(tiles=(7, 8, 9), held=0, hashes=()):
    """A sink with one open ticket, of generation 1."""
    end = t.TicketReceiver(LIMITS)
    offer = m.OfferMessage(X, 1, held, list(tiles)[held:], list(hashes))
    opened = t.OfferTiles(X, P, list(tiles), held, tuple(hashes))
    assert end.handle(opened, 0.0) == [t.SendMessage(P, offer)]
    return end


def chunk(seq, first, count, piece=0, pieces=1, generation=1):
    return m.ChunkMessage(X, generation, seq, first, piece, pieces, [0] * count)


def final(chunks, tiles=3, meta=b"", generation=1):
    return m.FinishMessage(X, generation, chunks, tiles, meta)


def landed(meta=b"", tiles=3):
    return [t.TilesArrived(X, meta, tiles)]


def note(end, message, now=1.0, peer=P):
    return end.handle(t.MessageReceived(peer, message), now)


def land(end, seq, first, count, ok=True, now=1.0, **place):
    """Chunk `seq` arrives and its checksums are computed."""
    verify = note(end, chunk(seq, first, count, **place), now)
    assert [type(action) for action in verify] == [t.VerifyChunk]
    return end.handle(t.ChunkVerified(X, seq, ok), now)


def broken(end, now=1.0):
    """The sink gives up on its ticket: nothing is free yet."""
    assert end.handle(t.CancelTicket(X, "aborted"), now) == [
        t.TransferFailed(X, "aborted"),
        t.SendMessage(P, STOP),
    ]
    return end


def test_a_chunk_is_verified_on_the_tiles_that_were_offered_for_it():
    end = sink()
    came = m.ChunkMessage(X, 1, 0, 1, 0, 1, [11, 12])
    assert note(end, came) == [t.VerifyChunk(X, [8, 9], came)]


def test_a_ticket_lands_when_all_chunks_are_verified_and_the_final_is_there():
    end = sink()
    assert land(end, 0, 0, 2) == []
    assert land(end, 1, 2, 1) == []
    assert note(end, final(2, meta=b"meta")) == landed(b"meta")
    assert end.tickets == {}


@pytest.mark.parametrize("order", ["final first", "chunks backwards", "final between"])
def test_the_order_of_arrival_does_not_matter(order):
    end = sink()
    steps = {"f": lambda: note(end, final(2)), "0": lambda: land(end, 0, 0, 2)}
    steps["1"] = lambda: land(end, 1, 2, 1)
    sequence = {"final first": "f01", "chunks backwards": "10f", "final between": "1f0"}[order]
    outcomes = [steps[step]() for step in sequence]
    assert outcomes == [[], [], landed()]


def test_a_chunk_that_arrived_but_was_not_verified_does_not_count():
    end = sink()
    note(end, chunk(0, 0, 3))
    assert note(end, final(1)) == []
    assert end.handle(t.ChunkVerified(X, 0, True), 1.0) == landed()


def test_a_chunk_that_comes_twice_counts_once():
    end = sink()
    land(end, 0, 0, 2)
    assert note(end, chunk(0, 0, 2)) == []
    assert note(end, final(2)) == []
    assert land(end, 1, 2, 1) == landed()


def test_a_second_final_changes_nothing():
    end = sink()
    assert note(end, final(1, meta=b"meta")) == []
    assert note(end, final(1, meta=b"meta")) == []
    assert land(end, 0, 0, 3) == landed(b"meta")
    assert note(end, final(1, meta=b"meta")) == []


def test_chunks_that_do_not_cover_all_blocks_never_land():
    end = sink()
    land(end, 0, 0, 2)
    assert note(end, final(1)) == [t.TransferFailed(X, "incomplete"), t.SendMessage(P, STOP)]


def test_chunks_that_overlap_do_not_make_up_for_a_missing_block():
    end = sink()
    land(end, 0, 0, 2)
    land(end, 1, 1, 1)
    assert note(end, final(2)) == [t.TransferFailed(X, "incomplete"), t.SendMessage(P, STOP)]


def test_a_final_of_no_chunks_does_not_land_reserved_blocks():
    assert note(sink(), final(0))[0] == t.TransferFailed(X, "incomplete")


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (2, 2), (3, 1), (0, 4)])
def test_a_chunk_outside_of_the_offer_breaks_the_ticket(first, count):
    actions = note(sink(), chunk(0, first, count))
    assert actions == [t.TransferFailed(X, "bad_chunk"), t.SendMessage(P, STOP)]


def test_a_bad_checksum_breaks_once_and_frees_only_after_drained():
    end = sink()
    assert land(end, 0, 0, 1, ok=False) == [t.TransferFailed(X, "checksum"), t.SendMessage(P, STOP)]
    assert note(end, chunk(1, 1, 1)) == []
    assert end.handle(t.ChunkVerified(X, 1, False), 1.0) == []
    assert note(end, final(2)) == []
    assert end.handle(t.CancelTicket(X, "aborted"), 1.0) == []
    assert note(end, DRAINED) == [FREED]
    assert end.tickets == {}


def test_a_void_ends_the_ticket_at_once():
    end = sink()
    assert note(end, m.FailedMessage(X, "finished")) == [t.TransferFailed(X, "finished"), FREED]


def test_a_void_that_crosses_a_stop_frees_without_a_second_broken():
    assert note(broken(sink()), m.FailedMessage(X, "finished")) == [FREED]


def test_drained_without_a_stop_changes_nothing():
    end = sink()
    assert note(end, DRAINED) == []
    assert land(end, 0, 0, 3) == []
    assert note(end, final(1)) == landed()


@pytest.mark.parametrize(
    "late", [DRAINED, m.FailedMessage(X, "x"), final(1), m.UnknownTicketMessage(X)]
)
def test_nothing_frees_a_ticket_twice(late):
    end = broken(sink())
    assert note(end, DRAINED) == [FREED]
    assert note(end, late) == []
    assert end.handle(t.PeerFenced(P), 9.0) == []


def test_a_note_of_another_peer_changes_nothing():
    end = sink()
    for message in (m.FailedMessage(X, "x"), chunk(0, 0, 3), final(1)):
        assert note(end, message, peer="prefill#2") == []
    assert note(broken(end), DRAINED, peer="prefill#2") == []


def test_a_lost_peer_breaks_the_ticket_and_only_its_fence_frees_the_blocks():
    end = sink()
    down = end.handle(t.PeerWentDown(P), 1.0)
    assert down == [t.TransferFailed(X, "peer_lost"), t.SendMessage(P, STOP)]
    assert end.handle(t.PeerWentDown(P), 1.1) == []
    assert end.handle(t.PeerFenced("prefill#2"), 1.2) == []
    assert end.handle(t.PeerFenced(P), 2.0) == [FREED]


def test_a_ticket_that_opens_while_its_peer_is_being_fenced_is_told_broken_before_freed():
    assert sink().handle(t.PeerFenced(P), 1.0) == [t.TransferFailed(X, "peer_lost"), FREED]


def test_the_loss_of_one_peer_leaves_the_tickets_of_others_alone():
    end = sink()
    end.handle(t.OfferTiles("other#0", "prefill#2", [1]), 0.0)
    end.handle(t.PeerWentDown(P), 1.0)
    assert end.tickets["other#0"].state is t.ReceivingState.RESERVED


def test_stop_is_repeated_until_it_is_answered():
    end = broken(sink(), now=1.0)
    assert end.handle(t.TicketTick(), 1.1) == []
    assert end.handle(t.TicketTick(), 1.25) == [t.SendMessage(P, STOP)]  # 0.25 > resend_s
    assert end.handle(t.TicketTick(), 1.3) == []
    assert end.handle(t.TicketTick(), 1.5) == [t.SendMessage(P, STOP)]
    assert note(end, DRAINED, 1.6) == [FREED]
    assert end.handle(t.TicketTick(), 2.0) == []


@pytest.mark.parametrize(
    "last", [DRAINED, m.FailedMessage(X, "x"), None], ids=["drained", "void", "fence"]
)
def test_a_silent_source_quarantines_the_blocks_until_it_proves_to_be_done(last):
    end = broken(sink(), now=0.0)
    end.handle(t.TicketTick(), 9.9)
    assert end.tickets[X].state is t.ReceivingState.ABORTING
    end.handle(t.TicketTick(), 10.1)  # > quarantine_s
    assert end.tickets[X].state is t.ReceivingState.QUARANTINED
    assert end.handle(t.TicketTick(), 1000.0) == [t.SendMessage(P, STOP)]
    freed = note(end, last, 1001.0) if last else end.handle(t.PeerFenced(P), 1001.0)
    assert freed == [FREED]


def test_silence_asks_and_a_lost_final_comes_again():
    end = sink()
    land(end, 0, 0, 3, now=1.0)
    assert end.handle(t.TicketTick(), 1.9) == []
    assert end.handle(t.TicketTick(), 2.1) == [
        t.SendMessage(P, m.QueryMessage(X, begun=True))
    ]  # 1.1 > idle_s
    assert end.handle(t.TicketTick(), 2.2) == []
    assert note(end, final(1, meta=b"meta"), 2.3) == landed(b"meta")


def test_progress_quiets_the_sink_for_another_while():
    end = sink()
    assert end.handle(t.TicketTick(), 1.1) == [t.SendMessage(P, m.QueryMessage(X))]
    assert note(end, m.ProgressMessage(X), 2.0) == []
    assert end.handle(t.TicketTick(), 2.9) == []
    assert end.handle(t.TicketTick(), 3.1) == [t.SendMessage(P, m.QueryMessage(X))]


def test_a_source_that_answers_no_query_breaks_the_ticket():
    end = sink()
    for asked_at in (1.1, 2.2, 3.3):
        assert end.handle(t.TicketTick(), asked_at) == [t.SendMessage(P, m.QueryMessage(X))]
    assert end.handle(t.TicketTick(), 4.2) == []
    silent = [t.TransferFailed(X, "silent"), t.SendMessage(P, STOP)]
    assert end.handle(t.TicketTick(), 4.4) == silent


def test_an_answer_makes_up_for_queries_without_one():
    end = sink()
    for asked_at in (1.1, 2.2, 3.3):
        end.handle(t.TicketTick(), asked_at)
    note(end, m.ProgressMessage(X), 3.5)
    for asked_at in (4.6, 5.7, 6.8):
        assert end.handle(t.TicketTick(), asked_at) == [t.SendMessage(P, m.QueryMessage(X))]


def test_a_source_that_is_busy_with_other_tickets_is_not_silent():
    end = sink()
    for asked_at in (1.1, 2.2, 3.3, 4.4, 5.5, 6.6):
        assert end.handle(t.TicketTick(), asked_at) == [t.SendMessage(P, m.QueryMessage(X))]
        note(end, m.ProgressMessage("another#0"), asked_at + 0.1)


def test_a_sink_that_was_frozen_asks_before_it_gives_up():
    end = sink()
    assert end.handle(t.TicketTick(), 20.0) == [t.SendMessage(P, m.QueryMessage(X))]
    assert note(end, m.ProgressMessage(X), 20.1) == []


def test_a_source_that_never_saw_the_offer_gets_it_again():
    assert note(sink(), m.UnknownTicketMessage(X)) == [
        t.SendMessage(P, m.OfferMessage(X, 1, 0, [7, 8, 9]))
    ]


def test_a_source_that_forgot_a_ticket_in_the_middle_breaks_it():
    end = sink()
    land(end, 0, 0, 1)
    assert end.handle(t.TicketTick(), 2.1) == [t.SendMessage(P, m.QueryMessage(X, begun=True))]
    forgot = note(end, m.UnknownTicketMessage(X, begun=True))
    assert forgot == [t.TransferFailed(X, "source_forgot"), t.SendMessage(P, STOP)]


def test_an_answer_that_was_overtaken_by_the_first_chunk_changes_nothing():
    end = sink()
    assert end.handle(t.TicketTick(), 1.1) == [t.SendMessage(P, m.QueryMessage(X, begun=False))]
    land(end, 0, 0, 3, now=1.2)
    assert note(end, m.UnknownTicketMessage(X, begun=False), 1.3) == []
    assert note(end, final(1), 1.4) == landed()


def test_a_ticket_that_takes_too_long_is_broken_however_lively_its_source():
    end = sink()
    for second in range(1, 31):
        assert note(end, m.ProgressMessage(X), second) == []
        assert end.handle(t.TicketTick(), second) == []
    actions = end.handle(t.TicketTick(), 30.1)  # > chunk_s
    assert actions == [t.TransferFailed(X, "timeout"), t.SendMessage(P, STOP)]


def test_a_ticket_of_which_chunks_come_may_take_as_long_as_they_take():
    end = sink()
    for number, second in enumerate((29.9, 59.8)):
        land(end, number, number, 1, now=second)
        assert end.handle(t.TicketTick(), second + 0.2) == []
    land(end, 2, 2, 1, now=80.0)
    assert note(end, final(3), 80.1) == landed()


def test_a_cancel_of_an_unknown_ticket_changes_nothing():
    assert t.TicketReceiver().handle(t.CancelTicket(X, "aborted"), 0.0) == []


# ---- generations ---------------------------------------------------------------------------------


def test_each_reservation_has_a_generation_of_its_own():
    end = sink()
    note(end, m.FailedMessage(X, "x"))
    again = end.handle(t.OfferTiles(X, P, [7, 8, 9]), 2.0)
    assert again == [t.SendMessage(P, m.OfferMessage(X, 2, 0, [7, 8, 9]))]


@pytest.mark.parametrize("other", [0, 2])
def test_a_chunk_of_another_reservation_changes_nothing(other):
    end = sink()
    assert note(end, chunk(0, 0, 3, generation=other)) == []
    assert note(end, chunk(5, 2, 9, generation=other)) == []  # not even where it makes no sense
    assert land(end, 0, 0, 3) == []
    assert note(end, final(1)) == landed()


@pytest.mark.parametrize("other", [0, 2])
def test_a_final_of_another_reservation_changes_nothing(other):
    end = sink()
    land(end, 0, 0, 3)
    assert note(end, final(1, meta=b"old", generation=other)) == []
    assert note(end, final(0, tiles=9, generation=other)) == []
    assert note(end, final(1, meta=b"new")) == landed(b"new")


# ---- held tiles ----------------------------------------------------------------------------------


def test_held_tiles_are_not_offered_and_count_as_landed():
    end = sink(held=2)
    verify = note(end, chunk(0, 2, 1))
    assert verify == [t.VerifyChunk(X, [9], chunk(0, 2, 1))]
    assert end.handle(t.ChunkVerified(X, 0, True), 1.0) == []
    assert note(end, final(1)) == landed()


def test_a_ticket_whose_tiles_are_all_held_lands_with_the_final_alone():
    end = sink(held=3)
    assert note(end, final(0, meta=b"meta")) == landed(b"meta")


@pytest.mark.parametrize(("first", "count"), [(1, 1), (1, 2), (0, 3)])
def test_a_chunk_that_would_fill_a_held_tile_breaks_the_ticket(first, count):
    actions = note(sink(held=2), chunk(0, first, count))
    assert actions == [t.TransferFailed(X, "bad_chunk"), t.SendMessage(P, STOP)]


def test_held_tiles_do_not_make_up_for_a_missing_one():
    end = sink(held=1)
    land(end, 0, 1, 1)
    assert note(end, final(1))[0] == t.TransferFailed(X, "incomplete")


# ---- pieces --------------------------------------------------------------------------------------

PIECES = [(first, piece) for first in (0, 1) for piece in (0, 1, 2)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(6)))[::37])
def test_pieces_land_in_any_order(order):
    end = sink(tiles=(7, 8))
    assert note(end, final(6, tiles=2)) == []
    told = []
    for seq in order:
        first, piece = PIECES[seq]
        told += land(end, seq, first, 1, piece=piece, pieces=3)
    assert told == landed(tiles=2)


@pytest.mark.parametrize("missing", range(6))
def test_a_piece_that_is_missing_never_lands(missing):
    end = sink(tiles=(7, 8))
    for seq, (first, piece) in enumerate(PIECES):
        if seq != missing:
            land(end, seq, first, 1, piece=piece, pieces=3)
    assert note(end, final(5, tiles=2))[0] == t.TransferFailed(X, "incomplete")


def test_all_pieces_at_once_go_together_with_single_ones():
    end = sink()
    land(end, 0, 0, 2, piece=-1, pieces=2)
    land(end, 1, 2, 1, piece=0, pieces=2)
    assert note(end, final(3)) == []
    assert land(end, 2, 2, 1, piece=1, pieces=2) == landed()


def test_all_pieces_of_one_tile_do_not_make_up_for_a_piece_of_another():
    end = sink(tiles=(7, 8))
    land(end, 0, 0, 1, piece=-1, pieces=2)
    land(end, 1, 1, 1, piece=0, pieces=2)
    assert note(end, final(2, tiles=2))[0] == t.TransferFailed(X, "incomplete")


def test_chunks_that_cut_their_tiles_into_different_numbers_of_pieces_never_land():
    end = sink(tiles=(7, 8))
    land(end, 0, 0, 1, piece=-1, pieces=1)
    land(end, 1, 1, 1, piece=-1, pieces=2)
    assert note(end, final(2, tiles=2))[0] == t.TransferFailed(X, "incomplete")


@pytest.mark.parametrize(("piece", "pieces"), [(-2, 2), (2, 2), (0, 0), (-1, 0), (-1, -1)])
def test_a_piece_that_cannot_be_breaks_the_ticket(piece, pieces):
    actions = note(sink(), chunk(0, 0, 3, piece=piece, pieces=pieces))
    assert actions == [t.TransferFailed(X, "bad_chunk"), t.SendMessage(P, STOP)]


# ---- prefix requests -----------------------------------------------------------------------------

HASHES = (b"h0", b"h1", b"h2")


def test_a_prefix_request_carries_its_hashes_and_takes_what_the_source_has():
    end = sink(hashes=HASHES)
    land(end, 0, 0, 2)
    assert note(end, final(1, tiles=2)) == landed(tiles=2)


@pytest.mark.parametrize("held", [0, 1])
def test_a_prefix_request_that_brings_nothing_lands_with_what_was_held(held):
    end = sink(held=held, hashes=HASHES)
    assert note(end, final(0, tiles=held)) == landed(tiles=held)


@pytest.mark.parametrize(("held", "tiles"), [(2, 1), (0, 4)])
def test_a_prefix_request_takes_no_fewer_than_held_and_no_more_than_asked(held, tiles):
    end = sink(held=held, hashes=HASHES)
    assert note(end, final(0, tiles=tiles))[0] == t.TransferFailed(X, "incomplete")


@pytest.mark.parametrize("tiles", [0, 2, 4])
def test_who_asked_for_all_tiles_takes_no_other_number(tiles):
    end = sink()
    land(end, 0, 0, 2)
    assert note(end, final(1, tiles=tiles))[0] == t.TransferFailed(X, "incomplete")


def test_a_tile_behind_the_delivered_ones_does_not_make_up_for_one_of_them():
    end = sink(hashes=HASHES)
    land(end, 0, 1, 2)
    assert note(end, final(1, tiles=2))[0] == t.TransferFailed(X, "incomplete")


def test_a_source_that_has_nothing_of_a_prefix_ends_it_at_once():
    assert note(sink(hashes=HASHES), m.FailedMessage(X, "miss")) == [
        t.TransferFailed(X, "miss"),
        FREED,
    ]


# ---- times ---------------------------------------------------------------------------------------


def test_what_was_exposed_lasts_until_the_last_checksum_holds():
    end = sink()
    note(end, chunk(0, 0, 3), now=4.0)
    assert note(end, m.FinishMessage(X, 1, 1, 3, b"", busy_s=2.5, exposed_s=0.5), now=5.0) == []
    (told,) = end.handle(t.ChunkVerified(X, 0, True), 5.25)
    assert (told.busy_s, told.exposed_s) == (2.5, 0.75)  # 0.5 at the source, 0.25 here
