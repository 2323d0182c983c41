"""Linear layers: a row's bits do not depend on how many rows there are, whatever the kernels do."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from diptych.engine import linear
from diptych.engine.decoder import Mlp
from diptych.engine.engine import Engine, EngineOptions
from diptych.engine.linear import Linear
from diptych.engine.ops import RmsNorm
from diptych.engine.scheduler import SchedulerLimits
from diptych.engine.sequence import Sequence
from diptych.protos.frames import Sampling

from tests.support.checkpoints import make

SHAPES = [
    (128, 384),
    (768, 256),
    (1024, 2048),
    pytest.param(1024, 5632, marks=pytest.mark.daily),
    pytest.param(2816, 1024, marks=pytest.mark.daily),
]


def layer(inputs: int, outputs: int, bias: bool = False) -> Linear:
    generator = torch.Generator().manual_seed(inputs + outputs)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16() * 0.05
    return Linear(weight, torch.randn(outputs, generator=generator).bfloat16() if bias else None)


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("bias", [pytest.param(False, marks=pytest.mark.slow), True])
def test_any_number_of_rows_gives_each_row_the_same_bits(
    inputs: int, outputs: int, bias: bool
) -> None:
    product, draw = layer(inputs, outputs, bias), random.Random(5)
    rows = torch.randn(700, inputs).bfloat16()
    whole = product(rows)
    assert whole.shape == (700, outputs)
    for count in (1, 2, 3, 7, 16, 31, 32, 33, 63, 64, 65, 100, 300, 513):
        start = draw.randrange(0, 700 - count)
        assert torch.equal(product(rows[start : start + count]), whole[start : start + count])


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_the_result_is_that_of_a_plain_linear(inputs: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16() * 0.05
    rows = torch.randn(70, inputs, generator=generator).bfloat16()
    expected = F.linear(rows.float(), weight.float())
    assert torch.allclose(Linear(weight)(rows).float(), expected, rtol=2e-2, atol=2e-2)


def test_other_kernels_are_found_out() -> None:
    """A product whose calls of 64 rows sum in another order loses exactly these."""
    weight = torch.randn(64, 256).bfloat16()

    def product(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] != 64:
            return F.linear(x, weight)
        return (
            F.linear(x[:, :128], weight[:, :128]).float()
            + F.linear(x[:, 128:], weight[:, 128:]).float()
        ).bfloat16()

    sizes = linear.calibrate(product, 256)
    assert 64 not in sizes and {16, 32} <= set(sizes)


@pytest.mark.parametrize("count", [1, 64, 65, 128, 333])
def test_an_mlp_in_pieces_gives_each_row_the_same_bits(count: int) -> None:
    gates = Linear(torch.randn(512, 128).bfloat16(), gated=True)
    down = layer(256, 128)
    norm = RmsNorm(torch.ones(128).bfloat16(), 1e-5)
    hidden = torch.randn(count, 128).bfloat16()
    lengths: list[int] = []

    def counting_down(rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        lengths.append(len(rows))
        return down(rows, residual=residual)

    pieces = Mlp(gates, counting_down, rows_at_once=64)(hidden, norm)
    assert torch.equal(pieces, Mlp(gates, down)(hidden, norm))
    assert sum(lengths) == count and max(lengths) <= 64 and max(lengths) - min(lengths) <= 1


def test_pieces_cover_every_row_whatever_sizes_agree() -> None:
    product = layer(128, 384)
    rows = torch.randn(1100, 128).bfloat16()
    whole = product(rows)
    for sizes in ((16,), (2, 4, 8, 16, 32), (1, 2, 16, 512), (16, 1024), linear.SIZES):
        product._sizes = sizes
        for count in (1, 15, 17, 33, 500, 1025, 1100):
            assert torch.equal(product(rows[:count]), whole[:count]), (sizes, count)


def test_a_wide_model_is_exact_over_chunks_and_batches(tmp_path: Path) -> None:
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 1}
    folder = make(tmp_path / "wide", "llama", num_attention_heads=16, **shape)
    draw = random.Random(2)
    prompts = [[draw.randrange(512) for _ in range(n)] for n in (200, 65, 3, 130, 40)]

    def run(step: int, chosen: list[list[int]]) -> list[list]:
        engine = Engine(EngineOptions(folder, limits=SchedulerLimits(max_step_tokens=step)))
        assert engine.exact
        for index, ids in enumerate(chosen):
            params = Sampling(12, logprobs=5)
            engine.add(Sequence((str(index), 0), list(ids), len(ids), params))
        tokens: list[list] = [[] for _ in chosen]
        while True:
            outputs = engine.step()
            for output in outputs:
                tokens[int(output.attempt_key[0])].append(output.token)
            if not outputs and not engine.scheduler.prefilling:
                return tokens

    alone = [run(512, [ids])[0] for ids in prompts]
    assert run(512, prompts) == run(64, prompts) == alone
