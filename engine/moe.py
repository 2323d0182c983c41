"""A mixture of experts: a router sends each row through a few of many MLPs.

Exact: a row's experts, their results and the order in which these are summed depend on that row
alone. Experts are summed in the order of the router's preference, in float32, rounded once. Of
experts that are preferred equally, the one with the lower index comes first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .decoder import Mlp
from .linear import Linear
from .ops import Norm, Ops


@dataclass(slots=True)
class Moe:
    """`hidden + sum of weight x expert(norm(hidden))` over each row's `chosen` experts.

    `renormalize`: the weights of a row's experts sum to 1; else they are what the softmax over all
    experts gave them.
    """

    router: Linear
    experts: list[Mlp]
    chosen: int
    renormalize: bool
    ops: Ops

    def __call__(self, hidden: torch.Tensor, norm: Norm) -> torch.Tensor:
        x = self.ops.norm(hidden, norm)
        weights, experts = self.route(x)
        results = self._run(x, experts)
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

    def _run(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Every expert over the rows that chose it: [T, chosen, hidden]."""
        rows, chosen = experts.shape
        pairs = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=len(self.experts)).tolist()
        results = x.new_empty(rows * chosen, x.shape[1])
        pieces = pairs.split(counts)
        for expert, piece in zip(self.experts, pieces, strict=True):
            if len(piece):
                results[piece] = expert.down(expert.gate_up(x[piece // chosen]))
        return results.view(rows, chosen, x.shape[1])
