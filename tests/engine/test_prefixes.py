"""Probes: blocks of no meaning that travel like a prefix, event by event and over real pools."""

from __future__ import annotations

import random

import pytest
from diptych.engine.blocks import BlockPool
from diptych.engine.commands import (
    AddSequence,
    BlocksLoaded,
    CachePrefix,
    LoadBlocks,
    PrefixStaged,
    ReleaseSequence,
    StagePrefix,
)
from diptych.engine.prefixes import PrefixExchange, ProbeEnded
from diptych.engine.scheduler import Scheduler, SchedulerLimits
from diptych.engine.sequence import Sequence
from diptych.kv_transfer import commands as transfer
from diptych.kv_transfer import tickets
from diptych.protos.frames import Sampling

KEY = ("decode/x\x1d0", 0)
STAGED = ("decode/x\x1d0\x1e", 0)
SERVED = ("decode/x\x1d0\x1e\x1f", 0)
TICKET_ID = "decode/x\x1d0\x1e#0"


def offered_probe(tokens: int = 192) -> tuple[PrefixExchange, transfer.OfferBlocks]:
    """A receiver that waits for its probe, and what it asked for."""
    receiver = PrefixExchange(64)
    assert receiver.begin_probe(KEY, "prefill/y", tokens) == [StagePrefix(STAGED, [], tokens // 64)]
    (offer,) = receiver.handle(PrefixStaged(STAGED, [3, 4, 5]))
    return receiver, offer


def test_both_ends_stage_fresh_blocks_and_drop_them_when_all_came() -> None:
    receiver, offer = offered_probe()
    assert (offer.ticket_id, offer.peer, offer.blocks) == (TICKET_ID, "prefill/y", [3, 4, 5])
    assert (offer.tokens, offer.held_tokens) == (192, 0) and offer.hashes
    sender = PrefixExchange(64)
    staged = sender.handle(tickets.PrefixRequested(TICKET_ID, "decode/x", offer.hashes))
    assert staged == [StagePrefix(SERVED, [], 3)]  # not pinned: nothing that is cached is sent
    assert sender.handle(PrefixStaged(SERVED, [7, 8, 9])) == [
        transfer.ExpectOffer(TICKET_ID, "decode/x", 192),
        transfer.PushBlocks(TICKET_ID, 0, [7, 8, 9]),
        transfer.FinishPush(TICKET_ID, b""),
    ]
    assert sender.has_staged(SERVED) and receiver.has_staged(STAGED)
    assert sender.handle(tickets.PushEnded(TICKET_ID, True)) == [ReleaseSequence(SERVED)]
    arrived = transfer.BlocksArrived(TICKET_ID, b"", 192, 0.25)
    assert receiver.handle(arrived) == [ReleaseSequence(STAGED), ProbeEnded(KEY, 192, 0.25)]
    assert not receiver.has_staged(STAGED) and not sender.has_staged(SERVED)


@pytest.mark.parametrize(("block_tokens", "blocks"), [(64, 8), (128, 4), (512, 1)])
def test_the_holder_counts_in_its_own_blocks(block_tokens: int, blocks: int) -> None:
    offer = offered_probe(512)[1]
    sender = PrefixExchange(block_tokens)
    assert sender.handle(tickets.PrefixRequested(TICKET_ID, "d", offer.hashes)) == [
        StagePrefix(SERVED, [], blocks)
    ]


def test_a_prefix_that_is_asked_for_is_still_looked_up() -> None:
    sender, hashes = PrefixExchange(64), (b"probe-like hash.", b"another")
    assert sender.handle(tickets.PrefixRequested(TICKET_ID, "d", hashes)) == [
        StagePrefix(SERVED, list(hashes), 0, pin_only=True)
    ]


def test_a_pool_that_is_too_full_is_an_answer() -> None:
    receiver = PrefixExchange(64)
    receiver.begin_probe(KEY, "prefill/y", 192)
    assert receiver.handle(PrefixStaged(STAGED, [])) == [
        ReleaseSequence(STAGED),
        ProbeEnded(KEY, 0, reason="pool_full"),
    ]
    sender = PrefixExchange(64)
    sender.handle(tickets.PrefixRequested(TICKET_ID, "decode/x", offered_probe()[1].hashes))
    assert transfer.CancelTransfer(TICKET_ID, "not_held") in sender.handle(PrefixStaged(SERVED, []))


def test_a_broken_probe_is_reported_at_once_and_its_blocks_released_when_no_write_can_land() -> (
    None
):
    for reason, reported in (("checksum", "checksum"), ("not_held", "peer_pool_full")):
        receiver, _ = offered_probe()
        assert receiver.handle(tickets.TransferFailed(TICKET_ID, reason)) == [
            ProbeEnded(KEY, 0, reason=reported)
        ]
        assert receiver.has_staged(STAGED)
        assert receiver.handle(tickets.BlocksFreed(TICKET_ID)) == [ReleaseSequence(STAGED)]
        assert not receiver.has_staged(STAGED)


def test_a_probe_that_is_cancelled_is_reported_once_whatever_comes_afterwards() -> None:
    receiver, _ = offered_probe()
    cancel, probed = receiver.cancel(KEY, "timeout")
    assert (cancel, probed) == (
        transfer.CancelTransfer(TICKET_ID, "timeout"),
        ProbeEnded(KEY, 0, reason="timeout"),
    )
    assert receiver.cancel(KEY) == []
    assert receiver.handle(tickets.TransferFailed(TICKET_ID, "timeout")) == []
    assert receiver.handle(tickets.BlocksFreed(TICKET_ID)) == [ReleaseSequence(STAGED)]
    assert receiver.cancel(KEY) == []

    arrived_late, _ = offered_probe()
    arrived_late.cancel(KEY, "timeout")
    assert arrived_late.handle(transfer.BlocksArrived(TICKET_ID, b"", 192)) == [
        ReleaseSequence(STAGED)
    ]

    early = PrefixExchange(64)
    early.begin_probe(KEY, "prefill/y", 192)
    assert early.cancel(KEY, "timeout")[1] == ProbeEnded(KEY, 0, reason="timeout")
    assert early.handle(PrefixStaged(STAGED, [3, 4, 5])) == [ReleaseSequence(STAGED)], (
        "no ticket was opened"
    )


FETCHED = ("prompt", 0)
FETCH = ("prompt\x1e", 0)
FETCH_TICKET_ID = "prompt\x1e#0"
HASHES = [bytes([index]) * 16 for index in range(10)]


def staged_fetch(peer: str | None) -> tuple[PrefixExchange, StagePrefix, Sequence]:
    """A worker whose prompt has a prefix of ten blocks, and what it asked its engine for."""
    prefixes = PrefixExchange(64, has_tiers=True)
    prompt = Sequence(FETCHED, [7] * 641, 641, Sampling(1), HASHES)
    (stage,) = prefixes.begin_sequence(prompt, peer)
    assert stage == StagePrefix(FETCH, HASHES, 10 if peer else 0, token_ids=(7,) * 640)
    return prefixes, stage, prompt


def loaded_fetch() -> tuple[PrefixExchange, Sequence]:
    """A fetch of which the pool held one block and the tiers brought eight; the peer is asked."""
    prefixes, stage, prompt = staged_fetch("prefill/y")
    blocks = list(range(1, 11))
    staged = PrefixStaged(FETCH, blocks, held_blocks=1, tier_blocks=8)
    assert prefixes.handle(staged) == [LoadBlocks(FETCH, 1, HASHES[1:9], blocks[1:9])]
    assert prefixes.handle(BlocksLoaded(FETCH, 9)) == [CachePrefix(FETCH, 9), stage]
    assert prefixes.handle(PrefixStaged(FETCH, blocks, held_blocks=9)) == [
        transfer.OfferBlocks(
            FETCH_TICKET_ID,
            "prefill/y",
            blocks,
            tokens=640,
            held_tokens=576,
            hashes=tuple(HASHES),
        )
    ]
    return prefixes, prompt


def test_a_peer_is_asked_only_for_what_the_own_tiers_have_not() -> None:
    prefixes, prompt = loaded_fetch()
    arrived = transfer.BlocksArrived(FETCH_TICKET_ID, b"", 640)
    assert prefixes.handle(arrived) == [CachePrefix(FETCH, 10), AddSequence(prompt)]
    assert not prefixes.has_staged(FETCH)


def test_what_the_tiers_brought_stays_cached_when_the_peer_fails() -> None:
    prefixes, prompt = loaded_fetch()  # it has cached the nine already
    failed = tickets.TransferFailed(FETCH_TICKET_ID, "not_held")
    assert prefixes.handle(failed) == [AddSequence(prompt)]
    assert prefixes.handle(tickets.BlocksFreed(FETCH_TICKET_ID)) == [ReleaseSequence(FETCH)]


def test_the_tiers_are_asked_once_and_the_peer_for_what_they_failed_to_load() -> None:
    prefixes, stage, _ = staged_fetch("prefill/y")
    blocks = list(range(1, 11))
    staged = PrefixStaged(FETCH, blocks, held_blocks=0, tier_blocks=10)
    prefixes.handle(staged)
    assert prefixes.handle(BlocksLoaded(FETCH, 0)) == [CachePrefix(FETCH, 0), stage]
    (offer,) = prefixes.handle(staged)  # the tiers say that they hold it still
    assert isinstance(offer, transfer.OfferBlocks)


def test_a_fetch_ends_with_the_tiers_if_they_brought_all_or_nobody_waits() -> None:
    prefixes, _, prompt = staged_fetch("prefill/y")
    prefixes.handle(PrefixStaged(FETCH, list(range(1, 11)), tier_blocks=10))
    assert prefixes.handle(BlocksLoaded(FETCH, 10)) == [
        CachePrefix(FETCH, 10),
        AddSequence(prompt),
    ]
    prefixes, _, prompt = staged_fetch(None)
    prefixes.handle(PrefixStaged(FETCH, [1, 2], tier_blocks=2))
    assert prefixes.handle(BlocksLoaded(FETCH, 1)) == [CachePrefix(FETCH, 1), AddSequence(prompt)]
    prefixes, _, _ = staged_fetch("prefill/y")
    prefixes.handle(PrefixStaged(FETCH, list(range(1, 11)), tier_blocks=8))
    prefixes.cancel(FETCHED)
    assert prefixes.handle(BlocksLoaded(FETCH, 8)) == [CachePrefix(FETCH, 8)]


class Pools:
    """Two ends over real block pools, and a wire that loses whole outcomes at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ends = [PrefixExchange(64), PrefixExchange(64)]
        self.pools = [Scheduler(BlockPool(17), SchedulerLimits(), b"") for _ in self.ends]
        self.ended_probes: list[ProbeEnded] = []
        self.queue: list[tuple[int, object]] = []
        self.open: dict[str, bool] = {}  #: tickets of the receiver: not over yet

    def act(self, end: int, actions: list) -> None:
        for action in actions:
            match action:
                case StagePrefix(key, hashes, count):
                    self.pools[end].stage(key, hashes, count)
                    blocks, _ = self.pools[end].staged.get(key, ([], []))
                    self.queue.append((end, PrefixStaged(key, list(blocks))))
                case ReleaseSequence(key):
                    self.pools[end].remove(key)
                case ProbeEnded():
                    self.ended_probes.append(action)
                case transfer.OfferBlocks(ticket_id, _, blocks):
                    assert blocks
                    self.open[ticket_id] = True
                    self.queue.append(
                        (1, tickets.PrefixRequested(ticket_id, "receiver", action.hashes))
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
            world.act(0, world.ends[0].begin_probe(waiting.pop(), "sender", 192))
        elif world.queue:
            ends = sorted({end for end, _ in world.queue})
            turn = world.random.choice(ends)  # the events of one end keep their order
            first = next(i for i, (end, _) in enumerate(world.queue) if end == turn)
            world.act(turn, world.ends[turn].handle(world.queue.pop(first)[1]))
        if world.random.random() < 0.2:
            world.act(0, world.ends[0].cancel(world.random.choice(keys), "timeout"))
    assert sorted(probe.attempt_key for probe in world.ended_probes) == sorted(keys)
    for scheduler, prefixes in zip(world.pools, world.ends, strict=True):
        scheduler.pool.validate()
        assert (
            scheduler.pool.available_blocks,
            scheduler.pool.cached_blocks,
            scheduler.staged,
        ) == (16, 0, {})
        assert not prefixes.probes and not prefixes.served and not prefixes.fetches


# ---- serving what tiers hold ---------------------------------------------------------------------

PREFIX_SERVED = ("prompt\x1e\x1f", 0)


def asked_for_a_prefix() -> PrefixExchange:
    """A worker with tiers that a peer asks for a prefix of ten blocks."""
    prefixes = PrefixExchange(64, has_tiers=True)
    request = tickets.PrefixRequested(FETCH_TICKET_ID, "peer", tuple(HASHES))
    assert prefixes.handle(request) == [StagePrefix(PREFIX_SERVED, HASHES)]
    assert prefixes.has_staged(PREFIX_SERVED)
    return prefixes


def pushed(prefixes: PrefixExchange, blocks: list[int]) -> list:
    """What is done once the pool has pinned what it holds."""
    assert prefixes.handle(PrefixStaged(PREFIX_SERVED, blocks, held_blocks=len(blocks))) == [
        transfer.ExpectOffer(FETCH_TICKET_ID, "peer", len(blocks) * 64),
        transfer.PushBlocks(FETCH_TICKET_ID, 0, blocks),
        transfer.FinishPush(FETCH_TICKET_ID, b""),
    ]
    assert prefixes.handle(tickets.PushEnded(FETCH_TICKET_ID, True)) == [
        ReleaseSequence(PREFIX_SERVED)
    ]
    return blocks


def test_what_the_tiers_hold_is_loaded_before_it_is_served() -> None:
    prefixes = asked_for_a_prefix()
    blocks = list(range(1, 9))
    assert prefixes.handle(PrefixStaged(PREFIX_SERVED, blocks, held_blocks=3, tier_blocks=5)) == [
        LoadBlocks(PREFIX_SERVED, 3, HASHES[3:8], blocks[3:])
    ]
    assert prefixes.handle(BlocksLoaded(PREFIX_SERVED, 7)) == [
        CachePrefix(PREFIX_SERVED, 7),
        StagePrefix(PREFIX_SERVED, HASHES, pin_only=True),
    ]
    pushed(prefixes, blocks[:7])
    assert not prefixes.served


@pytest.mark.parametrize("tier_blocks", [0, 4])
def test_without_tier_blocks_or_room_for_them_the_pools_part_is_served(tier_blocks: int) -> None:
    prefixes = asked_for_a_prefix()
    staged = PrefixStaged(PREFIX_SERVED, [], held_blocks=3, tier_blocks=tier_blocks)
    assert prefixes.handle(staged) == [StagePrefix(PREFIX_SERVED, HASHES, pin_only=True)]
    pushed(prefixes, [4, 5, 6])


def test_a_push_that_ends_while_the_tiers_load_releases_its_blocks_behind_the_load() -> None:
    prefixes = asked_for_a_prefix()
    prefixes.handle(PrefixStaged(PREFIX_SERVED, list(range(1, 9)), held_blocks=3, tier_blocks=5))
    assert prefixes.handle(tickets.PushEnded(FETCH_TICKET_ID, False, "peer_gone")) == []
    assert prefixes.handle(BlocksLoaded(PREFIX_SERVED, 7)) == [CachePrefix(PREFIX_SERVED, 7)]
    assert not prefixes.served


def test_a_push_that_ends_before_its_blocks_are_staged_leaves_nothing() -> None:
    prefixes = asked_for_a_prefix()
    ended = prefixes.handle(tickets.PushEnded(FETCH_TICKET_ID, False, "peer_gone"))
    assert ended == [ReleaseSequence(PREFIX_SERVED)]
    assert prefixes.handle(PrefixStaged(PREFIX_SERVED, [1, 2])) == [] and not prefixes.served
