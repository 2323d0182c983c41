"""The measurement: two engines in two processes, step by step in turn. Main path: `run`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..spec import ModelSpec, read_spec
from .child import BenchError, Child
from .machine import thread_times, wait_for_quiet, waited
from .results import Work, cell, decode_work, geomean, prefill_work

PEER = Path(__file__).with_name("peer.py")
BURST_MS = 300.0  #: a round's steps of one engine take about this long
BURST_MAX = 5  #: but are at most so many: a sequence grows by a token a step
DECODE_MIN, PREFILL_MIN = 3, 1
TRIES = 3  #: rounds are done again, up to so many times as asked for,
PATIENCE_S = 10.0  #: a cell waits so long, all in all, for other processes to be idle
CALM = 0.02  #: when threads stood in line for more than this share of one
WAKE_TOKENS = 64  #: an untimed prompt that wakes the threads before a timed one
BLOCK = 128  #: the larger block of the two engines, in tokens
GROWTH = 256  #: tokens that ours reserves behind a sequence
GIB = 1 << 30

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure. An empty tuple leaves a phase out."""

    model: Path
    threads: int
    rounds: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    step_tokens: int | None = None  #: prefill tokens of one of our steps; None: the default
    vllm_python: Path | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One measured situation: how to get there, what to time, how much work a step is."""

    labels: dict[str, Any]  #: phase, and batch and context or prompt
    prepare: dict[str, Any] | None
    timed: dict[str, Any]
    untimed: dict[str, Any]  #: before each round's timed steps
    least: int
    work: Work

    def __str__(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.labels.items() if key != "phase")


@dataclass(frozen=True, slots=True)
class Round:
    """What one alternation took, and the share of it that threads stood in line for a CPU."""

    took: dict[Child, list[float]]
    waited: float


def run(options: Options, say: Say) -> dict[str, Any]:
    """Measures every cell; the result is what `-o json` prints.

    Raises BenchError, and EngineError where the checkpoint cannot be read.
    """
    spec = read_spec(options.model)
    settings = _settings(options, spec)
    with ExitStack() as stack:
        say("starting Diptych's engine")
        ours = _start(stack, "Diptych's engine", _our_command(settings))
        setup = ours.answer()["ready"]
        with ours.turn(urgent=True):
            machine = ours.ask("machine")
        say(f"this machine: {machine['gb_per_s']} GB/s, {machine['tflops']} TFLOP/s in bf16")
        peer, peer_setup = None, None
        if options.vllm_python:
            say("starting vLLM (it compiles the model: about a minute)")
            peer = _start(stack, "vLLM", [str(options.vllm_python), str(PEER), _json(settings)])
            peer_setup = peer.answer()["ready"]
            peer.freeze()
        cells = []
        for entry in _cells(options, spec):
            cells.append(entry.labels | _measure(entry, ours, peer, options, machine))
            say(_line(entry, cells[-1]))
    return {
        "model": {"path": str(options.model), "parameters": spec.parameters},
        "options": asdict(options) | {"model": str(options.model), "vllm_python": None},
        "machine": machine | {"threads": options.threads},
        "setup": setup,
        "peer_setup": peer_setup,
        "cells": cells,
        "geomean_ratio": geomean(cells),
    }


def _settings(options: Options, spec: ModelSpec) -> dict[str, Any]:
    """What both engines are started with: the same model, threads, lengths and KV memory."""
    lengths = [context + _room(options) for context in options.contexts] if options.batches else []
    longest = -(-max([*lengths, *options.prompts]) // BLOCK) * BLOCK + BLOCK
    if longest > spec.max_positions:
        raise BenchError(
            f"sequences of {longest} tokens are needed, the model's limit is "
            f"{spec.max_positions}: choose a smaller --context, --prompt or --rounds"
        )
    held = max(options.contexts, default=0) + max(_room(options), GROWTH) + 2 * BLOCK
    tokens = max(2 * longest, held * max(options.batches, default=0))
    kv_bytes = tokens * 2 * spec.layers * spec.kv_heads * spec.head_dim * 2
    kv_bytes = max(1, -(-kv_bytes // GIB)) * GIB
    _check_memory((kv_bytes + 4 * spec.parameters + GIB) * (2 if options.vllm_python else 1))
    return {
        "model": str(options.model),
        "threads": options.threads,
        "kv_bytes": kv_bytes,
        "max_len": longest,
        "step_tokens": options.step_tokens,
        "seed": 0,
    }


def _room(options: Options) -> int:
    """Tokens that a decoding sequence may grow by: every step, and the way there."""
    return TRIES * options.rounds * (BURST_MAX + 1) + 64


def _check_memory(needed: int) -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable"))
    if needed > free:
        raise BenchError(
            f"this takes about {needed / GIB:.0f} GiB of memory and {free / GIB:.0f} GiB are free: "
            "choose a smaller --batch, --context or --prompt"
        )


def _our_command(settings: dict[str, Any]) -> list[str]:
    return [sys.executable, "-m", "diptych.engine.bench.worker", _json(settings)]


def _start(stack: ExitStack, name: str, command: list[str]) -> Child:
    threads = str(json.loads(command[-1])["threads"])
    child = Child(name, command, os.environ | {"OMP_NUM_THREADS": threads})
    stack.callback(child.close)
    return child


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values)


def _cells(options: Options, spec: ModelSpec) -> Iterator[Cell]:
    step: dict[str, Any] = {"do": "step"}
    for context in options.contexts:
        for batch in options.batches:
            at: dict[str, Any] = {"batch": batch, "context": context}
            yield Cell(
                labels={"phase": "decode", **at},
                prepare={"do": "decode", **at, "room": _room(options)},
                timed=step,
                untimed=step | {"times": 1},
                least=DECODE_MIN,
                work=decode_work(spec, batch, context),
            )
    for prompt in options.prompts:
        prefill: dict[str, Any] = {"do": "prefill", "prompt": prompt}
        yield Cell(
            labels={"phase": "prefill", "prompt": prompt},
            prepare=None,
            timed=prefill,
            untimed={"do": "prefill", "prompt": WAKE_TOKENS, "times": 1},
            least=PREFILL_MIN,
            work=prefill_work(spec, prompt),
        )


def _measure(
    entry: Cell, ours: Child, peer: Child | None, options: Options, machine: dict[str, float]
) -> dict[str, Any]:
    """Rounds until enough of them were calm, or `TRIES` times as many; the calmest ones count."""
    engines = [ours, peer] if peer else [ours]
    slowest = 0.0
    for engine in engines:
        with engine.turn():
            if entry.prepare:
                engine.ask(**entry.prepare)
            slowest = max(slowest, *engine.ask(**entry.timed, times=1)["ms"])
    times = max(entry.least, min(BURST_MAX, int(BURST_MS / slowest)))
    rounds: list[Round] = []
    patience = PATIENCE_S
    while len(rounds) < TRIES * options.rounds:
        patience = wait_for_quiet(patience)
        order = engines if len(rounds) % 2 == 0 else engines[::-1]
        rounds.append(_round(entry, order, times))
        if sum(done.waited < CALM for done in rounds) == options.rounds:
            break
    rounds = sorted(rounds, key=lambda done: done.waited)[: options.rounds]
    peers = [done.took[peer] for done in rounds] if peer else []
    numbers = cell([done.took[ours] for done in rounds], peers, entry.work, machine)
    return numbers | {"waited": round(rounds[-1].waited, 3)}


def _round(entry: Cell, order: list[Child], times: int) -> Round:
    """Every engine in turn: an untimed step, then some timed ones."""
    took: dict[Child, list[float]] = {}
    worst = 0.0
    for engine in order:
        with engine.turn(urgent=True):
            engine.ask(**entry.untimed)
            before, began = thread_times(engine.pid), time.perf_counter_ns()
            took[engine] = engine.ask(**entry.timed, times=times)["ms"]
            span = time.perf_counter_ns() - began
            worst = max(worst, waited(before, thread_times(engine.pid), span))
    return Round(took, worst)


def _line(entry: Cell, numbers: dict[str, Any]) -> str:
    line = f"{entry.labels['phase']} {entry}: {numbers['ms']:.2f} ms"
    if "ratio" in numbers:
        line += f", vLLM {numbers['peer_ms']:.2f} ms, ratio {numbers['ratio']:.2f}"
    return line
