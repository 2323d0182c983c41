"""A mixture of experts against the plainest one, and each of its rows against that row alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from diptych.engine.decoder import Mlp
from diptych.engine.errors import KernelUnavailable
from diptych.engine.kernels import native_ops
from diptych.engine.linear import make_linear
from diptych.engine.moe import MixtureOfExperts, SequentialExperts
from diptych.engine.ops import Ops, RmsNorm

COUNT, HIDDEN, WIDE = 8, 64, 96


def ops_named(name: str) -> Ops:
    try:
        return Ops() if name == "torch" else native_ops(64, 1, name)
    except KernelUnavailable as error:
        pytest.skip(str(error))


class Random:
    """Weights of a mixture, and the mixture."""

    def __init__(self, dtype: torch.dtype, ops: Ops, chosen: int, renormalize: bool) -> None:
        generator = torch.Generator().manual_seed(3)

        def random(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * 0.2).to(dtype)

        self.norm = RmsNorm(1 + random(HIDDEN), 1e-5)
        self.router = random(COUNT, HIDDEN)
        self.gate_up, self.down = random(COUNT, 2 * WIDE, HIDDEN), random(COUNT, HIDDEN, WIDE)
        experts = [
            Mlp(make_linear(gate_up, gated=True, ops=ops), make_linear(down, ops=ops))
            for gate_up, down in zip(self.gate_up, self.down, strict=True)
        ]
        self.moe = MixtureOfExperts(
            make_linear(self.router, ops=ops), SequentialExperts(experts), chosen, renormalize, ops
        )

    def plainly(self, hidden: torch.Tensor) -> torch.Tensor:
        """Row by row, expert by expert, in float64."""
        wide = hidden.double()
        x = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * self.norm.weight.double()
        out = wide.clone()
        for index, row in enumerate(x):
            scores = torch.softmax(self.router.double() @ row, 0)
            best = scores.argsort(descending=True)[: self.moe.experts_per_token]
            total = scores[best].sum() if self.moe.renormalize else 1.0
            for expert in best:
                gate, up = (self.gate_up[expert].double() @ row).chunk(2)
                result = self.down[expert].double() @ (F.silu(gate) * up)
                out[index] += scores[expert] / total * result
        return out


def rows(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(9)).to(dtype)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("chosen", [1, 3, COUNT])
def test_the_mixture_is_the_weighted_sum_of_the_chosen(chosen: int, renormalize: bool) -> None:
    mixture = Random(torch.float32, Ops(), chosen, renormalize)
    hidden = rows(50, torch.float32)
    ours = mixture.moe(hidden, mixture.norm)
    assert float((ours - mixture.plainly(hidden)).abs().max()) < 1e-5


@pytest.mark.parametrize("name", ["torch", "amx", "avx512", "avx2"])
def test_a_row_has_the_same_bits_beside_any_others(name: str) -> None:
    mixture = Random(torch.bfloat16, ops_named(name), 3, True)
    hidden = rows(200, torch.bfloat16)
    alone = torch.cat([mixture.moe(row[None].clone(), mixture.norm) for row in hidden])
    generator = torch.Generator().manual_seed(1)
    for size in (2, 3, 17, 64, 200):
        chosen = torch.randperm(200, generator=generator)[:size]
        assert torch.equal(mixture.moe(hidden[chosen], mixture.norm), alone[chosen]), size
    plain = mixture.plainly(hidden)
    error = (alone.double() - plain).abs().mean() / (plain - hidden.double()).abs().mean()
    assert float(error) < 0.02, "bf16 of the right numbers, but for near-ties of the router"


@pytest.mark.parametrize("count", [1, 2, 33])
def test_of_experts_preferred_equally_the_first_are_chosen(count: int) -> None:
    mixture = Random(torch.bfloat16, Ops(), 3, True)
    mixture.moe.router = make_linear(torch.zeros(COUNT, HIDDEN).bfloat16(), ops=Ops())
    weights, ids = mixture.moe.route(rows(count, torch.bfloat16))
    assert ids.tolist() == [[0, 1, 2]] * count
    assert torch.allclose(weights, torch.full((count, 3), 1 / 3))


def test_no_rows_are_no_rows() -> None:
    mixture = Random(torch.float32, Ops(), 3, True)
    assert mixture.moe(rows(0, torch.float32), mixture.norm).shape == (0, HIDDEN)
