"""The rows of a step: which ids are computed, where their KV goes, whose logits are needed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .attention import RowSpan, StepRows
from .pacing import StepWork, attended_pairs
from .scheduler import StepPlan
from .sequence import Sequence


@dataclass(slots=True)
class StepBatch:
    """The rows of one step.

    Of each sequence these are the next `count` ids that have no KV yet, and its drafts if it
    decodes. The sequences that are prefilled come first.
    """

    sequences: list[tuple[Sequence, int]]  #: with the number of ids, drafts not counted
    token_ids: torch.Tensor  #: int64 [rows]
    step_rows: StepRows  #: where the rows are in their sequences, and where their KV goes
    logit_rows: torch.Tensor  #: int64: rows whose logits are needed
    #: index in `logit_rows` of each sequence's last id; its drafts follow. A sequence whose last id
    #: is not computed yet has no logits, and the index means nothing.
    logit_starts: list[int]

    def work(self, prefill_count: int) -> StepWork:
        """Return the counts that the cost of the step is predicted from.

        The first `prefill_count` sequences are being prefilled.
        """
        prefill = self.step_rows.spans[:prefill_count]
        decode = self.step_rows.spans[prefill_count:]
        return StepWork(
            decode_rows=sum(span.row_count for span in decode),
            decode_kv_tokens=sum(span.first_position + span.row_count for span in decode),
            prefill_tokens=sum(span.row_count for span in prefill),
            attended_pairs=sum(
                attended_pairs(span.row_count, span.first_position) for span in prefill
            ),
            prefill_prompts=prefill_count,
        )


def build_batch(plan: StepPlan, block_tokens: int) -> StepBatch:
    """Lays out the rows of a plan: all prefill chunks, then the decoding sequences."""
    prefill_count = len(plan.prefill)
    sequences = [*plan.prefill, *((sequence, 1) for sequence in plan.decode)]
    token_ids: list[int] = []
    positions: list[int] = []
    slot_blocks: list[int] = []
    logit_rows: list[int] = []
    logit_starts: list[int] = []
    spans: list[RowSpan] = []
    for index, (sequence, count) in enumerate(sequences):
        is_decode = index >= prefill_count
        drafts = sequence.drafts if is_decode else []
        start = sequence.computed_tokens
        end = start + count + len(drafts)
        # A sequence may have more blocks than its rows reach: those are room to grow.
        block_table = sequence.blocks[: -(-end // block_tokens)]
        spans.append(
            RowSpan(
                first_row=len(token_ids),
                row_count=end - start,
                first_position=start,
                blocks=block_table,
                is_decode=is_decode and not drafts,
            )
        )
        token_ids += sequence.token_ids[start : start + count]
        token_ids += drafts
        positions += range(start, end)
        if end - start == 1:
            slot_blocks.append(block_table[-1])
        else:
            slot_blocks += [block_table[position // block_tokens] for position in range(start, end)]
        logit_starts.append(len(logit_rows))
        # The last id's logits give the next token; those of a draft give the one behind the draft.
        if start + count == len(sequence.token_ids):
            logit_rows += range(len(token_ids) - 1 - len(drafts), len(token_ids))

    row_positions = torch.tensor(positions)
    step_rows = StepRows(
        positions=row_positions,
        slot_blocks=torch.tensor(slot_blocks),
        slot_offsets=row_positions % block_tokens,
        spans=spans,
    )
    return StepBatch(
        sequences=sequences,
        token_ids=torch.tensor(token_ids),
        step_rows=step_rows,
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        logit_starts=logit_starts,
    )
