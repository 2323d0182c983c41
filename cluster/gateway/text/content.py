"""What an answer's text consists of (pure): reasoning, content and tool calls, as they come.

Life of a parser, in the states of `ContentState`:

    start ----> thinking ----> text <----> call        Hermes' calls, or none
      |                         ^ |
      +-------------------------+ +------> whole       Llama 3: the answer may be nothing but calls
                                  +------> plain       nothing to look for any more

Markers (`<think>`, `<tool_call>`) never come out, nor does the white space around them. What only
looked like a marker or a call comes out as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, assert_never

from .tools import (
    CALL_CLOSE,
    CALL_OPEN,
    HERMES,
    LLAMA3,
    PYTHON_TAG,
    ToolCall,
    ToolFormat,
    read_call,
    read_calls,
    read_cut_call,
)

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


class ContentState(StrEnum):
    """Where in an answer the parser is."""

    START = "start"  #: The answer may begin with `<think>`.
    THINKING = "thinking"  #: Reasoning, until `</think>`.
    TEXT = "text"  #: Content, in which a call may begin.
    CALL = "call"  #: Between `<tool_call>` and `</tool_call>`.
    WHOLE = "whole"  #: Everything is held until the end, because only then it is known to be calls.
    PLAIN = "plain"  #: Content, until the end.


class PartKind(StrEnum):
    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"


class ContentPart(NamedTuple):
    """A piece of an answer: text of its kind, or a call."""

    kind: PartKind
    value: str | ToolCall


@dataclass(frozen=True, slots=True)
class ContentRules:
    """What a parser looks for in an answer."""

    initial_state: ContentState = ContentState.TEXT
    tool_format: ToolFormat | None = None  #: None: calls are text.
    function_names: Sequence[str] = ()  #: Of the functions that the model may call.
    one_call_only: bool = False  #: Calls behind the first one are left out.
    only_calls: bool = False  #: The answer has nothing but calls: no text of it is content.


def initial_state_of(template: str, prompt_end: str) -> ContentState:
    """Return the state that an answer begins in.

    `template` is the model's chat template, `prompt_end` the last characters of the prompt.
    """
    if THINK_OPEN not in template and THINK_CLOSE not in template:
        return ContentState.TEXT
    if prompt_end.rstrip().endswith(THINK_OPEN):
        return ContentState.THINKING
    if prompt_end.rstrip().endswith(THINK_CLOSE):
        return ContentState.TEXT
    return ContentState.START


class ContentParser:
    """Parses one answer. Feed it text as it comes, then call `end`."""

    def __init__(self, rules: ContentRules) -> None:
        self._rules = rules
        self._state = rules.initial_state
        self._buffer = ""  #: Text that no part has yet.
        #: True while only white space has come since the last marker, or since the start.
        self._at_section_start = True
        self.calls = 0  #: Calls that came out so far.
        self.has_cut_call = False  #: True if the last of them lacks its end.

    def feed(self, text: str) -> list[ContentPart]:
        """Take the next text; return the parts that are complete with it."""
        self._buffer += text
        if self._state == ContentState.PLAIN:  # most text of most answers: no other state follows
            return self._step_plain()
        parts: list[ContentPart] = []
        previous_state = None
        while previous_state != self._state:
            previous_state = self._state
            parts += self._step()
        return [part for part in parts if part.value]

    def end(self, *, is_cut: bool = False) -> list[ContentPart]:
        """Return what was held back, once the answer has ended.

        `is_cut`: the model would have gone on, so that a call may lack its end.
        """
        parts = self._end(is_cut)
        self.has_cut_call = any(
            isinstance(part.value, ToolCall) and part.value.is_cut for part in parts
        )
        if self._rules.only_calls:
            return [part for part in parts if part.kind == PartKind.CALL]
        return parts

    def _end(self, is_cut: bool) -> list[ContentPart]:
        text = self._take_buffer()
        if not text:
            return []
        match self._state:
            case ContentState.THINKING:
                return [ContentPart(PartKind.REASONING, text)]
            case ContentState.CALL:
                return self._last_call_parts(text, is_cut)
            case ContentState.WHOLE:
                calls = read_calls(text, self._rules.function_names, is_cut=is_cut)
                if self._rules.one_call_only:
                    calls = calls[:1]
                self.calls += len(calls)
                if calls:
                    return [ContentPart(PartKind.CALL, call) for call in calls]
            case ContentState.START | ContentState.TEXT | ContentState.PLAIN:
                if self.calls > 0 and not text.strip():
                    return []  # the white space behind the last call
            case _:
                assert_never(self._state)
        return [ContentPart(PartKind.CONTENT, text)]

    def _step(self) -> list[ContentPart]:
        """Parse what the buffer has for the present state, which may become another."""
        match self._state:
            case ContentState.START:
                return self._step_start()
            case ContentState.THINKING:
                return self._step_until(THINK_CLOSE, PartKind.REASONING, ContentState.TEXT)
            case ContentState.TEXT:
                return self._step_text()
            case ContentState.CALL:
                return self._step_call()
            case ContentState.PLAIN:
                return self._step_plain()
            case ContentState.WHOLE:
                return []
            case _:
                assert_never(self._state)

    def _step_start(self) -> list[ContentPart]:
        text = self._buffer.lstrip()
        if text.startswith(THINK_OPEN):
            self._buffer = text.removeprefix(THINK_OPEN)
            self._state = ContentState.THINKING
        elif not THINK_OPEN.startswith(text):
            self._state = ContentState.TEXT
            self._at_section_start = False
        return []

    def _step_text(self) -> list[ContentPart]:
        if self._rules.tool_format is HERMES:
            return self._step_until(CALL_OPEN, PartKind.CONTENT, ContentState.CALL)
        if self._rules.tool_format is LLAMA3:
            text = self._buffer.lstrip()
            if text.startswith(("{", PYTHON_TAG)):
                self._state = ContentState.WHOLE
                return []
            if PYTHON_TAG.startswith(text):
                return []
        self._state = ContentState.PLAIN
        return []

    def _step_plain(self) -> list[ContentPart]:
        text = self._take_buffer()
        if self._at_section_start and self._rules.initial_state != ContentState.TEXT:
            text = text.lstrip()  # the white space between the reasoning and the content
            self._at_section_start = not text
        return [ContentPart(PartKind.CONTENT, text)] if text else []

    def _step_until(
        self, marker: str, kind: PartKind, next_state: ContentState
    ) -> list[ContentPart]:
        """Release text up to `marker`.

        What may become the marker is held back, and so is white space in front of that.
        """
        follows_marker = (
            kind == PartKind.REASONING
            or self.calls > 0
            or self._rules.initial_state != ContentState.TEXT
        )
        if self._at_section_start and follows_marker:
            self._buffer = self._buffer.lstrip()
            self._at_section_start = not self._buffer
        before, found_marker, after = self._buffer.partition(marker)
        if found_marker:
            self._buffer = after
            self._state = next_state
            self._at_section_start = True
            return [ContentPart(kind, before.rstrip())]
        possible_chars = _possible_marker_chars(self._buffer, marker)
        released = self._buffer[: len(self._buffer) - possible_chars].rstrip()
        self._buffer = self._buffer[len(released) :]
        return [ContentPart(kind, released)]

    def _step_call(self) -> list[ContentPart]:
        text, found_marker, after = self._buffer.partition(CALL_CLOSE)
        if not found_marker:
            return []
        self._buffer = after
        self._state = ContentState.TEXT
        self._at_section_start = True
        return self._call_parts(text, raw_text=CALL_OPEN + text + CALL_CLOSE)

    def _call_parts(self, text: str, raw_text: str) -> list[ContentPart]:
        """Return the call that `text` is; if it is none, `raw_text` as content."""
        return self._parts_of_call(read_call(text), raw_text)

    def _parts_of_call(self, call: ToolCall | None, raw_text: str) -> list[ContentPart]:
        """Return the call, if it is one and is wanted; if it is none, `raw_text` as content."""
        if call is None:
            return [ContentPart(PartKind.CONTENT, raw_text)]
        if self._rules.one_call_only and self.calls > 0:
            return []
        self.calls += 1
        return [ContentPart(PartKind.CALL, call)]

    def _last_call_parts(self, text: str, is_cut: bool) -> list[ContentPart]:
        """Return the call behind which no marker came; if it is none, its text as content."""
        marker_chars = _possible_marker_chars(text, CALL_CLOSE)
        call_text = text[: len(text) - marker_chars]
        call = read_call(call_text)
        if call is None and is_cut:
            call = read_cut_call(text, self._rules.function_names)
        return self._parts_of_call(call, raw_text=CALL_OPEN + text)

    def _take_buffer(self) -> str:
        text = self._buffer
        self._buffer = ""
        return text


def _possible_marker_chars(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that begins `marker`."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[len(text) - size :]):
            return size
    return 0
