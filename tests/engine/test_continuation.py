"""An answer that another engine goes on with, from any token on: the same tokens and logprobs."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from diptych.engine.engine import Engine
from diptych.engine.sequence import Sequence, sampling_of_answer
from diptych.engine.spec import fingerprint
from diptych.kv_transfer.identity import block_hashes
from diptych.protos.frames import Grammar, Sampling, Token

from tests.support.variants import daily_but

from . import rig

MOST = 70  #: tokens of an answer: over a block border
STOPS = tuple(range(100, 110))
#: whatever a token may depend on besides the ids in front of it
WAYS = {
    "greedy": Sampling(MOST, logprobs=3),
    "seeded": Sampling(MOST, temperature=0.7, seed=11, logprobs=3),
    "cut": Sampling(MOST, temperature=0.9, seed=3, top_p=0.9, top_k=40, min_p=0.01, logprobs=1),
    "penalties": Sampling(
        MOST,
        0.5,
        5,
        logprobs=2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias=tuple((one, 3.0) for one in range(60, 70)),
    ),  # the bias makes them repeat themselves
    "bias": Sampling(MOST, 0.8, 5, logprobs=1, logit_bias=((9, 3.0), (77, -50.0))),
    "limits": Sampling(MOST, 0.9, 8, stop_ids=STOPS, min_tokens=30, logprobs=1),
    "grammar": Sampling(
        MOST, 0.9, 4, stop_ids=STOPS, logprobs=2, grammar=Grammar("regex", "([a-f]{1,3} ){9,12}x")
    ),
}


def given(owner: Engine, ids: list[int], sampling: Sampling, answer: list[Token]) -> Sequence:
    """The request with `answer` as far as it came elsewhere."""
    whole = ids + [token.id for token in answer]
    hashes = block_hashes(whole, fingerprint(owner.options.model_folder))
    return Sequence(("on", 0), whole, len(ids), sampling, hashes)


def rest(owner: Engine, ids: list[int], sampling: Sampling, answer: list[Token]) -> list[Token]:
    owner.add(given(owner, ids, sampling, answer))
    tokens: list[Token] = []
    while owner.scheduler.live:
        for output in owner.step():
            assert output.error is None, output
            if output.token:
                assert output.offset == len(answer) + len(tokens), output
                tokens.append(output.token)
                finish = output.finish_reason
    assert finish == ("length" if len(answer + tokens) == sampling.max_tokens else "stop")
    return tokens


@pytest.fixture(scope="module")
def engines(checkpoint: Callable[[str], Path]) -> tuple[Engine, Engine, Engine]:
    """One that answers, one that goes on, and one that does so with guesses and small chunks."""
    folder = checkpoint("llama")
    fast = rig.engine(folder, draft_tokens=4, max_step_tokens=64)
    return rig.engine(folder), rig.engine(folder), fast


@pytest.mark.parametrize("way", daily_but(["cut", "penalties", "limits", "grammar"], WAYS))
def test_an_answer_goes_on_elsewhere_bit_by_bit(engines, way: str) -> None:
    first, second, guessing = engines
    sampling, ids = WAYS[way], rig.prompt(100, seed=5) + rig.prompt(30, seed=5)
    drafted_before = guessing.drafted_tokens
    whole = rig.alone(first, ids, sampling)
    assert len(whole) > 15
    draw = random.Random(way)
    cuts = {0, 1, len(whole) - 1, 28, 29, *draw.sample(range(len(whole)), 6)}
    for cut in sorted(cut for cut in cuts if cut < len(whole)):  # 28: the last id fills a block...
        for engine in (second, guessing):
            assert rest(engine, ids, sampling, whole[:cut]) == whole[cut:], cut
    if way == "penalties":  # the others repeat themselves on some CPUs only
        assert guessing.drafted_tokens > drafted_before


def test_it_may_be_cut_many_times(engines) -> None:
    """A token here, a token there: nothing but the ids travels."""
    sampling, ids = WAYS["penalties"], rig.prompt(60, seed=9)
    whole = rig.alone(engines[0], ids, sampling)
    answer: list[Token] = []
    while len(answer) < len(whole):
        engine = engines[1 + len(answer) % 2]
        engine.add(given(engine, ids, sampling, answer))
        while not (outputs := [one for one in engine.step() if one.token]):
            pass
        answer += [one.token for one in outputs]
        engine.release(("on", 0))
    assert answer == whole


@pytest.mark.parametrize("index", [0, 1, 3])
def test_one_of_several_answers_goes_on_alone(engines, index: int) -> None:
    first, second, _ = engines
    sampling, ids = Sampling(20, 0.9, seed=6, logprobs=1, n=4), rig.prompt(70)
    first.add(rig.request(first, "four", ids, sampling))
    answers: dict[int, list[Token]] = {}
    while first.scheduler.live:
        for output in first.step():
            answers.setdefault(output.answer_index, []).append(output.token)
    own = answers[index]
    assert rest(second, ids, sampling_of_answer(sampling, index), own[:8]) == own[8:]
    assert rest(second, ids, sampling_of_answer(sampling, index), []) == own


def test_what_the_other_engine_cached_is_found(engines) -> None:
    """An answer that comes back to where it was computes no more than its last block."""
    owner = engines[0]
    sampling, ids = WAYS["greedy"], rig.prompt(100, seed=21)
    whole = rig.alone(owner, ids, sampling)
    seq = given(owner, ids, sampling, whole[:60])
    owner.add(seq)
    while owner.scheduler.live:
        owner.step()
    assert seq.hit_tokens == 128
    assert seq.token_ids[160:] == [token.id for token in whole[60:]]


def test_preempted_again_it_keeps_its_place(checkpoint, engines) -> None:
    """A pool too small for all: who is preempted begins with what was given too."""
    sampling = Sampling(60, temperature=0.6, seed=2, logprobs=1)
    small = rig.engine(checkpoint("llama"), blocks=16, growth_tokens=1, watermark=0.0)
    texts = [rig.prompt(120, seed=number) for number in range(8)]
    wholes = [rig.alone(engines[0], ids, sampling) for ids in texts]
    answers: dict[str, list[Token]] = {}
    for number, (ids, whole) in enumerate(zip(texts, wholes, strict=True)):
        seq = given(small, ids, sampling, whole[: number + 1])
        seq.attempt_key = (f"s{number}", 0)
        small.add(seq)
    while small.scheduler.live:
        for output in small.step():
            answers.setdefault(output.attempt_key[0], []).append(output.token)
    assert small.scheduler.preemptions > 0
    for number, whole in enumerate(wholes):
        assert answers[f"s{number}"] == whole[number + 1 :]
