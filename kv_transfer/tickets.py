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
class Limits:
    """Waits in seconds, sizes in entries."""

    total_s: float = 30.0  #: from Offer to Landed
    idle_s: float = 1.0  #: silence before a Query
    resend_s: float = 0.2  #: between two Stops
    quarantine_s: float = 10.0  #: from Stop to QUARANTINED
    offer_s: float = 20.0  #: a source waits this long for the Offer
    remember: int = 4096  #: early offers, and tickets that are over


# ---- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """Sink: tiles are reserved, ask `peer` to fill those behind the `held` leading ones.

    `hashes`: ask it for a prefix that it may hold, as many leading tiles as it has of it.
    """

    xid: str
    peer: str
    tiles: list[int]
    held: int = 0
    hashes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Expect:
    """Source: `xid` will be pushed to `peer` once it offers tiles."""

    xid: str
    peer: str


@dataclass(frozen=True, slots=True)
class Push:
    """Source: piece `piece` (-1: all of them) of the ticket's tiles `first`.. is final.

    It lies in these `tiles` of this pool.
    """

    xid: str
    first: int
    tiles: list[int]
    piece: int = 0
    pieces: int = 1


@dataclass(frozen=True, slots=True)
class Finish:
    """Source: all `tiles` of the ticket were pushed."""

    xid: str
    tiles: int
    meta: bytes


@dataclass(frozen=True, slots=True)
class Cancel:
    """Either side: this end no longer wants the ticket."""

    xid: str
    reason: str


@dataclass(frozen=True, slots=True)
class Noted:
    peer: str
    message: m.Any


@dataclass(frozen=True, slots=True)
class Verified:
    xid: str
    seq: int
    ok: bool


@dataclass(frozen=True, slots=True)
class Written:
    xid: str
    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PeerDown:
    peer: str


@dataclass(frozen=True, slots=True)
class Fenced:
    """No write of the dead `peer` can land any more."""

    peer: str


@dataclass(frozen=True, slots=True)
class Tick:
    pass


# ---- actions -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    peer: str
    message: m.Any


@dataclass(frozen=True, slots=True)
class Verify:
    xid: str
    tiles: list[int]
    chunk: m.Chunk


@dataclass(frozen=True, slots=True)
class Post:
    """Source: write tiles `source` into `target`; the tiles are the ticket's `first`.. ."""

    xid: str
    peer: str
    generation: int
    seq: int
    first: int
    source: list[int]
    target: list[int]
    piece: int
    pieces: int


class Landed(msgspec.Struct, frozen=True, tag=True):
    """Sink: identity and checksum of every tile hold; the blocks are the engine's.

    `tiles`: how many leading ones hold KV, those that were held before included. Seconds of
    `messages.Final`, and until the last checksum held.
    """

    xid: str
    meta: bytes
    tiles: int
    busy_s: float = 0.0
    exposed_s: float = 0.0


class Broken(msgspec.Struct, frozen=True, tag=True):
    """Sink: the transfer failed. The blocks are not free yet: `Freed` follows."""

    xid: str
    reason: str


class Freed(msgspec.Struct, frozen=True, tag=True):
    xid: str


class Closed(msgspec.Struct, frozen=True, tag=True):
    """Source: no write of this ticket is under way; its blocks may be released."""

    xid: str
    ok: bool
    reason: str = ""


class Wanted(msgspec.Struct, frozen=True, tag=True):
    """Source: `peer` asks for a prefix. Answer with `Expect`, then its blocks or `Cancel`."""

    xid: str
    peer: str
    hashes: tuple[bytes, ...]


# ---- sink ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class SinkTicket:
    peer: str
    offer: m.Offer
    opened: float
    touched: float
    state: str = "RESERVED"
    chunks: dict[int, m.Chunk] = field(default_factory=dict)  #: by number
    verified: set[int] = field(default_factory=set)  #: chunks whose checksums held
    final: m.Final | None = None
    finished: float = 0.0  #: when the Final came

    def tiles(self, chunk: m.Chunk) -> list[int] | None:
        """The tiles that a chunk fills; None if it makes no sense."""
        start = chunk.first - self.offer.first
        tiles = self.offer.tiles[max(start, 0) : max(start, 0) + len(chunk.checksums)]
        fits = start >= 0 and len(tiles) == len(chunk.checksums)
        fits = fits and chunk.pieces > 0 and -1 <= chunk.piece < chunk.pieces
        return tiles if fits else None

    def covers(self, end: int) -> bool:
        """Every piece of every tile from the first offered one to `end` is in some chunk."""
        pieces = {chunk.pieces for chunk in self.chunks.values()}
        if self.offer.first >= end or len(pieces) != 1:
            return self.offer.first == end and not pieces
        count = pieces.pop()
        filled = {
            (index, piece)
            for chunk in self.chunks.values()
            for index in range(chunk.first, min(end, chunk.first + len(chunk.checksums)))
            for piece in (range(count) if chunk.piece < 0 else (chunk.piece,))
        }
        return len(filled) == (end - self.offer.first) * count


class Sink:
    """Decode side of all tickets of one worker."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.tickets: dict[str, SinkTicket] = {}
        self.generation = 0  #: of the last Open

    def handle(self, event: object, now: float) -> list:
        match event:
            case Open(xid, peer, tiles, held, hashes):
                assert xid not in self.tickets, xid
                self.generation += 1
                offer = m.Offer(xid, self.generation, held, tiles[held:], list(hashes))
                self.tickets[xid] = SinkTicket(peer, offer, now, now)
                return [Send(peer, offer)]
            case Noted(peer, message):
                ticket = self.tickets.get(message.xid)
                if ticket is None or ticket.peer != peer:
                    return []
                return self._noted(message.xid, ticket, message, now)
            case Verified(xid, seq, ok):
                return self._verified(xid, seq, ok, now)
            case Cancel(xid, reason):
                ticket = self.tickets.get(xid)
                return self._abort(xid, ticket, reason, now) if ticket else []
            case PeerDown(peer):
                return self._each(peer, lambda x, t: self._abort(x, t, "peer_lost", now))
            case Fenced(peer):
                return self._each(peer, lambda x, t: self._void(x, t, "peer_lost", now))
            case Tick():
                return [a for x, t in list(self.tickets.items()) for a in self._tick(x, t, now)]
        raise AssertionError(event)

    def _each(self, peer: str, act) -> list:
        mine = [(x, t) for x, t in self.tickets.items() if t.peer == peer]
        return [action for xid, ticket in mine for action in act(xid, ticket)]

    def _noted(self, xid: str, ticket: SinkTicket, message: m.Any, now: float) -> list:
        ticket.touched = now
        match message:
            case m.Chunk() if ticket.state == "RESERVED":
                return self._chunk(xid, ticket, message, now)
            case m.Final() if ticket.state == "RESERVED" and ticket.final is None:
                if message.generation == ticket.offer.generation:
                    ticket.final, ticket.finished = message, now
                    return self._complete(xid, ticket, now)
            case m.Void(_, reason):
                return self._void(xid, ticket, reason, now)
            case m.Drained() if ticket.state != "RESERVED":
                return self._free(xid)
            case m.Unknown(_, begun) if begun:
                return self._abort(xid, ticket, "source_forgot", now)
            case m.Unknown() if ticket.state == "RESERVED" and not ticket.chunks:
                return [Send(ticket.peer, ticket.offer)]
        return []

    def _chunk(self, xid: str, ticket: SinkTicket, chunk: m.Chunk, now: float) -> list:
        """One of another reservation of the tiles, or a second copy, changes nothing."""
        if chunk.generation != ticket.offer.generation or chunk.seq in ticket.chunks:
            return []
        tiles = ticket.tiles(chunk)
        if tiles is None:
            return self._abort(xid, ticket, "bad_chunk", now)
        ticket.chunks[chunk.seq] = chunk
        return [Verify(xid, tiles, chunk)]

    def _verified(self, xid: str, seq: int, ok: bool, now: float) -> list:
        ticket = self.tickets.get(xid)
        if ticket is None or ticket.state != "RESERVED":
            return []
        if not ok:
            return self._abort(xid, ticket, "checksum", now)
        ticket.verified.add(seq)
        return self._complete(xid, ticket, now)

    def _complete(self, xid: str, ticket: SinkTicket, now: float) -> list:
        final, offer = ticket.final, ticket.offer
        if final is None or len(ticket.verified) < final.chunks:
            return []
        whole = offer.first + len(offer.tiles)
        enough = offer.first <= final.tiles <= whole if offer.hashes else final.tiles == whole
        if not enough or not ticket.covers(final.tiles):
            return self._abort(xid, ticket, "incomplete", now)
        del self.tickets[xid]
        exposed = final.exposed_s + now - ticket.finished
        return [Landed(xid, final.meta, final.tiles, final.busy_s, exposed)]

    def _abort(
        self, xid: str, ticket: SinkTicket, reason: str, now: float, stop: bool = True
    ) -> list:
        if ticket.state != "RESERVED":
            return []
        ticket.state, ticket.opened, ticket.touched = "ABORTING", now, now
        stops = [Send(ticket.peer, m.Stop(xid))] if stop else []
        return [Broken(xid, reason), *stops]

    def _void(self, xid: str, ticket: SinkTicket, reason: str, now: float) -> list:
        """Nothing lands any more: ends the ticket at once, whatever its state."""
        return [*self._abort(xid, ticket, reason, now, stop=False), *self._free(xid)]

    def _free(self, xid: str) -> list:
        ticket = self.tickets.pop(xid, None)
        return [Freed(xid)] if ticket else []

    def _tick(self, xid: str, ticket: SinkTicket, now: float) -> list:
        limits, age = self.limits, now - ticket.opened
        if ticket.state == "RESERVED" and age > limits.total_s:
            return self._abort(xid, ticket, "timeout", now)
        if ticket.state == "RESERVED" and now - ticket.touched > limits.idle_s:
            ticket.touched = now
            return [Send(ticket.peer, m.Query(xid, bool(ticket.chunks)))]
        if ticket.state == "ABORTING" and age > limits.quarantine_s:
            ticket.state = "QUARANTINED"
        wait = limits.resend_s if ticket.state == "ABORTING" else limits.idle_s
        if ticket.state != "RESERVED" and now - ticket.touched > wait:
            ticket.touched = now
            return [Send(ticket.peer, m.Stop(xid))]
        return []


# ---- source --------------------------------------------------------------------------------------


@dataclass(slots=True)
class SourceTicket:
    peer: str
    opened: float
    state: str = "WAITING"
    offer: m.Offer | None = None
    held: list[Push] = field(default_factory=list)  #: pushes that wait for the Offer
    chunks: int = 0  #: writes posted
    under_way: int = 0  #: of these, not terminal yet
    busy_s: float = 0.0  #: time with a write under way
    since: float = 0.0  #: when the writes under way began
    finish: Finish | None = None
    finished: float = 0.0
    reason: str = ""
    stop: bool = False  #: the sink waits for Drained, not for Void


class Source:
    """Prefill side of all tickets of one worker."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.tickets: dict[str, SourceTicket] = {}
        self.early: OrderedDict[str, tuple[str, m.Offer]] = OrderedDict()  #: before Expect
        self.over: OrderedDict[str, m.Any | None] = OrderedDict()  #: xid -> its Final, or None

    def handle(self, event: object, now: float) -> list:
        match event:
            case Expect(xid, peer):
                return self._expect(xid, peer, now)
            case Push(xid) | Finish(xid):
                ticket = self.tickets.get(xid)
                if ticket is None or ticket.state == "CLOSING":
                    return []
                if isinstance(event, Push):
                    ticket.held.append(event)
                else:
                    ticket.finish, ticket.finished = event, now
                return self._advance(xid, ticket, now)
            case Cancel(xid, reason):
                return self._closing(xid, reason)
            case Written(xid, ok, reason):
                return self._written(xid, ok, reason, now)
            case Noted(peer, message):
                return self._noted(peer, message, now)
            case PeerDown(peer):
                for xid in [x for x, (of, _) in self.early.items() if of == peer]:
                    del self.early[xid]  # its tiles are not reserved any more
                mine = [x for x, t in self.tickets.items() if t.peer == peer]
                return [a for xid in mine for a in self._closing(xid, "peer_lost")]
            case Tick():
                late = [
                    xid
                    for xid, ticket in self.tickets.items()
                    if ticket.state == "WAITING" and now - ticket.opened > self.limits.offer_s
                ]
                return [a for xid in late for a in self._closing(xid, "no_offer")]
            case Fenced():
                return []
        raise AssertionError(event)

    def _expect(self, xid: str, peer: str, now: float) -> list:
        assert xid not in self.tickets, xid
        if xid in self.over:
            return [Closed(xid, False, "aborted")]
        self.tickets[xid] = SourceTicket(peer, now)
        early = self.early.pop(xid, None)
        return self._noted(*early, now) if early else []

    def _noted(self, peer: str, message: m.Any, now: float) -> list:
        xid = message.xid
        ticket = self.tickets.get(xid)
        match message:
            case m.Offer():
                if ticket is None and xid not in self.over:
                    known = xid in self.early
                    _remember(self.early, xid, (peer, message), self.limits.remember)
                    return [] if known else self._asked(xid)
                if ticket and ticket.state == "WAITING" and ticket.peer == peer:
                    ticket.state, ticket.offer = "OPEN", message
                    return self._advance(xid, ticket, now)
            case m.Stop():
                self.early.pop(xid, None)
                if ticket is None:
                    self._end(xid, None)
                    return [Send(peer, m.Drained(xid))]
                ticket.stop = True
                return self._closing(xid, "aborted")
            case m.Query(_, begun):
                offered = ticket.state != "WAITING" if ticket else xid in self.early
                answer = m.Progress(xid) if offered else self.over.get(xid) or m.Unknown(xid, begun)
                return [Send(peer, answer), *self._asked(xid)]
        return []

    def _asked(self, xid: str) -> list:
        """An early offer that asks for a prefix. Again at every query: at first nobody here may
        have known the peer."""
        peer, offer = self.early.get(xid, (None, None))
        return [Wanted(xid, peer, tuple(offer.hashes))] if peer and offer and offer.hashes else []

    def _written(self, xid: str, ok: bool, reason: str, now: float) -> list:
        ticket = self.tickets[xid]
        ticket.under_way -= 1
        assert ticket.under_way >= 0, xid
        if not ticket.under_way:
            ticket.busy_s += now - ticket.since
        return self._advance(xid, ticket, now) if ok else self._closing(xid, reason)

    def _advance(self, xid: str, ticket: SourceTicket, now: float) -> list:
        """Posts what may be posted, ends what is complete."""
        if ticket.state == "CLOSING":
            return self._drained(xid, ticket)
        if ticket.state != "OPEN":
            return []
        assert ticket.offer is not None
        actions: list = []
        for push in ticket.held:
            post = self._post(xid, ticket, ticket.offer, push)
            if post is None:
                return [*actions, *self._closing(xid, "offer_too_small")]
            if not post.source:
                continue  # the sink holds all of it
            actions.append(post)
            if not ticket.under_way:
                ticket.since = now
            ticket.chunks += 1
            ticket.under_way += 1
        ticket.held.clear()
        if ticket.finish is not None and ticket.under_way == 0:
            actions += self._finished(xid, ticket, ticket.finish, now)
        return actions

    def _post(self, xid: str, ticket: SourceTicket, offer: m.Offer, push: Push) -> Post | None:
        """What is left to write of a push; None if the offer has no place for it."""
        skip = max(0, offer.first - push.first)
        first, source = push.first + skip, push.tiles[skip:]
        start = first - offer.first
        target = offer.tiles[start : start + len(source)] if source else []
        if len(target) != len(source):
            return None
        generation = offer.generation
        place = push.piece, push.pieces
        return Post(xid, ticket.peer, generation, ticket.chunks, first, source, target, *place)

    def _finished(self, xid: str, ticket: SourceTicket, finish: Finish, now: float) -> list:
        assert ticket.offer is not None
        exposed = now - ticket.finished if ticket.chunks else 0.0
        times = ticket.busy_s, exposed
        generation, chunks = ticket.offer.generation, ticket.chunks
        final = m.Final(xid, generation, chunks, finish.tiles, finish.meta, *times)
        self._end(xid, final)
        return [Send(ticket.peer, final), Closed(xid, True)]

    def _closing(self, xid: str, reason: str) -> list:
        ticket = self.tickets.get(xid)
        if ticket is None:
            return []
        if ticket.state != "CLOSING":
            ticket.state, ticket.reason = "CLOSING", reason
            ticket.held.clear()
        return self._drained(xid, ticket)

    def _drained(self, xid: str, ticket: SourceTicket) -> list:
        if ticket.under_way:
            return []
        void = m.Void(xid, ticket.reason)
        self._end(xid, None if ticket.stop else void)
        message = m.Drained(xid) if ticket.stop else void
        return [Send(ticket.peer, message), Closed(xid, False, ticket.reason)]

    def _end(self, xid: str, answer: m.Any | None) -> None:
        self.tickets.pop(xid, None)
        _remember(self.over, xid, answer, self.limits.remember)


def _remember(table: OrderedDict, key: str, value: object, most: int) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > most:
        table.popitem(last=False)
