"""The exactness contract (bf16): a request's tokens and logprobs, bit for bit, whatever runs beside
it, however its prompt is cut, and on whichever engine each part of it is computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from diptych.engine.engine import Engine
from diptych.protos.frames import Sampling, Token
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import checkpoints
from tests.support.variants import daily

from .rig import MIX, alone, copy_blocks, drain, engine, finish, prompt, request

GREEDY = Sampling(24, logprobs=4)
SAMPLED = Sampling(24, temperature=0.8, seed=7, logprobs=4)


#: A dense model, and one of experts with norms of queries and keys. `make test-all` takes all.
QUICK = {"llama", "qwen3_moe"}


@pytest.fixture(
    params=[
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in sorted(checkpoints.ARCHITECTURES)
    ]
)
def model(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Path:
    """Each architecture in turn."""
    return checkpoint(request.param)


@lru_cache(maxsize=4096)
def expected(folder: Path, length: int, seed: int, sampling: Sampling) -> list[Token]:
    """The request alone on a fresh engine with default limits."""
    return alone(engine(folder), prompt(length, seed), sampling)


def transfer(source: Engine, target: Engine, first: Token, ids: list[int], sampling: Sampling):
    """What a KV transfer does: bytes into reserved blocks, then the first token, then decode."""
    seq = request(target, "moved", ids, sampling)
    blocks = target.reserve(seq).blocks
    held = source.scheduler.held_blocks["moved", 0]
    assert blocks is not None and blocks[: len(held)] != held, "another place, not a copy in place"
    copy_blocks(source, target, held, blocks)
    seq.token_ids.append(first.id)
    target.commit(seq)
    source.release(("moved", 0))


def test_every_architecture_passes_its_own_exactness_check(model: Path) -> None:
    assert engine(model).exact


def test_an_fp32_engine_makes_no_claim_of_exactness(model: Path) -> None:
    assert not engine(model, "float32").exact


@pytest.mark.parametrize("step", [64, 192, *daily([128, 512, 2048])])
def test_neighbours_and_chunk_sizes_change_no_bit(model: Path, step: int) -> None:
    owner = engine(model, blocks=120, max_step_tokens=step)
    mix = list(enumerate(MIX))
    streams = finish(owner, [request(owner, f"r{i}", prompt(n, i), GREEDY) for i, n in mix])
    for index, length in mix:
        assert streams[f"r{index}"] == expected(model, length, index, GREEDY), (index, length)


@pytest.mark.parametrize("step", [64, 128, 192, 2048])
def test_a_prompt_alone_may_be_cut_anywhere(model: Path, step: int) -> None:
    for length in (333, 129, 700):
        tokens = alone(engine(model, max_step_tokens=step), prompt(length), GREEDY)
        assert tokens == expected(model, length, 0, GREEDY)


def test_a_chunk_that_does_not_end_its_prompt_computes_no_logits(checkpoint) -> None:
    owner = engine(checkpoint("llama"), max_step_tokens=128)
    compute = owner._model.logits
    row_counts: list[int] = []

    def logits(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        row_counts.append(len(rows))
        return compute(hidden, rows)

    owner._model.logits = logits
    owner.add(request(owner, "long", prompt(300), Sampling(1)))
    drain(owner)
    assert row_counts == [1], "three chunks, of which the last one gives a token"
    row_counts.clear()
    owner.add(request(owner, "decoding", prompt(5), Sampling(4)))
    owner.add(request(owner, "beside", prompt(300, 1), Sampling(1)))
    drain(owner)
    assert sum(row_counts) == 4 + 1, "one row for each token of both"


def test_sampled_runs_are_equal_too(model: Path) -> None:
    owner = engine(model, max_step_tokens=128)
    mix = list(enumerate(MIX))
    streams = finish(owner, [request(owner, f"r{i}", prompt(n, i), SAMPLED) for i, n in mix])
    for index, length in mix:
        assert streams[f"r{index}"] == expected(model, length, index, SAMPLED), (index, length)


def test_the_same_prompt_again_is_a_prefix_hit_with_the_same_bits(model: Path) -> None:
    owner = engine(model)
    for length, hit in ((333, 320), (64, 0), (128, 64), (700, 640)):
        ids = prompt(length, length)
        finish(owner, [request(owner, "first", ids, GREEDY)])
        owner.add(request(owner, "again", ids, GREEDY))
        streams, outputs = drain(owner)
        assert streams["again"] == expected(model, length, length, GREEDY)
        assert outputs[0].hit_tokens == hit, "the last token is always computed"


def test_a_shared_prefix_of_130_tokens_changes_no_bit(model: Path) -> None:
    head = prompt(130, 1)
    asks = [head + prompt(rest, 50 + rest) for rest in (1, 63, 100, 203)]
    owner = engine(model)
    for ids in asks:
        owner.add(request(owner, "shared", ids, GREEDY))
        streams, outputs = drain(owner)
        assert streams["shared"] == alone(engine(model), ids, GREEDY)
    assert outputs[0].hit_tokens == 128


def test_preempted_sequences_come_back_with_the_same_bits(model: Path) -> None:
    long = Sampling(150, logprobs=2)
    owner = engine(model, blocks=17, growth_tokens=0)
    mix = [(0, 250), (1, 190), (2, 310), (3, 60)]
    streams = finish(owner, [request(owner, f"r{i}", prompt(n, i), long) for i, n in mix])
    assert owner.scheduler.preemptions > 0
    for index, length in mix:
        assert streams[f"r{index}"] == expected(model, length, index, long), (index, length)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_retry_from_prompt_and_generated_ids_goes_on_as_before(
    model: Path, sampling: Sampling
) -> None:
    for length in (50, 120, 333):
        whole = expected(model, length, 0, sampling)
        for done in (1, 8, 14, 23):
            ids = prompt(length) + [token.id for token in whole[:done]]
            rest = Sampling(24 - done, sampling.temperature, sampling.seed, (), 4)
            assert alone(engine(model), ids, rest) == whole[done:], (length, done)


@pytest.mark.parametrize("sampling", [SAMPLED, *daily([GREEDY])], ids=["sampled", "greedy"])
def test_prefill_here_and_decode_there_equals_one_engine(model: Path, sampling: Sampling) -> None:
    for length in (1, 63, 64, 65, 333):
        ids = prompt(length, 3)
        source, target = engine(model, max_step_tokens=128), engine(model)
        finish(target, [request(target, "other", prompt(100, 9), GREEDY)])
        source.add(request(source, "moved", ids, sampling, first_only=True))
        first = drain(source)[0]["moved"]
        assert len(first) == 1
        transfer(source, target, first[0], ids, sampling)
        for index in range(3):
            target.add(request(target, f"n{index}", prompt(200, index), GREEDY))
        seen = [
            o for o in (o for _ in range(60) for o in target.step()) if o.attempt_key[0] == "moved"
        ]
        rest = [output.token for output in seen]
        assert [output.offset for output in seen] == list(range(1, 24))
        assert first + rest == expected(model, length, 3, sampling), length


def test_a_sequence_that_came_by_transfer_may_be_preempted(model: Path) -> None:
    long = Sampling(150, logprobs=2)
    source, target = engine(model), engine(model, blocks=17, growth_tokens=0)
    ids = prompt(250, 4)
    for index, length in ((0, 330), (1, 300)):
        target.add(request(target, f"n{index}", prompt(length, index), long))
    target.step()
    source.add(request(source, "moved", ids, long, first_only=True))
    first = drain(source)[0]["moved"]
    transfer(source, target, first[0], ids, long)
    seen = [
        o for o in (o for _ in range(500) for o in target.step()) if o.attempt_key[0] == "moved"
    ]
    assert target.scheduler.preemptions > 0
    assert first + [output.token for output in seen] == expected(model, 250, 4, long)


def test_finite_garbage_in_unused_slots_changes_nothing(model: Path) -> None:
    for length in (1, 65, 333):
        owner = engine(model)
        whole = torch.frombuffer(owner.kv_pool.view, dtype=torch.bfloat16)
        noise = torch.randn(whole.shape, generator=torch.Generator().manual_seed(length))
        whole.copy_(noise * 1e20)
        assert alone(owner, prompt(length), GREEDY) == expected(model, length, 0, GREEDY)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 32), (6, 1, 64), (7, 1, 128)])
def test_other_head_layouts_are_as_exact(
    tmp_path: Path, heads: int, kv_heads: int, dim: int
) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim}
    folder = checkpoints.make(tmp_path / "m", "llama", **sizes)
    owner = engine(folder, max_step_tokens=64)
    mix = list(enumerate((333, 64, 1, 127, 65)))
    streams = finish(owner, [request(owner, f"r{i}", prompt(n, i), GREEDY) for i, n in mix])
    for index, length in mix:
        whole = expected(folder, length, index, GREEDY)
        assert streams[f"r{index}"] == whole
        ids = prompt(length, index) + [token.id for token in whole[:7]]
        assert alone(engine(folder), ids, Sampling(17, logprobs=4)) == whole[7:]


arrival = st.tuples(st.integers(1, 400), st.integers(0, 3), st.integers(0, 20), st.booleans())


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(["qwen2", "mixtral", "qwen3_moe"]),
    arrivals=st.lists(arrival, min_size=1, max_size=8),
    step=st.sampled_from([64, 128, 192, 512]),
    blocks=st.integers(17, 40),
    growth=st.sampled_from([0, 64, 256]),
    running=st.integers(1, 8),
)
def test_any_mix_of_arrivals_hits_and_preemptions_is_exact(
    checkpoint, name, arrivals, step, blocks, growth, running
) -> None:
    folder = checkpoint(name)
    owner = engine(
        folder, blocks=blocks, max_step_tokens=step, growth_tokens=growth, max_running=running
    )
    streams: dict[str, list[Token]] = {}
    for now in range(1500):
        for index, (length, seed, at, sampled) in enumerate(arrivals):
            if at == now:
                sampling = SAMPLED if sampled else GREEDY
                owner.add(request(owner, str(index), prompt(length, seed), sampling))
        for output in owner.step():
            if output.token is not None:
                streams.setdefault(output.attempt_key[0], []).append(output.token)
        owner.scheduler.pool.validate()
    for index, (length, seed, _, sampled) in enumerate(arrivals):
        sampling = SAMPLED if sampled else GREEDY
        assert streams[str(index)] == expected(folder, length, seed, sampling)
