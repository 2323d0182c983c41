"""The transfer thread: one thread owns the agent, and both ends' ticket machines with it.

Commands come in through a queue (any thread), outcomes go out through `deliver` (called on this
thread; it must not block). The loop: drain commands, poll the transport, let the machines decide,
do what they say. It spins while something happens. While a ticket is open it polls every
`ACTIVE_S`, and less often the longer nothing has come (`pause`); otherwise every `IDLE_S`.
A command wakes it at once.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from . import commands as c
from . import identity, messages
from . import tickets as t
from .errors import PeerLost
from .gauges import Gauges
from .slices import End, Lane, Side, tiles_of
from .transport import Admit, Down, Note, PeerCard, Pool, Transport, Wrote

log = logging.getLogger(__name__)

ACTIVE_S, SLOW_S, IDLE_S, SPIN = 0.0003, 0.005, 0.1, 8
PATIENCE = 0.25  #: of the time that nothing has come: so much later it may be seen
TICK_S = 0.05

Opener = Callable[[Admit], Transport]
Digest = Callable[[int, Sequence[tuple[int, int]], int], int]  #: `identity.digest` without view


def pause(quiet_s: float, moving: bool) -> float:
    """Seconds until the next poll, `quiet_s` after something came; `moving`: bytes are on the way.

    Where a prompt of half a second is computed first, polls every 0.3 ms would take a tenth of a
    core from the engine.
    """
    return ACTIVE_S if moving else min(max(ACTIVE_S, PATIENCE * quiet_s), SLOW_S)


class TransferService:
    """Ships KV blocks for one rank of a worker. `start`, then `submit` lane commands (`fan`).

    `reached` tells whether an event of the pool (`commands.Push.event`) has come; None: always.
    `digest` computes checksums where the CPU cannot read the pool (`vram`).
    """

    def __init__(
        self,
        agent: str,
        pool: Pool,
        end: End,
        compatibility: bytes,
        open_transport: Opener,
        deliver: Callable[[object], None],
        limits: t.TicketTimeouts | None = None,
        reached: Callable[[int], bool] | None = None,
        digest: Digest | None = None,
    ) -> None:
        self.agent, self.pool, self.end, self.compatibility = agent, pool, end, compatibility
        self._opener, self._deliver, self._reached = open_transport, deliver, reached
        if digest is None and pool.memory != "DRAM":
            raise ValueError("checksums of a pool in a GPU's memory need its `digest`")
        self._digest = digest or partial(identity.digest, pool.view)
        self._sink, self._source = t.TicketReceiver(limits), t.TicketSender(limits)
        self._commands: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._gated: deque[c.PushBlocks | c.FinishPush] = (
            deque()
        )  #: pushes whose event is still to come
        self._cards: dict[str, PeerCard] = {}  #: who the cluster says is there, by agent
        self._workers: dict[str, list[str]] = {}  #: their agents, by worker
        self._peers: dict[str, PeerCard] = {}  #: of these, whom the transport reaches
        self._dying: set[str] = set()  #: down, and not fenced yet
        self._strays: set[str] = set()  #: of these, whom the transport could not take back
        self._lanes: dict[str, Lane] = {}  #: of open tickets
        self._tokens: dict[str, int] = {}  #: of open tickets
        self._writes: dict[int, tuple[t.WriteTiles, int]] = {}  #: handle -> (post, bytes)
        self.gauges = Gauges()
        self._opened = threading.Event()
        self._error: BaseException | None = None
        self.card: PeerCard | None = None
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)

    def start(self) -> PeerCard:
        """Opens the transport on the transfer thread; returns what peers need to know."""
        self._thread.start()
        self._opened.wait()
        if self._error:
            raise self._error
        assert self.card is not None
        return self.card

    def submit(self, command: object) -> None:
        """Queues a command. Any thread."""
        self._commands.put(command)

    def stop(self) -> None:
        self._commands.put(None)
        self._thread.join(timeout=5.0)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def statistics(self) -> dict:
        """A snapshot; read without a lock, each number by itself is right."""
        sinks, sources = list(self._sink.tickets.values()), list(self._source.tickets.values())
        held = [ticket for ticket in sinks if ticket.state == "QUARANTINED"]
        states = [ticket.state for ticket in sinks] + [ticket.state for ticket in sources]
        return {
            "transport": self._transport.name,
            "sessions": len(self._peers),
            "tickets": dict(Counter(state.lower() for state in states)),
            "quarantined": sum(len(ticket.offer.tiles) for ticket in held),
            **self.gauges.values(),
        }

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._transport = self._opener(self._admit)
            pool = self.pool
            self.card = PeerCard(
                self.agent,
                self._transport.name,
                self.compatibility,
                self._transport.address(),
                pool.base,
                pool.size,
                self.end.layout,
                self.end.rank,
                self.end.ranks,
            )
        except BaseException as error:
            self._error = error
            return
        finally:
            self._opened.set()
        try:
            self._loop()
        except Exception:
            log.exception("the transfer thread ended")
            raise
        finally:
            self._transport.close()

    def _loop(self) -> None:
        quiet, stirred, ticked = 0, 0.0, 0.0
        while True:
            wait = IDLE_S
            if self._busy():
                quiet_s = time.monotonic() - stirred
                wait = 0.0 if quiet < SPIN else pause(quiet_s, self._transport.moving)
            commands = self._take(wait)
            if commands is None:
                return
            events = self._transport.poll()
            quiet = 0 if commands or events else quiet + 1
            for command in commands:
                self._command(command)
            self._open_gates()
            for event in events:
                self._event(event)
            now = time.monotonic()
            if not quiet:
                stirred = now
            if now - ticked > TICK_S:
                ticked = now
                self._both(t.TicketTick())
                self._fence()

    def _busy(self) -> bool:
        """Something may come soon. A quarantine may last for hours: it is polled now and then."""
        waiting = any(ticket.state != "QUARANTINED" for ticket in self._sink.tickets.values())
        return bool(waiting or self._source.tickets or self._gated)

    def _take(self, wait: float) -> list[object] | None:
        """Commands that are there, after at most `wait` seconds; None when it is time to stop."""
        commands: list[object] = []
        try:
            commands.append(self._commands.get(timeout=wait) if wait else self._commands.get(False))
            while True:
                commands.append(self._commands.get(False))
        except queue.Empty:
            pass
        return None if None in commands else commands

    def _command(self, command: object) -> None:
        match command:
            case c.AddPeer(worker, cards):
                self._workers[worker] = [card.agent for card in cards]
                for card in cards:
                    self._cards[card.agent] = card
                    self._add_peer(card)
            case c.LosePeer(worker, dead):
                for agent in self._workers.get(worker, ()):
                    self._cards.pop(agent, None)
                    self._lose_peer(agent)
                    if dead:
                        self._strays.discard(agent)
                        self._transport.bury(agent)
                if dead:
                    self._workers.pop(worker, None)
            case c.OfferBlocks():
                self._receive(command)
            case c.ExpectOffer(ticket_id, peer, tokens):
                joined = self._join(ticket_id, peer, tokens, sink=False)
                self._act(self._source, t.ExpectTileOffer(ticket_id, peer))
                if not joined:  # and a sink that asks, now or later, hears so
                    self._act(self._source, t.CancelTicket(ticket_id, "peer_lost"))
            case c.PushBlocks() | c.FinishPush():
                if not self._gate(command):
                    self._push(command)
            case c.CancelTransfer(ticket_id, reason):
                self._both(t.CancelTicket(ticket_id, reason))
            case _:
                raise AssertionError(command)

    # ---- commands of tickets ---------------------------------------------------------------------

    def _join(self, ticket_id: str, peer: str, tokens: int, sink: bool) -> bool:
        """Lays the lane of a ticket; False if the peer is not known, or cannot be joined."""
        self._reach(peer)
        card = self._peers.get(peer)
        if card is None:
            return False
        other = End(card.layout, card.rank, card.ranks)
        ends = (other, self.end) if sink else (self.end, other)
        try:
            self._lanes[ticket_id] = lane_between(*ends)
        except ValueError as error:
            log.error("no lane to %s: %s", peer, error)
            return False
        self._tokens[ticket_id] = tokens
        return True

    def _receive(self, command: c.OfferBlocks) -> None:
        ticket_id = command.ticket_id
        if not self._join(ticket_id, command.peer, command.tokens, sink=True):
            self.gauges.failures["peer_lost"] += 1
            self._deliver(t.TransferFailed(ticket_id, "peer_lost"))
            self._deliver(t.BlocksFreed(ticket_id))
            return
        lane = self._lanes[ticket_id]
        count = -(-command.tokens // lane.tile_tokens)
        tiles = tiles_of(command.blocks, lane.target.tiles, count)
        held = command.held_tokens // lane.tile_tokens
        self._act(self._sink, t.OfferTiles(ticket_id, command.peer, tiles, held, command.hashes))

    def _push(self, command: c.PushBlocks | c.FinishPush) -> None:
        ticket_id = command.ticket_id
        lane = self._lanes.get(ticket_id)
        if lane is None:
            return  # over
        count = -(-self._tokens[ticket_id] // lane.tile_tokens)
        if isinstance(command, c.FinishPush):
            self._act(self._source, t.FinishTilePush(ticket_id, count, command.meta))
            return
        per_block = lane.source.tiles
        first = command.first_block * per_block
        tiles = tiles_of(command.blocks, per_block, count - first)
        self._act(self._source, t.PushTiles(ticket_id, first, tiles, command.piece, lane.pieces))

    def _gate(self, command: c.PushBlocks | c.FinishPush) -> bool:
        """Keeps what must wait for the pool's event, and what comes behind it."""
        if self._reached is None:
            return False
        waits = isinstance(command, c.PushBlocks) and not self._reached(command.event)
        if waits or any(other.ticket_id == command.ticket_id for other in self._gated):
            self._gated.append(command)
            return True
        return False

    def _open_gates(self) -> None:
        gated, self._gated = self._gated, deque()
        for command in gated:
            if not self._gate(command):
                self._push(command)

    # ---- what the transport tells ----------------------------------------------------------------

    def _event(self, event: object) -> None:
        match event:
            case Note(peer, data):
                try:
                    message = messages.decode(data)
                except ValueError:
                    self.gauges.failures["malformed"] += 1
                    return
                self._reach(peer)
                self._both(t.MessageReceived(peer, message))
            case Wrote(handle, ok, reason):
                post, size = self._writes.pop(handle)
                self.gauges.sent += size if ok else 0
                self._act(self._source, t.WriteEnded(post.ticket_id, ok, reason))
            case Down(peer):
                self._lose_peer(peer)

    def _both(self, event: object) -> None:
        self._act(self._sink, event)
        self._act(self._source, event)

    def _act(self, machine: t.TicketReceiver | t.TicketSender, event: object) -> None:
        for action in machine.handle(event, time.monotonic()):
            match action:
                case t.SendMessage(peer, message):
                    self._send(peer, message)
                case t.WriteTiles():
                    self._post(action)
                case t.VerifyChunk():
                    self._verify(action)
                case outcome:
                    self._outcome(outcome)

    def _outcome(self, outcome: object) -> None:
        match outcome:
            case t.TilesArrived(ticket_id, meta, tiles, busy_s, exposed_s):
                tokens = min(tiles * self._lanes[ticket_id].tile_tokens, self._tokens[ticket_id])
                outcome = c.BlocksArrived(ticket_id, meta, tokens, busy_s, exposed_s)
                self.gauges.landed(busy_s, exposed_s)
                self._forget(ticket_id)
            case t.PushEnded(ticket_id, ok):
                self.gauges.closed += ok
                self._forget(ticket_id)
            case t.BlocksFreed(ticket_id):
                self._forget(ticket_id)
            case t.TransferFailed(_, reason):
                if reason != "finished":  # an answer of one token needs no KV elsewhere
                    self.gauges.failures[reason] += 1
        self._deliver(outcome)

    def _forget(self, ticket_id: str) -> None:
        self._lanes.pop(ticket_id, None)
        self._tokens.pop(ticket_id, None)

    # ---- peers -----------------------------------------------------------------------------------

    def _add_peer(self, card: PeerCard) -> None:
        if card.agent in self._peers or card.agent in self._dying or card.agent == self.agent:
            return
        if (card.transport, card.compatibility) != (self._transport.name, self.compatibility):
            self.gauges.failures["incompatible_peer"] += 1
            self._cards.pop(card.agent, None)
            log.error("peer %s has another model, numbers or transport: refused", card.agent)
            return
        try:
            self._transport.add_peer(card)
        except Exception as error:
            self.gauges.failures["unreachable_peer"] += 1
            log.error("peer %s cannot be reached: %s", card.agent, error)
            return
        self._peers[card.agent] = card
        self._send(card.agent, messages.GreetMessage(""))

    def _reach(self, agent: str) -> None:
        """A peer that was lost, and that the cluster says is there, may have come back.

        Tickets from before end as any that is stopped: blocks stay reserved until it has drained.
        """
        if agent not in self._cards or agent in self._peers:
            return
        dying = agent in self._dying  # alive, so no fence would ever pass
        if dying and any(post.peer == agent for post, _ in self._writes.values()):
            return  # they would go on, and nobody could tell when they end
        if dying:
            self._dying.discard(agent)
            self._transport.remove_peer(agent)
        self._add_peer(self._cards[agent])
        if dying and agent not in self._peers:  # and it may write still
            self._dying.add(agent)
            self._strays.add(agent)
        else:
            self._strays.discard(agent)

    def _lose_peer(self, agent: str) -> None:
        if self._peers.pop(agent, None) is None:
            return
        self._dying.add(agent)
        self._both(t.PeerWentDown(agent))

    def _fence(self) -> None:
        dying = self._dying - self._strays
        for agent in [a for a in dying if self._transport.fenced(a)]:
            self._dying.discard(agent)
            self._transport.remove_peer(agent)
            self._both(t.PeerFenced(agent))

    def _send(self, peer: str, message: messages.AnyMessage) -> None:
        try:
            self._transport.notify(peer, messages.encode(message))
        except PeerLost:
            self._lose_peer(peer)
            self._both(t.PeerWentDown(peer))
            if peer not in self._dying:
                self._both(t.PeerFenced(peer))

    # ---- data ------------------------------------------------------------------------------------

    def _checksums(
        self, ticket_id: str, generation: int, side: Side, first: int, tiles: list[int], piece: int
    ) -> list[int]:
        """Of a piece of the ticket's tiles `first`.., which are `tiles` of this pool."""
        began = time.perf_counter()
        unit = self._lanes[ticket_id].unit
        seed = identity.ticket_seed(self.compatibility, ticket_id, generation)
        sums = [
            self._digest(unit, side.runs(tile, piece), identity.tile_seed(seed, index, piece))
            for index, tile in enumerate(tiles, first)
        ]
        self.gauges.checksum_s += time.perf_counter() - began
        return sums

    def _post(self, post: t.WriteTiles) -> None:
        lane = self._lanes[post.ticket_id]
        place = post.first_tile, post.source_tiles, post.piece
        sums = self._checksums(post.ticket_id, post.generation, lane.source, *place)
        chunk = messages.ChunkMessage(
            post.ticket_id,
            post.generation,
            post.chunk_number,
            post.first_tile,
            post.piece,
            post.pieces,
            sums,
        )
        spans = lane.spans(post.source_tiles, post.target_tiles, post.piece)
        began = time.perf_counter()
        try:
            handle = self._transport.write(post.peer, spans, messages.encode(chunk))
        except PeerLost as error:
            self._act(self._source, t.WriteEnded(post.ticket_id, False, f"peer_lost: {error}"))
            return
        self.gauges.copy_s += time.perf_counter() - began
        self._writes[handle] = (post, spans.bytes)

    def _verify(self, check: t.VerifyChunk) -> None:
        chunk, lane = check.chunk, self._lanes[check.ticket_id]
        place = chunk.first_tile, check.tiles, chunk.piece
        sums = self._checksums(check.ticket_id, chunk.generation, lane.target, *place)
        units = len(lane.target.units(check.tiles, chunk.piece))
        self.gauges.took(self._sink.tickets[check.ticket_id].peer, units * lane.unit)
        ok = sums == chunk.checksums and chunk.pieces == lane.pieces
        self._act(self._sink, t.ChunkVerified(check.ticket_id, chunk.chunk_number, ok))

    def _admit(self, peer: str, note: bytes) -> bool:
        """May the data that comes with `note` be stored? Only while its ticket is open."""
        try:
            message = messages.decode(note)
        except ValueError:
            return False
        ticket = self._sink.tickets.get(message.ticket_id)
        return (
            ticket is not None
            and (ticket.peer, ticket.state) == (peer, "RESERVED")
            and isinstance(message, messages.ChunkMessage)
            and message.generation == ticket.offer.generation
        )


@lru_cache(maxsize=256)
def lane_between(source: End, target: End) -> Lane:
    return Lane(source, target)
