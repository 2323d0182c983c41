"""Sampling through the engine: sequences that go on elsewhere, prompt logprobs, damaged rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from diptych.engine.engine import Engine
from diptych.engine.sequence import SequenceOutput
from diptych.protos.frames import Grammar, Sampling, Token
from safetensors.torch import load_file, save_file

from tests.support import checkpoints
from tests.support.lazy import LazyModule
from tests.support.variants import daily

from .rig import MIX, alone, copy_blocks, drain, engine, finish, prompt, request

transformers = LazyModule("transformers")

SCHEMA = {"type": "array", "items": {"enum": ["red", "green", 17, None]}, "minItems": 30}
GRAMMAR = Grammar("json_schema", json.dumps(SCHEMA))
#: everything on
FULL = Sampling(
    40,
    temperature=0.9,
    seed=77,
    stop_ids=(1,),
    logprobs=3,
    top_k=60,
    top_p=0.97,
    min_p=0.001,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    repetition_penalty=1.2,
    logit_bias=((20, 2.0), (300, -5.0)),
    min_tokens=40,
)
ASKS = {"free": FULL, "grammar": msgspec.structs.replace(FULL, grammar=GRAMMAR)}


@pytest.fixture
def llama(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama")


def steps(owner: Engine, limit: int = 500) -> list[SequenceOutput]:
    """All outputs until the engine has nothing to do."""
    outputs: list[SequenceOutput] = []
    for _ in range(limit):
        outputs += owner.step()
        if not owner.scheduler.live:
            return outputs
    raise AssertionError(owner.scheduler)


# ---- going on elsewhere --------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [ASKS["grammar"], *daily([FULL])], ids=["grammar", "free"])
def test_an_answer_cut_anywhere_goes_on_as_before(llama: Path, ask: Sampling) -> None:
    ids = prompt(70)
    whole = alone(engine(llama), ids, ask)
    assert len(whole) == 40
    for cut in range(1, 40):
        seq = request(other := engine(llama), "rest", ids, ask)
        seq.token_ids += [token.id for token in whole[:cut]]
        other.add(seq)
        outputs = steps(other)
        assert [output.offset for output in outputs] == list(range(cut, 40))
        assert [output.token for output in outputs] == whole[cut:], cut
        assert outputs[-1].finish_reason == "length"


@pytest.mark.parametrize("ask", [ASKS["grammar"], *daily([FULL])], ids=["grammar", "free"])
def test_neighbours_chunks_and_preemption_change_no_bit(llama: Path, ask: Sampling) -> None:
    owner = engine(llama, blocks=17, growth_tokens=0, max_step_tokens=64)
    sizes = [250, 190, 310, 60]
    asks = [msgspec.structs.replace(ask, max_tokens=150, seed=i, min_tokens=150) for i in range(4)]
    mix = list(zip(sizes, asks, strict=True))
    added = [request(owner, f"r{i}", prompt(n, i), one) for i, (n, one) in enumerate(mix)]
    streams = finish(owner, added)
    assert owner.scheduler.preemptions > 0
    for index, (size, one) in enumerate(mix):
        assert streams[f"r{index}"] == alone(engine(llama), prompt(size, index), one), index


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_a_first_token_made_elsewhere_counts_like_ones_own(llama: Path, ask: Sampling) -> None:
    """Prefill there, KV moved, decode here: penalties and grammar know the first id."""
    source, target, ids = engine(llama), engine(llama), prompt(130, 3)
    source.add(request(source, "moved", ids, ask, first_only=True))
    (first,) = drain(source)[0]["moved"]
    seq = request(target, "moved", ids, ask)
    blocks = target.reserve(seq).blocks
    assert blocks is not None
    copy_blocks(source, target, source.scheduler.held_blocks["moved", 0], blocks)
    seq.token_ids.append(first.id)
    target.commit(seq)
    rest = [output.token for output in steps(target)]
    assert [first, *rest] == alone(engine(llama), ids, ask)


# ---- prompt logprobs -----------------------------------------------------------------------------


def told(outputs: list[SequenceOutput], name: str) -> list[Token]:
    return [
        token
        for output in outputs
        if output.attempt_key[0] == name
        for token in output.prompt_logprobs
    ]


def asked(owner: Engine, ids: list[int], n: int = 2, most: int = 3) -> list[Token]:
    owner.add(request(owner, "asked", ids, Sampling(most, prompt_logprobs=n)))
    return told(drain(owner)[1], "asked")


def test_prompt_logprobs_are_those_of_transformers(dense_or_experts: Path) -> None:
    ids = prompt(333)
    with torch.inference_mode():
        network = transformers.AutoModelForCausalLM.from_pretrained(
            dense_or_experts, dtype=torch.float32
        )
        expected = torch.log_softmax(network(torch.tensor([ids])).logits[0], -1)
    tokens = asked(engine(dense_or_experts, "float32", max_step_tokens=128), ids)
    assert [token.id for token in tokens] == ids[1:]
    for index, token in enumerate(tokens):
        assert token.logprob == pytest.approx(float(expected[index, token.id]), abs=1e-4)
        best = expected[index].topk(2).values.tolist()
        assert [value for _, value in token.top] == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("step", [64, *daily([128, 2048])])
def test_chunks_and_neighbours_change_no_bit_of_them(llama: Path, step: int) -> None:
    owner = engine(llama, max_step_tokens=step)
    ask = Sampling(3, prompt_logprobs=2, logprobs=1)
    for index, length in enumerate(MIX):
        params = ask if index % 2 else Sampling(20)
        owner.add(request(owner, f"r{index}", prompt(length, index), params))
    streams, outputs = drain(owner)
    for index, length in enumerate(MIX):
        if index % 2:
            assert told(outputs, f"r{index}") == asked(engine(llama), prompt(length, index))
            assert len(told(outputs, f"r{index}")) == length - 1
        else:
            assert told(outputs, f"r{index}") == []
            assert streams[f"r{index}"] == alone(engine(llama), prompt(length, index), Sampling(20))


def test_a_known_prefix_is_computed_again_for_them_and_read_by_others(llama: Path) -> None:
    owner, ids = engine(llama), prompt(200)
    first = asked(owner, ids)
    owner.add(request(owner, "again", ids, Sampling(3, prompt_logprobs=2)))
    outputs = drain(owner)[1]
    assert told(outputs, "again") == first
    assert max(output.hit_tokens for output in outputs) == 0
    owner.add(request(owner, "other", ids, Sampling(3)))
    assert drain(owner)[1][0].hit_tokens == 192


def test_after_a_preemption_they_are_not_told_again(llama: Path) -> None:
    owner = engine(llama, blocks=17, growth_tokens=0, max_step_tokens=64)
    ask = Sampling(150, prompt_logprobs=1)
    sizes = [250, 190, 310, 60]
    for index, size in enumerate(sizes):
        owner.add(request(owner, f"r{index}", prompt(size, index), ask))
    outputs = drain(owner)[1]
    assert owner.scheduler.preemptions > 0
    for index, size in enumerate(sizes):
        assert told(outputs, f"r{index}") == asked(engine(llama), prompt(size, index), 1)


def test_a_prompt_preempted_while_it_is_computed_is_told_once(llama: Path) -> None:
    owner, ids = engine(llama, max_step_tokens=64), prompt(300)
    seq = request(owner, "r", ids, Sampling(3, prompt_logprobs=2))
    owner.add(seq)
    outputs = [*owner.step(), *owner.step()]
    assert len(told(outputs, "r")) == 128
    owner.scheduler._preempt(seq)
    assert told(outputs + drain(owner)[1], "r") == asked(engine(llama), ids)


def test_a_prefill_worker_tells_them_too(llama: Path) -> None:
    owner, ids = engine(llama, max_step_tokens=64), prompt(150)
    owner.add(request(owner, "r", ids, Sampling(9, prompt_logprobs=2), first_only=True))
    assert told(drain(owner)[1], "r") == asked(engine(llama), ids)


def test_a_prompt_of_one_id_has_none(llama: Path) -> None:
    assert asked(engine(llama), prompt(1)) == []


def test_logits_of_a_long_prompt_are_never_all_in_memory(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, sizes = engine(llama, max_step_tokens=1024), []
    whole = owner._model.logits

    def counted(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return whole(hidden, rows)

    monkeypatch.setattr(owner._model, "logits", counted)
    assert len(asked(owner, prompt(900), most=1)) == 899
    assert max(sizes) <= 64 and sum(sizes) == 899 + 1


# ---- damage --------------------------------------------------------------------------------------

BAD = 7  #: the id whose embedding is damaged


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    folder = checkpoints.make(tmp_path / "llama", "llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][BAD] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def healthy(length: int, seed: int) -> list[int]:
    return [index if index != BAD else 8 for index in prompt(length, seed)]


def steer(tokens: int) -> Sampling:
    """Never generates the damaged id."""
    return Sampling(tokens, logprobs=2, logit_bias=((BAD, -100.0),))


@pytest.mark.parametrize("first_only", [False, True])
@pytest.mark.parametrize("position", [0, 149, *daily([10, 129])])
def test_nan_ends_its_sequence_with_an_error_and_no_other(
    damaged: Path, position: int, first_only: bool
) -> None:
    owner = engine(damaged, max_step_tokens=64)
    bad = healthy(150, 1)
    bad[position] = BAD
    owner.add(request(owner, "before", healthy(70, 2), steer(30)))
    owner.add(request(owner, "bad", bad, steer(30), first_only))
    owner.add(request(owner, "behind", healthy(200, 3), steer(30)))
    streams, outputs = drain(owner)
    errors = [(output.attempt_key[0], output.error) for output in outputs if output.error]
    (name, reason), last = errors[0], [o for o in outputs if o.attempt_key[0] == "bad"][-1]
    assert (name, len(errors)) == ("bad", 1)
    assert "NaN logits at position 150" in str(reason)
    assert last.error == reason and last.token is None and last.finish_reason is None
    assert "bad" not in streams
    assert streams["before"] == alone(engine(damaged), healthy(70, 2), steer(30))
    assert streams["behind"] == alone(engine(damaged), healthy(200, 3), steer(30))
    if first_only:  # a transfer may still read its first chunks
        assert owner.scheduler.held_blocks
        owner.release(("bad", 0))
    assert owner.scheduler.pool.used_blocks == 0 and not owner.scheduler.held_blocks
    owner.scheduler.pool.validate()


def test_nan_while_decoding_ends_the_answer_there(damaged: Path) -> None:
    owner, ids = engine(damaged), healthy(20, 1)
    force = Sampling(9, logit_bias=((BAD, 100.0),))
    owner.add(request(owner, "r", ids, force))
    good, error = steps(owner)
    assert good.token == Token(BAD)
    assert error.error and "NaN logits at position 21" in error.error
    assert owner.scheduler.pool.used_blocks == 0


def test_nan_in_a_prompt_that_asks_for_logprobs_ends_it_in_that_chunk(damaged: Path) -> None:
    owner, ids = engine(damaged, max_step_tokens=64), healthy(300, 1)
    ids[100] = BAD
    owner.add(request(owner, "r", ids, Sampling(9, prompt_logprobs=0)))
    first, error = steps(owner)
    assert [token.id for token in first.prompt_logprobs] == ids[1:65]
    assert error.error and "NaN logits at position" in error.error
    assert 65 <= int(error.error.split("position ")[1].split(":")[0]) <= 101
    assert owner.scheduler.pool.used_blocks == 0


def test_damaged_blocks_are_in_no_ones_prefix(llama: Path) -> None:
    """A bit that flipped in a cached block costs the next request, not all that follow."""
    owner, ids, ask = engine(llama), prompt(200), Sampling(9, logprobs=2)
    good = alone(owner, ids, ask)
    hashes = set(owner.scheduler.pool.hashes())
    pool, again = owner.scheduler.pool, request(owner, "again", ids, ask)
    (block,) = pool.match(again.block_hashes[:1])
    pool.release([block])
    owner.kv_pool.layer(1)[1][block] = torch.nan
    pool.drain_events()
    owner.add(again)
    (error,) = steps(owner)
    assert error.error and "NaN" in error.error
    assert set(pool.drain_events()[1]) == hashes and pool.hashes() == []
    pool.validate()
    assert alone(owner, ids, ask) == good


@pytest.mark.parametrize("dtype", ["bfloat16", *daily(["float32"])])
def test_what_lay_in_a_block_before_changes_nothing(llama: Path, dtype: str) -> None:
    """Every byte of the pool 0xFF: NaN. A block is cleared when a sequence begins to fill it."""
    for length in (1, 63, 64, 65, 200):
        clean, dirty = engine(llama, dtype), engine(llama, dtype)
        size = dirty.kv_pool.block_bytes
        np.frombuffer(dirty.kv_pool.view, np.uint8)[size:] = 0xFF  # block 0 is nobody's
        ask = Sampling(80, logprobs=2)
        assert alone(dirty, prompt(length), ask) == alone(clean, prompt(length), ask)


def test_one_bad_request_is_an_error_of_its_own(llama: Path) -> None:
    owner = engine(llama)
    bad = {
        "bias": Sampling(9, logit_bias=((9999, 1.0),)),
        "grammar": Sampling(9, grammar=Grammar("regex", "(")),
        "masked": Sampling(9, stop_ids=tuple(range(512)), min_tokens=3),
    }
    for name, ask in bad.items():
        owner.add(request(owner, name, prompt(70, 1), ask))
    owner.add(request(owner, "good", prompt(70, 2), Sampling(9)))
    streams, outputs = drain(owner)
    errors = {output.attempt_key[0]: output.error for output in outputs if output.error}
    assert streams == {"good": alone(engine(llama), prompt(70, 2), Sampling(9))}
    assert errors.keys() == bad.keys()
    assert "9999" in errors["bias"] and "invalid grammar" in errors["grammar"]
    assert errors["masked"] == "no token is possible at position 70"
    assert owner.scheduler.pool.used_blocks == 0
