"""Where a step's queries and keys are, in the form that every attention library for GPUs takes.

That form has no padding: the rows of all sequences lie one after the other ("varlen" in
flash-attention), and tensors say where each sequence begins and how many keys it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..attention import RowSpan


@dataclass(frozen=True, slots=True)
class Varlen:
    """Rows of S sequences, one after the other.

    A sequence's keys are those of its `kv_lengths` first positions, and its rows are the last of
    these. Tensors are int32, on the device of the model.
    """

    first_row: int  #: In the step.
    row_count: int
    query_starts: torch.Tensor  #: [S + 1] where each sequence's rows begin, from `first_row` on.
    kv_lengths: torch.Tensor  #: [S]; 0 for a row of padding.
    block_table: torch.Tensor  #: [S, W] blocks; 0 behind a sequence's own.
    max_query_rows: int  #: An upper bound, known to the host, of a sequence's rows.
    max_kv_length: int  #: An upper bound, known to the host, of `kv_lengths`.
    host: Varlen | None = None  #: The same on the host, where this is on a GPU.

    @property
    def sequences(self) -> int:
        """The number S of sequences."""
        return len(self.kv_lengths)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where queries and keys are: what a device must have of it."""
        return self.query_starts, self.kv_lengths, self.block_table

    def to(self, device: torch.device) -> Varlen:
        """Return a copy on `device`; the host does not wait for it."""
        return self.on_device(send_together(self.tensors, device))

    def on_device(self, tensors: Sequence[torch.Tensor]) -> Varlen:
        """Return the same with its `tensors` on the device."""
        query_starts, kv_lengths, block_table = tensors
        return replace(
            self,
            query_starts=query_starts,
            kv_lengths=kv_lengths,
            block_table=block_table,
            host=self,
        )


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor on `device`, from pinned memory, so the host does not wait for a GPU."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def send_together(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return host tensors on `device`: one pinned buffer, one copy that the host does not wait for.

    Every tensor begins at a multiple of 16 bytes, as kernels like it.
    """
    if device.type == "cpu":
        return list(tensors)
    starts = [0]
    for tensor in tensors:
        starts.append(starts[-1] + -(-tensor.nbytes // 16) * 16)
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    for tensor, start in zip(tensors, starts, strict=False):
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        packed[start : start + tensor.nbytes] = flat
    on_device = packed.to(device, non_blocking=True)
    return [
        on_device[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, start in zip(tensors, starts, strict=False)
    ]


def split_by_phase(spans: Sequence[RowSpan]) -> list[Varlen]:
    """Return runs of prefill and of decode, in the order of their rows.

    An engine's step has at most two runs, or more if some of its decoding sequences have drafts. The
    phases are apart because a row of decode has few queries for its keys and wants another grid of
    programs.
    """
    runs: list[list[RowSpan]] = []
    for span in spans:
        if runs and runs[-1][-1].is_decode == span.is_decode:
            runs[-1].append(span)
        else:
            runs.append([span])
    return [_varlen(run) for run in runs]


def _varlen(spans: list[RowSpan]) -> Varlen:
    """Return the form of spans that lie one after the other, without gaps."""
    first_row = spans[0].first_row
    starts = [span.first_row - first_row for span in spans]
    kv_lengths = [span.end_position for span in spans]
    row_count = sum(span.row_count for span in spans)
    assert starts[-1] + spans[-1].row_count == row_count, spans
    width = max(len(span.blocks) for span in spans)
    table = [span.blocks + [0] * (width - len(span.blocks)) for span in spans]
    return Varlen(
        first_row=first_row,
        row_count=row_count,
        query_starts=torch.tensor([*starts, row_count], dtype=torch.int32),
        kv_lengths=torch.tensor(kv_lengths, dtype=torch.int32),
        block_table=torch.tensor(table, dtype=torch.int32),
        max_query_rows=max(span.row_count for span in spans),
        max_kv_length=max(kv_lengths),
    )
