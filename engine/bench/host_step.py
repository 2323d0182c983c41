"""How much of the host's time a decode step takes, beside a device that takes none.

    python -m diptych.engine.bench.host_step              # 256 rows, published sampling defaults

The scheduler, the pipeline, packing and booking are the engine's own; the device is a stand-in that
gives every row the same id at once. Prints JSON with milliseconds of CPU time of a step: for each
kind of sampling the median over several runs of steps. Other processes on the machine disturb CPU
time less than wall-clock time.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import numpy as np

from ...protos.frames import Sampling
from ..blocks import BlockPool
from ..engine import Engine
from ..gpu.drawn import DrawnRows
from ..gpu.pipeline import DecodePipeline
from ..gpu.plan import BlockTables, DecodeRows, RowField, bucket_size, pad_rows
from ..gpu.slot_update import SlotUpdate
from ..gpu.slots import SlotTable
from ..options import SchedulerLimits
from ..scheduler import Scheduler
from ..sequence import Sequence
from ..step_counters import StepCounters

VOCAB = 128_256
PROMPT_TOKENS = 1024
STEPS = 60  #: Of a run.
RUNS = 7

#: Greedy sampling, and the generation defaults that some models are published with: fields of
#: `Sampling`.
SAMPLING_BY_NAME: dict[str, dict[str, Any]] = {
    "greedy": {},
    "llama-3.1": {"temperature": 0.6, "top_p": 0.9},
    "qwen-2.5": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    "qwen-3": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
}


class InstantStep:
    """A step that is done as soon as it is launched."""

    def __init__(self, rows: int) -> None:
        numbers = np.ones(rows, np.float32)
        none = np.zeros((rows, 0))
        self._drawn = DrawnRows(
            token_ids=[7] * rows,
            peaks=numbers,
            tops=numbers,
            logprobs=numbers,
            top_ids=none,
            top_logprobs=none,
        )

    def draw(self, update: SlotUpdate, required_ids: np.ndarray | None = None) -> None:
        """Do nothing: the rows are drawn already."""

    def read(self) -> DrawnRows:
        """Return the rows."""
        return self._drawn


class InstantRunner:
    """Packs steps as `gpu.decode.DecodeRunner` does, for no device."""

    def __init__(self, row_limit: int, blocks: int) -> None:
        self.row_limit = row_limit
        self.slot_table = SlotTable(row_limit, VOCAB)
        tables = np.zeros((row_limit, blocks), np.int32)
        self._tables = BlockTables(tables, [[]] * row_limit, [0] * row_limit)
        self._host_rows = np.zeros((len(RowField), row_limit), np.int64)

    def launch(self, rows: DecodeRows, *, draw: bool = True) -> InstantStep:
        """Pack the rows of a step as for a device, and return a step that is done."""
        width = bucket_size(len(rows))
        self._host_rows[:, :width] = pad_rows(rows.packed, width)
        changed = self._tables.update(rows.blocks)
        if changed:
            self._tables.device_tables[changed[0] : changed[-1] + 1].copy()
        if draw:
            self.slot_table.take_update()
        return InstantStep(len(rows))

    def draw_rows(self, logits: Any, rows: DecodeRows, update: SlotUpdate) -> InstantStep:
        """Raise NotImplementedError: every step of this bench is one of decode rows alone."""
        raise NotImplementedError("this bench plans no step with prefill in it")

    def score_rows(self, logits: Any, rows: DecodeRows) -> Any:
        """Raise NotImplementedError: no request of this bench asks for its prompt's logprobs."""
        raise NotImplementedError("this bench scores no prompt")


def measure(row_count: int, sampling: dict[str, Any]) -> float:
    """Return the median milliseconds of CPU time of a step of `row_count` rows."""
    answer_tokens = 2 * STEPS * RUNS
    block_tokens = SchedulerLimits().block_tokens
    blocks_of_row = -(-(PROMPT_TOKENS + answer_tokens) // block_tokens) + 1
    limits = SchedulerLimits(max_running=row_count, watermark=0.0)
    engine = Engine.__new__(Engine)  # booking needs no model
    engine.scheduler = Scheduler(BlockPool(row_count * blocks_of_row + 1), limits)
    engine.counters = StepCounters()
    for row in range(row_count):
        chosen = Sampling(answer_tokens, seed=row, stop_ids=(1, 2), **sampling)
        sequence = Sequence(
            (f"request-{row}", 0), list(range(PROMPT_TOKENS)), PROMPT_TOKENS, chosen
        )
        assert engine.scheduler.reserve(sequence)
        sequence.token_ids.append(7)
        engine.scheduler.commit(sequence)
    runner = InstantRunner(bucket_size(row_count), blocks_of_row)
    pipeline = DecodePipeline(
        runner, engine.scheduler, engine._book_token, PROMPT_TOKENS + answer_tokens
    )
    pipeline.start(engine.scheduler.plan().decode)
    pipeline.step()
    found: list[float] = []
    for _ in range(RUNS):
        began = time.process_time()
        for _ in range(STEPS):
            outputs = pipeline.step()
            assert outputs and len(outputs) == row_count
        found.append((time.process_time() - began) / STEPS)
    return median(found) * 1e3


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    row_count = parser.parse_args().rows
    figures = {
        name: round(measure(row_count, fields), 3) for name, fields in SAMPLING_BY_NAME.items()
    }
    print(json.dumps({"rows": row_count, "host_ms_per_step": figures}))


if __name__ == "__main__":
    main()
