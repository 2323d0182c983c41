"""What the two ends of a ticket are told, and what they decide (pure).

`tickets` has the two state machines. A receiver takes `ReceiverEvent`s and returns
`ReceiverAction`s; a sender takes `SenderEvent`s and returns `SenderAction`s. All of them belong to
one rank, and count in tiles, the unit that both ends share (`slices`); the same verbs for a whole
worker, in blocks, are in `commands`, and some actions are taken from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .commands import BlocksFreed, PrefixRequested, PushEnded, TransferFailed
from .messages import AnyMessage, ChunkMessage


@dataclass(frozen=True, slots=True)
class TicketTimeouts:
    """Waits in seconds, and other limits.

    `chunk_s` includes the time in which the sender computes the prompt, or waits to compute it: an
    overdue prompt gets its turn after 30 s (`router/policies/deadline.py`). The waits are so long
    that only a peer in trouble exceeds them.
    """

    chunk_s: float = 60.0  #: From the offer, or from a chunk, until the next chunk.
    idle_s: float = 1.0  #: Silence before a `QueryMessage`, and between two of them.
    #: A transfer fails when so many queries in a row have met nothing but silence: the link is cut,
    #: or the sender is frozen.
    queries_limit: int = 3
    resend_s: float = 0.2  #: Between two `StopMessage`s.
    quarantine_s: float = 10.0  #: From the failure until the tiles count as quarantined.
    offer_s: float = 20.0  #: A sender waits this long for the offer.
    #: Early offers, and ended tickets, that a sender remembers: enough that no message of a
    #: forgotten one is still on its way.
    history_limit: int = 4096


# ---- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OfferTiles:
    """To the receiver: tiles are reserved, ask `peer` to fill those behind the held ones."""

    ticket_id: str
    peer: str  #: The agent (one rank of the sending worker) that is asked.
    tiles: list[int]  #: Numbers of tiles in the receiver's pool, in the order of the tokens.
    held_tiles: int = 0  #: Leading tiles whose KV is there already.
    #: If not empty, `peer` is asked for a prefix, as many tiles as it holds: the content hashes of
    #: the prefix's blocks.
    hashes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class ExpectTileOffer:
    """To the sender: the ticket is going to be pushed to `peer` once it has offered tiles."""

    ticket_id: str
    peer: str


@dataclass(frozen=True, slots=True)
class PushTiles:
    """To the sender: a piece of the ticket's tiles from `first_tile` on is final."""

    ticket_id: str
    first_tile: int  #: Number within the ticket, from 0.
    tiles: list[int]  #: Where they lie in the sender's pool.
    piece: int = 0  #: Which of the `pieces`; -1: all of them.
    pieces: int = 1  #: Equal runs of layers that a tile is cut into.


@dataclass(frozen=True, slots=True)
class FinishTilePush:
    """To the sender: all `tiles` tiles of the ticket were pushed."""

    ticket_id: str
    tiles: int
    meta: bytes  #: What the receiver needs besides the KV, in the worker's own format.


@dataclass(frozen=True, slots=True)
class CancelTicket:
    """To either end: this end gives the ticket up."""

    ticket_id: str
    reason: str  #: One word; the other end is told it where it waits for data.


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """To either end: the other end's message has come."""

    peer: str  #: The agent that sent it.
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class ChunkVerified:
    """To the receiver: the answer to `VerifyChunk`; `ok` if every checksum holds."""

    ticket_id: str
    chunk_number: int
    ok: bool


@dataclass(frozen=True, slots=True)
class WriteEnded:
    """To the sender: a write has ended, well or not; its source may be used again."""

    ticket_id: str
    ok: bool
    reason: str = ""  #: Why not, if it is not `ok`.


@dataclass(frozen=True, slots=True)
class PeerWentDown:
    """To either end: the peer is lost; its last writes may still be on their way."""

    peer: str


@dataclass(frozen=True, slots=True)
class PeerFenced:
    """To either end: no write of the lost peer can land any more."""

    peer: str


@dataclass(frozen=True, slots=True)
class TicketTick:
    """To either end: time has passed, look at the timeouts."""


SharedEvent: TypeAlias = CancelTicket | MessageReceived | PeerWentDown | PeerFenced | TicketTick
ReceiverEvent: TypeAlias = OfferTiles | ChunkVerified | SharedEvent
SenderEvent: TypeAlias = ExpectTileOffer | PushTiles | FinishTilePush | WriteEnded | SharedEvent


# ---- actions -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendMessage:
    """A receiver or a sender returns this to have the message sent to the peer."""

    peer: str
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class VerifyChunk:
    """The receiver returns this to have the checksums of a chunk computed.

    `tiles` are those of the receiver's own pool.
    """

    ticket_id: str
    tiles: list[int]
    chunk: ChunkMessage


@dataclass(frozen=True, slots=True)
class WriteTiles:
    """The sender returns this to have tiles of the own pool written into tiles of the peer's.

    `source_tiles[i]` goes to `target_tiles[i]`; both are the ticket's tile `first_tile + i`. The
    caller sends a `ChunkMessage` of the same fields along, and answers once with `WriteEnded`.
    """

    ticket_id: str
    peer: str  #: The agent that receives.
    generation: int  #: That of the offer.
    chunk_number: int  #: Counts the ticket's chunks from 0.
    first_tile: int  #: Number within the ticket, from 0.
    source_tiles: list[int]  #: Where the tiles lie in the own pool.
    target_tiles: list[int]  #: Where they lie in the peer's pool.
    piece: int  #: Which of the `pieces`; -1: all of them.
    pieces: int  #: Equal runs of layers that a tile is cut into.


@dataclass(frozen=True, slots=True)
class TilesArrived:
    """The receiver returns this when identity and checksum of every tile hold.

    The engine may use the tiles from then on.
    """

    ticket_id: str
    meta: bytes
    tiles: int  #: Leading tiles that hold KV, those that were held before included.
    busy_s: float = 0.0  #: That of `FinishMessage`.
    exposed_s: float = 0.0  #: That of `FinishMessage`, and until the last checksum held.


ReceiverAction: TypeAlias = SendMessage | VerifyChunk | TilesArrived | TransferFailed | BlocksFreed
SenderAction: TypeAlias = SendMessage | WriteTiles | PushEnded | PrefixRequested
