"""A simulated fabric: any number of transports in one process, on an injected clock and seed.

Virtual time: step the agents, then move the clock to `next_at()`. Real time: give it
`time.monotonic` and it is a throttled network between real pools, one thread per agent.

Per direction between two agents (a lane): delay, jitter, loss and duplication of notes, bytes per
second shared by the writes under way. On command: a lane is cut or clogged, an agent crashes,
freezes or is slow. Data is read and lands piece by piece over the time of its write, so a write
that has landed by half, and a source that is reused too early, are there to be seen.

What fences a lost peer (`Fence`): REFUSE is like TCP: `Admit` is asked for every piece, a lost peer
is hung up on, and its death is told. GRACE is like NIXL: late pieces of a dead writer land within
`grace_s`, nobody is asked, and a death is found by the next call. GONE is GRACE that also waits
until the peer is gone: a frozen writer is not fenced.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ..errors import PeerLost
from ..transport import (
    AdmitData,
    NotificationReceived,
    PeerCard,
    PeerDisconnected,
    Pool,
    PostedWriteEnded,
    Spans,
    TransportEvent,
)
from .stream import pieces


class Fence(enum.Enum):
    GRACE = "grace"
    GONE = "gone"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Link:
    """What one direction between two agents is like. Loss and duplication are of notes, in 0..1."""

    delay_s: float = 0.0
    jitter_s: float = 0.0  #: mean of what is drawn on top, exponential: later ones overtake
    loss: float = 0.0
    duplication: float = 0.0
    bytes_s: float = float("inf")
    piece_bytes: int = 64 << 10


@dataclass(eq=False, slots=True)
class _Flight:
    """A write under way."""

    handle: int
    note: bytes
    pieces: deque[list[int]]  #: byte in the source, byte in the target, bytes


@dataclass(eq=False, slots=True)
class _Lane:
    source: str
    target: str
    link: Link
    flights: deque[_Flight] = field(default_factory=deque)
    busy: bool = False  #: a piece is on its way
    cut: bool = False
    clogged_until: float = 0.0
    parked: list[Callable[[float], None]] = field(default_factory=list)  #: go on when it is free


class Fabric:
    """`open` transports on it; all of them, and the faults, may be used from any thread."""

    def __init__(
        self,
        clock: Callable[[], float],
        seed: int,
        link: Link | None = None,
        fence: Fence = Fence.GRACE,
        grace_s: float = 1.0,
        notice_s: float = 0.0,
        witness: Callable[[str, int, int], None] | None = None,
    ) -> None:
        """`notice_s`: how long a death goes unnoticed. `witness(agent, start, size)` is told of
        the bytes of an agent's pool that are about to be written."""
        self.clock, self.fence, self.grace_s, self.notice_s = clock, fence, grace_s, notice_s
        self.lock = threading.RLock()
        self._link, self._witness = link or Link(), witness
        self._rng = random.Random(seed)
        self._ids = itertools.count()
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._agents: dict[str, FabricTransport] = {}
        self._frozen: set[str] = set()
        self._slow: dict[str, float] = {}

    def open(self, agent: str, pool: Pool, admit: AdmitData = lambda *_: True) -> FabricTransport:
        with self.lock:
            assert agent not in self._agents, f"{agent} was used before"
            self._agents[agent] = FabricTransport(self, agent, pool, admit)
            return self._agents[agent]

    # ---- time ------------------------------------------------------------------------------------

    def next_at(self) -> float | None:
        """When something happens next by itself; None: never."""
        return self._due[0][0] if self._due else None

    def advance(self) -> float:
        """Does what is due, in order and each at its own time; returns the clock's."""
        now = self.clock()
        while self._due and self._due[0][0] <= now:
            at, _, act = heapq.heappop(self._due)
            act(at)
        return now

    def _at(self, time: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._due, (time, next(self._ids), act))

    # ---- faults ----------------------------------------------------------------------------------

    def set_link(self, source: str, target: str, link: Link) -> None:
        with self.lock:
            self._lane(source, target).link = link

    def cut(self, source: str, target: str) -> None:
        """One way: notes are lost from now on, data and confirmations wait for `heal`."""
        with self.lock:
            self.advance()
            self._lane(source, target).cut = True

    def heal(self, source: str, target: str) -> None:
        with self.lock:
            now = self.advance()
            lane = self._lane(source, target)
            lane.cut = False
            self._unpark(lane, now)

    def clog(self, source: str, target: str, seconds: float) -> None:
        """One way: nothing that is sent moves for so long, then everything goes on."""
        with self.lock:
            lane, until = self._lane(source, target), self.advance() + seconds
            lane.clogged_until = max(lane.clogged_until, until)

    def slow(self, agent: str, factor: float) -> None:
        """Everything from and to the agent takes `factor` times as long."""
        self._slow[agent] = factor

    def freeze(self, agent: str) -> None:
        """Nothing leaves the agent until `thaw`; what others write into its pool still lands."""
        with self.lock:
            self.advance()
            self._frozen.add(agent)

    def thaw(self, agent: str) -> None:
        with self.lock:
            now = self.advance()
            self._frozen.discard(agent)
            for lane in [x for x in self._lanes.values() if x.source == agent]:
                self._unpark(lane, now)

    def crash(self, agent: str) -> None:
        """The agent's process dies. Some of its data is on the wire, and lands within the grace."""
        with self.lock:
            self._end(agent, late=True)

    # ---- the ends --------------------------------------------------------------------------------

    def _end(self, agent: str, late: bool) -> None:
        now, end = self.advance(), self._agents[agent]
        if end.ended_at is not None:
            return
        end.ended_at = now
        for lane in list(self._lanes.values()):
            if lane.source == agent:
                for flight in lane.flights:
                    self._scatter(lane, flight, now, late)
                lane.flights.clear()
                lane.parked.clear()
        for other in list(self._agents.values()):
            self._at(now + self.notice_s, partial(other.notice, agent))

    def _scatter(self, lane: _Lane, flight: _Flight, now: float, late: bool) -> None:
        """The writer is dead: a random part of what is left is in a buffer already, and lands."""
        left = list(flight.pieces)[: self._rng.randint(0, len(flight.pieces)) if late else 0]
        view = self._agents[lane.source].pool.view
        for start, target, size in left:
            data = bytes(view[start : start + size])
            at = now + self._rng.random() * 0.9 * self.grace_s
            self._at(at, partial(self._land, lane, flight, data, target))

    def _lane(self, source: str, target: str) -> _Lane:
        key = source, target
        if key not in self._lanes:
            self._lanes[key] = _Lane(source, target, self._link)
        return self._lanes[key]

    def _factor(self, lane: _Lane) -> float:
        return self._slow.get(lane.source, 1.0) * self._slow.get(lane.target, 1.0)

    def _delay(self, lane: _Lane) -> float:
        jitter = lane.link.jitter_s
        drawn = self._rng.expovariate(1.0 / jitter) if jitter else 0.0
        return (lane.link.delay_s + drawn) * self._factor(lane)

    def _send(self, lane: _Lane, now: float, act: Callable[[float], None]) -> None:
        """`act` after the lane's delay; not before the lane is free, never if its agent died."""
        if self._agents[lane.source].ended_at is not None:
            return
        if lane.cut or lane.source in self._frozen:
            lane.parked.append(lambda at: self._send(lane, at, act))
        elif lane.clogged_until > now:
            self._at(lane.clogged_until, lambda at: self._send(lane, at, act))
        else:
            self._at(now + self._delay(lane), act)

    def _unpark(self, lane: _Lane, now: float) -> None:
        parked, lane.parked = lane.parked, []
        for act in parked:
            act(now)

    def _note(self, lane: _Lane, now: float, data: bytes) -> None:
        link = lane.link
        if lane.cut or self._rng.random() < link.loss:
            return
        target = self._agents[lane.target]
        for _ in range(2 if self._rng.random() < link.duplication else 1):
            self._send(lane, now, lambda _: target.tell(NotificationReceived(lane.source, data)))

    # ---- data ------------------------------------------------------------------------------------

    def _post(self, source: str, target: str, flight: _Flight, now: float) -> None:
        lane = self._lane(source, target)

        def begin(at: float) -> None:
            if self._agents[source].ended_at is None:
                lane.flights.append(flight)
                self._serve(lane, at)

        self._send(lane, now, begin)

    def _serve(self, lane: _Lane, now: float) -> None:
        """Puts the next piece on its way; the writes of a lane take turns."""
        if lane.busy or not lane.flights:
            return
        lane.busy = True
        flight = lane.flights[0]
        took = flight.pieces[0][2] / lane.link.bytes_s * self._factor(lane)
        self._at(now + took, lambda at: self._arrive(lane, flight, at))

    def _arrive(self, lane: _Lane, flight: _Flight, now: float) -> None:
        if lane.cut or lane.source in self._frozen:
            lane.parked.append(lambda at: self._arrive(lane, flight, at))
            return
        if lane.clogged_until > now:
            self._at(lane.clogged_until, lambda at: self._arrive(lane, flight, at))
            return
        lane.busy = False
        if flight in lane.flights:  # else its writer died, or the reader hung up
            start, target, size = flight.pieces.popleft()
            view = self._agents[lane.source].pool.view
            self._land(lane, flight, view[start : start + size], target)
            lane.flights.remove(flight)
            if flight.pieces:
                lane.flights.append(flight)
            else:
                self._landed(lane, flight, now)
        self._serve(lane, now)

    def _land(
        self, lane: _Lane, flight: _Flight, data: bytes | memoryview, start: int, _: float = 0.0
    ) -> None:
        end = self._agents[lane.target]
        if end.ended_at is not None or start < 0 or start + len(data) > end.pool.size:
            return
        if self.fence is Fence.REFUSE:
            hung_up = lane.source in end.hung_up
            if hung_up or not end.admit(lane.source, flight.note):
                return
        if self._witness:
            self._witness(lane.target, start, len(data))
        end.pool.view[start : start + len(data)] = data

    def _landed(self, lane: _Lane, flight: _Flight, now: float) -> None:
        """All pieces of a write are there: its note follows, and the confirmation goes back."""
        self._note(lane, now, flight.note)
        writer, back = self._agents[lane.source], self._lane(lane.target, lane.source)
        self._send(back, now, lambda _: writer.complete(flight.handle))

    def _hang_up(self, source: str, target: str) -> None:
        """`target` closes the connection on which `source` writes."""
        lane = self._lane(source, target)
        lane.flights.clear()
        writer = self._agents.get(source)
        if writer is not None and writer.ended_at is None:
            told = partial(writer.hear_hang_up, target, writer.meetings[target])
            self._send(self._lane(target, source), self.clock(), told)


class FabricTransport:
    """One agent's end. Its calls and the fabric's exclude each other by one lock."""

    name = "fabric"

    def __init__(self, fabric: Fabric, agent: str, pool: Pool, admit: AdmitData) -> None:
        self._fabric, self.agent, self.pool, self.admit = fabric, agent, pool, admit
        self.refuses_late = fabric.fence is Fence.REFUSE
        self.peers: set[str] = set()
        self.meetings: Counter[str] = Counter()  #: how often each peer was added anew
        self.waiting: dict[int, str] = {}  #: handle -> peer of a write without an end
        self.hung_up: set[str] = set()  #: peers whose data is not read any more
        self.ended_at: float | None = None
        self._down: dict[str, float] = {}
        self._events: list[TransportEvent] = []
        self._ids = itertools.count()

    def address(self) -> bytes:
        return b""

    def add_peer(self, card: PeerCard) -> None:
        with self._fabric.lock:
            self.meetings[card.agent] += card.agent not in self.peers
            self.peers.add(card.agent)
            self.hung_up.discard(card.agent)

    def remove_peer(self, peer: str) -> None:
        with self._fabric.lock:
            self._fabric.advance()
            self.lost(peer, "removed", tell=False)
            self.peers.discard(peer)
            self._down.pop(peer, None)

    def write(self, peer: str, spans: Spans, note: bytes) -> int:
        with self._fabric.lock:
            now, handle = self._reach(peer), next(self._ids)
            link = self._fabric._lane(self.agent, peer).link
            flight = _Flight(handle, note, deque(pieces(spans, link.piece_bytes).tolist()))
            self.waiting[handle] = peer
            self._fabric._post(self.agent, peer, flight, now)
            return handle

    def notify(self, peer: str, note: bytes) -> None:
        with self._fabric.lock:
            now = self._reach(peer)
            self._fabric._note(self._fabric._lane(self.agent, peer), now, note)

    def _reach(self, peer: str) -> float:
        now = self._fabric.advance()
        other = self._fabric._agents.get(peer)
        if peer not in self.peers or peer in self._down or other is None:
            raise PeerLost(peer)
        if other.ended_at is not None and now >= other.ended_at + self._fabric.notice_s:
            self.lost(peer, "closed")
            raise PeerLost(peer)
        return now

    @property
    def moving(self) -> bool:
        return bool(self.waiting)

    def poll(self) -> list[TransportEvent]:
        with self._fabric.lock:
            self._fabric.advance()
            events, self._events = self._events, []
            return events

    def bury(self, peer: str) -> None:
        """Not needed: `fenced` sees for itself."""

    def fenced(self, peer: str) -> bool:
        with self._fabric.lock:
            now, fabric = self._fabric.advance(), self._fabric
            if fabric.fence is Fence.REFUSE:
                self.lost(peer, "fenced", tell=False)
                return True
            since, other = self._down.setdefault(peer, now), fabric._agents.get(peer)
            if fabric.fence is Fence.GONE and other is not None:
                if other.ended_at is None:
                    return False
                since = max(since, other.ended_at)
            return now - since > fabric.grace_s

    def close(self) -> None:
        with self._fabric.lock:
            self._fabric._end(self.agent, late=False)

    # ---- called by the fabric --------------------------------------------------------------------

    def tell(self, event: TransportEvent) -> None:
        if self.ended_at is None:
            self._events.append(event)

    def complete(self, handle: int) -> None:
        if self.waiting.pop(handle, None) is not None:
            self.tell(PostedWriteEnded(handle, True))

    def notice(self, peer: str, _: float) -> None:
        """The peer has ended: whose call is under way finds out, and who has a connection."""
        if self._fabric.fence is Fence.REFUSE or peer in self.waiting.values():
            self.lost(peer, "closed")

    def hear_hang_up(self, peer: str, meeting: int, _: float) -> None:
        """Concerns the connection that was there; it may have been made again since."""
        if self.meetings[peer] == meeting:
            self.lost(peer, "closed")

    def lost(self, peer: str, reason: str, tell: bool = True) -> None:
        """Ends all writes to the peer, and hangs up on it where that can be done."""
        if peer not in self.peers:
            return
        for handle in [h for h, to in self.waiting.items() if to == peer]:
            del self.waiting[handle]
            self.tell(PostedWriteEnded(handle, False, reason))
        if peer not in self._down:
            self._down[peer] = self._fabric.clock()
            if tell:
                self.tell(PeerDisconnected(peer))
        if self._fabric.fence is Fence.REFUSE and peer not in self.hung_up:
            self.hung_up.add(peer)
            self._fabric._hang_up(peer, self.agent)
