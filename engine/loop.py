"""The engine thread: one thread owns the engine, takes commands between steps, delivers outputs.

`deliver` is called on this thread with a list of outcomes, `Filled` ones while a step runs, and
must not block.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable

from .commands import (
    AddSequence,
    BlockDemoted,
    BlocksReserved,
    CachePrefix,
    CommitBlocks,
    DemoteBlocks,
    EngineObservation,
    ObserveEngine,
    ReleaseSequence,
    ReserveBlocks,
    StagePrefix,
)
from .engine import Engine

log = logging.getLogger(__name__)


class EngineThread:
    """Runs `engine.step()` while there is work, sleeps on the command queue while there is none."""

    def __init__(self, engine: Engine, deliver: Callable[[list], None]) -> None:
        self.engine = engine
        self._deliver = deliver
        self._commands: queue.SimpleQueue[tuple[float, object]] = queue.SimpleQueue()
        engine.announce = deliver
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, command: object) -> None:
        """Queues a command. Any thread."""
        self._commands.put((time.perf_counter(), command))

    def stop(self) -> None:
        self.submit(None)
        self._thread.join(timeout=10.0)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        if self.engine.config.cores:  # OpenMP's threads, which this one starts, inherit it
            os.sched_setaffinity(0, self.engine.config.cores)
        try:
            idle = False
            while self._obey(wait=idle):
                outputs = self.engine.step()
                idle = not outputs and not self.engine.scheduler.filling
                if outputs:
                    self._deliver(outputs)
                leaving = self.engine.demote()
                if leaving:
                    self._deliver([DemoteBlocks(leaving)])
        except Exception:
            log.exception("the engine thread ended")
            raise

    def _obey(self, wait: bool) -> bool:
        """Carries out what is queued (waiting for the first if idle); False at the end."""
        answers: list[object] = []
        try:
            while True:
                queued, command = self._commands.get(block=wait)
                if command is None:
                    return False
                wait = False
                answer = self._command(command, time.perf_counter() - queued)
                if answer:
                    answers.append(answer)
        except queue.Empty:
            pass
        if answers:
            self._deliver(answers)
        return True

    def _observed(self) -> EngineObservation:
        engine, scheduler = self.engine, self.engine.scheduler
        stored, evicted = scheduler.pool.drain_events()
        return EngineObservation(
            scheduler.pool.hashes(),
            stored,
            evicted,
            scheduler.pool.available,
            engine.prefill_tokens,
            engine.prefill_seconds,
            engine.decode_steps,
            engine.decode_seconds,
            len(scheduler.running),
            sum(len(seq.token_ids) for seq in scheduler.running),
            sum(seq.was_preempted for seq in scheduler.waiting),
            scheduler.step_s,
        )

    def _command(self, command: object, queued_s: float) -> object | None:
        match command:
            case AddSequence(seq):
                self.engine.add(seq)
            case ReserveBlocks(seq):
                return BlocksReserved(
                    seq.attempt_key, self.engine.reserve(seq), seq.published_blocks
                )
            case CommitBlocks(seq, others, ended, waited):
                self.engine.commit(seq, others, ended, waited + queued_s)
            case ReleaseSequence(key):
                self.engine.drop(key)
            case StagePrefix():
                return self.engine.stage(command)
            case CachePrefix(key, count):
                self.engine.scheduler.adopt(key, count)
            case BlockDemoted(block, kept):
                self.engine.scheduler.pool.demoted(block, kept)
            case ObserveEngine():
                return self._observed()
            case _:
                raise AssertionError(command)
        return None
