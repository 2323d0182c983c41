"""Diptych's engine on the other end of a pipe: `python -m diptych.engine.bench.worker OPTIONS`.

It is driven through `add`, `step` and `drop` alone, as a worker drives it. `peer.py` answers the
same commands for vLLM.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterable
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


class Ours:
    """Diptych's engine in this process, greedy."""

    def __init__(self, options: dict[str, Any]) -> None:
        limits = SchedulerLimits(
            max_step_tokens=options["step_tokens"] or SchedulerLimits().max_step_tokens
        )
        self._engine = Engine(
            EngineOptions(
                model_folder=Path(options["model"]),
                kv_bytes=options["kv_bytes"],
                max_model_len=options["max_len"],
                threads=options["threads"],
                limits=limits,
            )
        )
        self._random = random.Random(options["seed"])
        self._salt = fingerprint(Path(options["model"]))
        self._live: list[AttemptKey] = []
        self._count = 0
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

    def machine(self) -> dict[str, Any]:
        return measure_machine()

    def decode(self, batch: int, context: int, room: int) -> dict[str, Any]:
        """`batch` sequences of `context` random tokens, in their KV and ready to decode.

        Once for the prefix cache, then again: so all begin to decode within a few steps.
        """
        self._clear()
        prompts = [self._prompt(context) for _ in range(batch)]
        for tokens in (1, room):
            self._live = [self._add(ids, tokens) for ids in prompts]
            begun: set[AttemptKey] = set()
            while len(begun) < batch:
                begun.update(output.attempt_key for output in _tokens(self._engine.step()))
        return {}

    def step(self, times: int) -> dict[str, Any]:
        """Milliseconds of each of `times` decode steps over all sequences."""
        took = []
        for _ in range(times):
            began = time.perf_counter()
            outputs = self._engine.step()
            took.append((time.perf_counter() - began) * 1e3)
            assert len(outputs) == len(self._live), (len(outputs), len(self._live))
        return {"ms": took}

    def prefill(self, prompt: int, times: int) -> dict[str, Any]:
        """Milliseconds from a new random prompt to its first token, `times` times."""
        self._clear()
        took = []
        for _ in range(times):
            ids = self._prompt(prompt)
            began = time.perf_counter()
            self._add(ids, 1)
            while not _tokens(self._engine.step()):
                pass
            took.append((time.perf_counter() - began) * 1e3)
        return {"ms": took}

    def _prompt(self, length: int) -> list[int]:
        return self._random.choices(range(2, self._engine.spec.vocab), k=length)

    def _add(self, ids: list[int], tokens: int) -> AttemptKey:
        self._count += 1
        key = (str(self._count), 0)
        hashes = block_hashes(ids, self._salt)
        self._engine.add(Sequence(key, list(ids), len(ids), Sampling(tokens), hashes))
        return key

    def _clear(self) -> None:
        for key in self._live:
            self._engine.release(key)
        self._live = []


def _tokens(outputs: Iterable[SequenceOutput]) -> list[SequenceOutput]:
    return [output for output in outputs if output.token is not None]


def serve(options: dict[str, Any], commands: TextIO, answers: TextIO) -> None:
    """Answers commands until they end."""
    cores = sorted(os.sched_getaffinity(0))[: options["threads"]]
    os.sched_setaffinity(0, cores)
    try:
        ours = Ours(options)
    except EngineError as error:
        print(json.dumps({"error": str(error)}), file=answers)
        return
    print(json.dumps({"ready": ours.setup}), file=answers)
    known: dict[str, Any] = {
        "machine": ours.machine,
        "decode": ours.decode,
        "step": ours.step,
        "prefill": ours.prefill,
    }
    for line in commands:
        command = json.loads(line)
        print(json.dumps(known[command.pop("do")](**command)), file=answers)


if __name__ == "__main__":
    pipe = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    serve(json.loads(sys.argv[1]), sys.stdin, pipe)
