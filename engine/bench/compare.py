"""The measurement: our engine alone, or in turn with vLLM. The main path is `run`.

A cell is one measured situation: a batch of sequences that decode at a context, or a prompt. It is
measured in rounds. Each engine is a process of its own; in a round every engine takes one turn, of
an untimed step and a few timed ones, while the other engine is frozen.
"""

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
from .child import EngineBenchError, EngineProcess
from .machine import thread_times, wait_for_quiet, waited_share
from .results import (
    CellWork,
    decode_work,
    geometric_mean_ratio,
    prefill_work,
    summarize_cell,
)

#: The script that drives vLLM, run by vLLM's own Python.
PEER = Path(__file__).with_name("peer.py")

#: Milliseconds that a round's timed steps of one engine take, about: short, so that both engines of
#: a round find the machine in the same state.
BURST_MS = 300.0

#: Timed steps of a round, at most: a sequence grows by a token a step.
BURST_LIMIT = 5

#: Timed steps of a round of decode, and timed prompts of a round of prefill, at least. A decode
#: step is short, so there are three for a median; a prompt may take seconds.
DECODE_STEPS_MINIMUM = 3
PREFILLS_MINIMUM = 1

#: A round is calm if each thread stood in line for a CPU for less than this share of the time.
CALM_SHARE = 0.02

#: While too few rounds are calm, more are done: at most this many times the rounds asked for.
ROUNDS_FACTOR = 3

#: Seconds that a cell waits, all in all, for other processes to be idle.
PATIENCE_S = 10.0

#: Tokens of an untimed prompt that wakes the threads before a timed one: enough to use them all.
WAKE_TOKENS = 64

#: Tokens of the larger block of the two engines: vLLM's on a CPU. Ours has 64.
BLOCK_TOKENS = 128

#: Tokens that our engine reserves behind a sequence: the default of the engine's setting
#: `growth_tokens`. (`EngineBenchOptions.growth_tokens` is what a measured sequence grows by.)
GROWTH_TOKENS = 256

GIB = 1 << 30

#: Tells the user how far the measurement is.
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EngineBenchOptions:
    """What to measure.

    Without batches or contexts no decode is measured, without prompts no prefill; at least one of
    the two must be left.
    """

    model: Path  #: Folder of the checkpoint.
    threads: int  #: Of each engine.
    rounds: int  #: Rounds of each cell that count.
    batches: tuple[int, ...]  #: How many sequences decode together.
    contexts: tuple[int, ...]  #: Tokens of each of them; every batch is measured at every context.
    prompts: tuple[int, ...]  #: Tokens of the prompts whose prefill is timed.
    step_tokens: int | None = None  #: Prefill tokens of one of our steps; None: the default.
    vllm_python: Path | None = None  #: The Python of vLLM's environment; None: no peer.

    @property
    def growth_tokens(self) -> int:
        """Tokens by which a decoding sequence may grow, in all steps and before the first one.

        A round has `BURST_LIMIT` timed steps and an untimed one. 64 more are for the steps in which
        the other sequences of a batch begin.
        """
        return ROUNDS_FACTOR * self.rounds * (BURST_LIMIT + 1) + 64


@dataclass(frozen=True, slots=True)
class BenchCell:
    """One measured situation. The commands are those of the README's table."""

    labels: dict[str, Any]  #: `phase`, and `batch` and `context`, or `prompt`.
    prepare: dict[str, Any] | None  #: The command that brings an engine there, if one is needed.
    timed: dict[str, Any]  #: The command that is timed, without `times`.
    untimed: dict[str, Any]  #: The command before each round's timed ones.
    steps_minimum: int  #: Timed steps of a round, at least.
    work: CellWork  #: What a step must do at least; shares of the machine are reckoned from it.

    def __str__(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.labels.items() if key != "phase")


@dataclass(frozen=True, slots=True)
class BenchRound:
    """What each engine took in one round of turns."""

    times_ms: dict[EngineProcess, list[float]]  #: Of each engine's timed steps.
    waited: float  #: The largest share of the time that a thread stood in line for a CPU.


@dataclass(frozen=True, slots=True)
class _Engines:
    """The processes that are measured, and what these said when they were ready."""

    ours: EngineProcess
    setup: dict[str, Any]
    machine: dict[str, float]  #: What the machine can do (`machine.measure_machine`).
    peer: EngineProcess | None = None
    peer_setup: dict[str, Any] | None = None


def run(options: EngineBenchOptions, report: Report) -> dict[str, Any]:
    """Measure every cell, and return what `-o json` prints.

    Raises EngineBenchError, and EngineError where the checkpoint cannot be read. However it ends,
    no process is left behind.
    """
    spec = read_spec(options.model)
    settings = _settings(options, spec)
    cells: list[dict[str, Any]] = []
    with ExitStack() as stack:
        engines = _start_engines(stack, options, settings, report)
        for cell in _cells(options, spec):
            figures = _measure(cell, engines, options.rounds)
            cells.append(cell.labels | figures)
            report(_summary(cell, figures))
    return {
        "model": {"path": str(options.model), "parameters": spec.parameters},
        "options": asdict(options) | {"model": str(options.model), "vllm_python": None},
        "machine": engines.machine | {"threads": options.threads},
        "setup": engines.setup,
        "peer_setup": engines.peer_setup,
        "cells": cells,
        "geomean_ratio": geometric_mean_ratio(cells),
    }


def _settings(options: EngineBenchOptions, spec: ModelSpec) -> dict[str, Any]:
    """Return what both engines are started with: the same model, threads, lengths, KV memory.

    Raises EngineBenchError if the model, or the memory of this machine, is too small for it.
    """
    growth = options.growth_tokens
    lengths = [context + growth for context in options.contexts] if options.batches else []
    longest_in_blocks = -(-max([*lengths, *options.prompts]) // BLOCK_TOKENS)
    max_len = longest_in_blocks * BLOCK_TOKENS + BLOCK_TOKENS
    if max_len > spec.max_positions:
        raise EngineBenchError(
            f"sequences of {max_len} tokens are needed, the model's limit is "
            f"{spec.max_positions}: choose a smaller --context, --prompt or --rounds"
        )
    longest_context = max(options.contexts, default=0)
    # One block more for the last one, which is not full, and one to spare.
    sequence_tokens = longest_context + max(growth, GROWTH_TOKENS) + 2 * BLOCK_TOKENS
    tokens = max(2 * max_len, sequence_tokens * max(options.batches, default=0))
    kv_bytes = tokens * 2 * spec.layers * spec.kv_heads * spec.head_dim * 2  # K, V; 2 bytes each
    kv_bytes = max(1, -(-kv_bytes // GIB)) * GIB
    engines = 2 if options.vllm_python else 1
    # 2 bytes a weight, and as much again while weights are loaded and packed; a GiB for the rest
    _check_memory((kv_bytes + 4 * spec.parameters + GIB) * engines)
    return {
        "model": str(options.model),
        "threads": options.threads,
        "kv_bytes": kv_bytes,
        "max_len": max_len,
        "step_tokens": options.step_tokens,
        "seed": 0,
    }


def _check_memory(needed: int) -> None:
    """Raise EngineBenchError if less than `needed` bytes of memory are available."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvail"))
    if needed > available:
        raise EngineBenchError(
            f"this takes about {needed / GIB:.0f} GiB of memory and {available / GIB:.0f} GiB are "
            "free: choose a smaller --batch, --context or --prompt"
        )


def _start_engines(
    stack: ExitStack, options: EngineBenchOptions, settings: dict[str, Any], report: Report
) -> _Engines:
    """Start the engines, each of which `stack` closes; all of them are frozen afterwards."""
    settings_json = json.dumps(settings)
    peer, peer_setup = None, None
    if options.vllm_python is not None:  # first, as it is the one that may not be there
        report("starting vLLM (it compiles the model: about a minute)")
        peer_command = [str(options.vllm_python), str(PEER), settings_json]
        peer = _start(stack, "vLLM", peer_command, options.threads)
        peer_setup = peer.answer()["ready"]
        peer.freeze()

    report("starting Diptych's engine")
    our_command = [sys.executable, "-m", "diptych.engine.bench.worker", settings_json]
    ours = _start(stack, "Diptych's engine", our_command, options.threads)
    setup = ours.answer()["ready"]
    with ours.turn(urgent=True):
        machine = ours.command("machine")
    report(f"this machine: {machine['gb_per_s']} GB/s, {machine['tflops']} TFLOP/s")
    return _Engines(ours, setup, machine, peer=peer, peer_setup=peer_setup)


def _start(stack: ExitStack, name: str, command: list[str], threads: int) -> EngineProcess:
    process = EngineProcess(name, command, os.environ | {"OMP_NUM_THREADS": str(threads)})
    stack.callback(process.close)
    return process


def _cells(options: EngineBenchOptions, spec: ModelSpec) -> Iterator[BenchCell]:
    """Give the cells in the order of the result: decode by context and batch, then prompts."""
    for context in options.contexts:
        for batch in options.batches:
            state: dict[str, Any] = {"batch": batch, "context": context}
            yield BenchCell(
                labels={"phase": "decode", **state},
                prepare={"do": "decode", **state, "room": options.growth_tokens},
                timed={"do": "step"},
                untimed={"do": "step", "times": 1},
                steps_minimum=DECODE_STEPS_MINIMUM,
                work=decode_work(spec, batch, context),
            )
    for prompt in options.prompts:
        yield BenchCell(
            labels={"phase": "prefill", "prompt": prompt},
            prepare=None,
            timed={"do": "prefill", "prompt": prompt},
            untimed={"do": "prefill", "prompt": WAKE_TOKENS, "times": 1},
            steps_minimum=PREFILLS_MINIMUM,
            work=prefill_work(spec, prompt),
        )


def _measure(cell: BenchCell, engines: _Engines, round_count: int) -> dict[str, Any]:
    """Return a cell's figures.

    Rounds are done until enough of them were calm, or ROUNDS_FACTOR times as many. The calmest ones
    count.
    """
    ours = engines.ours
    peer = engines.peer
    processes = [ours, peer] if peer else [ours]
    slowest_ms = max(_prepare(cell, process) for process in processes)
    times = max(cell.steps_minimum, min(BURST_LIMIT, int(BURST_MS / slowest_ms)))

    rounds: list[BenchRound] = []
    patience_s = PATIENCE_S
    while len(rounds) < ROUNDS_FACTOR * round_count:
        patience_s = wait_for_quiet(patience_s)
        # the first of a round is the last of the next: neither always finds the warmer machine
        order = processes if len(rounds) % 2 == 0 else processes[::-1]
        rounds.append(_alternate(cell, order, times))
        if sum(bench_round.waited < CALM_SHARE for bench_round in rounds) == round_count:
            break

    calmest = sorted(rounds, key=lambda bench_round: bench_round.waited)[:round_count]
    figures = summarize_cell(
        [bench_round.times_ms[ours] for bench_round in calmest],
        [bench_round.times_ms[peer] for bench_round in calmest] if peer else [],
        cell.work,
        engines.machine,
    )
    return figures | {"waited": round(calmest[-1].waited, 3)}


def _prepare(cell: BenchCell, process: EngineProcess) -> float:
    """Bring an engine to the cell's state, and return the milliseconds of one step there."""
    with process.turn():
        if cell.prepare:
            process.command(**cell.prepare)
        (first_ms,) = process.command(**cell.timed, times=1)["ms"]
    return first_ms


def _alternate(cell: BenchCell, order: list[EngineProcess], times: int) -> BenchRound:
    """Do a round: every engine in turn does an untimed step, then `times` timed ones."""
    times_ms: dict[EngineProcess, list[float]] = {}
    worst_share = 0.0
    for process in order:
        with process.turn(urgent=True):
            process.command(**cell.untimed)
            before = thread_times(process.pid)
            started_ns = time.perf_counter_ns()
            times_ms[process] = process.command(**cell.timed, times=times)["ms"]
            span_ns = time.perf_counter_ns() - started_ns
            share = waited_share(before, thread_times(process.pid), span_ns)
            worst_share = max(worst_share, share)
    return BenchRound(times_ms, worst_share)


def _summary(cell: BenchCell, figures: dict[str, Any]) -> str:
    """Return a cell's line for the user who waits."""
    line = f"{cell.labels['phase']} {cell}: {figures['ms']:.2f} ms"
    if "ratio" in figures:
        line += f", vLLM {figures['peer_ms']:.2f} ms, ratio {figures['ratio']:.2f}"
    return line
