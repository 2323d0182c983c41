"""A mixture of experts: a router sends each row through a few of many MLPs.

Exact: a row's experts, their results and the order in which these are summed depend on that row
alone. Experts are summed in the order of the router's preference, in float32, rounded once. Of
experts that are preferred equally, the one with the lower index comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .decoder import Mlp
from .linear import Linear
from .ops import Norm, Ops

#: x [T, hidden] and the ids of each row's experts [T, chosen] -> their results [T, chosen, hidden]
Experts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class Each:
    """Every expert over the rows that chose it, one after the other."""

    experts: list[Mlp]

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        rows, count = chosen.shape
        pairs = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        results = x.new_empty(rows * count, x.shape[1])
        for expert, piece in zip(self.experts, pairs.split(counts), strict=True):
            if len(piece):
                results[piece] = expert.down(expert.gate_up(x[piece // count]))
        return results.view(rows, count, x.shape[1])


@dataclass(slots=True)
class Moe:
    """`hidden + sum of weight x expert(norm(hidden))` over each row's `chosen` experts.

    `renormalize`: the weights of a row's experts sum to 1; else they are what the softmax over all
    experts gave them.
    """

    router: Linear
    experts: Experts
    chosen: int
    renormalize: bool
    ops: Ops

    def __call__(self, hidden: torch.Tensor, norm: Norm) -> torch.Tensor:
        x = self.ops.norm(hidden, norm)
        weights, chosen = self.route(x)
        results = self.experts(x, chosen)
        total = results[:, 0].float() * weights[:, :1]
        for rank in range(1, self.chosen):
            total += results[:, rank].float() * weights[:, rank : rank + 1]
        return hidden + total.to(hidden.dtype)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 weights and ids of each row's experts, [T, chosen], most preferred first."""
        scores = torch.softmax(self.router(x).float(), dim=-1)
        ranked, ids = scores.sort(dim=-1, descending=True, stable=True)
        weights, ids = ranked[:, : self.chosen], ids[:, : self.chosen]
        if self.renormalize:
            total = weights[:, :1].clone()
            for rank in range(1, self.chosen):
                total += weights[:, rank : rank + 1]
            weights = weights / total
        return weights, ids
