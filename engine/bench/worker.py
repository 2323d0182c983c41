"""Diptych's engine on the other end of a pipe: `python -m diptych.engine.bench.worker OPTIONS`.

The engine is driven through `add`, `step` and `release` alone, as a worker drives it. `peer.py`
has the commands, and answers them for vLLM.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

import torch

from ...kv_transfer.identity import block_hashes
from ...protos.frames import AttemptKey, Sampling
from ..engine import Engine, EngineOptions
from ..errors import EngineError
from ..scheduler import SchedulerLimits
from ..sequence import Sequence
from ..spec import fingerprint
from .machine import measure_machine
from .peer import BenchEngine, answer_commands, divert_stdout

BATCH_LIMIT = 128  #: Sequences that decode together: twice the default, so that no batch waits.


class DiptychEngine(BenchEngine):
    """Diptych's engine in this process, greedy."""

    def __init__(self, options: dict[str, Any]) -> None:
        """`options` are the settings that `compare.run` makes for both engines: `model`, `threads`,
        `kv_bytes`, `max_len`, `step_tokens` (None: the default) and `seed`. Raises EngineError.
        """
        limits = SchedulerLimits(
            max_step_tokens=options["step_tokens"] or SchedulerLimits.max_step_tokens,
            max_running=BATCH_LIMIT,
        )
        model = Path(options["model"])
        self._engine = Engine(
            EngineOptions(
                model_folder=model,
                kv_bytes=options["kv_bytes"],
                max_model_len=options["max_len"],
                threads=options["threads"],
                limits=limits,
            )
        )
        super().__init__(self._engine.spec.vocab, options["seed"])
        self._salt = fingerprint(model)
        statistics = self._engine.statistics()
        self.setup = {
            "name": "Diptych",
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            **{name: value for name, value in statistics.items() if isinstance(value, str | bool)},
            "max_step_tokens": limits.max_step_tokens,
            "max_running": limits.max_running,
            "block_tokens": limits.block_tokens,
        }

    def _add(self, prompt_ids: list[int], max_tokens: int) -> AttemptKey:
        self._request_count += 1
        key = (str(self._request_count), 0)
        sequence = Sequence(
            attempt_key=key,
            token_ids=list(prompt_ids),
            prompt_tokens=len(prompt_ids),
            sampling=Sampling(max_tokens),
            block_hashes=block_hashes(prompt_ids, self._salt),
        )
        self._engine.add(sequence)
        return key

    def _step(self) -> list[AttemptKey]:
        outputs = self._engine.step()
        return [output.attempt_key for output in outputs if output.token is not None]

    def _end_all(self) -> None:
        for key in self._live:
            self._engine.release(key)
        self._live = []


def serve(options: dict[str, Any], commands: TextIO, answers: TextIO) -> None:
    """Answer each line of `commands` with one line, until these end."""
    cores = sorted(os.sched_getaffinity(0))[: options["threads"]]
    os.sched_setaffinity(0, cores)
    try:
        engine = DiptychEngine(options)
    except EngineError as error:
        print(json.dumps({"error": str(error)}), file=answers)
        return
    answer_commands(engine, commands, answers, machine=measure_machine)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]), sys.stdin, divert_stdout())
