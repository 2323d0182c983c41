"""Decode with the device one step ahead: step n + 1 is launched before the ids of n are read.

Whether a sequence ends with an id is known one step late: its row of the step under way is then
computed for nothing, into blocks that are its own until that step is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ...protos.frames import Token
from ..pacing import StepWork
from ..sampler import Fault, damage
from ..scheduler import Scheduler
from ..sequence import Sequence, SequenceOutput
from .plan import Row


class Runner(Protocol):
    """What of `decode.DecodeRunner` is used here."""

    most: int

    def launch(self, rows: list[Row]) -> Started: ...


class Started(Protocol):
    def read(self) -> tuple[list[int], list[float]]: ...


@dataclass(slots=True)
class Launched:
    ticket: Started
    sequences: list[Sequence]


def simple(seq: Sequence) -> bool:
    """Its next id is a function of logits, seed and position alone, without a sort: `pick` does."""
    s = seq.sampling
    return (
        not seq.drafts
        and s.logprobs is None
        and s.grammar is None
        and s.repetition_penalty == 1
        and not (s.presence_penalty or s.frequency_penalty or s.logit_bias)
        and (s.temperature == 0 or (s.top_k == 0 and s.top_p >= 1 and s.min_p <= 0))
        and seq.generated_tokens >= s.min_tokens
    )


class Pipeline:
    """Decode steps of `scheduler` on `runner`; `tell` books an id and gives what to deliver."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        tell: Callable[[Sequence, Token | Fault], SequenceOutput | None],
        max_len: int,
    ) -> None:
        self._runner, self._scheduler, self._tell = runner, scheduler, tell
        self._max_len = max_len
        self._ahead: Launched | None = None
        self.work = StepWork()  #: of the step that was booked last

    def takes(self, sequences: list[Sequence]) -> bool:
        """A step of pure decode over these can be run here."""
        return len(sequences) <= self._runner.most and all(map(simple, sequences))

    def start(self, sequences: list[Sequence]) -> None:
        """Launches a step over sequences whose blocks are there. None may be under way."""
        assert self._ahead is None
        rows = [_row(seq, seq.token_ids[-1], 0) for seq in sequences]
        self._ahead = Launched(self._runner.launch(rows), list(sequences))

    def settle(self) -> None:
        """Waits until no step is under way that nobody is going to book."""
        if self._ahead and not any(map(self._live, self._ahead.sequences)):
            self._ahead.ticket.read()
            self._ahead = None

    def wait(self) -> None:
        """Waits for the device: what it still writes is written when blocks change their owner."""
        if self._ahead:
            self._ahead.ticket.read()

    def step(self) -> list[SequenceOutput] | None:
        """Books the step under way, with the next one launched; None if there is none."""
        self.settle()
        if self._ahead is None:
            return None
        now, self._ahead = self._ahead, None
        self._ahead = self._run_ahead(now)
        keys = sum(seq.computed_tokens + 1 for seq in now.sequences)
        self.work = StepWork(decode_rows=len(now.sequences), decode_kv_tokens=keys)
        outputs = []
        for seq, token, peak in zip(now.sequences, *now.ticket.read(), strict=True):
            if self._live(seq):  # else it ended while this was computed
                position = len(seq.token_ids)
                self._scheduler.record_computed(seq, 1)
                outputs.append(self._tell(seq, damage(peak, position) or Token(token)))
        return [output for output in outputs if output]

    def _live(self, seq: Sequence) -> bool:
        return self._scheduler.live.get(seq.name) is seq and seq.queue is self._scheduler.running

    def _run_ahead(self, now: Launched) -> Launched | None:
        """The step behind `now`, whose ids are not known yet; None where something else is due."""
        if self._scheduler.must_plan:
            return None
        rows, sequences = [], []
        for index, seq in enumerate(now.sequences):
            if not self._live(seq) or not self._goes_on(seq):
                continue
            if not self._scheduler.reserve_ahead(seq, 2):
                return None  # somebody would have to be preempted: `plan` knows whom
            rows.append(_row(seq, -1 - index, 1))
            sequences.append(seq)
        return Launched(self._runner.launch(rows), sequences) if rows else None

    def _goes_on(self, seq: Sequence) -> bool:
        """It does not end with the id under way for its length."""
        return (
            seq.generated_tokens + 1 < seq.sampling.max_tokens
            and len(seq.token_ids) + 1 < self._max_len
        )


def _row(seq: Sequence, source: int, ahead: int) -> Row:
    """`seq` in a step `ahead` of its ids."""
    s, known = seq.sampling, len(seq.token_ids) + ahead
    return Row(source, known - 1, seq.blocks, s.seed, known, s.temperature)
