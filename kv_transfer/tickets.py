"""The two ends of a KV ticket, as pure machines: `handle(event, now) -> [action]`.

Sink (decode side):
    RESERVED --every chunk verified, and Final--> (Landed: the engine owns the blocks, ticket gone)
    RESERVED --abort, timeout, bad checksum, Void, lost peer--> ABORTING, Broken told once
    ABORTING --Drained, Void, or a dead peer's fence passed--> Freed: blocks may be used again
    ABORTING --none of these in time--> QUARANTINED, counted; freed by the same three
Source (prefill side):
    WAITING --Offer--> OPEN --Push--> writes posted --Finish, all terminal--> Closed(ok)
    any --Stop, Cancel, failed write, lost peer--> CLOSING --no write under way--> Closed(not ok)

A block is used again only when no write can land on it any more. Admission, the count of writes
under way and the post are one step of one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from . import messages as m


@dataclass(frozen=True, slots=True)
class TicketTimeouts:
    """Waits in seconds, sizes in entries."""

    total_s: float = 30.0  #: from Offer to Landed
    idle_s: float = 1.0  #: silence before a Query
    resend_s: float = 0.2  #: between two Stops
    quarantine_s: float = 10.0  #: from Stop to QUARANTINED
    offer_s: float = 20.0  #: a source waits this long for the Offer
    remember: int = 4096  #: early offers, and tickets that are over


# ---- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OfferTiles:
    """Sink: tiles are reserved, ask `peer` to fill those behind the `held` leading ones.

    `hashes`: ask it for a prefix that it may hold, as many leading tiles as it has of it.
    """

    ticket_id: str
    peer: str
    tiles: list[int]
    held_tiles: int = 0
    hashes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class ExpectTileOffer:
    """Source: `ticket_id` will be pushed to `peer` once it offers tiles."""

    ticket_id: str
    peer: str


@dataclass(frozen=True, slots=True)
class PushTiles:
    """Source: piece `piece` (-1: all of them) of the ticket's tiles `first`.. is final.

    It lies in these `tiles` of this pool.
    """

    ticket_id: str
    first_tile: int
    tiles: list[int]
    piece: int = 0
    pieces: int = 1


@dataclass(frozen=True, slots=True)
class FinishTilePush:
    """Source: all `tiles` of the ticket were pushed."""

    ticket_id: str
    tiles: int
    meta: bytes


@dataclass(frozen=True, slots=True)
class CancelTicket:
    """Either side: this end no longer wants the ticket."""

    ticket_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class MessageReceived:
    peer: str
    message: m.AnyMessage


@dataclass(frozen=True, slots=True)
class ChunkVerified:
    ticket_id: str
    chunk_number: int
    ok: bool


@dataclass(frozen=True, slots=True)
class WriteEnded:
    ticket_id: str
    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PeerWentDown:
    peer: str


@dataclass(frozen=True, slots=True)
class PeerFenced:
    """No write of the dead `peer` can land any more."""

    peer: str


@dataclass(frozen=True, slots=True)
class TicketTick:
    pass


# ---- actions -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendMessage:
    peer: str
    message: m.AnyMessage


@dataclass(frozen=True, slots=True)
class VerifyChunk:
    ticket_id: str
    tiles: list[int]
    chunk: m.ChunkMessage


@dataclass(frozen=True, slots=True)
class WriteTiles:
    """Source: write tiles `source` into `target`; the tiles are the ticket's `first`.. ."""

    ticket_id: str
    peer: str
    generation: int
    chunk_number: int
    first_tile: int
    source_tiles: list[int]
    target_tiles: list[int]
    piece: int
    pieces: int


class TilesArrived(msgspec.Struct, frozen=True, tag=True):
    """Sink: identity and checksum of every tile hold; the blocks are the engine's.

    `tiles`: how many leading ones hold KV, those that were held before included. Seconds of
    `messages.Final`, and until the last checksum held.
    """

    ticket_id: str
    meta: bytes
    tiles: int
    busy_s: float = 0.0
    exposed_s: float = 0.0


class TransferFailed(msgspec.Struct, frozen=True, tag=True):
    """Sink: the transfer failed. The blocks are not free yet: `Freed` follows."""

    ticket_id: str
    reason: str


class BlocksFreed(msgspec.Struct, frozen=True, tag=True):
    ticket_id: str


class PushEnded(msgspec.Struct, frozen=True, tag=True):
    """Source: no write of this ticket is under way; its blocks may be released."""

    ticket_id: str
    ok: bool
    reason: str = ""


class PrefixRequested(msgspec.Struct, frozen=True, tag=True):
    """Source: `peer` asks for a prefix. Answer with `Expect`, then its blocks or `Cancel`."""

    ticket_id: str
    peer: str
    hashes: tuple[bytes, ...]


# ---- sink ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class ReceivingTicket:
    peer: str
    offer: m.OfferMessage
    opened: float
    touched: float
    state: str = "RESERVED"
    chunks: dict[int, m.ChunkMessage] = field(default_factory=dict)  #: by number
    verified: set[int] = field(default_factory=set)  #: chunks whose checksums held
    final: m.FinishMessage | None = None
    finished: float = 0.0  #: when the Final came

    def tiles(self, chunk: m.ChunkMessage) -> list[int] | None:
        """The tiles that a chunk fills; None if it makes no sense."""
        start = chunk.first_tile - self.offer.first_tile
        tiles = self.offer.tiles[max(start, 0) : max(start, 0) + len(chunk.checksums)]
        fits = start >= 0 and len(tiles) == len(chunk.checksums)
        fits = fits and chunk.pieces > 0 and -1 <= chunk.piece < chunk.pieces
        return tiles if fits else None

    def covers(self, end: int) -> bool:
        """Every piece of every tile from the first offered one to `end` is in some chunk."""
        pieces = {chunk.pieces for chunk in self.chunks.values()}
        if self.offer.first_tile >= end or len(pieces) != 1:
            return self.offer.first_tile == end and not pieces
        count = pieces.pop()
        filled = {
            (index, piece)
            for chunk in self.chunks.values()
            for index in range(chunk.first_tile, min(end, chunk.first_tile + len(chunk.checksums)))
            for piece in (range(count) if chunk.piece < 0 else (chunk.piece,))
        }
        return len(filled) == (end - self.offer.first_tile) * count


class TicketReceiver:
    """Decode side of all tickets of one worker."""

    def __init__(self, limits: TicketTimeouts | None = None) -> None:
        self.limits = limits or TicketTimeouts()
        self.tickets: dict[str, ReceivingTicket] = {}
        self.generation = 0  #: of the last Open

    def handle(self, event: object, now: float) -> list:
        match event:
            case OfferTiles(ticket_id, peer, tiles, held, hashes):
                assert ticket_id not in self.tickets, ticket_id
                self.generation += 1
                offer = m.OfferMessage(ticket_id, self.generation, held, tiles[held:], list(hashes))
                self.tickets[ticket_id] = ReceivingTicket(peer, offer, now, now)
                return [SendMessage(peer, offer)]
            case MessageReceived(peer, message):
                ticket = self.tickets.get(message.ticket_id)
                if ticket is None or ticket.peer != peer:
                    return []
                return self._noted(message.ticket_id, ticket, message, now)
            case ChunkVerified(ticket_id, seq, ok):
                return self._verified(ticket_id, seq, ok, now)
            case CancelTicket(ticket_id, reason):
                ticket = self.tickets.get(ticket_id)
                return self._abort(ticket_id, ticket, reason, now) if ticket else []
            case PeerWentDown(peer):
                return self._each(peer, lambda x, t: self._abort(x, t, "peer_lost", now))
            case PeerFenced(peer):
                return self._each(peer, lambda x, t: self._void(x, t, "peer_lost", now))
            case TicketTick():
                return [a for x, t in list(self.tickets.items()) for a in self._tick(x, t, now)]
        raise AssertionError(event)

    def _each(self, peer: str, act) -> list:
        mine = [(x, t) for x, t in self.tickets.items() if t.peer == peer]
        return [action for ticket_id, ticket in mine for action in act(ticket_id, ticket)]

    def _noted(self, ticket_id: str, ticket: ReceivingTicket, message: m.AnyMessage, now: float) -> list:
        ticket.touched = now
        match message:
            case m.ChunkMessage() if ticket.state == "RESERVED":
                return self._chunk(ticket_id, ticket, message, now)
            case m.FinishMessage() if ticket.state == "RESERVED" and ticket.final is None:
                if message.generation == ticket.offer.generation:
                    ticket.final, ticket.finished = message, now
                    return self._complete(ticket_id, ticket, now)
            case m.FailedMessage(_, reason):
                return self._void(ticket_id, ticket, reason, now)
            case m.StoppedMessage() if ticket.state != "RESERVED":
                return self._free(ticket_id)
            case m.UnknownTicketMessage(_, begun) if begun:
                return self._abort(ticket_id, ticket, "source_forgot", now)
            case m.UnknownTicketMessage() if ticket.state == "RESERVED" and not ticket.chunks:
                return [SendMessage(ticket.peer, ticket.offer)]
        return []

    def _chunk(self, ticket_id: str, ticket: ReceivingTicket, chunk: m.ChunkMessage, now: float) -> list:
        """One of another reservation of the tiles, or a second copy, changes nothing."""
        if chunk.generation != ticket.offer.generation or chunk.chunk_number in ticket.chunks:
            return []
        tiles = ticket.tiles(chunk)
        if tiles is None:
            return self._abort(ticket_id, ticket, "bad_chunk", now)
        ticket.chunks[chunk.chunk_number] = chunk
        return [VerifyChunk(ticket_id, tiles, chunk)]

    def _verified(self, ticket_id: str, seq: int, ok: bool, now: float) -> list:
        ticket = self.tickets.get(ticket_id)
        if ticket is None or ticket.state != "RESERVED":
            return []
        if not ok:
            return self._abort(ticket_id, ticket, "checksum", now)
        ticket.verified.add(seq)
        return self._complete(ticket_id, ticket, now)

    def _complete(self, ticket_id: str, ticket: ReceivingTicket, now: float) -> list:
        final, offer = ticket.final, ticket.offer
        if final is None or len(ticket.verified) < final.chunks:
            return []
        whole = offer.first_tile + len(offer.tiles)
        enough = offer.first_tile <= final.tiles <= whole if offer.hashes else final.tiles == whole
        if not enough or not ticket.covers(final.tiles):
            return self._abort(ticket_id, ticket, "incomplete", now)
        del self.tickets[ticket_id]
        exposed = final.exposed_s + now - ticket.finished
        return [TilesArrived(ticket_id, final.meta, final.tiles, final.busy_s, exposed)]

    def _abort(
        self, ticket_id: str, ticket: ReceivingTicket, reason: str, now: float, stop: bool = True
    ) -> list:
        if ticket.state != "RESERVED":
            return []
        ticket.state, ticket.opened, ticket.touched = "ABORTING", now, now
        stops = [SendMessage(ticket.peer, m.StopMessage(ticket_id))] if stop else []
        return [TransferFailed(ticket_id, reason), *stops]

    def _void(self, ticket_id: str, ticket: ReceivingTicket, reason: str, now: float) -> list:
        """Nothing lands any more: ends the ticket at once, whatever its state."""
        return [*self._abort(ticket_id, ticket, reason, now, stop=False), *self._free(ticket_id)]

    def _free(self, ticket_id: str) -> list:
        ticket = self.tickets.pop(ticket_id, None)
        return [BlocksFreed(ticket_id)] if ticket else []

    def _tick(self, ticket_id: str, ticket: ReceivingTicket, now: float) -> list:
        limits, age = self.limits, now - ticket.opened
        if ticket.state == "RESERVED" and age > limits.total_s:
            return self._abort(ticket_id, ticket, "timeout", now)
        if ticket.state == "RESERVED" and now - ticket.touched > limits.idle_s:
            ticket.touched = now
            return [SendMessage(ticket.peer, m.QueryMessage(ticket_id, bool(ticket.chunks)))]
        if ticket.state == "ABORTING" and age > limits.quarantine_s:
            ticket.state = "QUARANTINED"
        wait = limits.resend_s if ticket.state == "ABORTING" else limits.idle_s
        if ticket.state != "RESERVED" and now - ticket.touched > wait:
            ticket.touched = now
            return [SendMessage(ticket.peer, m.StopMessage(ticket_id))]
        return []


# ---- source --------------------------------------------------------------------------------------


@dataclass(slots=True)
class SendingTicket:
    peer: str
    opened: float
    state: str = "WAITING"
    offer: m.OfferMessage | None = None
    held: list[PushTiles] = field(default_factory=list)  #: pushes that wait for the Offer
    chunks: int = 0  #: writes posted
    under_way: int = 0  #: of these, not terminal yet
    busy_s: float = 0.0  #: time with a write under way
    since: float = 0.0  #: when the writes under way began
    finish: FinishTilePush | None = None
    finished: float = 0.0
    reason: str = ""
    stop: bool = False  #: the sink waits for Drained, not for Void


class TicketSender:
    """Prefill side of all tickets of one worker."""

    def __init__(self, limits: TicketTimeouts | None = None) -> None:
        self.limits = limits or TicketTimeouts()
        self.tickets: dict[str, SendingTicket] = {}
        self.early: OrderedDict[str, tuple[str, m.OfferMessage]] = OrderedDict()  #: before Expect
        self.over: OrderedDict[str, m.AnyMessage | None] = (
            OrderedDict()
        )  #: ticket_id -> its Final, or None

    def handle(self, event: object, now: float) -> list:
        match event:
            case ExpectTileOffer(ticket_id, peer):
                return self._expect(ticket_id, peer, now)
            case PushTiles(ticket_id) | FinishTilePush(ticket_id):
                ticket = self.tickets.get(ticket_id)
                if ticket is None or ticket.state == "CLOSING":
                    return []
                if isinstance(event, PushTiles):
                    ticket.held.append(event)
                else:
                    ticket.finish, ticket.finished = event, now
                return self._advance(ticket_id, ticket, now)
            case CancelTicket(ticket_id, reason):
                return self._closing(ticket_id, reason)
            case WriteEnded(ticket_id, ok, reason):
                return self._written(ticket_id, ok, reason, now)
            case MessageReceived(peer, message):
                return self._noted(peer, message, now)
            case PeerWentDown(peer):
                for ticket_id in [x for x, (of, _) in self.early.items() if of == peer]:
                    del self.early[ticket_id]  # its tiles are not reserved any more
                mine = [x for x, t in self.tickets.items() if t.peer == peer]
                return [a for ticket_id in mine for a in self._closing(ticket_id, "peer_lost")]
            case TicketTick():
                late = [
                    ticket_id
                    for ticket_id, ticket in self.tickets.items()
                    if ticket.state == "WAITING" and now - ticket.opened > self.limits.offer_s
                ]
                return [a for ticket_id in late for a in self._closing(ticket_id, "no_offer")]
            case PeerFenced():
                return []
        raise AssertionError(event)

    def _expect(self, ticket_id: str, peer: str, now: float) -> list:
        assert ticket_id not in self.tickets, ticket_id
        if ticket_id in self.over:
            return [PushEnded(ticket_id, False, "aborted")]
        self.tickets[ticket_id] = SendingTicket(peer, now)
        early = self.early.pop(ticket_id, None)
        return self._noted(*early, now) if early else []

    def _noted(self, peer: str, message: m.AnyMessage, now: float) -> list:
        ticket_id = message.ticket_id
        ticket = self.tickets.get(ticket_id)
        match message:
            case m.OfferMessage():
                if ticket is None and ticket_id not in self.over:
                    known = ticket_id in self.early
                    _remember(self.early, ticket_id, (peer, message), self.limits.remember)
                    return [] if known else self._asked(ticket_id)
                if ticket and ticket.state == "WAITING" and ticket.peer == peer:
                    ticket.state, ticket.offer = "OPEN", message
                    return self._advance(ticket_id, ticket, now)
            case m.StopMessage():
                self.early.pop(ticket_id, None)
                if ticket is None:
                    self._end(ticket_id, None)
                    return [SendMessage(peer, m.StoppedMessage(ticket_id))]
                ticket.stop = True
                return self._closing(ticket_id, "aborted")
            case m.QueryMessage(_, begun):
                offered = ticket.state != "WAITING" if ticket else ticket_id in self.early
                answer = (
                    m.ProgressMessage(ticket_id)
                    if offered
                    else self.over.get(ticket_id) or m.UnknownTicketMessage(ticket_id, begun)
                )
                return [SendMessage(peer, answer), *self._asked(ticket_id)]
        return []

    def _asked(self, ticket_id: str) -> list:
        """An early offer that asks for a prefix. Again at every query: at first nobody here may
        have known the peer."""
        peer, offer = self.early.get(ticket_id, (None, None))
        return (
            [PrefixRequested(ticket_id, peer, tuple(offer.hashes))]
            if peer and offer and offer.hashes
            else []
        )

    def _written(self, ticket_id: str, ok: bool, reason: str, now: float) -> list:
        ticket = self.tickets[ticket_id]
        ticket.under_way -= 1
        assert ticket.under_way >= 0, ticket_id
        if not ticket.under_way:
            ticket.busy_s += now - ticket.since
        return self._advance(ticket_id, ticket, now) if ok else self._closing(ticket_id, reason)

    def _advance(self, ticket_id: str, ticket: SendingTicket, now: float) -> list:
        """Posts what may be posted, ends what is complete."""
        if ticket.state == "CLOSING":
            return self._drained(ticket_id, ticket)
        if ticket.state != "OPEN":
            return []
        assert ticket.offer is not None
        actions: list = []
        for push in ticket.held:
            post = self._post(ticket_id, ticket, ticket.offer, push)
            if post is None:
                return [*actions, *self._closing(ticket_id, "offer_too_small")]
            if not post.source_tiles:
                continue  # the sink holds all of it
            actions.append(post)
            if not ticket.under_way:
                ticket.since = now
            ticket.chunks += 1
            ticket.under_way += 1
        ticket.held.clear()
        if ticket.finish is not None and ticket.under_way == 0:
            actions += self._finished(ticket_id, ticket, ticket.finish, now)
        return actions

    def _post(
        self, ticket_id: str, ticket: SendingTicket, offer: m.OfferMessage, push: PushTiles
    ) -> WriteTiles | None:
        """What is left to write of a push; None if the offer has no place for it."""
        skip = max(0, offer.first_tile - push.first_tile)
        first, source = push.first_tile + skip, push.tiles[skip:]
        start = first - offer.first_tile
        target = offer.tiles[start : start + len(source)] if source else []
        if len(target) != len(source):
            return None
        generation = offer.generation
        place = push.piece, push.pieces
        return WriteTiles(
            ticket_id, ticket.peer, generation, ticket.chunks, first, source, target, *place
        )

    def _finished(
        self, ticket_id: str, ticket: SendingTicket, finish: FinishTilePush, now: float
    ) -> list:
        assert ticket.offer is not None
        exposed = now - ticket.finished if ticket.chunks else 0.0
        times = ticket.busy_s, exposed
        generation, chunks = ticket.offer.generation, ticket.chunks
        final = m.FinishMessage(ticket_id, generation, chunks, finish.tiles, finish.meta, *times)
        self._end(ticket_id, final)
        return [SendMessage(ticket.peer, final), PushEnded(ticket_id, True)]

    def _closing(self, ticket_id: str, reason: str) -> list:
        ticket = self.tickets.get(ticket_id)
        if ticket is None:
            return []
        if ticket.state != "CLOSING":
            ticket.state, ticket.reason = "CLOSING", reason
            ticket.held.clear()
        return self._drained(ticket_id, ticket)

    def _drained(self, ticket_id: str, ticket: SendingTicket) -> list:
        if ticket.under_way:
            return []
        void = m.FailedMessage(ticket_id, ticket.reason)
        self._end(ticket_id, None if ticket.stop else void)
        message = m.StoppedMessage(ticket_id) if ticket.stop else void
        return [SendMessage(ticket.peer, message), PushEnded(ticket_id, False, ticket.reason)]

    def _end(self, ticket_id: str, answer: m.AnyMessage | None) -> None:
        self.tickets.pop(ticket_id, None)
        _remember(self.over, ticket_id, answer, self.limits.remember)


def _remember(table: OrderedDict, key: str, value: object, most: int) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > most:
        table.popitem(last=False)
