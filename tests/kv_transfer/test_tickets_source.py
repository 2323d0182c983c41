"""The source of a ticket, event by event: what it posts, and when its blocks may be released."""

import pytest
from diptych.kv_transfer import messages as m
from diptych.kv_transfer import tickets as t

X, D = "request#0", "decode#1"
LIMITS = t.TicketTimeouts(
    chunk_s=30, idle_s=1, resend_s=0.2, quarantine_s=10, offer_s=20, history_limit=4
)
STOP, DRAINED = m.StopMessage(X), m.StoppedMessage(X)


def source(*events):
    """A source that expects the ticket; returns it after `events`."""
    end = t.TicketSender(LIMITS)
    assert end.handle(t.ExpectTileOffer(X, D), 0.0) == []
    for event in events:
        end.handle(event, 0.0)
    return end


def told(end, message, now=1.0, peer=D):
    return end.handle(t.MessageReceived(peer, message), now)


OFFER = t.MessageReceived(D, m.OfferMessage(X, 5, 0, [7, 8, 9]))
PUSH = t.PushTiles(X, 0, [1, 2])
WRITTEN, FINISH = t.WriteEnded(X, True), t.FinishTilePush(X, 3, b"meta")


def posted(seq, first, source, target, piece=0, pieces=1):
    return t.WriteTiles(X, D, 5, seq, first, source, target, piece, pieces)


POST = posted(0, 0, [1, 2], [7, 8])


def final(chunks, tiles=3, **times):
    return m.FinishMessage(X, 5, chunks, tiles, b"meta", **times)


def closed(reason, message):
    return [t.SendMessage(D, message), t.PushEnded(X, False, reason)]


def test_a_push_is_written_to_the_blocks_that_were_offered():
    end = source(OFFER)
    assert end.handle(PUSH, 1.0) == [POST]
    assert end.handle(t.PushTiles(X, 2, [3]), 1.0) == [posted(1, 2, [3], [9])]


def test_pushes_wait_for_the_offer():
    end = source()
    assert end.handle(PUSH, 1.0) == []
    assert end.handle(t.PushTiles(X, 2, [3]), 1.0) == []
    assert end.handle(OFFER, 2.0) == [POST, posted(1, 2, [3], [9])]


def test_an_offer_before_its_expect_is_kept():
    end = t.TicketSender(LIMITS)
    assert end.handle(OFFER, 0.0) == []
    assert end.handle(t.ExpectTileOffer(X, D), 1.0) == []
    assert end.handle(PUSH, 1.0) == [POST]


def test_early_offers_are_bounded_and_the_oldest_is_dropped():
    end = t.TicketSender(LIMITS)
    for index in range(5):  # remember = 4
        end.handle(t.MessageReceived(D, m.OfferMessage(f"r{index}#0", 1, 0, [1])), 0.0)
    assert list(end.early_offers) == ["r1#0", "r2#0", "r3#0", "r4#0"]


def test_a_second_offer_changes_nothing():
    end = source(OFFER)
    assert told(end, m.OfferMessage(X, 6, 0, [4, 5, 6])) == []
    assert end.handle(PUSH, 1.0) == [POST]


def test_an_offer_of_another_peer_is_not_taken():
    end = source()
    assert told(end, m.OfferMessage(X, 6, 0, [4, 5]), peer="decode#2") == []
    assert end.handle(PUSH, 1.0) == []


def test_a_ticket_closes_when_it_is_finished_and_every_write_is_terminal():
    end = source(OFFER, PUSH, t.PushTiles(X, 2, [3]))
    assert end.handle(FINISH, 1.0) == []
    assert end.handle(WRITTEN, 1.0) == []
    assert end.handle(WRITTEN, 1.0) == [
        t.SendMessage(D, final(2, busy_s=1.0)),
        t.PushEnded(X, True),
    ]


def test_a_finish_after_the_last_write_closes_at_once():
    end = source(OFFER, PUSH, WRITTEN)
    assert end.handle(FINISH, 1.0) == [t.SendMessage(D, final(1)), t.PushEnded(X, True)]


def test_a_finish_before_the_offer_waits_for_it():
    end = source(PUSH)
    assert end.handle(FINISH, 1.0) == []
    assert end.handle(OFFER, 1.0) == [POST]


def test_a_stop_while_a_write_is_under_way_is_answered_when_it_is_terminal():
    end = source(OFFER, PUSH)
    assert told(end, STOP) == []
    assert told(end, STOP) == []
    assert end.handle(t.PushTiles(X, 2, [3]), 1.0) == []
    assert end.handle(FINISH, 1.0) == []
    assert end.handle(WRITTEN, 2.0) == closed("aborted", DRAINED)


def test_every_write_must_be_terminal_before_drained():
    end = source(OFFER, PUSH, t.PushTiles(X, 2, [3]))
    told(end, STOP)
    assert end.handle(t.WriteEnded(X, False, "peer_lost"), 2.0) == []
    assert end.handle(WRITTEN, 2.0) == closed("aborted", DRAINED)


def test_a_stop_without_a_write_is_answered_at_once_and_again_when_repeated():
    end = source(OFFER)
    assert told(end, STOP) == closed("aborted", DRAINED)
    assert told(end, STOP) == [t.SendMessage(D, DRAINED)]


def test_a_stop_before_expect_is_drained_and_a_later_expect_closes_at_once():
    end = t.TicketSender(LIMITS)
    end.handle(OFFER, 0.0)
    assert told(end, STOP) == [t.SendMessage(D, DRAINED)]
    assert end.handle(OFFER, 0.5) == []
    assert end.handle(t.ExpectTileOffer(X, D), 1.0) == [t.PushEnded(X, False, "aborted")]
    assert end.handle(PUSH, 1.0) == []
    assert end.handle(FINISH, 1.0) == []


def test_a_stop_after_the_final_is_drained():
    end = source(OFFER, PUSH, WRITTEN, FINISH)
    assert told(end, STOP) == [t.SendMessage(D, DRAINED)]


def test_a_cancel_while_a_write_is_under_way_closes_only_when_it_is_terminal():
    end = source(OFFER, PUSH)
    assert end.handle(t.CancelTicket(X, "finished"), 1.0) == []
    assert end.handle(t.CancelTicket(X, "aborted"), 1.0) == []
    assert end.handle(WRITTEN, 2.0) == closed("finished", m.FailedMessage(X, "finished"))


def test_a_cancel_before_the_offer_voids_and_a_later_offer_opens_nothing():
    end = source(PUSH)
    assert end.handle(t.CancelTicket(X, "finished"), 1.0) == closed(
        "finished", m.FailedMessage(X, "finished")
    )
    assert end.handle(OFFER, 2.0) == []
    assert end.early_offers == {}
    assert told(end, m.QueryMessage(X)) == [t.SendMessage(D, m.FailedMessage(X, "finished"))]


def test_a_failed_write_closes_the_ticket():
    end = source(OFFER, PUSH)
    assert end.handle(t.WriteEnded(X, False, "disconnect"), 1.0) == closed(
        "disconnect", m.FailedMessage(X, "disconnect")
    )


def test_a_lost_peer_closes_its_tickets_when_their_writes_are_terminal():
    end = source(OFFER, PUSH)
    assert end.handle(t.PeerWentDown("decode#2"), 1.0) == []
    assert end.handle(t.PeerWentDown(D), 1.0) == []
    assert end.handle(t.PeerFenced(D), 1.5) == []
    assert end.handle(t.WriteEnded(X, False, "x"), 2.0)[-1] == t.PushEnded(X, False, "peer_lost")


def test_an_offer_that_is_too_small_closes_after_what_was_posted():
    end = source(PUSH, t.PushTiles(X, 2, [3, 4]))
    assert end.handle(OFFER, 1.0) == [POST]
    assert end.handle(WRITTEN, 1.0) == closed(
        "offer_too_small", m.FailedMessage(X, "offer_too_small")
    )


def test_no_offer_in_time_closes_the_ticket():
    end = source(PUSH)
    assert end.handle(t.TicketTick(), 20.0) == []
    assert end.handle(t.TicketTick(), 20.1) == closed(
        "no_offer", m.FailedMessage(X, "no_offer")
    )  # > offer_s


def test_an_open_ticket_waits_for_its_pushes_without_a_limit():
    assert source(OFFER).handle(t.TicketTick(), 1000.0) == []


def test_a_query_is_answered_by_what_is_known():
    end = source(OFFER)
    assert told(end, m.QueryMessage(X)) == [t.SendMessage(D, m.ProgressMessage(X))]
    for event in (PUSH, WRITTEN, FINISH):
        end.handle(event, 1.0)
    assert told(end, m.QueryMessage(X)) == [t.SendMessage(D, final(1))]
    for begun in (False, True):
        unknown = m.UnknownTicketMessage("other#0", begun)
        assert told(end, m.QueryMessage("other#0", begun)) == [t.SendMessage(D, unknown)]


def test_answers_of_tickets_that_are_over_are_bounded():
    end = source(OFFER, PUSH, WRITTEN, FINISH)
    for index in range(4):  # remember = 4
        told(end, m.StopMessage(f"r{index}#0"))
    assert told(end, m.QueryMessage(X)) == [t.SendMessage(D, m.UnknownTicketMessage(X))]


# ---- held tiles ----------------------------------------------------------------------------------


def held(first):
    """The sink holds `first` of three tiles."""
    return t.MessageReceived(D, m.OfferMessage(X, 5, first, [7, 8, 9][first:]))


def test_only_what_the_sink_does_not_hold_is_written():
    end = source(held(1))
    assert end.handle(PUSH, 1.0) == [posted(0, 1, [2], [8])]
    assert end.handle(t.PushTiles(X, 2, [3]), 1.0) == [posted(1, 2, [3], [9])]


def test_a_push_that_the_sink_holds_is_no_chunk():
    end = source(held(2))
    assert end.handle(PUSH, 1.0) == []
    assert end.handle(t.PushTiles(X, 2, [3]), 1.0) == [posted(0, 2, [3], [9])]
    end.handle(WRITTEN, 1.0)
    assert end.handle(FINISH, 1.0) == [t.SendMessage(D, final(1)), t.PushEnded(X, True)]


@pytest.mark.parametrize("order", ["offer first", "offer last"])
def test_if_all_is_held_nothing_is_written_and_the_final_goes_at_once(order):
    events = [PUSH, t.PushTiles(X, 2, [3]), FINISH]
    events.insert(0 if order == "offer first" else 3, held(3))
    end = source(*events[:-1])
    assert end.handle(events[-1], 1.0) == [t.SendMessage(D, final(0)), t.PushEnded(X, True)]


def test_an_offer_that_is_too_small_behind_held_tiles_closes_the_ticket():
    end = source(held(2))
    too_small = closed("offer_too_small", m.FailedMessage(X, "offer_too_small"))
    assert end.handle(t.PushTiles(X, 2, [3, 4]), 1.0) == too_small


# ---- pieces --------------------------------------------------------------------------------------


def test_each_piece_is_a_chunk_of_its_own():
    end = source(OFFER)
    posts = [
        end.handle(t.PushTiles(X, 0, [1, 2], piece, 3), 1.0)
        for piece in (2, 0, 1)  # any order
    ]
    assert posts == [
        [posted(seq, 0, [1, 2], [7, 8], piece, 3)] for seq, piece in enumerate((2, 0, 1))
    ]
    assert end.handle(t.PushTiles(X, 2, [3], -1, 3), 1.0) == [posted(3, 2, [3], [9], -1, 3)]


# ---- prefix requests -----------------------------------------------------------------------------

ASKED = t.MessageReceived(D, m.OfferMessage(X, 5, 0, [7, 8, 9], [b"h0", b"h1", b"h2"]))


def asked():
    end = t.TicketSender(LIMITS)
    assert end.handle(ASKED, 0.0) == [t.PrefixRequested(X, D, (b"h0", b"h1", b"h2"))]
    return end


def test_a_prefix_request_is_told_once_however_often_it_is_repeated():
    end = asked()
    assert end.handle(ASKED, 0.5) == []
    assert end.handle(t.ExpectTileOffer(X, D), 1.0) == []
    assert end.handle(ASKED, 1.5) == []
    end.handle(t.CancelTicket(X, "miss"), 2.0)
    assert end.handle(ASKED, 2.5) == []


def test_a_prefix_request_that_waits_is_told_at_every_query_until_it_is_expected():
    """Who was told at first may not have known the peer."""
    end = asked()
    again = t.PrefixRequested(X, D, (b"h0", b"h1", b"h2"))
    query = t.MessageReceived(D, m.QueryMessage(X, 0))
    assert end.handle(query, 1.0) == [t.SendMessage(D, m.ProgressMessage(X)), again]
    end.handle(t.ExpectTileOffer(X, D), 1.0)
    assert end.handle(query, 2.0) == [t.SendMessage(D, m.ProgressMessage(X))]


def test_a_prefix_request_that_was_expected_already_asks_nobody():
    end = source()
    assert end.handle(ASKED, 1.0) == []
    assert end.handle(PUSH, 1.0) == [POST]


def test_a_source_delivers_as_many_leading_tiles_as_it_has():
    end = asked()
    end.handle(t.ExpectTileOffer(X, D), 1.0)
    assert end.handle(PUSH, 1.0) == [POST]
    assert end.handle(t.FinishTilePush(X, 2, b"meta"), 1.0) == []
    assert end.handle(WRITTEN, 1.0) == [t.SendMessage(D, final(1, tiles=2)), t.PushEnded(X, True)]


def test_a_source_that_has_nothing_says_so_at_once():
    end = asked()
    end.handle(t.ExpectTileOffer(X, D), 1.0)
    assert end.handle(t.CancelTicket(X, "miss"), 1.0) == closed("miss", m.FailedMessage(X, "miss"))


def test_a_prefix_request_that_was_stopped_closes_at_its_expect():
    end = asked()
    assert told(end, STOP) == [t.SendMessage(D, DRAINED)]
    assert end.handle(ASKED, 0.5) == []
    assert end.handle(t.ExpectTileOffer(X, D), 1.0) == [t.PushEnded(X, False, "aborted")]


# ---- times ---------------------------------------------------------------------------------------


def test_busy_is_the_time_with_a_write_under_way_and_exposed_what_is_left_after_the_finish():
    end = source(OFFER)
    end.handle(PUSH, 1.0)
    end.handle(t.PushTiles(X, 2, [3]), 2.0)
    end.handle(WRITTEN, 3.0)
    end.handle(WRITTEN, 4.0)  # busy from 1 to 4
    end.handle(t.PushTiles(X, 0, [1]), 10.0)
    end.handle(FINISH, 11.0)
    actions = end.handle(WRITTEN, 13.0)  # busy from 10 to 13, from 11 on exposed
    assert actions[0] == t.SendMessage(D, final(3, busy_s=6.0, exposed_s=2.0))


def test_nothing_is_exposed_where_nothing_travels():
    end = source(FINISH)
    assert end.handle(held(3), 9.0)[0] == t.SendMessage(D, final(0))


# ---- lost peers ----------------------------------------------------------------------------------


def test_an_early_offer_of_a_peer_that_was_lost_since_is_not_taken():
    end = t.TicketSender(LIMITS)
    end.handle(OFFER, 0.0)
    end.handle(t.MessageReceived("decode#2", m.OfferMessage("other#0", 1, 0, [1])), 0.0)
    end.handle(t.PeerWentDown(D), 1.0)
    assert list(end.early_offers) == ["other#0"]
    end.handle(t.ExpectTileOffer(X, D), 2.0)
    assert end.handle(PUSH, 2.0) == []


def test_a_source_that_waits_for_an_offer_asks_for_it():
    """A lost offer comes again: the sink repeats it when it hears that nobody knows it."""
    assert told(source(PUSH), m.QueryMessage(X)) == [t.SendMessage(D, m.UnknownTicketMessage(X))]
    end = t.TicketSender(LIMITS)
    end.handle(OFFER, 0.0)
    assert told(end, m.QueryMessage(X)) == [t.SendMessage(D, m.ProgressMessage(X))]
