"""Real engines whose pool is too small for what they are asked: same bits, in order of age."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diptych.engine.engine import Engine
from diptych.engine.sequence import SequenceOutput
from diptych.protos.frames import Sampling, Token

from tests.support.variants import daily

from .rig import alone, drain, engine, prompt, request

MOST = 200
GREEDY = Sampling(MOST, logprobs=2)
SAMPLED = Sampling(MOST, temperature=0.8, seed=3, logprobs=2)


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[[int, Sampling], list[Token]]:
    """Prompt `index` alone on an engine with room for everything."""
    owner = engine(folder)
    made: dict[tuple[int, Sampling], list[Token]] = {}

    def tokens(index: int, sampling: Sampling) -> list[Token]:
        if (index, sampling) not in made:
            made[index, sampling] = alone(owner, prompt(60 + index, index), sampling)
        return made[index, sampling]

    return tokens


def ended(seen: list[SequenceOutput]) -> list[str]:
    return [output.attempt_key[0] for output in seen if output.finish_reason]


@pytest.mark.parametrize("sampling", [SAMPLED, *daily([GREEDY])], ids=["sampled", "greedy"])
def test_all_grow_to_their_end_on_a_full_pool_the_oldest_first(folder, expected, sampling) -> None:
    owner = engine(folder, blocks=16, growth_tokens=0)
    for index in range(8):  # 5 blocks each at their end, 40 in all
        owner.add(request(owner, str(index), prompt(60 + index, index), sampling))
    tokens, seen = drain(owner)
    assert owner.scheduler.preemptions > 0
    assert ended(seen) == [str(index) for index in range(8)]
    for index in range(8):
        assert tokens[str(index)] == expected(index, sampling)
    assert owner.scheduler.pool.used_blocks == 0 and not owner.scheduler.live
    owner.scheduler.pool.validate()


def test_it_is_the_same_with_an_itl_budget(folder, expected) -> None:
    owner = engine(folder, blocks=16, growth_tokens=0, itl_budget_s=1e-6, max_running=3)
    for index in range(6):
        owner.add(request(owner, str(index), prompt(60 + index, index), GREEDY))
    tokens, _ = drain(owner)
    for index in range(6):
        assert tokens[str(index)] == expected(index, GREEDY)
    assert owner.scheduler.cost.prefill_measured


def test_a_resumed_sequence_reads_the_blocks_that_it_decoded(folder, expected) -> None:
    owner = engine(folder)
    seq = request(owner, "a", prompt(60, 0), GREEDY)
    owner.add(seq)
    tokens = [o.token for o in (o for _ in range(100) for o in owner.step())]
    before = owner.counters.prefill_tokens
    owner.scheduler._preempt(seq)
    tokens += _rest(owner)
    assert owner.counters.prefill_tokens - before == 160 - 128, "two blocks were found again"
    assert tokens == expected(0, GREEDY)


def _rest(owner: Engine) -> list[Token | None]:
    tokens = []
    while owner.scheduler.live:
        tokens += [output.token for output in owner.step()]
    return tokens


def test_the_next_turn_is_a_hit_on_the_answer_with_the_same_bits(folder, expected) -> None:
    owner = engine(folder)
    answer = alone(owner, prompt(60, 0), GREEDY)
    ids = prompt(60, 0) + [token.id for token in answer] + prompt(30, 99)
    short = Sampling(20, logprobs=2)
    owner.add(request(owner, "next", ids, short))
    tokens, seen = drain(owner)
    assert seen[0].hit_tokens == 256, "260 ids came before, the last without KV"
    assert tokens["next"] == alone(engine(folder), ids, short)
