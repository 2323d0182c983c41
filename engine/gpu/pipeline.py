"""Decode with the device one step ahead: step n + 1 is launched before the ids of n are read.

Whether a sequence ends with an id is known one step late: its row of the step under way is then
computed for nothing, into blocks that are its own until that step is over.

Life: `start` launches the first step. Each `step` launches the next one and books the one under
way, until something else must be planned; then one more `step` books the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ...protos.frames import Token
from ..pacing import StepWork
from ..sampler import SamplingFault, find_damage, keeps_logits, needs_no_sort
from ..scheduler import Scheduler
from ..sequence import Sequence, SequenceOutput
from .plan import DecodeRow


class StepRunner(Protocol):
    """What the pipeline uses of `decode.DecodeRunner`."""

    row_limit: int  #: Rows of a step, at most.

    def launch(self, rows: list[DecodeRow]) -> StartedStep:
        """Start a step without waiting for it."""
        ...


class StartedStep(Protocol):
    """What the pipeline uses of `decode.LaunchedStep`."""

    def read(self) -> tuple[list[int], list[float]]:
        """Wait for the step; return each row's next id and largest logit."""
        ...


@dataclass(slots=True)
class StepAhead:
    """A step that the device computes, and the sequences of its rows."""

    started: StartedStep
    sequences: list[Sequence]  #: In the order of the rows.


def device_can_sample(sequence: Sequence) -> bool:
    """Return whether `sampling.pick_tokens` can draw the next id of a sequence.

    That id must be a function of logits, seed and position alone, and need no sort.
    """
    sampling = sequence.sampling
    return (
        not sequence.drafts
        and sampling.logprobs is None
        and keeps_logits(sequence)
        and needs_no_sort(sampling)
    )


class DecodePipeline:
    """Decode steps of `scheduler` on `runner`.

    `book_token` books a sequence's token, or why it has none, and returns what to deliver.
    `max_len` is the length of a sequence in tokens, at most.
    """

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        book_token: Callable[[Sequence, Token | SamplingFault], SequenceOutput | None],
        max_len: int,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._book_token = book_token
        self._max_len = max_len  #: Tokens of a sequence, at most.
        self._ahead: StepAhead | None = None  #: The step under way.
        self.work = StepWork()  #: What the step that was booked last computed.

    def can_run(self, sequences: list[Sequence]) -> bool:
        """Return whether a step of pure decode over these sequences can be run here."""
        if len(sequences) > self._runner.row_limit:
            return False
        return all(map(device_can_sample, sequences))

    def start(self, sequences: list[Sequence]) -> None:
        """Launch a step over sequences whose blocks are there. No step may be under way."""
        assert self._ahead is None
        rows = [_row(sequence, sequence.token_ids[-1], 0) for sequence in sequences]
        self._ahead = StepAhead(self._runner.launch(rows), list(sequences))

    def finish_abandoned_step(self) -> None:
        """Wait for the step under way if all of its sequences have ended, and forget it."""
        if self._ahead and not any(map(self._is_running, self._ahead.sequences)):
            self._ahead.started.read()
            self._ahead = None

    def wait_for_device(self) -> None:
        """Wait for the step under way, so that the device writes to no block any more."""
        if self._ahead:
            self._ahead.started.read()

    def step(self) -> list[SequenceOutput] | None:
        """Launch the next step and book the one under way; return None if none is under way."""
        self.finish_abandoned_step()
        if self._ahead is None:
            return None
        current = self._ahead
        self._ahead = None  # if the launch fails, nothing is under way
        self._ahead = self._launch_next(current)
        self.work = StepWork(
            decode_rows=len(current.sequences),
            decode_kv_tokens=sum(sequence.computed_tokens + 1 for sequence in current.sequences),
        )
        token_ids, peaks = current.started.read()
        outputs: list[SequenceOutput] = []
        for sequence, token_id, peak in zip(current.sequences, token_ids, peaks, strict=True):
            if not self._is_running(sequence):
                continue  # it ended while this step was computed
            position = len(sequence.token_ids)
            self._scheduler.record_computed(sequence, 1)
            token = find_damage(peak, position) or Token(token_id)
            output = self._book_token(sequence, token)
            if output:
                outputs.append(output)
        return outputs

    def _is_running(self, sequence: Sequence) -> bool:
        """Return whether the scheduler still has this sequence among those that decode."""
        is_live = self._scheduler.live.get(sequence.name) is sequence
        return is_live and sequence.queue is self._scheduler.running

    def _launch_next(self, current: StepAhead) -> StepAhead | None:
        """Launch the step behind `current`, whose ids are not known yet.

        Returns None where something else must be planned first, or nothing is left to decode.
        """
        if self._scheduler.must_plan:
            return None
        rows: list[DecodeRow] = []
        sequences: list[Sequence] = []
        for index, sequence in enumerate(current.sequences):
            if not self._is_running(sequence) or not self._may_grow(sequence):
                continue
            # room for the KV of two ids: the last one that is known, which the step under way
            # writes, and the one which that step gives
            if not self._scheduler.reserve_ahead(sequence, 2):
                return None  # a sequence would have to be preempted: the scheduler plans which
            rows.append(_row(sequence, -1 - index, 1))
            sequences.append(sequence)
        return StepAhead(self._runner.launch(rows), sequences) if rows else None

    def _may_grow(self, sequence: Sequence) -> bool:
        """Return whether the sequence goes on behind the id that is under way, by its lengths."""
        return (
            sequence.generated_tokens + 1 < sequence.sampling.max_tokens
            and len(sequence.token_ids) + 1 < self._max_len
        )


def _row(sequence: Sequence, source: int, ahead: int) -> DecodeRow:
    """Return the row of `sequence` in a step that is `ahead` ids before what the host knows.

    `source` is the row's id, or names the row of the step before that gives it (`DecodeRow`).
    """
    sampling = sequence.sampling
    length = len(sequence.token_ids) + ahead
    return DecodeRow(
        source=source,
        position=length - 1,
        blocks=sequence.blocks,
        seed=sampling.seed,
        draw=length,
        temperature=sampling.temperature,
    )
