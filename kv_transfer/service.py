"""The transfer thread of one rank: it owns the transport, and both ends' ticket machines with it.

Commands come in through a queue, from any thread. Outcomes go out through `deliver`, which is
called on this thread and must not block. Each round of the loop takes the queued commands, polls
the transport, lets the machines of `tickets` decide, and carries out their actions.

The loop spins while something happens. While a ticket is open it polls every `ACTIVE_POLL_S`, and
less often the longer nothing has come (`poll_interval_s`); otherwise every `IDLE_POLL_S`. A command
wakes it at once.

Life of a peer (one agent, that is one rank of another worker):
    named     `AddPeer` brings its card, and the transport is made to reach it.
    reached   Tickets may be opened with it.
    unfenced  It is down, or the cluster gave it up: the machines are told `PeerWentDown`. Some of
              its writes may still land, until the transport's fence passes (`PeerFenced`).
              If the cluster names it again, or it is still named and shows up again, it was lost
              by mistake: reached again.
    stray     It showed up again, but the transport cannot reach it. It is alive, so no fence is
              waited for, until the cluster says that its process is dead.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from . import identity, messages
from .commands import (
    AddPeer,
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
from .devices import enter_device
from .digests import Digester, HostDigester, StartedDigests
from .errors import PeerLost
from .lanes import OpenLane, lane_between
from .redials import Redials
from .slices import Lane, LaneEnd, LaneSide
from .statistics import TransferStatistics
from .ticket_events import (
    CancelTicket,
    ChunkVerified,
    ExpectTileOffer,
    MessageReceived,
    PeerFenced,
    PeerWentDown,
    ReceiverAction,
    ReceiverEvent,
    SenderAction,
    SenderEvent,
    SendMessage,
    SharedEvent,
    TicketTick,
    TilesArrived,
    VerifyChunk,
    WriteEnded,
    WriteTiles,
)
from .tickets import ReceivingState, SendingState, TicketReceiver, TicketSender, TicketTimeouts
from .transport import (
    AdmitData,
    NotificationReceived,
    PeerCard,
    PeerDisconnected,
    Pool,
    PostedWriteEnded,
    Transport,
    TransportEvent,
)

log = logging.getLogger(__name__)

ACTIVE_POLL_S = 0.0003  #: While bytes are on their way, or something came a moment ago.
SLOW_POLL_S = 0.005  #: While a ticket is open and has been quiet for 20 ms or more.
#: Without an open ticket. An idle worker takes 0.8 % of a core; polling every 8 ms, it took 1.9 %.
IDLE_POLL_S = 0.1
QUIET_SHARE = 0.25  #: Of the time that nothing has come: what comes next may be seen so much later.
SPIN_ROUNDS = 2  #: Quiet rounds of the loop before it waits between two polls.
REFUSALS_LIMIT = 16  #: Refused peers that are remembered with the reason.
TICK_S = 0.05  #: Between two looks at timeouts and fences; the shortest timeout is 0.2 s.

#: Opens the rank's transport, given what decides whether incoming data may be stored.
OpenTransport = Callable[[AdmitData], Transport]


def poll_interval_s(quiet_s: float, moving: bool) -> float:
    """Returns the seconds until the next poll, `quiet_s` seconds after something came.

    `moving`: bytes are on their way. The interval grows with the silence: where a prompt of half a
    second is computed first, polls every 0.3 ms would take a tenth of a core from the engine.
    """
    if moving:
        return ACTIVE_POLL_S
    return min(max(ACTIVE_POLL_S, QUIET_SHARE * quiet_s), SLOW_POLL_S)


@dataclass(frozen=True, slots=True)
class PostedWrite:
    """A write that the transport has under way."""

    action: WriteTiles
    size: int  #: In bytes.


@dataclass(frozen=True, slots=True)
class PendingChunk:
    """A chunk whose checksums a device computes: it is posted, or has been verified, after that."""

    action: WriteTiles | VerifyChunk
    lane: Lane
    started: StartedDigests


class TransferService:
    """Moves KV blocks for one rank of a worker: `start` it, then `submit` commands of its lanes.

    A lane is the part of a ticket that one rank of the sender and one of the receiver share; it
    has a ticket id of its own.
    """

    def __init__(
        self,
        agent: str,
        pool: Pool,
        end: LaneEnd,
        compatibility: bytes,
        open_transport: OpenTransport,
        deliver: Callable[[TransferOutcome], None],
        timeouts: TicketTimeouts | None = None,
        digester: Digester | None = None,
        facts: dict[str, str] | None = None,
    ) -> None:
        """`open_transport` and `deliver` are called on the transfer thread.

        `agent` is this rank's name, which is never used twice. `end` says which heads the pool
        holds, and how they lie there. `compatibility` is a hash of model, numbers and format: a
        peer with another one is refused. `digester` makes checksums where the CPU cannot read the
        pool; None: the CPU computes them. `facts` say what `compatibility` is a hash of, so that a
        refusal can name what differs. Raises ValueError if the pool needs a digester.
        """
        if digester is None and pool.memory != "DRAM":
            raise ValueError("checksums of a pool in a GPU's memory need its `digester`")
        self.agent = agent
        self.pool = pool
        self.end = end
        self.compatibility = compatibility
        self._facts = facts or {}
        self.card: PeerCard | None = None  #: What peers need to know; None until `start`.
        self.gauges = TransferStatistics()  #: what was done since the start
        self._open_transport = open_transport
        self._deliver = deliver
        self._digester = digester or HostDigester(pool.view)

        self._receiver = TicketReceiver(timeouts)
        self._sender = TicketSender(timeouts)
        self._lanes: dict[str, OpenLane] = {}  #: Of open tickets, by ticket id.
        self._writes: dict[int, PostedWrite] = {}  #: By the transport's handle.
        self._pending: deque[PendingChunk] = deque()  #: In the order in which they were started.
        #: Tickets that have failed here while checksums of their blocks are computed: the blocks
        #: are freed when these are over.
        self._freed_later: set[str] = set()

        self._agents: dict[str, list[str]] = {}  #: Agents that the cluster names, by worker.
        self._cards: dict[str, PeerCard] = {}  #: Their cards, by agent.
        self._peers: dict[str, PeerCard] = {}  #: Those of them that the transport reaches.
        #: Why agents were refused, of the last `REFUSALS_LIMIT`, until the cluster loses them.
        self._refusals: dict[str, str] = {}
        self._redials = Redials()  #: Agents that could not be reached.
        self._unfenced: set[str] = set()  #: Lost agents, some write of which may still land.
        #: The part of `_unfenced` that is back but cannot be reached: alive, these never pass a
        #: fence.
        self._strays: set[str] = set()
        #: The part of `_unfenced` that is back, and is reached again once our writes to it have
        #: ended.
        self._returning: set[str] = set()

        self._quiet_rounds = 0  #: Rounds since a command or an event of the transport came.
        self._last_event_s = 0.0  #: When one came last, on the monotonic clock.
        self._last_tick_s = 0.0  #: When timeouts were looked at last.

        self._commands: queue.SimpleQueue[TransferCommand | None] = queue.SimpleQueue()
        self._opened = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)

    def start(self) -> PeerCard:
        """Opens the transport on the transfer thread; returns what peers need to know.

        Raises what opening the transport raised.
        """
        self._thread.start()
        self._opened.wait()
        if self._error:
            raise self._error
        assert self.card is not None
        return self.card

    def submit(self, command: TransferCommand) -> None:
        """Queues a command. May be called from any thread. After `stop` nothing comes of it."""
        self._commands.put(command)

    def stop(self) -> None:
        """Ends the thread and closes the transport; waits for at most 5 seconds."""
        self._commands.put(None)
        self._thread.join(timeout=5.0)

    @property
    def alive(self) -> bool:
        """False once the transfer thread has ended, by `stop` or by an error."""
        return self._thread.is_alive()

    def statistics(self) -> dict[str, object]:
        """Returns a snapshot, read without a lock: each number by itself is right.

        `sessions` are the peers that can be reached, and `tickets` the open ones by state.
        `quarantined` are blocks of the pool to which a silent peer may still write. `refused_peers`
        say by agent in what it differs, `unreachable_peers` what the last try to reach it said.
        """
        counts = self.gauges.values()  # read first: a reason is noted before it is counted
        received = list(self._receiver.tickets.values())
        sent = list(self._sender.tickets.values())
        states = Counter(ticket.state.value for ticket in received)
        states.update(ticket.state.value for ticket in sent)
        quarantined = [ticket for ticket in received if ticket.state is ReceivingState.QUARANTINED]
        blocks: set[int] = set()  # lanes from several ranks may share them
        for ticket in quarantined:
            lane = self._lanes.get(ticket.ticket_id)
            if lane is not None:  # else the transfer thread has ended it a moment ago
                blocks.update(lane.blocks_of(ticket.offer.tiles))
        return {
            "transport": self._transport.name,
            "sessions": len(self._peers),
            "tickets": dict(states),
            "quarantined": len(blocks),
            "refused_peers": dict(self._refusals),
            "unreachable_peers": self._redials.errors(),
            **counts,
        }

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            enter_device(self.pool)  # before NIXL, which looks what memory the pool is
            self._open()
        except BaseException as error:
            self._error = error  # `start` raises it
            return
        finally:
            self._opened.set()
        try:
            while self._run_round(self._patience_s()):
                pass
        except Exception:
            log.exception("the transfer thread ended")
            raise
        finally:
            self._transport.close()

    def _open(self) -> None:
        """Opens the transport, and makes the card. Raises what opening the transport raises."""
        self._transport = self._open_transport(self._admit)
        self.card = PeerCard(
            agent=self.agent,
            transport=self._transport.name,
            compatibility=self.compatibility,
            address=self._transport.address(),
            base=self.pool.base,
            size=self.pool.size,
            layout=self.end.layout,
            rank=self.end.rank,
            ranks=self.end.ranks,
            facts=self._facts,
        )

    def _patience_s(self) -> float:
        """Returns how long the next round waits for a command before it polls."""
        if not self._expects_events():
            return IDLE_POLL_S
        if self._quiet_rounds < SPIN_ROUNDS:
            return 0.0
        quiet_s = time.monotonic() - self._last_event_s
        return poll_interval_s(quiet_s, self._transport.moving or bool(self._pending))

    def _run_round(self, wait_s: float) -> bool:
        """Takes commands and events, and does what they lead to; False if the thread shall end."""
        commands = self._take_commands(wait_s)
        if commands is None:
            return False
        events = self._transport.poll()
        computed = self._take_digests()
        self._quiet_rounds = 0 if commands or events or computed else self._quiet_rounds + 1

        for command in commands:
            self._handle_command(command)
        for event in events:
            self._handle_transport_event(event)

        now = time.monotonic()
        if not self._quiet_rounds:
            self._last_event_s = now
        if now - self._last_tick_s > TICK_S:
            self._last_tick_s = now
            self._to_both_ends(TicketTick())
            self._check_fences()
            for agent in self._redials.due(now):
                if agent not in self._peers:
                    self._reach(agent)
                elif self._transport.reached(agent):  # the first message has dialled it
                    self._redials.forget(agent)
        return True

    def _expects_events(self) -> bool:
        """Returns whether something may come soon.

        A quarantined ticket alone is no reason to expect anything: it may last for hours.
        """
        receives = any(
            ticket.state is not ReceivingState.QUARANTINED
            for ticket in self._receiver.tickets.values()
        )
        return bool(receives or self._sender.tickets or self._pending)

    def _take_commands(self, wait_s: float) -> list[TransferCommand] | None:
        """Returns the queued commands, after waiting for the first at most `wait_s` seconds.

        Returns None when the thread shall end.
        """
        commands: list[TransferCommand] = []
        try:
            if wait_s:
                command = self._commands.get(timeout=wait_s)
            else:
                command = self._commands.get(block=False)
            while command is not None:
                commands.append(command)
                command = self._commands.get(block=False)
        except queue.Empty:
            return commands
        return None

    # ---- commands --------------------------------------------------------------------------------

    def _handle_command(self, command: TransferCommand) -> None:
        match command:
            case AddPeer(worker, cards):
                self._agents[worker] = [card.agent for card in cards]
                for card in cards:
                    self._cards[card.agent] = card
                    self._redials.forget(card.agent)  # its address may be another one now
                    self._reach(card.agent)
            case LosePeer(worker, process_dead):
                self._lose_worker(worker, process_dead)
            case OfferBlocks():
                self._offer(command)
            case ExpectOffer():
                self._expect(command)
            case PushBlocks() | FinishPush():
                self._push(command)
            case CancelTransfer(ticket_id, reason):
                self._to_both_ends(CancelTicket(ticket_id, reason))
            case _:
                assert_never(command)

    def _join(self, command: OfferBlocks | ExpectOffer) -> OpenLane | None:
        """Opens the lane of a ticket; None if the peer is not known, or cannot be joined."""
        peer = command.peer
        self._reach(peer)
        card = self._peers.get(peer)
        if card is None:
            return None
        peer_end = LaneEnd(card.layout, card.rank, card.ranks)
        try:
            if isinstance(command, OfferBlocks):
                lane = lane_between(peer_end, self.end)
            else:
                lane = lane_between(self.end, peer_end)
        except ValueError as error:
            log.error("no lane to %s: %s", peer, error)
            return None
        self._lanes[command.ticket_id] = OpenLane(lane, command.tokens)
        return self._lanes[command.ticket_id]

    def _offer(self, command: OfferBlocks) -> None:
        lane = self._join(command)
        if lane is None:  # nobody was told of the blocks, so they are free at once
            self.gauges.failed_lanes["peer_lost"] += 1
            self._deliver(TransferFailed(command.ticket_id, "peer_lost"))
            self._deliver(BlocksFreed(command.ticket_id))
            return
        self._to_receiver(lane.offer(command))

    def _expect(self, command: ExpectOffer) -> None:
        lane = self._join(command)
        self._to_sender(ExpectTileOffer(command.ticket_id, command.peer))
        if lane is None:  # so that a receiver that asks, now or later, is told
            self._to_sender(CancelTicket(command.ticket_id, "peer_lost"))

    def _push(self, command: PushBlocks | FinishPush) -> None:
        lane = self._lanes.get(command.ticket_id)
        if lane is None:
            return  # the ticket has ended
        if isinstance(command, FinishPush):
            self._to_sender(lane.finish(command))
        else:
            self._to_sender(lane.push(command))

    # ---- events of the transport, actions of the machines ----------------------------------------

    def _handle_transport_event(self, event: TransportEvent) -> None:
        match event:
            case NotificationReceived(peer, data):
                try:
                    message = messages.decode(data)
                except ValueError:
                    self.gauges.failures["malformed"] += 1
                    return
                self._reach(peer)
                self._to_both_ends(MessageReceived(peer, message))
            case PostedWriteEnded(handle, ok, reason):
                write = self._writes.pop(handle)
                if ok:
                    self.gauges.sent_bytes += write.size
                self._to_sender(WriteEnded(write.action.ticket_id, ok, reason))
                if write.action.peer in self._returning:
                    self._reach(write.action.peer)
            case PeerDisconnected(peer, error):
                if error and peer in self._cards:
                    self._note_unreachable(peer, error)
                self._lose_peer(peer)
            case _:
                assert_never(event)

    def _to_both_ends(self, event: SharedEvent) -> None:
        self._to_receiver(event)
        self._to_sender(event)

    def _to_receiver(self, event: ReceiverEvent) -> None:
        for action in self._receiver.handle(event, time.monotonic()):
            self._carry_out(action)

    def _to_sender(self, event: SenderEvent) -> None:
        for action in self._sender.handle(event, time.monotonic()):
            self._carry_out(action)

    def _carry_out(self, action: ReceiverAction | SenderAction) -> None:
        match action:
            case SendMessage(peer, message):
                self._send(peer, message)
            case WriteTiles():
                self._write(action)
            case VerifyChunk():
                self._verify(action)
            case TilesArrived():
                self._arrived(action)
            case PushEnded(ticket_id, ok):
                if ok:
                    self.gauges.pushed_tickets += 1
                self._lanes.pop(ticket_id, None)
                self._deliver(action)
            case BlocksFreed(ticket_id):
                self._lanes.pop(ticket_id, None)
                if self._is_being_verified(ticket_id):
                    self._freed_later.add(ticket_id)
                else:
                    self._deliver(action)
            case TransferFailed(_, reason):
                self.gauges.failed_lanes[reason] += 1
                self._deliver(action)
            case PrefixRequested():
                self._deliver(action)
            case _:
                assert_never(action)

    def _arrived(self, arrived: TilesArrived) -> None:
        outcome = self._lanes[arrived.ticket_id].arrived(arrived)
        self.gauges.record_arrival(outcome.busy_s, outcome.exposed_s)
        del self._lanes[arrived.ticket_id]
        self._deliver(outcome)

    # ---- peers -----------------------------------------------------------------------------------

    def _add_peer(self, card: PeerCard) -> None:
        """Makes the transport reach a peer, unless the peer is refused or not fenced yet."""
        agent = card.agent
        if agent in self._peers or agent in self._unfenced or agent == self.agent:
            return
        assert self.card is not None
        mismatch = self.card.describe_mismatch(card)
        if mismatch is not None:
            self._cards.pop(agent, None)
            self._refuse(agent, mismatch)
            # Counted last: a snapshot without a lock that has the count has the reason too.
            self.gauges.failures["incompatible_peer"] += 1
            return
        self._refusals.pop(agent, None)
        try:
            self._transport.add_peer(card)
        except Exception as error:
            self._note_unreachable(agent, str(error))
            return
        if self._transport.reached(agent):
            self._redials.forget(agent)
        self._peers[agent] = card
        self._send(agent, messages.GreetMessage(""))

    def _note_unreachable(self, agent: str, error: str) -> None:
        """Tells operators why a peer is out of reach, and puts off the next dial."""
        wait_s = self._redials.note_failure(agent, error, time.monotonic())
        self.gauges.failures["unreachable_peer"] += 1
        log.error("peer %s cannot be reached, next try in %.0f s: %s", agent, wait_s, error)

    def _refuse(self, agent: str, mismatch: str) -> None:
        """Tells operators why no KV is exchanged with an agent."""
        log.error("peer %s is refused, as it has another %s", agent, mismatch)
        self._refusals.pop(agent, None)
        self._refusals[agent] = mismatch
        if len(self._refusals) > REFUSALS_LIMIT:
            del self._refusals[next(iter(self._refusals))]

    def _reach(self, agent: str) -> None:
        """Reaches a peer that the cluster names, also one that was lost before.

        A lost peer must have shown up, or must have been named anew: a worker that has ended comes
        into no directory again. The peer's tickets from before end like any that is stopped: their
        blocks stay reserved until the peer writes no more. A peer that could not be reached is left
        alone until its next try is due.
        """
        self._returning.discard(agent)
        if agent not in self._cards or agent in self._peers:
            return
        if self._redials.must_wait(agent, time.monotonic()):
            return
        was_lost = agent in self._unfenced
        if was_lost:  # the peer is alive, so that no fence would ever pass: take it back
            if any(write.action.peer == agent for write in self._writes.values()):
                # These would go on, and nobody could tell when they end.
                self._returning.add(agent)
                return
            self._unfenced.discard(agent)
            self._transport.remove_peer(agent)
        self._add_peer(self._cards[agent])
        if was_lost and agent not in self._peers:  # it is not back, and may still write
            self._unfenced.add(agent)
            self._strays.add(agent)
        else:
            self._strays.discard(agent)

    def _lose_worker(self, worker: str, process_dead: bool) -> None:
        """Loses every rank of a worker.

        The ranks' names are kept until the worker's process is known to be dead, so that this news
        still reaches the fences of its ranks.
        """
        for agent in self._agents.get(worker, ()):
            self._cards.pop(agent, None)
            self._refusals.pop(agent, None)
            self._redials.forget(agent)
            self._returning.discard(agent)
            self._lose_peer(agent)
            if process_dead:
                self._strays.discard(agent)
                self._transport.mark_process_dead(agent)
        if process_dead:
            self._agents.pop(worker, None)
            self.gauges.forget_worker(worker)

    def _lose_peer(self, agent: str) -> None:
        """Tells both machines that a peer is lost, once; from now on its fence is awaited."""
        if self._peers.pop(agent, None) is None:
            return
        self._unfenced.add(agent)
        self._to_both_ends(PeerWentDown(agent))

    def _check_fences(self) -> None:
        for agent in self._unfenced - self._strays:
            if not self._transport.fenced(agent):
                continue
            self._unfenced.discard(agent)
            self._transport.remove_peer(agent)
            self._to_both_ends(PeerFenced(agent))

    def _send(self, peer: str, message: messages.AnyMessage) -> None:
        try:
            self._transport.notify(peer, messages.encode(message))
        except PeerLost:
            self._lose_peer(peer)
            # Again, for a ticket that was opened after the peer was lost; it changes no other. A
            # peer that is not unfenced has passed its fence, or was never reached: it cannot write.
            self._to_both_ends(PeerWentDown(peer))
            if peer not in self._unfenced:
                self._to_both_ends(PeerFenced(peer))

    # ---- data ------------------------------------------------------------------------------------

    def _write(self, action: WriteTiles) -> None:
        """Posts a write once the checksums of its tiles are there, which travel with it."""
        open_lane = self._lanes[action.ticket_id]
        lane = open_lane.lane
        started = self._start_digests(open_lane, lane.source, action.source_tiles, action)
        checksums = self._poll_digests(started)
        if checksums is None:
            self._pending.append(PendingChunk(action, lane, started))
        else:
            self._post(action, lane, checksums)

    def _post(self, action: WriteTiles, lane: Lane, checksums: list[int]) -> None:
        chunk = messages.ChunkMessage(
            action.ticket_id,
            generation=action.generation,
            chunk_number=action.chunk_number,
            first_tile=action.first_tile,
            piece=action.piece,
            pieces=action.pieces,
            checksums=checksums,
        )
        spans = lane.spans(action.source_tiles, action.target_tiles, action.piece)
        began = time.perf_counter()
        try:
            handle = self._transport.write(action.peer, spans, messages.encode(chunk))
        except PeerLost as error:
            log.info("%s: a write was not posted: %s", action.ticket_id, error)
            self._to_sender(WriteEnded(action.ticket_id, ok=False, reason="peer_lost"))
            return
        self.gauges.copy_s += time.perf_counter() - began
        self._writes[handle] = PostedWrite(action, spans.bytes)

    def _verify(self, action: VerifyChunk) -> None:
        """Compares the checksums of what arrived with those that the sender computed."""
        chunk = action.chunk
        open_lane = self._lanes[action.ticket_id]
        lane = open_lane.lane
        size = len(action.tiles) * lane.piece_bytes(chunk.piece)
        self.gauges.record_received_bytes(self._receiver.tickets[action.ticket_id].peer, size)
        started = self._start_digests(open_lane, lane.target, action.tiles, chunk)
        checksums = self._poll_digests(started)
        if checksums is None:
            self._pending.append(PendingChunk(action, lane, started))
        else:
            self._compare(action, lane, checksums)

    def _compare(self, action: VerifyChunk, lane: Lane, checksums: list[int]) -> None:
        chunk = action.chunk
        # Both ends must also cut tiles into the same pieces: pieces are compared by number.
        ok = checksums == chunk.checksums and chunk.pieces == lane.pieces
        self._to_receiver(ChunkVerified(action.ticket_id, chunk.chunk_number, ok))

    def _start_digests(
        self,
        open_lane: OpenLane,
        side: LaneSide,
        tiles: list[int],
        chunk: WriteTiles | messages.ChunkMessage,
    ) -> StartedDigests:
        """Starts the checksums of what a chunk writes, or has written: `tiles` of the own pool."""
        began = time.perf_counter()
        request = open_lane.digest_request(
            side,
            tiles,
            ticket_seed=identity.ticket_seed(self.compatibility, chunk.ticket_id, chunk.generation),
            first_tile=chunk.first_tile,
            piece=chunk.piece,
        )
        started = self._digester.start(request)
        self.gauges.checksum_s += time.perf_counter() - began
        return started

    def _poll_digests(self, started: StartedDigests) -> list[int] | None:
        began = time.perf_counter()
        checksums = started.poll()
        self.gauges.checksum_s += time.perf_counter() - began
        return checksums

    def _take_digests(self) -> bool:
        """Goes on with the chunks whose checksums are there; returns whether there was one."""
        taken = False
        while self._pending:
            chunk = self._pending[0]
            checksums = self._poll_digests(chunk.started)
            if checksums is None:
                break
            self._pending.popleft()
            taken = True
            if isinstance(chunk.action, WriteTiles):
                self._write_late(chunk.action, chunk.lane, checksums)
            else:
                self._compare_late(chunk.action, chunk.lane, checksums)
        return taken

    def _write_late(self, action: WriteTiles, lane: Lane, checksums: list[int]) -> None:
        """Posts a write whose checksums took a while, unless its ticket is closing by now."""
        ticket = self._sender.tickets[action.ticket_id]  # it lives until its writes have ended
        if ticket.state is SendingState.CLOSING:
            self._to_sender(WriteEnded(action.ticket_id, ok=False, reason=ticket.reason))
        else:
            self._post(action, lane, checksums)

    def _compare_late(self, action: VerifyChunk, lane: Lane, checksums: list[int]) -> None:
        """Compares checksums that took a while, or frees the blocks of a ticket that failed."""
        ticket_id = action.ticket_id
        if ticket_id not in self._freed_later:
            self._compare(action, lane, checksums)
        elif not self._is_being_verified(ticket_id):
            self._freed_later.discard(ticket_id)
            self._deliver(BlocksFreed(ticket_id))

    def _is_being_verified(self, ticket_id: str) -> bool:
        """Returns whether a device reads blocks that a ticket has filled."""
        return any(
            isinstance(chunk.action, VerifyChunk) and chunk.action.ticket_id == ticket_id
            for chunk in self._pending
        )

    def _admit(self, peer: str, note: bytes) -> bool:
        """Returns whether the data that comes with `note` may be stored: its ticket must be open.

        The transport asks this from inside of `poll`, on the transfer thread.
        """
        try:
            message = messages.decode(note)
        except ValueError:
            return False
        ticket = self._receiver.tickets.get(message.ticket_id)
        if ticket is None or ticket.peer != peer:
            return False
        if ticket.state is not ReceivingState.RESERVED:
            return False
        return (
            isinstance(message, messages.ChunkMessage)
            and message.generation == ticket.offer.generation
        )
