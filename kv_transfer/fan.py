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
    command: c.Command


@dataclass(slots=True)
class Whole:
    lanes: dict[str, int]  #: open ones -> my rank
    landed: list[c.Arrived] = field(default_factory=list)
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
            case c.Receive(xid) | c.Expect(xid):
                return self._open(xid, event)
            case c.Push(xid) | c.Finish(xid) | c.Cancel(xid):
                return self._tell(xid, event)
            case t.Wanted(lane, peer, hashes):
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

    def _open(self, xid: str, command: c.Receive | c.Expect) -> list:
        assert xid not in self.tickets, xid
        self._wanted.discard(xid)
        cards = self.peers.get(command.peer)
        if cards is None:
            if isinstance(command, c.Expect):
                return [t.Closed(xid, False, "peer_lost")]
            return [t.Broken(xid, "peer_lost"), t.Freed(xid)]
        whole = self.tickets[xid] = Whole({})
        actions = []
        single = len(self.mine) == len(cards) == 1
        for mine in self.mine:
            for other in self._partners(mine, cards):
                sink = isinstance(command, c.Receive)
                pair = (other, mine.rank) if sink else (mine.rank, other)
                lane = xid if single else f"{xid}/{pair[0]}>{pair[1]}"
                whole.lanes[lane] = mine.rank
                agent = cards[other].agent
                lane_command = msgspec.structs.replace(command, xid=lane, peer=agent)
                actions.append(ToRank(mine.rank, lane_command))
        return actions

    def _tell(self, xid: str, command: c.Push | c.Finish | c.Cancel) -> list:
        whole = self.tickets.get(xid)
        return [
            ToRank(rank, msgspec.structs.replace(command, xid=lane))
            for lane, rank in (whole.lanes.items() if whole else ())
        ]

    def _wants(self, lane: str, peer: str, hashes: tuple[bytes, ...]) -> list:
        """Told once for all lanes, with the worker's name."""
        xid = _whole(lane)
        if xid in self._wanted or xid in self.tickets:
            return []
        for worker, cards in self.peers.items():
            if any(card.agent == peer for card in cards):
                self._wanted.add(xid)
                return [t.Wanted(xid, worker, hashes)]
        return []

    def _outcome(self, event: object) -> list:
        assert isinstance(event, c.Arrived | t.Broken | t.Freed | t.Closed), event
        xid = _whole(event.xid)
        whole = self.tickets.get(xid)
        if whole is None or event.xid not in whole.lanes:
            return []
        if isinstance(event, t.Broken):
            return self._broken(xid, whole, event.reason, but=event.xid)
        del whole.lanes[event.xid]
        if isinstance(event, c.Arrived):
            whole.landed.append(event)
        actions = []
        if isinstance(event, t.Closed) and not event.ok and not whole.reason:
            whole.reason = event.reason or "failed"
            actions = self._tell(xid, c.Cancel(xid, whole.reason))
        if whole.lanes:
            return actions
        del self.tickets[xid]
        return [self._end(xid, whole, event)]

    def _broken(self, xid: str, whole: Whole, reason: str, but: str) -> list:
        if whole.told:
            return []
        whole.told, whole.reason = True, reason
        others = [
            ToRank(rank, c.Cancel(lane, reason))
            for lane, rank in whole.lanes.items()
            if lane != but
        ]
        return [t.Broken(xid, reason), *others]

    def _end(self, xid: str, whole: Whole, last: object) -> object:
        if isinstance(last, t.Closed):
            return t.Closed(xid, not whole.reason, whole.reason)
        if whole.told:
            return t.Freed(xid)
        slowest = max(whole.landed, key=lambda landed: landed.exposed_s)
        fewest = min(landed.tokens for landed in whole.landed)
        return msgspec.structs.replace(slowest, xid=xid, tokens=fewest)


def _whole(lane: str) -> str:
    """The ticket of a lane. A ticket ends with `#attempt`, so what follows names the lane."""
    request, _, rest = lane.rpartition("#")
    return f"{request}#{rest.partition('/')[0]}"
