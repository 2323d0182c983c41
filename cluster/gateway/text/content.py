"""What an answer's text consists of (pure): reasoning, content, tool calls, as they come.

Life of a parser: START (may begin with `<think>`) -> THINKING -> TEXT <-> CALL. Markers never come
out, nor the white space around them; what only looked like a marker or a call comes out as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .tools import CLOSE, HERMES, LLAMA3, OPEN, Call, Format, read_call, read_calls

THINK, UNTHINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Grasp:
    """What to look for. `begin`: `start`, `thinking` or `text`."""

    begin: str = "text"
    format: Format | None = None
    known: Sequence[str] = ()  #: names of the functions


Part = tuple[str, str | Call]  #: ("reasoning" | "content", text) or ("call", Call)


def where_it_begins(template: str, prompt_end: str) -> str:
    """The state that the answer begins in."""
    if THINK not in template and UNTHINK not in template:
        return "text"
    if prompt_end.rstrip().endswith(THINK):
        return "thinking"
    return "text" if prompt_end.rstrip().endswith(UNTHINK) else "start"


class Content:
    """One answer."""

    def __init__(self, grasp: Grasp) -> None:
        self._state, self._grasp = grasp.begin, grasp
        self._buffer = ""
        self._fresh = True  #: nothing but white space since the last marker
        self.calls = 0

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        state = ""
        while state != self._state:
            state = self._state
            parts += self._step()
        return [part for part in parts if part[1]]

    def end(self) -> list[Part]:
        """What was held back."""
        rest, self._buffer = self._buffer, ""
        if not rest:
            return []
        if self._state == "thinking":
            return [("reasoning", rest)]
        if self._state == "call":
            return self._called(rest, OPEN + rest)
        if self._state == "whole":
            calls = read_calls(rest, self._grasp.known)
            self.calls += len(calls)
            return [("call", call) for call in calls] or [("content", rest)]
        return [("content", rest)] if not self._after_call(rest) else []

    def _after_call(self, rest: str) -> bool:
        """White space that follows a call, and nothing else."""
        return self.calls > 0 and not rest.strip()

    def _step(self) -> list[Part]:
        match self._state:
            case "start":
                return self._start()
            case "thinking":
                return self._until(UNTHINK, "reasoning", "text")
            case "text":
                return self._text()
            case "call":
                return self._call()
            case "plain":
                return self._pass()
        return []  # whole: everything is held until the end

    def _start(self) -> list[Part]:
        begun = self._buffer.lstrip()
        if begun.startswith(THINK):
            self._buffer, self._state = begun[len(THINK) :], "thinking"
        elif not THINK.startswith(begun):
            self._state, self._fresh = "text", False
        return []

    def _text(self) -> list[Part]:
        if self._grasp.format is HERMES:
            return self._until(OPEN, "content", "call")
        if self._grasp.format is LLAMA3:
            begun = self._buffer.lstrip()
            if begun.startswith(("{", "<|python_tag|>")):
                self._state = "whole"
                return []
            if "<|python_tag|>".startswith(begun):
                return []
        self._state = "plain"
        return []

    def _pass(self) -> list[Part]:
        out, self._buffer = self._buffer, ""
        if self._fresh and self._grasp.begin != "text":
            out = out.lstrip()  # between the reasoning and the content
            self._fresh = not out
        return [("content", out)]

    def _until(self, marker: str, kind: str, then: str) -> list[Part]:
        """Text up to a marker; holds back what may become it, and white space before that."""
        if self._fresh and (kind == "reasoning" or self._state_follows_marker()):
            self._buffer = self._buffer.lstrip()
            self._fresh = not self._buffer
        before, found, after = self._buffer.partition(marker)
        if found:
            self._buffer, self._state, self._fresh = after, then, True
            return [(kind, before.rstrip())]
        size = _beginning(self._buffer, marker)
        out = self._buffer[: len(self._buffer) - size].rstrip()
        self._buffer = self._buffer[len(out) :]
        return [(kind, out)]

    def _state_follows_marker(self) -> bool:
        return self.calls > 0 or self._grasp.begin != "text"

    def _call(self) -> list[Part]:
        body, found, after = self._buffer.partition(CLOSE)
        if not found:
            return []
        self._buffer, self._state, self._fresh = after, "text", True
        return self._called(body, OPEN + body + CLOSE)

    def _called(self, body: str, raw: str) -> list[Part]:
        call = read_call(body)
        self.calls += call is not None
        return [("call", call)] if call else [("content", raw)]


def _beginning(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`."""
    sizes = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((size for size in sizes if marker.startswith(text[len(text) - size :])), 0)
