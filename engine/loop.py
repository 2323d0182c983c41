"""The engine thread: owns the engine, takes commands between steps, delivers what happens.

Each round of the thread:
1. Carry out every queued command; with nothing to compute, sleep until one comes. Where steps
   bring nothing though something is to be computed, sleep a moment, or until one comes.
2. Run one step, and deliver its outputs. While it runs, the engine announces filled blocks.
3. When free blocks run low, pin cached blocks and deliver them, so that the tiers (host memory,
   disk) copy them before they are evicted.

`deliver` is called on this thread, several times in a round, each time with some of its events. It
must not block.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from typing import TypeAlias, assert_never

from ..kv_transfer.devices import enter_device
from .commands import (
    AddSequence,
    BlockDemoted,
    BlocksLeftTiers,
    CachePrefix,
    CommitBlocks,
    DemoteBlocks,
    EngineCommand,
    EngineEvent,
    ObserveEngine,
    ReleaseSequence,
    ReserveBlocks,
    StagePrefix,
)
from .engine_like import Deliver, EngineLike
from .priority import leave_cores_to_messages

log = logging.getLogger(__name__)

#: Seconds that `stop` waits for the step under way. A step is far shorter. If one hangs, the thread
#: is left alone: it is a daemon, so it ends with the process.
STOP_S = 10.0
#: Steps in a row that bring nothing may begin once in so many seconds. A step that computes takes
#: longer. One that finds all blocks in use takes 66 us of Python with vLLM, and without a pause it
#: would keep the GIL from the transfers that hold these blocks.
FRUITLESS_ROUND_S = 1e-3

#: A command with the time when it was queued; None ends the thread.
QueuedCommand: TypeAlias = tuple[float, EngineCommand | None]


class EngineThread:
    """Runs `engine.step()` while there is work, sleeps on the command queue while there is none.

    An exception of the engine or of `deliver` is logged and ends the thread: whoever started it
    watches `alive`. `deliver` gets what happens, on the thread, as the module says.
    """

    def __init__(self, engine: EngineLike, deliver: Deliver) -> None:
        self.engine = engine
        self._deliver = deliver
        self._commands: queue.SimpleQueue[QueuedCommand] = queue.SimpleQueue()
        #: Steps in a row, since the last command, that brought nothing to an engine with work.
        self._fruitless_steps = 0
        engine.announce_filled = deliver
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread, which owns the engine from now on."""
        self._thread.start()

    def submit(self, command: EngineCommand | None) -> None:
        """Queues a command; None ends the thread. Any thread."""
        if self.engine.core_sharing:  # here, as the engine's thread may have to wait for its core
            self.engine.core_sharing.take_back()
        self._commands.put((time.perf_counter(), command))

    def stop(self) -> None:
        """Ends the thread after the step under way, and waits up to `STOP_S` for that."""
        self.submit(None)
        self._thread.join(timeout=STOP_S)

    @property
    def alive(self) -> bool:
        """False before `start`, and once the thread has ended for whatever reason."""
        return self._thread.is_alive()

    def _run(self) -> None:
        # OpenMP's threads, which this one starts, inherit its cores and its priority.
        if self.engine.cores:
            os.sched_setaffinity(0, self.engine.cores)
        if self.engine.kv_pool.memory == "DRAM":  # else a GPU computes
            leave_cores_to_messages()
        sharing = self.engine.core_sharing
        if sharing:
            sharing.take_back()
        try:
            enter_device(self.engine.kv_pool)
            idle = False
            pause_s = 0.0
            while self._carry_out_commands(wait=idle or pause_s > 0, timeout_s=pause_s or None):
                began = time.perf_counter()
                outputs = self.engine.step()
                idle = not outputs and self.engine.idle()
                pause_s = self._pause_after(outputs, idle=idle, step_s=time.perf_counter() - began)
                if outputs:
                    self._deliver(outputs)
                pinned = self.engine.pin_for_demotion()
                if pinned:
                    self._deliver([DemoteBlocks(pinned)])
        except Exception:
            log.exception("the engine thread ended")
            raise

    def _pause_after(self, outputs: Collection[EngineEvent], *, idle: bool, step_s: float) -> float:
        """Returns for how many seconds the thread shall wait for a command behind a step.

        The first step without outputs is followed at once: vLLM computes an answer whose KV has
        arrived in the step behind the one that takes note of it.
        """
        if outputs or idle:
            self._fruitless_steps = 0
            return 0.0
        self._fruitless_steps += 1
        if self._fruitless_steps < 2:
            return 0.0
        return max(0.0, FRUITLESS_ROUND_S - step_s)

    def _wait_for_command(self, wait: bool, timeout_s: float | None) -> QueuedCommand:
        """Takes a command from the queue. Raises queue.Empty.

        While the thread sleeps with nothing to compute, its cores are others'.
        """
        sharing = self.engine.core_sharing
        if sharing is None or not wait or timeout_s is not None:
            return self._commands.get(wait, timeout_s)
        with suppress(queue.Empty):
            return self._commands.get_nowait()
        sharing.lend()
        try:
            return self._commands.get()
        finally:
            sharing.take_back()

    def _carry_out_commands(self, *, wait: bool, timeout_s: float | None = None) -> bool:
        """Carries out what is queued; with `wait`, sleeps until a first command comes.

        It sleeps for `timeout_s` at most; None is for ever. Delivers the commands' replies
        together. Returns False once the thread is to end, and drops the replies then.
        """
        replies: list[EngineEvent] = []
        try:
            while True:
                queued_at, command = self._wait_for_command(wait, timeout_s)
                if command is None:
                    return False
                wait = False
                self._fruitless_steps = 0
                reply = self._carry_out(command, time.perf_counter() - queued_at)
                if reply:
                    replies.append(reply)
        except queue.Empty:
            pass
        if replies:
            self._deliver(replies)
        return True

    def _carry_out(self, command: EngineCommand, queued_s: float) -> EngineEvent | None:
        """Has the engine carry out a command; returns the reply if the command has one.

        `queued_s` are the seconds that the command waited in the queue. (The `answers` in a
        command are those to its prompt: a request may ask for several.)
        """
        match command:
            case AddSequence(sequence):
                self.engine.add(sequence)
            case ReserveBlocks(sequence):
                return self.engine.reserve(sequence)
            case CommitBlocks():
                self.engine.commit(
                    command.sequence,
                    command.other_answers,
                    first_answer_ended=command.first_answer_ended,
                    waited_s=command.waited_s + queued_s,
                )
            case ReleaseSequence(attempt_key):
                self.engine.release(attempt_key)
            case StagePrefix():
                return self.engine.stage(command)
            case CachePrefix(attempt_key, block_count):
                self.engine.cache_staged(attempt_key, block_count)
            case BlockDemoted(block, copied):
                self.engine.finish_demotion(block, copied)
            case BlocksLeftTiers(hashes):
                self.engine.forget_in_tiers(hashes)
            case ObserveEngine():
                return self.engine.observe()
            case _:
                assert_never(command)
        return None
