"""The largest steps that an engine's limits allow, run once to learn what memory a step takes.

A pool that takes all that the weights leave would fail with the first long prompt. So the pool is
sized, or checked, when these have run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .attention import RowSpan, StepRows
from .decoder import Decoder
from .options import SchedulerLimits

SCRATCH_BLOCK = 1  #: Where all rows write their KV: what they read there has no meaning.
SCRATCH_BLOCKS = 2  #: Of the pool that these steps need.


def largest_steps(decoder: Decoder, limits: SchedulerLimits) -> list[Callable[[], None]]:
    """Returns the largest step with a prompt, and the largest one of decode alone.

    Their graphs keep memory of their own on a GPU, so both count. `decoder` has a scratch pool.
    """
    with_prompt = _step(limits, prompt_rows=limits.max_step_tokens)
    decode_alone = _step(limits, prompt_rows=0)
    return [lambda: _run(decoder, with_prompt), lambda: _run(decoder, decode_alone)]


def _step(limits: SchedulerLimits, prompt_rows: int) -> StepRows:
    """Returns the rows of `prompt_rows` ids of a prompt, and of each sequence that may run."""
    block = limits.block_tokens
    spans: list[RowSpan] = []
    if prompt_rows:
        blocks = [SCRATCH_BLOCK] * -(-prompt_rows // block)
        spans.append(RowSpan(0, prompt_rows, 0, blocks, is_decode=False))
    for index in range(limits.max_running):
        row = prompt_rows + index
        spans.append(RowSpan(row, 1, 0, [SCRATCH_BLOCK], is_decode=True))
    positions = torch.cat([torch.arange(prompt_rows), torch.zeros(limits.max_running)]).long()
    slot_blocks = torch.full_like(positions, SCRATCH_BLOCK)
    return StepRows(positions, slot_blocks, positions % block, spans)


def _run(decoder: Decoder, step: StepRows) -> None:
    """Computes the step, and logits for each of its sequences."""
    hidden = decoder.hidden(torch.zeros_like(step.positions), step)
    decoder.logits(hidden, torch.tensor([span.first_row for span in step.spans]))
