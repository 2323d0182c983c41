"""A simulated fabric: any number of transports in one process, on an injected clock and seed.

Virtual time: step the agents, then move the clock to `next_at()`. Real time: give it
`time.monotonic`, and it is a throttled network between real pools, one thread per agent.

Each direction between two agents is a lane. A lane has delay, jitter, loss and duplication of
notes, and bytes per second that the writes under way share. On command, a lane is cut or clogged,
and an agent crashes, freezes or is slow.

Data is read and stored piece by piece over the time of its write. So a write that has arrived by
half, and a source that is reused too early, can be seen in the pools.
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

from diptych.kv_transfer.errors import PeerLost
from diptych.kv_transfer.transport import (
    AdmitData,
    NotificationReceived,
    PeerCard,
    PeerDisconnected,
    Pool,
    PostedWriteEnded,
    Spans,
    TransportEvent,
)
from diptych.kv_transfer.transports.runs import bounded_pieces

TimedAction = Callable[[float], None]  #: is called with the time at which it happens


class FenceKind(enum.Enum):
    """What keeps a lost peer's late data out of a pool."""

    #: Like NIXL: late pieces of a dead writer are stored within `grace_s`, `AdmitData` is not
    #: asked, and a death is found by the next call.
    GRACE = "grace"
    #: Like GRACE, but also waits until the peer is gone: a frozen writer is not fenced.
    GONE = "gone"
    #: Like TCP: `AdmitData` is asked for every piece, a lost peer is hung up on, and its death is
    #: reported.
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class FabricLink:
    """What one direction between two agents is like.

    Loss and duplication are of notes, damage is of written pieces: probabilities, 0 to 1.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0  #: mean of an exponential that is added: later notes overtake
    loss: float = 0.0
    duplication: float = 0.0
    bytes_s: float = float("inf")
    piece_bytes: int = 64 << 10
    damage: float = 0.0  #: A damaged piece arrives with one bit wrong.


@dataclass(frozen=True, slots=True)
class _Piece:
    """A contiguous part of a write."""

    source_byte: int
    target_byte: int
    size: int


@dataclass(eq=False, slots=True)
class _PendingWrite:
    """A write under way."""

    handle: int
    note: bytes
    pieces: deque[_Piece]  #: those that have not left the source


@dataclass(eq=False, slots=True)
class _Lane:
    """One direction between two agents."""

    source: str
    target: str
    link: FabricLink
    writes: deque[_PendingWrite] = field(default_factory=deque)  #: they take turns
    busy: bool = False  #: True while a piece is on its way.
    cut: bool = False
    clogged_until_s: float = 0.0
    parked: list[TimedAction] = field(default_factory=list)  #: go on when nothing holds the lane


class Fabric:
    """The network. `open` makes an agent's transport on it.

    All transports, and the faults, may be used from any thread: one lock excludes their calls.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        seed: int,
        link: FabricLink | None = None,
        fence: FenceKind = FenceKind.GRACE,
        grace_s: float = 1.0,
        notice_s: float = 0.0,
        witness: Callable[[str, int, int], None] | None = None,
    ) -> None:
        """`link` is what every lane is like.

        `notice_s` is how long a death goes unnoticed. `witness(agent, start, size)` is called with
        the bytes of an agent's pool that are about to be written.
        """
        self.clock = clock
        self.fence = fence
        self.grace_s = grace_s
        self.notice_s = notice_s
        self.lock = threading.RLock()
        self._default_link = link or FabricLink()
        self._witness = witness
        self._random = random.Random(seed)
        self._action_numbers = itertools.count()  #: keep actions of one time in order
        self._scheduled: list[tuple[float, int, TimedAction]] = []  #: a heap
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._agents: dict[str, FabricTransport] = {}
        self._frozen: set[str] = set()
        self._slowdowns: dict[str, float] = {}

    def open(self, agent: str, pool: Pool, admit: AdmitData = lambda *_: True) -> FabricTransport:
        with self.lock:
            assert agent not in self._agents, f"{agent} was used before"
            self._agents[agent] = FabricTransport(self, agent, pool, admit)
            return self._agents[agent]

    # ---- time ------------------------------------------------------------------------------------

    def next_at(self) -> float | None:
        """When something happens next by itself; None: never."""
        return self._scheduled[0][0] if self._scheduled else None

    def advance(self) -> float:
        """Does all that is scheduled up to now, each at its own time; returns the clock's time."""
        now = self.clock()
        while self._scheduled and self._scheduled[0][0] <= now:
            time, _, action = heapq.heappop(self._scheduled)
            action(time)
        return now

    def _schedule(self, time: float, action: TimedAction) -> None:
        heapq.heappush(self._scheduled, (time, next(self._action_numbers), action))

    # ---- faults ----------------------------------------------------------------------------------

    def cut(self, source: str, target: str) -> None:
        """Loses all notes from `source` to `target` from now on; data and confirmations wait for
        `heal`.
        """
        with self.lock:
            self.advance()
            self.lane(source, target).cut = True

    def heal(self, source: str, target: str) -> None:
        with self.lock:
            now = self.advance()
            lane = self.lane(source, target)
            lane.cut = False
            self._resume(lane, now)

    def clog(self, source: str, target: str, seconds: float) -> None:
        """Holds up all that `source` sends to `target` for so many seconds; then everything goes
        on.
        """
        with self.lock:
            lane = self.lane(source, target)
            until_s = self.advance() + seconds
            lane.clogged_until_s = max(lane.clogged_until_s, until_s)

    def slow(self, agent: str, factor: float) -> None:
        """Everything from and to the agent takes `factor` times as long."""
        self._slowdowns[agent] = factor

    def freeze(self, agent: str) -> None:
        """Nothing leaves the agent until `thaw`; what others write is still stored in its pool."""
        with self.lock:
            self.advance()
            self._frozen.add(agent)

    def thaw(self, agent: str) -> None:
        with self.lock:
            now = self.advance()
            self._frozen.discard(agent)
            outgoing_lanes = [lane for lane in self._lanes.values() if lane.source == agent]
            for lane in outgoing_lanes:
                self._resume(lane, now)

    def crash(self, agent: str) -> None:
        """The agent's process dies. Some of its data is on the wire, and arrives in the grace."""
        with self.lock:
            self.end_agent(agent, late_data=True)

    # ---- called by the transports ----------------------------------------------------------------

    def find_agent(self, name: str) -> FabricTransport | None:
        return self._agents.get(name)

    def end_agent(self, name: str, late_data: bool) -> None:
        """The agent is closed, or with `late_data` has crashed. A second call changes nothing."""
        now = self.advance()
        agent = self._agents[name]
        if agent.ended_at is not None:
            return
        agent.ended_at = now
        for lane in list(self._lanes.values()):
            if lane.source != name:
                continue
            if late_data:
                for write in lane.writes:
                    self._scatter(lane, write, now)
            lane.writes.clear()
            lane.parked.clear()
        for other in list(self._agents.values()):
            self._schedule(now + self.notice_s, partial(other.on_peer_ended, name))

    def _scatter(self, lane: _Lane, write: _PendingWrite, now: float) -> None:
        """The writer is dead: a random part of its write is in a buffer already, and arrives."""
        buffered_pieces = list(write.pieces)[: self._random.randint(0, len(write.pieces))]
        source_pool = self._agents[lane.source].pool.view
        for piece in buffered_pieces:
            data = bytes(source_pool[piece.source_byte : piece.source_byte + piece.size])
            arrival = now + self._random.random() * 0.9 * self.grace_s
            self._schedule_arrival(arrival, lane, write, data=data, start=piece.target_byte)

    def _schedule_arrival(
        self, time: float, lane: _Lane, write: _PendingWrite, data: bytes, start: int
    ) -> None:
        self._schedule(time, lambda _: self._store(lane, write, data, start))

    def lane(self, source: str, target: str) -> _Lane:
        key = source, target
        if key not in self._lanes:
            self._lanes[key] = _Lane(source, target, self._default_link)
        return self._lanes[key]

    def send_note(self, lane: _Lane, now: float, data: bytes) -> None:
        """Sends a note, which may be lost or doubled on the way."""
        link = lane.link
        if lane.cut or self._random.random() < link.loss:
            return
        target = self._agents[lane.target]
        event = NotificationReceived(lane.source, data)
        copies = 2 if self._random.random() < link.duplication else 1
        for _ in range(copies):
            self._send(lane, now, lambda _: target.add_event(event))

    def post_write(self, lane: _Lane, write: _PendingWrite, now: float) -> None:
        def begin(at: float) -> None:
            if self._agents[lane.source].ended_at is None:
                lane.writes.append(write)
                self._send_next_piece(lane, at)

        self._send(lane, now, begin)

    def hang_up(self, source: str, target: str) -> None:
        """Closes, at the end of `target`, the connection on which `source` writes."""
        self.lane(source, target).writes.clear()
        writer = self._agents.get(source)
        if writer is not None and writer.ended_at is None:
            meeting = writer.meetings[target]
            back = self.lane(target, source)
            self._send(back, self.clock(), lambda _: writer.on_hang_up(target, meeting))

    # ---- moving ----------------------------------------------------------------------------------

    def _slowdown(self, lane: _Lane) -> float:
        return self._slowdowns.get(lane.source, 1.0) * self._slowdowns.get(lane.target, 1.0)

    def _delay_s(self, lane: _Lane) -> float:
        mean_jitter_s = lane.link.jitter_s
        jitter_s = self._random.expovariate(1.0 / mean_jitter_s) if mean_jitter_s else 0.0
        return (lane.link.delay_s + jitter_s) * self._slowdown(lane)

    def _postpone(self, lane: _Lane, now: float, action: TimedAction) -> bool:
        """Returns False when the lane is open; else True, and `action` is called when it is."""
        if lane.cut or lane.source in self._frozen:
            lane.parked.append(action)
            return True
        if lane.clogged_until_s > now:
            self._schedule(lane.clogged_until_s, action)
            return True
        return False

    def _resume(self, lane: _Lane, now: float) -> None:
        parked = lane.parked
        lane.parked = []
        for action in parked:
            action(now)

    def _send(self, lane: _Lane, now: float, action: TimedAction) -> None:
        """Calls `action` after the lane's delay, once the lane is open; never if its agent died."""
        if self._agents[lane.source].ended_at is not None:
            return
        if not self._postpone(lane, now, lambda at: self._send(lane, at, action)):
            self._schedule(now + self._delay_s(lane), action)

    def _send_next_piece(self, lane: _Lane, now: float) -> None:
        if lane.busy or not lane.writes:
            return
        lane.busy = True
        write = lane.writes[0]
        duration_s = write.pieces[0].size / lane.link.bytes_s * self._slowdown(lane)
        self._schedule(now + duration_s, lambda at: self._end_piece(lane, write, at))

    def _end_piece(self, lane: _Lane, write: _PendingWrite, now: float) -> None:
        if self._postpone(lane, now, lambda at: self._end_piece(lane, write, at)):
            return
        lane.busy = False
        if write in lane.writes:  # else its writer died, or the reader hung up
            piece = write.pieces.popleft()
            source_pool = self._agents[lane.source].pool.view
            data = source_pool[piece.source_byte : piece.source_byte + piece.size]
            self._store(lane, write, data, piece.target_byte)
            lane.writes.remove(write)
            if write.pieces:
                lane.writes.append(write)
            else:
                self._end_write(lane, write, now)
        self._send_next_piece(lane, now)

    def _store(
        self, lane: _Lane, write: _PendingWrite, data: bytes | memoryview, start: int
    ) -> None:
        target = self._agents[lane.target]
        end = start + len(data)
        if target.ended_at is not None or start < 0 or end > target.pool.size:
            return
        if self.fence is FenceKind.REFUSE and lane.source in target.hung_up:
            return
        if self.fence is FenceKind.REFUSE and not target.admit(lane.source, write.note):
            return
        if self._witness:
            self._witness(lane.target, start, len(data))
        target.pool.view[start:end] = data
        damage = lane.link.damage
        if damage and self._random.random() < damage:
            target.pool.view[self._random.randrange(start, end)] ^= 1

    def _end_write(self, lane: _Lane, write: _PendingWrite, now: float) -> None:
        """All pieces of a write are there: its note follows, and the confirmation goes back."""
        self.send_note(lane, now, write.note)
        writer = self._agents[lane.source]
        back = self.lane(lane.target, lane.source)
        self._send(back, now, lambda _: writer.on_write_confirmed(write.handle))


class FabricTransport:
    """One agent's transport on a `Fabric`."""

    name = "fabric"

    def __init__(self, fabric: Fabric, agent: str, pool: Pool, admit: AdmitData) -> None:
        self.agent = agent
        self.pool = pool
        self.admit = admit
        self.refuses_late = fabric.fence is FenceKind.REFUSE
        self.peers: set[str] = set()
        self.meetings: Counter[str] = Counter()  #: how often each peer was added anew
        self.open_writes: dict[int, str] = {}  #: handle -> peer
        self.hung_up: set[str] = set()  #: peers whose data is not read any more
        self.ended_at: float | None = None  #: when this agent was closed or crashed
        self._fabric = fabric
        self._lost_at: dict[str, float] = {}  #: peers that went down
        self._events: list[TransportEvent] = []  #: what the next `poll` returns
        self._handles = itertools.count()

    def address(self) -> bytes:
        return b""

    def add_peer(self, card: PeerCard) -> None:
        with self._fabric.lock:
            if card.agent not in self.peers:
                self.meetings[card.agent] += 1
            self.peers.add(card.agent)
            self.hung_up.discard(card.agent)

    def reached(self, peer: str) -> bool:
        return peer in self.peers

    def remove_peer(self, peer: str) -> None:
        with self._fabric.lock:
            self._fabric.advance()
            self._lose(peer, "removed", report=False)
            self.peers.discard(peer)
            self._lost_at.pop(peer, None)

    def write(self, peer: str, spans: Spans, note: bytes) -> int:
        with self._fabric.lock:
            now = self._reach(peer)
            handle = next(self._handles)
            lane = self._fabric.lane(self.agent, peer)
            rows = bounded_pieces(spans, lane.link.piece_bytes).tolist()
            pieces = deque(_Piece(source, target, size) for source, target, size in rows)
            self.open_writes[handle] = peer
            self._fabric.post_write(lane, _PendingWrite(handle, note, pieces), now)
            return handle

    def notify(self, peer: str, note: bytes) -> None:
        with self._fabric.lock:
            now = self._reach(peer)
            self._fabric.send_note(self._fabric.lane(self.agent, peer), now, note)

    def _reach(self, peer: str) -> float:
        """Returns the time; raises PeerLost when the peer cannot be called."""
        now = self._fabric.advance()
        other = self._fabric.find_agent(peer)
        if peer not in self.peers or peer in self._lost_at or other is None:
            raise PeerLost(peer)
        if other.ended_at is not None and now >= other.ended_at + self._fabric.notice_s:
            self._lose(peer, "closed")
            raise PeerLost(peer)
        return now

    @property
    def moving(self) -> bool:
        return bool(self.open_writes)

    def poll(self) -> list[TransportEvent]:
        with self._fabric.lock:
            self._fabric.advance()
            events = self._events
            self._events = []
            return events

    def mark_process_dead(self, peer: str) -> None:
        """Changes nothing: `fenced` sees for itself."""

    def fenced(self, peer: str) -> bool:
        with self._fabric.lock:
            fabric = self._fabric
            now = fabric.advance()
            if fabric.fence is FenceKind.REFUSE:
                self._lose(peer, "fenced", report=False)
                return True

            since = self._lost_at.setdefault(peer, now)
            other = fabric.find_agent(peer)
            if fabric.fence is FenceKind.GONE and other is not None:
                if other.ended_at is None:
                    return False
                since = max(since, other.ended_at)
            return now - since > fabric.grace_s

    def close(self) -> None:
        with self._fabric.lock:
            self._fabric.end_agent(self.agent, late_data=False)

    def _lose(self, peer: str, reason: str, report: bool = True) -> None:
        """Ends all writes to the peer, and hangs up on it where that can be done."""
        if peer not in self.peers:
            return
        failed_writes = [handle for handle, to in self.open_writes.items() if to == peer]
        for handle in failed_writes:
            del self.open_writes[handle]
            self.add_event(PostedWriteEnded(handle, ok=False, reason=reason))
        if peer not in self._lost_at:
            self._lost_at[peer] = self._fabric.clock()
            if report:
                self.add_event(PeerDisconnected(peer))
        if self._fabric.fence is FenceKind.REFUSE and peer not in self.hung_up:
            self.hung_up.add(peer)
            self._fabric.hang_up(peer, self.agent)

    # ---- called by the fabric --------------------------------------------------------------------

    def add_event(self, event: TransportEvent) -> None:
        if self.ended_at is None:
            self._events.append(event)

    def on_write_confirmed(self, handle: int) -> None:
        if self.open_writes.pop(handle, None) is not None:
            self.add_event(PostedWriteEnded(handle, ok=True))

    def on_peer_ended(self, peer: str, _time: float) -> None:
        """An agent has ended: who has a connection to it, or a write under way, finds out."""
        if self._fabric.fence is FenceKind.REFUSE or peer in self.open_writes.values():
            self._lose(peer, "closed")

    def on_hang_up(self, peer: str, meeting: int) -> None:
        """The peer closed a connection. It may have been made again since, in a later meeting."""
        if self.meetings[peer] == meeting:
            self._lose(peer, "closed")
