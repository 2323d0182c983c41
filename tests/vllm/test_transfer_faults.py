"""Two vLLM engines behind Diptych's tickets, and a transfer that goes wrong.

Whatever happens, a client gets the ids of an undisturbed engine or the attempt fails by name, and
afterwards both pools are whole. vLLM's own connector gets the same cases from `peers/nixl_faults.py`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from diptych.kv_transfer import messages
from diptych.kv_transfer.slices import Lane, LaneEnd
from diptych.protos import frames

from tests.support.checkpoints import VOCAB

from .pair import DECODE, GATEWAY, PREFILL, Outcome, Pair

PROMPT_TOKENS = 300
#: The end of all prompts, as of chats: an answer depends on the KV of what is before.
COMMON_END = [11, 12, 13, 14]
SERIAL = itertools.count()


@pytest.fixture(scope="module", params=["nixl", "tcp"])
def pair(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Iterator[Pair]:
    if request.param == "nixl":
        pytest.importorskip("nixl", reason="NIXL has no wheel for this platform")
    pair = Pair(checkpoint("llama"), request.param)
    yield pair
    pair.close()


@pytest.fixture(autouse=True)
def _whole_afterwards(pair: Pair) -> Iterator[None]:
    """Every block is free afterwards, and the next prompt is served right."""
    for wire in pair.wires.values():
        wire.calm()
    yield
    for wire in pair.wires.values():
        wire.calm()
    pair.run(pair.whole())
    ids = new_prompt()
    assert pair.run(pair.ask(ids)) == pair.run(pair.alone(ids))
    pair.run(pair.whole())


def new_prompt(length: int = PROMPT_TOKENS) -> list[int]:
    """A prompt that no test had before, whose last ids are every prompt's."""
    draw = random.Random(next(SERIAL))
    return draw.choices(range(20, VOCAB), k=length - len(COMMON_END)) + COMMON_END


def new_name() -> str:
    return f"request {next(SERIAL)}"


async def retried(pair: Pair, name: str, ids: list[int]) -> None:
    """A second attempt, as the gateway makes it, gives the right answer."""
    outcome = pair.begin(name, 1, ids)
    await pair.until(lambda: bool(outcome.finished or outcome.failures))
    assert outcome.token_ids.get(0) == await pair.alone(ids), outcome


async def failed(pair: Pair, outcome: Outcome, *reasons: str) -> None:
    """The attempt fails for one of the reasons; the client has no token but prefill's first.

    The worker that notices tells first. Then the other one may tell that it was stopped.
    """
    await pair.until(lambda: bool(outcome.failures))
    assert outcome.reasons[0] in reasons, outcome
    assert not outcome.finished
    assert len(outcome.token_ids.get(0, [])) <= 1, outcome


def is_offer_of(name: str) -> Callable[[messages.AnyMessage], bool]:
    return lambda message: (
        isinstance(message, messages.OfferMessage) and message.ticket_id.startswith(f"{name}#")
    )


# ---- the reference is wrong ----------------------------------------------------------------------


def test_answers_to_different_prompts_differ(pair: Pair) -> None:
    """Else none of these tests would see another's KV."""
    answers = [tuple(pair.run(pair.alone(new_prompt()))) for _ in range(4)]
    assert len(set(answers)) == 4


def test_a_request_that_prefill_does_not_know_fails_without_a_token(pair: Pair) -> None:
    async def scenario() -> None:
        name, ids = new_name(), new_prompt()
        outcome = pair.begin(name, 0, ids, at=(DECODE,))
        await failed(pair, outcome, "kv_timeout")
        assert not outcome.token_ids
        await retried(pair, name, ids)

    pair.run(scenario())


def test_blocks_that_are_out_of_range_are_not_written(pair: Pair) -> None:
    async def scenario() -> None:
        name, ids = new_name(), new_prompt()
        is_offer = is_offer_of(name)

        def move_out(message: messages.AnyMessage) -> messages.AnyMessage:
            if not is_offer(message):
                return message
            assert isinstance(message, messages.OfferMessage)
            tiles = [tile + 100_000 for tile in message.tiles]
            return msgspec.structs.replace(message, tiles=tiles)

        memory = np.frombuffer(pair.decode.engine.kv_pool.view, np.uint8)
        before = memory.copy()
        pair.wires[DECODE].change = move_out
        outcome = pair.begin(name, 0, ids)
        # NIXL refuses to write there. TCP's receiver drops the bytes, and misses them then.
        await failed(pair, outcome, "kv_peer_lost", "kv_checksum")
        assert np.array_equal(memory, before), "something was written"
        pair.wires[DECODE].calm()
        await pair.whole()
        await retried(pair, name, ids)

    pair.run(scenario())


def test_a_reference_that_was_used_moves_nothing_a_second_time(pair: Pair) -> None:
    """The used offer comes again while its blocks are another request's."""

    async def scenario() -> None:
        name, ids = new_name(), new_prompt()
        outcome = pair.begin(name, 0, ids)
        await pair.until(lambda: bool(outcome.finished))
        decode_wire = pair.wires[DECODE]
        [used] = [note for note in decode_wire.sent if is_offer_of(name)(note[1])]
        writes = pair.wires[PREFILL].writes[used[1].ticket_id]
        assert writes
        seen: list[messages.AnyMessage] = []
        pair.wires[PREFILL].look = seen.append
        decode_wire.change = before_the_next_note(pair, used)
        other_ids = new_prompt()
        other = pair.begin(new_name(), 0, other_ids)
        await pair.until(lambda: bool(other.finished or other.failures))
        assert sum(map(is_offer_of(name), seen)) == 1, "the used offer has not come again"
        assert other.token_ids.get(0) == await pair.alone(other_ids)
        assert pair.wires[PREFILL].writes[used[1].ticket_id] == writes

    pair.run(scenario())


def test_a_key_that_was_used_gives_no_answer_a_second_time(pair: Pair) -> None:
    """The decode worker is told to take an attempt's KV again, with another prompt."""

    async def scenario() -> None:
        name, ids = new_name(), new_prompt()
        outcome = pair.begin(name, 0, ids)
        await pair.until(lambda: bool(outcome.finished))
        await pair.whole()
        pair.outcomes[name, 0] = Outcome()
        again = pair.begin(name, 0, new_prompt(), at=(DECODE,))
        await failed(pair, again, "kv_timeout")
        assert not again.token_ids

    pair.run(scenario())


def test_a_reference_to_blocks_that_hold_another_prompt_moves_nothing(pair: Pair) -> None:
    """The offer comes when prefill has given the attempt up and its blocks to others."""

    async def scenario() -> None:
        name, ids = new_name(), new_prompt()
        prefill_wire = pair.wires[PREFILL]
        prefill_wire.hold = is_offer_of(name)
        # Its end is not told either: the decode worker still waits for the KV.
        prefill_wire.drop = lambda message: isinstance(message, messages.FailedMessage)
        outcome = pair.begin(name, 0, ids)
        await pair.until(lambda: bool(prefill_wire.held) and bool(outcome.token_ids))
        pair.prefill.cancel(frames.CancelAttempt((name, 0)))
        await pair.until(lambda: not pair.prefill.attempts)
        for _ in range(pair.prefill.engine.block_count // 5 + 1):
            others = pair.begin(new_name(), 0, new_prompt())
            await pair.until(lambda others=others: bool(others.finished or others.failures))
            assert not others.failures, others
        prefill_wire.hold = None
        # As answers to queries are dropped too, the sender may seem silent before time is over.
        await failed(pair, outcome, "kv_aborted", "kv_timeout", "kv_silent")
        prefill_wire.calm()
        await pair.whole()
        await retried(pair, name, ids)

    pair.run(scenario())


# ---- it comes too late ---------------------------------------------------------------------------


def test_prefill_gives_up_blocks_that_nobody_asks_for(pair: Pair) -> None:
    """Prefill's own deadline for the offer, of 20 s, is 1 s here."""

    async def scenario() -> None:
        sender = pair.prefill.transfers._services[0]._sender
        usual = sender.timeouts
        sender.timeouts = replace(usual, offer_s=1.0)
        name, ids = new_name(), new_prompt()
        try:
            outcome = pair.begin(name, 0, ids, at=(PREFILL,))
            await failed(pair, outcome, "kv_no_offer", "no_offer")
            await pair.whole()
        finally:
            sender.timeouts = usual
        # The decode worker comes after that: it is told, and nothing is computed from.
        late = pair.begin(name, 0, ids, at=(DECODE,))
        await pair.until(lambda: len(late.failures) == 2)
        assert late.reasons[1] in ("kv_no_offer", "kv_timeout"), late
        assert not late.finished
        await pair.whole()
        await retried(pair, name, ids)

    pair.run(scenario())


def test_an_offer_behind_its_deadline_moves_nothing(pair: Pair) -> None:
    async def scenario() -> None:
        name, ids = new_name(), new_prompt()
        prefill_wire = pair.wires[PREFILL]
        prefill_wire.hold = is_offer_of(name)
        writes_before = prefill_wire.write_count
        outcome = pair.begin(name, 0, ids)
        await failed(pair, outcome, "kv_timeout")
        await pair.whole()
        prefill_wire.calm()
        await pair.until(lambda: not prefill_wire.held)
        assert prefill_wire.write_count == writes_before
        await retried(pair, name, ids)

    pair.run(scenario())


# ---- it is damaged -------------------------------------------------------------------------------


def test_one_flipped_bit_is_seen(pair: Pair) -> None:
    async def scenario() -> None:
        name, ids = new_name(), new_prompt()
        flipped: list[int] = []
        failures = pair.decode.statistics()["transfer"]["failures"].get("checksum", 0)
        pair.wires[DECODE].look = flip_in_first_chunk(pair, name, flipped)
        outcome = pair.begin(name, 0, ids)
        await failed(pair, outcome, "kv_checksum")
        assert pair.decode.statistics()["transfer"]["failures"]["checksum"] == failures + 1
        assert flipped, "nothing was damaged"
        pair.wires[DECODE].calm()
        await retried(pair, name, ids)

    pair.run(scenario())


def flip_in_first_chunk(
    pair: Pair, name: str, flipped: list[int]
) -> Callable[[messages.AnyMessage], None]:
    """Flips the lowest bit of one number of the first chunk, before the decode worker looks."""
    end = LaneEnd(pair.decode.engine.kv_pool.layout)
    lane = Lane(end, end)
    memory = np.frombuffer(pair.decode.engine.kv_pool.view, np.uint8)

    def flip(message: messages.AnyMessage) -> None:
        if flipped or not isinstance(message, messages.ChunkMessage):
            return
        if not message.ticket_id.startswith(f"{name}#"):
            return
        sent = [offer for _, offer in pair.wires[DECODE].sent if is_offer_of(name)(offer)]
        assert isinstance(sent[-1], messages.OfferMessage)
        tile = sent[-1].tiles[message.first_tile - sent[-1].first_tile]
        unit = int(lane.target.units([tile], message.piece)[0])
        flipped.append(unit * lane.unit_bytes)
        memory[flipped[0]] ^= 1

    return flip


# ---- one leaves while the other writes -----------------------------------------------------------


def test_a_client_that_leaves_in_mid_transfer_costs_no_block(pair: Pair) -> None:
    """Blocks that a write may still land on stay reserved until prefill has stopped."""
    decode_wire = pair.wires[DECODE]

    async def scenario() -> None:
        name, ids = new_name(), new_prompt()
        decode_wire.hold = is_chunk_or_end_of(name)
        pair.begin(name, 0, ids)
        await pair.until(lambda: bool(decode_wire.held))
        for core in (pair.decode, pair.prefill):
            core.cancel(frames.CancelAttempt((name, 0)))
        await pair.until(lambda: not pair.prefill.attempts)
        reserved = pair.decode.statistics()["engine"]["kv_blocks"]["reserved"]
        assert reserved >= len(ids) // 64, "freed while a write could land"
        decode_wire.calm()
        await pair.whole()

    for _ in range(20):
        pair.run(scenario())


def is_chunk_or_end_of(name: str) -> Callable[[messages.AnyMessage], bool]:
    """Whether it is a chunk, or says that the sender writes no more."""
    kinds = messages.ChunkMessage | messages.StoppedMessage | messages.FailedMessage
    return lambda message: isinstance(message, kinds) and message.ticket_id.startswith(f"{name}#")


def test_a_gateway_that_leaves_costs_no_block(pair: Pair) -> None:
    async def scenario() -> None:
        for _ in range(3):
            pair.begin(new_name(), 0, new_prompt())
        for core in (pair.decode, pair.prefill):
            core.gateway_gone(GATEWAY)
        await pair.whole()

    pair.run(scenario())


# ---- helpers -------------------------------------------------------------------------------------


def before_the_next_note(
    pair: Pair, note: tuple[str, messages.AnyMessage]
) -> Callable[[messages.AnyMessage], messages.AnyMessage]:
    """Sends a note again before the next one, on the thread that owns the transport."""
    waiting = [note]

    def pass_on(message: messages.AnyMessage) -> messages.AnyMessage:
        if waiting:
            peer, earlier = waiting.pop()
            pair.wires[DECODE].inner.notify(peer, messages.encode(earlier))
        return message

    return pass_on
