"""Probes: blocks of no meaning that travel like a prefix, event by event and over real pools."""

from __future__ import annotations

import random

import pytest
from diptych.engine.blocks import BlockPool
from diptych.engine.commands import PrefixStaged, ReleaseSequence, StagePrefix
from diptych.engine.prefixes import Prefixes, Probed
from diptych.engine.scheduler import Scheduler, SchedulerLimits
from diptych.kv_transfer import commands as transfer
from diptych.kv_transfer import tickets

KEY = ("decode/x\x1d0", 0)
STAGED = ("decode/x\x1d0\x1e", 0)
SERVED = ("decode/x\x1d0\x1e\x1f", 0)
XID = "decode/x\x1d0\x1e#0"


def asked(tokens: int = 192) -> tuple[Prefixes, transfer.OfferBlocks]:
    """A sink that waits for its probe, and what it asked for."""
    sink = Prefixes(64)
    assert sink.probe(KEY, "prefill/y", tokens) == [StagePrefix(STAGED, [], tokens // 64)]
    (receive,) = sink.handle(PrefixStaged(STAGED, [3, 4, 5]))
    return sink, receive


def test_both_ends_stage_fresh_blocks_and_drop_them_when_all_came() -> None:
    sink, receive = asked()
    assert (receive.ticket_id, receive.peer, receive.blocks) == (XID, "prefill/y", [3, 4, 5])
    assert (receive.tokens, receive.held_tokens) == (192, 0) and receive.hashes
    source = Prefixes(64)
    wanted = source.handle(tickets.PrefixRequested(XID, "decode/x", receive.hashes))
    assert wanted == [StagePrefix(SERVED, [], 3)]  # not pinned: nothing that is cached is sent
    assert source.handle(PrefixStaged(SERVED, [7, 8, 9])) == [
        transfer.ExpectOffer(XID, "decode/x", 192),
        transfer.PushBlocks(XID, 0, [7, 8, 9]),
        transfer.FinishPush(XID, b""),
    ]
    assert source.knows(SERVED) and sink.knows(STAGED)
    assert source.handle(tickets.PushEnded(XID, True)) == [ReleaseSequence(SERVED)]
    arrived = transfer.BlocksArrived(XID, b"", 192, 0.25)
    assert sink.handle(arrived) == [ReleaseSequence(STAGED), Probed(KEY, 192, 0.25)]
    assert not sink.knows(STAGED) and not source.knows(SERVED)


@pytest.mark.parametrize(("mine", "blocks"), [(64, 8), (128, 4), (512, 1)])
def test_the_holder_counts_in_its_own_blocks(mine: int, blocks: int) -> None:
    receive = asked(512)[1]
    source = Prefixes(mine)
    assert source.handle(tickets.PrefixRequested(XID, "d", receive.hashes)) == [
        StagePrefix(SERVED, [], blocks)
    ]


def test_a_prefix_that_is_asked_for_is_still_looked_up() -> None:
    source, hashes = Prefixes(64), (b"probe-like hash.", b"another")
    assert source.handle(tickets.PrefixRequested(XID, "d", hashes)) == [
        StagePrefix(SERVED, list(hashes), 0, pin_only=True)
    ]


def test_a_pool_that_is_too_full_is_an_answer() -> None:
    sink = Prefixes(64)
    sink.probe(KEY, "prefill/y", 192)
    assert sink.handle(PrefixStaged(STAGED, [])) == [
        ReleaseSequence(STAGED),
        Probed(KEY, 0, reason="pool_full"),
    ]
    source = Prefixes(64)
    source.handle(tickets.PrefixRequested(XID, "decode/x", asked()[1].hashes))
    assert transfer.CancelTransfer(XID, "not_held") in source.handle(PrefixStaged(SERVED, []))


def test_a_broken_probe_is_told_at_once_and_its_blocks_dropped_when_no_write_can_land() -> None:
    for reason, told in (("checksum", "checksum"), ("not_held", "peer_pool_full")):
        sink, _ = asked()
        assert sink.handle(tickets.TransferFailed(XID, reason)) == [Probed(KEY, 0, reason=told)]
        assert sink.knows(STAGED)
        assert sink.handle(tickets.BlocksFreed(XID)) == [ReleaseSequence(STAGED)]
        assert not sink.knows(STAGED)


def test_a_probe_that_is_forgotten_is_told_once_whatever_comes_afterwards() -> None:
    sink, _ = asked()
    cancel, probed = sink.forget(KEY, "timeout")
    assert (cancel, probed) == (
        transfer.CancelTransfer(XID, "timeout"),
        Probed(KEY, 0, reason="timeout"),
    )
    assert sink.forget(KEY) == []
    assert sink.handle(tickets.TransferFailed(XID, "timeout")) == []
    assert sink.handle(tickets.BlocksFreed(XID)) == [ReleaseSequence(STAGED)]
    assert sink.forget(KEY) == []

    landed, _ = asked()
    landed.forget(KEY, "timeout")
    assert landed.handle(transfer.BlocksArrived(XID, b"", 192)) == [ReleaseSequence(STAGED)]

    early = Prefixes(64)
    early.probe(KEY, "prefill/y", 192)
    assert early.forget(KEY, "timeout")[1] == Probed(KEY, 0, reason="timeout")
    assert early.handle(PrefixStaged(STAGED, [3, 4, 5])) == [ReleaseSequence(STAGED)], (
        "no ticket was opened"
    )


class Pools:
    """Two ends over real block pools, and a wire that loses whole outcomes at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ends = [Prefixes(64), Prefixes(64)]
        self.pools = [Scheduler(BlockPool(17), SchedulerLimits(), b"") for _ in self.ends]
        self.told: list[Probed] = []
        self.queue: list[tuple[int, object]] = []
        self.open: dict[str, bool] = {}  #: tickets of the sink: not over yet

    def act(self, end: int, actions: list) -> None:
        for action in actions:
            match action:
                case StagePrefix(key, hashes, count):
                    self.pools[end].stage(key, hashes, count)
                    blocks, _ = self.pools[end].staged.get(key, ([], []))
                    self.queue.append((end, PrefixStaged(key, list(blocks))))
                case ReleaseSequence(key):
                    self.pools[end].remove(key)
                case Probed():
                    self.told.append(action)
                case transfer.OfferBlocks(ticket_id, _, blocks):
                    assert blocks
                    self.open[ticket_id] = True
                    self.queue.append(
                        (1, tickets.PrefixRequested(ticket_id, "sink", action.hashes))
                    )
                case transfer.FinishPush(ticket_id):
                    self.queue.append((1, tickets.PushEnded(ticket_id, True)))
                    if self.open.pop(ticket_id, False):
                        self.end(ticket_id, self.random.random() < 0.7)
                case transfer.CancelTransfer(ticket_id):
                    if end == 1:
                        self.queue.append((1, tickets.PushEnded(ticket_id, False, "not_held")))
                    if self.open.pop(ticket_id, False):
                        self.end(ticket_id, False)

    def end(self, ticket_id: str, well: bool) -> None:
        outcomes = [transfer.BlocksArrived(ticket_id, b"", 192)] if well else []
        outcomes = outcomes or [
            tickets.TransferFailed(ticket_id, "checksum"),
            tickets.BlocksFreed(ticket_id),
        ]
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
