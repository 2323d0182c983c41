"""Decode with the device one step ahead: step n + 1 is launched before the ids of n are read.

Whether a sequence ends with an id is known one step late. Its row of the step under way is then
computed for nothing, into blocks that are in the pool again. That does no harm: the device computes
steps in the order in which they were launched, so a later owner's KV comes later, and the engine
waits for the device before it hands blocks to transfers (`wait_for_device`).

What may come behind an id may depend on that id (a grammar, a budget of thinking). Even then the
layers of step n + 1 are launched before the ids of step n are read. Its sampling is launched once
they have been read.

To *book* a step is to add the ids that it drew to the host's sequences. A *slot* is what the device
keeps of one sequence for its sampling (`slots.py`).

Life: `start` launches the first step. Each `step` launches the next one and books the one under
way, until something else must be planned; then one more `step` books the last. Between such runs
`draw` samples the rows of a step that was planned, and `score` the ids of a prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ...protos.frames import ScoredToken, Token
from ..errors import InvalidRequest
from ..grammar import GrammarCompiler
from ..pacing import StepWork
from ..sampler import SamplingFault
from ..scheduler import Scheduler
from ..sequence import Sequence, SequenceOutput
from .drawn import DrawnRows
from .plan import TOP_SIZE, DecodeRows, RowField, plain_fields
from .slot_update import SlotUpdate
from .slots import SlotTable, depends_on_last_id, device_can_sample

log = logging.getLogger(__name__)


class StepRunner(Protocol):
    """What the pipeline uses of `decode.DecodeRunner`."""

    row_limit: int  #: Rows of a step, at most.
    slot_table: SlotTable  #: What the device is told of sequences.

    def launch(self, rows: DecodeRows, *, draw: bool = True) -> StartedStep:
        """Start a step without waiting for it; its sampling too, with `draw`."""
        ...

    def draw_rows(self, logits: Any, rows: DecodeRows, update: SlotUpdate) -> DrawingRows:
        """Sample rows of any logits on the device, without waiting for the device."""
        ...

    def score_rows(self, logits: Any, rows: DecodeRows) -> ScoringRows:
        """Score the id that each row requires, by `logits`, without waiting for the device."""
        ...


class DrawingRows(Protocol):
    """What the pipeline uses of `decode.PendingRows`."""

    def read(self) -> DrawnRows:
        """Wait for the rows, and return them."""
        ...


class ScoringRows(Protocol):
    """What the pipeline uses of `decode.PendingScores`."""

    def read(self) -> tuple[DrawnRows, list[int]]:
        """Wait for the scores; return them with the ids' ranks."""
        ...


class StartedStep(Protocol):
    """What the pipeline uses of `decode.LaunchedStep`."""

    def draw(self, update: SlotUpdate, required_ids: np.ndarray | None = None) -> None:
        """Launch the step's sampling, which `launch` has left out.

        `required_ids`, int64 [rows], stand in for those of the rows: the id that must come, or -1.
        """
        ...

    def read(self) -> DrawnRows:
        """Wait for the step, and return what it drew."""
        ...


@dataclass(slots=True)
class StepAhead:
    """A step that the device computes, and the sequences of its rows, in their order."""

    started: StartedStep
    sequences: list[Sequence]
    rows: DecodeRows
    #: int64 [rows]: ids of each sequence at its end, at most.
    length_limits: np.ndarray
    #: int64 [rows]: ids that each sequence's blocks hold.
    rooms: np.ndarray
    #: Rows whose sequence has a slot of the device, ascending.
    slot_rows: list[int]
    #: Rows with logprobs, a grammar or thinking, ascending: their tokens are looked at one by one.
    special_rows: list[int]
    #: Rows for which no id can be drawn, and why.
    faults: dict[int, SamplingFault]


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of some ids of a prompt, which the device works out."""

    scoring: ScoringRows
    token_ids: list[int]
    count: int  #: Likeliest ids of each, with their logprobs.
    position: int  #: Of the first id.

    def read(self) -> list[ScoredToken | SamplingFault]:
        """Wait for the scores, and return them in the order of the ids."""
        rows, ranks = self.scoring.read()
        return [
            rows.scored_token(token_id, rank, row, count=self.count, position=self.position + row)
            for row, (token_id, rank) in enumerate(zip(self.token_ids, ranks, strict=True))
        ]


class DecodePipeline:
    """Decode steps of `scheduler` on `runner`.

    `book_token` adds a token to its sequence, or ends the sequence by the fault in its place, and
    returns what to deliver. `max_model_len` is the length of a sequence in tokens, at most.
    """

    #: Needed by sequences that have a grammar; whoever makes the pipeline sets it.
    grammars: GrammarCompiler | None = None

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        book_token: Callable[[Sequence, Token | SamplingFault], SequenceOutput | None],
        max_model_len: int,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._book_token = book_token
        self._max_model_len = max_model_len  #: Tokens of a sequence, at most.
        self._slots = runner.slot_table
        self._ahead: StepAhead | None = None  #: The step under way.
        self.work = StepWork()  #: What the step that was booked last computed.

    def can_run(self, sequences: list[Sequence]) -> bool:
        """Return whether a step of pure decode over these sequences can be run here."""
        if len(sequences) > self._runner.row_limit:
            return False
        return all(not sequence.drafts and device_can_sample(sequence) for sequence in sequences)

    def start(self, sequences: list[Sequence]) -> None:
        """Launch a step over sequences whose blocks are there. No step may be under way."""
        assert self._ahead is None
        faults: dict[int, SamplingFault] = {}
        columns = [self._prepare(sequence, row, faults) for row, sequence in enumerate(sequences)]
        rows = DecodeRows.build(
            columns,
            sources=[sequence.token_ids[-1] for sequence in sequences],
            lengths=[len(sequence.token_ids) for sequence in sequences],
            blocks=[sequence.blocks for sequence in sequences],
        )
        block_tokens = self._scheduler.limits.block_tokens
        limits = [
            min(sequence.prompt_tokens + sequence.sampling.max_tokens, self._max_model_len)
            for sequence in sequences
        ]
        self._ahead = StepAhead(
            started=self._runner.launch(rows),
            sequences=list(sequences),
            rows=rows,
            length_limits=np.array(limits, np.int64),
            rooms=np.array([len(blocks) for blocks in rows.blocks], np.int64) * block_tokens,
            slot_rows=[row for row, column in enumerate(columns) if column[RowField.SLOT] >= 0],
            special_rows=[row for row, sequence in enumerate(sequences) if _is_special(sequence)],
            faults=faults,
        )

    def _prepare(
        self, sequence: Sequence, row: int, faults: dict[int, SamplingFault]
    ) -> np.ndarray:
        """Return the fields of a row; those of a plain one where no id can be drawn for it.

        Then `faults` gets the reason, by the row.
        """
        try:
            return self._slots.prepare(sequence, len(sequence.token_ids), self.grammars)
        except InvalidRequest as error:
            faults[row] = SamplingFault(str(error))
        except Exception:  # one request's grammar must not end the thread and all streams
            log.exception("sampling for %s", sequence.attempt_key[0])
            faults[row] = SamplingFault("no token could be sampled: the worker's log says why")
        return plain_fields()

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
        following, waiting_rows = self._launch_next(current)
        self._ahead = following
        row_count = len(current.sequences)
        self.work = StepWork(
            decode_rows=row_count,
            decode_kv_tokens=int(current.rows.packed[RowField.DRAW].sum()),
        )
        outputs = self._book(current)
        if following and waiting_rows:
            self._draw_late(following, waiting_rows)
        return outputs

    def _book(self, current: StepAhead) -> list[SequenceOutput]:
        """Wait for a step, and book its tokens."""
        drawn = current.started.read()
        outputs: list[SequenceOutput] = []
        running = self._scheduler.running
        record_computed = self._scheduler.record_computed
        book_token = self._book_token
        is_plain = drawn.all_finite() and not current.faults
        special_rows = frozenset(current.special_rows)
        for row, (sequence, token_id) in enumerate(
            zip(current.sequences, drawn.token_ids, strict=True)
        ):
            if sequence.queue is not running:
                continue  # it ended while this step was computed
            record_computed(sequence, 1)
            if is_plain and row not in special_rows:
                output = book_token(sequence, Token(token_id))
            else:
                token = current.faults.get(row) or drawn.token(sequence, row)
                output = book_token(sequence, token)
            if output:
                outputs.append(output)
        return outputs

    def _is_running(self, sequence: Sequence) -> bool:
        """Return whether the scheduler still has this sequence among those that decode."""
        return sequence.queue is self._scheduler.running

    def _launch_next(self, current: StepAhead) -> tuple[StepAhead | None, list[int]]:
        """Launch the step behind `current`, whose ids are not known yet.

        Returns it, with the rows whose sampling must wait for these ids: if there are any, the
        sampling is not launched. Returns no step where something else must be planned first, or
        nothing is left to decode.
        """
        if self._scheduler.must_plan:
            return None, []
        lengths = current.rows.packed[RowField.DRAW] + 1
        may_grow = lengths < current.length_limits
        running = self._scheduler.running
        if current.faults or not all(sequence.queue is running for sequence in current.sequences):
            is_running = [
                sequence.queue is running and row not in current.faults
                for row, sequence in enumerate(current.sequences)
            ]
            may_grow &= np.array(is_running)
        if not may_grow.any():
            return None, []
        # room for the KV of two ids: the last one that is known, which the step under way writes,
        # and the one which that step gives
        block_tokens = self._scheduler.limits.block_tokens
        for row in np.flatnonzero(may_grow & (lengths > current.rooms)).tolist():
            sequence = current.sequences[row]
            if not self._scheduler.reserve_ahead(sequence, 2):
                return None, []  # one would have to be preempted: the scheduler plans which
            current.rooms[row] = len(sequence.blocks) * block_tokens
        following = _following(current, may_grow)
        waiting_rows = self._prepare_ahead(following)
        if waiting_rows is None:
            return None, []
        following.started = self._runner.launch(following.rows, draw=not waiting_rows)
        return following, waiting_rows

    def _prepare_ahead(self, following: StepAhead) -> list[int] | None:
        """Note what the device counts for each row; return the rows that must wait for an id.

        Returns None if a sequence has lost its slot, which is made again where a run starts.
        """
        lengths: list[int] = following.rows.packed[RowField.DRAW].tolist()
        waiting_rows = [
            row for row in following.special_rows if depends_on_last_id(following.sequences[row])
        ]
        waiting = frozenset(waiting_rows)
        for row in following.slot_rows:
            sequence = following.sequences[row]
            counts_now = row not in waiting
            if not self._slots.keep(sequence, lengths[row], counts_now=counts_now):
                return None
        return waiting_rows

    def _draw_late(self, following: StepAhead, waiting_rows: list[int]) -> None:
        """Launch the sampling of a step, now that the ids before it are known."""
        packed = following.rows.packed
        required_ids = packed[RowField.REQUIRED]
        for row in waiting_rows:
            sequence = following.sequences[row]
            if sequence.queue is not self._scheduler.running:
                continue  # it ended with the id before: its row is drawn for nothing
            fields = self._prepare(sequence, row, following.faults)
            if row not in following.faults:
                required_ids[row] = fields[RowField.REQUIRED]
        following.started.draw(self._slots.take_update(), required_ids)

    # ---- steps that were planned -----------------------------------------------------------------

    def can_draw(self, sequences: list[Sequence]) -> bool:
        """Return whether `draw` honours all that these sequences ask for."""
        return all(map(device_can_sample, sequences))

    def can_score(self, count: int) -> bool:
        """Return whether `score` gives so many likeliest ids."""
        return count <= TOP_SIZE

    def draw(
        self, logits: Any, logit_rows: list[int], sequences: list[Sequence]
    ) -> list[Token | SamplingFault]:
        """Return the next token of each sequence, from its row of `logits`; no step is under way.

        Every sequence must be one that `device_can_sample`.
        """
        assert self._ahead is None
        tokens: list[Token | SamplingFault] = []
        limit = self._runner.row_limit
        for start in range(0, len(sequences), limit):
            part = slice(start, start + limit)
            tokens += self._draw_some(logits, logit_rows[part], sequences[part])
        return tokens

    def _draw_some(
        self, logits: Any, logit_rows: list[int], sequences: list[Sequence]
    ) -> list[Token | SamplingFault]:
        """Return what `draw` does, for at most `row_limit` sequences."""
        faults: dict[int, SamplingFault] = {}
        rows = DecodeRows.build(
            [self._prepare(sequence, row, faults) for row, sequence in enumerate(sequences)],
            sources=[0] * len(sequences),
            lengths=[len(sequence.token_ids) for sequence in sequences],
            blocks=[sequence.blocks for sequence in sequences],
        )
        rows.packed[RowField.LOGIT_ROW] = logit_rows
        drawn = self._runner.draw_rows(logits, rows, self._slots.take_update()).read()
        return [
            faults.get(row) or drawn.token(sequence, row) for row, sequence in enumerate(sequences)
        ]

    def score(
        self, logits: Any, token_ids: list[int], count: int, *, position: int
    ) -> PromptScores:
        """Launch the scoring of a prompt's own ids, as `sampler.score_prompt`; do not wait."""
        fields = plain_fields()
        fields[RowField.LOGPROBS] = count
        rows = DecodeRows.build(
            [fields] * len(token_ids),
            sources=[0] * len(token_ids),
            lengths=[position] * len(token_ids),
            blocks=[[]] * len(token_ids),
        )
        rows.packed[RowField.REQUIRED] = token_ids
        return PromptScores(self._runner.score_rows(logits, rows), token_ids, count, position)


def _is_special(sequence: Sequence) -> bool:
    """Return whether a token of the sequence is more than an id, or an id decides what follows."""
    sampling = sequence.sampling
    return (
        sampling.logprobs is not None
        or sampling.grammar is not None
        or sampling.thinking is not None
    )


def _following(current: StepAhead, goes_on: np.ndarray) -> StepAhead:
    """Return the step behind `current`, with those rows that go on. It is not launched yet."""
    rows = current.rows
    if goes_on.all():
        sequences = current.sequences
        packed = rows.packed.copy()
        blocks = rows.blocks
        limits = current.length_limits
        rooms = current.rooms
        slot_rows = current.slot_rows
        special_rows = current.special_rows
        packed[RowField.SOURCE] = -1 - np.arange(len(sequences))
    else:
        kept = np.flatnonzero(goes_on)
        places = {row: place for place, row in enumerate(kept.tolist())}
        sequences = [current.sequences[row] for row in places]
        packed = rows.packed[:, kept]
        blocks = [rows.blocks[row] for row in places]
        limits = current.length_limits[kept]
        rooms = current.rooms[kept]
        slot_rows = [places[row] for row in current.slot_rows if row in places]
        special_rows = [places[row] for row in current.special_rows if row in places]
        packed[RowField.SOURCE] = -1 - kept
        packed[RowField.LOGIT_ROW] = np.arange(len(kept))
    packed[RowField.DRAW] += 1
    packed[RowField.POSITION] += 1
    packed[RowField.REQUIRED] = -1
    wants_logprobs = bool((packed[RowField.LOGPROBS] >= 0).any())
    return StepAhead(
        started=current.started,  # until it is launched
        sequences=sequences,
        rows=DecodeRows(packed, blocks, wants_logprobs),
        length_limits=limits,
        rooms=rooms,
        slot_rows=slot_rows,
        special_rows=special_rows,
        faults={},
    )
