"""The messages between the two ends of a ticket, each a note of the transport.

A *ticket* is one transfer: mostly the KV of one attempt at a request, from a prefill worker to a
decode worker; else a cached prefix, between any two workers. The receiver offers tiles. The sender
writes into them and sends a message with each chunk of data. Either end can end the ticket.
A message of a ticket that has ended changes nothing.

A ticket id names the attempt: `request#attempt`. Between workers of several ranks, the two ranks
stand behind it: `request#attempt/1>0` is from the sender's rank 1 to the receiver's rank 0.

A *tile* is a part of a block that both ends cut alike: as many tokens as the smaller of their two
block sizes. It may be sent in pieces, which are runs of layers; the ticket's tiles are numbered
from 0, from its first token on.

The messages are MessagePack arrays with a one-letter tag: the order of the fields is the format.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from ..protos.frames import Token


class TicketMessage(msgspec.Struct, frozen=True, array_like=True):
    """Base of all messages."""

    ticket_id: str  #: As both ends know the ticket.


class OfferMessage(TicketMessage, frozen=True, tag="O"):
    """Receiver to sender: write the ticket's tiles from `first_tile` on into these tiles."""

    generation: int  #: Distinguishes this reservation from others under the same ticket id.
    first_tile: int  #: The receiver has the KV of those before it.
    tiles: list[int]  #: Tiles of the receiver's pool.
    #: The content hashes of a prefix's blocks, one a block, if the receiver asks for a prefix that
    #: the sender may hold. A receiver that only measures the way puts one stand-in there, and takes
    #: any bytes. Empty in all other offers.
    hashes: list[bytes] = []


class ChunkMessage(TicketMessage, frozen=True, tag="C"):
    """Sender to receiver, together with the data: a piece of the tiles from `first_tile` on."""

    generation: int  #: That of the offer.
    chunk_number: int  #: Counts the ticket's chunks from 0.
    first_tile: int
    piece: int  #: Which of the `pieces`; -1: all of them.
    pieces: int  #: Equal runs of layers that each tile is cut into.
    checksums: list[int]  #: 64 bits for each tile, of this piece of it.


class FinishMessage(TicketMessage, frozen=True, tag="F"):
    """Sender to receiver: everything was written, in `chunks` chunks."""

    generation: int  #: That of the offer.
    chunks: int
    tiles: int  #: Leading tiles that hold KV: all of the ticket, or fewer if it asked for a prefix.
    meta: bytes  #: What the receiver needs besides the KV, in the two workers' own format.
    busy_s: float = 0.0  #: Seconds in which at least one write was under way.
    #: Seconds from when the sender's worker had pushed everything until the last write had ended:
    #: what the transfer adds to the prefill. 0 if nothing was written.
    exposed_s: float = 0.0


class FailedMessage(TicketMessage, frozen=True, tag="V"):
    """Sender to receiver: the ticket is incomplete, and no write of it is or will be under way."""

    reason: str  #: One word, which the receiver reports as why the transfer failed.


class StopMessage(TicketMessage, frozen=True, tag="A"):
    """Receiver to sender: stop writing; answer `StoppedMessage` once no write is under way."""


class StoppedMessage(TicketMessage, frozen=True, tag="Z"):
    """Sender to receiver: no write is under way any more.

    It is never a mere receipt of `StopMessage`.
    """


class QueryMessage(TicketMessage, frozen=True, tag="Q"):
    """Receiver to sender: nothing has come for a while; what is the state of the ticket?"""

    begun: bool = False  #: True if a chunk has come.


class ProgressMessage(TicketMessage, frozen=True, tag="P"):
    """Sender to receiver: the answer to `QueryMessage` while the ticket's offer is there.

    The sender repeats the last message of a ticket that has ended.
    """


class UnknownTicketMessage(TicketMessage, frozen=True, tag="U"):
    """Sender to receiver: the answer to `QueryMessage` if the sender has no offer of the ticket.

    A ticket that has ended by `StoppedMessage` is answered so, too. If the ticket had begun, the
    sender has forgotten what it began. If it had not, the offer was lost; or the offer reached the
    sender after the query, and a chunk has overtaken this answer. So a receiver that has had a
    chunk by now ignores an answer that says `begun` False.
    """

    begun: bool = False  #: That of the query.


class GreetMessage(TicketMessage, frozen=True, tag="G"):
    """First note to a new peer: it sets the connection up before the first ticket needs it.

    Its ticket id is empty, and no ticket changes by it.
    """


class FirstTokens(msgspec.Struct, frozen=True, array_like=True):
    """`FinishMessage.meta` of a prompt: the first token of each answer, in the answers' order."""

    tokens: list[Token]
    ended_answers: list[int] = []  #: Indices of answers that ended with their first token.
    #: `identity.prompt_digest` of the ids that were computed; 0 in messages of older workers. A
    #: receiver with other ids must not go on from this KV.
    prompt_digest: int = 0


AnyMessage: TypeAlias = (
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
encode = msgspec.msgpack.Encoder().encode  #: Returns the bytes of a message's note.
_decode = msgspec.msgpack.Decoder(AnyMessage).decode


def decode(note: bytes) -> AnyMessage:
    """Returns the message of a note. Raises ValueError if the bytes are no message."""
    try:
        return _decode(note)
    except RecursionError:  # The decoder goes into so many nested arrays only.
        raise ValueError("the arrays of the note are nested too deep") from None
