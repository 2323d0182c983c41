"""What an answer's text consists of (pure): reasoning, content and tool calls, as they come.

An answer begins with reasoning, if its prompt or its first text says so; content with calls in it
follows. How both are marked is a matter of the model's formats (`formats/`).

What holds for all formats:

- Markers of what was read (texts such as `<think>` and `<tool_call>`) never come out, nor does the
  white space around them. What only looked like a marker or a call is content, with its markers.
- A call of one of the request's functions is announced as soon as it is certain, and its arguments
  come out as the model writes them. It stays a call whatever follows: its arguments may be no JSON,
  and lack their end. All other calls are held until they are complete.
- The parts do not depend on the pieces that the text came in, but for where texts and arguments
  are divided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .formats.parts import CallFlaw, ContentPart, PartKind
from .formats.reader import AnswerReader, Reading
from .formats.reasoning import THINK, ContentState, ReasoningFormat, read_reasoning
from .formats.registry import ToolFormat


@dataclass(frozen=True, slots=True)
class ContentRules:
    """What a parser looks for in an answer."""

    initial_state: ContentState = ContentState.TEXT  #: What the answer begins in.
    tool_format: ToolFormat | None = None  #: None: calls are text.
    function_names: Sequence[str] = ()  #: Of the functions that the model may call.
    one_call_only: bool = False  #: Calls behind the first one are left out.
    only_calls: bool = False  #: Behind its reasoning the answer has nothing but calls.
    reasoning_format: ReasoningFormat = THINK
    #: Schemas of the functions' parameters, for formats that do not mark the types of values.
    parameter_schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """True if all text of an answer is content."""
        return self.initial_state == ContentState.TEXT and self.tool_format is None

    @property
    def markers(self) -> frozenset[str]:
        """The texts that are looked for, which must come though they may be special tokens."""
        if self.is_plain:
            return frozenset()
        markers = set(self.reasoning_format.markers)
        if self.tool_format is not None:
            markers |= set(self.tool_format.markers)
        return frozenset(markers)


class ContentParser:
    """Parses one answer. Feed it text as it comes, then call `end`."""

    def __init__(self, rules: ContentRules) -> None:
        self._rules = rules
        self._reader = AnswerReader(
            rules.function_names,
            rules.parameter_schemas,
            one_call_only=rules.one_call_only,
            strips_start=rules.initial_state != ContentState.TEXT,
        )
        self._reading = self._read()  #: Goes on with each `_advance`.
        self._is_read = False  #: True once nothing more can come out.

    @property
    def calls(self) -> int:
        """Calls that came out so far, the one under way included."""
        return self._reader.calls

    @property
    def has_cut_call(self) -> bool:
        """True if the last call lacks its end."""
        return self._reader.has_cut_call

    @property
    def flaws(self) -> list[CallFlaw]:
        """What was wrong with what looked like calls."""
        return self._reader.flaws

    def feed(self, text: str) -> list[ContentPart]:
        """Take the next text; return the parts that are known with it."""
        if self._rules.is_plain:
            return [ContentPart(PartKind.CONTENT, text)] if text else []
        self._reader.buffer += text
        return self._advance()

    def end(self, *, is_cut: bool = False) -> list[ContentPart]:
        """Return what was held back, once the answer has ended.

        `is_cut`: the model would have gone on, so that a call may lack its end.
        """
        self._reader.has_ended = True
        self._reader.is_cut = is_cut
        parts = self._advance()
        if self._rules.only_calls:
            return [part for part in parts if part.kind is not PartKind.CONTENT]
        return parts

    def _advance(self) -> list[ContentPart]:
        """Read on until more text is needed; return the parts that were made."""
        if not self._is_read:
            # The generator yields None where it needs more text; at its end there is True instead.
            self._is_read = next(self._reading, True) is True
        parts = self._reader.parts
        self._reader.parts = []
        return parts

    def _read(self) -> Reading[None]:
        """Read the whole answer: reasoning, content with calls, and what is left."""
        rules = self._rules
        reader = self._reader
        tool_format = rules.tool_format
        if tool_format is None or not tool_format.is_whole_answer:
            yield from read_reasoning(
                reader,
                rules.reasoning_format,
                rules.initial_state,
                tool_format.ends_reasoning if tool_format is not None else (),
            )
        if tool_format is not None:
            yield from tool_format.read(reader)
        yield from reader.release_content()
