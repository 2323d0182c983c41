"""Probes: blocks of no meaning that travel like a prefix, event by event and over real pools."""

from __future__ import annotations

import random

import pytest
from diptych.engine.blocks import BlockPool
from diptych.engine.commands import Drop, Stage, Staged
from diptych.engine.prefixes import Prefixes, Probed
from diptych.engine.scheduler import Limits, Scheduler
from diptych.kv_transfer import commands as transfer
from diptych.kv_transfer import tickets

KEY = ("decode/x\x1d0", 0)
STAGED = ("decode/x\x1d0\x1e", 0)
SERVED = ("decode/x\x1d0\x1e\x1f", 0)
XID = "decode/x\x1d0\x1e#0"


def asked(tokens: int = 192) -> tuple[Prefixes, transfer.Receive]:
    """A sink that waits for its probe, and what it asked for."""
    sink = Prefixes(64)
    assert sink.probe(KEY, "prefill/y", tokens) == [Stage(STAGED, [], tokens // 64)]
    (receive,) = sink.handle(Staged(STAGED, [3, 4, 5]))
    return sink, receive


def test_both_ends_stage_fresh_blocks_and_drop_them_when_all_came() -> None:
    sink, receive = asked()
    assert (receive.xid, receive.peer, receive.blocks) == (XID, "prefill/y", [3, 4, 5])
    assert (receive.tokens, receive.held) == (192, 0) and receive.hashes
    source = Prefixes(64)
    wanted = source.handle(tickets.Wanted(XID, "decode/x", receive.hashes))
    assert wanted == [Stage(SERVED, [], 3)]  # not pinned: nothing that is cached is sent
    assert source.handle(Staged(SERVED, [7, 8, 9])) == [
        transfer.Expect(XID, "decode/x", 192),
        transfer.Push(XID, 0, [7, 8, 9]),
        transfer.Finish(XID, b""),
    ]
    assert source.knows(SERVED) and sink.knows(STAGED)
    assert source.handle(tickets.Closed(XID, True)) == [Drop(SERVED)]
    arrived = transfer.Arrived(XID, b"", 192, 0.25)
    assert sink.handle(arrived) == [Drop(STAGED), Probed(KEY, 192, 0.25)]
    assert not sink.knows(STAGED) and not source.knows(SERVED)


@pytest.mark.parametrize(("mine", "blocks"), [(64, 8), (128, 4), (512, 1)])
def test_the_holder_counts_in_its_own_blocks(mine: int, blocks: int) -> None:
    receive = asked(512)[1]
    source = Prefixes(mine)
    assert source.handle(tickets.Wanted(XID, "d", receive.hashes)) == [Stage(SERVED, [], blocks)]


def test_a_prefix_that_is_asked_for_is_still_looked_up() -> None:
    source, hashes = Prefixes(64), (b"probe-like hash.", b"another")
    assert source.handle(tickets.Wanted(XID, "d", hashes)) == [
        Stage(SERVED, list(hashes), 0, pin=True)
    ]


def test_a_pool_that_is_too_full_is_an_answer() -> None:
    sink = Prefixes(64)
    sink.probe(KEY, "prefill/y", 192)
    assert sink.handle(Staged(STAGED, [])) == [Drop(STAGED), Probed(KEY, 0, reason="pool_full")]
    source = Prefixes(64)
    source.handle(tickets.Wanted(XID, "decode/x", asked()[1].hashes))
    assert transfer.Cancel(XID, "not_held") in source.handle(Staged(SERVED, []))


def test_a_broken_probe_is_told_at_once_and_its_blocks_dropped_when_no_write_can_land() -> None:
    for reason, told in (("checksum", "checksum"), ("not_held", "peer_pool_full")):
        sink, _ = asked()
        assert sink.handle(tickets.Broken(XID, reason)) == [Probed(KEY, 0, reason=told)]
        assert sink.knows(STAGED)
        assert sink.handle(tickets.Freed(XID)) == [Drop(STAGED)]
        assert not sink.knows(STAGED)


def test_a_probe_that_is_forgotten_is_told_once_whatever_comes_afterwards() -> None:
    sink, _ = asked()
    cancel, probed = sink.forget(KEY, "timeout")
    assert (cancel, probed) == (transfer.Cancel(XID, "timeout"), Probed(KEY, 0, reason="timeout"))
    assert sink.forget(KEY) == []
    assert sink.handle(tickets.Broken(XID, "timeout")) == []
    assert sink.handle(tickets.Freed(XID)) == [Drop(STAGED)]
    assert sink.forget(KEY) == []

    landed, _ = asked()
    landed.forget(KEY, "timeout")
    assert landed.handle(transfer.Arrived(XID, b"", 192)) == [Drop(STAGED)]

    early = Prefixes(64)
    early.probe(KEY, "prefill/y", 192)
    assert early.forget(KEY, "timeout")[1] == Probed(KEY, 0, reason="timeout")
    assert early.handle(Staged(STAGED, [3, 4, 5])) == [Drop(STAGED)], "no ticket was opened"


class Pools:
    """Two ends over real block pools, and a wire that loses whole outcomes at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ends = [Prefixes(64), Prefixes(64)]
        self.pools = [Scheduler(BlockPool(17), Limits(), b"") for _ in self.ends]
        self.told: list[Probed] = []
        self.queue: list[tuple[int, object]] = []
        self.open: dict[str, bool] = {}  #: tickets of the sink: not over yet

    def act(self, end: int, actions: list) -> None:
        for action in actions:
            match action:
                case Stage(key, hashes, count):
                    self.pools[end].stage(key, hashes, count)
                    blocks, _ = self.pools[end].staged.get(key, ([], []))
                    self.queue.append((end, Staged(key, list(blocks))))
                case Drop(key):
                    self.pools[end].remove(key)
                case Probed():
                    self.told.append(action)
                case transfer.Receive(xid, _, blocks):
                    assert blocks
                    self.open[xid] = True
                    self.queue.append((1, tickets.Wanted(xid, "sink", action.hashes)))
                case transfer.Finish(xid):
                    self.queue.append((1, tickets.Closed(xid, True)))
                    if self.open.pop(xid, False):
                        self.end(xid, self.random.random() < 0.7)
                case transfer.Cancel(xid):
                    if end == 1:
                        self.queue.append((1, tickets.Closed(xid, False, "not_held")))
                    if self.open.pop(xid, False):
                        self.end(xid, False)

    def end(self, xid: str, well: bool) -> None:
        outcomes = [transfer.Arrived(xid, b"", 192)] if well else []
        outcomes = outcomes or [tickets.Broken(xid, "checksum"), tickets.Freed(xid)]
        self.queue += [(0, outcome) for outcome in outcomes]


@pytest.mark.parametrize("seed", range(30))
def test_both_pools_are_whole_after_probes_that_break_and_are_aborted(seed: int) -> None:
    world = Pools(seed)
    keys = [(f"d\x1d{index}", 0) for index in range(12)]
    waiting = list(keys)
    while waiting or world.queue:
        if waiting and world.random.random() < 0.3:
            world.act(0, world.ends[0].probe(waiting.pop(), "source", 192))
        elif world.queue:
            ends = sorted({end for end, _ in world.queue})
            turn = world.random.choice(ends)  # what one end is told keeps its order
            first = next(i for i, (end, _) in enumerate(world.queue) if end == turn)
            world.act(turn, world.ends[turn].handle(world.queue.pop(first)[1]))
        if world.random.random() < 0.2:
            world.act(0, world.ends[0].forget(world.random.choice(keys), "timeout"))
    assert sorted(one.key for one in world.told) == sorted(keys)
    for scheduler, prefixes in zip(world.pools, world.ends, strict=True):
        scheduler.pool.validate()
        assert (scheduler.pool.available, scheduler.pool.cached, scheduler.staged) == (16, 0, {})
        assert not prefixes.probing and not prefixes.serving and not prefixes.coming
