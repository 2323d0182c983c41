"""The transfer thread: one thread owns the agent, and both ends' ticket machines with it.

Commands come in through a queue (any thread), outcomes go out through `deliver` (called on this
thread; it must not block). The loop: drain commands, poll the transport, let the machines decide,
do what they say. It spins while something happens, polls every `ACTIVE_S` while a ticket is open,
and every `IDLE_S` otherwise; a command wakes it at once.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable

from . import identity, messages
from . import tickets as t
from .errors import PeerLost
from .transport import Admit, Down, Note, PeerCard, Pool, Transport, Wrote

log = logging.getLogger(__name__)

ACTIVE_S, IDLE_S, SPIN = 0.0003, 0.1, 30
TICK_S = 0.05

Opener = Callable[[Admit], Transport]


class AddPeer:
    def __init__(self, card: PeerCard) -> None:
        self.card = card


class LosePeer:
    """The rest of the cluster says that this agent is gone."""

    def __init__(self, agent: str) -> None:
        self.agent = agent


class TransferService:
    """Ships KV blocks for one worker. `start`, then `submit` commands and `tickets` events."""

    def __init__(
        self,
        agent: str,
        pool: Pool,
        compatibility: bytes,
        open_transport: Opener,
        deliver: Callable[[object], None],
        limits: t.Limits | None = None,
    ) -> None:
        self.agent, self.pool, self.compatibility = agent, pool, compatibility
        self._opener, self._deliver = open_transport, deliver
        self._sink, self._source = t.Sink(limits), t.Source(limits)
        self._commands: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._cards: dict[str, PeerCard] = {}  #: who the cluster says is there
        self._peers: dict[str, PeerCard] = {}  #: of these, whom the transport reaches
        self._dying: set[str] = set()  #: down, and not fenced yet
        self._writes: dict[int, t.Post] = {}
        self._seeds: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._checksum_s = self._copy_s = 0.0
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
        """Queues a `tickets` event, `AddPeer` or `LosePeer`. Any thread."""
        self._commands.put(command)

    def stop(self) -> None:
        self._commands.put(None)
        self._thread.join(timeout=5.0)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def statistics(self) -> dict:
        """A snapshot; read without a lock, each number by itself is right."""
        states = Counter(ticket.state.lower() for ticket in list(self._sink.tickets.values()))
        states.update(ticket.state.lower() for ticket in list(self._source.tickets.values()))
        held = list(self._sink.tickets.values())
        return {
            "transport": self._transport.name,
            "sessions": len(self._peers),
            "tickets": dict(states),
            "bytes_sent": self._counts["bytes_sent"],
            "bytes_received": self._counts["bytes_received"],
            "transfers": self._counts["landed"] + self._counts["closed"],
            "failures": dict(self._failures),
            "checksum_s": round(self._checksum_s, 6),
            "copy_s": round(self._copy_s, 6),
            "quarantined": sum(len(k.blocks) for k in held if k.state == "QUARANTINED"),
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
                pool.blocks,
                pool.block_bytes,
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
        quiet, ticked = 0, 0.0
        while True:
            wait = 0.0 if quiet < SPIN and self._busy() else ACTIVE_S if self._busy() else IDLE_S
            commands = self._take(wait)
            if commands is None:
                return
            events = self._transport.poll()
            quiet = 0 if commands or events else quiet + 1
            for command in commands:
                self._command(command)
            for event in events:
                self._event(event)
            now = time.monotonic()
            if now - ticked > TICK_S:
                ticked = now
                self._both(t.Tick())
                self._fence()

    def _busy(self) -> bool:
        return bool(self._sink.tickets or self._source.tickets or self._dying)

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
            case AddPeer(card=card):
                self._cards[card.agent] = card
                self._add_peer(card)
            case LosePeer(agent=agent):
                self._cards.pop(agent, None)
                self._lose_peer(agent)
            case t.Open(_, peer, _) | t.Expect(_, peer):
                self._reach(peer)
                self._act(self._sink if isinstance(command, t.Open) else self._source, command)
            case t.Cancel():
                self._both(command)
            case _:
                self._act(self._source, command)

    def _event(self, event: object) -> None:
        match event:
            case Note(peer, data):
                try:
                    message = messages.decode(data)
                except ValueError:
                    self._failures["malformed"] += 1
                    return
                self._reach(peer)
                self._both(t.Noted(peer, message))
            case Wrote(handle, ok, reason):
                post = self._writes.pop(handle)
                if ok:
                    self._counts["bytes_sent"] += len(post.source) * self.pool.block_bytes
                self._act(self._source, t.Written(post.xid, ok, reason))
            case Down(peer):
                self._lose_peer(peer)

    def _both(self, event: object) -> None:
        self._act(self._sink, event)
        self._act(self._source, event)

    def _act(self, machine: t.Sink | t.Source, event: object) -> None:
        for action in machine.handle(event, time.monotonic()):
            match action:
                case t.Send(peer, message):
                    self._send(peer, message)
                case t.Post():
                    self._post(action)
                case t.Verify():
                    self._verify(action)
                case outcome:
                    self._outcome(outcome)

    def _outcome(self, outcome: object) -> None:
        match outcome:
            case t.Landed(xid):
                self._counts["landed"] += 1
                self._seeds.pop(xid, None)
            case t.Closed(xid, ok):
                self._counts["closed"] += ok
                self._seeds.pop(xid, None)
            case t.Freed(xid):
                self._seeds.pop(xid, None)
            case t.Broken(_, reason):
                self._failures[reason] += 1
        self._deliver(outcome)

    # ---- peers -----------------------------------------------------------------------------------

    def _add_peer(self, card: PeerCard) -> None:
        if card.agent in self._peers or card.agent in self._dying or card.agent == self.agent:
            return
        if (card.transport, card.compatibility) != (self._transport.name, self.compatibility):
            self._failures["incompatible_peer"] += 1
            self._cards.pop(card.agent, None)
            log.error("peer %s has another model, layout or transport: refused", card.agent)
            return
        try:
            self._transport.add_peer(card)
        except Exception as error:
            self._failures["unreachable_peer"] += 1
            log.error("peer %s cannot be reached: %s", card.agent, error)
            return
        self._peers[card.agent] = card
        self._send(card.agent, messages.Greet(""))

    def _reach(self, agent: str) -> None:
        """A peer that was lost, and that the cluster says is there, may have come back."""
        if agent in self._cards and agent not in self._peers:
            self._add_peer(self._cards[agent])

    def _lose_peer(self, agent: str) -> None:
        if self._peers.pop(agent, None) is None:
            return
        self._dying.add(agent)
        self._both(t.PeerDown(agent))

    def _fence(self) -> None:
        for agent in [a for a in self._dying if self._transport.fenced(a)]:
            self._dying.discard(agent)
            self._transport.remove_peer(agent)
            self._both(t.Fenced(agent))

    def _send(self, peer: str, message: messages.Any) -> None:
        try:
            self._transport.notify(peer, messages.encode(message))
        except PeerLost:
            self._lose_peer(peer)
            self._both(t.PeerDown(peer))
            if peer not in self._dying:
                self._both(t.Fenced(peer))

    # ---- data ------------------------------------------------------------------------------------

    def _seed(self, xid: str) -> int:
        seed = self._seeds.get(xid)
        if seed is None:
            seed = self._seeds[xid] = identity.ticket_seed(self.compatibility, xid)
        return seed

    def _checksums(self, xid: str, first: int, blocks: list[int]) -> list[int]:
        began, size, view = time.perf_counter(), self.pool.block_bytes, self.pool.view
        seed = self._seed(xid)
        sums = [
            identity.block_checksum(view[b * size : (b + 1) * size], seed, first + i)
            for i, b in enumerate(blocks)
        ]
        self._checksum_s += time.perf_counter() - began
        return sums

    def _post(self, post: t.Post) -> None:
        sums = self._checksums(post.xid, post.first, post.source)
        note = messages.encode(messages.Chunk(post.xid, post.seq, post.first, sums))
        began = time.perf_counter()
        try:
            handle = self._transport.write(post.peer, post.source, post.target, note)
        except PeerLost as error:
            self._act(self._source, t.Written(post.xid, False, f"peer_lost: {error}"))
            return
        self._copy_s += time.perf_counter() - began
        self._writes[handle] = post

    def _verify(self, check: t.Verify) -> None:
        ok = self._checksums(check.xid, check.first, check.blocks) == check.checksums
        self._counts["bytes_received"] += len(check.blocks) * self.pool.block_bytes
        self._act(self._sink, t.Verified(check.xid, check.seq, ok))

    def _admit(self, peer: str, note: bytes) -> bool:
        """May the data that comes with `note` be stored? Only while its ticket is open."""
        try:
            message = messages.decode(note)
        except ValueError:
            return False
        ticket = self._sink.tickets.get(message.xid)
        return ticket is not None and ticket.peer == peer and ticket.state == "RESERVED"
