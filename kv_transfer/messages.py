"""What the two ends of a ticket say to each other, as transport notifications.

The sink (decode) offers blocks; the source (prefill) writes them and reports chunk by chunk; either
side can end the ticket. `xid` is `request#attempt`: a message of a closed ticket changes nothing.
"""

from __future__ import annotations

import msgspec

from ..protos.frames import Token


class Message(msgspec.Struct, frozen=True, array_like=True):
    xid: str


class Offer(Message, frozen=True, tag="O"):
    """Sink -> source: write the ticket's tiles `first`.. into these tiles of my pool.

    `generation` tells this reservation of the tiles from any other under the same `xid`. `hashes`:
    the content of the ticket's blocks, where the sink asks for a prefix that the source may hold.
    """

    generation: int
    first: int
    tiles: list[int]
    hashes: list[bytes] = []


class Chunk(Message, frozen=True, tag="C"):
    """Source -> sink, with the data: piece `piece` of `pieces` of the tiles `first`..; -1: all."""

    generation: int
    seq: int
    first: int
    piece: int
    pieces: int
    checksums: list[int]  #: one for each tile


class Final(Message, frozen=True, tag="F"):
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


class Void(Message, frozen=True, tag="V"):
    """Source -> sink: I write nothing more for this ticket (drained), and it is not complete."""

    reason: str


class Stop(Message, frozen=True, tag="A"):
    """Sink -> source: abort; answer `Drained` when no write is under way any more."""


class Drained(Message, frozen=True, tag="Z"):
    """Source -> sink: answer to `Stop`. It means drained, never merely received."""


class Query(Message, frozen=True, tag="Q"):
    """Sink -> source: nothing came for a while; say where we are. `begun`: a chunk has come."""

    begun: bool = False


class Progress(Message, frozen=True, tag="P"):
    """Source -> sink: answer to `Query` while the ticket is open."""


class Unknown(Message, frozen=True, tag="U"):
    """Source -> sink: answer to `Query` for a ticket that has no offer here, or is forgotten.

    `begun` is the query's. Only then it means that the source has forgotten what it began; else the
    answer may just have been overtaken.
    """

    begun: bool = False


class Greet(Message, frozen=True, tag="G"):
    """First note to a new peer: wires the connection up before the first ticket needs it."""


class Handover(msgspec.Struct, frozen=True, array_like=True):
    """`Final.meta`: what decode needs to go on, besides the KV: the first token of each answer."""

    firsts: list[Token]
    ended: list[int] = []  #: answers that ended with it


Any = Offer | Chunk | Final | Void | Stop | Drained | Query | Progress | Unknown | Greet
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Any).decode
