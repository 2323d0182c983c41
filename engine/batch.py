"""The rows of a step: which ids are computed, where their KV goes, whose logits are wanted."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .attention import Meta, Piece
from .pacing import Work, pairs
from .scheduler import Plan
from .sequence import Sequence


@dataclass(slots=True)
class Batch:
    """Of each sequence `count` ids from its computed ones on; a decoding one also its drafts."""

    sequences: list[tuple[Sequence, int]]
    ids: torch.Tensor  #: int64 [T]
    meta: Meta
    wanted: torch.Tensor  #: int64: rows whose logits are needed
    at: list[int]  #: index in `wanted` of each sequence's last id; its drafts follow

    def work(self, prefills: int) -> Work:
        """What the step costs by; the first `prefills` sequences are being prefilled."""
        prefill, decode = self.meta.pieces[:prefills], self.meta.pieces[prefills:]
        return Work(
            rows=sum(piece.count for piece in decode),
            keys=sum(piece.start + piece.count for piece in decode),
            tokens=sum(piece.count for piece in prefill),
            pairs=sum(pairs(piece.count, piece.start) for piece in prefill),
            prompts=prefills,
        )


def build(plan: Plan, block_tokens: int) -> Batch:
    sequences = [*plan.prefill, *((seq, 1) for seq in plan.decode)]
    ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    wanted: list[int] = []
    at: list[int] = []
    pieces: list[Piece] = []
    for index, (seq, count) in enumerate(sequences):
        drafts = seq.drafts if index >= len(plan.prefill) else []
        start, end = seq.computed_tokens, seq.computed_tokens + count + len(drafts)
        table = seq.blocks[: -(-end // block_tokens)]
        alone = index >= len(plan.prefill) and not drafts
        pieces.append(Piece(len(ids), end - start, start, table, alone))
        ids += seq.token_ids[start : start + count]
        ids += drafts
        positions += range(start, end)
        if end - start == 1:
            blocks.append(table[-1])
        else:
            blocks += [table[position // block_tokens] for position in range(start, end)]
        at.append(len(wanted))
        wanted += range(len(ids) - 1 - len(drafts), len(ids))
    where = torch.tensor(positions)
    meta = Meta(where, torch.tensor(blocks), where % block_tokens, pieces)
    return Batch(sequences, torch.tensor(ids), meta, torch.tensor(wanted), at)
