"""What whole tickets cost between two processes, beside raw NIXL that moves the same bytes.

This process sends and a second one receives. Both run a real `TransferService`: checksums, fences
and all. After each ticket the same two processes move as many blocks by NIXL's own calls, without
a service: once in one transfer, and once in the pieces of the ticket, a note behind each. So all
three see the same machine, and each ticket has raw transfers to be compared with.

A ticket is one transfer of a request's KV: its blocks, pushed in chunks of tokens, and each chunk
in pieces of a few layers, as a prefill computes them. A note is a short message of NIXL; one that
goes with a write reaches the peer after the write's bytes.

A time is the receiver's: from the offer until the blocks are committed, or from the note that asks
for a raw transfer until its last note. CPU time is that of all threads of a process.
"""

from __future__ import annotations

import enum
import logging
import multiprocessing
import os
import queue
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from . import commands
from .layout import KVLayout
from .service import TransferService
from .slices import LaneEnd, piece_count
from .speed import DEADLINE_S, GIB, SpeedPool
from .ticket_events import TicketTimeouts
from .transport import PeerCard
from .transports import open_transport

#: A block has 2 MiB in 8 pieces: that of the 205M model (`engine/bench/models.py`).
LAYOUT = KVLayout(
    layers=16,
    heads=8,
    head_dim=64,
    block_tokens=64,
    item_bytes=2,
    dtype="bfloat16",
    group_layers=2,
)
PIECES = piece_count(LAYOUT, ranks=1)
CHUNK_TOKENS = 512  #: A prefill pushes after so many tokens, piece by piece.
CHUNK_BLOCKS = CHUNK_TOKENS // LAYOUT.block_tokens
ROUNDS = 20  #: Exchanges of each kind that count.
TICKET_WAIT_S = 120.0  #: For one exchange; a prefill may run beside it on a busy machine.
REAL_TIME_PRIORITY = 2  #: Above that of `engine/bench`, which may run beside.
RAW_PAUSE_S = 0.0002  #: Between two polls of raw NIXL: a loop without a pause takes a core.
COMPATIBILITY = b"bench"  #: Both ends must have the same bytes to compare.
SECRET = "bench"  #: What peers prove to know, on a machine that has no cluster.
RECEIVER_ENDED = "the receiving process has ended"  #: Text of a TimeoutError.
_OWN_AGENT = "NIXL_INIT_AGENT"  #: NIXL's name for the side that begins a transfer.
_START_NOTE = b"start"  #: From the receiver: it waits for the transfers now.
_DATA_NOTE = b"data"  #: Behind each raw transfer.
_SOURCE_SEED = 1  #: Of the order of the sender's blocks.
_TARGET_SEED = 2  #: Of the order of the receiver's.


class Exchange(enum.StrEnum):
    """What the two processes do in turn."""

    TICKET = "ticket"
    RAW = "raw"  #: One transfer of whole blocks.
    RAW_PIECES = "raw_pieces"  #: A transfer for each piece of each chunk.


class ExchangeRequest(msgspec.Struct, frozen=True):
    """Asks the receiver to begin an exchange."""

    exchange: Exchange
    ticket_id: str = ""  #: Both ends name the ticket so; raw transfers have no name.


class Received(msgspec.Struct, frozen=True):
    """The receiver's answer. The last two are those of `BlocksArrived`, and 0 for raw NIXL."""

    seconds: float
    cpu_s: float
    busy_s: float = 0.0  #: Seconds in which at least one write was under way.
    exposed_s: float = 0.0  #: From the end of the sender's pushes until the last checksum held.


class Sample(msgspec.Struct, frozen=True):
    """What one exchange took."""

    seconds: float
    sender_cpu_s: float
    receiver_cpu_s: float

    @property
    def cpu_s(self) -> float:
        """CPU seconds of both processes."""
        return self.sender_cpu_s + self.receiver_cpu_s


class ExchangeFigures(msgspec.Struct, frozen=True):
    """Medians over all rounds of one kind of exchange: GiB/s, and milliseconds of CPU per GiB."""

    gib_s: float
    sender_cpu_ms: float
    receiver_cpu_ms: float


class RawFigures(msgspec.Struct, frozen=True):
    """Raw NIXL beside tickets. The ratios are medians over rounds of ticket over raw transfer."""

    figures: ExchangeFigures
    rate_ratio: float  #: Of bytes per second: below 1, tickets are slower.
    cpu_ratio: float  #: Of the CPU time of both processes: above 1, tickets take more.


class TicketSpeedRow(msgspec.Struct, frozen=True):
    """Tickets over one transport; `raw` and `raw_pieces` are None where NIXL is missing."""

    transport: str
    ticket: ExchangeFigures
    raw: RawFigures | None
    raw_pieces: RawFigures | None


class OpenedEnd(msgspec.Struct, frozen=True):
    """What one process tells the other when its transports are open."""

    card: PeerCard  #: How the transfer service is reached.
    raw_agent: str = ""
    raw_metadata: bytes | None = None  #: None where NIXL is missing, or not asked for.
    raw_base: int = 0  #: Address of byte 0 of the raw pool.


class RawNixl:
    """One agent of raw NIXL over a pool of its own, in huge pages."""

    def __init__(self, agent: str, size: int) -> None:
        """Opens an agent named `agent` with a pool of `size` bytes.

        Raises ImportError where NIXL is missing.
        """
        from nixl import _api as api

        # its import sets another one, and lets it print on stdout, where the figures go
        logging.getLogger("nixl").setLevel(logging.WARNING)

        self._pool = SpeedPool(size, shared=False)
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._nixl: Any = api.nixl_agent(agent, config)
        self._nixl.create_backend("UCX", {})
        self._nixl.register_memory([(self._pool.base, size, 0, "")], "DRAM")
        self.agent = agent
        self.base = self._pool.base
        self.metadata: bytes = self._nixl.get_agent_metadata()
        self._peer = ""
        #: A pool is cut into units, each a block or a piece; a transfer names units by number.
        #: Here are NIXL's prepared descriptors of all units, by the bytes of a unit.
        self._own_units: dict[int, Any] = {}
        self._peer_units: dict[int, Any] = {}

    def connect(self, peer: OpenedEnd) -> None:
        """Lets this agent write to the peer's pool, which is as large as its own."""
        assert peer.raw_metadata is not None
        self._nixl.add_remote_agent(peer.raw_metadata)
        self._peer = peer.raw_agent
        for unit in (LAYOUT.block_bytes, LAYOUT.block_bytes // PIECES):
            self._own_units[unit] = self._units(_OWN_AGENT, self.base, unit)
            self._peer_units[unit] = self._units(peer.raw_agent, peer.raw_base, unit)

    def _units(self, owner: str, base: int, unit: int) -> Any:
        """Returns the descriptors of a pool at `base` that is cut into units of `unit` bytes."""
        row = [base, unit, 0, unit, self._pool.size // unit]
        return self._nixl.prep_xfer_dlist(owner, np.array([row], np.uint64), "DRAM")

    def send(self, source: np.ndarray, target: np.ndarray) -> None:
        """Waits until the peer asks, then writes all blocks in one transfer.

        `source` and `target` number each block's place in this pool and in the peer's.
        Raises TimeoutError.
        """
        self._wait_for_notes(1)
        self._drain([self._post(LAYOUT.block_bytes, source, target)])

    def send_pieces(self, source: np.ndarray, target: np.ndarray) -> None:
        """Waits until the peer asks, then writes chunk by chunk and piece by piece.

        A piece is a part of each block's bytes. Later pieces do not wait for the writes of earlier
        ones; handles of ended writes are released on the way. Raises TimeoutError.
        """
        self._wait_for_notes(1)
        under_way: list[Any] = []
        for first in range(0, len(source), CHUNK_BLOCKS):
            chunk = slice(first, first + CHUNK_BLOCKS)
            for piece in range(PIECES):
                source_units = source[chunk] * PIECES + piece
                target_units = target[chunk] * PIECES + piece
                unit = LAYOUT.block_bytes // PIECES
                under_way.append(self._post(unit, source_units, target_units))
                if self._is_done(under_way[0]):
                    self._nixl.release_xfer_handle(under_way.pop(0))
        self._drain(under_way)

    def _post(self, unit: int, source: np.ndarray, target: np.ndarray) -> Any:
        transfer = self._nixl.make_prepped_xfer(
            "WRITE", self._own_units[unit], source, self._peer_units[unit], target, _DATA_NOTE
        )
        self._nixl.transfer(transfer)
        return transfer

    def _is_done(self, transfer: Any) -> bool:
        return bool(self._nixl.check_xfer_state(transfer) == "DONE")

    def _drain(self, transfers: list[Any]) -> None:
        """Waits until all writes are done. Raises TimeoutError after `DEADLINE_S`."""
        deadline_s = time.monotonic() + DEADLINE_S
        for transfer in transfers:
            while not self._is_done(transfer):
                if time.monotonic() > deadline_s:
                    raise TimeoutError("raw NIXL: a write does not end")
                time.sleep(RAW_PAUSE_S)
            self._nixl.release_xfer_handle(transfer)

    def receive(self, transfers: int) -> None:
        """Asks the peer for its blocks, and waits until all transfers are there."""
        self._nixl.send_notif(self._peer, _START_NOTE)
        self._wait_for_notes(transfers)

    def _wait_for_notes(self, count: int) -> None:
        """Waits for `count` notes of the peer. Raises TimeoutError after `DEADLINE_S`."""
        deadline_s = time.monotonic() + DEADLINE_S
        while count > 0:
            notes = self._nixl.get_new_notifs().get(self._peer, ())
            count -= len(notes)
            if notes:
                continue
            if time.monotonic() > deadline_s:
                raise TimeoutError("raw NIXL: nothing arrives")
            time.sleep(RAW_PAUSE_S)


class TicketEnd:
    """One of the two processes: its transfer service, and its raw NIXL if that is asked for."""

    def __init__(
        self, transport: str, role: str, *, layout: KVLayout, tokens: int, with_raw: bool
    ) -> None:
        """Opens the pools and starts the service; `role` is the first part of this end's name.

        Raises TransportUnavailable.
        """
        self.tokens = tokens
        self.block_count = -(-tokens // layout.block_tokens)
        self.agent = f"{role}/{os.getpid()}:0"  #: Worker and rank, as `PeerCard.agent` names them.
        size = self.block_count * layout.block_bytes
        pool = SpeedPool(size, shared=transport == "shm")
        self._outcomes: queue.SimpleQueue[commands.TransferOutcome] = queue.SimpleQueue()
        self.service = TransferService(
            agent=self.agent,
            pool=pool,
            end=LaneEnd(layout),
            compatibility=COMPATIBILITY,
            open_transport=lambda admit: open_transport(
                transport, self.agent, pool, admit, host="127.0.0.1", secret=SECRET
            ),
            deliver=self._outcomes.put,
            timeouts=TicketTimeouts(chunk_s=TICKET_WAIT_S),
        )
        card = self.service.start()
        self.raw = _open_raw(f"raw-{role}-{os.getpid()}", size) if with_raw else None
        self.opened = OpenedEnd(card)
        if self.raw is not None:
            self.opened = OpenedEnd(card, self.raw.agent, self.raw.metadata, self.raw.base)

    def connect(self, peer: OpenedEnd) -> None:
        """Makes the other process reachable, for tickets and for raw NIXL."""
        worker = peer.card.agent.rpartition(":")[0]
        self.service.submit(commands.AddPeer(worker, [peer.card]))
        if self.raw is not None and peer.raw_metadata is not None:
            self.raw.connect(peer)

    def send_ticket(self, ticket_id: str, peer: str) -> None:
        """Pushes a ticket as a prefill does, and waits until it has ended well.

        Raises RuntimeError if the ticket fails, TimeoutError if it does not end.
        """
        blocks = scattered_blocks(self.block_count, _SOURCE_SEED)
        self.service.submit(commands.ExpectOffer(ticket_id, peer, self.tokens))
        for first_block in range(0, self.block_count, CHUNK_BLOCKS):
            chunk = blocks[first_block : first_block + CHUNK_BLOCKS]
            for piece in range(PIECES):
                self.service.submit(commands.PushBlocks(ticket_id, first_block, chunk, piece))
        self.service.submit(commands.FinishPush(ticket_id, b""))
        outcome = self._next_outcome()
        if not isinstance(outcome, commands.PushEnded) or not outcome.ok:
            raise RuntimeError(f"the ticket failed: {outcome}")

    def receive_ticket(self, ticket_id: str, peer: str) -> commands.BlocksArrived:
        """Offers all blocks, and waits until they are committed.

        Raises RuntimeError if the ticket fails, TimeoutError if nothing arrives.
        """
        blocks = scattered_blocks(self.block_count, _TARGET_SEED)
        self.service.submit(commands.OfferBlocks(ticket_id, peer, blocks, self.tokens))
        outcome = self._next_outcome()
        if not isinstance(outcome, commands.BlocksArrived):
            raise RuntimeError(f"the ticket failed: {outcome}")
        return outcome

    def _next_outcome(self) -> commands.TransferOutcome:
        try:
            return self._outcomes.get(timeout=TICKET_WAIT_S)
        except queue.Empty:
            raise TimeoutError(f"{self.agent}: nothing arrives") from None

    def send(self, request: ExchangeRequest, peer: OpenedEnd) -> None:
        """Does the sender's part of an exchange, and waits for its end."""
        if request.exchange is Exchange.TICKET:
            self.send_ticket(request.ticket_id, peer.card.agent)
            return
        assert self.raw is not None
        source = np.array(scattered_blocks(self.block_count, _SOURCE_SEED), np.int32)
        target = np.array(scattered_blocks(self.block_count, _TARGET_SEED), np.int32)
        if request.exchange is Exchange.RAW:
            self.raw.send(source, target)
        else:
            self.raw.send_pieces(source, target)

    def receive(self, request: ExchangeRequest, peer: OpenedEnd) -> Received:
        """Does the receiver's part of an exchange, and returns what it took here."""
        cpu_before_s = time.process_time()
        began_s = time.perf_counter()
        busy_s = 0.0
        exposed_s = 0.0
        if request.exchange is Exchange.TICKET:
            arrived = self.receive_ticket(request.ticket_id, peer.card.agent)
            busy_s = arrived.busy_s
            exposed_s = arrived.exposed_s
        else:
            assert self.raw is not None
            chunks = -(-self.block_count // CHUNK_BLOCKS)
            in_one_transfer = request.exchange is Exchange.RAW
            self.raw.receive(transfers=1 if in_one_transfer else chunks * PIECES)
        seconds = time.perf_counter() - began_s
        return Received(seconds, time.process_time() - cpu_before_s, busy_s, exposed_s)


def _open_raw(agent: str, size: int) -> RawNixl | None:
    """Returns an agent of raw NIXL, or None where NIXL is missing."""
    try:
        return RawNixl(agent, size)
    except ImportError:
        return None


def scattered_blocks(count: int, seed: int) -> list[int]:
    """Returns the numbers of all blocks of a pool in random order.

    So neighbours of a request are no neighbours in memory, as in a cache that has been used.
    """
    return random.Random(seed).sample(range(count), count)


class ReceiverProcess:
    """The second process, as the first one sees it."""

    def __init__(
        self, transport: str, *, layout: KVLayout, tokens: int, with_raw: bool, before_others: bool
    ) -> None:
        """Starts the process and waits until its transports are open.

        `before_others` gives the process real-time priority where root runs it.

        Raises TimeoutError when its transport does not open.
        """
        context = multiprocessing.get_context("spawn")
        self._pipe, far = context.Pipe()
        end_options = {"layout": layout, "tokens": tokens, "with_raw": with_raw}
        self._process = context.Process(
            target=_receive, args=(transport, end_options, before_others, far), daemon=True
        )
        self._process.start()
        far.close()
        try:
            self.opened: OpenedEnd = self._answer(DEADLINE_S)
        except (EOFError, ConnectionError, TimeoutError):
            self.close()
            raise TimeoutError("the other process did not open its transport") from None

    def connect(self, sender: OpenedEnd) -> None:
        """Tells the process how the sender is reached. It must come before `ask`.

        Raises TimeoutError when the process has ended.
        """
        self._send(sender)

    def ask(self, request: ExchangeRequest) -> None:
        """Has the process begin an exchange; `received` waits for its end.

        Raises TimeoutError when the process has ended.
        """
        self._send(request)

    def received(self) -> Received:
        """Waits for the end of what was asked for. Raises TimeoutError."""
        try:
            received: Received = self._answer(2 * TICKET_WAIT_S)
        except (EOFError, ConnectionError):
            raise TimeoutError(RECEIVER_ENDED) from None
        return received

    def _send(self, message: OpenedEnd | ExchangeRequest) -> None:
        try:
            self._pipe.send(message)
        except ConnectionError:
            raise TimeoutError(RECEIVER_ENDED) from None

    def _answer(self, wait_s: float) -> Any:
        if not self._pipe.poll(wait_s):
            raise TimeoutError("the receiving process does not answer")
        return self._pipe.recv()

    def close(self) -> None:
        """Ends the process; waits up to 5 s for it, and then terminates it."""
        self._pipe.close()
        self._process.join(timeout=5.0)
        self._process.terminate()


def _receive(
    transport: str, end_options: dict[str, Any], before_others: bool, pipe: Connection
) -> None:
    """Runs in the other process: receives what the pipe asks for, until the pipe is closed."""
    if before_others:
        _set_real_time(True)
    end = TicketEnd(transport, "receiver", **end_options)
    pipe.send(end.opened)
    try:
        peer: OpenedEnd = pipe.recv()
        end.connect(peer)
        while True:
            pipe.send(end.receive(pipe.recv(), peer))
    except EOFError:
        end.service.stop()


def _set_real_time(real_time: bool) -> bool:
    """Lets this thread, and those that it starts, go before others; False where that is denied."""
    try:
        if real_time:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(REAL_TIME_PRIORITY))
        else:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    except (AttributeError, PermissionError):
        return False
    return True


@contextmanager
def _before_others() -> Iterator[None]:
    """Gives this thread real-time priority inside of the context, if it may.

    Only root may; everybody else is measured as the machine lets them.
    """
    changed = _set_real_time(True)
    try:
        yield
    finally:
        if changed:
            _set_real_time(False)


def measure_tickets(transport: str, tokens: int = 2048, rounds: int = ROUNDS) -> TicketSpeedRow:
    """Lets a ticket and the raw transfers take turns; the first round warms up and does not count.

    Each exchange moves the KV of `tokens` tokens.

    Raises TransportUnavailable when the transport cannot run here, TimeoutError when nothing
    arrives.
    """
    with _before_others():
        end = TicketEnd(transport, "sender", layout=LAYOUT, tokens=tokens, with_raw=True)
        try:
            return _measure(end, transport, tokens, rounds)
        finally:
            end.service.stop()


def _measure(end: TicketEnd, transport: str, tokens: int, rounds: int) -> TicketSpeedRow:
    receiver = ReceiverProcess(
        transport, layout=LAYOUT, tokens=tokens, with_raw=True, before_others=True
    )
    try:
        receiver.connect(end.opened)
        end.connect(receiver.opened)
        exchanges = list(Exchange) if end.raw is not None else [Exchange.TICKET]
        samples: dict[Exchange, list[Sample]] = {exchange: [] for exchange in exchanges}
        for number in range(rounds + 1):
            for exchange in exchanges:
                request = ExchangeRequest(exchange, f"speed{number}#0")
                samples[exchange].append(_take_sample(end, receiver, request))
    finally:
        receiver.close()
    gib = end.block_count * LAYOUT.block_bytes / GIB
    return _row(transport, gib, {kind: taken[1:] for kind, taken in samples.items()})


def _take_sample(end: TicketEnd, receiver: ReceiverProcess, request: ExchangeRequest) -> Sample:
    """Runs one exchange between both processes, and returns what it took."""
    cpu_before_s = time.process_time()
    receiver.ask(request)
    end.send(request, receiver.opened)
    received = receiver.received()
    sender_cpu_s = time.process_time() - cpu_before_s
    return Sample(received.seconds, sender_cpu_s, received.cpu_s)


def _row(transport: str, gib: float, samples: dict[Exchange, list[Sample]]) -> TicketSpeedRow:
    tickets = samples[Exchange.TICKET]
    raw = samples.get(Exchange.RAW)
    raw_pieces = samples.get(Exchange.RAW_PIECES)
    return TicketSpeedRow(
        transport,
        ticket=_figures(tickets, gib),
        raw=_raw_figures(tickets, raw, gib) if raw else None,
        raw_pieces=_raw_figures(tickets, raw_pieces, gib) if raw_pieces else None,
    )


def _raw_figures(tickets: list[Sample], raw: list[Sample], gib: float) -> RawFigures:
    pairs = list(zip(tickets, raw, strict=True))
    return RawFigures(
        _figures(raw, gib),
        # Equal bytes: the ratio of the rates is that of the seconds, turned round.
        rate_ratio=statistics.median(sample.seconds / ticket.seconds for ticket, sample in pairs),
        cpu_ratio=statistics.median(ticket.cpu_s / sample.cpu_s for ticket, sample in pairs),
    )


def _figures(samples: list[Sample], gib: float) -> ExchangeFigures:
    def median_of(value: Callable[[Sample], float]) -> float:
        return statistics.median(value(sample) for sample in samples)

    return ExchangeFigures(
        gib_s=gib / median_of(lambda sample: sample.seconds),
        sender_cpu_ms=1e3 * median_of(lambda sample: sample.sender_cpu_s) / gib,
        receiver_cpu_ms=1e3 * median_of(lambda sample: sample.receiver_cpu_s) / gib,
    )
