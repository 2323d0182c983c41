"""Several answers to one prompt: computed once, each as if it were alone."""

from __future__ import annotations

import msgspec
import pytest
from diptych.engine.engine import Engine
from diptych.protos.frames import Sampling

from . import rig

SEEDED = Sampling(30, temperature=0.9, seed=5, logprobs=2, n=4)


def answers(owner: Engine, limit: int = 2000) -> dict[int, list]:
    streams: dict[int, list] = {}
    for _ in range(limit):
        for output in owner.step():
            if output.token is not None:
                stream = streams.setdefault(output.answer_index, [])
                assert output.offset == len(stream)
                stream.append(output.token)
        if not owner.scheduler.live:
            return streams
    raise AssertionError(owner.scheduler)


def expected(folder, ids: list[int], sampling: Sampling) -> dict[int, list]:
    """Each answer asked for alone, by the seed that it draws with."""
    whole = rig.request(rig.engine(folder), "x", ids, sampling)
    single = [msgspec.structs.replace(sampling, n=1)]
    single += [whole.fork(i).sampling for i in range(1, sampling.n)]
    return {i: rig.alone(rig.engine(folder), ids, one) for i, one in enumerate(single)}


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_each_answer_is_what_it_would_be_alone(checkpoint, length: int) -> None:
    folder, ids = checkpoint("llama"), rig.prompt(length)
    owner = rig.engine(folder)
    owner.add(rig.request(owner, "r", ids, SEEDED))
    assert answers(owner) == expected(folder, ids, SEEDED)
    assert owner.counters.prefill_tokens == length
    assert len({str(stream) for stream in expected(folder, ids, SEEDED).values()}) == 4
    owner.scheduler.pool.validate()
    assert owner.scheduler.pool.used_blocks == 0


@pytest.mark.parametrize("length", [64, 130])
def test_one_transfer_serves_all_answers(checkpoint, length: int) -> None:
    folder, ids = checkpoint("llama"), rig.prompt(length)
    source, target = rig.engine(folder), rig.engine(folder)
    source.add(rig.request(source, "r", ids, SEEDED, first_only=True))
    firsts: dict[int, int] = {}
    streams: dict[int, list] = {}
    while len(firsts) < SEEDED.n:
        for output in source.step():
            if output.token is not None:
                firsts[output.answer_index] = output.token.id
                streams[output.answer_index] = [output.token]
    held = source.scheduler.held_blocks["r", 0]
    seq = rig.request(target, "r", ids, SEEDED)
    blocks = target.reserve(seq).blocks
    assert blocks is not None
    rig.copy_blocks(source, target, held, blocks)
    seq.token_ids.append(firsts[0])
    target.commit(seq, tuple((index, firsts[index]) for index in range(1, SEEDED.n)), waited_s=0.5)
    assert [one.waited_s for one in target.scheduler.live.values()] == [0.5] * SEEDED.n
    while target.scheduler.live:
        for output in target.step():
            assert output.token is not None and output.offset == len(streams[output.answer_index])
            streams[output.answer_index].append(output.token)
    assert streams == expected(folder, ids, SEEDED)
    source.release(("r", 0))
    for owner in (source, target):
        owner.scheduler.pool.validate()
        assert owner.scheduler.pool.used_blocks == 0


@pytest.mark.slow
def test_answers_on_a_full_pool_wait_and_are_preempted_and_stay_the_same(checkpoint) -> None:
    folder = checkpoint("llama")
    sampling = msgspec.structs.replace(SEEDED, max_tokens=200)
    owner = rig.engine(folder, blocks=20, growth_tokens=64)
    for index in range(3):
        owner.add(rig.request(owner, f"r{index}", rig.prompt(100, index), sampling))
    streams: dict[tuple, list] = {}
    while owner.scheduler.live:
        for output in owner.step():
            streams.setdefault((output.attempt_key[0], output.answer_index), []).append(
                output.token
            )
        owner.scheduler.pool.validate()
    assert owner.scheduler.preemptions > 0
    for index in range(3):
        alone = expected(folder, rig.prompt(100, index), sampling)
        assert {i: streams[f"r{index}", i] for i in range(4)} == alone


def test_a_drop_ends_all_answers(checkpoint) -> None:
    owner = rig.engine(checkpoint("llama"))
    owner.add(rig.request(owner, "r", rig.prompt(70), SEEDED))
    owner.add(rig.request(owner, "other", rig.prompt(70), SEEDED))
    for _ in range(5):
        owner.step()
    owner.release(("r", 0))
    assert {key for key, _ in owner.scheduler.live} == {("other", 0)}
    while owner.scheduler.live:
        assert all(output.attempt_key == ("other", 0) for output in owner.step())
    assert owner.scheduler.pool.used_blocks == 0


def test_answers_begin_beside_drafts_and_unfinished_prompts(checkpoint) -> None:
    """As many rows are sampled as were computed, but they are not the same ones."""
    folder, greedy = checkpoint("llama"), Sampling(12, n=2)
    drafted, pair, late = [9, 8, 7] * 20, rig.prompt(64, 1), rig.prompt(300, 2)
    alone = expected(folder, pair, greedy)
    owner = rig.engine(folder, max_step_tokens=192)
    owner.add(rig.request(owner, "pair", pair, greedy))
    owner.add(rig.request(owner, "late", late, Sampling(3)))
    assert answers_of(owner)["pair"] == alone
    owner = rig.engine(folder, draft_tokens=1)
    whole = rig.alone(rig.engine(folder), drafted, Sampling(200))
    owner.add(rig.request(owner, "drafted", drafted, Sampling(200)))
    streams = answers_of(owner, {at: (f"pair{at}", pair, greedy) for at in range(10, 90, 5)})
    assert owner.accepted_tokens > 0
    assert streams.pop("drafted") == {0: whole}
    assert all(stream == alone for stream in streams.values())


def answers_of(owner: Engine, later: dict | None = None) -> dict[str, dict[int, list]]:
    """All answers by request; `later`: step -> a request that comes then."""
    streams: dict[str, dict[int, list]] = {}
    for at in range(2000):
        if later and at in later:
            owner.add(rig.request(owner, *later[at]))
        for output in owner.step():
            if output.token is not None:
                streams.setdefault(output.attempt_key[0], {}).setdefault(
                    output.answer_index, []
                ).append(output.token)
        if not owner.scheduler.live and at > max(later or [0]):
            return streams
    raise AssertionError(owner.scheduler)


@pytest.mark.slow
def test_more_answers_than_the_pool_has_room_for_take_turns(checkpoint) -> None:
    folder, ids = checkpoint("llama"), rig.prompt(70)
    sampling = msgspec.structs.replace(SEEDED, n=24, max_tokens=80)
    owner = rig.engine(folder, blocks=20)
    owner.add(rig.request(owner, "r", ids, sampling))
    owner.add(rig.request(owner, "behind", ids, Sampling(3)))
    streams = answers_of(owner)
    assert streams["r"] == expected(folder, ids, sampling)
    assert len(streams["behind"][0]) == 3
    owner.scheduler.pool.validate()
    assert owner.scheduler.pool.used_blocks == 0


def test_prompt_logprobs_are_told_once(checkpoint) -> None:
    owner, ids = rig.engine(checkpoint("llama")), rig.prompt(30)
    sampling = msgspec.structs.replace(SEEDED, prompt_logprobs=1)
    owner.add(rig.request(owner, "r", ids, sampling))
    told = []
    while owner.scheduler.live:
        told += [
            (output.answer_index, token.id)
            for output in owner.step()
            for token in output.prompt_logprobs
        ]
    assert told == [(0, index) for index in ids[1:]]
