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
    """Sink -> source: write the ticket's blocks 0.. into these blocks of my pool."""

    blocks: list[int]


class Chunk(Message, frozen=True, tag="C"):
    """Source -> sink, with the data: blocks `first`.. of the ticket have landed."""

    seq: int
    first: int
    checksums: list[int]


class Final(Message, frozen=True, tag="F"):
    """Source -> sink: `chunks` chunks make the whole; `meta` is what decode needs to go on."""

    chunks: int
    meta: bytes


class Void(Message, frozen=True, tag="V"):
    """Source -> sink: I write nothing more for this ticket (drained), and it is not complete."""

    reason: str


class Stop(Message, frozen=True, tag="A"):
    """Sink -> source: abort; answer `Drained` when no write is under way any more."""


class Drained(Message, frozen=True, tag="Z"):
    """Source -> sink: answer to `Stop`. It means drained, never merely received."""


class Query(Message, frozen=True, tag="Q"):
    """Sink -> source: nothing came for a while; say where we are."""


class Progress(Message, frozen=True, tag="P"):
    """Source -> sink: answer to `Query` while the ticket is open."""


class Unknown(Message, frozen=True, tag="U"):
    """Source -> sink: answer to `Query` for a ticket that this process never had or forgot."""


class Greet(Message, frozen=True, tag="G"):
    """First note to a new peer: wires the connection up before the first ticket needs it."""


class Handover(msgspec.Struct, frozen=True, array_like=True):
    """`Final.meta`: what decode needs to go on, besides the KV."""

    first: Token


Any = Offer | Chunk | Final | Void | Stop | Drained | Query | Progress | Unknown | Greet
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Any).decode
