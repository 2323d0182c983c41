"""One ticket across ranks (pure): `handle(command or outcome) -> [ToRank or outcome]`.

Each pair of ranks that hold common heads has a ticket of its own, a *lane*: `request#0/1>0` joins
source rank 1 with sink rank 0. The whole lands when all lanes have landed; it breaks when the first
one breaks, which cancels the others; it is freed, or closed, when none is left. Between workers of
one rank there is one lane, and it has the ticket's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from . import commands as c
from . import tickets as t
from .slices import End, partners
from .transport import PeerCard


class ToRank(NamedTuple):
    """A command for the transfer service of one rank of this worker."""

    rank: int
    command: c.TransferCommand


@dataclass(slots=True)
class Whole:
    lanes: dict[str, int]  #: open ones -> my rank
    landed: list[c.BlocksArrived] = field(default_factory=list)
    reason: str = ""  #: why it is broken, if it is
    told: bool = False  #: that it is broken


class Fan:
    """`mine`: the cards of this worker's ranks."""

    def __init__(self, mine: Sequence[PeerCard]) -> None:
        self.mine = list(mine)
        self.peers: dict[str, list[PeerCard]] = {}
        self.tickets: dict[str, Whole] = {}
        self._wanted: set[str] = set()  #: told, not expected yet

    def handle(self, event: object) -> list:
        match event:
            case c.AddPeer(worker, cards):
                return self._add(worker, cards)
            case c.LosePeer(worker):
                self.peers.pop(worker, None)
                return [ToRank(card.rank, event) for card in self.mine]
            case c.OfferBlocks(ticket_id) | c.ExpectOffer(ticket_id):
                return self._open(ticket_id, event)
            case c.PushBlocks(ticket_id) | c.FinishPush(ticket_id) | c.CancelTransfer(ticket_id):
                return self._tell(ticket_id, event)
            case t.PrefixRequested(lane, peer, hashes):
                return self._wants(lane, peer, hashes)
            case _:
                return self._outcome(event)

    def _add(self, worker: str, cards: list[PeerCard]) -> list:
        self.peers[worker] = cards
        actions = []
        for mine in self.mine:
            others = [cards[rank] for rank in self._partners(mine, cards)]
            actions.append(ToRank(mine.rank, c.AddPeer(worker, others)))
        return actions

    def _partners(self, mine: PeerCard, cards: list[PeerCard]) -> list[int]:
        end = End(mine.layout, mine.rank, mine.ranks)
        return partners(end, len(cards), cards[0].layout.heads)

    def _open(self, ticket_id: str, command: c.OfferBlocks | c.ExpectOffer) -> list:
        assert ticket_id not in self.tickets, ticket_id
        self._wanted.discard(ticket_id)
        cards = self.peers.get(command.peer)
        if cards is None:
            if isinstance(command, c.ExpectOffer):
                return [t.PushEnded(ticket_id, False, "peer_lost")]
            return [t.TransferFailed(ticket_id, "peer_lost"), t.BlocksFreed(ticket_id)]
        whole = self.tickets[ticket_id] = Whole({})
        actions = []
        single = len(self.mine) == len(cards) == 1
        for mine in self.mine:
            for other in self._partners(mine, cards):
                sink = isinstance(command, c.OfferBlocks)
                pair = (other, mine.rank) if sink else (mine.rank, other)
                lane = ticket_id if single else f"{ticket_id}/{pair[0]}>{pair[1]}"
                whole.lanes[lane] = mine.rank
                agent = cards[other].agent
                lane_command = msgspec.structs.replace(command, ticket_id=lane, peer=agent)
                actions.append(ToRank(mine.rank, lane_command))
        return actions

    def _tell(self, ticket_id: str, command: c.PushBlocks | c.FinishPush | c.CancelTransfer) -> list:
        whole = self.tickets.get(ticket_id)
        return [
            ToRank(rank, msgspec.structs.replace(command, ticket_id=lane))
            for lane, rank in (whole.lanes.items() if whole else ())
        ]

    def _wants(self, lane: str, peer: str, hashes: tuple[bytes, ...]) -> list:
        """Told once for all lanes, with the worker's name."""
        ticket_id = _whole(lane)
        if ticket_id in self._wanted or ticket_id in self.tickets:
            return []
        for worker, cards in self.peers.items():
            if any(card.agent == peer for card in cards):
                self._wanted.add(ticket_id)
                return [t.PrefixRequested(ticket_id, worker, hashes)]
        return []

    def _outcome(self, event: object) -> list:
        assert isinstance(
            event, c.BlocksArrived | t.TransferFailed | t.BlocksFreed | t.PushEnded
        ), event
        ticket_id = _whole(event.ticket_id)
        whole = self.tickets.get(ticket_id)
        if whole is None or event.ticket_id not in whole.lanes:
            return []
        if isinstance(event, t.TransferFailed):
            return self._broken(ticket_id, whole, event.reason, but=event.ticket_id)
        del whole.lanes[event.ticket_id]
        if isinstance(event, c.BlocksArrived):
            whole.landed.append(event)
        actions = []
        if isinstance(event, t.PushEnded) and not event.ok and not whole.reason:
            whole.reason = event.reason or "failed"
            actions = self._tell(ticket_id, c.CancelTransfer(ticket_id, whole.reason))
        if whole.lanes:
            return actions
        del self.tickets[ticket_id]
        return [self._end(ticket_id, whole, event)]

    def _broken(self, ticket_id: str, whole: Whole, reason: str, but: str) -> list:
        if whole.told:
            return []
        whole.told, whole.reason = True, reason
        others = [
            ToRank(rank, c.CancelTransfer(lane, reason))
            for lane, rank in whole.lanes.items()
            if lane != but
        ]
        return [t.TransferFailed(ticket_id, reason), *others]

    def _end(self, ticket_id: str, whole: Whole, last: object) -> object:
        if isinstance(last, t.PushEnded):
            return t.PushEnded(ticket_id, not whole.reason, whole.reason)
        if whole.told:
            return t.BlocksFreed(ticket_id)
        slowest = max(whole.landed, key=lambda landed: landed.exposed_s)
        fewest = min(landed.tokens for landed in whole.landed)
        return msgspec.structs.replace(slowest, ticket_id=ticket_id, tokens=fewest)


def _whole(lane: str) -> str:
    """The ticket of a lane. A ticket ends with `#attempt`, so what follows names the lane."""
    request, _, rest = lane.rpartition("#")
    return f"{request}#{rest.partition('/')[0]}"
