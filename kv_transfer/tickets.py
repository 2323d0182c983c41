"""The two ends of a KV ticket, as pure state machines: `handle(event, now)` returns actions.

A ticket is one transfer between one rank of a receiver (mostly a decode worker) and one rank of a
sender (mostly a prefill worker). The machines count in tiles, the unit that both ends share
(`slices`); the worker's vocabulary in blocks is that of `commands`. What the machines take and return
is in `ticket_events`.

A *chunk* is what one write carries. Whoever carries `WriteTiles` out sends a `ChunkMessage` with the
checksums behind the data. An offer with `hashes` asks the sender, whatever its role, for a cached
prefix: it comes unexpected, and the sender's owner is told by `PrefixRequested`.

Receiver:
    RESERVED     `OfferTiles` has reserved tiles and sent them to the sender.
                 Every chunk verified, and `FinishMessage` there: `TilesArrived`, the ticket ends.
                 Cancelled, timed out, bad checksum, failed sender, lost or silent peer:
                 `TransferFailed`.
    ABORTING     The transfer has failed; `StopMessage` is repeated until the sender has stopped.
                 `StoppedMessage`, `FailedMessage` or a dead peer's fence: `BlocksFreed`, it ends.
    QUARANTINED  None of these came in time. The tiles stay reserved until one of the three comes.
Sender:
    WAITING      `ExpectTileOffer` was given, the offer has not come; pushes wait for it.
    OPEN         The offer is there: each push becomes a write. `FinishTilePush`, and every write
                 ended: `FinishMessage` goes out, `PushEnded(ok=True)`, the ticket ends.
    CLOSING      Stopped, cancelled, failed write, lost peer: nothing more is written. No write
                 under way: `StoppedMessage` or `FailedMessage` goes out, `PushEnded(ok=False)`.

A tile is used again only when no write can land on it any more. One thread owns a machine and its
transport, so a write counts as under way from when it is admitted, before it can be posted.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product
from typing import TypeVar, assert_never

from .commands import BlocksFreed, PrefixRequested, PushEnded, TransferFailed
from .messages import (
    AnyMessage,
    ChunkMessage,
    FailedMessage,
    FinishMessage,
    GreetMessage,
    OfferMessage,
    ProgressMessage,
    QueryMessage,
    StopMessage,
    StoppedMessage,
    UnknownTicketMessage,
)
from .ticket_events import (
    CancelTicket,
    ChunkVerified,
    ExpectTileOffer,
    FinishTilePush,
    MessageReceived,
    OfferTiles,
    PeerFenced,
    PeerWentDown,
    PushTiles,
    ReceiverAction,
    ReceiverEvent,
    SenderAction,
    SenderEvent,
    SendMessage,
    TicketTick,
    TicketTimeouts,
    TilesArrived,
    VerifyChunk,
    WriteEnded,
    WriteTiles,
)

Action = TypeVar("Action")
Value = TypeVar("Value")


# ---- receiver ------------------------------------------------------------------------------------


class ReceivingState(StrEnum):
    """The states of the receiver that the module's docstring describes."""

    RESERVED = "reserved"
    ABORTING = "aborting"
    QUARANTINED = "quarantined"


@dataclass(slots=True)
class ReceivingTicket:
    """One ticket at the receiver. Moments are seconds of the caller's clock (`now`)."""

    ticket_id: str
    peer: str  #: The agent that was asked to send; messages of anybody else are ignored.
    offer: OfferMessage  #: What was sent to it, with the reserved tiles.
    #: When the offer was sent, or the last chunk came; from the failure on, when that was.
    phase_began_s: float
    last_activity_s: float  #: When a message last came from the sender, or went to it.
    unanswered_queries: int = (
        0  #: Queries in a row after which nothing came from the sender's agent.
    )
    state: ReceivingState = ReceivingState.RESERVED
    chunks: dict[int, ChunkMessage] = field(default_factory=dict)  #: By chunk number.
    verified_chunks: set[int] = field(default_factory=set)  #: Numbers of those that hold.
    finish: FinishMessage | None = None  #: None until the sender has sent it.
    finish_received_s: float = 0.0

    @property
    def end_tile(self) -> int:
        """The number of the ticket's tile behind the last one that was offered."""
        return self.offer.first_tile + len(self.offer.tiles)

    def tiles_of(self, chunk: ChunkMessage) -> list[int] | None:
        """Returns the offered tiles that a chunk fills; None if the chunk does not fit the offer.

        A chunk carries one piece (a run of layers) of its tiles; -1 in `chunk.piece` is all pieces.
        """
        if chunk.pieces < 1 or not -1 <= chunk.piece < chunk.pieces:
            return None
        chunk_end = chunk.first_tile + len(chunk.checksums)
        if chunk.first_tile < self.offer.first_tile or chunk_end > self.end_tile:
            return None
        start = chunk.first_tile - self.offer.first_tile
        return self.offer.tiles[start : start + len(chunk.checksums)]

    def chunks_cover(self, end_tile: int) -> bool:
        """Returns whether the chunks hold every piece of all offered tiles before `end_tile`."""
        first_tile = self.offer.first_tile
        piece_counts = {chunk.pieces for chunk in self.chunks.values()}
        if end_tile <= first_tile:  # nothing was to be sent, as the receiver held all of it
            return end_tile == first_tile and not piece_counts
        if len(piece_counts) != 1:  # no chunk, or chunks that cut tiles into different pieces
            return False
        pieces = piece_counts.pop()
        filled: set[tuple[int, int]] = set()
        for chunk in self.chunks.values():
            chunk_end = min(end_tile, chunk.first_tile + len(chunk.checksums))
            chunk_pieces = range(pieces) if chunk.piece < 0 else (chunk.piece,)
            filled.update(product(range(chunk.first_tile, chunk_end), chunk_pieces))
        return len(filled) == (end_tile - first_tile) * pieces


class TicketReceiver:
    """The receiving end of all tickets of one rank."""

    def __init__(self, timeouts: TicketTimeouts | None = None) -> None:
        """None: the defaults of `TicketTimeouts`."""
        self.timeouts = timeouts or TicketTimeouts()
        self.tickets: dict[str, ReceivingTicket] = {}  #: By ticket id; quarantined ones included.
        #: Number of the last offer. It goes into checksums, so that bytes for an earlier offer of
        #: the same ticket id do not pass.
        self.generation = 0
        #: When each agent last sent a message about any ticket, in seconds of the caller's clock.
        self._last_heard_s: dict[str, float] = {}

    def handle(self, event: ReceiverEvent, now: float) -> list[ReceiverAction]:
        """Takes an event in; returns what the caller must carry out, in this order.

        `now` is in seconds, of a clock that never goes back. An event of a ticket that is not (or
        no longer) here changes nothing.
        """
        match event:
            case OfferTiles():
                return self._offer(event, now)
            case MessageReceived(peer, message):
                self._last_heard_s[peer] = now
                ticket = self.tickets.get(message.ticket_id)
                if ticket is None or ticket.peer != peer:
                    return []
                return self._receive(ticket, message, now)
            case ChunkVerified(ticket_id, chunk_number, ok):
                ticket = self.tickets.get(ticket_id)
                if ticket is None:
                    return []
                return self._verified(ticket, chunk_number, ok, now)
            case CancelTicket(ticket_id, reason):
                ticket = self.tickets.get(ticket_id)
                if ticket is None:
                    return []
                return self._fail_and_stop(ticket, reason, now)
            case PeerWentDown(peer):
                self._last_heard_s.pop(peer, None)
                tickets = self._tickets_with(peer)
                return _joined(self._fail_and_stop(ticket, "peer_lost", now) for ticket in tickets)
            case PeerFenced(peer):
                self._last_heard_s.pop(peer, None)
                tickets = self._tickets_with(peer)
                return _joined(self._fail_and_free(ticket, "peer_lost", now) for ticket in tickets)
            case TicketTick():
                tickets = list(self.tickets.values())
                return _joined(self._check_timeouts(ticket, now) for ticket in tickets)
            case _:
                assert_never(event)

    def _tickets_with(self, peer: str) -> list[ReceivingTicket]:
        return [ticket for ticket in self.tickets.values() if ticket.peer == peer]

    def _offer(self, event: OfferTiles, now: float) -> list[ReceiverAction]:
        assert event.ticket_id not in self.tickets, event.ticket_id
        self.generation += 1
        offer = OfferMessage(
            event.ticket_id,
            self.generation,
            event.held_tiles,
            event.tiles[event.held_tiles :],
            hashes=list(event.hashes),
        )
        self.tickets[event.ticket_id] = ReceivingTicket(
            event.ticket_id, event.peer, offer, phase_began_s=now, last_activity_s=now
        )
        return [SendMessage(event.peer, offer)]

    def _receive(
        self, ticket: ReceivingTicket, message: AnyMessage, now: float
    ) -> list[ReceiverAction]:
        ticket.last_activity_s = now
        reserved = ticket.state is ReceivingState.RESERVED
        match message:
            case ChunkMessage():
                return self._receive_chunk(ticket, message, now) if reserved else []
            case FinishMessage():
                if not reserved or ticket.finish is not None:
                    return []
                if message.generation != ticket.offer.generation:
                    return []
                ticket.finish = message
                ticket.finish_received_s = now
                return self._complete(ticket, now)
            case FailedMessage():
                return self._fail_and_free(ticket, message.reason, now)
            case StoppedMessage():
                return [] if reserved else self._free(ticket)
            case UnknownTicketMessage():
                # The answer to a `QueryMessage`. `begun`: this end had chunks when it asked.
                if message.begun:
                    return self._fail_and_stop(ticket, "source_forgot", now)
                if reserved and not ticket.chunks:  # the offer was lost
                    return [SendMessage(ticket.peer, ticket.offer)]
                return []
            case ProgressMessage() | GreetMessage():
                return []
            case OfferMessage() | StopMessage() | QueryMessage():
                return []  # for the sender of this rank
            case _:
                assert_never(message)

    def _receive_chunk(
        self, ticket: ReceivingTicket, chunk: ChunkMessage, now: float
    ) -> list[ReceiverAction]:
        """Asks for the chunk's checksums to be verified.

        A chunk for another reservation of the tiles, or a second copy, changes nothing.
        """
        if chunk.generation != ticket.offer.generation or chunk.chunk_number in ticket.chunks:
            return []
        tiles = ticket.tiles_of(chunk)
        if tiles is None:
            return self._fail_and_stop(ticket, "bad_chunk", now)
        ticket.chunks[chunk.chunk_number] = chunk
        ticket.phase_began_s = now
        return [VerifyChunk(ticket.ticket_id, tiles, chunk)]

    def _verified(
        self, ticket: ReceivingTicket, chunk_number: int, ok: bool, now: float
    ) -> list[ReceiverAction]:
        if ticket.state is not ReceivingState.RESERVED:
            return []
        if not ok:
            return self._fail_and_stop(ticket, "checksum", now)
        ticket.verified_chunks.add(chunk_number)
        return self._complete(ticket, now)

    def _complete(self, ticket: ReceivingTicket, now: float) -> list[ReceiverAction]:
        """Ends the ticket if the finish message and all of its chunks are there and hold."""
        finish = ticket.finish
        offer = ticket.offer
        if finish is None or len(ticket.verified_chunks) < finish.chunks:
            return []
        if offer.hashes:  # the sender may hold less of a prefix than was asked for
            right_count = offer.first_tile <= finish.tiles <= ticket.end_tile
        else:
            right_count = finish.tiles == ticket.end_tile
        if not right_count or not ticket.chunks_cover(finish.tiles):
            return self._fail_and_stop(ticket, "incomplete", now)
        del self.tickets[ticket.ticket_id]
        arrived = TilesArrived(
            ticket.ticket_id,
            finish.meta,
            finish.tiles,
            busy_s=finish.busy_s,
            exposed_s=finish.exposed_s + now - ticket.finish_received_s,
        )
        return [arrived]

    def _fail(self, ticket: ReceivingTicket, reason: str, now: float) -> list[ReceiverAction]:
        """Reports the failure of a transfer, once. The tiles stay reserved."""
        if ticket.state is not ReceivingState.RESERVED:
            return []
        ticket.state = ReceivingState.ABORTING
        ticket.phase_began_s = now
        ticket.last_activity_s = now
        return [TransferFailed(ticket.ticket_id, reason)]

    def _fail_and_stop(
        self, ticket: ReceivingTicket, reason: str, now: float
    ) -> list[ReceiverAction]:
        """Fails the transfer and asks the sender to stop, unless that was done before."""
        failed = self._fail(ticket, reason, now)
        if not failed:
            return []
        return [*failed, SendMessage(ticket.peer, StopMessage(ticket.ticket_id))]

    def _fail_and_free(
        self, ticket: ReceivingTicket, reason: str, now: float
    ) -> list[ReceiverAction]:
        """Ends the ticket at once, whatever its state: no write can land any more."""
        return [*self._fail(ticket, reason, now), *self._free(ticket)]

    def _free(self, ticket: ReceivingTicket) -> list[ReceiverAction]:
        if self.tickets.pop(ticket.ticket_id, None) is None:
            return []
        return [BlocksFreed(ticket.ticket_id)]

    def _check_timeouts(self, ticket: ReceivingTicket, now: float) -> list[ReceiverAction]:
        timeouts = self.timeouts
        phase_s = now - ticket.phase_began_s
        silent_s = now - ticket.last_activity_s

        # There are two cases: a transfer that still may succeed asks for the sender's state when
        # nothing comes; one that has failed repeats its `StopMessage` until that is answered.
        if ticket.state is ReceivingState.RESERVED:
            if phase_s > timeouts.chunk_s:
                return self._fail_and_stop(ticket, "timeout", now)
            if silent_s <= timeouts.idle_s:
                return []
            # Messages queue up behind data that is on its way, so those of other tickets count too.
            if self._last_heard_s.get(ticket.peer, -math.inf) >= ticket.last_activity_s:
                ticket.unanswered_queries = 0
            if ticket.unanswered_queries == timeouts.queries_limit:
                return self._fail_and_stop(ticket, "silent", now)
            ticket.unanswered_queries += 1
            ticket.last_activity_s = now
            query = QueryMessage(ticket.ticket_id, begun=bool(ticket.chunks))
            return [SendMessage(ticket.peer, query)]

        if ticket.state is ReceivingState.ABORTING and phase_s > timeouts.quarantine_s:
            ticket.state = ReceivingState.QUARANTINED
        aborting = ticket.state is ReceivingState.ABORTING
        resend_s = timeouts.resend_s if aborting else timeouts.idle_s
        if silent_s <= resend_s:
            return []
        ticket.last_activity_s = now
        return [SendMessage(ticket.peer, StopMessage(ticket.ticket_id))]


# ---- sender --------------------------------------------------------------------------------------


class SendingState(StrEnum):
    """The states of the sender that the module's docstring describes."""

    WAITING = "waiting"
    OPEN = "open"
    CLOSING = "closing"


@dataclass(slots=True)
class SendingTicket:
    """One ticket at the sender. Moments are seconds of the caller's clock (`now`)."""

    ticket_id: str
    peer: str  #: The agent that the tiles are pushed to.
    expected_since_s: float  #: When `ExpectTileOffer` came.
    state: SendingState = SendingState.WAITING
    offer: OfferMessage | None = None  #: None until it has come.
    waiting_pushes: list[PushTiles] = field(default_factory=list)  #: Until the offer is there.
    chunk_count: int = 0  #: Writes that were returned as `WriteTiles`.
    writes_under_way: int = 0  #: Those of them that have not ended.
    busy_s: float = 0.0  #: Seconds in which at least one write was under way, until the last gap.
    busy_since_s: float = 0.0  #: When the writes that are under way began.
    finish: FinishTilePush | None = None  #: Set once everything was pushed.
    finish_requested_s: float = 0.0  #: When `finish` came.
    reason: str = ""  #: Why the ticket is closing, if it is.
    stop_requested: bool = False  #: True if the receiver waits for `StoppedMessage`.


@dataclass(frozen=True, slots=True)
class EarlyOffer:
    """An offer that came before `ExpectTileOffer`."""

    peer: str  #: The agent that sent it.
    message: OfferMessage


class TicketSender:
    """The sending end of all tickets of one rank."""

    def __init__(self, timeouts: TicketTimeouts | None = None) -> None:
        """None: the defaults of `TicketTimeouts`."""
        self.timeouts = timeouts or TicketTimeouts()
        self.tickets: dict[str, SendingTicket] = {}  #: By ticket id.
        self.early_offers: OrderedDict[str, EarlyOffer] = OrderedDict()  #: By ticket id.
        #: The last message of each ended ticket, by ticket id; None where it was `StoppedMessage`.
        self.ended_tickets: OrderedDict[str, FinishMessage | FailedMessage | None] = OrderedDict()

    def handle(self, event: SenderEvent, now: float) -> list[SenderAction]:
        """Takes an event in; returns what the caller must carry out, in this order.

        `now` is in seconds, of a clock that never goes back. Of a ticket that has ended, pushes,
        offers and cancellations change nothing, and queries and stops are still answered. There is no
        `WriteEnded` of one: a ticket lives until its writes have ended.
        """
        match event:
            case ExpectTileOffer(ticket_id, peer):
                return self._expect(ticket_id, peer, now)
            case PushTiles() | FinishTilePush():
                return self._push(event, now)
            case CancelTicket(ticket_id, reason):
                ticket = self.tickets.get(ticket_id)
                return self._close(ticket, reason) if ticket else []
            case WriteEnded(ticket_id, ok, reason):
                return self._write_ended(self.tickets[ticket_id], ok, reason, now)
            case MessageReceived(peer, message):
                return self._receive(peer, message, now)
            case PeerWentDown(peer):
                return self._lose_peer(peer)
            case PeerFenced():
                return []  # only who receives has to wait until a lost peer's writes are over
            case TicketTick():
                return self._check_timeouts(now)
            case _:
                assert_never(event)

    def _expect(self, ticket_id: str, peer: str, now: float) -> list[SenderAction]:
        assert ticket_id not in self.tickets, ticket_id
        if ticket_id in self.ended_tickets:  # the receiver has stopped the ticket before
            return [PushEnded(ticket_id, ok=False, reason="aborted")]
        self.tickets[ticket_id] = SendingTicket(ticket_id, peer, now)
        early = self.early_offers.pop(ticket_id, None)
        return self._receive(early.peer, early.message, now) if early else []

    def _push(self, event: PushTiles | FinishTilePush, now: float) -> list[SenderAction]:
        ticket = self.tickets.get(event.ticket_id)
        if ticket is None or ticket.state is SendingState.CLOSING:
            return []
        if isinstance(event, PushTiles):
            ticket.waiting_pushes.append(event)
        else:
            ticket.finish = event
            ticket.finish_requested_s = now
        return self._advance(ticket, now)

    def _lose_peer(self, peer: str) -> list[SenderAction]:
        for ticket_id, early in list(self.early_offers.items()):
            if early.peer == peer:
                del self.early_offers[ticket_id]  # its tiles are not reserved any more
        tickets = [ticket for ticket in self.tickets.values() if ticket.peer == peer]
        return _joined(self._close(ticket, "peer_lost") for ticket in tickets)

    def _check_timeouts(self, now: float) -> list[SenderAction]:
        overdue = [
            ticket
            for ticket in self.tickets.values()
            if ticket.state is SendingState.WAITING
            and now - ticket.expected_since_s > self.timeouts.offer_s
        ]
        return _joined(self._close(ticket, "no_offer") for ticket in overdue)

    def _receive(self, peer: str, message: AnyMessage, now: float) -> list[SenderAction]:
        match message:
            case OfferMessage():
                return self._receive_offer(peer, message, now)
            case StopMessage():
                return self._receive_stop(peer, message.ticket_id)
            case QueryMessage():
                answer = SendMessage(peer, self._state_of(message))
                return [answer, *self._request_prefix(message.ticket_id)]
            case ChunkMessage() | FinishMessage() | FailedMessage() | StoppedMessage():
                return []  # for the receiver of this rank
            case ProgressMessage() | UnknownTicketMessage() | GreetMessage():
                return []
            case _:
                assert_never(message)

    def _receive_offer(self, peer: str, offer: OfferMessage, now: float) -> list[SenderAction]:
        ticket_id = offer.ticket_id
        ticket = self.tickets.get(ticket_id)
        if ticket is not None:
            if ticket.state is not SendingState.WAITING or ticket.peer != peer:
                return []
            ticket.state = SendingState.OPEN
            ticket.offer = offer
            return self._advance(ticket, now)
        if ticket_id in self.ended_tickets:
            return []
        repeated = ticket_id in self.early_offers
        self._remember(self.early_offers, ticket_id, EarlyOffer(peer, offer))
        return [] if repeated else self._request_prefix(ticket_id)

    def _receive_stop(self, peer: str, ticket_id: str) -> list[SenderAction]:
        self.early_offers.pop(ticket_id, None)
        ticket = self.tickets.get(ticket_id)
        if ticket is None:
            self._end(ticket_id, None)  # remembered, so that a later `ExpectTileOffer` is refused
            return [SendMessage(peer, StoppedMessage(ticket_id))]
        ticket.stop_requested = True
        return self._close(ticket, "aborted")

    def _state_of(self, query: QueryMessage) -> AnyMessage:
        """Answers a query: with the progress, an ended ticket's last message, or "unknown"."""
        ticket = self.tickets.get(query.ticket_id)
        if ticket is not None:
            offered = ticket.state is not SendingState.WAITING
        else:
            offered = query.ticket_id in self.early_offers
        if offered:
            return ProgressMessage(query.ticket_id)
        last_message = self.ended_tickets.get(query.ticket_id)
        return last_message or UnknownTicketMessage(query.ticket_id, begun=query.begun)

    def _request_prefix(self, ticket_id: str) -> list[SenderAction]:
        """Passes an early offer on that asks for a prefix.

        Each query passes it on again: at first, nobody here may have known the peer.
        """
        early = self.early_offers.get(ticket_id)
        if early is None or not early.message.hashes:
            return []
        return [PrefixRequested(ticket_id, early.peer, tuple(early.message.hashes))]

    def _write_ended(
        self, ticket: SendingTicket, ok: bool, reason: str, now: float
    ) -> list[SenderAction]:
        ticket.writes_under_way -= 1
        assert ticket.writes_under_way >= 0, ticket.ticket_id
        if not ticket.writes_under_way:
            ticket.busy_s += now - ticket.busy_since_s
        return self._advance(ticket, now) if ok else self._close(ticket, reason)

    def _advance(self, ticket: SendingTicket, now: float) -> list[SenderAction]:
        """Writes what may be written, and ends the ticket if it is complete.

        Pushes wait until the offer says where they go. A push that the offer has no room for
        closes the ticket; the writes that were returned before it count until each has ended by a
        `WriteEnded`, be it without having been posted.
        """
        if ticket.state is SendingState.CLOSING:
            return self._end_if_drained(ticket)
        if ticket.state is SendingState.WAITING:
            return []
        assert ticket.offer is not None
        actions: list[SenderAction] = []
        for push in ticket.waiting_pushes:
            write = self._write_of(ticket, ticket.offer, push)
            if write is None:
                return [*actions, *self._close(ticket, "offer_too_small")]
            if not write.source_tiles:
                continue  # the receiver holds all of these tiles
            actions.append(write)
            if not ticket.writes_under_way:
                ticket.busy_since_s = now
            ticket.chunk_count += 1
            ticket.writes_under_way += 1
        ticket.waiting_pushes.clear()
        if ticket.finish is not None and not ticket.writes_under_way:
            actions += self._finish(ticket, ticket.offer, ticket.finish, now)
        return actions

    def _write_of(
        self, ticket: SendingTicket, offer: OfferMessage, push: PushTiles
    ) -> WriteTiles | None:
        """Returns the part of a push that the receiver lacks; None if the offer lacks the room."""
        held = max(0, offer.first_tile - push.first_tile)  # tiles that the receiver has already
        first_tile = push.first_tile + held
        source_tiles = push.tiles[held:]
        start = first_tile - offer.first_tile
        target_tiles: list[int] = []
        if source_tiles:  # else `start` may be behind the offer's end
            target_tiles = offer.tiles[start : start + len(source_tiles)]
        if len(target_tiles) != len(source_tiles):
            return None
        return WriteTiles(
            ticket.ticket_id,
            ticket.peer,
            generation=offer.generation,
            chunk_number=ticket.chunk_count,
            first_tile=first_tile,
            source_tiles=source_tiles,
            target_tiles=target_tiles,
            piece=push.piece,
            pieces=push.pieces,
        )

    def _finish(
        self, ticket: SendingTicket, offer: OfferMessage, finish: FinishTilePush, now: float
    ) -> list[SenderAction]:
        # Without any chunk nothing was transferred: the wait was for the offer alone.
        exposed_s = now - ticket.finish_requested_s if ticket.chunk_count else 0.0
        message = FinishMessage(
            ticket.ticket_id,
            offer.generation,
            ticket.chunk_count,
            finish.tiles,
            meta=finish.meta,
            busy_s=ticket.busy_s,
            exposed_s=exposed_s,
        )
        self._end(ticket.ticket_id, message)
        return [SendMessage(ticket.peer, message), PushEnded(ticket.ticket_id, ok=True)]

    def _close(self, ticket: SendingTicket, reason: str) -> list[SenderAction]:
        """Writes no more; the ticket ends when no write is under way."""
        if ticket.state is not SendingState.CLOSING:
            ticket.state = SendingState.CLOSING
            ticket.reason = reason
            ticket.waiting_pushes.clear()
        return self._end_if_drained(ticket)

    def _end_if_drained(self, ticket: SendingTicket) -> list[SenderAction]:
        if ticket.writes_under_way:
            return []
        ticket_id = ticket.ticket_id
        message: StoppedMessage | FailedMessage
        if ticket.stop_requested:
            message = StoppedMessage(ticket_id)
            self._end(ticket_id, None)
        else:
            message = FailedMessage(ticket_id, ticket.reason)
            self._end(ticket_id, message)
        ended = PushEnded(ticket_id, ok=False, reason=ticket.reason)
        return [SendMessage(ticket.peer, message), ended]

    def _end(self, ticket_id: str, last_message: FinishMessage | FailedMessage | None) -> None:
        self.tickets.pop(ticket_id, None)
        self._remember(self.ended_tickets, ticket_id, last_message)

    def _remember(self, history: OrderedDict[str, Value], ticket_id: str, value: Value) -> None:
        """Puts the newest entry last, and forgets the oldest beyond the limit."""
        history[ticket_id] = value
        history.move_to_end(ticket_id)
        while len(history) > self.timeouts.history_limit:
            history.popitem(last=False)


def _joined(action_lists: Iterable[list[Action]]) -> list[Action]:
    return [action for actions in action_lists for action in actions]
