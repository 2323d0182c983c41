"""The suite that every `EngineLike` passes: give it an opener, and it opens engines and checks them.

    for check in CHECKS:
        check(EngineKit(open_engine, vocabulary=512))

A check sees an engine as a worker does: by the protocol, in one thread, without the engine's
scheduler or pool. A broken contract raises `AssertionError`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from diptych.engine.commands import BlocksReserved, StagePrefix
from diptych.engine.engine_like import EngineLike
from diptych.engine.options import SchedulerLimits
from diptych.engine.sequence import BlocksFilled, Sequence, SequenceOutput
from diptych.engine.vllm.self_test import LIKELIEST_IDS, find_difference
from diptych.kv_transfer.identity import block_hashes
from diptych.kv_transfer.slices import ALL_PIECES, Lane, LaneEnd
from diptych.protos.frames import AttemptKey, Grammar, Sampling, Token

#: Opens an engine whose pool has so many usable blocks; all that it opens have the same weights.
OpenWithBlocks = Callable[[SchedulerLimits, int], EngineLike]

STEP_LIMIT = 2000
POOL_BLOCKS = 24
PROMPT_TOKENS = 200  #: Three full blocks and a part, with blocks of 64 tokens.
ANSWER_TOKENS = 8
GREEDY = Sampling(ANSWER_TOKENS, logprobs=LIKELIEST_IDS)
SEEDED = Sampling(ANSWER_TOKENS, temperature=0.9, seed=11, logprobs=LIKELIEST_IDS)
BLOCK_STATES = ("free", "active", "cached", "reserved", "staged", "demoting")
STATISTICS = (
    "running",
    "prefilling",
    "waiting",
    "ready",
    "step_tokens",
    "request_preemptions",
    "step_s",
    "prefill_tokens",
    "preemptions",
    "drafted",
    "accepted",
    "kv_blocks",
)


@dataclass
class EngineKit:
    """Opens engines for one check, and makes what they are asked."""

    open_with_blocks: OpenWithBlocks
    vocabulary: int
    limits: SchedulerLimits = field(
        default_factory=lambda: SchedulerLimits(max_step_tokens=128, growth_tokens=64)
    )

    def open(self, blocks: int = POOL_BLOCKS) -> EngineLike:
        return self.open_with_blocks(self.limits, blocks)

    @property
    def block_tokens(self) -> int:
        return self.limits.block_tokens

    def blocks_for(self, sequence: Sequence) -> int:
        """How many blocks the sequence's ids fill, the last one perhaps in part."""
        return -(-len(sequence.token_ids) // self.block_tokens)

    def prompt(self, length: int = PROMPT_TOKENS, seed: int = 0) -> list[int]:
        """Random ids that are not special; those of one seed are prefixes of each other."""
        return random.Random(seed).choices(range(5, self.vocabulary), k=length)

    def sequence(
        self,
        name: str,
        sampling: Sampling = GREEDY,
        *,
        length: int = PROMPT_TOKENS,
        seed: int = 0,
        stop_after_first: bool = False,
    ) -> Sequence:
        """A sequence as a worker makes it of a gateway's frame."""
        token_ids = self.prompt(length, seed)
        hashes = block_hashes(token_ids, b"", self.block_tokens)
        return Sequence(
            (name, 0),
            token_ids,
            length,
            sampling,
            block_hashes=hashes,
            stop_after_first=stop_after_first,
        )


# ---- helpers -------------------------------------------------------------------------------------


def run(engine: EngineLike, after_step: Callable[[], None] = lambda: None) -> list[SequenceOutput]:
    """Steps until the engine has nothing to do before a command; returns all outputs."""
    outputs: list[SequenceOutput] = []
    for _ in range(STEP_LIMIT):
        step_outputs = engine.step()
        after_step()
        outputs += step_outputs
        assert not any(isinstance(event, BlocksReserved) for event in step_outputs), step_outputs
        if not step_outputs and engine.idle():
            return outputs
    raise AssertionError(f"the engine is not idle after {STEP_LIMIT} steps")


def reserve(engine: EngineLike, sequence: Sequence) -> list[int] | None:
    """Has blocks reserved, and waits for the answer, which may come with one of the next steps.

    Nothing else is computed meanwhile.
    """
    answer = engine.reserve(sequence)
    for _ in range(STEP_LIMIT):
        if answer is not None:
            assert answer.attempt_key == sequence.attempt_key
            assert answer.held_blocks == sequence.published_blocks
            return answer.blocks
        for event in engine.step():
            assert isinstance(event, BlocksReserved), event
            answer = event
    raise AssertionError(f"no answer to a reservation after {STEP_LIMIT} steps")


def answer(outputs: list[SequenceOutput], name: str, index: int = 0) -> list[int]:
    """The ids of one answer, as `answer_tokens` checks them."""
    return [token.id for token in answer_tokens(outputs, name, index)]


def answer_tokens(outputs: list[SequenceOutput], name: str, index: int = 0) -> list[Token]:
    """One answer. No token may be lost, nor come twice, nor come after the end."""
    tokens: list[Token] = []
    ended = False
    for output in outputs:
        if output.attempt_key[0] != name or output.answer_index != index or not output.token:
            continue
        assert not ended, f"{name} has a token after its end"
        assert output.error is None, output
        assert output.offset == len(tokens), f"a token of {name} is lost, or comes twice"
        tokens.append(output.token)
        ended = output.finish_reason is not None
    return tokens


def assert_same_answer(engine: EngineLike, found: list[Token], expected: list[Token]) -> None:
    """Fails unless the answer is the right one: bit by bit if the engine promises that, else up
    to what another batch rounds otherwise.
    """
    if engine.exact:
        assert found == expected
    difference = find_difference(expected, found)
    assert difference is None, difference


def blocks_by_attempt(engine: EngineLike) -> dict[AttemptKey, int]:
    counts: dict[AttemptKey, int] = {}
    for attempt_key, block_count in engine.block_holders():
        counts[attempt_key] = counts.get(attempt_key, 0) + block_count
    return counts


def assert_nothing_is_held(engine: EngineLike) -> None:
    """Fails if blocks are in use once the engine has done what it was told."""
    run(engine)
    blocks = engine.statistics()["kv_blocks"]
    assert blocks["free"] + blocks["cached"] == blocks["total"], blocks
    assert not any(blocks_by_attempt(engine).values())


def copy_blocks(
    source: EngineLike, source_blocks: list[int], target: EngineLike, target_blocks: list[int]
) -> None:
    """Does what a transfer does: the blocks' bytes in one pool become those in the other."""
    lane = Lane(LaneEnd(source.kv_pool.layout), LaneEnd(target.kv_pool.layout))
    count = min(len(source_blocks), len(target_blocks))
    spans = lane.spans(source_blocks[:count], target_blocks[:count], ALL_PIECES)
    size = spans.unit_bytes
    units = zip(spans.source_units.tolist(), spans.target_units.tolist(), strict=True)
    for source_unit, target_unit in units:
        content = source.kv_pool.view[source_unit * size : (source_unit + 1) * size]
        target.kv_pool.view[target_unit * size : (target_unit + 1) * size] = content


def prefill_elsewhere(
    kit: EngineKit, sequence: Sequence
) -> tuple[EngineLike, list[int], list[int]]:
    """Computes the sequence's prompt on an engine of its own.

    Returns that engine, the prompt's blocks in it, and the first id of each answer.
    """
    engine = kit.open()
    announced: dict[int, int] = {}

    def record(filled_ranges: list[BlocksFilled]) -> None:
        for filled in filled_ranges:
            announced.update(enumerate(filled.blocks, filled.first_block))

    engine.announce_filled = record
    length = sequence.prompt_tokens
    prefill = Sequence(
        sequence.attempt_key,
        list(sequence.token_ids),
        length,
        sequence.sampling,
        block_hashes=list(sequence.block_hashes),
        stop_after_first=True,
    )
    engine.add(prefill)
    outputs = run(engine)
    first_ids = [
        answer(outputs, sequence.attempt_key[0], index)[0] for index in range(sequence.sampling.n)
    ]
    assert sorted(announced) == list(range(-(-length // kit.block_tokens))), "a block is missing"
    return engine, [announced[index] for index in sorted(announced)], first_ids


# ---- what an engine is ---------------------------------------------------------------------------


def what_peers_and_the_router_ask_is_there(kit: EngineKit) -> None:
    engine = kit.open()
    assert engine.limits == kit.limits
    assert engine.block_count == POOL_BLOCKS
    assert 0 <= engine.growth_reserve_blocks < engine.block_count
    assert 0 < engine.max_model_len <= engine.block_count * kit.block_tokens
    assert engine.piece_count >= 1
    assert isinstance(engine.exact, bool)
    assert len(set(engine.cores)) == len(engine.cores)
    assert engine.cores or engine.core_sharing is None, "it lends cores that are not its own"
    assert len(engine.rank_sockets) == len(set(engine.rank_sockets))
    pool = engine.kv_pool
    assert pool.layout.block_tokens == kit.block_tokens
    assert pool.block_bytes == pool.layout.block_bytes
    assert pool.size >= engine.block_count * pool.block_bytes
    assert pool.memory in ("DRAM", "VRAM") and pool.base
    assert bool(pool.digester) or pool.memory == "DRAM", "the CPU cannot check what is in a GPU"
    assert len(pool.view) in (0, pool.size)


def engines_of_one_model_are_compatible(kit: EngineKit) -> None:
    first = kit.open()
    second = kit.open(POOL_BLOCKS + 1)
    assert first.compatibility and first.compatibility == second.compatibility
    assert first.format_facts["engine"] and first.format_facts == second.format_facts


def statistics_have_what_the_metrics_read(kit: EngineKit) -> None:
    engine = kit.open()
    engine.add(kit.sequence("a"))
    for _ in range(3):
        engine.step()
        statistics = engine.statistics()
        assert set(STATISTICS) <= statistics.keys()
        assert {"prefill", "decode"} <= statistics["step_s"].keys()
        blocks = statistics["kv_blocks"]
        assert sum(blocks[state] for state in BLOCK_STATES) == blocks["total"], blocks
        assert blocks["total"] == engine.block_count
    run(engine)


def a_closed_engine_has_no_ranks(kit: EngineKit) -> None:
    engine = kit.open()
    engine.add(kit.sequence("a"))
    run(engine)
    engine.close()
    for control in engine.rank_sockets:
        control.setblocking(True)
        assert control.recv(1) == b"", "a rank's process goes on"


# ---- sequences -----------------------------------------------------------------------------------


def a_sequence_is_answered_to_its_end(kit: EngineKit) -> None:
    engine = kit.open()
    assert engine.step() == [] and engine.idle(), "there is nothing to do yet"
    for sampling in (GREEDY, SEEDED):
        engine.add(kit.sequence("a", sampling))
        outputs = run(engine)
        assert len(answer(outputs, "a")) == ANSWER_TOKENS
        assert [output.finish_reason for output in outputs if output.finish_reason] == ["length"]
        assert_nothing_is_held(engine)


def an_answer_depends_on_ids_parameters_and_seed_alone(kit: EngineKit) -> None:
    engine = kit.open()
    names = [f"request {index}" for index in range(3)]
    for index, name in enumerate(names):
        engine.add(kit.sequence(name, SEEDED, seed=index))
    together = run(engine)
    for index, name in enumerate(names):
        alone = kit.open()
        alone.add(kit.sequence(name, SEEDED, seed=index))
        assert_same_answer(engine, answer_tokens(together, name), answer_tokens(run(alone), name))


def several_answers_to_one_prompt_end_each(kit: EngineKit) -> None:
    engine = kit.open()
    engine.add(kit.sequence("a", Sampling(ANSWER_TOKENS, temperature=1.0, seed=5, n=3)))
    outputs = run(engine)
    answers = [answer(outputs, "a", index) for index in range(3)]
    assert [len(token_ids) for token_ids in answers] == [ANSWER_TOKENS] * 3
    assert len(set(map(tuple, answers))) > 1, "every answer has draws of its own"
    assert_nothing_is_held(engine)


def a_request_at_fault_ends_alone(kit: EngineKit) -> None:
    """No id of the vocabulary is biased: nothing can be drawn for it, and another goes on."""
    engine = kit.open()
    impossible = Sampling(ANSWER_TOKENS, logit_bias=((kit.vocabulary + 7, 1.0),))
    engine.add(kit.sequence("impossible", impossible))
    engine.add(kit.sequence("possible", seed=1))
    outputs = run(engine)
    errors = [output for output in outputs if output.error is not None]
    assert [output.attempt_key[0] for output in errors] == ["impossible"]
    assert errors[0].request_at_fault
    assert len(answer(outputs, "possible")) == ANSWER_TOKENS
    engine.release(("impossible", 0))
    assert_nothing_is_held(engine)


def a_released_sequence_leaves_nothing(kit: EngineKit) -> None:
    """In mid-prefill, in mid-decode, and while it waits; what is not there cannot be released."""
    for steps in (0, 1, 4):
        engine = kit.open()
        engine.add(kit.sequence("a"))
        engine.add(kit.sequence("b", seed=1))
        outputs = [output for _ in range(steps) for output in engine.step()]
        engine.release(("a", 0))
        engine.release(("nobody", 0))
        assert ("a", 0) not in blocks_by_attempt(engine)
        later = run(engine)
        assert not answer([output for output in later if output.offset == 0], "a")
        assert len(answer(outputs + later, "b")) == ANSWER_TOKENS
        assert_nothing_is_held(engine)


# ---- prefill for another worker ------------------------------------------------------------------


def a_prefill_announces_every_block_and_holds_it(kit: EngineKit) -> None:
    engine = kit.open()
    announced: list[tuple[int, int]] = []
    blocks: dict[int, int] = {}

    def record(filled_ranges: list[BlocksFilled]) -> None:
        for filled in filled_ranges:
            assert filled.attempt_key == ("a", 0)
            for index, block in enumerate(filled.blocks, filled.first_block):
                assert blocks.setdefault(index, block) == block, "a block has moved"
                announced.append((index, filled.piece))

    engine.announce_filled = record
    engine.add(kit.sequence("a", stop_after_first=True))
    outputs = run(engine)
    assert len(answer(outputs, "a")) == 1
    block_count = -(-PROMPT_TOKENS // kit.block_tokens)
    for index in range(block_count):
        pieces = [piece for announced_index, piece in announced if announced_index == index]
        assert pieces in ([-1], list(range(engine.piece_count))), (index, pieces)
    assert blocks_by_attempt(engine)["a", 0] >= block_count, "a transfer may still read them"
    engine.release(("a", 0))
    assert_nothing_is_held(engine)


def held_prompts_leave_room_to_others(kit: EngineKit) -> None:
    """However slow the receivers are, transfers hold no more than `held_share` of the pool."""
    kit.limits = replace(kit.limits, held_share=0.5)
    engine = kit.open(12)
    names = ("first", "second", "third")
    for seed, name in enumerate(names):  # each has four blocks
        engine.add(kit.sequence(name, stop_after_first=True, seed=seed))
    outputs = run(engine)
    assert [output.attempt_key[0] for output in outputs if output.token] == ["first"]
    assert engine.statistics()["waiting"] == 2
    engine.release(("third", 0))
    engine.release(("first", 0))
    assert [output.attempt_key[0] for output in run(engine) if output.token] == ["second"]
    engine.release(("second", 0))
    assert_nothing_is_held(engine)
    large = kit.sequence("large", length=8 * kit.block_tokens, stop_after_first=True, seed=8)
    engine.add(large)  # more than the share, and computed alone
    assert len(answer(run(engine), "large")) == 1
    engine.release(("large", 0))
    assert_nothing_is_held(engine)


# ---- KV from another worker ----------------------------------------------------------------------


def kv_from_a_peer_is_decoded_as_if_it_were_computed_here(kit: EngineKit) -> None:
    for sampling in (GREEDY, SEEDED):
        alone = kit.open()
        alone.add(kit.sequence("a", sampling))
        expected = answer(run(alone), "a")

        sequence = kit.sequence("a", sampling)
        prefill_engine, source_blocks, first_ids = prefill_elsewhere(kit, sequence)
        engine = kit.open()
        required_blocks = engine.required_blocks(sequence)
        target_blocks = reserve(engine, sequence)
        assert target_blocks is not None
        longest = len(sequence.token_ids) + min(ANSWER_TOKENS, kit.limits.growth_tokens)
        assert required_blocks <= -(-longest // kit.block_tokens), "more than it can grow into"
        # What it grows into may be reserved with it, or be taken when it grows.
        assert len(target_blocks) in (kit.blocks_for(sequence), required_blocks)
        assert sequence.published_blocks == 0, "nothing is cached here"
        assert engine.step() == [], "its KV is not here yet"
        copy_blocks(prefill_engine, source_blocks, engine, target_blocks)
        sequence.token_ids.append(first_ids[0])
        engine.commit(sequence, waited_s=0.01)
        later = [output.token.id for output in run(engine) if output.token]
        assert first_ids + later == expected
        assert_nothing_is_held(engine)


def further_answers_begin_with_a_commit(kit: EngineKit) -> None:
    """Answer 0 has ended with its first id; the others go on behind theirs."""
    sampling = Sampling(ANSWER_TOKENS, temperature=1.0, seed=5, n=3)
    sequence = kit.sequence("a", sampling)
    prefill_engine, source_blocks, first_ids = prefill_elsewhere(kit, sequence)
    engine = kit.open()
    target_blocks = reserve(engine, sequence)
    assert target_blocks is not None
    copy_blocks(prefill_engine, source_blocks, engine, target_blocks)
    sequence.token_ids.append(first_ids[0])
    engine.commit(
        sequence, ((1, first_ids[1]), (2, first_ids[2])), first_answer_ended=True, waited_s=0.0
    )
    outputs = run(engine)
    assert {output.answer_index for output in outputs} == {1, 2}
    for index in (1, 2):
        offsets = [output.offset for output in outputs if output.answer_index == index]
        assert offsets == list(range(1, ANSWER_TOKENS)), "the first id came from the peer"
    assert_nothing_is_held(engine)


def a_cached_prefix_need_not_be_sent_again(kit: EngineKit) -> None:
    engine = kit.open()
    engine.add(kit.sequence("first"))
    run(engine)
    sequence = kit.sequence("second")
    assert reserve(engine, sequence)
    assert sequence.published_blocks == PROMPT_TOKENS // kit.block_tokens
    engine.release(("second", 0))
    assert_nothing_is_held(engine)


def a_full_pool_reserves_nothing_until_blocks_are_released(kit: EngineKit) -> None:
    engine = kit.open()
    reserved: list[Sequence] = []
    all_blocks: list[int] = []
    while True:
        sequence = kit.sequence(f"request {len(reserved)}", seed=len(reserved))
        blocks = reserve(engine, sequence)
        if blocks is None:
            break
        assert len(blocks) in (kit.blocks_for(sequence), engine.required_blocks(sequence))
        reserved.append(sequence)
        all_blocks += blocks
    assert reserved, "not even one fits"
    assert len(set(all_blocks)) == len(all_blocks), "two sequences have the same block"
    assert all(0 < block <= engine.block_count for block in all_blocks)
    held = sum(blocks_by_attempt(engine).values())
    assert held == len(all_blocks) == engine.statistics()["kv_blocks"]["reserved"]
    engine.release(reserved[0].attempt_key)
    assert reserve(engine, kit.sequence("later", seed=99)) is not None
    for name in [sequence.attempt_key for sequence in reserved[1:]] + [("later", 0)]:
        engine.release(name)
    assert_nothing_is_held(engine)


# ---- cached prefixes -----------------------------------------------------------------------------


def a_staged_prefix_is_found_once_it_is_cached(kit: EngineKit) -> None:
    sequence = kit.sequence("a", GREEDY)
    prefill_engine, source_blocks, _ = prefill_elsewhere(kit, sequence)
    alone = kit.open()
    alone.add(kit.sequence("a"))
    expected = answer_tokens(run(alone), "a")

    engine = kit.open()
    engine.observe()
    hashes = sequence.block_hashes
    fetch_key = ("fetch", 0)
    token_ids = tuple(sequence.token_ids[: len(hashes) * kit.block_tokens])
    staged = engine.stage(
        StagePrefix(fetch_key, hashes, peer_blocks=len(hashes), token_ids=token_ids)
    )
    assert staged.attempt_key == fetch_key and len(staged.blocks) == len(hashes)
    assert staged.held_blocks == staged.tier_blocks == 0
    assert blocks_by_attempt(engine) == {fetch_key: len(hashes)}
    assert engine.statistics()["kv_blocks"]["staged"] == len(hashes)
    copy_blocks(prefill_engine, source_blocks, engine, staged.blocks)
    engine.cache_staged(fetch_key, 2)
    assert sorted(engine.observe().stored) == sorted(hashes[:2]), "only two have come"
    assert_nothing_is_held(engine)
    engine.add(sequence)
    outputs = run(engine)
    assert max(output.hit_tokens for output in outputs) == 2 * kit.block_tokens
    assert_same_answer(engine, answer_tokens(outputs, "a"), expected)


def a_prefix_for_a_peer_is_pinned_until_its_release(kit: EngineKit) -> None:
    engine = kit.open()
    sequence = kit.sequence("a")
    engine.add(sequence)
    run(engine)
    hashes = block_hashes(kit.prompt(), b"", kit.block_tokens)
    unknown_hashes = block_hashes(kit.prompt(seed=8), b"", kit.block_tokens)
    pinned = engine.stage(StagePrefix(("peer", 0), hashes, pin_only=True))
    assert len(pinned.blocks) == pinned.held_blocks == len(hashes)
    nothing = engine.stage(StagePrefix(("other", 0), unknown_hashes, pin_only=True))
    assert nothing.blocks == [] and nothing.held_blocks == 0
    for index in range(1, 12):  # more than the pool holds
        engine.add(kit.sequence(f"pressure {index}", seed=index))
        run(engine)
    again = engine.stage(StagePrefix(("again", 0), hashes, pin_only=True))
    assert again.blocks == pinned.blocks, "they were evicted"
    engine.release(("peer", 0))
    engine.release(("again", 0))
    assert_nothing_is_held(engine)


# ---- tiers ---------------------------------------------------------------------------------------


def what_tiers_hold_is_staged_too(kit: EngineKit) -> None:
    engine = kit.open()
    counted: list[list[bytes]] = []

    def count_two(hashes: list[bytes]) -> int:
        counted.append(hashes)
        return min(2, len(hashes))

    engine.count_tier_blocks = count_two
    hashes = block_hashes(kit.prompt(), b"", kit.block_tokens)
    staged = engine.stage(StagePrefix(("a", 0), hashes))
    assert counted == [hashes]
    assert (staged.held_blocks, staged.tier_blocks, len(staged.blocks)) == (0, 2, 2)
    engine.cache_staged(("a", 0), 0)
    assert engine.observe().stored == []
    assert_nothing_is_held(engine)


def a_low_pool_pins_what_tiers_shall_copy(kit: EngineKit) -> None:
    engine = kit.open()
    assert engine.pin_for_demotion() == []
    engine.count_tier_blocks = lambda hashes: 0
    pinned: list[tuple[int, bytes]] = []
    for index in range(12):  # more than the pool holds
        engine.add(kit.sequence(f"request {index}", seed=index))
        run(engine)
        pinned = engine.pin_for_demotion()
        if pinned:
            break
    assert pinned, "the pool is full of cached blocks"
    cached = set(engine.observe().hashes)
    assert all(content in cached for _, content in pinned)
    assert engine.statistics()["kv_blocks"]["demoting"] == len(pinned)
    for index, (block, _) in enumerate(pinned):
        engine.finish_demotion(block, copied=index % 2 == 0)
    assert engine.statistics()["kv_blocks"]["demoting"] == 0
    assert_nothing_is_held(engine)


def what_only_the_tiers_hold_is_told_as_demoted(kit: EngineKit) -> None:
    engine = kit.open()
    engine.count_tier_blocks = lambda hashes: 0
    cached: set[bytes] = set()
    in_tiers: set[bytes] = set()
    demoted: set[bytes] = set()
    for index in range(24):  # more than the pool holds
        engine.add(kit.sequence(f"request {index}", seed=index))
        run(engine)
        for block, content in engine.pin_for_demotion():
            engine.finish_demotion(block, copied=True)
            in_tiers.add(content)
        changes = engine.observe()
        cached = (cached | set(changes.stored)) - set(changes.evicted) - set(changes.demoted)
        demoted = (demoted | set(changes.demoted)) - set(changes.stored) - set(changes.evicted)
        assert (cached, demoted) == (set(changes.hashes), set(changes.demoted_hashes))
    assert demoted, "nothing was evicted that the tiers have copied"
    assert demoted == in_tiers - cached
    engine.forget_in_tiers([*in_tiers, bytes(16)])
    changes = engine.observe()
    assert set(changes.evicted) == demoted and changes.demoted_hashes == []


# ---- observation ---------------------------------------------------------------------------------


def an_observation_says_what_is_cached_and_what_changed(kit: EngineKit) -> None:
    engine = kit.open()
    start = engine.observe()
    assert start.hashes == [] and start.free_blocks == engine.block_count
    engine.add(kit.sequence("a"))
    while not any(output.token for output in engine.step()):
        pass
    running = engine.observe()
    assert running.running_sequences == 1
    assert running.kv_tokens >= PROMPT_TOKENS
    assert running.free_blocks < engine.block_count
    assert running.prefill_tokens == PROMPT_TOKENS and running.prefill_s > 0
    run(engine)
    end = engine.observe()
    expected = set(block_hashes(kit.prompt(), b"", kit.block_tokens))
    assert expected <= set(running.stored) | set(end.stored)
    assert not set(running.stored) & set(end.stored), "a block is told twice"
    assert expected <= set(end.hashes) and not end.evicted
    assert end.decode_steps >= ANSWER_TOKENS - 1 and end.decode_s > 0
    assert end.running_sequences == 0 and end.free_blocks == engine.block_count
    cached_hashes = set(end.hashes)
    for index in range(1, 12):  # more than the pool holds
        engine.add(kit.sequence(f"pressure {index}", seed=index))
        run(engine)
        later = engine.observe()
        cached_hashes = (cached_hashes | set(later.stored)) - set(later.evicted)
        assert cached_hashes == set(later.hashes), "the changes do not lead to what is cached"
    assert expected - cached_hashes, "nothing was evicted"


def grammars_are_compiled_by_other_threads(kit: EngineKit) -> None:
    """A grammar is there once another thread has compiled it, a wrong one too."""
    engine = kit.open()
    for grammar in (Grammar("regex", "[a-z]{2}"), Grammar("regex", "(")):
        assert not engine.has_grammar(grammar)
        compiling = threading.Thread(target=engine.compile_grammar, args=(grammar,))
        compiling.start()
        compiling.join(60)
        assert engine.has_grammar(grammar)


#: For engines whose pool can have tiers below it.
TIER_CHECKS: tuple[Callable[[EngineKit], None], ...] = (
    what_tiers_hold_is_staged_too,
    a_low_pool_pins_what_tiers_shall_copy,
    what_only_the_tiers_hold_is_told_as_demoted,
)
#: For every engine.
CHECKS: tuple[Callable[[EngineKit], None], ...] = (
    grammars_are_compiled_by_other_threads,
    what_peers_and_the_router_ask_is_there,
    engines_of_one_model_are_compatible,
    statistics_have_what_the_metrics_read,
    a_closed_engine_has_no_ranks,
    a_sequence_is_answered_to_its_end,
    an_answer_depends_on_ids_parameters_and_seed_alone,
    several_answers_to_one_prompt_end_each,
    a_request_at_fault_ends_alone,
    a_released_sequence_leaves_nothing,
    a_prefill_announces_every_block_and_holds_it,
    held_prompts_leave_room_to_others,
    kv_from_a_peer_is_decoded_as_if_it_were_computed_here,
    further_answers_begin_with_a_commit,
    a_cached_prefix_need_not_be_sent_again,
    a_full_pool_reserves_nothing_until_blocks_are_released,
    a_staged_prefix_is_found_once_it_is_cached,
    a_prefix_for_a_peer_is_pinned_until_its_release,
    an_observation_says_what_is_cached_and_what_changed,
)
