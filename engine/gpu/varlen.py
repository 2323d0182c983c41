"""Where a step's queries and keys are, as every attention library for GPUs wants to be told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..attention import Piece


@dataclass(frozen=True, slots=True)
class Varlen:
    """Rows of S sequences, one after the other, from row `first` of the step on.

    A sequence's keys are those of its `kv_len` first positions, its rows the last of them. Tensors
    are int32, on the device of the model; `max_q` and `max_kv` are upper bounds known to the host.
    """

    first: int
    rows: int
    q_start: torch.Tensor  #: [S + 1], counted from `first`
    kv_len: torch.Tensor  #: [S]; 0: a row that pads
    table: torch.Tensor  #: [S, W] blocks; 0 behind a sequence's own
    max_q: int
    max_kv: int
    host: Varlen | None = None  #: the same on the host, where this is on a GPU

    @property
    def sequences(self) -> int:
        return len(self.kv_len)

    def to(self, device: torch.device) -> Varlen:
        """Copies to `device` without waiting for it (from pinned memory, where that is one)."""
        return replace(
            self,
            q_start=carry(self.q_start, device),
            kv_len=carry(self.kv_len, device),
            table=carry(self.table, device),
            host=self,
        )


def carry(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on `device`; the host does not wait for a GPU."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def parts(pieces: Sequence[Piece]) -> list[Varlen]:
    """Runs of prefill and of decode, in the order of their rows: at most two in an engine's step.

    Apart, because a row of decode has few queries for its keys and wants another grid.
    """
    runs: list[list[Piece]] = []
    for piece in pieces:
        if runs and runs[-1][-1].decode == piece.decode:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [_varlen(run) for run in runs]


def _varlen(pieces: list[Piece]) -> Varlen:
    first, counts = pieces[0].row, [piece.count for piece in pieces]
    ends = [piece.start + piece.count for piece in pieces]
    starts = [piece.row - first for piece in pieces]
    width = max(len(piece.blocks) for piece in pieces)
    table = [piece.blocks + [0] * (width - len(piece.blocks)) for piece in pieces]
    rows = sum(counts)
    assert starts[-1] + counts[-1] == rows, pieces  # without gaps
    return Varlen(
        first,
        rows,
        torch.tensor([*starts, rows], dtype=torch.int32),
        torch.tensor(ends, dtype=torch.int32),
        torch.tensor(table, dtype=torch.int32),
        max(counts),
        max(ends),
    )
