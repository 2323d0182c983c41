"""What a worker tells its transfer service (pure). Back come `Arrived`, or the `Broken`, `Freed`,
`Closed` and `Wanted` of `tickets`.

A role speaks of workers and blocks. `fan.Fan` turns that into one ticket for each pair of ranks;
a rank's service then counts in tiles (`slices`).
"""

from __future__ import annotations

import msgspec

from .transport import PeerCard


class AddPeer(msgspec.Struct, frozen=True, tag=True):
    """The cluster says that this worker is there; the cards of its ranks."""

    worker: str
    cards: list[PeerCard]


class LosePeer(msgspec.Struct, frozen=True, tag=True):
    """The cluster says that this worker is gone; `dead`: its process is known to be.

    A worker that is merely silent may be frozen, and wake up.
    """

    worker: str
    process_dead: bool = False


class OfferBlocks(msgspec.Struct, frozen=True, tag=True):
    """Sink: `blocks` are reserved for `tokens` tokens; `peer` shall fill those behind `held`.

    `held` counts tokens too: leading ones whose KV is in the blocks already. `hashes`: ask for a
    prefix that the peer may hold, for as much as it has of it.
    """

    ticket_id: str
    peer: str
    blocks: list[int]
    tokens: int
    held_tokens: int = 0
    hashes: tuple[bytes, ...] = ()


class ExpectOffer(msgspec.Struct, frozen=True, tag=True):
    """Source: `tokens` tokens will be pushed to `peer`."""

    ticket_id: str
    peer: str
    tokens: int


class PushBlocks(msgspec.Struct, frozen=True, tag=True):
    """Source: the KV of the ticket's blocks `first`.. is final, and lies in these `blocks`.

    `piece`: in the layers of this piece only (`slices.piece_layers`); -1: in all. `event`: not
    before the pool's event of this number (`Pool.reached`); 0: now.
    """

    ticket_id: str
    first_block: int
    blocks: list[int]
    piece: int = -1
    event: int = 0


class FinishPush(msgspec.Struct, frozen=True, tag=True):
    """Source: everything was pushed. `meta` is what the sink needs besides the KV."""

    ticket_id: str
    meta: bytes


class CancelTransfer(msgspec.Struct, frozen=True, tag=True):
    """Either side: this end no longer wants the ticket."""

    ticket_id: str
    reason: str


class BlocksArrived(msgspec.Struct, frozen=True, tag=True):
    """Outcome at the sink: the leading `tokens` tokens are in the blocks, which are the engine's.

    Seconds: in which a write was under way, and of these after the last KV was computed.
    """

    ticket_id: str
    meta: bytes
    tokens: int
    busy_s: float = 0.0
    exposed_s: float = 0.0


TransferCommand = (
    AddPeer | LosePeer | OfferBlocks | ExpectOffer | PushBlocks | FinishPush | CancelTransfer
)
