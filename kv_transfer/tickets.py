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
    """Sink: blocks are reserved, ask `peer` to fill them."""

    xid: str
    peer: str
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Expect:
    """Source: `xid` will be pushed to `peer` once it offers blocks."""

    xid: str
    peer: str


@dataclass(frozen=True, slots=True)
class Push:
    """Source: blocks `first`.. of the ticket are final and lie in `blocks` of this pool."""

    xid: str
    first: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Finish:
    xid: str
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
    seq: int
    first: int
    blocks: list[int]
    checksums: list[int]


@dataclass(frozen=True, slots=True)
class Post:
    xid: str
    peer: str
    seq: int
    first: int
    source: list[int]
    target: list[int]


@dataclass(frozen=True, slots=True)
class Landed:
    """Sink: identity and checksum of every block hold; the blocks are the engine's."""

    xid: str
    meta: bytes


@dataclass(frozen=True, slots=True)
class Broken:
    """Sink: the transfer failed. The blocks are not free yet: `Freed` follows."""

    xid: str
    reason: str


@dataclass(frozen=True, slots=True)
class Freed:
    xid: str


@dataclass(frozen=True, slots=True)
class Closed:
    """Source: no write of this ticket is under way; its blocks may be released."""

    xid: str
    ok: bool
    reason: str = ""


# ---- sink ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class SinkTicket:
    peer: str
    blocks: list[int]
    opened: float
    touched: float
    state: str = "RESERVED"
    chunks: dict[int, range] = field(default_factory=dict)  #: number -> the ticket's blocks in it
    verified: set[int] = field(default_factory=set)  #: chunks whose checksums held
    final: m.Final | None = None


class Sink:
    """Decode side of all tickets of one worker."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.tickets: dict[str, SinkTicket] = {}

    def handle(self, event: object, now: float) -> list:
        match event:
            case Open(xid, peer, blocks):
                assert xid not in self.tickets, xid
                self.tickets[xid] = SinkTicket(peer, blocks, now, now)
                return [Send(peer, m.Offer(xid, blocks))]
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
            case m.Chunk(_, seq, first, checksums) if ticket.state == "RESERVED":
                blocks = ticket.blocks[first : first + len(checksums)]
                if seq in ticket.chunks:
                    return []
                if first < 0 or len(blocks) != len(checksums):
                    return self._abort(xid, ticket, "bad_chunk", now)
                ticket.chunks[seq] = range(first, first + len(blocks))
                return [Verify(xid, seq, first, blocks, checksums)]
            case m.Final() if ticket.state == "RESERVED":
                ticket.final = message
                return self._complete(xid, ticket, now)
            case m.Void(_, reason):
                return self._void(xid, ticket, reason, now)
            case m.Drained() if ticket.state != "RESERVED":
                return self._free(xid)
            case m.Unknown() if ticket.state == "RESERVED" and not ticket.chunks:
                return [Send(ticket.peer, m.Offer(xid, ticket.blocks))]
            case m.Unknown():
                return self._abort(xid, ticket, "source_forgot", now)
        return []

    def _verified(self, xid: str, seq: int, ok: bool, now: float) -> list:
        ticket = self.tickets.get(xid)
        if ticket is None or ticket.state != "RESERVED":
            return []
        if not ok:
            return self._abort(xid, ticket, "checksum", now)
        ticket.verified.add(seq)
        return self._complete(xid, ticket, now)

    def _complete(self, xid: str, ticket: SinkTicket, now: float) -> list:
        if ticket.final is None or len(ticket.verified) < ticket.final.chunks:
            return []
        filled = {index for chunk in ticket.chunks.values() for index in chunk}
        if len(filled) != len(ticket.blocks):
            return self._abort(xid, ticket, "incomplete", now)
        del self.tickets[xid]
        return [Landed(xid, ticket.final.meta)]

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
            return [Send(ticket.peer, m.Query(xid))]
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
    target: list[int] = field(default_factory=list)
    held: list[Push] = field(default_factory=list)  #: pushes that wait for the Offer
    chunks: int = 0  #: writes posted
    under_way: int = 0  #: of these, not terminal yet
    meta: bytes | None = None
    reason: str = ""
    stop: bool = False  #: the sink waits for Drained, not for Void


class Source:
    """Prefill side of all tickets of one worker."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.tickets: dict[str, SourceTicket] = {}
        self.early: OrderedDict[str, tuple[str, list[int]]] = OrderedDict()  #: offers before Expect
        self.over: OrderedDict[str, m.Any | None] = OrderedDict()  #: xid -> its Final, or None

    def handle(self, event: object, now: float) -> list:
        match event:
            case Expect(xid, peer):
                return self._expect(xid, peer, now)
            case Push(xid, _, _):
                ticket = self.tickets.get(xid)
                if ticket is None or ticket.state == "CLOSING":
                    return []
                ticket.held.append(event)
                return self._advance(xid, ticket)
            case Finish(xid, meta):
                ticket = self.tickets.get(xid)
                if ticket is None or ticket.state == "CLOSING":
                    return []
                ticket.meta = meta
                return self._advance(xid, ticket)
            case Cancel(xid, reason):
                return self._closing(xid, reason)
            case Written(xid, ok, reason):
                ticket = self.tickets[xid]
                ticket.under_way -= 1
                assert ticket.under_way >= 0, xid
                return self._advance(xid, ticket) if ok else self._closing(xid, reason)
            case Noted(peer, message):
                return self._noted(peer, message)
            case PeerDown(peer):
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
        offer = self.early.pop(xid, None)
        return self._noted(offer[0], m.Offer(xid, offer[1])) if offer else []

    def _noted(self, peer: str, message: m.Any) -> list:
        xid = message.xid
        ticket = self.tickets.get(xid)
        match message:
            case m.Offer(_, blocks):
                if ticket is None and xid not in self.over:
                    _remember(self.early, xid, (peer, blocks), self.limits.remember)
                elif ticket and ticket.state == "WAITING" and ticket.peer == peer:
                    ticket.state, ticket.target = "OPEN", blocks
                    return self._advance(xid, ticket)
            case m.Stop():
                self.early.pop(xid, None)
                if ticket is None:
                    self._end(xid, None)
                    return [Send(peer, m.Drained(xid))]
                ticket.stop = True
                return self._closing(xid, "aborted")
            case m.Query():
                if ticket:
                    return [Send(peer, m.Progress(xid))]
                return [Send(peer, self.over.get(xid) or m.Unknown(xid))]
        return []

    def _advance(self, xid: str, ticket: SourceTicket) -> list:
        """Posts what may be posted, ends what is complete."""
        if ticket.state == "CLOSING":
            return self._drained(xid, ticket)
        if ticket.state != "OPEN":
            return []
        actions: list = []
        for push in ticket.held:
            target = ticket.target[push.first : push.first + len(push.blocks)]
            if len(target) != len(push.blocks):
                return [*actions, *self._closing(xid, "offer_too_small")]
            post = Post(xid, ticket.peer, ticket.chunks, push.first, push.blocks, target)
            actions.append(post)
            ticket.chunks += 1
            ticket.under_way += 1
        ticket.held.clear()
        if ticket.meta is not None and ticket.under_way == 0:
            final = m.Final(xid, ticket.chunks, ticket.meta)
            self._end(xid, final)
            actions += [Send(ticket.peer, final), Closed(xid, True)]
        return actions

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
