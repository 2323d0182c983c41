"""What the two ends of a ticket say to each other, as transport notifications.

The sink (decode) offers blocks; the source (prefill) writes them and reports chunk by chunk; either
side can end the ticket. `ticket_id` is `request#attempt`: a message of a closed ticket changes nothing.
"""

from __future__ import annotations

import msgspec

from ..protos.frames import Token


class TicketMessage(msgspec.Struct, frozen=True, array_like=True):
    ticket_id: str


class OfferMessage(TicketMessage, frozen=True, tag="O"):
    """Sink -> source: write the ticket's tiles `first`.. into these tiles of my pool.

    `generation` tells this reservation of the tiles from any other under the same `ticket_id`. `hashes`:
    the content of the ticket's blocks, where the sink asks for a prefix that the source may hold.
    """

    generation: int
    first_tile: int
    tiles: list[int]
    hashes: list[bytes] = []


class ChunkMessage(TicketMessage, frozen=True, tag="C"):
    """Source -> sink, with the data: piece `piece` of `pieces` of the tiles `first`..; -1: all."""

    generation: int
    chunk_number: int
    first_tile: int
    piece: int
    pieces: int
    checksums: list[int]  #: one for each tile


class FinishMessage(TicketMessage, frozen=True, tag="F"):
    """Source -> sink: `chunks` chunks make the whole; `meta` is what decode needs to go on.

    `tiles`: how many there are, less than were asked for only if the sink asked for a prefix.
    Seconds: in which a write was under way, and of these after the last KV was computed.
    """

    generation: int
    chunks: int
    tiles: int
    meta: bytes
    busy_s: float = 0.0
    exposed_s: float = 0.0


class FailedMessage(TicketMessage, frozen=True, tag="V"):
    """Source -> sink: I write nothing more for this ticket (drained), and it is not complete."""

    reason: str


class StopMessage(TicketMessage, frozen=True, tag="A"):
    """Sink -> source: abort; answer `Drained` when no write is under way any more."""


class StoppedMessage(TicketMessage, frozen=True, tag="Z"):
    """Source -> sink: answer to `Stop`. It means drained, never merely received."""


class QueryMessage(TicketMessage, frozen=True, tag="Q"):
    """Sink -> source: nothing came for a while; say where we are. `begun`: a chunk has come."""

    begun: bool = False


class ProgressMessage(TicketMessage, frozen=True, tag="P"):
    """Source -> sink: answer to `Query` while the ticket is open."""


class UnknownTicketMessage(TicketMessage, frozen=True, tag="U"):
    """Source -> sink: answer to `Query` for a ticket that has no offer here, or is forgotten.

    `begun` is the query's. Only then it means that the source has forgotten what it began; else the
    answer may just have been overtaken.
    """

    begun: bool = False


class GreetMessage(TicketMessage, frozen=True, tag="G"):
    """First note to a new peer: wires the connection up before the first ticket needs it."""


class FirstTokens(msgspec.Struct, frozen=True, array_like=True):
    """`Final.meta`: what decode needs to go on, besides the KV: the first token of each answer."""

    tokens: list[Token]
    ended_answers: list[int] = []  #: answers that ended with it


AnyMessage = (
    OfferMessage
    | ChunkMessage
    | FinishMessage
    | FailedMessage
    | StopMessage
    | StoppedMessage
    | QueryMessage
    | ProgressMessage
    | UnknownTicketMessage
    | GreetMessage
)
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(AnyMessage).decode
