"""The test at the start: does decoding from copied KV blocks give the right answer?

Layouts and kernels of vLLM change, and a block that lies otherwise than expected gives fluent
garbage, not an error. So before a worker serves, three sequences get the same short prompt:

    here     its prompt is computed where it is decoded; its answer is right
    source   its prompt is computed up to the first token, as on a prefill worker
    target   its blocks are copied from those of `source`, as a transfer would copy them; it goes on
             with the answer, which must be that of `here`
"""

from __future__ import annotations

from ...kv_transfer.slices import ALL_PIECES, Lane, LaneEnd
from ...protos.frames import Sampling, Token
from ..commands import BlocksReserved
from ..engine_like import EngineLike
from ..errors import EngineError
from ..sequence import BlocksFilled, Sequence, SequenceOutput

EXTRA_TOKENS = 5  #: Tokens of the prompt behind its first block: they begin a second one.
ANSWER_TOKENS = 4  #: Tokens of each answer, the first one included.
ID_STRIDE = 7919  #: From one id of the prompt to the next: a prime, so that the ids differ.
STEP_LIMIT = 100  #: Steps that an answer, or a reservation, may take; more fail the test.
LIKELIEST_IDS = 5  #: Of each distribution that is compared.
#: The log-probabilities of one id in two equal distributions may differ by so much, as an engine
#: that promises no bits rounds otherwise from batch to batch. Garbage differs by far more.
LOGPROB_TOLERANCE = 0.1
#: Greedy, with the likeliest ids of each distribution.
SAMPLING = Sampling(ANSWER_TOKENS, logprobs=LIKELIEST_IDS)


def check_moved_blocks(engine: EngineLike, vocabulary: int) -> None:
    """Raises EngineError if decoding from copied blocks gives another answer than it should.

    `vocabulary` is the number of token ids of the model. The engine must be new: nothing else may
    run in it. The error says what came and what is right, or what kept the test from running.
    """
    block_tokens = engine.kv_pool.layout.block_tokens
    prompt = [index * ID_STRIDE % vocabulary for index in range(block_tokens + EXTRA_TOKENS)]

    def sequence(name: str, stop_after_first: bool = False) -> Sequence:
        # Each has a partition of its own: none finds the blocks of another in the cache.
        return Sequence(
            (f"self test {name}", 0),
            list(prompt),
            len(prompt),
            SAMPLING,
            stop_after_first=stop_after_first,
            cache_partition=name.encode(),
        )

    here = sequence("here")
    engine.add(here)
    expected = _answer(engine)

    source_blocks: dict[int, int] = {}

    def note(filled_ranges: list[BlocksFilled]) -> None:
        for filled in filled_ranges:
            source_blocks.update(enumerate(filled.blocks, filled.first_block))

    announced_to = engine.announce_filled
    engine.announce_filled = note
    source = sequence("source", stop_after_first=True)
    engine.add(source)
    first = _answer(engine)
    engine.announce_filled = announced_to

    target = sequence("target")
    target_blocks = _reserve(engine, target)
    _copy(engine, [source_blocks[index] for index in sorted(source_blocks)], target_blocks)
    engine.release(source.attempt_key)
    target.token_ids.append(first[0].id)
    engine.commit(target)
    moved = first + _answer(engine)
    difference = find_difference(expected, moved)
    if difference is not None:
        raise EngineError(
            f"self test: an answer that goes on from moved KV blocks differs ({difference}): "
            "this build of the engine lays its blocks out otherwise than Diptych moves them"
        )


def _answer(engine: EngineLike) -> list[Token]:
    """Steps until nothing is left to do; returns the tokens of the only live sequence."""
    tokens: list[Token] = []
    for _ in range(STEP_LIMIT):
        events = engine.step()
        for event in events:
            if isinstance(event, SequenceOutput) and event.error is not None:
                raise EngineError(f"self test: {event.error}")
            if isinstance(event, SequenceOutput) and event.token is not None:
                tokens.append(event.token)
        if not events and engine.idle():
            return tokens
    raise EngineError(f"self test: no end after {STEP_LIMIT} steps")


def _reserve(engine: EngineLike, sequence: Sequence) -> list[int]:
    """Returns the blocks that are reserved for the sequence; an engine may need steps for them."""
    answer = engine.reserve(sequence)
    for _ in range(STEP_LIMIT):
        if answer is not None:
            break
        for event in engine.step():
            assert isinstance(event, BlocksReserved), event
            answer = event
    if answer is None or answer.blocks is None:
        raise EngineError("self test: the KV pool is too small: raise pools.*.engine.kv_mib")
    return answer.blocks


def _copy(engine: EngineLike, source_blocks: list[int], target_blocks: list[int]) -> None:
    """Copies blocks within the pool, by the units that a transfer would move."""
    pool = engine.kv_pool
    end = LaneEnd(pool.layout)
    count = len(source_blocks)
    spans = Lane(end, end).spans(source_blocks, target_blocks[:count], ALL_PIECES)
    size = spans.unit_bytes
    units = zip(spans.source_units.tolist(), spans.target_units.tolist(), strict=True)
    for source_unit, target_unit in units:
        content = pool.view[source_unit * size : (source_unit + 1) * size]
        pool.view[target_unit * size : (target_unit + 1) * size] = content


def find_difference(expected: list[Token], found: list[Token]) -> str | None:
    """Returns how an answer differs from the right one by more than rounding, or None.

    The tokens have their `LIKELIEST_IDS`. Behind the first id that differs, which may be drawn
    between two about equally likely ones, the answers are two texts, and nothing is compared.
    """
    if len(expected) != len(found):
        return f"{len(found)} tokens, where {len(expected)} are right"
    for position, (right_token, found_token) in enumerate(zip(expected, found, strict=True)):
        if not (
            _has_likeliest(right_token, found_token) and _has_likeliest(found_token, right_token)
        ):
            return f"token {position}: {found_token}, where {right_token} is right"
        if right_token.id != found_token.id:
            return None
    return None


def _has_likeliest(right_token: Token, found_token: Token) -> bool:
    """Returns whether the likeliest ids of `right_token` are about as likely in `found_token`.

    An id that `found_token` does not list is less likely than all that it lists.
    """
    assert right_token.top and found_token.top, "the distributions were not asked for"
    likeliest = dict(found_token.top)
    unlisted = min(likeliest.values())
    return all(
        abs(logprob - likeliest[token_id]) <= LOGPROB_TOLERANCE
        if token_id in likeliest
        else logprob <= unlisted + LOGPROB_TOLERANCE
        for token_id, logprob in right_token.top
    )
