"""A mixture of experts: a router sends each row through a few of many MLPs.

The mixture is exact: a row's experts, their results and the order in which these are summed depend
on that row alone. The results are summed in the order of the router's preference, in float32, and
rounded once. Of experts that are preferred equally, the one with the lower index comes first.

In shapes, T is the number of rows, and `chosen` the number of experts that each row goes through.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .decoder import Mlp
from .ops import ExpertFunction, LinearLayer, Ops, RmsNorm


@dataclass(slots=True)
class SequentialExperts:
    """Computes one expert after the other, each over the rows that chose it."""

    experts: list[Mlp]  #: By the index that the router gives them.

    def __call__(self, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the results [T, chosen, hidden] of `rows` [T, hidden] and ids [T, chosen]."""
        row_count, experts_per_row = chosen.shape
        hidden_size = rows.shape[1]
        pairs_by_expert = chosen.flatten().argsort(stable=True)
        pair_counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        results = rows.new_empty(row_count * experts_per_row, hidden_size)
        for expert, pairs in zip(self.experts, pairs_by_expert.split(pair_counts), strict=True):
            if len(pairs):
                results[pairs] = expert.down(expert.gate_up(rows[pairs // experts_per_row]))
        return results.view(row_count, experts_per_row, hidden_size)


@dataclass(slots=True)
class MixtureOfExperts:
    """The block `hidden + sum of weight x expert(norm(hidden))` over each row's experts."""

    router: LinearLayer  #: From normed hidden rows to a score for each expert.
    experts: ExpertFunction
    experts_per_token: int

    #: True: the weights of a row's experts are divided by their sum. False: the weights are what
    #: the softmax over all experts gave these.
    renormalize: bool

    ops: Ops

    def __call__(self, hidden: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        """Return the block's result, [T, hidden], of `hidden` rows [T, hidden]."""
        rows = self.ops.norm(hidden, norm)
        weights, chosen = self.route(rows)
        results = self.experts(rows, chosen)
        total = results[:, 0].float() * weights[:, :1]
        for rank in range(1, self.experts_per_token):
            total += results[:, rank].float() * weights[:, rank : rank + 1]
        return hidden + total.to(hidden.dtype)

    def route(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the float32 weights and the ids of each row's experts, both [T, chosen].

        The experts of a row stand in the order of the router's preference.
        """
        scores = torch.softmax(self.router(rows).float(), dim=-1)
        sorted_scores, sorted_ids = scores.sort(dim=-1, descending=True, stable=True)
        weights = sorted_scores[:, : self.experts_per_token]
        expert_ids = sorted_ids[:, : self.experts_per_token]
        if self.renormalize:
            # added one by one: the order of sums must not depend on the number of rows
            total = weights[:, :1].clone()
            for rank in range(1, self.experts_per_token):
                total += weights[:, rank : rank + 1]
            weights = weights / total
        return weights, expert_ids
