"""What an answer's text consists of (pure): reasoning, content and tool calls, as they come.

Life of a parser, in the states of `ContentState`:

    start ----> thinking ----> text <----> call    Hermes: between its markers
      |                         ^ |
      +-------------------------+ +------> whole   Llama 3: the answer may be nothing but calls
                                  +------> plain   nothing to look for any more

    call or whole ----> arguments ----> tail ----> call or whole    a call that is announced

Markers (`<think>`, `<tool_call>`) never come out, nor does the white space around them. What only
looked like a marker or a call comes out as text.

A call that begins with the name of one of the functions, and then has its arguments, is announced
as soon as they begin. They come out as the model writes them, so they may be no JSON, and lack
their end. All other calls are held until they are complete. So the parts do not depend on the
pieces that the text came in, but for where texts and arguments are divided.
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
    ObjectScanner,
    ToolCall,
    ToolFormat,
    read_call,
    read_call_beginning,
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
    CALL = "call"  #: Between `<tool_call>` and `</tool_call>`; a call may begin.
    WHOLE = "whole"  #: Calls, or what is held until the end, as only then it is known to be calls.
    ARGUMENTS = "arguments"  #: In the arguments of a call that was announced.
    TAIL = "tail"  #: Behind them, up to the end of the call's object.
    PLAIN = "plain"  #: Content, until the end.


class PartKind(StrEnum):
    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"  #: A call begins; the text is the name of its function.
    ARGUMENTS = "arguments"  #: The next piece of the last call's arguments.


CALL_KINDS = (PartKind.CALL, PartKind.ARGUMENTS)


class ContentPart(NamedTuple):
    """A piece of an answer."""

    kind: PartKind
    text: str


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
        self.calls = 0  #: Calls that came out so far, the one under way included.
        self.has_cut_call = False  #: True if the last of them lacks its end.
        self._scanner = ObjectScanner()  #: Looks for the end of the arguments, or of the tail.
        self._tail_has_begun = False  #: True if the scanner is the tail's.
        self._leaves_call_out = False  #: True if the call under way does not come out.
        self._block_has_call = False  #: True if a call began behind the last `<tool_call>`.

    def feed(self, text: str) -> list[ContentPart]:
        """Take the next text; return the parts that are known with it."""
        self._buffer += text
        if self._state == ContentState.PLAIN:  # most text of most answers: no other state follows
            return self._step_plain()
        parts: list[ContentPart] = []
        previous_state = None
        while previous_state != self._state:
            previous_state = self._state
            parts += self._step()
        return [part for part in parts if part.text]

    def end(self, *, is_cut: bool = False) -> list[ContentPart]:
        """Return what was held back, once the answer has ended.

        `is_cut`: the model would have gone on, so that a call may lack its end.
        """
        parts = [part for part in self._end(is_cut) if part.text]
        if self._rules.only_calls:
            return [part for part in parts if part.kind in CALL_KINDS]
        return parts

    def _end(self, is_cut: bool) -> list[ContentPart]:
        text = self._take_buffer()
        match self._state:
            case ContentState.THINKING:
                return [ContentPart(PartKind.REASONING, text)]
            case ContentState.CALL:
                return self._last_call_parts(text, is_cut)
            case ContentState.ARGUMENTS:
                self.has_cut_call = not self._leaves_call_out
                return self._arguments_parts(text)
            case ContentState.TAIL:
                self.has_cut_call = is_cut and not self._leaves_call_out
                return []
            case ContentState.WHOLE:
                calls = read_calls(text, self._rules.function_names, is_cut=is_cut)
                if calls:
                    return [part for call in calls for part in self._parts_of_call(call)]
            case ContentState.START | ContentState.TEXT | ContentState.PLAIN:
                pass
            case _:
                assert_never(self._state)
        if self.calls > 0 and not text.strip():
            return []  # the white space behind the last call
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
            case ContentState.ARGUMENTS:
                return self._step_arguments()
            case ContentState.TAIL:
                return self._step_tail()
            case ContentState.PLAIN:
                return self._step_plain()
            case ContentState.WHOLE:
                return self._step_whole()
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
        beginning = read_call_beginning(self._buffer, self._rules.function_names)
        if beginning is not None:
            return self._begin_call(beginning.name, self._buffer[beginning.arguments_start :])
        text, found_marker, after = self._buffer.partition(CALL_CLOSE)
        if not found_marker:
            return []
        self._buffer = after
        self._state = ContentState.TEXT
        self._at_section_start = True
        return self._block_parts(text)

    def _step_whole(self) -> list[ContentPart]:
        text = self._buffer.lstrip()
        if self.calls > 0:
            self._buffer = text = text.lstrip("; \t\r\n")
        elif PYTHON_TAG.startswith(text):
            return []
        else:
            text = text.removeprefix(PYTHON_TAG)
        beginning = read_call_beginning(text, self._rules.function_names)
        if beginning is None:
            return []
        return self._begin_call(beginning.name, text[beginning.arguments_start :])

    def _step_arguments(self) -> list[ContentPart]:
        taken_chars = self._scanner.take(self._buffer)
        parts = self._arguments_parts(self._buffer[:taken_chars])
        self._buffer = self._buffer[taken_chars:]
        if self._scanner.is_closed:
            self._state = ContentState.TAIL
        elif self._scanner.has_ended:
            self._state = self._state_behind_call
        return parts

    def _step_tail(self) -> list[ContentPart]:
        """Leave out the rest of a call's object: its bracket, and fields that are not read."""
        if not self._tail_has_begun:
            self._buffer = self._buffer.lstrip()
            if not self._buffer:
                return []
            if not self._buffer.startswith(("}", ",")):
                self._state = self._state_behind_call
                return []
            self._tail_has_begun = True
            self._scanner = self._new_scanner(depth=1)
        taken_chars = self._scanner.take(self._buffer)
        self._buffer = self._buffer[taken_chars:]
        if self._scanner.has_ended:
            self._state = self._state_behind_call
        return []

    def _begin_call(self, name: str, following_text: str) -> list[ContentPart]:
        """Announce a call. `following_text` is all that is held from its arguments on."""
        self._buffer = following_text
        self._state = ContentState.ARGUMENTS
        self._scanner = self._new_scanner(depth=0)
        self._tail_has_begun = False
        self._block_has_call = True
        self._leaves_call_out = self._rules.one_call_only and self.calls > 0
        if self._leaves_call_out:
            return []
        self.calls += 1
        return [ContentPart(PartKind.CALL, name)]

    @property
    def _state_behind_call(self) -> ContentState:
        return ContentState.CALL if self._rules.tool_format is HERMES else ContentState.WHOLE

    def _new_scanner(self, depth: int) -> ObjectScanner:
        end_marker = CALL_CLOSE if self._rules.tool_format is HERMES else ""
        return ObjectScanner(end_marker, depth)

    def _arguments_parts(self, text: str) -> list[ContentPart]:
        return [] if self._leaves_call_out else [ContentPart(PartKind.ARGUMENTS, text)]

    def _block_parts(self, text: str) -> list[ContentPart]:
        """Return what `text` is, which reached up to `</tool_call>` and was not announced.

        Behind a call it is what the model wrote too much, or another call.
        """
        raw_text = CALL_OPEN + text + CALL_CLOSE
        if self._block_has_call:
            self._block_has_call = False
            text = raw_text = text.strip()
        return self._parts_of_call(read_call(text), raw_text) if raw_text else []

    def _last_call_parts(self, text: str, is_cut: bool) -> list[ContentPart]:
        """Return the call behind which no marker came; if it is none, its text as content."""
        marker_chars = _possible_marker_chars(text, CALL_CLOSE)
        call_text = text[: len(text) - marker_chars]
        raw_text = CALL_OPEN + text
        if self._block_has_call:
            raw_text = call_text = call_text.strip()
        call = read_call(call_text)
        if call is None and is_cut:
            call = read_cut_call(text, self._rules.function_names)
        return self._parts_of_call(call, raw_text)

    def _parts_of_call(self, call: ToolCall | None, raw_text: str = "") -> list[ContentPart]:
        """Return the call, if it is one and is wanted; if it is none, `raw_text` as content."""
        if call is None:
            return [ContentPart(PartKind.CONTENT, raw_text)]
        if self._rules.one_call_only and self.calls > 0:
            return []
        self.calls += 1
        self.has_cut_call = call.is_cut
        return [
            ContentPart(PartKind.CALL, call.name),
            ContentPart(PartKind.ARGUMENTS, call.arguments),
        ]

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
