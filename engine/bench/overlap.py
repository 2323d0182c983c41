"""How much of a KV transfer hides behind the prefill that makes the KV.

The prefill is real, and so are the transfer services of both ends and TCP between them. The sender's
transport is throttled so that the transfer takes a given share of the prefill's time. What still has
to be carried after the prefill's end is exposed: a client would wait for it.
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
from ..pool import KVPool
from ..scheduler import SchedulerLimits
from ..sequence import BlocksFilled, Sequence, SequenceOutput

#: The names of the two ends; each has one rank, 0.
SOURCE = "prefill/bench"
SINK = "decode/bench"

#: Seconds to wait for the transfer's end.
WAIT_S = 60.0

#: Both ends must have the same bytes to compare.
COMPATIBILITY = b"bench"

#: Prefills for each share; the one with the median exposed part counts.
ROUNDS = 3


class OverlapResult(msgspec.Struct, frozen=True):
    """One prefill with its transfer. Times are in seconds."""

    of_prefill: float  #: The transfer's time over the prefill's.
    prefill_s: float
    transfer_s: float
    exposed_s: float  #: The part of the transfer after the prefill's end.
    exposed_of_transfer: float


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

    Unlike others' a write to a lost peer does not raise: it ends as failed.
    """

    def __init__(self, inner: Transport, bytes_s: float) -> None:
        super().__init__(inner)
        self._bytes_s = bytes_s
        self._delayed: deque[_DelayedWrite] = deque()
        self._link_free_at = 0.0
        self._handles = itertools.count()
        self._posted: dict[int, int] = {}  #: Handles of this transport, by those of `inner`.

    @property
    def moving(self) -> bool:
        return bool(self._delayed) or self.inner.moving

    def write(self, peer: str, spans: Spans, note: bytes) -> int:
        carry_s = spans.bytes / self._bytes_s
        self._link_free_at = max(self._link_free_at, time.monotonic()) + carry_s
        handle = next(self._handles)
        self._delayed.append(_DelayedWrite(handle, peer, spans, note, self._link_free_at))
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


@dataclass(slots=True)
class _Ends:
    """The services of both ends of one transfer, and the events that each end reports."""

    services: dict[str, TransferService]
    fan: Fan  #: Of the sender: hands commands to its rank.
    source_events: queue.SimpleQueue[object]
    sink_events: queue.SimpleQueue[object]

    def send(self, command: commands.TransferCommand) -> None:
        """Have the sender do a command."""
        for action in self.fan.handle(command):
            assert isinstance(action, RankCommand)
            self.services[SOURCE].submit(action.command)

    def stop(self) -> None:
        for service in self.services.values():
            service.stop()


class OverlapRig:
    """One engine that prefills, and a second pool that receives."""

    def __init__(self, model: Path, tokens: int, threads: int) -> None:
        self.tokens = tokens
        limits = SchedulerLimits(max_step_tokens=512)
        config = EngineOptions(model, kv_bytes=_kv_bytes(tokens), threads=threads, limits=limits)
        self.engine = Engine(config)
        source_pool = self.engine.kv_pool
        self.target = KVPool(source_pool.layout, source_pool.blocks, self.engine._model.dtype)
        self._prompt_count = 0

    @property
    def bytes(self) -> int:
        """The bytes of a prompt's KV, in whole blocks."""
        layout = self.engine.kv_pool.layout
        return -(-self.tokens // layout.block_tokens) * layout.block_bytes

    def measure(self, bytes_s: float) -> tuple[float, commands.BlocksArrived]:
        """Compute a prompt and transfer it at up to `bytes_s` meanwhile.

        Returns the seconds to the first token, and the event of the transfer's end with its times.
        """
        ends = self._open(bytes_s)
        try:
            prefill_s = self._prefill(ends)
            arrived = ends.sink_events.get(timeout=WAIT_S)
            assert isinstance(arrived, commands.BlocksArrived), arrived
            ends.source_events.get(timeout=WAIT_S)
        finally:
            ends.stop()
            self.engine.release((self._prompt_name(), 0))
        return prefill_s, arrived

    def _open(self, bytes_s: float) -> _Ends:
        """Start a service for each pool, and make the two known to each other."""
        source_events: queue.SimpleQueue[object] = queue.SimpleQueue()
        sink_events: queue.SimpleQueue[object] = queue.SimpleQueue()
        services: dict[str, TransferService] = {}
        cards = {}
        for name, pool, events in (
            (SOURCE, self.engine.kv_pool, source_events),
            (SINK, self.target, sink_events),
        ):
            rank_name = f"{name}:0"

            def open_throttled(
                admit: AdmitData, rank_name: str = rank_name, pool: KVPool = pool
            ) -> Transport:
                tcp = open_transport(
                    "tcp", rank_name, pool, admit, host="127.0.0.1", secret="overlap"
                )
                return ThrottledTransport(tcp, bytes_s)

            services[name] = TransferService(
                rank_name,
                pool,
                LaneEnd(pool.layout),
                COMPATIBILITY,
                open_transport=open_throttled,
                deliver=events.put,
            )
            cards[name] = services[name].start()
        services[SINK].submit(commands.AddPeer(SOURCE, [cards[SOURCE]]))
        services[SOURCE].submit(commands.AddPeer(SINK, [cards[SINK]]))
        fan = Fan([cards[SOURCE]])
        fan.handle(commands.AddPeer(SINK, [cards[SINK]]))
        return _Ends(services, fan, source_events=source_events, sink_events=sink_events)

    def _prefill(self, ends: _Ends) -> float:
        """Compute a prompt that no cache knows, and send its blocks as these are filled.

        Returns the seconds to its first token.
        """
        self._prompt_count += 1
        name = self._prompt_name()
        ticket_id = f"{name}#0"
        prompt_ids = [(self._prompt_count * 7919 + i * 31) % 200 + 10 for i in range(self.tokens)]
        sequence = Sequence(
            (name, 0), prompt_ids, len(prompt_ids), Sampling(4), stop_after_first=True
        )

        def push_filled(filled_ranges: list[BlocksFilled]) -> None:
            for filled in filled_ranges:
                ends.send(
                    commands.PushBlocks(ticket_id, filled.first_block, filled.blocks, filled.piece)
                )

        self.engine.announce_filled = push_filled
        self.engine.add(sequence)
        blocks = list(range(1, self.target.blocks))
        ends.services[SINK].submit(
            commands.OfferBlocks(ticket_id, f"{SOURCE}:0", blocks, self.tokens)
        )
        ends.send(commands.ExpectOffer(ticket_id, SINK, self.tokens))
        started_at = time.perf_counter()
        outputs: list[SequenceOutput] = []
        while not any(output.token for output in outputs):
            outputs = self.engine.step()
        prefill_s = time.perf_counter() - started_at
        ends.send(commands.FinishPush(ticket_id, b""))
        return prefill_s

    def _prompt_name(self) -> str:
        return f"bench{self._prompt_count}"


def _kv_bytes(tokens: int) -> int:
    """Return the bytes of a pool that holds the prompt several times over."""
    return max(64, tokens // 8) << 20


def measure_overlap(
    model: Path,
    tokens: int = 2048,
    shares: NumberSequence[float] = (0.3, 0.6, 1.0),
    threads: int = 1,
) -> list[OverlapResult]:
    """Return a result for each share of the prefill's time that the transfer shall take.

    The link's rate goes by the time of the prefill before, which had a transfer beside it too. A
    result is the median of ROUNDS by its exposed part.
    """
    rig = OverlapRig(model, tokens, threads)
    prefill_s, _ = rig.measure(bytes_s=math.inf)
    results: list[OverlapResult] = []
    for share in shares:
        rounds: list[OverlapResult] = []
        for _ in range(ROUNDS):
            prefill_s, arrived = rig.measure(bytes_s=rig.bytes / (share * prefill_s))
            rounds.append(
                OverlapResult(
                    of_prefill=arrived.busy_s / prefill_s,
                    prefill_s=prefill_s,
                    transfer_s=arrived.busy_s,
                    exposed_s=arrived.exposed_s,
                    exposed_of_transfer=arrived.exposed_s / arrived.busy_s,
                )
            )
        results.append(sorted(rounds, key=lambda result: result.exposed_of_transfer)[ROUNDS // 2])
    return results
