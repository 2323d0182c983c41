"""How much of a KV transfer hides behind the prefill that makes the KV.

A real prefill, the real transfer services of both ends, and between them a link that is throttled
so that the transfer takes a given share of the prefill's time.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence as Numbers
from pathlib import Path

import msgspec

from ...kv_transfer import commands as c
from ...kv_transfer.fan import Fan, RankCommand
from ...kv_transfer.service import TransferService
from ...kv_transfer.slices import LaneEnd
from ...kv_transfer.transports.fabric import Fabric, FabricLink
from ...protos.frames import Sampling
from ..engine import Engine, EngineOptions
from ..pool import KVPool
from ..scheduler import SchedulerLimits
from ..sequence import BlocksFilled, Sequence, SequenceOutput

SOURCE, SINK = "prefill/bench", "decode/bench"
WAIT_S = 60.0


class Overlap(msgspec.Struct, frozen=True):
    """One prefill. Seconds; `exposed_s` is the part of the transfer after the prefill's end."""

    of_prefill: float  #: the transfer's time over the prefill's
    prefill_s: float
    transfer_s: float
    exposed_s: float
    exposed_of_transfer: float


class Rig:
    """One engine that prefills, a second pool, and a service for each."""

    def __init__(self, model: Path, tokens: int, threads: int) -> None:
        self.tokens = tokens
        limits = SchedulerLimits(max_step_tokens=512)
        config = EngineOptions(model, kv_bytes=_kv_bytes(tokens), threads=threads, limits=limits)
        self.engine = Engine(config)
        layout = self.engine.kv_pool.layout
        self.target = KVPool(layout, self.engine.kv_pool.blocks, self.engine._model.dtype)
        self._count = 0

    @property
    def bytes(self) -> int:
        layout = self.engine.kv_pool.layout
        return -(-self.tokens // layout.block_tokens) * layout.block_bytes

    def prefill(self, push: Fan, services: dict[str, TransferService]) -> float:
        """Computes a fresh prompt, and sends it; seconds to its first token."""
        self._count += 1
        ids = [(self._count * 7919 + i * 31) % 200 + 10 for i in range(self.tokens)]
        key = (f"bench{self._count}", 0)
        ticket = f"{key[0]}#0"
        seq = Sequence(key, ids, len(ids), Sampling(4), stop_after_first=True)

        def tell(command: c.TransferCommand) -> None:
            for action in push.handle(command):
                assert isinstance(action, RankCommand)
                services[SOURCE].submit(action.command)

        def announce(filled: list[BlocksFilled]) -> None:
            for one in filled:
                tell(c.PushBlocks(ticket, one.first_block, one.blocks, one.piece))

        self.engine.announce_filled = announce
        self.engine.add(seq)
        blocks = list(range(1, self.target.blocks))
        services[SINK].submit(c.OfferBlocks(ticket, f"{SOURCE}:0", blocks, self.tokens))
        tell(c.ExpectOffer(ticket, SINK, self.tokens))
        began, outputs = time.perf_counter(), list[SequenceOutput]()
        while not any(output.token for output in outputs):
            outputs = self.engine.step()
        seconds = time.perf_counter() - began
        tell(c.FinishPush(ticket, b""))
        return seconds

    def drop(self) -> None:
        self.engine.release((f"bench{self._count}", 0))

    def over(self, link: FabricLink) -> tuple[float, c.BlocksArrived]:
        """A prefill with its transfer over `link`."""
        fabric, outcomes = Fabric(time.monotonic, 0, link), queue.SimpleQueue[object]()
        closed = queue.SimpleQueue[object]()
        services, cards = {}, {}
        ends = ((SOURCE, self.engine.kv_pool, closed), (SINK, self.target, outcomes))
        for name, pool, told in ends:
            opener = lambda admit, n=name, p=pool: fabric.open(f"{n}:0", p, admit)  # noqa: E731
            end = LaneEnd(pool.layout)
            same = b"bench"
            services[name] = TransferService(f"{name}:0", pool, end, same, opener, told.put)
            cards[name] = services[name].start()
        services[SINK].submit(c.AddPeer(SOURCE, [cards[SOURCE]]))
        services[SOURCE].submit(c.AddPeer(SINK, [cards[SINK]]))
        fan = Fan([cards[SOURCE]])
        fan.handle(c.AddPeer(SINK, [cards[SINK]]))
        try:
            seconds = self.prefill(fan, services)
            arrived = outcomes.get(timeout=WAIT_S)
            assert isinstance(arrived, c.BlocksArrived), arrived
            closed.get(timeout=WAIT_S)
        finally:
            for service in services.values():
                service.stop()
            self.drop()
        return seconds, arrived


def _kv_bytes(tokens: int) -> int:
    return max(64, tokens // 8) << 20


def measure(
    model: Path, tokens: int = 2048, shares: Numbers[float] = (0.3, 0.6, 1.0), threads: int = 1
) -> list[Overlap]:
    """One row for each share of the prefill's time that the transfer shall take.

    The link goes by the time of the prefill before, which had a transfer beside it too; a row is
    the median of three by its exposed part.
    """
    rig = Rig(model, tokens, threads)
    seconds, _ = rig.over(FabricLink())
    rows = []
    for share in shares:
        rounds = []
        for _ in range(3):
            link = FabricLink(bytes_s=rig.bytes / (share * seconds))
            seconds, arrived = rig.over(link)
            part = arrived.exposed_s / arrived.busy_s
            of_prefill = arrived.busy_s / seconds
            rounds.append(Overlap(of_prefill, seconds, arrived.busy_s, arrived.exposed_s, part))
        rows.append(sorted(rounds, key=lambda row: row.exposed_of_transfer)[1])
    return rows
