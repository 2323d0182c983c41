"""How much of a KV transfer hides behind the prefill that makes the KV.

The prefill is real, and so are the transfer services of both ends, in two processes, and what
carries the KV between them. The transfer is measured as fast as it is, and with a sender's
transport that is throttled so that the transfer takes a given share of the prefill's time. What
still has to be carried after the prefill's end is exposed: a client would wait for it.
"""

from __future__ import annotations

import itertools
import math
import queue
import time
from collections import deque
from collections.abc import Sequence as NumberSequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from ...kv_transfer import commands
from ...kv_transfer.errors import PeerLost
from ...kv_transfer.fan import Fan, RankCommand
from ...kv_transfer.service import TransferService
from ...kv_transfer.slices import LaneEnd
from ...kv_transfer.ticket_speed import (
    COMPATIBILITY,
    SECRET,
    Exchange,
    ExchangeRequest,
    OpenedEnd,
    ReceiverProcess,
)
from ...kv_transfer.transport import (
    AdmitData,
    PostedWriteEnded,
    Spans,
    Transport,
    TransportEvent,
)
from ...kv_transfer.transports import open_transport
from ...kv_transfer.transports.wrapped import WrappedTransport
from ...protos.frames import Sampling
from ..engine import Engine, EngineOptions
from ..scheduler import SchedulerLimits
from ..sequence import BlocksFilled, Sequence, SequenceOutput

#: The sender's name; it has one rank, 0.
SOURCE = "prefill/bench"

#: Seconds to wait for the transfer's end; even a throttled one takes no longer than its prefill.
WAIT_S = 60.0

#: Prefills for each share; the one with the median exposed part counts.
ROUNDS = 3


class OverlapResult(msgspec.Struct, frozen=True):
    """One prefill with its transfer. Times are in seconds."""

    throttled: bool  #: False: as fast as this machine moves it.
    of_prefill: float  #: The transfer's time over the prefill's: 1 if both take as long.
    prefill_s: float  #: To the first token, with the transfer beside it.
    transfer_s: float  #: While a write was under way.
    #: From the prefill's end until the receiving process has all blocks, and has said so: a client
    #: would wait for so long.
    exposed_s: float
    exposed_of_transfer: float  #: `exposed_s` over `transfer_s`.


@dataclass(frozen=True, slots=True)
class MeasuredPrefill:
    """Times of one prefill and its transfer, in seconds."""

    prefill_s: float  #: To the first token.
    exposed_s: float  #: As in `OverlapResult`.
    busy_s: float  #: While a write was under way.


@dataclass(frozen=True, slots=True, eq=False)
class _DelayedWrite:
    """A write that the link has not carried yet."""

    handle: int
    peer: str
    spans: Spans
    note: bytes
    carried_at: float  #: By `time.monotonic`.


class ThrottledTransport(WrappedTransport):
    """Posts each write when a link of `bytes_s` would have carried it and all before it.

    `bytes_s` is in bytes per second, infinite at first; it may be set while nothing is under way.
    `inner` moves the bytes; `moving`, `write` and `poll` are those of any `Transport`. A write to a
    lost peer does not raise, as it does with other transports: it ends as failed, because the peer
    is only looked for when the write is posted.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.bytes_s = math.inf
        self._delayed: deque[_DelayedWrite] = deque()
        self._link_free_at = 0.0
        self._handles = itertools.count()
        self._posted: dict[int, int] = {}  #: Handles of this transport, by those of `inner`.

    @property
    def moving(self) -> bool:
        return bool(self._delayed) or self.inner.moving

    def write(self, peer: str, spans: Spans, note: bytes) -> int:
        carry_s = spans.bytes / self.bytes_s
        self._link_free_at = max(self._link_free_at, time.monotonic()) + carry_s
        handle = next(self._handles)
        self._delayed.append(
            _DelayedWrite(handle, peer, spans, note, carried_at=self._link_free_at)
        )
        return handle

    def poll(self) -> list[TransportEvent]:
        events: list[TransportEvent] = []
        while self._delayed and self._delayed[0].carried_at <= time.monotonic():
            write = self._delayed.popleft()
            try:
                posted = self.inner.write(write.peer, write.spans, write.note)
            except PeerLost as error:
                events.append(PostedWriteEnded(write.handle, ok=False, reason=str(error)))
            else:
                self._posted[posted] = write.handle
        for event in self.inner.poll():
            if isinstance(event, PostedWriteEnded):
                event = replace(event, handle=self._posted.pop(event.handle))
            events.append(event)
        return events


class OverlapRig:
    """One engine that prefills, and a second process that receives."""

    def __init__(self, model: Path, tokens: int, *, threads: int, transport: str) -> None:
        """Loads `model` and starts the second process; a prompt has `tokens` tokens.

        `threads` compute the prefill. `transport` is a name that `open_transport` takes. Raises
        TransportUnavailable, and TimeoutError when the second process does not start.
        """
        self.tokens = tokens
        self.transport = transport
        limits = SchedulerLimits(max_step_tokens=512)
        config = EngineOptions(model, kv_bytes=_kv_bytes(tokens), threads=threads, limits=limits)
        self.engine = Engine(config)
        self._receiver = ReceiverProcess(
            transport,
            layout=self.engine.kv_pool.layout,
            tokens=tokens,
            with_raw=False,
            before_others=False,
        )
        self._ended: queue.SimpleQueue[commands.TransferOutcome] = queue.SimpleQueue()
        self._throttle: ThrottledTransport
        self._service = self._open_service()
        self._prompt_count = 0

    @property
    def bytes(self) -> int:
        """The bytes of a prompt's KV, in whole blocks."""
        layout = self.engine.kv_pool.layout
        return -(-self.tokens // layout.block_tokens) * layout.block_bytes

    def _open_service(self) -> TransferService:
        """Start the sender's service, and make the two ends known to each other."""
        pool = self.engine.kv_pool

        def open_throttled(admit: AdmitData) -> Transport:
            inner = open_transport(
                self.transport, f"{SOURCE}:0", pool, admit, host="127.0.0.1", secret=SECRET
            )
            self._throttle = ThrottledTransport(inner)
            return self._throttle

        service = TransferService(
            f"{SOURCE}:0",
            pool,
            LaneEnd(pool.layout),
            COMPATIBILITY,
            open_transport=open_throttled,
            deliver=self._ended.put,
        )
        card = service.start()
        peer = self._receiver.opened.card
        self._sink = peer.agent.rpartition(":")[0]
        service.submit(commands.AddPeer(self._sink, [peer]))
        self._receiver.connect(OpenedEnd(card))
        self._fan = Fan([card])
        self._fan.handle(commands.AddPeer(self._sink, [peer]))
        return service

    def close(self) -> None:
        """End the sender's service and the second process."""
        self._service.stop()
        self._receiver.close()

    def measure(self, bytes_s: float) -> MeasuredPrefill:
        """Compute a prompt and transfer it at up to `bytes_s` meanwhile. Raises TimeoutError."""
        self._throttle.bytes_s = bytes_s
        try:
            prefill_s = self._prefill()
            # By this process's clock, from before the transfer's thread hears of the end: the time
            # in which that thread waits for a core is exposed too.
            prefill_ended_s = time.monotonic()
            self._finish_push()
            received = self._receiver.received()
            exposed_s = time.monotonic() - prefill_ended_s
            try:
                ended = self._ended.get(timeout=WAIT_S)
            except queue.Empty:
                raise TimeoutError("the sender's end of a transfer does not come") from None
            assert isinstance(ended, commands.PushEnded) and ended.ok, ended
        finally:
            self.engine.release((self._prompt_name(), 0))
        return MeasuredPrefill(prefill_s, exposed_s, received.busy_s)

    def _prefill(self) -> float:
        """Compute a prompt that no cache knows, and send its blocks as these are filled.

        Returns the seconds to its first token.
        """
        self._prompt_count += 1
        name = self._prompt_name()
        ticket_id = self._ticket_id()
        # 7919 is a prime: the first ids differ from those of the prompts before
        prompt_ids = [(self._prompt_count * 7919 + i * 31) % 200 + 10 for i in range(self.tokens)]
        sequence = Sequence(
            (name, 0), prompt_ids, len(prompt_ids), Sampling(4), stop_after_first=True
        )

        def push_filled(filled_ranges: list[BlocksFilled]) -> None:
            for filled in filled_ranges:
                self._send(
                    commands.PushBlocks(ticket_id, filled.first_block, filled.blocks, filled.piece)
                )

        self.engine.announce_filled = push_filled
        self.engine.add(sequence)
        self._receiver.ask(ExchangeRequest(Exchange.TICKET, ticket_id))
        self._send(commands.ExpectOffer(ticket_id, self._sink, self.tokens))
        started_at = time.perf_counter()
        outputs: list[SequenceOutput] = []
        while not any(output.token for output in outputs):
            outputs = self.engine.step()
        return time.perf_counter() - started_at

    def _finish_push(self) -> None:
        """Say that all blocks of the prompt have been pushed."""
        self._send(commands.FinishPush(self._ticket_id(), b""))

    def _send(self, command: commands.TransferCommand) -> None:
        """Have the sender do a command."""
        for action in self._fan.handle(command):
            assert isinstance(action, RankCommand)
            self._service.submit(action.command)

    def _prompt_name(self) -> str:
        return f"bench{self._prompt_count}"

    def _ticket_id(self) -> str:
        return f"{self._prompt_name()}#0"


def _kv_bytes(tokens: int) -> int:
    """Return the bytes of a pool that holds the prompt several times over.

    128 KiB a token are four times what the 205M model of the benchmarks takes.
    """
    return max(64, tokens // 8) << 20


def measure_overlap(
    model: Path,
    tokens: int = 2048,
    shares: NumberSequence[float] = (0.3, 0.6, 1.0),
    *,
    threads: int = 1,
    transport: str = "auto",
) -> list[OverlapResult]:
    """Return a result without a throttle, and one for each share of the prefill's time.

    A share is what the transfer would take of the prefill's time; at 1 both take as long. `threads`
    compute the prefill, and `transport` is a name that `open_transport` takes.

    The link's rate goes by the time of the prefill before, which had a transfer beside it too. A
    result is the median of ROUNDS by its exposed part. Raises TransportUnavailable, TimeoutError.
    """
    rig = OverlapRig(model, tokens, threads=threads, transport=transport)
    try:
        prefill_s = rig.measure(bytes_s=math.inf).prefill_s
        results: list[OverlapResult] = []
        for share in (0.0, *shares):
            rounds: list[OverlapResult] = []
            for _ in range(ROUNDS):
                link_bytes_s = rig.bytes / (share * prefill_s) if share else math.inf
                measured = rig.measure(link_bytes_s)
                prefill_s = measured.prefill_s
                rounds.append(_result(measured, throttled=bool(share)))
            rounds.sort(key=lambda result: result.exposed_of_transfer)
            results.append(rounds[ROUNDS // 2])
    finally:
        rig.close()
    return results


def _result(measured: MeasuredPrefill, *, throttled: bool) -> OverlapResult:
    return OverlapResult(
        throttled=throttled,
        of_prefill=measured.busy_s / measured.prefill_s,
        prefill_s=measured.prefill_s,
        transfer_s=measured.busy_s,
        exposed_s=measured.exposed_s,
        exposed_of_transfer=measured.exposed_s / measured.busy_s,
    )
