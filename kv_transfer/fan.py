"""Spreads a worker's tickets over its ranks, and joins what comes of them (pure).

A worker has one ticket for each attempt; a rank's service knows only its own part. Each pair of a
sender's rank and a receiver's rank that hold common heads therefore has a ticket of its own, a
*lane*: `request#0/1>0` joins sender rank 1 with receiver rank 0. Between two workers of one rank
there is one lane, which has the ticket's own name.

Life of a fanned ticket:
    opened    `OfferBlocks` or `ExpectOffer` goes to each rank that has a lane, under its name.
    arrived   when every lane has arrived: `BlocksArrived`, with the times of the lane that was
              exposed longest (`exposed_s`).
    failed    with the first lane that fails, which cancels the others: `TransferFailed`.
    over      when no lane is open any more: `BlocksFreed` after a failure, or `PushEnded`.
A lane of a failed ticket stays open until its own blocks are free, or its push has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, assert_never

import msgspec

from .commands import (
    AddPeer,
    BlocksArrived,
    BlocksFreed,
    CancelTransfer,
    ExpectOffer,
    FinishPush,
    LosePeer,
    OfferBlocks,
    PrefixRequested,
    PushBlocks,
    PushEnded,
    TransferCommand,
    TransferFailed,
    TransferOutcome,
)
from .slices import LaneEnd, partner_ranks
from .transport import PeerCard


class RankCommand(NamedTuple):
    """A command for the transfer service of one rank of this worker."""

    rank: int
    command: TransferCommand


#: What a `Fan` wants done: a command goes to a rank's service, an outcome to the worker.
FanAction: TypeAlias = RankCommand | TransferOutcome
#: What the service of a rank says of one lane.
LaneOutcome: TypeAlias = BlocksArrived | TransferFailed | BlocksFreed | PushEnded


@dataclass(slots=True)
class FannedTicket:
    """One ticket of the worker, and its lanes."""

    #: The rank of this worker that has the lane, by the lane's name. A lane leaves when it ends.
    open_lanes: dict[str, int]
    arrivals: list[BlocksArrived] = field(default_factory=list)  #: Of lanes that have arrived.
    failure: str = ""  #: Why the ticket has failed, if it has.
    failure_reported: bool = False  #: True once `TransferFailed` was returned.


class Fan:
    """All tickets of one worker, across its ranks.

    `handle` takes the worker's commands and the outcomes of its ranks' services. It returns
    commands for the ranks, and outcomes of whole tickets for the worker.
    """

    def __init__(self, own_cards: Sequence[PeerCard]) -> None:
        """`own_cards` are those of this worker's ranks."""
        self.own_cards = list(own_cards)
        self.peers: dict[str, list[PeerCard]] = {}  #: Cards of the ranks, by worker.
        self.tickets: dict[str, FannedTicket] = {}
        self._requested: set[str] = set()  #: Prefix tickets that were reported, not yet expected.

    def handle(self, event: TransferCommand | TransferOutcome) -> list[FanAction]:
        """Takes a command or an outcome; returns what goes to the ranks, and what the worker hears.

        A command is the worker's. An outcome is that of one rank's lane, whose name is in its
        `ticket_id`.
        """
        match event:
            case AddPeer(worker, cards):
                return self._add_peer(worker, cards)
            case LosePeer(worker):
                self.peers.pop(worker, None)
                return [RankCommand(card.rank, event) for card in self.own_cards]
            case OfferBlocks() | ExpectOffer():
                return self._open(event)
            case PushBlocks() | FinishPush() | CancelTransfer():
                return self._forward(event)
            case PrefixRequested(lane, peer, hashes):
                return self._request_prefix(lane, peer, hashes)
            case BlocksArrived() | TransferFailed() | BlocksFreed() | PushEnded():
                return self._lane_outcome(event)
            case _:
                assert_never(event)

    def _add_peer(self, worker: str, cards: list[PeerCard]) -> list[FanAction]:
        """Tells each rank of the peer's ranks that it has lanes to."""
        self.peers[worker] = cards
        actions: list[FanAction] = []
        for own_card in self.own_cards:
            partners = [cards[rank] for rank in self._partner_ranks(own_card, cards)]
            actions.append(RankCommand(own_card.rank, AddPeer(worker, partners)))
        return actions

    def _partner_ranks(self, own_card: PeerCard, cards: list[PeerCard]) -> list[int]:
        own_end = LaneEnd(own_card.layout, own_card.rank, own_card.ranks)
        return partner_ranks(own_end, len(cards), cards[0].layout.heads)

    def _open(self, command: OfferBlocks | ExpectOffer) -> list[FanAction]:
        ticket_id = command.ticket_id
        assert ticket_id not in self.tickets, ticket_id
        self._requested.discard(ticket_id)
        cards = self.peers.get(command.peer)
        if cards is None:
            if isinstance(command, ExpectOffer):
                return [PushEnded(ticket_id, ok=False, reason="peer_lost")]
            return [TransferFailed(ticket_id, "peer_lost"), BlocksFreed(ticket_id)]

        ticket = self.tickets[ticket_id] = FannedTicket(open_lanes={})
        receives = isinstance(command, OfferBlocks)
        single_lane = len(self.own_cards) == len(cards) == 1
        actions: list[FanAction] = []
        for own_card in self.own_cards:
            for partner in self._partner_ranks(own_card, cards):
                if single_lane:
                    lane = ticket_id
                elif receives:
                    lane = f"{ticket_id}/{partner}>{own_card.rank}"
                else:
                    lane = f"{ticket_id}/{own_card.rank}>{partner}"
                ticket.open_lanes[lane] = own_card.rank
                agent = cards[partner].agent
                lane_command = msgspec.structs.replace(command, ticket_id=lane, peer=agent)
                actions.append(RankCommand(own_card.rank, lane_command))
        return actions

    def _forward(self, command: PushBlocks | FinishPush | CancelTransfer) -> list[FanAction]:
        """Passes a command on to every open lane of its ticket, if there is such a ticket."""
        ticket = self.tickets.get(command.ticket_id)
        if ticket is None:
            return []
        return [
            RankCommand(rank, msgspec.structs.replace(command, ticket_id=lane))
            for lane, rank in ticket.open_lanes.items()
        ]

    def _request_prefix(self, lane: str, peer: str, hashes: tuple[bytes, ...]) -> list[FanAction]:
        """Reports the request of the first lane for all lanes, with the worker's name.

        A request of an agent that no known worker has is dropped: the rank's service reports it
        again when the asking end sends its next query.
        """
        ticket_id = _ticket_of(lane)
        if ticket_id in self._requested or ticket_id in self.tickets:
            return []
        for worker, cards in self.peers.items():
            if any(card.agent == peer for card in cards):
                self._requested.add(ticket_id)
                return [PrefixRequested(ticket_id, worker, hashes)]
        return []

    def _lane_outcome(self, outcome: LaneOutcome) -> list[FanAction]:
        lane = outcome.ticket_id
        ticket_id = _ticket_of(lane)
        ticket = self.tickets.get(ticket_id)
        if ticket is None or lane not in ticket.open_lanes:
            return []
        actions: list[FanAction] = []
        match outcome:
            case TransferFailed():
                return self._fail(ticket_id, ticket, outcome)
            case BlocksArrived():
                del ticket.open_lanes[lane]
                ticket.arrivals.append(outcome)
            case BlocksFreed():
                del ticket.open_lanes[lane]
            case PushEnded():
                del ticket.open_lanes[lane]
                if not outcome.ok and not ticket.failure:
                    ticket.failure = outcome.reason or "failed"
                    actions = self._forward(CancelTransfer(ticket_id, ticket.failure))
            case _:
                assert_never(outcome)
        if ticket.open_lanes:
            return actions
        del self.tickets[ticket_id]
        return [_joined_outcome(ticket_id, ticket, outcome)]

    def _fail(
        self, ticket_id: str, ticket: FannedTicket, lane_failed: TransferFailed
    ) -> list[FanAction]:
        """Reports the first failure of a lane, and cancels the other lanes."""
        if ticket.failure_reported:
            return []
        ticket.failure_reported = True
        ticket.failure = lane_failed.reason
        cancels = [
            RankCommand(rank, CancelTransfer(lane, ticket.failure))
            for lane, rank in ticket.open_lanes.items()
            if lane != lane_failed.ticket_id
        ]
        return [TransferFailed(ticket_id, ticket.failure), *cancels]


def _joined_outcome(
    ticket_id: str, ticket: FannedTicket, last: BlocksArrived | BlocksFreed | PushEnded
) -> TransferOutcome:
    """Returns the outcome of a ticket whose last open lane ended with `last`."""
    if isinstance(last, PushEnded):
        return PushEnded(ticket_id, ok=not ticket.failure, reason=ticket.failure)
    if ticket.failure_reported:
        return BlocksFreed(ticket_id)
    slowest = max(ticket.arrivals, key=lambda arrival: arrival.exposed_s)
    # Ranks may hold different parts of a prefix; only what every lane brought can be used.
    tokens = min(arrival.tokens for arrival in ticket.arrivals)
    return msgspec.structs.replace(slowest, ticket_id=ticket_id, tokens=tokens)


def _ticket_of(lane: str) -> str:
    """Returns a lane's ticket: a ticket id ends with `#attempt`, and the lane's name follows."""
    request, _, rest = lane.rpartition("#")
    return f"{request}#{rest.partition('/')[0]}"
