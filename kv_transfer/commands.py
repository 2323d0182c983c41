"""What a worker asks of its transfer service, and what the service answers.

This is the vocabulary of a whole worker: it names other workers, and counts in blocks and tokens.
`fan.Fan` turns each command into one command for each pair of ranks. Inside a rank, the same verbs
exist once more as `ticket_events`: `OfferBlocks` becomes `OfferTiles`. They stay apart because the
two ends of a ticket may have blocks of different sizes. Only a rank's service knows the tile, the
unit that both ends share, and the state machines see tiles only.

A receiver offers blocks: `OfferBlocks` is answered by `BlocksArrived`, or by `TransferFailed` and
later `BlocksFreed`. A sender expects the offer and pushes: `ExpectOffer` is answered by
`PushEnded`.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from .transport import PeerCard

# ---- commands ------------------------------------------------------------------------------------


class AddPeer(msgspec.Struct, frozen=True, tag=True):
    """The cluster says that this worker exists; `cards` are those of its ranks, in their order.

    To the service of one rank, `cards` are those ranks of the worker that share heads with it.
    """

    worker: str  #: its id
    cards: list[PeerCard]


class LosePeer(msgspec.Struct, frozen=True, tag=True):
    """The cluster says that this worker is lost.

    A worker that is merely silent may be frozen, and wake up.
    """

    worker: str
    process_dead: bool = False  #: True if the worker's process is known to have ended.


class OfferBlocks(msgspec.Struct, frozen=True, tag=True):
    """The receiver has reserved `blocks` and asks `peer` to fill them."""

    ticket_id: str  #: `request#attempt`; both ends make it from the attempt's key.
    peer: str  #: The sender's worker id. To the service of one rank: the agent, a rank of it.
    blocks: list[int]  #: Numbers in the receiver's pool, in the order of the tokens.
    tokens: int  #: How many tokens the blocks are for; the last block may be filled in part.
    held_tokens: int = 0  #: Leading tokens whose KV is in the blocks already.
    #: If not empty, the receiver asks for a prefix, as much of it as `peer` holds: the content
    #: hashes of the prefix's blocks, in order.
    hashes: tuple[bytes, ...] = ()


class ExpectOffer(msgspec.Struct, frozen=True, tag=True):
    """The sender is going to push `tokens` tokens to `peer`, once `peer` has offered blocks."""

    ticket_id: str
    peer: str  #: The receiver; named as in `OfferBlocks`.
    tokens: int  #: All tokens of the ticket, those included that the receiver holds already.


class PushBlocks(msgspec.Struct, frozen=True, tag=True):
    """The sender's KV of the ticket's blocks `first_block` and following is final: write it."""

    ticket_id: str
    first_block: int  #: Position in the ticket, in blocks of the sender; 0 is its first token's.
    blocks: list[int]  #: Where the KV lies in the sender's pool.
    piece: int = -1  #: The piece of the layers that is final (`slices.piece_layers`); -1: all.


class FinishPush(msgspec.Struct, frozen=True, tag=True):
    """The sender has pushed everything. `meta` is what the receiver needs besides the KV."""

    ticket_id: str
    meta: bytes  #: In a format of the two workers' own; nothing here reads it.


class CancelTransfer(msgspec.Struct, frozen=True, tag=True):
    """This end, the receiver or the sender, gives the ticket up."""

    ticket_id: str
    reason: str  #: One word, such as "aborted"; failures are counted by it.


#: Commands of one ticket.
TicketCommand: TypeAlias = OfferBlocks | ExpectOffer | PushBlocks | FinishPush | CancelTransfer
#: Whatever a worker asks of its transfer service.
TransferCommand: TypeAlias = AddPeer | LosePeer | TicketCommand


# ---- outcomes ------------------------------------------------------------------------------------


class BlocksArrived(msgspec.Struct, frozen=True, tag=True):
    """To the receiver: the leading `tokens` tokens are in the blocks; they are the engine's now."""

    ticket_id: str
    meta: bytes  #: That of the sender's `FinishPush`.
    tokens: int  #: Fewer than were offered only if a prefix was asked for.
    busy_s: float = 0.0  #: Seconds in which at least one write was under way.
    exposed_s: float = 0.0  #: Seconds from the sender's `FinishPush` until the last checksum held.


class TransferFailed(msgspec.Struct, frozen=True, tag=True):
    """To the receiver: the transfer failed. Its blocks stay reserved until `BlocksFreed`."""

    ticket_id: str
    reason: str  #: One word, such as "checksum", "timeout" or "peer_lost".


class BlocksFreed(msgspec.Struct, frozen=True, tag=True):
    """To the receiver: no write can land on the blocks of a failed transfer any more."""

    ticket_id: str


class PushEnded(msgspec.Struct, frozen=True, tag=True):
    """To the sender: no write of this ticket is under way; its blocks may be released."""

    ticket_id: str
    ok: bool  #: True if everything was written.
    reason: str = ""  #: Why not, if it was not.


class PrefixRequested(msgspec.Struct, frozen=True, tag=True):
    """To the sender: `peer` asks for a prefix.

    The answer is `ExpectOffer`, and then the prefix's blocks or `CancelTransfer`.
    """

    ticket_id: str
    peer: str
    hashes: tuple[bytes, ...]  #: Those of `OfferBlocks`.


TransferOutcome: TypeAlias = (
    BlocksArrived | TransferFailed | BlocksFreed | PushEnded | PrefixRequested
)
