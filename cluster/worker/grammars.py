"""Attempts whose grammar is being compiled: they begin when it is.

A grammar says which texts an answer may be, JSON of a schema for instance. Compiling takes
milliseconds, and seconds for a grammar that somebody made to be slow. The engine's thread would
hold up every sequence meanwhile, so other threads compile. Gateways have compiled the grammar
before, within limits of time and memory (`cluster/gateway/text/grammars.py`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from ...engine.engine_like import EngineLike
from ...engine.priority import leave_cores_to_messages
from ...protos import frames

log = logging.getLogger(__name__)

COMPILE_LIMIT_S = 30.0  #: for an attempt to wait for its grammar, a free thread included
THREADS = 2  #: grammars that are compiled at a time; one that nobody awaits any more counts too

StartFrame: TypeAlias = frames.StartPrefill | frames.StartDecode


@dataclass(frozen=True, slots=True)
class WaitingAttempt:
    """An attempt whose grammar is not compiled yet."""

    gateway: str
    frame: StartFrame
    refusal: asyncio.TimerHandle  #: Refuses the attempt when it has waited too long.
    came_at_s: float  #: By the event loop's clock.

    def frame_at(self, now_s: float) -> StartFrame:
        """Return the frame as it is to be carried out now: its deadline is nearer.

        A deadline of 0 is none, so one that is over is a millisecond ahead.
        """
        frame = self.frame
        if not frame.deadline_s:
            return frame
        left_s = max(frame.deadline_s - (now_s - self.came_at_s), 1e-3)
        return msgspec.structs.replace(frame, deadline_s=left_s)


class GrammarQueue:
    """The attempts of one worker that wait for their grammars. Belongs to the event loop.

    `begin(gateway, frame)` starts an attempt. `refuse(gateway, attempt_key, reason, final)` tells
    the gateway why an attempt does not start. With `final` its grammar is at fault, so it would
    start nowhere else.
    """

    def __init__(
        self,
        engine: EngineLike,
        begin: Callable[[str, StartFrame], None],
        refuse: Callable[[str, frames.AttemptKey, str, bool], None],
    ) -> None:
        self._engine = engine
        self._begin = begin
        self._refuse = refuse
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[frames.AttemptKey, WaitingAttempt] = {}
        self._queue: deque[frames.Grammar] = deque()  #: That no thread has begun, each once.
        #: Those that threads compile, and when each was begun, by the event loop's clock.
        self._compiling: dict[frames.Grammar, float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def begin_when_compiled(self, gateway: str, frame: StartFrame) -> None:
        """Begin the attempt now, or once its grammar is compiled.

        An attempt that waits already is not taken twice. One that has waited `COMPILE_LIMIT_S` is
        refused.
        """
        grammar = frame.sampling.grammar
        if grammar is None or self._engine.has_grammar(grammar):
            self._begin(gateway, frame)
            return
        if frame.attempt_key in self._waiting:
            return
        refusal = self._loop.call_later(COMPILE_LIMIT_S, self._give_up, frame.attempt_key)
        came_at_s = self._loop.time()
        self._waiting[frame.attempt_key] = WaitingAttempt(gateway, frame, refusal, came_at_s)
        if grammar not in self._compiling and grammar not in self._queue:
            self._queue.append(grammar)
            self._compile_next(came_at_s)

    def forget(self, attempt_key: frames.AttemptKey) -> WaitingAttempt | None:
        """Let an attempt wait no more, and return it; None if it does not wait."""
        attempt = self._waiting.pop(attempt_key, None)
        if attempt is not None:
            attempt.refusal.cancel()
        return attempt

    def forget_all(self) -> list[WaitingAttempt]:
        """Let no attempt wait any more, and return all that did."""
        forgotten = [self.forget(key) for key in list(self._waiting)]
        return [attempt for attempt in forgotten if attempt is not None]

    def forget_gateway(self, gateway: str) -> None:
        """Drop the attempts of a gateway that is gone; nobody is told."""
        for key, attempt in list(self._waiting.items()):
            if attempt.gateway == gateway:
                self.forget(key)

    def _give_up(self, attempt_key: frames.AttemptKey) -> None:
        """Refuse an attempt that has waited too long. Its grammar is compiled to the end.

        The grammar is at fault only if threads have not been busy with others for a part of the
        time: only then is the refusal final.
        """
        attempt = self.forget(attempt_key)
        if attempt is None:
            return
        grammar = attempt.frame.sampling.grammar
        assert grammar is not None, "nothing else waits here"
        begun_at_s = self._compiling.get(grammar)
        final = begun_at_s is not None and begun_at_s <= attempt.came_at_s
        reason = f"the grammar takes more than {COMPILE_LIMIT_S:g} s to compile"
        if not final:
            reason = f"busy: behind other grammars this one was not ready in {COMPILE_LIMIT_S:g} s"
        self._refuse(attempt.gateway, attempt_key, reason, final)

    def _compile_next(self, now_s: float) -> None:
        """Let a thread compile the next grammar, if one is free.

        `now_s` is the time by the event loop's clock.
        """
        while self._queue and len(self._compiling) < THREADS:
            grammar = self._queue.popleft()
            if not self._is_awaited(grammar):
                continue
            self._compiling[grammar] = now_s
            # A thread of its own, as nothing waits for it when the process ends.
            threading.Thread(target=self._compile, args=(grammar,), daemon=True).start()

    def _compile(self, grammar: frames.Grammar) -> None:
        """Compile a grammar, in a thread of its own, and tell the event loop."""
        leave_cores_to_messages()
        try:
            self._engine.compile_grammar(grammar)
        except Exception:
            log.exception("a grammar of %d characters does not compile", len(grammar.text))
        self._loop.call_soon_threadsafe(self._compiled, grammar)

    def _compiled(self, grammar: frames.Grammar) -> None:
        """Begin what waited for this grammar; if it is wrong, the engine fails these attempts."""
        del self._compiling[grammar]
        for key, attempt in list(self._waiting.items()):
            if attempt.frame.sampling.grammar == grammar:
                self.forget(key)
                self._begin(attempt.gateway, attempt.frame_at(self._loop.time()))
        self._compile_next(self._loop.time())

    def _is_awaited(self, grammar: frames.Grammar) -> bool:
        return any(attempt.frame.sampling.grammar == grammar for attempt in self._waiting.values())
