"""Diptych's engine on the other end of a pipe: `python -m diptych.engine.bench.worker OPTIONS`.

The engine is driven through `add`, `step` and `drop` alone, as a worker drives it. `peer.py`
answers the same commands for vLLM; both keep to the table in this folder's README.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

import torch

from ...kv_transfer.identity import block_hashes
from ...protos.frames import AttemptKey, Sampling
from ..engine import Engine, EngineOptions
from ..errors import EngineError
from ..scheduler import SchedulerLimits
from ..sequence import Sequence, SequenceOutput
from ..spec import fingerprint
from .machine import measure_machine

BATCH_LIMIT = 128  #: Sequences that decode together: twice the default, so that no batch waits.


class DiptychEngine:
    """Diptych's engine in this process, greedy. Its public methods are the commands."""

    def __init__(self, options: dict[str, Any]) -> None:
        """`options` are those of `compare.run`'s settings. Raises EngineError."""
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
        self._random = random.Random(options["seed"])
        self._salt = fingerprint(model)
        self._live: list[AttemptKey] = []  #: Sequences that decode.
        self._sequence_count = 0
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

    def decode(self, batch: int, context: int, room: int) -> dict[str, Any]:
        """Bring `batch` sequences of `context` random tokens to the point where they decode.

        Each may grow by `room` tokens. The prompts are computed once for the prefix cache, then
        again: so all begin to decode within a few steps.
        """
        self._drop_all()
        prompts = [self._prompt(context) for _ in range(batch)]
        for max_tokens in (1, room):
            self._live = [self._add(prompt_ids, max_tokens) for prompt_ids in prompts]
            begun: set[AttemptKey] = set()
            while len(begun) < batch:
                begun.update(output.attempt_key for output in _with_token(self._engine.step()))
        return {}

    def step(self, times: int) -> dict[str, Any]:
        """Return the milliseconds of each of `times` decode steps over all sequences."""
        times_ms: list[float] = []
        for _ in range(times):
            started_at = time.perf_counter()
            outputs = self._engine.step()
            times_ms.append((time.perf_counter() - started_at) * 1e3)
            assert len(outputs) == len(self._live), (len(outputs), len(self._live))
        return {"ms": times_ms}

    def prefill(self, prompt: int, times: int) -> dict[str, Any]:
        """Return the milliseconds from a new random prompt to its first token, `times` times."""
        self._drop_all()
        times_ms: list[float] = []
        for _ in range(times):
            prompt_ids = self._prompt(prompt)
            started_at = time.perf_counter()
            self._add(prompt_ids, 1)
            while not _with_token(self._engine.step()):
                pass
            times_ms.append((time.perf_counter() - started_at) * 1e3)
        return {"ms": times_ms}

    def _prompt(self, length: int) -> list[int]:
        return self._random.choices(range(2, self._engine.spec.vocab), k=length)

    def _add(self, prompt_ids: list[int], max_tokens: int) -> AttemptKey:
        self._sequence_count += 1
        key = (str(self._sequence_count), 0)
        hashes = block_hashes(prompt_ids, self._salt)
        sampling = Sampling(max_tokens)
        self._engine.add(Sequence(key, list(prompt_ids), len(prompt_ids), sampling, hashes))
        return key

    def _drop_all(self) -> None:
        for key in self._live:
            self._engine.release(key)
        self._live = []


def _with_token(outputs: Iterable[SequenceOutput]) -> list[SequenceOutput]:
    """Return the outputs that carry a token."""
    return [output for output in outputs if output.token is not None]


def serve(options: dict[str, Any], commands: TextIO, answers: TextIO) -> None:
    """Answer each line of `commands` with one line, until these end."""
    cores = sorted(os.sched_getaffinity(0))[: options["threads"]]
    os.sched_setaffinity(0, cores)
    try:
        engine = DiptychEngine(options)
    except EngineError as error:
        print(json.dumps({"error": str(error)}), file=answers)
        return
    print(json.dumps({"ready": engine.setup}), file=answers)
    handlers: dict[str, Callable[..., dict[str, Any]]] = {
        "machine": measure_machine,
        "decode": engine.decode,
        "step": engine.step,
        "prefill": engine.prefill,
    }
    for line in commands:
        command = json.loads(line)
        handler = handlers[command.pop("do")]
        print(json.dumps(handler(**command)), file=answers)


if __name__ == "__main__":
    answer_pipe = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    serve(json.loads(sys.argv[1]), sys.stdin, answer_pipe)
