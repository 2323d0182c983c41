"""The largest steps that an engine's limits allow, run once to learn what memory a step takes.

A pool that takes all that the weights leave would fail with the first long prompt. So the pool is
sized, or checked, when these have run. What a step allocates grows with its rows, and hardly with
the length of its sequences, whose KV is in the pool. So the sequences here are short. What the
device keeps between decode steps is there as well while the largest one of them runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .attention import RowSpan, StepRows
from .decoder import Decoder
from .gpu.plan import kept_bytes
from .options import SchedulerLimits

SCRATCH_BLOCK = 1  #: Where all rows write their KV: what they read there has no meaning.
SCRATCH_BLOCKS = 2  #: Of the pool that these steps need.


def largest_steps(decoder: Decoder, limits: SchedulerLimits) -> list[Callable[[], None]]:
    """Returns functions that run the largest step with a prompt, and the largest of decode alone.

    Both count: on a GPU, decode alone runs as CUDA graphs, whose memory no other step can use. The
    second function also allocates as much as is kept between decode steps (`gpu.plan.kept_bytes`).
    `decoder` has a pool of `SCRATCH_BLOCKS` blocks.
    """
    block = limits.block_tokens
    decode_rows = [1] * limits.max_running
    # While few sequences run, each may have rows for its drafts too.
    draft_rows = [1 + limits.draft_tokens] * min(limits.draft_below, limits.max_running)
    running_rows = max(decode_rows, draft_rows, key=sum)
    # `max_step_tokens` limits the prompt's rows alone.
    with_prompt = _step([limits.max_step_tokens, *running_rows], block)
    decode_alone = _step(decode_rows, block)
    kept = kept_bytes(limits.max_running, decoder.spec.vocab)

    def run_decode_alone() -> None:
        buffers = torch.empty(kept, dtype=torch.uint8, device=decoder.weights.embedding.device)
        _run(decoder, decode_alone, sum(decode_rows))
        del buffers  # only now: they are there beside the step

    return [lambda: _run(decoder, with_prompt, 1 + sum(running_rows)), run_decode_alone]


def _step(row_counts: list[int], block_tokens: int) -> StepRows:
    """Returns the rows of a step of new sequences, which have `row_counts` rows."""
    spans: list[RowSpan] = []
    first_row = 0
    for row_count in row_counts:
        span = RowSpan(
            first_row=first_row,
            row_count=row_count,
            first_position=0,
            blocks=[SCRATCH_BLOCK] * -(-row_count // block_tokens),
            is_decode=row_count == 1,
        )
        spans.append(span)
        first_row += row_count
    positions = torch.cat([torch.arange(row_count) for row_count in row_counts])
    slot_blocks = torch.full_like(positions, SCRATCH_BLOCK)
    return StepRows(positions, slot_blocks, positions % block_tokens, spans)


def _run(decoder: Decoder, step: StepRows, logit_count: int) -> None:
    """Computes the step, and the logits of its last `logit_count` rows.

    Of a prompt that is its last row, of a running sequence each row.
    """
    hidden = decoder.hidden(torch.zeros_like(step.positions), step)
    row_count = len(step.positions)
    decoder.logits(hidden, torch.arange(row_count - logit_count, row_count))
