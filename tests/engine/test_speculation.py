"""n-gram speculation: fewer steps, the same tokens and logprobs, bit for bit."""

from __future__ import annotations

import pytest
from diptych.engine.engine import Engine
from diptych.protos.frames import Sampling

from tests.support.variants import daily

from . import rig

WAYS = {
    "greedy": Sampling(60, logprobs=3),
    "seeded": Sampling(60, temperature=0.3, seed=11, logprobs=3),
    "penalties": Sampling(60, frequency_penalty=0.02, repetition_penalty=1.01, logprobs=2),
    "top-p": Sampling(60, temperature=0.4, seed=3, top_p=0.9, top_k=40, logprobs=2),
    "stop": Sampling(200, stop_ids=tuple(range(100, 140))),
}


def run(folder, sampling: Sampling, drafts: int, blocks: int = 120) -> tuple[dict, Engine]:
    owner = rig.engine(folder, blocks=blocks, draft_tokens=drafts)
    phrase = rig.prompt(30, seed=5)
    texts = [phrase * 3, phrase * 7 + rig.prompt(9), rig.prompt(64), [7, 8] * 40]
    requests = [rig.request(owner, f"r{i}", ids, sampling) for i, ids in enumerate(texts)]
    return rig.finish(owner, requests), owner


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", *daily(["mistral"])])
def test_drafts_change_no_bit_and_save_steps(checkpoint, name: str, way: str) -> None:
    folder = checkpoint(name)
    plain, slow = run(folder, WAYS[way], 0)
    for drafts in (1, 4, 7):
        guessed, fast = run(folder, WAYS[way], drafts)
        assert guessed == plain
        fast.scheduler.pool.validate()
        assert fast.scheduler.pool.used_blocks == 0
    assert slow.drafted_tokens == 0
    if way in ("greedy", "stop"):
        assert fast.accepted_tokens > 0


def test_right_guesses_save_steps(checkpoint) -> None:
    sampling = Sampling(60, logit_bias=((9, 1000.0),))
    steps = []
    for drafts in (0, 4):
        owner = rig.engine(checkpoint("llama"), draft_tokens=drafts)
        assert [token.id for token in rig.alone(owner, rig.prompt(70), sampling)] == [9] * 60
        steps.append(owner.counters.steps)
    assert steps[0] == 60 and steps[1] <= 16


def test_drafts_give_way_where_blocks_are_short(checkpoint) -> None:
    folder = checkpoint("llama")
    sampling = Sampling(250, logprobs=1)
    plain, _ = run(folder, sampling, 0)
    for blocks in (17, 18, 20):
        guessed, owner = run(folder, sampling, 6, blocks)
        assert guessed == plain
        owner.scheduler.pool.validate()
    assert owner.drafted_tokens > 0


def test_many_sequences_are_not_guessed_for(checkpoint) -> None:
    owner = rig.engine(checkpoint("llama"), draft_tokens=4, draft_below=2)
    sampling = Sampling(20)
    rig.finish(owner, [rig.request(owner, f"r{i}", [9, 9] * 20, sampling) for i in range(3)])
    assert owner.drafted_tokens == 0
    rig.finish(owner, [rig.request(owner, "s", [9, 9] * 20, sampling)])
    assert owner.drafted_tokens > 0


def test_blocks_filled_by_drafts_serve_a_later_turn(checkpoint) -> None:
    folder = checkpoint("llama")
    sampling = Sampling(150, logprobs=2)
    ids = rig.prompt(20, seed=5) * 4
    owner = rig.engine(folder, draft_tokens=6)
    first = rig.alone(owner, ids, sampling)
    assert owner.accepted_tokens > 0
    turn = ids + [token.id for token in first] + rig.prompt(10, seed=8)
    again = rig.request(owner, "turn", turn, sampling)
    answer = rig.finish(owner, [again])["turn"]
    assert again.hit_tokens == (len(ids) + len(first) - 1) // 64 * 64
    assert answer == rig.alone(rig.engine(folder), turn, sampling)
